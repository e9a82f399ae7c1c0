"""The messages between routers over core NATS: all of one group share a subject for each topic."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from nats.aio.client import Client

from dynctl.adapters.event_channel import AnyPublisher
from dynctl.adapters.nats.address import NATS_ERRORS, NatsAuth
from dynctl.adapters.nats.dynamo_events import NatsEventPlane
from dynctl.adapters.nats.requests import NatsMessenger
from dynctl.adapters.ports import ChannelValue, RequestPlaneError
from dynctl.base.tasks import end_tasks
from dynctl.wire.dynamo.discovery import EndpointId, EventChannel, NatsTransport
from dynctl.wire.dynamo.events import Envelope, encode_envelope

#: Messages that wait to be sent; further ones are dropped.
_UNSENT: Final = 8192
#: After a lost connection: seconds in which the connections of readers return (their longest pause
#: is a second), and the age and number of messages that may have been lost with it. Readers
#: remember more messages than that, so they see which of them they have.
_RETURN_S: Final = 1.5
_UNSURE_S: Final = 4.0
_UNSURE: Final = 200
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
        self._unsent: deque[Envelope] = deque()
        self._wake = asyncio.Event()
        self._client: Client | None = None
        #: The last messages, with the loop's time at which each was sent.
        self._sent: deque[tuple[float, Envelope]] = deque(maxlen=_UNSURE)

    @property
    def title(self) -> str:
        return f"NATS, {self._plane.title}, subject {self._subject}"

    def publish(self, envelope: Envelope) -> bool:
        if len(self._unsent) >= _UNSENT:
            return False
        self._unsent.append(envelope)
        self._wake.set()
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
                client = await self._messenger.connected()
                while self._unsent:
                    await self._send_one(client)
                await client.flush()
        except (*NATS_ERRORS, RequestPlaneError):
            pass  # the others notice that this router is silent
        await self._plane.close()
        await self._messenger.close()

    async def _send(self) -> None:
        while True:
            self._wake.clear()
            try:
                while self._unsent:
                    client = await self._messenger.connected()
                    if client is not self._client:
                        await self._return(client)
                    await self._send_one(client)
            except (*NATS_ERRORS, RequestPlaneError):
                await asyncio.sleep(_RETRY_S)
            else:
                await self._wake.wait()

    async def _return(self, client: Client) -> None:
        """After a lost connection: wait for the connections of readers, which were lost too, and
        send again what may not have left."""
        lost, self._client = self._client, client
        if lost is None:
            return
        unsure_since = asyncio.get_running_loop().time() - _UNSURE_S
        unsure = [envelope for sent_at, envelope in self._sent if sent_at >= unsure_since]
        self._sent.clear()
        self._unsent.extendleft(reversed(unsure))
        await asyncio.sleep(_RETURN_S)

    async def _send_one(self, client: Client) -> None:
        envelope = self._unsent[0]
        await client.publish(f"{self._subject}.{envelope.topic}", encode_envelope(envelope))
        self._unsent.popleft()
        self._sent.append((asyncio.get_running_loop().time(), envelope))
