"""exec, logs and port-forward, by kubectl and by the official client."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import portforward, stream
from kubernetes.stream.ws_client import PortForward

from tests.kube.api_server import ApiServer, Ran
from tests.kube.objects.small import pod, running
from tests.kube.witness.conftest import Kubectl
from tests.waiting import patience

MOUNT = "etc/dynamo/topology"


@pytest.fixture
def worker(api_server: ApiServer, tmp_path: Path) -> ApiServer:
    """With a pod ``web`` that runs, and the files of a Downward API volume in it."""
    api_server.store.create(running(pod("web", node="n1")))
    mount = tmp_path / "root" / MOUNT
    (mount / "..2026_11_21").mkdir(parents=True)
    (mount / "..2026_11_21" / "zone").write_text("us-east-1a")
    (mount / "..data").symlink_to("..2026_11_21")
    (mount / "zone").symlink_to("..data/zone")
    (mount / "outside").symlink_to(tmp_path)
    api_server.exec_files["default", "web", "main"] = tmp_path / "root"
    return api_server


def test_kubectl_reads_a_file_through_the_symlinks_of_a_volume(worker: ApiServer, kubectl: Kubectl):
    assert kubectl("exec", "web", "--", "cat", f"/{MOUNT}/zone") == "us-east-1a"


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("/etc/none", "cat: /etc/none: No such file or directory"),
        (f"/{MOUNT}", f"cat: /{MOUNT}: Is a directory"),
        (f"/{MOUNT}/outside/kubeconfig", f"cat: /{MOUNT}/outside/kubeconfig: No such file"),
        ("/../kubeconfig", "cat: /../kubeconfig: No such file"),
    ],
)
def test_kubectl_hands_on_what_cat_complains_of(
    worker: ApiServer, kubectl: Kubectl, path: str, complaint: str
):
    done = kubectl.run("exec", "web", "--", "cat", path)
    assert done.returncode == 1
    assert complaint in done.stderr


def test_no_other_command_is_there(worker: ApiServer, kubectl: Kubectl):
    done = kubectl.run("exec", "web", "--", "sh", "-c", "id")
    assert done.returncode == 126
    assert 'exec: "sh": executable file not found' in done.stderr
    worker.exec_files["default", "web", "main"] = lambda command: Ran(
        " ".join(command).encode(), code=3
    )
    done = kubectl.run("exec", "web", "--", "sh", "-c", "id")
    assert (done.stdout, done.returncode) == ("sh -c id", 3)


def test_the_official_client_reads_files_of_any_size(
    worker: ApiServer, official: client.ApiClient, tmp_path: Path
):
    content = "".join(f"{n}\n" for n in range(60_000))
    (tmp_path / "root" / "big").write_text(content)
    session = stream(
        client.CoreV1Api(official).connect_get_namespaced_pod_exec,
        "web",
        "default",
        command=["cat", "/big", "/none"],
        stdout=True,
        stderr=True,
        _preload_content=False,
    )
    session.run_forever(timeout=10)
    assert session.read_stdout() == content
    assert session.read_stderr() == "cat: /none: No such file or directory\n"
    assert session.returncode == 1
    session.close()
    session.sock.shutdown()  # The client forgets its socket where the server closed first.


@pytest.mark.parametrize("protocol", ["v4.channel.k8s.io", "v5.channel.k8s.io"])
async def test_both_protocols_end_with_a_status_on_the_third_channel(
    worker: ApiServer, protocol: str
):
    import aiohttp

    url = f"{worker.url}/api/v1/namespaces/default/pods/web/exec"
    query = [("command", "cat"), ("command", "/none"), ("stdout", "true"), ("stderr", "true")]
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url, params=query, protocols=(protocol,)) as socket,
    ):
        assert socket.protocol == protocol
        error = await socket.receive_bytes()
        assert error == b"\x02cat: /none: No such file or directory\n"
        ended = await socket.receive_bytes()
    assert ended[0] == 3
    assert b'"causes":[{"reason":"ExitCode","message":"1"}]' in ended


def test_where_nothing_runs_nothing_is_executed(api_server: ApiServer, kubectl: Kubectl):
    api_server.store.create(pod("pending"))
    result = kubectl.refused("exec", "pending", "--", "cat", "/x")
    assert "pod pending does not have a host assigned" in result
    done = running(pod("done", node="n1"))
    done["status"]["phase"] = "Failed"
    api_server.store.create(done)
    result = kubectl.refused("exec", "done", "--", "cat", "/x")
    assert "cannot exec into a container in a completed pod; current phase is Failed" in result
    crashed = running(pod("crashed", node="n1"))
    crashed["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    api_server.store.create(crashed)
    assert 'container not found ("main")' in kubectl.refused("exec", "crashed", "--", "cat", "/x")


def two_containers() -> dict:
    body = pod("two", node="n1")
    body["spec"]["containers"].append({"name": "side", "image": "x"})
    return running(body)


def test_of_several_containers_one_must_be_named(api_server: ApiServer, official: client.ApiClient):
    api_server.store.create(two_containers())
    api_server.logs["default", "two", "side", False] = "hello\n"
    core = client.CoreV1Api(official)
    with pytest.raises(ApiException, match="a container name must be specified for pod two"):
        core.read_namespaced_pod_log("two", "default")
    with pytest.raises(ApiException, match="container other is not valid for pod two"):
        core.read_namespaced_pod_log("two", "default", container="other")
    assert core.read_namespaced_pod_log("two", "default", container="side") == "hello\n"


def test_logs_of_now_and_before_by_their_end_and_by_size(worker: ApiServer, kubectl: Kubectl):
    result = kubectl.refused("logs", "web", "--previous")
    assert 'previous terminated container "main" in pod "web" not found' in result
    worker.logs["default", "web", "main", False] = "one\ntwo\nthree\n"
    worker.logs["default", "web", "main", True] = "Exiting.\n"
    assert kubectl("logs", "web") == "one\ntwo\nthree\n"
    assert kubectl("logs", "web", "--tail=2") == "two\nthree\n"
    assert kubectl("logs", "web", "--limit-bytes=5") == "one\nt"
    assert kubectl("logs", "web", "--previous") == "Exiting.\n"


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """Answers one request per connection with the request's first line, then closes."""

    def answer(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection:
                    line = connection.recv(65536).split(b"\r\n")[0]
                    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(line)
                    connection.sendall(head + line)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, args=(listening,))
        thread.start()
        yield ("127.0.0.1", listening.getsockname()[1])
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def finish(forward: PortForward) -> None:
    """Leave neither the client's thread nor its socket behind, which it does by itself."""
    forward.close()
    for thread in threading.enumerate():
        if thread.name.startswith("Kubernetes port forward proxy"):
            thread.join(timeout=patience(10))
            assert not thread.is_alive()
    forward.websocket.shutdown()


def test_the_official_client_talks_through_a_forwarded_port(
    worker: ApiServer, official: client.ApiClient, echo: tuple[str, int]
):
    worker.forwards["default", "web", 9090] = echo
    forward = portforward(
        client.CoreV1Api(official).connect_get_namespaced_pod_portforward,
        "web",
        "default",
        ports="9090",
    )
    connection = http.client.HTTPConnection("web", 9090)
    connection.sock = forward.socket(9090)
    connection.request("GET", "/metadata")
    assert connection.getresponse().read() == b"GET /metadata HTTP/1.1"
    connection.close()
    finish(forward)


def test_a_closed_port_is_an_error_on_its_error_channel(
    worker: ApiServer, official: client.ApiClient
):
    forward = portforward(
        client.CoreV1Api(official).connect_get_namespaced_pod_portforward,
        "web",
        "default",
        ports="9090",
    )
    remote = forward.socket(9090)
    remote.settimeout(10)
    assert remote.recv(1) == b""
    assert "error forwarding port 9090 to pod" in forward.error(9090)
    finish(forward)
