"""Clients on bare sockets, for tests of bytes that no client library sends."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from tests.dynctl.serving.fleets import chat_body
from tests.waiting import patience

CHAT = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
)


class Raw:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, Any]]:
        """Status and JSON body of the next response."""
        async with asyncio.timeout(patience(10)):
            head = await self.reader.readuntil(b"\r\n\r\n")
            size = next(
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            )
            body = await self.reader.readexactly(size)
        return int(head.split()[1]), json.loads(body)

    async def closed(self, seconds: float = 10.0) -> bytes:
        """Wait until the server closes; what it sent before."""
        async with asyncio.timeout(patience(seconds)):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


@asynccontextmanager
async def raw(port: int, source: str = "127.0.0.1") -> AsyncIterator[Raw]:
    """A connection from the address ``source`` of this machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def chat_bytes(text: str = "hello", *, encoding: str = "", body: bytes | None = None) -> bytes:
    """A whole chat request; ``body`` replaces its JSON."""
    content = json.dumps(chat_body(text)).encode() if body is None else body
    extra = f"content-encoding: {encoding}\r\n".encode() if encoding else b""
    return CHAT + extra + f"content-length: {len(content)}\r\n\r\n".encode() + content
