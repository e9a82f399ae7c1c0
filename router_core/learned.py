"""Indexes that are learned from bookings: for ranks that do not report what they cache, and for the
time until a rank's report arrives.

A prompt's complete blocks count as cached on the rank that got it, from the booking on. A block
that no booking brings, because the rank accepts none of their prompts, is forgotten with the last
of them. The others are forgotten a time after the last booking that had them (`LearnedIndex`), or
when the rank needs the memory (`RecencyIndex`), and earlier where all ranks have more blocks than
they may: the oldest first, and of one prompt the last block first. So a rank that has a block
always has all blocks before it. Source: approximate mode of Dynamo 1.6 (time or recency) and 0.9
(size). It is an estimate: engines evict when they need memory, and other routers book too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice, repeat
from math import inf, nextafter
from typing import Any, Final, NamedTuple, Self

from router_core.changes import STAGES, Stage
from router_core.errors import SnapshotError
from router_core.forms import BLOCK_NAME, SLOT, TEXT, TIME, Each, Either, Fields, Form, OneOf, Row
from router_core.sharded import ShardedDict
from router_core.worker_sets import NO_OVERLAPS, Overlaps, match_prefix

#: Blocks of all ranks where the setting ``router_max_tree_size`` is not set; about 200 bytes each.
MOST_LEARNED = 2**20


class BookingLease(NamedTuple):
    """A booking that runs: the slot, its blocks, those that no earlier booking is known to have
    brought (``fresh``), and its time in the index.

    ``blocks`` is empty where blocks in use are not kept from being forgotten.
    """

    slot: int
    blocks: tuple[int, ...]
    fresh: tuple[int, ...]
    at: float


Key = tuple[str, Stage]

_HASHES: Final = Each(BLOCK_NAME)
_BLOCKS: Final = Fields({"slot": SLOT}, {"blocks": Each(Row(BLOCK_NAME, TIME))})
_BOOKING: Final = Fields(
    {
        "slot": SLOT,
        "request": Row(TEXT, OneOf(STAGES)),
        "leased": _HASHES,
        "fresh": _HASHES,
        "at": TIME,
    }
)


def _row_form(row: object) -> Form:
    return _BOOKING if isinstance(row, Mapping) and "request" in row else _BLOCKS


_FORM: Final = Each(Either(_row_form))
"""What `LearnedIndex.dump` writes."""


class LearnedIndex:
    """Blocks that each slot is expected to have cached, each for a time after its last booking.

    ``ttl_s``: seconds after its last booking until a block is forgotten. ``most``: blocks of all
    slots; above that the oldest go, until ``floor(most * keep)`` are left. All may be changed.
    :meth:`sweep` removes what is too old or too much, in bounded steps.
    """

    __slots__ = (
        "_due", "_gone", "_held", "_last", "_owners", "_pruning", "_size", "_unproven",
        "keep", "leases", "live", "most", "ttl_s",
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
        self.leases: dict[Key, BookingLease] = {}
        """request and hop -> its booking, while it runs and can still be unlearned or held"""
        self._unproven: dict[int, dict[int, int]] = {}
        """slot -> block that no ended booking has brought -> running bookings that may bring it"""
        self._last = -inf
        """time of the last booking; each booking has another, so that it marks its blocks"""

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
        self,
        slot: int,
        sequence_hashes: Sequence[int],
        now: float,
        capacity: int | None = None,
        key: Key | None = None,
    ) -> None:
        """Count a prompt's blocks as cached on ``slot`` from ``now`` on.

        ``sequence_hashes``: each block after its parent. ``capacity``: blocks that the rank can
        have; beyond it its oldest are forgotten. None and 0: unknown. ``key``: the request that
        :meth:`end` is called for.
        """
        if not sequence_hashes:
            return
        if slot in self._gone:  # its bits in the masks are those of the blocks before
            self._sweep_gone(slot, len(self._gone[slot]))
        now = self._last = now if now > self._last else nextafter(self._last, inf)
        fresh = self._take(slot, sequence_hashes, now)
        if key is not None:
            fresh = self._doubtful_blocks(slot, sequence_hashes, fresh)
            self._lease(key, slot, sequence_hashes, fresh, now)
        self.live |= 1 << slot
        self._trim(slot, capacity)
        # Twice as many go as came, so that the size stays bounded without calls of `sweep`.
        self.sweep(2 * len(sequence_hashes), now)

    def end(self, key: Key, now: float, *, computed: bool = True) -> None:
        """The booking of ``key`` ended. Not ``computed``: the engine did not accept its prompt, so
        the blocks that no other booking brought or may bring are forgotten."""
        lease = self.leases.pop(key, None)
        if lease is None:
            return
        unlearned, held = self._proven(lease, computed=computed), self._held.get(lease.slot)
        if unlearned and held is not None:
            forgotten = [block for block in unlearned if held.pop(block, None) is not None]
            self._disown(lease.slot, forgotten)

    def clear(self, slot: int) -> int:
        """Forget the blocks of ``slot`` and return their number; `sweep` frees their memory."""
        held = self._pop(slot)
        if held is None:
            return 0
        self.live &= ~(1 << slot)
        self._unproven.pop(slot, None)
        self.leases = {key: lease for key, lease in self.leases.items() if lease.slot != slot}
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
            max_blocks -= self._forget_oldest(max_blocks, -1 if expired else least)
        if not due:
            self._pruning = False
        return bool(self._gone)

    def _forget_oldest(self, most: int, least: int) -> int:
        """Forget the oldest blocks of the slot that is due: those of its oldest time, at most
        ``most``, while there are more than ``least`` in all. Returns how many."""
        at, slot = heappop(self._due)
        held = self._held[slot]
        forgotten = []
        for block, seen in islice(held.items(), max(0, min(most, self._size - least))):
            if seen > at:
                break
            forgotten.append(block)
        for block in forgotten:
            del held[block]
        self._disown(slot, forgotten)
        if held:
            heappush(self._due, (next(iter(held.values())), slot))
        else:
            del self._held[slot]
            if not self._unforgettable(slot):
                self.live &= ~(1 << slot)
        return len(forgotten)

    # -- dump and restore --------------------------------------------------------------------

    def copy(self) -> Self:
        """An independent copy."""
        made = type(self)(self.ttl_s, self.most, self.keep)
        made._owners = self._owners.copy()
        made._held = {slot: held.copy() for slot, held in self._held.items()}
        made._gone = {slot: gone.copy() for slot, gone in self._gone.items()}
        made._due = self._due.copy()
        made.leases = self.leases.copy()
        made._unproven = {slot: counts.copy() for slot, counts in self._unproven.items()}
        made.live, made._size, made._pruning = self.live, self._size, self._pruning
        made._last = self._last
        return made

    def dump(self) -> list[dict[str, Any]]:
        """``[{"slot", "blocks": [[hash, time of its last booking], ...]}, ...]``, oldest first, and
        the running bookings: ``{"request", "slot", "leased", "fresh", "at"}``."""
        held: list[dict[str, Any]] = [
            {"slot": slot, "blocks": [[block, at] for block, at in held.items()]}
            for slot, held in sorted(self._held.items())
        ]
        return held + [
            {
                "request": list(key),
                "slot": lease.slot,
                "leased": list(lease.blocks),
                "fresh": [
                    block for block in lease.fresh if block in self._unproven.get(lease.slot, ())
                ],
                "at": lease.at,
            }
            for key, lease in self.leases.items()
        ]

    def load(self, plain: Sequence[Mapping[str, Any]], path: str = "learned") -> None:
        """Take over the blocks of a :meth:`dump`, into an empty index; raises SnapshotError.

        ``path``: of the dump, for the error.
        """
        _FORM.check(plain, path)
        for place, row in enumerate(plain):
            for block, at in row.get("blocks", ()):
                if block in self._held.get(row["slot"], ()):
                    raise SnapshotError(f"{path}[{place}].blocks: block {block} occurs twice")
                self._owners[block] = self._owners.get(block, 0) | 1 << row["slot"]
                self._held.setdefault(row["slot"], OrderedDict())[block] = at
                self._size += 1
                self._last = max(self._last, at)
            if "request" in row:
                request_id, stage = row["request"]
                if (request_id, stage) in self.leases:
                    raise SnapshotError(f"{path}[{place}].request: this booking occurs twice")
                lease = BookingLease(
                    row["slot"], tuple(row["leased"]), tuple(row["fresh"]), row["at"]
                )
                self._restore((request_id, stage), lease)
        for slot, held in self._held.items():
            self.live |= 1 << slot
            heappush(self._due, (next(iter(held.values())), slot))

    # -- inside ------------------------------------------------------------------------------

    def _take(self, slot: int, blocks: Sequence[int], now: float) -> list[int]:
        """Count blocks as cached on ``slot``; returns the new ones, the deepest first."""
        held = self._held_of(slot, now)
        fresh = list(dict.fromkeys(reversed(blocks)))
        if len(fresh) == len(blocks) and held.keys().isdisjoint(fresh):
            held.update(zip(fresh, repeat(now)))
        else:
            fresh = []
            for block in reversed(blocks):
                if block in held:
                    held.move_to_end(block)
                else:
                    fresh.append(block)
                held[block] = now
        self._own(slot, fresh)
        return fresh

    def _doubtful_blocks(self, slot: int, blocks: Sequence[int], fresh: list[int]) -> list[int]:
        """The blocks of a booking that only running bookings may bring: its new ones, and those
        of others that run."""
        unproven = self._unproven.get(slot)
        if unproven is None:
            if not fresh:
                return fresh
            unproven = self._unproven[slot] = {}
        if len(fresh) == len(blocks) and unproven.keys().isdisjoint(fresh):
            unproven.update(zip(fresh, repeat(1)))
            return fresh
        for block in fresh:
            unproven.setdefault(block, 0)
        if len(fresh) < len(blocks):
            fresh = [block for block in reversed(blocks) if block in unproven]
        for block in fresh:
            unproven[block] += 1
        return fresh

    def _proven(self, lease: BookingLease, *, computed: bool) -> list[int]:
        """End the doubt about the blocks of a booking; those that no booking has brought."""
        unproven = self._unproven.get(lease.slot)
        if unproven is None:
            return []
        unlearned = []
        for block in lease.fresh:
            left = unproven.pop(block, 0)
            if left and not computed:
                if left > 1:
                    unproven[block] = left - 1
                else:
                    unlearned.append(block)
        if not unproven:
            del self._unproven[lease.slot]
        return unlearned

    def _trim(self, slot: int, capacity: int | None) -> None:
        """Forget the oldest blocks of a slot that has more than ``capacity``."""
        if capacity:
            held, most = self._held[slot], max(0, capacity - self._unforgettable(slot))
            over = range(len(held) - most)
            self._disown(slot, [held.popitem(last=False)[0] for _ in over])

    def _held_of(self, slot: int, now: float) -> OrderedDict[int, float]:
        held = self._held.get(slot)
        if held is None:
            held = self._held[slot] = OrderedDict()
            heappush(self._due, (now, slot))
        return held

    def _lease(
        self, key: Key, slot: int, blocks: Sequence[int], fresh: list[int], now: float
    ) -> None:
        if fresh:
            self.leases[key] = BookingLease(slot, (), tuple(fresh), now)

    def _restore(self, key: Key, lease: BookingLease) -> None:
        self.leases[key] = lease
        self._last = max(self._last, lease.at)
        if lease.fresh:
            unproven = self._unproven.setdefault(lease.slot, {})
            for block in lease.fresh:
                unproven[block] = unproven.get(block, 0) + 1

    def _unforgettable(self, slot: int) -> int:
        """Blocks of a slot that cannot be forgotten now, and are not in ``_held``."""
        return 0

    def _pop(self, slot: int) -> OrderedDict[int, float] | None:
        """Take the blocks of a slot out; None without any."""
        return self._held.pop(slot, None)

    def _sweep_gone(self, slot: int, max_blocks: int) -> int:
        gone = self._gone[slot]
        count = min(len(gone), max_blocks)
        self._disown(slot, [gone.popitem()[0] for _ in range(count)])
        if not gone:
            del self._gone[slot]
        return count

    def _own(self, slot: int, blocks: Collection[int]) -> None:
        """Note that ``slot`` has blocks that it did not have."""
        bit, shards = 1 << slot, self._owners.shards
        count = len(shards)
        for block in blocks:
            shard = shards[block % count]
            shard[block] = shard.get(block, 0) | bit
        self._size += len(blocks)

    def _disown(self, slot: int, blocks: Collection[int]) -> None:
        """Note that ``slot`` does not have these of its blocks any more."""
        bit, shards = 1 << slot, self._owners.shards
        count = len(shards)
        for block in blocks:
            shard = shards[block % count]
            if shard[block] == bit:
                del shard[block]
            else:
                shard[block] &= ~bit
        self._size -= len(blocks)


class RecencyIndex(LearnedIndex):
    """Blocks that each slot is expected to have cached, by its size and not by time.

    A rank that has more blocks than its capacity forgets those whose last request ended first, of
    one request the last block first. Blocks of running requests stay. Source: the policy ``lru`` of
    Dynamo 1.6.
    """

    __slots__ = ("_capacity", "_in_use")

    def __init__(
        self, ttl_s: float = inf, most: int | None = MOST_LEARNED, keep: float = 0.8
    ) -> None:
        super().__init__(inf, most, keep)
        self._in_use: dict[int, dict[int, tuple[int, float]]] = {}
        """slot -> block -> (running requests that have it, time of its last booking)"""
        self._capacity: dict[int, int | None] = {}

    def block_count(self, slot: int) -> int:
        return super().block_count(slot) + self._unforgettable(slot)

    def is_free(self, slot: int) -> bool:
        return super().is_free(slot) and slot not in self._in_use

    def end(self, key: Key, now: float, *, computed: bool = True) -> None:
        lease = self.leases.pop(key, None)
        if lease is None:
            return
        now = self._last = now if now > self._last else nextafter(self._last, inf)
        slot = lease.slot
        held, used = self._held_of(slot, now), self._in_use[slot]
        unlearned = frozenset(self._proven(lease, computed=computed))
        forgotten = []
        for block in reversed(lease.blocks):
            count, at = used[block]
            if count > 1:
                used[block] = (count - 1, at)
                continue
            del used[block]
            if block in unlearned:
                forgotten.append(block)
            else:
                held[block] = now
        self._disown(slot, forgotten)
        if not used:
            del self._in_use[slot]
        self._trim(slot, self._capacity.get(slot))

    def copy(self) -> Self:
        made = super().copy()
        made._capacity = self._capacity.copy()
        made._in_use = {slot: used.copy() for slot, used in self._in_use.items()}
        return made

    # -- inside ------------------------------------------------------------------------------

    def _take(self, slot: int, blocks: Sequence[int], now: float) -> list[int]:
        held, used = self._held_of(slot, now), self._in_use.setdefault(slot, {})
        fresh = []
        for block in reversed(blocks):
            uses = used.get(block)
            if uses is not None:
                used[block] = (uses[0] + 1, now)
                continue
            if held.pop(block, None) is None:
                fresh.append(block)
            used[block] = (1, now)
        self._own(slot, fresh)
        return fresh

    def _lease(
        self, key: Key, slot: int, blocks: Sequence[int], fresh: list[int], now: float
    ) -> None:
        self.leases[key] = BookingLease(slot, tuple(blocks), tuple(fresh), now)

    def _restore(self, key: Key, lease: BookingLease) -> None:
        super()._restore(key, lease)
        used = self._in_use.setdefault(lease.slot, {})
        for block in lease.blocks:
            if block not in used:
                self._owners[block] = self._owners.get(block, 0) | 1 << lease.slot
                self._size += 1
            count, at = used.get(block, (0, lease.at))
            used[block] = (count + 1, max(at, lease.at))
        self.live |= 1 << lease.slot

    def _trim(self, slot: int, capacity: int | None) -> None:
        self._capacity[slot] = capacity
        super()._trim(slot, capacity)

    def _unforgettable(self, slot: int) -> int:
        return len(self._in_use.get(slot, ()))

    def _pop(self, slot: int) -> OrderedDict[int, float] | None:
        held, used = self._held.pop(slot, None), self._in_use.pop(slot, None)
        self._capacity.pop(slot, None)
        if used:
            held = held or OrderedDict()
            held.update(dict.fromkeys(used, 0.0))
        return held
