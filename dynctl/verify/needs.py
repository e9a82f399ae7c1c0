"""What checks need before they can run, and the workers that they check. Pure.

Each need is a function of the joined facts that returns Skipped with the reason, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from dynctl.findings.runner import Found, Skipped, found
from dynctl.health.facts import Unread
from dynctl.verify.chain import WorkerChain
from dynctl.verify.cluster_facts import ClusterFacts, PodKey
from dynctl.verify.join import JoinedFacts
from dynctl.verify.wording import restart_fix
from dynctl.wire.kubernetes.objects import Pod

NO_CLUSTER: Final = "no cluster was read"


# -- accessors -------------------------------------------------------------------------------------


def cluster_of(joined: JoinedFacts) -> ClusterFacts:
    """The cluster, for checks that need one."""
    assert joined.cluster is not None
    return joined.cluster


def pod_of(worker: WorkerChain) -> Pod:
    """The pod of a worker that has one."""
    assert worker.pod is not None
    return worker.pod


def key_of(worker: WorkerChain) -> PodKey:
    """The key of the pod's files and logs."""
    pod = pod_of(worker)
    return pod.namespace, pod.name


def about_pod(worker: WorkerChain, **arguments: object) -> Found:
    """A finding about a worker that a restart mends."""
    return found(worker.subject, restart=restart_fix(pod_of(worker)), **arguments)


def about_log(worker: WorkerChain, **arguments: object) -> Found:
    """A finding about a worker whose log has the reason."""
    pod = pod_of(worker)
    return about_pod(worker, pod=pod.name, namespace=pod.namespace, **arguments)


def differing(worker: WorkerChain, differs: Iterable[str]) -> Found:
    """A finding that parts of the worker differ from what is before them."""
    return about_pod(worker, differs="; ".join(differs))


def live_workers(joined: JoinedFacts) -> list[WorkerChain]:
    """The worker pods of all graphs with a policy."""
    return [worker for graph in joined.governed for worker in graph.workers]


# -- needs -----------------------------------------------------------------------------------------


def has_cluster(joined: JoinedFacts) -> Skipped | None:
    """A cluster was read."""
    return Skipped(NO_CLUSTER) if joined.cluster is None else None


def graphs_read(joined: JoinedFacts) -> Skipped | None:
    """The graphs of the cluster were read."""
    if joined.cluster is None:
        return Skipped(NO_CLUSTER)
    graphs = joined.cluster.graphs
    return Skipped(f"graphs: {graphs.why}", unread=True) if isinstance(graphs, Unread) else None


def in_cluster(joined: JoinedFacts) -> Skipped | None:
    """The pods of a cluster were read."""
    cluster = joined.cluster
    if cluster is None:
        return Skipped(NO_CLUSTER)
    if isinstance(cluster.pods, Unread):
        return Skipped(f"pods: {cluster.pods.why}", unread=True)
    return None


def has_policy(joined: JoinedFacts) -> Skipped | None:
    """At least one graph has a valid policy."""
    if joined.governed:
        return None
    cluster = joined.cluster
    if cluster is not None and isinstance(cluster.graphs, Unread):
        return Skipped(f"graphs: {cluster.graphs.why}; no pod has a policy", unread=True)
    return Skipped("no graph has a valid policy (DYT0102)")


def has_workers(joined: JoinedFacts) -> Skipped | None:
    """At least one worker pod exists."""
    return None if live_workers(joined) else Skipped("no worker pods (DYT0401)")


def label_known(joined: JoinedFacts) -> Skipped | None:
    """The label of the transfer domain is known for at least one graph."""
    if any(graph.policy is not None and graph.policy.source for graph in joined.governed):
        return None
    unread = unlabelled_graphs(joined)
    why = "; ".join(unread[:2]) or "the label of the domain is unknown (DYT0201, DYT0202)"
    return Skipped(why, unread=bool(unread))


def unlabelled_graphs(joined: JoinedFacts) -> list[str]:
    """The graphs whose labels are unknown because their Grove topology could not be read."""
    cluster = joined.cluster
    if cluster is None or not isinstance(cluster.topologies, Unread):
        return []
    why = cluster.topologies.why
    return [
        f"{graph.short_name}: the levels of {graph.policy.cluster_topology}: {why}"
        for graph in joined.governed
        if graph.policy is not None and graph.policy.source is None
    ]


def first_skip(
    joined: JoinedFacts, needs: Iterable[Callable[[JoinedFacts], Skipped | None]]
) -> Skipped | None:
    """The result of the first unmet need; None if all are met."""
    return next((missing for need in needs if (missing := need(joined)) is not None), None)
