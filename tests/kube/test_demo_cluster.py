"""The simulated clusters of `demo --cluster`: each trouble is found by the codes that it names.

Their document is made by the living cluster of these tests, and nothing leaves this host.
"""

from __future__ import annotations

import re
import shlex
import socket
from pathlib import Path

import pytest

from dynctl.adapters.kubernetes import demo_cluster
from dynctl.adapters.kubernetes.demo_cluster import HEALTHY, PREFIX
from dynctl.adapters.ports import Cluster, ClusterRefusal
from dynctl.base.errors import UsageProblem
from dynctl.documents.demo import ClusterTrouble
from dynctl.simulation.demo.troubles import cluster_troubles, trouble_names
from tests.kube import demo_cluster as making
from tests.kube.command_line import Run

TROUBLES = cluster_troubles().troubles
DECODE = "my-llm-decode-a-0"


@pytest.fixture(autouse=True)
def only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection to another host, and no cluster on this one."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        assert isinstance(address, str) or address[0] == "127.0.0.1", address  # type: ignore[index]
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", guarded)
    monkeypatch.setenv("KUBECONFIG", "/nowhere")


def simulated(name: str) -> Cluster:
    return demo_cluster.demo_cluster(PREFIX + name)


def test_the_document_is_what_the_living_cluster_makes() -> None:
    assert making.FILE.read_text() == making.text(), "python -m tests.kube.demo_cluster"


def test_every_trouble_has_a_text_and_a_state() -> None:
    assert trouble_names() == [*making.TROUBLES]
    assert demo_cluster.demo_contexts() == [PREFIX + name for name in (HEALTHY, *trouble_names())]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.name)
def test_a_trouble_is_found_by_its_own_codes(trouble: ClusterTrouble, dynctl: Run) -> None:
    ran = dynctl("topology", "verify", "--kube-context", PREFIX + trouble.name, "-o", "json")

    assert ran.reported == {*trouble.codes}
    assert ran.code == int(ran.json["summary"]["failed"] > 0)


def test_without_a_trouble_everything_passes(dynctl: Run) -> None:
    ran = dynctl("topology", "verify", "--kube-context", PREFIX + HEALTHY, "-o", "json")

    assert ran.code == 0
    assert (ran.reported, ran.json["summary"]["unread"]) == (set(), 0)


@pytest.mark.parametrize("width", [80, 200])
def test_the_commands_run_as_they_are_printed(width: int, dynctl: Run) -> None:
    listed = dynctl("demo", "--cluster", width=width)
    assert listed.code == 0
    assert all(len(line) <= width for line in listed.out.splitlines())
    for trouble in TROUBLES:
        assert re.search(rf"^{trouble.name}  {' '.join(trouble.codes)}$", listed.out, re.M)
    shown = dynctl("demo", "--cluster", "crash-loop", width=width)
    assert all(len(line) <= width for line in shown.out.splitlines())
    commands = [line for line in shown.out.splitlines() if line.startswith("dynctl ")]
    assert len(commands) == 4
    for command in commands:
        words = shlex.split(command)[1:]
        ran = dynctl(*words, *(["--once"] if words[0] == "top" else []), width=width)
        assert ran.code == int(words[0] == "topology"), ran.err


def test_no_command_is_too_long_for_a_narrow_terminal() -> None:
    assert max(len(command) for trouble in TROUBLES for command in trouble.commands) <= 80


def test_workers_and_top_show_the_zone_without_decode_workers(dynctl: Run) -> None:
    context = ("--discovery", "kubernetes", "--kube-context", "demo:missing-service")
    listed = dynctl("workers", "list", *context, "-o", "name")
    assert [name for name in listed.out.split() if "decode" in name] == [
        f"my-llm-decode-b-{number}" for number in range(3)
    ]
    assert "STRANDED" in dynctl("top", "--once", *context).out


def test_wrong_names_are_refused(dynctl: Run) -> None:
    ran = dynctl("demo", "--cluster", "crash")
    assert (ran.code, ran.error[0]) == (2, "crash: unknown trouble")
    ran = dynctl("demo", "crash-loop")
    assert (ran.code, ran.error[1]) == (2, "demo --cluster crash-loop")
    ran = dynctl("topology", "verify", "--kube-context", "demo:crash")
    assert (ran.code, ran.error[0]) == (2, "--kube-context demo:crash: unknown simulated cluster")
    ran = dynctl("topology", "sync", "--once", "--kube-context", "demo:healthy")
    assert (ran.code, ran.err.splitlines()[0]) == (
        2,
        "error: --kube-context demo:healthy: a simulated cluster, which is only read",
    )


def test_nothing_is_changed_there(dynctl: Run) -> None:
    words = ("thresholds", "set", "Qwen/Qwen3-0.6B", "--active-prefill-tokens", "5", "-y")
    ran = dynctl(*words, "--discovery", "kubernetes", "--kube-context", "demo:healthy")
    assert ran.code == 3
    assert "501: a simulated frontend serves and changes nothing" in ran.error[0]


# -- the port --------------------------------------------------------------------------------------


def names(cluster: Cluster, path: str, **query: str) -> list[str]:
    pages = cluster.pages(path, query, page=2)
    return [item["metadata"]["name"] for page in pages for item in page["items"]]


def test_lists_are_selected_and_come_in_pages() -> None:
    cluster = simulated(HEALTHY)
    pods = "/api/v1/namespaces/prod/pods"
    graph = "nvidia.com/dynamo-graph-deployment-name"
    assert len(names(cluster, pods)) == len(names(cluster, "/api/v1/pods")) == 9
    assert names(cluster, "/api/v1/namespaces/pro/pods") == []
    assert names(cluster, pods, fieldSelector=f"metadata.name={DECODE}") == [DECODE]
    assert len(names(cluster, pods, labelSelector=graph)) == 9
    assert len(names(cluster, pods, labelSelector=f"{graph} in (other,my-llm)")) == 9
    assert names(cluster, pods, labelSelector=f"{graph}=other") == []
    with pytest.raises(ClusterRefusal) as refused:
        names(cluster, "/api/v1/namespaces/prod/secrets")
    assert refused.value.missing


def test_pods_are_entered_as_on_a_cluster() -> None:
    cluster = simulated(HEALTHY)
    zone = "/etc/dynamo/topology/zone"
    entered = ("prod", DECODE, "main")
    assert cluster.read_file(*entered, zone, max_bytes=64) == b"us-east-1a"
    assert cluster.file_names(*entered, "/etc/dynamo/topology", max_bytes=64) == ("zone",)
    with pytest.raises(FileNotFoundError):
        cluster.read_file(*entered, "/etc/passwd", max_bytes=64)
    with pytest.raises(ClusterRefusal, match="not found"):
        cluster.read_file("prod", "other", "main", zone, max_bytes=64)
    assert next(cluster.log_lines(*entered, last=1)).endswith("serving endpoint generate")
    silent = ("prod", "my-llm-decode-b-1", "main")
    with pytest.raises(ClusterRefusal, match="error dialing backend"):
        simulated("stopped-kubelet").read_file(*silent, zone, max_bytes=64)


def test_a_watch_ends_with_the_cluster() -> None:
    cluster = simulated(HEALTHY)
    cluster.close()
    assert [*cluster.watch("/api/v1/nodes", "1")] == []


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UsageProblem, match="unknown simulated cluster"):
        simulated("no-such-trouble")


def test_the_document_has_no_address_that_a_host_can_have() -> None:
    addresses = re.findall(r"\b(\d+\.\d+\.\d+\.\d+)\b", Path(making.FILE).read_text())
    assert addresses
    assert all(address.startswith("192.0.2.") for address in addresses)
