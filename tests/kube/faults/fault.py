"""A fault: its codes, and how to inject it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.kube.actors import Simulation, living, nothing
from tests.kube.objects import ZONE, Json

DECODE = "my-llm-decode-a-0"
"""A worker of zone us-east-1a, to which most faults happen."""


_SIZE = {"prefill": 2, "decode": 6}
"""Enough decode workers that one more or less is not an uneven capacity (DYT0908)."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``code``: that verify must report it by. ``also``: further codes that are true consequences.

    ``prepare`` is done to the cluster before the graph is applied, ``inject`` an hour after it has
    settled; ``inject`` lets pass what time it needs. ``start``: further arguments of ``living``.
    """

    name: str
    code: str
    inject: Callable[[Simulation], object] = nothing
    prepare: Callable[[Simulation], object] = nothing
    also: tuple[str, ...] = ()
    start: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def injected(fault: Fault) -> Iterator[Simulation]:
    """The living cluster with the fault in it."""
    with living(prepare=fault.prepare, **{**_SIZE, **fault.start}) as sim:
        fault.inject(sim)
        yield sim


def fault_of(faults: tuple[Fault, ...], name: str) -> Fault:
    """The fault with this name; KeyError for an unknown name."""
    return {one.name: one for one in faults}[name]


# -- what many faults do ---------------------------------------------------------------------------


def then_settle(change: Callable[[Simulation], object]) -> Callable[[Simulation], object]:
    """Inject the fault, let the cluster settle, and let ten minutes pass."""

    def inject(sim: Simulation) -> None:
        change(sim)
        sim.settle()
        sim.advance(600)

    return inject


def relabel_node(name: str, value: str | None, key: str = ZONE) -> Callable[[Simulation], object]:
    """``value`` None removes the label."""
    return lambda sim: sim.edit("Node", name, {"metadata": {"labels": {key: value}}}, "")


def relabel_pod(name: str, value: str | None, key: str = ZONE) -> Callable[[Simulation], object]:
    """``value`` None removes the label."""
    return lambda sim: sim.edit("Pod", name, {"metadata": {"labels": {key: value}}})


def spoil_pod(sim: Simulation, pod: str, spoil: Callable[[Json], Json]) -> None:
    """Have the operator create a pod again, and ``spoil`` what it creates, too."""
    before = sim.operator.mutate

    def mutate(body: Json) -> Json:
        made = before(body)
        return spoil(made) if made["metadata"]["name"] == pod else made

    sim.operator.mutate = mutate
    sim.recreate(pod)


def main_of(body: Json) -> Json:
    """The first container of a pod's JSON."""
    found: Json = body["spec"]["containers"][0]
    return found
