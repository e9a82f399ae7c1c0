"""Ports of pods on this machine, through an API server and through a scripted one."""

from __future__ import annotations

import http.client
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import WSMsgType, web

from dynctl.adapters.kubernetes.cluster import KubernetesCluster
from dynctl.adapters.ports import ClusterRefusal
from tests.dynctl.adapters.kube_lab import opened, pod
from tests.dynctl.adapters.kube_stand_ins import scripted
from tests.kube.api_server import ApiServer
from tests.waiting import patience


@pytest.fixture(params=["http", "https"])
def server(request: pytest.FixtureRequest) -> Iterator[ApiServer]:
    with ApiServer(tls=request.param == "https") as running:
        running.store.create(pod("w-0"))
        yield running


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """A program in the pod: ``serve`` is called with each connection, in a thread."""
    threads: list[threading.Thread] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def one(connection: socket.socket) -> None:
        with connection:
            serve(connection)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=one, args=(connection,)))
            threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for thread in threads:
            thread.join(patience(10))
            assert not thread.is_alive()


def echo(connection: socket.socket) -> None:
    while data := connection.recv(1 << 16):
        connection.sendall(data)


def connected(at: str) -> socket.socket:
    host, _, port = at.partition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        data = connection.recv(count - len(found))
        assert data, f"the connection ended after {len(found)} of {count} bytes"
        found += data
    return found


def test_what_is_sent_comes_back(server: ApiServer, cluster: KubernetesCluster):
    sent = random.Random(1).randbytes(300_000)
    before = set(threading.enumerate())
    with listening(echo) as place:
        server.forwards["lab", "w-0", 8000] = place
        with cluster.forward("lab", "w-0", 8000) as at:
            assert at.startswith("127.0.0.1:")
            connections = [connected(at) for _ in range(3)]
            for number, one in enumerate(connections):
                one.sendall(b"%d" % number + sent)
            for number, one in enumerate(connections):
                assert exactly(one, len(sent) + 1) == b"%d" % number + sent
                one.close()
    settled(before)


def settled(before: set[threading.Thread]) -> None:
    """All our threads have ended; those of the server's loop are not ours."""
    left = {one for one in threading.enumerate() if one.name.startswith("dynctl")}
    assert left <= before


def test_an_answer_larger_than_any_buffer(server: ApiServer, cluster: KubernetesCluster):
    """The reader is slow at first, so that the copying side has to wait."""
    count = 20_000_000

    def flood(connection: socket.socket) -> None:
        if connection.recv(1):
            connection.sendall(bytes(count))

    with listening(flood) as place:
        server.forwards["lab", "w-0", 8000] = place
        with cluster.forward("lab", "w-0", 8000) as at, connected(at) as one:
            one.sendall(b"!")
            time.sleep(0.3)
            assert exactly(one, count) == bytes(count)
            # The pod's side has closed behind it.
            assert one.recv(1) == b""


def test_http_through_a_port(server: ApiServer, cluster: KubernetesCluster):
    def serve(connection: socket.socket) -> None:
        if connection.recv(1 << 16):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    with listening(serve) as place:
        server.forwards["lab", "w-0", 8000] = place
        with cluster.forward("lab", "w-0", 8000) as at:
            asked = http.client.HTTPConnection(at, timeout=10)
            asked.request("GET", "/")
            assert asked.getresponse().read() == b"ok"
            asked.close()


def test_nobody_listens_in_the_pod(server: ApiServer, cluster: KubernetesCluster):
    before = set(threading.enumerate())
    with cluster.forward("lab", "w-0", 8000) as at, connected(at) as one:
        assert one.recv(10) == b""
    settled(before)


def test_the_end_of_the_block_ends_connections_and_the_port(
    server: ApiServer, cluster: KubernetesCluster
):
    before = set(threading.enumerate())
    with listening(echo) as place:
        server.forwards["lab", "w-0", 8000] = place
        with cluster.forward("lab", "w-0", 8000) as at:
            one = connected(at)
            one.sendall(b"x")
            assert exactly(one, 1) == b"x"
        assert ended(one)
        with pytest.raises(ConnectionRefusedError):
            connected(at)
        one.close()
    settled(before)


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_closing_the_cluster_ends_its_ports(server: ApiServer, cluster: KubernetesCluster):
    with listening(echo) as place:
        server.forwards["lab", "w-0", 8000] = place
        with cluster.forward("lab", "w-0", 8000) as at, connected(at) as one:
            one.sendall(b"x")
            assert exactly(one, 1) == b"x"
            cluster.close()
            assert ended(one)


def test_a_pod_that_is_not_there_and_a_port_that_is_not_allowed(tmp_path: Path):
    with ApiServer(rbac=True, tls=True) as server:
        server.store.create(pod("w-0"))
        server.add_user("poor-token", "poor")
        poor, admin = opened(server, tmp_path, token="poor-token"), opened(server, tmp_path / "a")
        with pytest.raises(ClusterRefusal) as caught, poor.forward("lab", "w-0", 8000):
            pass
        assert caught.value.forbidden
        with pytest.raises(ClusterRefusal) as caught, admin.forward("lab", "absent", 8000):
            pass
        assert caught.value.missing
        poor.close()
        admin.close()


def test_no_file_is_left_open(server: ApiServer, cluster: KubernetesCluster):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with listening(echo) as place:
        server.forwards["lab", "w-0", 8000] = place
        before = 0
        for turn in range(4):
            with cluster.forward("lab", "w-0", 8000) as at, connected(at) as one:
                one.sendall(b"x")
                assert exactly(one, 1) == b"x"
            if turn == 0:
                before = descriptors()
        deadline = time.monotonic() + patience(10)
        # The server's side of a connection ends a moment later.
        while descriptors() > before:
            assert time.monotonic() < deadline, "descriptors are left"
            time.sleep(0.02)


def test_a_message_of_another_kind_does_no_harm(tmp_path: Path):
    async def script(stream: web.WebSocketResponse) -> None:
        for channel in (0, 1):
            await stream.send_bytes(bytes([channel]) + (8000).to_bytes(2, "little"))
        async for message in stream:
            if message.type is WSMsgType.BINARY:
                await stream.ping()
                await stream.send_bytes(b"\x07\x00")
                await stream.send_bytes(b"\x07unknown channel")
                await stream.send_bytes(b"\x00" + message.data[1:].upper())

    with (
        scripted(script, tmp_path) as cluster,
        cluster.forward("lab", "w-0", 8000) as at,
        connected(at) as one,
    ):
        one.sendall(b"abc")
        assert exactly(one, 3) == b"ABC"
