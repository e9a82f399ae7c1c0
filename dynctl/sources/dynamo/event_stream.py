"""Events of a live deployment as they arrive, without an index.

Nothing is requested from workers: a gap is shown and stays. Lines go to a bounded
:class:`TailQueue`; a reader that is too slow loses lines, and gets their number.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from dynctl.adapters.dynamo.planes import watch_discovery
from dynctl.adapters.ports import (
    ChannelCode,
    ChannelCondition,
    ChannelMessage,
    ChannelValue,
    Discovery,
    DiscoveryChange,
    EventPlane,
    Interrupted,
)
from dynctl.base.decode_errors import WireError
from dynctl.base.tasks import Supervisor
from dynctl.documents.events import TailKind, TailLine
from dynctl.health.deployment import Deployment, Registrations
from dynctl.sources.dynamo.event_lines import (
    condition_kind,
    event_line,
    load_line,
    remark,
    sequence_line,
)
from dynctl.wire.dynamo.active_sequences import decode_sequences
from dynctl.wire.dynamo.discovery import ACTIVE_SEQUENCES, KV_EVENTS, EventChannel
from dynctl.wire.dynamo.events import RouterEvent, decode_kv_metrics, decode_router_events
from dynctl.wire.event_sequence import EventSequence, Verdict
from router_core import Worker

MAX_QUEUED: Final = 10_000


class TailQueue:
    """Lines that wait for their reader, up to ``most``; further ones are only counted."""

    def __init__(self, now_ms: Callable[[], int], most: int = MAX_QUEUED) -> None:
        self._now_ms = now_ms
        self._most = most
        self._lines: deque[TailLine] = deque()
        self._skipped = 0
        self._wake = asyncio.Event()

    def put(self, line: TailLine) -> None:
        if len(self._lines) >= self._most:
            self._skipped += 1
        else:
            self._report_skipped()
            self._lines.append(line)
        self._wake.set()

    async def take(self, most: int) -> list[TailLine]:
        """At least one line, at most ``most``, in order."""
        await self._wake.wait()
        taken = [self._lines.popleft() for _ in range(min(most, len(self._lines)))]
        if not self._lines:
            self._report_skipped()
        if not self._lines:
            self._wake.clear()
        return taken

    def _report_skipped(self) -> None:
        """Put one line in place of those that were dropped."""
        if self._skipped:
            number, self._skipped = self._skipped, 0
            text = f"{number:,} event{'' if number == 1 else 's'} not shown: the output is slower"
            line = remark(TailKind.SKIPPED, self._now_ms(), text, missing=number)
            self._lines.append(line)


class PublisherTail:
    """Lines from the channel of one rank's KV events.

    Events of a publisher are numbered from 1 without gaps; the first one received may be any.
    """

    def __init__(
        self,
        worker: Worker,
        dp_rank: int,
        emit: Callable[[TailLine], None],
        now_ms: Callable[[], int],
    ) -> None:
        self.worker = worker
        self._rank = dp_rank
        self._emit = emit
        self._now_ms = now_ms
        self._sequence = EventSequence(first=1, late_join=True)
        self._dropped = 0  # messages known to be lost since the last event
        self._was_connected = False

    def take(self, value: ChannelValue) -> None:
        if isinstance(value, ChannelCondition):
            self._condition(value)
            return
        try:
            events = decode_router_events(value.payload)
        except WireError as error:
            self._remark(TailKind.MALFORMED, f"a message of events is unreadable: {error}")
            return
        for event in events:
            self._event(event, value.published_at_ms)
        self._report_dropped()

    def _event(self, event: RouterEvent, at_ms: int) -> None:
        sequence, number, odd = self._sequence, event.event_id, None
        if (event.worker_id, event.dp_rank) != (self.worker.worker_id, self._rank):
            self._remark(
                TailKind.FOREIGN,
                f"an event of worker {event.worker_id:x} rank {event.dp_rank} on this channel",
            )
            return
        verdict = sequence.judge(number)
        if verdict is Verdict.LATE:
            odd = f"again or late: after event {sequence.last:,}"
        elif verdict is Verdict.GAP:
            self._gap(sequence.next_number, number - 1)
        else:
            self._report_dropped()
        self._dropped = 0
        if verdict is not Verdict.LATE:
            sequence.advance(number)
        self._emit(event_line(self.worker, event, at_ms, odd))

    def _gap(self, first: int, last: int) -> None:
        missing = last - first + 1
        which = f"event {first:,} is" if missing == 1 else f"events {first:,} to {last:,} are"
        lost = f" ({_messages(self._dropped)} lost on the way)" if self._dropped else ""
        self._remark(TailKind.GAP, f"{which} missing{lost}", missing)

    def _report_dropped(self) -> None:
        """A line for lost messages whose number of events is unknown."""
        if self._dropped:
            text = f"{_messages(self._dropped)} lost on the way; no numbered event is known missing"
            self._remark(TailKind.GAP, text, self._dropped)
            self._dropped = 0

    def _condition(self, value: ChannelCondition) -> None:
        match value.code:
            case ChannelCode.EVENTS_DROPPED:
                # Reported with the next message: its event numbers show what is missing.
                self._dropped += value.count
            case ChannelCode.CHANNEL_CONNECTED:
                if self._was_connected:
                    self._remark(TailKind.RECONNECT, value.message)
                self._was_connected = True
            case ChannelCode.PUBLISHER_RESTARTED:
                self._sequence, self._dropped = EventSequence(first=1, late_join=True), 0
                self._remark(
                    TailKind.RESTART, f"{value.message}; its earlier cache contents are invalid"
                )
            case _:
                self._remark(condition_kind(value.code), value.message)

    def _remark(self, kind: TailKind, message: str, missing: int | None = None) -> None:
        self._emit(
            remark(kind, self._now_ms(), message, self.worker, dp_rank=self._rank, missing=missing)
        )


@dataclass(frozen=True, slots=True)
class _Ranked:
    """The rank of a channel of KV events."""

    worker: Worker
    dp_rank: int


@dataclass(slots=True)
class _Followed:
    """``of``: None for a channel of load."""

    task: asyncio.Task[None]
    of: _Ranked | None


Wanted = Callable[[Worker | None], bool]
"""Whether a worker's lines are wanted; None stands for one that is not registered."""


def everyone(worker: Worker | None) -> bool:
    return True


class EventTail:
    """Follows the channels of the wanted workers that discovery has.

    ``emit`` takes lines, ``say`` messages that are not lines (discovery is interrupted).
    ``load`` follows load reports and bookings too. ``now_ms``: our wall clock in milliseconds.
    Use as an async context manager; entering raises Unreachable.
    """

    def __init__(
        self,
        discovery: Discovery,
        plane_of: Callable[[EventChannel], EventPlane],
        emit: Callable[[TailLine], None],
        say: Callable[[str], None],
        now_ms: Callable[[], int],
        *,
        namespace: str | None = None,
        wanted: Wanted = everyone,
        load: bool = False,
    ) -> None:
        self.deployment = Deployment()
        self._discovery = discovery
        self._plane_of = plane_of
        self._emit = emit
        self._say = say
        self._now_ms = now_ms
        self._namespace = namespace
        self.wanted = wanted
        self._load = load
        self._registrations = Registrations()
        self._workers: dict[int, Worker] = {}
        self._followed: dict[EventChannel, _Followed] = {}
        self._shared: dict[tuple[int, int], PublisherTail] = {}
        self._tasks = Supervisor(lambda name, text: say(f"internal error in {name}: {text}"))

    async def __aenter__(self) -> EventTail:
        try:
            self._registrations.apply(await self._discovery.list())
            self._join()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def follow(self) -> None:
        """Start to emit lines."""
        self._follow_channels()
        self._tasks.start("discovery", partial(watch_discovery, self._discovery, self._take))

    async def close(self) -> None:
        """End all tasks; the planes are the caller's."""
        await self._tasks.close()
        self._followed.clear()

    @property
    def publishers(self) -> int:
        """KV-event channels that are followed."""
        return sum(followed.of is not None for followed in self._followed.values())

    @property
    def load_channels(self) -> int:
        """Channels of load reports and bookings that are followed."""
        return len(self._followed) - self.publishers

    # -- discovery -------------------------------------------------------------------------

    def _take(self, change: DiscoveryChange) -> None:
        interrupted = self._registrations.interrupted
        self._registrations.apply(change)
        if isinstance(change, Interrupted):
            if interrupted is None:
                self._say(f"discovery is interrupted: {change.reason}; known publishers stay")
            return
        if interrupted is not None and self._registrations.interrupted is None:
            self._say("discovery works again")
        before = self._workers
        self._join()
        after = self._workers
        for worker_id in before.keys() - after.keys():
            self._report(TailKind.LEFT, "is no longer registered", before[worker_id])
        for worker_id in after.keys() - before.keys():
            self._report(TailKind.JOINED, "is registered now", after[worker_id])
        self._follow_channels()

    def _join(self) -> None:
        self.deployment = self._registrations.deployment(self._namespace)
        self._workers = {item.worker.worker_id: item.worker for item in self.deployment.workers}

    def _report(self, kind: TailKind, message: str, worker: Worker) -> None:
        if self.wanted(worker):
            self._emit(remark(kind, self._now_ms(), message, worker))

    # -- channels --------------------------------------------------------------------------

    def _follow_channels(self) -> None:
        wanted: dict[EventChannel, _Ranked | None] = {}
        for item in self.deployment.workers:
            if self.wanted(item.worker):
                for rank, channel in item.kv_events.items():
                    wanted[channel] = _Ranked(item.worker, rank)
                wanted |= dict.fromkeys(item.shared_events)
        if self._load:
            for channel in (*self.deployment.loads, *self.deployment.sequences):
                wanted[channel] = None
        for channel, followed in list(self._followed.items()):
            if channel not in wanted or wanted[channel] != followed.of:
                followed.task.cancel()
                del self._followed[channel]
        for channel, of in wanted.items():
            if channel not in self._followed:
                self._followed[channel] = _Followed(self._start(channel, of), of)

    def _start(self, channel: EventChannel, of: _Ranked | None) -> asyncio.Task[None]:
        if of is None and channel.topic == KV_EVENTS:
            take = self._take_shared
        elif of is None:
            take = self._take_sequences if channel.topic == ACTIVE_SEQUENCES else self._take_metrics
        else:
            take = PublisherTail(of.worker, of.dp_rank, self._emit, self._now_ms).take
        follower = self._plane_of(channel).follow(channel, take)
        publisher = f"publisher {channel.publisher_id:x}"
        return self._tasks.start(f"{channel.topic} stream", follower.run, publisher)

    def _take_shared(self, value: ChannelValue) -> None:
        """A value of a channel whose worker only its events name (Dynamo before 1.4)."""
        if isinstance(value, ChannelCondition):
            return
        with suppress(WireError):
            for event in decode_router_events(value.payload)[:1]:
                worker = self._workers.get(event.worker_id)
                if worker is None or not self.wanted(worker):
                    continue
                key = (event.worker_id, event.dp_rank)
                if key not in self._shared:
                    self._shared[key] = PublisherTail(
                        worker, event.dp_rank, self._emit, self._now_ms
                    )
                self._shared[key].take(value)

    # -- load ------------------------------------------------------------------------------

    def _take_metrics(self, value: ChannelValue) -> None:
        message = self._load_message(value)
        if message is None:
            return
        try:
            report = decode_kv_metrics(message.payload)
        except WireError as error:
            self._unreadable(message, error)
            return
        worker = self._workers.get(report.worker_id)
        if self.wanted(worker):
            self._emit(load_line(worker, report, message.published_at_ms))

    def _take_sequences(self, value: ChannelValue) -> None:
        message = self._load_message(value)
        if message is None:
            return
        try:
            events = decode_sequences(message.payload)
        except WireError as error:
            self._unreadable(message, error)
            return
        for event in events:
            worker = self._workers.get(event.worker_id)
            if self.wanted(worker):
                self._emit(sequence_line(worker, event, message.published_at_ms))

    def _load_message(self, value: ChannelValue) -> ChannelMessage | None:
        """The message of a value; a condition gives a line if it is a loss or a restart."""
        if isinstance(value, ChannelMessage):
            return value
        if value.code in (ChannelCode.EVENTS_DROPPED, ChannelCode.PUBLISHER_RESTARTED):
            where = f"{value.topic} of publisher {value.publisher_id:x}"
            line = remark(
                condition_kind(value.code),
                self._now_ms(),
                f"{where}: {value.message}",
                missing=value.count or None,
            )
            self._emit(line)
        return None

    def _unreadable(self, message: ChannelMessage, error: WireError) -> None:
        text = f"a message of {message.topic} is unreadable: {error}"
        self._emit(remark(TailKind.MALFORMED, self._now_ms(), text))


def _messages(number: int) -> str:
    return f"{number:,} message{'' if number == 1 else 's'}"
