"""Run checks: values in an ordered list, judged one by one on facts that were gathered before.

A check never reads anything itself. What it needs and the facts lack makes it skipped, with the
reason; running, counting and showing are not its business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from dynctl.findings.catalogue import Catalogue, Entry
from dynctl.findings.report import CheckResult, Finding, Report, Section, State, summarize
from dynctl.findings.suppression import NOTHING, Suppressions

Facts = TypeVar("Facts")
_NOT_TOLD: Final = "not told: "


@dataclass(frozen=True, slots=True)
class Passed:
    """The claim holds; ``says`` what was seen."""

    says: str = ""


@dataclass(frozen=True, slots=True)
class Skipped:
    """The claim was not judged. ``unread``: because something that was asked for was not told."""

    reason: str
    unread: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The claim does not hold for ``subject``; ``arguments`` fill in the texts of its code."""

    subject: str
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wrong:
    """The claim does not hold. ``note``: what could not be looked at beside this."""

    found: tuple[Found, ...]
    note: str = ""


Outcome = Passed | Skipped | Wrong
Need = Callable[[Facts], Skipped | None]


@dataclass(frozen=True, slots=True)
class Check(Generic[Facts]):
    """``judge`` is pure. ``needs``: each says why the check must be skipped, or None."""

    code: str
    judge: Callable[[Facts], Outcome]
    needs: tuple[Need[Facts], ...] = ()


def found(subject: str, **arguments: object) -> Found:
    """A finding about ``subject``."""
    return Found(subject, arguments)


def outcome(findings: Iterable[Found], unread: Iterable[str] = (), says: str = "") -> Outcome:
    """Wrong where anything was found, skipped where something could not be read, else passed."""
    wrong, missing = tuple(findings), tuple(dict.fromkeys(unread))
    told = "; ".join(missing[:3]) + (f"; and {len(missing) - 3} more" if missing[3:] else "")
    if wrong:
        return Wrong(wrong, f"{_NOT_TOLD}{told}" if told else "")
    return Skipped(told, unread=True) if told else Passed(says)


def run(
    sections: Sequence[tuple[str, Sequence[Check[Facts]]]],
    facts: Facts,
    codes: Catalogue,
    *,
    sources: Sequence[str] = (),
    suppressed: Suppressions = NOTHING,
    not_checked: Sequence[str] = (),
) -> Report:
    """Judge every check of every section.

    ``suppressed``: checks that are not to be judged, and findings that are only counted. A check
    whose every finding is suppressed is skipped, never passed.
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
        case Passed(says):
            state, message = State.PASS, says
        case Skipped(reason, unread):
            message = reason
        case Wrong(wrong, note):
            state, message = State(entry.level), note
            findings = [_finding(entry, one) for one in wrong]
    return CheckResult(check.code, section, entry.title, state, message, unread, findings)


def _outcome(check: Check[Facts], facts: Facts, suppressed: Suppressions) -> Outcome:
    if suppressed.leaves_out(check.code):
        return Skipped("suppressed")
    for need in check.needs:
        skipped = need(facts)
        if skipped is not None:
            return skipped
    judged = check.judge(facts)
    return _reported(check.code, judged, suppressed) if isinstance(judged, Wrong) else judged


def _reported(code: str, wrong: Wrong, suppressed: Suppressions) -> Wrong | Skipped:
    """What is left to report. What could not be looked at stays said, and stays a warning."""
    left = tuple(one for one in wrong.found if not suppressed.hides(code, one.subject))
    hidden = len(wrong.found) - len(left)
    if not hidden:
        return wrong
    if not left:
        note = "; ".join(filter(None, (wrong.note, "suppressed")))
        return Skipped(note, unread=wrong.note.startswith(_NOT_TOLD))
    return Wrong(left, "; ".join(filter(None, (wrong.note, f"{hidden:,} suppressed"))))


def _finding(entry: Entry, one: Found) -> Finding:
    values: dict[str, Any] = {"subject": one.subject, **one.arguments}
    if set(one.arguments) != entry.arguments:
        raise ValueError(
            f"{entry.code} takes {sorted(entry.arguments)}, got {sorted(one.arguments)}"
        )
    texts = (entry.template, entry.expected, entry.fix)
    return Finding(one.subject, *(text.format_map(values) for text in texts))
