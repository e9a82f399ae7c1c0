"""Replica sync: routers that share their load, over a plane that loses, delays and repeats."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.adapters.event_channel import SILENT_S, AnyPublisher
from dynctl.adapters.ports import ChannelCode, ChannelMessage, ChannelValue
from dynctl.documents.replicas import (
    REPLICAS,
    ReplicaMessage,
    decode_replica_message,
    encode_replica_message,
)
from dynctl.serving.engines.worker_spec import parse_worker_spec
from dynctl.serving.routing import replicas as sync_module
from dynctl.serving.routing.replicas import TOPICS, ReplicaSync
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
    ZmqTransport,
)
from dynctl.wire.dynamo.events import Envelope
from router_core import (
    Booked,
    Expired,
    Freed,
    PrefillDone,
    Role,
    RouterConfig,
    Worker,
    WorkerLost,
    WorkerUpserted,
)

SYNC = pytest.mark.seed("dynamo-1.6: replica sync: load is shared")


class World:
    """Routers and what is between them: one clock, timers that run when the clock moves, a wire.

    ``cut``: pairs (from, to) that nothing passes; ``lost``: deliveries that are dropped.
    """

    def __init__(self, *names: str, batched: bool = True, **config: Any) -> None:
        self.now = 0.0
        self.batched = batched
        self.cut: set[tuple[str, str]] = set()
        self.lose: Callable[[str, str, Envelope], bool] = lambda source, to, envelope: False
        self.sent: list[tuple[str, Envelope]] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.nodes: dict[str, Node] = {}
        for name in names:
            self.start(name, **config)

    def start(self, name: str, number: int = 0, **config: Any) -> Node:
        """A router; one of the name that ran before is replaced without a word."""
        router_id = number or 100 + len(self.nodes)
        node = self.nodes[name] = Node(self, name, router_id, RouterConfig(**config))
        for other in self.nodes.values():
            other.listen_to(self.nodes)
        return node

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._timers, (self.now + seconds, self._count, call))

    def run(self, seconds: float) -> None:
        """Move the clock on; each router reports once a second."""
        end = self.now + seconds
        while True:
            beat = min((node.beat_at for node in self.nodes.values()), default=end + 1)
            timer = self._timers[0][0] if self._timers else end + 1
            at = min(beat, timer)
            if at > end:
                break
            self.now = max(self.now, at)
            if timer <= beat:
                heapq.heappop(self._timers)[2]()
            else:
                for node in list(self.nodes.values()):
                    if node.beat_at <= self.now:
                        node.beat_at += sync_module.ALIVE_S
                        node.sync.beat()
        self.now = end

    def deliver(self, source: str, envelope: Envelope) -> None:
        self.sent.append((source, envelope))
        for name, node in list(self.nodes.items()):
            if name == source or (source, name) in self.cut:
                continue
            if not self.lose(source, name, envelope):
                node.intakes[source].take(envelope)


class Node:
    """One router of a World."""

    def __init__(self, world: World, name: str, router_id: int, config: RouterConfig) -> None:
        self.world, self.name, self.router_id = world, name, router_id
        self.service = RoutingService(config, clock=lambda: world.now, wall=lambda: world.now)
        for number, worker in enumerate(("w0", "w1"), 1):
            self.service.apply(WorkerUpserted(Worker(number, worker, "m")))
        self.intakes: dict[str, AnyPublisher] = {}
        self.title = "memory"
        self.addresses: tuple[str, ...] = ()
        self.batched = world.batched
        self.beat_at = world.now + 0.1
        self.full = False
        self.sync = ReplicaSync(
            self.service, self, router_id=router_id, name=name, later=world.later
        )

    def listen_to(self, others: dict[str, Node]) -> None:
        self.addresses = tuple(name for name in others if name != self.name)
        for address in self.addresses:
            channel = EventChannel(EndpointId("", "", ""), "", 0, ZmqTransport(address))
            take = partial(self.sync.take, address)
            self.intakes.setdefault(address, AnyPublisher(channel, TOPICS, take))

    def publish(self, envelope: Envelope) -> bool:
        if self.full:
            return False
        self.world.deliver(self.name, envelope)
        return True

    async def run(self, emit: Any) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    # -- as requests do

    def book(self, request: str, worker: int = 1, tokens: int = 32, blocks: int = 2) -> None:
        hashes = tuple(hash((request, at)) & (2**64 - 1) for at in range(blocks))
        applied = self.service.apply(
            Booked(request, "aggregated", worker, 0, prefill_tokens=tokens, sequence_hashes=hashes)
        )
        assert applied.ok, applied

    def free(self, request: str) -> None:
        self.service.apply(Freed(request))

    @property
    def load(self) -> dict[str, tuple[int, int, int]]:
        """Worker -> requests, prefill tokens, blocks."""
        router = self.service.router
        found = {}
        for worker in router.registry:
            (slot,) = router.registry.slots(worker.worker_id)
            load = router.load
            found[worker.name] = (
                load.requests[slot],
                load.prefill_tokens[slot],
                load.decode_blocks[slot],
            )
        return found

    def codes(self) -> set[tuple[str, str]]:
        return {
            (one.code, one.subject)
            for one in self.service.conditions
            if one.code.startswith("REPLICA")
        }

    def states(self) -> dict[str, str]:
        return {row.name: row.state for row in self.sync.rows()}


NONE = {"w0": (0, 0, 0), "w1": (0, 0, 0)}


@SYNC
@pytest.mark.parametrize("batched", [True, False])
def test_what_one_router_books_counts_at_the_others(batched):
    world = World("a", "b", "c", batched=batched)
    a, b, c = world.nodes.values()
    world.run(2.5)
    a.book("r1", tokens=48, blocks=3)
    world.run(0.01)
    assert a.load == b.load == c.load == {"w0": (1, 48, 3), "w1": (0, 0, 0)}
    a.service.apply(PrefillDone("r1"))
    world.run(0.01)
    assert b.load == {"w0": (1, 0, 3), "w1": (0, 0, 0)}
    a.free("r1")
    world.run(0.01)
    assert a.load == b.load == c.load == NONE
    assert b.sync.missed.total() == 0
    assert b.sync.events["received", "add"] == b.sync.events["received", "free"] == 1
    assert b.sync.events["received", "prefill_done"] == 1


def test_a_shared_prefix_counts_once_also_between_routers():
    world = World("a", "b")
    a, b = world.nodes.values()
    world.run(2.5)
    for node, request in ((a, "r1"), (b, "r2")):
        node.service.apply(
            Booked(request, "aggregated", 1, 0, prefill_tokens=32, sequence_hashes=(1, 2))
        )
    world.run(0.01)
    assert a.load["w0"] == b.load["w0"] == (2, 64, 2)


@pytest.mark.seed("smart-routing-guide-0.9: replicas: exchange of routing decisions")
def test_the_events_are_those_of_dynamo():
    """Prefill hop: no blocks, tokens in the hint. Decode hop: blocks, prefill not tracked."""
    world = World("a")
    a = world.nodes["a"]
    for number, role in ((11, Role.PREFILL), (12, Role.DECODE)):
        a.service.apply(WorkerUpserted(Worker(number, role.value, "m2", role)))
    a.service.apply(Booked("r", "prefill", 11, 0, prefill_tokens=93))
    a.service.apply(Booked("r", "decode", 12, 0, sequence_hashes=(7, 8)))
    a.service.apply(PrefillDone("r"))
    a.service.apply(Freed("r", "prefill"))
    a.service.apply(Freed("r"))
    a.sync.flush()
    (envelope,) = [one for _, one in world.sent if one.topic == ACTIVE_SEQUENCES]
    assert decode_sequences(envelope.payload) == (
        SequenceAdded("r", 11, 0, None, 93, 100),
        SequenceAdded("r", 12, 0, (7, 8), 0, 100, track_prefill_tokens=False),
        SequencePrefillDone("r", 11, 0, 100),
        SequenceFreed("r", 11, 0, 100),
        SequenceFreed("r", 12, 0, 100),
    )


@pytest.mark.seed("dynamo-1.6: replica sync: batches of 256 events or 1 ms")
def test_messages_have_at_most_256_events_and_wait_a_millisecond():
    world = World("a", "b")
    a, b = world.nodes.values()
    world.run(2.5)
    world.sent.clear()
    for number in range(600):
        a.book(f"r{number}")
    assert world.sent == []
    world.run(0.001)
    sizes = [len(decode_sequences(e.payload)) for _, e in world.sent if e.topic == ACTIVE_SEQUENCES]
    assert sizes == [256, 256, 88]
    assert b.load["w0"][0] == 600


def test_a_turn_moves_on_for_own_requests_only():
    world = World("a", "b", router_mode="round-robin")
    a, b = world.nodes.values()
    world.run(2.5)
    for number in range(3):
        a.book(f"r{number}")
    world.run(0.01)
    assert (sum(a.service.router.rotation.values()), sum(b.service.router.rotation.values())) == (
        3,
        0,
    )


def test_two_routers_may_use_the_same_request_id():
    world = World("a", "b")
    a, b = world.nodes.values()
    world.run(2.5)
    a.book("r")
    b.book("r")
    world.run(0.01)
    assert a.load == b.load == {"w0": (2, 64, 2), "w1": (0, 0, 0)}
    b.free("r")
    world.run(0.01)
    assert a.load == b.load == {"w0": (1, 32, 2), "w1": (0, 0, 0)}


# -- loss ------------------------------------------------------------------------------------------


@pytest.mark.seed("dynamo-1.6: replica sync: what was lost is counted")
def test_a_lost_message_is_counted_reported_and_made_up_for():
    world = World("a", "b")
    a, b = world.nodes.values()
    world.run(2.5)
    assert (b.states(), b.codes()) == ({"a": "in step"}, set())
    world.cut.add(("a", "b"))
    a.book("gone")
    world.run(0.01)
    world.cut.clear()
    a.book("seen")
    world.run(0.002)
    assert b.sync.missed["lost"] == 1
    assert b.codes() == {("REPLICA_BEHIND", "a")}
    assert b.service.doubts("m")[0].code == "DYR0734"
    world.run(4)
    assert b.load == a.load
    assert b.codes() == set()
    assert all(one.code != "DYR0734" for one in b.service.doubts("m"))


def test_a_lost_last_message_is_noticed_by_the_report_of_its_sender():
    world = World("a", "b")
    a, b = world.nodes.values()
    a.book("r")
    world.run(2.5)
    world.cut.add(("a", "b"))
    a.free("r")
    world.run(0.01)
    world.cut.clear()
    assert b.load["w0"][0] == 1
    world.run(6)
    assert b.load == NONE
    assert b.sync.missed["lost"] == 1


@pytest.mark.seed("dynamo-1.6: replica sync: convergence after a partition")
def test_both_views_are_equal_after_a_partition():
    world = World("a", "b")
    a, b = world.nodes.values()
    for node in (a, b):
        for number in range(4):
            node.book(f"{node.name}{number}", worker=1 + number % 2)
    world.run(2.5)
    assert a.load == b.load
    world.cut |= {("a", "b"), ("b", "a")}
    a.free("a0")
    b.book("b-new", worker=2, tokens=160, blocks=10)
    world.run(10)
    assert (a.codes(), b.codes()) == ({("REPLICA_SILENT", "b")}, {("REPLICA_SILENT", "a")})
    assert a.states() == {"b": "silent"}
    assert a.load != b.load
    world.cut.clear()
    world.run(6)
    assert a.load == b.load
    assert (a.load["w0"][0], a.load["w1"][0]) == (3, 5)
    assert a.codes() == b.codes() == set()


@pytest.mark.seed("smart-routing-guide-0.9: replicas: new replicas")
def test_requests_that_run_before_a_router_starts_count_there_too():
    world = World("a")
    a = world.nodes["a"]
    a.book("old", tokens=0)
    world.run(3)
    b = world.start("b")
    world.run(3)
    assert b.load == a.load
    assert b.states() == {"a": "in step"}


@pytest.mark.seed("dynamo-1.6: replica sync: newest dropped when full")
def test_a_full_queue_drops_the_newest_and_the_others_recover(monkeypatch):
    monkeypatch.setattr(sync_module, "MOST_PENDING", 5)
    world = World("a", "b")
    a, b = world.nodes.values()
    world.run(2.5)
    for number in range(8):
        a.book(f"r{number}")
    world.run(0.01)
    assert a.sync.missed["dropped"] == 3
    assert b.load["w0"][0] == 5
    world.run(6)
    assert b.load == a.load


def test_a_plane_that_refuses_messages_is_counted_and_the_others_recover():
    world = World("a", "b")
    a, b = world.nodes.values()
    world.run(2.5)
    a.full = True
    a.book("r")
    world.run(0.01)
    assert a.sync.missed["dropped"] == 1
    a.full = False
    world.run(6)
    assert b.load == a.load


# -- routers that end ------------------------------------------------------------------------------


def test_a_router_that_leaves_takes_its_load_with_it():
    world = World("a", "b")
    a, b = world.nodes.values()
    a.book("r")
    world.run(2.5)
    assert b.load["w0"][0] == 1
    a.sync.leave()
    assert b.load == NONE


def test_a_router_that_restarts_at_its_address_replaces_its_load():
    world = World("a", "b")
    a, b = world.nodes.values()
    a.book("r")
    world.run(2.5)
    world.start("a", number=777)
    world.run(2.5)
    assert b.load == NONE
    assert [row.router_id for row in b.sync.rows()] == [f"{777:016x}"]


@pytest.mark.seed("dynamo-1.6: replica sync: stale requests expire")
def test_the_load_of_a_silent_router_expires():
    world = World("a", "b", active_request_expiry_secs=30.0)
    a, b = world.nodes.values()
    a.book("r")
    world.run(2.5)
    world.cut.add(("a", "b"))
    world.run(20)
    b.service.expire()
    assert b.load["w0"][0] == 1
    assert b.codes() == {("REPLICA_SILENT", "a")}
    world.run(20)
    assert b.load == NONE


def test_the_long_requests_of_a_router_that_runs_do_not_expire():
    """Different from Dynamo, where a replica drops them after the expiry time."""
    world = World("a", "b", active_request_expiry_secs=30.0)
    a, b = world.nodes.values()
    a.service.held.add("long")
    a.book("long")
    for _ in range(20):
        world.run(5)
        a.service.expire()
        b.service.expire()
    assert a.load == b.load == {"w0": (1, 32, 2), "w1": (0, 0, 0)}


def test_a_booking_that_expires_here_ends_at_the_others():
    world = World("a", "b", active_request_expiry_secs=30.0)
    a, b = world.nodes.values()
    a.book("forgotten")
    world.run(31)
    assert b.load["w0"][0] == 1
    a.service.apply(Expired())
    world.run(0.01)
    assert a.load == b.load == NONE


def test_an_address_where_nothing_is_heard_is_a_condition():
    world = World("a")
    a = world.nodes["a"]
    a.addresses = ("tcp://127.0.0.1:9",)
    world.run(4)
    assert a.codes() == set()
    world.run(4)
    assert a.codes() == {("REPLICA_SILENT", "tcp://127.0.0.1:9")}
    assert a.states() == {"tcp://127.0.0.1:9": "never heard"}


# -- workers ---------------------------------------------------------------------------------------


def test_events_of_an_unknown_worker_count_when_it_joins():
    world = World("a", "b")
    a, b = world.nodes.values()
    a.service.apply(WorkerUpserted(Worker(3, "w2", "m")))
    world.run(2.5)
    a.book("r", worker=3)
    world.run(2.5)
    assert b.sync.missed["unknown_worker"] == 1
    assert b.codes() == {("REPLICA_WORKERS_DIFFER", "a")}
    b.service.apply(WorkerUpserted(Worker(3, "w2", "m")))
    world.run(5)
    assert b.load == a.load
    assert b.codes() == set()


def test_worker_ids_are_the_same_where_names_are():
    """Two routers with the same workers file have the same ids, at whatever address and time."""
    one = parse_worker_spec("http://127.0.0.1:8101,name=a,zone=z")
    other = parse_worker_spec("http://localhost:8101,name=a")
    assert one.worker_id == other.worker_id
    unnamed = parse_worker_spec("http://localhost:8101"), parse_worker_spec("http://127.0.0.1:8101")
    assert unnamed[0].worker_id != unnamed[1].worker_id


def test_the_bookings_of_a_lost_worker_end_everywhere():
    world = World("a", "b")
    a, b = world.nodes.values()
    world.run(2.5)
    a.book("r")
    world.run(0.01)
    a.service.apply(WorkerLost(1))
    world.run(0.01)
    assert b.load == NONE
    a.free("r")
    a.service.apply(WorkerUpserted(Worker(1, "w0", "m")))
    world.run(5)
    assert b.states() == {"a": "in step"}


def test_a_worker_that_one_router_loses_for_a_while_has_its_load_again():
    """The other router has it all the time, so it books nothing again by itself."""
    world = World("a", "b")
    a, b = world.nodes.values()
    world.run(2.5)
    a.book("r")
    world.run(0.01)
    assert b.load == a.load
    b.service.apply(WorkerLost(1))
    b.service.apply(WorkerUpserted(Worker(1, "w0", "m")))
    assert b.load == NONE
    world.run(5)
    assert b.load == a.load != NONE
    a.free("r")
    world.run(0.01)
    assert b.load == a.load == NONE


# -- messages that no router should send ----------------------------------------------------------


def test_unreadable_messages_and_too_many_routers_are_counted():
    world = World("a", "b")
    b = world.nodes["b"]
    world.run(2.5)
    world.deliver("a", Envelope(100, 900, 1, REPLICAS, b"\xc1"))
    world.deliver("a", Envelope(100, 900, 1, ACTIVE_SEQUENCES, b"\xc1"))
    assert b.sync.missed["malformed"] == 2
    message = encode_replica_message(ReplicaMessage("alive", "x"))
    b.addresses = ()
    for router in range(1000, 1100):
        b.sync.take("", _message(router, REPLICAS, message, name=f"n{router}"))
    assert len(b.sync.rows()) <= sync_module.MOST_PEERS
    assert b.sync.missed["too_many"] > 0


def test_a_router_cannot_end_the_bookings_of_another():
    world = World("a", "b")
    a, b = world.nodes.values()
    world.run(2.5)
    b.book("mine")
    forged = encode_sequences([SequenceFreed("mine", 1, 0, b.router_id)])
    world.deliver("a", Envelope(a.router_id, 0, 1, ACTIVE_SEQUENCES, forged))
    forged = encode_sequences([SequenceFreed("mine", 1, 0, a.router_id)])
    world.deliver("a", Envelope(a.router_id, 1, 1, ACTIVE_SEQUENCES, forged))
    assert b.load["w0"][0] == 1


def test_a_router_that_frees_nothing_keeps_out_no_other(monkeypatch):
    monkeypatch.setattr(sync_module, "MOST_OF_ONE", 5)
    world = World("liar", "honest", "c")
    liar, honest, c = world.nodes.values()
    world.run(2.5)
    for number in range(9):
        liar.book(f"never freed {number}")
    honest.book("r", worker=2)
    world.run(3)
    assert c.load == {"w0": (5, 160, 10), "w1": (1, 32, 2)}
    assert c.sync.missed["too_many"] >= 4
    assert c.codes() == {("REPLICA_OVER_LIMIT", "liar")}
    assert c.states() == {"liar": "in step", "honest": "in step"}
    for number in range(9):
        liar.free(f"never freed {number}")
    world.run(3)
    assert c.load == {"w0": (0, 0, 0), "w1": (1, 32, 2)}
    assert c.codes() == set()
    # Also in an answer with all its bookings.
    for number in range(9):
        liar.book(f"more {number}")
    late = world.start("late")
    world.run(5)
    assert late.load["w0"][0] == 5
    assert late.load["w1"][0] == 1


@pytest.mark.parametrize("late", [False, True])
def test_the_hashes_of_bookings_have_a_bound_and_their_blocks_count(monkeypatch, late):
    monkeypatch.setattr(sync_module, "MOST_HASHES_OF_ONE", 10)
    world = World("a", "b")
    a, b = world.nodes.values()
    world.run(0 if late else 2.5)
    for number in range(6):
        a.book(f"r{number}", blocks=4)
    world.run(5)
    assert b.load == a.load
    assert sum(len(one.sequence_hashes) for one in b.service.router.load) == 8
    assert b.sync._hashes == 8
    for number in range(6):
        a.free(f"r{number}")
    world.run(2.5)
    assert b.load == NONE
    assert b.sync._hashes == 0


def test_a_router_that_takes_the_name_of_another_ends_none_of_its_bookings():
    world = World("a", "b")
    a, b = world.nodes.values()
    b.addresses = ()
    a.book("r")
    world.run(2.5)
    thief = encode_replica_message(ReplicaMessage("alive", "a"))
    for _ in range(40):
        b.sync.take("", _message(7, REPLICAS, thief))
        world.run(0.1)
        assert b.load["w0"][0] == 1
    # Once the first one is silent, it was the same router, started again.
    world.cut.add(("a", "b"))
    for _ in range(60):
        b.sync.take("", _message(7, REPLICAS, thief))
        world.run(0.1)
    assert b.load == NONE


def test_bookings_are_sent_once_a_second_at_most():
    world = World("a", "b")
    a = world.nodes["a"]
    a.book("r")
    world.run(2.5)
    world.sent.clear()
    wish = encode_replica_message(ReplicaMessage("alive", "b", wants=[a.router_id]))
    for number in range(100):
        world.deliver("b", Envelope(101, 1000 + number, 1, REPLICAS, wish))
        world.run(0.02)
    own = [e for source, e in world.sent if source == "a" and e.topic == REPLICAS]
    sent = [one for one in own if decode_replica_message(one.payload).kind == "bookings"]
    assert 1 <= len(sent) <= 3


def _message(router: int, topic: str, payload: bytes, name: str = "") -> Any:
    from dynctl.adapters.ports import ChannelMessage

    if name:
        payload = encode_replica_message(ReplicaMessage("alive", name))
    return ChannelMessage(topic, router, 0, 0, payload)


# -- order -----------------------------------------------------------------------------------------


@pytest.mark.seed("dynamo-1.6: replica sync: no ordering")
def test_a_free_before_its_add_leaves_no_load():
    """Different from Dynamo, where such a request stays as load until it expires."""
    world = World("a", "b")
    b = world.nodes["b"]
    world.run(2.5)
    events: list[SequenceEvent] = [
        SequenceFreed("r", 1, 0, 100),
        SequenceAdded("r", 1, 0, (1, 2), 32, 100),
    ]
    b.sync.take("a", _message(100, ACTIVE_SEQUENCES, encode_sequences(events)))
    assert b.load == NONE
    assert b.sync.missed["early_free"] == 1


def test_a_router_remembers_the_frees_of_the_last_minute_alone():
    """Thousands would stay for as long as the other router runs."""
    world = World("a", "b")
    a, b = world.nodes.values()
    world.run(2.5)
    for number in range(300):
        a.book(f"r{number}")
        a.free(f"r{number}")
        world.run(0.5)
    (peer,) = b.sync._peers.values()
    assert 110 <= len(peer.freed) <= 124
    world.run(62)
    assert not peer.freed


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["book", "done", "free", "lose", "cut", "heal", "wait", "expire"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 5),
    ),
    max_size=40,
)


@given(actions=ACTIONS, batched=st.booleans())
@settings(deadline=None, max_examples=60)
def test_views_are_equal_once_the_network_is(actions, batched):
    """Whatever is booked, freed, lost or cut: a few seconds later both count the same load."""
    world = World("a", "b", batched=batched)
    losing = [0]

    def lose(source: str, to: str, envelope: Envelope) -> bool:
        losing[0] = max(0, losing[0] - 1)
        return losing[0] > 0

    world.lose = lose
    for act, name, number in actions:
        node = world.nodes[name]
        request, worker = f"{name}{number}", 1 + number % 2
        if act == "book" and not node.service.router.load.bookings(request):
            node.book(request, worker=worker, blocks=number)
        elif act == "done":
            node.service.apply(PrefillDone(request))
        elif act == "free":
            node.free(request)
        elif act == "lose":
            losing[0] = number + 1
        elif act == "cut":
            world.cut.add(("a", "b") if name == "a" else ("b", "a"))
        elif act == "heal":
            world.cut.clear()
        elif act == "wait":
            world.run(number / 2)
        elif act == "expire":
            node.service.expire()
    losing[0] = 0
    world.cut.clear()
    world.run(15)
    a, b = world.nodes.values()
    assert a.load == b.load
    assert a.codes() == b.codes() == set()
    for node in (a, b):
        for number in range(6):
            node.free(f"{node.name}{number}")
    world.run(0.01)
    assert a.load == b.load == NONE


@given(order=st.permutations(range(6)))
@settings(deadline=None)
def test_adds_and_frees_in_any_order_leave_no_load(order):
    """Three requests; each Add and Free in a message of its own number, delivered in any order."""
    world = World("a", "b")
    b = world.nodes["b"]
    world.run(2.5)
    events: list[SequenceEvent] = [
        event
        for name in ("x", "y", "z")
        for event in (
            SequenceAdded(name, 1, 0, (hash(name) & 0xFFFF,), 16, 100),
            SequenceFreed(name, 1, 0, 100),
        )
    ]
    batch = [events[at] for at in order]
    b.sync.take("a", _message(100, ACTIVE_SEQUENCES, encode_sequences(batch)))
    assert b.load == NONE


def test_an_address_forgets_publishers_that_ended_when_a_new_one_sends() -> None:
    """A router that starts again has another id: each would be kept with its last numbers."""
    now = 0.0
    seen: list[ChannelValue] = []
    channel = EventChannel(EndpointId("", "", ""), "", 0, ZmqTransport("tcp://a:1"))
    intake = AnyPublisher(channel, TOPICS, seen.append, most=3, clock=lambda: now)

    def send(publisher: int, number: int) -> list[int | str]:
        """What arrives of a message: its number, or the code of a condition."""
        seen.clear()
        intake.take(Envelope(publisher, number, 1_000 + number, TOPICS[0], b""))
        return [v.sequence if isinstance(v, ChannelMessage) else v.code.value for v in seen]

    lost = ChannelCode.EVENTS_DROPPED.value
    assert send(1, 0) == [0]
    now = SILENT_S
    assert send(2, 0) == [0]
    assert send(1, 2) == [lost, 2], "it was silent for just as long as it may be"
    now = 2 * SILENT_S + 1.0
    assert send(1, 4) == [lost, 4], "no new publisher, so it is still known"
    assert send(3, 0) == [0]
    assert send(2, 2) == [2], "forgotten: it is as if it began now"
    assert send(1, 6) == [lost, 6]
    assert send(4, 0) == [0], "a fourth: the one that is silent longest is forgotten"
    assert send(3, 2) == [2]
