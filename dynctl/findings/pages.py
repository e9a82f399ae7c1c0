"""The pages of the codes: one for ``dynctl explain CODE``, and all of them as docs/checks.md."""

from __future__ import annotations

from collections.abc import Iterator

from dynctl.findings.catalogue import Catalogue, Entry, all_codes
from dynctl.findings.report import CodeList, CodePage

_HEAD = """\
<!-- Made from dynctl/findings/*.toml by `dynctl explain --markdown`; change those files. -->
# Finding codes of `dynctl check`, `topology verify` and `topology lint`, and the doubts of `route`

Every check has a code. A check passes, warns, fails, or is skipped with a reason. A check whose
objects could not be read is skipped, never passed. `dynctl explain CODE` shows the same pages
without a network. `--suppress CODE` leaves a check out, `--suppress 'CODE=Pod my-llm-*.prod'` its
findings about some subjects; `--fail-on warn` also fails on warnings. Codes are never reused.
Each page shows an example of a finding: names and values are those of the example. Codes without a
number are conditions of a running `dynctl serve frontend`: its log, `/health`, `dynctl check` and
the dashboard show them. Codes of the level `doubt` are not checked: they come with an answer of
`dynctl route`, and name an input that is unknown or a behaviour that is not modelled.
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


def markdown() -> str:
    """The content of docs/checks.md."""
    every = all_codes()
    return "\n".join([_HEAD, *_index(every), *_pages(every)])


def _index(codes: Catalogue) -> Iterator[str]:
    yield "| code | level | healthy condition |\n|---|---|---|"
    for entry in codes.values():
        level = "retired" if entry.retired else entry.level
        yield f"| [{entry.code}](#{entry.anchor}) | {level} | {entry.title} |"


def _pages(codes: Catalogue) -> Iterator[str]:
    section = ""
    for entry in codes.values():
        if entry.section != section:
            section = entry.section
            yield f"\n## {section}"
        shown = page(entry)
        level = "retired: no longer checked" if entry.retired else entry.level
        yield f"\n### {entry.code}\n"
        yield f"**{entry.title}** ({level})\n"
        yield f"{shown.cause}\n"
        for label, text in shown.texts:
            if label != "why":
                yield f"- {label.capitalize()}: `{text}`"
