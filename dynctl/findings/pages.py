"""The codes as pages: one for a person who asks, and all of them as a document."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dynctl.findings.catalogue import Catalogue, Entry, catalogue
from dynctl.findings.report import CodeList, CodePage

_HEAD = """\
<!-- Made from dynctl/findings/codes.toml by `dynctl explain --markdown`; change that file. -->
# What `dynctl check` finds

Every claim that is checked has a code. The check passes, warns, fails, or is skipped with a reason;
what could not be read is skipped and said, never passed. `dynctl explain CODE` shows the same pages
without a network. `--suppress CODE` leaves a check out, `--suppress 'CODE=Pod my-llm-*.prod'` its
findings about some subjects; `--fail-on warn` makes warnings count. Codes are never used again.
`<names>` stand for what a check fills in.
"""


def page(entry: Entry) -> CodePage:
    """The page of one code; what a finding fills in stands there as ``<name>``."""
    return CodePage(
        entry.code,
        entry.level,
        entry.section,
        entry.title,
        _open(entry.template),
        _open(entry.expected),
        entry.cause,
        _open(entry.fix),
        entry.retired,
    )


def code_list(prefix: str = "") -> CodeList:
    """The pages of every code that starts with ``prefix``: of a family (DYT), or of all."""
    return CodeList([page(one) for code, one in catalogue().items() if code.startswith(prefix)])


def markdown(codes: Catalogue) -> str:
    """docs/checks.md."""
    return "\n".join([_HEAD, *_index(codes), *_pages(codes)])


def _index(codes: Catalogue) -> Iterator[str]:
    yield "| code | level | holds when |\n|---|---|---|"
    for entry in codes.values():
        level = "retired" if entry.retired else entry.level
        yield f"| [{entry.code}](#{entry.anchor}) | {level} | {entry.title} |"


def _pages(codes: Catalogue) -> Iterator[str]:
    section = ""
    for entry in codes.values():
        if entry.section != section:
            section = entry.section
            yield f"\n## {section}"
        told = page(entry)
        level = "retired: no longer checked" if entry.retired else entry.level
        yield f"\n### {entry.code}\n"
        yield f"**{entry.title}** ({level})\n"
        yield f"Found: `{told.found}`. Expected: `{told.expected}`.\n"
        yield f"{told.cause}\n"
        yield f"Fix: `{told.fix}`"


def _open(text: str) -> str:
    if re.fullmatch(r"\{\w+\}", text):
        return "told with the finding: it depends on what was met"
    return re.sub(r"\{(\w+)\}", r"<\1>", text)
