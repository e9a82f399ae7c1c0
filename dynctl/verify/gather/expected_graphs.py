"""Check that the cluster has the wanted graphs; if not, find out where they are.

A missing graph is an error with the next command to try, not a report with only skipped checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from dynctl.adapters.ports import Cluster, ClusterRefusal
from dynctl.base.errors import Unreachable
from dynctl.base.json_fields import mapping, sequence, text
from dynctl.health.facts import Unread
from dynctl.manifests.graphs import GRAPH, GRAPH_GROUP, GRAPH_VERSIONS, GRAPHS, GRAPHS_RESOURCE
from dynctl.verify.cluster_facts import ClusterFacts, VerifyFacts
from dynctl.wire.kubernetes.names import GRAPH_LABEL

_MOST_NAMED: Final = 20
_OTHER_CLUSTER: Final = "or name another cluster: --kube-context NAME"


def expect_graphs(cluster: Cluster, namespace: str | None, facts: VerifyFacts) -> None:
    """Raise Unreachable if the namespace has no graphs, or not the named ones.

    ``namespace`` None: all were read.
    """
    read, registered = facts.cluster, facts.registry is not None
    if read is None:
        return
    where = f"namespace {namespace}" if namespace else "any namespace"
    place = f"in {where} of {cluster.title}"
    unreadable = _unreadable(read)
    there = _names(read)
    if not registered:
        _expect_readable(cluster, place, read)
    also = f"; {unreadable[0]}" if unreadable else ""
    for name in read.wanted:
        if name not in there:
            hint = _list(there) if there else _other_graphs(cluster, namespace, read, name)
            raise Unreachable(f"no {GRAPH} {name} {place}{also}", hint)
    if not (there or registered or read.metadata):
        raise Unreachable(f"no {GRAPH} {place}{also}", _other_graphs(cluster, namespace, read))


def _expect_readable(cluster: Cluster, place: str, read: ClusterFacts) -> None:
    """Raise Unreachable if graphs and pods are not readable, or Dynamo is not installed."""
    unreadable = _unreadable(read)
    if len(unreadable) == 2:
        raise Unreachable(
            f"graphs and pods are not readable {place}: {'; '.join(unreadable)}",
            "permissions of verify: dynctl explain DYT0004",
        )
    if not unreadable and not _names(read) and _is_absent(read):
        raise Unreachable(
            f"{cluster.title} serves no {GRAPHS_RESOURCE}: Dynamo is not installed",
            f"install Dynamo's operator and its resource definitions, {_OTHER_CLUSTER}",
        )


def _unreadable(read: ClusterFacts) -> list[str]:
    return [listing.why for listing in (read.graphs, read.pods) if isinstance(listing, Unread)]


def _names(read: ClusterFacts) -> list[str]:
    """The names of existing graphs, and of those that only have pods."""
    graphs = () if isinstance(read.graphs, Unread) else read.graphs
    pods = () if isinstance(read.pods, Unread) else read.pods
    return sorted({*(graph.name for graph in graphs), *(pod.labels[GRAPH_LABEL] for pod in pods)})


def _list(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return f"existing: {', '.join(names[:_MOST_NAMED])}" + (
        f" and {more:,} more" if more > 0 else ""
    )


def _is_absent(read: ClusterFacts) -> bool:
    return isinstance(read.served, Mapping) and GRAPHS_RESOURCE not in read.served


def _other_graphs(
    cluster: Cluster, namespace: str | None, read: ClusterFacts, name: str | None = None
) -> str:
    """What to do instead. Reads the graphs of all namespaces once, if permitted."""
    if namespace is None:
        return f"apply one: kubectl apply -f FILE, {_OTHER_CLUSTER}"
    graphs = _everywhere(cluster, read)
    if graphs is None:
        return "specify its namespace with -n NAME"
    spaces = sorted({space for space, graph in graphs if name in (None, graph)})
    missing = "the namespace does not exist; " if _is_missing(cluster, namespace) else ""
    if spaces:
        what = "it is" if name else "graphs are"
        more = "" if name else ", or -A for all"
        return f"{missing}{what} in {_join_names(spaces)}: -n {spaces[0]}{more}"
    if not graphs:
        return f"{missing}no other namespace has one: kubectl apply -f FILE, {_OTHER_CLUSTER}"
    return missing + _list([f"{graph} in {space}" for space, graph in graphs])


def _join_names(spaces: Sequence[str]) -> str:
    return f"namespace {spaces[0]}" if len(spaces) == 1 else f"namespaces {', '.join(spaces[:8])}"


def _everywhere(cluster: Cluster, read: ClusterFacts) -> list[tuple[str, str]] | None:
    """``(namespace, name)`` of the first page of all graphs; None if that is refused."""
    served = read.served
    versions = () if isinstance(served, Unread) else served.get(GRAPHS_RESOURCE, ())
    version = next(
        (candidate for candidate in reversed(GRAPH_VERSIONS) if candidate in versions), None
    )
    if version is None:
        return None
    path = f"/apis/{GRAPH_GROUP}/{version}/{GRAPHS}"
    try:
        page = cluster.get(path, {"limit": "500"})
    except (ClusterRefusal, Unreachable):
        return None
    metadata = [mapping(mapping(item).get("metadata")) for item in sequence(page.get("items"))]
    return sorted((text(item.get("namespace")), text(item.get("name"))) for item in metadata)


def _is_missing(cluster: Cluster, namespace: str) -> bool:
    try:
        cluster.get(f"/api/v1/namespaces/{namespace}")
    except ClusterRefusal as refusal:
        return refusal.missing
    except Unreachable:
        return False
    return False
