"""The listener that receives workers' responses on the request plane.

A worker connects here and sends the subject of the request, an unguessable word that only the
request had. A connection with another subject is dropped without a response.
"""

import asyncio
import os
import socket
import uuid
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from dynctl.base.decode_errors import WireError
from dynctl.base.peer_hosts import LOOK_S, connections_of_silent_hosts, probe_host
from dynctl.wire.dynamo.request_plane import MAX_HANDSHAKE_BYTES, FrameDecoder, parse_handshake

#: Connections that the kernel holds until they are accepted: many workers may answer at once.
_BACKLOG: Final = 1024
#: Connections that one turn of the event loop accepts. uvloop accepts one for each listening
#: descriptor, so under load the connections of workers would wait for many turns.
_ACCEPTED: Final = 8


class Receiver(Protocol):
    """Takes one response. Its methods are called from the event loop and must not block."""

    def called(self, transport: asyncio.Transport, frames: FrameDecoder) -> None:
        """The worker connected. ``frames`` gets the bytes after its handshake."""
        ...

    def received(self) -> None:
        """``frames`` has more bytes; also called once after :meth:`called`."""
        ...

    def host_is_silent(self) -> None:
        """The worker's host does not respond; called again and again until it does, or until the
        system ends the connection."""
        ...

    def lost(self, error: Exception | None) -> None:
        """The connection ended; or, before :meth:`called`, the listener was closed."""
        ...


@dataclass(slots=True)
class CallHomeCounts:
    """Connections since the start: matched to a request, and dropped without a match."""

    matched: int = 0
    dropped: int = 0


class CallHome:
    """One listener for each local address that was sent to workers, shared by all requests.

    Connections without a subject yet are bounded by one for each expected response and
    ``strangers`` more; one above that closes another one. An address with more of them than
    responses are expected has some that are of no worker: its oldest is closed, so that a flood
    of one address closes its own. Without such an address the oldest of all is closed.
    ``handshake_s``: the seconds until they send it. ``port``: where to listen; 0: a free port.
    """

    def __init__(self, *, strangers: int, handshake_s: float, port: int = 0) -> None:
        self.counts = CallHomeCounts()
        self.handshake_s = handshake_s
        self._max_strangers = strangers
        self._port = port
        self._servers: dict[str, list[asyncio.Server]] = {}
        self._opening = asyncio.Lock()
        self._expected: dict[str, tuple[Receiver, asyncio.Future[str | None] | None]] = {}
        self._strangers: dict[_CallingConnection, None] = {}
        self._strangers_of: dict[str | bytes, dict[_CallingConnection, None]] = {}
        self._connections: set[_CallingConnection] = set()
        self._look: asyncio.TimerHandle | None = None
        self._closed = False

    async def port(self, host: str) -> int:
        """The listening port at a local address; opened at the first call. Raises OSError."""
        async with self._opening:
            if self._closed:
                raise OSError("the request plane was closed")
            servers = self._servers.get(host)
            if servers is None:
                # One address: with port 0 each of a name's addresses would get another port.
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(
                    host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )
                address = str(found[0][4][0])
                first = await loop.create_server(
                    lambda: _CallingConnection(self), address, self._port, backlog=_BACKLOG
                )
                # A worker that only computes sends nothing for long, as one whose host vanished.
                probe_host(first.sockets[0])
                servers = self._servers[host] = [first]
                for _ in range(_ACCEPTED - 1):
                    same = socket.socket(fileno=os.dup(first.sockets[0].fileno()))
                    servers.append(
                        await loop.create_server(
                            lambda: _CallingConnection(self), sock=same, backlog=_BACKLOG
                        )
                    )
        port: int = servers[0].sockets[0].getsockname()[1]
        return port

    def expect(self, receiver: Receiver, accepted: asyncio.Future[str | None] | None = None) -> str:
        """A new subject for a response to ``receiver``. The caller must call forget.

        ``accepted`` gets "" when the worker connects, as if it had acknowledged the request.
        """
        subject = str(uuid.uuid4())
        self._expected[subject] = receiver, accepted
        return subject

    def forget(self, subject: str) -> None:
        """Drop connections with this subject from now on."""
        self._expected.pop(subject, None)

    async def close(self) -> None:
        """Close all listeners and connections; expected responses are lost."""
        self._closed = True
        async with self._opening:
            servers, self._servers = list(self._servers.values()), {}
        for server in (one for listening in servers for one in listening):
            server.close()
        expected, self._expected = list(self._expected.values()), {}
        for receiver, _ in expected:
            receiver.lost(OSError("the request plane was closed"))
        for connection in list(self._connections):
            connection.abort()
        if self._look is not None:
            self._look.cancel()

    # -- called by connections -----------------------------------------------------------------

    def opened(self, connection: "_CallingConnection") -> None:
        # Workers are strangers too until their subject is read, so the bound grows with requests.
        while self._strangers and len(self._strangers) >= self._max_strangers + len(self._expected):
            crowd = max(self._strangers_of.values(), key=len)
            oldest = next(iter(crowd if len(crowd) > len(self._expected) else self._strangers))
            self._is_known(oldest)
            oldest.abort()
        self._strangers[connection] = None
        self._strangers_of.setdefault(connection.peer, {})[connection] = None
        self._connections.add(connection)
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_at_hosts)

    def _look_at_hosts(self) -> None:
        """Report silent hosts of workers to the receivers of their responses."""
        loop = asyncio.get_running_loop()
        self._look = loop.call_later(LOOK_S, self._look_at_hosts) if self._connections else None
        for connection in connections_of_silent_hosts(self._connections):
            connection.report_silence()

    def receiver_of(self, connection: "_CallingConnection", subject: str) -> Receiver | None:
        """Who expects this subject; it is expected no more."""
        if self._closed:
            return None
        receiver, accepted = self._expected.pop(subject, (None, None))
        if receiver is not None:
            self._is_known(connection)
            self.counts.matched += 1
        if accepted is not None and not accepted.done():
            accepted.set_result("")
        return receiver

    def ended(self, connection: "_CallingConnection", *, matched: bool) -> None:
        self._is_known(connection)
        self._connections.discard(connection)
        self.counts.dropped += not matched

    def _is_known(self, connection: "_CallingConnection") -> None:
        """It is not a stranger: it has a subject, or ended."""
        if connection in self._strangers:
            del self._strangers[connection]
            same = self._strangers_of[connection.peer]
            del same[connection]
            if not same:
                del self._strangers_of[connection.peer]


class _CallingConnection(asyncio.Protocol):
    """A connection of a worker, or of a stranger."""

    __slots__ = ("_frames", "_home", "_receiver", "_timer", "_transport", "peer")

    def __init__(self, home: CallHome) -> None:
        self.peer: str | bytes = ""
        self._home = home
        self._frames = FrameDecoder()
        self._receiver: Receiver | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def host(self) -> str | bytes:
        return self.peer

    @property
    def socket(self) -> Any:
        return None if self._transport is None else self._transport.get_extra_info("socket")

    def report_silence(self) -> None:
        """The peer's host does not respond."""
        if self._receiver is not None:
            self._receiver.host_is_silent()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self.peer = network_of(transport.get_extra_info("peername"))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._home.handshake_s, self.abort)
        self._home.opened(self)

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        if self._receiver is None and not self._shake_hands():
            return
        if self._receiver is not None:
            self._receiver.received()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._home.ended(self, matched=self._receiver is not None)
        if self._receiver is not None:
            self._receiver.lost(exc)

    def _shake_hands(self) -> bool:
        """Whether the connection belongs to a request; one that belongs to none is dropped."""
        try:
            frame = self._frames.next_frame(MAX_HANDSHAKE_BYTES)
            if frame is None:
                return False
            receiver = self._home.receiver_of(self, parse_handshake(frame))
        except WireError:
            receiver = None
        if receiver is None or self._transport is None:
            self.abort()
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._receiver = receiver
        receiver.called(self._transport, self._frames)
        return True


def network_of(peer: Any) -> str | bytes:
    """Who connected: an IPv4 address, or the /64 of an IPv6 address: a host has all of it."""
    if not peer:
        return ""  # it is gone already
    host = str(peer[0])
    if ":" not in host or host.startswith("::ffff:"):
        return host
    return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8]
