"""Checks of the cluster and of the user's permissions: DYT00."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from dynctl.adapters.ports import AccessReview
from dynctl.findings.runner import Check, Found, Outcome, Passed, Skipped, found, outcome
from dynctl.health.facts import Unread
from dynctl.manifests.graphs import GRAPH_VERSIONS, GRAPHS_RESOURCE
from dynctl.verify.join import JoinedFacts
from dynctl.verify.needs import cluster_of, has_cluster
from dynctl.verify.pod_spec import KUBERNETES, backend_of
from dynctl.verify.wording import some
from dynctl.wire.kubernetes.worker_metadata import GROUP, PLURAL

_METADATA_RESOURCE: Final = f"{PLURAL}.{GROUP}"
_DEFINITION: Final = "CustomResourceDefinition"
#: Resource -> what verify cannot check without a permission for it; the most important first.
_LOST: Final[Mapping[str, str]] = {
    "pods": "workers are not checked (DYT04 to DYT09)",
    "dynamographdeployments": "policies are read from pods only (DYT01)",
    "nodes": "node labels are not compared (DYT0205, DYT0404)",
    "dynamoworkermetadatas": "registered workers are unknown (DYT07, DYT08)",
    "endpointslices": "EndpointSlices are not compared with pods (DYT0702)",
    "events": "events about missing labels and stopped workers are not read (DYT0405, DYT0410)",
    "pods/exec": "topology files are not read (DYT0503)",
    "pods/log": "worker logs are not read (DYT0601, DYT0602)",
    "pods/portforward": "routers are not queried (DYT0904)",
    "clustertopologies": "levels of Grove topologies are unknown (DYT0201)",
    "clustertopologybindings": "levels of Grove topologies are unknown (DYT0201)",
    "podcliquesets": "it is unknown whether Grove runs the graph (DYT0203)",
    "deployments": "the operator is not checked (DYT0301)",
    "customresourcedefinitions": "the schema of graphs is not checked (DYT0003)",
}
#: Authorized by the request's method, GET for a WebSocket; newer servers require both.
_STREAMS: Final = ("pods/exec", "pods/portforward")


def _cluster_answers(joined: JoinedFacts) -> Outcome:
    cluster = cluster_of(joined)
    version = f"Kubernetes {cluster.version}" if cluster.version else "version unknown"
    return Passed(version)


# -- resource definitions --------------------------------------------------------------------------


def _serves_graphs(joined: JoinedFacts) -> Outcome:
    served = cluster_of(joined).served
    if isinstance(served, Unread):
        return Skipped(f"resources: {served.why}", unread=True)
    versions = served.get(GRAPHS_RESOURCE, ())
    if any(served in GRAPH_VERSIONS for served in versions):
        return Passed(", ".join(versions))
    how = f"is served only as {', '.join(versions)}" if versions else "is not served"
    return outcome([found(f"{_DEFINITION} {GRAPHS_RESOURCE}", how=how)])


def _serves_metadata(joined: JoinedFacts) -> Outcome:
    served = cluster_of(joined).served
    if isinstance(served, Unread):
        return Skipped(f"resources: {served.why}", unread=True)
    if _METADATA_RESOURCE in served:
        return Passed(", ".join(served[_METADATA_RESOURCE]))
    pods = [worker.pod for worker in joined.workers if worker.pod is not None]
    workers = [pod for pod in pods if backend_of(pod) == KUBERNETES]
    if not workers:
        return Skipped("no worker uses Kubernetes for discovery")
    return outcome([found(f"{_DEFINITION} {_METADATA_RESOURCE}", workers=f"{len(workers):,}")])


def _schema_has_policy(joined: JoinedFacts) -> Outcome:
    schemas = cluster_of(joined).schemas
    if isinstance(schemas, Unread):
        return Skipped(f"the definition of {GRAPHS_RESOURCE}: {schemas.why}", unread=True)
    if not schemas:
        return Skipped(f"no {GRAPHS_RESOURCE} is served (DYT0002)")
    versions = ", ".join(sorted(schema.version for schema in schemas if schema.fields))
    others = ", ".join(sorted(schema.version for schema in schemas if not schema.fields))
    if not versions:
        if all(schema.open for schema in schemas):
            return Skipped("the definition preserves unknown fields, so this check cannot decide")
        return outcome([found(f"{_DEFINITION} {GRAPHS_RESOURCE}", versions=others)])
    if others:
        versions += f"; not in {others}"
    named = any("clusterTopologyName" in schema.fields for schema in schemas)
    return Passed(versions if named else f"{versions}; labelKey only")


# -- permissions of the user -----------------------------------------------------------------------


def _user_permissions(joined: JoinedFacts) -> Outcome:
    access = cluster_of(joined).access
    if not access:
        return Skipped("no access review was requested")
    unread = [
        f"{_permission(review)}: {answer.why}"
        for review, answer in access.items()
        if isinstance(answer, Unread)
    ]
    denied = [review for review, answer in access.items() if answer is False]
    return outcome(_denials(denied), unread, summary=f"{len(access)} of {len(access)} permissions")


def _denials(denied: Iterable[AccessReview]) -> Iterable[Found]:
    """One finding for each verb and resource, for any number of namespaces."""
    namespaces: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for review in denied:
        namespaces[review.resource, review.verb, review.group].append(review.namespace or "")
    for (resource, verb, group), spaces in sorted(namespaces.items(), key=_weight):
        inside = sorted(filter(None, spaces))
        where = f" in {some(inside)}" if inside else ""
        verbs = ("create", "get") if resource in _STREAMS else (verb,)
        yield found(
            f"Resource {resource}",
            verb=verb,
            where=where,
            lost=_LOST.get(resource, "checks that need it are skipped"),
            rule=rule(group, resource, verbs),
        )


def _weight(item: tuple[tuple[str, str, str], object]) -> tuple[int, str, str]:
    """Sort key: the most important permission first."""
    (resource, verb, _), _ = item
    order = [*_LOST]
    return (order.index(resource) if resource in order else len(order)), resource, verb


def rule(group: str, resource: str, verbs: Sequence[str]) -> str:
    """A rule of a ClusterRole, as one line of YAML."""
    quoted = ", ".join(f'"{verb}"' for verb in verbs)
    return f'{{apiGroups: ["{group}"], resources: ["{resource}"], verbs: [{quoted}]}}'


def _permission(review: AccessReview) -> str:
    where = f" in {review.namespace}" if review.namespace else ""
    return f"{review.verb} {review.resource}{where}"


ACCESS_CHECKS: Final[tuple[Check[JoinedFacts], ...]] = (
    Check("DYT0001", _cluster_answers, (has_cluster,)),
    Check("DYT0002", _serves_graphs, (has_cluster,)),
    Check("DYT0003", _schema_has_policy, (has_cluster,)),
    Check("DYT0004", _user_permissions, (has_cluster,)),
    Check("DYT0005", _serves_metadata, (has_cluster,)),
)
