"""Calls as tags with a function and its parameters: the formats of Qwen3-Coder and others.

The rules for broken text are those of Dynamo 1.6.1, as observed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynctl.tokenization.tool_calls.calls import (
    Parsed,
    ToolCall,
    after_blank,
    end_of_marked,
    strip_space,
)
from dynctl.tokenization.tool_calls.json_values import write_value
from dynctl.tokenization.tool_calls.typed_values import typed_value

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a function -> name of a parameter -> its JSON schema."""

Tags = tuple[str, str]
"""A start tag and an end tag."""


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """The schemas of the parameters of a request's tools; the first tool of a name counts."""
    schemas_of_tools: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, Mapping):
            continue
        given = function.get("parameters")
        parameters = given if isinstance(given, Mapping) else {}
        properties = parameters.get("properties", parameters)
        schemas = properties if isinstance(properties, Mapping) else {}
        schemas_of_tools.setdefault(str(function.get("name")), schemas)
    return schemas_of_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlFormat:
    """``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``.

    ``outer``, ``function``, ``parameter``: a start tag, up to the name where it has one, and the
    end tag. ``strict``: functions and parameters need their end tags, and what has a start tag and
    no call is lost.

    A function without the outer tags is a call when the answer ends. The types of arguments are
    those of ``schemas``.
    """

    outer: Tags = ("<tool_call>", "</tool_call>")
    function: Tags = ("<function=", "</function>")
    parameter: Tags = ("<parameter=", "</parameter>")
    strict: bool = False
    schemas: Schemas = field(default_factory=dict)
    loose_starts: tuple[str, ...] = ()
    cuts: bool = True
    hides: bool = False
    tried: str = ""

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.outer[0], self.function[0])

    @property
    def ends(self) -> tuple[str, ...]:
        return self.outer[1:]

    def may_begin(self, text: str) -> bool:
        return False

    def parse(self, text: str, *, final: bool) -> Parsed:
        calls: list[ToolCall] = []
        outside, rest = "", text
        while rest:
            before, mark, rest = rest.partition(self.outer[0])
            bare = self._bare_calls(before, final=final)
            if not calls:
                outside += before[: before.find(self.function[0])] if bare else before
            calls += bare
            block, closed, rest = rest.partition(self.outer[1])
            begun = self.function[0] in block or self.parameter[0] in block
            if closed or (final and (begun or self.strict)):
                calls += self._calls(block + closed)
            elif not calls:
                outside += mark + block
        lost = not calls and self.strict and self._is_lost(text, outside, final=final)
        return Parsed(tuple(calls), "" if lost else outside)

    def _is_lost(self, text: str, outside: str, *, final: bool) -> bool:
        """Whether a text without calls, of which some is ``outside`` of the outer tags, is lost."""
        bare, marked = self.function[0] in outside, self.outer[0] in text
        return (bare or marked) if final else bare and not marked

    def _bare_calls(self, text: str, *, final: bool) -> list[ToolCall]:
        """The calls in text outside of the outer tags: end tags make them, or the end."""
        begin = text.find(self.function[0])
        ended = text.find(self.outer[1], max(begin, 0)) >= 0 and self.function[1] in text
        return self._calls(text[begin:]) if begin >= 0 and (final or ended) else []

    def end(self, text: str, *, seen: int = 0) -> int | None:
        start, mark = self.outer
        if text.find(start, max(0, seen - len(start))) >= 0:
            return end_of_marked(text, start, mark)
        if seen:
            return None
        at: int | None = text.find(self.function[0])
        while at is not None and (closed := text.find(self.function[1], at)) >= 0:
            closed += len(self.function[1])
            end = after_blank(text, closed, mark)
            if end is not None:
                return end
            at = after_blank(text, closed, self.function[0])
        return None

    def _calls(self, text: str) -> list[ToolCall]:
        """The calls in a text; not one whose last parameter the end of the answer cut off."""
        calls = []
        begin, end = self.parameter
        for name, body, ended in _tags(text, *self.function):
            cut_off = not ended and self.outer[1] not in body
            if cut_off and begin in body.rpartition(end)[2]:
                continue
            if name and (ended or not self.strict):
                calls.append(ToolCall(name, write_value(self._arguments(name, body))))
        return calls

    def _arguments(self, function: str, body: str) -> dict[str, Any]:
        schemas = self.schemas.get(function, {})
        return {
            name: typed_value(value, schemas.get(name))
            for name, value, ended in _tags(body, *self.parameter)
            if name and (ended or not self.strict)
        }


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
        name = _unquote(text[at:named])
        at = len(text) if closed < 0 else closed + len(end)
        yield name, text[named + 1 : len(text) if closed < 0 else closed], closed >= 0


def _unquote(text: str) -> str:
    text = strip_space(text)
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if quoted else text
