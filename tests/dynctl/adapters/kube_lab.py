"""A small cluster for adapters to read: an API server, pods that seem to run, workers' metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dynctl.adapters.kubernetes.cluster import KubernetesCluster, open_cluster
from dynctl.wire.kubernetes.names import DISCOVERY_ENABLED_LABEL
from tests.kube.api_server import ApiServer
from tests.kube.objects import Json, small

NAMESPACE = "lab"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
METADATA = "/apis/nvidia.com/v1alpha1"
NOW = 1_700_000_000.0

DEFINITION: Json = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "dynamoworkermetadatas.nvidia.com"},
    "spec": {
        "group": "nvidia.com",
        "scope": "Namespaced",
        "names": {"plural": "dynamoworkermetadatas", "kind": "DynamoWorkerMetadata"},
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}


def opened(
    server: ApiServer, folder: Path, *, timeout: float = 10.0, **values: Any
) -> KubernetesCluster:
    """Through a kubeconfig in ``folder``; ``values`` goes into it."""
    path = server.kubeconfig(folder / "kubeconfig", **values)
    return open_cluster(kubeconfig=path, context=None, timeout=timeout)


def pod(name: str, *, namespace: str = NAMESPACE, running: bool = True) -> Json:
    """A pod with one container, ``main``."""
    return small.running(small.pod(name, namespace, "node-1"), started=running)


def endpoint(name: str, uid: str = "", *, ready: bool | None = True) -> Json:
    """``ready`` None: not said."""
    target = {"kind": "Pod", "namespace": NAMESPACE, "name": name} | ({"uid": uid} if uid else {})
    conditions = {} if ready is None else {"ready": ready}
    return {"addresses": ["10.0.0.1"], "conditions": conditions, "targetRef": target}


def endpoint_slice(
    name: str, endpoints: Iterable[Json], *, enabled: bool = True, namespace: str = NAMESPACE
) -> Json:
    labels = {DISCOVERY_ENABLED_LABEL: "true"} if enabled else {}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "addressType": "IPv4",
        "endpoints": list(endpoints),
        "ports": [],
    }


def metadata(
    name: str,
    data: Mapping[str, Any],
    *,
    owner: str | None = None,
    uid: str = "",
    namespace: str = NAMESPACE,
) -> Json:
    """A DynamoWorkerMetadata of the pod ``owner``, of that name where it is not said."""
    owners = [{"apiVersion": "v1", "kind": "Pod", "name": owner or name, "uid": uid}] if uid else []
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoWorkerMetadata",
        "metadata": {"name": name, "namespace": namespace, "ownerReferences": owners},
        "spec": {"data": dict(data)},
    }


def bind(server: ApiServer, user: str, *rules: Json) -> None:
    """Let a user do this in the whole cluster."""
    name = user.replace(":", "-")
    server.store.create(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": name},
            "rules": list(rules),
        }
    )
    server.store.create(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": name,
            },
            "subjects": [{"kind": "User", "name": user}],
        }
    )


def rule(group: str, resources: str, verbs: str) -> Json:
    return {"apiGroups": [group], "resources": resources.split(), "verbs": verbs.split()}


def with_pods(server: ApiServer, count: int) -> None:
    """Create ``w-00``, ``w-01``, .."""
    for number in range(count):
        server.store.create(pod(f"w-{number:02}"))


def names(page: Any) -> list[str]:
    return [item["metadata"]["name"] for item in page["items"]]
