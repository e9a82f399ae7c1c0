"""Long work in Python, in one thread, for which its owners take turns.

A thread that runs Python competes with the event loop for the interpreter: each time that the loop
needs it again, it waits for a switch. With several such threads it waits longer, so there is one.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Protocol, TypeVar

T = TypeVar("T")
#: How long a thread keeps the interpreter while another waits for it. Python's default is 5 ms, and
#: the event loop waits for it several times in one short request.
_SWITCH_S: Final = 0.001


class Apart(Protocol):
    """Runs work in a thread, and returns its result or raises its exception."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


class Turns:
    """One thread for long work. For one event loop.

    Owners that have work waiting take turns, so that one with much work holds up itself.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: ThreadPoolExecutor | None = None
        self._busy = False
        #: Owner -> its callers that wait, in their order; the next owner is the first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """The result of ``work``, or its exception. A call of the interpreter's C code cannot be
        interrupted, so ``work`` makes no long one."""
        await self._turn(owner)
        try:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, self._name)
                sys.setswitchinterval(_SWITCH_S)
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._pass_on()

    def of(self, owner: str) -> Apart:
        """Runs work of ``owner``."""
        return partial(self.run, owner)

    async def _turn(self, owner: str) -> None:
        if not self._busy:
            self._busy = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next caller that still waits."""
        while self._waiting:
            owner = next(iter(self._waiting))
            calls = self._waiting.pop(owner)
            turn = calls.popleft()
            if calls:
                self._waiting[owner] = calls
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
