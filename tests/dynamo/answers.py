"""Requests whose answers ours and Dynamo's frontend must agree on, and how to compare them.

The worker (:mod:`tests.dynamo.scripted_worker`) sends the chunks that the prompt contains, so both
sides see the same output.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from dynctl.base.decode_errors import RequestError
from dynctl.serving.dynamo.answer import NO_PARSERS, EngineAnswer, Parsers
from dynctl.wire.dynamo.openai_options import engine_request, read_engine_options
from tests.dynamo.fleet import TINY_MODEL
from tests.dynctl.serving.scripted import answered

Chunk = Mapping[str, Any]
_CALL_ID = re.compile("call-[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_OWN_ID = re.compile(r"call-[0-9]{1,3}|.*:\d+")

ALLOWED = {
    "id": "each frontend names its answers",
    "created": "the second in which the answer began",
    "id of a tool call": "random in both; equal in shape (those of two parsers are not random: "
    "they are compared)",
    "body of an error": "ours is OpenAI's error object; status codes are equal",
    "stream that fails before its first output": "ours has status 500, as without streaming; "
    "Dynamo's has 200 and an error event",
}
"""Every difference that a comparison ignores, and why."""


@dataclass(frozen=True)
class Case:
    """``fields`` are those of the body beside the prompt; ``chunks`` what the worker sends.

    ``prompt`` is for a body whose prompt is not a script: then the worker sends nothing.
    ``raises``: the text of an exception after the chunks, of the class that ``kind`` names.
    """

    name: str
    chat: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)
    chunks: Sequence[Any] = ()
    model: str = "tiny"
    prompt: Any = None
    raises: str | None = None
    kind: str = "RuntimeError"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        script: dict[str, Any] = {"key": self.name, "chunks": list(self.chunks)}
        if self.raises is not None:
            script |= {"raise": self.raises, "kind": self.kind}
        text = f"@@{json.dumps(script)}@@"
        body: dict[str, Any] = {"model": self.model}
        if self.chat:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        if self.prompt is not None:
            body["messages" if self.chat else "prompt"] = self.prompt
        return {**body, **self.fields}


@dataclass(frozen=True)
class Seen:
    """An answer as a client sees it. ``events``: of a stream, else the one body."""

    status: int
    events: tuple[Any, ...] = ()


FAILED_AT_ONCE = (
    {"error": {"message": "Internal server error", "type": "internal_server_error", "code": 500}},
    "[DONE]",
)


def parsed(status: int, streamed: bool, text: str) -> Seen:
    """An answer without what :data:`ALLOWED` names."""
    if status != 200:
        return Seen(status)
    if not streamed:
        return Seen(status, (_plain(json.loads(text)),))
    events = tuple(_event(event) for event in text.split("\n\n") if event.strip())
    outputs = tuple(each for each in events if not str(each).startswith("event: "))
    return Seen(500) if outputs == FAILED_AT_ONCE else Seen(status, events)


def _event(event: str) -> Any:
    if not event.startswith("data: "):
        assert event.startswith("event: "), event
        return "event: request_id" if event.startswith("event: request_id\n") else event
    data = event.removeprefix("data: ")
    return data if data == "[DONE]" else _plain(json.loads(data))


def _plain(body: Any) -> Any:
    for name in ("id", "created"):
        if name in body:
            body[name] = "..."
    for choice in body.get("choices", ()):
        for call in (choice.get("message") or choice.get("delta") or {}).get("tool_calls", ()):
            if "id" in call and _OWN_ID.fullmatch(call["id"]) is None:
                assert _CALL_ID.fullmatch(call["id"]), call
                call["id"] = "..."
    return body


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))


class _Decoder:
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = tokenizer().decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def ours(case: Case, token_ids: Sequence[int], parsers: Parsers = NO_PARSERS) -> Seen:
    """Our answer to what the worker sends, without a server and a network."""
    body = case.body()
    try:
        options = read_engine_options(body)
    except RequestError as error:
        return Seen(error.status)
    request = engine_request(options, token_ids, eos_token_ids=[1])
    answer = EngineAnswer(options, request, _Decoder(), request_id="1", created=1, parsers=parsers)
    raises = case.raises is not None
    status, sent = answered(answer, case.chunks, streamed=options.stream, raises=raises)
    return parsed(status, options.stream, sent.decode())


# -- the generator ---------------------------------------------------------------------------------

_TEXTS = (
    "Hello world, stop here please.",
    "wörld Straße über façade ünder",
    "你好，世界。東京は晴れです。",
    "👩‍👩‍👧‍👦 🏳️‍🌈 emoji stop 🇪🇺",
    "line one\nline two\n\n\tindented  twice",
    'json {"a": [1, 2, {"b": "c"}]} end',
    "aaa aab aabb abab ababab",
    "שלום עולם مرحبا",
)
_FINISHES = ("stop", "length", "eos", "cancelled", "content_filter")


def _ids(source: random.Random) -> list[int]:
    text = source.choice(_TEXTS)
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids[: source.randint(1, 28)]
    for _ in range(source.choice((0, 0, 1, 2))):
        place = source.randint(0, len(ids))
        kind = source.random()
        if kind < 0.3:
            ids.insert(place, source.choice((0, 2, 3)))  # special
        elif kind < 0.45:
            ids.insert(place, 1)  # the end of the model
        elif kind < 0.6:
            ids.insert(place, source.randint(400, 9000))  # outside the vocabulary
        elif ids:
            del ids[min(place, len(ids) - 1)]  # half of a character may remain
    return ids


def _top(source: random.Random, token_id: int) -> list[dict[str, Any]]:
    others = [source.randint(4, 316) for _ in range(source.randint(0, 2))]
    chosen = [token_id] if source.random() < 0.7 else []
    top = []
    for rank, each in enumerate([*chosen, *others], 1):
        entry: dict[str, Any] = {"rank": rank, "token_id": each, "logprob": -source.random() * 9}
        known = tokenizer().decode([each]) if source.random() < 0.5 else None
        entry["token"] = known or None
        top.append(entry)
    return top


def _chunks(source: random.Random, choices: int, logprobs: bool) -> list[Any]:
    chunks: list[Any] = []
    streams = []
    for index in range(choices):
        ids = _ids(source)
        pieces: list[dict[str, Any]] = []
        size = source.choice((1, 1, 2, 5, 40))
        for start in range(0, len(ids), size):
            piece: dict[str, Any] = {"token_ids": ids[start : start + size]}
            if index or source.random() < 0.5:
                piece["index"] = index
            if logprobs and source.random() < 0.9:
                piece["log_probs"] = [-source.random() * 20 for _ in piece["token_ids"]]
                if source.random() < 0.6:
                    piece["top_logprobs"] = [_top(source, each) for each in piece["token_ids"]]
            pieces.append(piece)
        if source.random() < 0.1:
            pieces.insert(source.randint(0, len(pieces)), {"token_ids": [], "index": index})
        end = source.random()
        finish = source.choice(_FINISHES)
        if end < 0.6:
            pieces.append({"token_ids": [], "finish_reason": finish, "index": index})
        elif end < 0.85 and pieces:
            pieces[-1]["finish_reason"] = finish
        if pieces and source.random() < 0.3:
            pieces[-1]["completion_usage"] = _usage(source)
        streams.append(pieces)
    while any(streams):
        stream = source.choice([each for each in streams if each])
        chunks.append(stream.pop(0))
    if source.random() < 0.07:
        place = source.randint(0, len(chunks))
        wrong = source.choice(
            (
                {"token_ids": [], "finish_reason": {"error": "no memory"}},
                {"nonsense": 1},
                {"token_ids": [-1]},
                {"token_ids": [], "finish_reason": "finished"},
                {"token_ids": [70], "index": choices},
                "text",
            )
        )
        chunks.insert(place, wrong)
    if source.random() < 0.05 and chunks and isinstance(chunks[0], dict):
        source.choice([each for each in chunks if isinstance(each, dict)])["text"] = "given text"
    return chunks


def _usage(source: random.Random) -> dict[str, Any]:
    prompt, output = source.randint(1, 99), source.randint(1, 99)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }
    if source.random() < 0.7:
        usage["prompt_tokens_details"] = {"audio_tokens": None, "cached_tokens": 16}
    if source.random() < 0.2:
        usage["completion_tokens_details"] = {"reasoning_tokens": 3}
    return usage


def _fields(source: random.Random, chat: bool, logprobs: bool, choices: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}

    def maybe(chance: float, name: str, value: Any) -> None:
        if source.random() < chance:
            fields[name] = value

    if choices > 1:
        fields["n"] = choices
    if logprobs:
        if chat:
            fields["logprobs"] = True
            maybe(0.5, "top_logprobs", source.randint(0, 3))
        else:
            fields["logprobs"] = source.randint(0, 3)
        maybe(0.15, "return_tokens_as_token_ids", True)
    if source.random() < 0.4:
        text = source.choice(_TEXTS)
        start = source.randrange(len(text))
        stops = [text[start : start + source.randint(1, 6)]]
        if source.random() < 0.5:
            stops.append(source.choice(("stop", "ab", "aab", "e", " ", "東京", "zzz")))
        fields["stop"] = stops[0] if len(stops) == 1 and source.random() < 0.5 else stops
        maybe(0.3, "include_stop_str_in_output", True)
    maybe(0.1, "stop_token_ids", [source.randint(60, 90), 224])
    maybe(0.15, "min_tokens", source.randint(0, 9))
    maybe(0.12, "ignore_eos", source.random() < 0.7)
    maybe(0.25, "skip_special_tokens", source.random() < 0.3)
    maybe(0.2, "max_tokens", source.randint(1, 50))
    maybe(0.1, "temperature", source.choice((0.1, 0.7, 1, 2)))
    maybe(0.1, "seed", source.randint(-5, 2**40))
    maybe(0.1, "user", "someone")
    extra = source.random()
    if extra < 0.15:
        names = ["completion_token_ids", "stop_reason", "unknown"]
        fields["nvext"] = {"extra_fields": source.sample(names, source.randint(1, 3))}
    elif extra < 0.2:
        names = ["token_ids", "request_id", "unknown"]
        fields["nvext"] = {"annotations": source.sample(names, 2)}
    if source.random() < 0.6:
        fields["stream"] = True
        options = {}
        if source.random() < 0.6:
            options["include_usage"] = source.random() < 0.8
        if source.random() < 0.25:
            options["continuous_usage_stats"] = True
        if options:
            fields["stream_options"] = options
    return fields


_WRONG: tuple[tuple[str, Any], ...] = (
    ("temperature", 3),
    ("temperature", "warm"),
    ("top_p", 0),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("n", 0),
    ("n", 200),
    ("stop", ""),
    ("stop", []),
    ("stop", {"a": 1}),
    ("stop", ["x"] * 40),
    ("min_p", 1.5),
    ("top_k", -2),
    ("repetition_penalty", 0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -3),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"5": 101}),
    ("stream_options", {"include_usage": True}),
    ("bogus", 1),
    ("user", ""),
    ("seed", 1.5),
    ("ignore_eos", 1),
    ("stop_token_ids", ["a"]),
    ("guided_choice", "a"),
    ("nvext", {"bogus": 1}),
    ("nvext", {"agent_hints": {"bogus": 1}}),
    ("model", ""),
    ("model", 5),
    ("cache_salt", 5),
    ("logprobs", -1),
    ("best_of", 21),
    ("echo", "yes"),
    ("top_logprobs", 21),
    ("response_format", {"type": "xml"}),
    ("reasoning_effort", "huge"),
    ("tools", []),
    ("messages", []),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("functions", [{"name": "f", "parameters": {}}]),
    ("functions", [{"name": "f"}]),
    ("service_tier", "cheap"),
    ("detokenize", 1),
)


def cases(count: int, seed: int = 16) -> list[Case]:
    """``count`` requests; one in six has a wrong field."""
    source = random.Random(seed)
    made = []
    for number in range(count):
        chat = source.random() < 0.5
        logprobs = source.random() < 0.3
        choices = source.choice((1, 1, 1, 1, 2, 3))
        fields = _fields(source, chat, logprobs, choices)
        chunks = _chunks(source, choices, logprobs)
        if number % 6 == 5:
            name, value = _WRONG[number // 6 % len(_WRONG)]
            chat = name in ("messages", "functions") or (chat and name != "prompt")
            fields = {name: value}
        raises = "failed" if source.random() < 0.03 else None
        made.append(Case(str(number), chat, fields, chunks, raises=raises))
    return made
