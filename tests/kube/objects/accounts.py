"""Accounts and permissions: of the operator and of a graph's workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dynctl.wire.kubernetes.names import OPERATOR_APP
from tests.kube.objects.meta import Json, metadata, stamp

OPERATOR_NAMESPACE: Final = "dynamo-system"
OPERATOR_NAME: Final = "dynamo-platform-dynamo-operator-controller-manager"
OPERATOR_IMAGE: Final = "nvcr.io/nvidia/ai-dynamo/kubernetes-operator"
_RBAC: Final = "rbac.authorization.k8s.io"

Rule = tuple[str, str, Sequence[str]]
"""API group, resources separated by blanks, verbs."""

NODE_RULE: Final[Rule] = ("", "nodes", ("get",))
OPERATOR_RULES: Final[tuple[Rule, ...]] = (
    NODE_RULE,
    ("", "pods", ("create", "delete", "get", "list", "patch", "update", "watch")),
    ("", "events", ("create", "patch")),
    ("", "services serviceaccounts", ("create", "get", "list", "patch", "update", "watch")),
    (_RBAC, "roles rolebindings", ("create", "get", "list", "patch", "update", "watch")),
    ("nvidia.com", "dynamographdeployments", ("get", "list", "patch", "update", "watch")),
    ("nvidia.com", "dynamographdeployments/status", ("get", "patch", "update")),
    ("grove.io", "clustertopologybindings clustertopologies", ("get", "list", "watch")),
    ("grove.io", "podcliquesets", ("create", "get", "list", "patch", "update", "watch")),
)
WORKER_RULES: Final[tuple[Rule, ...]] = (
    ("", "endpoints pods", ("get", "list", "watch")),
    ("discovery.k8s.io", "endpointslices", ("get", "list", "watch")),
    (
        "nvidia.com",
        "dynamoworkermetadatas",
        ("create", "get", "list", "watch", "update", "patch", "delete"),
    ),
)
#: What `dynctl topology verify` asks for, and nothing else.
VIEWER_RULES: Final[tuple[Rule, ...]] = (
    ("", "nodes", ("list",)),
    ("", "pods", ("list",)),
    ("", "events", ("list",)),
    ("", "pods/exec", ("create", "get")),
    ("", "pods/log", ("get",)),
    ("", "pods/portforward", ("create", "get")),
    ("apps", "deployments", ("list",)),
    ("discovery.k8s.io", "endpointslices", ("list",)),
    ("nvidia.com", "dynamographdeployments dynamoworkermetadatas", ("list",)),
    ("grove.io", "clustertopologybindings clustertopologies podcliquesets", ("list",)),
    ("apiextensions.k8s.io", "customresourcedefinitions", ("get",)),
    ("authorization.k8s.io", "subjectaccessreviews localsubjectaccessreviews", ("create",)),
)


def operator_deployment(
    *,
    version: str = "1.6.1",
    namespace: str = OPERATOR_NAMESPACE,
    name: str = OPERATOR_NAME,
    replicas: int = 1,
    ready: int | None = None,
    args: Sequence[str] = (),
    created: float | None = None,
) -> Json:
    """The operator's Deployment; ``ready`` replicas are all of them where it is not said."""
    labels = {"app.kubernetes.io/name": OPERATOR_APP, "control-plane": "controller-manager"}
    up = replicas if ready is None else ready
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata("Deployment", namespace, name, labels=labels, created=created),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "serviceAccountName": name,
                    "containers": [
                        {
                            "name": "manager",
                            "image": f"{OPERATOR_IMAGE}:{version}",
                            "args": ["--leader-elect", *args],
                        }
                    ],
                },
            },
        },
        "status": {
            "replicas": replicas,
            "readyReplicas": up,
            "availableReplicas": up,
            "updatedReplicas": replicas,
            "conditions": [
                {
                    "type": "Available",
                    "status": "True" if up >= replicas > 0 else "False",
                    "lastTransitionTime": stamp(created or 0),
                }
            ],
        },
    }


def operator_objects(
    *,
    version: str = "1.6.1",
    namespace: str = OPERATOR_NAMESPACE,
    name: str = OPERATOR_NAME,
    created: float | None = None,
) -> list[Json]:
    """The Deployment with its ServiceAccount, ClusterRole and ClusterRoleBinding."""
    return [
        operator_deployment(version=version, namespace=namespace, name=name, created=created),
        service_account(namespace, name, created=created),
        role("", f"{name}-role", OPERATOR_RULES, created=created),
        role_binding("", f"{name}-rolebinding", f"{name}-role", namespace, name, created=created),
    ]


def worker_accounts(namespace: str, graph: str, *, created: float | None = None) -> list[Json]:
    """The ServiceAccount of a graph's pods, its Role and RoleBinding."""
    name = f"{graph}-k8s-service-discovery"
    return [
        service_account(namespace, name, created=created),
        role(namespace, f"{name}-role", WORKER_RULES, created=created),
        role_binding(
            namespace, f"{name}-rolebinding", f"{name}-role", namespace, name, created=created
        ),
    ]


def service_account(namespace: str, name: str, *, created: float | None = None) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata("ServiceAccount", namespace, name, created=created),
    }


def role(namespace: str, name: str, rules: Sequence[Rule], *, created: float | None = None) -> Json:
    """A Role, or a ClusterRole where ``namespace`` is empty."""
    kind = "Role" if namespace else "ClusterRole"
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": kind,
        "metadata": metadata(kind, namespace, name, created=created),
        "rules": [
            {"apiGroups": [group], "resources": resources.split(), "verbs": list(verbs)}
            for group, resources, verbs in rules
        ],
    }


def role_binding(
    namespace: str,
    name: str,
    role_name: str,
    account_namespace: str,
    account: str,
    *,
    created: float | None = None,
) -> Json:
    """Binds a role of the same scope to a service account; cluster-wide without ``namespace``."""
    kind = "RoleBinding" if namespace else "ClusterRoleBinding"
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": kind,
        "metadata": metadata(kind, namespace, name, created=created),
        "roleRef": {
            "apiGroup": _RBAC,
            "kind": "Role" if namespace else "ClusterRole",
            "name": role_name,
        },
        "subjects": [{"kind": "ServiceAccount", "namespace": account_namespace, "name": account}],
    }


def user_binding(role_name: str, user: str) -> Json:
    """A ClusterRoleBinding to a person."""
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": metadata("ClusterRoleBinding", "", f"{role_name}-{user}"),
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": role_name},
        "subjects": [{"apiGroup": _RBAC, "kind": "User", "name": user}],
    }
