"""The index runtime: work in slices, long events cut, nothing applied after a worker is left."""

import asyncio

from dynctl.adapters.ports import IndexUpdate, StreamCondition
from dynctl.serving.index_runtime import MAX_WAITING, PIECE_BLOCKS, IndexRuntime
from router_core import (
    OK,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    IndexMarked,
    KvEvent,
    Router,
    Worker,
    WorkerLost,
    WorkerUpserted,
    sequence_hashes,
)


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
        Ticking(step),
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
    removed = BlocksRemoved(list(range(count, 0, -1)))
    work.take(IndexUpdate(1, 0, 1, (removed,), 0.0))
    await work.drained()
    assert router.index.block_count(0) == 0
    await work.close()


async def test_other_tasks_get_turns_while_a_backlog_is_worked_off():
    router = router_of("a")
    work = runtime(router, step=0.0005)  # about four looks at the clock a slice
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
    async with asyncio.timeout(5):
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

    work = IndexRuntime(apply, router.sweep, print, Ticking(0.0))
    work.start()
    work.take(stored(1, 3))
    work.take(stored(1, 4, first=50))
    await work.drained()
    await asyncio.sleep(0)
    assert router.index.block_count(0) == 4
    await work.close()
