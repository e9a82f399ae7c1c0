"""All checks of `topology lint` in their order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dynctl.findings.catalogue import catalogue
from dynctl.findings.report import Report
from dynctl.findings.runner import Check, run
from dynctl.findings.suppression import NOTHING, Suppressions
from dynctl.manifests.files import Manifest
from dynctl.manifests.lint.capacity import CAPACITY_CHECKS
from dynctl.manifests.lint.facts import LintFacts, gather, sources
from dynctl.manifests.lint.graph import GRAPH_CHECKS, POD_CHECKS
from dynctl.manifests.lint.levels import LEVEL_CHECKS
from dynctl.manifests.lint.policy import POLICY_CHECKS

LINT_SECTIONS: Final[Sequence[tuple[str, Sequence[Check[LintFacts]]]]] = (
    ("transfer policy", sorted((*POLICY_CHECKS, *GRAPH_CHECKS), key=lambda check: check.code)),
    ("topology levels and nodes", LEVEL_CHECKS),
    ("worker pods", POD_CHECKS[:1]),
    ("topology files", POD_CHECKS[1:]),
    ("domain capacity", CAPACITY_CHECKS),
)
NOT_CHECKED: Final = (
    "the cluster: node labels, its Grove topologies, the operator and its version",
    "the policy of a running graph, which cannot be changed",
    "the KV transfer itself (NIXL, RDMA)",
)


def lint(manifests: Sequence[Manifest], suppressed: Suppressions = NOTHING) -> Report:
    """The report on manifests. Raises UsageProblem if none is a graph or a Grove topology."""
    facts = gather(manifests)
    return run(
        LINT_SECTIONS,
        facts,
        catalogue(),
        sources=sources(facts),
        suppressed=suppressed,
        not_checked=NOT_CHECKED,
    )
