"""Faults of node labels."""

from __future__ import annotations

from tests.kube import objects
from tests.kube.actors import Simulation
from tests.kube.faults.fault import Fault, relabel_node, then_settle
from tests.kube.objects import ZONE
from tests.kube.objects.nodes import RACK


def _new_node(sim: Simulation, name: str, labels: dict[str, str]) -> None:
    sim.apply(objects.node(name, labels))


def _label_late(sim: Simulation) -> None:
    relabel_node("gpu-a-1", "us-east-1a")(sim)
    sim.advance(600)


def _label_late_and_restart_operator(sim: Simulation) -> None:
    _label_late(sim)
    sim.restart_operator()
    sim.advance(1200)


def _two_regions(sim: Simulation) -> None:
    """The same names of zones in each of two regions."""
    for zone in "ab":
        for place, region in enumerate(("us-east-1", "eu-west-1")):
            relabel_node(f"gpu-{zone}-{place}", region, "topology.kubernetes.io/region")(sim)


_UNPINNED = {"pinned": False}

NODE_FAULTS = (
    Fault(
        "node-relabelled-after-start",
        "DYT0404",
        then_settle(relabel_node("gpu-a-1", "us-east-1b")),
    ),
    Fault(
        "node-label-removed-after-start",
        "DYT0205",
        then_settle(relabel_node("gpu-a-1", None)),
    ),
    Fault(
        "node-without-label-before-start",
        "DYT0205",
        prepare=relabel_node("gpu-a-1", None),
        start=_UNPINNED,
        also=("DYT0113",),
    ),
    Fault(
        "node-labelled-too-late",
        "DYT0403",
        _label_late,
        prepare=relabel_node("gpu-a-1", None),
        start=_UNPINNED,
        also=("DYT0113",),
    ),
    Fault(
        "node-labelled-late-and-operator-restarted",
        "DYT0405",
        _label_late_and_restart_operator,
        prepare=relabel_node("gpu-a-1", None),
        start=_UNPINNED,
        also=("DYT0603",),
    ),
    Fault(
        "node-label-empty",
        "DYT0207",
        prepare=relabel_node("gpu-a-1", ""),
        start=_UNPINNED,
        also=("DYT0113", "DYT0403"),
    ),
    Fault(
        "node-label-empty-after-start",
        "DYT0207",
        then_settle(relabel_node("gpu-a-1", "")),
        also=("DYT0404",),
    ),
    Fault(
        "node-labels-differ-by-case",
        "DYT0213",
        lambda sim: _new_node(sim, "gpu-a-9", {ZONE: "US-East-1a"}),
    ),
    Fault("one-value-in-the-whole-cluster", "DYT0212", start={"zones": ("us-east-1a",)}),
    Fault(
        "candidate-node-without-label",
        "DYT0206",
        lambda sim: _new_node(sim, "gpu-c-0", {}),
        start=_UNPINNED,
    ),
    Fault(
        "rack-spans-zones",
        "DYT0208",
        lambda sim: _new_node(sim, "gpu-b-9", {ZONE: "us-east-1b", RACK: "us-east-1a-r0"}),
        start={"grove": True},
    ),
    Fault("zones-of-two-regions-with-one-name", "DYT0208", _two_regions),
    Fault(
        "node-without-rack",
        "DYT0214",
        prepare=relabel_node("gpu-a-1", None, RACK),
        start={"grove": True},
    ),
)
