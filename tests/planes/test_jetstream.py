"""KV events in a stream of JetStream with three replicas, whose leader is killed."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import StreamConfig

from dynctl.adapters.nats.durable_events import DurableEventPlane, RouterConsumer
from dynctl.adapters.ports import IndexUpdate, StreamValue
from dynctl.base.tasks import end_tasks
from dynctl.serving.dynamo.durable import DurableEvents
from dynctl.wire.dynamo.discovery import KV_EVENTS, EndpointId
from dynctl.wire.dynamo.events import RouterEvent
from tests.contract.nats_server import NatsServer, kill_all, nats_cluster, start_all
from tests.contract.test_durable_events import CHANNEL, STREAM, WORKER, until
from tests.planes.traffic import Outcome, Scores, Traffic
from tests.waiting import patience


class Events:
    """A publisher of numbered events, and a reader that notes when each arrives. Both know all
    servers. ``durable``: reads as a router that serves does."""

    def __init__(self, servers: list[NatsServer], *, durable: bool) -> None:
        self.addresses = [f"nats://{server.address}" for server in servers]
        self.stored_at: list[float] = []
        self.arrived_at: dict[int, float] = {}
        self.events = DurableEvents(self._arrived, time.monotonic)
        self.events.attach(WORKER, [0])

        async def dump(_scope: EndpointId) -> list[RouterEvent]:
            return []

        consumer = RouterConsumer(lambda: "4711", dump) if durable else None
        self.plane = DurableEventPlane(self.addresses, consumer=consumer)
        self.client = Client()

    def _arrived(self, value: StreamValue) -> None:
        if isinstance(value, IndexUpdate):
            self.arrived_at.setdefault(value.seq, time.monotonic())

    async def publish(self) -> None:
        """The next event, again and again until the stream has it."""
        number = len(self.stored_at)
        block = {"block_hash": 100 + number, "tokens_hash": number, "mm_extra_info": None}
        stored = {"stored": {"parent_hash": None, "blocks": [block]}}
        event = {"event_id": number, "data": stored, "dp_rank": 0}
        body = json.dumps({"worker_id": WORKER, "event": event}).encode()
        while True:
            try:
                headers = {"Nats-Msg-Id": str(number)}
                await self.stream.publish(f"{STREAM}.{KV_EVENTS}", body, timeout=1, headers=headers)
                self.stored_at.append(time.monotonic())
                return
            except (NatsError, OSError, TimeoutError):
                await asyncio.sleep(0.05)

    async def connect(self) -> None:
        await self.client.connect(self.addresses, max_reconnect_attempts=-1, reconnect_time_wait=1)
        self.stream = self.client.jetstream(timeout=5)

    def outcomes(self) -> Traffic:
        """Of each event: whether it arrived, and how many seconds after the stream had it."""
        result = Traffic()
        for number, at in enumerate(self.stored_at):
            arrived = self.arrived_at.get(number)
            seconds = 0.0 if arrived is None else max(0.0, arrived - at)
            result.outcomes.append(Outcome(200 if arrived else 0, at, seconds))
        return result


@pytest.mark.parametrize("durable", [False, True], ids=["observer", "router"])
async def test_the_leader_of_a_stream_is_killed(
    tmp_path: Path, scores: Scores, durable: bool
) -> None:
    """Every event arrives once and in order, and the index is current again."""
    servers = nats_cluster(tmp_path, jetstream=True)
    async with asyncio.timeout(patience(120)):
        await start_all(servers)
        events = Events(servers, durable=durable)
        reader = None
        try:
            await events.connect()
            await create_stream(events)
            reader = asyncio.create_task(events.plane.follow(CHANNEL, events.events.reader()).run())
            await events.publish()
            await until(lambda: events.arrived_at and not events.events.not_current())
            leader = await leader_of_stream(events, servers)
            await leader.kill()
            for _ in range(30):
                await events.publish()
                await asyncio.sleep(0.1)
            await leader.start()
            began = time.monotonic()
            await events.publish()
            await until(lambda: len(events.arrived_at) == len(events.stored_at))
            await until(lambda: not events.events.not_current())
            outcomes = events.outcomes()
            outcomes.right_s = time.monotonic() - began
            assert list(events.arrived_at) == list(range(32))
            assert not any(state.lost for state in events.events.states().values())
            scores.add("JetStream: the leader of a stream of KV events killed (events)", outcomes)
        finally:
            if reader is not None:
                await end_tasks([reader])
            await events.plane.close()
            await events.client.close()
            await kill_all(servers)


async def create_stream(events: Events) -> None:
    """Once the servers have a leader among them."""
    config = StreamConfig(STREAM, subjects=[f"{STREAM}.*"], num_replicas=3)
    while True:
        try:
            await events.stream.add_stream(config)
            return
        except (NatsError, TimeoutError):
            await asyncio.sleep(0.2)


async def leader_of_stream(events: Events, servers: list[NatsServer]) -> NatsServer:
    while True:
        info = await events.stream.stream_info(STREAM)
        if info.cluster is not None and info.cluster.leader:
            return servers[int(info.cluster.leader.removeprefix("n"))]
        await asyncio.sleep(0.1)
