"""OpenAI answers: unary bodies and the chunks of a stream, as bytes."""

from typing import Any

import msgspec

from dynctl.simulation.engine.openai_request import Generate

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """`cached_tokens` were found in this engine's own cache; pulled ones do not count."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def unary(
    asked: Generate,
    answer_id: str,
    created: int,
    text: str,
    finish_reason: str,
    usage: dict[str, Any],
    kv_transfer_params: dict[str, Any] | None,
) -> bytes:
    """The whole answer of a request without `stream`."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
    if asked.chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    body = {
        "id": answer_id,
        "object": "chat.completion" if asked.chat else "text_completion",
        "created": created,
        "model": asked.model,
        "choices": [choice],
        "usage": usage,
    }
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = kv_transfer_params
    return _encode(body)


class ChunkWriter:
    """Server-sent events of one answer. The constant parts are encoded once."""

    def __init__(self, asked: Generate, answer_id: str, created: int) -> None:
        self._chat = asked.chat
        self._base = {
            "id": answer_id,
            "object": "chat.completion.chunk" if asked.chat else "text_completion",
            "created": created,
            "model": asked.model,
        }
        head = b"data: " + _encode(self._base)[:-1] + b',"choices":[{"index":0,'
        if asked.chat:
            self._before = head + b'"delta":{"content":'
            self._after = b'},"logprobs":null,"finish_reason":null}]}\n\n'
        else:
            self._before = head + b'"text":'
            self._after = b',"logprobs":null,"finish_reason":null}]}\n\n'

    def first(self) -> bytes:
        """The chunk that announces the assistant's role; nothing for a plain completion."""
        if not self._chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return self._event({"choices": [self._choice(delta, None)]})

    def text(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after

    def last(self, finish_reason: str, kv_transfer_params: dict[str, Any] | None) -> bytes:
        extra = {"choices": [self._choice({} if self._chat else "", finish_reason)]}
        if kv_transfer_params is not None:
            extra["kv_transfer_params"] = kv_transfer_params  # type: ignore[assignment]
        return self._event(extra)

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._event({"choices": [], "usage": usage})

    def _choice(self, content: dict[str, str] | str, finish_reason: str | None) -> dict[str, Any]:
        key = "delta" if self._chat else "text"
        return {"index": 0, key: content, "logprobs": None, "finish_reason": finish_reason}

    def _event(self, extra: dict[str, Any]) -> bytes:
        return b"data: " + _encode({**self._base, **extra}) + b"\n\n"


def error_event(body: bytes) -> bytes:
    """An error after the stream began: the status line is gone, so it is an event."""
    return b"data: " + body + b"\n\n"


class StopScanner:
    """Finds stop strings in text that arrives in pieces."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        # The start of a stop string may be at the end of what is there: that much is held back.
        self._keep = max((len(stop) for stop in stops), default=1) - 1
        self.stopped = False

    def feed(self, piece: str) -> str:
        """The text that may be shown now; sets `stopped` once a stop string is complete."""
        if not self._stops:
            return piece
        self._held += piece
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        cut = max(0, len(self._held) - self._keep)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def rest(self) -> str:
        """What was held back, when the answer ends without a stop string."""
        rest, self._held = self._held, ""
        return rest
