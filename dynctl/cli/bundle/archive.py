"""The `.tar.gz` of a bundle, readable only by its owner."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import secrets
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dynctl.base.errors import UsageProblem, file_problem

#: The directory that an archive unpacks into.
ROOT: Final = "dynctl-bundle"
#: Bytes before compression: of one member, and of all.
MAX_MEMBER: Final = 32 << 20
MAX_TOTAL: Final = 96 << 20
_MODE: Final = 0o600


def check_target(path: Path, *, force: bool) -> None:
    """Raise UsageProblem if the file cannot or must not be written."""
    if path.is_symlink() or path.exists():
        if path.is_dir():
            raise UsageProblem(f"{path}: is a directory; expected the name of a file to write")
        if not force:
            raise UsageProblem(
                f"{path}: exists already", "choose another file, or overwrite it: --force"
            )
    if not path.absolute().parent.is_dir():
        raise UsageProblem(f"{path}: directory {path.absolute().parent} does not exist")


def pack(members: Sequence[tuple[str, bytes]], at: float) -> bytes:
    """The archive's bytes, identical for the same members and second."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in members:
            entry = tarfile.TarInfo(f"{ROOT}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(at), _MODE
            archive.addfile(entry, io.BytesIO(data))
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=int(at)) as zipped:
        zipped.write(raw.getvalue())
    return packed.getvalue()


def write_new(path: Path, data: bytes, *, force: bool) -> None:
    """Write a file that only its owner can read, atomically.

    Raises UsageProblem if it exists and ``force`` is not set, or if it cannot be written.
    """
    check_target(path, force=force)
    # Without force the file is created under its own name, which never replaces another file.
    target = path.with_name(f".{path.name}.{secrets.token_hex(4)}") if force else path
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        if force:
            target.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            target.unlink()
        if isinstance(error, OSError):
            raise _unwritable(path, error) from None
        raise


def _unwritable(path: Path, error: OSError) -> UsageProblem:
    return UsageProblem(f"{path}: cannot be written: {file_problem(error, writing=True)}")
