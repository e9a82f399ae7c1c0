"""Calls between DeepSeek's marks, with a name and JSON: the formats of V3 and V3.1.

The rules for broken text are those of Dynamo 1.6.1, as observed.
"""

import re
from dataclasses import dataclass
from typing import Final

from dynctl.tokenization.tool_calls.calls import SPACE, Parsed, ToolCall, strip_space, texts_between
from dynctl.tokenization.tool_calls.json_values import read_value, write_value

_BEGIN: Final = "<｜tool▁calls▁begin｜>"
_END: Final = "<｜tool▁calls▁end｜>"
_CALL_BEGIN: Final = "<｜tool▁call▁begin｜>"
_CALL_END: Final = "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_FENCE: Final = "```"
_FENCE_BEGIN: Final = re.compile(r"```json(?:\r?\n)?")
_NOT_IN_NAMES: Final = frozenset("{}[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekFormat:
    """Calls between marks of their own, inside of marks around all of them.

    ``fenced``: a call is its type, the name and a block of code with JSON, else name and JSON.
    Calls that a piece brings without the outer marks count too; they end where one of them ends.
    """

    fenced: bool
    starts: tuple[str, ...] = (_BEGIN,)
    ends: tuple[str, ...] = (_END,)
    loose_starts: tuple[str, ...] = (_CALL_BEGIN,)
    cuts: bool = True
    hides: bool = False
    tried: str = _CALL_END

    def may_begin(self, text: str) -> bool:
        text = strip_space(text)
        begun = any(text.endswith(_BEGIN[:length]) for length in range(1, len(_BEGIN)))
        return begun or _CALL_BEGIN in text

    def parse(self, text: str, *, final: bool) -> Parsed:
        text = strip_space(text)
        outer = text.find(_BEGIN)
        begin = outer if outer >= 0 else text.find(_CALL_BEGIN)
        if begin < 0:
            return Parsed((), text)
        calls: tuple[ToolCall, ...] = ()
        if final or outer < 0 or _END in text:
            read = map(self._call, texts_between(text, _CALL_BEGIN, _CALL_END))
            calls = tuple(each for each in read if each is not None)
        return Parsed(calls, text[:begin] if calls or outer >= 0 else "")

    def end(self, text: str, *, seen: int = 0) -> int:
        mark = _END if _BEGIN in text else _CALL_END
        at = text.find(mark) if _BEGIN in text else text.rfind(mark)
        return len(text) if at < 0 else at + len(mark)

    def _call(self, block: str) -> ToolCall | None:
        """The call in the text between its marks, None if it is broken."""
        name, separator, arguments = block.partition(_SEPARATOR)
        if self.fenced:
            name, newline, arguments = arguments.partition("\n")
            begin = _FENCE_BEGIN.search(arguments)
            if not newline or begin is None:
                return None
            arguments = arguments[begin.end() :].partition(_FENCE)[0]
        name, arguments = strip_space(name), strip_space(arguments)
        if not separator or not name or not _NOT_IN_NAMES.isdisjoint(name):
            return None
        for written in (arguments, _on_one_line(arguments)):
            try:
                return ToolCall(name, write_value(read_value(written)))
            except ValueError:
                continue
        return None


def _on_one_line(text: str) -> str:
    """JSON whose texts contain ends of lines, which JSON does not allow."""
    lines = text.removesuffix("\n").split("\n")
    return " ".join(line.removesuffix("\r").lstrip(SPACE) for line in lines)
