"""Ending background tasks for certain."""

import asyncio
from collections.abc import Iterable
from typing import Any, Final

_AGAIN_S: Final = 0.25


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks`` and return when all have ended, however they do; their errors are dropped.

    One cancellation may get lost: it can arrive together with a result or a failure that a library
    prefers, and then a task that loops goes on. So whoever is still there is asked again.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
