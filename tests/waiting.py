"""Deadlines that follow the machine: a test waits longer where processes get less CPU."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

#: Set by tests/busy.py: how much slower than alone a process runs beside its burners.
SLOWDOWN = "DYNCTL_TEST_SLOWDOWN"
_MOST = 20.0
#: The load average is a minute late and does not show what a virtual machine's host takes away.
_FLOOR = 5.0
# Read now: the environment of a test has no variables of this name.
_SET = float(os.environ.get(SLOWDOWN, "1"))


@functools.cache
def cores() -> int:
    """How many cores this process may use: of its affinity and of the quota of its container."""
    try:
        found = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        found = os.cpu_count() or 1
    return min([found, *quotas(Path("/sys/fs/cgroup"))])


def quotas(root: Path) -> list[int]:
    """The limits in both versions of control groups, in cores, rounded up."""
    limits = []
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            words = " ".join((root / file).read_text() for file in files).split()
            quota, period = (int(word) for word in words)
        except (OSError, ValueError):
            continue  # no such file, or "max": no limit
        if quota > 0 and period > 0:
            limits.append(-(-quota // period))
    return limits


def slowdown() -> float:
    """How much longer CPU work takes now than on an idle machine: at least 1.

    The larger of runnable processes per core (the load average of the last minute) and the value
    of ``DYNCTL_TEST_SLOWDOWN``.
    """
    return min(_MOST, max(1.0, os.getloadavg()[0] / cores(), _SET))


def patience(seconds: float) -> float:
    """The deadline for something that takes less than ``seconds`` on an idle machine.

    Only a failure lasts as long as this. A time that a test lets pass is not a deadline: see
    :func:`slowdown`.
    """
    return seconds * max(_FLOOR, slowdown())


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until ``condition`` holds; raises TimeoutError after ``patience(seconds)``."""
    began = time.monotonic()
    while not condition():
        _check(began, seconds)
        await asyncio.sleep(0.005)


def until_now(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """As :func:`until`, for code without an event loop."""
    began = time.monotonic()
    while not condition():
        _check(began, seconds)
        time.sleep(0.005)


def _check(began: float, seconds: float) -> None:
    # Asked again each time: a machine that is busy only now has waited for too little until now.
    waited = time.monotonic() - began
    if waited > patience(seconds):
        raise TimeoutError(f"waited {waited:.0f} s in vain")
