"""Tool calls in formats with marks of their own, whole and broken."""

import random
from collections.abc import Callable
from typing import Final

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_NAMES = ("f", "g", "get_weather", "unknown")
_ARGUMENTS = (
    "{}",
    '{"x": 1}',
    '{"city": "a b", "x" : [1, {"y": "}]"}]}',
    '{"t": "日本 [x]; \\"q\\" \\\\ \\u00e9"}',
    '{"x": -1.50, "y": 1e-7, "x": null}',
    '{"x": 1234567890123456789012, "y": 0.72585260144651521}',
)
_BROKEN = (
    "",
    "5",
    "{x:1}",
    '{"x": 1',
    '{"x": "a\n   b"}',
    '{"x": NaN}',
    '{"x": "\\ud800"}',
    '{"x": 1e400}',
    '{"x": 1} {}',
)


def _choose(source: random.Random, whole: tuple[str, ...], broken: tuple[str, ...]) -> str:
    return source.choice(whole if source.random() < 0.75 else whole + broken)


def _deepseek(source: random.Random, *, fenced: bool) -> str:
    calls = []
    for _ in range(source.choice((0, 1, 1, 1, 1, 2, 3))):
        name = _choose(source, _NAMES, ("", " f g ", "a{", "f\n", _SEPARATOR))
        arguments = _choose(source, _ARGUMENTS, _BROKEN)
        if fenced:
            fences = ("```json\n{}\n```",), ("```json{}```", "```json\r\n{}", "{}", "```\n{}\n```")
            arguments = _choose(source, *fences).replace("{}", arguments)
            name = f"{source.choice(('function', ''))}{_SEPARATOR}{name}\n{arguments}"
        else:
            name += _choose(source, (_SEPARATOR,), ("", " ")) + arguments
        opened, closed = source.random() < 0.95, source.random() < 0.92
        calls.append(_CALL_BEGIN * opened + name + _CALL_END * closed)
    blank = source.choice(("", "", "\n", " so "))
    opened, closed = source.random() < 0.85, source.random() < 0.85
    return _BEGIN * opened + blank + blank.join(calls) + blank + _END * closed


CALLS: Final[dict[str, Callable[[random.Random], str]]] = {
    "deepseek_v3": lambda source: _deepseek(source, fenced=True),
    "deepseek_v3_1": lambda source: _deepseek(source, fenced=False),
}
"""Parsers, and what makes calls in their format."""

MARKS: Final = {
    "deepseek_v3": (_BEGIN, _END, _CALL_BEGIN, _CALL_END, _SEPARATOR, "```json\n"),
    "deepseek_v3_1": (_BEGIN, _END, _CALL_BEGIN, _CALL_END, _SEPARATOR),
}
