"""Gather the facts of a cluster: each list once, then files and logs of a few pods.

The number of requests does not grow with the number of pods, except for the pods that
:mod:`dynctl.verify.gather.pods` chooses. A refused request becomes Unread, and the others continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, TypeVar

from dynctl.adapters.ports import Cluster, ClusterRefusal
from dynctl.base.errors import Unreachable
from dynctl.base.json_fields import mapping, sequence, text
from dynctl.health.facts import Unread
from dynctl.manifests.files import Manifest
from dynctl.manifests.graphs import GRAPH, GRAPH_GROUP, GRAPHS, GRAPHS_RESOURCE, TOPOLOGY_KINDS
from dynctl.verify.cluster_facts import (
    ClusterFacts,
    GraphSchema,
    Listing,
    PodKey,
    VerifyFacts,
)
from dynctl.verify.gather.expected_graphs import expect_graphs
from dynctl.verify.gather.kubelets import Kubelets
from dynctl.verify.gather.permissions import (
    SETS,
    account,
    graph_namespaces,
    operator_reviews,
    operator_users,
    unread,
    verify_reviews,
    worker_reviews,
    worker_users,
)
from dynctl.verify.gather.pods import (
    Sampling,
    chosen_workers,
    read_files,
    read_start,
    warning_queries,
)
from dynctl.verify.join import join
from dynctl.wire.kubernetes import objects
from dynctl.wire.kubernetes.names import (
    DISCOVERY_ENABLED_LABEL,
    GRAPH_LABEL,
    LABEL_MISSING_REASON,
    OPERATOR_APP,
)
from dynctl.wire.kubernetes.worker_metadata import PLURAL, WorkerMetadata, worker_metadata

_TOPOLOGIES: Final = {f"{kind.lower()}s": kind for kind in TOPOLOGY_KINDS}
_GRAPH_VERSIONS: Final = ("v1beta1", "v1alpha1")
_AT_ONCE: Final = 8
#: The most pods that are looked up one by one.
_MOST_OTHERS: Final = 64

T = TypeVar("T")
Served: TypeAlias = Mapping[str, tuple[str, ...]] | Unread
"""``plural.group`` -> versions."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to read. ``namespace`` None: all. ``graphs``: names, empty for all graphs.

    ``optional``: a cluster without graphs is not an error.
    """

    namespace: str | None
    graphs: tuple[str, ...] = ()
    exec: Sampling = Sampling.AUTO
    logs: Sampling = Sampling.AUTO
    optional: bool = False


def gather(cluster: Cluster, wanted: Wanted, before: VerifyFacts | None = None) -> VerifyFacts:
    """The facts of a cluster, added to ``before`` (a registry, routers).

    Raises Unreachable if the API server does not respond or has no such graph.
    """
    lists = _lists(cluster, wanted)
    if _is_torn(lists):
        # A pod was replaced between two lists, or it really has what another pod left: once more.
        lists = _lists(cluster, wanted)
    facts = replace(before or VerifyFacts(), cluster=lists)
    if not wanted.optional:
        expect_graphs(cluster, wanted.namespace, facts)
    return _with_details(cluster, wanted, facts)


def _with_details(cluster: Cluster, wanted: Wanted, facts: VerifyFacts) -> VerifyFacts:
    """Add files, log starts and warnings of chosen pods."""
    if facts.cluster is None:
        return facts
    joined = join(facts)
    with_files = chosen_workers(joined, wanted.exec)
    with_logs = chosen_workers(joined, wanted.logs)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="dynctl-verify") as pool:
        kubelets = Kubelets(cluster, pool, (*with_files, *with_logs))
        files = kubelets.read("exec", read_files, with_files)
        logs = kubelets.read("log", read_start, with_logs)
        warnings = pool.map(lambda query: _warnings(cluster, *query), warning_queries(joined))
        complete = replace(
            facts.cluster,
            files=files,
            logs=logs,
            silent_nodes=kubelets.silent,
            warnings=tuple(warning for events in warnings for warning in events),
        )
    return replace(facts, cluster=complete)


def _warnings(cluster: Cluster, namespace: str, selector: str) -> tuple[objects.ObjectEvent, ...]:
    """The events of one query; none if they are not readable: they only explain a finding."""
    events = _ClusterReader(cluster, namespace).events(selector)
    return () if isinstance(events, Unread) else events


def _lists(cluster: Cluster, wanted: Wanted) -> ClusterFacts:
    version = _version(cluster)
    served = _served_resources(cluster)
    names: Mapping[str, tuple[str, ...]] = served if isinstance(served, Mapping) else {}
    topologies = [name for name in _TOPOLOGIES if f"{name}.grove.io" in names]
    sets = [SETS] if f"{SETS}.grove.io" in names else []
    selected = _graph_selector(wanted.graphs)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="dynctl-verify") as pool:
        permissions = verify_reviews(wanted.namespace, [*topologies, *sets])
        access = pool.map(lambda review: _or_unread(lambda: cluster.allowed(review)), permissions)
        reader = _ClusterReader(cluster, wanted.namespace)
        jobs: dict[str, Future[Any]] = {
            "schemas": pool.submit(_schemas, cluster),
            "graphs": pool.submit(reader.graphs, served),
            "topologies": pool.submit(reader.topologies, served, topologies),
            "nodes": pool.submit(reader.all, "/api/v1", "nodes", objects.node),
            "pods": pool.submit(reader.inside, "/api/v1", "pods", objects.pod, selected),
            "events": pool.submit(reader.events, f"reason={LABEL_MISSING_REASON}"),
            "endpoints": pool.submit(reader.endpoints),
            "metadata": pool.submit(reader.metadata, served),
            "operators": pool.submit(reader.operators),
            "grove_sets": pool.submit(reader.grove_sets, served),
        }
        lists: dict[str, Any] = {name: job.result() for name, job in jobs.items()}
        facts = ClusterFacts(
            cluster.title,
            cluster.now,
            version,
            namespaces=() if wanted.namespace is None else (wanted.namespace,),
            wanted=wanted.graphs,
            served=served,
            access=dict(zip(permissions, access, strict=True)),
            **lists,
        )
        spaces = graph_namespaces(facts)
        accounts = [
            *((user, operator_reviews(topologies, spaces)) for user in operator_users(facts)),
            *((user, worker_reviews(space)) for user, space in worker_users(facts)),
        ]
        read = tuple(pool.map(lambda names: account(cluster, *names), accounts))
        others = _or_unread(lambda: _other_pods(cluster, facts)) if wanted.graphs else ()
    operators = len(operator_users(facts))
    return replace(
        facts,
        other_pods=others,
        operator_accounts=read[:operators],
        worker_accounts=read[operators:],
    )


def _is_torn(facts: ClusterFacts) -> bool:
    """Whether a list names another pod of the same name than the list of pods has."""
    pods = () if isinstance(facts.pods, Unread) else facts.pods
    uids = {(pod.namespace, pod.name): pod.uid for pod in pods}
    metadata = () if isinstance(facts.metadata, Unread) else facts.metadata
    endpoints = () if isinstance(facts.endpoints, Unread) else facts.endpoints
    named = [((item.namespace, item.owner), item.owner_uid) for item in metadata]
    named += [((endpoint.namespace, endpoint.pod), endpoint.uid) for endpoint in endpoints]
    return any(uid and uids.get(key, uid) != uid for key, uid in named)


class _ClusterReader:
    """Reads each list once. ``namespace`` None: all namespaces."""

    def __init__(self, cluster: Cluster, namespace: str | None) -> None:
        self._cluster = cluster
        self._namespace = namespace

    def all(
        self,
        root: str,
        plural: str,
        read: Callable[[Mapping[str, Any]], T],
        query: Mapping[str, str] | None = None,
    ) -> Listing[T]:
        """A list over all namespaces, or of cluster-wide objects."""
        return _or_unread(lambda: self._read(f"{root}/{plural}", read, query))

    def inside(
        self,
        root: str,
        plural: str,
        read: Callable[[Mapping[str, Any]], T],
        query: Mapping[str, str] | None = None,
    ) -> Listing[T]:
        """A list of the wanted namespace."""
        inner = "" if self._namespace is None else f"/namespaces/{self._namespace}"
        return self.all(root + inner, plural, read, query)

    def graphs(self, served: Served) -> Listing[Manifest]:
        if isinstance(served, Unread):
            return served
        versions = served.get(GRAPHS_RESOURCE, ())
        version = next((candidate for candidate in _GRAPH_VERSIONS if candidate in versions), None)
        if version is None:
            others = f"the cluster serves only {', '.join(versions)} (DYT0002)"
            return Unread(others) if versions else ()
        root = f"/apis/{GRAPH_GROUP}/{version}"
        return self.inside(
            root, GRAPHS, lambda body: _manifest(body, GRAPH, f"{GRAPH_GROUP}/{version}")
        )

    def topologies(self, served: Served, plurals: Iterable[str]) -> Listing[Manifest]:
        if isinstance(served, Unread):
            return served
        manifests: list[Manifest] = []
        for plural in plurals:
            version = served[f"{plural}.grove.io"][0]
            kind, api = _TOPOLOGIES[plural], f"grove.io/{version}"
            listing = self.all(f"/apis/{api}", plural, _as_manifest(kind, api))
            if isinstance(listing, Unread):
                return listing
            manifests += listing
        return tuple(manifests)

    def events(self, selector: str) -> Listing[objects.ObjectEvent]:
        query = {"fieldSelector": selector}
        return self.inside("/api/v1", "events", objects.object_event, query)

    def endpoints(self) -> Listing[objects.Endpoint]:
        listing = self.inside(
            "/apis/discovery.k8s.io/v1",
            "endpointslices",
            lambda body: tuple(objects.endpoints(body)),
            {"labelSelector": f"{DISCOVERY_ENABLED_LABEL}=true"},
        )
        if isinstance(listing, Unread):
            return listing
        return tuple(endpoint for endpoints in listing for endpoint in endpoints)

    def metadata(self, served: Served) -> Listing[WorkerMetadata]:
        if isinstance(served, Unread):
            return served
        if f"{PLURAL}.{GRAPH_GROUP}" not in served:
            return ()
        version = served[f"{PLURAL}.{GRAPH_GROUP}"][0]
        return self.inside(f"/apis/{GRAPH_GROUP}/{version}", PLURAL, worker_metadata)

    def operators(self) -> Listing[objects.KubeDeployment]:
        query = {"labelSelector": f"app.kubernetes.io/name={OPERATOR_APP}"}
        return self.all("/apis/apps/v1", "deployments", objects.kube_deployment, query)

    def grove_sets(self, served: Served) -> Listing[str]:
        if isinstance(served, Unread):
            return served
        if f"{SETS}.grove.io" not in served:
            return ()
        root = f"/apis/grove.io/{served[f'{SETS}.grove.io'][0]}"
        return self.inside(root, SETS, _object_name)

    def _read(
        self, path: str, read: Callable[[Mapping[str, Any]], T], query: Mapping[str, str] | None
    ) -> tuple[T, ...]:
        """Read page by page: only one page is in memory as JSON."""
        items: list[T] = []
        for page in self._cluster.pages(path, query):
            if mapping(page.get("metadata")).get("dynctlRestarted") is True:
                items.clear()
            items += (read(mapping(item)) for item in sequence(page.get("items")))
        return tuple(items)


def _other_pods(cluster: Cluster, facts: ClusterFacts) -> Listing[PodKey]:
    """The existing pods of other graphs that own metadata: a request for each."""
    metadata, pods, endpoints = facts.metadata, facts.pods, facts.endpoints
    if isinstance(metadata, Unread) or isinstance(pods, Unread) or isinstance(endpoints, Unread):
        return ()
    owners = {(item.namespace, item.owner or item.name) for item in metadata}
    owners -= {(pod.namespace, pod.name) for pod in pods}
    owners -= {(endpoint.namespace, endpoint.pod) for endpoint in endpoints}
    if len(owners) > _MOST_OTHERS:
        return Unread(f"{len(owners):,} owners of metadata, {_MOST_OTHERS} are looked up at most")
    existing: list[PodKey] = []
    for namespace, name in sorted(owners):
        query = {"fieldSelector": f"metadata.name={name}"}
        for page in cluster.pages(f"/api/v1/namespaces/{namespace}/pods", query):
            existing += ((namespace, name) for _ in sequence(page.get("items")))
    return tuple(existing)


def _version(cluster: Cluster) -> str:
    """The Kubernetes version; empty without permission. The first request to a server."""
    try:
        return text(cluster.get("/version").get("gitVersion"))
    except ClusterRefusal as refusal:
        if refusal.forbidden or refusal.missing:
            return ""
        raise Unreachable(
            f"{cluster.title}: unexpected response to GET /version: {unread(refusal).why}",
            "is the cluster up?",
        ) from None


def _served_resources(cluster: Cluster) -> Served:
    """``plural.group`` -> versions, of Dynamo's and Grove's groups."""
    served: dict[str, list[str]] = {}
    try:
        for entry in sequence(cluster.get("/apis").get("groups")):
            group = mapping(entry)
            name = text(group.get("name"))
            if name not in (GRAPH_GROUP, "grove.io"):
                continue
            for versions_entry in sequence(group.get("versions")):
                version = text(mapping(versions_entry).get("version"))
                resources = cluster.get(f"/apis/{name}/{version}")
                for resource in sequence(resources.get("resources")):
                    plural = text(mapping(resource).get("name"))
                    if plural and "/" not in plural:
                        served.setdefault(f"{plural}.{name}", []).append(version)
    except ClusterRefusal as refusal:
        return unread(refusal)
    return {name: tuple(versions) for name, versions in served.items()}


def _schemas(cluster: Cluster) -> Listing[GraphSchema]:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    try:
        body = cluster.get(f"{path}/{GRAPHS_RESOURCE}")
    except ClusterRefusal as refusal:
        return () if refusal.missing else unread(refusal)
    schemas = []
    for entry in sequence(mapping(body.get("spec")).get("versions")):
        version = mapping(entry)
        if version.get("served") is True:
            schema = mapping(mapping(version.get("schema")).get("openAPIV3Schema"))
            schemas.append(_graph_schema(text(version.get("name")), schema))
    return tuple(schemas)


def _graph_schema(version: str, schema: Mapping[str, Any]) -> GraphSchema:
    here = schema
    loose = False
    for name in ("spec", "experimental", "kvTransferPolicy"):
        loose = loose or here.get("x-kubernetes-preserve-unknown-fields") is True
        here = mapping(mapping(here.get("properties")).get(name))
    return GraphSchema(version, frozenset(mapping(here.get("properties"))), loose)


def _graph_selector(names: tuple[str, ...]) -> dict[str, str]:
    if not names:
        return {"labelSelector": GRAPH_LABEL}
    return {"labelSelector": f"{GRAPH_LABEL} in ({','.join(names)})"}


def _as_manifest(kind: str, api: str) -> Callable[[Mapping[str, Any]], Manifest]:
    return lambda body: _manifest(body, kind, api)


def _manifest(body: Mapping[str, Any], kind: str, api: str) -> Manifest:
    """A manifest of an item of a list: items have no kind and apiVersion."""
    return Manifest("cluster", {**body, "kind": kind, "apiVersion": api})


def _object_name(body: Mapping[str, Any]) -> str:
    metadata = mapping(body.get("metadata"))
    return f"{text(metadata.get('namespace'))}/{text(metadata.get('name'))}"


def _or_unread(read: Callable[[], T]) -> T | Unread:
    try:
        return read()
    except ClusterRefusal as refusal:
        return unread(refusal)
