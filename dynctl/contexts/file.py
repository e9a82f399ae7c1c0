"""The file of the contexts: where it is, what it says, and how it is changed.

A change is written whole or not at all, for the owner alone (mode 0600), one program at a time.
Comments stay; a text that cannot be changed line by line is written anew, after a copy was put
aside.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dynctl.contexts import toml_edit
from dynctl.contexts.keys import Value, checked_name, checked_values, known, near
from dynctl.errors import UsageProblem

VARIABLE: Final = "DYNCTL_CONFIG"
LARGEST_BYTES: Final = 1 << 20
MOST_CONTEXTS: Final = 1000

_BEGINNING: Final = (
    "# Contexts of dynctl: where it looks, by name. Yours to edit: `dynctl context` changes lines\n"
    "# and keeps comments.\n"
)
_ANEW: Final = (
    "# Contexts of dynctl. This text was written by `dynctl context`, which could not change the\n"
    "# earlier one line by line; that one, with its comments, is in {copy}.\n"
)


@dataclass(frozen=True, slots=True)
class Contexts:
    """What the file says. ``current`` may name a context that is not there."""

    path: Path
    current: str | None = None
    contexts: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)


def config_path() -> Path:
    """The file, whether it is there or not: $DYNCTL_CONFIG, else below the user's configuration."""
    told = os.environ.get(VARIABLE, "")
    if told:
        return Path(told).expanduser()
    # What the specification says of relative ones: ignore them.
    base = os.environ.get("XDG_CONFIG_HOME", "")
    folder = Path(base) if base.startswith("/") else Path("~/.config").expanduser()
    return folder / "dynctl" / "config.toml"


def read_contexts(path: Path | None = None) -> Contexts:
    """All contexts; none where there is no file. Raises UsageProblem naming file, key and what
    was expected."""
    where = path or config_path()
    return _contexts(where, _text(where))


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
            text = _text(path)
            before = _contexts(path, text)
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


def _text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageProblem(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) > LARGEST_BYTES:
        raise UsageProblem(f"{path}: larger than {LARGEST_BYTES:,} bytes, this is no such file")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageProblem(f"{path}: expected TOML in UTF-8") from None


def _contexts(path: Path, text: str | None) -> Contexts:
    if text is None:
        return Contexts(path)
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageProblem(f"{path}: not TOML: {error}") from None
    try:
        return _checked(path, document)
    except UsageProblem as error:
        raise UsageProblem(f"{path}: {error.message}", error.hint) from None


def _checked(path: Path, document: Mapping[str, object]) -> Contexts:
    top = (toml_edit.CURRENT, toml_edit.TABLE)
    for key in document:
        if key not in top:
            raise UsageProblem(f"{key}: unknown key{near(key, top)}", known(top))
    current = document.get(toml_edit.CURRENT)
    if current is not None and not isinstance(current, str):
        raise UsageProblem(f"{toml_edit.CURRENT}: expected the name of a context, in quotes")
    tables = document.get(toml_edit.TABLE, {})
    if not isinstance(tables, dict):
        raise UsageProblem(f"{toml_edit.TABLE}: expected tables [{toml_edit.TABLE}.NAME]")
    if len(tables) > MOST_CONTEXTS:
        raise UsageProblem(
            f"{toml_edit.TABLE}: {len(tables):,} of them, expected at most {MOST_CONTEXTS:,}"
        )
    found = {}
    for name, table in tables.items():
        place = f"{toml_edit.TABLE}.{name}"
        try:
            checked_name(name)
        except UsageProblem as error:
            raise UsageProblem(f"{toml_edit.TABLE}: {error.message}") from None
        if not isinstance(table, dict):
            raise UsageProblem(
                f"{place}: expected a table [{place}]", "for example: frontend = [..]"
            )
        found[name] = checked_values(table, f"{place}.")
    return Contexts(path, current or None, found)


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
        if _contexts(path, edited) == after:
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
