"""Faults of Grove topologies."""

from __future__ import annotations

from typing import Any

from dynctl.wire.kubernetes.names import ENABLE_GROVE_ANNOTATION
from tests.kube import objects
from tests.kube.actors import Simulation
from tests.kube.deployment import LEVELS, TOPOLOGY_NAME
from tests.kube.faults.fault import Fault
from tests.kube.objects import Json

_GROVE = {"grove": True}


def _other_domain(graph: Json) -> Json:
    graph["spec"]["experimental"]["kvTransferPolicy"]["domain"] = "host"
    return graph


def _annotate(sim: Simulation) -> None:
    annotations = {ENABLE_GROVE_ANNOTATION: "false"}
    sim.edit("DynamoGraphDeployment", "my-llm", {"metadata": {"annotations": annotations}})


def _out_of_sync(sim: Simulation) -> None:
    status = objects.cluster_topology(LEVELS, in_sync=False)["status"]
    sim.edit("ClusterTopologyBinding", TOPOLOGY_NAME, {"status": status}, "")


def _reversed(sim: Simulation) -> None:
    spec: dict[str, Any] = objects.cluster_topology(LEVELS[::-1])["spec"]
    sim.edit("ClusterTopologyBinding", TOPOLOGY_NAME, {"spec": spec}, "")


def _grove_off(sim: Simulation) -> None:
    sim.operator.grove = False


def _packed(graph: Json) -> Json:
    graph["spec"]["topologyConstraint"] = {
        "clusterTopologyName": TOPOLOGY_NAME,
        "packDomain": "rack",
    }
    return graph


TOPOLOGY_FAULTS = (
    Fault(
        "grove-topology-deleted",
        "DYT0201",
        lambda sim: sim.store.delete("ClusterTopologyBinding", TOPOLOGY_NAME),
        start=_GROVE,
    ),
    Fault(
        "domain-is-no-level",
        "DYT0202",
        start={**_GROVE, "change": _other_domain},
        also=("DYT0113", "DYT0601"),
    ),
    Fault("grove-switched-off-by-annotation", "DYT0203", _annotate, start=_GROVE),
    Fault("operator-without-grove", "DYT0203", prepare=_grove_off, start=_GROVE),
    Fault("grove-topology-out-of-sync", "DYT0204", _out_of_sync, start=_GROVE),
    Fault(
        "packed-into-another-domain",
        "DYT0211",
        start={**_GROVE, "change": _packed},
    ),
    Fault("grove-levels-reversed", "DYT0210", _reversed, start=_GROVE),
)
