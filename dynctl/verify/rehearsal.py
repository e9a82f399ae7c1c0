"""What `topology verify` would ask a cluster: it reads the lists, and only notes the rest.

The code of verify decides what it asks; this cluster passes on what every viewer reads, and answers
exec, logs and port-forwards itself, as if there were nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from dynctl.adapters.kubernetes.following import place_of
from dynctl.adapters.ports import AccessReview, Cluster, ClusterEvent, ClusterRefusal
from dynctl.documents.verify import PlannedRequest

_NAMES = 3
_VERSIONS = "versions and definitions"


class RehearsedCluster:
    """A cluster whose pods are not entered. ``requests``: what was asked, in order of the kinds."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._noted: dict[tuple[str, str, str], list[str]] = {}
        self._lock = threading.Lock()

    @property
    def title(self) -> str:
        return self._cluster.title

    @property
    def namespace(self) -> str:
        return self._cluster.namespace

    @property
    def now(self) -> float:
        return self._cluster.now

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Mapping[str, Any]:
        self._note("get", *_resource(path), "")
        return self._cluster.get(path, query)

    def pages(
        self, path: str, query: Mapping[str, str] | None = None, *, page: int = 500
    ) -> Iterator[Mapping[str, Any]]:
        for items in self._cluster.pages(path, query, page=page):
            self._note("list", *_resource(path), "")
            yield items

    def watch(
        self, path: str, resource_version: str, query: Mapping[str, str] | None = None
    ) -> Iterator[ClusterEvent]:
        self._note("watch", *_resource(path), "")
        return self._cluster.watch(path, resource_version, query)

    def allowed(
        self, question: AccessReview, *, user: str | None = None, groups: tuple[str, ...] = ()
    ) -> bool:
        self._note("access review", "permissions", question.namespace or "", "")
        return self._cluster.allowed(question, user=user, groups=groups)

    def read_file(
        self, namespace: str, pod: str, container: str, path: str, *, max_bytes: int
    ) -> bytes:
        self._note("exec", "pods (cat)", namespace, pod)
        raise FileNotFoundError(path)

    def file_names(
        self, namespace: str, pod: str, container: str, path: str, *, max_bytes: int
    ) -> tuple[str, ...]:
        self._note("exec", "pods (ls)", namespace, pod)
        return ()

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
        self._note("log", "pods", namespace, pod)
        return iter(())

    def forward(self, namespace: str, pod: str, port: int) -> AbstractContextManager[str]:
        self._note("port-forward", "pods", namespace, pod)
        raise ClusterRefusal(0, "Rehearsed", "is not sent by --plan")

    def close(self) -> None:
        self._cluster.close()

    def _note(self, request: str, what: str, namespace: str, pod: str) -> None:
        with self._lock:
            self._noted.setdefault((request, what, namespace), []).append(pod)

    @property
    def requests(self) -> list[PlannedRequest]:
        """Each kind of request with its number, and the first pods of those that enter pods."""
        return [
            PlannedRequest(
                request,
                what,
                namespace,
                len(pods),
                len(set(filter(None, pods))),
                sorted(set(filter(None, pods)))[:_NAMES],
            )
            for (request, what, namespace), pods in self._noted.items()
        ]


def _resource(path: str) -> tuple[str, str]:
    """``pods`` and the namespace (empty: all) of a path of the API."""
    plural, namespace, _ = place_of(path)
    return plural or _VERSIONS, namespace
