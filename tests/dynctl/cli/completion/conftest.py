"""A frontend that knows workers, and a `dynctl` on the path that tells when it was called."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dynctl.cli.completion import live
from tests.http_servers import Exchange, HttpServer
from tests.waiting import patience

ROOT = Path(__file__).parents[4]

WORKERS: list[dict[str, Any]] = [
    {
        "name": f"{role}-{zone}0",
        "worker_id": 1,
        "model": "org/llama-8b" if role == "prefill" else "org/llama-70b",
        "role": role,
        "status": "ready",
        "domains": {"zone": f"zone-{zone}", "rack": f"r:{zone}"},
        "runtime_config": {"taints": [f"topology.zone=zone-{zone}"]},
    }
    for zone in "ab"
    for role in ("prefill", "decode")
]


@dataclass
class Fleet:
    """What a frontend answers on ``/v1/workers``; ``asked``: (path, authorization) of each call."""

    url: str = ""
    body: bytes = json.dumps({"workers": WORKERS}).encode()
    status: int = 200
    hang: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """It answers at once; with ``hang`` cleared, only when that is set."""
    found = Fleet()
    found.hang.set()

    def respond(exchange: Exchange) -> None:
        found.asked.append((exchange.path, exchange.headers.get("authorization")))
        found.hang.wait(patience(20))
        exchange.reply(found.body, found.status)

    with HttpServer(respond) as server:
        found.url = server.url
        yield found
        found.hang.set()


@dataclass(frozen=True)
class Program:
    """A `dynctl` first on the path. ``calls`` are the arguments of each start."""

    folder: Path
    env: dict[str, str]

    @property
    def calls(self) -> list[list[str]]:
        log = self.folder / "calls"
        if not log.exists():
            return []
        records = log.read_text().split("\x1e")[:-1]
        return [record.split("\x1f")[:-1] for record in records]

    def forget(self) -> None:
        (self.folder / "calls").unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process names have the time that a busy machine needs."""
    monkeypatch.setattr(live, "LIMIT_S", 15.0)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The real one; its time to answer is long, so that a busy machine does not fail a test."""
    monkeypatch.setenv("DYNCTL_CONFIG", str(tmp_path / "c.toml"))
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "dynctl"
    code = (
        "import sys; from dynctl.cli.completion import live; live.LIMIT_S = 15; "
        "live.answer(sys.argv[2:])"
    )
    script.write_text(
        "#!/bin/sh\n"
        f"{{ printf '%s\\037' \"$@\"; printf '\\036'; }} >> {folder}/calls\n"
        f"exec {sys.executable} -c '{code}' \"$@\"\n"
    )
    script.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "TERM": "dumb", "LC_ALL": "C.UTF-8"}
    return Program(folder, env)
