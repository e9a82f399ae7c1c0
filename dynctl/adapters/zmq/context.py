"""The shared ZMQ context of a process with its IO thread, and bounded reading of sockets."""

import asyncio
import contextlib
import select
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Protocol

import zmq
import zmq.asyncio

from dynctl.base.tasks import TURN_BYTES, TURN_MESSAGES, end_tasks

#: A followed engine takes three sockets, and ZMQ's default of 1,023 is then reached by 341 engines.
#: These are enough for the 4,096 workers that a frontend accepts.
MAX_SOCKETS: Final = 16_384
#: Messages that one turn of the event loop reads ahead, which takes about half a millisecond. While
#: their reader waits for something else, so many turns read, and then there is a pause.
_AHEAD: Final = 64
_AHEAD_TURNS: Final = 4
_AHEAD_S: Final = 0.02
#: Sockets of a :class:`ReadySockets` that one turn of the event loop wakes.
_WOKEN: Final = 16
# As plain numbers: operations on flags take longer than reading the state of a socket.
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)


def new_context() -> zmq.asyncio.Context:
    """A context to share; the caller ends it with :func:`close_context`."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def close_context(context: zmq.asyncio.Context) -> None:
    """Close it and all its sockets, without waiting."""
    context.destroy(linger=0)


def subscriber(
    context: zmq.asyncio.Context, events: int, stack: contextlib.ExitStack
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A SUB socket, and the one on which ZMQ reports these ``events`` of its connections.

    Both are plain sockets, for a :class:`SocketWatch`, and ``stack`` closes them.
    """
    sub: zmq.Socket[bytes] = zmq.Socket(context, zmq.SUB)
    stack.callback(sub.close, linger=0)
    address = f"inproc://connections-{sub.FD}"
    sub.monitor(address, events)
    # Unwound in reverse: stop the monitor, close its socket, close the monitored socket.
    monitor: zmq.Socket[bytes] = zmq.Socket(context, zmq.PAIR)
    stack.callback(monitor.close, linger=0)
    stack.callback(sub.disable_monitor)
    monitor.connect(address)
    return sub, monitor


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be read."""
    return bool(int(socket.get(_EVENTS)) & _POLLIN)


class Readers(Protocol):
    """Calls back when a descriptor is ready; an event loop, or :class:`ReadySockets`."""

    def add_reader(self, descriptor: int, callback: Callable[..., object], /, *args: Any) -> object:
        """Call ``callback`` in each turn in which the descriptor is ready."""

    def remove_reader(self, descriptor: int, /) -> bool:
        """Whether the descriptor had a callback."""


class ReadySockets:
    """Calls back for ready descriptors, at most for 16 in each turn of the event loop.

    A loop calls back for all in one turn, and wakes a task for each: with a thousand engines whose
    events come at once that takes 10 ms, in which no request goes on. Here those that are left
    come in the next turns, before those that were called. For one event loop.
    """

    def __init__(self) -> None:
        self._callbacks: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        #: With the loop that watches it; None without a reader, when it takes no descriptor.
        self._ready: tuple[select.epoll, asyncio.AbstractEventLoop] | None = None

    def add_reader(self, descriptor: int, callback: Callable[..., object], /, *args: Any) -> None:
        """Raises OSError without a free descriptor."""
        if self._ready is None:
            self._ready = select.epoll(), asyncio.get_running_loop()
            ready, loop = self._ready
            loop.add_reader(ready.fileno(), self._call, ready)
        self._ready[0].register(descriptor, select.EPOLLIN)
        self._callbacks[descriptor] = callback, args

    def remove_reader(self, descriptor: int, /) -> bool:
        if self._ready is None or self._callbacks.pop(descriptor, None) is None:
            return False
        ready, loop = self._ready
        ready.unregister(descriptor)
        if not self._callbacks:
            loop.remove_reader(ready.fileno())
            ready.close()
            self._ready = None
        return True

    def _call(self, ready: select.epoll) -> None:
        # The kernel shows first what it did not show the last time.
        for descriptor, _ in ready.poll(0, _WOKEN):
            # One that is called may remove another.
            found = self._callbacks.get(descriptor)
            if found is not None:
                callback, args = found
                callback(*args)


def ready_sockets() -> ReadySockets | None:
    """None where the system has no epoll: the event loop calls back then."""
    return ReadySockets() if hasattr(select, "epoll") else None


class SocketWatch:
    """Waits for messages on plain sockets; the caller closes it before them.

    A poller of ZMQ does the same, but makes its futures and callbacks again each time, which takes
    as long as to apply a short event. ``readers``: who watches the descriptors, the running event
    loop by default.
    """

    def __init__(self, *sockets: zmq.Socket[bytes], readers: Readers | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._readers: Readers = self._loop if readers is None else readers
        self._sockets = sockets
        self._descriptors = [socket.FD for socket in sockets]
        self._waiting: asyncio.Future[bool] | None = None
        for socket, descriptor in zip(sockets, self._descriptors, strict=True):
            self._readers.add_reader(descriptor, self._note_change, socket)

    def close(self) -> None:
        for descriptor in self._descriptors:
            self._readers.remove_reader(descriptor)

    async def wait(self, seconds: float | None) -> bool:
        """Wait until a message can be read, at most so long; returns whether one can."""
        # ZMQ's descriptors show changes only, so that a message may wait without one.
        if any(map(readable, self._sockets)):
            return True
        waiting: asyncio.Future[bool] = self._loop.create_future()
        self._waiting = waiting
        end = None if seconds is None else self._loop.call_later(seconds, self._wake, False)
        try:
            return await waiting
        finally:
            self._waiting = None
            if end is not None:
                end.cancel()

    def _note_change(self, socket: zmq.Socket[bytes]) -> None:
        # Reading the state also ends the readiness of the descriptor.
        if readable(socket):
            self._wake(True)

    def _wake(self, readable: bool) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(readable)


def drain(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """The messages that have arrived, at most those of one turn of the event loop."""
    received: list[list[bytes]] = []
    size = 0
    while len(received) < TURN_MESSAGES and size < TURN_BYTES and readable(socket):
        frames = socket.recv_multipart(zmq.NOBLOCK)
        received.append(frames)
        size += sum(map(len, frames))
    return received


class Backlog:
    """The messages of a socket that wait for their reader, bounded by their bytes.

    ZMQ bounds only their number, and a hundred thousand messages of 32 MiB are more memory than a
    host has. So they are read ahead. Above ``most_bytes`` the connection to ``endpoint`` is closed,
    what waits is lost, and ``overflowed`` is true: the caller begins again with a new socket.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], endpoint: str, *, most_bytes: int, most_messages: int
    ) -> None:
        self.overflowed = False
        self._socket = socket
        self._endpoint = endpoint
        self._most_bytes = most_bytes
        self._most_messages = most_messages
        self._waiting: deque[list[bytes]] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def read(self) -> None:
        """Read ahead what has arrived, at most the messages of one turn."""
        for _ in range(_AHEAD):
            if self.overflowed or len(self._waiting) >= self._most_messages:
                return
            # To ask takes less time than the exception of a socket without a message.
            if not readable(self._socket):
                return
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            self._waiting.append(frames)
            self._bytes += sum(map(len, frames))
            if self._bytes > self._most_bytes:
                self.overflowed = True
                self._waiting.clear()
                # What ZMQ holds is freed with the connection.
                with contextlib.suppress(zmq.ZMQError):
                    self._socket.disconnect(self._endpoint)

    def take(self) -> list[list[bytes]]:
        """The oldest messages, at most those of one turn of the event loop."""
        taken: list[list[bytes]] = []
        size = 0
        while self._waiting and len(taken) < TURN_MESSAGES and size < TURN_BYTES:
            frames = self._waiting.popleft()
            taken.append(frames)
            size += sum(map(len, frames))
        self._bytes -= size
        return taken

    @contextlib.asynccontextmanager
    async def reading_ahead(self) -> AsyncIterator[None]:
        """Read ahead while the reader waits for something else."""

        async def read() -> None:
            while True:
                for _ in range(_AHEAD_TURNS):
                    self.read()
                    await asyncio.sleep(0)
                await asyncio.sleep(_AHEAD_S)

        task = asyncio.create_task(read(), name="messages that wait")
        try:
            yield
        finally:
            await end_tasks([task])
