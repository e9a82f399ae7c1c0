"""The finding codes: title, texts, cause, fix and an example of each, read from the TOML files.

Screens, ``dynctl explain`` and docs/checks/ all take their texts from these files.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any, Final, Literal, get_args

Level = Literal["fail", "warn", "doubt"]
"""A doubt is not a finding: it is about an answer, and its code is in its own file."""

_FILES: Final = ("experiment_codes.toml", "codes.toml", "topology_codes.toml")
"""One file for each family, in the order of their codes."""
_CODE: Final = re.compile(r"DY[ERT]\d{4}|[A-Z]+(_[A-Z]+)+")
_FAMILIES: Final = {"DYE": "a server by requests", "DYR": "a live deployment", "DYT": "topology"}
SECTIONS: Final = {
    "DYE01": "models and names",
    "DYE02": "tokens",
    "DYE03": "streams",
    "DYE04": "reuse",
    "DYE05": "truth of the index",
    "DYE06": "isolation",
    "DYE07": "topology",
    "DYE08": "load",
    "DYE09": "limits",
    "DYE10": "change",
    "DYE11": "restart",
    "DYR01": "planes",
    "DYR02": "workers",
    "DYR03": "events",
    "DYR04": "frontends",
    "DYR05": "versions",
    "DYR07": "doubts about an answer",
    "DYT00": "cluster access",
    "DYT01": "transfer policy",
    "DYT02": "topology levels and nodes",
    "DYT03": "operator",
    "DYT04": "worker pods",
    "DYT05": "topology files",
    "DYT06": "worker start",
    "DYT07": "discovery",
    "DYT08": "model cards",
    "DYT09": "domain capacity",
}
"""Codes are grouped by their hundreds."""
CONDITIONS: Final = "conditions"
_DOUBT: Final = {"what": "template", "effect": "expected", "resolve": "fix"}
"""Names in the file of doubts, and the fields of an entry that they fill."""


class CatalogueError(Exception):
    """A file of codes is invalid: a defect of this program, not of its input."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One code. ``template``, ``expected`` and ``fix`` have ``{names}`` that a finding fills in.

    ``{subject}`` is always available. ``example`` has the subject and a value for each name, for
    the pages of ``dynctl explain``. A retired code is explained and no longer checked.

    A doubt has no subject; ``template`` is what is unknown, ``expected`` its effect on the answer,
    ``fix`` how to make it known.
    """

    code: str
    level: Level
    title: str
    template: str
    expected: str
    cause: str
    fix: str
    example: Mapping[str, str]
    retired: bool = False

    @property
    def anchor(self) -> str:
        """The anchor of its code on its page."""
        return self.code.lower()

    @property
    def file(self) -> str:
        """The page of its section below docs/checks."""
        return f"{self.section.replace(' ', '-')}.md"

    @property
    def section(self) -> str:
        """The name of its section, by the hundreds of its code; a condition has no number."""
        return SECTIONS.get(self.code[:5], CONDITIONS)

    @property
    def arguments(self) -> frozenset[str]:
        """The names for which a finding of this code needs values, without the subject."""
        texts = (self.template, self.expected, self.fix)
        names = {name for text in texts for _, name, _, _ in Formatter().parse(text) if name}
        return frozenset(names - {"subject"})

    def texts(self, subject: str, arguments: Mapping[str, object]) -> tuple[str, str, str]:
        """What was found, what was expected and the fix, with the arguments filled in.

        Raises ValueError where the arguments are not those of the code.
        """
        if set(arguments) != self.arguments:
            raise ValueError(f"{self.code} takes {sorted(self.arguments)}, got {sorted(arguments)}")
        values = {"subject": subject, **arguments}
        return (
            self.template.format_map(values),
            self.expected.format_map(values),
            self.fix.format_map(values),
        )


class Catalogue(Mapping[str, Entry]):
    """Code -> entry, in the order of the file."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, code: str) -> Entry:
        return self._entries[code]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def near(self, text: str) -> list[str]:
        """Codes that are similar to ``text``: same digits, same hundred, or similar spelling."""
        wanted = text.strip().upper()
        digits = "".join(filter(str.isdigit, wanted))
        same = [code for code in self if digits and code.endswith(digits.zfill(4))]
        if same:
            return same
        close = get_close_matches(wanted, list(self), n=5, cutoff=0.7)
        hundred = [code for code in self if len(wanted) > 4 and code[:5] == wanted[:5]]
        return list(dict.fromkeys([*close, *hundred]))[:5]


@cache
def conditions() -> Catalogue:
    """The conditions of a running frontend, read and checked at the first use."""
    return parse(Path(__file__).with_name("conditions.toml").read_bytes())


@cache
def catalogue() -> Catalogue:
    """The codes of this version, read and validated at the first use."""
    return parse(b"\n".join(Path(__file__).with_name(name).read_bytes() for name in _FILES))


@cache
def doubts() -> Catalogue:
    """The doubts about an answer, read and validated at the first use."""
    return parse(Path(__file__).with_name("doubts.toml").read_bytes(), doubts=True)


@cache
def all_codes() -> Catalogue:
    """The codes, the doubts and the conditions: every code that a surface shows."""
    numbered = {**catalogue(), **doubts()}
    return Catalogue({**dict(sorted(numbered.items())), **conditions()})


def parse(data: bytes, *, doubts: bool = False) -> Catalogue:
    """Parse the codes. Raises CatalogueError with the code and the problem.

    ``doubts``: the tables are doubts, with ``what``, ``effect`` and ``resolve``.
    """
    try:
        tables = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CatalogueError(f"codes: {error}") from None
    entries = {code: _entry(code, table, doubts) for code, table in tables.items()}
    if list(entries) != sorted(entries):
        raise CatalogueError("codes: expected ascending order")
    return Catalogue(entries)


def _entry(code: str, table: Any, doubt: bool) -> Entry:
    if not _CODE.fullmatch(code):
        raise CatalogueError(f"{code}: expected {', '.join(_FAMILIES)} and four digits")
    if not isinstance(table, dict):
        raise CatalogueError(f"{code}: expected a table")
    known = _fields_of_table(doubt)
    _check_field_names(code, table, known)
    level = table.get("level", "doubt")
    if level not in get_args(Level):
        raise CatalogueError(f"{code}: level {level!r}, expected fail or warn")
    if not isinstance(table.get("retired", False), bool):
        raise CatalogueError(f"{code}: retired: expected true or false")
    texts = {name: table[name] for name in known - {"retired", "level", "example"}}
    _check_texts(code, texts, table["example"])
    entry = Entry(
        code,
        level=level,
        retired=table.get("retired", False),
        example=table["example"],
        **{_DOUBT.get(name, name): text.strip() for name, text in texts.items()},
    )
    _check_placeholders(entry, doubt)
    return entry


def _fields_of_table(doubt: bool) -> set[str]:
    """The names that the table of a code, or of a doubt, has."""
    known = {item.name for item in fields(Entry)} - {"code"}
    return known - {"level", *_DOUBT.values()} | set(_DOUBT) if doubt else known


def _check_field_names(code: str, table: Mapping[str, Any], known: set[str]) -> None:
    unknown, missing = set(table) - known, known - set(table) - {"retired"}
    if unknown:
        raise CatalogueError(f"{code}: unknown {', '.join(sorted(unknown))}")
    if missing:
        raise CatalogueError(f"{code}: missing {', '.join(sorted(missing))}")


def _check_texts(code: str, texts: Mapping[str, Any], example: Any) -> None:
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise CatalogueError(f"{code}: {name}: expected a text")
    if not isinstance(example, dict) or not all(isinstance(v, str) for v in example.values()):
        raise CatalogueError(f"{code}: example: expected a table of texts")


def _check_placeholders(entry: Entry, doubt: bool) -> None:
    """The texts have ``{names}`` only, and the example has a value for each."""
    code, example = entry.code, entry.example
    try:
        names = entry.arguments
    except ValueError as error:
        raise CatalogueError(f"{code}: {error}") from None
    if not all(name.isidentifier() for name in names):
        raise CatalogueError(f"{code}: expected {{names}} only, got {sorted(names)}")
    wanted = names if doubt else {"subject", *names}
    if set(example) != wanted:
        raise CatalogueError(
            f"{code}: example: expected values for {sorted(wanted)}, got {sorted(example)}"
        )
