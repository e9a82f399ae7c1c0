"""The report of a test as Prometheus text, for a file that an exporter reads or a push gateway."""

from __future__ import annotations

from typing import Final

from dynctl.documents.trial import TrialReport
from dynctl.findings.report import State
from dynctl.serving.telemetry.exposition import Family, samples

_CHECK: Final = Family(
    "dynctl_test_check",
    "gauge",
    "1 for the state of a check of dynctl test, 0 for the states that it does not have.",
    ("code", "state"),
)
_ENDED: Final = Family(
    "dynctl_test_end_timestamp_seconds", "gauge", "Unix time at the end of the test.", ("model",)
)
_REQUESTS: Final = Family(
    "dynctl_test_requests", "gauge", "Requests that the test sent.", ("model",)
)
_SECONDS: Final = Family(
    "dynctl_test_duration_seconds", "gauge", "Seconds that the test took.", ("model",)
)


def prometheus_text(report: TrialReport) -> str:
    """One gauge for each check and state, and the test's time and requests."""
    states = [
        ((check.code, state.value), float(check.state is state))
        for check in report.checks
        for state in State
    ]
    model = (report.model,)
    return (
        samples(_CHECK, states)
        + samples(_ENDED, [(model, round(report.at, 3))])
        + samples(_REQUESTS, [(model, report.spent.requests)])
        + samples(_SECONDS, [(model, report.spent.seconds)])
    )
