"""The fleet of a cluster for a capacity plan: ready worker pods by graph, domain, node. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from dynctl.base.errors import UsageProblem
from dynctl.health.facts import Unread
from dynctl.planning.capacity import Cell, NodeWorkers
from dynctl.planning.planned_fleet import Home, PlannedFleet
from dynctl.verify.chain import LinkName, WorkerChain
from dynctl.verify.join import JoinedFacts, VerifiedGraph

_BY_TRUST = (LinkName.CARD, LinkName.FILE, LinkName.LABEL, LinkName.NODE)
"""The router uses the card; without one, the links from which it will be made."""


def fleet_of_cluster(joined: JoinedFacts, domain: str | None) -> PlannedFleet:
    """The ready worker pods of every graph; each graph is a pool of its own.

    Raises UsageProblem if the graphs have different transfer domains and none is chosen, or if
    pods could not be listed.
    """
    cluster = joined.cluster
    if cluster is None or isinstance(cluster.pods, Unread):
        why = cluster.pods.why if cluster and isinstance(cluster.pods, Unread) else "no cluster"
        raise UsageProblem(f"pods cannot be counted: {why}", "plan from manifests: -f FILE")
    domain = domain or _common_domain(joined)
    count = _Count(joined, domain)
    for graph in joined.graphs:
        if graph.workers:
            count.add(graph)
    where = ", ".join(cluster.namespaces) or "all namespaces"
    return PlannedFleet(
        f"{cluster.title}, {where}",
        domain,
        tuple(count.cells()),
        in_force={graph.name: _in_force(graph, domain) for graph in joined.graphs},
        homes=tuple(count.homes),
        notes=tuple(count.notes),
    )


def _common_domain(joined: JoinedFacts) -> str:
    domains = sorted({graph.policy.domain for graph in joined.graphs if graph.policy})
    if len(domains) > 1:
        raise UsageProblem(
            f"the graphs have different transfer domains ({', '.join(domains)})",
            "choose one: --domain NAME",
        )
    return domains[0] if domains else "zone"


def _in_force(graph: VerifiedGraph, domain: str) -> str:
    policy = graph.policy
    return "none" if policy is None or policy.domain != domain else policy.enforcement


class _Count:
    """Ready workers by (graph, value) and node."""

    def __init__(self, joined: JoinedFacts, domain: str) -> None:
        self._joined = joined
        self._domain = domain
        self._nodes: dict[tuple[str, str | None], dict[str, NodeWorkers]] = defaultdict(dict)
        self.homes: list[Home] = []
        self.notes: list[str] = []

    def add(self, graph: VerifiedGraph) -> None:
        waiting = unknown = 0
        for worker in graph.workers:
            if worker.follower:
                continue
            if worker.pod is None or not worker.pod.ready:
                waiting += 1
            elif worker.role not in ("prefill", "decode"):
                unknown += 1
            else:
                self._place(graph.name, worker, worker.role)
        if waiting:
            self.notes.append(f"{graph.name}: {waiting:,} worker pods are not ready: not counted")
        if unknown:
            self.notes.append(
                f"{graph.name}: {unknown:,} worker pods are aggregated or have no known role: "
                "not counted"
            )
        self.homes += self._homes(graph)

    def cells(self) -> Iterator[Cell]:
        for (pool, value), nodes in sorted(
            self._nodes.items(), key=lambda item: (item[0][0], item[0][1] is None, item[0][1] or "")
        ):
            members = tuple(nodes[name] for name in sorted(nodes))
            yield Cell(
                pool,
                value,
                sum(node.prefill for node in members),
                sum(node.decode for node in members),
                nodes=members,
            )

    def _place(self, pool: str, worker: WorkerChain, role: str) -> None:
        value = self._value(worker)
        name = worker.pod.node if worker.pod is not None else ""
        nodes = self._nodes[pool, value]
        node = nodes.get(name, NodeWorkers(name))
        more = (node.prefill + (role == "prefill"), node.decode + (role == "decode"))
        nodes[name] = NodeWorkers(name, *more)

    def _value(self, worker: WorkerChain) -> str | None:
        chain = worker.chains.get(self._domain)
        if chain is not None:
            return next((chain[link].value for link in _BY_TRUST if chain[link].value), None)
        labels = {} if worker.node is None else worker.node.labels
        return next(
            (value for key, value in sorted(labels.items()) if _names(key, self._domain)), None
        )

    def _homes(self, graph: VerifiedGraph) -> Iterable[Home]:
        """The components that are pinned to one value: a patch can change their replicas."""
        policy = graph.policy
        if graph.graph is None or policy is None or self._domain not in policy.sources:
            return
        key = policy.sources[self._domain].node_key
        for worker in graph.graph.workers:
            values = worker.domains(key)
            if values is not None and len(values) == 1 and worker.role in ("prefill", "decode"):
                yield Home(graph.name, next(iter(values)), str(worker.role), graph.graph, worker)


def _names(key: str, domain: str) -> bool:
    return key.rpartition("/")[2] == domain
