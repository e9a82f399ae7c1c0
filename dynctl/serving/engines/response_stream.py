"""One response of an engine, parsed from its bytes: head, length or chunks, and the end.

Without a socket: a :class:`Wire` feeds it, and it pauses, resumes and releases that wire.
Strict on purpose: an ambiguous response is an error.

One read of a connection may have tens of thousands of chunks. What a stream costs in one turn of
the event loop has a bound; the rest has to wait for its share, as all such streams together have
one, and meanwhile nothing more is read from the connection.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from dynctl.base.tasks import LoopShare
from dynctl.serving.engines.apis import EVENT_BYTES, WHOLE_EVENTS, EventCut
from dynctl.serving.engines.failures import UpstreamFailure

#: Bytes that wait for the reader before the connection is paused.
_BUFFER_BYTES: Final = 256 * 1024
#: One chunk of a stream; engines send a few hundred bytes.
_CHUNK_BYTES: Final = 16 * 1024 * 1024
#: Chunks that a stream may bring in one turn of the event loop: about 0.3 ms.
_TURN_CHUNKS: Final = 256
#: A read of as many bytes is all that a stream may bring in one turn. The loop reads as long as
#: there is more, up to 32 times, and that would be megabytes.
_TURN_BYTES: Final = 32 * 1024
#: Of a larger chunk that is not complete, the content is passed on as it arrives: to copy it whole
#: would take as long as hundreds of others.
_PARTS_ABOVE: Final = 64 * 1024
#: More than any number of bytes: what is not read yet waits for its share of the event loop.
_UNTIL_TURN: Final = 1 << 62
#: What streams that cost much may take together of each turn of the event loop, in seconds.
SHARE_S: Final = 0.002
_STATUS: Final = rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\r\n]*+)?"
#: A head before that of the response (100, 103). A proxy sends one or two; 101 is another protocol.
_INFORMATIONAL: Final = re.compile(rb"HTTP/1\.[01] 1(?!01)[0-9][0-9](?: [^\r\n]*)?\r\n")
_MOST_INFORMATIONAL: Final = 8
_SIZE_LINE: Final = re.compile(rb"([0-9a-fA-F]{1,8})(?:[ \t]*;[^\r\n]*)?")
_SIZE_LINE_BYTES: Final = 256
_WHOLE_BYTES: Final = 5
_WHOLE_MOST: Final = 8192
#: The end of a chunk of whole events.
_ENDS_WHOLE: Final = tuple(end + b"\r\n" for end in WHOLE_EVENTS)
#: How a response ends, without trailers, and how nearly all streams do.
_END: Final = b"0\r\n\r\n"
_DONE_END: Final = b"e\r\ndata: [DONE]\n\n\r\n" + _END
_WHOLE_BEGIN: Final = re.compile(rb"[0-9a-fA-F]{2,3}\r\n")


class _WholeBytes(dict[bytes, int]):
    """The first `_WHOLE_BYTES` of a chunk of 16 to 4,095 bytes -> the bytes of the whole chunk; 0
    for any other beginning. They hold its size, the end of the line, and of a short size one byte
    more."""

    def __missing__(self, begin: bytes) -> int:
        match = _WHOLE_BEGIN.match(begin)
        if match is None:
            return 0
        whole = int(match[0], 16) + match.end() + 2
        if len(self) < _WHOLE_MOST:
            self[begin] = whole
        return whole


_WHOLE: Final = _WholeBytes()
_NAME: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
#: A line feed, or another control character, would split what is passed on, or reach a terminal.
_VALUE: Final = rb"[\t\x20-\x7e\x80-\xff]*+"
_HEAD: Final = re.compile(rb"%b((?:\r\n%b:%b)*+)\r\n\r\n" % (_STATUS, _NAME, _VALUE))
#: Longer ones are not remembered.
_SHORT_HEAD: Final = 1024
_FINAL_STATUS: Final = re.compile(rb"(?!HTTP/1\.[01] 1)%b\r\n" % _STATUS)
_UNTIL_CLOSE: Final = -1


@dataclass(frozen=True, slots=True)
class ClientBounds:
    """Times in seconds, sizes in bytes; see `dynctl.serving.routing.config.Limits`."""

    connect_s: float = 3.0
    first_byte_s: float = 300.0
    idle_s: float = 300.0
    header_bytes: int = 16 * 1024


class Wire(Protocol):
    """The connection of a response. ``keep``: it may take another request afterwards."""

    keep: bool

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None:
        """Cut it."""

    def relay(self, take: Callable[[bytes], None] | None) -> None:
        """Give what arrives directly to ``take``; None: to the response again."""

    def finished(self, *, clean: bool) -> None:
        """The response is complete; ``clean``: no bytes followed it."""


class EngineStream:
    """One response. ``headers`` have lower-case names; a repeated header's last value counts.

    The first byte of its body must arrive within ``first_byte_s``, by default that of the bounds.
    """

    # Most streams change few of these.
    status = 0
    headers: Mapping[str, str] = MappingProxyType({})
    chunked = False
    done = False
    _buffered = 0
    _paused = False
    #: Of `_tail`: it is incomplete until it has as many bytes.
    _needed = 0
    #: Bytes that are missing of a large chunk whose content is passed on, with its line end.
    _left = 0
    #: Whether the stream waits for its share, and nothing is read meanwhile.
    _queued = False
    #: How the connection ended while the stream waited for its share.
    _end: tuple[Exception | None] | None = None
    _informational = 0
    _length = 0
    _failure: UpstreamFailure | None = None
    _waiter: asyncio.Future[None] | None = None
    _pipe: Callable[[bytes], None] | None = None
    #: Of a pipe; None: no piece of an event waits.
    _cut: EventCut | None = None
    _started = False
    _last_chunks = b""

    def __init__(
        self,
        wire: Wire,
        origin: str,
        bounds: ClientBounds,
        first_byte_s: float | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        share: LoopShare | None = None,
    ) -> None:
        self.origin = origin
        self._connection: Wire | None = wire
        self._bounds = bounds
        self._loop = asyncio.get_running_loop() if loop is None else loop
        self._pieces: list[bytes] = []
        #: What is not read yet.
        self._tail = bytearray()
        #: Of the event loop, with other streams; None: not needed until now.
        self._share = share
        self._first_byte_s = bounds.first_byte_s if first_byte_s is None else first_byte_s
        self._born = self._last_read = self._loop.time()
        # Soon enough for a response that begins right now, so that its first byte sets no timer.
        soon = min(self._first_byte_s, bounds.idle_s)
        self._timer = self._loop.call_later(soon, self._check_silence)

    # -- reading ---------------------------------------------------------------------------

    @property
    def exhausted(self) -> bool:
        """Whether the response is complete and was read to its end."""
        return self.done and not self._pieces

    def waits_since(self, at: float) -> bool:
        """Whether the request was sent by then, by the clock of the loop, and no output arrived."""
        return self._born <= at and not self._started

    @property
    def started(self) -> bool:
        """Whether output has arrived."""
        return self._started

    async def readany(self) -> bytes:
        """The part of the body that has arrived, at least a byte; empty at its end."""
        while not self._pieces:
            if self.done:
                return b""
            await self.wait()
        pieces, self._pieces, self._buffered = self._pieces, [], 0
        if self._paused:
            self._paused = False
            if self._connection is not None and not self._queued:
                self._connection.resume()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read(self, limit: int) -> bytes:
        """The whole body; raises UpstreamFailure if incomplete or longer than ``limit`` bytes."""
        if self.done and len(self._pieces) == 1 and len(self._pieces[0]) <= limit:
            return self._pieces.pop()  # it came at once
        body = await self.readany()
        if self.exhausted and len(body) <= limit:
            return body
        # Not a list of pieces: each of a few bytes would take twenty times its size.
        whole, piece = bytearray(), body
        while piece:
            whole += piece
            if len(whole) > limit:
                self.close()
                raise UpstreamFailure("protocol", f"{self.origin} sent more than {limit} bytes")
            piece = await self.readany()
        return bytes(whole)

    async def turn(self) -> None:
        """Wait for time of the event loop: what a reader calls between the parts of long work on
        this stream."""
        await self._loop_share().turn()

    async def pipe(
        self,
        write: Callable[[bytes], None],
        seen: Callable[[list[bytes]], int],
        cut: EventCut,
    ) -> bool:
        """Write chunks of whole events, with their frames, as they arrive.

        For a chunked response without unread pieces. ``write`` is that of a transport; RuntimeError
        means that it is closed. ``seen`` gets the chunks since its last call, those of
        :meth:`last_chunks` too, and returns after how many bytes it wants the next; 0: the other
        side is full. ``cut`` holds the event that is not complete, here and where the caller reads
        on.

        Returns True at the end; False when there is something for :meth:`last_chunks` or
        :meth:`readany`: the last chunks arrived together with the end, so that both can be passed
        on in one write, or the other side is full. Raises UpstreamFailure.
        """
        if not self.chunked or self._pieces:
            return self.exhausted
        written: list[bytes] = []
        left = seen(written)
        time, known, keep = self._loop.time, _WHOLE, written.append
        tail, waiting = self._tail, cut.waiting
        self._cut = cut

        def look() -> None:
            nonlocal left
            left = seen(written)
            written.clear()
            if left <= 0:
                self._end_pipe()
                self._release_waiter()

        def whole(chunks: bytes) -> None:
            nonlocal left
            try:
                write(chunks)
            except RuntimeError:
                left = 0
            keep(chunks)
            left -= len(chunks)
            if left <= 0:
                look()

        def take(data: bytes) -> None:
            # One chunk of whole events, as engines write them: in one function, for a frontend
            # does this more often than anything else.
            nonlocal left
            size = len(data)
            if (
                known[data[:_WHOLE_BYTES]] == size
                and data.endswith(_ENDS_WHOLE)
                and not tail
                and not waiting
            ):
                self._last_read = time()
                try:
                    write(data)
                except RuntimeError:
                    left = 0
                keep(data)
                left -= size
                if left <= 0:
                    look()
                return
            self.received(data)

        if left > 0 and not self.done:
            self._pipe = whole
            if self._connection is not None:
                self._connection.relay(take)
        try:
            while self._pipe is not None:
                await self.wait()
        finally:
            self._end_pipe()
            if self._last_chunks:
                keep(self._last_chunks)
            if written:
                seen(written)
        return self.exhausted and not self._last_chunks

    def last_chunks(self) -> bytes:
        """After a pipe: the last chunks with their frames, all of whole events up to ``[DONE]``,
        where they arrived together with the end of the response; else nothing."""
        chunks, self._last_chunks = self._last_chunks, b""
        return chunks

    def abandon(self, failure: UpstreamFailure) -> None:
        """End an incomplete response with this failure, as if the engine had failed."""
        self._fail(failure)

    def close(self) -> None:
        """Release the response; an incomplete one closes its connection, which stops the engine."""
        self._timer.cancel()
        self._queued, self._end = False, None
        self._tail.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    # -- called by the connection ----------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Take more bytes of this response."""
        if self._failure is not None:
            return
        self._last_read = self._loop.time()
        large = len(data) >= _TURN_BYTES
        tail = self._tail
        if tail:
            tail += data
            if len(tail) < self._needed:
                if large:
                    self._wait_for_share()
                return
            data = bytes(tail)
            tail.clear()
            self._needed = 0
        if not self.status:
            data = self._parse_head(data)
            if not self.status:
                return
        if self.chunked:
            self._chunks(data)
        elif self._length == _UNTIL_CLOSE:
            self._keep(data)
        else:
            self._take_counted_body(data)
        if large:
            self._wait_for_share()
        if self._pipe is None and self._waiter is not None:
            self._release_waiter()

    def ended(self, error: Exception | None) -> None:
        """The connection was closed."""
        self._connection = None
        if self.done:
            return
        if self._queued:
            self._end = (error,)
            return
        if error is None and self.status and self._length == _UNTIL_CLOSE:
            self._finish(b"")
        else:
            what = (
                "closed the connection during its response"
                if self.status
                else "closed the connection"
            )
            self._fail(UpstreamFailure("reset", f"{self.origin} {what}"))
        self._release_waiter()

    # -- inside ----------------------------------------------------------------------------

    def _loop_share(self) -> LoopShare:
        if self._share is None:
            self._share = LoopShare(SHARE_S)
        return self._share

    def _wait_for_share(self) -> None:
        """Read nothing more until there is time for this stream."""
        if self._queued or self.done or self._failure is not None:
            return
        self._queued = True
        if self._connection is not None:
            self._connection.pause()
        self._loop_share().later(self._go_on)

    def _go_on(self) -> None:
        """It is this stream's turn."""
        if not self._queued:
            return  # it was closed
        self._queued = False
        # First, so that a connection whose response is complete now can take another request.
        if self._connection is not None and not self._paused:
            self._connection.resume()
        if self._needed == _UNTIL_TURN:
            self._needed = 0
            self.received(b"")
        if self._end is not None:
            (error,), self._end = self._end, None
            self.ended(error)  # which waits again if there is more

    def _end_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe = None
            if self._connection is not None:
                self._connection.relay(None)

    async def wait(self) -> None:
        """Wait for a change; raises the failure once everything before it was read."""
        # A copy: the traceback of what is raised refers to this stream.
        failure = self._failure
        if failure is not None:
            raise replace(failure)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        failure = self._failure
        if failure is not None and not self._pieces:
            raise replace(failure)

    def _parse_head(self, data: bytes) -> bytes:
        """Parse status and headers; returns the bytes after them. Keeps an incomplete head, and
        skips those of informational responses."""
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if not 4 <= end <= self._bounds.header_bytes + 4:
                if len(data) > self._bounds.header_bytes:
                    self._protocol("headers too long")
                self._tail += data
                return b""
            read = _read_head if end <= _SHORT_HEAD else _read_head.__wrapped__
            head = read(data[:end])
            if not isinstance(head, str):
                break
            if not _INFORMATIONAL.match(data):
                self._protocol(head)
                return b""
            self._informational += 1
            if self._informational > _MOST_INFORMATIONAL:
                self._protocol(f"more than {_MOST_INFORMATIONAL} informational responses")
                return b""
            data = data[end:]
        self.headers, self.chunked, self._length = head.headers, head.chunked, head.length
        if self._connection is not None:
            self._connection.keep = head.keeps
        self.status = head.status
        return data[end:]

    def _take_counted_body(self, data: bytes) -> None:
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
        """Take whole chunks, and parts of large ones: piped with their frames, or kept without."""
        if not self._left and data.endswith(b"\r\n") and self._take_whole(data):
            return
        start = self._rest_of_chunk(data) if self._left else 0
        if start < 0:
            return
        pipe = self._pipe
        position, whole_events = self._whole_chunks(data, start, kept=pipe is None)
        size = None if position == len(data) else self._begun_chunk(data, position)
        if self._failure is not None:
            return
        if pipe is not None and position > start:
            if size == 0:
                self._end_pipe()
                self._chunks(data[start:] if start else data)
                return
            chunks = data if position - start == len(data) else data[start:position]
            if whole_events:
                pipe(chunks)
            else:
                self._pipe_events(chunks, pipe)
        if position < len(data):
            self._take_begun_chunk(data[position:] if position else data, size)

    def _take_whole(self, data: bytes) -> bool:
        """Take a read of whole chunks, the last one of the response possibly among them. False:
        it is another read."""
        pipe, cut = self._pipe, self._cut
        if pipe is not None and cut is not None and not cut.waiting:
            whole = len(data)
            if data.endswith(_END):
                whole = whole - len(_DONE_END) if data.endswith(_DONE_END) else -1
            if _are_whole_events(data, whole):
                if whole == len(data):
                    pipe(data)
                    return True
                self._end_pipe()  # so that the last events and the end are passed on in one write
                self._last_chunks = data[: -len(_END)]
                self._finish(b"")
                return True
        contents = _contents(data)
        if contents is None:
            return False
        ends = not contents[-1]
        if ends:
            self._end_pipe()  # so that the last events and the end can be passed on in one write
        content = contents[0] if len(contents) == 1 else b"".join(contents)
        if ends or pipe is None:
            self._keep(content)
        else:
            self._pipe_content(content, pipe)
        if ends:
            self._finish(b"")
        return True

    def _whole_chunks(self, data: bytes, position: int, *, kept: bool) -> tuple[int, bool]:
        """The place after the chunks from ``position`` on that are complete, as many as one turn
        may have, and whether each of them is whole events. ``kept``: their content is kept.

        All in one loop without calls: a stream may have thousands of chunks in one read.
        """
        cut = self._cut
        whole_events = cut is None or not cut.waiting
        total = len(data)
        for _ in range(_TURN_CHUNKS):
            line = data.find(b"\r\n", position, position + _SIZE_LINE_BYTES)
            size = _chunk_size(data[position:line]) if line >= 0 else None
            if not size or size > _CHUNK_BYTES:
                break
            after = line + 2 + size
            if data[after : after + 2] != b"\r\n":
                break
            if kept:
                self._keep(data[line + 2 : after])
            elif whole_events:
                whole_events = data.endswith(WHOLE_EVENTS, line + 2, after)
            position = after + 2
            if position == total:
                break
        else:
            self._needed = _UNTIL_TURN
        return position, whole_events

    def _begun_chunk(self, data: bytes, position: int) -> int | None:
        """The size of the chunk that begins at ``position`` and is not complete: 0 for the last
        one, None if it is unknown. Notes how many of its bytes are missing."""
        if self._needed == _UNTIL_TURN:
            return None
        line = data.find(b"\r\n", position, position + _SIZE_LINE_BYTES)
        if line < 0:
            if len(data) - position >= _SIZE_LINE_BYTES:
                self._protocol("chunk without a size")
            return None
        size = _chunk_size(data[position:line])
        if size is None or size > _CHUNK_BYTES:
            self._protocol("invalid chunk size")
            return None
        after = line + 2 + size
        if size and after + 2 <= len(data):
            self._protocol("chunk longer than its size")
        elif size > _PARTS_ABOVE:
            self._left = size + 2
        elif size:
            self._needed = after + 2 - position
        return size

    def _take_begun_chunk(self, data: bytes, size: int | None) -> None:
        """Take the bytes of a chunk that is not complete, or what follows the last one."""
        if size == 0:
            self._take_trailers(data)
        elif self._left:
            self._rest_of_chunk(data[data.index(b"\r\n") + 2 :])
        else:
            self._tail += data
            if self._needed == _UNTIL_TURN:
                self._wait_for_share()

    def _take_trailers(self, data: bytes) -> None:
        """After the last chunk: trailers, if any, and an empty line."""
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            self._finish(data[end + 4 :])
        elif len(data) > self._bounds.header_bytes:
            self._protocol("trailers too long")
        else:
            self._tail += data

    def _rest_of_chunk(self, data: bytes) -> int:
        """Pass on what has arrived of a large chunk; returns the place after it, -1 where it is
        not complete, or the response failed."""
        size = self._left - 2
        content = data if len(data) <= size else data[:size]
        self._left -= len(content)
        if content:
            if self._pipe is None:
                self._keep(content)
            else:
                self._pipe_content(content, self._pipe)
        if self._left > 2 or self._failure is not None:
            return -1
        if len(data) - size < 2:
            if len(data) > size:
                self._tail += data[size:]
                self._needed = 2
            return -1
        self._left = 0
        if data[size : size + 2] != b"\r\n":
            self._protocol("chunk longer than its size")
            return -1
        return size + 2

    def _pipe_events(self, chunks: bytes, pipe: Callable[[bytes], None]) -> None:
        """Pipe the whole events in these chunks, in a chunk of their own."""
        self._pipe_content(content_of(chunks), pipe)

    def _pipe_content(self, content: bytes, pipe: Callable[[bytes], None]) -> None:
        """Pipe the events that this content completes, in a chunk of their own."""
        cut = self._cut
        assert cut is not None  # of the pipe
        events = cut.whole(content)
        if events:
            pipe(chunk_of(events))
        if len(cut.waiting) > EVENT_BYTES:
            self._protocol("an event is longer than the maximum")

    def _keep(self, piece: bytes) -> None:
        if not piece:
            return
        self._started = True
        self._pieces.append(piece)
        self._buffered += len(piece)
        if self._buffered > _BUFFER_BYTES and not self._paused and self._connection is not None:
            self._paused = True
            self._connection.pause()

    def _finish(self, rest: bytes) -> None:
        if self._pipe is not None:
            self._end_pipe()  # before the connection takes another request
        self.done = True
        self._timer.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            # Bytes after the end belong to no request: such a connection is not reused.
            connection.finished(clean=not rest and not self._paused)

    def _protocol(self, problem: str) -> None:
        self._fail(UpstreamFailure("protocol", f"{self.origin}: {problem}"))

    def _fail(self, failure: UpstreamFailure) -> None:
        if self._failure is None and not self.done:
            self._failure = failure
        self._end_pipe()
        self.close()
        self._release_waiter()

    def host_is_silent(self) -> None:
        """The engine's host does not respond. A response that another engine can give ends; any
        other one may still arrive, until the system ends its connection."""
        failure = UpstreamFailure("vanished", f"{self.origin}: its host does not respond")
        if self._may_leave_after(failure):
            self._fail(failure)

    def _may_leave_after(self, failure: UpstreamFailure) -> bool:
        """Whether the request may go to another engine after this failure."""
        return not self._started

    def _release_waiter(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_silence(self) -> None:
        if self._started:
            limit, since, what = self._bounds.idle_s, self._last_read, "sent nothing for"
        else:
            limit, since, what = self._first_byte_s, self._born, "sent no output within"
        left = since + limit - self._loop.time()
        if self._paused or self._queued:
            left = limit  # our side is slow
        if left > 0:
            pause = min(left, self._bounds.idle_s)
            self._timer = self._loop.call_later(pause, self._check_silence)
            return
        self._fail(UpstreamFailure("timeout", f"{self.origin} {what} {limit:g} s"))


def content_of(chunks: bytes) -> bytes:
    """The content of whole chunks."""
    contents, at = [], 0
    while at < len(chunks):
        line = chunks.index(b"\r\n", at)
        after = line + 2 + (_chunk_size(chunks[at:line]) or 0)
        contents.append(chunks[line + 2 : after])
        at = after + 2
    return contents[0] if len(contents) == 1 else b"".join(contents)


def chunk_of(content: bytes) -> bytes:
    """A chunk with this content."""
    return b"%x\r\n%b\r\n" % (len(content), content)


class _Head(NamedTuple):
    """The head of a response. ``keeps``: its connection stays open afterwards. ``length``: of the
    body, where it is not ``chunked``."""

    status: int
    headers: Mapping[str, str]
    chunked: bool
    length: int
    keeps: bool


@lru_cache(maxsize=256)
def _read_head(head: bytes) -> _Head | str:
    """A head, or what is wrong with it. Heads of an engine are equal, but for the second."""
    match = _HEAD.match(head)
    if match is None or match[2].startswith(b"1"):
        final = _FINAL_STATUS.match(head) is not None
        return "malformed header" if final else "not a final HTTP/1.1 response"
    headers, lengths = {}, set()
    for line in match[3].decode("latin-1").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        key, text = name.lower(), value.strip(" \t")
        headers[key] = text
        if key == "content-length":
            lengths.add(text)
    status, keeps, length = int(match[2]), match[1] == b"1", 0
    encoding = headers.get("transfer-encoding")
    if encoding is not None:
        if encoding.lower() != "chunked" or lengths:
            return "ambiguous length (transfer-encoding and content-length)"
    elif lengths:
        text = lengths.pop()
        if lengths or not (text.isascii() and text.isdigit() and len(text) < 16):
            return "content-length is not a number"
        length = int(text)
    elif status not in (204, 304):
        length, keeps = _UNTIL_CLOSE, False
    keeps = keeps and "close" not in headers.get("connection", "").lower()
    return _Head(status, MappingProxyType(headers), encoding is not None, length, keeps)


def _are_whole_events(data: bytes, end: int) -> bool:
    """Whether the first ``end`` bytes are chunks of whole events and nothing else; False for a
    large read."""
    at = 0
    while at < end <= _TURN_BYTES:
        size = _WHOLE[data[at : at + _WHOLE_BYTES]]
        at += size
        if not size or not data.endswith(_ENDS_WHOLE, 0, at):
            return False
    return at == end


def _contents(data: bytes) -> list[bytes] | None:
    """The contents of chunks, as many as one turn may have, where the bytes are those chunks and
    nothing else; an empty one is the last of a response.

    None: they may be others, as contents with ends of lines of two characters. Exact for all that
    it returns, as each content between two ends of lines is as long as the size before it.
    """
    if _WHOLE[data[:_WHOLE_BYTES]] == len(data) and data.endswith(b"\r\n"):
        return [data[data.index(b"\n") + 1 : -2]]
    parts = data.split(b"\r\n", 2 * _TURN_CHUNKS + 1)
    if parts.pop():
        return None
    contents = parts[1::2]
    sizes = list(map(_chunk_size, parts[::2]))
    if sizes != list(map(len, contents)) or 0 in sizes[:-1]:
        return None
    return contents


@lru_cache(maxsize=4096)
def _chunk_size(line: bytes) -> int | None:
    match = _SIZE_LINE.fullmatch(line)
    return None if match is None else int(match[1], 16)
