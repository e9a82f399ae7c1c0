"""Virtual time: what happens next, and the order of what happens at one time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final

from dynctl.simulation.replay.rank import NS

#: At one time: ends of steps, then what travels, then faults and limits.
STEP: Final = 0
TRAVEL: Final = 1
LATER: Final = 2


class Agenda:
    """A clock in ns, and what is due at which time.

    Of what is due at one time, the lower ``order`` is first, then the lower ``place``, then what
    was added first.
    """

    __slots__ = ("_heap", "_number", "now")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, int, Callable[[Any], None], Any]] = []
        self._number = count()
        self.now = 0

    @property
    def seconds(self) -> float:
        return self.now / NS

    def schedule(
        self,
        when: int,
        act: Callable[[Any], None],
        what: Any = None,
        order: int = TRAVEL,
        place: int = 0,
    ) -> None:
        """Call ``act(what)`` at ``when``, which is not before now."""
        heappush(self._heap, (when, order, place, next(self._number), act, what))

    def run_until(self, when: int) -> None:
        """Do what is due up to and including ``when``, which is the time then."""
        heap = self._heap
        while heap and heap[0][0] <= when:
            self.now, _, _, _, act, what = heappop(heap)
            act(what)
        self.now = when

    def run_out(self) -> None:
        """Do what is due until nothing is left."""
        heap = self._heap
        while heap:
            self.now, _, _, _, act, what = heappop(heap)
            act(what)
