"""The load that the router booked on each rank: prefill tokens, KV blocks, requests.

Prompt blocks that running requests share are counted once per rank. Since a prompt's blocks are
a chain from its start, the set of ranks that hold a block only shrinks with depth, so bisection
finds how much of a new prompt a rank already holds, as in the prefix index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from router_core.changes import Stage
from router_core.errors import SnapshotError
from router_core.worker_sets import Overlaps, match_prefix


@dataclass(slots=True)
class ActiveRequest:
    """One booking. ``prefill_tokens`` is 0 after the first output token."""

    request_id: str
    stage: Stage
    slot: int
    prefill_tokens: int
    sequence_hashes: tuple[int, ...]
    anonymous_blocks: int
    booked_at: float
    seen_at: float
    output_blocks: int = 0
    #: Change of this request's blocks by decay (zero or negative).
    adjustment: float = 0.0


@dataclass(frozen=True, slots=True)
class PotentialLoad:
    """The load of a rank with one more request: prompt tokens to compute, KV blocks held."""

    prefill_tokens: int
    decode_blocks: int


class ActiveSequences:
    """Bookings, and the per-slot columns that the cost reads. Times are seconds of one clock."""

    def __init__(self) -> None:
        self.prefill_tokens: list[int] = []
        self.decode_blocks: list[int] = []
        self.requests: list[int] = []
        self._blocks: list[int] = []
        self._adjusted: list[float] = []
        self._bookings: dict[tuple[str, Stage], ActiveRequest] = {}
        self._stages: dict[str, tuple[Stage, ...]] = {}
        self._of_slot: list[set[tuple[str, Stage]]] = []
        self._holders: dict[int, int] = {}
        #: (hash, slot) -> additional requests that hold the block there; absent means 0.
        self._extra_holders: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._bookings)

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(self._bookings.values())

    def bookings(self, request_id: str) -> tuple[ActiveRequest, ...]:
        """The bookings of the request, one per hop, in booking order."""
        return tuple(self._bookings[request_id, s] for s in self._stages.get(request_id, ()))

    def grow(self, capacity: int) -> None:
        """Extend the columns to the slots 0 .. capacity - 1."""
        missing = capacity - len(self.prefill_tokens)
        if missing > 0:
            for column in (self.prefill_tokens, self.decode_blocks, self.requests, self._blocks):
                column.extend([0] * missing)
            self._adjusted.extend([0.0] * missing)
            self._of_slot.extend(set() for _ in range(missing))

    def shared_blocks(self, sequence_hashes: Sequence[int], candidates: int) -> Overlaps:
        """Leading blocks of the prompt that running requests hold, by slot."""
        return match_prefix(self._holders, sequence_hashes, candidates)

    # -- changes ---------------------------------------------------------------------------

    def book(
        self,
        request_id: str,
        stage: Stage,
        slot: int,
        *,
        prefill_tokens: int,
        sequence_hashes: Sequence[int],
        anonymous_blocks: int,
        now: float,
    ) -> bool:
        """Count a request on a slot; False, and nothing changes, if that hop is booked already."""
        key = (request_id, stage)
        if key in self._bookings:
            return False
        hashes = tuple(sequence_hashes)
        self._bookings[key] = ActiveRequest(
            request_id, stage, slot, prefill_tokens, hashes, anonymous_blocks, now, now
        )
        self._stages[request_id] = (*self._stages.get(request_id, ()), stage)
        self._of_slot[slot].add(key)
        self.prefill_tokens[slot] += prefill_tokens
        self.requests[slot] += 1
        self._blocks[slot] += anonymous_blocks + self._hold(slot, hashes)
        self._round(slot)
        return True

    def prefill_done(self, request_id: str, now: float) -> tuple[int, ...]:
        """End the request's prefill load; returns the slots whose load changed."""
        changed = []
        for stage in self._stages.get(request_id, ()):
            booking = self._bookings[request_id, stage]
            booking.seen_at = now
            if booking.prefill_tokens:
                self.prefill_tokens[booking.slot] -= booking.prefill_tokens
                booking.prefill_tokens = 0
                changed.append(booking.slot)
        return tuple(changed)

    def touch(self, request_id: str, now: float) -> bool:
        """Record progress of the request; False for an unknown request."""
        for stage in self._stages.get(request_id, ()):
            self._bookings[request_id, stage].seen_at = now
        return request_id in self._stages

    def output_block(self, request_id: str, fraction: float | None, now: float) -> int | None:
        """Add one generated block; returns the slot, or None for an unknown request.

        With ``fraction`` f in 0..1 every block that only this request uses (its exclusive prompt
        suffix and its outputs) now counts f, as in Dynamo. Different from Dynamo, a block that
        another request still holds counts 1 again when this request is freed.
        """
        stages = self._stages.get(request_id)
        if not stages:
            return None
        booking = self._bookings[request_id, stages[-1]]
        slot = booking.slot
        booking.seen_at = now
        booking.output_blocks += 1
        self._blocks[slot] += 1
        if fraction is not None:
            exclusive = booking.output_blocks + booking.anonymous_blocks
            exclusive += sum((h, slot) not in self._extra_holders for h in booking.sequence_hashes)
            lowered = (fraction - 1.0) * exclusive
            self._adjusted[slot] += lowered - booking.adjustment
            booking.adjustment = lowered
        self._round(slot)
        return slot

    def free(self, request_id: str, stage: Stage | None = None) -> tuple[int, ...]:
        """End the request on one hop or on all; returns the slots whose load changed."""
        stages = self._stages.get(request_id, ())
        ending = stages if stage is None else tuple(s for s in stages if s == stage)
        changed = []
        for one in ending:
            booking = self._bookings.pop((request_id, one))
            slot = booking.slot
            self._of_slot[slot].discard((request_id, one))
            self.prefill_tokens[slot] -= booking.prefill_tokens
            self.requests[slot] -= 1
            gone = self._drop(slot, booking.sequence_hashes)
            self._blocks[slot] -= booking.anonymous_blocks + booking.output_blocks + gone
            self._adjusted[slot] -= booking.adjustment
            self._round(slot)
            changed.append(slot)
        left = tuple(s for s in stages if s not in ending)
        if left:
            self._stages[request_id] = left
        else:
            self._stages.pop(request_id, None)
        return tuple(changed)

    def expire(self, now: float, max_idle: float) -> tuple[tuple[str, Stage], ...]:
        """Free bookings without progress for over ``max_idle`` seconds and return their keys."""
        stale = [
            (booking.request_id, booking.stage)
            for booking in self._bookings.values()
            if now - booking.seen_at > max_idle
        ]
        for request_id, stage in stale:
            self.free(request_id, stage)
        return tuple(stale)

    def drop_slot(self, slot: int) -> None:
        """Free all bookings of a rank that is removed."""
        for request_id, stage in tuple(self._of_slot[slot]):
            self.free(request_id, stage)

    # -- snapshot --------------------------------------------------------------------------

    def dump(self) -> list[dict[str, Any]]:
        """The bookings as plain data, in booking order."""
        return [
            {
                "request_id": b.request_id,
                "stage": b.stage,
                "slot": b.slot,
                "prefill_tokens": b.prefill_tokens,
                "sequence_hashes": list(b.sequence_hashes),
                "anonymous_blocks": b.anonymous_blocks,
                "booked_at": b.booked_at,
                "seen_at": b.seen_at,
                "output_blocks": b.output_blocks,
                "adjustment": b.adjustment,
            }
            for b in self._bookings.values()
        ]

    @classmethod
    def restore(cls, plain: Sequence[dict[str, Any]], capacity: int) -> ActiveSequences:
        """The inverse of :meth:`dump`; raises SnapshotError."""
        load = cls()
        load.grow(capacity)
        for row in plain:
            if not 0 <= row["slot"] < capacity:
                raise SnapshotError(
                    f"booking of {row['request_id']}: slot {row['slot']} does not exist"
                )
            load.book(
                row["request_id"],
                row["stage"],
                row["slot"],
                prefill_tokens=row["prefill_tokens"],
                sequence_hashes=row["sequence_hashes"],
                anonymous_blocks=row["anonymous_blocks"],
                now=row["booked_at"],
            )
            booking = load._bookings[row["request_id"], row["stage"]]
            booking.seen_at = row["seen_at"]
            booking.output_blocks = row["output_blocks"]
            booking.adjustment = row["adjustment"]
            load._blocks[booking.slot] += booking.output_blocks
            load._adjusted[booking.slot] += booking.adjustment
            load._round(booking.slot)
        return load

    # -- inside ----------------------------------------------------------------------------

    def _hold(self, slot: int, hashes: tuple[int, ...]) -> int:
        """Add the blocks to a slot; returns how many no request held there before."""
        bit = 1 << slot
        fresh = 0
        holders = self._holders
        for block in hashes:
            mask = holders.get(block, 0)
            if mask & bit:
                self._extra_holders[block, slot] = self._extra_holders.get((block, slot), 0) + 1
            else:
                holders[block] = mask | bit
                fresh += 1
        return fresh

    def _drop(self, slot: int, hashes: tuple[int, ...]) -> int:
        """Release the blocks of a slot; returns how many no request holds there any more."""
        bit = 1 << slot
        gone = 0
        for block in hashes:
            more = self._extra_holders.get((block, slot), 0)
            if more > 1:
                self._extra_holders[block, slot] = more - 1
            elif more == 1:
                del self._extra_holders[block, slot]
            else:
                left = self._holders[block] & ~bit
                if left:
                    self._holders[block] = left
                else:
                    del self._holders[block]
                gone += 1
        return gone

    def _round(self, slot: int) -> None:
        # Half a block counts as a block, as in Dynamo.
        self.decode_blocks[slot] = int(self._blocks[slot] + self._adjusted[slot] + 0.5)
