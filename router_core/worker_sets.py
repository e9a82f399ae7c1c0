"""Sets of workers as bitmasks, and how much of a prompt each worker holds.

The worker registry gives every (worker, data-parallel rank) a small integer **slot**; bit
``1 << slot`` stands for it in a mask. One machine-level ``and`` over masks replaces a loop over
workers, and a mask of 1,024 workers is one object of 160 bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass


def slots_of(mask: int) -> Iterator[int]:
    """The slots in ``mask``, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Leading blocks of one prompt that each slot holds.

    ``levels`` are pairs (depth, mask), **deepest first**: the slots in ``mask`` hold exactly the
    first ``depth`` blocks (at least 1). The masks are disjoint; a slot in none of them holds
    nothing of the prompt. There is one pair per distinct depth, so workers that share a prefix cost
    nothing apiece.
    """

    levels: tuple[tuple[int, int], ...]

    def get(self, slot: int) -> int:
        """Leading blocks that ``slot`` holds; 0 if none."""
        bit = 1 << slot
        for depth, mask in self.levels:
            if mask & bit:
                return depth
        return 0

    def best(self, mask: int) -> tuple[int, int]:
        """The deepest match among the slots of ``mask``: (depth, those of them that have it).

        (0, ``mask``) if none of them holds anything: then all are equally good.
        """
        for depth, level in self.levels:
            if level & mask:
                return depth, level & mask
        return 0, mask

    def restrict(self, mask: int) -> "Overlaps":
        """The same overlaps, without the slots outside ``mask``."""
        return Overlaps(tuple((depth, at & mask) for depth, at in self.levels if at & mask))

    def items(self) -> Iterator[tuple[int, int]]:
        """Pairs (slot, depth), deepest first, slots ascending within a depth."""
        for depth, mask in self.levels:
            for slot in slots_of(mask):
                yield slot, depth

    @property
    def mask(self) -> int:
        """The slots that hold at least the first block."""
        union = 0
        for _, level in self.levels:
            union |= level
        return union


NO_OVERLAPS = Overlaps(())
