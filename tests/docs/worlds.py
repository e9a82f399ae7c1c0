"""The worlds in which the commands of pages run.

=================== ==========================================================================
none                nothing runs
engines             the engines and the frontend of docs/tour/plain-engines.md
demo                the embedded fleet: six engines in two zones and a frontend on port 8000;
                    all scenes share one
cluster             a healthy deployment over two zones, on a simulated Kubernetes cluster
cluster FAULT       the same with a fault of the matrix (tests/kube/faults) in it
files               a Dynamo registered in files whose processes have ended (DYN_FILE_KV)
checkout            this repository, with the environment that make sets up
traces              the folder with published traces that $DYNCTL_TRACES names; without one
                    these commands do not run
dynamo              a real Dynamo; tests/dynamo/test_docs.py runs these
=================== ==========================================================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Final

import pytest

from dynctl.simulation.demo.fleet import DemoFleet
from tests.docs.pages import DOCS, ROOT, scenes
from tests.docs.running import ADMIN_KUBECONFIG, Session, free_page_port
from tests.dynctl.cli.test_check import CAPTURE, written
from tests.forks import forked_demos
from tests.kube.actors import Simulation, living
from tests.kube.faults import FAULTS, fault_of, injected

WORLDS = ("none", "engines", "demo", "cluster", "files", "checkout", "traces", "dynamo")
ELSEWHERE = ("dynamo",)
"""Worlds of pages that another test runs."""


#: Read before each test gets a clean environment.
TRACES: Final = os.environ.get("DYNCTL_TRACES")
#: Age of a cluster with a fault. A worker that restarts for ever costs time for each restart.
_AGE_S: Final = 900.0

Fleet = Callable[[], DemoFleet]


@contextmanager
def demo_fleet() -> Iterator[Fleet]:
    """Start the shared demo fleet at its first use."""
    with ExitStack() as stack:
        started: list[DemoFleet] = []

        def fleet() -> DemoFleet:
            if not started:
                with forked_demos():
                    started.append(stack.enter_context(DemoFleet(port=int(free_page_port()))))
            return started[0]

        yield fleet


@contextmanager
def session(world: str, directory: Path, fleet: Fleet) -> Iterator[Session]:
    """A shell in the world of that name."""
    kind, _, which = world.partition(" ")
    match kind:
        case "none" | "engines":
            found = Session(directory, {})
        case "checkout":
            if not (ROOT / ".venv" / ".run-stamp").exists():
                pytest.skip("make has set up no environment here")
            found = Session(directory, {}, place=ROOT)
        case "traces":
            if TRACES is None:
                pytest.skip("DYNCTL_TRACES names no folder with the published traces")
            found = Session(directory, {}, place=Path(TRACES))
        case "files":
            found = Session(directory, {"DYN_FILE_KV": str(_registered(directory))})
        case "demo":
            found = Session(directory, {})
            found.use_frontend(fleet().url)
        case "cluster":
            with _cluster(which) as sim:
                yield from _closing(_at_cluster(sim, directory))
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


def _cluster(fault: str) -> AbstractContextManager[Simulation]:
    """With TLS, without which kubectl sends no token."""
    if not fault:
        return living(tls=True)
    found = fault_of(FAULTS, fault)
    return injected(replace(found, start={"age": _AGE_S, **found.start, "tls": True}))


def _at_cluster(sim: Simulation, directory: Path) -> Session:
    """dynctl has the rights that verify needs; kubectl has those of an administrator."""
    kubeconfigs = {
        "KUBECONFIG": sim.viewer_kubeconfig(directory / "kubeconfig"),
        ADMIN_KUBECONFIG: sim.server.kubeconfig(directory / "admin", namespace="default"),
    }

    def go_on() -> None:
        sim.settle()
        sim.advance(60)

    return Session(directory, {n: str(path) for n, path in kubeconfigs.items()}, after=go_on)


def _registered(directory: Path) -> Path:
    entries = json.loads(CAPTURE.read_text())
    values = {key: row["value"] for key, row in entries.items()}
    return written(directory / "kv", values)
