"""The file of the contexts: where it is and what it says.

Completion reads it on every TAB, so what only a change needs is in `dynctl.settings.contexts.edit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dynctl.base.errors import UsageProblem
from dynctl.settings.contexts.keys import Value, checked_name, checked_values, known, near
from dynctl.settings.contexts.path import CURRENT, LARGEST_BYTES, TABLE, config_place

MOST_CONTEXTS: Final = 1000


@dataclass(frozen=True, slots=True)
class Contexts:
    """What the file says. ``current`` may name a context that is not there."""

    path: Path
    current: str | None = None
    contexts: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)


def config_path() -> Path:
    """The file, whether it is there or not."""
    return Path(config_place())


def read_contexts(path: Path | None = None) -> Contexts:
    """All contexts; none where there is no file. Raises UsageProblem naming file, key and what
    was expected."""
    where = path or config_path()
    return parse(where, read_text(where))


def read_text(path: Path) -> str | None:
    """What is in the file; None where there is none. Raises UsageProblem."""
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


def parse(path: Path, text: str | None) -> Contexts:
    """What a text means; ``path`` is for errors (UsageProblem)."""
    if text is None:
        return Contexts(path)
    import tomllib

    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageProblem(f"{path}: not TOML: {error}") from None
    try:
        return _checked(path, document)
    except UsageProblem as error:
        raise UsageProblem(f"{path}: {error.message}", error.hint) from None


def _checked(path: Path, document: Mapping[str, object]) -> Contexts:
    top = (CURRENT, TABLE)
    for key in document:
        if key not in top:
            raise UsageProblem(f"{key}: unknown key{near(key, top)}", known(top))
    current = document.get(CURRENT)
    if current is not None and not isinstance(current, str):
        raise UsageProblem(f"{CURRENT}: expected the name of a context, in quotes")
    tables = document.get(TABLE, {})
    if not isinstance(tables, dict):
        raise UsageProblem(f"{TABLE}: expected tables [{TABLE}.NAME]")
    if len(tables) > MOST_CONTEXTS:
        raise UsageProblem(f"{TABLE}: {len(tables):,} of them, expected at most {MOST_CONTEXTS:,}")
    found = {}
    for name, table in tables.items():
        place = f"{TABLE}.{name}"
        try:
            checked_name(name)
        except UsageProblem as error:
            raise UsageProblem(f"{TABLE}: {error.message}") from None
        if not isinstance(table, dict):
            raise UsageProblem(
                f"{place}: expected a table [{place}]", "for example: frontend = [..]"
            )
        found[name] = checked_values(table, f"{place}.")
    return Contexts(path, current or None, found)
