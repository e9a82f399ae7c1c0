"""A disk that is full, a process without descriptors, a clock that jumps, a suspended machine.

Two simulated engines behind our frontend, without a Dynamo.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.dynamo.fleet import TINY_MODEL
from tests.dynamo.ours import FOREIGN, OurFrontend, frontend_of, wait
from tests.dynamo.processes import Process, ProcessGroup
from tests.planes.traffic import Scores
from tests.ports import free_port
from tests.waiting import patience, until_now

FEW_DESCRIPTORS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
"""
CLOCK = """
import mmap, os, struct, time
file = open(os.environ["SHIFTED_CLOCK"], "rb")
shared = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + struct.unpack("d", shared)[0]
time.time_ns = lambda: real_ns() + int(struct.unpack("d", shared)[0] * 1e9)
"""


@dataclass
class Engines:
    directory: Path
    processes: list[Process]
    urls: list[str]

    @contextmanager
    def served(
        self, *options: str, variables: Mapping[str, str] | None = None
    ) -> Iterator[OurFrontend]:
        """A frontend of both, with these options and variables."""
        arguments = [text for url in self.urls for text in ("--worker", url)]
        arguments += ["--model-path", str(TINY_MODEL), *options]
        with frontend_of(self.directory, "tiny", set(), arguments, variables or {}) as frontend:
            wait(frontend, lambda: len(frontend.ready()) == 2, "both engines")
            yield frontend


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    directory = tmp_path_factory.mktemp("engines")
    group = ProcessGroup(directory)
    processes, urls = [], []
    try:
        for name in ("a", "b"):
            port, events = free_port(), free_port()
            command = [sys.executable, "-m", "dynctl", "serve", "engine", "--name", name]
            command += ["--model", "tiny", "--model-path", str(TINY_MODEL), "--port", str(port)]
            command += ["--kv-events", f"tcp://127.0.0.1:{events}", "--speedup-ratio", "10"]
            processes.append(group.start(f"engine-{name}", command, clean_environment()))
            urls.append(f"http://127.0.0.1:{port}")
        yield Engines(directory, processes, urls)
    finally:
        group.close()


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 3 MiB, of its own."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write a file until its disk is full."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1024))


def codes(frontend: OurFrontend) -> set[str]:
    return {code for code, _ in frontend.conditions()}


def test_the_disk_of_a_recording_is_full(engines: Engines, tmp_path: Path, scores: Scores) -> None:
    """Serving goes on, a condition names the file, and the recording goes on with room."""
    with small_disk(tmp_path / "disk") as disk:
        record = disk / "recording"
        other = disk / "other"
        options = ("--record", str(record), "--record-max-bytes", "1MiB")
        with (
            engines.served(*options) as frontend,
            scores.traffic("the disk of the recording is full", frontend) as requests,
        ):
            fill(other)
            wait(frontend, lambda: "BACKGROUND_TASK_FAILED" in codes(frontend), "the condition")
            subject = ("BACKGROUND_TASK_FAILED", str(record))
            assert "no space is left" in frontend.conditions()[subject]
            other.unlink()
            wait(frontend, lambda: not codes(frontend), "the end of the condition")
            wait(frontend, lambda: record.stat().st_size > 0, "a new recording")
        assert not requests.lost, requests.lost[:3]


def test_the_disk_of_a_snapshot_is_full(tmp_path: Path) -> None:
    """The last snapshot stays, a condition names it, and the next one is written with room."""
    group, port, refused = ProcessGroup(tmp_path), free_port(), "SNAPSHOT_NOT_WRITTEN"
    client = httpx.Client(
        base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=patience(10)
    )

    def register(instance_id: int) -> None:
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        body = {"instance_id": instance_id, "endpoint": endpoint, "model_name": "tiny"}
        client.post("/register", json={**body, "block_size": 16}).raise_for_status()

    with small_disk(tmp_path / "disk") as disk:
        snapshot = disk / "snapshots" / "index.snapshot"
        command = [sys.executable, "-m", "dynctl", "serve", "indexer", "--port", str(port)]
        command += ["--snapshot", str(snapshot.parent), "--snapshot-interval", "0.2s"]
        try:
            process = group.start("indexer", command, clean_environment())
            until_now(snapshot.exists, 30)
            before = snapshot.read_bytes()
            fill(disk / "other")
            register(1)
            until_now(lambda: refused in client.get("/metrics").text, 30)
            assert f"{snapshot}: no space is left on its device" in process.tail()
            assert snapshot.read_bytes() == before
            (disk / "other").unlink()
            until_now(lambda: refused not in client.get("/metrics").text, 30)
            assert snapshot.read_bytes() != before
            assert list(snapshot.parent.iterdir()) == [snapshot]
        finally:
            group.close()
            client.close()


def test_the_disk_of_contexts_is_full(tmp_path: Path) -> None:
    """The file is as it was."""

    def add(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dynctl", "context", "add", name]
        return subprocess.run(
            [*command, "--frontend", "http://127.0.0.1:1"],
            env={**clean_environment(), "XDG_CONFIG_HOME": str(tmp_path / "disk")},
            capture_output=True,
            text=True,
            check=False,
            timeout=patience(60),
        )

    with small_disk(tmp_path / "disk") as disk:
        assert add("first").returncode == 0
        file = disk / "dynctl" / "config.toml"
        before = file.read_bytes()
        fill(disk / "other")
        refused = add("second")
        problem = " ".join(refused.stderr.split())
        assert refused.returncode == 2
        assert f"{file}: cannot be written: no space is left on its device" in problem
        assert file.read_bytes() == before
        assert list(file.parent.iterdir()) == [file]
        (disk / "other").unlink()
        assert add("second").returncode == 0


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}


def at_start(folder: Path, code: str) -> dict[str, str]:
    """Variables with which a Python process runs this code before its program."""
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


def test_no_descriptor_is_left(engines: Engines, tmp_path: Path, scores: Scores) -> None:
    """Idle clients leave room for those that send requests."""
    few = at_start(tmp_path, FEW_DESCRIPTORS)
    with engines.served(variables=few) as frontend, ExitStack() as stack:
        fault = "300 idle clients, and 256 descriptors in all"
        with scores.traffic(fault, frontend) as requests:
            for _ in range(300):
                stack.enter_context(socket.create_connection(("127.0.0.1", frontend.port)))
            time.sleep(3)
        assert not requests.lost, requests.lost[:3]
        assert len(frontend.ready()) == 2


def test_everything_is_suspended(engines: Engines, scores: Scores) -> None:
    """As a laptop or a virtual machine is: all processes stop, and all go on."""
    with engines.served() as frontend:
        stopped = [*engines.processes, frontend.process]
        with scores.traffic("all processes stopped, 15 s", frontend, rate=4) as requests:
            for process in stopped:
                process.kill(signal.SIGSTOP)
            time.sleep(15)
            for process in stopped:
                process.kill(signal.SIGCONT)
            began = time.monotonic()
            for _ in range(4):
                time.sleep(0.5)
                assert "WORKER_EJECTED" not in codes(frontend)
            wait(frontend, lambda: len(frontend.ready()) == 2, "both engines")
            wait(frontend, lambda: not codes(frontend), "the end of all conditions")
            requests.right_s = time.monotonic() - began
        assert not requests.lost, requests.lost[:3]


def test_the_wall_clock_jumps_by_an_hour(engines: Engines, tmp_path: Path, scores: Scores) -> None:
    """Forth and back: nothing expires, and nothing is read again."""
    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("d", 0.0))
    shifted = {**at_start(tmp_path, CLOCK), "SHIFTED_CLOCK": str(clock)}
    with engines.served("--record", str(tmp_path / "recording"), variables=shifted) as frontend:
        before = len(frontend.process.lines())
        with scores.traffic("the wall clock jumps an hour, and back", frontend) as requests:
            for hours in (1, -1, 0):
                with clock.open("r+b") as file:  # in place: it is mapped
                    file.write(struct.pack("d", hours * 3600.0))
                time.sleep(2)
                assert not codes(frontend)
                assert len(frontend.ready()) == 2
        assert not requests.lost, requests.lost[:3]
        assert frontend.process.lines(before) == []
