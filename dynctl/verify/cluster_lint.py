"""Manifests judged against the cluster that they are meant for, beside what lint says of them.

The graphs of the files take the place of the cluster's own; nodes, Grove topologies and served
definitions are the cluster's. Pure, on facts that were gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from dynctl.base.json_fields import mapping
from dynctl.findings.catalogue import catalogue
from dynctl.findings.report import Report, summarize
from dynctl.findings.runner import Check, Outcome, Skipped, found, outcome, run
from dynctl.findings.suppression import NOTHING, Suppressions
from dynctl.health.facts import Unread
from dynctl.manifests.files import Manifest
from dynctl.manifests.graphs import Graph, policy_label_key
from dynctl.manifests.lint.facts import LintFacts, gather, subject_of
from dynctl.manifests.lint.levels import LEVEL_CHECKS
from dynctl.manifests.lint.policy import immutable_changes
from dynctl.manifests.lint.run import lint
from dynctl.verify.checks.access import ACCESS_CHECKS
from dynctl.verify.checks.nodes import NODE_CHECKS
from dynctl.verify.facts import VerifyFacts
from dynctl.verify.join import JoinedFacts, VerifiedGraph, join
from dynctl.verify.policy import policy_of

SECTION: Final = "against the cluster"
_FROM_VERIFY: Final = frozenset(
    f"DYT{number}" for number in ("0002", "0003", "0201", "0206", "0207", "0208", "0213")
)
_DOMAIN_IS_A_LEVEL: Final = "DYT0202"
NOT_CHECKED: Final = (
    "what the operator's webhook would refuse beyond these rules",
    "whether nodes have room for the replicas",
    "the KV transfer itself (NIXL, RDMA)",
)


@dataclass(frozen=True, slots=True)
class Against:
    """``planned``: the cluster as if the files' graphs were its own; ``live``: its own, by name."""

    files: LintFacts
    planned: JoinedFacts
    live: dict[str, Graph]
    graphs_unread: str = ""


def lint_against(
    manifests: Sequence[Manifest],
    facts: VerifyFacts,
    namespace: str,
    suppressed: Suppressions = NOTHING,
) -> Report:
    """What lint says, and one section more. ``namespace``: of graphs that name none.

    Raises UsageProblem where none of the manifests is about topology.
    """
    alone = lint(manifests, suppressed)
    whole = run(
        [(SECTION, AGAINST_CHECKS)],
        _against(gather(manifests), facts, namespace),
        catalogue(),
        suppressed=suppressed,
    )
    title = "a cluster" if facts.cluster is None else facts.cluster.title
    sections = [*alone.sections, *whole.sections]
    return Report([*alone.sources, title], sections, summarize(sections), list(NOT_CHECKED))


def _against(files: LintFacts, facts: VerifyFacts, namespace: str) -> Against:
    there = join(facts)
    topologies = (*files.topologies, *there.topologies)
    graphs = []
    for graph in files.graphs:
        placed = _in_namespace(graph, namespace)
        graphs.append(VerifiedGraph(placed.name, placed, policy_of(placed, topologies)))
    planned = JoinedFacts(facts, tuple(graphs), (), topologies, there.nodes)
    unread = ""
    if facts.cluster is not None and isinstance(facts.cluster.graphs, Unread):
        unread = facts.cluster.graphs.why
    live = {one.name: one.graph for one in there.graphs if one.graph is not None}
    return Against(files, planned, live, unread)


def _in_namespace(graph: Graph, namespace: str) -> Graph:
    if graph.manifest.namespace:
        return graph
    metadata = {**mapping(graph.manifest.body.get("metadata")), "namespace": namespace}
    body = {**graph.manifest.body, "metadata": metadata}
    return replace(graph, manifest=Manifest(graph.manifest.source, body))


def _planned(check: Check[JoinedFacts], facts: Against) -> Outcome:
    for need in check.needs:
        skipped = need(facts.planned)
        if skipped is not None:
            return skipped
    return check.judge(facts.planned)


def _levels_there(facts: Against) -> Outcome:
    """Lint's own rule, with the Grove topologies of the cluster beside those of the files."""
    topologies = {one.name: one for one in (*facts.planned.topologies, *facts.files.topologies)}
    check = next(one for one in LEVEL_CHECKS if one.code == _DOMAIN_IS_A_LEVEL)
    return check.judge(replace(facts.files, topologies=tuple(topologies.values())))


def _unchanged(facts: Against) -> Outcome:
    if facts.graphs_unread:
        return Skipped(f"graphs: {facts.graphs_unread}", unread=True)
    pairs = [
        (facts.live[one.name], one.graph)
        for one in facts.planned.graphs
        if one.graph is not None and one.name in facts.live
    ]
    if not pairs:
        return Skipped("none of these graphs is there yet")
    wrong = [item for live, file in pairs for item in immutable_changes(live, file)]
    return outcome(wrong, summary=f"{len(pairs)} of {len(facts.planned.graphs)} graphs are there")


def _pinned_values_exist(facts: Against) -> Outcome:
    cluster = facts.planned.cluster
    if cluster is not None and isinstance(cluster.nodes, Unread):
        return Skipped(f"nodes: {cluster.nodes.why}", unread=True)
    nodes = facts.planned.nodes.values()
    wrong, pinned = [], 0
    for one in facts.planned.graphs:
        key = one.graph and policy_label_key(one.graph, facts.planned.topologies)
        if one.graph is None or not key:
            continue
        there = {node.labels[key] for node in nodes if key in node.labels}
        for component in one.graph.workers:
            values = component.domains(key)
            pinned += values is not None
            if values is not None and not values & there:
                wrong.append(
                    found(
                        subject_of(one.graph),
                        component=component.name,
                        key=key,
                        values=", ".join(sorted(values)) or "no value at all",
                        there=", ".join(sorted(there)[:10]) or "none",
                    )
                )
    if not pinned:
        return Skipped("no worker component is pinned by the label")
    return outcome(wrong, summary=f"{pinned} worker components are pinned")


AGAINST_CHECKS: Final[Sequence[Check[Against]]] = sorted(
    (
        *(
            Check(one.code, partial(_planned, one))
            for one in (*ACCESS_CHECKS, *NODE_CHECKS)
            if one.code in _FROM_VERIFY
        ),
        Check(_DOMAIN_IS_A_LEVEL, _levels_there),
        Check("DYT0112", _unchanged),
        Check("DYT0215", _pinned_values_exist),
    ),
    key=lambda check: check.code,
)
