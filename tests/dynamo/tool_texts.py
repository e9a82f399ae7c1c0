"""What models write around tool calls, whole and broken, for each parser of a card."""

import json
import random
from collections.abc import Mapping
from typing import Any

from tests.dynamo import tool_markup
from tests.dynamo.answers import Case, tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer"},
                    "city": {"type": "string"},
                    "any": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "list": {"type": "array"},
                    "flag": {"type": "boolean"},
                    "number": {"type": "number"},
                },
            },
        },
    }
    for name in ("f", "g", "get_weather")
]
MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "jamba": ("<tool_calls>", "</tool_calls>"),
    "llama3_json": ("<|python_tag|>", ""),
    "mistral": ("[TOOL_CALLS]", "[/TOOL_CALLS]"),
    "nemotron_deci": ("<TOOLCALL>", "</TOOLCALL>"),
    "phi4": ("functools", ""),
    "qwen25": ("<tool_call>", "</tool_call>"),
}
"""The parsers that read JSON, and their marks."""

CARDS: dict[str, dict[str, str]] = {
    **{name: {"tool_call_parser": name} for name in MARKS},
    "pythonic": {"tool_call_parser": "pythonic"},
    **{name: {"tool_call_parser": name} for name in tool_markup.CALLS},
    "think": {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
}
"""Models of the fleet, with what is in their cards."""

_WHOLE = (
    '{"name": "f", "arguments": {"x": 1}}',
    '{"name":"g","parameters":{"city": "a b","x":[1,{"y":"}]"}]}}',
    '{"name": "unknown", "arguments": {"t": "日本 [x]; \\"q\\" \\\\"}}',
    '{"name":"f","arguments":{}, "parameters":{"z":1}}',
    '{"name": "f"}',
)
_BROKEN = (
    '{"nam": "f"}',
    '{"name":"f","arguments":{x:1}}',
    '{"name":"f","arguments":{"x":1',
    '{"name":"f","arguments":{"x": NaN}}',
    '{"name":"f","arguments":{"x": "a\nb"}}',
    '{"name":"f","name":"g","arguments":{}}',
    '{"name":1,"arguments":{}}',
    '{"name":"f","arguments":"s"}',
    "{}",
    "[]",
)
_PYTHON = (
    "f(x=1)",
    'g(city="a b", x=[1, {"y": "}]"}])',
    "unknown(t='日本 [x]; \\'q\\' \\\\')",
    "f()",
    'f(x={"a": None}, y=True, z=1.5e-7)',
    "f(x=-1, y=[1, 2,], z=(3,))",
    'f(city="a"\n "b", x=99999999999999999999)',
    "f(x=0x10,\n y=1e400,)",
    "g(x = 1, **more)",
)
"""Calls as Python; objects have one member, since Dynamo's order of more is random."""

_PYTHON_MARK = "__NEVER_MATCH__"
"""What Dynamo looks for where a parser has no marks."""

_BROKEN_PYTHON = (
    "f(1)",
    "f(x=1, x=2)",
    "f(x=1, 2)",
    "f(x=)",
    "f(x=1",
    "f x=1)",
    "f.g(x=1)",
    "f(x=1) + g(y=2)",
    'f(x="a\nb")',
    'f(x="a)]")',
    'f(x="\\ud800 \\d")',
    "5",
    "",
)
_PLAIN = (
    "hello ",
    " bye",
    "\n",
    " ",
    "a { b",
    "x [1] y",
    "<b>",
    " < ",
    "<to",
    "fun ",
    "wörld 日本",
    "}",
    "]",
    ";",
    "\u00a0",
)
_FINISHES = ("stop", "stop", "stop", "eos", "length", "content_filter")


def _json_calls(source: random.Random, parser: str) -> str:
    start, end = MARKS[parser]
    kinds = _WHOLE if source.random() < 0.7 else _WHOLE + _BROKEN
    objects = [source.choice(kinds) for _ in range(source.choice((1, 1, 1, 2, 3)))]
    body = ";".join(objects) if source.random() < 0.2 else "[" + ", ".join(objects) + "]"
    if len(objects) == 1 and source.random() < 0.6:
        body = objects[0]
    blank = source.choice(("", "\n", " "))
    opened, closed = source.random() < 0.9, source.random() < 0.8
    return start * opened + blank + body + blank + end * closed


def _python_calls(source: random.Random) -> str:
    kinds = _PYTHON if source.random() < 0.7 else _PYTHON + _BROKEN_PYTHON
    calls = [source.choice(kinds) for _ in range(source.choice((1, 1, 1, 2, 3)))]
    body = source.choice((", ", ",", ",\n", " ")).join(calls)
    opened, closed = source.random() < 0.9, source.random() < 0.85
    marked = source.random() < 0.1
    begin, end = ("<|python_start|>", "<|python_end|>") if marked else ("", "")
    return begin + "[" * opened + body + "]" * closed + end


def text(source: random.Random, model: str) -> str:
    parser = CARDS[model]["tool_call_parser"]
    parts = []
    for _ in range(source.choice((1, 1, 2, 2, 3, 4))):
        kind = source.random()
        if kind < 0.45 and parser in tool_markup.CALLS:
            parts.append(tool_markup.CALLS[parser](source))
        elif kind < 0.45 and parser == "pythonic":
            parts.append(_python_calls(source))
        elif kind < 0.45:
            parts.append(_json_calls(source, parser))
        elif kind < 0.9:
            parts.append(source.choice(_PLAIN))
        else:
            marks = {**MARKS, **tool_markup.MARKS}.get(parser, (_PYTHON_MARK,))
            mark = source.choice([each for each in marks if each])
            parts.append(mark[: source.randint(1, len(mark))])
        if "reasoning_parser" in CARDS[model] and source.random() < 0.3:
            parts.append(source.choice(("<think>", "</think>", "<think>hm</think>")))
    return "".join(parts)


def chunks_of(source: random.Random, text: str) -> list[dict[str, Any]]:
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    style, at = source.choice((1, 3, 8, 1000, 0)), 0
    chunks: list[dict[str, Any]] = []
    while at < len(ids):
        size = style or source.choice((1, 2, 3, 5, 8, 20, 50))
        chunks.append({"token_ids": ids[at : at + size]})
        at += size
    end, finish = source.random(), source.choice(_FINISHES)
    if end < 0.6:
        chunks.append({"token_ids": [], "finish_reason": finish})
    elif end < 0.9 and chunks:
        chunks[-1]["finish_reason"] = finish
    return chunks


def fields_of(source: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"tools": TOOLS}
    if source.random() < 0.7:
        fields["stream"] = True
        if source.random() < 0.5:
            continuous = source.random() < 0.4
            fields["stream_options"] = {
                "include_usage": True,
                **({"continuous_usage_stats": True} if continuous else {}),
            }
    if source.random() < 0.2:
        fields["nvext"] = {"extra_fields": ["completion_token_ids", "stop_reason"]}
    if source.random() < 0.1:
        fields["stop"] = [source.choice(("y", "f", "</", "ye", "1}"))]
    if source.random() < 0.15:
        fields["tool_choice"] = source.choice(("auto", "none"))
    return fields


def cases(model: str, count: int, seed: str = "") -> list[Case]:
    """``count`` chats with a model of ``CARDS``: for one seed the same ones each time."""
    source = random.Random(model + seed)
    made = []
    for number in range(count):
        fields, chunks = fields_of(source), chunks_of(source, text(source, model))
        if "nvext" not in fields and source.random() < 0.1:
            fields["n"] = 2
            chunks = [{**each, "index": source.randint(0, 1)} for each in chunks]
        made.append(Case(f"{model} {number}", True, fields, chunks, model=model))
    return made


def card_args(cards: Mapping[str, Mapping[str, str]] = CARDS) -> list[str]:
    """The arguments of a scripted worker that serves every model."""
    return [
        part for name, card in cards.items() for part in ("--model", f"{name}={json.dumps(card)}")
    ]
