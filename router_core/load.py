"""The load that the router booked on each rank: prefill tokens, KV blocks, requests.

Prompt blocks that running requests share are counted once per rank
(:mod:`router_core.held_blocks`). Since a prompt's blocks are a chain from its start, the set of
ranks that hold a block only shrinks with depth.

A booking may have the predicted duration of its prefill. Then the prefill tokens of its rank fall
with time, before the first output token arrives. The *anchor* is the oldest prefill of a rank, and
it runs for as long as it is the anchor:

- all prefills of the rank have a duration: ``max(0, sum - floor(anchor * elapsed / duration))``. A
  prefill that takes longer than predicted thus eats into the tokens of those behind it;
- some have none: only the anchor falls, to ``ceil(anchor * (1 - elapsed / duration))``, at least 0.

A duration of 0 counts no tokens of its own. Source: Dynamo 1.6 (``ais`` prefill load model).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final

from router_core.changes import STAGES, Stage
from router_core.errors import SnapshotError
from router_core.forms import (
    BLOCK_NAME,
    COUNT,
    COUNT_MAX,
    SECONDS,
    TEXT,
    TIME,
    Each,
    Fields,
    OneOf,
    Real,
    Whole,
    check_once,
)
from router_core.held_blocks import HeldBlocks, HeldChains, NotChains
from router_core.load_order import LoadOrders
from router_core.worker_sets import Overlaps

_FORM: Final = Each(
    Fields(
        {
            "request_id": TEXT,
            "stage": OneOf(STAGES),
            "slot": COUNT,
            "prefill_tokens": COUNT,
            "sequence_hashes": Each(BLOCK_NAME),
            "anonymous_blocks": COUNT,
            "booked_at": TIME,
            "seen_at": TIME,
            "output_blocks": COUNT,
            "adjustment": Real(-COUNT_MAX, 0),
        },
        {"predicted_s": SECONDS, "anchor_since": TIME, "chains": Each(Whole(1, COUNT_MAX))},
    )
)
"""What `ActiveSequences.dump` writes."""


def decay_fraction(generated: int, expected: int) -> float:
    """The weight of a request's own blocks after ``generated`` of ``expected`` output tokens.

    0 to 1: the nearer its end, the sooner its blocks are free. Source: Dynamo 1.6.
    """
    return max(0.0, 1.0 - generated / max(1, expected))


@dataclass(slots=True)
class ActiveRequest:
    """One booking. ``prefill_tokens`` is 0 after the first output token.

    ``predicted_s``: predicted duration of its prefill in seconds; None: not predicted. ``chains``:
    the lengths of the chains that the hashes consist of; empty: not known.
    """

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
    predicted_s: float | None = None
    chains: tuple[int, ...] = ()


@dataclass(slots=True)
class _Prefills:
    """The prefills of a rank, oldest first, of which ``predicted`` have a duration: at least one.

    ``tokens`` is their sum without decay; the first is the anchor ``since`` that time. The other
    fields follow from these: ``gone`` tokens count no more, and of the rest up to ``most`` go, as
    many as ``anchor`` in each ``duration``.
    """

    tokens: int
    since: float
    active: dict[tuple[str, Stage], ActiveRequest] = field(default_factory=dict)
    predicted: int = 0
    gone: int = 0
    most: int = 0
    anchor: int = 0
    duration: float = 1.0

    def update_rates(self) -> None:
        """Derive what is derived, after a prefill began or ended."""
        first = next(iter(self.active.values()))
        self.gone, self.anchor, self.duration = 0, first.prefill_tokens, 1.0
        self.most = self.tokens if self.predicted == len(self.active) else self.anchor
        if first.predicted_s is None:
            self.anchor = 0
        elif first.predicted_s > 0:
            self.duration = first.predicted_s
        else:
            self.gone, self.anchor = self.anchor, 0

    def tokens_left(self, now: float) -> int:
        """Prompt tokens that are expected to wait still, 0 to ``tokens``."""
        # A tiny duration makes the product infinite.
        elapsed = now - self.since
        went = self.anchor * (elapsed / self.duration) if elapsed > 0 else 0.0
        return self.tokens - self.gone - int(min(went, self.most))


@dataclass(frozen=True, slots=True)
class PotentialLoad:
    """The load of a rank with one more request: prompt tokens to compute, KV blocks held."""

    prefill_tokens: int
    decode_blocks: int


class ActiveSequences:
    """Bookings, and the per-slot columns that the cost reads. Times are seconds of one clock.

    Where a prefill has a predicted duration, ``prefill_tokens`` of its slot are those of the last
    change there or of the last :meth:`advance`, whichever is later.
    """

    def __init__(self) -> None:
        self.prefill_tokens: list[int] = []
        self.decode_blocks: list[int] = []
        self.requests: list[int] = []
        #: Hashes of blocks that all bookings together have.
        self.hashes = 0
        self._blocks: list[int] = []
        self._adjusted: list[float] = []
        self._bookings: dict[tuple[str, Stage], ActiveRequest] = {}
        self._stages: dict[str, tuple[Stage, ...]] = {}
        #: The keys of the bookings of each slot, oldest first.
        self._of_slot: list[dict[tuple[str, Stage], None]] = []
        #: By chains as long as the hashes of all bookings are known to be chains.
        self._held: HeldBlocks | HeldChains = HeldChains()
        #: Slots with a prefill whose duration is predicted: their prefill tokens fall with time.
        self.decaying: dict[int, _Prefills] = {}
        #: The ranks by their load, for decisions.
        self.orders = LoadOrders()

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
            self._of_slot.extend({} for _ in range(missing))

    def shared_blocks(self, sequence_hashes: Sequence[int], candidates: int) -> Overlaps:
        """Leading blocks of the prompt that running requests hold, by slot."""
        return self._held.find_shared(sequence_hashes, candidates)

    # -- prefill that falls with time ------------------------------------------------------

    def advance(self, now: float) -> list[int]:
        """Set the prefill tokens of all slots to those of ``now``; returns the changed slots."""
        column, changed = self.prefill_tokens, []
        for slot, prefills in self.decaying.items():
            left = prefills.tokens_left(now)
            if left != column[slot]:
                column[slot] = left
                self.orders.note_change(slot)
                changed.append(slot)
        return changed

    def booked_prefill(self, slot: int) -> int:
        """The prefill tokens of a slot without decay: those of all prefills that began there."""
        prefills = self.decaying.get(slot)
        return self.prefill_tokens[slot] if prefills is None else prefills.tokens

    def without_decay(self) -> ActiveSequences:
        """A view of the same bookings whose prefill tokens do not fall with time; to read only."""
        other = copy(self)
        other.prefill_tokens = list(map(self.booked_prefill, range(len(self.prefill_tokens))))
        other.decaying = {}
        other.orders = LoadOrders()
        return other

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
        predicted_s: float | None = None,
        chains: tuple[int, ...] = (),
    ) -> bool:
        """Count a request on a slot; False, and nothing changes, if that hop is booked already.

        ``predicted_s``: predicted duration of its prefill. ``chains``: the lengths of the chains
        that the hashes consist of; empty: not known.
        """
        key = (request_id, stage)
        if key in self._bookings:
            return False
        hashes = tuple(sequence_hashes)
        if sum(chains) != len(hashes):
            chains = ()
        booking = ActiveRequest(
            request_id, stage, slot, prefill_tokens, hashes, anonymous_blocks, now, now
        )
        booking.chains = chains
        # Before the sum is read: it may count the blocks of all bookings again.
        held = self._hold(booking) if hashes else 0
        self._blocks[slot] += anonymous_blocks + held
        self._bookings[key] = booking
        self._stages[request_id] = (*self._stages.get(request_id, ()), stage)
        self._of_slot[slot][key] = None
        if prefill_tokens and (predicted_s is not None or slot in self.decaying):
            booking.predicted_s = predicted_s
            self._begin_prefill(key, booking, now)
        else:
            self.prefill_tokens[slot] += prefill_tokens
        self.requests[slot] += 1
        self.hashes += len(hashes)
        self._round(slot)
        return True

    def prefill_done(self, request_id: str, now: float) -> tuple[int, ...]:
        """End the request's prefill load; returns the slots whose load changed."""
        changed = []
        for stage in self._stages.get(request_id, ()):
            booking = self._bookings[request_id, stage]
            booking.seen_at = now
            if booking.prefill_tokens:
                self._end_prefill((request_id, stage), booking, now)
                self.orders.note_change(booking.slot)
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
            exclusive += self._exclusive(booking)
            lowered = (fraction - 1.0) * exclusive
            self._adjusted[slot] += lowered - booking.adjustment
            booking.adjustment = lowered
        self._round(slot)
        return slot

    def free(self, request_id: str, stage: Stage | None, now: float) -> tuple[int, ...]:
        """End the request on one hop or on all; returns the slots whose load changed."""
        stages = self._stages.get(request_id, ())
        ending = stages if stage is None else tuple(s for s in stages if s == stage)
        changed = []
        for hop in ending:
            booking = self._bookings[request_id, hop]
            slot = booking.slot
            gone = self._drop(booking) if booking.sequence_hashes else 0
            del self._bookings[request_id, hop]
            self._of_slot[slot].pop((request_id, hop), None)
            if booking.prefill_tokens:
                self._end_prefill((request_id, hop), booking, now)
            self.requests[slot] -= 1
            self.hashes -= len(booking.sequence_hashes)
            self._blocks[slot] -= booking.anonymous_blocks + booking.output_blocks + gone
            self._adjusted[slot] -= booking.adjustment
            self._round(slot)
            changed.append(slot)
        if not self._bookings and isinstance(self._held, HeldBlocks):
            self._held = HeldChains()
        if len(ending) < len(stages):
            self._stages[request_id] = tuple(s for s in stages if s not in ending)
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
            self.free(request_id, stage, now)
        return tuple(stale)

    def drop_slot(self, slot: int) -> tuple[tuple[str, Stage], ...]:
        """Free all bookings of a rank that is removed; returns their keys."""
        prefills = self.decaying.pop(slot, None)
        if prefills is not None:
            self.prefill_tokens[slot] = prefills.tokens
            self.orders.note_change(slot)
        keys = tuple(self._of_slot[slot])
        for request_id, stage in keys:
            self.free(request_id, stage, 0.0)
        return keys

    # -- snapshot --------------------------------------------------------------------------

    def dump(self) -> list[dict[str, Any]]:
        """The bookings as plain data, in booking order.

        Only predicted ones have ``predicted_s``, and only a predicted anchor ``anchor_since``; only
        those whose hashes are known to be chains have ``chains``.
        """
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
                **({"chains": list(b.chains)} if b.chains else {}),
                **self._dump_prediction(b),
            }
            for b in self._bookings.values()
        ]

    def _dump_prediction(self, booking: ActiveRequest) -> dict[str, float]:
        prefills = self.decaying.get(booking.slot)
        if prefills is None or booking.predicted_s is None or not booking.prefill_tokens:
            return {}
        plain = {"predicted_s": booking.predicted_s}
        if next(iter(prefills.active.values())) is booking:
            plain["anchor_since"] = prefills.since
        return plain

    @classmethod
    def restore(cls, plain: Sequence[dict[str, Any]], capacity: int) -> ActiveSequences:
        """The inverse of :meth:`dump`; raises SnapshotError."""
        _FORM.check(plain, "load")
        check_once(((row["request_id"], row["stage"]) for row in plain), "load", "this booking")
        load = cls()
        load.grow(capacity)
        for place, row in enumerate(plain):
            if row["slot"] >= capacity:
                raise SnapshotError(f"load[{place}].slot: slot {row['slot']} does not exist")
            load.book(
                row["request_id"],
                row["stage"],
                row["slot"],
                prefill_tokens=row["prefill_tokens"],
                sequence_hashes=row["sequence_hashes"],
                anonymous_blocks=row["anonymous_blocks"],
                now=row["booked_at"],
                predicted_s=row.get("predicted_s"),
                chains=tuple(row.get("chains", ())),
            )
            if "anchor_since" in row and row["slot"] in load.decaying:
                load.decaying[row["slot"]].since = row["anchor_since"]
            booking = load._bookings[row["request_id"], row["stage"]]
            booking.seen_at = row["seen_at"]
            booking.output_blocks = row["output_blocks"]
            booking.adjustment = row["adjustment"]
            load._blocks[booking.slot] += booking.output_blocks
            load._adjusted[booking.slot] += booking.adjustment
            load._round(booking.slot)
        return load

    # -- inside ----------------------------------------------------------------------------

    def _begin_prefill(self, key: tuple[str, Stage], booking: ActiveRequest, now: float) -> None:
        slot = booking.slot
        prefills = self.decaying.get(slot)
        if prefills is None:
            # Those before it have no duration, so the time since when one is the anchor is unused.
            prefills = self.decaying[slot] = _Prefills(self.prefill_tokens[slot], now)
            earlier = (
                (other, self._bookings[other]) for other in self._of_slot[slot] if other != key
            )
            prefills.active.update((other, row) for other, row in earlier if row.prefill_tokens)
        prefills.active[key] = booking
        prefills.tokens += booking.prefill_tokens
        prefills.predicted += booking.predicted_s is not None
        prefills.update_rates()
        self.prefill_tokens[slot] = prefills.tokens_left(now)

    def _end_prefill(self, key: tuple[str, Stage], booking: ActiveRequest, now: float) -> None:
        slot = booking.slot
        prefills = self.decaying.get(slot)
        if prefills is None:
            self.prefill_tokens[slot] -= booking.prefill_tokens
            return
        if next(iter(prefills.active)) == key:
            prefills.since = now
        del prefills.active[key]
        prefills.tokens -= booking.prefill_tokens
        prefills.predicted -= booking.predicted_s is not None
        if prefills.predicted:
            prefills.update_rates()
            self.prefill_tokens[slot] = prefills.tokens_left(now)
        else:
            del self.decaying[slot]
            self.prefill_tokens[slot] = prefills.tokens

    def _hold(self, booking: ActiveRequest) -> int:
        """Hold the blocks of a booking; returns how many no request held on its slot before."""
        hashes, chains = booking.sequence_hashes, booking.chains
        if not chains and isinstance(self._held, HeldChains):
            self._hold_by_hash()
        else:
            try:
                return self._held.hold(booking.slot, hashes, chains)
            except NotChains:
                self._hold_by_hash()
        return self._held.hold(booking.slot, hashes, chains)

    def _drop(self, booking: ActiveRequest) -> int:
        """Release the blocks of a booking; returns how many no request holds on its slot now."""
        try:
            return self._held.drop(booking.slot, booking.sequence_hashes, booking.chains)
        except NotChains:
            self._hold_by_hash()
            return self._held.drop(booking.slot, booking.sequence_hashes, booking.chains)

    def _exclusive(self, booking: ActiveRequest) -> int:
        """How many prompt blocks of a booking no other booking on its slot has."""
        try:
            return self._held.exclusive(booking.slot, booking.sequence_hashes, booking.chains)
        except NotChains:
            self._hold_by_hash()
            return self._held.exclusive(booking.slot, booking.sequence_hashes, booking.chains)

    def _hold_by_hash(self) -> None:
        """Count by hash from now on, until no booking is left: some hashes are not chains."""
        held = self._held = HeldBlocks()
        blocks = [0] * len(self._blocks)
        for booking in self._bookings.values():
            new = held.hold(booking.slot, booking.sequence_hashes)
            blocks[booking.slot] += new + booking.anonymous_blocks + booking.output_blocks
        changed = [slot for slot, count in enumerate(blocks) if count != self._blocks[slot]]
        self._blocks[:] = blocks
        for slot in changed:
            self._round(slot)

    def _round(self, slot: int) -> None:
        # Half a block counts as a block, as in Dynamo.
        self.decode_blocks[slot] = int(self._blocks[slot] + self._adjusted[slot] + 0.5)
        self.orders.note_change(slot)
