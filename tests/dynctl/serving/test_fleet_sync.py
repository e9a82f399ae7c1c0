"""Replica sync with Dynamo's frontends, without one: what is published, and what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest

from dynctl.adapters.ports import ChannelCode, ChannelCondition, ChannelMessage
from dynctl.base.errors import UsageProblem
from dynctl.health import conditions as codes
from dynctl.health.deployment import Deployment
from dynctl.serving.dynamo import fleet_sync
from dynctl.serving.dynamo.fleet_sync import FleetSync
from dynctl.serving.dynamo.observer import Observer
from dynctl.serving.routing import replicas
from dynctl.serving.routing.service import RoutingService
from dynctl.wire.dynamo.active_sequences import (
    SequenceAdded,
    SequenceEvent,
    SequenceFreed,
    SequencePrefillDone,
    decode_sequences,
    encode_sequences,
)
from dynctl.wire.dynamo.discovery import (
    ACTIVE_SEQUENCES,
    EndpointId,
    EventChannel,
    NatsTransport,
    ZmqTransport,
)
from router_core import Booked, Expired, Freed, LoadReported, PrefillDone, Role, RouterConfig
from tests.dynctl.serving.test_observer import Rig
from tests.waiting import patience, until

OURS, THEIRS = 0xA1, 0xB2


class Topic:
    """A channel that keeps what is published."""

    dropped = 0

    def __init__(self, scope: EndpointId, publisher: int, nats: bool) -> None:
        transport = NatsTransport("x") if nats else ZmqTransport("tcp://127.0.0.1:1")
        self.channel = EventChannel(scope, ACTIVE_SEQUENCES, publisher, transport)
        self.payloads: list[bytes] = []
        self.closed = False

    def publish(self, payload: bytes) -> None:
        self.payloads.append(payload)

    async def run(self) -> None:
        await asyncio.Future()

    async def close(self) -> None:
        self.closed = True

    @property
    def events(self) -> list[SequenceEvent]:
        return [event for one in self.payloads for event in decode_sequences(one)]


class Synced:
    """A service on the captured deployment, with replica sync."""

    nats = False

    def __init__(self) -> None:
        self.rig = Rig()
        self.now = 0.0
        self.service = RoutingService(RouterConfig(), clock=lambda: self.now)
        self.topics: dict[str, Topic] = {}
        self.refuse = False
        self.changes = 0
        self.sync = FleetSync(
            self.service,
            self.open,
            router_id=OURS,
            later=lambda seconds, call: call(),
            changed=self.changed,
        )
        self.observer = Observer(
            self.rig.planes, self.service.router, apply=self.service.apply, namespace="dynamo"
        )

    def open(self, scope: EndpointId) -> Topic:
        if self.refuse:
            raise UsageProblem("no address")
        topic = Topic(scope, 1_000 + len(self.topics), self.nats)
        self.topics[scope.component] = topic
        return topic

    def changed(self) -> None:
        self.changes += 1

    def worker(self, role: Role) -> int:
        return next(w.worker_id for w in self.service.router.registry if w.role is role)

    def book(self, name: str, worker: int, **more: Any) -> None:
        found = self.service.router.registry.get(worker)
        assert found is not None
        assert self.service.apply(Booked(name, found.role.value, worker, 0, **more)).ok

    def receive(self, *events: SequenceEvent, publisher: int = 0xFE) -> EventChannel:
        scope = EndpointId("dynamo", "backend", "generate")
        transport = ZmqTransport("tcp://127.0.0.1:2")
        channel = EventChannel(scope, ACTIVE_SEQUENCES, publisher, transport)
        payload = encode_sequences(list(events))
        self.sync.take(channel, ChannelMessage(ACTIVE_SEQUENCES, publisher, 0, 0, payload))
        return channel

    def requests(self, worker: int) -> int:
        slot = self.service.router.registry.slot(worker, 0)
        assert slot is not None
        return self.service.router.load.requests[slot]


@pytest.fixture
async def synced() -> AsyncIterator[Synced]:
    made = Synced()
    async with asyncio.timeout(patience(30)), made.observer:
        made.sync.take_deployment(made.observer.deployment)
        yield made
        await made.sync.close()
        await made.service.tasks.close()
    await made.rig.events.close()
    assert all(one.closed for one in made.topics.values())


async def test_bookings_are_published_for_their_pool(synced: Synced) -> None:
    prefill, decode = synced.worker(Role.PREFILL), synced.worker(Role.DECODE)
    synced.book("r1", prefill, prefill_tokens=93)
    synced.book("r1", decode, sequence_hashes=(1, 2, 3))
    synced.service.apply(PrefillDone("r1"))
    synced.service.apply(Freed("r1"))
    first, second = synced.topics["prefill"], synced.topics["backend"]
    assert first.events == [
        SequenceAdded("r1", prefill, 0, None, 93, OURS),
        SequencePrefillDone("r1", prefill, 0, OURS),
        SequenceFreed("r1", prefill, 0, OURS),
    ]
    assert second.events == [
        SequenceAdded("r1", decode, 0, (1, 2, 3), 0, OURS, None, False),
        SequenceFreed("r1", decode, 0, OURS),
    ]


async def test_each_pool_has_a_registered_channel(synced: Synced) -> None:
    keys = [key for key, _ in synced.sync.entries(7)]
    assert len(keys) == 2
    for component in ("prefill", "backend"):
        at = f"namespace/dynamo/component/{component}/endpoint/generate/topic/{ACTIVE_SEQUENCES}/"
        assert any(key.startswith(f"v1/event_channels/{at}") for key in keys)
    assert synced.changes == 2
    # Its own channels are not those of others.
    for key, value in synced.sync.entries(7):
        synced.rig.discovery.put(key, value)
    own = {one.channel.publisher_id for one in synced.topics.values()}
    deadline = asyncio.get_running_loop().time() + patience(5)
    while not own <= {one.publisher_id for one in synced.observer.deployment.sequences}:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)
    assert synced.sync.publishers() == own


async def test_over_nats_each_event_is_a_message() -> None:
    Synced.nats = True
    try:
        made = Synced()
        async with made.observer:
            made.sync.take_deployment(made.observer.deployment)
            decode = made.worker(Role.DECODE)
            made.book("r1", decode, sequence_hashes=(1,))
            made.book("r2", decode, sequence_hashes=(1,))
            payloads = made.topics["backend"].payloads
            assert [len(decode_sequences(one)) for one in payloads] == [1, 1]
            assert b"events" not in payloads[0]
            await made.sync.close()
            await made.service.tasks.close()
        await made.rig.events.close()
    finally:
        Synced.nats = False


async def test_bookings_of_others_count_and_are_not_published_again(synced: Synced) -> None:
    decode = synced.worker(Role.DECODE)
    synced.receive(SequenceAdded("r1", decode, 0, (1, 2, 3), 0, THEIRS))
    slot = synced.service.router.registry.slot(decode, 0)
    assert slot is not None
    assert synced.requests(decode) == 1
    assert synced.service.router.load.decode_blocks[slot] == 3
    # The same id on the same worker by us is another request.
    synced.book("r1", decode, sequence_hashes=(9,))
    assert synced.requests(decode) == 2
    synced.receive(SequenceFreed("r1", decode, 0, THEIRS))
    assert synced.requests(decode) == 1
    assert [type(one) for one in synced.topics["backend"].events] == [SequenceAdded]
    assert synced.sync.events["received", "add"] == 1
    (row,) = synced.sync.rows()
    assert (row.state, row.requests, row.router_id) == ("in step", 0, f"{THEIRS:016x}")


async def test_a_booking_on_two_channels_counts_once_and_is_not_ours(synced: Synced) -> None:
    decode = synced.worker(Role.DECODE)
    event = SequenceAdded("r1", decode, 0, (1,), 0, THEIRS)
    synced.receive(event)
    synced.receive(event, publisher=0xFF)
    assert synced.requests(decode) == 1
    synced.receive(SequenceFreed("r1", decode, 0, THEIRS), publisher=0xFF)
    assert synced.requests(decode) == 1
    synced.service.apply(Freed("r1"))
    assert synced.topics["backend"].events == []
    synced.receive(SequenceFreed("r1", decode, 0, THEIRS))
    assert synced.requests(decode) == 0
    assert not synced.sync._foreign


async def test_a_router_that_frees_nothing_is_a_condition_until_it_does(
    synced: Synced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "MOST_OF_ONE", 3)
    decode = synced.worker(Role.DECODE)
    added = [SequenceAdded(f"r{number}", decode, 0, (1,), 0, THEIRS) for number in range(5)]
    synced.receive(*added)
    assert synced.requests(decode) == 3
    synced.sync.keep_alive()
    assert {one.code for one in synced.service.conditions} == {codes.REPLICA_OVER_LIMIT}
    synced.receive(*(SequenceFreed(one.request_id, decode, 0, THEIRS) for one in added))
    synced.sync.keep_alive()
    assert not list(synced.service.conditions)


async def test_a_worker_reports_the_end_of_a_prefill(synced: Synced) -> None:
    prefill = synced.worker(Role.PREFILL)
    slot = synced.service.router.registry.slot(prefill, 0)
    assert slot is not None
    synced.receive(SequenceAdded("r1", prefill, 0, None, 93, THEIRS))
    assert synced.service.router.load.prefill_tokens[slot] == 93
    synced.receive(SequencePrefillDone("r1", prefill, 0, prefill), publisher=0xFF)
    assert synced.service.router.load.prefill_tokens[slot] == 0
    assert len(synced.sync.rows()) == 1, "a worker is no router"


async def test_own_events_that_come_back_are_ignored(synced: Synced) -> None:
    decode = synced.worker(Role.DECODE)
    synced.receive(SequenceAdded("r1", decode, 0, (1,), 0, OURS))
    assert synced.requests(decode) == 0


async def test_requests_of_a_router_end_with_its_channel(synced: Synced) -> None:
    decode = synced.worker(Role.DECODE)
    synced.receive(SequenceAdded("r1", decode, 0, (1,), 0, THEIRS))
    # The channel is not in discovery.
    synced.sync.take_deployment(synced.observer.deployment)
    assert synced.requests(decode) == 0
    assert synced.sync.rows() == []


async def test_a_worker_may_report_its_end_before_the_loss_of_messages_is_noticed(
    synced: Synced,
) -> None:
    """It does not report again while it has nothing to do."""
    decode = synced.worker(Role.DECODE)
    channel = synced.receive(SequenceAdded("r1", decode, 0, (1,), 0, THEIRS))
    synced.now = 0.5
    synced.service.apply(LoadReported(decode, 0, kv_used_blocks=0))
    synced.receive(SequenceAdded("r2", decode, 0, (2,), 0, THEIRS))
    synced.now = 1.0
    lost = ChannelCondition(ACTIVE_SEQUENCES, 0xFE, ChannelCode.EVENTS_DROPPED, "gap", 1)
    synced.sync.take(channel, lost)
    synced.now = 3.5
    synced.service.expire()
    assert synced.requests(decode) == 1, "r2 was booked after the report"


async def test_lost_messages_are_a_condition_until_what_they_ended_expired(synced: Synced) -> None:
    decode = synced.worker(Role.DECODE)
    channel = synced.receive(SequenceAdded("r1", decode, 0, (1,), 0, THEIRS))
    lost = ChannelCondition(ACTIVE_SEQUENCES, 0xFE, ChannelCode.EVENTS_DROPPED, "gap", 2)
    synced.sync.take(channel, lost)
    (row,) = synced.sync.rows()
    assert (row.state, row.lost) == ("behind", 2)
    assert {one.code for one in synced.service.conditions} == {codes.REPLICA_BEHIND}
    assert synced.sync.out_of_date()
    synced.now = synced.service.router.config.active_request_expiry_secs + 1.0
    synced.service.expire()
    assert synced.requests(decode) == 0
    assert not synced.sync._foreign
    assert not list(synced.service.conditions)
    assert synced.sync.rows()[0].requests == 0
    synced.service.apply(Expired())


async def test_a_worker_without_used_blocks_has_no_request_from_before_a_loss(
    synced: Synced,
) -> None:
    decode = synced.worker(Role.DECODE)
    channel = synced.receive(SequenceAdded("r1", decode, 0, (1,), 0, THEIRS))

    def report(**load: int) -> int:
        """Requests after a report of the worker."""
        synced.service.apply(LoadReported(decode, 0, **load))
        synced.service.expire()
        return synced.requests(decode)

    assert report(kv_used_blocks=0) == 1, "no message was lost: the report is older"
    lost = ChannelCondition(ACTIVE_SEQUENCES, 0xFE, ChannelCode.EVENTS_DROPPED, "gap", 1)
    synced.sync.take(channel, lost)
    synced.receive(SequenceAdded("r2", decode, 0, (2,), 0, THEIRS))
    assert report(kv_used_blocks=0) == 2, "r1 may be on its way"
    synced.now = 2.5
    assert report(kv_used_blocks=1) == 2
    assert report(active_decode_blocks=0, active_prefill_tokens=0) == 2, "the view of a router"
    synced.sync.take(channel, lost)
    synced.receive(SequenceAdded("r3", decode, 0, (3,), 0, THEIRS))
    assert report(kv_used_blocks=0) == 3, "r2 may be on its way"
    synced.now = 5.0
    synced.service.expire()
    assert synced.requests(decode) == 1, "r3 came after the loss"
    synced.now = 33.0
    synced.service.expire()
    assert not list(synced.service.conditions)


@pytest.mark.parametrize(("used", "left"), [(0, 0), (3, 1)])
async def test_a_rank_that_reports_no_use_for_long_has_no_request_from_before_a_loss(
    synced: Synced, used: int, left: int
) -> None:
    """Dynamo's mock workers do not report requests that end within a millisecond."""
    decode = synced.worker(Role.DECODE)
    synced.service.apply(LoadReported(decode, 0, kv_used_blocks=used))
    synced.now = 0.5
    channel = synced.receive(SequenceAdded("r1", decode, 0, (1,), 0, THEIRS))
    synced.now = 1.0
    lost = ChannelCondition(ACTIVE_SEQUENCES, 0xFE, ChannelCode.EVENTS_DROPPED, "gap", 1)
    synced.sync.take(channel, lost)
    synced.now = 30.9
    synced.service.expire()
    assert synced.requests(decode) == 1
    synced.now = 31.1
    synced.service.expire()
    assert synced.requests(decode) == left
    assert len(list(synced.service.conditions)) == left


async def test_a_loss_is_over_when_all_bookings_from_before_it_have_ended(synced: Synced) -> None:
    decode = synced.worker(Role.DECODE)
    channel = synced.receive(SequenceAdded("r1", decode, 0, (1,), 0, THEIRS))
    lost = ChannelCondition(ACTIVE_SEQUENCES, 0xFE, ChannelCode.EVENTS_DROPPED, "gap", 1)
    synced.sync.take(channel, lost)
    synced.receive(SequenceAdded("r2", decode, 0, (2,), 0, THEIRS))
    synced.now = 31.0
    synced.service.expire()
    assert synced.sync.rows()[0].state == "behind", "r1 may have ended"
    synced.receive(SequenceFreed("r1", decode, 0, THEIRS))
    synced.service.expire()
    assert synced.sync.rows()[0].state == "in step"
    assert not list(synced.service.conditions)


async def test_a_worker_that_leaves_takes_the_bookings_of_others_along(synced: Synced) -> None:
    decode = synced.worker(Role.DECODE)
    synced.receive(SequenceAdded("r1", decode, 0, (1,), 0, THEIRS))
    synced.service.membership.remove(decode)
    assert not synced.sync._foreign
    synced.receive(SequenceFreed("r1", decode, 0, THEIRS))
    synced.receive(SequenceAdded("r2", decode, 0, (1,), 0, THEIRS))
    assert synced.sync.missed["unknown_worker"] == 1


async def test_unreadable_messages_are_counted(synced: Synced) -> None:
    channel = synced.receive(SequenceFreed("r0", 1, 0, THEIRS))
    synced.sync.take(channel, ChannelMessage(ACTIVE_SEQUENCES, 0xFE, 1, 0, b"\xc1"))
    assert synced.sync.missed["malformed"] == 1


#: What a hostile router may send as a number.
HOSTILE: tuple[Any, ...] = (0, -1, 2**31, 2**53 + 1, 2**63, 2**64 - 1, 1e300, True, None, "7", [])


def hostile_payloads(worker: int) -> Iterator[bytes]:
    """Events with each number replaced by each hostile one, then mutated bytes of real ones."""
    real = encode_sequences(
        [
            SequenceAdded("r", worker, 0, (1, 2, 3), 48, THEIRS, None, True, 128, 0.5),
            SequencePrefillDone("r", worker, 0, THEIRS),
            SequenceFreed("r", worker, 0, THEIRS),
        ]
    )
    yield real
    document = msgspec.msgpack.decode(real)
    for change in every_leaf_replaced(document):
        yield msgspec.msgpack.encode(change)
    random = Random(27)
    for _ in range(2_000):
        data = bytearray(real)
        for _ in range(random.randint(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        yield bytes(data[: random.randint(1, len(data))])


def every_leaf_replaced(value: Any) -> Iterator[Any]:
    """Copies of a document with one leaf replaced by each hostile value."""
    if isinstance(value, list):
        for at, part in enumerate(value):
            for other in every_leaf_replaced(part):
                yield [*value[:at], other, *value[at + 1 :]]
    elif isinstance(value, dict):
        for name, part in value.items():
            for other in every_leaf_replaced(part):
                yield {**value, name: other}
    else:
        yield from HOSTILE


async def test_a_hostile_router_stops_nothing(synced: Synced) -> None:
    decode = synced.worker(Role.DECODE)
    channel = synced.receive()
    sent = 0
    for sent, payload in enumerate(hostile_payloads(decode), start=1):
        synced.sync.take(channel, ChannelMessage(ACTIVE_SEQUENCES, 0xFE, sent, 0, payload))
        if sent % 100 == 0:
            assert synced.service.router.snapshot()
    assert sent > 2_100
    assert synced.sync.missed["malformed"] > 500
    # Its decisions are those of a router that heard nothing wrong, and all of it ends with it.
    synced.sync.take_deployment(replace(synced.observer.deployment))
    before = synced.requests(decode)
    synced.receive(SequenceAdded("good", decode, 0, (1,), 0, THEIRS))
    assert synced.requests(decode) == before + 1
    for load in (synced.service.router.load.prefill_tokens, synced.service.router.load.requests):
        assert all(0 <= value < 2**63 for value in load)


async def test_what_is_booked_is_freed_at_the_end(synced: Synced) -> None:
    decode = synced.worker(Role.DECODE)
    synced.receive(SequenceAdded("other", decode, 0, (1,), 0, THEIRS))
    synced.book("r1", decode, sequence_hashes=(1,))
    await synced.sync.leave()
    assert synced.topics["backend"].events[-1] == SequenceFreed("r1", decode, 0, OURS)
    assert len(synced.topics["backend"].events) == 2


async def test_an_address_that_cannot_be_bound_is_a_condition() -> None:
    made = Synced()
    made.refuse = True
    async with made.observer:
        made.sync.take_deployment(made.observer.deployment)
        found = {one.subject for one in made.service.conditions if one.code == codes.REPLICA_SILENT}
        assert found == {"dynamo.prefill.generate", "dynamo.backend.generate"}
        made.book("r1", made.worker(Role.DECODE), sequence_hashes=(1,))
        assert made.sync.missed["dropped"] == 1
        await made.service.tasks.close()
    await made.rig.events.close()


async def test_the_channels_of_pools_without_workers_have_a_bound(
    synced: Synced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployment that rolls has other components each time."""
    monkeypatch.setattr(fleet_sync, "MOST_IDLE", 1)
    deployment = synced.observer.deployment
    assert set(synced.topics) == {"prefill", "backend"}

    def of(number: int) -> Deployment:
        workers = [
            replace(
                one,
                instance=replace(
                    one.instance, endpoint=one.instance.endpoint._replace(component=f"new-{number}")
                ),
                worker=replace(one.worker, worker_id=number),
            )
            for one in deployment.workers[:1]
        ]
        return replace(deployment, workers=tuple(workers))

    for number in (1, 2, 3):
        synced.sync.take_deployment(of(number))
    await until(
        lambda: [n for n, one in synced.topics.items() if not one.closed] == ["new-2", "new-3"]
    )
    assert len(list(synced.sync.entries(1))) == 2
    assert synced.changes == 5 + 3
    synced.sync.take_deployment(of(2))
    assert len(synced.topics) == 5, "the idle channel is used again"
