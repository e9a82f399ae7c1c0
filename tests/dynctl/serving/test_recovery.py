"""One rank's events against a worker that numbers, keeps and forgets them as Dynamo's does.

Whatever is lost, doubled, swapped or restarted on the way, the index ends up with what the worker
holds, or says that it does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.adapters.ports import (
    ChannelCode,
    ChannelCondition,
    ChannelMessage,
    IndexUpdate,
    RequestPlaneError,
    StreamCode,
    StreamCondition,
    StreamValue,
)
from dynctl.base.tasks import end_tasks
from dynctl.serving.dynamo.recovery import RankIndex
from dynctl.wire.dynamo.discovery import EndpointId, EventSource
from dynctl.wire.dynamo.events import RouterEvent, UnknownEvent, encode_router_events
from dynctl.wire.dynamo.recovery import Events, RecoveryAnswer, RecoveryError, TooNew, TreeDump
from router_core import BlocksRemoved, BlocksStored, Cleared
from tests.waiting import patience

WORKER = 0xABC
SOURCE = EventSource(EndpointId("dynamo", "backend", "generate"), "kv-events", 7, WORKER, 0)


@dataclass
class Slices:
    events: tuple[RouterEvent, ...]

    def __len__(self) -> int:
        return len(self.events)

    def slices(self) -> Iterator[tuple[RouterEvent, ...]]:
        for at in range(0, len(self.events), 3):
            yield self.events[at : at + 3]


@dataclass
class FakeWorker:
    """Numbers its events from 1, keeps the last ``kept``, and answers as a local indexer does."""

    kept: int = 1000
    numbered: bool = True
    """Dynamo 1.0 sends a dump without the number of its last event."""
    log: list[RouterEvent] = field(default_factory=list)
    broken: str | None = None
    requested: list[int | None] = field(default_factory=list)

    def store(self, block: int) -> RouterEvent:
        return self._add(BlocksStored(None, (block,), (block,)))

    def remove(self, block: int) -> RouterEvent:
        return self._add(BlocksRemoved((block,)))

    def _add(self, event: BlocksStored | BlocksRemoved | Cleared) -> RouterEvent:
        made = RouterEvent(WORKER, 0, len(self.log) + 1, event)
        self.log.append(made)
        return made

    @property
    def blocks(self) -> set[int]:
        known = tuple(e.event for e in self.log if not isinstance(e.event, UnknownEvent))
        return applied([IndexUpdate(WORKER, 0, 0, known, 0.0)])

    async def recover(self, source: EventSource, start: int | None) -> RecoveryAnswer:
        self.requested.append(start)
        await asyncio.sleep(0)
        if self.broken is not None:
            raise RequestPlaneError(self.broken)
        newest = len(self.log)
        if start is not None and start > newest:
            return TooNew(start, newest)
        if start is None or start <= newest - self.kept:
            # Made from its tree: numbers that mean nothing.
            tree = [
                RouterEvent(WORKER, 0, at, BlocksStored(None, (block,), (block,)))
                for at, block in enumerate(sorted(self.blocks))
            ]
            return TreeDump(Slices(tuple(tree)), newest if self.numbered else None, "all")
        return Events(Slices(tuple(self.log[start - 1 :])), newest)


def applied(values: list[StreamValue]) -> set[int]:
    """The blocks that an index holds after these values."""
    held: set[int] = set()
    for value in values:
        if isinstance(value, StreamCondition):
            if value.clears:
                held.clear()
            continue
        for event in value.events if isinstance(value, IndexUpdate) else ():
            if isinstance(event, BlocksStored):
                held |= set(event.block_hashes)
            elif isinstance(event, BlocksRemoved):
                held -= set(event.block_hashes)
            else:
                held.clear()
    return held


class Follower:
    """A RankIndex on a worker, with everything that it emitted."""

    def __init__(self, worker: FakeWorker) -> None:
        self.values: list[StreamValue] = []
        self.index = RankIndex(SOURCE, worker.recover, self.values.append, lambda: 1.0)
        self._task = asyncio.create_task(self.index.run())

    def connect(self) -> None:
        self.condition(ChannelCode.CHANNEL_CONNECTED)

    def condition(self, code: ChannelCode) -> None:
        self.index.take(ChannelCondition("kv-events", 7, code, "said by the test"))

    def send(self, *events: RouterEvent) -> None:
        self.index.take(ChannelMessage("kv-events", 7, 0, 0, encode_router_events(events)))

    async def settle(self) -> None:
        async with asyncio.timeout(patience(10)):
            await self.index.settled()

    def is_current(self) -> bool:
        return self.index.current

    @property
    def codes(self) -> list[str]:
        return [value.code for value in self.values if isinstance(value, StreamCondition)]

    async def close(self) -> None:
        await end_tasks([self._task])


@pytest.fixture
def worker() -> FakeWorker:
    made = FakeWorker()
    for block in range(10):
        made.store(block)
    return made


async def following(worker: FakeWorker) -> Follower:
    follower = Follower(worker)
    follower.connect()
    await follower.settle()
    return follower


@pytest.mark.seed("router-guide: events: local indexer")
async def test_earlier_events_are_requested(worker):
    follower = await following(worker)
    assert applied(follower.values) == worker.blocks
    assert worker.requested == [None]
    assert (follower.index.current, follower.index.problem) == (True, None)
    follower.send(worker.store(99), worker.remove(3))
    assert applied(follower.values) == worker.blocks
    assert worker.requested == [None], "contiguous events need no request"
    await follower.close()


async def test_the_whole_index_is_read_again_on_demand(worker):
    """Not what came after the last event: what this router had is dropped."""
    follower = await following(worker)
    assert follower.is_current()
    before = len(follower.values)
    follower.index.read_again()
    follower.send(worker.store(400))
    await follower.settle()
    assert worker.requested == [None, None]
    assert applied(follower.values[before:]) == worker.blocks
    assert any(isinstance(one, StreamCondition) and one.clears for one in follower.values[before:])
    assert follower.is_current()


async def test_live_events_wait_for_the_answer(worker):
    follower = Follower(worker)
    follower.connect()
    follower.send(worker.store(50))
    assert applied(follower.values) == set()
    follower.send(worker.store(51))
    await follower.settle()
    assert applied(follower.values) == worker.blocks
    await follower.close()


async def test_a_gap_is_healed_from_where_it_began(worker):
    follower = await following(worker)
    worker.store(20)  # lost
    follower.send(worker.store(21))
    assert not follower.is_current()
    await follower.settle()
    assert applied(follower.values) == worker.blocks
    assert worker.requested == [None, 11]
    assert (follower.index.state().gaps, follower.index.state().healed) == (1, 2)
    assert follower.is_current()
    await follower.close()


async def test_a_loss_at_the_end_of_a_burst_is_healed_too(worker):
    follower = await following(worker)
    worker.store(20)  # lost, and nothing comes after it
    follower.condition(ChannelCode.EVENTS_DROPPED)
    await follower.settle()
    assert applied(follower.values) == worker.blocks
    await follower.close()


async def test_swapped_and_doubled_events(worker):
    follower = await following(worker)
    first, second = worker.store(20), worker.remove(20)
    follower.send(second)
    follower.send(first)
    follower.send(second, second)
    await follower.settle()
    assert applied(follower.values) == worker.blocks
    assert follower.index.state().duplicates >= 1
    await follower.close()


async def test_a_worker_that_forgot_gives_its_whole_index(worker):
    worker.kept = 2
    follower = await following(worker)
    for block in range(20, 30):
        worker.store(block)
    worker.remove(0)
    follower.send(worker.store(40))
    await follower.settle()
    assert applied(follower.values) == worker.blocks
    await follower.close()


async def test_a_restarted_publisher_starts_empty(worker):
    follower = await following(worker)
    worker.log.clear()
    follower.condition(ChannelCode.PUBLISHER_RESTARTED)
    assert applied(follower.values) == set()
    follower.send(worker.store(77))
    await follower.settle()
    assert applied(follower.values) == {77}
    assert StreamCode.ENGINE_RESTARTED in follower.codes
    await follower.close()


async def test_a_restart_without_a_condition(worker):
    follower = await following(worker)
    worker.log.clear()
    worker.store(77)
    follower.connect()
    await follower.settle()
    await asyncio.sleep(0.01)
    await follower.settle()
    assert applied(follower.values) == {77}
    assert follower.index.state().restarts == 1
    await follower.close()


@pytest.mark.parametrize("more", [-1, 0, 3])
async def test_a_new_process_with_as_many_events_is_noticed_after_a_lost_connection(worker, more):
    follower = await following(worker)
    follower.send(worker.store(50))
    count = len(worker.log) + more
    worker.log.clear()
    for block in range(count):
        worker.store(700 + block)
    follower.condition(ChannelCode.CHANNEL_DISCONNECTED)
    follower.connect()
    await follower.settle()
    await asyncio.sleep(0.01)
    await follower.settle()
    assert applied(follower.values) == worker.blocks
    assert follower.index.state().restarts == 1
    assert follower.is_current()
    await follower.close()


async def test_the_same_process_keeps_its_index_over_a_lost_connection(worker):
    follower = await following(worker)
    follower.send(worker.store(50))
    known = len(worker.log)
    worker.store(51)  # lost with the connection
    follower.condition(ChannelCode.CHANNEL_DISCONNECTED)
    follower.connect()
    await follower.settle()
    assert worker.requested[-1] == known, "the last event shows which process it is"
    assert applied(follower.values) == worker.blocks
    assert (follower.index.state().restarts, follower.is_current()) == (0, True)
    await follower.close()


async def test_a_worker_without_recovery_leaves_a_named_gap(worker):
    worker.broken = "it has no local indexer"
    follower = await following(worker)
    assert not follower.is_current()
    assert follower.index.problem is not None
    assert "no local indexer" in follower.index.problem
    assert StreamCode.EVENTS_LOST in follower.codes
    follower.send(worker.store(60))
    worker.store(61)  # lost
    follower.send(worker.store(62))
    assert applied(follower.values) == {60, 62}, "events are taken as they come"
    assert follower.index.state().lost == 11
    worker.broken = None
    follower.connect()
    await follower.settle()
    assert applied(follower.values) == worker.blocks
    assert worker.requested[-1] is None, "a gap may be anywhere: only the whole index is certain"
    assert follower.is_current()
    await follower.close()


async def test_without_events_the_index_is_a_snapshot(worker):
    follower = Follower(worker)
    follower.condition(ChannelCode.CHANNEL_DISCONNECTED)
    await follower.settle()
    assert applied(follower.values) == worker.blocks
    assert not follower.is_current()
    assert follower.index.problem == "said by the test"
    worker.store(44)
    follower.connect()
    await follower.settle()
    assert applied(follower.values) == worker.blocks
    assert follower.is_current()
    await follower.close()


async def test_an_answer_that_says_no_is_a_problem(worker):
    async def refuse(source: EventSource, start: int | None) -> RecoveryAnswer:
        return RecoveryError("worker_id mismatch")

    follower = Follower(worker)
    follower.index._recover = refuse
    follower.connect()
    await follower.settle()
    assert "worker_id mismatch" in (follower.index.problem or "")
    await follower.close()


async def test_odd_messages_are_named_and_healed(worker):
    follower = await following(worker)
    worker.store(30)
    follower.index.take(ChannelMessage("kv-events", 7, 0, 0, b"\xc1not msgpack"))
    await follower.settle()
    assert applied(follower.values) == worker.blocks
    assert StreamCode.MALFORMED_BATCH in follower.codes
    follower.send(RouterEvent(WORKER + 1, 0, 12, Cleared()))
    assert applied(follower.values) == worker.blocks, "an event of another worker is not ours"
    number = len(worker.log) + 1
    worker.log.append(RouterEvent(WORKER, 0, number, BlocksRemoved(())))
    follower.send(RouterEvent(WORKER, 0, number, UnknownEvent("pinned")))
    assert follower.index.state().unknown_events == 1
    follower.send(worker.store(31))
    assert applied(follower.values) == worker.blocks, "its number leaves no gap"
    await follower.close()


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=60),
    kept=st.sampled_from([1, 3, 1000]),
    numbered=st.booleans(),
)
def test_whatever_happens_on_the_way_it_ends_up_right(steps, kept, numbered):
    async def run() -> None:
        worker = FakeWorker(kept=kept, numbered=numbered)
        follower = Follower(worker)
        follower.connect()
        late: list[RouterEvent] = []
        for kind, block in steps:
            event = worker.remove(block) if kind % 3 == 0 else worker.store(block)
            if kind < 6:
                follower.send(event)
            elif kind == 6:
                late.append(event)  # comes later, out of order
            elif kind == 7:
                follower.send(event, event)
            elif kind == 8:
                await asyncio.sleep(0)  # lost
            else:
                follower.send(*late, event)
                late.clear()
        follower.condition(ChannelCode.EVENTS_DROPPED)
        await follower.settle()
        assert applied(follower.values) == worker.blocks
        assert follower.is_current()
        await follower.close()

    asyncio.run(run())
