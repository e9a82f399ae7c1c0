"""The report of checks, which every output format renders."""

from __future__ import annotations

from enum import StrEnum

import msgspec

SCHEMA = 1
FLEET = "fleet"
"""The section with the conditions of dynctl frontends."""


class State(StrEnum):
    """The result of a check. If something could not be read it is ``skip``, never ``pass``."""

    PASS = "pass"  # noqa: S105  no password
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class Finding(msgspec.Struct, frozen=True):
    """One place where a condition does not hold. ``value``: what was found there."""

    subject: str
    value: str
    expected: str
    fix: str


class CheckResult(msgspec.Struct, frozen=True):
    """One check and its result.

    ``message``: what was seen (pass), why it was skipped (skip), or what else could not be checked
    (warn, fail). ``unread``: something could not be read, which counts as a warning.
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
    """Number of checks by state; ``unread`` of the skipped ones could not be read."""

    passed: int = 0
    warnings: int = 0
    failed: int = 0
    skipped: int = 0
    unread: int = 0


class Report(msgspec.Struct, frozen=True):
    """All sections in order. ``sources``: what was read. ``not_checked``: what never is."""

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
        """Whether no check reaches the level ``fail_on``: ``fail``, ``skip`` (a check could not be
        read) or ``warn``, each with those before it."""
        summary = self.summary
        if summary.failed or (summary.unread and fail_on != State.FAIL):
            return False
        return not (summary.warnings and fail_on == State.WARN)


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
    """One code with an example finding: ``subject``, ``found``, ``expected`` and ``fix``.

    Of the level ``doubt``: no subject, ``expected`` is the effect on the answer, ``fix`` how to
    make known what is unknown.
    """

    code: str
    level: str
    section: str
    title: str
    found: str
    expected: str
    cause: str
    fix: str
    retired: bool = False
    subject: str = ""
    kind: str = "Code"
    schema: int = SCHEMA

    @property
    def texts(self) -> list[tuple[str, str]]:
        """The texts of the page with their labels, in order."""
        doubt = self.level == "doubt"
        return [
            ("example", f"{self.subject}: {self.found}" if self.subject else self.found),
            ("effect" if doubt else "expected", self.expected),
            ("why", self.cause),
            ("resolve" if doubt else "fix", self.fix),
        ]


class CodeList(msgspec.Struct, frozen=True):
    codes: list[CodePage]
    kind: str = "CodeList"
    schema: int = SCHEMA


class ErrorCause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One likely cause of an error. ``ask``: commands that tell it from the others."""

    cause: str
    ask: str
    fix: str


class ClientError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error as clients see it.

    ``by`` sends it, with one of the HTTP ``status``, with one of ``texts`` (``*`` is any value) or
    of ``codes`` in its body. ``source``: how this is known. The most likely cause is the first.
    """

    by: str
    status: list[int]
    texts: list[str]
    source: str
    meaning: str
    causes: list[ErrorCause]
    codes: list[str] = []


class Runbook(msgspec.Struct, frozen=True):
    """The known errors that match ``question``. ``status``: the HTTP status in it, if any."""

    question: str
    status: int | None
    errors: list[ClientError]
    kind: str = "Runbook"
    schema: int = SCHEMA
