"""The intake of one event channel, the same for every event plane.

A publisher numbers its messages of a topic from 0; a late reader begins with whatever arrives
first. :class:`~dynctl.wire.event_sequence.EventSequence` judges the numbers: gaps are counted and
reported, duplicates and late messages are counted and skipped, a restart is reported.

No IO: envelopes and errors in, values out through ``emit``; :class:`AnyPublisher` reads a clock.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from xxhash import xxh3_64_intdigest

from dynctl.adapters.ports import (
    ChannelCode,
    ChannelCondition,
    ChannelCounts,
    ChannelMessage,
    ChannelValue,
)
from dynctl.base.decode_errors import WireError
from dynctl.wire.dynamo.discovery import EventChannel
from dynctl.wire.dynamo.events import Envelope
from dynctl.wire.event_sequence import EventSequence, Verdict

_RESTART_RUN: Final = 8
#: A publisher of a shared address that sent nothing for so many seconds has ended.
SILENT_S: Final = 300.0


class ChannelIntake:
    """Follows one publisher's numbers; ``counts`` and ``connected`` can be read at any time.

    Duplicates and late messages both count as ``duplicates``: they are not passed on.
    """

    def __init__(self, channel: EventChannel, emit: Callable[[ChannelValue], None]) -> None:
        self.channel = channel
        self.counts = ChannelCounts()
        self.connected = False
        self._emit = emit
        self._sequence = EventSequence(late_join=True, restart_run=_RESTART_RUN)
        self._reconnected = False
        self._reported: set[ChannelCode] = set()

    def claims(self, envelope: Envelope) -> bool:
        """Whether a message on an address that publishers share is for this channel."""
        return envelope.publisher_id == self.channel.publisher_id

    # -- the connection ---------------------------------------------------------------------

    def connect(self, address: str) -> None:
        """Messages can arrive from now on."""
        if not self.connected:
            self.connected = True
            self._reported.discard(ChannelCode.CHANNEL_DISCONNECTED)
            self._report(ChannelCode.CHANNEL_CONNECTED, f"connected to {address}")

    def disconnect(self, why: str) -> None:
        """No message can arrive until :meth:`connect`; reported once each time."""
        self._reconnected = True
        self.connected = False
        self._report_once(ChannelCode.CHANNEL_DISCONNECTED, why)

    # -- messages ---------------------------------------------------------------------------

    def take(self, envelope: Envelope) -> None:
        """Take one message; of another publisher or topic it is counted as foreign and skipped."""
        channel = self.channel
        if envelope.publisher_id != channel.publisher_id or envelope.topic != channel.topic:
            self._refuse_foreign(envelope)
            return
        seq = envelope.sequence
        # Seeded with the time, because an idle worker's reports are the same bytes.
        digest = xxh3_64_intdigest(envelope.payload, envelope.published_at)
        ts = float(envelope.published_at)
        verdict = self._sequence.judge(seq, digest, ts, reconnected=self._reconnected)
        if verdict is Verdict.DUPLICATE or verdict is Verdict.LATE:
            self.counts.duplicates += 1
            return
        if verdict is Verdict.RESTART:
            self._restart(seq)
        missing = self._sequence.advance(seq, digest, ts)
        if missing:
            self._lose(missing, seq)
        self._reconnected = False
        self.counts.received += 1
        self._emit(
            ChannelMessage(
                channel.topic,
                channel.publisher_id,
                seq,
                envelope.published_at,
                envelope.payload,
            )
        )

    def malformed(self, error: WireError) -> None:
        """Count an unreadable message; reported once."""
        self.counts.malformed += 1
        self._report_once(ChannelCode.MALFORMED_MESSAGE, f"skipped a message: {error}", 1)

    # -- what they mean ---------------------------------------------------------------------

    def _refuse_foreign(self, envelope: Envelope) -> None:
        self.counts.foreign += 1
        if envelope.topic != self.channel.topic:
            what = "messages of another topic arrive"
        else:
            what = f"publisher {envelope.publisher_id:x} sends"
        self._report_once(
            ChannelCode.FOREIGN_PUBLISHER,
            f"{what} on the channel of publisher {self.channel.publisher_id:x}; skipped "
            "(another process may use the address of a stopped one)",
            1,
        )

    def _restart(self, seq: int) -> None:
        last = self._sequence.last
        self._sequence.reset()
        self._reported.clear()
        self.counts.restarts += 1
        self._report(
            ChannelCode.PUBLISHER_RESTARTED,
            f"the publisher restarted: message {seq} came after {last}",
        )

    def _lose(self, count: int, seq: int) -> None:
        self.counts.dropped += count
        plural = "s" if count > 1 else ""
        self._report(
            ChannelCode.EVENTS_DROPPED, f"{count} message{plural} lost before {seq}", count
        )

    # -- reporting --------------------------------------------------------------------------

    def _report_once(self, code: ChannelCode, message: str, count: int = 0) -> None:
        if code not in self._reported:
            self._reported.add(code)
            self._report(code, message, count)

    def _report(self, code: ChannelCode, message: str, count: int = 0) -> None:
        channel = self.channel
        self._emit(ChannelCondition(channel.topic, channel.publisher_id, code, message, count))


class AnyPublisher:
    """The intake of an address whose publishers are not known before they send.

    Each publisher of one of ``topics`` gets its own :class:`ChannelIntake` with its first message;
    ``channel`` gives the address. The connection itself is reported as that of publisher 0. With
    each new channel those that were silent for ``SILENT_S`` are forgotten, and of more than
    ``most`` the one that was silent longest: a process that starts again is a new publisher.
    ``clock``: seconds.
    """

    def __init__(
        self,
        channel: EventChannel,
        topics: Collection[str],
        emit: Callable[[ChannelValue], None],
        most: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.channel = replace(channel, publisher_id=0)
        self.counts = ChannelCounts()
        self.connected = False
        self._topics = frozenset(topics)
        self._emit = emit
        self._most = most
        self._clock = clock
        #: With the time of the last message; the one that is silent longest first.
        self._intakes: dict[tuple[int, str], tuple[ChannelIntake, float]] = {}

    def claims(self, envelope: Envelope) -> bool:
        """Every message is for this intake."""
        return True

    def connect(self, address: str) -> None:
        """Messages can arrive from now on."""
        if not self.connected:
            self.connected = True
            self._report(ChannelCode.CHANNEL_CONNECTED, f"connected to {address}")

    def disconnect(self, why: str) -> None:
        """No message can arrive until :meth:`connect`."""
        if self.connected:
            self._report(ChannelCode.CHANNEL_DISCONNECTED, why)
        self.connected = False

    def take(self, envelope: Envelope) -> None:
        """Take one message; one of another topic is counted as foreign and skipped."""
        if envelope.topic not in self._topics:
            self.counts.foreign += 1
            return
        key = (envelope.publisher_id, envelope.topic)
        now = self._clock()
        known = self._intakes.pop(key, None)
        if known is None:
            channel = replace(self.channel, publisher_id=key[0], topic=key[1])
            intake = ChannelIntake(channel, self._emit)
            self._make_room(now)
        else:
            intake = known[0]
        self._intakes[key] = intake, now
        intake.take(envelope)
        self.counts.received += 1

    def _make_room(self, now: float) -> None:
        while self._intakes:
            oldest, (_, heard_at) = next(iter(self._intakes.items()))
            if len(self._intakes) < self._most and now - heard_at <= SILENT_S:
                return
            del self._intakes[oldest]

    def malformed(self, error: WireError) -> None:
        """Count an unreadable message; its publisher is unknown."""
        self.counts.malformed += 1
        self._report(ChannelCode.MALFORMED_MESSAGE, f"skipped a message: {error}", 1)

    def _report(self, code: ChannelCode, message: str, count: int = 0) -> None:
        self._emit(ChannelCondition(self.channel.topic, 0, code, message, count))
