"""Topology files in `dynctl topology verify`: in pods of a cluster, and with --path inside a pod;
and workers that register in a directory, without Kubernetes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynctl.wire.kubernetes.worker_metadata import worker_metadata
from tests.kube import deployment
from tests.kube.actors import Simulation, living
from tests.kube.command_line import Run
from tests.kube.deployment import is_worker

VERIFY = ("topology", "verify")
DECODE = "my-llm-decode-a-0"
POD = f"Pod {DECODE}.prod"
STRANGE = {
    "not UTF-8": (b"\xff\xfe\x00us-east-1a", "is not UTF-8"),
    "1 MiB": (b"x" * (1 << 20), "is larger than 4,096 bytes"),
    "escape": (b"us-east-1a\x1b[31m\n", "has characters that are not printable"),
    "nul": (b"us-east-1a\0", "has characters that are not printable"),
    "lines": (b"us-east-1a\nus-east-1b\n", "has 2 lines"),
    "empty": (b"", "is empty"),
    "blank": (b" \n\n", "is empty"),
}


# -- in the pods of a cluster ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Simulation]:
    """Only one worker's file changes, and every test writes it again."""
    with living() as sim:
        yield sim


@pytest.fixture
def write(
    cluster: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[bytes], None]:
    """What stands in the topology file of one worker."""
    path = cluster.viewer_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(path))
    file = cluster.sandbox(DECODE).root / "etc/dynamo/topology/zone"

    def writes(content: bytes) -> None:
        file.unlink()
        file.write_bytes(content)

    return writes


@pytest.mark.parametrize("kind", STRANGE)
def test_a_file_that_holds_no_value(write: Callable[[bytes], None], dynctl: Run, kind: str) -> None:
    content, says = STRANGE[kind]
    write(content)
    ran = dynctl(*VERIFY, "-o", "json")

    assert ran.code == 1
    assert ran.reported == {"DYT0503"}
    assert ran.values("DYT0503") == {POD: f"file zone {says}, the pod label is us-east-1a"}
    [row] = [one for one in ran.json["chain"] if one["worker"] == DECODE]
    assert (row["first_break"], row["file"]["state"]) == ("file", "missing")


@pytest.mark.parametrize("value", ["us-east-1b", '"; rm -rf / #$(x)`', "Zürich", "x" * 63, "-1"])
def test_a_file_with_another_value(write: Callable[[bytes], None], dynctl: Run, value: str) -> None:
    write(value.encode())
    ran = dynctl(*VERIFY, "-o", "json")
    screen = dynctl(*VERIFY, width=200).out

    assert ran.code == 1
    assert ran.reported == {"DYT0504", "DYT0802"}
    assert ran.values("DYT0504") == {POD: f"file zone has {value}, the pod label us-east-1a"}
    assert f"!={value}" in screen


def test_a_file_with_blanks_around_its_value(write: Callable[[bytes], None], dynctl: Run) -> None:
    write(b"  us-east-1a \n")

    assert dynctl(*VERIFY).code == 0


def test_values_that_look_odd_and_are_labels(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with living(zones=("UPPER.Case-9", "0")) as sim:
        path = sim.viewer_kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(path))
        ran = dynctl(*VERIFY, "-o", "json", "--exec", "all")

    assert ran.code == 0
    assert ran.reported == set()
    assert {row["taint"]["value"] for row in ran.json["chain"]} == {"UPPER.Case-9", "0"}


# -- from inside one pod ---------------------------------------------------------------------------


def mount(folder: Path, files: Mapping[str, bytes]) -> Path:
    """As the kubelet lays a Downward API volume out: symlinks to ``..data``, itself a symlink."""
    data = folder / "..2026_11_21_12_00_00.0001"
    data.mkdir(parents=True)
    (folder / "..data").symlink_to(data.name)
    for name, content in files.items():
        (data / name).write_bytes(content)
        (folder / name).symlink_to(f"..data/{name}")
    return folder


def findings(ran: Any) -> dict[str, list[str]]:
    return {code: [*ran.values(code).values()] for code in sorted(ran.reported)}


def test_a_mount_with_its_value(dynctl: Run, tmp_path: Path) -> None:
    path = mount(tmp_path / "topology", {"zone": b"us-east-1a"})
    ran = dynctl(*VERIFY, "--path", path, "--domain", "zone", "-o", "json")

    assert (ran.code, ran.err) == (0, "")
    assert ran.json["sources"] == [f"mount {path}"]
    assert ran.checks["DYT0503"]["message"] == "zone=us-east-1a"
    assert {code for code, one in ran.checks.items() if one["state"] == "pass"} == {
        "DYT0503",
        "DYT0505",
    }
    assert ran.json["chain"] == []


def test_the_domain_is_that_of_the_environment(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = mount(tmp_path / "topology", {"zone": b"us-east-1a"})
    monkeypatch.setenv("DYN_KV_TRANSFER_DOMAIN", "rack")
    ran = dynctl(*VERIFY, "--path", path, "-o", "json")

    assert ran.code == 1
    assert findings(ran) == {
        "DYT0503": ["file rack does not exist"],
        "DYT0505": ["zone in addition to rack"],
    }


@pytest.mark.parametrize("kind", STRANGE)
def test_a_mount_without_a_value(dynctl: Run, tmp_path: Path, kind: str) -> None:
    content, says = STRANGE[kind]
    path = mount(tmp_path / "topology", {"zone": content})
    ran = dynctl(*VERIFY, "--path", path, "--domain", "zone", "-o", "json")

    assert ran.code == 1
    assert findings(ran) == {"DYT0503": [f"file zone {says}"]}


def test_odd_entries_are_passed_over(dynctl: Run, tmp_path: Path) -> None:
    path = mount(tmp_path / "topology", {"zone": b"us-east-1a", "host": b""})
    (path / "folder").mkdir()
    (path / "dangling").symlink_to("nowhere")
    (path / ".hidden").write_text("value")
    os.mkfifo(path / "pipe")
    ran = dynctl(*VERIFY, "--path", path, "--domain", "zone", "-o", "json")

    assert ran.code == 0
    assert ran.reported == set()


def test_other_domains_beside_the_one_that_transfers(dynctl: Run, tmp_path: Path) -> None:
    files = {"zone": b"us-east-1a", "rack": b"r1", "odd": b"\xff"}
    path = mount(tmp_path / "topology", files)
    ran = dynctl(*VERIFY, "--path", path, "--domain", "zone", "-o", "json")

    assert ran.code == 0
    assert findings(ran) == {"DYT0505": ["odd, rack in addition to zone"]}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "the directory does not exist"),
        (lambda path: path.write_text("us-east-1a"), "not a directory"),
        (lambda path: path.mkdir(), "file zone does not exist"),
    ],
    ids=["nothing", "a file", "empty"],
)
def test_a_directory_that_is_not_as_it_should_be(
    dynctl: Run, tmp_path: Path, make: Callable[[Path], object], says: str
) -> None:
    path = tmp_path / "topology"
    make(path)
    ran = dynctl(*VERIFY, "--path", path, "--domain", "zone", "-o", "json")

    assert ran.code == 1
    assert findings(ran) == {"DYT0503": [says]}
    assert "dynctl topology" in ran.checks["DYT0503"]["findings"][0]["fix"]


def test_a_directory_that_cannot_be_read(dynctl: Run, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    ran = dynctl(*VERIFY, "--path", loop)

    assert ran.code == 3
    assert ran.error[0].startswith(f"--path {loop}: not readable: ")


def test_a_mount_needs_no_cluster(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "gone"))
    path = mount(tmp_path / "topology", {"zone": b"us-east-1a"})

    assert dynctl(*VERIFY, "--path", path).code == 0


# -- workers that register in a directory ----------------------------------------------------------


def encoded(name: str) -> str:
    """As Dynamo's file backend writes a key: all but letters and digits as %XX."""
    return "".join(
        chr(byte) if chr(byte).isalnum() and byte < 128 else f"%{byte:02X}"
        for byte in name.encode()
    )


def register(root: Path, change: Callable[[Any], None] = lambda config: None) -> Path:
    """The workers of the healthy deployment, whose model cards ``change`` may spoil."""
    for pod in deployment.healthy(discovery="etcd"):
        if pod["kind"] == "Pod" and is_worker(pod):
            body = deployment.registration(pod)
            change(deployment.card_config(body))
            for key, value in worker_metadata(body).entries():
                version, bucket, name = key.split("/", 2)
                path = root / version / bucket / encoded(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(value)
    return root


def test_card_taint_and_capacity_without_kubernetes(dynctl: Run, tmp_path: Path) -> None:
    root = register(tmp_path / "kv")
    files = ("--discovery", "file", "--file-kv", root, "--dyn-namespace", "*")
    ran = dynctl(*VERIFY, *files, "-o", "json")

    assert (ran.code, ran.err) == (0, "")
    assert ran.json["sources"] == [f"file {root}: 12 workers"]
    sections = [part["name"] for part in ran.json["sections"]]
    assert sections == ["model cards", "domain capacity"]
    assert ran.checks["DYT0801"]["message"] == "12 of 12 workers"
    assert ran.checks["DYT0901"]["message"].startswith("us-east-1a 2 prefill 4 decode")
    for row in ran.json["chain"]:
        assert (row["card"]["state"], row["taint"]["state"]) == ("same", "same")
        assert row["node"]["why"] == "no cluster was read"


@pytest.mark.seed("router-topology: troubleshooting: no topology metadata")
def test_a_card_without_taints_is_found_without_kubernetes(dynctl: Run, tmp_path: Path) -> None:
    root = register(tmp_path / "kv", lambda config: config.update(taints=[]))
    files = ("--discovery", "file", "--file-kv", root, "--dyn-namespace", "*")
    ran = dynctl(*VERIFY, *files, "-o", "json")

    assert ran.code == 1
    assert "DYT0804" in ran.reported


def test_a_registry_without_workers(dynctl: Run, tmp_path: Path) -> None:
    root = register(tmp_path / "kv")
    (tmp_path / "empty").mkdir()
    other = dynctl(*VERIFY, "--file-kv", root, "--dyn-namespace", "dynamo")
    empty = dynctl(*VERIFY, "--file-kv", tmp_path / "empty")
    shutil.rmtree(root)
    gone = dynctl(*VERIFY, "--file-kv", root)

    assert other.code == empty.code == gone.code == 3
    assert other.error[0] == f"file {root}: no worker is registered in Dynamo namespace dynamo"
    assert "other namespaces: prod-my-llm" in other.error[1]
    assert empty.error[0].endswith("no worker is registered in Dynamo namespace dynamo")
    assert gone.error[0].startswith(f"cannot read the directory {root}")
