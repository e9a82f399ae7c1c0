"""Every check of a live deployment, in the order of the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dynctl.findings.catalogue import all_codes
from dynctl.findings.report import FLEET, Report
from dynctl.findings.runner import Check, run
from dynctl.findings.suppression import NOTHING, Suppressions
from dynctl.health.checks.events import EVENT_CHECKS
from dynctl.health.checks.fleet import FLEET_CHECKS
from dynctl.health.checks.frontends import FRONTEND_CHECKS, VERSION_CHECKS
from dynctl.health.checks.planes import PLANE_CHECKS, WORKER_CHECKS
from dynctl.health.facts import CheckFacts

SECTIONS: Final[Sequence[tuple[str, Sequence[Check[CheckFacts]]]]] = (
    ("planes", PLANE_CHECKS),
    ("workers", WORKER_CHECKS),
    ("events", EVENT_CHECKS),
    ("frontends", FRONTEND_CHECKS),
    (FLEET, FLEET_CHECKS),
    ("versions", VERSION_CHECKS),
)
DYNAMO_SECTIONS: Final = frozenset({"planes", "workers", "events"})
ENGINES: Final = "the engines' own health"
NOT_CHECKED: Final[tuple[str, ...]] = (
    "the KV transfer itself (NIXL, RDMA)",
    ENGINES,
    "Kubernetes objects and node labels",
)


def judge(facts: CheckFacts, suppressed: Suppressions = NOTHING) -> Report:
    """The report on the facts, without suppressed findings."""
    left_out = _left_out(facts)
    return run(
        [(name, checks) for name, checks in SECTIONS if name not in left_out],
        facts,
        all_codes(),
        sources=_sources(facts),
        suppressed=suppressed,
        not_checked=_not_checked(facts, left_out),
    )


def _sources(facts: CheckFacts) -> list[str]:
    """What was read: the planes and the frontends."""
    sources = [frontend.url for frontend in facts.frontends]
    if facts.planes is None:
        return sources
    planes = facts.planes.title
    if facts.planes.unreachable is None:
        planes += f", Dynamo namespace {facts.planes.namespace or '*'}"
    return [planes, *sources]


def _not_checked(facts: CheckFacts, left_out: frozenset[str]) -> tuple[str, ...]:
    # A dynctl frontend probes its engines.
    others = any(frontend.kind != "dynctl" for frontend in facts.frontends)
    probed = facts.planes is None and not others
    not_checked = tuple(part for part in NOT_CHECKED if part != ENGINES or not probed)
    if left_out & DYNAMO_SECTIONS and others:
        not_checked += ("a Dynamo's planes (specify --discovery)",)
    return not_checked


def _left_out(facts: CheckFacts) -> frozenset[str]:
    """The sections about a kind of fleet that was not specified."""
    left_out: set[str] = set()
    if facts.planes is None and facts.frontends:
        left_out |= DYNAMO_SECTIONS
    if not any(frontend.kind == "dynctl" for frontend in facts.frontends):
        left_out.add(FLEET)
    return frozenset(left_out)
