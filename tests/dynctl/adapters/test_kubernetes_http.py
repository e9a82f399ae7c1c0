"""Requests to an API server that refuses, is silent, is another one, or is none at all."""

from __future__ import annotations

import socket
import threading
from base64 import b64encode
from pathlib import Path

import pytest

from dynctl.adapters.kubernetes import http as kubernetes_http
from dynctl.adapters.kubernetes.cluster import KubernetesCluster
from dynctl.adapters.ports import ClusterRefusal
from dynctl.base.errors import Unreachable
from tests.dynctl.adapters.kube_lab import PODS, opened
from tests.dynctl.adapters.kube_stand_ins import answering, elsewhere, whole
from tests.http_servers import Exchange
from tests.kube.api_server import ApiServer

# -- refusals and silence --------------------------------------------------------------------------


def test_what_is_not_served_and_what_is_not_there(server: ApiServer, cluster: KubernetesCluster):
    with pytest.raises(ClusterRefusal) as caught:
        cluster.get("/apis/nobody.example/v1/things")
    assert caught.value.missing
    with pytest.raises(ClusterRefusal, match='pods "absent" not found') as caught:
        cluster.get(f"{PODS}/absent")
    assert caught.value.missing


def test_a_busy_server_is_asked_again_when_it_says_so(
    server: ApiServer, cluster: KubernetesCluster
):
    server.faults.answer("/api/v1/nodes", 429, times=2, retry_after=0)
    server.faults.answer("/api/v1/nodes", 503, times=1, retry_after=0)
    assert cluster.get("/api/v1/nodes")["items"] == []
    assert [request.status for request in server.requests] == [429, 429, 503, 200]


@pytest.mark.parametrize(("status", "after"), [(429, 60), (503, None), (500, None)])
def test_a_server_that_stays_busy_is_a_refusal(
    server: ApiServer, cluster: KubernetesCluster, status: int, after: int | None
):
    server.faults.answer("/api/v1/nodes", status, message="not now", retry_after=after)
    with pytest.raises(ClusterRefusal, match="not now") as caught:
        cluster.get("/api/v1/nodes")
    assert caught.value.status == status
    assert len(server.requests) == 1


def test_a_server_that_asks_for_ever_is_asked_five_times(
    server: ApiServer, cluster: KubernetesCluster
):
    server.faults.answer("/api/v1/nodes", 429, retry_after=0)
    with pytest.raises(ClusterRefusal):
        cluster.get("/api/v1/nodes")
    assert len(server.requests) == 5


def test_silence_ends_with_the_timeout(server: ApiServer, tmp_path: Path):
    server.faults.hang("/api/v1/nodes", 30, times=1)
    one = opened(server, tmp_path, timeout=0.3)
    with pytest.raises(Unreachable, match=r"no response within 0\.3 s"):
        one.get("/api/v1/nodes")
    one.close()


def test_nobody_listens(tmp_path: Path):
    with ApiServer() as server:
        one = opened(server, tmp_path)
    with pytest.raises(Unreachable) as caught:
        one.get("/api/v1/nodes")
    assert "connection refused" in caught.value.message
    assert "context test" in caught.value.message
    one.close()


def test_a_name_that_is_not_known(tmp_path: Path):
    one = elsewhere(tmp_path, {"server": "https://no-such-host.invalid:6443"})
    with pytest.raises(Unreachable, match="unknown host name"):
        one.get("/api/v1/nodes")
    one.close()


# -- TLS -------------------------------------------------------------------------------------------


def authority(server: ApiServer) -> str:
    assert server.ca is not None
    return b64encode(server.ca.read_bytes()).decode()


def test_a_certificate_of_another_authority_is_said_with_the_host(tmp_path: Path):
    with ApiServer(tls=True) as server, ApiServer(tls=True) as other:
        values = {"server": server.url, "certificate-authority-data": authority(other)}
        one = elsewhere(tmp_path, values)
        with pytest.raises(Unreachable) as caught:
            one.get("/api/v1/nodes")
        assert f"the TLS certificate of {server.url}" in caught.value.message
        assert "certificate-authority of context lab" in caught.value.hint
        one.close()


def test_a_certificate_of_another_name_is_not_accepted(tmp_path: Path):
    with ApiServer(tls=True) as server:
        values = {"server": server.url, "certificate-authority-data": authority(server)}
        one = elsewhere(tmp_path, values | {"tls-server-name": "elsewhere"})
        with pytest.raises(Unreachable, match="elsewhere"):
            one.get("/api/v1/nodes")
        one.close()
        one = elsewhere(tmp_path, values | {"tls-server-name": "kubernetes.default.svc"})
        assert one.get("/api/v1/nodes")["items"] == []
        one.close()


def test_who_wants_no_verification_gets_none_and_no_warning(tmp_path: Path):
    with ApiServer(tls=True) as server:
        one = elsewhere(tmp_path, {"server": server.url, "insecure-skip-tls-verify": True})
        assert one.get("/api/v1/nodes")["items"] == []
        one.close()


def test_tls_to_a_server_without(server: ApiServer, tmp_path: Path):
    one = elsewhere(tmp_path, {"server": server.url.replace("http:", "https:")})
    with pytest.raises(Unreachable, match="the TLS handshake failed"):
        one.get("/api/v1/nodes")
    one.close()


# -- servers that are none -------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"<html>Sign in", b"[1]", b"", b'{"a": \xff}', b"[" * 100_000])
@pytest.mark.usefixtures("no_collection")
def test_an_answer_that_is_no_object(tmp_path: Path, body: bytes):
    with answering(whole(body)) as url:
        one = elsewhere(tmp_path, {"server": url})
        with pytest.raises(Unreachable, match="not return a JSON object"):
            one.get("/api/v1/nodes")
        one.close()


def test_a_redirect_is_not_followed(tmp_path: Path):
    with answering(whole(b"", 302, Location="http://127.0.0.1:1/login")) as url:
        one = elsewhere(tmp_path, {"server": url})
        with pytest.raises(Unreachable, match="a redirect"):
            one.get("/api/v1/nodes")
        one.close()


def test_a_refusal_that_is_no_status(tmp_path: Path):
    with answering(whole(b"bad \x1b[2J gateway", 502)) as url:
        one = elsewhere(tmp_path, {"server": url})
        with pytest.raises(ClusterRefusal, match=r"bad \?\[2J gateway \(HTTP 502\)") as caught:
            one.get("/api/v1/nodes")
        assert caught.value.status == 502
        one.close()


def test_an_answer_that_is_too_large_names_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kubernetes_http, "MAX_BYTES", 1_000)
    with answering(whole(b'{"a":"' + b"x" * 2_000 + b'"}')) as url:
        one = elsewhere(tmp_path, {"server": url})
        with pytest.raises(Unreachable, match="more than 1,000 bytes"):
            one.get("/api/v1/nodes")
        one.close()


def test_an_answer_that_is_cut(tmp_path: Path):
    def answer(handler: Exchange) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"a":')
        handler.close_connection = True

    with answering(answer) as url:
        one = elsewhere(tmp_path, {"server": url})
        with pytest.raises(Unreachable, match="the connection was closed"):
            one.get("/api/v1/nodes")
        one.close()


def test_an_answer_that_drips_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # What the whole answer may take is short, and not what its first byte may take.
    monkeypatch.setattr(kubernetes_http, "_SLOWEST", 0.03)
    ended = threading.Event()

    def answer(handler: Exchange) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        while not ended.wait(0.02):
            handler.wfile.write(b" ")
            handler.wfile.flush()

    with answering(answer) as url:
        one = elsewhere(tmp_path, {"server": url}, timeout=20)
        try:
            with pytest.raises(Unreachable, match=r"not complete after 0\.6 s"):
                one.get("/api/v1/nodes")
        finally:
            ended.set()
            one.close()


def test_a_kept_connection_that_was_closed_is_opened_again(tmp_path: Path):
    """The server closes each connection after an answer that did not say so."""

    def answer(handler: Exchange) -> None:
        whole(b"{}", Connection="keep-alive")(handler)
        handler.close_connection = True

    with answering(answer) as url:
        one = elsewhere(tmp_path, {"server": url})
        for _ in range(20):
            assert one.get("/api/v1/nodes") == {}
        one.close()


# -- proxies ---------------------------------------------------------------------------------------


def test_a_proxy_is_gone_through(server: ApiServer, tmp_path: Path):
    """A plain HTTP proxy, which gets the whole URL."""
    asked: list[str] = []

    def answer(handler: Exchange) -> None:
        asked.append(handler.path)
        whole(b'{"items": []}')(handler)

    with answering(answer) as proxy:
        one = elsewhere(tmp_path, {"server": "http://cluster.internal:1", "proxy-url": proxy})
        assert one.get("/api/v1/nodes") == {"items": []}
        one.close()
    assert asked == ["http://cluster.internal:1/api/v1/nodes"]


def test_a_proxy_that_is_not_there(tmp_path: Path):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{held.getsockname()[1]}"
        one = elsewhere(tmp_path, {"server": "http://cluster.internal:1", "proxy-url": gone})
        with pytest.raises(Unreachable, match="refused"):
            one.get("/api/v1/nodes")
        one.close()
