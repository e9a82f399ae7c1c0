"""Build the facts of verify from objects as JSON: no server and no IO.

Whatever is not said is as it is in a healthy cluster in which everything may be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from dynctl.adapters.ports import AccessReview, DiscoveryEntry, Listed
from dynctl.health.deployment import Registrations
from dynctl.health.facts import Unread
from dynctl.manifests.files import Manifest
from dynctl.manifests.graphs import TOPOLOGY_KINDS
from dynctl.manifests.transfer_policy import FIELDS
from dynctl.verify.cluster_facts import (
    Account,
    ClusterFacts,
    GraphSchema,
    PodKey,
    Registry,
    RouterView,
    StartLog,
    TopologyFile,
    VerifyFacts,
)
from dynctl.verify.gather.permissions import operator_reviews, verify_reviews, worker_reviews
from dynctl.wire.dynamo.worker_log import read_start_log
from dynctl.wire.kubernetes import objects as read
from dynctl.wire.kubernetes.names import DISCOVERY_ENABLED_LABEL, GRAPH_LABEL, OPERATOR_APP
from dynctl.wire.kubernetes.worker_metadata import worker_metadata
from tests.kube import deployment
from tests.kube.objects import key_of

Body = Mapping[str, Any]
Files = Mapping[PodKey, Mapping[str, str | TopologyFile | None] | Unread]
"""Pod -> file -> content, None: the file does not exist."""
Logs = Mapping[PodKey, str | StartLog | Unread]
Access = Mapping[AccessReview, bool | Unread]

TITLE: Final = "prod (https://kubernetes.example:6443)"
SCHEMAS: Final = tuple(GraphSchema(one, frozenset(FIELDS)) for one in ("v1alpha1", "v1beta1"))
_SERVED: Final = {
    "dynamographdeployments.nvidia.com": ("v1beta1", "v1alpha1"),
    "dynamoworkermetadatas.nvidia.com": ("v1alpha1",),
}
_PLURALS: Final = {kind: f"{kind.lower()}s" for kind in (*TOPOLOGY_KINDS, "PodCliqueSet")}


def facts_of(
    objects: Iterable[Body],
    *,
    files: Files | None = None,
    logs: Logs | None = None,
    now: float = deployment.NOW,
    routers: Sequence[RouterView] = (),
    access: Access | None = None,
    namespace: str | None = None,
    unread: Mapping[str, Unread] | None = None,
    registry: Registry | None = None,
    operator_may: Mapping[str, bool] | None = None,
    workers_may: Mapping[str, bool] | None = None,
    **cluster: Any,
) -> VerifyFacts:
    """The facts of a cluster that holds ``objects``.

    ``files`` and ``logs`` None: as the pods' labels and the workers' metadata have them.
    ``access`` overrides what we are allowed (all). ``unread``: a list of ClusterFacts (nodes,
    pods, events, ...) -> why it was refused. ``operator_may`` and ``workers_may`` override what
    their accounts are allowed, as ``VERB RESOURCE`` -> whether (``get nodes``). ``cluster``:
    further fields of ClusterFacts, as they are.
    """
    found = list(objects)
    by_kind: dict[str, list[Body]] = {}
    for body in found:
        by_kind.setdefault(body["kind"], []).append(body)
    topologies = [kind for kind in TOPOLOGY_KINDS if kind in by_kind]
    plurals = [_PLURALS[kind] for kind in topologies]
    sets = ["podcliquesets"] if "PodCliqueSet" in by_kind else []
    spaces = {key_of(body)[0] for body in by_kind.get("DynamoGraphDeployment", ())}
    pods = tuple(
        read.pod(body)
        for body in by_kind.get("Pod", ())
        if GRAPH_LABEL in body["metadata"].get("labels", {})
    )
    operators = tuple(
        read.kube_deployment(body)
        for body in by_kind.get("Deployment", ())
        if body["metadata"].get("labels", {}).get("app.kubernetes.io/name") == OPERATOR_APP
    )
    result: dict[str, Any] = {
        "version": "v1.32.0",
        "namespaces": () if namespace is None else (namespace,),
        "served": _served(by_kind),
        "schemas": SCHEMAS,
        "access": {
            **dict.fromkeys(verify_reviews(namespace, [*plurals, *sets]), True),
            **(access or {}),
        },
        "graphs": _manifests(by_kind.get("DynamoGraphDeployment", ())),
        "topologies": _manifests([body for kind in topologies for body in by_kind[kind]]),
        "nodes": tuple(read.node(body) for body in by_kind.get("Node", ())),
        "pods": pods,
        "events": tuple(map(read.object_event, by_kind.get("Event", ()))),
        "endpoints": tuple(
            endpoint
            for body in by_kind.get("EndpointSlice", ())
            if body["metadata"].get("labels", {}).get(DISCOVERY_ENABLED_LABEL) == "true"
            for endpoint in read.endpoints(body)
        ),
        "metadata": tuple(map(worker_metadata, by_kind.get("DynamoWorkerMetadata", ()))),
        "operators": operators,
        "operator_accounts": _accounts(
            {(one.namespace, one.service_account) for one in operators},
            lambda _: operator_reviews(plurals, sorted(spaces)),
            operator_may,
        ),
        "worker_accounts": _accounts(
            {
                (body["metadata"]["namespace"], body["spec"].get("serviceAccountName", "default"))
                for body in by_kind.get("Pod", ())
                if deployment.is_worker(body)
            },
            worker_reviews,
            workers_may,
        ),
        "grove_sets": tuple("/".join(key_of(body)) for body in by_kind.get("PodCliqueSet", ())),
        "files": _files(deployment.files(found) if files is None else files),
        "logs": _logs(deployment.logs(found) if logs is None else logs),
    }
    result |= dict(unread or {}) | cluster
    return VerifyFacts(
        ClusterFacts(TITLE, now, **result), registry=registry, routers=tuple(routers)
    )


def registry_of(objects: Iterable[Body], title: str = "etcd 127.0.0.1:2379") -> Registry:
    """What the same workers register in a backend other than Kubernetes."""
    entries = [
        DiscoveryEntry(key, value)
        for body in objects
        if body["kind"] == "Pod" and deployment.is_worker(body)
        for key, value in worker_metadata(deployment.registration(body)).entries()
    ]
    registrations = Registrations()
    registrations.apply(Listed(tuple(entries)))
    return Registry(title, registrations.deployment())


def router_views(objects: Iterable[Body], *, but: Iterable[int] = ()) -> tuple[RouterView, ...]:
    """The routers of all frontend pods: the registered workers, ``but`` for these ids."""
    found = list(objects)
    workers = [body for body in found if body["kind"] == "DynamoWorkerMetadata"] or [
        deployment.registration(body)
        for body in found
        if body["kind"] == "Pod" and deployment.is_worker(body)
    ]
    known = frozenset(
        card["instance_id"]
        for body in workers
        for card in body["spec"]["data"]["model_cards"].values()
    ).difference(but)
    views = []
    for body in found:
        labels = body["metadata"].get("labels", {})
        if body["kind"] == "Pod" and labels and not deployment.is_worker(body):
            namespace, name = key_of(body)
            graph = f"{namespace}/{labels[GRAPH_LABEL]}"
            views.append(RouterView(f"Pod {name}.{namespace}", graph, known))
    return tuple(views)


def _served(by_kind: Mapping[str, Sequence[Body]]) -> dict[str, tuple[str, ...]]:
    grove = {
        f"{plural}.grove.io": ("v1alpha1",) for kind, plural in _PLURALS.items() if kind in by_kind
    }
    return {**_SERVED, **grove}


def _manifests(bodies: Iterable[Body]) -> tuple[Manifest, ...]:
    return tuple(Manifest("cluster", body) for body in bodies)


def _accounts(
    users: Iterable[tuple[str, str]],
    asks: Callable[[str], Iterable[AccessReview]],
    overrides: Mapping[str, bool] | None,
) -> tuple[Account, ...]:
    """``users``: namespace and name. ``asks``: what of an account in a namespace."""
    found = []
    for namespace, name in sorted(users):
        may = {
            one: (overrides or {}).get(f"{one.verb} {one.resource}", True)
            for one in asks(namespace)
        }
        found.append(Account(f"system:serviceaccount:{namespace}:{name}", may))
    return tuple(found)


def _files(files: Files) -> dict[PodKey, Mapping[str, TopologyFile] | Unread]:
    found: dict[PodKey, Mapping[str, TopologyFile] | Unread] = {}
    for key, result in files.items():
        if isinstance(result, Unread):
            found[key] = result
            continue
        found[key] = {
            domain: one if isinstance(one, TopologyFile) else TopologyFile(one)
            for domain, one in result.items()
        }
    return found


def _logs(logs: Logs) -> dict[PodKey, StartLog | Unread]:
    return {key: _start(one) if isinstance(one, str) else one for key, one in logs.items()}


def _start(log: str) -> StartLog:
    lines = read_start_log(log.splitlines())
    config = lines.config or {}
    return StartLog(
        config.get("topology_domains"),
        config.get("kv_transfer_domain") or "",
        config.get("kv_transfer_enforcement") or "",
        config.get("kv_transfer_preferred_weight"),
        lines.timed_out,
        lines.not_persisted,
    )
