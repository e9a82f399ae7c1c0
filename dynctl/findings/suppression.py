"""Suppressed checks and findings: the values of ``--suppress``.

``CODE`` leaves a check out. ``CODE=SUBJECT`` leaves out its findings about a subject; the subject
may contain shell wildcards: ``DYT0404=Pod my-llm-*.prod``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

from dynctl.base.errors import UsageProblem
from dynctl.findings.catalogue import Catalogue

_EXAMPLE: Final = "for example: --suppress DYT0404, or --suppress 'DYT0404=Pod my-llm-*.prod'"


@dataclass(frozen=True, slots=True)
class Suppressions:
    """``checks``: codes that are left out. ``subjects``: code -> patterns of subjects."""

    checks: frozenset[str] = frozenset()
    subjects: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Sequence[str], codes: Catalogue) -> Suppressions:
        """Parse the values of ``--suppress``; codes in upper or lower case.

        Raises UsageProblem for an unknown code, with similar codes, and for an empty subject.
        """
        checks: set[str] = set()
        subjects: dict[str, tuple[str, ...]] = {}
        for text in given:
            code, equals, subject = text.partition("=")
            code, subject = code.strip().upper(), subject.strip()
            if code not in codes:
                near = ", ".join(codes.near(code))
                raise UsageProblem(
                    f"--suppress {text}: unknown code",
                    f"similar codes: {near}" if near else "dynctl explain lists all codes",
                )
            if not equals:
                checks.add(code)
            elif subject:
                subjects[code] = (*subjects.get(code, ()), subject)
            else:
                raise UsageProblem(
                    f"--suppress {text}: no subject, expected CODE or CODE=SUBJECT", _EXAMPLE
                )
        return cls(frozenset(checks), subjects)

    def leaves_out(self, code: str) -> bool:
        """Whether the whole check is suppressed."""
        return code in self.checks

    def hides(self, code: str, subject: str) -> bool:
        """Whether a finding is suppressed. Subjects are case-sensitive."""
        return any(fnmatchcase(subject, pattern) for pattern in self.subjects.get(code, ()))


NOTHING: Final = Suppressions()
