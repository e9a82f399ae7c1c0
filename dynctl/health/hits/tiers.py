"""The blocks of a rank below its device, as its events show them.

Records have the sequence hashes of a prompt, while a router finds lower blocks by the engine's
names. So each block is known here by the sequence hash that follows from the block before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from router_core import TIERS

#: Where a cached prefix goes on below the device, in this order.
_PLACES: Final = tuple(dict.fromkeys(TIERS.values()))


class LowerBlocks:
    """Blocks in host memory and on disk. ``most``: the most that were there at a time, which is
    the known part of the tiers' size: no engine publishes it. ``most_of``: the same of each."""

    __slots__ = ("_held", "_names", "most", "most_of")

    def __init__(self) -> None:
        self.most = 0
        self.most_of: dict[str, int] = dict.fromkeys(_PLACES, 0)
        self._names: dict[str, dict[int, int]] = {place: {} for place in _PLACES}
        self._held: dict[str, set[int]] = {place: set() for place in _PLACES}

    def sequence_of(self, name: int) -> int | None:
        """The sequence hash of the block with the engine's ``name``; None where it is unknown."""
        blocks = (names.get(name) for names in self._names.values())
        return next((block for block in blocks if block is not None), None)

    def store(self, tier: str, names: Iterable[int], blocks: Iterable[int]) -> int:
        """Add blocks. Returns by how many ``most`` grew."""
        place = TIERS[tier]
        self._names[place].update(zip(names, blocks, strict=False))
        self._held[place].update(self._names[place][name] for name in names)
        self.most_of[place] = max(self.most_of[place], len(self._names[place]))
        grown = max(0, sum(map(len, self._names.values())) - self.most)
        self.most += grown
        return grown

    def remove(self, tier: str, names: Iterable[int]) -> None:
        place = TIERS[tier]
        for name in names:
            block = self._names[place].pop(name, None)
            if block is not None:
                self._held[place].discard(block)

    def clear(self) -> None:
        for place in _PLACES:
            self._names[place].clear()
            self._held[place].clear()

    def end_of(self, hashes: Sequence[int], start: int) -> int:
        """The leading blocks with those that continue the ``start`` blocks of the device."""
        for held in self._held.values():
            while start < len(hashes) and hashes[start] in held:
                start += 1
        return start
