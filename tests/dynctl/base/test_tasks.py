"""Tasks end, whatever they do with a cancellation."""

import asyncio
import contextlib

import pytest

from dynctl.base.tasks import end_tasks


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
        async with asyncio.timeout(10):
            await end_tasks([task])
        return task.done()

    assert asyncio.run(run())


def test_none_are_fine() -> None:
    asyncio.run(end_tasks([]))
