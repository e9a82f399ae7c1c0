"""KV events out of a stream of a real nats-server: old and new messages, and lost ones."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig

from dynctl.adapters.nats.durable_events import (
    DurableEventPlane,
    RouterConsumer,
    read_snapshot,
    snapshot_threshold,
)
from dynctl.adapters.ports import (
    ChannelCode,
    ChannelCondition,
    ChannelMessage,
    IndexUpdate,
    StreamCondition,
    StreamValue,
)
from dynctl.base.errors import UsageProblem
from dynctl.base.tasks import end_tasks
from dynctl.serving.dynamo.durable import DurableEvents
from dynctl.wire.dynamo.discovery import KV_EVENTS, EndpointId, EventChannel, JetStreamTransport
from dynctl.wire.dynamo.events import RouterEvent
from dynctl.wire.dynamo.radix_state import (
    RADIX_STATE,
    decode_radix_state,
    encode_radix_state,
    radix_bucket,
)
from router_core import BlocksStored
from tests.contract.nats_server import NatsServer, nats_server
from tests.waiting import patience

STREAM = "namespace-dynamo-component-backend-kv-events"
CHANNEL = EventChannel(
    EndpointId("dynamo", "backend", ""), KV_EVENTS, 0, JetStreamTransport(STREAM)
)
WORKER, OTHER = 7, 8


class Rig:
    """A stream, its publisher, and the two ranks that read it."""

    def __init__(self, server: NatsServer) -> None:
        self.url = f"nats://{server.address}"
        self.client = Client()
        self.values: list[StreamValue] = []
        self.events = DurableEvents(self.values.append, lambda: 0.0)
        self.plane = DurableEventPlane(self.url, check_s=0.1)
        self.task: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        self.client = Client()
        await self.client.connect(self.url, allow_reconnect=False)

    async def create(self, **limits: Any) -> None:
        js = self.client.jetstream()
        await js.add_stream(StreamConfig(STREAM, subjects=[f"{STREAM}.*"], **limits))

    async def publish(self, worker_id: int, *numbers: int, **more: Any) -> None:
        for number in numbers:
            block = {"block_hash": 100 + number, "tokens_hash": number, "mm_extra_info": None}
            stored = {"stored": {"parent_hash": None, "blocks": [block]}}
            event = {"event_id": number, "data": stored, "dp_rank": 0}
            await self.raw(json.dumps({"worker_id": worker_id, "event": event, **more}).encode())

    async def raw(self, body: bytes) -> None:
        await self.client.jetstream().publish(f"{STREAM}.{KV_EVENTS}", body)

    def follow(self) -> None:
        if self.task is not None:
            self.task.cancel()
        self.task = asyncio.create_task(self.plane.follow(CHANNEL, self.events.reader()).run())

    def numbers(self, worker_id: int) -> list[int]:
        updates = [one for one in self.values if isinstance(one, IndexUpdate)]
        return [one.seq for one in updates if one.worker_id == worker_id]

    def last_condition(self, worker_id: int) -> tuple[str, int | None]:
        found = [one for one in self.values if isinstance(one, StreamCondition)]
        last = [one for one in found if one.worker_id == worker_id][-1]
        return last.code, last.missing

    async def consumers(self) -> int:
        info = await self.client.jetstream().stream_info(STREAM)
        return info.state.consumer_count


@asynccontextmanager
async def rig(directory: Path, kind: type[Rig] = Rig) -> AsyncIterator[tuple[Rig, NatsServer]]:
    config = f'jetstream {{ store_dir: "{directory}/store" }}'
    async with asyncio.timeout(patience(30)), nats_server(directory, config) as server:
        made = kind(server)
        await made.connect()
        try:
            yield made, server
        finally:
            if made.task is not None:
                await end_tasks([made.task])
            await made.plane.close()
            await made.client.close()


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110  bounded by the rig
        await asyncio.sleep(0.01)


@pytest.mark.seed("router-guide: events: JetStream")
async def test_the_messages_from_before_are_read_and_then_followed(tmp_path: Path) -> None:
    async with rig(tmp_path) as (made, _):
        await made.create()
        await made.publish(WORKER, 0, 1)
        made.events.attach(WORKER, [0])
        made.events.attach(OTHER, [0])
        assert made.events.read() == frozenset()
        made.follow()
        await made.events.settled()
        assert made.events.not_current() == {}
        assert made.events.read() == {WORKER}
        assert made.numbers(WORKER) == [0, 1]
        assert made.last_condition(OTHER) == ("INDEX_CURRENT", 0)
        await made.publish(OTHER, 0)
        await made.publish(WORKER, 2)
        await until(lambda: made.numbers(WORKER) == [0, 1, 2])
        assert made.numbers(OTHER) == [0]
        assert made.events.not_current() == {}
        info = await made.client.jetstream().consumers_info(STREAM)
        assert [one.config.durable_name for one in info] == [None]
        assert made.task is not None
        await end_tasks([made.task])
        while await made.consumers():  # noqa: ASYNC110  the server removes it by itself
            await asyncio.sleep(0.1)


async def test_messages_that_the_stream_has_no_more_make_an_index_degraded(tmp_path: Path) -> None:
    async with rig(tmp_path) as (made, _):
        await made.create()
        await made.publish(WORKER, 0, 1)
        await made.client.jetstream().purge_stream(STREAM)
        await made.publish(WORKER, 2)
        await made.publish(OTHER, 0)
        made.events.attach(WORKER, [0])
        made.events.attach(OTHER, [0])
        made.events.attach(9, [0])
        made.events.attach(10, [0])
        await made.publish(10, 1, storage_tier="device")  # as Dynamo 1.2 numbers them
        made.follow()
        await made.events.settled()
        # The other worker's first event is there. The third has none, and may have lost some.
        assert made.events.not_current().keys() == {(WORKER, 0), (9, 0)}
        assert made.last_condition(WORKER) == ("EVENTS_LOST", 2)
        assert made.last_condition(OTHER) == ("INDEX_CURRENT", 0)
        await made.publish(9, 0)
        await until(lambda: made.events.not_current().keys() == {(WORKER, 0)})
        await made.raw(b"{")
        await until(lambda: (OTHER, 0) in made.events.not_current())
        await made.raw(
            json.dumps({"worker_id": WORKER, "event": {"event_id": 3, "data": "cleared"}}).encode()
        )
        await until(lambda: (WORKER, 0) not in made.events.not_current())


async def test_a_whole_stream_begins_with_number_0_or_1(tmp_path: Path) -> None:
    async with rig(tmp_path) as (made, _):
        await made.create()
        await made.publish(WORKER, 1)
        await made.publish(OTHER, 2)
        made.events.attach(WORKER, [0])
        made.events.attach(OTHER, [0])
        made.follow()
        await made.events.settled()
        assert made.events.not_current().keys() == {(OTHER, 0)}
        assert made.last_condition(OTHER) == ("EVENTS_LOST", 2)


async def test_a_worker_that_registers_after_its_events_is_read_again(tmp_path: Path) -> None:
    async with rig(tmp_path) as (made, _):
        await made.create()
        await made.publish(OTHER, 0, 1)
        made.events.attach(WORKER, [0])
        made.follow()
        await made.events.settled()
        assert not made.events.attach(9, [0])
        assert made.events.attach(OTHER, [0])
        made.events.restart()
        assert made.events.not_current()
        made.follow()
        await made.events.settled()
        assert made.numbers(OTHER) == [0, 1]
        assert made.events.not_current() == {}


async def test_without_the_stream_nothing_counts_as_read(tmp_path: Path) -> None:
    async with rig(tmp_path) as (made, server):
        made.events.attach(WORKER, [0])
        made.follow()
        await made.events.settled()
        assert made.events.not_current() == {(WORKER, 0): f"NATS has no stream {STREAM}"}
        assert made.events.read() == frozenset()
        await made.create()
        await made.publish(WORKER, 0)
        await until(made.events.read)
        assert made.numbers(WORKER) == [0]
        await server.kill()
        await until(made.events.not_current)
        await server.start()
        await made.connect()
        await made.publish(WORKER, 1)
        await until(lambda: made.numbers(WORKER) == [0, 1])
        await until(lambda: not made.events.not_current())
        # A new stream begins at message 1 again, and the events that were in none are lost.
        await made.client.jetstream().delete_stream(STREAM)
        await made.create()
        await made.publish(WORKER, 4)
        await until(lambda: made.numbers(WORKER) == [0, 1, 4])
        await until(lambda: made.last_condition(WORKER) == ("EVENTS_LOST", 2))


async def test_a_stream_that_is_full_loses_its_oldest_messages_while_the_reader_is_away(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as (made, _):
        await made.create(max_msgs=3)
        await made.publish(WORKER, 0, 1)
        made.events.attach(WORKER, [0])
        made.follow()
        await made.events.settled()
        assert made.events.not_current() == {}
        assert made.task is not None
        await end_tasks([made.task])
        await made.publish(WORKER, 2, 3, 4, 5, 6)
        made.follow()
        await until(lambda: made.numbers(WORKER)[-1] == 6)
        assert 3 not in made.numbers(WORKER)
        await until(lambda: made.last_condition(WORKER) == ("EVENTS_LOST", 2))


async def test_events_of_a_stream_that_are_published_again_count_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as (made, _):
        await made.create()
        made.events.attach(WORKER, [0])
        await made.publish(WORKER, 0, 1, 2)
        made.follow()
        await made.events.settled()
        for _ in range(2):
            await made.publish(WORKER, 0, 1, 2)
        await made.publish(WORKER, 3)
        await until(lambda: 3 in made.numbers(WORKER))
        assert made.numbers(WORKER) == [0, 1, 2, 3]
        assert made.events.not_current() == {}


@pytest.mark.seed("router-guide: events: snapshots")
async def test_a_snapshot_stands_for_messages_that_a_router_removed(tmp_path: Path) -> None:
    async with rig(tmp_path) as (made, _):
        await made.create()
        js = made.client.jetstream()
        await made.publish(WORKER, 0, 1, 2)
        await js.purge_stream(STREAM, seq=4)
        stored = RouterEvent(WORKER, 0, 0, BlocksStored(None, (100, 101, 102), (0, 1, 2)))
        await store_snapshot(js, [stored])
        made.events.attach(WORKER, [0])
        made.follow()
        await made.events.settled()
        assert made.events.not_current() == {}
        assert made.events.read() == {WORKER}
        assert made.numbers(WORKER) == [0]
        await made.publish(WORKER, 3)
        await until(lambda: made.numbers(WORKER) == [0, 3])
        assert made.events.not_current() == {}
        # A worker that registers later has the snapshot read again for it.
        assert made.last_condition(WORKER) == ("INDEX_CURRENT", 0)


async def test_a_snapshot_older_than_the_stream_keeps_messages_is_not_enough(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as (made, _):
        js = made.client.jetstream()
        await js.add_stream(StreamConfig(STREAM, subjects=[f"{STREAM}.*"], max_age=0.2))
        await store_snapshot(js, [RouterEvent(WORKER, 0, 0, BlocksStored(None, (100,), (0,)))])
        aged = time.monotonic() + 0.25
        await until(lambda: time.monotonic() > aged)
        await made.publish(WORKER, 0)
        await js.purge_stream(STREAM)
        made.events.attach(WORKER, [0])
        made.follow()
        await made.events.settled()
        assert made.events.not_current() != {}


async def test_an_unreadable_snapshot_makes_the_index_degraded(tmp_path: Path) -> None:
    async with rig(tmp_path) as (made, _):
        await made.create()
        js = made.client.jetstream()
        await made.publish(WORKER, 0)
        await js.purge_stream(STREAM)
        store = await js.create_object_store(radix_bucket(CHANNEL.scope))
        await store.put(RADIX_STATE, b"nonsense")
        made.events.attach(WORKER, [0])
        made.follow()
        await made.events.settled()
        assert made.events.not_current() != {}


async def store_snapshot(js: Any, events: list[RouterEvent]) -> None:
    store = await js.create_object_store(radix_bucket(CHANNEL.scope))
    await store.put(RADIX_STATE, encode_radix_state(events))


class Consuming(Rig):
    """A router that serves: with a durable consumer, and an index of its own."""

    def __init__(self, server: NatsServer) -> None:
        super().__init__(server)
        self.name: str | None = "4711"
        self.indexed: list[RouterEvent] = []
        self.open()

    def open(self, *, reset: bool = False, threshold: int = 10) -> None:
        async def dump(scope: EndpointId) -> list[RouterEvent]:
            assert scope == CHANNEL.scope
            return self.indexed

        consumer = RouterConsumer(lambda: self.name, dump, reset, threshold)
        self.plane = DurableEventPlane(self.url, check_s=0.1, consumer=consumer)

    async def durable(self) -> list[Any]:
        return list(await self.client.jetstream().consumers_info(STREAM))

    async def messages(self) -> int:
        return (await self.client.jetstream().stream_info(STREAM)).state.messages

    async def snapshot(self) -> list[RouterEvent]:
        found = await read_snapshot(self.client.jetstream(), CHANNEL.scope)
        return [] if found is None else decode_radix_state(found.data)


@asynccontextmanager
async def consuming(directory: Path) -> AsyncIterator[Consuming]:
    async with rig(directory, Consuming) as (made, _):
        assert isinstance(made, Consuming)
        await made.create()
        made.events.attach(WORKER, [0])
        yield made


@pytest.mark.seed("router-guide: events: durable consumers")
async def test_a_router_has_a_consumer_of_its_name_and_acknowledges(tmp_path: Path) -> None:
    async with consuming(tmp_path) as made:
        await made.publish(WORKER, 0, 1)
        made.name = None
        made.follow()
        await made.events.settled()
        assert await made.durable() == [], "a router without a name is not registered"
        made.name = "4711"
        await until(lambda: made.numbers(WORKER) == [0, 1])
        await made.publish(WORKER, 2)
        await until(lambda: made.numbers(WORKER) == [0, 1, 2])
        while (await made.durable())[0].ack_floor.stream_seq < 3:  # noqa: ASYNC110  the server's
            await asyncio.sleep(0.01)
        (consumer,) = await made.durable()
        assert consumer.config.durable_name == "4711"
        assert consumer.config.deliver_subject is None, "Dynamo's routers list pull consumers only"
        assert consumer.config.inactive_threshold == 300.0
        assert await made.messages() == 3, "below the threshold nothing is removed"
        await made.plane.close()
        assert await made.durable() == []


async def test_acknowledged_messages_are_removed_and_a_snapshot_stays(tmp_path: Path) -> None:
    async with consuming(tmp_path) as made:
        made.indexed = [RouterEvent(WORKER, 0, 0, BlocksStored(None, (100,), (0,)))]
        made.follow()
        await made.events.settled()
        await made.publish(WORKER, *range(12))
        while await made.messages():  # noqa: ASYNC110  the server's
            await asyncio.sleep(0.02)
        while not await made.snapshot():  # noqa: ASYNC110  the server's
            await asyncio.sleep(0.02)
        assert await made.snapshot() == made.indexed
        assert made.numbers(WORKER) == list(range(12))


async def test_what_another_router_has_not_read_stays(tmp_path: Path) -> None:
    async with consuming(tmp_path) as made:
        js = made.client.jetstream()
        config = ConsumerConfig(durable_name="other", ack_policy=AckPolicy.EXPLICIT)
        await js.add_consumer(STREAM, config)
        made.follow()
        await made.events.settled()
        await made.publish(WORKER, *range(12))
        await until(lambda: made.numbers(WORKER) == list(range(12)))
        other = await js.pull_subscribe_bind("other", STREAM)
        for message in await other.fetch(5, timeout=patience(5)):
            await message.ack_sync(timeout=patience(1))
        while await made.messages() > 7:  # noqa: ASYNC110  the server's
            await asyncio.sleep(0.02)
        assert await made.messages() == 7


@pytest.mark.seed("smart-routing-guide-0.9: replicas: --router-reset-states")
async def test_a_reset_removes_messages_and_snapshot_once(tmp_path: Path) -> None:
    async with consuming(tmp_path) as made:
        js = made.client.jetstream()
        await made.publish(WORKER, 0, 1)
        await store_snapshot(js, [RouterEvent(WORKER, 0, 0, BlocksStored(None, (9,), (9,)))])
        made.open(reset=True)
        made.follow()
        await made.events.settled()
        assert made.numbers(WORKER) == []
        assert await made.snapshot() == []
        await made.publish(WORKER, 2)
        await until(lambda: made.numbers(WORKER) == [2])
        # The reading ends and begins again: what came since is not removed again.
        assert made.task is not None
        await end_tasks([made.task])
        # A message that is sent to the old reading comes back only after the time to acknowledge.
        while (await made.durable())[0].num_waiting:  # noqa: ASYNC110  the server's
            await asyncio.sleep(0.01)
        await made.publish(WORKER, 3)
        made.follow()
        await until(lambda: made.numbers(WORKER)[-1:] == [3])
        assert await made.messages() == 2


async def test_a_consumer_that_was_removed_is_made_again(tmp_path: Path) -> None:
    """Dynamo's routers remove the consumers of routers that are not registered."""
    async with consuming(tmp_path) as made:
        await made.publish(WORKER, 0)
        made.follow()
        await until(lambda: made.numbers(WORKER) == [0])
        await made.client.jetstream().delete_consumer(STREAM, "4711")
        await made.publish(WORKER, 1)
        await until(lambda: made.numbers(WORKER) == [0, 1])
        assert [one.config.durable_name for one in await made.durable()] == ["4711"]


@pytest.mark.parametrize("text", ["0", "-1", "many", "99999999999999"])
def test_a_threshold_that_is_no_number_of_messages_is_refused(text: str) -> None:
    with pytest.raises(UsageProblem, match="DYN_ROUTER_SNAPSHOT_THRESHOLD"):
        snapshot_threshold({"DYN_ROUTER_SNAPSHOT_THRESHOLD": text})
    assert snapshot_threshold({}) == 1_000_000
    assert snapshot_threshold({"DYN_ROUTER_SNAPSHOT_THRESHOLD": "20"}) == 20


@pytest.mark.parametrize("known", [3, 400])
def test_numbers_that_go_back_are_those_of_a_new_process(known: int) -> None:
    values: list[StreamValue] = []
    events = DurableEvents(values.append, lambda: 0.0)
    take = events.reader()
    take(ChannelCondition(KV_EVENTS, 0, ChannelCode.CHANNEL_CONNECTED, "connected"))
    events.attach(WORKER, [0])

    def message(at: int, number: int, name: int) -> ChannelMessage:
        block = {"block_hash": name, "tokens_hash": name, "mm_extra_info": None}
        stored = {"stored": {"parent_hash": None, "blocks": [block]}}
        event = {"event_id": number, "data": stored, "dp_rank": 0}
        more = {"worker_id": WORKER, "event": event, "storage_tier": "device"}
        return ChannelMessage(KV_EVENTS, 0, at, 0, json.dumps(more).encode())

    first = [message(number, number, 100 + number) for number in range(1, known + 1)]
    for one in first:
        take(one)
    take(message(known + 1, known, 100 + known))  # published twice
    for one in first:  # read again from the stream's start
        take(one)
    state = events.states()[WORKER, 0]
    assert (state.last_seq, state.restarts, state.missing) == (known, 0, 0)
    for number in (1, 2):
        take(message(known + 1 + number, number, 900 + number))
    state = events.states()[WORKER, 0]
    assert (state.last_seq, state.restarts, state.missing) == (2, 1, 0)
    [restarted] = [one for one in values if getattr(one, "code", "") == "ENGINE_RESTARTED"]
    assert isinstance(restarted, StreamCondition)
    assert restarted.clears
    after = values[values.index(restarted) :]
    assert [one.seq for one in after if isinstance(one, IndexUpdate)] == [1, 2]
