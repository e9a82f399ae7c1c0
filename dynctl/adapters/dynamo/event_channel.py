"""What every event plane does with the messages of one channel, whatever brought them.

A publisher numbers its messages of a topic from 0. Who joins late begins with whatever comes first.
From there a higher number than the next is a loss, counted and told. A lower one is a duplicate or
a straggler, which is counted and skipped, or the publisher began anew: the rules are those of
:class:`~dynctl.wire.event_sequence.EventSequence`, with one more. A publisher whose
clock was set back while it restarted would look like stragglers for ever, so a run of stragglers in
ascending order counts as a restart.

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
from dynctl.wire.event_sequence import EventSequence, Place

_STRAGGLERS: Final = 8


class ChannelIntake:
    """Follows one publisher's numbers; ``counts`` and ``connected`` can be read at any time.

    Duplicates and stragglers both count as ``duplicates``: neither is handed on.
    """

    def __init__(self, channel: EventChannel, emit: Callable[[ChannelValue], None]) -> None:
        self.channel = channel
        self.counts = ChannelCounts()
        self.connected = False
        self._emit = emit
        self._sequence = EventSequence()
        self._reconnected = False
        self._stragglers = 0
        self._last_straggler = -1
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
        if self._sequence.last_seq is None:
            self._sequence.advance(seq, digest, ts)
        else:
            place = self._sequence.place(seq, digest, ts, reconnected=self._reconnected)
            if place is Place.DUPLICATE or (place is Place.LATE and not self._runs_anew(seq)):
                self.counts.duplicates += 1
                return
            if place is Place.LATE or place is Place.RESTART:
                self._restart(seq)
            skipped = self._sequence.advance(seq, digest, ts)
            if skipped:
                self._lose(skipped, seq)
        self._reconnected = False
        self._stragglers = 0
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

    def _runs_anew(self, seq: int) -> bool:
        self._stragglers = self._stragglers + 1 if seq == self._last_straggler + 1 else 1
        self._last_straggler = seq
        return self._stragglers >= _STRAGGLERS

    def _restart(self, seq: int) -> None:
        last = self._sequence.last_seq
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
