"""Dynamo's TCP request plane: what travels when a worker's endpoint is asked.

The question goes to the address that discovery names; the worker acknowledges it on the same
connection (an empty reply, or a text that says why not) and answers over a connection of its own,
made to the address that the question names: it "calls home". There it sends two-part frames: who
calls (``subject``), a prologue (``error`` or null), the items, an end marker, ``"sentinel"``.

Everything here is pure; the sockets live in ``dynctl.adapters.dynamo.request_plane``.
"""

import struct
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import msgspec

from dynctl.base.decode_errors import WireError

CODECS: Final = ("msgpack", "json")
MAX_REPLY_BYTES: Final = 64 * 1024
MAX_HANDSHAKE_BYTES: Final = 4 * 1024
"""Of the first frame of whoever connects, before it has named a subject that we know."""

_MAX_TEXT: Final = 300  # characters of a peer's text that an error quotes
_SMALL: Final = 32 * 1024
_LENGTH: Final = struct.Struct(">I")
_SHORT: Final = struct.Struct(">H")

Buffer = bytes | memoryview


class Address(NamedTuple):
    """Where an instance is asked. ``path`` names the endpoint within the process."""

    host: str
    port: int
    path: str


def parse_address(address: str) -> Address:
    """Read ``HOST:PORT/ID/NAMESPACE/COMPONENT/ENDPOINT``; an IPv6 host stands in brackets."""
    location, slash, path = address.partition("/")
    host, colon, port = location.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    port_number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
    if not (slash and path and colon and host and 0 < port_number < 65536):
        raise WireError("address", f"expected HOST:PORT/PATH, got {printable(address)!r}")
    return Address(host, port_number, path)


def format_host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def printable(text: str) -> str:
    """A peer's text, fit for one line of a terminal."""
    cut = text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in cut)


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
"""Of one header; real ones are below 1 KiB."""

_COPIED: Final = 32 * 1024  # bytes; what comes in one read of a socket is cheaper copied


class Frame(NamedTuple):
    """One frame as received. A large body is a view of a buffer of its own."""

    header: bytes
    body: bytes | memoryview


def encode_frame(header: bytes = b"", body: bytes = b"") -> bytes:
    return _LENGTHS.pack(len(header), len(body), 0) + header + body


class FrameDecoder:
    """Cuts a byte stream into frames, whatever pieces it comes in.

    What a frame claims to hold is bounded by the caller before it is waited for. A large body is
    handed out as a view of the buffer it was collected in, since copying a 100 MB answer would
    stop the event loop.
    """

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> None:
        """Take the next piece of the stream; call next_frame until it has no more."""
        self._received += data

    @property
    def midway(self) -> bool:
        """Whether an end of the stream now would cut a frame."""
        return bool(self._received)

    def next_frame(self, max_bytes: int) -> Frame | None:
        """The next whole frame, None when more must be fed.

        Raises WireError when it claims more than ``max_bytes`` (prefix, header and body), or a
        header above MAX_HEADER_BYTES; the stream is of no use afterwards.
        """
        received = self._received
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
        header = bytes(received[PREFIX_BYTES:start])
        if body_bytes > _COPIED:
            self._received = received[end:]
            return Frame(header, memoryview(received)[start:end].toreadonly())
        body = bytes(received[start:end])
        del received[:end]
        return Frame(header, body)


# -- the question ----------------------------------------------------------------------------------


def encode_request(
    path: str, request_id: str, body: Any, *, call_home: str, subject: str, codec: str
) -> bytes:
    """One question as it is written to the instance.

    ``call_home`` is the HOST:PORT where we listen, ``subject`` what the worker says when it calls.
    ``codec`` is the instance's own and is used for the body and all items of the answer. Raises
    WireError for another codec than CODECS and for a path that is too long to be sent.
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
    payload = encode_frame(msgspec.json.encode(control), encode_body(body, codec))
    headers = msgspec.json.encode({"request-id": request_id, "x-endpoint-path": path})
    route = path.encode()
    if len(headers) > 0xFFFF or len(payload) > 0xFFFF_FFFF:
        problem = f"a path of {len(route):,} bytes with a body of {len(payload):,} cannot be sent"
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


def encode_body(body: Any, codec: str) -> bytes:
    """A body or an item in an instance's codec."""
    if codec == "msgpack":
        return msgspec.msgpack.encode(body)
    if codec == "json":
        return msgspec.json.encode(body)
    raise WireError("codec", f"expected one of {', '.join(CODECS)}, got {printable(codec)!r}")


def decode_reply(received: bytes | bytearray) -> str | None:
    """The acknowledgement: "" when the question was accepted, else the worker's text.

    None when more must be read; raises WireError when it claims to be longer than MAX_REPLY_BYTES.
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
    """What the asking side may write to the connection of an answer: end it, or drop it now."""
    return encode_frame(msgspec.json.encode(message))


# -- the answer ------------------------------------------------------------------------------------


class _HandshakeJson(msgspec.Struct):
    subject: str
    stream_type: str = "response"


def parse_handshake(frame: Frame) -> str:
    """The subject that a caller names in its first frame."""
    try:
        read = msgspec.json.decode(frame.header, type=_HandshakeJson)
    except msgspec.MsgspecError as error:
        raise WireError("handshake", str(error)) from None
    if read.stream_type != "response":
        problem = f"expected a response stream, got {printable(read.stream_type)!r}"
        raise WireError("handshake", problem)
    return read.subject


@dataclass(frozen=True, slots=True)
class RawItem:
    """One item of an answer, undecoded: a single document in ``codec``.

    A large one is not looked into before it is decoded, so that its size costs the event loop
    nothing until somebody reads it, in slices where the format allows.
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
    def of(cls, item: Any) -> "RawItem":
        """Itself, or a decoded item back in msgpack."""
        return item if isinstance(item, cls) else cls(encode_body(item, "msgpack"), "msgpack")


@dataclass(frozen=True, slots=True)
class Begun:
    """The worker will answer."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker will not answer, and says why."""

    error: str


@dataclass(frozen=True, slots=True)
class Completed:
    """All items were sent."""


@dataclass(frozen=True, slots=True)
class Sentinel:
    """The worker closes the connection now."""


Step = Begun | Refused | RawItem | Completed | Sentinel


class _ItemDocument(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw()
    complete_final: bool = False


# Before and after the item in a document of Dynamo's. Cutting there leaves the item unproved until
# it is decoded; one that decodes whole proves the cut, because documents are prefix free.
_AROUND: Final = {
    "msgpack": (b"\x82\xa4data", b"\xaecomplete_final\xc2"),
    "json": (b'{"data":', b',"complete_final":false}'),
}


class AnswerDecoder:
    """Reads an answer's steps after its handshake, in order: Begun or Refused comes first.

    ``max_bytes`` bounds all frames together. ``frames`` may hold bytes that came with the
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
        """Whether an end of the stream now would cut a frame."""
        return self._frames.midway

    def next_step(self) -> Step | None:
        """The next step, None when more must be fed. Raises WireError; no use afterwards."""
        try:
            frame = self._frames.next_frame(self._left)
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
        except msgspec.MsgspecError as error:
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
        return Refused(printable(text))

    def _control(self, header: bytes) -> Step:
        message = msgspec.json.decode(header)
        if message == "sentinel":
            return Sentinel()
        raise WireError("answer", "expected an item or the sentinel, got another header")

    def _item(self, body: bytes | memoryview) -> Step:
        before, after = _AROUND[self._codec]
        if len(body) > _SMALL and body[: len(before)] == before and body[-len(after) :] == after:
            return RawItem(memoryview(body)[len(before) : -len(after)], self._codec)
        if self._codec == "msgpack":
            read = msgspec.msgpack.decode(body, type=_ItemDocument)
        else:
            read = msgspec.json.decode(body, type=_ItemDocument)
        if read.complete_final:
            return Completed()
        document = memoryview(read.data)
        if not document:
            raise WireError("answer", "an item without `data`")
        return RawItem(document, self._codec)
