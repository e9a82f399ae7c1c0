"""Accepts requests on Dynamo's request plane (see dynctl.wire.dynamo.request_plane).

Interface::

    server = RequestServer(host="10.0.0.7")
    server.serve(EndpointId("dynamo", "backend", "generate"), handler, body=EngineRequest)
    await server.start()
    instance = server.instance(endpoint, instance_id)   # register encode_entry(instance)
    ...
    await server.drain(30.0); await server.close()

``async def handler(request: PlaneRequest) -> AsyncIterator[item]`` yields the items of the answer;
a RawItem is sent as it is. ``request.stopped`` is set when the requester wants no more items; the
handler is cancelled when the requester is gone. ``serve(..., admit=check)``: ``check(request)`` may
raise :class:`RequestRefusal` before the answer begins. An exception of the handler ends the answer
with an error item of Dynamo's form; :class:`ErrorItem` sets its text and type. :class:`AnswerLost`
closes the connection without an end, which Dynamo's frontends take as a lost worker.

``RequestServer(host, nats=NatsListener(servers))`` takes requests over NATS instead: it listens at
no port, and each instance has a subject. Await ``listening()`` before you register an instance.
"""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Protocol, cast

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import network_reason
from dynctl.base.tasks import end_tasks
from dynctl.wire.dynamo.discovery import EndpointId, Instance, instance_of, nats_instance_of
from dynctl.wire.dynamo.request_plane import (
    MAX_HANDSHAKE_BYTES,
    FrameDecoder,
    RequestDecoder,
    Requested,
    RoutedRequest,
    decode_body,
    encode_end,
    encode_handshake,
    encode_item,
    encode_prologue,
    encode_reply,
    format_host_port,
    parse_control,
    parse_host_port,
    parse_payload,
    printable,
)

READ_BYTES: Final = 256 * 1024
_BACKLOG: Final = 1024
_REFUSING: Final = 256
"""Refusals at once that are sent to requesters over NATS; further ones are replies."""
_CLOSING_S: Final = 1.0
"""How long a requester may take to close a connection whose answer is complete."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of one server: counts, bytes and seconds.

    ``connections``: above it one makes room, of the address that has most: one that never brought a
    request, or none for longest. ``requests``: answers at once; a request above it is refused.
    ``buffered_bytes``: of requests that are not complete, of all connections; above it the largest
    of the address that has most is closed. ``receive_s``: from the first to the last byte of a
    request. ``connect_s``: to connect to the requester. ``stall_s``: how long a requester may read
    nothing. ``stop_s``: how long a handler may go on after ``stopped``.
    """

    connections: int = 1024
    requests: int = 2048
    request_bytes: int = 64 * 1024 * 1024
    buffered_bytes: int = 256 * 1024 * 1024
    receive_s: float = 30.0
    connect_s: float = 5.0
    stall_s: float = 60.0
    stop_s: float = 10.0


@dataclass(frozen=True, slots=True)
class PlaneRequest:
    """One request. ``body`` is decoded as the endpoint's kind of body."""

    endpoint: EndpointId
    instance_id: int
    request_id: str
    headers: Mapping[str, str]
    body: Any
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    _when_stopped: list[Callable[[], None]] = field(default_factory=list)

    def on_stop(self, call: Callable[[], None]) -> None:
        """Call this when the requester wants no more items."""
        if self.stopped.is_set():
            call()
        self._when_stopped.append(call)

    def stop(self) -> None:
        """The requester wants no more items."""
        if not self.stopped.is_set():
            self.stopped.set()
            for call in self._when_stopped:
                call()


class RequestRefusal(Exception):
    """Why a request gets no answer; the requester receives the text."""


class _Gone(Exception):
    """The requester closed the connection, cancelled the request or reads nothing."""


class AnswerLost(Exception):
    """The answer ends without an end, so that the requester may ask another worker."""


ErrorKind = Literal[
    "InvalidArgument", "Unknown", "CannotConnect", "ConnectionTimeout", "Disconnected",
    "WorkerUnavailable",
]  # fmt: skip
"""The types of Dynamo's errors that are sent here."""

_ERRORS: Final[Mapping[ErrorKind, tuple[str, str]]] = {
    "InvalidArgument": ("InvalidRequest", "invalid_argument"),
    "Unknown": ("Internal", "unknown"),
    "CannotConnect": ("Unavailable", "cannot_connect"),
    "ConnectionTimeout": ("DeadlineExceeded", "connection_timeout"),
    "Disconnected": ("Unavailable", "disconnected"),
    "WorkerUnavailable": ("Unavailable", "worker_unavailable"),
}
"""Type -> class and reason."""


class ErrorItem(Exception):
    """Ends an answer with an error of a kind that Dynamo has."""

    def __init__(self, message: str, kind: "ErrorKind" = "Unknown") -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind


Handler = Callable[[PlaneRequest], AsyncIterator[Any]]


class _ServedEndpoint(NamedTuple):
    handler: Handler
    body: Any
    admit: Callable[[PlaneRequest], None]


@dataclass(slots=True)
class _PeerConnection:
    """A connection of a requester. ``used``: it brought a request that was accepted; ``since``:
    when that was, or when it began."""

    peer: str
    task: asyncio.Task[None]
    requests: RequestDecoder
    since: float
    used: bool = False


@dataclass(slots=True)
class ServerCounts:
    """Requests since the start: accepted, refused, and answers that ended early."""

    accepted: int = 0
    refused: int = 0
    cancelled: int = 0
    failed: int = 0


class Subjects(Protocol):
    """Receives requests over NATS; see `dynctl.adapters.nats.requests.NatsListener`."""

    def listen(self, subject: str, take: Callable[[bytes, Mapping[str, str]], str]) -> None:
        """Give ``take`` the bodies and headers of a subject's requests; it returns the reply."""
        ...

    def forget(self, subject: str) -> None: ...

    async def listening(self) -> None:
        """Return once all subjects are listened to. Raises dynctl.base.errors.Unreachable."""
        ...

    async def hush(self) -> None:
        """Receive nothing more."""
        ...

    async def close(self) -> None: ...


class RequestServer:
    """Listens at ``host``, which workers register too; ``port`` 0: a free one.

    ``advertised`` replaces the host in what is registered. ``nats``: requests arrive there, and
    host and port are not used.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        advertised: str | None = None,
        limits: ServerLimits = ServerLimits(),
        nats: Subjects | None = None,
    ) -> None:
        self.counts = ServerCounts()
        self._host = host
        self._port = port
        self._advertised = advertised or host
        self._limits = limits
        self._nats = nats
        self._subjects: dict[EndpointId, str] = {}
        self._endpoints: dict[EndpointId, _ServedEndpoint] = {}
        self._ids: set[int] = set()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.StreamWriter, _PeerConnection] = {}
        self._buffered = 0
        self._answers: set[asyncio.Task[None]] = set()
        self._refusing: set[asyncio.Task[None]] = set()
        self._draining = ""

    @property
    def running(self) -> int:
        """Answers that are being sent."""
        return len(self._answers)

    def serve(
        self,
        endpoint: EndpointId,
        handler: Handler,
        *,
        body: Any = Any,
        admit: Callable[[PlaneRequest], None] = lambda request: None,
    ) -> None:
        """Answer requests to this endpoint; ``body``: the msgspec type of their bodies."""
        self._endpoints[endpoint] = _ServedEndpoint(handler, body, admit)

    def remove(self, endpoint: EndpointId) -> None:
        """Refuse further requests to this endpoint."""
        self._endpoints.pop(endpoint, None)
        subject = self._subjects.pop(endpoint, None)
        if self._nats is not None and subject is not None:
            self._nats.forget(subject)

    def instance(self, endpoint: EndpointId, instance_id: int) -> Instance:
        """The instance to register; from then on requests for this id are accepted.

        Over NATS an endpoint has one instance, the last one: each id has its own subject.
        """
        if self._nats is not None:
            return self._at_subject(self._nats, nats_instance_of(endpoint, instance_id))
        if self._server is None:
            raise RuntimeError("the server does not listen yet")
        self._ids.add(instance_id)
        return instance_of(endpoint, instance_id, self._location)

    def is_own(self, instance: Instance) -> bool:
        """Whether requests for this instance reach this process: it listens at the address."""
        if self._nats is not None:
            return instance.address in self._subjects.values()
        return instance.transport == "tcp" and (
            instance.address.partition("/")[0] == self._location
        )

    @property
    def _location(self) -> str:
        return format_host_port(self._advertised, self.port)

    def _at_subject(self, nats: Subjects, instance: Instance) -> Instance:
        endpoint, subject = instance.endpoint, instance.address
        self._ids.add(instance.instance_id)
        before = self._subjects.get(endpoint)
        if before != subject:
            if before is not None:
                nats.forget(before)
            self._subjects[endpoint] = subject
            path = f"{instance.instance_id:x}/{'/'.join(endpoint)}"
            nats.listen(subject, partial(self._from_nats, path))
        return instance

    async def listening(self) -> None:
        """Return once all instances can be requested. Raises dynctl.base.errors.Unreachable."""
        if self._nats is not None:
            await self._nats.listening()

    @property
    def port(self) -> int:
        """Of the listener; 0 over NATS."""
        if self._nats is not None:
            return 0
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Listen. Raises OSError."""
        if self._nats is not None:
            return
        found = await asyncio.get_running_loop().getaddrinfo(
            self._host or None, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        address = str(found[0][4][0])
        self._server = await asyncio.start_server(
            self._receive, address, self._port, limit=READ_BYTES, backlog=_BACKLOG
        )

    async def drain(self, seconds: float, reason: str = "the worker is shutting down") -> bool:
        """Refuse new requests and wait for the running ones; False if some still run."""
        if self._nats is not None:
            # A requester hears at once that nothing listens any more, and takes another worker.
            await self._nats.hush()
        self._draining = reason
        if self._answers:
            await asyncio.wait(self._answers, timeout=seconds)
        return not self._answers

    def resume(self) -> None:
        """Accept requests again after a drain."""
        self._draining = ""

    async def close(self) -> None:
        """Stop listening, and end every request; leaves no connection or task."""
        if self._server is not None:
            self._server.close()
        if self._nats is not None:
            await self._nats.close()
        tasks = [connection.task for connection in self._connections.values()]
        await end_tasks([*tasks, *self._answers, *self._refusing])
        for writer in list(self._connections):
            writer.transport.abort()

    # -- requests

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        if len(self._connections) >= self._limits.connections:
            self._make_room()
        address = writer.get_extra_info("peername")
        connection = self._connections[writer] = _PeerConnection(
            str(address[0]) if isinstance(address, tuple) else "",
            task,
            RequestDecoder(self._limits.request_bytes),
            asyncio.get_running_loop().time(),
        )
        try:
            await self._requests(connection, reader, writer)
        except (OSError, TimeoutError, WireError, asyncio.CancelledError) as error:
            if isinstance(error, WireError):
                _log.warning("a connection of the request plane was closed: %s", error)
        finally:
            self._drop(writer)
            writer.transport.abort() if task.cancelling() else writer.close()

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        connection = self._connections.pop(writer, None)
        if connection is not None:
            self._buffered -= connection.requests.waiting

    def _make_room(self) -> None:
        """Close a connection for a new one. Requests that run have connections of their own."""
        peers = Counter(connection.peer for connection in self._connections.values())
        self._close_one(lambda one: (-peers[one.peer], one.used, one.since))

    def _make_memory(self) -> None:
        """Close the connection whose request is the largest that is not complete."""
        sizes: Counter[str] = Counter()
        for connection in self._connections.values():
            sizes[connection.peer] += connection.requests.waiting
        self._close_one(lambda one: (-sizes[one.peer], -one.requests.waiting))

    def _close_one(self, order: Callable[[_PeerConnection], Any]) -> None:
        writer, connection = min(self._connections.items(), key=lambda item: order(item[1]))
        self._drop(writer)
        connection.task.cancel()

    async def _requests(
        self,
        connection: _PeerConnection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        requests = connection.requests
        deadline: float | None = None
        loop = asyncio.get_running_loop()
        while True:
            if not requests.midway:
                deadline = None
            elif deadline is None:
                deadline = loop.time() + self._limits.receive_s
            async with asyncio.timeout_at(deadline):
                data = await reader.read(READ_BYTES)
            if not data:
                return
            requests.feed(data)
            self._buffered += len(data)
            while (received := self._next_request(requests)) is not None:
                deadline = None
                refusal = self.accept(received)
                if not refusal:
                    connection.used, connection.since = True, loop.time()
                writer.write(encode_reply(refusal))
                async with asyncio.timeout(self._limits.stall_s):
                    await writer.drain()

    def _next_request(self, requests: RequestDecoder) -> RoutedRequest | None:
        before = requests.waiting
        try:
            received = requests.next_request()
        finally:
            self._buffered -= before - requests.waiting
        if received is None and self._buffered > self._limits.buffered_bytes:
            self._make_memory()
        return received

    def accept(self, received: RoutedRequest) -> str:
        """Start to answer; "" or the reason of the refusal."""
        refusal = self._refusal_of(received.path)
        if refusal:
            self.counts.refused += 1
            return refusal
        try:
            requested = _read_request(received.payload)
        except WireError as error:
            self.counts.refused += 1
            return f"invalid request: {error}"
        self.counts.accepted += 1
        self._begin(self._answer(received, requested))
        return ""

    def _from_nats(self, path: str, payload: bytes, headers: Mapping[str, str]) -> str:
        """As :meth:`accept`. Dynamo's frontends do not read the reply, so that a refusal of what
        can be answered has to be the beginning of an answer."""
        received = RoutedRequest(path, headers, payload)
        refusal = self._refusal_of(path)
        if not refusal and len(payload) > self._limits.request_bytes:
            refusal = (
                f"invalid request: {len(payload):,} bytes, over {self._limits.request_bytes:,}"
            )
        if not refusal:
            return self.accept(received)
        self.counts.refused += 1
        with suppress(WireError):
            requested = _read_request(payload)
            if len(self._refusing) < _REFUSING:
                self._begin(self._refuse(requested, refusal), self._refusing)
                return ""
        return refusal

    def _begin(
        self,
        answering: Coroutine[Any, Any, None],
        among: "set[asyncio.Task[None]] | None" = None,
    ) -> None:
        tasks = self._answers if among is None else among
        task = asyncio.create_task(answering, name="plane-answer")
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _refusal_of(self, path: str) -> str:
        instance, *where = path.split("/")
        known = len(where) == 3 and EndpointId(*where) in self._endpoints
        if not known or not _is_one_of(instance, self._ids):
            return f"Server unavailable: unknown endpoint {printable(path)}"
        if self._draining:
            return f"Server unavailable: {self._draining}"
        if len(self._answers) >= self._limits.requests:
            return f"Server unavailable: {len(self._answers):,} requests are running, the limit"
        return ""

    # -- answers

    async def _answer(self, received: RoutedRequest, requested: Requested) -> None:
        instance, *where = received.path.split("/")
        endpoint = EndpointId(*where)
        served = self._endpoints[endpoint]
        if (called := await self._call(requested)) is None:
            return
        reader, writer = called
        try:
            writer.write(encode_handshake(requested.subject))
            try:
                request = PlaneRequest(
                    endpoint,
                    int(instance, 16),
                    requested.request_id,
                    received.headers,
                    decode_body(requested.body, requested.codec, served.body),
                )
                served.admit(request)
            except (WireError, RequestRefusal) as error:
                self.counts.refused += 1
                text = f"invalid request: {error}" if isinstance(error, WireError) else str(error)
                writer.write(encode_prologue(text))
            else:
                await self._stream(served.handler, request, requested.codec, reader, writer)
            await _finish(reader, writer)
        except _Gone:
            self.counts.cancelled += 1
            writer.transport.abort()
        finally:
            writer.close()

    async def _refuse(self, requested: Requested, refusal: str) -> None:
        """Send the reason as the beginning of the answer."""
        if (called := await self._call(requested)) is None:
            return
        reader, writer = called
        try:
            writer.write(encode_handshake(requested.subject) + encode_prologue(refusal))
            await _finish(reader, writer)
        finally:
            writer.close()

    async def _call(
        self, requested: Requested
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection to the requester, None if there is none."""
        try:
            async with asyncio.timeout(self._limits.connect_s):
                host, port = parse_host_port(requested.call_home)
                return await asyncio.open_connection(host, port, limit=READ_BYTES)
        except (OSError, TimeoutError) as error:
            self.counts.failed += 1
            late = isinstance(error, TimeoutError) and not str(error)
            reason = (
                f"no connection within {self._limits.connect_s:g} s"
                if late
                else network_reason(error)
            )
            _log.warning("the requester at %s is not reachable: %s", requested.call_home, reason)
            return None

    async def _stream(
        self,
        handler: Handler,
        request: PlaneRequest,
        codec: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Send the answer. Raises _Gone."""
        sending = asyncio.create_task(self._send(handler, request, codec, writer))
        listening = asyncio.create_task(_listen(reader, request.stop))
        stopping: asyncio.Task[Any] = asyncio.create_task(request.stopped.wait())
        try:
            await asyncio.wait([sending, listening, stopping], return_when="FIRST_COMPLETED")
            if not sending.done() and not listening.done():
                waited = [sending, listening]
                await asyncio.wait(
                    waited, timeout=self._limits.stop_s, return_when="FIRST_COMPLETED"
                )
            if not sending.done():
                raise _Gone
            sending.result()
        finally:
            await end_tasks([sending, listening, stopping])

    async def _send(
        self, handler: Handler, request: PlaneRequest, codec: str, writer: asyncio.StreamWriter
    ) -> None:
        # The prologue does not wait for the first item, which may take minutes.
        writer.write(encode_prologue())
        try:
            async with aclosing(cast(Any, handler(request))) as items:
                async for item in items:
                    writer.write(encode_item(item, codec))
                    await self._drain(writer)
        except ErrorItem as error:
            self.counts.failed += 1
            writer.write(encode_item(error_item(str(error), error.kind), codec))
        except _Gone:
            raise
        except AnswerLost as error:
            _log.warning("an answer of %s was lost: %s", request.endpoint, error)
            raise _Gone from error
        except Exception as error:
            self.counts.failed += 1
            _log.exception("a request to %s failed", request.endpoint)
            name = type(error).__name__
            writer.write(encode_item(error_item(f"internal error: {name}", "Unknown"), codec))
        writer.write(encode_end(codec))
        await self._drain(writer)

    async def _drain(self, writer: asyncio.StreamWriter) -> None:
        if writer.transport.get_write_buffer_size() == 0 and not writer.is_closing():
            return
        try:
            async with asyncio.timeout(self._limits.stall_s):
                await writer.drain()
        except (OSError, TimeoutError) as error:
            raise _Gone from error


def error_item(message: str, kind: ErrorKind) -> dict[str, Any]:
    """An item that ends an answer, as a 1.6.1 worker sends it for its exceptions.

    Dynamo's clients read all of it or nothing: an unknown type or class is another error there.
    """
    class_name, reason = _ERRORS[kind]
    error: dict[str, Any] = {
        "error_type": kind if kind == "WorkerUnavailable" else {"Backend": kind},
        "class": class_name,
        "reason": f"backend.{reason}",
        "message": message,
        "diagnostic": message,
    }
    if kind == "InvalidArgument":
        # What the client of a frontend reads; without it only that its request is invalid.
        error["public"] = {"type": "message", "message": message}
    return {"event": "error", "error": error}


def _read_request(payload: bytes) -> Requested:
    """Raises WireError for what cannot be answered."""
    requested = parse_payload(payload)
    parse_host_port(requested.call_home)
    return requested


async def _finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let the requester close first, for a moment."""
    with suppress(OSError, TimeoutError, WireError):
        async with asyncio.timeout(_CLOSING_S):
            await writer.drain()
            writer.write_eof()
            while await reader.read(READ_BYTES):
                pass


async def _listen(reader: asyncio.StreamReader, stop: Callable[[], None]) -> None:
    """Read control messages; returns when the answer is to be dropped at once."""
    frames = FrameDecoder()
    with suppress(OSError, WireError):
        while True:
            while (frame := frames.next_frame(MAX_HANDSHAKE_BYTES)) is not None:
                message = parse_control(frame)
                if message == "stop":
                    stop()
                elif message == "kill":
                    return
            data = await reader.read(READ_BYTES)
            if not data:
                return
            frames.feed(data)


def _is_one_of(text: str, ids: set[int]) -> bool:
    try:
        return len(text) <= 16 and int(text, 16) in ids
    except ValueError:
        return False
