"""Calls as tags with a function and its parameters: the formats of Qwen3-Coder and others.

The rules for broken text are those of Dynamo 1.6.1, as observed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dynctl.tokenization.tool_calls.calls import (
    Parsed,
    ToolCall,
    after_blank,
    end_of_marked,
    stripped,
)
from dynctl.tokenization.tool_calls.json_values import write_value
from dynctl.tokenization.tool_calls.typed_values import typed_value

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a function -> name of a parameter -> its JSON schema."""

_START: Final = "<tool_call>"
_END: Final = "</tool_call>"
_FUNCTION_START: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER_START: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """The schemas of the parameters of a request's tools; the first tool of a name counts."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, Mapping):
            continue
        given = function.get("parameters")
        parameters = given if isinstance(given, Mapping) else {}
        properties = parameters.get("properties", parameters)
        schemas = properties if isinstance(properties, Mapping) else {}
        found.setdefault(str(function.get("name")), schemas)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlFormat:
    """``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``.

    A function without the outer tags is a call when the answer ends. The types of arguments are
    those of ``schemas``.
    """

    schemas: Schemas = field(default_factory=dict)
    starts: tuple[str, ...] = (_START, _FUNCTION_START)
    ends: tuple[str, ...] = (_END,)
    cuts: bool = True
    hides: bool = False
    tried: str = ""

    def may_begin(self, text: str) -> bool:
        return False

    def parse(self, text: str, *, final: bool) -> Parsed:
        calls: list[ToolCall] = []
        outside, rest = "", text
        while rest:
            before, mark, rest = rest.partition(_START)
            found = self._bare_calls(before, final=final)
            if not calls:
                outside += before[: before.find(_FUNCTION_START)] if found else before
            calls += found
            block, closed, rest = rest.partition(_END)
            if closed or (final and (_FUNCTION_START in block or _PARAMETER_START in block)):
                calls += self._calls(block + closed)
            elif not calls:
                outside += mark + block
        return Parsed(tuple(calls), outside)

    def _bare_calls(self, text: str, *, final: bool) -> list[ToolCall]:
        """The calls in text outside of the outer tags: end tags make them, or the end."""
        begin = text.find(_FUNCTION_START)
        ended = text.find(_END, max(begin, 0)) >= 0 and _FUNCTION_END in text
        return self._calls(text[begin:]) if begin >= 0 and (final or ended) else []

    def end(self, text: str, *, seen: int = 0) -> int | None:
        if text.find(_START, max(0, seen - len(_START))) >= 0:
            return end_of_marked(text, _START, _END)
        if seen:
            return None
        at: int | None = text.find(_FUNCTION_START)
        while at is not None and (closed := text.find(_FUNCTION_END, at)) >= 0:
            closed += len(_FUNCTION_END)
            end = after_blank(text, closed, _END)
            if end is not None:
                return end
            at = after_blank(text, closed, _FUNCTION_START)
        return None

    def _calls(self, text: str) -> list[ToolCall]:
        """The calls in a text; not one whose last parameter the end of the answer cut off."""
        found = []
        for name, body, ended in _tags(text, _FUNCTION_START, _FUNCTION_END):
            cut = not ended and _END not in body
            if not name or (cut and _PARAMETER_START in body.rpartition(_PARAMETER_END)[2]):
                continue
            schemas = self.schemas.get(name, {})
            arguments = {
                parameter: typed_value(value, schemas.get(parameter))
                for parameter, value, _ in _tags(body, _PARAMETER_START, _PARAMETER_END)
                if parameter
            }
            found.append(ToolCall(name, write_value(arguments)))
        return found


def _tags(text: str, start: str, end: str) -> Iterator[tuple[str, str, bool]]:
    """The name in each start tag, the text after it, and whether an end tag follows."""
    at = 0
    while (at := text.find(start, at)) >= 0:
        named = text.find(">", at)
        if named < 0:
            return
        at += len(start)
        if named == at:
            continue
        closed = text.find(end, named)
        name = _unquoted(text[at:named])
        at = len(text) if closed < 0 else closed + len(end)
        yield name, text[named + 1 : len(text) if closed < 0 else closed], closed >= 0


def _unquoted(text: str) -> str:
    text = stripped(text)
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if quoted else text
