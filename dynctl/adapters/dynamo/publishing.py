"""Publishes one topic on Dynamo's event plane; the channel is registered in discovery.

``open_topic(scope, topic, ...)`` gives a :class:`TopicPublisher`: ``channel`` is the entry to
register (encode_entry), ``publish(payload)`` numbers and sends a payload, ``run()`` must run.
"""

import secrets
import time
from collections.abc import Callable
from typing import Final, Literal

from dynctl.adapters.nats.replicas import NatsReplicas
from dynctl.adapters.ports import ReplicaPlane
from dynctl.adapters.zmq.replicas import ZmqReplicas
from dynctl.wire.dynamo.discovery import EndpointId, EventChannel, NatsTransport, ZmqTransport
from dynctl.wire.dynamo.events import Envelope
from dynctl.wire.dynamo.request_plane import format_host_port

EventPlaneName = Literal["zmq", "nats"]
PUBLISHER_ID_BITS: Final = 53
"""As Dynamo's ids, which fit into a JSON number of any reader."""


class TopicPublisher:
    """One publisher of one topic; ``dropped`` counts messages that were not sent."""

    def __init__(
        self,
        plane: ReplicaPlane,
        channel: EventChannel,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.channel = channel
        self.published = 0
        self.dropped = 0
        self._plane = plane
        self._clock_ms = clock_ms

    def publish(self, payload: bytes) -> None:
        """Send a payload (msgpack) to all subscribers; never blocks."""
        channel = self.channel
        envelope = Envelope(
            channel.publisher_id, self.published, self._clock_ms(), channel.topic, payload
        )
        # A message that is dropped has its number: subscribers see the gap.
        self.published += 1
        if not self._plane.publish(envelope):
            self.dropped += 1

    async def run(self) -> None:
        """Send until cancelled."""
        await self._plane.run(lambda address, value: None)

    async def close(self) -> None:
        """Leaves no socket; what was published is on its way."""
        await self._plane.close()


def open_topic(
    scope: EndpointId,
    topic: str,
    *,
    plane: EventPlaneName,
    host: str,
    nats_servers: str = "",
) -> TopicPublisher:
    """A publisher of ``topic`` for the endpoint ``scope``, with a random id.

    ZMQ binds a free port at ``host``, NATS uses ``nats_servers``. Raises UsageProblem.
    """
    publisher_id = secrets.randbits(PUBLISHER_ID_BITS) | 1
    if plane == "nats":
        at = f"namespace.{scope.namespace}.component.{scope.component}.endpoint.{scope.name}"
        nats = NatsReplicas(nats_servers, at, ())
        return TopicPublisher(nats, EventChannel(scope, topic, publisher_id, NatsTransport(at)))
    zmq = ZmqReplicas(f"tcp://{format_host_port(host, 0)}", (), ())
    transport = ZmqTransport(zmq.endpoint)
    return TopicPublisher(zmq, EventChannel(scope, topic, publisher_id, transport))
