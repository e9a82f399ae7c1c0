"""The cluster's adapter against an API server: reading, watching, and being told no."""

from __future__ import annotations

import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynctl.errors import Unreachable
from dynctl.planes import kubernetes_http
from dynctl.planes.kubernetes_cluster import KubernetesCluster, open_cluster
from dynctl.ports import AccessQuestion, ClusterRefusal
from tests.dynctl.planes.kube_lab import PODS, bind, opened, pod, rule
from tests.kube.api_server import ApiServer

NOW = 1_700_000_000.0


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer(clock=lambda: NOW) as running:
        yield running


@pytest.fixture
def cluster(server: ApiServer, tmp_path: Path) -> Iterator[KubernetesCluster]:
    one = opened(server, tmp_path)
    yield one
    one.close()


def with_pods(server: ApiServer, count: int) -> None:
    for number in range(count):
        server.store.create(pod(f"w-{number:02}"))


def names(page: Any) -> list[str]:
    return [item["metadata"]["name"] for item in page["items"]]


# -- reading -------------------------------------------------------------------------------------


def test_what_it_is_called(server: ApiServer, tmp_path: Path):
    one = opened(server, tmp_path, context="west", namespace="lab")
    assert one.title == f"west ({server.url})"
    assert one.namespace == "lab"
    one.close()


def test_one_object(server: ApiServer, cluster: KubernetesCluster):
    with_pods(server, 1)
    assert cluster.get(f"{PODS}/w-00")["metadata"]["name"] == "w-00"


def test_the_clock_is_the_clusters(server: ApiServer, cluster: KubernetesCluster):
    assert cluster.now == pytest.approx(time.time(), abs=60)
    cluster.get("/api/v1/nodes")
    assert cluster.now == NOW


def test_a_list_comes_in_pages(server: ApiServer, cluster: KubernetesCluster):
    with_pods(server, 7)
    pages = list(cluster.pages(PODS, {"labelSelector": "!nobody"}, page=3))
    assert [names(page) for page in pages] == [
        ["w-00", "w-01", "w-02"],
        ["w-03", "w-04", "w-05"],
        ["w-06"],
    ]
    asked = server.requests[-1].query
    assert (asked["limit"], asked["labelSelector"]) == ("3", "!nobody")
    assert not any("dynctlRestarted" in page["metadata"] for page in pages)


def test_a_list_whose_token_expired_is_begun_again_once(
    server: ApiServer, cluster: KubernetesCluster
):
    with_pods(server, 4)
    server.faults.expire_continue(times=1)
    pages = list(cluster.pages(PODS, page=3))
    assert [len(names(page)) for page in pages] == [3, 3, 1]
    assert [page["metadata"].get("dynctlRestarted") for page in pages] == [None, True, None]


def test_a_list_whose_token_always_expires_is_given_up(
    server: ApiServer, cluster: KubernetesCluster
):
    with_pods(server, 4)
    server.faults.expire_continue(times=None)
    with pytest.raises(ClusterRefusal) as caught:
        list(cluster.pages(PODS, page=3))
    assert caught.value.status == 410


def test_several_threads_read_at_once(
    server: ApiServer, cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture
):
    with_pods(server, 20)
    found: list[int] = []

    def read() -> None:
        for _ in range(5):
            found.append(sum(len(names(page)) for page in cluster.pages(PODS, page=7)))

    threads = [threading.Thread(target=read) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [20] * 150
    assert not caplog.records


def test_log_lines(server: ApiServer, cluster: KubernetesCluster):
    with_pods(server, 1)
    server.logs["lab", "w-00", "main", False] = "one\nzwei ü\r\n\nlast"
    server.logs["lab", "w-00", "main", True] = "before\n"
    assert list(cluster.log_lines("lab", "w-00", "main")) == ["one", "zwei ü", "", "last"]
    assert list(cluster.log_lines("lab", "w-00", "main", previous=True)) == ["before"]
    assert list(cluster.log_lines("lab", "w-00", "main", max_bytes=6)) == ["one", "zw"]


def test_a_log_that_is_not_there(server: ApiServer, cluster: KubernetesCluster):
    with_pods(server, 1)
    with pytest.raises(ClusterRefusal, match="previous terminated container"):
        list(cluster.log_lines("lab", "w-00", "main", previous=True))


# -- access --------------------------------------------------------------------------------------


def test_what_somebody_may_do(tmp_path: Path):
    with ApiServer(rbac=True, tls=True) as server:
        server.add_user("looker-token", "looker")
        bind(server, "looker", rule("", "nodes pods/exec", "get list create"))
        mine, admin = opened(server, tmp_path, token="looker-token"), opened(server, tmp_path / "a")
        assert mine.allowed(AccessQuestion("list", "nodes"))
        assert not mine.allowed(AccessQuestion("watch", "nodes"))
        assert mine.allowed(AccessQuestion("create", "pods/exec", namespace="lab"))
        assert not mine.allowed(AccessQuestion("create", "pods/portforward", namespace="lab"))
        graphs = AccessQuestion("list", "dynamographdeployments", "nvidia.com")
        assert not admin.allowed(graphs, user="looker")
        assert admin.allowed(AccessQuestion("get", "nodes"), user="looker")
        assert admin.allowed(graphs, user="looker", groups=("system:masters",))
        inside = AccessQuestion("create", "pods/exec", namespace="lab")
        assert admin.allowed(inside, user="looker")
        posts = {request.path.rpartition("/")[2] for request in server.requests}
        assert posts == {
            "selfsubjectaccessreviews",
            "subjectaccessreviews",
            "localsubjectaccessreviews",
        }
        mine.close()
        admin.close()


def test_what_is_forbidden_is_a_refusal_with_the_servers_words(tmp_path: Path):
    with ApiServer(rbac=True) as server:
        server.add_user("poor-token", "poor")
        poor = opened(server, tmp_path, token="poor-token")
        with pytest.raises(ClusterRefusal) as caught:
            poor.get("/api/v1/nodes")
        assert caught.value.forbidden
        assert caught.value.reason == "Forbidden"
        assert 'User "poor" cannot list resource "nodes"' in caught.value.message
        poor.close()


def test_an_expired_token_is_unreachable_and_says_how_to_log_in(tmp_path: Path):
    with ApiServer(rbac=True) as server:
        gone = opened(server, tmp_path, token="a-token-of-yesterday", context="west")
        with pytest.raises(Unreachable) as caught:
            gone.get("/api/v1/nodes")
        assert "does not accept the credentials of context west" in caught.value.message
        assert "kubectl --context west auth whoami" in caught.value.hint
        assert "yesterday" not in f"{caught.value.message}{caught.value.hint}"
        gone.close()


def test_a_refused_token_is_renewed_by_its_plugin(tmp_path: Path):
    """As after a restart of the API server with new keys."""
    with ApiServer(rbac=True) as server:
        path = server.kubeconfig(tmp_path / "kubeconfig")
        command = tmp_path / "plugin"
        status = '{"token": "\'$(cat token)\'"}'
        kind = '"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"'
        command.write_text(
            f"#!/bin/sh\ncd {tmp_path}\nprintf '%s' '{{{kind}, \"status\": {status}}}'\n"
        )
        command.chmod(0o755)
        (tmp_path / "token").write_text("old")
        told = yaml.safe_load(path.read_text())
        told["users"][0]["user"] = {
            "exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(command)}
        }
        path.write_text(yaml.safe_dump(told))
        one = open_cluster(kubeconfig=path, context=None, timeout=10)
        (tmp_path / "token").write_text("admin")
        assert one.get("/api/v1/nodes")["items"] == []
        assert [request.status for request in server.requests] == [401, 200]
        one.close()


# -- refusals and silence ------------------------------------------------------------------------


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
    with pytest.raises(Unreachable, match=r"no answer within 0\.3 s"):
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
    with pytest.raises(Unreachable, match="its name is not known"):
        one.get("/api/v1/nodes")
    one.close()


def elsewhere(folder: Path, cluster: dict[str, Any], timeout: float = 10) -> KubernetesCluster:
    told = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "contexts": [{"name": "lab", "context": {"cluster": "c"}}],
        "current-context": "lab",
    }
    path = folder / "elsewhere"
    path.write_text(yaml.safe_dump(told))
    return open_cluster(kubeconfig=path, context=None, timeout=timeout)


# -- TLS -----------------------------------------------------------------------------------------


def authority(server: ApiServer) -> str:
    assert server.ca is not None
    return b64encode(server.ca.read_bytes()).decode()


def test_a_certificate_of_another_authority_is_said_with_the_host(tmp_path: Path):
    with ApiServer(tls=True) as server, ApiServer(tls=True) as other:
        told = {"server": server.url, "certificate-authority-data": authority(other)}
        one = elsewhere(tmp_path, told)
        with pytest.raises(Unreachable) as caught:
            one.get("/api/v1/nodes")
        assert f"the TLS certificate of {server.url}" in caught.value.message
        assert "certificate-authority of context lab" in caught.value.hint
        one.close()


def test_a_certificate_of_another_name_is_not_accepted(tmp_path: Path):
    with ApiServer(tls=True) as server:
        told = {"server": server.url, "certificate-authority-data": authority(server)}
        one = elsewhere(tmp_path, told | {"tls-server-name": "elsewhere"})
        with pytest.raises(Unreachable, match="elsewhere"):
            one.get("/api/v1/nodes")
        one.close()
        one = elsewhere(tmp_path, told | {"tls-server-name": "kubernetes.default.svc"})
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


# -- servers that are none -----------------------------------------------------------------------


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server that answers every GET like this; its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def whole(body: bytes, status: int = 200, **headers: str) -> Callable[[Any], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Connection": "close", **headers}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@pytest.mark.parametrize("body", [b"<html>Sign in", b"[1]", b"", b'{"a": \xff}', b"[" * 100_000])
def test_an_answer_that_is_no_object(tmp_path: Path, body: bytes):
    with answering(whole(body)) as url:
        one = elsewhere(tmp_path, {"server": url})
        with pytest.raises(Unreachable, match="no JSON object"):
            one.get("/api/v1/nodes")
        one.close()


def test_a_redirect_is_not_followed(tmp_path: Path):
    with answering(whole(b"", 302, Location="http://127.0.0.1:1/login")) as url:
        one = elsewhere(tmp_path, {"server": url})
        with pytest.raises(Unreachable, match="with a redirect"):
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
        with pytest.raises(Unreachable, match="over 1,000 bytes"):
            one.get("/api/v1/nodes")
        one.close()


def test_an_answer_that_is_cut(tmp_path: Path):
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"a":')
        handler.close_connection = True

    with answering(answer) as url:
        one = elsewhere(tmp_path, {"server": url})
        with pytest.raises(Unreachable, match="the connection was cut"):
            one.get("/api/v1/nodes")
        one.close()


def test_an_answer_that_drips_is_given_up(tmp_path: Path):
    ended = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        while not ended.wait(0.02):
            handler.wfile.write(b" ")
            handler.wfile.flush()

    with answering(answer) as url:
        one = elsewhere(tmp_path, {"server": url}, timeout=0.1)
        try:
            with pytest.raises(Unreachable, match=r"not complete after 0\.6 s"):
                one.get("/api/v1/nodes")
        finally:
            ended.set()
            one.close()


def test_a_kept_connection_that_was_closed_is_opened_again(tmp_path: Path):
    """The server closes each connection after an answer that did not say so."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        whole(b"{}", Connection="keep-alive")(handler)
        handler.close_connection = True

    with answering(answer) as url:
        one = elsewhere(tmp_path, {"server": url})
        for _ in range(20):
            assert one.get("/api/v1/nodes") == {}
        one.close()


# -- watching ------------------------------------------------------------------------------------


def test_a_watch_tells_changes_from_a_version_on(server: ApiServer, cluster: KubernetesCluster):
    with_pods(server, 1)
    version = str(server.store.revision)
    watch = cluster.watch(PODS, version, {"labelSelector": "app!=other"})
    server.store.create(pod("w-01"))
    server.store.patch_merge("pods", "w-01", {"metadata": {"labels": {"a": "b"}}}, "lab")
    server.store.delete("pods", "w-00", "lab")
    seen = [next(watch) for _ in range(3)]
    assert [(one.kind, one.object["metadata"]["name"]) for one in seen] == [
        ("ADDED", "w-01"),
        ("MODIFIED", "w-01"),
        ("DELETED", "w-00"),
    ]
    asked = next(one.query for one in server.requests if one.query.get("watch"))
    assert asked["resourceVersion"] == version
    assert asked["labelSelector"] == "app!=other"
    assert int(asked["timeoutSeconds"]) > 0
    assert asked["allowWatchBookmarks"] == "true"


def test_a_watch_ends_quietly_when_the_server_ends_it(
    server: ApiServer, cluster: KubernetesCluster
):
    told = list(cluster.watch(PODS, str(server.store.revision), {"timeoutSeconds": "1"}))
    assert [one.kind for one in told] == ["BOOKMARK"]


def test_a_version_that_is_too_old_is_410(server: ApiServer, cluster: KubernetesCluster):
    server.faults.expire_watch(PODS)
    with pytest.raises(ClusterRefusal) as caught:
        next(cluster.watch(PODS, "1"))
    assert caught.value.status == 410
    assert caught.value.reason == "Expired"


def test_a_watch_that_is_cut_is_unreachable(server: ApiServer, cluster: KubernetesCluster):
    watch = cluster.watch(PODS, str(server.store.revision))
    with_pods(server, 1)
    assert next(watch).kind == "ADDED"
    server.faults.cut_watches()
    with pytest.raises(Unreachable, match="the connection was cut"):
        next(watch)


def test_a_silent_watch_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from dynctl.planes import kubernetes_cluster

    monkeypatch.setattr(kubernetes_cluster, "_WATCH_SLACK_S", 0.2)
    ended = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        ended.wait(20)

    with answering(answer) as url:
        one = elsewhere(tmp_path, {"server": url})
        try:
            with pytest.raises(Unreachable, match="no answer within"):
                next(one.watch(PODS, "1", {"timeoutSeconds": "0"}))
        finally:
            ended.set()
            one.close()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([b'{"type":"ADDED","obj'], "in the middle of an event"),
        ([b"<html>\n"], "no JSON object"),
        ([b"x" * 600, b"x" * 600], "is over 1,000 bytes"),
    ],
)
def test_a_watch_of_nonsense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[bytes], words: str
):
    from dynctl.planes import kubernetes_cluster

    monkeypatch.setattr(kubernetes_cluster, "MAX_LINE", 1_000)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for line in lines:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        handler.wfile.write(b"0\r\n\r\n")

    with answering(answer) as url:
        one = elsewhere(tmp_path, {"server": url})
        with pytest.raises(Unreachable, match=words):
            list(one.watch(PODS, "1"))
        one.close()


# -- closing -------------------------------------------------------------------------------------


def test_close_ends_a_watch_that_waits(server: ApiServer, tmp_path: Path):
    one = opened(server, tmp_path)
    before = set(threading.enumerate())
    ends: list[BaseException] = []
    waiting = threading.Event()

    def follow() -> None:
        try:
            for _ in one.watch(PODS, str(server.store.revision)):
                waiting.set()
        except Unreachable as error:
            ends.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    until(lambda: any(one.query.get("watch") for one in server.requests))
    with_pods(server, 1)
    assert waiting.wait(10)
    one.close()
    thread.join(10)
    assert not thread.is_alive()
    assert "closed by dynctl itself" in str(ends[0])
    assert set(threading.enumerate()) <= before
    with pytest.raises(Unreachable, match="closed by dynctl itself"):
        one.get("/api/v1/nodes")


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_close_leaves_no_connection(server: ApiServer, tmp_path: Path):
    port = int(server.url.rpartition(":")[2])
    one = opened(server, tmp_path)
    one.get("/api/v1/nodes")
    assert connections_to(port)
    one.close()
    assert not connections_to(port)


def connections_to(port: int) -> list[str]:
    """Those that this process holds as their client."""
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state = line.split()[:4]
        if remote.endswith(f":{port:04X}") and state == "01":
            found.append(local)
    return found


def test_a_proxy_is_gone_through(server: ApiServer, tmp_path: Path):
    """A plain HTTP proxy, which is told the whole URL."""
    asked: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
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
