"""The Cluster port on the official Kubernetes client.

The client authenticates (kubeconfig, plugins, TLS, proxies; see login.py); requests go through
:class:`dynctl.adapters.kubernetes.http.ApiServer`, and objects stay JSON.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from dynctl.adapters.kubernetes.http import MAX_LINE, ApiServer, refusal_of
from dynctl.adapters.kubernetes.kubeconfig import kube_context
from dynctl.adapters.kubernetes.login import Login
from dynctl.adapters.kubernetes.port_forward import forwarded
from dynctl.adapters.kubernetes.streams import output_in_container, pod_path
from dynctl.adapters.ports import AccessReview, ClusterEvent, ClusterRefusal
from dynctl.base.errors import TimedOut, Unreachable

_READ_LESS: Final = "read less: one namespace (-n NAME), or wait longer: --timeout SECONDS"

WATCH_S: Final = 240
"""Seconds after which the server ends a watch, so that the reader begins a new one."""

MANAGER: Final = "dynctl"
"""The field manager of what dynctl writes."""

_WATCH_SLACK_S: Final = 30.0
MOST_PAGES: Final = 400
"""Pages of one list: 200,000 objects at the usual size of a page; a cluster has 150,000 pods."""
_LONGEST_LIST: Final = 6
"""The pages of a list may take this many times the timeout of a request."""
_REVIEWS: Final = "/apis/authorization.k8s.io/v1"
_KINDS: Final = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK")


def open_cluster(
    *, kubeconfig: Path | None, context: str | None, timeout: float
) -> KubernetesCluster:
    """The cluster of ``context`` (None: the current one) of ``kubeconfig`` (None: kubectl's
    locations, then the pod's service account); ``timeout`` in seconds. Does not connect yet.

    Raises UsageProblem, or Unreachable if a credential plugin fails.
    """
    return KubernetesCluster(ApiServer(Login(kube_context(kubeconfig, context)), timeout))


class KubernetesWriter:
    """A :class:`dynctl.adapters.ports.ClusterWriter`, for commands that are there to change."""

    def __init__(self, cluster: KubernetesCluster) -> None:
        self._server = cluster.server

    def create(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._server.object(path, {"fieldManager": MANAGER}, body=body)

    def replace(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._server.object(path, {"fieldManager": MANAGER}, body=body, method="PUT")

    def merge(self, path: str, patch: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._server.object(path, {"fieldManager": MANAGER}, body=patch, method="PATCH")

    def apply(self, path: str, body: Mapping[str, Any], *, manager: str) -> Mapping[str, Any]:
        query = {"force": "true", "fieldManager": manager}
        return self._server.object(path, query, body=body, method="APPLY")

    def delete(self, path: str, *, uid: str) -> None:
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            self._server.object(path, body=options, method="DELETE")
        except ClusterRefusal as refusal:
            if refusal.status not in (404, 409):
                raise


class KubernetesCluster:
    """A :class:`dynctl.adapters.ports.Cluster`. Closing it ends watches, logs and forwards."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    @property
    def server(self) -> ApiServer:
        return self._server

    @property
    def title(self) -> str:
        return self._server.context.title

    @property
    def namespace(self) -> str:
        return self._server.context.namespace

    @property
    def now(self) -> float:
        return self._server.now

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Mapping[str, Any]:
        return self._server.object(path, query)

    def pages(
        self, path: str, query: Mapping[str, str] | None = None, *, page: int = 500
    ) -> Iterator[Mapping[str, Any]]:
        parameters = {**(query or {}), "limit": str(page)}
        token, restarted, count, spent = "", False, 0, 0.0
        while True:
            count += 1
            if count > MOST_PAGES:
                raise Unreachable(
                    f"the API server's list of {path} has more than {MOST_PAGES:,} pages",
                    _READ_LESS,
                )
            if spent > _LONGEST_LIST * self._server.timeout:
                raise TimedOut(
                    f"the API server's list of {path} did not end within {spent:.0f} s", _READ_LESS
                )
            began = time.monotonic()
            try:
                found = self._server.object(
                    path, parameters | ({"continue": token} if token else {})
                )
            except ClusterRefusal as refusal:
                if refusal.status != 410 or not token or restarted:
                    raise
                token, restarted = "", True
                continue
            spent += time.monotonic() - began
            if restarted and not token:
                found = _mark(found)
            yield found
            before, token = token, _metadata(found).get("continue") or ""
            if not token:
                return
            if token == before:
                raise Unreachable(f"the API server repeats a page of {path}: its list has no end")

    def watch(
        self, path: str, resource_version: str, query: Mapping[str, str] | None = None
    ) -> Iterator[ClusterEvent]:
        parameters = {
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
            **(query or {}),
            "resourceVersion": resource_version,
            "watch": "true",
        }
        silence = float(parameters["timeoutSeconds"]) + _WATCH_SLACK_S
        with self._server.answer(path, parameters, silence=silence) as response:
            for line in self._lines(response, path):
                event = self._event(line, path)
                if event is not None:
                    yield event

    def allowed(
        self, question: AccessReview, *, user: str | None = None, groups: tuple[str, ...] = ()
    ) -> bool:
        resource, _, part = question.resource.partition("/")
        attributes = {
            "verb": question.verb,
            "group": question.group,
            "resource": resource,
            "subresource": part,
            "namespace": question.namespace or "",
        }
        spec: dict[str, Any] = {"resourceAttributes": {k: v for k, v in attributes.items() if v}}
        if user is None:
            kind, path = "SelfSubjectAccessReview", f"{_REVIEWS}/selfsubjectaccessreviews"
        else:
            spec |= {"user": user, "groups": list(groups)}
            kind, path = "SubjectAccessReview", f"{_REVIEWS}/subjectaccessreviews"
            if question.namespace:
                kind = "LocalSubjectAccessReview"
                path = f"{_REVIEWS}/namespaces/{question.namespace}/localsubjectaccessreviews"
        body: dict[str, Any] = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": kind,
            "metadata": {"namespace": question.namespace} if kind.startswith("Local") else {},
            "spec": spec,
        }
        status = self._server.object(path, body=body).get("status")
        return isinstance(status, Mapping) and status.get("allowed") is True

    def read_file(
        self, namespace: str, pod: str, container: str, path: str, *, max_bytes: int
    ) -> bytes:
        return output_in_container(
            self._server, namespace, pod, container, ("cat", path), max_bytes
        )

    def file_names(
        self, namespace: str, pod: str, container: str, path: str, *, max_bytes: int
    ) -> tuple[str, ...]:
        # -p marks directories with a slash; busybox and coreutils both have it.
        output = output_in_container(
            self._server, namespace, pod, container, ("ls", "-1p", path), max_bytes
        )
        names = output.decode(errors="replace").splitlines()
        return tuple(name for name in names if name and not name.endswith("/"))

    def log_lines(
        self,
        namespace: str,
        pod: str,
        container: str,
        *,
        previous: bool = False,
        last: int | None = None,
        max_bytes: int = 1 << 20,
    ) -> Iterator[str]:
        path = pod_path(namespace, pod, "log")
        query = {"container": container, "limitBytes": str(max_bytes)}
        if previous:
            query["previous"] = "true"
        if last is not None:
            query["tailLines"] = str(last)
        left, rest = max_bytes, b""
        with self._server.answer(path, query) as response:
            for piece in self._server.pieces(response, path, max_bytes + MAX_LINE):
                *lines, rest = (rest + piece[:left]).split(b"\n")
                left -= min(left, len(piece))
                for line in lines:
                    yield line.decode(errors="replace").removesuffix("\r")
                if not left:
                    break
        if rest:
            yield rest.decode(errors="replace").removesuffix("\r")

    def forward(self, namespace: str, pod: str, port: int) -> AbstractContextManager[str]:
        return forwarded(self._server, namespace, pod, port)

    def close(self) -> None:
        self._server.close()

    def _lines(self, response: Any, path: str) -> Iterator[bytes]:
        """The lines of a watch. Raises Unreachable if it ends within one."""
        parts: list[bytes] = []
        size = 0
        for piece in self._server.pieces(response, path, None):
            first, *others = piece.split(b"\n")
            parts.append(first)
            size += len(first)
            for other in others:
                yield b"".join(parts)
                parts, size = [other], len(other)
            if size > MAX_LINE:
                raise Unreachable(f"an event of the watch of {path} is over {MAX_LINE:,} bytes")
        if any(parts):
            raise Unreachable(f"the watch of {path} ended within an event")

    def _event(self, line: bytes, path: str) -> ClusterEvent | None:
        if not line.strip():
            return None
        found = self._server.decoded(line, path)
        kind, body = found.get("type"), found.get("object")
        body = body if isinstance(body, Mapping) else {}
        if kind == "ERROR":
            raise refusal_of(body, 500, path)
        return ClusterEvent(str(kind), body) if kind in _KINDS else None


def _metadata(item: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = item.get("metadata")
    return metadata if isinstance(metadata, Mapping) else {}


def _mark(item: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**item, "metadata": {**_metadata(item), "dynctlRestarted": True}}
