"""Objects at the API server of a real cluster: their paths, and creating them once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tests.kube import objects
from tests.kube.client import Api, ApiError
from tests.kube.objects import Json

_VERSIONS: Final = {
    "v1": "ConfigMap Event Namespace Node Pod ResourceQuota Service ServiceAccount",
    "apps/v1": "Deployment ReplicaSet",
    "coordination.k8s.io/v1": "Lease",
    "discovery.k8s.io/v1": "EndpointSlice",
    "rbac.authorization.k8s.io/v1": "Role RoleBinding ClusterRole ClusterRoleBinding",
    "apiextensions.k8s.io/v1": "CustomResourceDefinition",
    "flowcontrol.apiserver.k8s.io/v1": "FlowSchema PriorityLevelConfiguration",
    "nvidia.com/v1beta1": "DynamoGraphDeployment",
    "nvidia.com/v1alpha1": "DynamoWorkerMetadata",
}
_PLURALS: Final = {"DynamoWorkerMetadata": "dynamoworkermetadatas"}


def path_of(kind: str, namespace: str = "", name: str = "") -> str:
    """The path of a collection, or of an object in it."""
    [version] = [version for version, kinds in _VERSIONS.items() if kind in kinds.split()]
    words = ["api" if version == "v1" else "apis", version]
    words += ["namespaces", namespace] if namespace else []
    words += [_PLURALS.get(kind, f"{kind.lower()}s"), *([name] if name else [])]
    return "/" + "/".join(words)


def create(api: Api, body: Mapping[str, Any]) -> Json:
    """Create an object at the path of its kind; one that exists stays as it is."""
    namespace, name = objects.key_of(body)
    try:
        return api.create(path_of(body["kind"], namespace), body)
    except ApiError as refused:
        if refused.reason != "AlreadyExists":
            raise
        return api.get(path_of(body["kind"], namespace, name))


def namespace_of(name: str) -> Json:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def has_condition(body: Mapping[str, Any], kind: str) -> bool:
    """Whether a condition of its status is True."""
    conditions = body.get("status", {}).get("conditions") or ()
    return any(one["type"] == kind and one["status"] == "True" for one in conditions)
