"""An API server that is reached through a kubeconfig."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dynctl.adapters.kubernetes.cluster import KubernetesCluster
from tests.dynctl.adapters.kube_lab import NOW, opened
from tests.kube.api_server import ApiServer


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer(clock=lambda: NOW) as running:
        yield running


@pytest.fixture
def cluster(server: ApiServer, tmp_path: Path) -> Iterator[KubernetesCluster]:
    one = opened(server, tmp_path)
    yield one
    one.close()
