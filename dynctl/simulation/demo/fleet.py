"""A two-zone disaggregated fleet of simulated engines and one frontend, as child processes.

The engines read their zone from files and their policy from the environment, as workers on
Kubernetes do, so that the demo uses the whole path from topology file to routing decision.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

READY_SECONDS = 30.0
_STOP_SECONDS = 5.0
#: Prefixes of variables of the user's deployment, which the demo does not inherit.
_FOREIGN = ("DYN_", "ETCD_", "NATS_")


class DemoError(RuntimeError):
    """A failure of the demo; for a process that did not start, with the end of its log."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine of the fleet; ``zone`` becomes its topology file."""

    name: str
    role: str
    zone: str


#: Two zones, each with a prefill worker and two decode workers.
TWO_ZONES = tuple(
    EnginePlan(f"{role}-{zone[-1]}{number}", role, zone)
    for role, count in (("prefill", 1), ("decode", 2))
    for zone in ("zone-a", "zone-b")
    for number in range(count)
)


@dataclass(slots=True)
class Child:
    """A running process. ``ready``: its ready record; ``log``: the path of its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return str(self.ready["url"])


class DemoFleet:
    """Starts on enter, ends every process on exit. ``directory`` holds topology files and logs."""

    def __init__(
        self,
        plans: Sequence[EnginePlan] = TWO_ZONES,
        *,
        enforcement: str = "required",
        weight: float | None = None,
        frontend_args: Sequence[str] = (),
        engine_args: Sequence[str] = (),
        port: int = 0,
    ) -> None:
        self._plans = plans
        self._enforcement = enforcement
        self._weight = weight
        self._frontend_args = tuple(frontend_args)
        self._engine_args = tuple(engine_args)
        self._port = port
        self.directory = Path()
        self.engines: dict[str, Child] = {}
        self.frontend: Child | None = None
        self.started_in = 0.0

    @property
    def url(self) -> str:
        """The URL of the frontend."""
        if self.frontend is None:
            raise DemoError("the demo's frontend is not running")
        return self.frontend.url

    def __enter__(self) -> DemoFleet:
        started = time.monotonic()
        self.directory = Path(tempfile.mkdtemp(prefix="dynctl-demo-"))
        try:
            for plan in self._plans:
                self.engines[plan.name] = self._start_engine(plan)
            _await_ready(self.engines.values())
            self.frontend = self._start_frontend()
            _await_ready([self.frontend])
        except BaseException:
            self.close()
            raise
        self.started_in = time.monotonic() - started
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def stop(self, name: str) -> None:
        """Kill one engine, to simulate a crash."""
        child = self.engines[name]
        child.process.kill()
        child.process.wait()
        _close_output(child)

    def close(self) -> None:
        """End every process, by SIGTERM first; remove the directory."""
        children = [*([self.frontend] if self.frontend else []), *self.engines.values()]
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        for child in children:
            try:
                child.process.wait(max(0.05, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            _close_output(child)
        if self.directory != Path():
            shutil.rmtree(self.directory, ignore_errors=True)

    def _start_engine(self, plan: EnginePlan) -> Child:
        topology = self.directory / "topology" / plan.zone
        topology.mkdir(parents=True, exist_ok=True)
        (topology / "zone").write_text(plan.zone + "\n")
        policy = {
            "DYN_TOPOLOGY_ENABLED": "true",
            "DYN_TOPOLOGY_MOUNT_PATH": str(topology),
            "DYN_KV_TRANSFER_DOMAIN": "zone",
            "DYN_KV_TRANSFER_ENFORCEMENT": self._enforcement,
        }
        if self._weight is not None:
            policy["DYN_KV_TRANSFER_PREFERRED_WEIGHT"] = str(self._weight)
        command = [
            "-m",
            "dynctl.simulation.engine",
            "--name",
            plan.name,
            "--role",
            plan.role,
            "--port",
            "0",
        ]
        command += ["--kv-events", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0"]
        return self._start(plan.name, [*command, *self._engine_args], policy)

    def _start_frontend(self) -> Child:
        command = ["-m", "dynctl", "serve", "frontend", "--announce"]
        command += ["--http-port", str(self._port)]
        for plan in self._plans:
            ready = self.engines[plan.name].ready
            spec = [ready["url"], f"name={plan.name}", f"role={plan.role}"]
            if ready.get("kv_events"):
                spec += [f"kv-events={ready['kv_events']}", f"replay={ready['replay']}"]
            command += ["--worker", ",".join(spec)]
        return self._start("frontend", [*command, *self._frontend_args], {})

    def _start(self, name: str, arguments: Sequence[str], extra: Mapping[str, str]) -> Child:
        log = self.directory / f"{name}.log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        with log.open("wb") as errors:
            process = subprocess.Popen(  # noqa: S603  our own interpreter, our own modules
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment | dict(extra),
            )
        return Child(name, process, log)


def _await_ready(children: Iterable[Child]) -> None:
    """Wait for the ready record (a JSON line) of each child."""
    deadline = time.monotonic() + READY_SECONDS
    for child in children:
        child.ready = _read_ready(child, deadline)


def _read_ready(child: Child, deadline: float) -> dict[str, Any]:
    output = child.process.stdout
    if output is None:
        raise DemoError(f"{child.name}: its output is not connected")
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([output], [], [], left)[0]:
            raise DemoError(f"{child.name} was not ready within {READY_SECONDS:g} s{_tail(child)}")
        chunk = os.read(output.fileno(), 65536)
        if not chunk:
            code = child.process.wait()
            raise DemoError(f"{child.name} ended with exit code {code}{_tail(child)}")
        line += chunk
    ready = json.loads(line.splitlines()[0])
    if not isinstance(ready, dict):
        raise DemoError(f"{child.name} announced {ready!r}, expected an object")
    return ready


def _tail(child: Child) -> str:
    lines = child.log.read_text(errors="replace").splitlines()[-15:]
    return ":\n  " + "\n  ".join(lines) if lines else ", and its log is empty"


def _close_output(child: Child) -> None:
    if child.process.stdout is not None:
        child.process.stdout.close()
