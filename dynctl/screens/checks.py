"""The screen of checks: sections, a line a check, and what to do about each finding.

Any room's report is drawn here, so that every doctor of dynctl looks the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from dynctl.findings.catalogue import catalogue
from dynctl.findings.report import CheckResult, CodeList, CodePage, Finding, Report, Section, State
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, table
from dynctl.screens.numbers import opening, plural

_MARKS: Final = {State.PASS: "pass", State.WARN: "WARN", State.FAIL: "FAIL", State.SKIP: "skip"}
_INDENT: Final = " " * 5
_LABEL: Final = _INDENT + "  "
_MOST_SHOWN: Final = 5
_ROOMY: Final = 100
_SHORTEST: Final = 12


def check_report(report: Report, canvas: Canvas) -> str:
    """Everything that was checked, section by section, then the sums."""
    return joined([*checked(report, canvas), "", *sums(report, canvas)])


def checked(report: Report, canvas: Canvas) -> Iterator[str]:
    """What was looked at, and every section."""
    yield from report.sources
    for section in report.sections:
        yield from titled(section.name, canvas)
        yield from _section(section, canvas)


def titled(name: str, canvas: Canvas) -> tuple[str, str, str]:
    """How a section of the screen begins."""
    return "", canvas.bold(name), "-" * len(name)


def joined(lines: Iterable[str]) -> str:
    """The screen of some lines."""
    return "".join(line + "\n" for line in lines)


def _section(section: Section, canvas: Canvas) -> Iterator[str]:
    told: set[str] = set()
    for check in section.checks:
        if check.state is State.SKIP:
            if check.message not in told:
                told.add(check.message)
                yield from _skipped(section, check, canvas)
        elif check.state is State.PASS:
            yield from _passed(check, canvas)
        else:
            yield from _wrong(check, canvas)


def _passed(check: CheckResult, canvas: Canvas) -> Iterator[str]:
    """One line; what was seen gives way, from its end, where the terminal is narrow."""
    line = f"{_MARKS[check.state]} {check.code} {check.title}"
    room = len(check.message)
    if canvas.width is not None:
        room = min(room, canvas.width - len(line) - 2)
    if not check.message or room < min(_SHORTEST, len(check.message)):
        yield from canvas.paragraph(line, first="", rest=_INDENT)
    else:
        yield f"{line}: {opening(check.message, room)}"


def _skipped(section: Section, check: CheckResult, canvas: Canvas) -> list[str]:
    """Checks that are skipped for one reason stand in one place."""
    same = [
        one for one in section.checks if one.state is State.SKIP and one.message == check.message
    ]
    if len(same) == 1:
        what = f"{check.code} {check.title}"
    elif len(same) == len(section.checks):
        what = f"all {len(same)} checks"
    else:
        what = ", ".join(_runs([one.code for one in section.checks], {one.code for one in same}))
    reason = f"could not be read: {check.message}" if check.unread else check.message
    return canvas.paragraph(f"{_MARKS[check.state]} {what}: {reason}", first="", rest=_INDENT)


def _runs(codes: Sequence[str], chosen: Set[str]) -> Iterator[str]:
    """The chosen ones of ``codes``; three and more in a row as ``DYT0401..DYT0405``."""
    for picked, run in groupby(codes, key=chosen.__contains__):
        first, *rest = run
        if picked and len(rest) > 1:
            yield f"{first}..{rest[-1]}"
        elif picked:
            yield from (first, *rest)


def _wrong(check: CheckResult, canvas: Canvas) -> Iterator[str]:
    first, *rest = canvas.paragraph(
        f"{_MARKS[check.state]} {check.code} {check.title}", first="", rest=_INDENT
    )
    yield canvas.bold(first[:4]) + first[4:]
    yield from rest
    shown = one_by_one(check.findings) if canvas.wide else alike(check.findings)[:_MOST_SHOWN]
    for one in shown:
        yield from canvas.paragraph(one.text, first=_INDENT, rest=_LABEL)
    hidden = len(check.findings) - sum(one.count for one in shown)
    if hidden:
        yield f"{_INDENT}and {hidden:,} more (-o wide shows all)"
    yield from _labelled("expected", _unique([one.first.expected for one in shown]), canvas)
    if canvas.wide or canvas.screen_width >= _ROOMY:
        entry = catalogue().get(check.code)
        yield from _labelled("why", [] if entry is None else [entry.cause], canvas)
    told = _unique([one.fix for one in shown]) if canvas.wide else fixes(shown)
    yield from _labelled("fix", told, canvas)
    yield from _labelled("note", [check.message] if check.message else [], canvas)
    yield from _labelled("more", [f"dynctl explain {check.code}"], canvas)


def _labelled(label: str, texts: Sequence[str], canvas: Canvas) -> Iterator[str]:
    """``label`` before each of ``texts``; a hint of several lines keeps them."""
    for text in texts:
        for number, line in enumerate(text.splitlines()):
            head = label if number == 0 else ""
            first = f"{_LABEL}{head:<9} "
            yield from canvas.paragraph(line, first=first, rest=" " * len(first))


def _unique(texts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def sums(report: Report, canvas: Canvas) -> Iterator[str]:
    """The checks counted, and what no check looks at."""
    summary = report.summary
    counted = (
        f"{summary.passed:,} passed",
        plural(summary.warnings, "warning"),
        f"{summary.failed:,} failed",
        f"{summary.skipped:,} skipped",
    )
    yield ", ".join(counted)
    if summary.unread:
        yield f"warning: {summary.unread:,} of those skipped could not be read"
    if report.not_checked:
        text = f"never checked: {', '.join(report.not_checked)}"
        yield from canvas.paragraph(text, first="", rest="  ")


# -- explain ---------------------------------------------------------------------------------------


def code_page(page: CodePage, canvas: Canvas) -> str:
    """One code: its condition, an example finding, the cause and the fix."""
    level = "retired" if page.retired else page.level
    first, *rest = canvas.paragraph(page.title, first=f"{page.code}  ", rest=" " * 9)
    code, title = first[: len(page.code)], first[len(page.code) :]
    lines = [canvas.bold(code) + title, *rest, f"          {page.section}, {level}", ""]
    for label, text in (
        ("example", f"{page.subject}: {page.found}"),
        ("expected", page.expected),
        ("why", page.cause),
        ("fix", page.fix),
    ):
        lines += canvas.paragraph(text, first=f"{label:<9} ", rest=" " * 10)
    return "".join(line + "\n" for line in lines)


def code_list(result: CodeList, canvas: Canvas) -> str:
    """Every code with its claim."""
    columns: list[Column[CodePage]] = [
        Column("code", "CODE", lambda c: c.code, lambda c: c.code),
        Column("level", "LEVEL", lambda c: c.level, lambda c: c.level),
        Column("section", "SECTION", lambda c: c.section, lambda c: c.section, rank=1, wide=True),
        Column("title", "HEALTHY CONDITION", lambda c: c.title, lambda c: c.title, name=True),
    ]
    return table(columns, result.codes, canvas)


_KINDS_OF_KINDS: Final = ("Resource",)
"""Their names are what a fix is about, not to whom it is done."""
_FEWEST: Final = 3
"""So many findings are gathered; two are read as fast one by one."""


@dataclass(frozen=True, slots=True)
class Alike:
    """``first`` stands for ``count`` findings, itself among them.

    ``one_fix``: they all have the fix of the first one, to the letter.
    """

    first: Finding
    count: int = 1
    one_fix: bool = True

    @property
    def text(self) -> str:
        """Of whom, and what."""
        subject, value, more = self.first.subject, self.first.value, self.count - 1
        # Reasons of others often name their subject themselves.
        if subject in value:
            return f"{value} (and {more:,} more like it)" if more else value
        return f"{subject} and {more:,} more: {value}" if more else f"{subject}: {value}"

    @property
    def fix(self) -> str:
        """What to do about all of them."""
        if self.one_fix:
            return self.first.fix
        return f"{self.first.fix}\nlikewise for {self.count - 1:,} more (-o wide shows all)"


def fixes(shown: Sequence[Alike]) -> list[str]:
    """What to do about all that is shown; what is done alike to each of many is said once."""
    groups: dict[str, list[Alike]] = defaultdict(list)
    for one in shown:
        groups[_pattern(one.first)[2]].append(one)
    told = []
    for group in groups.values():
        if len(group) < _FEWEST:
            told += [one.fix for one in group]
        else:
            same = all(one.one_fix and one.fix == group[0].fix for one in group)
            told.append(Alike(group[0].first, sum(one.count for one in group), same).fix)
    return list(dict.fromkeys(told))


def alike(findings: Sequence[Finding]) -> list[Alike]:
    """Three or more that differ in their subject only become one, where the first of them stood."""
    groups: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    for one in findings:
        groups[_pattern(one)].append(one)
    told: list[Alike] = []
    for one in findings:
        group = groups[_pattern(one)]
        if len(group) < _FEWEST:
            told.append(Alike(one))
        elif one is group[0]:
            told.append(Alike(one, len(group), len({other.fix for other in group}) == 1))
    return told


def one_by_one(findings: Sequence[Finding]) -> list[Alike]:
    """Every finding for itself."""
    return [Alike(one) for one in findings]


def _pattern(finding: Finding) -> tuple[str, str, str]:
    """The texts without what names the subject.

    Commands name it without its kind and namespace; values are left alone there, since a name may
    be that of a domain's value.
    """
    value, expected, fix = (
        text.replace(finding.subject, "\0")
        for text in (finding.value, finding.expected, finding.fix)
    )
    kind, _, named = finding.subject.partition(" ")
    name = named.rpartition(".")[0] or named
    if kind.isalpha() and name and kind not in _KINDS_OF_KINDS:
        fix = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", "\0", fix)
    return value, expected, fix
