"""Faults of worker logs and model cards."""

from __future__ import annotations

from collections.abc import Callable

from tests.kube.actors import Simulation
from tests.kube.actors.worker import (
    Published,
    with_config,
    without_taints,
    without_topology,
)
from tests.kube.faults.fault import DECODE, Fault, relabel_node, relabel_pod, then_settle


def _publishing(how: Published, *pods: str) -> Callable[[Simulation], object]:
    """These pods (default: :data:`DECODE`) restart and publish this."""

    def change(sim: Simulation) -> None:
        for pod in pods or (DECODE,):
            sim.workers.publish[pod] = how
        sim.recreate(*(pods or (DECODE,)))

    return then_settle(change)


def _relogged(change: Callable[[list[str]], list[str]]) -> Callable[[Simulation], object]:
    """The log of one worker is another; its card stays."""

    def inject(sim: Simulation) -> None:
        process = sim.sandbox(DECODE).process
        assert process is not None
        process.log = "".join(change(process.log.splitlines(keepends=True)))
        sim.settle()

    return inject


def _without_config(lines: list[str]) -> list[str]:
    return [line for line in lines if "Topology config:" not in line]


def _other_config(lines: list[str]) -> list[str]:
    return [line.replace("us-east-1a", "us-east-1b") for line in lines]


def _moved(sim: Simulation) -> None:
    """A node is relabelled, and the labels of its pods are copied again while they run."""
    node = sim.pod(DECODE)["spec"]["nodeName"]
    relabel_node(node, "us-east-1c")(sim)
    for pod in [one for one in sim.pods() if sim.pod(one)["spec"]["nodeName"] == node]:
        relabel_pod(pod, None)(sim)


WORKER_FAULTS = (
    Fault("log-without-topology", "DYT0604", _relogged(_without_config)),
    Fault("log-says-another-value", "DYT0602", _relogged(_other_config)),
    Fault(
        "card-without-topology",
        "DYT0801",
        _publishing(without_topology),
        also=("DYT0903",),
    ),
    Fault(
        "card-without-topology-preferred",
        "DYT0801",
        _publishing(without_topology),
        start={"enforcement": "preferred"},
        also=("DYT0909",),
    ),
    Fault("card-older-than-label", "DYT0802", then_settle(_moved)),
    Fault(
        "card-with-another-enforcement",
        "DYT0803",
        _publishing(
            with_config(kv_transfer_enforcement="preferred", kv_transfer_preferred_weight=0.5)
        ),
    ),
    Fault(
        "card-with-another-domain",
        "DYT0803",
        _publishing(with_config(kv_transfer_domain="rack")),
    ),
    Fault(
        "card-with-another-weight",
        "DYT0803",
        _publishing(with_config(kv_transfer_preferred_weight=0.25)),
        start={"enforcement": "preferred"},
    ),
    Fault("card-without-taints", "DYT0804", _publishing(without_taints), also=("DYT0903",)),
    Fault(
        "taint-of-another-zone",
        "DYT0804",
        _publishing(with_config(taints=["dynamo.topology/zone=us-east-1b"])),
        also=("DYT0908",),
    ),
)
