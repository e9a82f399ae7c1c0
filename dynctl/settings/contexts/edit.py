"""Change the file of the contexts.

A change is written whole or not at all, for the owner alone (mode 0600), one program at a time.
Comments stay; a text that cannot be changed line by line is written anew, after a copy was put
aside.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dynctl.base.errors import UsageProblem
from dynctl.settings.contexts import toml_edit
from dynctl.settings.contexts.file import MOST_CONTEXTS, Contexts, config_path, parse, read_text
from dynctl.settings.contexts.path import LARGEST_BYTES, VARIABLE

_BEGINNING: Final = (
    "# Contexts of dynctl: where it looks, by name. Yours to edit: `dynctl context` changes lines\n"
    "# and keeps comments.\n"
)
_ANEW: Final = (
    "# Contexts of dynctl. This text was written by `dynctl context`, which could not change the\n"
    "# earlier one line by line; that one, with its comments, is in {copy}.\n"
)


def change(edit: Callable[[Contexts], Contexts]) -> Contexts:
    """Read the file, write what ``edit`` makes of it, and return that.

    Two programs that do so wait for each other. Raises UsageProblem, also where the file cannot
    be written.
    """
    # A link (of who keeps his configuration elsewhere) stays one.
    path = Path(os.path.realpath(config_path()))
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _alone(path.parent):
            text = read_text(path)
            before = parse(path, text)
            after = edit(before)
            if after != before:
                text = _changed(path, text or "", before, after)
                _bounded(path, after, text)
                _write(path, text)
            return after
    except OSError as error:
        raise UsageProblem(
            f"{path}: cannot be written: {error.strerror or error}",
            f"another place: {VARIABLE}=FILE in the environment",
        ) from None


def _bounded(path: Path, after: Contexts, text: str) -> None:
    """Never write what could not be read again."""
    if len(after.contexts) > MOST_CONTEXTS or len(text.encode()) > LARGEST_BYTES:
        raise UsageProblem(
            f"{path}: full, it takes {MOST_CONTEXTS:,} contexts and {LARGEST_BYTES:,} bytes",
            "dynctl context remove NAME makes room",
        )


def _changed(path: Path, text: str, before: Contexts, after: Contexts) -> str:
    """The new text: the old one with the lines changed that must be, where that works out."""
    edited = text or _BEGINNING + "\n"
    for name in before.contexts:
        if name not in after.contexts:
            edited = toml_edit.without_context(edited, name)
    for name, values in after.contexts.items():
        if before.contexts.get(name) != values:
            edited = toml_edit.with_context(edited, name, values)
    if after.current != before.current:
        edited = toml_edit.with_current(edited, after.current)
    with contextlib.suppress(UsageProblem):
        if parse(path, edited) == after:
            return edited
    copy = path.with_name(path.name + ".bak")
    _write(copy, text)
    lines = [_ANEW.format(copy=copy.name), "\n"]
    if after.current is not None:
        lines += [toml_edit.with_current("", after.current), "\n"]
    for name, values in after.contexts.items():
        lines += [*toml_edit.table_lines(name, values), "\n"]
    return "".join(lines)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other dynctl changes a file of ``folder``; the kernel lets go when one dies."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems have no locks; there the last one to write wins.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(path: Path, text: str) -> None:
    """Put ``text`` in place of the file in one step; mkstemp makes files of mode 0600."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
