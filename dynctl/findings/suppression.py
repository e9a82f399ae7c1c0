"""What is not to be reported: whole checks, or findings about some subjects.

``CODE`` leaves a check out. ``CODE=SUBJECT`` leaves out its findings about a subject, which may
hold the wildcards of a shell: ``DYT0404=Pod my-llm-*.prod``.
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
        """Read what ``--suppress`` was given, once each; codes in either case.

        Raises UsageProblem for a code that does not exist, naming those near it, and for a
        subject that is empty.
        """
        checks: set[str] = set()
        subjects: dict[str, tuple[str, ...]] = {}
        for one in given:
            said, equals, subject = one.partition("=")
            code, subject = said.strip().upper(), subject.strip()
            if code not in codes:
                near = ", ".join(codes.near(code))
                raise UsageProblem(
                    f"--suppress {one}: no such code",
                    f"near it: {near}" if near else "dynctl explain lists all",
                )
            if not equals:
                checks.add(code)
            elif subject:
                subjects[code] = (*subjects.get(code, ()), subject)
            else:
                raise UsageProblem(
                    f"--suppress {one}: no subject, expected CODE or CODE=SUBJECT", _EXAMPLE
                )
        return cls(frozenset(checks), subjects)

    def leaves_out(self, code: str) -> bool:
        """Whether the check itself is not to be judged."""
        return code in self.checks

    def hides(self, code: str, subject: str) -> bool:
        """Whether a finding is not to be reported. Subjects are compared in their own case."""
        return any(fnmatchcase(subject, one) for one in self.subjects.get(code, ()))


NOTHING: Final = Suppressions()
