"""A lean HTTP/1.1 client for requests from the router to its engines: inference on the data path
(`EngineClient`), and small bounded control calls (`Upstream`, which has the engines' keys).

It supports requests with a whole body, responses with a length, in chunks or until the end,
kept-alive connections, and bounds. Unlike a general client it has a pipe
(:mod:`dynctl.serving.engines.response_stream`): whole chunks of a stream go to the client's
transport directly from the callback that received them, with their frames, without waking a task
for each token.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec

from dynctl.base.peer_hosts import LOOK_S, SILENT_S, connections_of_silent_hosts, probe_host
from dynctl.base.tasks import LoopShare
from dynctl.serving.engines.failures import UpstreamFailure, connect_failure
from dynctl.serving.engines.response_stream import SHARE_S, ClientBounds, EngineStream
from dynctl.serving.routing.config import Limits

#: Below the 5 s after which uvicorn (so vLLM and SGLang) closes: a request must not meet the close.
KEEPALIVE_S: Final = 4.0
_IDLE_CONNECTIONS: Final = 1024
_HEADERS = {"user-agent": "dynctl"}
_JSON: Final = "content-type: application/json\r\n"
_PLAIN: Final = "accept-encoding: identity\r\n"
_CONTROL_ANSWER_BYTES = 4 * 1024 * 1024
_ERROR_ANSWER_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Origin:
    """The address of an engine, and the path prefix of its endpoints.

    ``key``: of shared connections, the same for every path of an engine. ``name``: its scheme and
    address. ``head``: the beginning of the head of each request, after its method; ``post``: that
    of a POST, up to the length of its body.
    """

    host: str
    port: int
    tls: bool
    key: tuple[str, bool]
    name: str
    head: str
    post: str

    def __str__(self) -> str:
        return self.name


@lru_cache(maxsize=8192)
def origin_of(url: str) -> Origin:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    port = parts.port or (443 if tls else 80)
    head = f" {target} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
    return Origin(
        parts.hostname or "",
        port,
        tls,
        (parts.netloc, tls),
        f"{'https' if tls else 'http'}://{parts.netloc}",
        head,
        f"POST{head}{_JSON}{_PLAIN}content-length: ",
    )


class EngineClient:
    """Connections to engines, kept alive between requests. Belongs to one event loop."""

    def __init__(self, bounds: ClientBounds) -> None:
        self._bounds = bounds
        self._idle: dict[tuple[str, bool], deque[_EngineConnection]] = {}
        self._open: set[_EngineConnection] = set()
        self._tls: ssl.SSLContext | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._closed = False
        #: Set with the first connection. Each look-up of the running loop is a system call.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._share = LoopShare(SHARE_S)

    async def post(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        first_byte_s: float | None = None,
        waiting: set[EngineStream] | None = None,
    ) -> EngineStream:
        """Send a request and wait for the head of its response; raises UpstreamFailure, also for a
        status other than 200.

        ``first_byte_s`` replaces that of the bounds. The response is added to ``waiting`` once it
        is sent, and stays there unless this call fails.
        """
        origin = origin_of(url)
        connection = self._idle_connection(origin) or await self._connect(origin)
        stream = EngineStream(
            connection, origin.name, self._bounds, first_byte_s, self._loop, self._share
        )
        connection.send(stream, _request(origin, body, headers))
        if waiting is not None:
            waiting.add(stream)
        try:
            while not stream.status:
                await stream.wait()
        except BaseException:
            stream.close()
            if waiting is not None:
                waiting.discard(stream)
            raise
        if stream.status != 200:
            if waiting is not None:
                waiting.discard(stream)
            raise await _refusal(stream)
        return stream

    async def control(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], limit: int
    ) -> tuple[int, bytes]:
        """A small request: status and body; raises UpstreamFailure, also above ``limit`` bytes.

        A GET on a connection that its engine has just closed is sent again on a new one.
        """
        origin = origin_of(url)
        request = _request(origin, body or b"", headers, method)
        connection = self._idle_connection(origin)
        while True:
            reused = connection is not None
            connection = connection or await self._connect(origin)
            stream = EngineStream(
                connection, origin.name, self._bounds, None, self._loop, self._share
            )
            connection.send(stream, request)
            try:
                while not stream.status:
                    await stream.wait()
                return stream.status, await stream.read(limit)
            except UpstreamFailure as failure:
                closed = failure.kind == "reset" and not stream.status
                if not (closed and reused and method == "GET"):
                    raise
                connection = None
            finally:
                stream.close()

    def close(self) -> None:
        """Cut every connection."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        if self._look is not None:
            self._look.cancel()
        for connection in tuple(self._open):
            connection.abort()
        self._idle.clear()

    def released(self, connection: "_EngineConnection") -> None:
        """Keep a connection for another request; its response is complete."""
        key = connection.origin.key
        idle = self._idle.get(key)
        if idle is None:
            idle = self._idle[key] = deque()
        if self._closed or len(idle) >= _IDLE_CONNECTIONS:
            connection.abort()
            return
        idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._close_idle)

    def opened(self, connection: "_EngineConnection") -> None:
        self._open.add(connection)
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_at_hosts)

    def lost(self, connection: "_EngineConnection") -> None:
        self._open.discard(connection)

    def _look_at_hosts(self) -> None:
        """Report silent hosts of engines to the responses that wait for output."""
        loop = asyncio.get_running_loop()
        self._look = loop.call_later(LOOK_S, self._look_at_hosts) if self._open else None
        sent_by = loop.time() - SILENT_S
        waiting = [each for each in self._open if each.waits_since(sent_by)]
        for connection in connections_of_silent_hosts(waiting):
            connection.report_silence()

    def _close_idle(self) -> None:
        """Close the connections that were idle for too long, of every origin."""
        loop = asyncio.get_running_loop()
        for key, idle in tuple(self._idle.items()):
            while idle and loop.time() - idle[0].idle_since >= KEEPALIVE_S:
                idle.popleft().abort()
            if not idle:
                del self._idle[key]
        self._sweep = loop.call_later(KEEPALIVE_S, self._close_idle) if self._idle else None

    def _idle_connection(self, origin: Origin) -> "_EngineConnection | None":
        idle = self._idle.get(origin.key)
        if not idle or self._loop is None:
            return None
        now = self._loop.time()
        while idle:
            connection = idle.pop()  # the most recent; older ones are closed here
            if connection.usable and now - connection.idle_since < KEEPALIVE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin) -> "_EngineConnection":
        loop = self._loop = asyncio.get_running_loop()
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(self._bounds.connect_s):
                _, connection = await loop.create_connection(
                    lambda: _EngineConnection(self, origin, loop),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.tls else None,
                )
        except (OSError, ValueError) as error:  # TimeoutError and TLS errors are OSErrors
            raise connect_failure(str(origin), error) from error
        return connection


class _EngineConnection(asyncio.Protocol):
    """One TCP connection, used by one response at a time."""

    __slots__ = (
        *("_client", "_loop", "_stream", "_transport", "idle_since", "keep", "origin", "usable"),
    )

    def __init__(
        self, client: EngineClient, origin: Origin, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.origin = origin
        self.usable = False
        self.keep = False
        self.idle_since = 0.0
        self._client = client
        self._loop = loop
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
        self.idle_since = self._loop.time()
        self._client.released(self)

    @property
    def host(self) -> str:
        return self.origin.host

    @property
    def socket(self) -> Any:
        return None if self._transport is None else self._transport.get_extra_info("socket")

    def waits_since(self, at: float) -> bool:
        """Whether its request was sent by then, by the clock of the loop, and has no output."""
        return self._stream is not None and self._stream.waits_since(at)

    def report_silence(self) -> None:
        """The engine's host does not respond."""
        if self._stream is not None:
            self._stream.host_is_silent()

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

    def relay(self, take: Callable[[bytes], None] | None) -> None:
        if self._transport is not None and self.usable:
            self._transport.set_protocol(self if take is None else _Relay(self, take))

    # -- asyncio.Protocol ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self.usable = True
        probe_host(transport.get_extra_info("socket"))
        self._client.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._stream is None:
            self.abort()  # without a request
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


class _Relay(asyncio.Protocol):
    """Gives what a connection receives to a function, without another call in between."""

    __slots__ = ("_connection", "data_received")

    def __init__(self, connection: _EngineConnection, take: Callable[[bytes], None]) -> None:
        self._connection = connection
        self.data_received = take  # type: ignore[assignment, method-assign]

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)


def _request(
    origin: Origin, body: bytes, headers: Mapping[str, str], method: str = "POST"
) -> bytes:
    if method == "POST":
        head = f"{origin.post}{len(body)}\r\n"
    elif body:
        head = f"{method}{origin.head}{_JSON}{_PLAIN}content-length: {len(body)}\r\n"
    else:
        head = f"{method}{origin.head}{_PLAIN}"
    for name, value in headers.items():
        if "\r" not in value and "\n" not in value:
            head += f"{name}: {value}\r\n"
    return f"{head}\r\n".encode("utf-8", "surrogateescape") + body


async def _refusal(stream: EngineStream) -> UpstreamFailure:
    read = bytearray()
    try:
        # The beginning of a longer one, or of one that breaks off, has the reason.
        while len(read) < _ERROR_ANSWER_BYTES and (piece := await stream.readany()):
            read += piece
    except UpstreamFailure:
        pass
    finally:
        stream.close()
    body = bytes(read[:_ERROR_ANSWER_BYTES])
    if stream.headers.get("content-encoding", "identity").lower() != "identity":
        body = b""
    if stream.status < 400:
        return UpstreamFailure(
            "protocol", f"{stream.origin} returned status {stream.status}; expected 200"
        )
    return UpstreamFailure(
        "status",
        f"{stream.origin} returned status {stream.status}",
        status=stream.status,
        body=body,
        retry_after=stream.headers.get("retry-after"),
    )


class Upstream:
    """The engines' client. ``open`` is for inference, ``get`` and ``post`` for control.

    Keeps connections alive; never follows redirects, never uses proxies or cookies.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._client: EngineClient | None = None
        self._credentials: dict[str, str] = {}

    def authorize(self, url: str, key: str | None) -> None:
        """Send ``key`` with every request to the engine at ``url``; None: no longer."""
        origin = str(origin_of(url))
        self._credentials.pop(origin, None)
        if key is not None:
            self._credentials[origin] = f"Bearer {key}"

    async def __aenter__(self) -> "Upstream":
        self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Open the client; needs a running event loop."""
        limits = self._limits
        self._client = EngineClient(
            ClientBounds(
                connect_s=limits.connect_s,
                first_byte_s=limits.first_byte_s,
                idle_s=limits.idle_s,
                header_bytes=limits.header_bytes,
            )
        )

    async def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def open(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        first_byte_s: float | None = None,
        waiting: set[EngineStream] | None = None,
    ) -> Coroutine[Any, Any, EngineStream]:
        """POST an inference request; returns when the response's head has arrived.

        The caller closes it. Raises UpstreamFailure, also for an error status. ``first_byte_s`` and
        ``waiting`` as in :meth:`EngineClient.post`.
        """
        if self._client is None:
            raise RuntimeError("the upstream client is not started")
        if self._credentials:
            headers = self._with_key(url, headers)
        return self._client.post(url, body, headers, first_byte_s=first_byte_s, waiting=waiting)

    async def get(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        """A control request: status and body; raises UpstreamFailure."""
        return await self._control("GET", url, None, timeout_s)

    async def post(self, url: str, body: Any, timeout_s: float) -> tuple[int, bytes]:
        """A control request with a JSON body; raises UpstreamFailure."""
        return await self._control("POST", url, msgspec.json.encode(body), timeout_s)

    async def pass_on(
        self, method: str, url: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        """A client's control request: status and body as they are; raises UpstreamFailure."""
        return await self._control(method, url, body, timeout_s)

    def _with_key(self, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """The headers with the engine's key, unless they have the client's."""
        if not self._credentials or "authorization" in headers:
            return headers
        value = self._credentials.get(str(origin_of(url)))
        return headers if value is None else {**headers, "authorization": value}

    async def _control(
        self, method: str, url: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        if self._client is None:
            raise RuntimeError("the upstream client is not started")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._client.control(
                    method, url, body, self._with_key(url, _HEADERS), _CONTROL_ANSWER_BYTES
                )
        except TimeoutError:
            where = str(origin_of(url))
            raise UpstreamFailure("timeout", f"{where} did not respond in time") from None
