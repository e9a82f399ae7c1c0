"""The seats of the connections of one listener: how many there are, and how long one may wait.

A client that opens connections and sends nothing, or half a header, costs a descriptor each. Such
connections are closed after ``header_s``; a peer has at most ``per_peer`` of them, and the
listeners for clients leave descriptors for engines, files and the other listeners. A client that
does not read its answer costs the answer's memory too; it is closed after ``unread_s``.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from operator import itemgetter
from typing import Any, Final, Protocol

_SWEEP_S: Final = 0.5
#: Seconds without a byte read after which a client with an unread answer may have to make room. One
#: that is only slower than its engine has read some by then.
_LAGS_S: Final = 1.0


class Occupant(Protocol):
    """The protocol of a connection that has a seat."""

    @property
    def writing_paused(self) -> bool:
        """Whether its client has to read before more is written."""

    def force_close(self) -> None:
        """Answer nothing more."""


class Seat:
    """The seat of one connection, whichever protocol it has.

    ``wire``: its transport, until that is closed. ``peer``: see :func:`network_of`.
    """

    __slots__ = ("_loop", "_seats", "admitted", "handshake", "occupant", "peer", "wire")

    def __init__(self, seats: Seats, loop: asyncio.AbstractEventLoop) -> None:
        self._seats = seats
        self._loop = loop
        self.admitted = False
        self.occupant: Occupant | None = None
        self.wire: asyncio.Transport | None = None
        self.handshake: asyncio.Task[None] | None = None
        self.peer = ""

    def now(self) -> float:
        return self._loop.time()

    @property
    def unread(self) -> int:
        """Bytes of answers that wait here for the client to read."""
        return 0 if self.wire is None else self.wire.get_write_buffer_size()

    @property
    def writing_paused(self) -> bool:
        return self.occupant is not None and self.occupant.writing_paused

    def enter(self, address: Any) -> bool:
        """Take the seat for a client of this address; whether there was one."""
        self.peer = network_of(address)
        self.admitted = self._seats.admit(self)
        return self.admitted

    def leave(self) -> None:
        """Close the connection at once, without an answer."""
        self.free()
        if self.handshake is not None and self.handshake is not asyncio.current_task():
            self.handshake.cancel()
        if self.occupant is not None:
            self.occupant.force_close()
        if self.wire is not None:
            # A transport that is only closed keeps its descriptor until all is read.
            self.wire.abort()

    def lost(self) -> None:
        """The connection was closed."""
        self.wire = self.occupant = None
        self.free()

    def free(self) -> None:
        if self.admitted:
            self.admitted = False
            self._seats.free(self)

    # -- called by the protocol ------------------------------------------------------------

    def arrives(self) -> None:
        """Bytes arrived; they are a header where the connection has no request."""
        if self.admitted and self._seats.waits(self):
            self._seats.first_byte(self)

    def begun(self) -> None:
        """The header of a request is complete."""
        self._seats.begun(self)

    def ended(self) -> None:
        """A request ended; the connection waits for the next one."""
        if self.admitted:
            self._seats.ended(self)
            self._seats.wrote(self)

    def wrote(self) -> None:
        """Bytes were written; watch the connection until the client has read them."""
        if self.admitted:
            self._seats.wrote(self)


class Seats:
    """The seats of one listener.

    ``limit`` is the maximum of open connections and ``per_peer`` of one address's (0: ``limit``);
    ``header_s`` seconds until a request's header is complete, from the connection or its first
    byte on. ``unread_s`` seconds in which a client reads nothing of its answer. Above a maximum the
    connection that waits longest for a request is closed, else the one whose client read nothing
    for the longest time; without one the new connection gets 503.
    """

    def __init__(
        self, limit: int, per_peer: int = 0, *, header_s: float = 10.0, unread_s: float = 60.0
    ) -> None:
        self.limit = limit
        self.per_peer = per_peer or limit
        self.header_s = header_s
        self._unread_s = unread_s
        self._peers: Counter[str] = Counter()
        #: Connections without a request, and since when; the oldest first.
        self._waiting: dict[Seat, float] = {}
        #: Connections whose next header is not complete, and since when.
        self._headers: dict[Seat, float] = {}
        #: Connections with an answer that the client did not read yet: its bytes that wait here,
        #: and since when they are as many.
        self._unread: dict[Seat, tuple[int, float]] = {}
        self.open = 0
        self.refused = 0
        self.timed_out = 0
        self.not_read = 0

    @property
    def lagging(self) -> int:
        """Connections with an answer that goes on when the client has read more."""
        return sum(seat.writing_paused for seat in self._unread)

    def admit(self, seat: Seat) -> bool:
        """Whether there is room; the longest waiting connection makes room for a new one."""
        peer = seat.peer
        if self._peers[peer] >= self.per_peer:
            self._make_room(peer)
        elif self.open >= self.limit:
            self._make_room(None)
        if self._peers[peer] >= self.per_peer or self.open >= self.limit:
            self.refused += 1
            return False
        self._peers[peer] += 1
        self.open += 1
        self._waiting[seat] = self._headers[seat] = seat.now()
        return True

    def free(self, seat: Seat) -> None:
        """The seat may have another connection."""
        self._waiting.pop(seat, None)
        self._headers.pop(seat, None)
        self._unread.pop(seat, None)
        self.open -= 1
        self._peers[seat.peer] -= 1
        if not self._peers[seat.peer]:
            del self._peers[seat.peer]

    def first_byte(self, seat: Seat) -> None:
        """The client sends a header."""
        self._headers.setdefault(seat, seat.now())

    def begun(self, seat: Seat) -> None:
        """The header is complete."""
        self._waiting.pop(seat, None)
        self._headers.pop(seat, None)

    def ended(self, seat: Seat) -> None:
        """A request ended; the connection waits for the next one."""
        self._waiting[seat] = seat.now()

    def waits(self, seat: Seat) -> bool:
        return seat in self._waiting

    def wrote(self, seat: Seat) -> None:
        """Bytes were written; watch the connection until the client has read them."""
        if seat not in self._unread and (size := seat.unread):
            self._unread[seat] = size, seat.now()

    def _make_room(self, peer: str | None) -> None:
        for seat in self._waiting:
            if peer is None or seat.peer == peer:
                seat.leave()
                return
        before = asyncio.get_running_loop().time() - _LAGS_S
        idle = [
            (since, seat)
            for seat, (_, since) in self._unread.items()
            if since < before and (peer is None or seat.peer == peer)
        ]
        if idle:
            self.not_read += 1
            min(idle, key=itemgetter(0))[1].leave()

    async def sweep(self) -> None:
        """Close connections that are late, again and again."""
        while True:
            await asyncio.sleep(min(_SWEEP_S, self.header_s / 2))
            now = asyncio.get_running_loop().time()
            before = now - self.header_s
            late = [seat for seat, since in self._headers.items() if since < before]
            for seat in late:
                self.timed_out += 1
                seat.leave()
            self.close_unread(now)

    def close_unread(self, now: float) -> None:
        """Close the connections whose clients read nothing for ``unread_s``. Called often: a
        client has read something if the bytes that wait have another number than before."""
        for seat, (size, since) in tuple(self._unread.items()):
            left = seat.unread
            if not left:
                del self._unread[seat]
            elif left != size:  # it was read, or more was written, which is bounded
                self._unread[seat] = left, now
            elif since < now - self._unread_s:
                self.not_read += 1
                seat.leave()


def network_of(name: Any) -> str:
    """The peer of a socket's address: an IPv4 address, the /64 of an IPv6 one; "" without one."""
    if not isinstance(name, tuple):
        return ""
    address = ipaddress.ip_address(name[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or address.packed[:8].hex())
