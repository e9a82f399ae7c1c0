"""A lean HTTP/1.1 client for the way between the router and its engines.

It does what that way needs and nothing else: POST with a whole body, answers with a length, in
chunks or until the end, kept-alive connections, bounds. What it adds to a general client is
:meth:`EngineStream.pipe`: whole chunks of a stream go to the client's transport from the very
callback that received them, frames and all, without waking a task for each token.

Strict on purpose: an answer that could be read in two ways is an error, not a guess.
"""

import asyncio
import re
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, cast
from urllib.parse import urlsplit

from dynctl.serving.upstream_failure import UpstreamFailure, connect_failure

#: Below the 5 s after which uvicorn (so vLLM and SGLang) closes: a request must not meet the close.
KEEPALIVE_S: Final = 4.0
_IDLE_CONNECTIONS: Final = 1024
#: A stream that its reader leaves alone stops being read beyond this.
_BUFFER_BYTES: Final = 256 * 1024
#: One chunk of a stream; engines send a few hundred bytes.
_CHUNK_BYTES: Final = 16 * 1024 * 1024
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\r\n]*)?")
_SIZE_LINE: Final = re.compile(rb"([0-9a-fA-F]{1,8})(?:[ \t]*;[^\r\n]*)?")
_SIZE_LINE_BYTES: Final = 256
_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_UNTIL_CLOSE: Final = -1


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an engine listens, and the path before its endpoints."""

    host: str
    port: int
    tls: bool
    netloc: str
    path: str

    @property
    def key(self) -> tuple[str, bool]:
        """What connections are shared by: the same for every path of an engine."""
        return self.netloc, self.tls

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.netloc}"


@lru_cache(maxsize=8192)
def origin_of(url: str) -> Origin:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    return Origin(parts.hostname or "", port, tls, parts.netloc, parts.path)


@dataclass(frozen=True, slots=True)
class ClientBounds:
    """Times in seconds, sizes in bytes; see `dynctl.serving.config.Limits`."""

    connect_s: float = 3.0
    first_byte_s: float = 300.0
    idle_s: float = 300.0
    header_bytes: int = 16 * 1024


class EngineClient:
    """Connections to engines, kept alive between requests. Belongs to one event loop."""

    def __init__(self, bounds: ClientBounds) -> None:
        self._bounds = bounds
        self._idle: dict[tuple[str, bool], deque[_Connection]] = {}
        self._open: set[_Connection] = set()
        self._tls: ssl.SSLContext | None = None
        self._closed = False

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> "EngineStream":
        """Send a request and wait for the head of its answer; raises UpstreamFailure."""
        origin = origin_of(url)
        connection = self._reused(origin) or await self._connect(origin)
        stream = EngineStream(connection, origin, self._bounds)
        connection.send(stream, _request(origin, body, headers))
        try:
            await stream.head()
        except BaseException:
            stream.close()
            raise
        return stream

    def close(self) -> None:
        """Cut every connection."""
        self._closed = True
        for connection in tuple(self._open):
            connection.abort()
        self._idle.clear()

    def released(self, connection: "_Connection") -> None:
        """A connection whose answer is complete may take another request."""
        idle = self._idle.setdefault(connection.origin.key, deque())
        if self._closed or len(idle) >= _IDLE_CONNECTIONS:
            connection.abort()
            return
        idle.append(connection)
        while connection.idle_since - idle[0].idle_since >= KEEPALIVE_S:
            idle.popleft().abort()

    def opened(self, connection: "_Connection") -> None:
        self._open.add(connection)

    def lost(self, connection: "_Connection") -> None:
        self._open.discard(connection)

    def _reused(self, origin: Origin) -> "_Connection | None":
        idle = self._idle.get(origin.key)
        now = asyncio.get_running_loop().time()
        while idle:
            connection = idle.pop()  # the warmest; the rest grow old and are closed here
            if connection.usable and now - connection.idle_since < KEEPALIVE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin) -> "_Connection":
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(self._bounds.connect_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self, origin),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.tls else None,
                )
        except (OSError, ValueError) as error:  # TimeoutError and TLS errors are OSErrors
            raise connect_failure(str(origin), error) from error
        return connection


class EngineStream:
    """One answer. ``headers`` have lower-case names; a repeated header's last value counts."""

    __slots__ = (
        "_bounds",
        "_buffered",
        "_connection",
        "_failure",
        "_last_read",
        "_length",
        "_loop",
        "_paused",
        "_pieces",
        "_pipe",
        "_tail",
        "_timer",
        "_waiter",
        "chunked",
        "done",
        "headers",
        "origin",
        "status",
    )

    def __init__(self, connection: "_Connection", origin: Origin, bounds: ClientBounds) -> None:
        self.origin = origin
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunked = False
        self.done = False
        self._connection: _Connection | None = connection
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._paused = False
        self._tail = b""
        self._length = 0
        self._failure: UpstreamFailure | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pipe: Callable[[bytes], bool] | None = None
        self._last_read = self._loop.time()
        self._timer = self._loop.call_later(bounds.first_byte_s, self._check_silence)

    # -- reading ---------------------------------------------------------------------------

    async def head(self) -> None:
        """Until status and headers are there."""
        while not self.status:
            await self._wait()

    async def readany(self) -> bytes:
        """What has arrived of the body, at least a byte; empty at its end."""
        while not self._pieces:
            if self.done:
                return b""
            await self._wait()
        pieces, self._pieces, self._buffered = self._pieces, [], 0
        if self._paused:
            self._paused = False
            if self._connection is not None:
                self._connection.resume()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read(self, limit: int) -> bytes:
        """The whole body; raises UpstreamFailure for a broken one or more than ``limit`` bytes."""
        parts: list[bytes] = []
        size = 0
        while piece := await self.readany():
            size += len(piece)
            if size > limit:
                self.close()
                raise UpstreamFailure("protocol", f"{self.origin} answered more than {limit} bytes")
            parts.append(piece)
        return b"".join(parts)

    async def pipe(self, take: Callable[[bytes], bool]) -> bool:
        """Hand whole chunks, with their frames, to ``take`` as they arrive.

        For a chunked answer whose pieces were all read. Returns True at the end; False when
        ``take`` said that its side is full (then go on with :meth:`readany` for a while).
        Raises UpstreamFailure.
        """
        if not self.chunked or self._pieces:
            return self.done and not self._pieces
        self._pipe = take
        try:
            while self._piping():
                await self._wait()
        finally:
            self._pipe = None
        return self.done and not self._pieces

    def close(self) -> None:
        """Done with it: an incomplete answer costs its connection, which stops the engine."""
        self._timer.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    # -- called by the connection ----------------------------------------------------------

    def received(self, data: bytes) -> None:
        """More bytes of this answer."""
        if self._failure is not None:
            return
        self._last_read = self._loop.time()
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if not self.status:
            data = self._parse_head(data)
            if not self.status:
                return
        if self.chunked:
            self._chunks(data)
        elif self._length == _UNTIL_CLOSE:
            self._keep(data)
        else:
            self._counted(data)
        self._wake()

    def ended(self, error: Exception | None) -> None:
        """The connection is gone."""
        self._connection = None
        if self.done:
            return
        if error is None and self.status and self._length == _UNTIL_CLOSE:
            self._finish(b"")
        else:
            what = "broke off its answer" if self.status else "broke the connection"
            self._fail(UpstreamFailure("reset", f"{self.origin} {what}"))
        self._wake()

    # -- inside ----------------------------------------------------------------------------

    def _piping(self) -> bool:
        return self._pipe is not None and not self.done

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _wait(self) -> None:
        """Until something happened; raises the failure once everything before it was read."""
        self._raise_failure()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if not self._pieces:
            self._raise_failure()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._pipe is None or self.done or self._failure is not None:
            waiter.set_result(None)

    def _parse_head(self, data: bytes) -> bytes:
        """Read status and headers; what follows them. Keeps an incomplete head for later."""
        end = data.find(b"\r\n\r\n")
        if end < 0 or end > self._bounds.header_bytes:
            if len(data) > self._bounds.header_bytes:
                self._protocol("its headers are too long")
            self._tail = data
            return b""
        first, *lines = data[:end].split(b"\r\n")
        status = _STATUS.fullmatch(first)
        if status is None or status[2].startswith(b"1"):
            # We ask for nothing that an interim answer could be about.
            self._protocol("its answer is not a final HTTP/1.1 one")
            return b""
        headers: dict[str, str] = {}
        lengths = set()
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon or not _NAME.fullmatch(name):
                self._protocol("it sent a malformed header")
                return b""
            key, text = name.decode("ascii").lower(), value.strip(b" \t").decode("latin-1")
            headers[key] = text
            if key == "content-length":
                lengths.add(text)
        self.headers = headers
        self._frame(int(status[2]), status[1] == b"1", lengths)
        return data[end + 4 :]

    def _frame(self, status: int, keeps: bool, lengths: set[str]) -> None:
        """How long the body is, and whether the connection outlives it."""
        headers = self.headers
        encoding = headers.get("transfer-encoding")
        if encoding is not None:
            if encoding.lower() != "chunked" or lengths:
                self._protocol("it frames its answer in two ways")
                return
            self.chunked = True
        elif lengths:
            text = next(iter(lengths))
            if len(lengths) > 1 or not (text.isascii() and text.isdigit() and len(text) < 16):
                self._protocol("its content-length is not a number")
                return
            self._length = int(text)
        elif status in (204, 304):
            self._length = 0
        else:
            self._length, keeps = _UNTIL_CLOSE, False
        if self._connection is not None:
            told = headers.get("connection", "").lower()
            self._connection.keep = keeps and "close" not in told
        self.status = status

    def _counted(self, data: bytes) -> None:
        left = self._length - len(data)
        if left > 0:
            self._length = left
            self._keep(data)
            return
        body, rest = data[: self._length], data[self._length :]
        self._length = 0
        self._keep(body)
        self._finish(rest)

    def _chunks(self, data: bytes) -> None:
        """Cut whole chunks off; piped with their frames, or kept without."""
        position, total, ends = 0, len(data), False
        piped = self._pipe
        while position < total:
            line = data.find(b"\r\n", position, position + _SIZE_LINE_BYTES)
            if line < 0:
                if total - position >= _SIZE_LINE_BYTES:
                    self._protocol("a chunk has no size")
                    return
                break
            size = _chunk_size(data[position:line])
            if size is None or size > _CHUNK_BYTES:
                self._protocol("a chunk's size is not one")
                return
            if size == 0:
                ends = True
                break
            after = line + 2 + size
            if after + 2 > total:
                break
            if data[after : after + 2] != b"\r\n":
                self._protocol("a chunk does not end where it said")
                return
            if piped is None:
                self._keep(data[line + 2 : after])
            position = after + 2
        if piped is not None and position:
            whole = data if position == total else data[:position]
            if not piped(whole):
                self._pipe = None
                self._release_waiter()
        rest = data[position:] if position else data
        if not ends:
            self._tail = rest
            return
        # After the last chunk: trailers, if any, and an empty line.
        line = rest.find(b"\r\n")
        if rest[line + 2 : line + 4] == b"\r\n":
            self._finish(rest[line + 4 :])
            return
        end = rest.find(b"\r\n\r\n")
        if end >= 0:
            self._finish(rest[end + 4 :])
        elif len(rest) > self._bounds.header_bytes:
            self._protocol("its trailers are too long")
        else:
            self._tail = rest

    def _keep(self, piece: bytes) -> None:
        if not piece:
            return
        self._pieces.append(piece)
        self._buffered += len(piece)
        if self._buffered > _BUFFER_BYTES and not self._paused and self._connection is not None:
            self._paused = True
            self._connection.pause()

    def _finish(self, rest: bytes) -> None:
        self.done = True
        self._timer.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            # Bytes after the end belong to no request: such a connection is not reused.
            connection.finished(clean=not rest and not self._paused)

    def _protocol(self, problem: str) -> None:
        self._fail(UpstreamFailure("protocol", f"{self.origin}: {problem}"))
        self._wake()

    def _fail(self, failure: UpstreamFailure) -> None:
        if self._failure is None and not self.done:
            self._failure = failure
        self.close()
        self._release_waiter()

    def _release_waiter(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_silence(self) -> None:
        limit = self._bounds.idle_s if self.status else self._bounds.first_byte_s
        left = self._last_read + limit - self._loop.time()
        if self._paused:
            left = limit  # it is our side that is slow
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_silence)
            return
        self._fail(UpstreamFailure("timeout", f"{self.origin} was silent for {limit:g} s"))


class _Connection(asyncio.Protocol):
    """One TCP connection, used by one answer at a time."""

    __slots__ = ("_client", "_stream", "_transport", "idle_since", "keep", "origin", "usable")

    def __init__(self, client: EngineClient, origin: Origin) -> None:
        self.origin = origin
        self.usable = False
        self.keep = False
        self.idle_since = 0.0
        self._client = client
        self._stream: EngineStream | None = None
        self._transport: asyncio.Transport | None = None

    def send(self, stream: EngineStream, request: bytes) -> None:
        self._stream = stream
        if self._transport is None or not self.usable:
            stream.ended(None)
            return
        self._transport.write(request)

    def finished(self, *, clean: bool) -> None:
        self._stream = None
        if not (clean and self.keep and self.usable):
            self.abort()
            return
        self.idle_since = asyncio.get_running_loop().time()
        self._client.released(self)

    def abort(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self.usable:
            self._transport.resume_reading()

    # -- asyncio.Protocol ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.usable = True
        self._client.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._stream is None:
            self.abort()  # nobody asked
        else:
            self._stream.received(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._client.lost(self)
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.ended(exc)


@lru_cache(maxsize=4096)
def _chunk_size(line: bytes) -> int | None:
    found = _SIZE_LINE.fullmatch(line)
    return None if found is None else int(found[1], 16)


def _request(origin: Origin, body: bytes, headers: Mapping[str, str]) -> bytes:
    lines = [
        f"POST {origin.path} HTTP/1.1\r\nhost: {origin.netloc}\r\n"
        "content-type: application/json\r\naccept-encoding: identity\r\n"
        f"content-length: {len(body)}\r\n"
    ]
    for name, value in headers.items():
        if "\r" not in value and "\n" not in value:
            lines.append(f"{name}: {value}\r\n")
    lines.append("\r\n")
    return "".join(lines).encode("utf-8", "surrogateescape") + body
