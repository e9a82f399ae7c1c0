"""KV events that Dynamo 1.0 to 1.3 keep in NATS JetStream: a stream's messages, old and new.

A command that only looks reads with an ordered consumer: it lives in the server's memory,
acknowledges nothing, and the server removes it after some seconds without a reader. The stream is
only read.

A router that serves has a durable consumer, as Dynamo's routers have: named by the router's
instance id, with every message acknowledged. When the stream has more messages than a threshold,
the router removes those that all routers have acknowledged, and then stores a snapshot of its
index.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeout
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy, StreamInfo
from nats.js.errors import NotFoundError

from dynctl.adapters.nats.address import NATS_ERRORS, NatsAuth
from dynctl.adapters.nats.dynamo_events import reason_of
from dynctl.adapters.nats.requests import NatsMessenger
from dynctl.adapters.ports import (
    ChannelCode,
    ChannelCondition,
    ChannelCounts,
    ChannelMessage,
    ChannelValue,
    RequestPlaneError,
)
from dynctl.base.errors import UsageProblem
from dynctl.base.tasks import TURN_BYTES, TURN_MESSAGES
from dynctl.wire.dynamo.discovery import EndpointId, EventChannel, JetStreamTransport
from dynctl.wire.dynamo.events import RouterEvent
from dynctl.wire.dynamo.radix_state import MAX_BYTES, RADIX_STATE, encode_radix_state, radix_bucket

#: Messages of a stream above which Dynamo's routers remove them (--router-snapshot-threshold).
SNAPSHOT_MESSAGES: Final = 1_000_000
_RESPONSE_S: Final = 5.0
#: A durable consumer without a reader is removed by the server after this time, as Dynamo sets it.
_INACTIVE_S: Final = 300.0
_FETCHED: Final = 256
_CHECK_S: Final = 2.0
_RETRY_S: Final = (0.5, 1.0, 2.0, 5.0)
#: Messages and bytes that wait for us; the server sends further ones when these are read.
_PENDING_MESSAGES: Final = 65_536
_PENDING_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RouterConsumer:
    """How a router that serves reads streams.

    ``name()``: of its consumers, the router's instance id in decimal; None while it has none.
    ``dump(scope)``: the events that build its index of a component's workers. ``reset``: remove
    the messages and the snapshot of each stream first. ``threshold``: messages of a stream above
    which they are removed after a snapshot.
    """

    name: Callable[[], str | None]
    dump: Callable[[EndpointId], Awaitable[list[RouterEvent]]]
    reset: bool = False
    threshold: int = SNAPSHOT_MESSAGES


def snapshot_threshold(environ: Mapping[str, str]) -> int:
    """Messages of a stream above which they are removed: Dynamo's variable for it, else its
    default. Raises UsageProblem."""
    text = environ.get("DYN_ROUTER_SNAPSHOT_THRESHOLD", "").strip()
    if not text:
        return SNAPSHOT_MESSAGES
    if not (text.isascii() and text.isdigit() and 0 < int(text[:12]) < 2**32):
        raise UsageProblem(
            f"DYN_ROUTER_SNAPSHOT_THRESHOLD {text[:40]}: expected a number of messages from 1 on"
        )
    return int(text)


class DurableEventPlane:
    """Followers of streams that share one connection to one of ``servers``.

    Raises UsageProblem for a server or invalid credentials, as NatsEventPlane does.
    """

    def __init__(
        self,
        servers: str | list[str] | tuple[str, ...],
        auth: NatsAuth | None = None,
        *,
        check_s: float = _CHECK_S,
        consumer: RouterConsumer | None = None,
    ) -> None:
        self.messenger = NatsMessenger(servers, auth)
        self.check_s = check_s
        self.consumer = consumer
        #: (stream, durable consumer) of this process, and streams that were reset.
        self.consumers: set[tuple[str, str]] = set()
        self.were_reset: set[str] = set()

    def follow(
        self, channel: EventChannel, emit: Callable[[ChannelValue], None]
    ) -> DurableFollower:
        """Never fails: a stream that does not exist is reported once it runs."""
        return DurableFollower(self, channel, emit)

    async def close(self) -> None:
        """Leaves no connection and no durable consumer."""
        if self.consumers:
            with contextlib.suppress(*NATS_ERRORS, RequestPlaneError):
                js = (await self.messenger.connected()).jetstream(timeout=_RESPONSE_S)
                for stream, name in self.consumers:
                    with contextlib.suppress(NatsError):
                        await js.delete_consumer(stream, name)
        await self.messenger.close()


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """The snapshot of a router's index, and when it was stored."""

    data: bytes
    at: datetime


async def read_snapshot(js: JetStreamContext, scope: EndpointId) -> StoredSnapshot | None:
    """The snapshot of a component; None without one, or if it cannot be read."""
    try:
        store = await js.object_store(radix_bucket(scope))
        info = await store.get_info(RADIX_STATE)
        if info.deleted or (info.size or 0) > MAX_BYTES:
            return None
        found = await store.get(RADIX_STATE)
    except (*NATS_ERRORS, ValueError):
        return None
    stored: Any = info.mtime  # the library has a time where it declares a text
    at = datetime.fromisoformat(stored) if isinstance(stored, str) else stored
    return StoredSnapshot(found.data or b"", datetime.now(UTC) if at is None else at)


class _Stale(Exception):
    """The stream has to be read with a new consumer; the message has the reason."""


class DurableFollower:
    """Reads one stream from its first message.

    Where a router has removed messages from it, the router's snapshot comes first: a message with
    the topic ``radix-state``, number 0. CHANNEL_CONNECTED comes once the messages that the stream
    had at the connection are read. EVENTS_DROPPED counts messages that it does not keep any more.
    ``sequence`` of a message is the stream's number of it, from 1; its payload is undecoded.
    """

    def __init__(
        self,
        plane: DurableEventPlane,
        channel: EventChannel,
        emit: Callable[[ChannelValue], None],
    ) -> None:
        self.counts = ChannelCounts()
        self.connected = False
        self._plane = plane
        self._channel = channel
        self._emit = emit
        self._next = 1
        self._created: datetime | None = None
        self._reported = ""

    async def run(self) -> None:
        """Follow until cancelled; connects again after each loss."""
        transport = self._channel.transport
        if not isinstance(transport, JetStreamTransport):
            raise TypeError(f"expected a stream of JetStream, got {transport}")
        failures = 0
        while True:
            try:
                client = await self._plane.messenger.connected()
                if self._plane.consumer is None:
                    await self._read(client, transport.stream)
                else:
                    await self._consume(client, transport.stream, self._plane.consumer)
                why = "the connection to NATS ended"
            except (RequestPlaneError, _Stale) as error:
                why = str(error)
            except NotFoundError:
                why = f"NATS has no stream {transport.stream}"
            except NATS_ERRORS as error:
                why = f"stream {transport.stream}: {reason_of(error, _RESPONSE_S)}"
            failures = 0 if self.connected else failures + 1
            self.connected = False
            if why != self._reported:
                self._reported = why
                self._report(ChannelCode.CHANNEL_DISCONNECTED, why)
            await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])

    async def _read(self, client: Client, stream: str) -> None:
        """Read until the connection ends."""
        js = client.jetstream(timeout=_RESPONSE_S)
        info = await js.stream_info(stream)
        if self._next == 1 and info.state.first_seq > 1:
            await self._take_snapshot(js, info)
        self._resume(info)
        end = info.state.last_seq
        turn = size = 0

        async def received(message: Msg) -> None:
            nonlocal turn, size
            self._take(message)
            if self._next > end:
                self._connect(stream)
            turn, size = turn + 1, size + len(message.data)
            if turn >= TURN_MESSAGES or size >= TURN_BYTES:
                turn = size = 0
                await asyncio.sleep(0)

        consumer = await js.subscribe(
            f"{stream}.*",
            stream=stream,
            ordered_consumer=True,
            config=ConsumerConfig(
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=self._next
            ),
            cb=received,
            pending_msgs_limit=_PENDING_MESSAGES,
            pending_bytes_limit=_PENDING_BYTES,
        )
        if self._next > end:
            self._connect(stream)
        try:
            await self._watch(client, stream)
        finally:
            with contextlib.suppress(*NATS_ERRORS):
                await consumer.unsubscribe()

    async def _consume(self, client: Client, stream: str, consumer: RouterConsumer) -> None:
        """Read with the router's durable consumer until the connection ends."""
        name = consumer.name()
        if name is None:
            raise _Stale("this router is not registered yet")
        js = client.jetstream(timeout=_RESPONSE_S)
        if consumer.reset and stream not in self._plane.were_reset:
            await self._reset(js, stream)
        info = await js.stream_info(stream)
        if self._next == 1 and info.state.first_seq > 1:
            await self._take_snapshot(js, info)
        self._resume(info)
        end = info.state.last_seq
        self._plane.consumers.add((stream, name))
        config = ConsumerConfig(
            durable_name=name,
            ack_policy=AckPolicy.EXPLICIT,
            deliver_policy=DeliverPolicy.ALL,
            inactive_threshold=_INACTIVE_S,
        )
        reader = await js.pull_subscribe(f"{stream}.*", durable=name, stream=stream, config=config)
        loop = asyncio.get_running_loop()
        behind_at: int | None = None
        checked = loop.time()
        try:
            while not client.is_closed:
                if self._next > end:
                    self._connect(stream)
                try:
                    messages = await reader.fetch(_FETCHED, timeout=self._plane.check_s)
                except NatsTimeout:
                    messages = []
                for message in messages:
                    self._take(message)
                    await message.ack()
                if loop.time() - checked < self._plane.check_s:
                    continue
                info, behind_at = await self._compare(js, stream, behind_at)
                if info.state.messages > consumer.threshold:
                    await self._purge_and_store(js, stream, consumer)
                checked = loop.time()
        finally:
            with contextlib.suppress(*NATS_ERRORS):
                await reader.unsubscribe()

    async def _reset(self, js: JetStreamContext, stream: str) -> None:
        """Remove what earlier routers kept: the messages of the stream, and the snapshot."""
        await js.purge_stream(stream)
        with contextlib.suppress(NatsError):
            await js.delete_object_store(radix_bucket(self._channel.scope))
        self._plane.were_reset.add(stream)

    async def _purge_and_store(
        self, js: JetStreamContext, stream: str, consumer: RouterConsumer
    ) -> None:
        """Remove the messages that all routers have acknowledged, then store a snapshot.

        In this order, as in Dynamo: the snapshot has all that was removed. A router that has not
        acknowledged anything yet still reads, so nothing is removed before it has.
        """
        floor = _acknowledged_by_all(await js.consumers_info(stream))
        if floor is None:
            return
        await js.purge_stream(stream, seq=floor + 1)
        events = await consumer.dump(self._channel.scope)
        payload = await asyncio.to_thread(encode_radix_state, events)
        bucket = radix_bucket(self._channel.scope)
        try:
            store = await js.object_store(bucket)
        except NotFoundError:
            store = await js.create_object_store(bucket)
        await store.put(RADIX_STATE, payload)

    async def _take_snapshot(self, js: JetStreamContext, info: StreamInfo) -> None:
        """Emit the snapshot of the messages that were removed.

        It is complete as long as the stream has all messages since it was taken: they stay for the
        stream's maximum age, unless a router purges them, which is followed by another snapshot.
        """
        found = await read_snapshot(js, self._channel.scope)
        if found is None:
            return
        age = datetime.now(UTC) - found.at
        kept = info.config.max_age
        channel, at = self._channel, int(found.at.timestamp() * 1000)
        self._emit(ChannelMessage(RADIX_STATE, channel.publisher_id, 0, at, found.data))
        if not kept or age.total_seconds() < kept:
            self._next = info.state.first_seq

    async def _watch(self, client: Client, stream: str) -> None:
        """Compare with the stream, because a consumer that stops makes no error."""
        js = client.jetstream(timeout=_RESPONSE_S)
        behind_at: int | None = None
        while True:
            await asyncio.sleep(self._plane.check_s)
            if client.is_closed:
                return
            _, behind_at = await self._compare(js, stream, behind_at)

    async def _compare(
        self, js: JetStreamContext, stream: str, behind_at: int | None
    ) -> tuple[StreamInfo, int | None]:
        """The stream as it is now, and the next message if the stream has it already.

        ``behind_at``: that of the last comparison. Raises _Stale where it did not arrive since.
        """
        if behind_at == self._next:
            raise _Stale(f"stream {stream} has messages that do not arrive")
        info = await js.stream_info(stream)
        if info.created != self._created:
            raise _Stale(f"stream {stream} was deleted and created again")
        return info, self._next if info.state.last_seq >= self._next else None

    def _resume(self, info: StreamInfo) -> None:
        """Continue after the last message, or where the stream begins now."""
        first = max(1, info.state.first_seq)
        if self._created not in (None, info.created):
            self._next = 1
            self._drop(1, "the stream was deleted and created again")
        self._created = info.created
        if first > self._next:
            self._drop(first - self._next, f"the stream begins with message {first:,}")
            self._next = first

    def _take(self, message: Msg) -> None:
        number = message.metadata.sequence.stream
        if number < self._next:
            self.counts.duplicates += 1
            return
        if number > self._next:
            self._drop(number - self._next, f"message {number:,} came after {self._next - 1:,}")
        self._next = number + 1
        self.counts.received += 1
        published = int(message.metadata.timestamp.timestamp() * 1000)
        channel = self._channel
        self._emit(
            ChannelMessage(channel.topic, channel.publisher_id, number, published, message.data)
        )

    def _drop(self, count: int, why: str) -> None:
        self.counts.dropped += count
        self._report(ChannelCode.EVENTS_DROPPED, f"messages are missing: {why}", count)

    def _connect(self, stream: str) -> None:
        if not self.connected:
            self.connected = True
            self._reported = ""
            self._report(ChannelCode.CHANNEL_CONNECTED, f"connected to stream {stream}")

    def _report(self, code: ChannelCode, message: str, count: int = 0) -> None:
        channel = self._channel
        self._emit(ChannelCondition(channel.topic, channel.publisher_id, code, message, count))


def _acknowledged_by_all(consumers: Sequence[ConsumerInfo]) -> int | None:
    """The last message that the durable consumer of every router has acknowledged; None without
    one."""
    acknowledged: list[int] = []
    for consumer in consumers:
        if consumer.config.ack_policy is AckPolicy.NONE or consumer.config.deliver_subject:
            continue
        number = consumer.ack_floor.stream_seq if consumer.ack_floor is not None else 0
        if number:
            acknowledged.append(number)
        elif consumer.num_pending:
            return None
    return min(acknowledged, default=None)
