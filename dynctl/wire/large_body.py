"""Decode a large JSON body in slices, and refuse one that would become too many values.

One call of the decoder holds the interpreter until it ends: 80 ms for four million numbers, and all
requests wait meanwhile, also where a thread calls it. Here a call decodes at most a window of the
text, or one string, so that a thread that decodes a large body can be interrupted. What a window
has is counted before it is decoded.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from dynctl.base.decode_errors import RequestError

#: Bytes from which a body is large: a smaller one has at most half as many values.
LARGE: Final = 64 * 1024
#: Values of one body, without the numbers of arrays of numbers: 65,536 messages with one part have
#: 393,216.
MOST_VALUES: Final = 524_288
#: Numbers in arrays of numbers: token ids and hashes.
MOST_NUMBERS: Final = 4 * 1024 * 1024
_WINDOW: Final = 32 * 1024
#: Bytes in which separators are counted by one call.
_COUNTED: Final = 1024 * 1024
#: Levels at which something is larger than a window; each costs the search of a window.
_MOST_OPEN: Final = 64

#: A string, an array of numbers, a string that does not end, or what separates values.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|\[[-+0-9.eE, \t\r\n]*+\]|["\[\]{},]', re.DOTALL)
#: Up to a bracket, or a string that does not end.
_BRACKET: Final = re.compile(
    rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+"|\[[-+0-9.eE, \t\r\n]*+\])*+["\[\]{}]', re.DOTALL
)
_AFTER: Final = re.compile(rb"[ \t\r\n]*+,")
_NUMBERS: Final = re.compile(rb"[-+0-9.eE, \t\r\n]*+")
_SCALAR: Final = re.compile(rb"[-+.\w]*+")
_SPACE: Final = re.compile(rb"[ \t\r\n]*+")
_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_QUOTE, _COMMA = b'",'
_OPENING: Final = b"[{"
_CLOSING: Final = b"]}"


def decode_large(body: bytes, most_numbers: int = MOST_NUMBERS) -> Any:
    """The JSON value of a body of any length; equal to ``msgspec.json.decode(body)``.

    Raises msgspec.DecodeError, UnicodeError, RecursionError, and RequestError (400) above
    `MOST_VALUES` or ``most_numbers``.
    """
    if len(body) <= _WINDOW:
        return msgspec.json.decode(body)
    return _Decoder(body, most_numbers).value()


class _Decoder:
    """One pass over a body. ``_at``: the next byte; ``_open``: the arrays and objects around it."""

    def __init__(self, body: bytes, most_numbers: int) -> None:
        self._body = body
        self._most_numbers = most_numbers
        self._at = 0
        self._open: list[list[Any] | dict[str, Any]] = []
        self._values = 0
        self._numbers = 0
        #: Whether the body may have too many values, so that they are counted.
        self._counts = self._separators() > MOST_VALUES

    def value(self) -> Any:
        self._skip_space()
        first = self._byte()
        if first not in _OPENING:
            return msgspec.json.decode(self._body)  # one string, or one number
        whole: list[Any] | dict[str, Any] = [] if first == _OPENING[0] else {}
        self._enter(whole)
        while self._open:
            self._step()
        self._skip_space()
        if self._at < len(self._body):
            raise self._malformed_here("trailing characters")
        return whole

    def _step(self) -> None:
        """Decode the values of the innermost container that fit in a window; where the next one
        does not, enter it or decode it alone."""
        start = self._at
        comma, end = self._search()
        if end is not None:
            self._take(start, end)
            self._at = end
            self._leave()
        elif comma is not None:
            if comma == start:
                raise self._malformed_here("invalid character")
            self._take(start, comma)
            self._at = comma + 1
            self._expect_value()
        else:
            self._large_value()

    def _search(self) -> tuple[int | None, int | None]:
        """(the last comma between values of the container, the byte that closes it) in the
        window from here."""
        body, start = self._body, self._at
        stop = min(start + _WINDOW, len(body))
        numbers = _NUMBERS.match(body, start, stop)
        flat = start if numbers is None else numbers.end()
        if flat > start and isinstance(self._open[-1], list):
            comma = body.rfind(b",", start, flat)
            if flat < len(body) and body[flat] == _CLOSING[0]:
                self._count(0, body.count(b",", start, flat) + 1)
                return None, flat
            if comma > start + _WINDOW // 2:
                self._count(0, body.count(b",", start, comma) + 1)
                return comma, None
        if self._counts or body[start] == _QUOTE:
            return self._search_counting(start, stop)
        return self._quick(start, stop)

    def _quick(self, start: int, stop: int) -> tuple[int | None, int | None]:
        """As `_search`: only brackets are looked at, for a body that cannot have too many values.
        A comma counts where it follows a value that ends with one."""
        body, comma_at, depth, at = self._body, None, 0, start
        while bracket := _BRACKET.match(body, at, stop):
            at = bracket.end()
            byte = body[at - 1]
            if byte in _OPENING:
                depth += 1
            elif byte == _QUOTE:  # the string ends outside of the window
                break
            elif not depth:
                return None, at - 1
            else:
                depth -= 1
                if not depth and (comma := _AFTER.match(body, at, stop)):
                    comma_at = comma.end() - 1
        # Strings and numbers of the container itself have commas that were not looked at.
        return (comma_at, None) if comma_at is not None else self._search_counting(start, stop)

    def _search_counting(self, start: int, stop: int) -> tuple[int | None, int | None]:
        """As `_search`, and what the values count."""
        body, comma_at, depth = self._body, None, 0
        values = numbers = 0
        counted = (0, 0)
        for token in _TOKEN.finditer(body, start, stop):
            at, end = token.span()
            byte = body[at]
            if byte == _COMMA:
                values += 1
                if not depth:
                    comma_at, counted = at, (values, numbers)
            elif byte == _QUOTE:
                if end == at + 1:  # the string ends outside of the window
                    break
            elif byte in _OPENING:
                values += 1
                if end == at + 1:
                    depth += 1
                else:
                    numbers += body.count(b",", at, end) + 1
            elif depth:
                depth -= 1
            else:
                self._count(values, numbers)
                return None, at
        self._count(*counted)
        return comma_at, None

    def _take(self, start: int, end: int) -> None:
        """Decode what is between two places of the innermost container, and add it."""
        inner, piece = self._open[-1], self._body[start:end]
        try:
            if isinstance(inner, list):
                inner += msgspec.json.decode(b"[%b]" % piece)
            else:
                inner |= msgspec.json.decode(b"{%b}" % piece)
        except msgspec.DecodeError as error:
            raise _error_at(error, start - 1) from None

    def _large_value(self) -> None:
        """The next value does not end in the window."""
        inner = self._open[-1]
        key = None
        if isinstance(inner, dict):
            key = self._string()
            self._skip_space()
            if self._byte() != ord(":"):
                raise self._malformed_here("expected ':'")
            self._at += 1
        self._skip_space()
        byte = self._byte()
        value: Any
        if byte in _OPENING:
            value = [] if byte == _OPENING[0] else {}
        elif byte == _QUOTE:
            value = self._string()
        else:
            value = self._scalar()
        if isinstance(inner, list):
            inner.append(value)
        else:
            assert key is not None
            inner[key] = value
        self._count(2)
        if byte in _OPENING:
            self._enter(value)
        else:
            self._after_value()

    def _string(self) -> str:
        """The string that begins here, in one call: copying is fast."""
        self._skip_space()
        body, start = self._body, self._at
        if self._byte() != _QUOTE:
            raise self._malformed_here("invalid character")
        end = start
        while True:
            end = body.find(b'"', end + 1)
            if end < 0:
                raise msgspec.DecodeError("Input data was truncated")
            before = end - 1
            while body[before] == 0x5C:  # an even number of backslashes escapes each other
                before -= 1
            if (end - before) % 2:
                break
        self._at = end + 1
        try:
            return msgspec.json.decode(body[start : end + 1], type=str)
        except msgspec.DecodeError as error:
            raise _error_at(error, start) from None

    def _scalar(self) -> Any:
        """A number, true, false or null that begins here."""
        start = self._at
        scalar = _SCALAR.match(self._body, start, start + _WINDOW)
        self._at = start if scalar is None else scalar.end()
        try:
            return msgspec.json.decode(self._body[start : self._at])
        except msgspec.DecodeError as error:
            raise _error_at(error, start) from None

    def _enter(self, container: list[Any] | dict[str, Any]) -> None:
        if len(self._open) >= _MOST_OPEN:
            raise RecursionError
        self._open.append(container)
        self._at += 1
        self._skip_space()

    def _leave(self) -> None:
        """The byte here closes the innermost container."""
        inner = self._open.pop()
        if self._byte() != _CLOSING[isinstance(inner, dict)]:
            raise self._malformed_here("invalid character")
        self._at += 1
        if self._open:
            self._after_value()

    def _after_value(self) -> None:
        self._skip_space()
        byte = self._byte()
        if byte == _COMMA:
            self._at += 1
            self._expect_value()
        elif byte not in _CLOSING:
            raise self._malformed_here("expected ',' or ']'")

    def _expect_value(self) -> None:
        """After a comma: the container must not end here."""
        self._skip_space()
        if self._byte() in _CLOSING:
            raise self._malformed_here("trailing comma in array or object")

    def _byte(self) -> int:
        if self._at >= len(self._body):
            raise msgspec.DecodeError("Input data was truncated")
        return self._body[self._at]

    def _skip_space(self) -> None:
        while space := _SPACE.match(self._body, self._at, self._at + _WINDOW):
            if space.end() == self._at:
                return
            self._at = space.end()

    def _separators(self) -> int:
        """An upper bound of the values: strings have commas and brackets too."""
        body, total = self._body, 0
        for start in range(0, len(body), _COUNTED):
            total += sum(body.count(mark, start, start + _COUNTED) for mark in (b",", b"[", b"{"))
        return total

    def _count(self, values: int, numbers: int = 0) -> None:
        self._values += values
        self._numbers += numbers
        if self._values > MOST_VALUES:
            raise _too_many("values", MOST_VALUES, "send fewer messages, parts, prompts or tools")
        if self._numbers > self._most_numbers:
            raise _too_many("numbers in arrays", self._most_numbers, "send fewer token ids")

    def _malformed_here(self, problem: str) -> msgspec.DecodeError:
        return msgspec.DecodeError(f"JSON is malformed: {problem} (byte {self._at})")


def _error_at(error: msgspec.DecodeError, offset: int) -> msgspec.DecodeError:
    """The error of a piece that begins at ``offset``, with the place in the body."""
    text = _BYTE.sub(lambda match: f"(byte {int(match[1]) + offset})", str(error))
    return msgspec.DecodeError(text)


def _too_many(what: str, most: int, instead: str) -> RequestError:
    problem = f"the body has more than {most} {what}, the maximum: {instead}"
    return RequestError(400, "too_many_values", None, problem)
