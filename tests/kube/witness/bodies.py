"""Small objects to write."""

from typing import Any

Json = dict[str, Any]


def pod(name: str, namespace: str = "default", node: str = "", **labels: str) -> Json:
    spec: Json = {"containers": [{"name": "main", "image": "engine:1"}]}
    if node:
        spec["nodeName"] = node
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def running(body: Json, *, restarts: int = 0) -> Json:
    """With the status of a pod that runs and is ready."""
    statuses = [
        {
            "name": container["name"],
            "ready": True,
            "restartCount": restarts,
            "state": {"running": {}},
        }
        for container in body["spec"]["containers"]
    ]
    return body | {"status": {"phase": "Running", "containerStatuses": statuses}}


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


def graph(name: str, namespace: str = "default", policy: Json | None = None) -> Json:
    spec: Json = {
        "backendFramework": "vllm",
        "components": [{"name": "decode", "type": "decode", "replicas": 2}],
    }
    if policy is not None:
        spec["experimental"] = {"kvTransferPolicy": policy}
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }
