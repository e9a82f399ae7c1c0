"""A pod that registers itself in a small cluster, with the permissions of the manifest only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from dynctl.adapters.kubernetes.cluster import KubernetesCluster, KubernetesWriter
from dynctl.adapters.kubernetes.discovery import KubernetesDiscovery
from dynctl.adapters.kubernetes.registration import KubernetesRegistrar
from dynctl.adapters.ports import DiscoveryEntry
from dynctl.wire.kubernetes.worker_metadata import OwnPod, instance_id
from tests.dynctl.adapters.kube_lab import (
    DEFINITION,
    NAMESPACE,
    endpoint,
    endpoint_slice,
    opened,
    pod,
)
from tests.kube.api_server import ApiServer
from tests.waiting import patience

MANIFEST = Path(__file__).parents[3] / "docs" / "deploy" / "kubernetes" / "attach.yaml"
KIND = "DynamoWorkerMetadata"
ACCOUNT = "dynctl-attach"


@contextmanager
def serving_cluster() -> Iterator[ApiServer]:
    """With RBAC; the account of the manifest, and ``other``, which may do nothing."""
    with ApiServer(rbac=True) as running:
        running.store.create(DEFINITION)
        for body in yaml.safe_load_all(MANIFEST.read_text()):
            if body["kind"] == "Service":
                continue
            body["metadata"]["namespace"] = NAMESPACE
            for subject in body.get("subjects", ()):
                subject["namespace"] = NAMESPACE
            running.store.create(body)
        running.add_service_account(ACCOUNT, NAMESPACE, ACCOUNT)
        running.add_service_account("other", NAMESPACE, "other")
        yield running


class PodLab:
    """A pod of the cluster, and what it registers with."""

    def __init__(self, server: ApiServer, folder: Path, name: str = "worker-0") -> None:
        self.server = server
        created = server.store.create(pod(name))
        self.pod = OwnPod(NAMESPACE, name, created["metadata"]["uid"])
        self.id = instance_id(name)
        self._folder = folder
        self._opened: list[KubernetesCluster] = []

    def cluster(self, token: str = ACCOUNT) -> KubernetesCluster:
        made = opened(
            self.server, self._folder, timeout=patience(10), token=token, namespace=NAMESPACE
        )
        self._opened.append(made)
        return made

    def registrar(self, token: str = ACCOUNT, **how: Any) -> KubernetesRegistrar:
        cluster = self.cluster(token)
        return KubernetesRegistrar(cluster, KubernetesWriter(cluster), self.pod, **how)

    def ready(self, ready: bool = True) -> None:
        self.server.store.create(
            endpoint_slice("slice", [endpoint(self.pod.name, self.pod.uid, ready=ready)])
        )

    def objects(self) -> list[dict[str, Any]]:
        return self.server.store.list(KIND, NAMESPACE)

    async def entries(self) -> tuple[DiscoveryEntry, ...]:
        """What frontends read."""
        return (await KubernetesDiscovery(self.cluster(), NAMESPACE).list()).entries

    async def keys(self) -> list[str]:
        return [entry.key for entry in await self.entries()]

    def close(self) -> None:
        for one in self._opened:
            one.close()
