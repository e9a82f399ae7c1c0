"""What checks answer: one report, which every output format renders."""

from __future__ import annotations

from enum import StrEnum

import msgspec

SCHEMA = 1


class State(StrEnum):
    """How a check ended. What could not be read is ``skip``, never ``pass``."""

    PASS = "pass"  # noqa: S105  no password
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class Finding(msgspec.Struct, frozen=True):
    """What is wrong at one place. ``fix``: what to do about it."""

    subject: str
    value: str
    expected: str
    fix: str


class CheckResult(msgspec.Struct, frozen=True):
    """One claim and how it stands.

    ``message``: what was seen where it passes, why it was not judged where it is skipped, what
    could not be looked at beside the findings otherwise. ``unread``: something that should have
    been read could not be, which counts as a warning.
    """

    code: str
    section: str
    title: str
    state: State
    message: str = ""
    unread: bool = False
    findings: list[Finding] = []


class Section(msgspec.Struct, frozen=True):
    name: str
    checks: list[CheckResult]


class Summary(msgspec.Struct, frozen=True):
    """Checks by state; ``unread`` of the skipped ones could not be read."""

    passed: int = 0
    warnings: int = 0
    failed: int = 0
    skipped: int = 0
    unread: int = 0


class Report(msgspec.Struct, frozen=True):
    """All sections in order. ``sources``: what was looked at. ``not_checked``: what never is."""

    sources: list[str]
    sections: list[Section]
    summary: Summary
    not_checked: list[str] = []
    kind: str = "CheckReport"
    schema: int = SCHEMA

    @property
    def checks(self) -> list[CheckResult]:
        return [check for section in self.sections for check in section.checks]

    def passes(self, fail_on: str) -> bool:
        """Whether nothing is as bad as ``fail_on`` (``fail`` or ``warn``)."""
        summary = self.summary
        return not (
            summary.failed or (fail_on == State.WARN and (summary.warnings or summary.unread))
        )


def summarize(sections: list[Section]) -> Summary:
    """Count the checks of all sections."""
    checks = [check for section in sections for check in section.checks]
    states = [check.state for check in checks]
    return Summary(
        states.count(State.PASS),
        states.count(State.WARN),
        states.count(State.FAIL),
        states.count(State.SKIP),
        sum(check.unread for check in checks),
    )


class CodePage(msgspec.Struct, frozen=True):
    """One code, explained."""

    code: str
    level: str
    section: str
    title: str
    found: str
    expected: str
    cause: str
    fix: str
    retired: bool = False
    kind: str = "Code"
    schema: int = SCHEMA


class CodeList(msgspec.Struct, frozen=True):
    codes: list[CodePage]
    kind: str = "CodeList"
    schema: int = SCHEMA
