"""A hash table of u64 keys in arrays: about 18 bytes an entry where dicts of ints take 120.

An entry is one number: the key's remainder above the value. The key itself is kept by the caller,
who compares it, since different keys may have equal remainders. The low bits of the remainder
choose one of `_SHARDS` arrays, which grow independently, so that no single entry waits for the
growth of the whole table. In its array an entry is at the place of the other bits or, where others
are there, after it (open addressing).
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from operator import mod

VALUE_BITS = 38
_PRIME = 2**26 - 5
_VALUE = (1 << VALUE_BITS) - 1
_SHARD_BITS = 10
_SHARDS = 1 << _SHARD_BITS
_LOW = _SHARDS - 1
_PLACE = VALUE_BITS + _SHARD_BITS
_FIRST_SIZE = 8
_REACH = 40
"""An entry is at most so many places after its own."""
_NEAR = 10
"""An entry that finds no place so near lets its array grow, if the table is more than `_FULL` full:
each operation takes longer the fuller it is."""
_FULL = 0.65
# Stands for a shard without entries; the remainder is that of no key.
_NO_SHARD = array("Q", (2**64 - 1,))


class PackedTable:
    """Values from 1 to 2**38 - 1 under u64 keys that the caller keeps."""

    __slots__ = ("_count", "_crowded", "_shards")

    def __init__(self) -> None:
        self._shards = [_NO_SHARD] * _SHARDS
        self._count = 0
        """entries"""
        self._crowded: dict[int, tuple[int, ...]] = {}
        """remainder -> values that found no place; only where many keys are chosen to be close"""

    def find(self, key: int, is_meant: Callable[[int, int], bool]) -> int:
        """The value of ``key`` for which ``is_meant(value, key)``; 0 if there is none."""
        rest = key % _PRIME
        shard = self._shards[rest & _LOW]
        size = len(shard)
        at = (rest >> _SHARD_BITS) % size
        end = at + _REACH
        while entry := shard[at if at < size else at % size]:
            if entry >> VALUE_BITS == rest and is_meant(entry & _VALUE, key):
                return entry & _VALUE
            at += 1
            if at == end:
                break
        if self._crowded:
            for value in self._crowded.get(rest, ()):
                if is_meant(value, key):
                    return value
        return 0

    def first(self, key: int) -> int:
        """The first value that may be of ``key``; 0 only if there is none."""
        rest = key % _PRIME
        shard = self._shards[rest & _LOW]
        size = len(shard)
        at = (rest >> _SHARD_BITS) % size
        end = at + _REACH
        while entry := shard[at if at < size else at % size]:
            if entry >> VALUE_BITS == rest:
                return entry & _VALUE
            at += 1
            if at == end:
                break
        return self._crowded[rest][0] if rest in self._crowded else 0

    def add(self, key: int, value: int) -> None:
        """Add a value to ``key``."""
        self._count += 1
        rest = key % _PRIME
        shard = self._shards[rest & _LOW]
        at = (rest >> _SHARD_BITS) % len(shard)
        if shard[at]:
            self._place(rest, rest << VALUE_BITS | value)
        else:
            shard[at] = rest << VALUE_BITS | value

    def add_new(
        self, keys: Sequence[int], value: int, is_meant: Callable[[int, int], bool]
    ) -> bool:
        """Give the keys the values from ``value`` on.

        False, and nothing is added, if one of them occurs twice or has a value (as in `find`).
        """
        if self._crowded:
            return self._add_one_by_one(keys, value, is_meant)
        shards, first = self._shards, value
        for rest in map(mod, keys, repeat(_PRIME)):
            shard = shards[rest & _LOW]
            size = len(shard)
            at = (rest >> _SHARD_BITS) % size
            if entry := shard[at]:
                near, end = at + _NEAR, at + _REACH
                while entry:
                    if entry >> VALUE_BITS == rest:
                        key, other = keys[value - first], entry & _VALUE
                        added = first <= other < value
                        if keys[other - first] == key if added else is_meant(other, key):
                            self._remove_added(keys, first, value)
                            return False
                    at += 1
                    if at == end:
                        break
                    entry = shard[at if at < size else at % size]
                if at >= near:
                    self._place(rest, rest << VALUE_BITS | value)
                    value += 1
                    if self._crowded:
                        self._remove_added(keys, first, value)
                        return self._add_one_by_one(keys, first, is_meant)
                    continue
                at %= size
            shard[at] = rest << VALUE_BITS | value
            value += 1
        self._count += value - first
        return True

    def _remove_added(self, keys: Sequence[int], first: int, end: int) -> None:
        """Remove the values from ``first`` to before ``end`` from the first of the keys."""
        self._count += end - first
        for key, value in zip(keys, range(first, end), strict=False):
            self.remove(key, value)

    def _add_one_by_one(
        self, keys: Sequence[int], value: int, is_meant: Callable[[int, int], bool]
    ) -> bool:
        if len({*keys}) != len(keys) or any(self.find(key, is_meant) for key in keys):
            return False
        for added, key in enumerate(keys, value):
            self.add(key, added)
        return True

    def remove(self, key: int, value: int) -> None:
        """Remove ``value`` from ``key``, which has it."""
        self._count -= 1
        rest = key % _PRIME
        shard = self._shards[rest & _LOW]
        size = len(shard)
        wanted = rest << VALUE_BITS | value
        at = (rest >> _SHARD_BITS) % size
        end = at + _REACH
        while (entry := shard[at if at < size else at % size]) != wanted:
            at += 1
            if not entry or at == end:
                left = tuple(other for other in self._crowded.pop(rest) if other != value)
                if left:
                    self._crowded[rest] = left
                return
        hole = at
        shard[at % size] = 0
        # Those after it move up, so that none is behind an empty place.
        while entry := shard[(at := at + 1) % size]:
            if (at - (entry >> _PLACE)) % size >= at - hole:
                shard[hole % size], shard[at % size] = entry, 0
                hole = at

    def values(self) -> Iterator[int]:
        """All values."""
        for shard in self._shards:
            if shard is not _NO_SHARD:
                yield from (entry & _VALUE for entry in shard if entry)
        for values in self._crowded.values():
            yield from values

    def copy(self) -> "PackedTable":
        """An independent copy."""
        made = PackedTable.__new__(PackedTable)
        made._shards = [shard if shard is _NO_SHARD else shard[:] for shard in self._shards]
        made._count, made._crowded = self._count, self._crowded.copy()
        return made

    def _place(self, rest: int, entry: int) -> None:
        """Put an entry at a free place, in a larger array if there is none near."""
        shard = self._shards[rest & _LOW]
        if shard is _NO_SHARD or self._count > _FULL * _SHARDS * len(shard):
            shard = self._grow(rest, shard)
        while not _put(shard, entry):
            if 2 * (len(shard) - shard.count(0)) < len(shard):
                self._crowd(entry)
                return
            shard = self._grow(rest, shard)

    def _grow(self, rest: int, shard: "array[int]") -> "array[int]":
        """The shard of a remainder, with twice the places."""
        # Different first sizes, so that the arrays do not all grow at the same time.
        first = shard is _NO_SHARD
        size = _FIRST_SIZE + (rest & _FIRST_SIZE - 1) if first else 2 * len(shard)
        self._shards[rest & _LOW] = larger = array("Q", bytes(8 * size))
        for moved in () if first else shard:
            if not moved:
                continue
            at = (moved >> _PLACE) % size
            if not larger[at]:
                larger[at] = moved
            elif at + 1 < size and not larger[at + 1]:
                larger[at + 1] = moved
            elif not _put(larger, moved):
                self._crowd(moved)
        return larger

    def _crowd(self, entry: int) -> None:
        rest = entry >> VALUE_BITS
        self._crowded[rest] = (*self._crowded.get(rest, ()), entry & _VALUE)


def _put(shard: "array[int]", entry: int) -> bool:
    """Put an entry at its place or a free one near it; False if there is none."""
    size = len(shard)
    at = (entry >> _PLACE) % size
    end = at + _REACH
    while shard[at if at < size else at % size]:
        at += 1
        if at == end:
            return False
    shard[at % size] = entry
    return True
