"""The messages between routers over ZMQ: each binds a publishing socket, which the others read."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import zmq
import zmq.asyncio

from dynctl.adapters.event_channel import AnyPublisher
from dynctl.adapters.ports import ChannelValue
from dynctl.adapters.zmq.context import close_context, new_context
from dynctl.adapters.zmq.dynamo_events import ZmqBounds, ZmqEventPlane
from dynctl.adapters.zmq.kv_event_source import EndpointError, dialable_endpoint
from dynctl.base.errors import UsageProblem, network_reason
from dynctl.base.tasks import end_tasks
from dynctl.wire.dynamo.discovery import EndpointId, EventChannel, ZmqTransport
from dynctl.wire.dynamo.events import Envelope, encode_zmq_frames

#: Messages that wait for a router that reads slowly; further ones are dropped for it.
_UNSENT: Final = 1024
#: How long the last messages may take to leave after the end, in milliseconds.
_LINGER_MS: Final = 200
_BOUNDS: Final = ZmqBounds(queue_messages=_UNSENT, heartbeat=1.0, heartbeat_timeout=3.0)


class ZmqReplicas:
    """A ReplicaPlane of listed addresses.

    ``bind``: the address of our own socket, port 0 for a free one (``endpoint`` has the port);
    ``peers``: those of the others. Raises UsageProblem for an address that cannot be bound or used.
    """

    batched = True

    def __init__(self, bind: str, peers: Sequence[str], topics: Sequence[str]) -> None:
        for peer in peers:
            try:
                dialable_endpoint(peer)
            except EndpointError as error:
                raise UsageProblem(f"--router-replica-peer {error}") from None
        self.addresses = tuple(dict.fromkeys(peers))
        self._topics = tuple(topics)
        self._context = new_context()
        self._plane = ZmqEventPlane(context=self._context, bounds=_BOUNDS)
        socket = self._socket = zmq.Socket(self._context, zmq.PUB)
        socket.set(zmq.SNDHWM, _UNSENT)
        socket.set(zmq.LINGER, _LINGER_MS)
        try:
            if "[" in bind:
                socket.set(zmq.IPV6, 1)
            socket.bind(bind.removesuffix(":0") + ":*" if bind.endswith(":0") else bind)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            close_context(self._context)
            raise UsageProblem(
                f"--router-replica-bind {bind}: {network_reason(error)}",
                "expected a free address of this host: tcp://HOST:PORT, or PORT for 127.0.0.1",
            ) from None
        self.endpoint: str = socket.get_string(zmq.LAST_ENDPOINT)

    @property
    def title(self) -> str:
        return f"ZMQ, {self.endpoint}"

    def publish(self, envelope: Envelope) -> bool:
        """A message for each router that reads; one that is too slow misses it, and sees that by
        the sequence numbers."""
        if self._socket.closed:
            return False
        self._socket.send_multipart(encode_zmq_frames(envelope), zmq.NOBLOCK)
        return True

    async def run(self, emit: Callable[[str, ChannelValue], None]) -> None:
        following = []
        for address in self.addresses:
            channel = EventChannel(EndpointId("", "", ""), "", 0, ZmqTransport(address))
            intake = AnyPublisher(channel, self._topics, partial(emit, address))
            following.append(asyncio.create_task(self._plane.follow_with(intake).run()))
        try:
            await asyncio.gather(*following)
            await asyncio.Future()  # without peers it only publishes
        finally:
            await end_tasks(following)

    async def close(self) -> None:
        if self._socket.closed:
            return
        await self._plane.close()
        self._socket.close()
        # It waits for the last messages, so that others hear that this router ends.
        with contextlib.suppress(zmq.ZMQError):
            await asyncio.to_thread(self._context.term)
