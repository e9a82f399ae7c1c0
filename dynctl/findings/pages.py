"""The pages of the codes: one for ``dynctl explain CODE``, and all of them as docs/checks/."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter

from dynctl.findings.catalogue import Entry, all_codes
from dynctl.findings.report import CodeList, CodePage

_MADE = "<!-- Made from dynctl/findings/*.toml by `make docs`; change those files. -->"
_HEAD = f"""\
{_MADE}
# Finding codes of `check`, `topology verify`, `topology lint` and `test`, and the doubts of `route`

Every check has a code. A check passes, warns, fails, or is skipped with a reason. A check whose
objects could not be read is skipped, never passed. `dynctl explain CODE` shows the same pages
without a network. `--suppress CODE` leaves a check out, `--suppress 'CODE=Pod my-llm-*.prod'` its
findings about some subjects; `--fail-on skip` also fails on checks that could not be read,
`--fail-on warn` on warnings too. Codes are never reused.
Each page shows an example of a finding: names and values are those of the example. Codes without a
number are conditions of a running `dynctl serve frontend`: its log, `/health`, `dynctl check` and
the dashboard show them. Codes of the level `doubt` are not checked: they come with an answer of
`dynctl route`, and name an input that is unknown or a behaviour that is not modelled.\
"""


def page(entry: Entry) -> CodePage:
    """The page of one code, with its example finding."""
    arguments = dict(entry.example)
    subject = arguments.pop("subject", "")
    found, expected, fix = entry.texts(subject, arguments)
    return CodePage(
        entry.code,
        entry.level,
        entry.section,
        entry.title,
        found,
        expected,
        entry.cause,
        fix,
        entry.retired,
        subject,
    )


def code_list(prefix: str = "") -> CodeList:
    """The pages of all codes that start with ``prefix``, for example of a family (DYT)."""
    return CodeList([page(entry) for code, entry in all_codes().items() if code.startswith(prefix)])


def markdown() -> dict[str, str]:
    """File name -> content, of docs/checks/: an index, and a page for each section."""
    index, pages = [_HEAD], dict[str, str]()
    for section, grouped in groupby(all_codes().values(), attrgetter("section")):
        entries = list(grouped)
        index += _index(section, entries)
        pages[entries[0].file] = "\n".join(_section(section, entries)) + "\n"
    return {"README.md": "\n".join(index) + "\n", **pages}


def _index(section: str, entries: list[Entry]) -> Iterator[str]:
    yield f"\n## [{section.capitalize()}]({entries[0].file})\n"
    yield "| code | level | healthy condition |\n|---|---|---|"
    for entry in entries:
        level = "retired" if entry.retired else entry.level
        yield f"| [{entry.code}]({entry.file}#{entry.anchor}) | {level} | {entry.title} |"


def _section(section: str, entries: list[Entry]) -> Iterator[str]:
    yield f"{_MADE}\n# {section.capitalize()}\n\n[All codes](README.md)"
    for entry in entries:
        shown = page(entry)
        level = "retired: no longer checked" if entry.retired else entry.level
        yield f"\n## {entry.code}\n"
        yield f"**{entry.title}** ({level})\n"
        yield f"{shown.cause}\n"
        for label, text in shown.texts:
            if label != "why":
                yield f"- {label.capitalize()}: `{text}`"
