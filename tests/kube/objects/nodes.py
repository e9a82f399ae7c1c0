"""Nodes, and Grove topologies over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tests.kube.objects.meta import Json, metadata, stamp

ZONE: Final = "topology.kubernetes.io/zone"
RACK: Final = "example.com/rack"
GROVE: Final = "grove.io/v1alpha1"


def node(
    name: str,
    labels: Mapping[str, str] | None = None,
    *,
    zone: str | None = None,
    ready: bool = True,
    cordoned: bool = False,
    taints: Sequence[str] = (),
    created: float | None = None,
) -> Json:
    """A node. ``taints``: keys of NoSchedule taints. ``zone``: value of the zone label."""
    result = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **(labels or {})}
    if zone is not None:
        result[ZONE] = zone
    spec: Json = {"providerID": f"example://{name}"}
    if cordoned:
        spec["unschedulable"] = True
    if taints:
        spec["taints"] = [{"key": key, "effect": "NoSchedule"} for key in taints]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": metadata("Node", "", name, labels=result, created=created),
        "spec": spec,
        "status": {
            "allocatable": {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8", "pods": "110"},
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True" if ready else "False",
                    "reason": "KubeletReady" if ready else "KubeletNotReady",
                    "lastTransitionTime": stamp(created or 0),
                }
            ],
        },
    }


def cluster_topology(
    levels: Sequence[tuple[str, str]],
    *,
    name: str = "cluster-levels",
    kind: str = "ClusterTopologyBinding",
    in_sync: bool = True,
    created: float | None = None,
) -> Json:
    """Grove's levels, ``(domain, node label)`` from broad to narrow; ``kind`` has been renamed."""
    return {
        "apiVersion": GROVE,
        "kind": kind,
        "metadata": metadata(kind, "", name, created=created),
        "spec": {"levels": [{"domain": domain, "key": key} for domain, key in levels]},
        "status": {
            "schedulerTopologyStatuses": [
                {
                    "schedulerName": "kai-scheduler",
                    "topologyReference": name,
                    "inSync": in_sync,
                    "message": "" if in_sync else "levels differ from those of the scheduler",
                }
            ]
        },
    }


def pod_clique_set(namespace: str, name: str, *, created: float | None = None) -> Json:
    """What the operator makes of a graph on the Grove pathway."""
    return {
        "apiVersion": GROVE,
        "kind": "PodCliqueSet",
        "metadata": metadata("PodCliqueSet", namespace, name, created=created),
        "spec": {"replicas": 1, "template": {"cliques": []}},
    }
