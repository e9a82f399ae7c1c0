"""Checks of Grove topologies that policies name: their levels, and whether Grove runs the graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

from dynctl.findings.runner import Check, Found, Outcome, Skipped, found, outcome
from dynctl.health.facts import Unread
from dynctl.manifests.graphs import ClusterTopology
from dynctl.manifests.lint.facts import subject_of
from dynctl.manifests.lint.levels import LEVEL_CHECKS as LINT_CHECKS
from dynctl.manifests.lint.levels import misordered
from dynctl.verify.join import Custody, VerifiedGraph
from dynctl.verify.live_graphs import (
    clustered,
    graphs_read,
    judged_live,
    topologies_read,
    topology_names,
)
from dynctl.verify.root_causes import (
    cluster_of,
    excerpt,
    governed,
    some,
)
from dynctl.wire.kubernetes.fields import mapping, sequence, text
from dynctl.wire.kubernetes.names import ENABLE_GROVE_ANNOTATION
from dynctl.wire.kubernetes.objects import Node

_GROVE_SETS: Final = "podcliquesets.grove.io"
_GROVE_CLIQUE_LABEL: Final = "grove.io/podclique"


def _by_grove(custody: Custody) -> list[tuple[VerifiedGraph, str]]:
    """The graphs whose policy names a Grove topology, and its name."""
    return [
        (one, one.policy.cluster_topology)
        for one in custody.governed
        if one.policy is not None and one.policy.cluster_topology
    ]


def _named(custody: Custody) -> list[ClusterTopology]:
    """The topologies that policies name, and that are there."""
    names = {name for _, name in _by_grove(custody)}
    return [one for one in custody.topologies if one.manifest.name in names]


# -- what checks need ------------------------------------------------------------------------------


def topology_named(custody: Custody) -> Skipped | None:
    """Some graph names a Grove topology, for transfers or for placement."""
    return None if topology_names(custody) else Skipped("no graph here names a Grove topology")


def grove_named(custody: Custody) -> Skipped | None:
    """Some policy takes its domain from Grove."""
    if _by_grove(custody):
        return None
    return Skipped("no policy here takes its domain from a Grove topology")


def topology_there(custody: Custody) -> Skipped | None:
    """At least one topology that a policy names is there."""
    return None if _named(custody) else Skipped("no topology that is named is there (DYT0201)")


def nodes_read(custody: Custody) -> Skipped | None:
    """The nodes, and the worker pods on them, are known."""
    cluster = cluster_of(custody)
    if isinstance(cluster.nodes, Unread):
        return Skipped(f"nodes: {cluster.nodes.why}", unread=True)
    if isinstance(cluster.pods, Unread):
        return Skipped(f"pods: {cluster.pods.why}", unread=True)
    return None


# -- topologies and Grove --------------------------------------------------------------------------


def _topology_exists(custody: Custody) -> Outcome:
    there = {one.manifest.name: one for one in custody.topologies}
    named = _by_grove(custody)
    return outcome(
        (
            found(graph.subject, topology=name, there=some(sorted(there)) or "none at all")
            for graph, name in named
            if name not in there
        ),
        summary=some(sorted({subject_of(there[name]) for _, name in named if name in there})),
    )


def _grove_runs(custody: Custody) -> Outcome:
    cluster = cluster_of(custody)
    wrong: list[Found] = []
    unread: list[str] = []
    for graph, _ in _by_grove(custody):
        annotations = {} if graph.graph is None else graph.graph.manifest.annotations
        namespace, _, name = graph.name.rpartition("/")
        again = "delete the graph and apply it again"
        what = fix = ""
        if str(annotations.get(ENABLE_GROVE_ANNOTATION, "")).lower() == "false":
            command = f"kubectl annotate dynamographdeployment {name} -n {namespace}"
            what = f'the annotation {ENABLE_GROVE_ANNOTATION} is "false"'
            fix = f"{command} {ENABLE_GROVE_ANNOTATION}-"
        elif isinstance(cluster.served, Unread):
            unread.append(f"resources: {cluster.served.why}")
        elif _GROVE_SETS not in cluster.served:
            what = f"the cluster serves no {_GROVE_SETS}: Grove is not installed"
            fix = f"install Grove, enable it for Dynamo's operator and restart that, then {again}"
        elif any(_GROVE_CLIQUE_LABEL in pod.labels for pod in graph.pods):
            pass
        elif isinstance(cluster.grove_sets, Unread):
            unread.append(f"PodCliqueSets: {cluster.grove_sets.why}")
        elif graph.name not in cluster.grove_sets:
            what = f"there is no PodCliqueSet {name}: the operator runs the graph without Grove"
            fix = f"enable Grove for Dynamo's operator and restart that, then {again}"
        if what:
            wrong.append(found(graph.subject, what=what, fix=fix))
    return outcome(wrong, unread)


def _in_sync(custody: Custody) -> Outcome:
    def all_of() -> Iterator[Found]:
        for topology in _named(custody):
            status = mapping(topology.manifest.body.get("status"))
            for entry in sequence(status.get("schedulerTopologyStatuses")):
                one = mapping(entry)
                if one.get("inSync") is False:
                    yield found(
                        subject_of(topology),
                        scheduler=text(one.get("schedulerName")) or "(no name)",
                        reference=text(one.get("topologyReference")) or "(no name)",
                        why=excerpt(text(one.get("message"))) or "no reason is given",
                    )

    return outcome(all_of())


# -- values of levels ------------------------------------------------------------------------------


def _nested(custody: Custody) -> Outcome:
    wrong: list[Found] = []
    unordered: list[str] = []
    for topology in _named(custody):
        if misordered([one.domain for one in topology.levels]) is not None:
            unordered.append(topology.manifest.name)
            continue
        levels = [one for one in topology.levels if one.domain and one.key]
        for broad, narrow in pairwise(levels):
            spans = _spans(custody.nodes.values(), broad.key, narrow.key)
            if spans:
                wrong.append(
                    found(
                        subject_of(topology),
                        narrow=narrow.domain,
                        broad=broad.domain,
                        spans=some(
                            f"{value} ({some(sorted(spans[value]))})" for value in sorted(spans)
                        ),
                        key=narrow.key,
                    )
                )
    if unordered and not wrong:
        return Skipped(f"{some(unordered)}: the levels are not in order (DYT0210)")
    return outcome(wrong)


def _spans(nodes: Iterable[Node], broad: str, narrow: str) -> dict[str, set[str]]:
    """Narrow values whose nodes are in several broad ones."""
    told: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        inner, outer = node.labels.get(narrow), node.labels.get(broad)
        if inner and outer:
            told[inner].add(outer)
    return {value: outer for value, outer in told.items() if len(outer) > 1}


#: Placement without a named topology is judged by the usual names of levels.
_OF_PLACEMENT: Final = [one for one in LINT_CHECKS if one.code == "DYT0211"]
_OF_LEVELS: Final = [one for one in LINT_CHECKS if one not in _OF_PLACEMENT]
_GROVE: Final = (clustered, governed, topology_named, grove_named)
_LEVELS: Final = (*_GROVE, topologies_read, topology_there)

LEVEL_CHECKS: Final[tuple[Check[Custody], ...]] = (
    Check("DYT0201", _topology_exists, (*_GROVE, topologies_read)),
    Check("DYT0203", _grove_runs, _GROVE),
    Check("DYT0204", _in_sync, _LEVELS),
    Check("DYT0208", _nested, (*_LEVELS, nodes_read)),
    *judged_live(_OF_LEVELS, graphs_read, topology_named, topologies_read).values(),
    *judged_live(_OF_PLACEMENT, graphs_read, topologies_read).values(),
)
