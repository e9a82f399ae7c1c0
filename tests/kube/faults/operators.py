"""Faults of the operator: missing, several, too old, without permission, not copying."""

from __future__ import annotations

from tests.kube import objects
from tests.kube.actors import Simulation
from tests.kube.actors.simulation import OPERATOR_ROLE
from tests.kube.faults.fault import DECODE, Fault, relabel_pod
from tests.kube.objects.accounts import OPERATOR_NAME, OPERATOR_NAMESPACE


def _controller_off(sim: Simulation) -> None:
    sim.labels.on = False


def _unlabelled(sim: Simulation) -> None:
    _controller_off(sim)
    relabel_pod(DECODE, None)(sim)
    sim.advance(600)


def _scaled_to_nothing(sim: Simulation) -> None:
    sim.edit("Deployment", OPERATOR_NAME, {"spec": {"replicas": 0}}, OPERATOR_NAMESPACE)
    sim.operator.on = sim.labels.on = False
    sim.settle()


def _broken(sim: Simulation) -> None:
    sim.deployments.broken = {OPERATOR_NAME}
    sim.operator.on = sim.labels.on = False
    sim.settle()


def _uninstalled(sim: Simulation) -> None:
    sim.store.delete("Deployment", OPERATOR_NAME, OPERATOR_NAMESPACE)
    sim.operator.on = sim.labels.on = False


def _second(sim: Simulation) -> None:
    for body in objects.operator_objects(namespace="team-b", name="second-dynamo-operator"):
        sim.store.create(body)
    sim.settle()


def _old_image(sim: Simulation) -> None:
    body = sim.store.get("Deployment", OPERATOR_NAME, OPERATOR_NAMESPACE)
    old = objects.operator_deployment(version="1.1.0")
    sim.store.update({**body, "spec": old["spec"]})


def _no_grove(sim: Simulation) -> None:
    for verb in ("get", "list", "watch"):
        for plural in ("clustertopologybindings", "clustertopologies"):
            sim.forbid(verb, plural, OPERATOR_ROLE)


_UNLABELLED = ("DYT0113", "DYT0403")

OPERATOR_FAULTS = (
    Fault("copied-label-removed-by-hand", "DYT0403", _unlabelled),
    Fault("label-controller-off", "DYT0403", prepare=_controller_off, also=("DYT0113",)),
    Fault("operator-scaled-to-nothing", "DYT0301", _scaled_to_nothing),
    Fault("operator-not-ready", "DYT0301", _broken),
    Fault("operator-uninstalled", "DYT0301", _uninstalled),
    Fault("two-operators", "DYT0302", _second),
    Fault("operator-too-old", "DYT0304", _old_image),
    Fault(
        "operator-may-not-get-nodes",
        "DYT0303",
        prepare=lambda sim: sim.forbid("get", "nodes", OPERATOR_ROLE),
        also=_UNLABELLED,
    ),
    Fault(
        "operator-may-not-patch-pods",
        "DYT0303",
        prepare=lambda sim: sim.forbid("patch", "pods", OPERATOR_ROLE),
        also=_UNLABELLED,
    ),
    Fault(
        "operator-may-not-read-grove",
        "DYT0303",
        _no_grove,
        start={"grove": True},
    ),
)
