"""The connections of one listener: their number, a share for each peer, and how long one may wait.

A client that opens connections and sends nothing, or half a header, costs a descriptor each. Such
connections are closed after ``header_s``; a peer has at most ``per_peer`` of them, and the
listeners for clients leave descriptors for engines, files and the other listeners.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import socket
from collections import Counter
from typing import Any, Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from dynctl.serving.http.json_responses import error_response
from dynctl.serving.refusal import HttpError

#: Connections of a listener for operators and health checks: few programs use it.
FEW: Final = 64
_BACKLOG: Final = 1024
_SWEEP_S: Final = 0.5


def descriptors() -> int:
    """The descriptors that this process may open; the soft limit is raised to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return _finite(soft)
    return _finite(hard)


def _finite(limit: int) -> int:
    return 1 << 20 if limit in (resource.RLIM_INFINITY, -1) else limit


class Connections:
    """The connections of one listener. Serves one application runner.

    ``limit`` is the maximum of open connections and ``per_peer`` of one address's (0: ``limit``);
    ``header_s`` seconds until a request's header is complete, from the connection or its first
    byte on. Above a maximum the connection that waits longest for a request is closed; without one
    the new connection gets 503.
    """

    def __init__(self, limit: int, per_peer: int = 0, *, header_s: float = 10.0) -> None:
        self.limit = limit
        self.per_peer = per_peer or limit
        self._header_s = header_s
        self._peers: Counter[str] = Counter()
        #: Connections without a request, and since when; the oldest first.
        self._waiting: dict[_Connection, float] = {}
        #: Connections whose next header is not complete, and since when.
        self._headers: dict[_Connection, float] = {}
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.open = 0
        self.refused = 0
        self.timed_out = 0

    async def listen(self, runner: web.AppRunner, listener: socket.socket, **options: Any) -> None:
        """Accept the connections of ``listener`` for the application of ``runner``.

        ``options`` are those of aiohttp's RequestHandler.
        """
        await runner.setup()
        manager = runner.server
        assert manager is not None
        loop = asyncio.get_running_loop()
        make = manager.request_factory

        def begun(
            message: RawRequestMessage,
            payload: StreamReader,
            protocol: web.RequestHandler,
            writer: AbstractStreamWriter,
            task: asyncio.Task[None],
        ) -> web.BaseRequest:
            if isinstance(protocol, _Connection):
                self._begun(protocol)
            return make(message, payload, protocol, writer, task)

        manager.request_factory = begun
        self._server = await loop.create_server(
            lambda: _Connection(self, manager, loop=loop, **options),
            sock=listener,
            backlog=_BACKLOG,
        )
        self._sweeper = loop.create_task(self._sweep(), name="connections without a request")

    async def close(self) -> None:
        """Accept no more; the runner ends the open connections."""
        if self._server is not None:
            self._server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    # -- called by connections -------------------------------------------------------------

    def admit(self, connection: _Connection) -> bool:
        """Whether there is room; the longest waiting connection makes room for a new one."""
        peer = connection.peer
        if self._peers[peer] >= self.per_peer:
            self._make_room(peer)
        elif self.open >= self.limit:
            self._make_room(None)
        if self._peers[peer] >= self.per_peer or self.open >= self.limit:
            self.refused += 1
            return False
        self._peers[peer] += 1
        self.open += 1
        self._waiting[connection] = self._headers[connection] = connection.now()
        return True

    def gone(self, connection: _Connection) -> None:
        self._waiting.pop(connection, None)
        self._headers.pop(connection, None)
        self.open -= 1
        self._peers[connection.peer] -= 1
        if not self._peers[connection.peer]:
            del self._peers[connection.peer]

    def first_byte(self, connection: _Connection) -> None:
        """The client sends a header."""
        self._headers.setdefault(connection, connection.now())

    def ended(self, connection: _Connection) -> None:
        """A request ended; the connection waits for the next one."""
        self._waiting[connection] = connection.now()

    def waits(self, connection: _Connection) -> bool:
        return connection in self._waiting

    def _begun(self, connection: _Connection) -> None:
        self._waiting.pop(connection, None)
        self._headers.pop(connection, None)

    def _make_room(self, peer: str | None) -> None:
        for connection in self._waiting:
            if peer is None or connection.peer == peer:
                connection.leave()
                return

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._header_s / 2))
            before = asyncio.get_running_loop().time() - self._header_s
            late = [one for one, since in self._headers.items() if since < before]
            for connection in late:
                self.timed_out += 1
                connection.leave()


class _Connection(web.RequestHandler):
    """aiohttp's connection with a place among the connections of its listener."""

    __slots__ = ("_admitted", "_place", "peer")

    def __init__(self, place: Connections, manager: web.Server, **options: Any) -> None:
        super().__init__(manager, **options)
        self._place = place
        self._admitted = False
        self.peer = ""

    def now(self) -> float:
        return self._loop.time()

    def leave(self) -> None:
        """Close at once, without an answer."""
        if self._admitted:
            self._admitted = False
            self._place.gone(self)
        self.force_close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.peer = _network(transport.get_extra_info("peername"))
        self._admitted = self._place.admit(self)
        if self._admitted:
            super().connection_made(transport)
            return
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()

    def data_received(self, data: bytes) -> None:
        if data and self._admitted and self._place.waits(self):
            self._place.first_byte(self)
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._admitted:
            self._admitted = False
            self._place.gone(self)
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        result = await super().finish_response(request, resp, start_time)
        if self._admitted:
            self._place.ended(self)
        return result

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Bytes that are not HTTP: a JSON error, and no traceback in the log."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        problem = "the request is not valid HTTP, or its header is too large"
        answer = error_response(HttpError(status, problem, "invalid_request_error", "invalid_http"))
        answer.force_close()
        return answer


def _network(name: Any) -> str:
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
