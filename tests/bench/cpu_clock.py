"""An event loop as on a core of its own, on a machine that many processes share.

Its clock shows the CPU time of its thread, and moves on at once where the loop only waits. So a
process that is stopped within its work loses no time by that, and what arrives meanwhile is no
burst. What arrives comes from :class:`Arrivals`, whose own work takes no time.
"""

from __future__ import annotations

import gc
import selectors
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Arrivals(Protocol):
    """What happens outside of the process, at times of the clock in nanoseconds."""

    def due(self) -> int:
        """When the next happens."""

    def arrive(self, now: int) -> bool:
        """Let everything happen that is due; whether anything was."""


class CpuClock:
    """The clock of one thread, the one that makes it."""

    def __init__(self) -> None:
        self._thread = time.pthread_getcpuclockid(threading.get_ident())
        self._ahead = time.monotonic_ns() - self.cpu()
        self._stopped = 0

    def cpu(self) -> int:
        """CPU time of the thread (ns)."""
        return time.clock_gettime_ns(self._thread)

    def ns(self) -> int:
        """The time (ns)."""
        return self._ahead + self.cpu()

    def worked(self) -> int:
        """CPU time (ns) without that of blocks in which it was stopped."""
        return self.cpu() - self._stopped

    def move(self, ns: int) -> None:
        """Let time pass in which the thread waits."""
        self._ahead += max(0, ns)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What is done in the block takes no time, nor does the garbage collector run in it."""
        began, collects = self.cpu(), gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
            took = self.cpu() - began
            self._ahead -= took
            self._stopped += took

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In the block it is what :mod:`time` calls monotonic."""
        seconds, nanoseconds = time.monotonic, time.monotonic_ns
        time.monotonic_ns, time.monotonic = self.ns, lambda: self.ns() / 1e9
        try:
            yield
        finally:
            time.monotonic, time.monotonic_ns = seconds, nanoseconds


class CpuSelector(selectors.EpollSelector):
    """The selector of a loop with this clock; uvloop has none. Without ``arrivals`` it waits as
    others do."""

    def __init__(self, clock: CpuClock) -> None:
        super().__init__()
        self._clock = clock
        self.arrivals: Arrivals | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.arrivals is None:
            return self._wait(timeout)
        with self._clock.stopped():
            arrived = self.arrivals.arrive(self._clock.ns())
        ready = super().select(0)
        if not ready and not arrived and timeout != 0:
            now, until = self._clock.ns(), self.arrivals.due()
            if timeout is not None:
                until = min(until, now + int(timeout * 1e9))
            self._clock.move(until - now)
        return ready

    def _wait(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        began, worked = time.perf_counter_ns(), self._clock.cpu()
        ready = super().select(timeout)
        self._clock.move(time.perf_counter_ns() - began - (self._clock.cpu() - worked))
        return ready
