"""Events of an engine as Dynamo's workers publish them, and what a late reader recovers."""

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynctl.adapters.dynamo.publishing import TopicPublisher
from dynctl.adapters.dynamo.request_server import PlaneRequest
from dynctl.adapters.ports import IndexUpdate, StreamCondition
from dynctl.serving.attach.events import KEPT_EVENTS, BlockTree, RankEvents, dump_of
from dynctl.wire.dynamo.discovery import EndpointId, EventChannel, ZmqTransport
from dynctl.wire.dynamo.events import Envelope, RouterEvent, decode_router_events
from dynctl.wire.dynamo.recovery import Events, RecoveryQuery, TreeDump, parse_recovery
from router_core import BlocksRemoved, BlocksStored, CacheEvent, Cleared

AT = EndpointId("dynamo", "backend", "generate")
WORKER = 2**63 - 5


class Wire:
    """A plane that keeps what is published."""

    title = "test"
    addresses: tuple[str, ...] = ()
    batched = True

    def __init__(self) -> None:
        self.sent: list[Envelope] = []

    def publish(self, envelope: Envelope) -> bool:
        self.sent.append(envelope)
        return True

    async def run(self, emit: Any) -> None: ...
    async def close(self) -> None: ...

    def events(self) -> list[RouterEvent]:
        return [one for sent in self.sent for one in decode_router_events(sent.payload)]


def rank_events() -> tuple[RankEvents, Wire]:
    wire = Wire()
    channel = EventChannel(AT, "kv-events", 7, ZmqTransport("tcp://127.0.0.1:1"))
    rank = RankEvents(TopicPublisher(wire, channel, lambda: 1), 0)
    rank.worker_id = WORKER
    return rank, wire


def update(*events: CacheEvent) -> IndexUpdate:
    return IndexUpdate(1, 0, 0, events, 0.0)


def stored(parent: int | None, *names: int, tier: str = "device") -> BlocksStored:
    return BlocksStored(parent, names, tuple(name + 1000 for name in names), tier, counted=True)


async def ask(rank: RankEvents, **query: Any) -> Any:
    body = RecoveryQuery(**({"worker_id": WORKER} | query))
    request = PlaneRequest(AT, WORKER, "r", {}, body)
    [item] = [item async for item in rank.answer(request)]
    return parse_recovery(item)


def test_copies_of_a_block_are_published_once_and_removed_with_the_last():
    rank, wire = rank_events()
    rank.take(update(stored(None, 1, 2)))
    rank.take(update(stored(None, 1, 2)))
    rank.take(update(BlocksRemoved((2, 1))))
    assert [one.event for one in wire.events()] == [
        BlocksStored(None, (1, 2), (1001, 1002), "device")
    ]
    rank.take(update(BlocksRemoved((2, 1))))
    assert wire.events()[-1].event == BlocksRemoved((2, 1))
    assert len(rank.tree) == 0
    assert [one.event_id for one in wire.events()] == [1, 2]
    assert [sent.sequence for sent in wire.sent] == [0, 1]


def test_an_engine_that_restarted_clears():
    rank, wire = rank_events()
    rank.take(update(stored(None, 1)))
    rank.take(StreamCondition(1, "ENGINE_RESTARTED", "new", (0,), clears=True))
    assert wire.events()[-1].event == Cleared()


def test_nothing_is_published_before_the_registration_and_all_is_recovered():
    rank, wire = rank_events()
    rank.worker_id = None
    rank.take(update(stored(None, 1, 2)))
    assert wire.sent == []
    assert rank.last_event_id == 1
    assert len(rank.tree) == 2


async def test_queries_get_events_or_a_dump():
    rank, _ = rank_events()
    for name in range(1, 6):
        rank.take(update(stored(name - 1 or None, name)))
    answer = await ask(rank, start_event_id=3)
    assert isinstance(answer, Events)
    assert answer.last_event_id == 5
    assert [one.event_id for part in answer.events.slices() for one in part] == [3, 4, 5]
    for start in (None, 0):
        dump = await ask(rank, start_event_id=start)
        assert isinstance(dump, TreeDump)
        assert dump.last_event_id == 5
        [chain] = [one.event for part in dump.events.slices() for one in part]
        assert chain == BlocksStored(None, (1, 2, 3, 4, 5), (1001, 1002, 1003, 1004, 1005))


async def test_queries_that_cannot_be_answered_say_why():
    rank, _ = rank_events()
    rank.take(update(stored(None, 1)))
    assert (await ask(rank, start_event_id=2)).nothing_missed
    invalid = await ask(rank, start_event_id=5, end_event_id=2)
    assert (invalid.start_id, invalid.end_id) == (5, 2)
    assert "worker_id mismatch" in (await ask(rank, worker_id=3)).message
    assert "dp_rank mismatch" in (await ask(rank, dp_rank=1)).message


async def test_events_that_are_no_longer_kept_are_a_dump():
    rank, _ = rank_events()
    for name in range(1, KEPT_EVENTS + 10):
        rank.take(update(stored(None, name)))
    assert isinstance(await ask(rank, start_event_id=2), TreeDump)
    assert isinstance(await ask(rank, start_event_id=20), Events)


NAMES = st.integers(1, 12)
CHANGES = st.lists(
    st.one_of(
        st.builds(
            lambda parent, names, tier: stored(parent, *names, tier=tier),
            st.none() | NAMES,
            st.lists(NAMES, min_size=1, max_size=4, unique=True),
            st.sampled_from(["device", "host_pinned"]),
        ),
        st.builds(
            lambda names, tier: BlocksRemoved(tuple(names), tier),
            st.lists(NAMES, min_size=1, max_size=4),
            st.sampled_from(["device", "host_pinned"]),
        ),
        st.just(Cleared()),
    ),
    max_size=30,
)


@given(CHANGES)
def test_what_is_published_gives_the_tree_again(changes: list[CacheEvent]):
    """A reader of every event, and one of a dump, hold the same blocks."""
    tree, reader = BlockTree(), BlockTree()
    for change in changes:
        for published in tree.apply(change):
            plain = published
            if isinstance(plain, BlocksStored):
                # A reader does not count copies.
                plain = BlocksStored(
                    plain.parent_hash, plain.block_hashes, plain.local_hashes, plain.tier
                )
            reader.apply(plain)
    assert {t: b.keys() for t, b in reader.copy().items() if b} == {
        t: b.keys() for t, b in tree.copy().items() if b
    }
    dumped = BlockTree()
    known: set[tuple[str, int]] = set()
    for event in dump_of(tree.copy()):
        assert event.parent_hash is None or (event.tier, event.parent_hash) in known
        known |= set(itertools.product([event.tier], event.block_hashes))
        dumped.apply(event)
    for tier, blocks in dumped.copy().items():
        assert blocks.items() <= tree.copy()[tier].items()
