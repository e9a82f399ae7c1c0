"""The base of all actors: a clock that only tests move, and access to the API server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from tests.kube.client import ApiError, Requests
from tests.kube.objects import Json, key_of

_Bodies = list[Json]
_ROOTS: Final[Mapping[str, tuple[str, str, bool]]] = {
    "Node": ("/api/v1", "nodes", False),
    "Pod": ("/api/v1", "pods", True),
    "Event": ("/api/v1", "events", True),
    "ServiceAccount": ("/api/v1", "serviceaccounts", True),
    "Deployment": ("/apis/apps/v1", "deployments", True),
    "EndpointSlice": ("/apis/discovery.k8s.io/v1", "endpointslices", True),
    "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles", True),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings", True),
    "ClusterRole": ("/apis/rbac.authorization.k8s.io/v1", "clusterroles", False),
    "ClusterRoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "clusterrolebindings", False),
    "DynamoGraphDeployment": ("/apis/nvidia.com/v1beta1", "dynamographdeployments", True),
    "DynamoWorkerMetadata": ("/apis/nvidia.com/v1alpha1", "dynamoworkermetadatas", True),
    "ClusterTopology": ("/apis/grove.io/v1alpha1", "clustertopologies", False),
    "ClusterTopologyBinding": ("/apis/grove.io/v1alpha1", "clustertopologybindings", False),
    "PodCliqueSet": ("/apis/grove.io/v1alpha1", "podcliquesets", True),
}


class Clock:
    """Seconds since the epoch; only :meth:`to` moves it."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def to(self, at: float) -> None:
        """Never back."""
        self.now = max(self.now, at)


class Hands:
    """What one user does at the API server, by kind. Everything raises ApiError.

    ``changed``: kind -> the last revision in which a list of it may have changed. What was listed
    since then is used again, like the cache that a controller's watches fill.
    """

    def __init__(self, api: Requests, changed: Callable[[str], int]) -> None:
        self._api = api
        self._changed = changed
        self._lists: dict[str, tuple[int, _Bodies]] = {}

    def list(self, kind: str) -> list[Json]:
        """Of all namespaces, by namespace and name; nothing where the kind is not served.

        Items have their kind and apiVersion, which a list does not repeat. Callers share them and
        do not change them.
        """
        changed = self._changed(kind)
        if self._lists.get(kind, (None,))[0] != changed:
            self._lists[kind] = (changed, self._listed(kind))
        return [*self._lists[kind][1]]

    def _listed(self, kind: str) -> _Bodies:
        root, plural, _ = _ROOTS[kind]
        try:
            items = self._api.list(f"{root}/{plural}")
        except ApiError as refused:
            if refused.status == 404:
                return []
            raise
        version = root.removeprefix("/apis/").removeprefix("/api/")
        found = [{**item, "kind": kind, "apiVersion": version} for item in items]
        return sorted(found, key=key_of)

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        """None where there is none."""
        try:
            return self._api.get(_path(kind, namespace, name))
        except ApiError as refused:
            if refused.status == 404:
                return None
            raise

    def create(self, body: Mapping[str, Any], *, manager: str = "") -> Json:
        """Raises ApiError 409 where it exists."""
        kind, namespace = body["kind"], body["metadata"].get("namespace", "")
        path = _path(kind, namespace, "", _root(body["apiVersion"]))
        return self._api.create(path, dict(body), **_by(manager))

    def merge(
        self,
        kind: str,
        namespace: str,
        name: str,
        patch: Mapping[str, Any],
        *,
        subresource: str = "",
        manager: str = "",
    ) -> Json:
        """RFC 7396."""
        path = _path(kind, namespace, name) + (f"/{subresource}" if subresource else "")
        return self._api.patch(path, dict(patch), **_by(manager))

    def apply(self, body: Mapping[str, Any], *, manager: str) -> Json:
        """Server-side apply, forced."""
        path = _path(body["kind"], *key_of(body))
        return self._api.patch(path, dict(body), "apply", force="true", fieldManager=manager)

    def delete(self, kind: str, namespace: str, name: str) -> None:
        """Nothing where it is gone already."""
        try:
            self._api.delete(_path(kind, namespace, name))
        except ApiError as refused:
            if refused.status != 404:
                raise

    def bind(self, namespace: str, pod: str, node: str) -> None:
        """As the scheduler does it."""
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod, "namespace": namespace},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        self._api.create(_path("Pod", namespace, pod) + "/binding", body)


class Actor(Protocol):
    """A loop that looks at the cluster and does what is due."""

    def step(self) -> bool:
        """Do everything that can be done now; whether that was anything."""
        ...

    def due(self) -> float | None:
        """When something can be done next that cannot be done now; None: nothing waits."""
        ...


def message_of(refused: ApiError) -> str:
    return str(refused.body.get("message", refused))


def _by(manager: str) -> dict[str, str]:
    return {"fieldManager": manager} if manager else {}


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _path(kind: str, namespace: str, name: str, root: str | None = None) -> str:
    known, plural, namespaced = _ROOTS[kind]
    inside = f"/namespaces/{namespace}" if namespaced else ""
    return f"{root or known}{inside}/{plural}" + (f"/{name}" if name else "")
