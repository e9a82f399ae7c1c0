"""`topology lint --against`: the checks of lint, and one more section with a cluster. Pure.

The graphs come from the files; nodes, Grove topologies and resource definitions from the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

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
from dynctl.verify.cluster_facts import VerifyFacts
from dynctl.verify.graph_policy import policy_of
from dynctl.verify.join import JoinedFacts, VerifiedGraph, join

SECTION: Final = "against the cluster"
_FROM_VERIFY: Final = frozenset(
    f"DYT{number}" for number in ("0002", "0003", "0201", "0206", "0207", "0208", "0213")
)
_DOMAIN_IS_A_LEVEL: Final = "DYT0202"
NOT_CHECKED: Final = (
    "other rules of the operator's webhook",
    "whether nodes have room for the replicas",
    "the KV transfer itself (NIXL, RDMA)",
)


@dataclass(frozen=True, slots=True)
class LintWithCluster:
    """``planned``: the cluster with the graphs of the files; ``live``: its own graphs, by name."""

    files: LintFacts
    planned: JoinedFacts
    live: dict[str, Graph]
    graphs_unread: str = ""


def lint_report(
    manifests: Sequence[Manifest],
    facts: VerifyFacts,
    namespace: str,
    suppressed: Suppressions = NOTHING,
) -> Report:
    """The report of lint with one more section. ``namespace``: of graphs without one.

    Raises UsageProblem if no manifest is a graph or a Grove topology.
    """
    alone = lint(manifests, suppressed)
    whole = run(
        [(SECTION, CLUSTER_CHECKS)],
        _facts(gather(manifests), facts, namespace),
        catalogue(),
        suppressed=suppressed,
    )
    title = "a cluster" if facts.cluster is None else facts.cluster.title
    sections = [*alone.sections, *whole.sections]
    return Report([*alone.sources, title], sections, summarize(sections), list(NOT_CHECKED))


def _facts(files: LintFacts, facts: VerifyFacts, namespace: str) -> LintWithCluster:
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
    live = {graph.name: graph.graph for graph in there.graphs if graph.graph is not None}
    return LintWithCluster(files, planned, live, unread)


def _in_namespace(graph: Graph, namespace: str) -> Graph:
    if graph.manifest.namespace:
        return graph
    metadata = {**mapping(graph.manifest.body.get("metadata")), "namespace": namespace}
    body = {**graph.manifest.body, "metadata": metadata}
    return replace(graph, manifest=Manifest(graph.manifest.source, body))


def _judge_planned(check: Check[JoinedFacts], facts: LintWithCluster) -> Outcome:
    for need in check.needs:
        skipped = need(facts.planned)
        if skipped is not None:
            return skipped
    return check.judge(facts.planned)


def _domain_is_level(facts: LintWithCluster) -> Outcome:
    """Lint's check, with the Grove topologies of the cluster and of the files."""
    topologies = {
        topology.name: topology for topology in (*facts.planned.topologies, *facts.files.topologies)
    }
    check = next(check for check in LEVEL_CHECKS if check.code == _DOMAIN_IS_A_LEVEL)
    return check.judge(replace(facts.files, topologies=tuple(topologies.values())))


def _no_immutable_change(facts: LintWithCluster) -> Outcome:
    if facts.graphs_unread:
        return Skipped(f"graphs: {facts.graphs_unread}", unread=True)
    pairs = [
        (facts.live[graph.name], graph.graph)
        for graph in facts.planned.graphs
        if graph.graph is not None and graph.name in facts.live
    ]
    if not pairs:
        return Skipped("none of these graphs is in the cluster yet")
    wrong = [item for live, file in pairs for item in immutable_changes(live, file)]
    return outcome(
        wrong, summary=f"{len(pairs)} of {len(facts.planned.graphs)} graphs are in the cluster"
    )


def _pinned_values_exist(facts: LintWithCluster) -> Outcome:
    cluster = facts.planned.cluster
    if cluster is not None and isinstance(cluster.nodes, Unread):
        return Skipped(f"nodes: {cluster.nodes.why}", unread=True)
    pins = [pin for graph in facts.planned.graphs for pin in _pins(facts, graph)]
    wrong = [
        found(
            pin.subject,
            component=pin.component,
            key=pin.key,
            values=", ".join(sorted(pin.values)) or "(no value)",
            there=", ".join(sorted(pin.there)[:10]) or "none",
        )
        for pin in pins
        if not pin.values & pin.there
    ]
    if not pins:
        return Skipped("no worker component is pinned by the topology label")
    return outcome(wrong, summary=f"{len(pins)} worker components are pinned")


class _Pin(NamedTuple):
    """A component that requires ``values`` of a node label, and the values that are ``there``."""

    subject: str
    component: str
    key: str
    values: Set[str]
    there: Set[str]


def _pins(facts: LintWithCluster, verified: VerifiedGraph) -> Iterator[_Pin]:
    graph = verified.graph
    key = policy_label_key(graph, facts.planned.topologies) if graph is not None else None
    if graph is None or not key:
        return
    there = {node.labels[key] for node in facts.planned.nodes.values() if key in node.labels}
    for component in graph.workers:
        values = component.domains(key)
        if values is not None:
            yield _Pin(subject_of(graph), component.name, key, values, there)


CLUSTER_CHECKS: Final[Sequence[Check[LintWithCluster]]] = sorted(
    (
        *(
            Check(check.code, partial(_judge_planned, check))
            for check in (*ACCESS_CHECKS, *NODE_CHECKS)
            if check.code in _FROM_VERIFY
        ),
        Check(_DOMAIN_IS_A_LEVEL, _domain_is_level),
        Check("DYT0112", _no_immutable_change),
        Check("DYT0215", _pinned_values_exist),
    ),
    key=lambda check: check.code,
)
