"""Publishers for the contract of event planes: what Dynamo's workers do, and what they should not.

A rig hides how a message gets onto its plane. Envelopes are sent as they are, so that a test can
choose every number.
"""

from collections.abc import Callable
from typing import Any, Protocol

import nats
import zmq
import zmq.asyncio

from dynctl.adapters.nats.address import NatsAuth
from dynctl.adapters.nats.dynamo_events import NatsEventPlane
from dynctl.adapters.ports import ChannelCondition, ChannelMessage, ChannelValue, EventPlane
from dynctl.adapters.zmq.dynamo_events import ZmqBounds, ZmqEventPlane
from dynctl.wire.dynamo.discovery import (
    KV_EVENTS,
    EndpointId,
    EventChannel,
    NatsTransport,
    ZmqTransport,
)
from dynctl.wire.dynamo.events import Envelope, encode_envelope, encode_zmq_frames
from dynctl.wire.dynamo.payload import PayloadLimits
from tests.contract.nats_server import NatsServer
from tests.contract.zmq_publisher import Collected, ScriptedPublisher
from tests.memory_planes import MemoryEventPlane

SCOPE = EndpointId("dynamo", "backend", "generate")
LIMITS = PayloadLimits(payload_bytes=2000)  # small, so that a test can pass it
NAME = 0x1D193C1B93FE90


def envelope(
    sequence: int,
    payload: bytes | None = None,
    *,
    at: int | None = None,
    publisher: int = NAME,
    topic: str = KV_EVENTS,
) -> Envelope:
    """Message ``sequence`` of a publisher whose clock advances by a millisecond a message."""
    time = 1_000_000 + sequence if at is None else at
    return Envelope(publisher, sequence, time, topic, payload or b"message %d" % sequence)


class Recorder(Collected[ChannelValue]):
    """The values of a channel."""

    @property
    def shown(self) -> str:
        return f"{self.numbers} and {self.codes}"

    @property
    def numbers(self) -> list[int]:
        return [value.sequence for value in self.values if isinstance(value, ChannelMessage)]

    @property
    def conditions(self) -> list[ChannelCondition]:
        return [value for value in self.values if isinstance(value, ChannelCondition)]

    @property
    def codes(self) -> list[str]:
        return [value.code.value for value in self.conditions]

    def message_of(self, code: str) -> str:
        (found,) = (each.message for each in self.conditions if each.code == code)
        return found

    async def until_number(self, number: int, times: int = 1) -> None:
        await self.until(lambda: self.numbers.count(number) >= times, f"message {number}")

    async def until_code(self, code: str, times: int = 1) -> None:
        await self.until(lambda: self.codes.count(code) >= times, f"{code} x{times}")


class Rig(Protocol):
    name: str

    @property
    def plane(self) -> EventPlane: ...

    async def open(self) -> None: ...
    async def publisher(self, publisher_id: int = NAME) -> EventChannel:
        """Somebody who publishes, and the channel that discovery would name."""
        ...

    async def ready(self, channel: EventChannel, recorder: Recorder, times: int = 1) -> None:
        """Wait until what is sent now arrives."""
        ...

    async def send(self, channel: EventChannel, *envelopes: Envelope) -> None: ...
    async def garble(self, channel: EventChannel) -> None:
        """Send something that is no message."""
        ...

    async def cut(self, channel: EventChannel) -> None:
        """As if what carries the messages were killed."""
        ...

    async def restore(self, channel: EventChannel) -> None: ...
    async def close(self) -> None: ...


class MemoryRig:
    name = "memory"

    def __init__(self, _: Any) -> None:
        self.plane = MemoryEventPlane()

    async def open(self) -> None:
        pass

    async def publisher(self, publisher_id: int = NAME) -> EventChannel:
        return EventChannel(SCOPE, KV_EVENTS, publisher_id, ZmqTransport("memory"))

    async def ready(self, channel: EventChannel, recorder: Recorder, times: int = 1) -> None:
        await recorder.until_code("CHANNEL_CONNECTED", times)

    async def send(self, channel: EventChannel, *envelopes: Envelope) -> None:
        for each in envelopes:
            self.plane.publish_envelope(channel, each)

    async def garble(self, channel: EventChannel) -> None:
        self.plane.publish_bytes(channel, b"what?")

    async def cut(self, channel: EventChannel) -> None:
        self.plane.disconnect(channel)

    async def restore(self, channel: EventChannel) -> None:
        self.plane.reconnect(channel)

    async def close(self) -> None:
        await self.plane.close()


class ZmqRig:
    name = "zmq"

    def __init__(self, _: Any) -> None:
        self.plane = ZmqEventPlane(bounds=ZmqBounds(message=LIMITS))
        self._context = zmq.asyncio.Context()
        self._publishers: dict[EventChannel, ScriptedPublisher] = {}

    async def open(self) -> None:
        pass

    async def publisher(self, publisher_id: int = NAME) -> EventChannel:
        publisher = ScriptedPublisher(self._context)
        publisher.pub.set(zmq.XPUB_VERBOSE, 1)  # else the second of two followers is not reported
        channel = EventChannel(SCOPE, KV_EVENTS, publisher_id, ZmqTransport(publisher.endpoint))
        self._publishers[channel] = publisher
        return channel

    async def ready(self, channel: EventChannel, recorder: Recorder, times: int = 1) -> None:
        await recorder.until_code("CHANNEL_CONNECTED", times)
        await self._publishers[channel].subscribed()

    async def send(self, channel: EventChannel, *envelopes: Envelope) -> None:
        for each in envelopes:
            await self._publishers[channel].raw(*encode_zmq_frames(each))

    async def garble(self, channel: EventChannel) -> None:
        await self._publishers[channel].raw(b"what?")

    async def cut(self, channel: EventChannel) -> None:
        await self._publishers[channel].die()

    async def restore(self, channel: EventChannel) -> None:
        assert isinstance(channel.transport, ZmqTransport)
        self._publishers[channel] = ScriptedPublisher(
            self._context, endpoint=channel.transport.endpoint
        )

    async def close(self) -> None:
        await self.plane.close()
        for publisher in self._publishers.values():
            await publisher.die()
        self._context.destroy(linger=0)


class NatsRig:
    name = "nats"
    prefix = "namespace.dynamo.component.backend.endpoint.generate"
    plane: NatsEventPlane

    def __init__(self, directory: Any) -> None:
        self.server = NatsServer(directory)

    async def open(self) -> None:
        await self.server.start()
        self.plane = nats_plane(self.server)
        await self._connect()

    async def _connect(self) -> None:
        self._client = await nats.connect(f"nats://{self.server.address}", allow_reconnect=False)

    async def publisher(self, publisher_id: int = NAME) -> EventChannel:
        return EventChannel(SCOPE, KV_EVENTS, publisher_id, NatsTransport(self.prefix))

    async def ready(self, channel: EventChannel, recorder: Recorder, times: int = 1) -> None:
        await recorder.until_code("CHANNEL_CONNECTED", times)

    async def send(self, channel: EventChannel, *envelopes: Envelope) -> None:
        for each in envelopes:
            await self._client.publish(f"{self.prefix}.{KV_EVENTS}", encode_envelope(each))
        await self._client.flush()

    async def garble(self, channel: EventChannel) -> None:
        await self._client.publish(f"{self.prefix}.{KV_EVENTS}", b"what?")

    async def cut(self, channel: EventChannel) -> None:
        await self._client.close()
        await self.server.kill()

    async def restore(self, channel: EventChannel) -> None:
        await self.server.start()
        await self._connect()

    async def close(self) -> None:
        await self.plane.close()
        await self._client.close()
        await self.server.kill()


def nats_plane(server: NatsServer, auth: NatsAuth | None = None, **bounds: Any) -> NatsEventPlane:
    from dynctl.adapters.nats.dynamo_events import NatsBounds

    return NatsEventPlane(
        server.address, auth or NatsAuth(), bounds=NatsBounds(**{"message": LIMITS} | bounds)
    )


RIGS: dict[str, Callable[[Any], Rig]] = {"memory": MemoryRig, "zmq": ZmqRig, "nats": NatsRig}
