"""The index that is learned from bookings, for ranks that do not report what they cache.

A prompt's complete blocks count as cached on the rank that got it, from the booking on. They are
forgotten a time after the last booking that had them, or earlier where a rank or all ranks have
more blocks than they may: the oldest first, and of one prompt the last block first. So a rank that
has a block always has all blocks before it. Source: approximate mode of Dynamo 1.6 (time) and 0.9
(size). It is an estimate: engines evict when they need memory, and other routers book too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from router_core.sharded import ShardedDict
from router_core.worker_sets import NO_OVERLAPS, Overlaps, match_prefix

#: Blocks of all ranks where the setting ``router_max_tree_size`` is not set; about 200 bytes each.
MOST_LEARNED = 2**20


class LearnedIndex:
    """Blocks that each slot is expected to have cached.

    ``ttl_s``: seconds after its last booking until a block is forgotten. ``most``: blocks of all
    slots; above that the oldest go, until ``floor(most * keep)`` are left. All may be changed.
    :meth:`sweep` removes what is too old or too much, in bounded steps.
    """

    __slots__ = (
        "_due", "_gone", "_held", "_owners", "_pruning", "_size", "keep", "live", "most", "ttl_s",
    )  # fmt: skip

    def __init__(
        self, ttl_s: float = 120.0, most: int | None = MOST_LEARNED, keep: float = 0.8
    ) -> None:
        self.ttl_s = ttl_s
        self.most = MOST_LEARNED if most is None else most
        self.keep = keep
        self._owners = ShardedDict()
        """block -> mask of the slots that have it"""
        self._held: dict[int, OrderedDict[int, float]] = {}
        """slot -> block -> time of its last booking, oldest first, a block before its parent"""
        self._due: list[tuple[float, int]] = []
        """heap of (time at most that of the slot's oldest block, slot), one entry for each slot"""
        self._gone: dict[int, OrderedDict[int, float]] = {}
        """slot -> its blocks, which do not count any more and are not swept yet"""
        self.live = 0
        """mask of the slots that have blocks"""
        self._size = 0
        self._pruning = False

    def __len__(self) -> int:
        """(slot, block) pairs in memory."""
        return self._size

    def block_count(self, slot: int) -> int:
        """Blocks that ``slot`` is expected to have."""
        return len(self._held.get(slot, ()))

    def is_free(self, slot: int) -> bool:
        """Whether no block of ``slot`` is in memory, so that another worker may get it."""
        return slot not in self._held and slot not in self._gone

    def find_matches(self, sequence_hashes: Sequence[int], candidates: int) -> Overlaps:
        """How many leading blocks of a prompt each slot of the mask is expected to have."""
        live = self.live & candidates
        return match_prefix(self._owners, sequence_hashes, live) if live else NO_OVERLAPS

    def learn(
        self, slot: int, sequence_hashes: Sequence[int], now: float, capacity: int | None = None
    ) -> None:
        """Count a prompt's blocks as cached on ``slot`` from ``now`` on.

        ``sequence_hashes``: each block after its parent. ``capacity``: blocks that the rank can
        have; beyond it its oldest are forgotten. None and 0: unknown.
        """
        if not sequence_hashes:
            return
        if slot in self._gone:  # its bits in the masks are those of the blocks before
            self._sweep_gone(slot, len(self._gone[slot]))
        held = self._held.get(slot)
        if held is None:
            held = self._held[slot] = OrderedDict()
            heappush(self._due, (now, slot))
        bit, shards = 1 << slot, self._owners.shards
        count = len(shards)
        for block in reversed(sequence_hashes):
            if block in held:
                held.move_to_end(block)
            else:
                shard = shards[block % count]
                shard[block] = shard.get(block, 0) | bit
                self._size += 1
            held[block] = now
        self.live |= bit
        if capacity:
            while len(held) > capacity:
                self._disown(slot, held.popitem(last=False)[0])
        # Twice as many go as came, so that the size stays bounded without calls of `sweep`.
        self.sweep(2 * len(sequence_hashes), now)

    def clear(self, slot: int) -> int:
        """Forget the blocks of ``slot`` and return their number; `sweep` frees their memory."""
        held = self._held.pop(slot, None)
        if held is None:
            return 0
        self.live &= ~(1 << slot)
        self._due = [entry for entry in self._due if entry[1] != slot]
        self._due.sort()
        if held:
            self._gone[slot] = held
        return len(held)

    def sweep(self, max_blocks: int, now: float | None = None) -> bool:
        """Remove at most ``max_blocks`` blocks that are too old at ``now``, too many, or cleared.

        True while there are more to remove. Without ``now`` none is too old.
        """
        for slot in list(self._gone):
            if max_blocks <= 0:
                return True
            max_blocks -= self._sweep_gone(slot, max_blocks)
        least = int(self.most * self.keep)
        due = self._due
        while due:
            expired = now is not None and due[0][0] + self.ttl_s <= now
            if not expired:
                self._pruning = self._size > (least if self._pruning else self.most)
                if not self._pruning:
                    break
            if max_blocks <= 0:
                return True
            at, slot = heappop(due)
            held = self._held[slot]
            while held and max_blocks > 0 and (expired or self._size > least):
                block, seen = next(iter(held.items()))
                if seen > at:
                    break
                del held[block]
                self._disown(slot, block)
                max_blocks -= 1
            if held:
                heappush(due, (next(iter(held.values())), slot))
            else:
                del self._held[slot]
                self.live &= ~(1 << slot)
        if not due:
            self._pruning = False
        return bool(self._gone)

    # -- dump and restore --------------------------------------------------------------------

    def copy(self) -> LearnedIndex:
        """An independent copy."""
        made = LearnedIndex(self.ttl_s, self.most, self.keep)
        made._owners = self._owners.copy()
        made._held = {slot: held.copy() for slot, held in self._held.items()}
        made._gone = {slot: gone.copy() for slot, gone in self._gone.items()}
        made._due = self._due.copy()
        made.live, made._size, made._pruning = self.live, self._size, self._pruning
        return made

    def dump(self) -> list[dict[str, Any]]:
        """``[{"slot", "blocks": [[hash, time of its last booking], ...]}, ...]``, oldest first."""
        return [
            {"slot": slot, "blocks": [[block, at] for block, at in held.items()]}
            for slot, held in sorted(self._held.items())
        ]

    def load(self, plain: Iterable[Mapping[str, Any]]) -> None:
        """Take over the blocks of a :meth:`dump`, into an empty index."""
        for row in plain:
            for block, at in row["blocks"]:
                self._owners[block] = self._owners.get(block, 0) | 1 << row["slot"]
                self._held.setdefault(row["slot"], OrderedDict())[block] = at
                self._size += 1
        for slot, held in self._held.items():
            self.live |= 1 << slot
            heappush(self._due, (next(iter(held.values())), slot))

    # -- inside ------------------------------------------------------------------------------

    def _sweep_gone(self, slot: int, max_blocks: int) -> int:
        gone = self._gone[slot]
        count = min(len(gone), max_blocks)
        for _ in range(count):
            self._disown(slot, gone.popitem()[0])
        if not gone:
            del self._gone[slot]
        return count

    def _disown(self, slot: int, block: int) -> None:
        self._size -= 1
        left = self._owners[block] & ~(1 << slot)
        if left:
            self._owners[block] = left
        else:
            del self._owners[block]
