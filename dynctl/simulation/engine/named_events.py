"""Answers of the Messages and the Responses API, whole and as streams, with vLLM's events."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

_encode = msgspec.json.Encoder().encode

#: Fields of a Responses request that its answer repeats, with their defaults.
_ECHOED: Final[dict[str, Any]] = {
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "max_output_tokens": None,
    "truncation": "disabled",
}


def event(name: str, body: Mapping[str, Any]) -> bytes:
    """One event with its name."""
    return f"event: {name}\ndata: ".encode() + _encode(body) + b"\n\n"


class MessagesWriter:
    """One answer of the Messages API; ``answer_id`` is its id."""

    def __init__(self, model: str, answer_id: str) -> None:
        self._model = model
        self._id = answer_id

    def whole(
        self, text: str, finish: str, stop: str | None, usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The answer without streaming; ``stop`` is the stop string that ended it."""
        content = [{"type": "text", "text": text}]
        return {**self._message(content, self._usage(usage)), **self._ending(finish, stop)}

    def first(self, usage: Mapping[str, Any]) -> bytes:
        """The events before the first text."""
        began = self._usage({**usage, "completion_tokens": 0})
        return event(
            "message_start", {"type": "message_start", "message": self._message([], began)}
        ) + event(
            "content_block_start",
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            },
        )

    def text(self, text: str) -> bytes:
        return event(
            "content_block_delta",
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": text},
            },
        )

    def last(self, _text: str, finish: str, stop: str | None, usage: Mapping[str, Any]) -> bytes:
        """The events after the last text."""
        return (
            event("content_block_stop", {"type": "content_block_stop", "index": 0})
            + event(
                "message_delta",
                {
                    "type": "message_delta",
                    "delta": self._ending(finish, stop),
                    "usage": self._usage(usage),
                },
            )
            + event("message_stop", {"type": "message_stop"})
        )

    def error(self, message: str) -> bytes:
        """The event that ends a stream after a failure."""
        return event("error", {"type": "error", "error": {"type": "api_error", "message": message}})

    def _message(self, content: list[Any], usage: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _ending(self, finish: str, stop: str | None) -> dict[str, Any]:
        reason = "stop_sequence" if stop else "end_turn"
        if finish == "length":
            reason = "max_tokens"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self, usage: Mapping[str, Any]) -> dict[str, int]:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "output_tokens": usage["completion_tokens"],
            "cache_read_input_tokens": cached,
        }


class ResponsesWriter:
    """One answer of the Responses API to ``request_body``; ``created``: seconds since 1970."""

    def __init__(
        self, model: str, answer_id: str, created: int, request_body: Mapping[str, Any]
    ) -> None:
        self._base = {
            "id": answer_id,
            "object": "response",
            "created_at": created,
            "model": model,
            "background": False,
            "error": None,
            "incomplete_details": None,
            **{name: request_body.get(name, default) for name, default in _ECHOED.items()},
        }
        self._item = {"id": f"msg_{answer_id}", "type": "message", "role": "assistant"}
        self._sent = 0

    def whole(
        self, text: str, finish: str, _stop: str | None, usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The answer without streaming."""
        cut = finish == "length"
        status = "incomplete" if cut else "completed"
        return {
            **self._base,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [{**self._item, "status": status, "content": [self._part(text)]}],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def first(self, _usage: Mapping[str, Any]) -> bytes:
        """The events before the first text."""
        began = {**self._base, "status": "in_progress", "output": [], "usage": None}
        item = {**self._item, "status": "in_progress", "content": []}
        return (
            self._event("response.created", response=began)
            + self._event("response.in_progress", response=began)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._of_part("response.content_part.added", part=self._part(""))
        )

    def text(self, text: str) -> bytes:
        return self._of_part("response.output_text.delta", delta=text, logprobs=[])

    def last(self, text: str, finish: str, stop: str | None, usage: Mapping[str, Any]) -> bytes:
        """The events after the last text; ``text`` is all of it."""
        whole = self.whole(text, finish, stop, usage)
        return (
            self._of_part("response.output_text.done", text=text, logprobs=[])
            + self._of_part("response.content_part.done", part=self._part(text))
            + self._event("response.output_item.done", output_index=0, item=whole["output"][0])
            # As vLLM: an answer that was cut is completed too, with its status in it.
            + self._event("response.completed", response=whole)
        )

    def error(self, message: str) -> bytes:
        """The event that ends a stream after a failure."""
        return self._event("error", code="server_error", message=message, param=None)

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _of_part(self, name: str, **fields: Any) -> bytes:
        return self._event(
            name, item_id=self._item["id"], output_index=0, content_index=0, **fields
        )

    def _event(self, name: str, **fields: Any) -> bytes:
        body = {"type": name, "sequence_number": self._sent, **fields}
        self._sent += 1
        return event(name, body)


# -- what is not simulated -------------------------------------------------------------------------


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, Mapping) else value


def _not_text(value: Any) -> bool:
    return _kind(value) not in (None, "text")


def _forces_call(value: Any) -> bool:
    return _kind(value) not in (None, "auto", "none")


def _value_at(body: Mapping[str, Any], path: str) -> Any:
    value: Any = body
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


_GUIDED: Final[dict[str, Callable[[Any], bool]]] = {
    "structured_outputs": bool,
    "guided_json": bool,
    "guided_regex": bool,
    "guided_choice": bool,
    "guided_grammar": bool,
    "logit_bias": bool,
    "use_beam_search": bool,
}
_SAMPLED: Final[dict[str, Callable[[Any], bool]]] = {
    **_GUIDED,
    "prompt_logprobs": lambda value: value is not None,
    "top_logprobs": bool,
    "response_format": _not_text,
}
#: API -> field -> whether its value asks for what is not simulated.
NOT_SIMULATED: Final[dict[str, dict[str, Callable[[Any], bool]]]] = {
    "chat": {
        **_SAMPLED,
        "logprobs": bool,
        "tool_choice": _forces_call,
        "functions": bool,
        "function_call": _forces_call,
        "audio": bool,
    },
    "completions": {
        **_SAMPLED,
        "logprobs": lambda value: value is not None and value is not False,
        "echo": bool,
        "prompt_embeds": bool,
        "suffix": bool,
    },
    "responses": {
        **_GUIDED,
        "text.format": _not_text,
        "tool_choice": _forces_call,
        "top_logprobs": bool,
        "include": lambda value: (
            isinstance(value, list) and "message.output_text.logprobs" in value
        ),
    },
    "messages": {
        "tool_choice": _forces_call,
        "output_config.format": bool,
        "thinking": lambda value: _kind(value) == "enabled",
    },
}


def not_simulated(body: Mapping[str, Any], api: str) -> str | None:
    """The field of a body that asks for what the engine does not simulate; None if none does."""
    for path, asks in NOT_SIMULATED[api].items():
        if asks(_value_at(body, path)):
            return path
    return None
