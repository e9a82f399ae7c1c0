"""A log as it grows: a file, also when it is rotated, or standard input.

Read in small pieces between other work, never waited for; lines are handed on whole.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dynctl.base.errors import UsageProblem

STDIN: Final = "-"
_EVERY_S: Final = 0.25
_PIECE: Final = 64 * 1024
#: At most this much at a time, so that a huge log does not hold up the screen.
_AT_ONCE: Final = 16
#: Of a log that is there already, the end is of interest.
_TAIL: Final = 256 * 1024
_LONGEST: Final = 64 * 1024


class LogTail:
    """``name``: a path, or ``-``. ``take`` gets each line without its end.

    Raises UsageProblem for a file that cannot be read, or a standard input that is a terminal.
    Standard input is kept apart at once: the dashboard needs its place for the keyboard.
    """

    def __init__(self, name: str, take: Callable[[str], None]) -> None:
        self.name = "standard input" if name == STDIN else name
        self._take = take
        self._path = None if name == STDIN else Path(name)
        self._rest = b""
        self._inode: int | None = None
        self.ended = False
        if self._path is None:
            if os.isatty(0):
                raise UsageProblem(
                    "--frontend-log -: standard input is a terminal",
                    "kubectl logs -f POD | dynctl top .. --frontend-log -",
                )
            self._fd: int | None = os.dup(0)
            os.set_blocking(self._fd, False)
        else:
            self._fd = self._open(self._path, tail=True)

    async def run(self) -> None:
        """Read until cancelled, or until standard input ends."""
        while not self.ended:
            self.read()
            await asyncio.sleep(_EVERY_S)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def read(self) -> None:
        """Hand on what has come since the last time."""
        for _ in range(_AT_ONCE):
            if self._fd is None:
                break
            try:
                data = os.read(self._fd, _PIECE)
            except BlockingIOError:
                return
            if not data:
                break
            self._lines(data)
        else:
            return
        if self._path is None:
            # A pipe at its end has no writer any more; a file may grow.
            self.ended = self._fd is None or not stat.S_ISREG(os.fstat(self._fd).st_mode)
        else:
            self._reopen(self._path)

    def _lines(self, data: bytes) -> None:
        *whole, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LONGEST:]
        for line in whole:
            self._take(line.decode("utf-8", "replace").rstrip("\r"))

    def _open(self, path: Path, *, tail: bool = False) -> int:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            told = os.fstat(fd)
        except OSError as error:
            raise UsageProblem(f"--frontend-log {path}: {error.strerror}") from None
        if stat.S_ISDIR(told.st_mode):
            os.close(fd)
            raise UsageProblem(f"--frontend-log {path}: a directory; expected a log file")
        self._inode = told.st_ino
        if tail and stat.S_ISREG(told.st_mode) and told.st_size > _TAIL:
            os.lseek(fd, told.st_size - _TAIL, os.SEEK_SET)
            os.read(fd, 1)
            self._rest = b"\0"  # the beginning of that line is missing, so it says nothing
        return fd

    def _reopen(self, path: Path) -> None:
        """Go on with the file that has the name now, where the old one was moved or emptied."""
        try:
            told = os.stat(path)
        except OSError:
            return  # between two files of a rotation
        fd = self._fd
        same = fd is not None and told.st_ino == self._inode
        if same and fd is not None and told.st_size >= os.lseek(fd, 0, os.SEEK_CUR):
            return
        if not stat.S_ISREG(told.st_mode):
            return
        if fd is not None:
            os.close(fd)
        self._rest = b""
        self._fd = self._open(path)
