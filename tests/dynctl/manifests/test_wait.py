"""`dynctl topology wait`, on directories as the kubelet writes them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dynctl.base.worker_environment import TopologyEnvironmentError, names_a_file, wait_for_domain
from tests.dynctl.manifests.kubelet import DownwardApiVolume
from tests.waiting import patience

ZONE = "topology.kubernetes.io/zone"


class Waiting:
    """A clock that moves only while sleeping; ``at[n]`` happens during the n-th sleep."""

    def __init__(self, mount: Path, at: dict[int, Callable[[], object]] | None = None) -> None:
        self.mount, self.at = mount, at or {}
        self.time = 50.0
        self.sleeps: list[float] = []
        self.lines: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.time += seconds
        self.at.get(len(self.sleeps), lambda: None)()

    def run(self, timeout_s: float) -> dict[str, str]:
        return wait_for_domain(
            self.mount,
            "zone",
            now=lambda: self.time,
            sleep=self.sleep,
            log=lambda _, line: self.lines.append(line),
            timeout_s=timeout_s,
        )


def test_a_late_label_ends_the_wait(tmp_path: Path):
    volume = DownwardApiVolume(tmp_path / "topology", {"zone": ZONE, "rack": "nvidia.com/rack"})
    volume.write({"nvidia.com/rack": "r1"})
    waiting = Waiting(volume.mount, {2: lambda: volume.write({ZONE: "us-east-1a"})})
    assert waiting.run(5) == {"zone": "us-east-1a"}
    assert waiting.sleeps == [1.0, 1.0]
    assert waiting.lines == [
        f"Waiting for topology domain zone in {volume.mount} (5s remaining)...",
        f"Waiting for topology domain zone in {volume.mount} (4s remaining)...",
    ]


def test_a_directory_that_appears_late_is_found(tmp_path: Path):
    mount = tmp_path / "not" / "yet"

    def appear() -> None:
        DownwardApiVolume(mount, {"zone": ZONE}).write({ZONE: "b"})

    assert Waiting(mount, {1: appear}).run(3) == {"zone": "b"}


def test_the_last_wait_is_cut_to_the_time_left(tmp_path: Path):
    waiting = Waiting(tmp_path)
    with pytest.raises(TopologyEnvironmentError, match=r"was not populated within 2\.5s\."):
        waiting.run(2.5)
    assert waiting.sleeps == [1.0, 1.0, 0.5]


@pytest.mark.parametrize("name", ["", ".hidden", "..data", "a/b", "a\0b"])
def test_a_domain_must_be_a_visible_file(name: str):
    assert not names_a_file(name)


def test_the_value_is_the_answer(dynctl, tmp_path: Path):
    volume = DownwardApiVolume(tmp_path / "topology", {"zone": ZONE})
    volume.write({ZONE: "us-east-1a"})
    ran = dynctl("topology", "wait", "--path", volume.mount, "--domain", "zone")
    assert (ran.code, ran.out, ran.err) == (0, "us-east-1a\n", "")
    ran = dynctl("topology", "wait", "--path", volume.mount, "--domain", "zone", "-o", "json")
    assert ran.json == {
        "domain": "zone",
        "value": "us-east-1a",
        "path": str(volume.mount / "zone"),
        "kind": "TopologyValue",
        "schema": 1,
    }


def test_the_environment_of_the_worker_is_enough(dynctl, tmp_path: Path, monkeypatch):
    volume = DownwardApiVolume(tmp_path / "topology", {"rack": "nvidia.com/rack"})
    volume.write({"nvidia.com/rack": "r7"})
    monkeypatch.setenv("DYN_TOPOLOGY_MOUNT_PATH", str(volume.mount))
    monkeypatch.setenv("DYN_KV_TRANSFER_DOMAIN", "rack")
    assert dynctl("topology", "wait").out == "r7\n"


@pytest.mark.seed("dep-topology: startup failures: topology files not present")
@pytest.mark.parametrize("timeout", ["50ms", "0.05"])
def test_time_up_is_the_answer_no_in_the_worker_s_words(dynctl, tmp_path: Path, timeout: str):
    mount = tmp_path / "missing"
    ran = dynctl("topology", "wait", "--path", mount, "--domain", "zone", "--timeout", timeout)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.splitlines() == [
        f"Waiting for topology domain zone in {mount} (1s remaining)...",
        f"DYN_TOPOLOGY_ENABLED is set but topology file {mount}/zone was not populated within "
        "0.05s. This indicates the configured topology source did not publish the selected "
        "transfer domain. Exiting.",
    ]


def test_the_timeout_may_stand_before_the_command(dynctl, tmp_path: Path):
    ran = dynctl("--timeout", "0.05", "topology", "wait", "--path", tmp_path, "--domain", "zone")
    assert ran.code == 1
    assert "within 0.05s" in ran.err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xef\xbb\xbfus-east-1a\n", "has characters that are not printable"),
        (b"us-east-1a\0", "has characters that are not printable"),
        (b"us\teast", "has characters that are not printable"),
        (b"us-east-1a\nus-east-1b\n", "has 2 lines"),
    ],
)
def test_a_value_that_no_other_worker_can_have_ends_the_wait(
    dynctl, tmp_path: Path, content: bytes, says: str
):
    """As `verify --path` judges it."""
    (tmp_path / "zone").write_bytes(content)
    arguments = ("--path", str(tmp_path), "--domain", "zone")
    ran = dynctl("topology", "wait", *arguments, "--timeout", "30s")
    assert (ran.code, ran.out) == (1, "")
    assert says in ran.err
    assert says in dynctl("topology", "verify", *arguments).out


def test_what_cannot_be_read_ends_the_wait_at_once(dynctl, tmp_path: Path):
    (tmp_path / "zone").write_bytes(b"\xff\xfe")
    ran = dynctl("topology", "wait", "--path", tmp_path, "--domain", "zone", "--timeout", "1h")
    assert (ran.code, ran.out) == (1, "")
    assert "is not UTF-8 text" in ran.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no domain specified"),
        (["--domain", "../secret"], "expected the name of a file"),
        (["--domain", "zone", "--timeout", "soon"], "'soon': expected a duration of"),
        (["--domain", "zone", "--timeout", "0s"], "'0s': expected a duration of"),
        (["--domain", "zone", "--timeout", "25h"], "'25h': expected a duration of"),
    ],
)
def test_wrong_words_are_usage_problems(dynctl, arguments: list[str], says: str):
    ran = dynctl("topology", "wait", *arguments)
    assert ran.code == 2
    assert says in ran.err


@pytest.mark.seed("dep-topology: pod labels: init container")
def test_as_an_init_container_runs_it(tmp_path: Path):
    """A process of its own that waits for a label which comes while it runs."""
    volume = DownwardApiVolume(tmp_path / "topology", {"zone": ZONE})
    volume.write({})
    command = [sys.executable, "-m", "dynctl", "topology", "wait", "--path", str(volume.mount)]
    process = subprocess.Popen(
        [*command, "--domain", "zone", "--timeout", "60s"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("Waiting for topology domain zone in")
        volume.write({ZONE: "us-east-1b"})
        out, _ = process.communicate(timeout=patience(30))
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (0, "us-east-1b\n")
