"""Recovery: keep the index of one rank complete from its KV events.

Events of a publisher are numbered from 1 without gaps. Earlier and lost events are read from the
worker's local indexer over the request plane; live events wait meanwhile. If the worker cannot be
read, the gap stays: the index then misses blocks, may contain evicted ones, and is marked so.
After a lost connection the last event is read again too: a process that does not have it as it was
received is a new one, and the index of the old one is invalid.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from dynctl.adapters.ports import (
    ChannelCode,
    ChannelCondition,
    ChannelValue,
    IndexUpdate,
    RequestPlaneError,
    StreamCode,
    StreamCondition,
    StreamValue,
)
from dynctl.base.decode_errors import WireError
from dynctl.documents.workers import StreamState
from dynctl.wire.dynamo.discovery import EventSource
from dynctl.wire.dynamo.events import (
    RouterEvent,
    UnknownEvent,
    decode_router_events,
)
from dynctl.wire.dynamo.recovery import (
    Events,
    EventSlices,
    InvalidRange,
    RecoveryAnswer,
    RecoveryError,
    TooNew,
    TreeDump,
)
from dynctl.wire.event_sequence import EventSequence, Verdict

#: Live events that wait for a recovery; above this they are dropped and requested again.
MAX_WAITING: Final = 20_000
#: Requests before a gap is accepted: events may be lost again while a response is on its way.
_ROUNDS: Final = 3
_RETRY_S: Final = (1.0, 2.0, 5.0, 15.0, 30.0)


class Recover(Protocol):
    """Request a worker's events from ``start`` on (None: its whole index).

    Raises RequestPlaneError or WireError.
    """

    def __call__(self, source: EventSource, start: int | None) -> Awaitable[RecoveryAnswer]: ...


@dataclass(slots=True)
class _RankCounts:
    batches: int = 0
    gaps: int = 0
    healed: int = 0
    lost: int = 0
    duplicates: int = 0
    restarts: int = 0
    malformed: int = 0
    unknown_events: int = 0


class RankIndex:
    """The events of one rank. Values go to ``emit`` in order; ``clock`` is monotonic seconds.

    Give every value of the rank's channel to :meth:`take` and run :meth:`run` beside it.
    """

    def __init__(
        self,
        source: EventSource,
        recover: Recover,
        emit: Callable[[StreamValue], None],
        clock: Callable[[], float],
    ) -> None:
        self.source = source
        self._recover = recover
        self._emit = emit
        self._clock = clock
        self._counts = _RankCounts()
        self._connected = False
        self._sequence = EventSequence(first=1)
        self._last_at: float | None = None
        self._missing = 0
        self._waiting: list[RouterEvent] = []
        self._due = asyncio.Event()
        self._settled = asyncio.Event()
        self._last_event: RouterEvent | None = None
        self._unproven = False  # after a lost connection the worker may be a new process
        self._recovering = True  # live events wait for a response
        self._unrecovered = False  # recovery failed: events are applied over gaps
        self._failures = 0
        self._problem = "recovery has not started yet"
        self._disconnected = ""
        self._reported: set[str] = set()

    # -- reading ---------------------------------------------------------------------------

    def state(self) -> StreamState:
        """A snapshot of the counters; ``last_seq`` is the last event's number."""
        counts = self._counts
        return StreamState(
            connected=self._connected,
            last_seq=self._sequence.last,
            last_batch_at=self._last_at,
            batches=counts.batches,
            gaps=counts.gaps,
            healed=counts.healed,
            lost=counts.lost,
            missing=self._missing,
            duplicates=counts.duplicates,
            restarts=counts.restarts,
            malformed=counts.malformed,
            unknown_events=counts.unknown_events,
        )

    @property
    def current(self) -> bool:
        """Whether every event so far is in the index, or queued for it."""
        return self._connected and self._settled.is_set() and not self._missing

    @property
    def problem(self) -> str | None:
        """Why the index is not current; None if it is."""
        if self.current:
            return None
        return self._problem if self._connected else self._disconnected or self._problem

    async def settled(self) -> None:
        """Wait until recovery succeeded, or failed for now."""
        await self._settled.wait()

    # -- the channel -----------------------------------------------------------------------

    def take(self, value: ChannelValue) -> None:
        """A value of the rank's channel, in order."""
        if isinstance(value, ChannelCondition):
            self._condition(value)
            return
        try:
            events = decode_router_events(value.payload)
        except WireError as error:
            self._counts.malformed += 1
            self._report_once(StreamCode.MALFORMED_BATCH, f"a batch is unreadable: {error}")
            self.request_recovery()  # its events are missing now
            return
        self.take_events(events)

    def take_events(self, events: Iterable[RouterEvent]) -> None:
        """The decoded events of a message of the rank's channel."""
        self._counts.batches += 1
        self._last_at = self._clock()
        for event in events:
            self._live(event)

    def _condition(self, value: ChannelCondition) -> None:
        match value.code:
            case ChannelCode.CHANNEL_CONNECTED:
                self._connected = True
                self._report(StreamCode.STREAM_CONNECTED, value.message)
                self._unproven = self._sequence.last is not None
                self.request_recovery()
            case ChannelCode.CHANNEL_DISCONNECTED:
                self._connected = False
                self._disconnected = value.message
                self._report(StreamCode.STREAM_DISCONNECTED, value.message)
                if self._sequence.last is None:
                    self.request_recovery()  # the worker may answer anyway
            case ChannelCode.PUBLISHER_RESTARTED:
                self._note_restart(value.message)
            case ChannelCode.EVENTS_DROPPED:
                # Requested at once: no later event would show a loss at the end of a burst.
                self.request_recovery()
            case ChannelCode.MALFORMED_MESSAGE:
                self._counts.malformed += 1
                self._report_once(StreamCode.MALFORMED_MESSAGE, value.message)
                self.request_recovery()
            case ChannelCode.FOREIGN_PUBLISHER:
                self._report_once(StreamCode.FOREIGN_PUBLISHER, value.message)

    def _live(self, event: RouterEvent) -> None:
        if (event.worker_id, event.dp_rank) != (self.source.worker_id, self.source.dp_rank):
            self._report_once(
                StreamCode.FOREIGN_PUBLISHER,
                f"an event of worker {event.worker_id:x} rank {event.dp_rank} on the channel "
                f"of worker {self.source.worker_id:x} rank {self.source.dp_rank}; skipped",
            )
            return
        if self._recovering:
            self._wait(event)
            return
        match self._sequence.judge(event.event_id):
            case Verdict.NEXT:
                self._apply([event])
            case Verdict.GAP if self._unrecovered:
                self._skip_to(event.event_id)
                self._apply([event])
            case Verdict.GAP:
                self._counts.gaps += 1
                self.request_recovery()
                self._wait(event)
            case _:
                self._counts.duplicates += 1

    def _wait(self, event: RouterEvent) -> None:
        self._waiting.append(event)
        if len(self._waiting) > MAX_WAITING:
            # Nothing is lost: the worker's response has the events that are dropped here.
            del self._waiting[: MAX_WAITING // 2]
            self.request_recovery()

    # -- recovery --------------------------------------------------------------------------

    def request_recovery(self) -> None:
        """Request the worker's index, or the events after the last one."""
        self._problem = "the worker has not answered yet"
        self._recovering = True
        self._due.set()
        self._settled.clear()

    def read_again(self) -> None:
        """Request the worker's whole index, whatever was received of it."""
        self._unrecovered = True
        self.request_recovery()

    async def run(self) -> None:
        """Recover whenever events are missing, until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await self._recover_until_complete()
                self._failures = 0
            except (RequestPlaneError, WireError) as error:
                self._failures += 1
                self._give_up(str(error))
            except Exception:
                self._due.set()  # so that the restarted task recovers first
                raise
            self._settled.set()
            if self._failures:
                pause = _RETRY_S[min(self._failures, len(_RETRY_S)) - 1]
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._due.wait()
                self._due.set()

    async def _recover_until_complete(self) -> None:
        for _ in range(_ROUNDS):
            self._due.clear()
            await self._round()
            known = self._sequence.last is not None or self._sequence.joining
            if known and not self._waiting and not self._due.is_set():
                self._recovering = self._unrecovered = False
                self._problem, self._missing = "", 0
                self._emit_condition(StreamCode.INDEX_CURRENT, "nothing is missing", missing=0)
                return
        raise RequestPlaneError(f"events are still missing after {_ROUNDS} responses")

    async def _round(self) -> None:
        # After a failed recovery gaps are possible anywhere: only the whole index is certain.
        started = self._sequence.last is not None and not self._unrecovered
        start = self._sequence.next_number if started else None
        last_seen = self._sequence.last if started and self._unproven else None
        if last_seen is not None:
            start = last_seen  # the same process has this event, and returns it as it was
        answer = await self._recover(self.source, start)
        if last_seen is not None and not self._is_same_process(answer, last_seen):
            self._note_restart(f"it does not have event {last_seen:,} as it was received")
            return
        self._unproven = False
        if await self._take_answer(answer):
            self._apply_waiting()

    async def _take_answer(self, answer: RecoveryAnswer) -> bool:
        """Take what a worker answered; returns whether its process is the one that was known.
        Raises RequestPlaneError."""
        match answer:
            case TreeDump(events, last):
                self._emit_condition(
                    StreamCode.INDEX_CURRENT, "the worker's whole index was read", clears=True
                )
                # The numbers inside a dump are arbitrary: its last number is a field of its own.
                await self._take_over(events, after=None)
                if last is None:
                    # Waiting events that the dump has already are applied again, in their order:
                    # the result is the same.
                    self._sequence.join()
                else:
                    self._sequence.advance(last)
            case Events(events, last):
                before = self._sequence.last or 0
                await self._take_over(events, after=before)
                self._sequence.advance(max(before, last or 0))
            case TooNew(newest_available=newest):
                if self._sequence.last is not None and not answer.nothing_missed:
                    self._note_restart(
                        f"it has {newest} events, {self._sequence.last} were received"
                    )
                    return False
                self._sequence.advance(newest)
            case InvalidRange():
                raise RequestPlaneError("the worker cannot export its index: invalid range")
            case RecoveryError():
                raise RequestPlaneError(f"the worker cannot export its index: {answer.message}")
        return True

    def _is_same_process(self, answer: RecoveryAnswer, last_seen: int) -> bool:
        """Whether an answer from event ``last_seen`` on is of the process that published it.

        A dump replaces all that is known, so that it does not matter; a failure shows nothing.
        """
        if isinstance(answer, TooNew):
            return False
        if not isinstance(answer, Events):
            return True
        first = next((event for piece in answer.events.slices() for event in piece), None)
        if first is None or first.event_id != last_seen:
            return False
        known = self._last_event
        return known is None or known.event_id != last_seen or _content(known) == _content(first)

    async def _take_over(self, events: EventSlices, after: int | None) -> None:
        for piece in events.slices():
            new = piece
            if after is not None:
                new = tuple(event for event in piece if event.event_id > after)
                self._counts.healed += len(new)
            self._apply(new)
            await asyncio.sleep(0)

    def _apply_waiting(self) -> None:
        """Apply the waiting events up to the next gap; the rest waits for the next response."""
        waiting, self._waiting = sorted(self._waiting, key=_number), []
        for at, event in enumerate(waiting):
            match self._sequence.judge(event.event_id):
                case Verdict.NEXT:
                    self._apply([event])
                case Verdict.GAP:
                    self._waiting = waiting[at:]
                    return
                case _:
                    self._counts.duplicates += 1

    def _give_up(self, why: str) -> None:
        """Continue without recovery; events before the next one are lost for now."""
        self._problem = why
        self._recovering, self._unrecovered = False, True
        # Events before the subscription are missing too, an unknown number of them.
        self._missing = max(self._missing, 1)
        for event in sorted(self._waiting, key=_number):
            if self._sequence.judge(event.event_id) in (Verdict.NEXT, Verdict.GAP):
                self._skip_to(event.event_id)
                self._apply([event])
        self._waiting = []
        self._emit_condition(
            StreamCode.EVENTS_LOST, f"its index is incomplete: {why}", missing=self._missing
        )

    def _skip_to(self, number: int) -> None:
        """Count the missing events before ``number`` as lost."""
        lost = self._sequence.missing_before(number)
        if lost:
            self._counts.gaps += 1
            self._counts.lost += lost
            self._missing += lost

    def _note_restart(self, why: str) -> None:
        self._counts.restarts += 1
        self._sequence.reset()
        self._last_event, self._unproven = None, False
        self._waiting, self._missing = [], 0
        self._emit_condition(
            StreamCode.ENGINE_RESTARTED, f"the publisher restarted: {why}", clears=True, missing=0
        )
        self.request_recovery()

    # -- reports --------------------------------------------------------------------------

    def _apply(self, events: list[RouterEvent] | tuple[RouterEvent, ...]) -> None:
        if not events:
            return
        self._sequence.advance(events[-1].event_id)
        self._last_event = events[-1]
        known = []
        for event in events:
            if isinstance(event.event, UnknownEvent):
                self._counts.unknown_events += 1
                self._report_once(
                    StreamCode.UNKNOWN_EVENT, f"events of kind {event.event.kind!r} are skipped"
                )
            else:
                known.append(event.event)
        rank = (self.source.worker_id, self.source.dp_rank)
        self._emit(IndexUpdate(*rank, events[-1].event_id, tuple(known), 0.0))

    def _report_once(self, code: StreamCode, message: str) -> None:
        if code not in self._reported:
            self._reported.add(code)
            self._report(code, message)

    def _report(self, code: StreamCode, message: str) -> None:
        self._emit_condition(code, message)

    def _emit_condition(
        self, code: StreamCode, message: str, *, clears: bool = False, missing: int | None = None
    ) -> None:
        self._emit(
            StreamCondition(
                self.source.worker_id,
                code.value,
                message,
                (self.source.dp_rank,),
                clears=clears,
                missing=missing,
            )
        )


def _number(event: RouterEvent) -> int:
    return event.event_id


def _content(event: RouterEvent) -> tuple[object, ...]:
    """What an event says, however its columns are kept."""
    change = event.event
    columns = (getattr(change, name, ()) for name in ("block_hashes", "local_hashes"))
    parent = getattr(change, "parent_hash", None)
    return type(change), event.storage_tier, parent, *map(tuple, columns)
