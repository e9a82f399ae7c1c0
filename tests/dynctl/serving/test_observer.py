"""The observer on memory planes: workers come and go under it, and so does their load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynctl.adapters.dynamo.planes import Planes
from dynctl.adapters.memory import MemoryDiscovery
from dynctl.health.deployment import ProblemCode
from dynctl.serving.dynamo import observer as observer_module
from dynctl.serving.dynamo.observer import Observer, ObserverBounds
from dynctl.wire.dynamo.active_sequences import (
    SequenceAdded,
    SequenceFreed,
    SequencePrefillDone,
    encode_sequences,
)
from dynctl.wire.dynamo.discovery import EventChannel, Instance
from dynctl.wire.dynamo.events import (
    KvMetrics,
    RouterEvent,
    encode_kv_metrics,
    encode_router_events,
)
from dynctl.wire.dynamo.request_plane import RawItem
from router_core import BlocksStored, Router, hash_prompt
from tests.memory_planes import MemoryEventPlane
from tests.waiting import patience

CAPTURE = Path(__file__).parents[2] / "captures" / "etcd-disagg-required.json"
PREFILL_HASH = 0x1234


class Requests:
    """Every worker answers with a dump of one block and that it has seen three events."""

    def __init__(self) -> None:
        self.requested: list[int] = []
        self.at_once = self.most_at_once = 0
        self.closed = False

    async def ask_raw(
        self, instance: Instance, body: Any, *, timeout: float, max_bytes: int
    ) -> AsyncGenerator[RawItem, None]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0.01)
            self.requested.append(body["worker_id"])
            stored = RouterEvent(
                body["worker_id"], 0, 1, BlocksStored(None, (PREFILL_HASH,), (PREFILL_HASH,))
            )
            events = msgspec.msgpack.decode(encode_router_events([stored]))
            dump = {"TreeDump": {"events": events, "last_event_id": 3, "reset_scope": "all"}}
            yield RawItem(msgspec.msgpack.encode(dump), "msgpack")
        finally:
            self.at_once -= 1

    async def close(self) -> None:
        self.closed = True


class Rig:
    """The captured two-zone deployment on memory planes, under an observer."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {
            key: row["value"] for key, row in json.loads(CAPTURE.read_text()).items()
        }
        self.discovery = MemoryDiscovery()
        self.events = MemoryEventPlane()
        self.requests = Requests()
        for key, value in self.values.items():
            self.discovery.put(key, json.dumps(value).encode())
        self.observer = Observer(self.planes, Router(), namespace="dynamo")

    @property
    def planes(self) -> Planes:
        return Planes("memory", self.discovery, lambda channel: self.events, self.requests, [])

    @property
    def router(self) -> Router:
        return self.observer.router

    def worker_id(self, component: str) -> int:
        return next(
            item.worker.worker_id
            for item in self.observer.deployment.workers
            if item.instance.endpoint.component == component
        )

    def publish(self, channel: EventChannel, payload: bytes) -> None:
        self.events.publish(channel, payload)

    def slot(self, worker_id: int) -> int:
        slot = self.router.registry.slot(worker_id, 0)
        assert slot is not None
        return slot


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    async with asyncio.timeout(patience(30)):
        async with made.observer:
            await made.observer.settled()
            yield made
    assert made.requests.closed
    await made.events.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(patience(5)):
        while not condition():  # noqa: ASYNC110  many things change it
            await asyncio.sleep(0.005)


async def test_the_whole_deployment_is_taken_over(rig):
    assert len(rig.router.registry) == 4
    assert sorted(rig.requests.requested) == sorted(
        item.worker.worker_id for item in rig.observer.deployment.workers if item.sources
    )
    slot = rig.slot(rig.worker_id("prefill"))
    assert rig.router.index.block_count(slot) == 1
    assert rig.observer.not_current() == {}
    assert rig.router.freshness[slot].index_state == "current"
    assert rig.router.freshness[rig.slot(rig.worker_id("backend"))].index_state == "absent"


async def test_live_events_follow_the_dump(rig):
    worker_id = rig.worker_id("prefill")
    item = next(i for i in rig.observer.deployment.workers if i.worker.worker_id == worker_id)
    stored = BlocksStored(PREFILL_HASH, (99,), (99,))
    event = RouterEvent(worker_id, 0, 4, stored)
    rig.publish(item.kv_events[0], encode_router_events([event]))
    await until(lambda: rig.router.index.block_count(rig.slot(worker_id)) == 2)
    assert len(rig.requests.requested) == 2, "no further request"


async def test_events_in_a_stream_are_followed(rig):
    worker_id = rig.worker_id("prefill")
    [card] = [k for k in rig.values if k == f"v1/mdc/dynamo/prefill/generate/{worker_id:x}"]
    runtime = rig.values[card]["card_json"]["runtime_config"]
    runtime["enable_local_indexer"] = False
    del runtime["kv_event_publishing_enabled"]
    for key in [key for key in rig.values if key.startswith("v1/event_")]:
        rig.discovery.delete(key)
    rig.discovery.put(card, json.dumps(rig.values[card]).encode())

    def silent() -> list[str]:
        return [p.subject for p in rig.observer.problems if p.code is ProblemCode.EVENTS_MISSING]

    def durable() -> EventChannel | None:
        observer: Observer = rig.observer
        workers = observer.deployment.workers
        return next(i.durable_events for i in workers if i.worker.worker_id == worker_id)

    slot = rig.slot(worker_id)
    await until(lambda: durable() and (worker_id, 0) in rig.observer.stream_states())
    await rig.observer.settled()
    assert rig.observer.not_current() == {}
    assert len(silent()) == 2, "it has shown no event yet"
    block = {"block_hash": 9, "tokens_hash": 9}
    event = {"event_id": 0, "data": {"stored": {"parent_hash": None, "blocks": [block]}}}
    channel = durable()
    assert channel is not None
    rig.publish(channel, json.dumps({"worker_id": worker_id, "event": event}).encode())
    await until(lambda: rig.router.index.block_count(slot) == 1)
    assert len(silent()) == 1
    # Another registration does not change what is known of this one.
    runtime["max_num_seqs"] = 7
    rig.discovery.put(card, json.dumps(rig.values[card]).encode())
    await until(lambda: rig.router.registry.get(worker_id).runtime_config.max_num_seqs == 7)
    assert rig.router.freshness[slot].index_state == "current"
    rig.discovery.delete(card)
    await until(lambda: rig.router.registry.get(worker_id) is None)
    assert rig.observer.stream_states() == {}


async def test_a_worker_leaves_and_comes_back(rig):
    worker_id = rig.worker_id("prefill")
    key = next(
        key
        for key, value in rig.values.items()
        if key.startswith("v1/mdc/dynamo/prefill/") and value["instance_id"] == worker_id
    )
    rig.discovery.delete(key)
    await until(lambda: rig.router.registry.get(worker_id) is None)
    assert len(rig.observer.stream_states()) == 1
    rig.discovery.put(key, json.dumps(rig.values[key]).encode())
    await until(lambda: rig.router.registry.get(worker_id) is not None)
    await rig.observer.settled()
    await until(lambda: rig.router.index.block_count(rig.slot(worker_id)) == 1)


async def test_a_changed_card_keeps_what_is_cached(rig):
    worker_id = rig.worker_id("prefill")
    key = f"v1/mdc/dynamo/prefill/generate/{worker_id:x}"
    changed = json.loads(json.dumps(rig.values[key]))
    changed["card_json"]["runtime_config"]["taints"].append("gpu=h100")
    rig.discovery.put(key, json.dumps(changed).encode())
    await until(lambda: "gpu=h100" in rig.router.registry.get(worker_id).runtime_config.taints)
    assert rig.router.index.block_count(rig.slot(worker_id)) == 1
    assert rig.router.freshness[rig.slot(worker_id)].index_state == "current"
    assert len(rig.requests.requested) == 2


async def test_load_is_mirrored_from_replica_sync_events(rig):
    prefill, decode = rig.worker_id("prefill"), rig.worker_id("backend")
    channel = rig.observer.deployment.sequences[0]
    load = rig.router.load

    def send(*events: Any) -> None:
        rig.publish(channel, encode_sequences(events))

    send(SequenceAdded("r1", prefill, 0, None, 100, router_id=5))
    send(SequenceAdded("r2", prefill, 0, None, 30, router_id=6))
    await until(lambda: load.prefill_tokens[rig.slot(prefill)] == 130)
    send(SequencePrefillDone("r1", prefill, 0, 5), SequenceFreed("r1", prefill, 0, 5))
    send(SequenceAdded("r1", decode, 0, (1, 2, 3), 0, router_id=5))
    await until(lambda: load.decode_blocks[rig.slot(decode)] == 3)
    assert load.prefill_tokens[rig.slot(prefill)] == 30
    send(SequenceFreed("r1", decode, 0, 5), SequenceFreed("r2", prefill, 0, 6))
    await until(lambda: not load.decode_blocks[rig.slot(decode)])
    assert not load.prefill_tokens[rig.slot(prefill)]
    send(SequenceAdded("r9", 4711, 0, None, 5, router_id=5))  # of an unknown worker
    rig.publish(channel, b"\xc1")
    rig.publish(
        rig.observer.deployment.loads[0], encode_kv_metrics(KvMetrics(decode, 0, 7, None, 9))
    )
    await until(lambda: rig.observer.load.reports == 1)
    assert rig.router.busy.reported[rig.slot(decode)].kv_used_blocks == 9
    assert rig.observer.load.malformed == 1


async def test_workers_of_the_preferred_model_are_read_first():
    rig = Rig()
    other = one_more_prefill_worker(rig.values, 1)
    for key, value in other.items():
        text = json.dumps(value).replace('"display_name": "tiny"', '"display_name": "other"')
        rig.discovery.put(key, text.encode())
    wanted = next(v["instance_id"] for k, v in other.items() if k.startswith("v1/mdc/"))
    observer = Observer(
        rig.planes,
        Router(),
        prefer="other",
        follow_index=False,
        bounds=ObserverBounds(recoveries=1),
    )
    async with asyncio.timeout(patience(30)), observer:
        assert observer.deployment.models == ("other", "tiny")
        observer.follow_indexes()
        await observer.settled()
    assert len(rig.requests.requested) == 3
    assert rig.requests.requested[0] == wanted
    await rig.events.close()


def one_more_prefill_worker(values: dict[str, Any], number: int) -> dict[str, Any]:
    """Another worker's entries, made from those of a captured one."""
    source_key = next(key for key in values if key.startswith("v1/event_sources/"))
    publisher = values[source_key]["publisher_id"]
    worker = values[source_key]["metadata"]["worker"]["worker_id"]
    made = {}
    for key, value in values.items():
        if key.endswith((f"/{worker:x}", f"/{publisher:x}")):
            both = json.dumps([key, value])
            for old, new in ((worker, worker + 4096 * number), (publisher, publisher + number)):
                both = both.replace(str(old), str(new)).replace(f"{old:x}", f"{new:x}")
            new_key, new_value = json.loads(both)
            made[new_key] = new_value
    return made


async def test_at_most_eight_recoveries_run_at_a_time():
    rig = Rig()
    for number in range(1, 31):
        for key, value in one_more_prefill_worker(rig.values, number).items():
            rig.discovery.put(key, json.dumps(value).encode())
    async with asyncio.timeout(patience(30)):
        async with rig.observer:
            await rig.observer.settled()
            assert len(rig.router.registry) == 34
            assert len(rig.requests.requested) == 32
    assert rig.requests.most_at_once == 8
    await rig.events.close()


@pytest.mark.parametrize("lower", [[], [{"tier": "host"}]], ids=["device only", "lower tiers too"])
async def test_an_indexer_with_blocks_of_lower_tiers_says_so(rig, monkeypatch, lower: list[Any]):
    worker = rig.observer.deployment.workers[0]
    hashes = hash_prompt(range(32), worker.worker.block_size)

    async def scores(instance: Instance, body: Any, **_: Any) -> AsyncGenerator[RawItem, None]:
        device = {"scores": [[{"worker_id": worker.worker.worker_id, "dp_rank": 0}, 1]]}
        found = {"TieredScores": {"device": device, "lower_tier": lower}}
        yield RawItem(msgspec.msgpack.encode(found), "msgpack")

    monkeypatch.setattr(rig.requests, "ask_raw", scores)
    model = worker.worker.model
    query = rig.observer.query_indexer(worker.instance, model, hashes, [worker.worker])
    assert await query is bool(lower)
    slot = rig.slot(worker.worker.worker_id)
    assert rig.router.index.find_matches(hashes.sequence, 1 << slot).levels == ((1, 1 << slot),)


async def test_changes_that_come_at_once_are_joined_together(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a join takes long, as with hundreds of workers."""
    monkeypatch.setattr(observer_module, "_QUICK_JOIN_S", -1.0)
    monkeypatch.setattr(observer_module, "_JOIN_REST", 1e6)
    monkeypatch.setattr(observer_module, "_LONGEST_REST_S", 0.2)
    joins: list[int] = []
    monkeypatch.setattr(
        rig.observer, "_on_deployment", lambda found: joins.append(len(found.workers))
    )
    before = len(rig.observer.deployment.workers)
    keys = [
        key for key in rig.values if rig.worker_id("prefill").to_bytes(8).hex().lstrip("0") in key
    ]
    for key in keys:
        rig.discovery.delete(key)
    await until(lambda: len(rig.observer.deployment.workers) == before - 1)
    for key in keys:
        rig.discovery.put(key, json.dumps(rig.values[key]).encode())
    await until(lambda: len(rig.observer.deployment.workers) == before)
    assert len(joins) < len(keys)
