"""stdout for commands that run until they are stopped: `events tail`, `thresholds watch`.

Writing never blocks the event loop, however slow the terminal is, and the stream ends when its
reader leaves, even while there is nothing to write. Besides ``render.emit`` the only writer to
stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TextIO, TypeVar

import msgspec

from dynctl.base.errors import ReaderLeft, UsageProblem
from dynctl.base.options import STREAM_FORMATS, GlobalOptions, OutputFormat
from dynctl.base.tasks import end_tasks
from dynctl.base.terminal import printable_json, printable_value
from dynctl.documents.thresholds import ThresholdEvent
from dynctl.screens.thresholds import event_line

Item = TypeVar("Item")

#: A pipe that polls as writable takes this much at once (POSIX: PIPE_BUF on Linux).
_PIECE: Final = 4096
_AT_ONCE: Final = 256


class LiveOutput:
    """Text to a stream. A context manager; raises ReaderLeft when the reader of a pipe left."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._left: asyncio.Future[None] | None = None
        self._fd: int | None = None
        self._polled = True
        with contextlib.suppress(OSError, ValueError):
            self._fd = self._stream.fileno()

    def __enter__(self) -> LiveOutput:
        loop = asyncio.get_running_loop()
        self._left = loop.create_future()
        self._stream.flush()
        # The writing end of a pipe becomes readable only when the other end closes.
        if self._fd is not None and stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            with contextlib.suppress(OSError, NotImplementedError):
                loop.add_reader(self._fd, self._reader_left)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError, NotImplementedError):
                asyncio.get_running_loop().remove_reader(self._fd)
        if self._left is not None and not self._left.cancelled():
            self._left.cancel()

    async def write(self, text: str) -> None:
        """Write all of ``text``, as fast as the reader takes it."""
        try:
            if self._fd is None:
                self._stream.write(text)
                self._stream.flush()
                return
            data = text.encode(self._stream.encoding or "utf-8", "replace")
            for at in range(0, len(data), _PIECE):
                await self._write_piece(data[at : at + _PIECE])
        except BrokenPipeError:
            raise ReaderLeft from None

    async def reader_left(self) -> None:
        """Wait until the reader leaves; raises ReaderLeft."""
        if self._left is not None:
            await asyncio.shield(self._left)
        raise ReaderLeft

    async def _write_piece(self, data: bytes) -> None:
        assert self._fd is not None
        while data:
            await self._writable(self._fd)
            data = data[os.write(self._fd, data) :]

    async def _writable(self, fd: int) -> None:
        if not self._polled:
            return
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        try:
            loop.add_writer(fd, _resolve, ready)
        except (OSError, NotImplementedError):
            self._polled = False  # a regular file: always writable, and it cannot be polled
            return
        try:
            await ready
        finally:
            loop.remove_writer(fd)

    def _reader_left(self) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
        if self._left is not None:
            _resolve(self._left)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class LineStream:
    """Lines on stdout as they come. ``limit``: lines to show at most; ``shown`` counts them.

    ``what`` and ``command`` are for the UsageProblem that an unsuitable output format raises.
    """

    def __init__(
        self, options: GlobalOptions, *, what: str, command: str, limit: int | None = None
    ) -> None:
        if options.output not in STREAM_FORMATS:
            raise UsageProblem(
                f"-o {options.output}: {what} are a stream; expected table, wide or jsonl",
                f"{command} -o jsonl",
            )
        self.shown = 0
        self._limit = limit
        self._as_json = options.output is OutputFormat.JSONL

    async def write(
        self,
        take: Callable[[int], Awaitable[Sequence[Item]]],
        line: Callable[[Item], str],
        duration: float | None = None,
        heading: str = "",
    ) -> None:
        """Write what ``take`` (at most so many items) returns until the limit is reached or
        ``duration`` seconds have passed. ``line``: an item with its line end. Raises ReaderLeft
        when the reader of stdout leaves."""
        with LiveOutput() as output:
            writing = asyncio.create_task(self._write(output, take, line, duration, heading))
            leaving = asyncio.create_task(output.reader_left())
            try:
                tasks = {writing, leaving}
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                await end_tasks((writing, leaving))

    async def _write(
        self,
        output: LiveOutput,
        take: Callable[[int], Awaitable[Sequence[Item]]],
        line: Callable[[Item], str],
        duration: float | None,
        heading: str,
    ) -> None:
        end = None if duration is None else asyncio.get_running_loop().time() + duration
        if heading:
            await output.write(heading)
        while self._limit is None or self.shown < self._limit:
            most = _AT_ONCE if self._limit is None else min(_AT_ONCE, self._limit - self.shown)
            try:
                async with asyncio.timeout_at(end):
                    items = await take(most)
            except TimeoutError:
                return
            # Outside of the timeout: a line is written completely or not at all.
            if self._as_json:
                text = printable_json("".join(line(item) for item in items))
            else:
                text = "".join(line(printable_value(item)) for item in items)
            await output.write(text)
            self.shown += len(items)


class ThresholdStream(LineStream):
    """`thresholds watch`: changes of thresholds and busy states.

    :meth:`put` may be called from any thread once :meth:`show` has begun.
    """

    def __init__(self, options: GlobalOptions, *, limit: int | None = None) -> None:
        super().__init__(
            options, what="threshold changes", command="dynctl thresholds watch", limit=limit
        )
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[list[ThresholdEvent]] = asyncio.Queue()

    def put(self, events: list[ThresholdEvent]) -> None:
        """Show these events; without effect once the loop has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, events)

    async def show(self, duration: float | None = None) -> None:
        """Show events until the limit or for ``duration`` seconds; raises ReaderLeft."""

        async def take(most: int) -> list[ThresholdEvent]:
            events = await self._queue.get()
            return events if self._limit is None else events[:most]

        await self.write(take, self._line, duration)

    def _line(self, event: ThresholdEvent) -> str:
        text = msgspec.json.encode(event).decode() if self._as_json else event_line(event)
        return text + "\n"
