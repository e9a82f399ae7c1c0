"""The connections of one listener: their number, a share for each peer, and how long one may wait.

A client that opens connections and sends nothing, or half a header, costs a descriptor each. Such
connections are closed after ``header_s``; a peer has at most ``per_peer`` of them, and the
listeners for clients leave descriptors for engines, files and the other listeners. A client that
does not read its answer costs the answer's memory too; it is closed after ``unread_s``.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, cast

from aiohttp import web, web_response
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from dynctl.base.acceptor import Acceptor
from dynctl.base.errors import file_problem
from dynctl.base.files import expect_regular
from dynctl.base.tasks import end_tasks
from dynctl.serving.http.bodies import PEER_SHARE
from dynctl.serving.http.json_responses import error_response
from dynctl.serving.http.start import accept
from dynctl.serving.routing.config import Limits
from dynctl.serving.routing.refusal import HttpError

_log = logging.getLogger(__name__)

# aiohttp adds a Server header to every answer, with its own version and Python's, which tell an
# attacker what to try. There is no setting for it, and a signal would not see answers to bytes that
# are not HTTP.
vars(web_response)["SERVER_SOFTWARE"] = "dynctl"

#: Connections of a listener for operators and health checks: few programs use it.
FEW: Final = 64
_BACKLOG: Final = 1024
_SWEEP_S: Final = 0.5
#: Seconds without a byte read after which a client with an unread answer may have to make room. One
#: that is only slower than its engine has read some by then.
_LAGS_S: Final = 1.0


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
    byte on. ``unread_s`` seconds in which a client reads nothing of its answer. Above a maximum the
    connection that waits longest for a request is closed, else the one whose client read nothing
    for the longest time; without one the new connection gets 503.
    """

    def __init__(
        self, limit: int, per_peer: int = 0, *, header_s: float = 10.0, unread_s: float = 60.0
    ) -> None:
        self.limit = limit
        self.per_peer = per_peer or limit
        self._header_s = header_s
        self._unread_s = unread_s
        self._peers: Counter[str] = Counter()
        #: Connections without a request, and since when; the oldest first.
        self._waiting: dict[_Connection, float] = {}
        #: Connections whose next header is not complete, and since when.
        self._headers: dict[_Connection, float] = {}
        #: Connections with an answer that the client did not read yet: its bytes that wait here,
        #: and since when they are as many.
        self._unread: dict[_Connection, tuple[int, float]] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._acceptor: Acceptor | None = None
        #: Accepted connections that are not made yet: with TLS, until the handshake is done.
        self._handshakes: set[asyncio.Task[None]] = set()
        self.open = 0
        self.refused = 0
        self.timed_out = 0
        self.not_read = 0

    async def listen(
        self,
        runner: web.AppRunner,
        listener: socket.socket,
        *,
        certificate: Certificate | None = None,
        **options: Any,
    ) -> None:
        """Accept the connections of ``listener`` for the application of ``runner``, with TLS if
        there is a certificate.

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

        def connection() -> _Connection:
            return _Connection(self, manager, loop=loop, **options)

        self._sweeper = loop.create_task(self._sweep(), name="connections without a request")
        accept(listener, _BACKLOG)
        self._acceptor = Acceptor(listener, partial(self._take, connection, certificate))

    async def close(self) -> None:
        """Accept no more; the runner ends the open connections."""
        if self._acceptor is not None:
            self._acceptor.close()
        tasks = [self._sweeper, *self._handshakes]
        await end_tasks([task for task in tasks if task is not None])

    @property
    def lagging(self) -> int:
        """Connections with an answer that goes on when the client has read more."""
        return sum(connection.writing_paused for connection in self._unread)

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
        self._unread.pop(connection, None)
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

    def wrote(self, connection: _Connection) -> None:
        """Bytes were written; watch the connection until the client has read them."""
        if connection not in self._unread and (size := connection.unread):
            self._unread[connection] = size, connection.now()

    def _take(
        self,
        make: Callable[[], _Connection],
        certificate: Certificate | None,
        accepted: socket.socket,
        address: Any,
    ) -> None:
        """With TLS a connection has its place before its handshake, so that clients without one
        take no place of others. (A server of asyncio does not show it before.)"""
        loop, connection = asyncio.get_running_loop(), make()
        context = None
        if certificate is not None:
            context = certificate.context
            if not connection.enter(address):
                accepted.close()
                return
        task = loop.create_task(self._open(connection, accepted, context), name="new connection")
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)
        connection.handshake = task

    async def _open(
        self, connection: _Connection, accepted: socket.socket, context: ssl.SSLContext | None
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=context,
                ssl_handshake_timeout=None if context is None else self._header_s,
            )
        except (OSError, EOFError):
            connection.leave()
        except asyncio.CancelledError:
            accepted.close()
            raise

    def _begun(self, connection: _Connection) -> None:
        self._waiting.pop(connection, None)
        self._headers.pop(connection, None)

    def _make_room(self, peer: str | None) -> None:
        for connection in self._waiting:
            if peer is None or connection.peer == peer:
                connection.leave()
                return
        before = asyncio.get_running_loop().time() - _LAGS_S
        idle = [
            (since, connection)
            for connection, (_, since) in self._unread.items()
            if since < before and (peer is None or connection.peer == peer)
        ]
        if idle:
            self.not_read += 1
            min(idle, key=itemgetter(0))[1].leave()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._header_s / 2))
            now = asyncio.get_running_loop().time()
            before = now - self._header_s
            late = [connection for connection, since in self._headers.items() if since < before]
            for connection in late:
                self.timed_out += 1
                connection.leave()
            self.close_unread(now)

    def close_unread(self, now: float) -> None:
        """Close the connections whose clients read nothing for ``unread_s``. Called often: a
        client has read something if the bytes that wait have another number than before."""
        for connection, (size, since) in tuple(self._unread.items()):
            left = connection.unread
            if not left:
                del self._unread[connection]
            elif left != size:  # it was read, or more was written, which is bounded
                self._unread[connection] = left, now
            elif since < now - self._unread_s:
                self.not_read += 1
                connection.leave()


class _Connection(web.RequestHandler):
    """aiohttp's connection with a place among the connections of its listener."""

    __slots__ = ("_admitted", "_place", "_wire", "handshake", "peer")

    def __init__(self, place: Connections, manager: web.Server, **options: Any) -> None:
        super().__init__(manager, **options)
        self._place = place
        self._admitted = False
        #: The transport until it is closed. That of aiohttp ends earlier.
        self._wire: asyncio.Transport | None = None
        self.handshake: asyncio.Task[None] | None = None
        self.peer = ""

    def now(self) -> float:
        return self._loop.time()

    @property
    def unread(self) -> int:
        """Bytes of answers that wait here for the client to read."""
        return 0 if self._wire is None else self._wire.get_write_buffer_size()

    def leave(self) -> None:
        """Close at once, without an answer."""
        if self._admitted:
            self._admitted = False
            self._place.gone(self)
        if self.handshake is not None and self.handshake is not asyncio.current_task():
            self.handshake.cancel()
        self.force_close()
        if self._wire is not None:
            # A transport that is only closed keeps its descriptor until all is read.
            self._wire.abort()

    def enter(self, address: Any) -> bool:
        """Take a place for a client of this address; whether there was one."""
        self.peer = network_of(address)
        self._admitted = self._place.admit(self)
        return self._admitted

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no class of asyncio.
        stream = cast(asyncio.Transport, transport)
        if self._admitted or self.enter(transport.get_extra_info("peername")):
            self._wire = stream
            super().connection_made(transport)
            return
        stream.write(_FULL)
        stream.close()

    def data_received(self, data: bytes) -> None:
        if data and self._admitted and self._place.waits(self):
            self._place.first_byte(self)
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._admitted:
            self._place.wrote(self)

    async def start(self) -> None:
        try:
            await super().start()
        finally:
            if self._admitted:  # the transport closes when its last bytes are read
                self._place.wrote(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._wire = None
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
            self._place.wrote(self)
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


class CertificateError(ValueError):
    """Files that are not a certificate with its key."""


class Certificate:
    """The certificate of a listener, from PEM files; :meth:`watch` loads them when they change.

    ``protocols`` are those of ALPN.
    """

    def __init__(self, chain: Path, key: Path, protocols: tuple[str, ...] = ("http/1.1",)) -> None:
        self._files = (chain, key)
        self._protocols = protocols
        self._seen: tuple[tuple[int, ...], ...] = ()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def load(self) -> bool:
        """Read the files if they changed; whether they did. Raises CertificateError, and keeps
        the old certificate."""
        chain, key = self._files
        try:
            seen = tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in map(Path.stat, self._files))
            if seen == self._seen:
                return False
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            # A client of TLS 1.2 could ask for handshake after handshake on one connection.
            context.options |= ssl.OP_NO_RENEGOTIATION
            context.set_alpn_protocols(self._protocols)
            for file in (chain, key):
                expect_regular(file)
            # An encrypted key would ask on the terminal.
            context.load_cert_chain(chain, key, password=_no_password)
        except ssl.SSLError as error:
            reason = (error.reason or "not PEM").lower().replace("_", " ")
            raise CertificateError(
                f"{chain} and {key}: not a certificate with its key: {reason}"
            ) from None
        except OSError as error:
            name = error.filename or f"{chain} or {key}"
            raise CertificateError(f"{name}: {file_problem(error)}") from None
        except ValueError as error:
            raise CertificateError(f"{key}: {error}") from None
        self.context, self._seen = context, seen
        return True

    async def watch(self, poll_s: float = 1.0) -> None:
        """Load the files again whenever they change. An error changes nothing: of two files one is
        written first."""
        problem = ""
        while True:
            await asyncio.sleep(poll_s)
            try:
                if self.load():
                    _log.info("the certificate %s is loaded again", self._files[0])
                problem = ""
            except CertificateError as error:
                if str(error) != problem:
                    problem = str(error)
                    _log.warning("the certificate stays as it is: %s", problem)


def _no_password() -> str:
    raise ValueError("the key has a password; expected one without")


def unix_listener(path: Path) -> socket.socket:
    """A Unix socket that only this user can open. Raises OSError.

    A socket that an ended process left is replaced; one that answers is not.
    """
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise OSError(errno.EADDRINUSE, "another process listens on it", str(path))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The mode must be right from the start; chmod after bind would leave a moment.
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


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


class Listeners:
    """The open listeners of a process."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._runners: list[web.AppRunner] = []
        #: One for each listener.
        self.connections: list[Connections] = []

    async def serve_clients(
        self, app: web.Application, listener: socket.socket, certificate: Certificate | None = None
    ) -> None:
        """Half of the descriptors are for clients: each request may need one to its engine."""
        limits = self._limits
        most = max(FEW, descriptors() // 2)
        connections = Connections(
            most,
            limits.peer_connections or int(most * PEER_SHARE),
            header_s=limits.header_s,
            unread_s=limits.unread_s,
        )
        await self._serve(app, listener, connections, certificate)

    async def serve_few(
        self, app: web.Application, listener: socket.socket, share: float = 1.0
    ) -> None:
        """For few programs; ``share``: the part of the connections that one address may have."""
        connections = Connections(FEW, int(FEW * share), unread_s=self._limits.unread_s)
        await self._serve(app, listener, connections)

    async def _serve(
        self,
        app: web.Application,
        listener: socket.socket,
        connections: Connections,
        certificate: Certificate | None = None,
    ) -> None:
        limits = self._limits
        # A client that disconnects must stop its engine at once.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        self._runners.append(runner)
        self.connections.append(connections)
        await connections.listen(
            runner,
            listener,
            certificate=certificate,
            access_log=None,
            auto_decompress=False,  # without a bound; Bodies has one
            keepalive_timeout=limits.keep_alive_s,
            max_field_size=limits.header_bytes,
            max_line_size=limits.header_bytes,
        )

    async def close(self) -> None:
        for connections in self.connections:
            await connections.close()
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()
