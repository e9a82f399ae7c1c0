"""Small objects, for tests of one thing: without an operator, a policy or times."""

from collections.abc import Sequence
from typing import Any

from tests.kube.objects.meta import Json


def pod(name: str, namespace: str = "default", node: str = "", **labels: str) -> Json:
    spec: Json = {"containers": [{"name": "main", "image": "engine:1"}]}
    if node:
        spec["nodeName"] = node
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def running(
    body: Json, *, restarts: int = 0, ready: bool = True, started: bool = True, ip: str = ""
) -> Json:
    """With the status of a pod whose containers run. ``started`` False: they wait for an image."""
    state: Json = {"running": {}} if started else {"waiting": {"reason": "ContainerCreating"}}
    statuses = [
        {"name": container["name"], "ready": ready, "restartCount": restarts, "state": state}
        for container in body["spec"]["containers"]
    ]
    status: Json = {"phase": "Running", "containerStatuses": statuses}
    if ip:
        status |= {"podIP": ip, "conditions": [{"type": "Ready", "status": str(ready)}]}
    return body | {"status": status}


def node(name: str, zone: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone}},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "nodeInfo": {"kubeletVersion": "v1.34.0"},
        },
    }


def config_map(name: str, namespace: str = "default", **data: str) -> Json:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def graph(
    name: str,
    namespace: str = "default",
    policy: Any = None,
    *,
    components: Sequence[Json] = ({"name": "decode", "type": "decode", "replicas": 2},),
    **spec: Any,
) -> Json:
    """A DynamoGraphDeployment; ``spec``: more fields of it. ``namespace`` may be empty."""
    found: Json = {"backendFramework": "vllm", "components": list(components), **spec}
    if policy is not None:
        found["experimental"] = {"kvTransferPolicy": policy}
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name} | ({"namespace": namespace} if namespace else {}),
        "spec": found,
    }
