"""Read the contexts file.

Completion reads it on every TAB, so code that only a change needs is in
`dynctl.settings.contexts.edit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dynctl.base.errors import UsageProblem, file_problem
from dynctl.base.files import read_file
from dynctl.settings.contexts.keys import (
    Value,
    checked_name,
    checked_values,
    did_you_mean,
    known_names,
)
from dynctl.settings.contexts.path import CURRENT, LARGEST_BYTES, TABLE, config_file

MOST_CONTEXTS: Final = 1000


@dataclass(frozen=True, slots=True)
class Contexts:
    """The content of the file. ``current`` may name a context that does not exist."""

    path: Path
    current: str | None = None
    contexts: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)


def config_path() -> Path:
    """The path of the contexts file, which may not exist yet."""
    return Path(config_file())


def read_contexts(path: Path | None = None) -> Contexts:
    """All contexts, none if there is no file.

    Raises UsageProblem with the file, the key and what was expected.
    """
    where = path or config_path()
    return parse(where, read_text(where))


def read_text(path: Path) -> str | None:
    """The text of the file, None if there is no file. Raises UsageProblem."""
    try:
        data = read_file(path, LARGEST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageProblem(f"{path}: cannot be read: {file_problem(error)}") from None
    if len(data) > LARGEST_BYTES:
        raise UsageProblem(f"{path}: larger than {LARGEST_BYTES:,} bytes; not a contexts file")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageProblem(f"{path}: expected TOML in UTF-8") from None


def parse(path: Path, text: str | None) -> Contexts:
    """Parse the text of a contexts file. Raises UsageProblem, which names ``path``."""
    if text is None:
        return Contexts(path)
    import tomllib

    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageProblem(f"{path}: not TOML: {error}") from None
    try:
        return _contexts_of(path, document)
    except UsageProblem as error:
        raise UsageProblem(f"{path}: {error.message}", error.hint) from None


def _contexts_of(path: Path, document: Mapping[str, object]) -> Contexts:
    top = (CURRENT, TABLE)
    for key in document:
        if key not in top:
            raise UsageProblem(f"{key}: unknown key{did_you_mean(key, top)}", known_names(top))
    current = document.get(CURRENT)
    if current is not None and not isinstance(current, str):
        raise UsageProblem(f"{CURRENT}: expected the name of a context, in quotes")
    tables = document.get(TABLE, {})
    if not isinstance(tables, dict):
        raise UsageProblem(f"{TABLE}: expected tables [{TABLE}.NAME]")
    if len(tables) > MOST_CONTEXTS:
        raise UsageProblem(f"{TABLE}: {len(tables):,} contexts; expected at most {MOST_CONTEXTS:,}")
    contexts = {}
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
        contexts[name] = checked_values(table, f"{place}.")
    return Contexts(path, current or None, contexts)
