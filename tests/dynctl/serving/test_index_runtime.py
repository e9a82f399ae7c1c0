"""The index runtime: work in slices, long events cut, nothing applied after a worker is left."""

import asyncio
import contextlib
import select
import socket
from collections import Counter
from dataclasses import replace
from unittest.mock import Mock

import pytest
import zmq

from dynctl.adapters.ports import IndexUpdate, StreamCondition
from dynctl.adapters.zmq.context import SocketWatch
from dynctl.adapters.zmq.kv_event_source import KvEventSource
from dynctl.base.tasks import Supervisor
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing import index_runtime
from dynctl.serving.routing.index_runtime import MAX_WAITING, PIECE_BLOCKS, IndexRuntime
from dynctl.wire.vllm_events import encode_batch, encode_seq
from router_core import (
    OK,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    IndexMarked,
    KvEvent,
    Router,
    WindowStored,
    Worker,
    WorkerLost,
    WorkerUpserted,
    sequence_hashes,
)
from tests.contract.zmq_publisher import batch
from tests.dynctl.serving.fleets import WORDS, site
from tests.waiting import patience, until


class Ticking:
    """A clock that moves on by a step at each look, so that slices end after a known amount."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def runtime(router: Router, step: float = 0.0, heard: list | None = None) -> IndexRuntime:
    return IndexRuntime(
        lambda change: router.apply(change, 0.0),
        router.sweep,
        (heard if heard is not None else []).append,
        Ticking(0.0),
        Supervisor(),
        Ticking(step),
        Ticking(1.0),
    )


def router_of(*names: str) -> Router:
    router = Router()
    for number, name in enumerate(names, 1):
        assert router.apply(WorkerUpserted(Worker(number, name, "m")), 0.0) == OK
    return router


def stored(worker: int, count: int, first: int = 1) -> IndexUpdate:
    names = list(range(first, first + count))
    return IndexUpdate(worker, 0, 0, (BlocksStored(None, names, names),), 0.0)


async def test_a_long_run_of_blocks_is_the_same_whole_or_in_pieces():
    router = router_of("a")
    work = runtime(router)
    work.start()
    count = 3 * PIECE_BLOCKS + 17
    work.take(stored(1, count))
    await work.drained()
    assert router.index.block_count(0) == count
    found = router.index.find_matches(sequence_hashes(list(range(1, count + 1))))
    assert dict(found.items()) == {0: count}
    # Blocks of another cache group keep their group in every piece.
    window = WindowStored(1, list(range(1, count + 1)), needed=2)
    work.take(IndexUpdate(1, 0, 1, (window,), 0.0))
    await work.drained()
    assert router.index.block_count(0) == 2 * count
    work.take(IndexUpdate(1, 0, 1, (BlocksRemoved(window.block_hashes, group=1),), 0.0))
    await work.drained()
    assert router.index.block_count(0) == count
    removed = BlocksRemoved(list(range(count, 0, -1)))
    work.take(IndexUpdate(1, 0, 1, (removed,), 0.0))
    await work.drained()
    assert router.index.block_count(0) == 0
    await work.close()


async def test_the_blocks_of_a_worker_that_wait_have_a_bound(monkeypatch):
    """A worker whose values wait is read no more; others are."""
    monkeypatch.setattr(index_runtime, "MAX_WAITING_BLOCKS", 100)
    router = router_of("a", "b")
    work = runtime(router)
    room, other = index_runtime._Room(work, 1), index_runtime._Room(work, 2)
    work.take(stored(1, 60))
    assert (room.full, other.full) == (False, False)
    work.take(stored(1, 60, first=61))
    assert (room.full, other.full) == (True, False)
    waiting = asyncio.ensure_future(room.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    work.start()
    await asyncio.wait_for(waiting, patience(5))
    await work.drained()
    assert not work.blocks
    assert router.index.block_count(0) == 120
    # What a lost worker had waiting is no debt of its next life.
    work.take(stored(1, 200))
    work.unfollow(1)
    await asyncio.wait_for(room.wait(), patience(5))
    await work.drained()
    assert not work.blocks
    await work.close()


async def test_other_tasks_get_turns_while_a_backlog_is_worked_off():
    router = router_of("a")
    work = runtime(router, step=0.00025)  # about four looks at the clock a slice
    for i in range(200):
        work.take(stored(1, 10, first=1 + 10 * i))
    turns = 0

    async def stream() -> None:
        nonlocal turns
        while work.waiting:
            turns += 1
            await asyncio.sleep(0)

    work.start()
    await stream()
    assert turns >= 40
    await work.drained()
    assert router.index.block_count(0) == 2000
    await work.close()


async def test_the_backlog_is_bounded_and_nothing_is_lost():
    router = router_of("a")
    work = runtime(router)
    for i in range(MAX_WAITING + 100):
        work.take(stored(1, 1, first=1 + i))
        assert work.waiting <= MAX_WAITING
    assert router.index.block_count(0) == 100  # the oldest were applied at once
    work.start()
    await work.drained()
    assert router.index.block_count(0) == MAX_WAITING + 100
    await work.close()


async def test_a_value_that_fails_takes_no_room(monkeypatch):
    """Else each failure would leave its worker less room, until its streams wait for ever."""
    monkeypatch.setattr(index_runtime, "MAX_WAITING", 1)

    def fail(change):
        raise LookupError("broken")

    work = IndexRuntime(fail, Router().sweep, print, Ticking(0.0), Supervisor())
    work.take(stored(1, 60))
    with pytest.raises(LookupError):
        work.take(stored(1, 10))  # which applies the oldest at once
    assert not work.blocks
    await work.close()


async def test_conditions_are_heard_and_change_the_index_in_order():
    heard: list[StreamCondition] = []
    router = router_of("a")
    work = runtime(router, heard=heard)
    work.start()
    work.take(stored(1, 5))
    condition = StreamCondition(1, "ENGINE_RESTARTED", "m", (0,), clears=True, missing=0)
    work.take(condition)
    work.take(stored(1, 2, first=100))
    await work.drained()
    assert heard == [condition]
    assert router.index.block_count(0) == 2
    assert list(condition.changes()) == [
        KvEvent(1, 0, Cleared()),
        IndexMarked(1, 0, "current", 0),
    ]
    await work.close()


async def test_what_lost_workers_had_is_swept():
    router = router_of("a", "b")
    work = runtime(router)
    work.start()
    work.take(stored(1, 5000))
    await work.drained()
    router.apply(WorkerLost(1), 0.0)
    work.request_sweep()
    async with asyncio.timeout(patience(5)):
        while not router.index.is_free(0):  # noqa: ASYNC110
            await asyncio.sleep(0)
    await work.close()


async def test_a_change_that_raises_does_not_stop_the_rest():
    router = router_of("a")
    calls = 0

    def apply(change):
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("a defect")
        return router.apply(change, 0.0)

    tasks = Supervisor()
    work = IndexRuntime(apply, router.sweep, print, Ticking(0.0), tasks)
    work.start()
    work.take(stored(1, 3))
    work.take(stored(1, 4, first=50))
    await work.drained()
    await asyncio.sleep(0)
    assert router.index.block_count(0) == 4
    assert tasks.failures == {"index update": 1}
    await work.close()


def test_a_backlog_gets_more_of_a_turn():
    router = router_of("a")
    work = runtime(router, step=0.0005)  # two looks at the clock a slice
    for number in range(9 * 512):
        work.take(stored(1, 1, first=1 + number))
    assert work._slice()
    assert router.index.block_count(0) == 10  # ten slices
    # The others had nothing since then, so their turns are short: one slice.
    assert work._slice()
    assert router.index.block_count(0) <= 10 + 3
    while len(work._waiting) > 8:
        work._slice()
    before = len(work._waiting)
    work._slice()
    assert before - len(work._waiting) <= 3


def test_the_time_of_the_thread_is_not_read_before_a_slice_can_end():
    router, worked = router_of("a"), Ticking(0.0)
    looks = Mock(side_effect=worked)
    work = IndexRuntime(
        lambda change: router.apply(change, 0.0),
        router.sweep,
        print,
        Ticking(0.0),
        Supervisor(),
        looks,
        Ticking(0.0),
    )
    for number in range(100):
        work.take(stored(1, 1, first=1 + number))
    assert not work._slice()
    assert looks.call_count == 1


async def test_nothing_that_was_queued_before_unfollow_is_applied_after_it():
    router = router_of("a", "b")
    work = runtime(router, step=0.00025)  # the first batch is applied in several slices
    work.start()
    work.take(stored(1, 4 * PIECE_BLOCKS))
    work.take(stored(1, 7, first=100_000))
    work.take(stored(2, 5))
    while not router.index.block_count(0):  # noqa: ASYNC110
        await asyncio.sleep(0)
    work.unfollow(1)
    router.apply(KvEvent(1, 0, Cleared()), 0.0)
    work.take(stored(1, 2, first=200_000))
    await work.drained()
    assert [router.index.block_count(slot) for slot in (0, 1)] == [2, 5]
    await work.close()


def test_stale_values_are_dropped_when_the_queue_overflows_too():
    router = router_of("a", "b")
    work = runtime(router)
    work.take(stored(1, 1))
    work.unfollow(1)
    for i in range(MAX_WAITING):
        work.take(stored(2, 1, first=1 + i))
    assert router.index.block_count(0) == 0


async def test_a_frontend_that_starts_has_read_what_its_engines_cache():
    async with site([{"name": "a0"}]) as first:
        assert (await first.chat(WORDS * 8))[0] == 200
        await first.idle()
        engine = first.engines["a0"]
        second = build_frontend(replace(first.frontend.config, workers=(f"{engine.url},name=a0",)))
        await second.start()
        try:
            (row,) = second.service.workers()
            assert (row.ranks[0].index, row.ranks[0].cached_blocks > 4) == ("current", True)
        finally:
            await second.close()


async def test_events_that_never_come_do_not_keep_a_frontend_from_starting(monkeypatch):
    refused = {"a0": ",kv-events=tcp://127.0.0.1:1,replay=tcp://127.0.0.1:1"}
    monkeypatch.setattr("dynctl.serving.http.process.FIRST_READ_S", 1000.0)
    async with asyncio.timeout(patience(20)), site([{"name": "a0"}], specs=refused) as fleet:
        assert fleet.frontend.service.workers()[0].ranks[0].index == "disconnected"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        specs = {"a0": f",kv-events=tcp://127.0.0.1:{silent.getsockname()[1]}"}
        monkeypatch.setattr("dynctl.serving.http.process.FIRST_READ_S", 0.1)
        async with asyncio.timeout(patience(20)), site([{"name": "a0"}], specs=specs) as fleet:
            assert fleet.frontend.service.workers()[0].ranks[0].index == "disconnected"


async def test_a_turn_wakes_few_of_the_streams_that_are_ready_at_once(monkeypatch):
    """Each is woken in its turn, and what all of them sent arrives."""
    count, turn, woken = 40, 0, Counter[int]()
    note_change = SocketWatch._note_change

    def counted(watch, changed):
        woken[turn] += 1
        note_change(watch, changed)

    monkeypatch.setattr(SocketWatch, "_note_change", counted)
    router = router_of(*(f"w{number}" for number in range(count)))
    work = runtime(router)
    work.start()
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        publishers = [stack.enter_context(context.socket(zmq.PUB)) for _ in range(count)]
        for number, publisher in enumerate(publishers, 1):
            publisher.bind("tcp://127.0.0.1:*")
            endpoint = publisher.get_string(zmq.LAST_ENDPOINT)
            work.follow(KvEventSource(number, endpoint, 2))
        await until(lambda: all(state.connected for state in work.all_states().values()))
        # A connection is reported before its subscription has reached the publisher.
        while not all(router.index.block_count(slot) for slot in range(count)):
            for publisher in publishers:
                publisher.send_multipart([b"", encode_seq(0), encode_batch(batch(0))])
            await asyncio.sleep(0.01)
        woken.clear()
        # No turn of the loop until every socket has a message.
        for publisher in publishers:
            publisher.send_multipart([b"", encode_seq(1), encode_batch(batch(1))])
        for held in work._streams.values():
            assert held.stream._backlog is not None
            poll = select.poll()
            poll.register(held.stream._backlog._socket.FD, select.POLLIN)
            assert poll.poll(1000 * patience(10))
        while not all(router.index.block_count(slot) == 2 for slot in range(count)):
            await asyncio.sleep(0)
            turn += 1
        await work.close()
    assert sum(woken.values()) >= count
    assert max(woken.values()) <= 16
