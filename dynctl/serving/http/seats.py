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
from typing import Any, Final, Protocol, cast

from dynctl.serving.routing.refusal import HttpError

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

    @property
    def unread(self) -> int:
        """Bytes of answers that wait here for the client to read."""
        return 0 if self.wire is None else self.wire.get_write_buffer_size()

    @property
    def writing_paused(self) -> bool:
        return self.occupant is not None and self.occupant.writing_paused

    def take(self, transport: asyncio.BaseTransport, occupant: Occupant) -> bool:
        """Give the seat to a connection that begins, or to the next protocol of one that has it.
        Without a free seat the connection gets 503 and is closed; whether there was one."""
        # uvloop's transports are of no class of asyncio.
        wire = cast(asyncio.Transport, transport)
        self.occupant = occupant
        if self.admitted or self.enter(transport.get_extra_info("peername")):
            self.wire = wire
            return True
        wire.write(_FULL)
        wire.close()
        return False

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
        if self.admitted and self in self._seats.waiting:
            self._seats.headers.setdefault(self, self._loop.time())

    def begun(self) -> None:
        """The header of a request is complete."""
        self._seats.waiting.pop(self, None)
        self._seats.headers.pop(self, None)

    def ended(self) -> None:
        """A request ended; the connection waits for the next one."""
        if self.admitted:
            self._seats.waiting[self] = self._loop.time()
            self.wrote()

    def wrote(self) -> None:
        """Bytes were written; watch the connection until the client has read them."""
        unread = self._seats.unread
        if self.admitted and self not in unread and (size := self.unread):
            unread[self] = size, self._loop.time()


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
        self.waiting: dict[Seat, float] = {}
        #: Connections whose next header is not complete, and since when.
        self.headers: dict[Seat, float] = {}
        #: Connections with an answer that the client did not read yet: its bytes that wait here,
        #: and since when they are as many.
        self.unread: dict[Seat, tuple[int, float]] = {}
        self.open = 0
        self.refused = 0
        self.timed_out = 0
        self.not_read = 0

    @property
    def lagging(self) -> int:
        """Connections with an answer that goes on when the client has read more."""
        return sum(seat.writing_paused for seat in self.unread)

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
        self.waiting[seat] = self.headers[seat] = asyncio.get_running_loop().time()
        return True

    def free(self, seat: Seat) -> None:
        """The seat may have another connection."""
        self.waiting.pop(seat, None)
        self.headers.pop(seat, None)
        self.unread.pop(seat, None)
        self.open -= 1
        self._peers[seat.peer] -= 1
        if not self._peers[seat.peer]:
            del self._peers[seat.peer]

    def _make_room(self, peer: str | None) -> None:
        for seat in self.waiting:
            if peer is None or seat.peer == peer:
                seat.leave()
                return
        before = asyncio.get_running_loop().time() - _LAGS_S
        idle = [
            (since, seat)
            for seat, (_, since) in self.unread.items()
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
            late = [seat for seat, since in self.headers.items() if since < before]
            for seat in late:
                self.timed_out += 1
                seat.leave()
            self.close_unread(now)

    def close_unread(self, now: float) -> None:
        """Close the connections whose clients read nothing for ``unread_s``. Called often: a
        client has read something if the bytes that wait have another number than before."""
        for seat, (size, since) in tuple(self.unread.items()):
            left = seat.unread
            if not left:
                del self.unread[seat]
            elif left != size:  # it was read, or more was written, which is bounded
                self.unread[seat] = left, now
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


def _raw(error: HttpError) -> bytes:
    body = error.body()
    head = (
        f"HTTP/1.1 {error.status} Service Unavailable\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


_FULL: Final = _raw(
    HttpError(503, "too many connections; use fewer, or try again", "overloaded", "connections")
)
