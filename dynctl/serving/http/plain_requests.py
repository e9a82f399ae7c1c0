"""Plain requests: those that inference clients send, read and answered without a general server.

:func:`read_head` reads one form of a request: HTTP/1.1, one length, headers that occur once and
have no control characters. A request of any other form is none of these, whether it is valid or
not, so nothing here is ambiguous: aiohttp judges it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from functools import lru_cache
from typing import Any, Final, Protocol

from aiohttp import HttpVersion11, web

#: Bytes of a body that wait for their reader before the connection is paused.
_BUFFER_BYTES: Final = 128 * 1024
_FIRST_LINE: Final = rb"POST (/v1/[a-z/_]{1,32}+)(?:\?[!\"$-~]*+)? HTTP/1\.1\r\n"
_NAME: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}+"
_VALUE: Final = rb"[\t\x20-\x7e\x80-\xff]*+"
_HEAD: Final = re.compile(rb"%b((?:%b:%b\r\n)++)\r\n" % (_FIRST_LINE, _NAME, _VALUE))
#: A head that is not complete, from its second line on.
_BEGUN: Final = re.compile(
    rb"%b(?:%b:%b\r\n)*+(?:%b(?::%b)?)?\r?" % (_FIRST_LINE, _NAME, _VALUE, _NAME, _VALUE)
)
_BEGIN: Final = b"POST /v1/"
_BEGUN_LINE: Final = re.compile(_BEGIN + rb"[ -~]*\r?")
_LENGTH_DIGITS: Final = 15
_LENGTH: Final = re.compile(f"[0-9]{{1,{_LENGTH_DIGITS}}}")
_LENGTH_LINE: Final = re.compile(rb"\r\n(?i:content-length):[ \t]*([0-9]+)(?=[ \t]*\r\n)")
#: Longer heads are read each time.
_REMEMBERED_BYTES: Final = 4 * 1024
_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
#: Headers of requests of other forms, or that ask for another answer.
_OTHER_FORMS: Final = frozenset({"expect", "trailer", "transfer-encoding", "upgrade"})
_MOST_HEADERS: Final = 100
#: No answer may have these in a header: they would begin another one.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_JSON: Final = "application/json"


class Client(Protocol):
    """The connection of a request. ``transport``: None once it is closed."""

    transport: asyncio.Transport | None
    writing_paused: bool

    async def drained(self) -> None:
        """Wait until the client has read enough. Raises ConnectionError if it left."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class PlainBody:
    """A body of a known length, as it arrives."""

    __slots__ = ("_client", "_held", "_left", "_pieces", "_waiter")

    def __init__(self, client: Client, length: int, first: bytes) -> None:
        self._client = client
        self._pieces = [first] if first else []
        self._held = len(first)
        self._left = length - len(first)
        self._waiter: asyncio.Future[None] | None = None

    def is_eof(self) -> bool:
        """Whether all of it has arrived."""
        return not self._left

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; returns those after the body."""
        piece, rest = data[: self._left], data[self._left :]
        self._left -= len(piece)
        self._held += len(piece)
        self._pieces.append(piece)
        if self._held > _BUFFER_BYTES:
            self._client.pause_reading()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return rest

    def read_nowait(self) -> bytes:
        """What has arrived and was not read yet."""
        pieces = self._pieces
        self._pieces = []
        if self._held > _BUFFER_BYTES:
            self._client.resume_reading()
        self._held = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def readany(self) -> bytes:
        """As :meth:`read_nowait`, at least a byte; empty at the end."""
        while not self._pieces and self._left:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.read_nowait()


class PlainRequest:
    """One request. What it has of `aiohttp.web.Request`, under the same names, means the same.

    ``headers`` have lower-case names. ``keep_alive``: whether the client wants to send more.
    """

    __slots__ = (
        *("_client", "_values", "app", "content", "content_length"),
        *("headers", "keep_alive", "path", "remote"),
    )

    method: Final = "POST"
    version: Final = HttpVersion11
    content_type: Final = _JSON
    can_read_body: Final = True

    def __init__(
        self, path: str, headers: dict[str, str], length: int, *, keep_alive: bool
    ) -> None:
        self.path = path
        self.headers = headers
        self.content_length = length
        self.keep_alive = keep_alive
        self.remote: str | None = None
        self.app: Mapping[Any, Any]
        self.content: PlainBody
        self._client: Client
        self._values: dict[Any, Any] | None = None

    def arrive(
        self, client: Client, remote: str | None, app: Mapping[Any, Any], first: bytes
    ) -> None:
        """Give the request its connection and the first bytes of its body."""
        self._client = client
        self.remote = remote
        self.app = app
        self.content = PlainBody(client, self.content_length, first)

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._client.transport

    @property
    def host(self) -> str:
        return self.headers["host"]

    @property
    def hostname(self) -> str:
        """The name in the Host header, without its port."""
        match = _HOST.fullmatch(self.host)
        assert match is not None
        return (match[1] or match[2]).lower()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        transport = self.transport
        return default if transport is None else transport.get_extra_info(name, default)

    def __getitem__(self, key: Any) -> Any:
        if self._values is None:
            raise KeyError(key)
        return self._values[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._values is None:
            self._values = {}
        self._values[key] = value

    def begin(self, headers: Mapping[str, str]) -> PlainStream:
        """A stream as the answer; its head is sent with its first bytes."""
        kept = "" if self.keep_alive else "connection: close\r\n"
        return PlainStream(
            self._client, _head(200, "OK", headers, f"transfer-encoding: chunked\r\n{kept}")
        )


class PlainStream:
    """An answer in chunks."""

    __slots__ = ("_client", "_head", "complete")

    def __init__(self, client: Client, head: bytes) -> None:
        self._client = client
        self._head = head
        self.complete = False

    async def write(self, data: bytes) -> None:
        """Send a chunk, and wait while the client reads too slowly. Raises ConnectionError."""
        if not data:
            return
        client, head = self._client, self._head
        if head:
            self._head = b""
        transport = client.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client disconnected")
        transport.write(b"%b%x\r\n%b\r\n" % (head, len(data), data))
        if client.writing_paused:
            await client.drained()

    async def write_eof(self, data: bytes = b"", *, framed: bytes = b"") -> None:
        """As :meth:`write`, for the last chunk. ``framed``: whole chunks before the end."""
        client, head = self._client, self._head
        transport = client.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client disconnected")
        if data:
            transport.write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(data), data))
        else:
            transport.write(b"%b%b0\r\n\r\n" % (head, framed))
        self.complete = True
        if client.writing_paused:
            await client.drained()


#: A request of inference, and its answer, on either server.
ClientRequest = web.Request | PlainRequest
ClientAnswer = web.StreamResponse | PlainStream
ClientHandler = Callable[[ClientRequest], Awaitable[ClientAnswer]]


def may_be_plain(begun: bytes) -> bool:
    """Whether these bytes, a head that is not complete, may become that of a plain request."""
    if b"\n" in begun:
        return _BEGUN.fullmatch(begun) is not None
    return _BEGIN.startswith(begun) or _BEGUN_LINE.fullmatch(begun) is not None


def read_head(data: bytes) -> PlainRequest | None:
    """The plain request whose whole head ``data`` begins with; None: it begins with another."""
    match = _HEAD.match(data)
    if match is None:
        return None
    lines = match[2].decode("utf-8", "surrogateescape").split("\r\n")
    lines.pop()
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip(" \t")
    if len(headers) != len(lines) or len(lines) > _MOST_HEADERS:
        return None
    length, host = headers.get("content-length", ""), headers.get("host", "")
    kind = headers.get("content-type", "").lower()
    connection = headers.get("connection", "keep-alive").lower()
    if (
        not _LENGTH.fullmatch(length)
        or not _HOST.fullmatch(host)
        or not (kind == _JSON or kind.startswith(_JSON + ";"))
        or connection not in ("keep-alive", "close")
        or not _OTHER_FORMS.isdisjoint(headers)
    ):
        return None
    keep_alive = connection == "keep-alive"
    return PlainRequest(match[1].decode("ascii"), headers, int(length), keep_alive=keep_alive)


class HeadReader:
    """Reads the heads of one connection: :func:`read_head` with a memory of one head.

    A client sends the same head again and again, with another length. So what is equal to the last
    one, up to the digits of its length and from there to its end, is not read again.
    """

    __slots__ = ("_after", "_before", "_headers", "_keep_alive", "_path")

    def __init__(self) -> None:
        # Of the last head, not its request: that refers to the connection, which refers to this.
        self._headers: dict[str, str] = {}
        self._path = ""
        self._keep_alive = False
        self._before = self._after = b""

    def read(self, data: bytes, end: int) -> PlainRequest | None:
        """As :func:`read_head`; ``end``: of the head."""
        before = self._before
        if before and data.startswith(before):
            at = len(before)
            after = data.find(b"\r", at, at + _LENGTH_DIGITS + 1)
            length = data[at:after]
            if length.isdigit() and data.startswith(self._after, after):
                headers = {**self._headers, "content-length": length.decode("ascii")}
                return PlainRequest(self._path, headers, int(length), keep_alive=self._keep_alive)
        request = read_head(data)
        place = None
        if request is not None and end <= _REMEMBERED_BYTES:
            place = _LENGTH_LINE.search(data, 0, end)
        if request is None or place is None:
            self._before = b""
            return request
        self._before, self._after = data[: place.start(1)], data[place.end(1) : end]
        self._headers, self._path = request.headers, request.path
        self._keep_alive = request.keep_alive
        return request


def whole_answer(answer: web.StreamResponse, *, close: bool) -> bytes:
    """The bytes of an answer with a whole body. ``close``: its connection ends."""
    body = answer.body if isinstance(answer, web.Response) else None
    text = body if isinstance(body, bytes) else b""
    more = f"content-length: {len(text)}\r\n"
    if close and "connection" not in answer.headers:
        more += "connection: close\r\n"
    return _head(answer.status, answer.reason, answer.headers, more) + text


def _head(status: int, reason: str, headers: Mapping[str, str], more: str) -> bytes:
    """The head of an answer. Raises ValueError for a header that cannot be in one."""
    values = "".join(headers.values())
    if not values.isprintable() and _CONTROL.search(values):
        name = next(name for name, value in headers.items() if _CONTROL.search(value))
        raise ValueError(f"the header {name} of an answer has a control character")
    lines = ""
    for name, value in headers.items():
        lines += f"{name}: {value}\r\n"
    return f"HTTP/1.1 {status} {reason}\r\n{lines}{more}{_own_headers(int(time.time()))}".encode()


@lru_cache(maxsize=1)
def _own_headers(now: int) -> str:
    """The end of each head. ``now``: seconds since the epoch."""
    return f"date: {formatdate(now, usegmt=True)}\r\nserver: dynctl\r\n\r\n"
