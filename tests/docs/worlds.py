"""The worlds that pages are about, each brought about as it comes about in life.

=================== ==========================================================================
none                nothing runs
engines             the engines and the frontend of docs/tour/plain-engines.md
demo                the embedded fleet: six engines in two zones and a frontend on port 8000
cluster             a healthy deployment over two zones, on a simulated Kubernetes cluster
cluster FAULT       the same with a fault of the matrix (tests/kube/faults) in it
files               a Dynamo registered in files whose processes are gone; DYN_FILE_KV names it
checkout            this repository, with the environment that make sets up
dynamo              a real Dynamo; tests/dynamo/test_docs.py runs these
=================== ==========================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import pytest

from dynctl.demo.fleet import DemoFleet
from tests.docs.pages import DOCS, ROOT, scenes
from tests.docs.running import Session, free_port
from tests.dynctl.cli.test_check import CAPTURE, written
from tests.kube.actors import Simulation, living
from tests.kube.faults import FAULTS, fault_of, injected

WORLDS = ("none", "engines", "demo", "cluster", "files", "checkout", "dynamo")
ELSEWHERE = ("dynamo",)
"""Run by another test than the one of this room."""


@contextmanager
def session(world: str, directory: Path) -> Iterator[Session]:
    """A shell in the world of that name."""
    kind, _, which = world.partition(" ")
    match kind:
        case "none" | "engines":
            found = Session(directory, {})
        case "checkout":
            if not (ROOT / ".venv" / ".run-stamp").exists():
                pytest.skip("make has set up no environment here")
            found = Session(directory, {}, place=ROOT)
        case "files":
            found = Session(directory, {"DYN_FILE_KV": str(_registered(directory))})
        case "demo":
            with DemoFleet(port=int(free_port())) as fleet:
                found = Session(directory, {})
                found.use_frontend(fleet.url)
                yield from _closing(found)
            return
        case "cluster":
            with injected(fault_of(FAULTS, which)) if which else living() as sim:
                found = Session(directory, _of_cluster(sim, directory))
                yield from _closing(found)
            return
        case _:
            raise KeyError(f"no world is called {world!r}")
    if kind == "engines":
        commands = scenes(DOCS / "tour" / "plain-engines.md")[0].commands
        for command in takewhile(lambda one: " serve " in one.text, commands):
            found.run(command)
    yield from _closing(found)


def _closing(found: Session) -> Iterator[Session]:
    try:
        yield found
    finally:
        found.close()


def _of_cluster(sim: Simulation, directory: Path) -> dict[str, str]:
    return {"KUBECONFIG": str(sim.viewer_kubeconfig(directory / "kubeconfig"))}


def _registered(directory: Path) -> Path:
    entries = json.loads(CAPTURE.read_text())
    values = {key: row["value"] for key, row in entries.items()}
    return written(directory / "kv", values)
