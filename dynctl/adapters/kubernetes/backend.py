"""A Kubernetes cluster as a discovery backend, opened as the options name it."""

from __future__ import annotations

import os
from typing import Final

from dynctl.adapters.kubernetes.discovery import KubernetesDiscovery
from dynctl.adapters.kubernetes.from_options import namespaces_of, open_cluster, open_pod_registrar
from dynctl.adapters.kubernetes.registration import own_pod
from dynctl.adapters.ports import BackendPort, Discovery, Registrar
from dynctl.base.options import GlobalOptions


def _open(options: GlobalOptions) -> Discovery:
    cluster = open_cluster(options)
    return KubernetesDiscovery(cluster, namespaces_of(options, cluster))


def _open_registrar(options: GlobalOptions, discovery: Discovery) -> Registrar:
    assert isinstance(discovery, KubernetesDiscovery)
    return open_pod_registrar(discovery.cluster)


def _expect_registrar() -> None:
    own_pod(os.environ, "default")


BACKEND: Final = BackendPort(_open, _open_registrar, _expect_registrar, pods_only=True)
