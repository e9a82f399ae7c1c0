"""The floor of a Python frontend: bytes from one uvloop transport to the other, nothing else.

    python -m tests.bench.raw_proxy URL [URL ..]

Prints its port. It reads as much HTTP/1.1 as it needs to find the end of a request and of a
chunked answer; it routes nothing, checks nothing and bounds nothing. No frontend on asyncio
protocols can cost less for the same reads and writes.
"""

import asyncio
import itertools
import sys
from collections.abc import Iterator
from typing import cast
from urllib.parse import urlsplit

import uvloop

_END = b"0\r\n\r\n"


class _Engine(asyncio.Protocol):
    """A connection to an engine, kept alive; ``client`` is whose answer it carries."""

    def __init__(self, idle: list["_Engine"]) -> None:
        self._idle = idle
        self.client: asyncio.Transport | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        assert self.client is not None
        self.client.write(data)
        if data.endswith(_END):
            self.client = None
            self._idle.append(self)


class _Client(asyncio.Protocol):
    def __init__(self, turn: Iterator[tuple[tuple[str, int], list[_Engine]]]) -> None:
        self._turn = turn
        self._pending = b""
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        data = self._pending + data if self._pending else data
        end = data.find(b"\r\n\r\n")
        at = data.find(b"content-length: ")
        if end < 0 or len(data) < end + 4 + int(data[at + 16 : data.index(b"\r\n", at)]):
            self._pending = data
            return
        self._pending = b""
        address, idle = next(self._turn)
        if idle:
            self._send(idle.pop(), data)
        else:
            self._task = asyncio.get_running_loop().create_task(self._connect(address, idle, data))

    async def _connect(self, address: tuple[str, int], idle: list[_Engine], data: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, engine = await loop.create_connection(lambda: _Engine(idle), *address)
        self._send(engine, data)

    def _send(self, engine: _Engine, data: bytes) -> None:
        assert engine.transport is not None
        engine.client = self._transport
        engine.transport.write(data)


async def serve(urls: list[str]) -> None:
    parts = [urlsplit(url) for url in urls]
    engines: list[tuple[tuple[str, int], list[_Engine]]] = [
        ((one.hostname or "", one.port or 80), []) for one in parts
    ]
    turn = itertools.cycle(engines)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Client(turn), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1:]))
