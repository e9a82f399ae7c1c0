"""A TCP relay between a process and a server: it cuts, delays, throttles, drops and resets."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self

_CHUNK: Final = 65_536
#: SO_LINGER that makes the end of a connection a reset.
_RESET: Final = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class Link:
    """How the relay passes bytes on. ``delay_s`` holds back each piece; ``bytes_a_second`` bounds
    the rate, 0: it does not; ``dropped``: the direction of which nothing arrives, without an error.
    """

    delay_s: float = 0.0
    bytes_a_second: int = 0
    dropped: Literal["", "to", "from", "both"] = ""


class Relay:
    """Listens at ``port`` of a ``host`` while it is entered. ``to`` is the direction to the server,
    whose port it gets."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._host = host
        self.link = Link()
        self.port = 0
        self._server_port = port
        self._refuses = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._accept, self._host, 0), self._loop
        ).result()
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextmanager
    def with_link(self, link: Link) -> Iterator[None]:
        """Pass bytes on in this way until the end of the block."""
        self.link = link
        try:
            yield
        finally:
            self.link = Link()

    @contextmanager
    def cut(self) -> Iterator[None]:
        """End all connections, and each new one at once, until the end of the block."""
        self._refuses = True
        self.reset()
        try:
            yield
        finally:
            self._refuses = False

    def reset(self) -> None:
        """End all connections with a reset."""
        asyncio.run_coroutine_threadsafe(self._reset(), self._loop).result()

    async def _reset(self) -> None:
        for writer in self._writers:
            sock: socket.socket = writer.get_extra_info("socket")
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def _close(self) -> None:
        self._server.close()
        await self._reset()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        try:
            there = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, there[1]}
        self._writers |= ends
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass("to", reader, there[1]))
                group.create_task(self._pass("from", there[0], writer))
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pass(
        self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while piece := await reader.read(_CHUNK):
                link = self.link
                if link.dropped in (way, "both"):
                    continue
                wait = link.delay_s
                if link.bytes_a_second:
                    wait += len(piece) / link.bytes_a_second
                if wait:
                    await asyncio.sleep(wait)
                writer.write(piece)
                await writer.drain()
        writer.transport.abort()
