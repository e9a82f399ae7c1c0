"""A registrar and an event plane inside one process, with faults that a test chooses."""

import asyncio
import time
from collections.abc import Callable

from dynctl.adapters.event_channel import ChannelIntake
from dynctl.adapters.memory import MemoryDiscovery
from dynctl.adapters.ports import ChannelValue
from dynctl.base.decode_errors import WireError
from dynctl.base.errors import Unreachable
from dynctl.wire.dynamo.discovery import EventChannel
from dynctl.wire.dynamo.events import Envelope, decode_envelope, encode_envelope


class MemoryRegistrar:
    """Registers in a :class:`MemoryDiscovery` of the same process."""

    def __init__(self, discovery: MemoryDiscovery) -> None:
        self._discovery = discovery
        self._leases: set[MemoryLease] = set()
        self._next = 1

    @property
    def title(self) -> str:
        return self._discovery.title

    async def grant(self, instance_id: int | None = None) -> "MemoryLease":
        lease = MemoryLease(self._discovery, instance_id or self._next, self._leases.discard)
        self._next += not instance_id
        self._leases.add(lease)
        return lease

    async def close(self) -> None:
        for lease in list(self._leases):
            await lease.close()


class MemoryLease:
    """Lives until it is closed, or until :meth:`expire`."""

    trouble = ""

    def __init__(
        self, discovery: MemoryDiscovery, id: int, ended: "Callable[[MemoryLease], None]"
    ) -> None:
        self.id = id
        self.lost = asyncio.Event()
        self._discovery = discovery
        self._ended = ended
        self._keys: set[str] = set()

    async def put(self, key: str, value: bytes) -> None:
        if self.lost.is_set():
            raise Unreachable("the lease in memory ended")
        self._keys.add(key)
        self._discovery.put(key, value)

    async def delete(self, key: str) -> None:
        self._keys.discard(key)
        self._discovery.delete(key)

    async def close(self) -> None:
        for key in self._keys:
            self._discovery.delete(key)
        self._keys.clear()
        self._ended(self)

    def expire(self) -> None:
        """The plane drops the lease, as etcd does after a minute without its holder."""
        for key in self._keys:
            self._discovery.delete(key)
        self._keys.clear()
        self.lost.set()


class MemoryEventPlane:
    """Delivers messages to the followers that run at that moment.

    ``clock`` gives the publishers' wall clock in milliseconds.
    """

    def __init__(self, clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._clock = clock
        self._next: dict[EventChannel, int] = {}
        self._lost: dict[EventChannel, int] = {}
        self._cut: set[EventChannel] = set()
        self._running: list[MemoryFollower] = []

    def follow(
        self, channel: EventChannel, emit: Callable[[ChannelValue], None]
    ) -> "MemoryFollower":
        return MemoryFollower(self, channel, emit)

    @property
    def followed(self) -> set[EventChannel]:
        """The channels with a running follower; messages of others are lost."""
        return {each.intake.channel for each in self._running}

    async def close(self) -> None:
        """End all running followers, as by a cancellation."""
        for follower in list(self._running):
            follower.stop()
        await asyncio.sleep(0)

    # -- publishing -------------------------------------------------------------------------

    def publish(
        self, channel: EventChannel, payload: bytes, *, published_at_ms: int | None = None
    ) -> int:
        """Send one message; returns its sequence number."""
        sequence = self._next.get(channel, 0)
        self._next[channel] = sequence + 1
        self.publish_envelope(
            channel,
            Envelope(
                channel.publisher_id,
                sequence,
                self._clock() if published_at_ms is None else published_at_ms,
                channel.topic,
                payload,
            ),
        )
        return sequence

    def publish_envelope(self, channel: EventChannel, envelope: Envelope) -> None:
        """Send a message unchanged: of another publisher, or with an unexpected number."""
        self.publish_bytes(channel, encode_envelope(envelope))

    def publish_bytes(self, channel: EventChannel, body: bytes) -> None:
        """Send bytes, even if they are not an envelope."""
        if self._lost.get(channel, 0):
            self._lost[channel] -= 1
        else:
            self._deliver(channel, body)

    # -- faults -----------------------------------------------------------------------------

    def lose(self, channel: EventChannel, count: int = 1) -> None:
        """Lose the next ``count`` messages."""
        self._lost[channel] = self._lost.get(channel, 0) + count

    def restart(self, channel: EventChannel) -> None:
        """Restart the publisher: it counts from 0 again."""
        self._next.pop(channel, None)

    def disconnect(self, channel: EventChannel) -> None:
        """Deliver nothing to the followers until :meth:`reconnect`."""
        self._cut.add(channel)
        for follower in self._of(channel):
            follower.intake.disconnect("lost the publisher; reconnecting")

    def reconnect(self, channel: EventChannel) -> None:
        self._cut.discard(channel)
        for follower in self._of(channel):
            follower.intake.connect("memory")

    # -- followers --------------------------------------------------------------------------

    def add(self, follower: "MemoryFollower") -> None:
        self._running.append(follower)
        if follower.intake.channel not in self._cut:
            follower.intake.connect("memory")

    def remove(self, follower: "MemoryFollower") -> None:
        self._running.remove(follower)

    def _of(self, channel: EventChannel) -> list["MemoryFollower"]:
        return [each for each in self._running if each.intake.channel == channel]

    def _deliver(self, channel: EventChannel, body: bytes) -> None:
        if channel in self._cut:
            return
        for follower in self._of(channel):
            try:
                envelope = decode_envelope(body)
            except WireError as error:
                follower.intake.malformed(error)
            else:
                follower.intake.take(envelope)


class MemoryFollower:
    """Follows one channel of a :class:`MemoryEventPlane`."""

    def __init__(
        self, plane: MemoryEventPlane, channel: EventChannel, emit: Callable[[ChannelValue], None]
    ) -> None:
        self.intake = ChannelIntake(channel, emit)
        self.counts = self.intake.counts
        self._plane = plane
        self._end: asyncio.Future[None] | None = None

    @property
    def connected(self) -> bool:
        return self.intake.connected

    def stop(self) -> None:
        if self._end is not None:
            self._end.cancel()

    async def run(self) -> None:
        """Follow until cancelled, or until the plane is closed."""
        self._end = asyncio.get_running_loop().create_future()
        self._plane.add(self)
        try:
            await self._end
        finally:
            self._plane.remove(self)
            self.intake.connected = False
