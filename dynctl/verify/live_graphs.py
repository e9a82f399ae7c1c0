"""The graphs of a cluster as input of lint's checks, so that the same code judges both. Pure.

The role of a running worker takes precedence over the role in the manifest.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from dynctl.base.json_fields import mapping, text
from dynctl.findings.runner import Check, Outcome, Skipped
from dynctl.health.facts import Unread
from dynctl.manifests.files import Manifest
from dynctl.manifests.graphs import Component, Graph, graphs_of
from dynctl.manifests.lint.facts import LintFacts, spec_of
from dynctl.verify.join import JoinedFacts, VerifiedGraph
from dynctl.verify.needs import NO_CLUSTER
from router_core import Role

LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
_FIRST_HAND: Final = ("card", "label", "sub-label")
"""Sources of a role that come from the worker itself or from the operator's labels."""


def topologies_read(joined: JoinedFacts) -> Skipped | None:
    """The Grove topologies were read, or no graph names one."""
    if joined.cluster is None:
        return Skipped(NO_CLUSTER)
    topologies = joined.cluster.topologies
    if not isinstance(topologies, Unread) or not topology_names(joined):
        return None
    return Skipped(f"Grove topologies: {topologies.why}", unread=True)


def topology_names(joined: JoinedFacts) -> list[str]:
    """The names of the Grove topologies in graphs, for transfers or placement."""
    names: set[str] = set()
    for graph in joined.graphs:
        if graph.policy is not None:
            names.add(graph.policy.cluster_topology)
        if graph.graph is not None:
            names.add(text((graph.graph.policy or {}).get("clusterTopologyName")))
            constraint = mapping(spec_of(graph.graph).get("topologyConstraint"))
            names.add(text(constraint.get("clusterTopologyName")))
            names.add(text(constraint.get("topologyProfile")))
    return sorted(names - {""})


def lint_facts(joined: JoinedFacts) -> LintFacts:
    """The graphs of the cluster, and those of its topologies that they name."""
    named = topology_names(joined)
    return LintFacts(
        tuple(
            _with_live_roles(graph, graph.graph)
            for graph in joined.graphs
            if graph.graph is not None
        ),
        tuple(topology for topology in joined.topologies if topology.manifest.name in named),
        live=True,
    )


def judged_live(
    checks: Sequence[Check[LintFacts]],
    *needs: Callable[[JoinedFacts], Skipped | None],
) -> dict[str, Check[JoinedFacts]]:
    """Checks of lint for the graphs of a cluster, by code."""
    return {check.code: Check(check.code, partial(_judge, check), needs) for check in checks}


def _judge(check: Check[LintFacts], joined: JoinedFacts) -> Outcome:
    facts = lint_facts(joined)
    for need in check.needs:
        skipped = need(facts)
        if skipped is not None:
            return skipped
    return check.judge(facts)


def _with_live_roles(verified: VerifiedGraph, graph: Graph) -> Graph:
    """The graph with the roles of its running workers."""
    roles: dict[str, set[Role | None]] = defaultdict(set)
    for worker in verified.workers:
        if worker.role_source in _FIRST_HAND:
            roles[worker.component.lower()].add(worker.role)

    def with_role(component: Component) -> Component:
        known = roles.get(component.name.lower(), set())
        if len(known) != 1 or None in known:
            return component
        [role] = known
        return replace(component, role=role, role_source="type")

    return replace(graph, components=tuple(with_role(component) for component in graph.components))


# -- what was applied ------------------------------------------------------------------------------


def last_applied(graph: Graph) -> Graph | None:
    """The graph as kubectl last applied it, before the API server removed unknown fields.

    None if another client created it, or if the annotation is not readable.
    """
    applied = graph.manifest.annotations.get(LAST_APPLIED)
    try:
        body = json.loads(text(applied))
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    return next(iter(graphs_of([Manifest("last applied", body)])), None)


def applied_pairs(joined: JoinedFacts) -> Iterator[tuple[Graph, Graph]]:
    """Each graph with its last applied form, if that is known."""
    for graph in joined.graphs:
        if graph.graph is not None:
            applied = last_applied(graph.graph)
            if applied is not None:
                yield graph.graph, applied
