"""stdout for a command that goes on until somebody ends it.

Writing never blocks the event loop, however slow the terminal is, and a reader that leaves is
noticed though nothing is written. Beside ``render.emit`` the only writer to stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
from typing import Final, TextIO

from dynctl.base.errors import ReaderLeft

#: A pipe that polls as writable takes this much at once (POSIX: PIPE_BUF on Linux).
_PIECE: Final = 4096


class LiveOutput:
    """Text to a stream. A context manager; raises ReaderLeft once its reader has left."""

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
        # The writing end of a pipe is never readable, save to say that the other end is gone.
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
        """All of ``text``, as fast as it is taken."""
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
        """Returns only by raising ReaderLeft."""
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
