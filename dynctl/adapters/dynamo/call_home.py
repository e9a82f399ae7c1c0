"""The listener that receives workers' responses on the request plane.

A worker connects here and sends the subject of the request, an unguessable word that only the
request had. A connection with another subject is dropped without a response.
"""

import asyncio
import socket
import uuid
from dataclasses import dataclass
from typing import Final, NamedTuple

from dynctl.base.decode_errors import WireError
from dynctl.base.tasks import end_tasks
from dynctl.wire.dynamo.request_plane import MAX_HANDSHAKE_BYTES, FrameDecoder, parse_handshake

READ_BYTES: Final = 256 * 1024
#: Connections that the kernel holds until they are accepted: many workers may answer at once.
_BACKLOG: Final = 1024


class Caller(NamedTuple):
    """The connection of a worker; ``frames`` may have more than its handshake already."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    frames: FrameDecoder


@dataclass(slots=True)
class CallHomeCounts:
    """Connections since the start: matched to a request, and dropped without a match."""

    matched: int = 0
    dropped: int = 0


class CallHome:
    """One listener for each local address that was sent to workers, shared by all requests.

    Connections without a subject yet are bounded by one for each expected response and
    ``strangers`` more; one above that closes the oldest. ``handshake_s``: the seconds until they
    send it.
    """

    def __init__(self, *, strangers: int, handshake_s: float) -> None:
        self.counts = CallHomeCounts()
        self._max_strangers = strangers
        self._handshake_s = handshake_s
        self._servers: dict[str, asyncio.Server] = {}
        self._opening = asyncio.Lock()
        self._expected: dict[str, asyncio.Future[Caller]] = {}
        self._strangers: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._closed = False

    async def port(self, host: str) -> int:
        """The listening port at a local address; opened at the first call. Raises OSError."""
        async with self._opening:
            if self._closed:
                raise OSError("the request plane was closed")
            server = self._servers.get(host)
            if server is None:
                # One address: with port 0 each of a name's addresses would get another port.
                found = await asyncio.get_running_loop().getaddrinfo(
                    host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )
                address = str(found[0][4][0])
                server = await asyncio.start_server(
                    self._greet, address, 0, limit=READ_BYTES, backlog=_BACKLOG
                )
                self._servers[host] = server
        port: int = server.sockets[0].getsockname()[1]
        return port

    def expect(self) -> tuple[str, asyncio.Future[Caller]]:
        """A new subject, and the future of its connection. The caller must call forget."""
        subject = str(uuid.uuid4())
        calling: asyncio.Future[Caller] = asyncio.get_running_loop().create_future()
        self._expected[subject] = calling
        return subject, calling

    def forget(self, subject: str) -> None:
        """Drop connections with this subject from now on."""
        calling = self._expected.pop(subject, None)
        if calling is not None:
            calling.cancel()

    async def close(self) -> None:
        """Close all listeners; pending futures are cancelled."""
        self._closed = True
        async with self._opening:
            servers, self._servers = list(self._servers.values()), {}
        for server in servers:
            server.close()
        for subject in list(self._expected):
            self.forget(subject)
        await end_tasks(list(self._strangers.values()))

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        # Workers are strangers too until their subject is read, so the bound grows with requests.
        while len(self._strangers) >= self._max_strangers + len(self._expected):
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = task
        matched = False
        try:
            async with asyncio.timeout(self._handshake_s):
                matched = await self._match(reader, writer)
        except (OSError, TimeoutError, WireError, asyncio.CancelledError):
            pass  # This task is not awaited; it only has to end.
        finally:
            self._strangers.pop(writer, None)
            if matched:
                self.counts.matched += 1
            else:
                self.counts.dropped += 1
                writer.transport.abort()

    async def _match(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        frames = FrameDecoder()
        while (frame := frames.next_frame(MAX_HANDSHAKE_BYTES)) is None:
            data = await reader.read(READ_BYTES)
            if not data:
                return False
            frames.feed(data)
        calling = self._expected.pop(parse_handshake(frame), None)
        if calling is None or calling.done() or self._closed:
            return False
        calling.set_result(Caller(reader, writer, frames))
        return True
