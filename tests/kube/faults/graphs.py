"""Faults of the graph and its policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.kube.actors import Simulation
from tests.kube.faults.fault import Fault
from tests.kube.objects import ZONE, Component, Json

Parts = Callable[[list[Component]], list[Component]]


def _policy(**changes: Any) -> Callable[[Json], Json]:
    """Other fields in the policy that is applied; None removes one."""

    def change(graph: Json) -> Json:
        policy = graph["spec"]["experimental"]["kvTransferPolicy"]
        policy.update(changes)
        for name in [name for name, value in changes.items() if value is None]:
            del policy[name]
        return graph

    return change


def _without_policy(graph: Json) -> Json:
    del graph["spec"]["experimental"]
    return graph


def _first_draft(graph: Json) -> Json:
    _without_policy(graph)
    graph["spec"]["components"][0]["kvCacheTransferTopology"] = {
        "level": "zone",
        "mismatchPolicy": "fail",
    }
    return graph


def _each(names: str, **changes: Any) -> Parts:
    """Change the components whose name begins so."""
    return lambda found: [
        replace(one, **changes) if one.name.startswith(names) else one for one in found
    ]


def _replicas(**wanted: int) -> Parts:
    """By name, with ``_`` for ``-``; a component without replicas stays in the graph."""
    result = {name.replace("_", "-"): number for name, number in wanted.items()}
    return lambda found: [
        replace(one, replicas=result.get(one.name, one.replicas)) for one in found
    ]


def _then(change: Parts) -> Callable[[Simulation], object]:
    def inject(sim: Simulation) -> None:
        sim.regraph(change)
        sim.settle()

    return inject


def _add(*more: Component) -> Parts:
    return lambda found: [*found, *more]


def _orphan_pods(sim: Simulation) -> None:
    """As kubectl delete --cascade=orphan does."""
    sim.operator.on = False
    for pod in sim.pods():
        sim.edit("Pod", pod, {"metadata": {"ownerReferences": None}})
    sim.store.delete("DynamoGraphDeployment", "my-llm", "prod")
    sim.settle()


_BOTH = ("python3", "-m", "dynamo.vllm", "--disaggregation-mode", "agg")

GRAPH_FAULTS = (
    Fault("graph-without-policy", "DYT0102", start={"change": _without_policy}),
    Fault(
        "policy-with-a-field-of-a-draft",
        "DYT0103",
        start={"change": _policy(noMatchPolicy="fail", enforcement=None)},
    ),
    Fault("policy-in-the-shape-of-the-first-draft", "DYT0103", start={"change": _first_draft}),
    Fault(
        "policy-with-a-field-that-does-not-exist",
        "DYT0114",
        start={"change": _policy(weigth=0.5)},
    ),
    Fault(
        "domain-and-label-mean-different-levels",
        "DYT0108",
        start={"change": _policy(domain="rack")},
    ),
    Fault(
        "preferred-weighs-nothing",
        "DYT0116",
        start={"enforcement": "preferred", "weight": 0.0},
    ),
    Fault(
        "domain-longer-than-a-label",
        "DYT0117",
        start={"change": _policy(domain="zone" * 17)},
    ),
    Fault(
        "aggregated-graph-with-a-policy",
        "DYT0115",
        start={"parts": lambda found: [found[0], Component("engine", "worker", 4, args=_BOTH)]},
    ),
    Fault("graph-deleted-and-its-pods-left", "DYT0101", _orphan_pods),
    Fault("no-decode-at-all", "DYT0109", start={"parts": lambda found: found[:3]}),
    Fault(
        "frontend-routes-round-robin",
        "DYT0110",
        start={"parts": _each("frontend", env={"DYN_ROUTER_MODE": "round-robin"})},
    ),
    Fault(
        "role-unknown",
        "DYT0111",
        _then(_add(Component("engine", "worker", zone="none", zone_key="example.com/pool"))),
        also=("DYT0113", "DYT0410"),
    ),
    Fault(
        "engine-not-called-main",
        "DYT0119",
        start={"parts": _each("decode-b", container="engine")},
        also=("DYT0903", "DYT0901"),
    ),
    Fault(
        "template-sets-the-label",
        "DYT0406",
        start={
            "parts": lambda found: [
                replace(one, labels={ZONE: "us-east-1z"}) if one.zone == "us-east-1a" else one
                for one in found
            ]
        },
        also=("DYT0404",),
    ),
    Fault(
        "template-sets-a-variable-of-the-policy",
        "DYT0506",
        start={"parts": _each("decode-a", env={"DYN_KV_TRANSFER_DOMAIN": "rack"})},
    ),
    Fault("zone-without-decode", "DYT0901", _then(_replicas(decode_a=0))),
    Fault(
        "zone-without-decode-preferred",
        "DYT0906",
        _then(_replicas(decode_a=0)),
        start={"enforcement": "preferred"},
    ),
    Fault("one-decode-in-a-zone", "DYT0902", _then(_replicas(decode_a=1)), also=("DYT0908",)),
    Fault("zone-without-prefill", "DYT0907", _then(_replicas(prefill_b=0))),
    Fault("uneven-ratios", "DYT0908", _then(_replicas(decode_a=3))),
)
