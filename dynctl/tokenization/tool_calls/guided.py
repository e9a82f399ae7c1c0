"""Calls that a request forces: the engine may write nothing but their JSON.

With ``tool_choice`` ``required`` the text is an array of calls, with a named function it is the
arguments of that function. So there is no mark to wait for: a call is passed on as it comes, once
its name is known and its arguments have begun. What engines write that do not keep to the schema is
read as Dynamo 1.6.1 reads it, as observed.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

from dynctl.tokenization.tool_calls.calls import (
    MAX_CALLS,
    SPACE,
    CallFormat,
    CallPiece,
    Parsed,
    ToolCall,
    ToolCallError,
    first_mark,
    strip_space,
)
from dynctl.tokenization.tool_calls.json_calls import JsonEnds, elements_of, read_call, read_calls
from dynctl.tokenization.tool_calls.json_values import read_value
from dynctl.tokenization.tool_calls.splitter import Part, ToolCallSplitter

_ARGUMENTS: Final = ("arguments", "parameters")
_OPENING: Final = ("{", "[")

_Sent = dict[int, tuple[str | None, str]]
"""New pieces of calls by their number: the name, if this is the first piece, and arguments."""


class _AnyMark:
    """What may begin calls after the first ones, where the model's card has no parser."""

    starts: tuple[str, ...] = (
        "<TOOLCALL>",
        "<tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "functools[",
        "[{",
        "{",
    )
    ends: tuple[str, ...] = ()
    loose_starts: tuple[str, ...] = ()
    cuts = hides = False
    tried = ""

    def may_begin(self, text: str) -> bool:
        return False

    def parse(self, text: str, *, final: bool) -> Parsed:
        return Parsed((), text)

    def end(self, text: str, *, seen: int = 0) -> int | None:
        return len(text)


class GuidedSplitter(ToolCallSplitter):
    """Separates forced calls in the text of one answer; as ToolCallSplitter.

    ``form``: of the parser in the model's card, which reads what is not JSON; None without one.
    ``function``: the name that every call has to have; None if any function may be called.
    """

    def __init__(
        self, form: CallFormat | None, function: str | None, *, by_text: bool = False
    ) -> None:
        super().__init__(_AnyMark() if form is None else form, by_text=by_text)
        self._function = function
        self._hold("")

    def _hold(self, text: str) -> None:
        self._inside = True
        self._values: JsonEnds | None = JsonEnds((), followed=True)
        self._cursor = _Cursor(self._function)
        super()._hold(text)

    @property
    def holding(self) -> bool:
        return self._inside or bool(self._begun)

    @property
    def _inside_call(self) -> bool:
        return self._inside

    def _feed(self, piece: str) -> list[Part]:
        if self._inside:
            self._held += piece
            self._check_held()
            sent = self._cursor.feed(self._held)
            return self._ended_parts(sent)
        text, self._begun = self._begun + piece, ""
        parts = self._outside(text)
        if first_mark(self._held, self._starts) == 0:
            parts += self._ended_parts({})
        return parts

    def end(self) -> Part | None:
        begun, held, inside = self._begun, self._held, self._inside
        self._begun = self._held = ""
        self._inside = False
        if inside and held:
            return self._last(self._rebuild(held, {}))
        return self._last(Part(begun)) if begun else None

    def cut_text(self, text: str) -> str:
        """As in ToolCallSplitter; without a mark all of the text was to be calls."""
        if first_mark(text, self.form.starts) is None:
            return ""
        return super().cut_text(text)

    def _ended_parts(self, sent: _Sent) -> list[Part]:
        """The parts of the held text, whose calls may now be whole."""
        end = self._whole_value()
        if end is None:
            pieces = self._pieces(sent)
            return [Part("", pieces=pieces)] if pieces else []
        held, self._held = self._held, ""
        self._inside = False
        return [self._rebuild(held[:end], sent), *self._outside(held[end:])]

    def _whole_value(self) -> int | None:
        """The length of the held text if it is the JSON that was asked for."""
        if self._values is None or not self._values.new(self._held):
            return None
        end = self._values.end
        # Text after the first value only makes more than one of it, so one look is enough.
        self._values = None
        value = _value(self._held[:end])
        whole = isinstance(value, dict) if self._function else isinstance(value, list) and value
        return end if whole else None

    def _rebuild(self, text: str, sent: _Sent) -> Part:
        """The part for a text that is over: the rest of its calls, after what was sent of them."""
        calls = self._read(text)
        kept = {n: call for n, call in calls.items() if self._function in (None, call.name)}
        pieces = list(self._pieces(sent))
        before = self._cursor.sent
        for number, call in kept.items():
            arguments = before.get(number)
            if arguments is None:
                pieces.append(self._piece(number, call.name, call.arguments, call.id))
            elif call.arguments.startswith(arguments) and call.arguments != arguments:
                pieces.append(self._piece(number, None, call.arguments[len(arguments) :]))
        content: str | None = "" if calls or sent else text
        if before and not kept and not sent:
            content = None
        self.calls += max((number + 1 for number in (*kept, *before)), default=0)
        return Part(content, pieces=tuple(pieces))

    def _pieces(self, sent: _Sent) -> tuple[CallPiece, ...]:
        return tuple(self._piece(number, *piece) for number, piece in sent.items())

    def _piece(self, number: int, name: str | None, arguments: str, call_id: str = "") -> CallPiece:
        number += self.calls
        if number >= MAX_CALLS:
            raise ToolCallError(f"made more than {MAX_CALLS} tool calls")
        return CallPiece(number, name, arguments, call_id)

    def _read(self, text: str) -> dict[int, ToolCall]:
        """The calls in a text, by their number."""
        if not self._function and (array := _array(text)):
            return array
        bare = strip_space(text)
        begin = first_mark(bare, _OPENING)
        calls = read_calls(bare[begin or 0 :], names_only=False) or ()
        if not calls and self._function and isinstance(_value(text), dict):
            calls = (ToolCall(self._function, text.strip(" \t\n\r")),)
        if not calls:
            calls = self.form.parse(text, final=False).calls
        kept = [each for each in calls if self._function in (None, each.name)]
        # Numbers are given after the calls of other functions are removed; without any they stay,
        # so that the text of such calls is not shown.
        return dict(enumerate(kept or calls))


def _value(text: str) -> Any:
    """The value of a JSON text, None for any other text."""
    try:
        return read_value(text)
    except ValueError:
        return None


def _array(text: str) -> dict[int, ToolCall]:
    """The calls in an array by their place; elements that are not calls have none."""
    elements = elements_of(text) if isinstance(_value(text), list) else None
    read = ((n, read_call(each, _ARGUMENTS, False)) for n, each in enumerate(elements or ()))
    return {number: call for number, call in read if call is not None}


class _Cursor:
    """Reads the JSON of calls as it grows, each character once.

    ``sent``: the arguments that were passed on, by the number of the call.
    """

    def __init__(self, function: str | None) -> None:
        self.sent: dict[int, str] = {}
        self._function = function
        self._at = self._depth = 0
        self._quoted = self._escaped = self._off = False
        # The depth of the members of a call; and whether there was a bracket.
        self._members, self._begun = 1, False
        self._literal = -1
        self._call = _Call()
        self._number = 0
        self._new: _Sent = {}

    def feed(self, text: str) -> _Sent:
        """What the new end of the text adds to the calls; ``text`` is all of it."""
        self._new = {}
        while self._at < len(text) and not self._off:
            mark = text[self._at]
            self._at += 1
            if self._quoted:
                self._in_string(text, mark)
            elif self._function:
                self._read_arguments(mark)
            else:
                self._array(text, mark)
        self._pass_on(text)
        return self._new

    def _in_string(self, text: str, mark: str) -> None:
        if self._escaped:
            self._escaped = False
        elif mark == "\\":
            self._escaped = True
        elif mark == '"':
            self._quoted = False
            if self._literal >= 0:
                self._read(text[self._literal : self._at])
                self._literal = -1

    def _read_arguments(self, mark: str) -> None:
        """A character of the arguments, which are all of the text but for blanks before them."""
        call = self._call
        if call.begin < 0:
            if mark == "{":
                call.begin, self._depth = self._at - 1, 1
            else:
                self._off = mark not in SPACE
        elif call.end >= 0:
            return
        elif mark == '"':
            self._quoted = True
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
            if self._depth == 0:
                call.end = self._at

    def _array(self, text: str, mark: str) -> None:
        call = self._call
        in_call = self._depth == self._members
        if mark in "{[":
            self._open(mark, call, value=in_call and call.slot == "value")
            self._commit()
        elif mark in "}]":
            self._close(text, mark, call)
        elif not self._begun:
            self._off = mark not in SPACE
        elif mark == '"':
            self._quoted = True
            self._literal = self._at - 1 if in_call and call.reads_text else -1
        elif in_call:
            call.take(mark)

    def _open(self, mark: str, call: "_Call", *, value: bool) -> None:
        if not self._begun:
            self._members, self._begun = 2 if mark == "[" else 1, True
            value = False
        begins = mark == "{" and self._depth == self._members - 1
        self._depth += 1
        if mark == "{" and value and call.key in _ARGUMENTS:
            call.blocked = call.blocked or call.begin >= 0
            if call.begin < 0:
                call.begin, call.inside = self._at - 1, True
        elif begins:
            call.slot, call.key = "key", ""
        elif value and call.key == "name":
            call.blocked = True

    def _close(self, text: str, mark: str, call: "_Call") -> None:
        arguments = mark == "}" and call.inside and self._depth == self._members + 1
        whole = mark == "}" and self._depth == self._members
        self._depth -= 1
        if arguments:
            call.end, call.inside = self._at, False
        if arguments or whole:
            self._pass_on(text)
        if whole and not arguments:
            self._number += 1
            self._call = _Call()

    def _read(self, literal: str) -> None:
        """A name, or the key of a member."""
        read = _value(literal)
        if read is None:
            return
        call = self._call
        if call.slot == "key":
            if read in _ARGUMENTS:
                call.blocked = call.blocked or call.aliased
                call.aliased = True
            call.key, call.slot = read, "colon"
        elif call.slot == "value" and call.key == "name":
            call.name = read

    def _commit(self) -> None:
        call = self._call
        name = self._function or call.name
        if not call.committed and not call.blocked and call.begin >= 0 and name is not None:
            call.committed = True
            self.sent[self._number] = ""
            self._new[self._number] = (name, "")

    def _pass_on(self, text: str) -> None:
        self._commit()
        call = self._call
        if not call.committed or call.blocked:
            return
        start = call.begin + len(self.sent[self._number])
        more = text[start : self._at if call.end < 0 else call.end]
        if more:
            self.sent[self._number] += more
            name, before = self._new.get(self._number, (None, ""))
            self._new[self._number] = (name, before + more)


@dataclass(slots=True)
class _Call:
    """A call that is being read.

    ``begin`` and ``end``: of its arguments, -1 before they are seen. ``blocked``: nothing more of
    it is passed on. ``slot``: what comes next in it, with ``key`` of its member.
    """

    name: str | None = None
    begin: int = -1
    end: int = -1
    inside: bool = False
    aliased: bool = False
    blocked: bool = False
    committed: bool = False
    slot: Literal["key", "colon", "value"] = "key"
    key: str = ""

    @property
    def reads_text(self) -> bool:
        """Whether the next string is a key or the name of the function."""
        return self.slot == "key" or (self.slot == "value" and self.key == "name")

    def take(self, mark: str) -> None:
        """A character between the members, or of a value without quotes and brackets."""
        if mark == ":" and self.slot == "colon":
            self.slot = "value"
        elif mark == ",":
            self.slot, self.key = "key", ""
        elif mark not in SPACE and self.slot == "value" and self.key in ("name", *_ARGUMENTS):
            self.blocked = True
