"""Runs of `dynctl test` in this process, and what they report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynctl.documents.trial import TrialReport
from dynctl.experiments.trial import TrialOptions, run_trial
from dynctl.findings.report import State
from tests.waiting import patience

ENGINE = {"name": "e0", "speedup_ratio": 2.0, "max_model_len": 2048}


async def result_of(url: str, **options: Any) -> TrialReport:
    options = {"timeout": patience(30), "duration": 600, "settle": patience(0.1), **options}
    return await run_trial(TrialOptions(url, **options))


def wrong(report: TrialReport) -> set[str]:
    return {check.code for check in report.checks if check.state in (State.WARN, State.FAIL)}


def states(report: TrialReport) -> dict[str, State]:
    return {check.code: check.state for check in report.checks}


def messages(report: TrialReport) -> dict[str, str]:
    return {check.code: check.message for check in report.checks}


def journals(folder: Path) -> list[Path]:
    """What tests have not put back."""
    return list(folder.glob("*.json"))
