"""Frontends as processes, each with its whole process tree on one core."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.bench.harness import cpu_seconds

FRONTEND_CORE, LOAD_CORE = 0, 1
#: Engines behind each of them.
ENGINES = 4
BARE, FLOOR = "bare aiohttp proxy", "raw uvloop proxy"
BY_LOAD, TOKENIZING = "dynctl, routed by load", "dynctl, tokenizing"
DEMO_MODEL = Path(__file__).parents[2] / "dynctl" / "tokenization" / "demo_model"


@dataclass(frozen=True)
class Command:
    """How to start a frontend. ``port`` None: it picks one and says so on stdout."""

    name: str
    argv: tuple[str, ...]
    port: int | None = None
    ready_path: str | None = None


class Contestant:
    """A running frontend; use as a context manager. The process tree ends with it.

    ``pinned``: it has one core and this process another one.
    """

    def __init__(self, command: Command, *, pinned: bool = True) -> None:
        self.name = command.name
        self._pinned = pinned
        self._command = command
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in __exit__
        self.port = 0
        #: Processes that it announced: name -> pid.
        self.processes: dict[str, int] = {}

    def __enter__(self) -> "Contestant":
        if self._pinned:
            with_core(FRONTEND_CORE)
        try:
            self._process = subprocess.Popen(
                self._command.argv,
                stdout=subprocess.PIPE if self._command.port is None else self._log,
                stderr=self._log,
                start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        finally:
            if self._pinned:
                with_core(LOAD_CORE)
        try:
            self.port = self._command.port or self._told_port()
            self._await_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(timeout=5)
                break
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def cpu_s(self) -> float:
        """Seconds of CPU that the process and its descendants have used."""
        return sum(cpu_seconds(pid) for pid in _tree(self._process.pid))

    def cpu_of(self, process: str) -> float:
        """Seconds of CPU of one of its processes alone."""
        return cpu_seconds(self.processes[process])

    def _told_port(self) -> int:
        """The port: printed alone, or in the record of ``--announce``."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        try:
            answer = json.loads(line)
            self.processes = answer.get("processes", {}) if isinstance(answer, dict) else {}
            return int(answer["port"] if isinstance(answer, dict) else answer)
        except (ValueError, KeyError):
            raise RuntimeError(f"{self.name} did not start: {line}{self._tail()}") from None

    def _await_ready(self) -> None:
        path = self._command.ready_path
        deadline = time.monotonic() + 60
        while path is not None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not become ready: {self._tail()}")
            try:
                url = f"http://127.0.0.1:{self.port}{path}"
                with urllib.request.urlopen(url, timeout=2) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.1)

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:].decode(errors="replace")


def with_core(core: int) -> None:
    """Run this process, and what it starts from now on, on one core, where there are several."""
    cores = sorted(os.sched_getaffinity(0) | _ALL_CORES)
    os.sched_setaffinity(0, {cores[core % len(cores)]})


_ALL_CORES = os.sched_getaffinity(0)


#: Peer -> how it starts with the Python that it is installed for.
_PEERS: Final[dict[str, tuple[str, ...]]] = {
    "sglang-router": ("-m", "sglang_router.launch_router"),
    "smg": ("-c", "from smg.cli import main; main()", "launch"),
}


def serve(kind: str, urls: Sequence[str]) -> tuple[str, ...]:
    """The command line of `dynctl serve`, with the defaults of users."""
    workers = [word for url in urls for word in ("--worker", url)]
    return (sys.executable, "-m", "dynctl", "serve", kind, "--log-level", "warning", *workers)


def frontend(name: str, urls: Sequence[str], *options: str) -> Command:
    """Our frontend on a free port."""
    return Command(name, (*serve("frontend", urls), "--announce", "--http-port", "0", *options))


def commands(urls: Sequence[str], peers: Mapping[str, str]) -> list[Command]:
    """Ours with and without a tokenizer, both proxies, and the peers that are installed.

    ``peers``: name -> the Python that has it.
    """
    run = (sys.executable, "-m")
    return [
        frontend(BY_LOAD, urls),
        frontend(TOKENIZING, urls, "--model-path", str(DEMO_MODEL)),
        Command(BARE, (*run, "tests.bench.bare_proxy", *urls)),
        Command(FLOOR, (*run, "tests.bench.raw_proxy", *urls)),
        *(_peer(name, peers[name], urls) for name in _PEERS if name in peers),
    ]


def _peer(name: str, python: str, urls: Sequence[str]) -> Command:
    """A peer as it comes, but for the ports and less of a log."""
    port, metrics = free_ports(2)
    argv = (
        *(python, *_PEERS[name], "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(metrics), "--log-level", "error", "--worker-urls", *urls),
    )
    return Command(name, argv, port, "/health")


def free_ports(count: int) -> list[int]:
    """Free ports."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()


def _tree(root: int) -> list[int]:
    pids = [root]
    for pid in pids:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                pids += [int(child) for child in children.read_text().split()]
            except OSError:
                continue
    return pids
