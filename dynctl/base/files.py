"""Files that an operator names: how each is read and written.

Reading has a bound on bytes and time: a path may be a pipe without a writer, a device without an
end, or a file that grows. Writing makes a file for its owner alone, whole or not at all.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path
from typing import Final

from dynctl.base.errors import (
    LinkedFile,
    NotARegularFile,
    SilentPipe,
    file_error,
    named_in_errors,
)

#: Seconds in which a pipe, such as the shell's ``<(COMMAND)``, must end.
PIPE_S: Final = 30.0
_PIECE: Final = 1 << 20
_OPEN: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: Names of open files, which are links to what they are.
_OPEN_FILES: Final = ("/dev/fd/", "/proc/self/fd/", "/dev/stdout", "/dev/stderr")


def read_file(path: str | os.PathLike[str], most: int, *, pipe: bool = True) -> bytes:
    """The bytes of a file, at most ``most`` + 1 of them: one too many shows a file too large.

    ``pipe``: a pipe is read, too, for at most `PIPE_S` seconds. Raises OSError with the file's
    name; NotARegularFile for devices and sockets, SilentPipe for a pipe that does not end.
    """
    with named_in_errors(path):
        descriptor = os.open(path, _OPEN)
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                raise file_error(IsADirectoryError, errno.EISDIR, path)
            if stat.S_ISREG(mode):
                return _whole(descriptor, most)
            if stat.S_ISFIFO(mode) and pipe:
                return _piped(descriptor, most, path)
            if os.path.realpath(path) == os.devnull:
                return b""
            raise file_error(NotARegularFile, errno.EINVAL, path)
        finally:
            os.close(descriptor)


def expect_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless a library that opens the path by itself can read it to its end."""
    with named_in_errors(path):
        if not stat.S_ISREG(os.stat(path).st_mode):
            read_file(path, 0, pipe=False)


def write_private_file(path: Path, data: bytes, *, new: bool = False) -> None:
    """Write a file that only its owner can read (mode 0600): the whole one, or none.

    A file of that name is replaced, unless ``new``; a symbolic link is not followed. Raises OSError
    with the file's name.
    """
    with named_in_errors(path):
        if str(path).startswith(_OPEN_FILES):
            path.write_bytes(data)
            return
        _expect_writable(path, new=new)
        part = path.with_name(f".{path.name[:100]}.{os.urandom(6).hex()}.part")
        try:
            with os.fdopen(os.open(part, _NEW, 0o600), "wb") as file:
                file.write(data)
            if new:
                os.link(part, path)
            else:
                part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _expect_writable(path: Path, *, new: bool) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if new:
        raise file_error(FileExistsError, errno.EEXIST, path)
    if stat.S_ISLNK(mode):
        raise file_error(LinkedFile, errno.ELOOP, path)
    if stat.S_ISDIR(mode):
        raise file_error(IsADirectoryError, errno.EISDIR, path)
    if not stat.S_ISREG(mode):
        raise file_error(NotARegularFile, errno.EINVAL, path)


def _whole(descriptor: int, most: int) -> bytes:
    pieces, left = [], most + 1
    while left > 0 and (piece := os.read(descriptor, min(left, _PIECE))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _piped(descriptor: int, most: int, path: str | os.PathLike[str]) -> bytes:
    pieces, left = [], most + 1
    ends = time.monotonic() + PIPE_S
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while left > 0:
        wait = ends - time.monotonic()
        if wait <= 0 or not poll.poll(wait * 1000):
            raise file_error(SilentPipe, errno.ETIMEDOUT, path)
        try:
            piece = os.read(descriptor, min(left, _PIECE))
        except BlockingIOError:
            continue
        if not piece:
            break
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
