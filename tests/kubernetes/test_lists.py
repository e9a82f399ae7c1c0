"""Lists and watches of a real API server: pages, forgotten versions, too many requests."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dynctl.adapters.kubernetes.cluster import KubernetesCluster, open_cluster
from dynctl.adapters.ports import ClusterRefusal
from tests.kube.client import Api
from tests.kube.test_contract import Place, place
from tests.kubernetes.control_plane import VIEWER, ControlPlane
from tests.kubernetes.objects import create, path_of

__all__ = ["place"]


@pytest.fixture
def maps(place: Place) -> str:
    """The path of 25 ConfigMaps in a namespace of their own, named a00 to a24."""
    for number in range(25):
        place.write(f"a{number:02}")
    return path_of("ConfigMap", place.namespace)


@contextmanager
def opened(kubeconfig: Path) -> Iterator[KubernetesCluster]:
    cluster = open_cluster(kubeconfig=kubeconfig, context=None, timeout=10)
    try:
        yield cluster
    finally:
        cluster.close()


OURS = {"fieldSelector": "metadata.name!=kube-root-ca.crt"}


def names_of(pages: Iterable[Mapping[str, Any]]) -> list[str]:
    return [item["metadata"]["name"] for page in pages for item in page["items"]]


def test_pages_are_of_one_version(maps: str, place: Place, kubeconfig: Path) -> None:
    pages = []
    with opened(kubeconfig) as cluster:
        for page in cluster.pages(maps, OURS, page=10):
            pages.append(page)
            place.core.delete_namespaced_config_map(f"a{25 - len(pages):02}", place.namespace)
    assert len(pages) == 3
    assert names_of(pages) == [f"a{number:02}" for number in range(25)]


def test_what_etcd_forgot_is_read_again(
    maps: str, place: Place, kubeconfig: Path, control_plane: ControlPlane
) -> None:
    """A restarted API server keeps no old versions: a list begins again, a watch is refused."""
    with opened(kubeconfig) as cluster:
        pages = cluster.pages(maps, OURS, page=10)
        version = next(pages)["metadata"]["resourceVersion"]
        place.core.delete_namespaced_config_map("a00", place.namespace)
        control_plane.kill_api_server()
        control_plane.compact_etcd()
        control_plane.start_api_server()
        rest = list(pages)
        assert rest[0]["metadata"]["dynctlRestarted"] is True
        assert names_of(rest) == [f"a{number:02}" for number in range(1, 25)]
        with pytest.raises(ClusterRefusal, match=r"too old|compacted|expired") as refused:
            next(iter(cluster.watch(maps, version)))
        assert refused.value.status == 410


@contextmanager
def throttled(api: Api) -> Iterator[None]:
    """Priority and fairness let the viewer have one request at a time."""
    limited = {
        "nominalConcurrencyShares": 0,
        "lendablePercent": 0,
        "borrowingLimitPercent": 0,
        "limitResponse": {"type": "Reject"},
    }
    level = {
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
        "kind": "PriorityLevelConfiguration",
        "metadata": {"name": "none"},
        "spec": {"type": "Limited", "limited": limited},
    }
    rule = {
        "subjects": [{"kind": "User", "user": {"name": "verifier"}}],
        "resourceRules": [
            {
                "verbs": ["*"],
                "apiGroups": ["*"],
                "resources": ["*"],
                "clusterScope": True,
                "namespaces": ["*"],
            }
        ],
        "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
    }
    schema = {
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
        "kind": "FlowSchema",
        "metadata": {"name": "none"},
        "spec": {
            "priorityLevelConfiguration": {"name": "none"},
            "matchingPrecedence": 3,
            "rules": [rule],
        },
    }
    create(api, level)
    create(api, schema)
    try:
        yield
    finally:
        for kind in ("FlowSchema", "PriorityLevelConfiguration"):
            api.delete(path_of(kind, "", "none"))


@contextmanager
def endless_request(plane: ControlPlane) -> Iterator[ssl.SSLSocket]:
    """A request of the viewer whose body does not come, until the socket is closed."""
    context = ssl.create_default_context(cafile=str(plane.authority.certificate))
    lines = [
        "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews HTTP/1.1",
        *("Host: 127.0.0.1", f"Authorization: Bearer {VIEWER}"),
        *("Content-Type: application/json", "Content-Length: 1000"),
    ]
    with (
        socket.create_connection(("127.0.0.1", plane.port)) as connection,
        context.wrap_socket(connection, server_hostname="127.0.0.1") as held,
    ):
        held.sendall("\r\n".join([*lines, "", ""]).encode())
        yield held


def test_a_server_with_too_many_requests_is_asked_again(control_plane: ControlPlane) -> None:
    kubeconfig = control_plane.kubeconfig(VIEWER)
    with (
        control_plane.api() as admin,
        control_plane.api(VIEWER) as viewer,
        throttled(admin),
        opened(kubeconfig) as cluster,
        endless_request(control_plane) as held,
    ):
        control_plane.wait(lambda: viewer.http.get("/version").status_code == 429, "a refusal")
        with pytest.raises(ClusterRefusal, match="Too many requests") as refused:
            cluster.get("/version")
        assert refused.value.status == 429
        release = threading.Timer(1.5, held.shutdown, [socket.SHUT_RDWR])
        release.start()
        assert cluster.get("/version")["major"] == "1"
        release.join()
