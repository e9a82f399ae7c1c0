"""Dynamo's "two part" frame: a JSON header, a body, either of them possibly empty.

::

    u64 header length | u64 body length | u64 checksum | header | body          (big endian)

The checksum is 0 in release builds and not looked at: TCP carries these bytes, and debug builds
alone fill it.
"""

import struct
from typing import Final, NamedTuple

from dynctl.base.decode_errors import WireError

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
