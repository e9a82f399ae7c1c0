"""Messages made from valid ones: bytes changed, values replaced, frames dropped or repeated.

A message is a tuple of frames; most formats have one. The same seed gives the same messages.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

Message = tuple[bytes, ...]

LONGEST: Final = 1 << 16  # bytes of one frame: what the limits refuse needs no larger input
_POOL: Final = 500
#: Values that decoders met with surprise: bounds, other types, depth, control characters.
_NUMBERS: Final = (0, -1, 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
_VALUES: Final[tuple[Callable[[], Any], ...]] = (
    lambda: None,
    lambda: True,
    lambda: 1e308,
    lambda: -0.5,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: "",
    lambda: "x" * 5000,
    lambda: "\x1b]0;title\x07\x9b31m\u202e\x00",
    lambda: "\ud800",
    list,
    dict,
    lambda: [[]] * 300,
    lambda: _nested(60),
    lambda: _nested(3000),
    lambda: {"type": "BlockStored"},
)
_BYTES: Final = (
    b"\x00",
    b"\xff",
    b"\xc1",
    b"\xdf\xff\xff\xff\xff",
    b"{",
    b"[",
    b'"',
    b"\n",
    b"NaN",
)


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


class Mutator:
    """Endless mutants of ``seeds``; inputs that `keep` reports as new become seeds as well."""

    def __init__(self, seeds: Sequence[Message], seed: int) -> None:
        self._random = random.Random(seed)
        self._seeds = list(seeds)
        self._fixed = len(self._seeds)

    def keep(self, message: Message) -> None:
        """Use ``message`` as a seed: it led to an outcome that no other did."""
        if len(self._seeds) - self._fixed >= _POOL:
            self._seeds[self._fixed + self._random.randrange(_POOL)] = message
        else:
            self._seeds.append(message)

    def __next__(self) -> Message:
        choose = self._random
        # Half of the mutants start from a valid message, so that most of it is read.
        fixed = choose.random() < 0.5
        frames = list(self._seeds[choose.randrange(self._fixed if fixed else len(self._seeds))])
        if choose.random() < 0.05:
            return self._frames(frames)
        place = choose.randrange(len(frames))
        for _ in range(choose.choice((1, 1, 1, 2, 4))):
            frames[place] = self._frame(frames[place])[:LONGEST]
        return tuple(frames)

    def _frames(self, frames: list[bytes]) -> Message:
        place = self._random.randrange(len(frames))
        how = self._random.randrange(3)
        if how == 0:
            del frames[place]
        elif how == 1:
            frames.insert(place, frames[place])
        else:
            self._random.shuffle(frames)
        return tuple(frames) or (b"",)

    def _frame(self, data: bytes) -> bytes:
        if self._random.random() < 0.5:
            replaced = self._values(data)
            if replaced is not None:
                return replaced
        return self._bytes(data)

    def _bytes(self, data: bytes) -> bytes:
        choose = self._random
        at = choose.randrange(len(data) + 1)
        end = min(len(data), at + choose.choice((1, 2, 8, 64, 1024)))
        match choose.randrange(7):
            case 0 if data:
                at = min(at, len(data) - 1)
                return data[:at] + bytes([data[at] ^ (1 << choose.randrange(8))]) + data[at + 1 :]
            case 1:
                return data[:at] + choose.randbytes(choose.randrange(1, 9)) + data[at:]
            case 2:
                return data[:at] + data[end:]
            case 3:
                return data[:end] + data[at:]
            case 4:
                return data[:at]
            case 5:
                return data[:at] + choose.choice(_BYTES) + data[end:]
            case _:
                other = choose.choice(choose.choice(self._seeds))
                return data[:at] + other[choose.randrange(len(other) + 1) :]

    def _values(self, data: bytes) -> bytes | None:
        """``data`` with one value replaced, removed or repeated; None if it is not JSON."""
        decode: Callable[[bytes], Any]
        encode: Callable[[Any], bytes]
        if data[:1] in (b"{", b"["):
            decode, encode = json.loads, _json
        else:
            decode, encode = msgspec.msgpack.decode, msgspec.msgpack.encode
        try:
            value = decode(data)
            places = list(_places(value))
            if not places:
                return None
            holder, key = self._random.choice(places)
            how = self._random.random()
            if how < 0.7:
                holder[key] = self._value(holder[key])
            elif how < 0.85:
                del holder[key]
            elif isinstance(holder, list):
                holder += holder[-100:]
            else:
                holder[str(key)[:40] + "x"] = holder[key]
            return encode(value)
        except (ValueError, TypeError, OverflowError, RecursionError, UnicodeError):
            return None

    def _value(self, old: Any) -> Any:
        choose = self._random
        if isinstance(old, int | float) and choose.random() < 0.4:
            return old + choose.choice((-1, 1))
        if choose.random() < 0.4:
            return choose.choice(_NUMBERS) * choose.choice((1, 1, -1))
        return choose.choice(_VALUES)()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _places(value: Any, most: int = 2000) -> Sequence[tuple[Any, Any]]:
    """(container, key) of the values in ``value``, at most ``most``."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < most:
        holder = waiting.pop()
        if isinstance(holder, dict):
            pairs: list[tuple[Any, Any]] = list(holder.items())
        elif isinstance(holder, list):
            pairs = list(enumerate(holder[:200]))
        else:
            continue
        found += [(holder, key) for key, _ in pairs]
        waiting += [inner for _, inner in pairs]
    return found
