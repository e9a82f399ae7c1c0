"""The indexes of workers whose KV events are in a stream (Dynamo 1.0 to 1.3, durable KV events).

The stream has the events of all workers of a component, each rank's numbered by itself, and keeps
them for a limited time. A rank's index is complete if none of its numbers is missing. Where the
stream has lost messages, a rank may have lost its newest events too: it is complete again with the
next event, if that has the expected number.
A rank whose numbers go back in a message that the stream did not have before is a new process: its
index starts empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from xxhash import xxh3_64_intdigest

from dynctl.adapters.ports import (
    ChannelCode,
    ChannelCondition,
    ChannelMessage,
    ChannelValue,
    IndexUpdate,
    StreamCode,
    StreamCondition,
    StreamValue,
)
from dynctl.base.decode_errors import WireError
from dynctl.documents.workers import StreamState
from dynctl.wire.dynamo.events import RouterEvent, UnknownEvent, decode_durable_event
from dynctl.wire.dynamo.radix_state import RADIX_STATE, decode_radix_state
from dynctl.wire.event_sequence import EventSequence, Verdict
from router_core import Cleared

Rank = tuple[int, int]
"""Worker id and rank."""
#: Workers that are not registered and have events in the stream; above this any worker may be one.
MAX_SKIPPED: Final = 10_000


@dataclass(slots=True)
class _Rank:
    sequence: EventSequence = field(default_factory=EventSequence)
    missing: int = 0
    doubted: bool = False
    reported: int | None = None
    last_at: float | None = None
    batches: int = 0
    gaps: int = 0
    lost: int = 0
    duplicates: int = 0
    unknown_events: int = 0
    restarts: int = 0
    #: Number in the stream of its newest message.
    newest: int = 0
    #: Events before its first one are in a snapshot; the snapshot has some.
    in_snapshot: bool = False
    restored: bool = False

    @property
    def incomplete(self) -> int:
        """The events that are missing, at least 1 while an unknown number may be."""
        return max(self.missing, int(self.doubted))


class DurableEvents:
    """The ranks of one stream. Values go to ``emit`` in order; ``clock`` is monotonic seconds."""

    def __init__(self, emit: Callable[[StreamValue], None], clock: Callable[[], float]) -> None:
        self._emit = emit
        self._clock = clock
        self._ranks: dict[Rank, _Rank] = {}
        self._skipped: set[int] = set()
        self._connected = False
        self._truncated = False  # messages are missing, of any rank
        self._from_snapshot = False  # messages before the stream are in a snapshot
        self._malformed = 0
        self._problem = "its stream is being read"
        self._settled = asyncio.Event()
        self._reading = 0

    # -- reading ---------------------------------------------------------------------------

    async def settled(self) -> None:
        """Wait until the stream is read, or cannot be read for now."""
        await self._settled.wait()

    @property
    def empty(self) -> bool:
        """Whether no worker is attached."""
        return not self._ranks

    def read(self) -> frozenset[int]:
        """The workers of which events are read: before the first one a worker may publish none."""
        seen = (
            key
            for key, state in self._ranks.items()
            if state.sequence.last is not None or state.restored
        )
        return frozenset(worker_id for worker_id, _ in seen) if self._connected else frozenset()

    def not_current(self) -> dict[Rank, str]:
        """The ranks whose index is incomplete or out of date, and why."""
        if not self._connected:
            return dict.fromkeys(self._ranks, self._problem)
        why = "its stream does not have all of its events any more"
        return {rank: why for rank, state in self._ranks.items() if state.incomplete}

    def states(self) -> dict[Rank, StreamState]:
        """The state of each rank; ``last_seq`` is its last event's number."""
        return {
            rank: StreamState(
                connected=self._connected,
                last_seq=state.sequence.last,
                last_batch_at=state.last_at,
                batches=state.batches,
                gaps=state.gaps,
                lost=state.lost,
                missing=state.incomplete,
                duplicates=state.duplicates,
                restarts=state.restarts,
                malformed=self._malformed,
                unknown_events=state.unknown_events,
            )
            for rank, state in self._ranks.items()
        }

    # -- ranks -----------------------------------------------------------------------------

    def attach(self, worker_id: int, ranks: Iterable[int]) -> bool:
        """Take the events of a worker from now on; whether the stream must be read again for it."""
        new = [(worker_id, rank) for rank in ranks if (worker_id, rank) not in self._ranks]
        for rank in new:
            self._ranks[rank] = _Rank(doubted=self._truncated, in_snapshot=self._from_snapshot)
            if self._connected:
                self._report_connected(rank)
        seen = worker_id in self._skipped or len(self._skipped) >= MAX_SKIPPED
        return bool(new) and seen

    def detach(self, worker_id: int) -> None:
        """The worker is not registered any more."""
        for rank in [rank for rank in self._ranks if rank[0] == worker_id]:
            del self._ranks[rank]

    def restart(self) -> None:
        """The stream is read again from its start; known events are skipped by their numbers."""
        self._skipped.clear()
        self._disconnect("its stream is being read again")
        self._settled.clear()

    def reader(self) -> Callable[[ChannelValue], None]:
        """The callback for a new follower; an earlier one is not listened to any more."""
        self._reading = reading = self._reading + 1

        def take(value: ChannelValue) -> None:
            if reading == self._reading:
                self._take(value)

        return take

    # -- the stream ------------------------------------------------------------------------

    def _take(self, value: ChannelValue) -> None:
        if isinstance(value, ChannelCondition):
            self._condition(value)
            return
        if value.topic == RADIX_STATE:
            self._snapshot(value.payload)
            return
        try:
            event, first = decode_durable_event(value.payload)
        except WireError as error:
            self._malformed += 1
            self._doubt_all(f"message {value.sequence:,} of the stream is unreadable: {error}")
            return
        state = self._ranks.get((event.worker_id, event.dp_rank))
        if state is not None:
            self._event(state, event, first, value)
        elif len(self._skipped) < MAX_SKIPPED:
            self._skipped.add(event.worker_id)

    def _snapshot(self, payload: bytes) -> None:
        """Take what a router had indexed when it removed messages of the stream."""
        try:
            events = decode_radix_state(payload)
        except WireError as error:
            self._malformed += 1
            self._doubt_all(f"the snapshot of its events is unreadable: {error}")
            return
        self._from_snapshot = True
        for state in self._ranks.values():
            state.in_snapshot = True
        for event in events:
            rank = (event.worker_id, event.dp_rank)
            if rank not in self._ranks:
                if len(self._skipped) < MAX_SKIPPED:
                    self._skipped.add(event.worker_id)
            elif self._ranks[rank].sequence.last is None and not isinstance(
                event.event, UnknownEvent
            ):
                self._ranks[rank].restored = True
                self._emit(IndexUpdate(*rank, event.event_id, (event.event,), 0.0))

    def _event(self, state: _Rank, event: RouterEvent, first: int, message: ChannelMessage) -> None:
        rank = (event.worker_id, event.dp_rank)
        digest = xxh3_64_intdigest(message.payload)
        # A message that is read again has a number that was read before.
        is_new = message.sequence > state.newest
        state.newest = max(state.newest, message.sequence)
        started = state.sequence.last is not None
        if started and state.sequence.judge(event.event_id, digest, reconnected=is_new) is (
            Verdict.RESTART
        ):
            self._restart(rank, state, event.event_id)
        if state.sequence.last is None:
            # A stream that has lost nothing has a rank's first event, which is 0 or 1.
            complete = not state.doubted and event.event_id == 1
            start = 1 if complete else min(first, event.event_id)
            # What came before is in the snapshot, which has no number.
            state.sequence = EventSequence(event.event_id if state.in_snapshot else start)
        verdict = state.sequence.judge(event.event_id, digest)
        if verdict not in (Verdict.NEXT, Verdict.GAP):
            state.duplicates += 1
            return
        lost = state.sequence.advance(event.event_id, digest)
        state.gaps += bool(lost)
        state.lost += lost
        state.missing = 0 if isinstance(event.event, Cleared) else state.missing + lost
        state.doubted = False
        state.batches += 1
        state.last_at = self._clock()
        if isinstance(event.event, UnknownEvent):
            state.unknown_events += 1
        else:
            self._emit(IndexUpdate(*rank, event.event_id, (event.event,), 0.0))
        if self._connected:
            self._report_state(rank, state)

    def _restart(self, rank: Rank, state: _Rank, number: int) -> None:
        last = state.sequence.last
        state.sequence.reset()
        state.restarts += 1
        state.missing, state.doubted, state.in_snapshot, state.reported = 0, False, False, None
        self._emit(
            StreamCondition(
                rank[0],
                StreamCode.ENGINE_RESTARTED.value,
                f"the worker restarted: event {number:,} came after {last:,}; its index starts "
                "empty",
                (rank[1],),
                clears=True,
                missing=0,
            )
        )

    def _condition(self, value: ChannelCondition) -> None:
        match value.code:
            case ChannelCode.CHANNEL_CONNECTED:
                self._connected = True
                for rank in self._ranks:
                    self._report_connected(rank)
                self._settled.set()
            case ChannelCode.CHANNEL_DISCONNECTED:
                self._disconnect(value.message)
                self._settled.set()
            case ChannelCode.EVENTS_DROPPED:
                self._doubt_all(value.message)

    def _disconnect(self, why: str) -> None:
        self._connected, self._problem = False, why
        for rank in self._ranks:
            self._report(rank, StreamCode.STREAM_DISCONNECTED, why)

    def _doubt_all(self, why: str) -> None:
        self._truncated = True
        for rank, state in self._ranks.items():
            state.doubted = True
            if self._connected:
                self._report_state(rank, state, why)

    # -- reports ---------------------------------------------------------------------------

    def _report_connected(self, rank: Rank) -> None:
        self._report(rank, StreamCode.STREAM_CONNECTED, "its stream is read")
        state = self._ranks[rank]
        state.reported = None
        self._report_state(rank, state)

    def _report_state(self, rank: Rank, state: _Rank, why: str = "") -> None:
        missing = state.incomplete
        if missing == state.reported:
            return
        state.reported = missing
        if missing:
            why = why or "the stream does not have all of its events"
            message = f"its index is incomplete: {why}"
            self._report(rank, StreamCode.EVENTS_LOST, message, missing)
        else:
            self._report(rank, StreamCode.INDEX_CURRENT, "nothing is missing", 0)

    def _report(
        self, rank: Rank, code: StreamCode, message: str, missing: int | None = None
    ) -> None:
        worker_id, number = rank
        self._emit(StreamCondition(worker_id, code.value, message, (number,), missing=missing))
