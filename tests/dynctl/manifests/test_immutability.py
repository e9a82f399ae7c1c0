"""Changes of a live graph that the operator's webhook refuses: DYT0112."""

from __future__ import annotations

from typing import Any

import pytest

from dynctl.findings.catalogue import catalogue
from dynctl.findings.runner import Check, outcome, run
from dynctl.manifests.files import Manifest
from dynctl.manifests.graphs import Graph, graphs_of
from dynctl.manifests.lint.policy import immutable_changes
from tests.kube.objects import small

POLICY = {"labelKey": "topology.kubernetes.io/zone", "domain": "zone"}


def graph(
    policy: Any = None,
    constraint: Any = None,
    inner: Any = None,
    *,
    version: str = "v1beta1",
    names: tuple[str, ...] = ("decode",),
) -> Graph:
    parts = [{"name": name, "type": "decode", "topologyConstraint": inner} for name in names]
    more = {} if constraint is None else {"topologyConstraint": constraint}
    body = small.graph("llm", "prod", components=parts, **more)
    body["apiVersion"] = f"nvidia.com/{version}"
    body["spec"]["experimental"] = {"kvTransferPolicy": policy}
    if version == "v1alpha1":
        del body["spec"]["components"]
        body["spec"]["services"] = {
            name: {"componentType": "worker", "topologyConstraint": inner} for name in names
        }
    return graphs_of([Manifest("f", body)])[0]


def changes(live: Graph, file: Graph) -> list[str]:
    return [
        f"{one.arguments['path']}: {one.arguments['change']}"
        for one in immutable_changes(live, file)
    ]


F = "spec.experimental.kvTransferPolicy"


@pytest.mark.parametrize(
    ("live", "file", "expected"),
    [
        (None, POLICY, "the file adds it"),
        (POLICY, None, "the file removes it"),
        (POLICY, {**POLICY, "domain": "rack"}, "the file changes domain from zone to rack"),
        (
            POLICY,
            {**POLICY, "enforcement": "preferred", "preferredWeight": 0.85},
            "the file changes enforcement from required to preferred, preferredWeight from "
            "nothing to 0.85",
        ),
        (
            POLICY,
            {"clusterTopologyName": "t", "domain": "zone"},
            "the file changes labelKey from topology.kubernetes.io/zone to nothing, "
            "clusterTopologyName from nothing to t",
        ),
    ],
)
def test_the_policy_cannot_change(live: Any, file: Any, expected: str):
    assert changes(graph(live), graph(file)) == [f"{F}: {expected}"]


@pytest.mark.parametrize(
    ("live", "file"),
    [
        (None, None),
        (POLICY, dict(POLICY)),
        ({**POLICY, "enforcement": "required"}, POLICY),
        (POLICY, {**POLICY, "clusterTopologyName": None}),
        (POLICY, {**POLICY, "noMatchPolicy": "fail"}),
        (
            {**POLICY, "enforcement": "preferred", "preferredWeight": 0.8500000238418579},
            {**POLICY, "enforcement": "preferred", "preferredWeight": 0.85},
        ),
    ],
)
def test_equal_meanings_are_not_a_change(live: Any, file: Any):
    assert changes(graph(live), graph(file)) == []


def test_constraints_of_the_graph_and_of_components_cannot_change():
    pack = {"clusterTopologyName": "t", "packDomain": "zone"}
    rack = {**pack, "packDomain": "rack"}
    assert changes(graph(constraint=pack, inner=rack), graph(constraint=rack)) == [
        "spec.topologyConstraint: the file changes packDomain from zone to rack",
        "spec.components[0].topologyConstraint: the file removes it",
    ]
    assert changes(graph(inner=pack), graph(inner=dict(pack))) == []


def test_both_versions_name_the_same_topology():
    old = graph(
        POLICY,
        {"topologyProfile": "t", "packDomain": "zone"},
        {"packDomain": "rack"},
        version="v1alpha1",
        names=("Decode",),
    )
    new = graph(POLICY, {"clusterTopologyName": "t", "packDomain": "zone"}, {"packDomain": "rack"})
    assert changes(old, new) == changes(new, old) == []


def test_components_come_and_go():
    packed = graph(inner={"packDomain": "rack"}, names=("decode", "more"))
    assert changes(graph(names=()), packed) == changes(packed, graph(names=())) == []


@pytest.mark.parametrize(
    "odd", ["text", 1, [1], {"preferredWeight": "x"}, {"preferredWeight": 1e99}]
)
def test_odd_values_are_compared_and_never_an_accident(odd: Any):
    assert changes(graph(odd, odd, odd), graph(odd, odd, odd)) == []
    for one in immutable_changes(graph(POLICY), graph(odd, odd, odd)):
        assert one.arguments["change"]


def test_a_finding_quotes_the_webhook_and_names_the_command():
    live, file = graph(POLICY), graph({**POLICY, "domain": "rack"})
    check: Check[None] = Check("DYT0112", lambda _: outcome(immutable_changes(live, file)))
    [result] = run([("transfer policy", [check])], None, catalogue()).checks
    [finding] = result.findings
    assert finding.subject == "DynamoGraphDeployment llm.prod"
    assert f"{F} is immutable and cannot be added, removed, or changed" in finding.value
    assert "kubectl delete dynamographdeployment llm -n prod" in finding.fix
