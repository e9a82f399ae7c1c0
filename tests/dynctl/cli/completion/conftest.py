"""A frontend that knows workers and decisions, and a patient `dynctl` first on the path."""

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

from dynctl.cli import completion
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
    """What a frontend answers on any path; ``asked``: (path, authorization) of each call."""

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


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process names have the time that a busy machine needs."""
    monkeypatch.setattr(completion, "LIMIT_S", 15.0)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables with the real program first on the path; live names have plenty of time."""
    monkeypatch.setenv("DYNCTL_CONFIG", str(tmp_path / "c.toml"))
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "dynctl"
    code = (
        "from dynctl.cli import completion; completion.LIMIT_S = 15; "
        "from dynctl.__main__ import main; main()"
    )
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
    program.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
    }
