"""An engine whose streams are made to cost much: ``python costly_engine.py KIND``. Stdlib only.

It prints its port. Each request gets a stream of its kind that does not end. A process of its own,
so that what it costs is not taken for what the frontend costs.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Final

_EVENT: Final = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
_CHUNK: Final = 16 * 1024 * 1024


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _many(piece: bytes) -> Iterator[bytes]:
    """A piece without end, as fast as it is taken."""
    yield framed(_EVENT)
    yield from repeat(piece * max(1, 65_536 // len(piece)))


def _byte_by_byte() -> Iterator[bytes]:
    """The largest chunk, most of it at once, and the rest in a packet for each byte."""
    yield framed(_EVENT) + b"%x\r\n" % _CHUNK
    yield b"x" * (_CHUNK - 300_000)
    yield from repeat(b"x")


def _bytes_in_chunks() -> Iterator[bytes]:
    """Chunks of a byte each, which are events together."""
    return _many(b"".join(framed(_EVENT[at : at + 1]) for at in range(len(_EVENT))))


def _largest_chunks() -> Iterator[bytes]:
    """Chunks of 16 MiB, full of small events."""
    yield framed(_EVENT)
    small = b"data:{}\n\n"
    yield from repeat(framed(small * (_CHUNK // len(small))))


KINDS: Final[dict[str, Callable[[], Iterator[bytes]]]] = {
    "a chunk byte by byte": _byte_by_byte,
    "chunks of a byte": _bytes_in_chunks,
    "chunks of a byte, one event": lambda: _many(b"1\r\nx\r\n"),
    "small chunks with long extensions": lambda: _many(b"1;" + b"e" * 240 + b"\r\nx\r\n"),
    "events of a byte": lambda: _many(framed(b"x\n\n")),
    "empty events": lambda: _many(framed(b"data:{}\n\n" * 4000)),
    "lines without an event": lambda: _many(framed(b"data:{}\n" * 4000)),
    "the largest chunks": _largest_chunks,
}


async def _serve(kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"POST"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            return
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for piece in KINDS[kind]():
            writer.write(piece)
            await writer.drain()
            # Without it a stream whose packets are taken at once would keep the others out.
            await asyncio.sleep(0)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main(kind: str) -> None:
    server = await asyncio.start_server(
        lambda reader, writer: _serve(kind, reader, writer), "127.0.0.1", 0
    )
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
