"""Keep the index of one rank true from its KV events: gaps seen, healed, or admitted.

Events of a publisher are numbered from 1 without holes. What came before we listened, and what got
lost, is asked of the worker itself (its local indexer, over the request plane); live events wait
meanwhile. A worker that cannot be asked leaves a named gap: the index then lacks blocks and may
hold some that were evicted, and everything says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
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

#: Live events that wait for a recovery; beyond this they are let go and asked for again.
MAX_WAITING: Final = 20_000
#: Rounds of asking before a hole is accepted: each answer may be overtaken by new losses.
_ROUNDS: Final = 3
_RETRY_S: Final = (1.0, 2.0, 5.0, 15.0, 30.0)


class Recover(Protocol):
    """Asks a worker for its events from ``start`` on (None: everything it holds).

    Raises RequestPlaneError or WireError.
    """

    def __call__(self, source: EventSource, start: int | None) -> Awaitable[RecoveryAnswer]: ...


@dataclass(slots=True)
class _Counts:
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
        self._counts = _Counts()
        self._connected = False
        self._sequence = EventSequence(first=1)
        self._last_at: float | None = None
        self._missing = 0
        self._waiting: list[RouterEvent] = []
        self._due = asyncio.Event()
        self._settled = asyncio.Event()
        self._asking = True  # live events wait for an answer
        self._loose = False  # the worker could not be asked: events are taken as they come
        self._failures = 0
        self._why = "not asked yet"
        self._unheard = ""
        self._told: set[str] = set()

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
        """Whether every event up to now is in the index (or on its way into it)."""
        return self._connected and self._settled.is_set() and not self._missing

    @property
    def problem(self) -> str | None:
        """Why the index is not current; None if it is."""
        if self.current:
            return None
        return self._why if self._connected else self._unheard or self._why

    async def settled(self) -> None:
        """Until recovery succeeded, or failed for now."""
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
            self._tell_once(StreamCode.MALFORMED_BATCH, f"a batch is unreadable: {error}")
            self.request_recovery()  # whatever it held is missing now
            return
        self._counts.batches += 1
        self._last_at = self._clock()
        for event in events:
            self._live(event)

    def _condition(self, value: ChannelCondition) -> None:
        match value.code:
            case ChannelCode.CHANNEL_CONNECTED:
                self._connected = True
                self._tell(StreamCode.STREAM_CONNECTED, value.message)
                self.request_recovery()
            case ChannelCode.CHANNEL_DISCONNECTED:
                self._connected = False
                self._unheard = value.message
                self._tell(StreamCode.STREAM_DISCONNECTED, value.message)
                if self._sequence.last is None:
                    self.request_recovery()  # the worker may answer anyway
            case ChannelCode.PUBLISHER_RESTARTED:
                self._restarted(value.message)
            case ChannelCode.EVENTS_DROPPED:
                # Asked at once: no later event would show a loss at the end of a burst.
                self.request_recovery()
            case ChannelCode.MALFORMED_MESSAGE:
                self._counts.malformed += 1
                self._tell_once(StreamCode.MALFORMED_MESSAGE, value.message)
                self.request_recovery()
            case ChannelCode.FOREIGN_PUBLISHER:
                self._tell_once(StreamCode.FOREIGN_PUBLISHER, value.message)

    def _live(self, event: RouterEvent) -> None:
        if (event.worker_id, event.dp_rank) != (self.source.worker_id, self.source.dp_rank):
            self._tell_once(
                StreamCode.FOREIGN_PUBLISHER,
                f"an event of worker {event.worker_id:x} rank {event.dp_rank} came on the channel "
                f"of worker {self.source.worker_id:x} rank {self.source.dp_rank}; skipped",
            )
            return
        if self._asking:
            self._wait(event)
            return
        match self._sequence.judge(event.event_id):
            case Verdict.NEXT:
                self._apply([event])
            case Verdict.GAP if self._loose:
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
            # Nothing is lost for good: the answer of the worker covers what is let go here.
            del self._waiting[: MAX_WAITING // 2]
            self.request_recovery()

    # -- recovery --------------------------------------------------------------------------

    def request_recovery(self) -> None:
        """Have the worker say what it holds, or what came after the last event seen."""
        self._why = "it was asked and has not answered yet"
        self._asking = True
        self._due.set()
        self._settled.clear()

    async def run(self) -> None:
        """Recover whenever something is missing, until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await self._ask_until_whole()
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

    async def _ask_until_whole(self) -> None:
        for _ in range(_ROUNDS):
            self._due.clear()
            await self._round()
            if self._sequence.last is not None and not self._waiting and not self._due.is_set():
                self._asking = self._loose = False
                self._why, self._missing = "", 0
                self._emit_condition(StreamCode.INDEX_CURRENT, "nothing is missing", missing=0)
                return
        raise RequestPlaneError(f"its answers still leave a hole after {_ROUNDS} rounds")

    async def _round(self) -> None:
        # Events that were taken loosely may hide holes: only the whole index is sure then.
        started = self._sequence.last is not None and not self._loose
        start = self._sequence.expected if started else None
        answer = await self._recover(self.source, start)
        match answer:
            case TreeDump(events, last):
                self._emit_condition(
                    StreamCode.INDEX_CURRENT, "the worker's whole index is taken over", clears=True
                )
                # The numbers inside a dump mean nothing: where it ends is said beside it.
                await self._take_over(events, after=None)
                self._sequence.advance(last)
            case Events(events, last):
                await self._take_over(events, after=self._sequence.last or 0)
                self._sequence.advance(max(last, self._sequence.last or 0))
            case TooNew(newest_available=newest):
                if self._sequence.last is not None and not answer.nothing_missed:
                    self._restarted(f"it has {newest} events, we have seen {self._sequence.last}")
                    return
                self._sequence.advance(newest)
            case InvalidRange() | RecoveryError():
                told = answer.message if isinstance(answer, RecoveryError) else "invalid range"
                raise RequestPlaneError(f"the worker cannot say what it caches: {told}")
        self._follow_on()

    async def _take_over(self, events: EventSlices, after: int | None) -> None:
        for piece in events.slices():
            new = piece
            if after is not None:
                new = tuple(event for event in piece if event.event_id > after)
                self._counts.healed += len(new)
            self._apply(new)
            await asyncio.sleep(0)

    def _follow_on(self) -> None:
        """Apply what waited as far as it follows on; the rest waits for the next answer."""
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
        """Go on without an answer; what lies before the next event is lost for now."""
        self._why = why
        self._asking, self._loose = False, True
        # Whatever came before we listened is unknown too, though nobody can say how much it was.
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
        """Admit that the events before ``number`` that we did not see are lost."""
        lost = self._sequence.missing_before(number)
        if lost:
            self._counts.gaps += 1
            self._counts.lost += lost
            self._missing += lost

    def _restarted(self, why: str) -> None:
        self._counts.restarts += 1
        self._sequence.reset()
        self._waiting, self._missing = [], 0
        self._emit_condition(
            StreamCode.ENGINE_RESTARTED, f"the publisher restarted: {why}", clears=True, missing=0
        )
        self.request_recovery()

    # -- telling ---------------------------------------------------------------------------

    def _apply(self, events: list[RouterEvent] | tuple[RouterEvent, ...]) -> None:
        if not events:
            return
        self._sequence.advance(events[-1].event_id)
        known = []
        for event in events:
            if isinstance(event.event, UnknownEvent):
                self._counts.unknown_events += 1
                self._tell_once(
                    StreamCode.UNKNOWN_EVENT, f"events of kind {event.event.kind!r} are skipped"
                )
            else:
                known.append(event.event)
        rank = (self.source.worker_id, self.source.dp_rank)
        self._emit(IndexUpdate(*rank, events[-1].event_id, tuple(known), 0.0))

    def _tell_once(self, code: StreamCode, message: str) -> None:
        if code not in self._told:
            self._told.add(code)
            self._tell(code, message)

    def _tell(self, code: StreamCode, message: str) -> None:
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
