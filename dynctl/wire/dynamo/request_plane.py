"""Messages of Dynamo's TCP request plane.

A request goes to the instance's address in discovery. The worker acknowledges it on the same
connection (with an empty reply, or with the reason of a refusal) and sends its answer over a second
connection, which it opens to the address in the request: it "calls home". There it sends two-part
frames: a handshake (``subject``), a prologue (``error`` or null), the items, an end marker,
``"sentinel"``.

Everything here is pure; the sockets live in ``dynctl.adapters.dynamo``: ``request_plane`` sends
requests, ``request_server`` accepts them.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import msgspec

from dynctl.base import terminal
from dynctl.base.decode_errors import WireError

CODECS: Final = ("msgpack", "json")
MAX_REPLY_BYTES: Final = 64 * 1024
MAX_HANDSHAKE_BYTES: Final = 4 * 1024
"""The most bytes of a connection's first frame, before its subject is known."""

_MAX_TEXT: Final = 300  # characters of a peer's text that an error quotes
_SMALL: Final = 32 * 1024
_LENGTH: Final = struct.Struct(">I")
_SHORT: Final = struct.Struct(">H")
NO_CONTEXT: Final[Mapping[str, str]] = {}
_TRACEPARENT: Final = re.compile("00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_CLIENT_ID: Final = re.compile("[!-~]{1,256}")
_PORT: Final = re.compile("[0-9]{1,5}")

Buffer = bytes | memoryview


class Address(NamedTuple):
    """The address of an instance. ``path`` names the endpoint within the process."""

    host: str
    port: int
    path: str


def parse_address(address: str) -> Address:
    """Read ``HOST:PORT/ID/NAMESPACE/COMPONENT/ENDPOINT``; an IPv6 host has brackets."""
    location, _, path = address.partition("/")
    host, _, port = location.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not (host and path and _PORT.fullmatch(port) and 0 < int(port) < 65536):
        raise WireError("address", f"expected HOST:PORT/PATH, got {printable(address)!r}")
    return Address(host, int(port), path)


def format_host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def printable(text: str) -> str:
    """A peer's text as one line for a terminal, shortened."""
    cut = text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
    return terminal.printable(cut, "\N{REPLACEMENT CHARACTER}")


# -- two-part frames -------------------------------------------------------------------------------
#
# Each has a JSON header and a body, either of them possibly empty:
#
#     u64 header length | u64 body length | u64 checksum | header | body          (big endian)
#
# The checksum is 0 in release builds and is not checked: only debug builds fill it.

_LENGTHS: Final = struct.Struct(">QQQ")
PREFIX_BYTES: Final = _LENGTHS.size
MAX_HEADER_BYTES: Final = 64 * 1024
"""The most bytes of one header; observed headers are below 1 KiB."""

_COPIED: Final = 32 * 1024  # bytes; the content of one socket read is cheaper to copy


class Frame(NamedTuple):
    """A received frame. A large body is a view of its own buffer."""

    header: bytes
    body: bytes | memoryview


def encode_frame(header: bytes = b"", body: bytes = b"") -> bytes:
    return _LENGTHS.pack(len(header), len(body), 0) + header + body


class FrameDecoder:
    """Cuts a byte stream into frames, for any size of the received pieces.

    The caller bounds the size in a frame's header before the frame is complete. A large body is a
    view of the receive buffer, because copying a 100 MB answer would block the event loop.
    """

    def __init__(self) -> None:
        #: The bytes that are not cut yet.
        self.received = bytearray()

    def feed(self, data: bytes) -> None:
        """Add the next piece of the stream; then call next_frame until it returns None."""
        self.received += data

    @property
    def midway(self) -> bool:
        """Whether the stream is inside a frame."""
        return bool(self.received)

    @property
    def waiting(self) -> int:
        """Received bytes that are not cut yet."""
        return len(self.received)

    def next_frame(self, max_bytes: int) -> Frame | None:
        """The next complete frame, None if it is not complete yet.

        Raises WireError if it has more than ``max_bytes`` (prefix, header and body), or a header
        above MAX_HEADER_BYTES; the stream cannot be used afterwards.
        """
        received = self.received
        if len(received) < PREFIX_BYTES:
            return None
        header_bytes, body_bytes, _ = _LENGTHS.unpack_from(received)
        if header_bytes > MAX_HEADER_BYTES:
            problem = f"a header of {header_bytes:,} bytes, over the limit of {MAX_HEADER_BYTES:,}"
            raise WireError("frame", problem)
        start = PREFIX_BYTES + header_bytes
        end = start + body_bytes
        if end > max_bytes:
            raise WireError("frame", f"{end:,} bytes, over the limit of {max_bytes:,}")
        if len(received) < end:
            return None
        header = bytes(received[PREFIX_BYTES:start]) if header_bytes else b""
        if body_bytes > _COPIED:
            self.received = received[end:]
            return Frame(header, memoryview(received)[start:end].toreadonly())
        body = bytes(received[start:end])
        del received[:end]
        return Frame(header, body)


# -- the request -----------------------------------------------------------------------------------


def encode_request(
    path: str,
    request_id: str,
    body: Any,
    *,
    call_home: str,
    subject: str,
    codec: str,
    context: Mapping[str, str] = NO_CONTEXT,
) -> bytes:
    """The bytes of a request to an instance. ``context``: see :func:`trace_context`.

    ``call_home``: the HOST:PORT for the worker's connection; ``subject``: the name in its
    handshake. ``codec`` is the instance's codec, for the body and all items of the answer. Raises
    WireError for an unknown codec and for a path that is too long.
    """
    payload = encode_payload(request_id, body, call_home=call_home, subject=subject, codec=codec)
    headers = msgspec.json.encode({"request-id": request_id, "x-endpoint-path": path, **context})
    route = path.encode()
    if len(headers) > 0xFFFF or len(payload) > 0xFFFF_FFFF:
        problem = f"too long: a path of {len(route):,} bytes, a body of {len(payload):,} bytes"
        raise WireError("request", problem)
    return b"".join(
        (
            _SHORT.pack(len(route)),
            route,
            _SHORT.pack(len(headers)),
            headers,
            _LENGTH.pack(len(payload)),
            payload,
        )
    )


def trace_context(headers: Mapping[str, str], client_id: str | None) -> dict[str, str]:
    """What the headers of a traced request have beside their own: ``traceparent`` and the
    ``x-request-id`` of the client, if they are valid.

    Dynamo's frontend sends them while its tracing is on (DYN_LOGGING_JSONL), and no ``tracestate``.
    """
    context = {}
    parent = headers.get("traceparent", "")
    if _TRACEPARENT.fullmatch(parent):
        # The other flags are not those of version 00; Dynamo's library may refuse them.
        context["traceparent"] = f"{parent[:-2]}{int(parent[-2:], 16) & 1:02x}"
    if client_id is not None and _CLIENT_ID.fullmatch(client_id):
        context["x-request-id"] = client_id
    return context


def encode_payload(
    request_id: str, body: Any, *, call_home: str, subject: str, codec: str
) -> bytes:
    """A request without its route: what a NATS message to an instance's subject carries.

    Raises WireError for an unknown codec.
    """
    home = {"address": call_home, "subject": subject, "context": request_id}
    info = msgspec.json.encode(home | {"stream_type": "response"}).decode()
    control = {
        "id": request_id,
        "request_type": "single_in",
        "response_type": "many_out",
        "payload_codec": codec,
        "connection_info": {"transport": "tcp_server", "info": info},
    }
    return encode_frame(msgspec.json.encode(control), encode_body(body, codec))


_msgpack: Final = msgspec.msgpack.Encoder(uuid_format="bytes")


def encode_body(body: Any, codec: str) -> bytes:
    """A body or an item in an instance's codec."""
    if codec == "msgpack":
        return _msgpack.encode(body)
    if codec == "json":
        return msgspec.json.encode(body)
    raise WireError("codec", f"expected one of {', '.join(CODECS)}, got {printable(codec)!r}")


def decode_reply(received: bytes | bytearray) -> str | None:
    """The acknowledgement: "" if the request was accepted, else the worker's reason.

    None if it is not complete yet. Raises WireError if it is longer than MAX_REPLY_BYTES.
    """
    if len(received) < _LENGTH.size:
        return None
    [length] = _LENGTH.unpack_from(received)
    if length > MAX_REPLY_BYTES:
        raise WireError("reply", f"{length:,} bytes, over the limit of {MAX_REPLY_BYTES:,}")
    if len(received) < _LENGTH.size + length:
        return None
    return bytes(received[_LENGTH.size : _LENGTH.size + length]).decode(errors="replace")


def encode_control(message: Literal["stop", "kill"]) -> bytes:
    """A control message to a worker that sends an answer: stop it, or drop it at once."""
    return encode_frame(msgspec.json.encode(message))


# -- the request, as a server reads it -------------------------------------------------------------

_MAX_HEADERS: Final = 256


class RoutedRequest(NamedTuple):
    """A request with its route. ``payload`` is what :func:`parse_payload` reads."""

    path: str
    headers: Mapping[str, str]
    payload: bytes


class RequestDecoder:
    """Cuts the stream of one connection into requests, for any size of the received pieces."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes`` bounds one request's payload."""
        self._received = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> None:
        """Add the next piece of the stream; then call next_request until it returns None."""
        self._received += data

    @property
    def midway(self) -> bool:
        """Whether the stream is inside a request."""
        return bool(self._received)

    @property
    def waiting(self) -> int:
        """Received bytes of a request that is not complete."""
        return len(self._received)

    def next_request(self) -> RoutedRequest | None:
        """The next complete request, None if it is not complete yet.

        Raises WireError; the stream cannot be used afterwards.
        """
        received = self._received
        route = self._part(_SHORT, 0)
        if route is None:
            return None
        headers = self._part(_SHORT, route[1])
        if headers is None:
            return None
        start = headers[1] + _LENGTH.size
        if len(received) < start:
            return None
        [length] = _LENGTH.unpack_from(received, headers[1])
        if length > self._max_bytes:
            problem = f"a body of {length:,} bytes, over the limit of {self._max_bytes:,}"
            raise WireError("request", problem)
        if len(received) < start + length:
            return None
        try:
            path = route[0].decode()
            read = msgspec.json.decode(headers[0], type=dict[str, Any]) if headers[0] else {}
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise WireError("request", str(error)) from None
        if len(read) > _MAX_HEADERS:
            raise WireError("request", f"{len(read):,} headers, over the limit of {_MAX_HEADERS}")
        payload = bytes(received[start : start + length])
        del received[: start + length]
        texts = {name: text for name, text in read.items() if isinstance(text, str)}
        return RoutedRequest(path, texts, payload)

    def _part(self, size: struct.Struct, at: int) -> tuple[bytes, int] | None:
        """The bytes of a part with its length before it, and where they end."""
        if len(self._received) < at + size.size:
            return None
        [length] = size.unpack_from(self._received, at)
        end = at + size.size + length
        if len(self._received) < end:
            return None
        return bytes(self._received[at + size.size : end]), end


class Requested(NamedTuple):
    """The content of a request: where its answer goes, and the body in ``codec``, undecoded.

    ``call_home`` is the requester's HOST:PORT, ``subject`` its name of the answer.
    """

    request_id: str
    call_home: str
    subject: str
    codec: str
    body: Buffer


class _ConnectionInfoJson(msgspec.Struct):
    transport: str
    info: str


class _ControlJson(msgspec.Struct):
    id: str
    connection_info: _ConnectionInfoJson
    payload_codec: str = "json"


class _HomeJson(msgspec.Struct):
    address: str
    subject: str


def parse_payload(payload: bytes) -> Requested:
    """Read a request without its route. Raises WireError."""
    frames = FrameDecoder()
    frames.feed(payload)
    frame = frames.next_frame(len(payload))
    if frame is None or frames.midway:
        raise WireError("request", f"its {len(payload):,} bytes are not one frame")
    try:
        control = msgspec.json.decode(frame.header, type=_ControlJson)
        home = msgspec.json.decode(control.connection_info.info, type=_HomeJson)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WireError("request", str(error)) from None
    transport = control.connection_info.transport
    if transport != "tcp_server":
        problem = f"expected an answer over tcp_server, got {printable(transport)!r}"
        raise WireError("request", problem)
    if control.payload_codec not in CODECS:
        problem = f"expected one of {', '.join(CODECS)}, got {printable(control.payload_codec)!r}"
        raise WireError("codec", problem)
    return Requested(control.id, home.address, home.subject, control.payload_codec, frame.body)


def parse_host_port(address: str) -> tuple[str, int]:
    """Read ``HOST:PORT``; an IPv6 host has brackets. Raises WireError."""
    parsed = parse_address(f"{address}/-")
    return parsed.host, parsed.port


def decode_body(body: Buffer, codec: str, kind: Any = Any) -> Any:
    """A request's body as ``kind`` (a msgspec type). Raises WireError without quoting it."""
    try:
        if codec == "msgpack":
            return msgspec.msgpack.decode(body, type=kind)
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError("body", printable(str(error))) from None


def encode_reply(refusal: str = "") -> bytes:
    """The acknowledgement of a request; ``refusal`` is the reason why it is not accepted."""
    text = refusal.encode()[:MAX_REPLY_BYTES]
    return _LENGTH.pack(len(text)) + text


# -- the answer, as a server writes it -------------------------------------------------------------


def encode_handshake(subject: str) -> bytes:
    """The first frame of an answer."""
    return encode_frame(msgspec.json.encode({"subject": subject, "stream_type": "response"}))


def encode_prologue(error: str | None = None) -> bytes:
    """The second frame: None, or the reason why there is no answer."""
    return encode_frame(msgspec.json.encode({"error": error}))


def encode_item(item: Any, codec: str) -> bytes:
    """One item; a RawItem in the same codec is copied."""
    before, after = _AROUND[codec]
    if isinstance(item, RawItem):
        document = item.document if item.codec == codec else encode_body(item.decode(), codec)
    else:
        document = encode_body(item, codec)
    return encode_frame(body=b"".join((before, document, after)))


def encode_end(codec: str) -> bytes:
    """The last two frames of a complete answer."""
    return encode_frame(body=encode_body({"complete_final": True}, codec)) + _SENTINEL


_SENTINEL: Final = encode_frame(b'"sentinel"')


def parse_control(frame: Frame) -> str:
    """What the requester sends while it reads: ``stop``, ``kill`` or ``sentinel``."""
    try:
        return msgspec.json.decode(frame.header, type=str)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WireError("control", str(error)) from None


# -- the answer ------------------------------------------------------------------------------------


class _HandshakeJson(msgspec.Struct):
    subject: str
    stream_type: str = "response"


def parse_handshake(frame: Frame) -> str:
    """The subject in the first frame of a connection."""
    try:
        read = msgspec.json.decode(frame.header, type=_HandshakeJson)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WireError("handshake", str(error)) from None
    if read.stream_type != "response":
        problem = f"expected a response stream, got {printable(read.stream_type)!r}"
        raise WireError("handshake", problem)
    return read.subject


class RawItem(msgspec.Struct, frozen=True, gc=False):
    """One item of an answer, undecoded: a single document in ``codec``.

    A large item is not parsed before it is read, and then in slices if its format allows that, so
    that it does not block the event loop.
    """

    document: Buffer
    codec: str

    def decode(self) -> Any:
        """The item as plain objects. Raises WireError."""
        try:
            if self.codec == "msgpack":
                return msgspec.msgpack.decode(self.document)
            return msgspec.json.decode(self.document)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError("item", str(error)) from None

    @classmethod
    def wrap(cls, item: Any) -> "RawItem":
        """``item`` if it is a RawItem, else the item encoded as msgpack."""
        return item if isinstance(item, cls) else cls(encode_body(item, "msgpack"), "msgpack")


@dataclass(frozen=True, slots=True)
class Begun:
    """The worker will answer."""


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """The worker refuses to answer; ``error`` is its reason."""

    error: str


@dataclass(frozen=True, slots=True)
class Completed:
    """All items were sent."""


@dataclass(frozen=True, slots=True)
class Sentinel:
    """The worker closes the connection now."""


Step = Begun | RequestRefused | RawItem | Completed | Sentinel


class _ItemDocument(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw()
    complete_final: bool = False


_MSGPACK_ITEM: Final = msgspec.msgpack.Decoder(_ItemDocument)
_JSON_ITEM: Final = msgspec.json.Decoder(_ItemDocument)
# The bytes before and after the item in Dynamo's documents. A cut at these bytes is proved later:
# if the item decodes completely, the cut was right, because documents are prefix free.
_AROUND: Final = {
    "msgpack": (b"\x82\xa4data", b"\xaecomplete_final\xc2"),
    "json": (b'{"data":', b',"complete_final":false}'),
}


class AnswerDecoder:
    """Reads the steps of an answer after its handshake, in order: Begun or Refused is the first.

    ``max_bytes`` bounds all frames together. ``frames`` may have bytes that arrived with the
    handshake.
    """

    def __init__(self, codec: str, max_bytes: int, frames: FrameDecoder | None = None) -> None:
        self._codec = codec
        self._max_bytes = max_bytes
        self._left = max_bytes
        self._frames = frames or FrameDecoder()
        self._begun = False

    def feed(self, data: bytes) -> None:
        self._frames.feed(data)

    @property
    def midway(self) -> bool:
        """Whether the stream is inside a frame."""
        return self._frames.midway

    @property
    def waiting(self) -> int:
        """Received bytes that are not read yet."""
        return self._frames.waiting

    def next_step(self) -> Step | None:
        """The next step, None if it is not complete yet. After a WireError it cannot be used."""
        frames = self._frames
        if not frames.received:
            return None
        try:
            frame = frames.next_frame(self._left)
        except WireError as error:
            problem = f"{error.problem} left of {self._max_bytes:,} for the whole answer"
            raise WireError("answer", problem) from None
        if frame is None:
            return None
        self._left -= PREFIX_BYTES + len(frame.header) + len(frame.body)
        try:
            if not self._begun:
                return self._prologue(frame)
            if frame.header and frame.body:
                raise WireError("answer", "a frame with both a header and a body")
            return self._item(frame.body) if frame.body else self._control(frame.header)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise WireError("answer", str(error)) from None

    def _prologue(self, frame: Frame) -> Step:
        read = msgspec.json.decode(frame.header, type=dict[str, Any])
        if "error" not in read:
            raise WireError("prologue", "expected a field `error`")
        self._begun = True
        error = read["error"]
        if error is None:
            return Begun()
        text = error if isinstance(error, str) else msgspec.json.encode(error).decode()
        return RequestRefused(printable(text))

    def _control(self, header: bytes) -> Step:
        message = msgspec.json.decode(header)
        if message == "sentinel":
            return Sentinel()
        raise WireError("answer", "expected an item or the sentinel, got another header")

    def _item(self, body: bytes | memoryview) -> Step:
        if len(body) > _SMALL:
            before, after = _AROUND[self._codec]
            if body[: len(before)] == before and body[-len(after) :] == after:
                return RawItem(memoryview(body)[len(before) : -len(after)], self._codec)
        read = (_MSGPACK_ITEM if self._codec == "msgpack" else _JSON_ITEM).decode(body)
        if read.complete_final:
            return Completed()
        document = memoryview(read.data)
        if not document:
            raise WireError("answer", "an item without `data`")
        return RawItem(document, self._codec)
