"""The cluster's adapter against an API server: reading, asking who may, watching."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dynctl.adapters.kubernetes import cluster as cluster_module
from dynctl.adapters.kubernetes.cluster import KubernetesCluster, open_cluster
from dynctl.adapters.ports import AccessReview, ClusterRefusal
from dynctl.base.errors import Unreachable
from tests.dynctl.adapters.kube_lab import NOW, PODS, bind, names, opened, pod, rule, with_pods
from tests.dynctl.adapters.kube_stand_ins import answering, elsewhere
from tests.http_servers import Exchange
from tests.kube.api_server import ApiServer
from tests.waiting import patience

# -- reading ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("repeated", [True, False])
def test_a_list_without_an_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeated: bool
):
    monkeypatch.setattr(cluster_module, "MOST_PAGES", 5)
    served: list[str] = []

    def respond(handler: Exchange) -> None:
        served.append(handler.path)
        token = "again" if repeated else f"page-{len(served)}"
        body = json.dumps({"metadata": {"continue": token}, "items": []}).encode()
        handler.send_response(200)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    with answering(respond) as url:
        one = elsewhere(tmp_path, {"server": url})
        with pytest.raises(Unreachable, match="no end" if repeated else "more than 5 pages"):
            list(one.pages(PODS))
        one.close()
    assert len(served) == (2 if repeated else 5)


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


# -- access ----------------------------------------------------------------------------------------


def test_what_somebody_may_do(tmp_path: Path):
    with ApiServer(rbac=True, tls=True) as server:
        server.add_user("looker-token", "looker")
        bind(server, "looker", rule("", "nodes pods/exec", "get list create"))
        mine, admin = opened(server, tmp_path, token="looker-token"), opened(server, tmp_path / "a")
        assert mine.allowed(AccessReview("list", "nodes"))
        assert not mine.allowed(AccessReview("watch", "nodes"))
        assert mine.allowed(AccessReview("create", "pods/exec", namespace="lab"))
        assert not mine.allowed(AccessReview("create", "pods/portforward", namespace="lab"))
        graphs = AccessReview("list", "dynamographdeployments", "nvidia.com")
        assert not admin.allowed(graphs, user="looker")
        assert admin.allowed(AccessReview("get", "nodes"), user="looker")
        assert admin.allowed(graphs, user="looker", groups=("system:masters",))
        inside = AccessReview("create", "pods/exec", namespace="lab")
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
        values = yaml.safe_load(path.read_text())
        values["users"][0]["user"] = {
            "exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(command)}
        }
        path.write_text(yaml.safe_dump(values))
        one = open_cluster(kubeconfig=path, context=None, timeout=10)
        (tmp_path / "token").write_text("admin")
        assert one.get("/api/v1/nodes")["items"] == []
        assert [request.status for request in server.requests] == [401, 200]
        one.close()


# -- watching --------------------------------------------------------------------------------------


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
    values = list(cluster.watch(PODS, str(server.store.revision), {"timeoutSeconds": "1"}))
    assert [one.kind for one in values] == ["BOOKMARK"]


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
    with pytest.raises(Unreachable, match="the connection was closed"):
        next(watch)


def test_a_silent_watch_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from dynctl.adapters.kubernetes import cluster as kubernetes_cluster

    monkeypatch.setattr(kubernetes_cluster, "_WATCH_SLACK_S", 0.2)
    ended = threading.Event()

    def answer(handler: Exchange) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        ended.wait(patience(20))

    with answering(answer) as url:
        one = elsewhere(tmp_path, {"server": url})
        try:
            with pytest.raises(Unreachable, match="no response within"):
                next(one.watch(PODS, "1", {"timeoutSeconds": "0"}))
        finally:
            ended.set()
            one.close()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([b'{"type":"ADDED","obj'], "ended within an event"),
        ([b"<html>\n"], "not return a JSON object"),
        ([b"x" * 600, b"x" * 600], "is over 1,000 bytes"),
    ],
)
def test_a_watch_of_nonsense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[bytes], words: str
):
    from dynctl.adapters.kubernetes import cluster as kubernetes_cluster

    monkeypatch.setattr(kubernetes_cluster, "MAX_LINE", 1_000)

    def answer(handler: Exchange) -> None:
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


# -- closing ---------------------------------------------------------------------------------------


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
    assert waiting.wait(patience(10))
    one.close()
    thread.join(patience(10))
    assert not thread.is_alive()
    assert "closed by dynctl itself" in str(ends[0])
    assert set(threading.enumerate()) <= before
    with pytest.raises(Unreachable, match="closed by dynctl itself"):
        one.get("/api/v1/nodes")


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patience(10)
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
