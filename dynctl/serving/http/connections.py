"""The listeners of a process and their connections: open, TLS, closed at the end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from aiohttp import web, web_response
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from dynctl.base.acceptor import Acceptor
from dynctl.base.errors import file_problem
from dynctl.base.files import expect_regular
from dynctl.base.tasks import end_tasks
from dynctl.serving.http.bodies import PEER_SHARE
from dynctl.serving.http.data_path import DataPath
from dynctl.serving.http.json_responses import error_response
from dynctl.serving.http.plain_requests import ClientHandler
from dynctl.serving.http.seats import Seat, Seats
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
#: Seconds that requests have which still run when the listeners close.
_GRACE_S: Final = 1.0


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


class Connections(Seats):
    """The connections of one listener, each with its seat. Serves one application runner."""

    def __init__(
        self, limit: int, per_peer: int = 0, *, header_s: float = 10.0, unread_s: float = 60.0
    ) -> None:
        super().__init__(limit, per_peer, header_s=header_s, unread_s=unread_s)
        self._sweeper: asyncio.Task[None] | None = None
        self._acceptor: Acceptor | None = None
        #: Accepted connections that are not made yet: with TLS, until the handshake is done.
        self._handshakes: set[asyncio.Task[None]] = set()
        self._data_path: DataPath | None = None

    async def listen(
        self,
        runner: web.AppRunner,
        listener: socket.socket,
        *,
        certificate: Certificate | None = None,
        handlers: Mapping[str, ClientHandler] | None = None,
        **options: Any,
    ) -> None:
        """Accept the connections of ``listener`` for the application of ``runner``, with TLS if
        there is a certificate.

        ``handlers``: of plain requests by path, which do not go through the application.
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
                protocol.seat.begun()
            return make(message, payload, protocol, writer, task)

        manager.request_factory = begun

        def of_aiohttp(seat: Seat) -> asyncio.Protocol:
            return _Connection(seat, manager, loop=loop, **options)

        connection = of_aiohttp
        if handlers:
            self._data_path = DataPath(
                handlers,
                runner.app,
                of_aiohttp,
                header_bytes=options["max_field_size"],
                keep_alive_s=options["keepalive_timeout"],
            )
            connection = self._data_path.connection

        self._sweeper = loop.create_task(self.sweep(), name="connections without a request")
        accept(listener, _BACKLOG)
        self._acceptor = Acceptor(listener, partial(self._take, connection, certificate))

    async def close(self) -> None:
        """Accept no more, and end the requests of the data path; the runner ends the others."""
        if self._acceptor is not None:
            self._acceptor.close()
        tasks = [self._sweeper, *self._handshakes]
        await end_tasks([task for task in tasks if task is not None])
        if self._data_path is not None:
            await self._data_path.close(_GRACE_S)

    def _take(
        self,
        make: Callable[[Seat], asyncio.Protocol],
        certificate: Certificate | None,
        accepted: socket.socket,
        address: Any,
    ) -> None:
        """With TLS a connection has its seat before its handshake, so that clients without one
        take no seat of others. (A server of asyncio does not show it before.)"""
        loop = asyncio.get_running_loop()
        seat, context = Seat(self, loop), None
        if certificate is not None:
            context = certificate.context
            if not seat.enter(address):
                accepted.close()
                return
        opening = self._open(seat, make(seat), accepted, context)
        seat.handshake = loop.create_task(opening, name="new connection")
        self._handshakes.add(seat.handshake)
        seat.handshake.add_done_callback(self._handshakes.discard)

    async def _open(
        self,
        seat: Seat,
        connection: asyncio.Protocol,
        accepted: socket.socket,
        context: ssl.SSLContext | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=context,
                ssl_handshake_timeout=None if context is None else self.header_s,
            )
        except (OSError, EOFError):
            seat.leave()
        except asyncio.CancelledError:
            accepted.close()
            raise


class _Connection(web.RequestHandler):
    """aiohttp's connection with a seat among the connections of its listener."""

    __slots__ = ("seat",)

    def __init__(self, seat: Seat, manager: web.Server, **options: Any) -> None:
        super().__init__(manager, **options)
        self.seat = seat

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self.seat.take(transport, self):
            super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if data:
            self.seat.arrives()
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.seat.wrote()

    async def start(self) -> None:
        try:
            await super().start()
        finally:
            self.seat.wrote()  # the transport closes when its last bytes are read

    def connection_lost(self, exc: BaseException | None) -> None:
        self.seat.lost()
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        result = await super().finish_response(request, resp, start_time)
        self.seat.ended()
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


class Listeners:
    """The open listeners of a process."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._runners: list[web.AppRunner] = []
        #: One for each listener.
        self.connections: list[Connections] = []

    async def serve_clients(
        self,
        app: web.Application,
        listener: socket.socket,
        certificate: Certificate | None = None,
        handlers: Mapping[str, ClientHandler] | None = None,
    ) -> None:
        """Half of the descriptors are for clients: each request may need one to its engine.

        ``handlers``: of plain requests by path.
        """
        limits = self._limits
        most = max(FEW, descriptors() // 2)
        connections = Connections(
            most,
            limits.peer_connections or int(most * PEER_SHARE),
            header_s=limits.header_s,
            unread_s=limits.unread_s,
        )
        await self._serve(app, listener, connections, certificate, handlers)

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
        handlers: Mapping[str, ClientHandler] | None = None,
    ) -> None:
        limits = self._limits
        # A client that disconnects must stop its engine at once.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_GRACE_S)
        self._runners.append(runner)
        self.connections.append(connections)
        await connections.listen(
            runner,
            listener,
            certificate=certificate,
            handlers=handlers,
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
