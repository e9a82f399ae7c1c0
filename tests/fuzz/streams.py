"""A grammar of chunked streams: valid ones, faults in them, and the reads in which they arrive.

A message has three frames: the bytes of a response, the sizes of its reads (a byte each, repeated;
none: all at once), and faults (each a byte for its kind and one for its place). What a stream is
must not depend on the reads.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle
from typing import Final
from unittest import mock

from dynctl.serving.engines import response_stream
from dynctl.serving.engines.apis import EventCut, event_data, event_name, events_of
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.response_stream import ClientBounds, EngineStream
from tests.fuzz.mutator import Message

_BOUNDS: Final = ClientBounds(header_bytes=1 << 20)
_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n")
_LINES: Final = (
    b'data: {"choices":[{"delta":{"content":"x"}}]}',
    b"data: [DONE]",
    b"data:{}",
    b": a comment",
    b"event: error\ndata: {}",
    b"id: 7",
    b"data: " + b"y" * 300,
)
#: What a fault changes, and into what.
_FAULTS: Final = (
    (b"\r\n", b"\n"),
    (b"\r\n", b""),
    (b"\r\n", b"\r\n\r\n"),
    (b"\r\n", b" \r\n"),
    (b"\r\n", b";" + b"e" * 300 + b"\r\n"),
    (b"\r\n", b"\r\nffffffff\r\n"),
    (b"\r\n", b"\r\n1000000\r\n"),
    (b"\r\n", b"\r\n0\r\n"),
    (b"\r\n", b"\r\n-1\r\n"),
    (b"\r\n", b"\r\n0x5\r\n"),
    (b"\r\n", b"\r\nx-huge: " + b"h" * 20_000 + b"\r\n"),
    (b"chunked", b"chunked\r\ncontent-length: 5"),
    (b"chunked", b"identity"),
    (b"HTTP/1.1 200", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200"),
    (b"\n", b"\x00"),
)
#: Reads of one message: more are as these, and take long.
_MOST_READS: Final = 1024


def streams() -> list[Message]:
    """Valid responses, in reads of all kinds."""
    choose = random.Random(11)
    return [(_response(choose), _sizes(choose), b"") for _ in range(300)]


def _response(choose: random.Random) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    if choose.random() < 0.1:
        head += b"x-huge: " + b"h" * choose.randrange(20_000) + b"\r\n"
    lines = choose.choices(_LINES, k=choose.randrange(12))
    body = b"".join(line + choose.choice(_ENDS) for line in lines)
    parts = [head, b"transfer-encoding: chunked\r\n\r\n"]
    at = 0
    while at < len(body):
        size = choose.choice((1, 1, 2, 16, 17, 50, 400, 5000))
        piece = body[at : at + size]
        extension = choose.choice((b"", b"", b"", b";a=b", b" \t;" + b"e" * 200))
        digits = choose.choice((b"%x", b"%X", b"%04x")) % len(piece)
        parts += [digits, extension, b"\r\n", piece, b"\r\n"]
        at += size
    trailer = b"x-trailer: 1\r\n" * choose.choice((0, 0, 1, 40))
    return b"".join((*parts, b"0\r\n", trailer, b"\r\n"))


def _sizes(choose: random.Random) -> bytes:
    return choose.choice((b"", b"\x01", b"\x01\xff", b"\x02\x03", choose.randbytes(8)))


def read_stream(response: bytes, sizes: bytes, faults: bytes) -> None:
    """Read it at once and in pieces, by a reader and by a pipe. Raises UpstreamFailure, and
    AssertionError where these differ."""
    sent = _broken(response, faults)
    at_once = _loop().run_until_complete(_read([sent], pipes=False))
    pieces = list(_reads(sent, sizes))
    with mock.patch.multiple(response_stream, _TURN_CHUNKS=3, _PARTS_ABOVE=64, _TURN_BYTES=128):
        results = [
            _loop().run_until_complete(_read(pieces, pipes=pipes)) for pipes in (False, True)
        ]
    for content, failure in results:
        assert str(failure) == str(at_once[1]), f"{failure} in pieces, {at_once[1]} at once"
        if failure is None:
            assert content == at_once[0], "the content depends on the reads"
    for event in events_of(EventCut().whole(at_once[0])):
        event_data(event)
        event_name(event)
    if at_once[1] is not None:
        raise at_once[1]


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _broken(response: bytes, faults: bytes) -> bytes:
    for kind, place in zip(faults[:8:2], faults[1:8:2], strict=False):
        what, into = _FAULTS[kind % len(_FAULTS)]
        number = place % max(1, response.count(what))
        parts = response.split(what)
        if len(parts) > 1:
            before, after = parts[: number + 1], parts[number + 1 :]
            response = what.join(before) + into + what.join(after)
    return response


def _reads(sent: bytes, sizes: bytes) -> Iterator[bytes]:
    at = 0
    for number, size in enumerate(cycle(sizes or b"\x00")):
        if at >= len(sent):
            return
        end = at + size if size and number < _MOST_READS else len(sent)
        yield sent[at:end]
        at = end


class _Wire:
    """A connection that nothing is done with."""

    keep = False

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...

    def relay(self, take: Callable[[bytes], None] | None) -> None: ...

    def finished(self, *, clean: bool) -> None: ...


async def _read(pieces: list[bytes], *, pipes: bool) -> tuple[bytes, UpstreamFailure | None]:
    """The content, and the failure that ended it."""
    stream, cut, content = EngineStream(_Wire(), "http://engine", _BOUNDS), EventCut(), bytearray()

    def write(chunks: bytes) -> None:
        at = 0
        while at < len(chunks):
            line = chunks.index(b"\r\n", at)
            size = int(chunks[at:line].partition(b";")[0], 16)
            content.extend(chunks[line + 2 : line + 2 + size])
            at = line + size + 4

    async def take() -> None:
        while not stream.status:
            await stream.wait()
        while True:
            if pipes and await stream.pipe(write, lambda _: 1 << 30, cut):
                break
            piece = await stream.readany()
            if not piece:
                break
            content.extend(cut.whole(piece) if pipes else piece)
        content.extend(cut.waiting)

    taking = asyncio.ensure_future(take())
    await asyncio.sleep(0)
    for piece in pieces:
        if stream.done:
            break
        stream.received(piece)
        while stream._queued:  # noqa: ASYNC110  the wire is paused
            await asyncio.sleep(0)
    stream.ended(None)
    try:
        await taking
    except UpstreamFailure as failure:
        return bytes(content), failure
    finally:
        stream.close()
    return bytes(content), None
