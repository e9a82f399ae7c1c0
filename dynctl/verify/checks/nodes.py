"""Checks of the labels of nodes, from which every domain's value comes, and of Grove's levels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dynctl.findings.runner import Check, Outcome, Skipped, found, outcome
from dynctl.health.checks.planes import count
from dynctl.manifests.pod_placement import may_run, tolerates
from dynctl.verify.checks.levels import LEVEL_CHECKS, nodes_read
from dynctl.verify.join import Custody, VerifiedGraph
from dynctl.verify.live_graphs import clustered
from dynctl.verify.root_causes import governed, live, short, some, sourced, unsourced
from dynctl.wire.kubernetes.names import GRAPH_LABEL
from dynctl.wire.kubernetes.objects import Node, Pod


@dataclass(frozen=True, slots=True)
class _Use:
    """A node label that a graph takes a domain from, and the worker pods of the graph by node.

    ``transfers``: of the domain that transfers stay in; a worker does not start without it.
    """

    graph: VerifiedGraph
    key: str
    transfers: bool
    hosts: Mapping[str, Sequence[Pod]]

    def may_start(self, node: Node) -> bool:
        """Whether the next worker of the graph may start there, as far as it is told.

        Taints are compared by key; a node that hosts a worker of the graph is tolerated.
        """
        if self.graph.graph is None or not (node.schedulable and node.ready):
            return False
        return any(
            may_run(one.pod, node.labels)
            and (node.name in self.hosts or tolerates(one.pod, node.taints))
            for one in self.graph.graph.workers
        )


def _uses(custody: Custody) -> Iterator[_Use]:
    for graph in custody.governed:
        if graph.policy is None:
            continue
        hosts: dict[str, list[Pod]] = defaultdict(list)
        for worker in live(graph):
            if worker.pod is not None and worker.pod.node in custody.nodes:
                hosts[worker.pod.node].append(worker.pod)
        for domain, source in graph.policy.sources.items():
            yield _Use(graph, source.node_key, domain == graph.policy.domain, hosts)


def _by_key(custody: Custody) -> dict[str, list[_Use]]:
    """The uses for transfers, by the label that they use, sorted."""
    told: dict[str, list[_Use]] = defaultdict(list)
    for use in _uses(custody):
        if use.transfers:
            told[use.key].append(use)
    return dict(sorted(told.items()))


# -- labels that are not there ---------------------------------------------------------------------


def _hosts_labelled(custody: Custody) -> Outcome:
    return _hosts_with(custody, transfers=True)


def _hosts_have_all_levels(custody: Custody) -> Outcome:
    if all(one.transfers for one in _uses(custody)):
        return Skipped("no policy here has further levels")
    return _hosts_with(custody, transfers=False)


def _hosts_with(custody: Custody, *, transfers: bool) -> Outcome:
    lacks: dict[str, set[str]] = defaultdict(set)
    pods: dict[str, dict[str, Pod]] = defaultdict(dict)
    hosts: set[str] = set()
    for use in _uses(custody):
        if use.transfers is not transfers:
            continue
        hosts |= use.hosts.keys()
        for name, mine in use.hosts.items():
            if use.key not in custody.nodes[name].labels:
                lacks[name].add(use.key)
                pods[name].update((f"{pod.namespace}/{pod.name}", pod) for pod in mine)
    unread = unsourced(custody)
    if not hosts and not unread:
        return Skipped("no worker pod runs on a node that is known")
    return outcome(
        (
            found(
                f"Node {name}",
                keys=", ".join(sorted(lacks[name])),
                pods=count(len(pods[name]), "worker pod"),
                label=_label(name, sorted(lacks[name])),
                delete=_delete(name, list(pods[name].values())),
            )
            for name in sorted(lacks)
        ),
        unread,
        summary=f"{len(hosts):,} of {count(len(hosts), 'node')} with workers",
    )


def _candidates_labelled(custody: Custody) -> Outcome:
    wrong = []
    says = []
    unread = unsourced(custody)
    for key, uses in _by_key(custody).items():
        unread += [
            f"{short(one.graph)}: where its workers may start"
            for one in uses
            if not one.graph.graph
        ]
        lacking = [node for node in custody.nodes.values() if key not in node.labels]
        # A node that hosts a worker without the label is DYT0205's.
        hosting = {name for one in uses for name in one.hosts}
        nodes = sorted(
            node.name
            for node in lacking
            if node.name not in hosting and any(one.may_start(node) for one in uses)
        )
        if nodes:
            told = f"{count(len(nodes), 'node')} on which a worker may start: {some(nodes)}"
            wrong.append(found(f"Label {key}", nodes=told, label=_label(nodes[0], [key])))
        labelled = len(custody.nodes) - len(lacking)
        says.append(f"{labelled:,} of {count(len(custody.nodes), 'node')} ({key})")
    return outcome(wrong, unread, summary=some(says))


def _label(node: str, keys: Sequence[str], value: str = "VALUE") -> str:
    return f"kubectl label node {node} " + " ".join(f"{key}={value}" for key in keys)


def _delete(node: str, pods: Sequence[Pod]) -> str:
    """Deletes the pods of the graphs on a node: a command a graph, two at most."""
    graphs = sorted({(pod.namespace, pod.labels.get(GRAPH_LABEL, "")) for pod in pods})
    told = " && ".join(
        f"kubectl delete pod -n {namespace} -l {GRAPH_LABEL}={name} "
        f"--field-selector spec.nodeName={node}"
        for namespace, name in graphs[:2]
    )
    return told + (", likewise for its other graphs" if graphs[2:] else "")


def _relabelled(node: str, key: str, value: str, uses: Sequence[_Use]) -> str:
    """Corrects a label that is there; workers of that node read theirs at their start only."""
    pods = [pod for one in uses for pod in one.hosts.get(node, ())]
    told = _label(f"--overwrite {node}", [key], value)
    return f"{told}, then {_delete(node, pods)}" if pods else told


# -- values ----------------------------------------------------------------------------------------


def _values(custody: Custody, key: str) -> dict[str, list[str]]:
    """Value of a node label -> names of its nodes, sorted."""
    told: dict[str, list[str]] = defaultdict(list)
    for name in sorted(custody.nodes):
        value = custody.nodes[name].labels.get(key)
        if value is not None:
            told[value].append(name)
    return told


def _not_empty(custody: Custody) -> Outcome:
    wrong = []
    says = []
    for key, uses in _by_key(custody).items():
        values = _values(custody, key)
        for name in values.pop("", ()):
            node = custody.nodes[name]
            if any(name in one.hosts or one.may_start(node) for one in uses):
                fix = _relabelled(name, key, "VALUE", uses)
                wrong.append(found(f"Node {name}", key=key, fix=fix))
        told = (f"{value} {len(nodes):,}" for value, nodes in sorted(values.items()))
        says.append(f"{some(told, most=4)} ({key})")
    return outcome(wrong, unsourced(custody), summary="; ".join(says))


def _several_values(custody: Custody) -> Outcome:
    wrong = []
    says = []
    for key in _by_key(custody):
        values = _values(custody, key)
        values.pop("", None)
        if len(values) == 1:
            [(value, nodes)] = values.items()
            many = count(len(nodes), "node")
            wrong.append(found(f"Label {key}", nodes=many, value=value))
        says.append(f"{count(len(values), 'value')} ({key})")
    return outcome(wrong, unsourced(custody), summary="; ".join(says))


def _no_twins(custody: Custody) -> Outcome:
    wrong = []
    for key, uses in _by_key(custody).items():
        values = _values(custody, key)
        groups: dict[str, list[str]] = defaultdict(list)
        for value in values:
            groups[value.lower()].append(value)
        for _, group in sorted(groups.items()):
            if len(group) > 1:
                *rare, usual = sorted(group, key=lambda one: (len(values[one]), one))
                told = ", ".join(
                    f"{one} ({count(len(values[one]), 'node')})" for one in (usual, *rare)
                )
                odd = [node for one in rare for node in values[one]]
                more = f", likewise {count(len(odd) - 1, 'more node')}" if odd[1:] else ""
                fix = _relabelled(odd[0], key, usual, uses) + more
                wrong.append(found(f"Label {key}", twins=told, fix=fix))
    return outcome(wrong, unsourced(custody))


_NEEDS: Final = (clustered, governed, nodes_read, sourced)

NODE_CHECKS: Final[tuple[Check[Custody], ...]] = tuple(
    sorted(
        (
            *LEVEL_CHECKS,
            Check("DYT0205", _hosts_labelled, _NEEDS),
            Check("DYT0206", _candidates_labelled, _NEEDS),
            Check("DYT0207", _not_empty, _NEEDS),
            Check("DYT0212", _several_values, _NEEDS),
            Check("DYT0213", _no_twins, _NEEDS),
            Check("DYT0214", _hosts_have_all_levels, _NEEDS),
        ),
        key=lambda check: check.code,
    )
)
