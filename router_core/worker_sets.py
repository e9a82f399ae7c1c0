"""Sets of workers as bit masks, and the leading prompt blocks that each worker holds.

The worker registry gives every (worker, data-parallel rank) a small integer **slot**, bit
``1 << slot`` of a mask. One ``and`` of two masks replaces a loop over workers, and a mask of 1,024
workers is one object of 160 bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, count, repeat

from router_core.frozen import quick_init
from router_core.sharded import ShardedDict

# The digits "0" and "1" as the numbers 0 and 1.
_DIGITS = bytes.maketrans(b"01", b"\x00\x01")


@lru_cache(maxsize=512)
def slots_of(mask: int) -> tuple[int, ...]:
    """The slots in ``mask``, ascending; raises ValueError for a negative (endless) one."""
    if mask < 0:
        raise ValueError(f"expected a mask of at least 0, got {mask}")
    if mask.bit_count() >= 16:
        digits = bin(mask)[:1:-1].encode().translate(_DIGITS)
        return tuple(compress(count(), digits))
    slots = []
    while mask:
        lowest = mask & -mask
        slots.append(lowest.bit_length() - 1)
        mask ^= lowest
    return tuple(slots)


def nth_slot(mask: int, number: int) -> int:
    """The slot in ``mask`` that ``number`` slots are below; there must be one."""
    if number > 8:
        return slots_of(mask)[number]
    for _ in range(number):
        mask &= mask - 1
    return (mask & -mask).bit_length() - 1


@quick_init
@dataclass(frozen=True, slots=True)
class Overlaps:
    """Leading blocks of one prompt that each slot holds.

    ``levels`` are pairs (depth, mask), **deepest first**: the slots in ``mask`` hold exactly the
    first ``depth`` blocks (at least 1). The masks are disjoint; a slot in none of them holds
    nothing of the prompt. There is one pair per distinct depth, so workers that share a prefix take
    no extra memory.
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
        """The deepest match among the slots of ``mask``: (depth, the slots that have it).

        (0, ``mask``) if none of them holds a block.
        """
        for depth, level in self.levels:
            if level & mask:
                return depth, level & mask
        return 0, mask

    def items(self) -> Iterator[tuple[int, int]]:
        """Pairs (slot, depth), deepest first, slots ascending within a depth."""
        for depth, mask in self.levels:
            for slot in slots_of(mask):
                yield slot, depth

    def column(self, slots: Sequence[int]) -> list[int]:
        """The leading blocks that each of ``slots`` (ascending) holds."""
        column = [0] * len(slots)
        if not self.levels:
            return column
        first = slots[0]
        if slots[-1] - first == len(slots) - 1:
            for depth, mask in self.levels:
                for slot in slots_of(mask):
                    column[slot - first] = depth
            return column
        sparse: dict[int, int] = {}
        for depth, mask in self.levels:
            sparse.update(dict.fromkeys(slots_of(mask), depth))
        return list(map(sparse.get, slots, repeat(0)))

    @property
    def mask(self) -> int:
        """The slots that hold at least the first block."""
        union = 0
        for _, level in self.levels:
            union |= level
        return union


NO_OVERLAPS = Overlaps(())


def match_prefix(holders: Mapping[int, int], hashes: Sequence[int], candidates: int) -> Overlaps:
    """How many leading ``hashes`` each candidate slot holds.

    ``holders``: hash -> mask of the slots that hold it, where a slot that holds a hash of a chain
    holds every one before it, so that masks only shrink with depth. Cost: two look-ups if all slots
    that hold the first hash hold the last, otherwise about log2(hashes) more per distinct depth.
    """
    total = len(hashes)
    if not total or not candidates:
        return NO_OVERLAPS
    # Not isinstance: for a class of an ABC it takes five times as long.
    shards = holders.shards if type(holders) is ShardedDict else (holders,)
    count = len(shards)
    first = shards[hashes[0] % count].get(hashes[0], 0) & candidates
    if not first:
        return NO_OVERLAPS
    last = shards[hashes[-1] % count].get(hashes[-1], 0) & candidates
    if last == first:
        return Overlaps(((total, first),))
    levels = [(total, last)] if last else []
    # Intervals of the chain within which the set of holders shrinks; the deepest on top. Sets only
    # shrink, so an interval with equal ends has no change and is skipped.
    intervals = [(0, first, total - 1, last)]
    while intervals:
        low, at_low, high, at_high = intervals.pop()
        while high - low > 1:
            middle = (low + high) >> 1
            block = hashes[middle]
            held = shards[block % count].get(block, 0) & candidates
            if held == at_low:
                low = middle
            elif held == at_high:
                high = middle
            else:
                intervals.append((low, at_low, middle, held))
                low, at_low = middle, held
        levels.append((high, at_low & ~at_high))
    return Overlaps(tuple(levels))
