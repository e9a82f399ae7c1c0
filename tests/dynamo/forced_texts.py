"""What engines write where a request forces a call of a tool: JSON as asked for, and other text."""

import random
from typing import Any

from tests.dynamo import tool_texts
from tests.dynamo.answers import Case

CARDS: dict[str, dict[str, str]] = {
    "bare": {},
    **{name: card for name, card in tool_texts.CARDS.items() if name != "kimi_k2"},
}
"""Models whose engines get a JSON schema, with what is in their cards."""

NAMED = {"type": "function", "function": {"name": "f"}}


def _function(name: str, definitions: object) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, "$defs": definitions}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


_FIRST = _function("f", {"A": {"type": "string"}, "B": {"type": "number"}})
DEFINITIONS = [_FIRST, _function("g", {"A": {"type": "string"}, "C": {"type": "null"}})]
"""Tools that share definitions; then those of which one is another, or which are none."""
CONFLICT = [_FIRST, _function("g", {"A": {"type": "number"}})]
NO_DEFINITIONS = [_function("f", ["A"])]

_ARGUMENTS = (
    "{}",
    '{"x": 1}',
    '{"city": "a b", "x" : [1, {"y": "}]"}]}',
    '{"t": "日本 [x]; \\"q\\" \\\\ \\u00e9", "name": "g"}',
    '{ "x": -1.50,\n "y": 1e-7, "parameters": {"a": null} }',
    '{"x": 1234567890123456789012, "arguments": [true]}',
)
_ODD = ("null", "5", '"s"', "[1, {}]", "{x:1}", '{"x": NaN}', '{"x": "a\nb"}', "", "{}{}")
_NAMES = ('"f"', '"g"', '"f"', '"unknown"', '"get_weather"', '"g\\u0065t_weather"')
_ODD_NAMES = ("1", "null", "{}", '""', '"\\ud800"', '"a\\"b"')
_BLANKS = ("", "", " ", "\n", " \t ")
_THOUGHTS = ("<think>hm</think>", "<think>", "</think>", "<think>a</think>\n")
_AFTER = (" bye", "\n", "}", "]", " { b", "[", "x [1] y", "<to", '{"x": 2}', "fun", "日")


def _some(source: random.Random, whole: tuple[str, ...], odd: tuple[str, ...]) -> str:
    return source.choice(odd if source.random() < 0.12 else whole)


def _call(source: random.Random) -> str:
    key = source.choice(("parameters", "parameters", "arguments"))
    members = [
        f'"name":{source.choice(_BLANKS)}{_some(source, _NAMES, _ODD_NAMES)}',
        f'"{key}":{source.choice(_BLANKS)}{_some(source, _ARGUMENTS, _ODD)}',
    ]
    kind = source.random()
    if kind < 0.15:
        members.reverse()
    elif kind < 0.2:
        members.append(f'"{source.choice(("arguments", "parameters", "name"))}": {{"z": 1}}')
    elif kind < 0.25:
        members.insert(source.randint(0, 2), '"more": ["name", {"name": "n"}]')
    elif kind < 0.3:
        members.pop()
    blank = source.choice(_BLANKS)
    return "{" + blank + ("," + blank).join(members) + blank + "}"


def _forced(source: random.Random, *, named: bool) -> str:
    if named and source.random() < 0.85:
        return _some(source, _ARGUMENTS, _ODD)
    calls = [_call(source) for _ in range(source.choice((0, 1, 1, 1, 2, 3)))]
    blank = source.choice(_BLANKS)
    text = "[" + blank + ("," + blank).join(calls) + blank + "]"
    return calls[0] if calls and source.random() < 0.1 else text


def _text(source: random.Random, model: str, *, named: bool) -> str:
    text = source.choice(_BLANKS) + _forced(source, named=named)
    if source.random() < 0.12:
        text = text[: source.randint(0, len(text))]
    kind = source.random()
    if kind < 0.12:
        text += source.choice(_AFTER)
    elif kind < 0.2:
        text += source.choice(_AFTER) + _forced(source, named=named)
    elif kind < 0.26:
        text = source.choice(_AFTER) + text
    elif kind < 0.36 and "tool_call_parser" in CARDS[model]:
        marked = tool_texts.text(source, model)
        text = text + marked if source.random() < 0.3 else marked
    if "reasoning_parser" in CARDS[model] and source.random() < 0.6:
        text = (
            source.choice(("<think>hm</think>", "<think>", "</think>", "<think>a</think>\n")) + text
        )
    return text


def cases(model: str, count: int, seed: str = "") -> list[Case]:
    """``count`` chats that force a call, with a model of ``CARDS``; as tool_texts.cases."""
    source = random.Random(f"forced {model}{seed}")
    made = []
    for number in range(count):
        fields = tool_texts.fields_of(source)
        named = source.random() < 0.4
        fields["tool_choice"] = NAMED if named else "required"
        text = _text(source, model, named=named) or " "
        chunks = tool_texts.chunks_of(source, text)
        if "nvext" not in fields and source.random() < 0.1:
            fields["n"] = 2
            chunks = [{**each, "index": source.randint(0, 1)} for each in chunks]
        made.append(Case(f"forced {model} {number}{seed}", True, fields, chunks, model=model))
    return made
