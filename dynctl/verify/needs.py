"""What checks need before they can run, and the workers that they check. Pure.

Each need is a function of the joined facts that returns Skipped with the reason, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from dynctl.findings.runner import Skipped
from dynctl.health.facts import Unread
from dynctl.verify.chain import WorkerChain
from dynctl.verify.facts import ClusterFacts, PodKey
from dynctl.verify.join import JoinedFacts, VerifiedGraph
from dynctl.verify.wording import short
from dynctl.wire.kubernetes.objects import Pod

_ENDED: Final = ("Succeeded", "Failed")
NO_CLUSTER: Final = "Kubernetes was not asked"


# -- accessors -------------------------------------------------------------------------------------


def cluster_of(joined: JoinedFacts) -> ClusterFacts:
    """The cluster, for checks that need it to be there."""
    assert joined.cluster is not None
    return joined.cluster


def pod_of(worker: WorkerChain) -> Pod:
    """The pod of a worker that has one."""
    assert worker.pod is not None
    return worker.pod


def key_of(worker: WorkerChain) -> PodKey:
    """By what files and logs are kept."""
    pod = pod_of(worker)
    return pod.namespace, pod.name


def live(graph: VerifiedGraph) -> list[WorkerChain]:
    """The graph's worker pods, without those that have ended (evicted ones stay for a while)."""
    return [one for one in graph.workers if one.pod and one.pod.phase not in _ENDED]


def live_workers(joined: JoinedFacts) -> list[WorkerChain]:
    """The live worker pods of all graphs with a policy."""
    return [one for graph in joined.governed for one in live(graph)]


# -- needs -----------------------------------------------------------------------------------------


def clustered(joined: JoinedFacts) -> Skipped | None:
    """A cluster was looked at."""
    return Skipped(NO_CLUSTER) if joined.cluster is None else None


def graphs_read(joined: JoinedFacts) -> Skipped | None:
    """The graphs of the cluster are known."""
    if joined.cluster is None:
        return Skipped(NO_CLUSTER)
    graphs = joined.cluster.graphs
    return Skipped(f"graphs: {graphs.why}", unread=True) if isinstance(graphs, Unread) else None


def in_cluster(joined: JoinedFacts) -> Skipped | None:
    """The pods of a cluster are known."""
    cluster = joined.cluster
    if cluster is None:
        return Skipped(NO_CLUSTER)
    if isinstance(cluster.pods, Unread):
        return Skipped(f"pods: {cluster.pods.why}", unread=True)
    return None


def governed(joined: JoinedFacts) -> Skipped | None:
    """At least one graph has a policy that can be followed."""
    if joined.governed:
        return None
    cluster = joined.cluster
    if cluster is not None and isinstance(cluster.graphs, Unread):
        return Skipped(f"graphs: {cluster.graphs.why}; no pod tells of a policy", unread=True)
    return Skipped("no graph here has a policy that can be followed (DYT0102)")


def peopled(joined: JoinedFacts) -> Skipped | None:
    """At least one worker pod is there."""
    return None if live_workers(joined) else Skipped("there is no worker pod (DYT0401)")


def sourced(joined: JoinedFacts) -> Skipped | None:
    """Which labels hold the transfer domain is known of at least one graph."""
    if any(graph.policy is not None and graph.policy.source for graph in joined.governed):
        return None
    unread = unsourced(joined)
    told = "; ".join(unread[:2]) or "which label holds the domain is not known (DYT0201, DYT0202)"
    return Skipped(told, unread=bool(unread))


def unsourced(joined: JoinedFacts) -> list[str]:
    """The graphs whose labels are not known because their topology could not be read."""
    cluster = joined.cluster
    if cluster is None or not isinstance(cluster.topologies, Unread):
        return []
    return [
        f"{short(graph)}: the levels of {graph.policy.cluster_topology}: {cluster.topologies.why}"
        for graph in joined.governed
        if graph.policy is not None and graph.policy.source is None
    ]


def first_skip(
    joined: JoinedFacts, needs: Iterable[Callable[[JoinedFacts], Skipped | None]]
) -> Skipped | None:
    """The first of ``needs`` that is not met; None where all are."""
    return next((one for need in needs if (one := need(joined)) is not None), None)
