"""Find a list of calls in text, as the regular expression of Dynamo 1.6 does, in linear time.

The expression is ``LIST = "[" (CALL "," blank*)* (CALL blank*)+ "]"``, where a CALL has arguments
``name=text,``. Its text is what is left of a line, so many readings of one text are possible, and
which of them counts follows from the order in which a matcher tries them. Python's ``re`` tries
them one after the other; here an automaton follows all of them at the same time.
"""

import unicodedata
from typing import Final

from dynctl.tokenization.tool_calls.calls import SPACE

# Each character stands for a class; these are the ones that the expression distinguishes.
_LETTER, _WORD, _NEWLINE, _SPACE, _OTHER = "awns."
_MARKS: Final = "[](),="
_ALL: Final = _MARKS + _LETTER + _WORD + _SPACE + _OTHER
_BLANK: Final = _SPACE + _NEWLINE
_JOINERS: Final = "\u200c\u200d"
# Letters in circles and squares: symbols that Unicode calls alphabetic.
_ENCLOSED: Final = (
    range(0x24B6, 0x24EA),
    range(0x1F130, 0x1F14A),
    range(0x1F150, 0x1F16A),
    range(0x1F170, 0x1F18A),
)


def _is_word(char: str) -> bool:
    kind = unicodedata.category(char)
    enclosed = any(ord(char) in each for each in _ENCLOSED)
    return kind[0] in "LM" or kind in ("Nd", "Nl", "Pc") or char in _JOINERS or enclosed


class _Classes(dict[int, str]):
    def __missing__(self, code: int) -> str:
        char = chr(code)
        if char in SPACE:
            return _SPACE
        return _WORD if _is_word(char) else _OTHER


_CLASSES: Final = _Classes(
    {ord(each): each for each in _MARKS}
    | dict.fromkeys((*range(65, 91), *range(97, 123)), _LETTER)
    | {ord("\n"): _NEWLINE}
)
for _code in range(128):
    _CLASSES.setdefault(_code, _CLASSES[_code])

Expression = tuple["str | Expression", ...]
"""An operator and its operands; a class, or several, is one character of these classes."""


def _some(kinds: str) -> Expression:
    return ("any", kinds)


def _all(*parts: Expression) -> Expression:
    return ("all", *parts)


def _many(part: Expression, *, lazy: bool = False) -> Expression:
    return ("lazy" if lazy else "many", part)


def _maybe(part: Expression) -> Expression:
    return ("maybe", part)


def _call(end: Expression) -> Expression:
    """A call. ``end``: the white space that its last argument may end with."""
    name = _all(_some(_LETTER), _many(_some(_LETTER)), _many(_some(_LETTER + _WORD)))
    argument = _all(name, _some("="), _many(_some(_ALL), lazy=True))
    blank = _many(_some(_BLANK))
    more = _many(_all(argument, _some(","), blank))
    return _all(name, _some("("), more, _maybe(_all(argument, end)), _some(")"))


def _list() -> Expression:
    blank = _many(_some(_BLANK))
    first = _many(_all(_call(_maybe(_some(_BLANK))), _some(","), blank))
    last = _all(_call(blank), blank)
    return _all(_some("["), first, last, _many(last), _some("]"))


class _Automaton:
    """All readings of a text at once. ``backward``: from the end of one, to its first character.

    A state is the places in the expression that readings have reached, the one that counts first.
    States are made when they are met; the expression is fixed, so they are few.
    """

    def __init__(self, expression: Expression, *, backward: bool) -> None:
        self._backward = backward
        # A place reads a character (its classes, the next place) or is a choice of places.
        self._reads: dict[int, tuple[str, int]] = {}
        self._choices: dict[int, tuple[int, ...]] = {}
        self._places = 1
        self._start = self._compile(expression, 0)
        self._states: dict[tuple[int, ...], int] = {}
        self._rows: list[dict[str, int]] = []
        self._members: list[tuple[int, ...]] = []
        self._matched: list[bool] = []
        self._first = self._state(self._closed([self._start]))

    def last_match(self, kinds: str) -> int | None:
        """The length of what is read until the reading that counts is whole, None without one."""
        state, found = self._first, None
        rows, matched = self._rows, self._matched
        for at, kind in enumerate(kinds, 1):
            following = rows[state].get(kind)
            if following is None:
                following = self._follow(state, kind)
            state = following
            if matched[state]:
                found = at
            elif not self._members[state]:
                break
        return found

    def _place(self) -> int:
        self._places += 1
        return self._places - 1

    def _choice(self, *places: int) -> int:
        place = self._place()
        self._choices[place] = places
        return place

    def _compile(self, expression: Expression, following: int) -> int:
        """The place where an expression begins, after which comes another place."""
        operator, *operands = expression
        if operator == "any":
            place = self._place()
            self._reads[place] = (str(operands[0]), following)
            return place
        parts = [each for each in operands if not isinstance(each, str)]
        if operator == "all":
            for part in parts if self._backward else reversed(parts):
                following = self._compile(part, following)
            return following
        if operator == "maybe":
            return self._choice(self._compile(parts[0], following), following)
        place = self._place()
        again = self._compile(parts[0], place)
        self._choices[place] = (following, again) if operator == "lazy" else (again, following)
        return place

    def _closed(self, places: list[int]) -> tuple[int, ...]:
        """The places that read a character, in their order, or 0 for a whole reading."""
        found: dict[int, None] = {}
        seen: set[int] = set()
        stack = places[::-1]
        while stack:
            place = stack.pop()
            if place in seen:
                continue
            seen.add(place)
            if place in self._choices:
                stack.extend(reversed(self._choices[place]))
                continue
            found[place] = None
            if place == 0 and not self._backward:
                break  # what comes after it does not count any more
        return tuple(sorted(found) if self._backward else found)

    def _state(self, members: tuple[int, ...]) -> int:
        state = self._states.get(members)
        if state is None:
            state = self._states[members] = len(self._rows)
            self._rows.append({})
            self._members.append(members)
            self._matched.append(0 in members)
        return state

    def _follow(self, state: int, kind: str) -> int:
        members = self._members[state]
        places = [
            self._reads[place][1] for place in members if place and kind in self._reads[place][0]
        ]
        # A list may begin at each character, as long as none has been found.
        if not self._backward and self._start in members:
            places.append(self._start)
        following = self._rows[state][kind] = self._state(self._closed(places))
        return following


_FORWARD: Final = _Automaton(_list(), backward=False)
_BACKWARD: Final = _Automaton(_list(), backward=True)


def find_list(text: str) -> tuple[int, int] | None:
    """The place of the first list of calls in a text and the place after it."""
    kinds = text.translate(_CLASSES)
    end = _FORWARD.last_match(kinds)
    if end is None:
        return None
    length = _BACKWARD.last_match(kinds[:end][::-1])
    assert length is not None
    return end - length, end
