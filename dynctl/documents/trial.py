"""The answer of `dynctl test`: its checks, and what they cost."""

from __future__ import annotations

import msgspec

from dynctl.base.quantities import plural
from dynctl.findings.report import Report


class Spent(msgspec.Struct, frozen=True):
    """What a test sent. ``generated_tokens``: the most that its requests allowed."""

    requests: int
    prompt_tokens: int
    generated_tokens: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{plural(self.requests, 'request')}, {self.prompt_tokens:,} prompt tokens, at most "
            f"{self.generated_tokens:,} generated, {self.seconds:.1f} s"
        )


class TrialReport(Report, frozen=True):
    """A report of checks that were made by requests to a server. ``seed``: of the prompts. ``at``:
    wall-clock seconds of its end."""

    spent: Spent = Spent(0, 0, 0, 0.0)
    model: str = ""
    seed: int = 0
    at: float = 0.0
    kind: str = "TestReport"
