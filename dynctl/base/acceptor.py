"""Accept the connections of a listening socket."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any, Final

#: Connections that one turn of the event loop accepts: what they cost delays running streams by a
#: few milliseconds.
MAX_ACCEPTED: Final = 256
#: Seconds without accepting after the system refused, as it does when no descriptor is left.
_AGAIN_S: Final = 0.1
#: Probes without an answer after which a peer's host counts as gone.
_PROBES: Final = 3


def probe_peer(connection: Any, idle_s: int = 5, between_s: int = 5) -> None:
    """Let the system end a connection whose peer's host vanished, or each that a listening socket
    accepts: after ``idle_s`` of silence and three probes, ``between_s`` apart. A process that is
    stopped does not count as gone; None is no connection."""
    if connection is None:
        return
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        probes = {"TCP_KEEPIDLE": idle_s, "TCP_KEEPINTVL": between_s, "TCP_KEEPCNT": _PROBES}
        for name, value in probes.items():
            if (option := getattr(socket, name, None)) is not None:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Acceptor:
    """Gives each accepted connection of a listening socket with its address to ``take``.

    A server of uvloop accepts one connection in a turn of the event loop. With some hundred
    streams a turn takes 100 ms, and then the last of a hundred new clients waited 10 s for its
    first byte. ``take`` owns the socket.
    """

    def __init__(self, listener: socket.socket, take: Callable[[socket.socket, Any], None]) -> None:
        self._listener = listener
        self._take = take
        self._again: asyncio.TimerHandle | None = None
        self._closed = False
        listener.setblocking(False)
        self._watch()

    def close(self) -> None:
        """Accept no more, and close the listening socket."""
        if self._closed:
            return
        self._closed = True
        if self._again is None:
            asyncio.get_running_loop().remove_reader(self._listener)
        else:
            self._again.cancel()
        self._listener.close()

    def _watch(self) -> None:
        self._again = None
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # no other client waits, or it left already
            except OSError:
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                self._again = loop.call_later(_AGAIN_S, self._watch)
                return
            self._take(accepted, address)
