"""Two proxies in front of an engine: one breaks connections, the other breaks answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with 0 seconds: close() sends a reset
_CHUNK = 64 * 1024


@dataclass
class Wire:
    """What happens to the bytes of connections. ``after``: bytes of the response that still pass.

    ``refuse``: the port is closed. ``stall``: nothing more is forwarded, the connection stays open.
    ``end``: the connection ends as ``close`` or ``reset``. ``corrupt``: later bytes are inverted.
    ``piece``: bytes of one write, ``delay_s`` before each write.
    """

    refuse: bool = False
    stall: bool = False
    end: str = ""
    corrupt: bool = False
    after: int = 0
    piece: int = _CHUNK
    delay_s: float = 0.0


PASS = Wire()


class TcpProxy:
    """Forwards one port to a target; `wire` applies to the bytes from the target from now on."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.wire = PASS

    def target(self, port: int) -> None:
        """Forward to another port from now on, and end the connections to the old one."""
        self._target = port
        self._cancel()

    async def open(self) -> None:
        """Listen; the port stays the same after `close`."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def set(self, wire: Wire) -> None:
        """Apply a fault, also to connections that exist."""
        self.wire = wire
        if wire.refuse:
            await self.close()
        else:
            await self.open()
            if wire.end and not wire.after:
                self._cancel()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upstream: asyncio.StreamWriter | None = None
        try:
            if self.wire.end and not self.wire.after:
                return
            source, upstream = await asyncio.open_connection("127.0.0.1", self._target)
            there = asyncio.create_task(_copy(reader, upstream))
            back = asyncio.create_task(self._back(source, writer))
            try:
                # A client that left, or a target that ended, ends both directions.
                await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
            finally:
                there.cancel()
                back.cancel()
                await asyncio.gather(there, back, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            if self.wire.end == "reset" or self.wire.refuse:
                connection = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            for one in (upstream, writer):
                if one is not None:
                    one.close()
            self._tasks.discard(task)

    async def _back(self, source: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed, faulty = 0, PASS
        while data := await source.read(_CHUNK):
            wire = self.wire
            if wire is not faulty:
                passed, faulty = 0, wire
            left = max(0, wire.after - passed)
            good, bad = data[:left], data[left:]
            if wire.stall or wire.end:
                bad_passes = b""
            else:
                bad_passes = bytes(255 - byte for byte in bad) if wire.corrupt else bad
            passed += len(data)
            await self._write(writer, good + bad_passes, wire)
            if bad and wire.end:
                return
            if bad and wire.stall:
                while self.wire is wire:  # noqa: ASYNC110  the fault ends from outside
                    await asyncio.sleep(0.02)
                return  # what was held back is lost: the connection cannot go on

    async def _write(self, writer: asyncio.StreamWriter, data: bytes, wire: Wire) -> None:
        for start in range(0, len(data), wire.piece):
            if wire.delay_s:
                await asyncio.sleep(wire.delay_s)
            writer.write(data[start : start + wire.piece])
            await writer.drain()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()


Answerer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Change = Callable[[bytes], bytes]


class AnswerProxy:
    """Forwards HTTP to an engine. ``instead`` answers in its place, ``change`` alters its bodies.

    Both apply to the paths that start with ``path``; ``change`` to each piece of the body.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.path = "/v1/"
        self.instead: Answerer | None = None
        self.change: Change | None = None
        self.port = 0

    def target(self, url: str) -> None:
        """Forward to another engine from now on."""
        self._url = url

    def clear(self) -> None:
        self.path, self.instead, self.change = "/v1/", None, None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[AnswerProxy]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5
        )
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        # Without a pool: a connection to the engine lives no longer than the client's.
        self._client = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        try:
            yield self
        finally:
            await self._client.close()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        faulty = request.path.startswith(self.path) and request.path != "/v1/models"
        if faulty and self.instead is not None:
            return await self.instead(request)
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name != "Host"}
        async with self._client.request(
            request.method, self._url + request.path_qs, data=body, headers=headers
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                data = self.change(piece) if faulty and self.change is not None else piece
                if data:
                    await response.write(data)
            return response
