"""What is wrong with a live Dynamo, by the checks that `dynctl check` makes. Pure.

Only those that can be judged from what is followed anyway: what is registered, and the frontends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dynctl.findings.catalogue import catalogue
from dynctl.findings.runner import run
from dynctl.health.checks.frontends import FRONTEND_CHECKS
from dynctl.health.checks.planes import PLANE_CHECKS, WORKER_CHECKS
from dynctl.health.deployment import Deployment
from dynctl.health.facts import CheckFacts, FrontendFacts, PlaneFacts
from dynctl.sources.snapshot import Alert

#: Who is stranded is told by DYT0901, for every source alike.
_TOLD_OTHERWISE: Final = ("DYR0210",)
_MOST: Final = 200


def planes_alerts(
    title: str,
    namespace: str | None,
    deployment: Deployment,
    frontends: tuple[FrontendFacts, ...],
) -> Iterator[Alert]:
    """The findings, at most a few hundred of them."""
    facts = CheckFacts(PlaneFacts(title, namespace, deployment=deployment), frontends)
    sections = [
        ("planes", PLANE_CHECKS),
        ("workers", WORKER_CHECKS),
        ("frontends", FRONTEND_CHECKS),
    ]
    report = run(sections, facts, catalogue())
    left = _MOST
    for check in report.checks:
        if check.code in _TOLD_OTHERWISE:
            continue
        for one in check.findings[:left]:
            left -= 1
            yield Alert(check.code, str(check.state), one.subject, one.value, one.fix)
