"""Cut a long msgpack array into short ones, a slice at a time.

The cache of a worker arrives as one document, and decoding 100 MB of it would block the event loop
for too long. msgpack cannot skip an element without reading it, and reading in Python is slow. So a
boundary between elements is guessed (the next position with the leading bytes of the first element)
and then proved: if exactly n elements end exactly there, the guess is right, because msgpack
documents are prefix free. A wrong guess costs time and never gives a wrong result.
"""

import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dynctl.base.decode_errors import WireError

SLICE_BYTES: Final = 48 * 1024
"""About 230 events of one block: checked in 50 us, decoded in 1 ms."""

_LONGEST_TAIL: Final = 512  # bytes of the fields after the array in its map
_WIDER: Final = 4

_FIXMAP, _FIXARRAY, _FIXSTR = 0x80, 0x90, 0xA0
_ARRAY16, _ARRAY32 = 0xDC, 0xDD

_raws: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class LongArray:
    """An undecoded array; ``name``: the name of its map, ``fields``: the fields after the array."""

    name: str
    fields: dict[str, Any]
    _document: memoryview
    _count: int
    _start: int
    _end: int

    def __len__(self) -> int:
        """The number of elements in the array's header."""
        return self._count

    def slices(self) -> Iterator[bytes]:
        """The elements in order, as well-formed msgpack arrays of about SLICE_BYTES.

        Can be called again. Raises WireError at the first slice that is not well-formed.
        """
        at, left = self._start, self._count
        mark = _leading_bytes(self._document[at : self._end]) if left else b""
        while left:
            array, count, at = self._slice(at, left, mark)
            left -= count
            yield array
        if at != self._end:
            raise WireError(self.name, f"{self._end - at:,} bytes after the last element")

    def _slice(self, at: int, left: int, mark: bytes) -> tuple[bytes, int, int]:
        size = SLICE_BYTES if mark else self._end - at
        while at + size < self._end:
            piece = bytes(self._document[at : at + size])
            boundary = piece.rfind(mark, 1)
            count = piece.count(mark, 0, boundary) if boundary > 0 else 0
            if 0 < count < left:
                array = _array(piece[:boundary], count)
                with suppress(msgspec.DecodeError):
                    _raws.decode(array)
                    return array, count, at + boundary
            # The element is longer than the piece, or contains the mark: take a longer piece.
            size *= _WIDER
        array = _array(bytes(self._document[at : self._end]), left)
        try:
            _raws.decode(array)
        except msgspec.DecodeError as error:
            raise WireError(self.name, str(error)) from None
        return array, left, self._end


def find_long_array(document: memoryview, key: str, following: str) -> LongArray | None:
    """The array when the document is ``{NAME: {key: [...], following: ..., ...}}`` in that order.

    None for any other document, well-formed or not.
    """
    try:
        if document[0] != _FIXMAP | 1:
            return None
        name, at = _short_string(document, 1)
        fields = document[at] ^ _FIXMAP
        first_key, at = _short_string(document, at + 1)
        if first_key != key or not 2 <= fields < 16:
            return None
        count, start = _array_header(document, at)
        end, tail = _tail(document, start, fields - 1, following)
    except (IndexError, ValueError, struct.error, msgspec.DecodeError):
        return None
    return LongArray(name, tail, document, count, start, end)


def _tail(
    document: memoryview, start: int, fields: int, following: str
) -> tuple[int, dict[str, Any]]:
    """The offset and the values of the map's last ``fields`` fields; ``following`` is the first."""
    first = max(start, len(document) - _LONGEST_TAIL)
    piece = bytes(document[first:])
    at = piece.rfind(msgspec.msgpack.encode(following))
    if at < 0:
        raise ValueError(f"no field {following}")
    read = msgspec.msgpack.decode(bytes([_FIXMAP | fields]) + piece[at:], type=dict[str, Any])
    return first + at, read


def _short_string(document: memoryview, at: int) -> tuple[str, int]:
    length = document[at] ^ _FIXSTR
    if length >= 32:
        raise ValueError("not a short string")
    return str(document[at + 1 : at + 1 + length], "utf-8"), at + 1 + length


def _array_header(document: memoryview, at: int) -> tuple[int, int]:
    kind = document[at]
    if kind == _ARRAY32:
        return struct.unpack_from(">I", document, at + 1)[0], at + 5
    if kind == _ARRAY16:
        return struct.unpack_from(">H", document, at + 1)[0], at + 3
    if kind & 0xF0 == _FIXARRAY:
        return kind & 0x0F, at + 1
    raise ValueError("not an array")


def _leading_bytes(elements: memoryview) -> bytes:
    """The header and the first key of the first element, b"" if it is not a map."""
    try:
        if elements[0] & 0xF0 != _FIXMAP:
            return b""
        _, end = _short_string(elements, 1)
    except (IndexError, ValueError):
        return b""
    return bytes(elements[:end]) if end > 4 else b""


def _array(elements: bytes, count: int) -> bytes:
    return struct.pack(">BI", _ARRAY32, count) + elements
