"""Faults of permissions and of served resources."""

from __future__ import annotations

from tests.kube import crds
from tests.kube.actors import Simulation
from tests.kube.faults.fault import Fault

_DENIED = (
    ("list", "nodes"),
    ("list", "pods"),
    ("list", "events"),
    ("list", "endpointslices"),
    ("list", "dynamographdeployments"),
    ("list", "dynamoworkermetadatas"),
    ("list", "deployments"),
    ("get", "customresourcedefinitions"),
    ("create", "pods/exec"),
    ("get", "pods/log"),
    ("create", "pods/portforward"),
)


def _denied(verb: str, resource: str) -> Fault:
    def inject(sim: Simulation) -> None:
        sim.forbid(verb, resource)

    return Fault(f"we-may-not-{verb}-{resource.replace('/', '-')}", "DYT0004", inject)


ACCESS_FAULTS = (
    *(_denied(verb, resource) for verb, resource in _DENIED),
    Fault(
        "we-may-not-list-grove-topologies",
        "DYT0004",
        lambda sim: sim.forbid("list", "clustertopologybindings"),
        start={"grove": True},
    ),
    Fault(
        "definition-without-the-policy",
        "DYT0003",
        start={
            "definitions": (
                crds.graph_crd(policy=False),
                crds.worker_metadata_crd(),
                crds.cluster_topology_crd(),
                crds.pod_clique_set_crd(),
            )
        },
        also=("DYT0120",),
    ),
    Fault(
        "metadata-not-served",
        "DYT0005",
        start={"definitions": (crds.graph_crd(),)},
        also=("DYT0704", "DYT0113"),
    ),
)
