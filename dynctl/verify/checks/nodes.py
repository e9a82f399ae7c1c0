"""Checks of node labels and of Grove topologies: DYT02."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dynctl.base.json_fields import mapping, sequence, text
from dynctl.findings.runner import Check, Found, Outcome, Skipped, found, outcome
from dynctl.health.checks.planes import count
from dynctl.health.facts import Unread
from dynctl.manifests.graphs import ClusterTopology
from dynctl.manifests.lint.facts import subject_of
from dynctl.manifests.lint.levels import KNOWN_LEVELS, misordered
from dynctl.manifests.lint.levels import LEVEL_CHECKS as LINT_CHECKS
from dynctl.manifests.pod_placement import may_run, tolerates
from dynctl.verify.cluster_facts import ClusterFacts
from dynctl.verify.join import JoinedFacts, VerifiedGraph
from dynctl.verify.live_graphs import judged_live, topologies_read, topology_names
from dynctl.verify.needs import (
    cluster_of,
    graphs_read,
    has_cluster,
    has_policy,
    label_known,
    unlabelled_graphs,
)
from dynctl.verify.wording import excerpt, some
from dynctl.wire.kubernetes.names import ENABLE_GROVE_ANNOTATION, GRAPH_LABEL
from dynctl.wire.kubernetes.objects import Node, Pod


@dataclass(frozen=True, slots=True)
class _LabelUse:
    """A node label that a graph uses for a domain, and the graph's worker pods by node.

    ``pod_key``: the label of its pods with the copied value. ``transfers``: it is the transfer
    domain; a worker does not start without it.
    """

    graph: VerifiedGraph
    key: str
    pod_key: str
    transfers: bool
    hosts: Mapping[str, Sequence[Pod]]

    def may_start(self, node: Node) -> bool:
        """Whether the next worker of the graph can be scheduled there, as far as it is known.

        Taints are compared by key; the graph tolerates the taints of nodes with its workers.
        """
        if self.graph.graph is None or not (node.schedulable and node.ready):
            return False
        return any(
            may_run(worker.pod, node.labels)
            and (node.name in self.hosts or tolerates(worker.pod, node.taints))
            and (node.devices is None or node.devices >= self._devices(worker.name))
            for worker in self.graph.graph.workers
        )

    def _devices(self, component: str) -> frozenset[str]:
        """The extended resources that the running pods of a component need, such as GPUs."""
        name = component.lower()
        return frozenset(
            device
            for worker in self.graph.workers
            if worker.component.lower() == name and worker.pod is not None
            for container in worker.pod.containers
            for device in container.devices
        )


def _uses(joined: JoinedFacts) -> Iterator[_LabelUse]:
    for graph in joined.governed:
        if graph.policy is None:
            continue
        hosts: dict[str, list[Pod]] = defaultdict(list)
        for worker in graph.workers:
            if worker.pod is not None and worker.pod.node in joined.nodes:
                hosts[worker.pod.node].append(worker.pod)
        for domain, source in graph.policy.sources.items():
            transfers = domain == graph.policy.domain
            yield _LabelUse(graph, source.node_key, source.pod_key, transfers, hosts)


def _by_key(joined: JoinedFacts) -> dict[str, list[_LabelUse]]:
    """The uses for transfer domains, by label, sorted."""
    uses: dict[str, list[_LabelUse]] = defaultdict(list)
    for use in _uses(joined):
        if use.transfers:
            uses[use.key].append(use)
    return dict(sorted(uses.items()))


# -- missing labels --------------------------------------------------------------------------------


def _hosts_labelled(joined: JoinedFacts) -> Outcome:
    return _hosts_with(joined, transfers=True)


def _hosts_have_all_levels(joined: JoinedFacts) -> Outcome:
    if all(use.transfers for use in _uses(joined)):
        return Skipped("no policy has further levels")
    return _hosts_with(joined, transfers=False)


def _hosts_with(joined: JoinedFacts, *, transfers: bool) -> Outcome:
    bare: dict[str, _BareNode] = {}
    hosts: set[str] = set()
    for use in _uses(joined):
        if use.transfers is not transfers:
            continue
        hosts |= use.hosts.keys()
        for name, mine in use.hosts.items():
            if use.key not in joined.nodes[name].labels:
                bare.setdefault(name, _BareNode(name)).add(use, mine)
    unread = unlabelled_graphs(joined)
    if not hosts and not unread:
        return Skipped("no worker pod runs on a known node")
    unknown = _unknown_nodes(joined)
    if unknown and not bare and not unread:
        return Skipped(f"the cluster has no node {some(unknown)}, where worker pods run")
    return outcome(
        [bare[name].finding() for name in sorted(bare)],
        unread,
        summary=f"{len(hosts):,} of {count(len(hosts), 'node')} with workers",
    )


class _BareNode:
    """A node without labels that the graphs of its workers use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pods: dict[str, Pod] = {}
        self._unlabelled: dict[str, Pod] = {}
        self._copied: dict[str, set[str]] = defaultdict(set)

    def add(self, use: _LabelUse, pods: Sequence[Pod]) -> None:
        """A missing label, and the workers there that use it."""
        copied = self._copied[use.key]
        for pod in pods:
            self._pods[f"{pod.namespace}/{pod.name}"] = pod
            if use.pod_key in pod.labels:
                copied.add(pod.labels[use.pod_key])
            else:
                self._unlabelled[f"{pod.namespace}/{pod.name}"] = pod

    def finding(self) -> Found:
        values = {
            key: next(iter(copied)) if len(copied) == 1 else "VALUE"
            for key, copied in sorted(self._copied.items())
        }
        fix = _label(self._name, values)
        if self._unlabelled:
            fix += f", then {_delete(self._name, list(self._unlabelled.values()))}"
        elif "VALUE" not in values.values():
            fix += ", as its workers have it: they need no restart"
        pods = count(len(self._pods), "worker pod")
        return found(f"Node {self._name}", keys=", ".join(values), pods=pods, fix=fix)


def _unknown_nodes(joined: JoinedFacts) -> list[str]:
    """The nodes of worker pods that the cluster does not list (deleted, or a pod's leftover)."""
    named = {worker.pod.node for graph in joined.governed for worker in graph.workers if worker.pod}
    return sorted(named - joined.nodes.keys() - {""})


def _candidates_labelled(joined: JoinedFacts) -> Outcome:
    wrong = []
    counts = []
    unread = unlabelled_graphs(joined)
    for key, uses in _by_key(joined).items():
        unread += [
            f"{use.graph.short_name}: the nodes for its workers are unknown"
            for use in uses
            if not use.graph.graph
        ]
        lacking = [node for node in joined.nodes.values() if key not in node.labels]
        nodes = _free_candidates(lacking, uses)
        if nodes:
            names = f"{count(len(nodes), 'node')} on which a worker may start: {some(nodes)}"
            wrong.append(found(f"Label {key}", nodes=names, label=_label(nodes[0], {key: "VALUE"})))
        labelled = len(joined.nodes) - len(lacking)
        counts.append(f"{labelled:,} of {count(len(joined.nodes), 'node')} ({key})")
    return outcome(wrong, unread, summary=some(counts))


def _free_candidates(nodes: Iterable[Node], uses: Sequence[_LabelUse]) -> list[str]:
    """The nodes on which a worker may start and none runs: DYT0205 reports the others."""
    hosting = {name for use in uses for name in use.hosts}
    free = [node for node in nodes if node.name not in hosting]
    return sorted(node.name for node in free if any(use.may_start(node) for use in uses))


def _label(node: str, values: Mapping[str, str]) -> str:
    pairs = " ".join(f"{key}={value}" for key, value in values.items())
    return f"kubectl label node {node} {pairs}"


def _delete(node: str, pods: Sequence[Pod]) -> str:
    """Commands that delete the graphs' pods on a node: one for each graph, at most two."""
    graphs = sorted({(pod.namespace, pod.labels.get(GRAPH_LABEL, "")) for pod in pods})
    commands = " && ".join(
        f"kubectl delete pod -n {namespace} -l {GRAPH_LABEL}={name} "
        f"--field-selector spec.nodeName={node}"
        for namespace, name in graphs[:2]
    )
    serving = sum(pod.ready for pod in pods)
    note = f" (ends {count(serving, 'serving worker')}; one after the other is enough)"
    others = ", and the same for its other graphs" if graphs[2:] else ""
    return commands + others + (note if serving else "")


def _relabel(node: str, key: str, value: str, uses: Sequence[_LabelUse]) -> str:
    """Commands that correct a label; workers on that node must restart to read it."""
    pods = [pod for use in uses for pod in use.hosts.get(node, ())]
    command = _label(f"--overwrite {node}", {key: value})
    return f"{command}, then {_delete(node, pods)}" if pods else command


# -- values ----------------------------------------------------------------------------------------


def _values(joined: JoinedFacts, key: str) -> dict[str, list[str]]:
    """Value of a node label -> names of its nodes, sorted."""
    names: dict[str, list[str]] = defaultdict(list)
    for name in sorted(joined.nodes):
        value = joined.nodes[name].labels.get(key)
        if value is not None:
            names[value].append(name)
    return names


def _not_empty(joined: JoinedFacts) -> Outcome:
    wrong = []
    summaries = []
    for key, uses in _by_key(joined).items():
        values = _values(joined, key)
        for name in values.pop("", ()):
            node = joined.nodes[name]
            if any(name in use.hosts or use.may_start(node) for use in uses):
                fix = _relabel(name, key, "VALUE", uses)
                wrong.append(found(f"Node {name}", key=key, fix=fix))
        counts = (f"{value} {len(nodes):,}" for value, nodes in sorted(values.items()))
        summaries.append(f"{some(counts, most=4)} ({key})")
    nothing = _no_values(joined)
    return outcome(wrong, unlabelled_graphs(joined), summary="; ".join(summaries), nothing=nothing)


def _no_values(joined: JoinedFacts) -> str:
    """That no node has a label of the policies; empty where one has."""
    there = any(_values(joined, key) for key in _by_key(joined))
    return "" if there else "no node has a label of the policies (DYT0205, DYT0206)"


def _several_values(joined: JoinedFacts) -> Outcome:
    wrong = []
    summaries = []
    for key in _by_key(joined):
        values = _values(joined, key)
        values.pop("", None)
        if len(values) == 1:
            [(value, nodes)] = values.items()
            many = count(len(nodes), "node")
            wrong.append(found(f"Label {key}", nodes=many, value=value))
        summaries.append(f"{count(len(values), 'value')} ({key})")
    nothing = _no_values(joined)
    return outcome(wrong, unlabelled_graphs(joined), summary="; ".join(summaries), nothing=nothing)


def _one_spelling(joined: JoinedFacts) -> Outcome:
    wrong = []
    for key, uses in _by_key(joined).items():
        values = _values(joined, key)
        groups: dict[str, list[str]] = defaultdict(list)
        for value in values:
            groups[value.lower()].append(value)
        for _, group in sorted(groups.items()):
            if len(group) > 1:
                *rare, usual = sorted(group, key=lambda spelling: (len(values[spelling]), spelling))
                spellings = ", ".join(
                    f"{spelling} ({count(len(values[spelling]), 'node')})"
                    for spelling in (usual, *rare)
                )
                odd = [node for spelling in rare for node in values[spelling]]
                more = f", and the same for {count(len(odd) - 1, 'more node')}" if odd[1:] else ""
                fix = _relabel(odd[0], key, usual, uses) + more
                wrong.append(found(f"Label {key}", twins=spellings, fix=fix))
    return outcome(wrong, unlabelled_graphs(joined), nothing=_no_values(joined))


# -- Grove topologies ------------------------------------------------------------------------------


_GROVE_SETS: Final = "podcliquesets.grove.io"
_GROVE_CLIQUE_LABEL: Final = "grove.io/podclique"


def _by_grove(joined: JoinedFacts) -> list[tuple[VerifiedGraph, str]]:
    """The graphs whose policy has a Grove topology, with its name."""
    return [
        (graph, graph.policy.cluster_topology)
        for graph in joined.governed
        if graph.policy is not None and graph.policy.cluster_topology
    ]


def _named_topologies(joined: JoinedFacts) -> list[ClusterTopology]:
    """The existing Grove topologies of policies."""
    names = {name for _, name in _by_grove(joined)}
    return [topology for topology in joined.topologies if topology.manifest.name in names]


# -- what checks need ------------------------------------------------------------------------------


def topology_named(joined: JoinedFacts) -> Skipped | None:
    """A graph has a Grove topology, for transfers or for placement."""
    return None if topology_names(joined) else Skipped("no graph has a Grove topology")


def grove_named(joined: JoinedFacts) -> Skipped | None:
    """A policy has a Grove topology."""
    if _by_grove(joined):
        return None
    return Skipped("no policy has a Grove topology")


def topology_exists(joined: JoinedFacts) -> Skipped | None:
    """At least one Grove topology of a policy exists."""
    return (
        None
        if _named_topologies(joined)
        else Skipped("the referenced topologies do not exist (DYT0201)")
    )


def nodes_read(joined: JoinedFacts) -> Skipped | None:
    """The nodes and pods were read."""
    cluster = cluster_of(joined)
    if isinstance(cluster.nodes, Unread):
        return Skipped(f"nodes: {cluster.nodes.why}", unread=True)
    if isinstance(cluster.pods, Unread):
        return Skipped(f"pods: {cluster.pods.why}", unread=True)
    return None


# -- topologies and Grove --------------------------------------------------------------------------


def _topology_exists(joined: JoinedFacts) -> Outcome:
    there = {topology.manifest.name: topology for topology in joined.topologies}
    named = _by_grove(joined)
    return outcome(
        (
            found(graph.subject, topology=name, there=some(sorted(there)) or "none")
            for graph, name in named
            if name not in there
        ),
        summary=some(sorted({subject_of(there[name]) for _, name in named if name in there})),
    )


def _grove_runs(joined: JoinedFacts) -> Outcome:
    cluster = cluster_of(joined)
    wrong: list[Found] = []
    unread: list[str] = []
    for graph, _ in _by_grove(joined):
        obstacle = _grove_obstacle(cluster, graph)
        if isinstance(obstacle, str):
            unread.append(obstacle)
        elif obstacle is not None:
            wrong.append(found(graph.subject, what=obstacle[0], fix=obstacle[1]))
    return outcome(wrong, unread)


def _grove_obstacle(cluster: ClusterFacts, graph: VerifiedGraph) -> tuple[str, str] | str | None:
    """What keeps a graph from Grove, and the fix; a text: why that is unknown; None: nothing."""
    annotations = {} if graph.graph is None else graph.graph.manifest.annotations
    namespace, _, name = graph.name.rpartition("/")
    enable = "enable Grove for Dynamo's operator and restart the operator"
    recreate = "delete the graph and apply it again"
    if str(annotations.get(ENABLE_GROVE_ANNOTATION, "")).lower() == "false":
        command = f"kubectl annotate dynamographdeployment {name} -n {namespace}"
        what = f'the annotation {ENABLE_GROVE_ANNOTATION} is "false"'
        return what, f"{command} {ENABLE_GROVE_ANNOTATION}-"
    if isinstance(cluster.served, Unread):
        return f"resources: {cluster.served.why}"
    if _GROVE_SETS not in cluster.served:
        what = f"the cluster serves no {_GROVE_SETS}: Grove is not installed"
        return what, f"install Grove, {enable}, then {recreate}"
    if any(_GROVE_CLIQUE_LABEL in pod.labels for pod in graph.pods):
        return None
    if isinstance(cluster.grove_sets, Unread):
        return f"PodCliqueSets: {cluster.grove_sets.why}"
    if graph.name in cluster.grove_sets:
        return None
    what = f"no PodCliqueSet {name}: the operator runs the graph without Grove"
    return what, f"{enable}, then {recreate}"


def _in_sync(joined: JoinedFacts) -> Outcome:
    def all_of() -> Iterator[Found]:
        for topology in _named_topologies(joined):
            status = mapping(topology.manifest.body.get("status"))
            for entry in sequence(status.get("schedulerTopologyStatuses")):
                scheduler = mapping(entry)
                if scheduler.get("inSync") is False:
                    yield found(
                        subject_of(topology),
                        scheduler=text(scheduler.get("schedulerName")) or "(no name)",
                        reference=text(scheduler.get("topologyReference")) or "(no name)",
                        why=excerpt(text(scheduler.get("message"))) or "no reason reported",
                    )

    return outcome(all_of())


# -- values of levels ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """Levels from broad to narrow, as ``(domain, node label)``, and the nodes that have them."""

    subject: str
    levels: Sequence[tuple[str, str]]
    nodes: Sequence[Node]


def _levels_nest(joined: JoinedFacts) -> Outcome:
    """Of a Grove topology all levels, of a labelKey with the broader labels of Kubernetes."""
    hierarchies = [*_of_label_keys(joined)]
    unordered: list[str] = []
    skipped = topologies_read(joined) if _by_grove(joined) else None
    for topology in _named_topologies(joined):
        if misordered([level.domain for level in topology.levels]) is None:
            hierarchies.append(_of_topology(joined, topology))
        else:
            unordered.append(topology.manifest.name)
    wrong = [finding for hierarchy in hierarchies for finding in _values_across(hierarchy)]
    if wrong or skipped is not None:
        return outcome(wrong, [] if skipped is None else [skipped.reason])
    if unordered:
        return Skipped(f"{some(unordered)}: the levels are not in order (DYT0210)")
    if not any(map(_is_comparable, hierarchies)):
        return Skipped("no node has the labels of a broader level")
    return outcome(())


def _of_topology(joined: JoinedFacts, topology: ClusterTopology) -> _Hierarchy:
    levels = [(level.domain, level.key) for level in topology.levels if level.domain and level.key]
    return _Hierarchy(subject_of(topology), levels, list(joined.nodes.values()))


def _values_across(hierarchy: _Hierarchy) -> Iterator[Found]:
    """The values of a level that lie in several values of a broader level."""
    for place, (narrow, key) in enumerate(hierarchy.levels):
        known: set[str] = set()
        # The nearest level first: a node may lack the labels of a level between.
        for broad, outer in reversed(hierarchy.levels[:place]):
            spans = _spans(hierarchy.nodes, outer, key)
            new = sorted(spans.keys() - known)
            known |= spans.keys()
            if new:
                places = some(f"{value} ({some(sorted(spans[value]))})" for value in new)
                yield found(hierarchy.subject, narrow=narrow, broad=broad, spans=places, key=key)


def _is_comparable(hierarchy: _Hierarchy) -> bool:
    """Whether a node has the labels of two levels."""
    keys = [key for _, key in hierarchy.levels]
    return any(sum(key in node.labels for key in keys) > 1 for node in hierarchy.nodes)


_REGION: Final = ("region", "topology.kubernetes.io/region")
_ZONE: Final = ("zone", "topology.kubernetes.io/zone")


def _of_label_keys(joined: JoinedFacts) -> Iterator[_Hierarchy]:
    """The labels of policies that name no topology, below the labels that Kubernetes defines."""
    for key, uses in _by_key(joined).items():
        mine = [
            (use, use.graph.policy.domain)
            for use in uses
            if use.graph.policy and use.graph.policy.label_key
        ]
        domain = mine[0][1] if mine else ""
        broader = _broader_levels(key, domain)
        nodes = [
            node
            for name, node in joined.nodes.items()
            if any(name in use.hosts or use.may_start(node) for use, _ in mine)
        ]
        if broader and nodes:
            yield _Hierarchy(f"Label {key}", [*broader, (domain, key)], nodes)


def _broader_levels(key: str, domain: str) -> list[tuple[str, str]]:
    """The levels that certainly contain the level of a label; none for an unknown level."""
    tail = key.rpartition("/")[2]
    level = next((known for known in (tail, domain) if known in KNOWN_LEVELS), "")
    place = KNOWN_LEVELS.index(level) if level else 0
    return [broad for broad in (_REGION, _ZONE) if place > KNOWN_LEVELS.index(broad[0])]


def _spans(nodes: Iterable[Node], broad: str, narrow: str) -> dict[str, set[str]]:
    """Narrow values whose nodes have several broad values."""
    values: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        inner, outer = node.labels.get(narrow), node.labels.get(broad)
        if inner and outer:
            values[inner].add(outer)
    return {value: outer for value, outer in values.items() if len(outer) > 1}


#: Placement without a named topology is checked by the usual names of levels.
_OF_PLACEMENT: Final = [check for check in LINT_CHECKS if check.code == "DYT0211"]
_OF_LEVELS: Final = [check for check in LINT_CHECKS if check not in _OF_PLACEMENT]
_GROVE: Final = (has_cluster, has_policy, topology_named, grove_named)
_LEVELS: Final = (*_GROVE, topologies_read, topology_exists)

_LEVEL_CHECKS: Final[tuple[Check[JoinedFacts], ...]] = (
    Check("DYT0201", _topology_exists, (*_GROVE, topologies_read)),
    Check("DYT0203", _grove_runs, _GROVE),
    Check("DYT0204", _in_sync, _LEVELS),
    Check("DYT0208", _levels_nest, (has_cluster, has_policy, nodes_read)),
    *judged_live(_OF_LEVELS, graphs_read, topology_named, topologies_read).values(),
    *judged_live(_OF_PLACEMENT, graphs_read, topologies_read).values(),
)


_NEEDS: Final = (has_cluster, has_policy, nodes_read, label_known)

NODE_CHECKS: Final[tuple[Check[JoinedFacts], ...]] = tuple(
    sorted(
        (
            *_LEVEL_CHECKS,
            Check("DYT0205", _hosts_labelled, _NEEDS),
            Check("DYT0206", _candidates_labelled, _NEEDS),
            Check("DYT0207", _not_empty, _NEEDS),
            Check("DYT0212", _several_values, _NEEDS),
            Check("DYT0213", _one_spelling, _NEEDS),
            Check("DYT0214", _hosts_have_all_levels, _NEEDS),
        ),
        key=lambda check: check.code,
    )
)
