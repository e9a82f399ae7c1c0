"""A log that grows: a file, also when it is rotated, or standard input.

It is read in small pieces between other work, without blocking; only whole lines are passed on.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dynctl.base.errors import UsageProblem, file_problem

STDIN: Final = "-"
_EVERY_S: Final = 0.25
_PIECE: Final = 64 * 1024
#: Pieces read at a time, so that a huge log does not delay the screen.
_AT_ONCE: Final = 16
#: Only this much of the end of an existing log is read.
_TAIL: Final = 256 * 1024
_LONGEST: Final = 64 * 1024


class LogTail:
    """``name``: a path, or ``-``. ``take`` gets each line without its end.

    Raises UsageProblem for a file that cannot be read, or a standard input that is a terminal.
    Standard input is duplicated at once: the dashboard needs file descriptor 0 for the keyboard.
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
        """Pass on the lines since the last time."""
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
            # The end of a pipe is final; a file may grow.
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
            status = os.fstat(fd)
        except OSError as error:
            raise UsageProblem(f"--frontend-log {path}: {file_problem(error)}") from None
        if stat.S_ISDIR(status.st_mode):
            os.close(fd)
            raise UsageProblem(f"--frontend-log {path}: is a directory; expected a log file")
        self._inode = status.st_ino
        if tail and stat.S_ISREG(status.st_mode) and status.st_size > _TAIL:
            os.lseek(fd, status.st_size - _TAIL, os.SEEK_SET)
            os.read(fd, 1)
            self._rest = b"\0"  # the line's beginning is missing: never pass it on
        return fd

    def _reopen(self, path: Path) -> None:
        """Continue with the new file of that name, if the old one was moved or truncated."""
        try:
            status = os.stat(path)
        except OSError:
            return  # during a rotation
        fd = self._fd
        same = fd is not None and status.st_ino == self._inode
        if same and fd is not None and status.st_size >= os.lseek(fd, 0, os.SEEK_CUR):
            return
        if not stat.S_ISREG(status.st_mode):
            return
        if fd is not None:
            os.close(fd)
        self._rest = b""
        self._fd = self._open(path)
