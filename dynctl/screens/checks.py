"""The screen of checks: sections, one line per check, and the fix of each finding.

`check`, `topology verify` and `topology lint` draw their reports here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from dynctl.findings.catalogue import all_codes
from dynctl.findings.report import (
    FLEET,
    CheckResult,
    ClientError,
    CodeList,
    CodePage,
    Finding,
    Report,
    Runbook,
    Section,
    State,
)
from dynctl.screens.canvas import Canvas, Color
from dynctl.screens.columns import Column, table
from dynctl.screens.numbers import opening, plural

_MARKS: Final = {State.PASS: "pass", State.WARN: "WARN", State.FAIL: "FAIL", State.SKIP: "skip"}
_COLORS: Final = {State.PASS: Color.GREEN, State.WARN: Color.YELLOW, State.FAIL: Color.RED}
_INDENT: Final = " " * 5
_LABEL: Final = _INDENT + "  "
_MOST_SHOWN: Final = 5
_ROOMY: Final = 100
_SHORTEST: Final = 12


def check_report(report: Report, canvas: Canvas) -> str:
    """All checks, section by section, then the totals."""
    return join_lines([*report_sections(report, canvas), "", *sums(report, canvas)])


def report_sections(report: Report, canvas: Canvas) -> Iterator[str]:
    """The sources and all sections."""
    for source in report.sources:
        yield from canvas.paragraph(source, first="", rest=_INDENT)
    for section in report.sections:
        yield from section_heading(section.name, canvas)
        yield from _section(section, canvas)


def section_heading(name: str, canvas: Canvas) -> tuple[str, str, str]:
    """The heading of a section."""
    return "", canvas.bold(name), "-" * len(name)


def join_lines(lines: Iterable[str]) -> str:
    """Lines as one text."""
    return "".join(line + "\n" for line in lines)


def _section(section: Section, canvas: Canvas) -> Iterator[str]:
    reasons: set[str] = set()
    together = 0
    for check in section.checks:
        if check.state is State.SKIP:
            if check.message not in reasons:
                reasons.add(check.message)
                yield from _skipped_lines(section, check, canvas)
        elif check.state is State.PASS and section.name == FLEET and not canvas.wide:
            together += 1
        elif check.state is State.PASS:
            yield from _passed_lines(check, canvas)
        else:
            yield from _wrong(check, canvas)
    if together:
        other = "" if together == len(section.checks) else "other "
        yield _color_mark(
            f"{_MARKS[State.PASS]} {plural(together, f'{other}condition')}: not in force",
            State.PASS,
            canvas,
        )


def _passed_lines(check: CheckResult, canvas: Canvas) -> Iterator[str]:
    """One line; on a narrow terminal the message is cut at its end."""
    line = f"{_MARKS[check.state]} {check.code} {check.title}"
    room = len(check.message)
    if canvas.width is not None:
        room = min(room, canvas.width - len(line) - 2)
    if not check.message or room < min(_SHORTEST, len(check.message)):
        first, *rest = canvas.paragraph(line, first="", rest=_INDENT)
    else:
        first, rest = f"{line}: {opening(check.message, room)}", []
    yield _color_mark(first, check.state, canvas)
    yield from rest


def _color_mark(line: str, state: State, canvas: Canvas) -> str:
    """A line with its mark (``FAIL``) in the color of the state."""
    size = len(_MARKS[state])
    mark = line[:size] if state is State.PASS else canvas.bold(line[:size])
    return canvas.paint(mark, _COLORS[state]) + line[size:]


def _skipped_lines(section: Section, check: CheckResult, canvas: Canvas) -> list[str]:
    """Checks that are skipped for the same reason, together."""
    same = [
        other
        for other in section.checks
        if other.state is State.SKIP and other.message == check.message
    ]
    if len(same) == 1:
        what = f"{check.code} {check.title}"
    elif len(same) == len(section.checks):
        what = f"all {len(same)} checks"
    else:
        what = ", ".join(
            _runs([other.code for other in section.checks], {other.code for other in same})
        )
    reason = f"could not be read: {check.message}" if check.unread else check.message
    return canvas.paragraph(f"{_MARKS[check.state]} {what}: {reason}", first="", rest=_INDENT)


def _runs(codes: Sequence[str], chosen: Set[str]) -> Iterator[str]:
    """The chosen codes; three or more in sequence as ``DYT0401..DYT0405``."""
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
    yield _color_mark(first, check.state, canvas)
    yield from rest
    shown = one_by_one(check.findings) if canvas.wide else alike(check.findings)[:_MOST_SHOWN]
    for group in shown:
        yield from canvas.paragraph(group.text, first=_INDENT, rest=_LABEL)
    hidden = len(check.findings) - sum(group.count for group in shown)
    if hidden:
        yield f"{_INDENT}and {hidden:,} more (-o wide shows all)"
    yield from _labelled_lines(
        "expected", _unique([group.first.expected for group in shown]), canvas
    )
    if canvas.wide or canvas.screen_width >= _ROOMY:
        entry = all_codes().get(check.code)
        yield from _labelled_lines("why", [] if entry is None else [entry.cause], canvas)
    texts = _unique([group.fix for group in shown]) if canvas.wide else fixes(shown)
    yield from _labelled_lines("fix", texts, canvas)
    yield from _labelled_lines("note", [check.message] if check.message else [], canvas)
    yield from _labelled_lines("more", [f"dynctl explain {check.code}"], canvas)


def _labelled_lines(label: str, texts: Sequence[str], canvas: Canvas) -> Iterator[str]:
    """``label`` before each of ``texts``; a text of several lines keeps its lines."""
    for text in texts:
        for number, line in enumerate(text.splitlines()):
            head = label if number == 0 else ""
            first = f"{_LABEL}{head:<9} "
            yield from canvas.paragraph(line, first=first, rest=" " * len(first))


def _unique(texts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def sums(report: Report, canvas: Canvas) -> Iterator[str]:
    """The number of checks by state, what no check covers, and how many were not read."""
    summary = report.summary
    counted = (
        f"{summary.passed:,} passed",
        plural(summary.warnings, "warning"),
        f"{summary.failed:,} failed",
        f"{summary.skipped:,} skipped",
    )
    yield ", ".join(counted)
    if report.not_checked:
        text = f"not covered by any check: {', '.join(report.not_checked)}"
        yield from canvas.paragraph(text, first="", rest="  ")
    if summary.unread:
        text = f"{plural(summary.unread, 'check')} could not be read: --fail-on skip exits with 1"
        yield from canvas.paragraph(f"warning: {text}", first="", rest="  ")


# -- explain ---------------------------------------------------------------------------------------


def code_page(page: CodePage, canvas: Canvas) -> str:
    """One code: its condition, an example finding, the cause and the fix."""
    level = "retired" if page.retired else page.level
    first, *rest = canvas.paragraph(page.title, first=f"{page.code}  ", rest=" " * 9)
    code, title = first[: len(page.code)], first[len(page.code) :]
    lines = [canvas.bold(code) + title, *rest, f"          {page.section}, {level}", ""]
    for label, text in page.texts:
        lines += canvas.paragraph(text, first=f"{label:<9} ", rest=" " * 10)
    return "".join(line + "\n" for line in lines)


def runbook(result: Runbook, canvas: Canvas) -> str:
    """What an error means: who sends it, its causes, and the commands that tell them apart."""
    blocks = [_client_error(error, canvas) for error in result.errors]
    return "\n".join("".join(line + "\n" for line in block) for block in blocks)


def _client_error(error: ClientError, canvas: Canvas) -> Iterator[str]:
    statuses = " or ".join(map(str, error.status))
    texts = ", ".join(f'"{text}"' for text in error.texts)
    yield f"{canvas.bold(statuses)}  from {error.by}" + (":" if texts else "")
    if texts:
        yield from canvas.paragraph(texts, first="     ", rest="     ")
    yield from canvas.paragraph(error.meaning, first="means     ", rest=" " * 10)
    for number, cause in enumerate(error.causes, 1):
        yield from canvas.paragraph(cause.cause, first=f"  {number}  why  ", rest=" " * 10)
        yield from canvas.paragraph(cause.ask, first="     ask  ", rest=" " * 10)
        yield from canvas.paragraph(cause.fix, first="     fix  ", rest=" " * 10)
    yield from canvas.paragraph(error.source, first="source    ", rest=" " * 10)


def code_list(result: CodeList, canvas: Canvas) -> str:
    """All codes with their titles."""
    columns: list[Column[CodePage]] = [
        Column("code", "CODE", lambda c: c.code),
        Column("level", "LEVEL", lambda c: c.level),
        Column("section", "SECTION", lambda c: c.section, rank=1, wide=True),
        Column(
            "title",
            "HEALTHY CONDITION",
            lambda c: c.title,
            name=True,
            sentence=True,
        ),
    ]
    return table(columns, result.codes, canvas)


_KINDS_OF_KINDS: Final = ("Resource",)
"""Kinds whose names a fix is about; they stay in the fix."""
_FEWEST: Final = 3
"""From this many findings on they are grouped."""


@dataclass(frozen=True, slots=True)
class Alike:
    """``first`` stands for ``count`` similar findings, including itself.

    ``one_fix``: all of them have exactly the fix of the first one.
    """

    first: Finding
    count: int = 1
    one_fix: bool = True

    @property
    def text(self) -> str:
        """Subject and value."""
        subject, value, more = self.first.subject, self.first.value, self.count - 1
        # Quoted reasons often contain their subject.
        if not _may_be_a_word(subject) and re.search(_whole(subject), value):
            return f"{value} (and {more:,} similar)" if more else value
        return f"{subject} and {more:,} more: {value}" if more else f"{subject}: {value}"

    @property
    def fix(self) -> str:
        """The fix of all of them."""
        if self.one_fix:
            return self.first.fix
        return f"{self.first.fix}\nand the same for {self.count - 1:,} more (-o wide shows all)"


def fixes(shown: Sequence[Alike]) -> list[str]:
    """The fixes of the shown findings; similar fixes are combined."""
    groups: dict[str, list[Alike]] = defaultdict(list)
    for finding in shown:
        groups[_pattern(finding.first)[2]].append(finding)
    texts = []
    for group in groups.values():
        if len(group) < _FEWEST:
            texts += [finding.fix for finding in group]
        else:
            same = all(finding.one_fix and finding.fix == group[0].fix for finding in group)
            number = sum(finding.count for finding in group)
            texts.append(Alike(group[0].first, number, same).fix)
    return list(dict.fromkeys(texts))


def alike(findings: Sequence[Finding]) -> list[Alike]:
    """Findings with three or more that differ only in their subject combined into one."""
    groups: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[_pattern(finding)].append(finding)
    combined: list[Alike] = []
    for finding in findings:
        group = groups[_pattern(finding)]
        if len(group) < _FEWEST:
            combined.append(Alike(finding))
        elif finding is group[0]:
            combined.append(Alike(finding, len(group), len({other.fix for other in group}) == 1))
    return combined


def one_by_one(findings: Sequence[Finding]) -> list[Alike]:
    """Every finding on its own."""
    return [Alike(finding) for finding in findings]


def _may_be_a_word(subject: str) -> bool:
    """Whether the name may be a part of a sentence that is not about it: ``a``, ``engine``."""
    return subject.isalpha()


def _whole(name: str) -> str:
    """A regular expression for the name, not as a part of a longer one."""
    return rf"(?<![\w-]){re.escape(name)}(?![\w-])"


def _pattern(finding: Finding) -> tuple[str, str, str]:
    """The texts with the subject's name removed, to compare findings.

    Commands contain the name without kind and namespace. Only the fix is searched for it: in values
    a name may be the value of a domain.
    """
    value, expected, fix = (
        re.sub(_whole(finding.subject), "\0", text)
        for text in (finding.value, finding.expected, finding.fix)
    )
    kind, _, named = finding.subject.partition(" ")
    name = named.rpartition(".")[0] or named
    if kind.isalpha() and name and kind not in _KINDS_OF_KINDS:
        fix = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", "\0", fix)
    return value, expected, fix
