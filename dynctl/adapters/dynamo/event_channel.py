"""The intake of one event channel, the same for every event plane.

A publisher numbers its messages of a topic from 0; a late reader begins with whatever arrives
first. :class:`~dynctl.wire.event_sequence.EventSequence` judges the numbers: gaps are counted and
reported, duplicates and late messages are counted and skipped, a restart is reported.

No IO: envelopes and errors in, values out through ``emit``.
"""

from collections.abc import Callable
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


class ChannelIntake:
    """Follows one publisher's numbers; ``counts`` and ``connected`` can be read at any time.

    Duplicates and stragglers both count as ``duplicates``: neither is handed on.
    """

    def __init__(self, channel: EventChannel, emit: Callable[[ChannelValue], None]) -> None:
        self.channel = channel
        self.counts = ChannelCounts()
        self.connected = False
        self._emit = emit
        self._sequence = EventSequence(late_join=True, restart_run=_RESTART_RUN)
        self._reconnected = False
        self._told: set[ChannelCode] = set()

    # -- the connection ---------------------------------------------------------------------

    def connect(self, address: str) -> None:
        """Messages can come from now on."""
        if not self.connected:
            self.connected = True
            self._told.discard(ChannelCode.CHANNEL_DISCONNECTED)
            self._tell(ChannelCode.CHANNEL_CONNECTED, f"connected to {address}")

    def disconnect(self, why: str) -> None:
        """No message can come until :meth:`connect`; told once for each time."""
        self._reconnected = True
        self.connected = False
        self._tell_once(ChannelCode.CHANNEL_DISCONNECTED, why)

    # -- messages ---------------------------------------------------------------------------

    def take(self, envelope: Envelope) -> None:
        """One message. Of another publisher or topic it is counted as foreign and skipped."""
        channel = self.channel
        if envelope.publisher_id != channel.publisher_id or envelope.topic != channel.topic:
            self._refuse_foreign(envelope)
            return
        seq = envelope.sequence
        # Seeded with the time, because reports of a calm worker are the same bytes again and again.
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
        """A message that cannot be read: counted, told once."""
        self.counts.malformed += 1
        self._tell_once(ChannelCode.MALFORMED_MESSAGE, f"skipped a message: {error}", 1)

    # -- what they mean ---------------------------------------------------------------------

    def _refuse_foreign(self, envelope: Envelope) -> None:
        self.counts.foreign += 1
        if envelope.topic != self.channel.topic:
            what = "messages of another topic come"
        else:
            what = f"publisher {envelope.publisher_id:x} sends"
        self._tell_once(
            ChannelCode.FOREIGN_PUBLISHER,
            f"{what} where discovery names publisher {self.channel.publisher_id:x}; skipped "
            "(another process may have been given the address of one that is gone)",
            1,
        )

    def _restart(self, seq: int) -> None:
        last = self._sequence.last
        self._sequence.reset()
        self._told.clear()
        self.counts.restarts += 1
        self._tell(
            ChannelCode.PUBLISHER_RESTARTED,
            f"the publisher began anew: message {seq} came after {last}",
        )

    def _lose(self, count: int, seq: int) -> None:
        self.counts.dropped += count
        plural = "s" if count > 1 else ""
        self._tell(ChannelCode.EVENTS_DROPPED, f"{count} message{plural} lost before {seq}", count)

    # -- telling ----------------------------------------------------------------------------

    def _tell_once(self, code: ChannelCode, message: str, count: int = 0) -> None:
        if code not in self._told:
            self._told.add(code)
            self._tell(code, message, count)

    def _tell(self, code: ChannelCode, message: str, count: int = 0) -> None:
        channel = self.channel
        self._emit(ChannelCondition(channel.topic, channel.publisher_id, code, message, count))
