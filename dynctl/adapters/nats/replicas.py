"""The messages between routers over core NATS: all of one group share a subject for each topic."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from nats.errors import Error as NatsError

from dynctl.adapters.event_channel import AnyPublisher
from dynctl.adapters.nats.address import NatsAuth
from dynctl.adapters.nats.dynamo_events import NatsEventPlane
from dynctl.adapters.nats.requests import NatsMessenger
from dynctl.adapters.ports import ChannelValue, RequestPlaneError
from dynctl.base.tasks import end_tasks
from dynctl.wire.dynamo.discovery import EndpointId, EventChannel, NatsTransport
from dynctl.wire.dynamo.events import Envelope, encode_envelope

#: Messages that wait to be sent; further ones are dropped.
_UNSENT: Final = 8192
_RETRY_S: Final = 0.5
#: How long the last messages may take to leave at the end.
_FLUSH_S: Final = 0.5


class NatsReplicas:
    """A ReplicaPlane over the servers of a NATS cluster.

    ``subject``: the beginning of the subjects that all routers of the group share. Raises
    UsageProblem for a server or invalid credentials.
    """

    batched = False
    addresses: tuple[str, ...] = ()

    def __init__(
        self, servers: str, subject: str, topics: Sequence[str], auth: NatsAuth | None = None
    ) -> None:
        self._plane = NatsEventPlane(servers, auth)
        self._messenger = NatsMessenger(servers, auth)
        self._subject = subject
        self._topics = tuple(topics)
        self._unsent: asyncio.Queue[Envelope] = asyncio.Queue(_UNSENT)

    @property
    def title(self) -> str:
        return f"NATS, {self._plane.title}, subject {self._subject}"

    def publish(self, envelope: Envelope) -> bool:
        try:
            self._unsent.put_nowait(envelope)
        except asyncio.QueueFull:
            return False
        return True

    async def run(self, emit: Callable[[str, ChannelValue], None]) -> None:
        tasks = [asyncio.create_task(self._send())]
        for topic in self._topics:
            channel = EventChannel(EndpointId("", "", ""), topic, 0, NatsTransport(self._subject))
            intake = AnyPublisher(channel, (topic,), lambda value: emit("", value))
            tasks.append(asyncio.create_task(self._plane.follow_with(intake).run()))
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_tasks(tasks)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(_FLUSH_S):
                while not self._unsent.empty():
                    await self._send_one()
                await (await self._messenger.connected()).flush()
        except (RequestPlaneError, NatsError, OSError, TimeoutError):
            pass  # the others notice that this router is silent
        await self._plane.close()
        await self._messenger.close()

    async def _send(self) -> None:
        while True:
            try:
                await self._send_one()
            except (RequestPlaneError, NatsError, OSError, TimeoutError):
                await asyncio.sleep(_RETRY_S)  # the message is lost; its number shows it

    async def _send_one(self) -> None:
        envelope = await self._unsent.get()
        client = await self._messenger.connected()
        await client.publish(f"{self._subject}.{envelope.topic}", encode_envelope(envelope))
