"""Background tasks: supervised while they run, and ended reliably."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

Result = TypeVar("Result")

_CANCEL_AGAIN_S: Final = 0.25
_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 30.0
#: Longer than two of the longest pauses, so that a task that fails at every start stays failing.
_SETTLED_S: Final = 75.0

#: What one turn of the event loop takes from a flood of messages. Small, because streams of tokens
#: wait meanwhile.
TURN_MESSAGES: Final = 16
TURN_BYTES: Final = 64 * 1024

#: Workers that one step of a long computation reads or writes: about 0.5 ms, for a turn of the loop
#: has more to do.
SLICE: Final = 32

#: Those that wait for time of the loop and get it in one turn, at most.
_WOKEN: Final = 8

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Failing:
    error_type: type[BaseException]
    message: str
    settled: asyncio.TimerHandle


class Supervisor:
    """Runs long-lived tasks, and restarts one that fails.

    A failure is logged, counted in ``failures`` by the kind of the task, and passed to
    ``on_failure(name, message)``. The task starts again after ``pause_s`` seconds; the pause
    doubles with each further failure, up to ``max_pause_s``. After ``settled_s`` seconds without a
    failure, or when the task ends, ``on_recovery(name)`` is called and the pause is short again.
    """

    def __init__(
        self,
        on_failure: Callable[[str, str], None] = lambda name, message: None,
        on_recovery: Callable[[str], None] = lambda name: None,
        *,
        pause_s: float = _PAUSE_S,
        max_pause_s: float = _MAX_PAUSE_S,
        settled_s: float = _SETTLED_S,
    ) -> None:
        #: Kind of task -> failures since the start.
        self.failures: Counter[str] = Counter()
        self._on_failure = on_failure
        self._on_recovery = on_recovery
        self._pause_s = pause_s
        self._max_pause_s = max_pause_s
        self._settled_s = settled_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._failing: dict[str, _Failing] = {}

    @property
    def failing(self) -> dict[str, str]:
        """Name -> message of the tasks that failed and have not recovered yet."""
        return {name: failing.message for name, failing in self._failing.items()}

    def start(
        self,
        kind: str,
        work: Callable[[], Coroutine[Any, Any, None]],
        of: str = "",
        *,
        restart: bool = True,
    ) -> asyncio.Task[None]:
        """Run ``work`` until it returns or the task is cancelled.

        ``kind`` and ``of`` (a worker, a channel) make the task's name. ``restart`` False: a failure
        is reported and ends the task; ``on_failure`` handles it.
        """
        task = asyncio.create_task(self._supervise(kind, of, work, restart), name=_name(kind, of))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def report(self, kind: str, error: BaseException, of: str = "") -> None:
        """Report a failure of a task that continues by itself."""
        name = _name(kind, of)
        self.failures[kind] += 1
        before = self._failing.get(name)
        if before is not None:
            before.settled.cancel()
        if before is None or before.error_type is not type(error):
            _log.error("background task failed: %s", name, exc_info=error)
        settled = asyncio.get_running_loop().call_later(self._settled_s, self._recover, name)
        self._failing[name] = _Failing(type(error), _message(error), settled)
        self._on_failure(name, _message(error))

    async def close(self) -> None:
        """End all tasks."""
        await end_tasks(self._tasks)

    async def _supervise(
        self, kind: str, of: str, work: Callable[[], Coroutine[Any, Any, None]], restart: bool
    ) -> None:
        loop, name, pause = asyncio.get_running_loop(), _name(kind, of), self._pause_s
        try:
            while True:
                started = loop.time()
                try:
                    await work()
                    return
                except (Exception, asyncio.CancelledError) as error:
                    # A cancellation without a request is a failure; a failure that replaced
                    # a requested cancellation is the end.
                    if _is_cancelled():
                        raise asyncio.CancelledError from error
                    self.report(kind, error, of)
                    if not restart:
                        self._failing[name].settled.cancel()
                        return
                    if loop.time() - started >= self._settled_s:
                        pause = self._pause_s
                    _log.warning("%s: restarting in %g s (%s)", name, pause, _message(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._max_pause_s)
        finally:
            if restart:
                self._recover(name)

    def _recover(self, name: str) -> None:
        failing = self._failing.pop(name, None)
        if failing is not None:
            failing.settled.cancel()
            self._on_recovery(name)


def _is_cancelled() -> bool:
    """Whether the current task was cancelled.

    A local variable of the caller for the task would make a reference cycle: a cancelled task
    refers to its error, the error's traceback to the caller's frame, and the frame to the task.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _name(kind: str, of: str) -> str:
    return f"{kind} of {of}" if of else kind


def _message(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def drained(steps: Generator[None, None, Result]) -> Result:
    """The result of a computation in steps, all of them at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


async def in_turns(steps: Generator[None, None, Result]) -> Result:
    """The result of a computation in steps, one in each turn of the event loop."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        await asyncio.sleep(0)


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks`` and return when all have ended, in any way; their errors are dropped.

    One cancellation may get lost: it can arrive together with a result or a failure that a library
    prefers, and then a task that loops continues. So a task that still runs is cancelled again.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)


class LoopShare:
    """What many tasks may take of each turn of the event loop together.

    A socket for each of a thousand engines can be ready at once, and then all their tasks run in
    one turn, while everything else waits. They call :meth:`turn` before each message: it returns at
    once while less than ``seconds`` of this turn are spent, else in a later turn, in order.
    Callbacks, which cannot wait, give the rest of their work to :meth:`later`. ``clock``: seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        #: When the share of this turn is spent; None: nothing has begun in it.
        self._end: float | None = None
        self._within = False
        self._waiting: deque[asyncio.Future[None] | Callable[[], None]] = deque()
        #: Tasks that were woken and came too late in their turn: the first of the next.
        self._returned: list[asyncio.Future[None]] = []
        #: Tasks that waited and had a message in this turn. One has, whatever was spent before.
        self._served = 0

    def later(self, work: Callable[[], None]) -> None:
        """Call ``work`` in a later turn, after what waits already."""
        if not self._within:
            self._begin(asyncio.get_running_loop())
        self._waiting.append(work)

    async def turn(self) -> None:
        """Wait until there is time for a message."""
        loop = asyncio.get_running_loop()
        wait: Callable[[asyncio.Future[None]], None] = self._waiting.append
        woken = False
        while True:
            if not self._within:
                self._begin(loop)
            now = self._clock()
            if self._end is None:
                self._end = now + self._seconds
            if now < self._end or (woken and not self._served):
                self._served += woken
                return
            place = loop.create_future()
            wait(place)
            await place
            wait, woken = self._returned.append, True

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._within, self._end = True, None
        loop.call_soon(self._next, loop)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """A new turn of the loop: the first that wait may have a message each in it, one task more
        than in the last."""
        self._within = False
        self._waiting.extendleft(reversed(self._returned))
        self._returned.clear()
        if not self._waiting:
            return
        left, self._served = self._served + 1, 0
        self._within, self._end = True, None
        end = self._clock() + self._seconds
        try:
            for number in range(min(_WOKEN, len(self._waiting))):
                if number and self._clock() >= end:
                    self._end = end
                    break
                waiting = self._waiting.popleft()
                if not isinstance(waiting, asyncio.Future):
                    waiting()
                elif not waiting.done():  # not cancelled
                    waiting.set_result(None)
                    left -= 1
                if not left:
                    break
        finally:
            # After those that were woken, so that who returns is the first again.
            loop.call_soon(self._next, loop)
