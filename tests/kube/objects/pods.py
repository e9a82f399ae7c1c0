"""Pods as the operator creates them for a graph, and their later changes by the cluster.

Modelled on the operator 1.2 and later. Simplified: the graph owns its pods itself (no Deployment,
ReplicaSet or PodClique stands between them), and pods are numbered.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dynctl.wire.kubernetes import names
from tests.kube.objects.graphs import Component, components_of, policy_of
from tests.kube.objects.meta import Json, metadata, owner, stamp

CREATOR = "kube-controller-manager"
"""Who creates the pods of ReplicaSets, as managedFields names it."""
FRONTEND_PORT = 8000
SYSTEM_PORT = 9090
POLICY_ENV = (
    "DYN_KV_TRANSFER_DOMAIN",
    "DYN_KV_TRANSFER_ENFORCEMENT",
    "DYN_TOPOLOGY_ENABLED",
    "DYN_TOPOLOGY_MOUNT_PATH",
    "DYN_KV_TRANSFER_PREFERRED_WEIGHT",
)


class Source(NamedTuple):
    """Where a domain's value comes from and goes to."""

    domain: str
    node_key: str
    pod_key: str


def label_sources(
    policy: Mapping[str, Any] | None, levels: Sequence[tuple[str, str]] = ()
) -> list[Source]:
    """What is copied under a policy; ``levels`` of its Grove topology, ``(domain, node label)``."""
    if not policy:
        return []
    if policy.get("labelKey"):
        return [Source(policy["domain"], policy["labelKey"], policy["labelKey"])]
    return [Source(domain, key, names.DOMAIN_LABEL_PREFIX + domain) for domain, key in levels]


def worker_hash(graph: Mapping[str, Any]) -> str:
    """Of the graph's worker specs without their replicas: it changes with a rolling update."""
    workers = [repr(replace(one, replicas=0)) for one in components_of(graph) if one.is_worker]
    return hashlib.sha256(json.dumps(workers).encode()).hexdigest()[:8]


def pod(
    graph: Mapping[str, Any],
    component: Component,
    number: int = 0,
    *,
    levels: Sequence[tuple[str, str]] = (),
    discovery: str = "kubernetes",
    created: float | None = None,
    rank: int = 0,
    life: int = 0,
    grove: bool = False,
) -> Json:
    """A pod as it leaves the operator: injected, not scheduled. ``rank``: of a multinode replica.

    ``levels``: of the Grove topology that the policy names. ``created`` gives it time and uid.
    """
    about = graph["metadata"]
    namespace, dgd = about["namespace"], about["name"]
    replica = f"{dgd}-{component.name.lower()}"
    name = f"{replica}-{number}" + (f"-{rank}" if component.nodes > 1 else "")
    body: Json = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(
            "Pod",
            namespace,
            name,
            labels=_labels(graph, component, number, rank, discovery, grove),
            created=created,
            life=life,
        ),
        "spec": {
            "serviceAccountName": f"{dgd}-k8s-service-discovery",
            "restartPolicy": "Always",
            "containers": [_container(graph, component, discovery)],
            "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
        },
        "status": {"phase": "Pending"},
    }
    if "uid" in about:
        body["metadata"]["ownerReferences"] = [owner(graph)]
    if component.zone:
        body["spec"]["nodeSelector"] = {component.zone_key: component.zone}
    policy = policy_of(graph)
    if policy and component.is_worker:
        _inject(body, policy, levels)
    if created is not None:
        _manage(body, body["metadata"]["labels"], created, CREATOR)
    return body


def _labels(
    graph: Mapping[str, Any],
    component: Component,
    number: int,
    rank: int,
    discovery: str,
    grove: bool,
) -> dict[str, str]:
    about = graph["metadata"]
    replica = f"{about['name']}-{component.name.lower()}"
    labels = {
        **component.labels,
        names.GRAPH_LABEL: about["name"],
        names.COMPONENT_LABEL: component.name,
        names.COMPONENT_TYPE_LABEL: component.type,
        names.DYNAMO_NAMESPACE_LABEL: f"{about['namespace']}-{about['name']}",
        "nvidia.com/selector": replica,
    }
    if component.sub_type:
        labels[names.SUB_COMPONENT_TYPE_LABEL] = component.sub_type
    if component.is_worker:
        labels[names.WORKER_HASH_LABEL] = worker_hash(graph)
    if discovery == "kubernetes":
        labels[names.DISCOVERY_BACKEND_LABEL] = "kubernetes"
        labels[names.DISCOVERY_ENABLED_LABEL] = "true"
    if component.nodes > 1 and not grove:
        labels["leaderworkerset.sigs.k8s.io/name"] = replica
        labels["leaderworkerset.sigs.k8s.io/group-index"] = str(number)
        labels["leaderworkerset.sigs.k8s.io/worker-index"] = str(rank)
    elif component.nodes > 1:
        clique = f"{replica}-{number}-{component.name.lower()}-{'ldr' if rank == 0 else 'wkr'}"
        labels["grove.io/podclique"] = clique
        labels["grove.io/podcliquescalinggroup"] = replica
        labels["grove.io/podcliquescalinggroup-replica-index"] = str(number)
    elif grove:
        labels["grove.io/podclique"] = f"{about['name']}-0-{component.name.lower()}"
    return labels


def _container(graph: Mapping[str, Any], component: Component, discovery: str) -> Json:
    about = graph["metadata"]
    port = SYSTEM_PORT if component.is_worker else FRONTEND_PORT
    health = "system" if component.is_worker else "http"
    env: list[Json] = [
        {"name": "DYN_NAMESPACE", "value": f"{about['namespace']}-{about['name']}"},
        {"name": "DYN_COMPONENT", "value": component.type},
        {"name": "DYN_DISCOVERY_BACKEND", "value": discovery},
        {"name": "DYN_SYSTEM_PORT", "value": str(SYSTEM_PORT)},
    ]
    for name, path in (
        ("POD_NAME", "metadata.name"),
        ("POD_NAMESPACE", "metadata.namespace"),
        ("POD_UID", "metadata.uid"),
    ):
        env.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    result = {entry["name"] for entry in env}
    env = [entry for entry in env if entry["name"] not in component.env]
    env += [{"name": key, "value": value} for key, value in component.env.items()]
    assert result <= {entry["name"] for entry in env}
    return {
        "name": component.container,
        "image": component.image,
        "args": list(component.args),
        "env": env,
        "ports": [{"name": health, "containerPort": port, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": health}, "periodSeconds": 10},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }


def _inject(body: Json, policy: Mapping[str, Any], levels: Sequence[tuple[str, str]]) -> None:
    """What the operator adds under a policy; what the user wrote in its place is dropped."""
    key = policy.get("labelKey")
    annotations = body["metadata"].setdefault("annotations", {})
    if key:
        annotations[names.LABEL_KEY_ANNOTATION] = key
    else:
        annotations[names.CLUSTER_TOPOLOGY_ANNOTATION] = policy["clusterTopologyName"]
    main = next((c for c in body["spec"]["containers"] if c["name"] == names.MAIN_CONTAINER), None)
    if main is None:
        return
    weight = policy.get("preferredWeight")
    values = (
        policy["domain"],
        policy.get("enforcement") or "required",
        "true",
        names.MOUNT_PATH,
        None if weight is None else f"{weight:g}",
    )
    main["env"] = [one for one in main["env"] if one["name"] not in POLICY_ENV] + [
        {"name": name, "value": value}
        for name, value in zip(POLICY_ENV, values, strict=True)
        if value is not None
    ]
    items = [
        {"path": one.domain, "fieldRef": _field(f"metadata.labels['{one.pod_key}']")}
        for one in label_sources(policy, levels)
    ]
    volume = {"name": names.TOPOLOGY_VOLUME, "downwardAPI": {"items": items, "defaultMode": 420}}
    body["spec"]["volumes"].append(volume)
    main["volumeMounts"].append(
        {"name": names.TOPOLOGY_VOLUME, "mountPath": names.MOUNT_PATH, "readOnly": True}
    )


def _field(path: str) -> Json:
    return {"apiVersion": "v1", "fieldPath": path}


# -- what the cluster does to it -------------------------------------------------------------------


def bound(body: Mapping[str, Any], node: str, at: float) -> Json:
    """The pod once the scheduler has bound it."""
    found = copy.deepcopy(dict(body))
    found["spec"]["nodeName"] = node
    found["status"]["conditions"] = [condition("PodScheduled", "True", at)]
    return found


def labelled(
    body: Mapping[str, Any], values: Mapping[str, str], at: float, *, manager: str = "manager"
) -> Json:
    """The pod once ``manager`` (of managedFields; the operator's binary) has set labels."""
    found = copy.deepcopy(dict(body))
    found["metadata"].setdefault("labels", {}).update(values)
    _manage(found, values, at, manager)
    return found


def _manage(body: Json, labels: Iterable[str], at: float, manager: str) -> None:
    """Write down that ``manager`` wrote these labels; of its other fields nothing is said."""
    entry = {
        "manager": manager,
        "operation": "Update",
        "apiVersion": "v1",
        "time": stamp(at),
        "fieldsType": "FieldsV1",
        "fieldsV1": {"f:metadata": {"f:labels": {f"f:{key}": {} for key in labels}}},
    }
    body["metadata"].setdefault("managedFields", []).append(entry)


def running(
    body: Mapping[str, Any], ip: str, at: float, *, ready: bool = True, restarts: int = 0
) -> Json:
    """The pod once its containers run: started at ``at``, ready ten seconds later."""
    found = copy.deepcopy(dict(body))
    scheduled = found["status"].get("conditions", [])
    found["status"] = {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "startTime": stamp(at),
        "conditions": [
            *scheduled,
            condition("Initialized", "True", at),
            condition("ContainersReady", str(ready), at + 10),
            condition("Ready", str(ready), at + 10),
        ],
        "containerStatuses": [
            {
                "name": one["name"],
                "image": one["image"],
                "ready": ready,
                "started": True,
                "restartCount": restarts,
                "state": {"running": {"startedAt": stamp(at)}},
                "lastState": {},
            }
            for one in found["spec"]["containers"]
        ],
    }
    return found


def condition(kind: str, status: str, at: float, reason: str = "", message: str = "") -> Json:
    """A condition of a pod; ``status`` is True, False or Unknown."""
    found = {"type": kind, "status": status, "lastTransitionTime": stamp(at)}
    if reason:
        found["reason"] = reason
    if message:
        found["message"] = message
    return found
