"""Checks of the cluster itself: what it serves, what it knows of the policy, what we may read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from dynctl.adapters.ports import AccessQuestion
from dynctl.findings.runner import Check, Found, Outcome, Passed, Skipped, found, outcome
from dynctl.health.facts import Unread
from dynctl.manifests.graphs import GRAPH_GROUP, GRAPH_VERSIONS
from dynctl.verify.join import JoinedFacts
from dynctl.verify.needs import cluster_of, clustered
from dynctl.verify.pod_spec import KUBERNETES, backend_of
from dynctl.verify.wording import some

GRAPHS_RESOURCE: Final = f"dynamographdeployments.{GRAPH_GROUP}"
METADATA_RESOURCE: Final = f"dynamoworkermetadatas.{GRAPH_GROUP}"
_DEFINITION: Final = "CustomResourceDefinition"
#: What verify does not judge where it may not do this with the resource; what matters most first.
_LOST: Final[Mapping[str, str]] = {
    "pods": "no worker is judged (DYT04 to DYT09)",
    "dynamographdeployments": "policies are told by pods only (DYT01)",
    "nodes": "node labels are not compared (DYT0205, DYT0404)",
    "dynamoworkermetadatas": "what workers registered is not known (DYT07, DYT08)",
    "endpointslices": "discovery is not compared with pods (DYT0702)",
    "events": "events that name a missing label are not seen (DYT0405)",
    "pods/exec": "topology files are not read (DYT0503)",
    "pods/log": "the start of workers is not read (DYT0601, DYT0602)",
    "pods/portforward": "routers are not asked (DYT0904)",
    "clustertopologies": "levels of Grove topologies are not known (DYT0201)",
    "clustertopologybindings": "levels of Grove topologies are not known (DYT0201)",
    "podcliquesets": "whether Grove runs the graph is not known (DYT0203)",
    "deployments": "the operator is not looked at (DYT0301)",
    "customresourcedefinitions": "the schema of graphs is not looked at (DYT0003)",
}
#: Authorized by the request's method, which for a WebSocket is GET; newer servers ask for both.
_STREAMS: Final = ("pods/exec", "pods/portforward")


def _reachable(joined: JoinedFacts) -> Outcome:
    cluster = cluster_of(joined)
    version = f"Kubernetes {cluster.version}" if cluster.version else "version not told"
    return Passed(version)


# -- what is served --------------------------------------------------------------------------------


def _served(joined: JoinedFacts) -> Outcome:
    served = cluster_of(joined).served
    if isinstance(served, Unread):
        return Skipped(f"resources: {served.why}", unread=True)
    versions = served.get(GRAPHS_RESOURCE, ())
    if any(one in GRAPH_VERSIONS for one in versions):
        return Passed(", ".join(versions))
    how = f"is served as {', '.join(versions)} only" if versions else "is not served"
    return outcome([found(f"{_DEFINITION} {GRAPHS_RESOURCE}", how=how)])


def _metadata_served(joined: JoinedFacts) -> Outcome:
    served = cluster_of(joined).served
    if isinstance(served, Unread):
        return Skipped(f"resources: {served.why}", unread=True)
    if METADATA_RESOURCE in served:
        return Passed(", ".join(served[METADATA_RESOURCE]))
    pods = [one.pod for one in joined.workers if one.pod is not None]
    workers = [pod for pod in pods if backend_of(pod) == KUBERNETES]
    if not workers:
        return Skipped("no worker says that it registers in Kubernetes")
    return outcome([found(f"{_DEFINITION} {METADATA_RESOURCE}", workers=f"{len(workers):,}")])


def _policy_known(joined: JoinedFacts) -> Outcome:
    schemas = cluster_of(joined).schemas
    if isinstance(schemas, Unread):
        return Skipped(f"the definition of {GRAPHS_RESOURCE}: {schemas.why}", unread=True)
    if not schemas:
        return Skipped(f"no {GRAPHS_RESOURCE} is served (DYT0002)")
    knows = [one.version for one in schemas if one.fields]
    lacks = [one.version for one in schemas if not one.fields]
    if not knows:
        if all(one.open for one in schemas):
            return Skipped("the definition keeps fields that it does not know, so it tells nothing")
        return outcome(
            [found(f"{_DEFINITION} {GRAPHS_RESOURCE}", versions=", ".join(sorted(lacks)))]
        )
    told = ", ".join(sorted(knows))
    if lacks:
        told += f"; {', '.join(sorted(lacks))} does not know it"
    if not any("clusterTopologyName" in one.fields for one in schemas):
        told += "; labelKey only"
    return Passed(told)


# -- what we may read ------------------------------------------------------------------------------


def _allowed(joined: JoinedFacts) -> Outcome:
    access = cluster_of(joined).access
    if not access:
        return Skipped("no access review was asked for")
    unread = [
        f"{_question(asked)}: {one.why}" for asked, one in access.items() if isinstance(one, Unread)
    ]
    denied = [asked for asked, one in access.items() if one is False]
    return outcome(_denials(denied), unread, summary=f"{len(access)} of {len(access)} permissions")


def _denials(denied: Iterable[AccessQuestion]) -> Iterable[Found]:
    """One a verb and resource, whatever the number of namespaces."""
    namespaces: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for one in denied:
        namespaces[one.resource, one.verb, one.group].append(one.namespace or "")
    for (resource, verb, group), spaces in sorted(namespaces.items(), key=_weight):
        inside = sorted(filter(None, spaces))
        where = f" in {some(inside)}" if inside else ""
        verbs = ("create", "get") if resource in _STREAMS else (verb,)
        yield found(
            f"Resource {resource}",
            verb=verb,
            where=where,
            lost=_LOST.get(resource, "what needs it is skipped"),
            rule=rule(group, resource, verbs),
        )


def _weight(item: tuple[tuple[str, str, str], object]) -> tuple[int, str, str]:
    """What is needed most comes first."""
    (resource, verb, _), _ = item
    order = [*_LOST]
    return (order.index(resource) if resource in order else len(order)), resource, verb


def rule(group: str, resource: str, verbs: Sequence[str]) -> str:
    """A rule of a ClusterRole, as one line of YAML."""
    told = ", ".join(f'"{verb}"' for verb in verbs)
    return f'{{apiGroups: ["{group}"], resources: ["{resource}"], verbs: [{told}]}}'


def _question(one: AccessQuestion) -> str:
    return f"{one.verb} {one.resource}" + (f" in {one.namespace}" if one.namespace else "")


ACCESS_CHECKS: Final[tuple[Check[JoinedFacts], ...]] = (
    Check("DYT0001", _reachable, (clustered,)),
    Check("DYT0002", _served, (clustered,)),
    Check("DYT0003", _policy_known, (clustered,)),
    Check("DYT0004", _allowed, (clustered,)),
    Check("DYT0005", _metadata_served, (clustered,)),
)
