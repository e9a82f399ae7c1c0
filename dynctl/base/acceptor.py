"""Accept the connections of a listening socket."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final

#: Connections that one turn of the event loop accepts: what they cost delays running streams by a
#: few milliseconds.
MAX_ACCEPTED: Final = 256
#: Seconds without accepting after the system refused, as it does when no descriptor is left.
_AGAIN_S: Final = 0.1


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
