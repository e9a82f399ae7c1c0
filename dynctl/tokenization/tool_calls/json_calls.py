"""Calls as JSON objects with a name and arguments: the formats of Hermes, Llama, Mistral, ...

The rules for broken text are those of Dynamo 1.6.1, as observed.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from dynctl.tokenization.tool_calls.calls import (
    MAX_NESTING,
    Parsed,
    ToolCall,
    after_blank,
    end_of_marked,
    strip_space,
    texts_between,
)
from dynctl.tokenization.tool_calls.json_values import value_end

_SYNTAX: Final = re.compile(r'["\\{}\[\]]')
_BLANK: Final = re.compile(r"[ \t\n\r]*")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_CLOSING: Final = {"{": "}", "[": "]"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonFormat:
    """JSON between marks, or bare.

    ``closes``: the end marks in the order in which they are looked for; an empty one stands for a
    format whose calls end where their JSON ends. ``names_only``: an object without arguments is a
    call. ``repairs``: JSON that the end of the answer cut off is completed. ``drops``: text with a
    mark and no call is lost. ``leading``: of calls that were cut off the whole ones count.
    ``ends_at``: whether a call ends at its end mark, at its last bracket, or with the piece.
    """

    start: str
    closes: tuple[str, ...]
    hides: bool = False
    names_only: bool = False
    repairs: bool = True
    drops: bool = False
    leading: bool = False
    ends_at: Literal["mark", "bracket", "piece"] = "piece"
    loose_starts: tuple[str, ...] = ()
    cuts: bool = True
    tried: str = "json"

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.start,)

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(each for each in self.closes if each)

    def may_begin(self, text: str) -> bool:
        text = strip_space(text)
        begun = self.start[:3] in text or text.endswith((self.start[:1], self.start[:2]))
        return bool(text) and (begun or "{" in text or "[" in text)

    def parse(self, text: str, *, final: bool) -> Parsed:
        text = strip_space(text)
        body, before = self._body(text, final=final) or (text, text)
        calls = self._read_calls(body)
        if calls is None and final:
            calls = self._read_unfinished(text, body)
        if calls is not None:
            return Parsed(calls, before)
        return self._without_json(text, body, before, final=final)

    def _without_json(self, text: str, body: str, before: str, *, final: bool) -> Parsed:
        """What a text contains whose body is not the JSON of calls."""
        starts, ends = self.start in text, any(mark in text for mark in self.ends)
        if body and self.drops and (starts or ends) and (final or (self.leading and ends)):
            return Parsed(self._read_calls(self._without_marks(body)) or (), "")
        if not body:
            return Parsed((), "")
        return Parsed((), before if self.hides and starts and ends else text)

    def _read_calls(self, text: str) -> tuple[ToolCall, ...] | None:
        return read_calls(text, names_only=self.names_only)

    def _read_unfinished(self, text: str, body: str) -> tuple[ToolCall, ...] | None:
        """The calls of a text that the end of the answer cut off; None if it has none."""
        if self.leading and self.start in text and self.ends[0] not in text:
            return self._read_calls("[" + ",".join(_leading(body)) + "]") or ()
        return (self._read_calls(_complete_json(body)) or None) if self.repairs else None

    def end(self, text: str, *, seen: int = 0) -> int | None:
        if self.ends_at == "piece":
            return len(text)
        if self.ends_at == "mark":
            return end_of_marked(text, self.start, self.ends[0])
        if self.ends and self.start in text:
            return self._end_of_optional(text, self.ends[0], seen)
        return text.rfind("]") + 1 or len(text)

    def _end_of_optional(self, text: str, mark: str, seen: int) -> int | None:
        at = text.find(mark, max(0, seen - len(mark)))
        if at >= 0:
            at += len(mark)
            while (following := after_blank(text, at, mark)) is not None:
                at = following
            return at
        at = text.rfind("]") + 1 or len(text)
        return None if mark.startswith(strip_space(text[at:])) else at

    def _body(self, text: str, *, final: bool) -> tuple[str, str] | None:
        """The JSON in a text, and the text before it."""
        first = text.find(self.start)
        if first < 0:
            bare = re.search(r"[{\[]", text)
            return (
                None if bare is None else (text[bare.start() :], strip_space(text[: bare.start()]))
            )
        before = text[:first] if self.leading else strip_space(text[:first])
        for close in self.closes:
            if not close:
                return _json_array(_after_marks(text, self.start), ""), before
            bodies = list(map(strip_space, texts_between(text, self.start, close)))
            if bodies:
                return _json_array(bodies, bodies[0]) if len(bodies) > 1 else bodies[0], before
            rest = strip_space(text[first + len(self.start) :])
            if final and self.repairs and rest.startswith(("{", "[")):
                return rest, before
        return None

    def _without_marks(self, text: str) -> str:
        text = strip_space(text)
        while text.startswith(self.start):
            text = strip_space(text[len(self.start) :])
        while marks := [each for each in self.ends if text.endswith(each)]:
            text = strip_space(text[: -len(marks[0])])
        return text


class JsonEnds:
    """Finds the ends of JSON values in text that grows. After a start mark it begins again.

    Without a mark only the first value counts: a call is all of the text from its first bracket.
    ``followed``: it counts also where another value has begun after it.
    """

    def __init__(self, starts: Sequence[str], *, followed: bool = False) -> None:
        self._starts = starts
        self._followed = followed
        self._longest = max(map(len, starts), default=0)
        self._seen = self._at = 0
        self._started_at = -1
        self._restart(0)

    @property
    def end(self) -> int:
        """The place after the last value that has ended, -1 without one."""
        return self._end

    def _restart(self, at: int) -> None:
        self._at, self._depth, self._quoted, self._escaped = at, 0, False, -1
        self._end = self._seen_end = -1
        self._more = False

    def new(self, text: str) -> bool:
        """Whether a value has ended since the last look; ``text`` is all of it."""
        begin = max(0, self._seen - self._longest + 1)
        marks = [at + len(mark) for mark in self._starts if (at := text.rfind(mark, begin)) >= 0]
        self._seen = len(text)
        if marks and max(marks) > self._started_at:
            self._started_at = max(marks)
            self._restart(self._started_at)
        for mark in _SYNTAX.finditer(text, self._at):
            self._read(mark[0], mark.start())
        self._at = len(text)
        ended, self._seen_end = self._end != self._seen_end, self._end
        return ended and (self._followed or not self._more)

    def _read(self, mark: str, at: int) -> None:
        if self._depth == 0:
            self._depth = int(mark in "{[")
            self._more = self._more or (self._end >= 0 > self._started_at and mark in "{[")
        elif self._quoted:
            if at != self._escaped:
                self._quoted = mark != '"'
                self._escaped = at + 1 if mark == "\\" else -1
        elif mark == '"':
            self._quoted = True
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end = at + 1


def _after_marks(text: str, start: str) -> Iterator[str]:
    """The JSON values after each mark: objects with semicolons between them, or the elements of
    one array."""
    for part in map(strip_space, text.split(start)):
        if part.startswith("{"):
            while (end := value_end(part)) is not None:
                yield part[:end]
                part = strip_space(part[end:])
                if not part.startswith(";"):
                    break
                part = strip_space(part[1:])
        elif part.startswith("["):
            yield from elements_of(part[: part.rfind("]") + 1]) or ()


def _json_array(values: Any, empty: str) -> str:
    listed = list(values)
    return "[" + ",".join(listed) + "]" if listed else empty


def _leading(text: str) -> Iterator[str]:
    """The whole objects at the beginning of an array."""
    text = strip_space(strip_space(text).removeprefix("["))
    while text.startswith("{") and (end := value_end(text)) is not None:
        yield text[:end]
        text = strip_space(text[end:])
        if not text.startswith(","):
            return
        text = strip_space(text[1:])


def read_calls(text: str, *, names_only: bool) -> tuple[ToolCall, ...] | None:
    """The calls in a JSON text; None if it is neither an array nor one call."""
    elements = elements_of(text)
    if elements is not None:
        read = (read_call(each, ("arguments", "parameters"), names_only) for each in elements)
        return tuple(each for each in read if each is not None)
    call = read_call(text, ("parameters", "arguments"), names_only)
    return None if call is None else (call,)


def read_call(text: str, keys: Sequence[str], names_only: bool) -> ToolCall | None:
    members = _members(text)
    if members is None:
        return None
    known = [member for member in members if member[0] in ("name", *keys)]
    fields = dict(known)
    written = fields.get("name", "")
    name = json.loads(written) if written.startswith('"') else None
    if len(fields) < len(known) or name is None or _SURROGATE.search(name):
        return None
    for key in keys:
        if key in fields:
            return ToolCall(name, fields[key])
    return ToolCall(name, "{}") if names_only else None


# -- JSON whose values stay as they were written ---------------------------------------------------


def elements_of(text: str) -> list[str] | None:
    """The elements of a JSON array, None if the text is not one."""
    values = _values(text, "[")
    return None if values is None else [value for _, value in values]


def _members(text: str) -> list[tuple[str, str]] | None:
    """The members of a JSON object, None if the text is not one."""
    return _values(text, "{")


def _values(text: str, opening: str) -> list[tuple[str, str]] | None:
    text = text.strip(" \t\n\r")
    closing = _CLOSING[opening]
    if not text.startswith(opening) or not text.endswith(closing):
        return None
    values: list[tuple[str, str]] = []
    at = _blank(text, 1)
    if text[at] == closing:
        return values if at == len(text) - 1 else None
    if _open(text).deep:
        return None
    while True:
        key = ""
        if opening == "{":
            member = _key(text, at)
            if member is None:
                return None
            key, at = member
        end = value_end(text, at)
        if end is None:
            return None
        values.append((key, text[at:end]))
        at = _blank(text, end)
        after = text[at : at + 1]
        if after == closing:
            return values if at == len(text) - 1 else None
        if after != ",":
            return None
        at = _blank(text, at + 1)


def _key(text: str, at: int) -> tuple[str, int] | None:
    """The key of a member, and the place of its value; None if there is none."""
    end = value_end(text, at)
    if text[at] != '"' or end is None:
        return None
    colon = _blank(text, end)
    if text[colon : colon + 1] != ":":
        return None
    return json.loads(text[at:end]), _blank(text, colon + 1)


def _blank(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    assert blank is not None
    return blank.end()


@dataclass(slots=True)
class _Open:
    """What is open at the end of a JSON text."""

    closing: list[str]
    quoted: bool = False
    escaped: bool = False
    deep: bool = False


def _open(text: str) -> _Open:
    state = _Open([])
    skipped = -1
    for match in _SYNTAX.finditer(text):
        mark, at = match[0], match.start()
        if state.quoted:
            if at != skipped:
                state.quoted = mark != '"'
                skipped = at + 1 if mark == "\\" else -1
        elif mark == '"':
            state.quoted = True
        elif mark in _CLOSING:
            state.closing.append(_CLOSING[mark])
            state.deep = state.deep or len(state.closing) > MAX_NESTING
        elif mark in "}]" and state.closing:
            state.closing.pop()
    state.escaped = skipped == len(text)
    return state


def _complete_json(text: str) -> str:
    """A JSON text with what its end lacks, empty if that is nothing."""
    state = _open(text)
    if not state.quoted and not state.closing:
        return ""
    end = ("\\" if state.escaped else "") + ('"' if state.quoted else "")
    return text + end + "".join(reversed(state.closing))
