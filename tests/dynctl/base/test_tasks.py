"""Background tasks are restarted when they fail, and end when they are cancelled."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from dynctl.base.tasks import LoopShare, Supervisor, end_tasks
from tests.waiting import patience


async def _loses_one_cancellation() -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    await asyncio.sleep(60)


async def _fails() -> None:
    raise ValueError("of its own")


async def _nothing() -> None:
    pass


@pytest.mark.parametrize("work", [_loses_one_cancellation, _fails, _nothing])
def test_a_task_ends(work) -> None:
    async def run() -> bool:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        async with asyncio.timeout(patience(10)):
            await end_tasks([task])
        return task.done()

    assert asyncio.run(run())


def test_none_are_fine() -> None:
    asyncio.run(end_tasks([]))


# -- supervision -----------------------------------------------------------------------------------


class Failing:
    """Work that fails at its first ``times`` starts, then runs until it is cancelled."""

    def __init__(self, times: int, error: type[BaseException] = ValueError) -> None:
        self.left, self.error, self.starts = times, error, 0

    async def __call__(self) -> None:
        self.starts += 1
        if self.left:
            self.left -= 1
            raise self.error("broken")
        await asyncio.sleep(60)


class Reports:
    def __init__(self) -> None:
        self.failed: list[tuple[str, str]] = []
        self.recovered: list[str] = []

    def supervisor(self, **seconds: float) -> Supervisor:
        short = {"pause_s": 0.001, "max_pause_s": 0.004, "settled_s": 0.05, **seconds}
        return Supervisor(
            lambda name, message: self.failed.append((name, message)),
            self.recovered.append,
            **short,
        )


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(patience(10)):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_a_task_that_fails_is_restarted_until_it_runs(error, caplog) -> None:
    reports, work = Reports(), Failing(3, error)
    tasks = reports.supervisor()
    with caplog.at_level(logging.WARNING):
        tasks.start("reader", work, "engine a")
        await until(lambda: reports.recovered == ["reader of engine a"])
    assert work.starts == 4
    assert tasks.failures == {"reader": 3}
    assert reports.failed == [("reader of engine a", f"{error.__name__}: broken")] * 3
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert [record.getMessage() for record in tracebacks] == [
        "background task failed: reader of engine a"
    ]
    await tasks.close()


async def test_the_pause_grows_to_its_limit_and_is_short_again_after_success(caplog) -> None:
    starts = 0

    async def work() -> None:
        nonlocal starts
        starts += 1
        if starts == 5:
            await asyncio.sleep(0.2)
        raise ValueError

    tasks = Reports().supervisor(pause_s=0.01, max_pause_s=0.04, settled_s=0.2)
    tasks.start("reader", work)
    await until(lambda: starts >= 6)
    await tasks.close()
    lines = [record.getMessage() for record in caplog.records if "restarting" in record.msg]
    assert [line.split(" (")[0] for line in lines][:5] == [
        f"reader: restarting in {pause} s" for pause in ("0.01", "0.02", "0.04", "0.04", "0.01")
    ]


async def test_a_task_that_must_not_restart_stays_failed() -> None:
    reports, work = Reports(), Failing(9)
    tasks = reports.supervisor(settled_s=0.01)
    task = tasks.start("scheduler", work, restart=False)
    await until(task.done)
    await asyncio.sleep(0.03)
    assert (work.starts, len(reports.failed), reports.recovered) == (1, 1, [])


async def test_a_failing_task_that_is_ended_is_no_longer_reported() -> None:
    reports = Reports()
    tasks = reports.supervisor(pause_s=60, max_pause_s=60)
    task = tasks.start("reader", Failing(1))
    await until(lambda: bool(reports.failed))
    await end_tasks([task])
    assert reports.recovered == ["reader"]


async def test_a_reported_failure_is_over_after_a_time_without_another() -> None:
    reports = Reports()
    tasks = reports.supervisor()
    for number in range(3):
        tasks.report("index", ValueError(f"change {number}"))
    assert tasks.failures == {"index": 3}
    await until(lambda: reports.recovered == ["index"])


async def _fails_when_it_is_cancelled() -> None:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise OSError("replaces the cancellation") from None


@pytest.mark.parametrize("work", [_fails_when_it_is_cancelled, _loses_one_cancellation])
async def test_one_cancellation_ends_a_task(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    reports = Reports()
    tasks = reports.supervisor()
    tasks.start("reader", work)
    await asyncio.sleep(0)
    async with asyncio.timeout(patience(10)):
        await tasks.close()
    assert reports.failed == []


@pytest.mark.parametrize("took", [0.001, 0.003])
async def test_many_tasks_share_each_turn_of_the_loop(took: float):
    now = 0.0
    share, done, turns, ended = LoopShare(0.005, lambda: now), [], [], False

    async def stream(number: int) -> None:
        nonlocal now
        for message in range(3):
            await share.turn()
            now += took
            done.append((number, message))

    async def watch() -> None:
        while not ended:
            before = len(done)
            await asyncio.sleep(0)
            turns.append(len(done) - before)

    watching = asyncio.create_task(watch())
    streams = [asyncio.create_task(stream(number)) for number in range(100)]
    await asyncio.sleep(0)
    streams[50].cancel()  # while it waits
    await asyncio.gather(*streams, return_exceptions=True)
    ended = True
    await watching
    assert len(done) == 297
    assert max(turns) <= 0.005 / took + 1
    first = [number for number, message in done if not message]
    assert first == sorted(first)


async def test_work_of_callbacks_waits_for_its_share_in_order():
    now = 0.0
    share, done = LoopShare(0.005, lambda: now), []

    def work(number: int) -> None:
        nonlocal now
        now += 0.003
        done.append(number)

    for number in range(6):
        share.later(partial(work, number))
    turns = []
    while len(done) < 6:
        before = len(done)
        await asyncio.sleep(0)
        turns.append(len(done) - before)
    assert done == list(range(6))
    assert max(turns) == 2
