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


_VALUES = (
    "1",
    "\n12\n",
    " Pa ris\n",
    "1.50",
    "{'a': True}",
    '{"y": [1, null]}',
    "a &lt;b&gt; &amp; c",
    "null",
    "日本\nx",
    "",
    "1e22",
)
_PARAMETERS = ("x", "city", "any", "list", "flag", "number", "unknown")
_BROKEN_NAMES = ("", " f ", '"f"', "f\n", "f<g", "'g\"")


def _tag(source: random.Random, name: str, value: str, whole: str, broken: str) -> str:
    opened = source.choice(("<{}={}>",) * 30 + ("{}={}>", "<{}={}", "<{}>{}")).format(whole, name)
    return opened + value + source.choice((f"</{whole}>",) * 20 + ("", broken))


def _qwen_function(source: random.Random) -> str:
    parts = []
    for _ in range(source.choice((0, 1, 1, 2, 2, 3))):
        name = _choose(source, _PARAMETERS, _BROKEN_NAMES)
        parts.append(_tag(source, name, source.choice(_VALUES), "parameter", "</param"))
    blank = source.choice(("", "\n", "\n", " junk "))
    body = blank + blank.join(parts) + blank
    return _tag(source, _choose(source, _NAMES, _BROKEN_NAMES), body, "function", "</")


def _qwen(source: random.Random) -> str:
    calls = []
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        functions = [_qwen_function(source) for _ in range(source.choice((1, 1, 1, 1, 0, 2)))]
        blank = source.choice(("", "\n", "\n", " so "))
        body = blank + blank.join(functions) + blank
        opened, closed = source.random() < 0.85, source.random() < 0.85
        calls.append("<tool_call>" * opened + body + "</tool_call>" * closed)
    text = source.choice(("", "\n", " q ")).join(calls)
    return text[: source.randint(0, len(text))] if source.random() < 0.15 else text


_KIMI_MARKS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_begin|>",
    "<|tool_call_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
_KIMI_IDS = ("functions.f:0", "functions.g:1", " get_weather:2 ", "functions.a.b-c:12")
_BROKEN_KIMI_IDS = ("f", "functions.:0", ":0", "f :0", "a b:0", "f:x", "functions.日本:0", "a:0:1")


def _kimi(source: random.Random) -> str:
    begin, end, other, other_end, call_begin, call_end, argument = _KIMI_MARKS
    calls = []
    for _ in range(source.choice((0, 1, 1, 1, 2, 3))):
        identity = _choose(source, _KIMI_IDS, _BROKEN_KIMI_IDS)
        arguments = _choose(source, _ARGUMENTS, (*_BROKEN, "[1] x", "5 x", f"{{}}{argument}{{}}"))
        call = _choose(source, (call_begin,), ("", call_begin + "x")) + identity
        call += _choose(source, (argument,), ("", " ")) + arguments
        calls.append(call + _choose(source, (call_end,), ("", " ")))
    blank = source.choice(("", "", "\n", " so "))
    if source.random() < 0.1:
        begin, end = other, other_end
    opened, closed = source.random() < 0.85, source.random() < 0.85
    return begin * opened + blank + blank.join(calls) + blank + end * closed


_MINIMAX = (
    ("tool_call>", "minimax:tool_call>"),
    ("<function=", "<invoke name="),
    ("</function>", "</invoke>"),
    ("<parameter=", "<parameter name="),
)


def _minimax(source: random.Random) -> str:
    text = _qwen(source)
    for other, tag in _MINIMAX:
        text = text.replace(other, tag)
    return text


CALLS: Final[dict[str, Callable[[random.Random], str]]] = {
    "deepseek_v3": lambda source: _deepseek(source, fenced=True),
    "deepseek_v3_1": lambda source: _deepseek(source, fenced=False),
    "kimi_k2": _kimi,
    "minimax_m2": _minimax,
    "nemotron_nano": _qwen,
    "qwen3_coder": _qwen,
}
"""Parsers, and what makes calls in their format."""

MARKS: Final = {
    "deepseek_v3": (_BEGIN, _END, _CALL_BEGIN, _CALL_END, _SEPARATOR, "```json\n"),
    "deepseek_v3_1": (_BEGIN, _END, _CALL_BEGIN, _CALL_END, _SEPARATOR),
    "kimi_k2": _KIMI_MARKS,
    "minimax_m2": (
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<invoke name=f>",
        "</invoke>",
        "<parameter name=x>",
    ),
    **dict.fromkeys(
        ("nemotron_nano", "qwen3_coder"),
        ("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>"),
    ),
}
