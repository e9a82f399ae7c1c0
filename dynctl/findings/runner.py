"""Run checks in their order on facts that were gathered before, and report the results.

A check never reads anything itself. If facts that it needs are missing, it is skipped with the
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from dynctl.findings.catalogue import Catalogue, Entry
from dynctl.findings.report import CheckResult, Finding, Report, Section, State, summarize
from dynctl.findings.suppression import NOTHING, Suppressions

Facts = TypeVar("Facts")
_UNAVAILABLE: Final = "unavailable: "


@dataclass(frozen=True, slots=True)
class Passed:
    """The condition holds. ``summary``: what was seen."""

    summary: str = ""


@dataclass(frozen=True, slots=True)
class Skipped:
    """The condition was not checked. ``unread``: because something could not be read."""

    reason: str
    unread: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The condition does not hold for ``subject``; ``arguments`` fill in the texts of its code.

    ``texts``: what was found, what was expected and the fix, where they are complete already.
    """

    subject: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    texts: tuple[str, str, str] | None = None


@dataclass(frozen=True, slots=True)
class Wrong:
    """The condition does not hold. ``note``: what else could not be checked."""

    found: tuple[Found, ...]
    note: str = ""


Outcome = Passed | Skipped | Wrong
Need = Callable[[Facts], Skipped | None]


@dataclass(frozen=True, slots=True)
class Check(Generic[Facts]):
    """``judge`` is pure. ``needs``: each returns why the check must be skipped, or None."""

    code: str
    judge: Callable[[Facts], Outcome]
    needs: tuple[Need[Facts], ...] = ()


def found(subject: str, **arguments: object) -> Found:
    """A finding about ``subject``."""
    return Found(subject, arguments)


def outcome(
    findings: Iterable[Found], unread: Iterable[str] = (), summary: str = "", nothing: str = ""
) -> Outcome:
    """Wrong if anything was found, skipped if something could not be read, else passed.

    ``nothing``: why no object was checked, empty where one was: such a check is skipped.
    """
    wrong, missing = tuple(findings), tuple(dict.fromkeys(unread))
    gaps = "; ".join(missing[:3]) + (f"; and {len(missing) - 3} more" if missing[3:] else "")
    if wrong:
        return Wrong(wrong, f"{_UNAVAILABLE}{gaps}" if gaps else "")
    if gaps:
        return Skipped(gaps, unread=True)
    return Skipped(nothing) if nothing else Passed(summary)


def run(
    sections: Sequence[tuple[str, Sequence[Check[Facts]]]],
    facts: Facts,
    codes: Catalogue,
    *,
    sources: Sequence[str] = (),
    suppressed: Suppressions = NOTHING,
    not_checked: Sequence[str] = (),
) -> Report:
    """Run every check of every section.

    ``suppressed``: checks that are left out, and findings that are only counted. A check with only
    suppressed findings is skipped, never passed.
    """
    done = [
        Section(name, [_run(check, name, facts, codes[check.code], suppressed) for check in checks])
        for name, checks in sections
    ]
    return Report(list(sources), done, summarize(done), list(not_checked))


def _run(
    check: Check[Facts], section: str, facts: Facts, entry: Entry, suppressed: Suppressions
) -> CheckResult:
    result = _outcome(check, facts, suppressed)
    state, message, unread = State.SKIP, "", False
    findings: list[Finding] = []
    match result:
        case Passed(summary):
            state, message = State.PASS, summary
        case Skipped(reason, unread):
            message = reason
        case Wrong(wrong, note):
            state, message = State(entry.level), note
            findings = [_finding(entry, finding) for finding in wrong]
    return CheckResult(check.code, section, entry.title, state, message, unread, findings)


def _outcome(check: Check[Facts], facts: Facts, suppressed: Suppressions) -> Outcome:
    if suppressed.leaves_out(check.code):
        return Skipped("suppressed")
    for need in check.needs:
        skipped = need(facts)
        if skipped is not None:
            return skipped
    judged = check.judge(facts)
    return (
        _without_suppressed(check.code, judged, suppressed) if isinstance(judged, Wrong) else judged
    )


def _without_suppressed(code: str, wrong: Wrong, suppressed: Suppressions) -> Wrong | Skipped:
    """The findings that are left. A note about unread objects stays, and stays a warning."""
    left = tuple(finding for finding in wrong.found if not suppressed.hides(code, finding.subject))
    hidden = len(wrong.found) - len(left)
    if not hidden:
        return wrong
    if not left:
        note = "; ".join(filter(None, (wrong.note, "suppressed")))
        return Skipped(note, unread=wrong.note.startswith(_UNAVAILABLE))
    return Wrong(left, "; ".join(filter(None, (wrong.note, f"{hidden:,} suppressed"))))


def _finding(entry: Entry, finding: Found) -> Finding:
    return Finding(
        finding.subject, *(finding.texts or entry.texts(finding.subject, finding.arguments))
    )
