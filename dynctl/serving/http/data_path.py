"""The connections of inference clients, without a general server between bytes and handler.

A connection is here as long as its requests are plain ones for inference. Any other request goes,
with all bytes from its first one on, to a connection of aiohttp, which keeps the transport. So both
never read parts of one request, and what is valid in all other requests is aiohttp's to decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from aiohttp import web

from dynctl.serving.http.errors import error_answer
from dynctl.serving.http.plain_requests import (
    ClientHandler,
    HeadReader,
    PlainBody,
    PlainRequest,
    PlainStream,
    may_be_plain,
    whole_answer,
)
from dynctl.serving.http.seats import Seat

#: Bytes behind a request that runs; more are read when it has ended.
_BEHIND_BYTES: Final = 64 * 1024
#: Reads in which a header may arrive; one in more pieces is aiohttp's.
_HEAD_READS: Final = 8
#: Seconds in which the rest of a body may arrive that its handler did not read.
_LINGER_S: Final = 10.0


class DataPath:
    """The inference endpoints of one listener, and the connections that use them.

    ``handlers`` by path. ``app``: of the other endpoints.
    ``hand_over`` makes aiohttp's connection for a seat. A header has at most ``header_bytes``; an
    idle connection is closed after ``keep_alive_s`` seconds.
    """

    def __init__(
        self,
        handlers: Mapping[str, ClientHandler],
        app: Mapping[Any, Any],
        hand_over: Callable[[Seat], asyncio.Protocol],
        *,
        header_bytes: int,
        keep_alive_s: float,
    ) -> None:
        self.handlers = handlers
        self.app = app
        self.hand_over = hand_over
        self.header_bytes = header_bytes
        self.keep_alive_s = keep_alive_s
        self.loop = asyncio.get_running_loop()
        self.open: set[DataConnection] = set()

    def connection(self, seat: Seat) -> asyncio.Protocol:
        return DataConnection(self, seat)

    async def close(self, grace_s: float) -> None:
        """Close idle connections; requests that run have ``grace_s`` seconds, and as many again to
        end after they are cancelled."""
        for connection in tuple(self.open):
            connection.force_close()
        running = {each.task for each in self.open if each.task is not None}
        if running:
            _, late = await asyncio.wait(running, timeout=grace_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=grace_s)
        for connection in tuple(self.open):
            connection.abort()


class DataConnection(asyncio.Protocol):
    """One connection; ``task`` answers its request, None between requests."""

    __slots__ = (
        *("_behind", "_body", "_closing", "_heads", "_idle_since", "_path", "_reading_paused"),
        *("_reads", "_remote", "_seat", "_timer", "_waiter", "task"),
        *("transport", "writing_paused"),
    )

    def __init__(self, path: DataPath, seat: Seat) -> None:
        self._path = path
        self._seat = seat
        self._remote: str | None = None
        self.transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None
        self.writing_paused = False
        #: What arrived of the next requests.
        self._behind = b""
        #: Reads of a header that is not complete.
        self._reads = 0
        self._heads = HeadReader()
        #: Of the request that runs, while it arrives.
        self._body: PlainBody | None = None
        self._closing = False
        self._reading_paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._idle_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # -- asyncio.Protocol ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._seat.take(transport, self):
            return
        path = self._path
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        peer = transport.get_extra_info("peername")
        self._remote = peer[0] if isinstance(peer, tuple) else None
        used = transport.get_extra_info("socket")
        if used is not None:
            with contextlib.suppress(OSError):
                used.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        path.open.add(self)
        self._idle_since = path.loop.time()
        self._timer = path.loop.call_later(path.keep_alive_s, self._check_idle)

    def data_received(self, data: bytes) -> None:
        if self._closing and self.task is None:
            return
        if self._body is not None:
            data = self._body.feed(data)
            if self._body.is_eof():
                self._body = None
            if not data:
                return
        if self.task is None:
            self._take(self._behind + data if self._behind else data)
            return
        self._behind += data
        if len(self._behind) > _BEHIND_BYTES:
            self.pause_reading()

    def pause_writing(self) -> None:
        self.writing_paused = True
        self._seat.wrote()

    def resume_writing(self) -> None:
        self.writing_paused = False
        self._release_waiter()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._closing = True
        self._path.open.discard(self)
        self._seat.lost()
        if self._timer is not None:
            self._timer.cancel()
        self._release_waiter()
        if self.task is not None:
            # A client that disconnects must stop its engine at once.
            self.task.cancel()

    # -- for its seat and its request ------------------------------------------------------

    def force_close(self) -> None:
        """Take no further request; close the connection now if it has none."""
        self._closing = True
        if self.task is None and self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._closing = True
        if self.transport is not None:
            self.transport.abort()

    async def drained(self) -> None:
        while self.writing_paused and self.transport is not None:
            self._waiter = self._path.loop.create_future()
            await self._waiter
        if self.transport is None:
            raise ConnectionResetError("the client disconnected")

    def pause_reading(self) -> None:
        if not self._reading_paused and self.transport is not None:
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._reading_paused and self.transport is not None:
            self._reading_paused = False
            self.transport.resume_reading()

    # -- inside ----------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        """Begin the request that ``data`` begins with, if its head is complete."""
        path, end = self._path, data.find(b"\r\n\r\n", 0, self._path.header_bytes)
        if end < 0:
            self._reads += 1
            waits = len(data) < path.header_bytes and self._reads < _HEAD_READS
            if waits and may_be_plain(data):
                self._seat.arrives()
                self._behind = data
            else:
                self._hand_over(data)
            return
        self._reads = 0
        end += 4
        request = self._heads.read(data, end)
        handler = None if request is None else path.handlers.get(request.path)
        if request is None or handler is None:
            self._hand_over(data)
            return
        after = end + request.content_length
        request.arrive(self, self._remote, path.app, data[end:after])
        self._behind = data[after:]
        if len(data) < after:
            self._body = request.content
        self._seat.begun()
        self.task = path.loop.create_task(self._answer(request, handler))

    async def _answer(self, request: PlainRequest, handler: ClientHandler) -> None:
        keeps = False
        try:
            try:
                answer = await handler(request)
            except ConnectionError:
                raise
            except Exception as error:
                answer = error_answer(error, request)
            if isinstance(answer, PlainStream):
                keeps = answer.complete and request.keep_alive
            else:
                keeps = self._send(answer, request)
                if self.writing_paused:
                    await self.drained()
            self._seat.ended()
            if self._body is not None:
                await self._read_rest(request.content)
        except ConnectionError:
            keeps = False
        except BaseException:
            self.abort()
            raise
        finally:
            self.task = None
            self._next(keeps=keeps)

    def _send(self, answer: web.StreamResponse, request: PlainRequest) -> bool:
        """Send a whole answer; whether the connection is kept afterwards."""
        transport = self.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client disconnected")
        keeps = request.keep_alive and not self._closing
        keeps = keeps and answer.headers.get("connection") != "close"
        transport.write(whole_answer(answer, close=not keeps))
        return keeps

    async def _read_rest(self, body: PlainBody) -> None:
        """Read what the handler left of a body. A connection that is closed before would be reset,
        and its client would not see the answer."""
        try:
            async with asyncio.timeout(_LINGER_S):
                while await body.readany():
                    pass
        except TimeoutError:
            self._closing = True

    def _next(self, *, keeps: bool) -> None:
        """A request has ended."""
        transport = self.transport
        if transport is None:
            return
        if not keeps or self._closing:
            transport.close()
            self._seat.wrote()  # the transport closes when its last bytes are read
            return
        self._idle_since = self._path.loop.time()
        if self._behind:
            behind, self._behind = self._behind, b""
            self.resume_reading()
            self._take(behind)

    def _hand_over(self, data: bytes) -> None:
        """Give the connection and what arrived of the next request to aiohttp."""
        transport = self.transport
        if transport is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._path.open.discard(self)
        self.transport = None
        self._closing = True
        other = self._path.hand_over(self._seat)
        transport.set_protocol(other)
        other.connection_made(transport)
        if self.writing_paused:
            other.pause_writing()
        if self._reading_paused:
            transport.resume_reading()
        other.data_received(data)

    def _check_idle(self) -> None:
        path, left = self._path, self._path.keep_alive_s
        if self.task is None:
            left += self._idle_since - path.loop.time()
            if left <= 0:
                self.force_close()
                return
        self._timer = path.loop.call_later(left, self._check_idle)

    def _release_waiter(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
