"""Calls between Kimi's marks, with an id that contains the name: the format of Kimi K2.

The rules for broken text are those of Dynamo 1.6.1, as observed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dynctl.tokenization.tool_calls.calls import SPACE, Parsed, ToolCall, first_mark, strip_space
from dynctl.tokenization.tool_calls.json_values import read_value, value_end, write_value

_BEGINS: Final = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_ENDS: Final = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
_CALL_BEGIN: Final = "<|tool_call_begin|>"
_CALL_END: Final = "<|tool_call_end|>"
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_DELIMITERS: Final = ' \t\n\r"[]{},:'
_HEAD: Final = re.compile(
    f"{re.escape(_CALL_BEGIN)}[{SPACE}]*"
    rf"((?:functions\.(?!:))?([\w.\-]+):\d+)"
    f"[{SPACE}]*{re.escape(_ARGUMENTS)}"
)


@dataclass(frozen=True, slots=True)
class KimiFormat:
    """Calls inside of marks around all of them, or from the first call on until such an end mark.

    The id of a call is that in the text: ``functions.NAME:NUMBER``.
    """

    starts: tuple[str, ...] = (*_BEGINS, _CALL_BEGIN)
    ends: tuple[str, ...] = _ENDS
    loose_starts: tuple[str, ...] = ()
    cuts: bool = True
    hides: bool = False
    tried: str = ""

    def may_begin(self, text: str) -> bool:
        return False

    def parse(self, text: str, *, final: bool) -> Parsed:
        calls: list[ToolCall] = []
        outside, rest = "", text
        while rest:
            begin = first_mark(rest, _BEGINS)
            before = rest[:begin]
            calls += _calls(before)
            outside += before
            end = len(before) + _end_of_mark(rest[len(before) :], _ENDS)
            calls += _calls(rest[len(before) : end])
            rest = rest[end:]
        first = first_mark(text, _BEGINS)
        if not calls:
            lost = not strip_space(outside) or (first is None and _CALL_BEGIN in text)
            return Parsed((), "" if lost else outside)
        before = text[:first]
        bare = any(_calls(before))
        return Parsed(tuple(calls), before[: before.find(_CALL_BEGIN)] if bare else before)

    def end(self, text: str, *, seen: int = 0) -> int:
        return _end_of_mark(text, _ENDS)


def _end_of_mark(text: str, marks: tuple[str, ...]) -> int:
    """The place after the first mark, or the end of the text."""
    places = (at + len(mark) for mark in marks if (at := text.find(mark)) >= 0)
    return min(places, default=len(text))


def _calls(text: str) -> Iterator[ToolCall]:
    at = 0
    while (head := _HEAD.search(text, at)) is not None:
        end = text.find(_CALL_END, head.end())
        if end < 0:
            return
        yield ToolCall(head[2], _arguments(strip_space(text[head.end() : end])), head[1])
        at = end + len(_CALL_END)


def _arguments(text: str) -> str:
    """Arguments as JSON: the first value; as they are where there is none."""
    end = value_end(text)
    if end is None:
        return text
    delimited = text[end - 1] in ']}"' or text[end : end + 1] in _DELIMITERS
    if not delimited or _CALL_BEGIN in text[end:]:
        return text
    try:
        return write_value(read_value(text[:end]))
    except ValueError:
        return text[:end]
