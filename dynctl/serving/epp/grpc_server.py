"""A gRPC server: HTTP/2 by the ``h2`` package, messages of bidirectional streams as bytes.

The streams of a gateway are many and short, and their messages small; grpcio's asyncio server costs
more CPU for them, and has no bound on what clients leave half sent (decision 0030).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol, cast
from urllib.parse import quote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import H2Error, StreamClosedError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from dynctl.base.acceptor import Acceptor
from dynctl.base.tasks import end_tasks
from dynctl.serving.http.connections import Certificate
from dynctl.serving.http.seats import network_of
from dynctl.serving.http.start import accept

_log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_SWEEP_S: Final = 0.5
_CLOSE_S: Final = 0.5
#: Seconds between two tracebacks in the log: a client may repeat what fails.
_TRACEBACK_S: Final = 60.0
#: Bytes of a stream that its peer does not read; above this no more of its data is acknowledged.
_LAGGING_BYTES: Final = 1 << 20
#: Bytes of a connection that its peer does not read; above this no more is read from it.
_UNREAD_BYTES: Final = 1 << 20
#: Part of the connections that one address may have.
_PEER_SHARE: Final = 0.75
#: Bytes of the names that answers refer back to; a peer may offer gigabytes for them.
_HEADER_TABLE: Final = 4096
_STREAM_WINDOW: Final = 1 << 20
_CONNECTION_WINDOW: Final = 16 << 20
#: Frames of a connection that one turn of the event loop takes.
_TURN_FRAMES: Final = 64
#: Frames without a message that a connection may send: at first and at most, and a second. Each
#: message allows more. What is above comes from the allowance of all connections together.
_ALLOWED: Final = 256.0
_MOST_ALLOWED: Final = 1024.0
_ALLOWED_PER_S: Final = 4.0
_PER_MESSAGE: Final = 32.0
_SHARED: Final = 2000.0
_SHARED_PER_S: Final = 2000.0
_LONGEST_PAUSE_S: Final = 5.0
#: What a frame counts: one that carries at least as many bytes nothing, headers as four.
_CARRIES: Final = 512
_HEADERS_COUNT: Final = 4
_PREFIX: Final = 5
_LONGEST_MESSAGE: Final = 1024
_HIGHEST_STREAM: Final = 2**31 - 1
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEAD: Final = 9
_HEADERS: Final = 1
_SETTINGS: Final = 4
_WINDOW_UPDATE: Final = 8
_BEGIN: Final = [(":status", "200"), ("content-type", "application/grpc")]


class Code(IntEnum):
    """gRPC's status codes, as far as they are used."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Bounds of one listener. Sizes in bytes, times in seconds.

    A connection begins within ``greeting_s`` with the preface of HTTP/2, after its handshake if
    there is one; without streams it is closed after ``idle_s``. Above a maximum of connections the
    one that is longest without streams makes room. ``held_bytes`` bounds what all streams hold:
    bytes that are not handled yet, and those that clients do not read. A stream whose client does
    not read its end within ``unread_s`` is reset.
    """

    connections: int = 1024
    streams: int = 4096
    header_bytes: int = 16 * 1024
    message_bytes: int = 16 * 1024 * 1024 + 64 * 1024
    held_bytes: int = 512 * 1024 * 1024
    greeting_s: float = 10.0
    idle_s: float = 600.0
    unread_s: float = 60.0


class Handler(Protocol):
    """One call: what the client sends. Called on the event loop; must not block."""

    def on_message(self, data: bytes) -> None: ...

    def on_half_close(self) -> None:
        """The client sends no more."""

    def on_closed(self) -> None:
        """The call is over, in any way; called once, also where the client does not read its
        end."""


Method = Callable[["Call"], Handler]
"""Begins a call; what it returns gets its messages."""


class Call:
    """One call, as its handler answers it."""

    __slots__ = (
        *("_connection", "_stream", "_buffer", "_out", "_held", "_begun", "_ending"),
        *("handler", "closed"),
    )

    def __init__(self, connection: _Connection, stream: int) -> None:
        self._connection = connection
        self._stream = stream
        self._buffer = bytearray()
        self._out = bytearray()
        self._held = 0
        self._begun = False
        self._ending: tuple[Code, str] | None = None
        self.handler: Handler | None = None
        self.closed = False

    @property
    def waits(self) -> bool:
        """Whether something of it waits to be sent."""
        return bool(self._out) or self._ending is not None or bool(self._held)

    def send(self, message: bytes) -> None:
        """Send a message; nothing happens once the call is over."""
        if self.closed or self._ending is not None:
            return
        server = self._connection.server
        self._out += b"\0" + len(message).to_bytes(4) + message
        server.unread += _PREFIX + len(message)
        self._connection.flush(self)
        if self._out and server.full(len(self._out)):
            self.drop_unread()
            self.finish(Code.RESOURCE_EXHAUSTED, server.held_problem)

    def finish(self, code: Code = Code.OK, message: str = "") -> None:
        """End the call after what was sent. Its handler is notified at once: what it holds does
        not wait for a client that does not read."""
        if self.closed or self._ending is not None:
            return
        self._ending = (code, message)
        if self._buffer:
            self._drop_unhandled()
        self._notify()
        self._connection.flush(self)

    def drop_unread(self) -> None:
        """Forget what the client has not read; its last message may be cut."""
        self._connection.server.unread -= len(self._out)
        self._out.clear()

    def over(self) -> None:
        """The call ended: its handler is notified once."""
        if not self.closed:
            self.closed = True
            if self._out:
                self.drop_unread()
            if self._buffer:
                self._drop_unhandled()
            if self.handler is not None:
                self._notify()

    def _drop_unhandled(self) -> None:
        self._connection.server.buffered -= len(self._buffer)
        self._buffer.clear()

    def _notify(self) -> None:
        # The handler refers to the call: such a cycle would keep both.
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.on_closed()


class _Frames:
    """The frames in the bytes of one connection, without their content."""

    def __init__(self) -> None:
        self._left = len(_PREFACE)  # of the frame that arrives
        self._head = b""

    def cut(self, data: bytes, streams: int) -> tuple[int, int]:
        """The end of at most _TURN_FRAMES frames, and what they count. ``streams``: that are open,
        which a change of settings or of the connection's window concerns."""
        at, count = 0, 0
        for _ in range(_TURN_FRAMES):
            skipped = min(self._left, len(data) - at)
            at += skipped
            self._left -= skipped
            if self._left or at == len(data):
                return at, count
            taken = data[at : at + _FRAME_HEAD - len(self._head)]
            at += len(taken)
            self._head += taken
            if len(self._head) < _FRAME_HEAD:
                return at, count
            length, kind = int.from_bytes(self._head[:3]), self._head[3]
            stream = int.from_bytes(self._head[5:]) & _HIGHEST_STREAM
            self._left, self._head = length, b""
            if kind == _HEADERS:
                count += _HEADERS_COUNT
            elif length < _CARRIES:
                every = kind == _SETTINGS or (kind == _WINDOW_UPDATE and not stream)
                count += 1 + (streams // 16 if every else 0)
        return at, count


class GrpcServer:
    """One listener. ``methods``: path -> what begins a call. ``certificate`` None: without TLS.
    ``held``: bytes that handlers keep of what they received."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        limits: GrpcLimits,
        certificate: Certificate | None = None,
        held: Callable[[], int] = lambda: 0,
    ) -> None:
        self.methods = methods
        self.limits = limits
        self._certificate = certificate
        self._held = held
        #: Bytes of messages that are not complete.
        self.buffered = 0
        #: Bytes of messages that clients have not read.
        self.unread = 0
        self._traceback_at = -_TRACEBACK_S
        self._connections: set[_Connection] = set()
        self._peers: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._acceptor: Acceptor | None = None
        self._shared = _SHARED
        self._shared_at = 0.0

    def start(self, listener: socket.socket) -> None:
        """Accept connections of a bound socket. Raises StartError."""
        accept(listener, _BACKLOG)
        self._acceptor = Acceptor(listener, self._take)
        self._spawn(self._sweep(), "idle gRPC connections")

    @property
    def listening(self) -> bool:
        return self._acceptor is not None

    def drain(self) -> None:
        """Ask clients to begin new calls elsewhere; running ones go on."""
        for connection in tuple(self._connections):
            connection.go_away()

    async def close(self) -> None:
        """End everything."""
        if self._acceptor is not None:
            self._acceptor.close()
        await end_tasks(self._tasks)
        for connection in tuple(self._connections):
            connection.close()
        # What was sent last is written first; a TLS client may not take part in the end.
        loop = asyncio.get_running_loop()
        end = loop.time() + _CLOSE_S
        while self._connections and loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for connection in tuple(self._connections):
            connection.abort()

    def full(self, call_bytes: int) -> bool:
        """Whether a call that waits for the rest of a message must end. (One alone has its limit
        anyway.)"""
        held = self.buffered + self.unread + self._held()
        return held > self.limits.held_bytes and held > call_bytes

    @property
    def held_problem(self) -> str:
        return f"all streams together have {self.limits.held_bytes:,} bytes, the maximum"

    def log_failure(self) -> None:
        """Log the exception that a handler raised; with its traceback once a minute."""
        now = asyncio.get_running_loop().time()
        shown = now - self._traceback_at >= _TRACEBACK_S
        if shown:
            self._traceback_at = now
        _log.error("a gRPC call failed", exc_info=shown)

    def draw(self, count: float, now: float) -> float:
        """Take from the allowance of all connections; the seconds to wait for it."""
        refilled = self._shared + (now - self._shared_at) * _SHARED_PER_S
        self._shared = min(_SHARED, refilled) - count
        self._shared_at = now
        return max(0.0, -self._shared / _SHARED_PER_S)

    def left(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            self._peers[connection.peer] -= 1
            if not self._peers[connection.peer]:
                del self._peers[connection.peer]

    # -- inside ----------------------------------------------------------------------------

    def _spawn(self, work: Any, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _take(self, accepted: socket.socket, address: Any) -> None:
        connection = _Connection(self, network_of(address))
        if not self._admit(connection):
            accepted.close()
            return
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.handshake = self._spawn(self._open(connection, accepted), "gRPC handshake")

    def _admit(self, connection: _Connection) -> bool:
        """Whether there is room; the connection that is longest without calls makes it."""
        most, peer = self.limits.connections, connection.peer
        share = max(1, int(most * _PEER_SHARE))
        if self._peers[peer] >= share:
            self._make_room(peer)
        elif len(self._connections) >= most:
            self._make_room(None)
        if self._peers[peer] >= share or len(self._connections) >= most:
            return False
        self._connections.add(connection)
        self._peers[peer] += 1
        return True

    def _make_room(self, peer: str | None) -> None:
        idle = [
            connection
            for connection in self._connections
            if connection.idle and (peer is None or connection.peer == peer)
        ]
        if idle:
            min(idle, key=lambda one: one.since).abort()

    async def _open(self, connection: _Connection, accepted: socket.socket) -> None:
        loop, certificate = asyncio.get_running_loop(), self._certificate
        try:
            if certificate is None:
                await loop.connect_accepted_socket(lambda: connection, accepted)
            else:
                await loop.connect_accepted_socket(
                    lambda: connection,
                    accepted,
                    ssl=certificate.context,
                    ssl_handshake_timeout=self.limits.greeting_s,
                )
        except (OSError, EOFError):
            accepted.close()
            self.left(connection)
        except asyncio.CancelledError:
            accepted.close()
            self.left(connection)
            raise

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self.limits.greeting_s / 2))
            now = asyncio.get_running_loop().time()
            for connection in tuple(self._connections):
                connection.sweep(now)


class _Connection(asyncio.Protocol):
    """One HTTP/2 connection."""

    def __init__(self, server: GrpcServer, peer: str) -> None:
        self.server = server
        self.peer = peer
        self.handshake: asyncio.Task[None] | None = None
        limits = server.limits
        self._h2 = H2Connection(
            H2Configuration(
                client_side=False, header_encoding="latin-1", validate_outbound_headers=False
            )
        )
        self._h2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: limits.streams,
                SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
                SettingCodes.MAX_HEADER_LIST_SIZE: limits.header_bytes,
                SettingCodes.ENABLE_CONNECT_PROTOCOL: 0,
            },
        )
        # h2 applies its own default until the peer acknowledges ours.
        self._h2.decoder.max_header_list_size = limits.header_bytes
        self._calls: dict[int, Call] = {}
        #: Calls whose end the peer has not read, and since when.
        self._unread_ends: dict[Call, float] = {}
        self._transport: asyncio.Transport | None = None
        self._paused = self._reading = self._leaving = self._ended = False
        #: Nothing is read until the peer reads.
        self._deaf = False
        self._writing: asyncio.Handle | None = None
        self._frames = _Frames()
        self._unread = b""
        self._allowed, self._allowed_at = _ALLOWED, asyncio.get_running_loop().time()
        #: Takes what is left to read, in a later turn or when there is an allowance for it.
        self._later: asyncio.Handle | None = None
        self._stopped = False
        self._greeted = False
        #: Since when it is without calls, not read by its peer, or ended.
        self.since = asyncio.get_running_loop().time()

    @property
    def idle(self) -> bool:
        """Whether no call would end with it."""
        return not self._calls

    # -- the transport ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.since = asyncio.get_running_loop().time()
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_CONNECTION_WINDOW)
        self._write()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.server.left(self)
        for handle in (self._writing, self._later):
            if handle is not None:
                handle.cancel()
        for call in tuple(self._calls.values()):
            call.over()
        self._calls.clear()
        self._unread_ends.clear()

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if self._later is None:
            self._receive()

    def _receive(self) -> None:
        """Take frames, at most those of one turn and of the allowance."""
        self._later = None
        if self._transport is None or self._ended:
            self._unread = b""
            return
        end, count = self._frames.cut(self._unread, len(self._calls))
        data, self._unread = self._unread[:end], self._unread[end:]
        self._reading = True
        try:
            for event in self._h2.receive_data(data):
                self._take(event)
        except H2Error as error:
            _log.debug("a gRPC connection is closed: %s", error)
            self._write()
            self.close()
        finally:
            self._reading = False
            self._write()
        self._go_on(count)

    def _go_on(self, count: int) -> None:
        """Read on: at once, in the next turn, or when there is an allowance for what was read."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        earned = (now - self._allowed_at) * _ALLOWED_PER_S
        self._allowed = min(_MOST_ALLOWED, self._allowed + earned) - count
        self._allowed_at = now
        pause = 0.0
        if self._allowed < 0:
            pause = min(_LONGEST_PAUSE_S, self.server.draw(-self._allowed, now))
            self._allowed = 0.0
        if pause or self._unread:
            self._later = loop.call_later(pause, self._receive)
        self._set_reading()

    def _set_reading(self) -> None:
        stopped = self._deaf or self._later is not None
        if stopped == self._stopped or self._transport is None or self._transport.is_closing():
            return
        self._stopped = stopped
        if stopped:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._deaf:
            self._deaf = False
            self._set_reading()
        for call in tuple(self._calls.values()):
            self.flush(call)

    def close(self) -> None:
        if self._transport is not None and not self._ended:
            self._ended, self.since = True, asyncio.get_running_loop().time()
            self._transport.close()

    def abort(self) -> None:
        """Close at once; what was not sent is lost."""
        self.server.left(self)
        if self._transport is not None:
            self._transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()

    def go_away(self) -> None:
        """Take no new calls. (h2 would take no more of the running ones either.)"""
        if self._leaving or self._transport is None:
            return
        self._leaving = True
        self._write()
        last = self._h2.highest_inbound_stream_id
        self._transport.write(GoAwayFrame(0, last_stream_id=last).serialize())
        if not self._calls:
            self.close()

    def sweep(self, now: float) -> None:
        """Close the connection if it waited too long, and reset calls whose end is not read."""
        limits = self.server.limits
        waited = now - self.since
        for call, since in tuple(self._unread_ends.items()):
            if now - since > limits.unread_s:
                self._reset(call)
        if (self._ended or self._deaf) and waited > limits.greeting_s:
            self.abort()
        elif self._ended or self._deaf:
            return
        elif not self._greeted and waited > limits.greeting_s:
            self.close()
        elif self._greeted and not self._calls and waited > limits.idle_s:
            self.go_away()

    # -- events ----------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            self._data(event)
        elif isinstance(event, RequestReceived):
            self._begin(event)
        elif isinstance(event, WindowUpdated):
            calls = (
                [self._calls.get(event.stream_id or 0)] if event.stream_id else self._calls.values()
            )
            for call in tuple(calls):
                if call is not None and call.waits:
                    self.flush(call)
        elif isinstance(event, StreamEnded):
            call = self._calls.get(event.stream_id or 0)
            if call is not None and call.handler is not None:
                call.handler.on_half_close()
        elif isinstance(event, StreamReset):
            self._forget(event.stream_id or 0)
        elif isinstance(event, RemoteSettingsChanged):
            self._greeted = True
            if self._h2.encoder.header_table_size > _HEADER_TABLE:
                self._h2.encoder.header_table_size = _HEADER_TABLE
            for call in tuple(self._calls.values()):
                self.flush(call)
        elif isinstance(event, ConnectionTerminated):
            self._leaving = True

    def _begin(self, event: RequestReceived) -> None:
        stream = event.stream_id or 0
        if self._leaving:
            self._h2.reset_stream(stream, ErrorCodes.REFUSED_STREAM)
            return
        headers = {str(name): str(value) for name, value in event.headers or ()}
        call = self._calls[stream] = Call(self, stream)
        kind = headers.get("content-type", "")
        if headers.get(":method") != "POST" or not kind.startswith("application/grpc"):
            self._h2.send_headers(stream, [(":status", "415")], end_stream=True)
            self._forget(stream)
            return
        path = headers.get(":path", "")
        method = self.server.methods.get(path)
        if method is None:
            call.finish(Code.UNIMPLEMENTED, f"unknown method {path[:200]}")
            return
        call.handler = method(call)

    def _data(self, event: DataReceived) -> None:
        stream = event.stream_id or 0
        size = event.flow_controlled_length or 0
        call = self._calls.get(stream)
        if call is None or call.handler is None or call._ending is not None:
            self._acknowledge(size, stream)
            return
        if len(call._out) > _LAGGING_BYTES:
            call._held += size
        else:
            self._acknowledge(size, stream)
        buffer = call._buffer
        before, begin = len(buffer), 0
        buffer += event.data or b""
        self.server.buffered += len(buffer) - before
        while len(buffer) - begin >= _PREFIX:
            length = int.from_bytes(buffer[begin + 1 : begin + _PREFIX])
            if buffer[begin]:
                call.finish(Code.UNIMPLEMENTED, "compressed messages are not supported")
                return
            if length > self.server.limits.message_bytes:
                most = self.server.limits.message_bytes
                call.finish(
                    Code.RESOURCE_EXHAUSTED, f"a message of {length:,} bytes; at most {most:,}"
                )
                return
            end = begin + _PREFIX + length
            if len(buffer) < end:
                break
            message = bytes(memoryview(buffer)[begin + _PREFIX : end])
            begin = end
            self._deliver(call, message)
            if call.closed or call._ending is not None:
                return
        del buffer[:begin]
        self.server.buffered -= begin
        if self.server.full(len(buffer)):
            call.finish(Code.RESOURCE_EXHAUSTED, self.server.held_problem)

    def _deliver(self, call: Call, message: bytes) -> None:
        try:
            assert call.handler is not None
            call.handler.on_message(message)
            self._allowed = min(_MOST_ALLOWED, self._allowed + _PER_MESSAGE)
        except Exception:
            self.server.log_failure()
            call.finish(Code.INTERNAL, "internal error; the log has the details")

    # -- sending ---------------------------------------------------------------------------

    def flush(self, call: Call) -> None:
        """Send what the peer's windows allow."""
        if call.closed or self._transport is None:
            return
        if not self._paused:
            try:
                self._send(call)
            except (H2Error, KeyError):
                self._forget(call._stream)
        if call._ending is not None and not call.closed:
            self._unread_ends.setdefault(call, asyncio.get_running_loop().time())
        if not self._reading and self._writing is None:
            self._writing = asyncio.get_running_loop().call_soon(self._write)

    def _send(self, call: Call) -> None:
        connection, stream, out = self._h2, call._stream, call._out
        if out and not call._begun:
            connection.send_headers(stream, _BEGIN)
            call._begun = True
        while out:
            room = min(
                connection.local_flow_control_window(stream), connection.max_outbound_frame_size
            )
            if room <= 0:
                return
            piece = bytes(memoryview(out)[:room])
            connection.send_data(stream, piece)
            del out[:room]
            self.server.unread -= len(piece)
        if call._held:
            held, call._held = call._held, 0
            self._acknowledge(held, stream)
        if call._ending is not None:
            code, text = call._ending
            end = [("grpc-status", str(int(code)))]
            if text:
                end.append(("grpc-message", quote(text[:_LONGEST_MESSAGE], safe=" ,:;/()'\"=-_.")))
            connection.send_headers(stream, end if call._begun else _BEGIN + end, end_stream=True)
            self._forget(stream)

    def _reset(self, call: Call) -> None:
        with suppress(H2Error, KeyError):
            self._h2.reset_stream(call._stream, ErrorCodes.CANCEL)
        self._forget(call._stream)
        self._write()

    def _acknowledge(self, size: int, stream: int) -> None:
        if size:
            try:
                self._h2.acknowledge_received_data(size, stream)
            except (StreamClosedError, KeyError):
                return

    def _forget(self, stream: int) -> None:
        call = self._calls.pop(stream, None)
        if call is not None:
            self._unread_ends.pop(call, None)
            held, call._held = call._held, 0
            self._acknowledge(held, stream)
            call.over()
        if not self._calls and self._transport is not None:
            self.since = asyncio.get_running_loop().time()
            if self._leaving:
                self._write()
                self.close()

    def _write(self) -> None:
        self._writing = None
        if self._transport is not None:
            data = self._h2.data_to_send()
            if data:
                self._transport.write(data)
                if self._paused and not self._deaf:
                    self._listen_less(self._transport)

    def _listen_less(self, transport: asyncio.Transport) -> None:
        """Read nothing more from a peer that leaves too much unread: each of its frames may need
        an answer."""
        if transport.get_write_buffer_size() > _UNREAD_BYTES:
            self._deaf, self.since = True, asyncio.get_running_loop().time()
            self._set_reading()
