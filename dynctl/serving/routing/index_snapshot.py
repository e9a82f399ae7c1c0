"""The snapshot of an index in a directory: a local disk, or a mounted object store.

One file, written beside the old one and put in its place when it is complete: a process that is
killed leaves the old one. Its bytes are those of :mod:`dynctl.documents.index_dump`, with version
and checksums. A file that is cut, changed or of another program is never used; it is put aside, so
that the next snapshot does not destroy it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import file_problem
from dynctl.base.files import read_file
from dynctl.documents.index_dump import MAX_BYTES, DumpHead, RankDump, decode_snapshot

NAME: Final = "index.snapshot"
REFUSED: Final = "index.snapshot.refused"
_PART: Final = "index.snapshot.part-"
_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class SnapshotProblem(ValueError):
    """A snapshot that cannot be read or written; the message has its path and the reason."""


class UnusableDirectory(SnapshotProblem):
    """No snapshot can be read or written in the directory."""


class SnapshotDirectory:
    """The snapshot in ``path``. Methods block on the disk, but run in another thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing = asyncio.Lock()

    async def load(self) -> tuple[DumpHead, list[RankDump]] | None:
        """The snapshot, None without one. Raises SnapshotProblem; UnusableDirectory where no
        snapshot can be written either."""
        return await asyncio.to_thread(self._load)

    async def save(self, frames: Iterator[bytes]) -> int:
        """Replace the snapshot; returns its size in bytes. Raises SnapshotProblem."""
        async with self._writing:
            return await asyncio.to_thread(self._save, frames)

    def _load(self) -> tuple[DumpHead, list[RankDump]] | None:
        file = self.path / NAME
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for part in self.path.glob(f"{_PART}*"):
                part.unlink(missing_ok=True)
            probe = self.path / f"{_PART}{secrets.token_hex(6)}"
            probe.touch(exist_ok=False)
            probe.unlink()
        except FileExistsError:
            raise UnusableDirectory(f"{self.path}: is a file; expected a directory") from None
        except OSError as error:
            problem = file_problem(error, "directory", writing=True)
            raise UnusableDirectory(f"{self.path}: {problem}") from None
        try:
            data = read_file(file, MAX_BYTES, pipe=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SnapshotProblem(f"{file}: {file_problem(error)}") from None
        try:
            if len(data) > MAX_BYTES:
                raise WireError("index dump", f"more than {MAX_BYTES:,} bytes")
            return decode_snapshot(data)
        except WireError as error:
            aside = ""
            with contextlib.suppress(OSError):
                file.replace(self.path / REFUSED)
                aside = f"; it is now {self.path / REFUSED}"
            raise SnapshotProblem(f"{file}: {error.problem}{aside}") from None

    def _save(self, frames: Iterator[bytes]) -> int:
        part = self.path / f"{_PART}{secrets.token_hex(6)}"
        size = 0
        try:
            # A program that reads the hashes can confirm a prompt that it guesses.
            with os.fdopen(os.open(part, _FLAGS, 0o600), "wb") as opened:
                for frame in frames:
                    size += len(frame)
                    if size > MAX_BYTES:
                        raise SnapshotProblem(
                            f"{part.parent / NAME}: the index has more than {MAX_BYTES:,} bytes, "
                            "the maximum of a snapshot"
                        )
                    opened.write(frame)
                opened.flush()
                os.fsync(opened.fileno())
            part.replace(self.path / NAME)
            with contextlib.suppress(OSError):  # not every mounted store can
                directory = os.open(self.path, os.O_RDONLY)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)
        except OSError as error:
            raise SnapshotProblem(
                f"{self.path / NAME}: {file_problem(error, writing=True)}"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        return size
