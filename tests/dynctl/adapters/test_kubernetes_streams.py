"""Files of containers, through an API server and through scripted ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from dynctl.adapters.kubernetes import streams as kubernetes_streams
from dynctl.adapters.kubernetes.cluster import KubernetesCluster
from dynctl.adapters.ports import ClusterRefusal
from dynctl.base.errors import Unreachable
from tests.dynctl.adapters.kube_lab import PODS, bind, opened, pod, rule
from tests.dynctl.adapters.kube_stand_ins import Script, scripted
from tests.kube.api_server import ApiServer

BYTES = bytes(range(256)) * 700
"""No UTF-8, and more than one message."""


@pytest.fixture(params=["http", "https"])
def server(request: pytest.FixtureRequest) -> Iterator[ApiServer]:
    with ApiServer(tls=request.param == "https") as running:
        running.store.create(pod("w-0"))
        yield running


def read(cluster: KubernetesCluster, path: str, *, max_bytes: int = 1 << 20) -> bytes:
    return cluster.read_file("lab", "w-0", "main", path, max_bytes=max_bytes)


# -- files ---------------------------------------------------------------------------------------


@pytest.fixture
def root(server: ApiServer, tmp_path: Path) -> Path:
    """What the container sees as its root."""
    inside = tmp_path / "root"
    inside.mkdir()
    server.exec_files["lab", "w-0", "main"] = inside
    return inside


def test_bytes_come_back_unharmed(cluster: KubernetesCluster, root: Path):
    for name, content in {"a": BYTES, "b": b"", "c": b"us-east-1a\n", "d e%20&": b"1"}.items():
        (root / name).write_bytes(content)
        assert read(cluster, f"/{name}") == content


def test_a_file_through_a_link_as_the_downward_api_writes_it(
    cluster: KubernetesCluster, root: Path
):
    (root / "..2026").mkdir()
    (root / "..2026" / "zone").write_text("a")
    (root / "..data").symlink_to("..2026")
    (root / "zone").symlink_to("..data/zone")
    assert read(cluster, "/zone") == b"a"


def test_a_missing_file_is_named(cluster: KubernetesCluster, root: Path):
    with pytest.raises(FileNotFoundError) as caught:
        read(cluster, "/etc/dynamo/topology/zone")
    assert caught.value.filename == "/etc/dynamo/topology/zone"
    assert "container main of pod lab/w-0" in str(caught.value)


def test_what_cat_cannot_read_is_a_refusal(cluster: KubernetesCluster, root: Path):
    with pytest.raises(ClusterRefusal, match="Is a directory"):
        read(cluster, "/")


def test_a_file_may_be_as_large_as_said_and_no_larger(cluster: KubernetesCluster, root: Path):
    (root / "f").write_bytes(BYTES)
    assert read(cluster, "/f", max_bytes=len(BYTES)) == BYTES
    with pytest.raises(ValueError, match="larger than 179,199 bytes"):
        read(cluster, "/f", max_bytes=len(BYTES) - 1)


def test_a_container_that_does_not_run(server: ApiServer, cluster: KubernetesCluster):
    server.store.create(pod("w-1", running=False))
    with pytest.raises(ClusterRefusal, match="container not found") as caught:
        cluster.read_file("lab", "w-1", "main", "/x", max_bytes=1)
    assert caught.value.status == 500
    with pytest.raises(ClusterRefusal, match="container absent is not valid"):
        cluster.read_file("lab", "w-0", "absent", "/x", max_bytes=1)
    with pytest.raises(ClusterRefusal) as caught:
        cluster.read_file("lab", "absent", "main", "/x", max_bytes=1)
    assert caught.value.missing


def test_who_may_not_exec_or_is_not_known(tmp_path: Path):
    with ApiServer(rbac=True, tls=True) as server:
        server.store.create(pod("w-0"))
        server.add_user("poor-token", "poor")
        bind(server, "poor", rule("", "pods", "get"))
        poor, gone = opened(server, tmp_path, token="poor-token"), None
        with pytest.raises(ClusterRefusal, match='cannot get resource "pods/exec"') as caught:
            read(poor, "/x")
        assert caught.value.forbidden
        gone = opened(server, tmp_path, token="nobodys")
        with pytest.raises(Unreachable, match="does not accept the credentials"):
            read(gone, "/x")
        poor.close()
        gone.close()


def test_nothing_is_written_to_the_container(
    server: ApiServer, cluster: KubernetesCluster, root: Path
):
    (root / "f").write_bytes(b"1")
    read(cluster, "/f")
    asked = server.requests[-1]
    assert asked.path == f"{PODS}/w-0/exec"
    assert (asked.query["stdin"], asked.query["tty"]) == ("false", "false")
    assert asked.method == "GET"


# -- scripted servers ----------------------------------------------------------------------------


def saying(*messages: tuple[int, bytes]) -> Script:
    async def script(stream: web.WebSocketResponse) -> None:
        for channel, data in messages:
            await stream.send_bytes(bytes([channel]) + data)
        await stream.close()

    return script


def failure(**values: object) -> tuple[int, bytes]:
    return 3, json.dumps({"kind": "Status", "status": "Failure", **values}).encode()


def test_a_stream_that_ends_without_a_status(tmp_path: Path):
    with (
        scripted(saying((1, b"half")), tmp_path) as cluster,
        pytest.raises(Unreachable, match="ended without the status"),
    ):
        read(cluster, "/f")


def test_an_image_without_cat(tmp_path: Path):
    values = failure(code=500, reason="InternalError", message='exec: "cat": not found in $PATH')
    with (
        scripted(saying(values), tmp_path) as cluster,
        pytest.raises(ClusterRefusal, match="not found in") as caught,
    ):
        read(cluster, "/f")
    assert (caught.value.status, caught.value.reason) == (500, "InternalError")


def test_an_exit_code_without_words(tmp_path: Path):
    values = failure(reason="NonZeroExitCode", message="exit code 137")
    with (
        scripted(saying(values), tmp_path) as cluster,
        pytest.raises(ClusterRefusal, match="exit code 137"),
    ):
        read(cluster, "/f")


def test_a_status_with_which_the_server_does_not_hang_up(tmp_path: Path):
    async def script(stream: web.WebSocketResponse) -> None:
        await stream.send_bytes(b"\x01a")
        await stream.ping()
        await stream.send_bytes(b'\x03{"status": "Succ')
        await stream.send_bytes(b'\x03ess"}')
        await stream.receive()

    with scripted(script, tmp_path) as cluster:
        assert read(cluster, "/f") == b"a"


def test_a_command_that_hangs_is_given_up(tmp_path: Path):
    async def script(stream: web.WebSocketResponse) -> None:
        await stream.receive()

    with (
        # The handshake has this time-out too, and must keep it.
        scripted(script, tmp_path, timeout=2) as cluster,
        pytest.raises(Unreachable, match="no data from the pod"),
    ):
        read(cluster, "/f")


def test_a_file_that_never_ends_is_given_up(tmp_path: Path):
    async def script(stream: web.WebSocketResponse) -> None:
        while not stream.closed:
            await stream.send_bytes(b"\x01" + bytes(10_000))

    with (
        scripted(script, tmp_path) as cluster,
        pytest.raises(ValueError, match="larger than 1,000,000 bytes"),
    ):
        read(cluster, "/dev/zero", max_bytes=1_000_000)


def test_a_message_without_bounds_is_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kubernetes_streams, "MAX_MESSAGE", 1_000)
    with (
        scripted(saying((1, bytes(5_000))), tmp_path) as cluster,
        pytest.raises(Unreachable, match="over 1,000 bytes at once"),
    ):
        read(cluster, "/f")


def test_a_server_that_does_not_upgrade(tmp_path: Path):
    with ApiServer() as server:
        server.store.create(pod("w-0"))
        cluster = opened(server, tmp_path)
        server.faults.answer(PODS, 302)
        with pytest.raises(Unreachable, match=r"(?i)redirect"):
            read(cluster, "/f")
        server.faults.clear()
        server.faults.answer(PODS, 503, message="kubelet away")
        with pytest.raises(ClusterRefusal, match="kubelet away"):
            read(cluster, "/f")
        cluster.close()
    with pytest.raises(Unreachable):
        read(cluster, "/f")


def test_a_handshake_without_an_answer_is_given_up(tmp_path: Path):
    """As where the API server waits for the kubelet of a node that is gone."""
    with ApiServer() as server:
        server.store.create(pod("w-0"))
        server.faults.hang(PODS, 30, times=1)
        cluster = opened(server, tmp_path, timeout=0.3)
        with pytest.raises(Unreachable, match=r"no response within 0\.3 s"):
            read(cluster, "/f")
        cluster.close()
