"""Change the contexts file.

A change is written completely or not at all, readable by the owner only (mode 0600), by one process
at a time. Comments, order and all other lines of the file stay.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dynctl.base.errors import UsageProblem, file_problem
from dynctl.settings.contexts.file import MOST_CONTEXTS, Contexts, config_path, parse, read_text
from dynctl.settings.contexts.keys import Value
from dynctl.settings.contexts.path import CURRENT, LARGEST_BYTES, TABLE, VARIABLE

_BEGINNING: Final = (
    "# Contexts of dynctl: saved endpoints, by name. You can edit this file; `dynctl context`\n"
    "# keeps your comments.\n"
)


def change(edit: Callable[[Contexts], Contexts]) -> Contexts:
    """Read the file, apply ``edit``, write the result and return it.

    Two processes that do so wait for each other. Raises UsageProblem, also if the file cannot be
    written.
    """
    # A symbolic link stays a symbolic link.
    path = Path(os.path.realpath(config_path()))
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _lock_folder(path.parent):
            text = read_text(path)
            before = parse(path, text)
            after = edit(before)
            if after != before:
                text = _edited_text(path, _BEGINNING if text is None else text, before, after)
                _check_size(path, after, text)
                _write(path, text)
            return after
    except OSError as error:
        raise UsageProblem(
            f"{path}: cannot be written: {file_problem(error, writing=True)}",
            f"use another file: {VARIABLE}=FILE in the environment",
        ) from None


def _check_size(path: Path, after: Contexts, text: str) -> None:
    """Refuse a text that could not be read again."""
    if len(after.contexts) > MOST_CONTEXTS or len(text.encode()) > LARGEST_BYTES:
        raise UsageProblem(
            f"{path}: full; at most {MOST_CONTEXTS:,} contexts and {LARGEST_BYTES:,} bytes",
            "remove a context: dynctl context remove NAME",
        )


def _edited_text(path: Path, text: str, before: Contexts, after: Contexts) -> str:
    """``text`` with the differences between ``before`` and ``after``; all other lines stay."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        document = tomlkit.parse(text)
        tables: Any = document.setdefault(TABLE, tomlkit.table(is_super_table=True))
        for name in before.contexts:
            if name not in after.contexts:
                _remove(tables, name)
        for name, values in after.contexts.items():
            if before.contexts.get(name) != values:
                _set(tables, name, before.contexts.get(name), values)
        if after.current is None:
            document.pop(CURRENT, None)
        elif after.current != before.current:
            document[CURRENT] = after.current
        edited = document.as_string()
        if parse(path, edited) == after:
            return edited
    except (TOMLKitError, RecursionError):
        pass
    raise UsageProblem(
        f"{path}: cannot be changed without losing parts of it", "change it in an editor"
    )


def _set(
    tables: Any, name: str, before: Mapping[str, Value] | None, values: Mapping[str, Value]
) -> None:
    """Set the keys of one context. A key whose value stays keeps its line and its comment."""
    import tomlkit

    if before is None:
        inline = isinstance(tables, tomlkit.items.InlineTable)
        tables[name] = tomlkit.inline_table() if inline else tomlkit.table()
    table = tables[name]
    for key in before or {}:
        if key not in values:
            del table[key]
    for key, value in values.items():
        if before is None or before.get(key) != value:
            whole = isinstance(value, float) and value.is_integer()
            table[key] = int(value) if whole else value  # type: ignore[arg-type]


def _remove(tables: Any, name: str) -> None:
    """Remove one context. Comments below its last key stay: they may belong to the next one."""
    import tomlkit

    if not all(isinstance(table, tomlkit.items.Table) for table in (tables, tables[name])):
        del tables[name]  # inline tables and dotted keys have no comments below their keys
        return
    body = tables[name].value.body
    last = max((at for at, (key, _) in enumerate(body) if key is not None), default=-1)
    below = "".join(item.as_string() for _, item in body[last + 1 :])
    place = next(at for at, (key, _) in enumerate(tables.value.body) if key and key.key == name)
    del tables[name]  # leaves an empty item in its place
    tables.value.body[place] = (None, tomlkit.ws(below if below.strip() else ""))


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no other dynctl changes a file of ``folder``.

    The kernel releases the lock when a process ends.
    """
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
