"""Deadlines that follow the machine: a test waits longer where processes get less CPU."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

#: Set by tests/busy.py: how much slower than alone a process runs beside its burners.
SLOWDOWN = "DYNCTL_TEST_SLOWDOWN"
_MOST = 20.0


def slowdown() -> float:
    """How much longer CPU work takes now than on an idle machine: at least 1.

    The larger of runnable processes per core (the load average of the last minute) and the value
    of ``DYNCTL_TEST_SLOWDOWN``.
    """
    per_core = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(_MOST, max(1.0, per_core, float(os.environ.get(SLOWDOWN, "1"))))


def patience(seconds: float) -> float:
    """The deadline for something that takes less than ``seconds`` on an idle machine."""
    return seconds * slowdown()


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until ``condition`` holds; raises TimeoutError after ``patience(seconds)``."""
    async with asyncio.timeout(patience(seconds)):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)


def until_now(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """As :func:`until`, for code without an event loop."""
    deadline = time.monotonic() + patience(seconds)
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.005)
