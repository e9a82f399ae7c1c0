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
from nats.js.api import StreamConfig

from dynctl.adapters.nats.durable_events import DurableEventPlane
from dynctl.adapters.ports import IndexUpdate, StreamCondition, StreamValue
from dynctl.serving.dynamo.durable import DurableEvents
from dynctl.wire.dynamo.discovery import KV_EVENTS, EndpointId, EventChannel, JetStreamTransport
from dynctl.wire.dynamo.events import RouterEvent
from dynctl.wire.dynamo.radix_state import RADIX_STATE, encode_radix_state, radix_bucket
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

    async def create(self) -> None:
        js = self.client.jetstream()
        await js.add_stream(StreamConfig(STREAM, subjects=[f"{STREAM}.*"]))

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
async def rig(directory: Path) -> AsyncIterator[tuple[Rig, NatsServer]]:
    config = f'jetstream {{ store_dir: "{directory}/store" }}'
    async with asyncio.timeout(patience(30)), nats_server(directory, config) as server:
        made = Rig(server)
        await made.connect()
        try:
            yield made, server
        finally:
            if made.task is not None:
                made.task.cancel()
                await asyncio.gather(made.task, return_exceptions=True)
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
        made.task.cancel()
        await asyncio.gather(made.task, return_exceptions=True)
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
