"""Live graphs and their policies: lint's rules on a cluster, and what only a cluster can tell."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynctl.findings.report import CheckResult, State
from dynctl.manifests.lint.run import LINT_SECTIONS
from dynctl.verify.checks.policy import POLICY_CHECKS
from dynctl.verify.facts import VerifyFacts
from dynctl.verify.join import join
from dynctl.verify.live_graphs import LAST_APPLIED, last_applied, lint_facts
from tests.dynctl.verify.whole_cluster import REFUSED, Cluster, judged, skipped, wrong

GRAPH = "DynamoGraphDeployment my-llm.prod"
AGAIN = "a live policy cannot be edited: delete the graph, then apply it again"
_, LINT = LINT_SECTIONS[0]


def results(cluster: Cluster, **changes: Any) -> dict[str, CheckResult]:
    return judged(POLICY_CHECKS, cluster.joined(**changes))


def found(cluster: Cluster, **changes: Any) -> dict[str, list[str]]:
    return wrong(results(cluster, **changes))


def says(cluster: Cluster, code: str, **changes: Any) -> str:
    [finding] = results(cluster, **changes)[code].findings
    return finding.value


def apply(cluster: Cluster, **changes: Any) -> None:
    """What kubectl wrote down of the graph; ``changes`` lie over its spec."""
    body = {**cluster.graph, "spec": {**cluster.graph["spec"], **changes}}
    del body["status"]
    about = cluster.graph["metadata"].setdefault("annotations", {})
    about[LAST_APPLIED] = json.dumps(body)


@pytest.mark.parametrize("version", ["v1alpha1", "v1beta1"])
@pytest.mark.parametrize("grove", [False, True])
def test_a_healthy_graph_passes(version: str, grove: bool):
    cluster = Cluster(version=version, grove=grove)
    apply(cluster)
    told = results(cluster)
    assert {one.code for one in told.values() if one.state is not State.PASS} == set()
    assert told["DYT0101"].message == "my-llm.prod"
    assert told["DYT0102"].message == "my-llm.prod: zone, required"
    assert told["DYT0109"].message == "4 prefill, 8 decode"
    assert told["DYT0113"].message == "successful"


def test_every_rule_of_lint_is_judged_on_live_graphs():
    codes = [check.code for check in POLICY_CHECKS]
    assert {check.code for check in LINT} <= set(codes)
    assert codes == sorted(set(codes))


def test_what_cannot_be_read_is_skipped_and_said():
    assert {skipped(one) for one in results(Cluster(), graphs=REFUSED).values()} == {(True, True)}
    told = judged(POLICY_CHECKS, join(VerifyFacts()))
    assert {skipped(one) for one in told.values()} == {(True, False)}


# -- the graph -------------------------------------------------------------------------------------


def test_a_name_that_is_not_there():
    told = found(Cluster(), wanted=("my-llm", "my-lm"))
    assert told == {"DYT0101": ["DynamoGraphDeployment my-lm"]}
    assert says(Cluster(), "DYT0101", wanted=("my-llm", "my-lm")) == "does not exist in prod"


def test_pods_without_their_graph():
    told = results(Cluster(), graphs=())
    assert wrong(told) == {"DYT0101": [GRAPH]}
    [finding] = told["DYT0101"].findings
    assert finding.value == "does not exist, but has 13 pods"
    assert "kubectl delete pods -n prod -l nvidia.com/dynamo-graph-" in finding.fix
    assert told["DYT0102"].message == "no DynamoGraphDeployment"


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({}, "has no status: no operator has processed it"),
        (
            {"state": "pending", "conditions": [{"type": "Ready", "reason": "r", "message": "m"}]},
            "state pending: r, m",
        ),
        ({"state": "failed"}, "state failed"),
        ({"state": "successful", "observedGeneration": 0}, "generation 1 is not processed yet"),
        ({"conditions": [{"type": "Ready", "status": "False", "reason": "r"}]}, "is not Ready: r"),
        (
            {
                "state": "successful",
                "conditions": [
                    {
                        "type": "TopologyLevelsAvailable",
                        "status": "False",
                        "reason": "TopologyDefinitionNotFound",
                    }
                ],
            },
            "TopologyLevelsAvailable is False: TopologyDefinitionNotFound",
        ),
        ({"state": 1, "conditions": "odd", "observedGeneration": "x"}, ""),
    ],
)
def test_what_the_operator_reports(status: dict[str, Any], text: str):
    cluster = Cluster()
    cluster.graph["status"] = status
    told = results(cluster)
    assert wrong(told) == ({"DYT0113": [GRAPH]} if text else {})
    if text:
        assert told["DYT0113"].findings[0].value.startswith(text)
        assert told["DYT0113"].findings[0].fix.startswith("kubectl describe dynamographdeployment")


# -- the policy ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        ({"labelKey": "zone=a", "domain": "zone"}, "DYT0105"),
        ({"labelKey": "topology.kubernetes.io/zone", "domain": "Zone"}, "DYT0106"),
        ({"labelKey": "k", "domain": "zone", "enforcement": "preferred"}, "DYT0107"),
        ({"domain": "zone"}, "DYT0104"),
    ],
)
def test_a_live_policy_would_be_refused_today(policy: dict[str, Any], code: str):
    cluster = Cluster()
    cluster.graph["spec"]["experimental"]["kvTransferPolicy"] = policy
    told = results(cluster)
    assert wrong(told) == {code: [GRAPH]}
    [finding] = told[code].findings
    assert " would refuse it: spec.experimental.kvTransferPolicy" in finding.value
    assert finding.fix.endswith(AGAIN)


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        ({"labelKey": "example.com/rack", "domain": "zone"}, "DYT0108"),
        (
            {"labelKey": "k", "domain": "zone", "enforcement": "preferred", "preferredWeight": 0},
            "DYT0116",
        ),
        ({"labelKey": "k", "domain": "z" * 64}, "DYT0117"),
        ({"labelKey": "k", "domain": "zone", "fallback": True}, "DYT0114"),
    ],
)
def test_what_nobody_refuses(policy: dict[str, Any], code: str):
    cluster = Cluster()
    cluster.graph["spec"]["experimental"]["kvTransferPolicy"] = policy
    assert found(cluster) == {code: [GRAPH]}


def test_a_graph_without_a_policy_is_blind_to_topology():
    cluster = Cluster()
    del cluster.graph["spec"]["experimental"]
    told = results(cluster)
    assert wrong(told) == {"DYT0102": [GRAPH]}
    assert told["DYT0102"].state is State.WARN
    [finding] = told["DYT0102"].findings
    assert "delete it first" in finding.fix
    assert finding.value == (
        "no spec.experimental.kvTransferPolicy; its workers run in us-east-1a (4 decode, "
        "2 prefill), us-east-1b (4 decode, 2 prefill): KV cache can cross zones"
    )
    assert skipped(told["DYT0105"]) == (True, False)


def test_a_policy_that_was_applied_and_dropped_is_its_own_fault():
    cluster = Cluster()
    apply(cluster)
    del cluster.graph["spec"]["experimental"]
    told = results(cluster)
    assert wrong(told) == {"DYT0120": [GRAPH]}
    assert told["DYT0120"].state is State.FAIL
    assert "kubectl delete dynamographdeployment my-llm -n prod" in told["DYT0120"].findings[0].fix
    assert told["DYT0102"].state is State.SKIP


def test_another_graph_that_never_had_a_policy_is_still_seen():
    cluster = Cluster()
    apply(cluster)
    del cluster.graph["spec"]["experimental"]
    other = Cluster(name="other").graph
    del other["spec"]["experimental"]
    cluster.bodies.append(other)
    assert found(cluster) == {
        "DYT0102": ["DynamoGraphDeployment other.prod"],
        "DYT0120": [GRAPH],
    }


def test_a_field_that_was_applied_and_dropped():
    cluster = Cluster()
    policy = {**cluster.policy, "maxHops": 1}
    apply(cluster, experimental={"kvTransferPolicy": policy})
    assert found(cluster) == {"DYT0114": [GRAPH]}
    assert says(cluster, "DYT0114") == (
        "the API server removed a part of it: unknown field "
        '"spec.experimental.kvTransferPolicy.maxHops", last applied'
    )


# -- drafts ----------------------------------------------------------------------------------------


def test_a_draft_that_the_api_server_dropped_is_read_from_what_was_applied():
    cluster = Cluster()
    parts = cluster.graph["spec"]["components"]
    draft = {"level": "zone", "mismatchPolicy": "fail"}
    del cluster.graph["spec"]["experimental"]
    apply(cluster, components=[{**parts[0], "kvCacheTransferTopology": draft}, *parts[1:]])
    told = results(cluster)
    assert wrong(told) == {"DYT0103": [GRAPH]}
    [finding] = told["DYT0103"].findings
    assert finding.value.startswith("last applied spec.components[0]: kvCacheTransferTopology is")
    assert finding.fix == (
        "write spec.experimental.kvTransferPolicy: {labelKey: topology.kubernetes.io/zone, "
        f"domain: zone, enforcement: required}}; {AGAIN}"
    )


def test_a_draft_that_is_live_is_told_once():
    cluster = Cluster()
    main = cluster.component("decode-a")["podTemplate"]["spec"]["containers"][0]
    main["env"] = [{"name": "DYN_TOPOLOGY_DOMAIN", "value": "zone"}]
    apply(cluster)
    assert found(cluster) == {"DYT0103": [GRAPH]}


def test_a_dropped_draft_field_of_a_policy_is_a_draft_and_no_unknown_field():
    cluster = Cluster()
    policy = {**cluster.policy, "noMatchPolicy": "fail"}
    apply(cluster, experimental={"kvTransferPolicy": policy})
    assert found(cluster) == {"DYT0103": [GRAPH]}


def test_labels_of_drafts_on_pods_are_one_finding():
    cluster = Cluster()
    for pod in cluster.all("Pod"):
        pod["metadata"]["labels"]["grove.io/topology.zone"] = "us-east-1a"
    told = results(cluster)
    assert wrong(told) == {"DYT0103": ["Pod my-llm-decode-a-0.prod"]}
    assert says(cluster, "DYT0103").startswith(
        "metadata.labels, in this and 12 more pods: the label grove.io/topology.zone is a draft "
    )


def test_the_mount_of_a_draft_is_told_where_it_comes_from():
    mount = {"name": "topology", "mountPath": "/etc/podinfo/topology"}
    cluster = Cluster()
    pod = cluster.one("Pod", "my-llm-decode-a-0")
    pod["spec"]["containers"][0].setdefault("volumeMounts", []).append(mount)
    assert found(cluster) == {"DYT0103": ["Pod my-llm-decode-a-0.prod"]}
    main = cluster.component("decode-a")["podTemplate"]["spec"]["containers"][0]
    main["volumeMounts"] = [mount]
    assert found(cluster) == {"DYT0103": [GRAPH]}


def test_the_volume_of_a_draft():
    field = {"fieldPath": "metadata.labels['grove.io/topology.zone']"}
    volume = {"name": "t", "downwardAPI": {"items": [{"path": "zone", "fieldRef": field}]}}
    cluster = Cluster()
    cluster.one("Pod", "my-llm-prefill-a-1")["spec"]["volumes"].append(volume)
    assert found(cluster) == {"DYT0103": ["Pod my-llm-prefill-a-1.prod"]}


@pytest.mark.parametrize("told", ["", "{", "[]", "1", "null", '{"kind": "Pod"}', "[" * 100_000])
def test_an_odd_annotation_tells_nothing(told: str):
    cluster = Cluster()
    cluster.graph["metadata"]["annotations"] = {LAST_APPLIED: told}
    [graph] = lint_facts(cluster.joined()).graphs
    assert last_applied(graph) is None
    assert found(cluster) == {}


@pytest.mark.parametrize("odd", [None, 1, "text", [], {}, {"kvTransferPolicy": 1}])
def test_odd_shapes_of_what_was_applied_are_no_accident(odd: Any):
    cluster = Cluster()
    apply(cluster, experimental=odd, components=odd, topologyConstraint=odd)
    assert found(cluster) == {}


# -- roles -----------------------------------------------------------------------------------------


def one_typed_worker(cluster: Cluster) -> None:
    """The manifest says worker of all, as the documentation's own examples do."""
    for one in cluster.graph["spec"]["components"]:
        if one["type"] in ("prefill", "decode"):
            one["type"] = "worker"
            one["podTemplate"]["spec"]["containers"][0].pop("args")
            one["name"] = one["name"].replace("prefill", "first").replace("decode", "second")


def follow(cluster: Cluster) -> None:
    """Pods carry the labels that the operator makes of such components."""
    for pod in cluster.all("Pod"):
        labels = pod["metadata"]["labels"]
        if labels["nvidia.com/dynamo-component-type"] in ("prefill", "decode"):
            labels["nvidia.com/dynamo-component-type"] = "worker"
            labels.pop("nvidia.com/dynamo-sub-component-type", None)
            name = labels["nvidia.com/dynamo-component"]
            name = name.replace("prefill", "first").replace("decode", "second")
            labels["nvidia.com/dynamo-component"] = name
            pod["spec"]["containers"][0].pop("args")


def test_cards_tell_roles_that_the_manifest_does_not():
    cluster = Cluster()
    one_typed_worker(cluster)
    follow(cluster)
    told = results(cluster)
    assert wrong(told) == {}
    assert told["DYT0109"].message == "4 prefill, 8 decode"
    # Without cards nobody knows any role, so it looks like a graph that is not disaggregated.
    assert list(found(cluster, metadata=())) == ["DYT0115"]


def test_roles_that_are_told_in_part_are_asked_for():
    cluster = Cluster()
    one_typed_worker(cluster)
    follow(cluster)
    told = cluster.facts().metadata
    assert isinstance(told, tuple)
    some = tuple(one for one in told if "-prefill-a-" not in one.name)
    results_ = results(cluster, metadata=some)
    assert wrong(results_) == {"DYT0111": [GRAPH]}
    assert results_["DYT0111"].findings[0].value == (
        "component first-a: its role, prefill or decode, is not specified"
    )


def test_one_half_is_missing():
    cluster = Cluster()
    parts = cluster.graph["spec"]["components"]
    cluster.graph["spec"]["components"] = [one for one in parts if one["type"] != "decode"]
    assert found(cluster) == {"DYT0109": [GRAPH]}


def test_the_router_must_be_the_kv_router():
    cluster = Cluster()
    main = cluster.component("frontend")["podTemplate"]["spec"]["containers"][0]
    main["env"] = [{"name": "DYN_ROUTER_MODE", "value": "random"}]
    assert found(cluster) == {"DYT0110": [GRAPH]}
    assert says(cluster, "DYT0110") == "component frontend: router mode random"
    main["env"] = [{"name": "DYN_ROUTER_MODE", "valueFrom": {}}]
    assert skipped(results(cluster)["DYT0110"]) == (True, True)


def test_the_engine_runs_in_main():
    cluster = Cluster()
    cluster.component("decode-a")["podTemplate"]["spec"]["containers"][0]["name"] = "engine"
    assert found(cluster) == {"DYT0119": [GRAPH]}
    assert says(cluster, "DYT0119") == "the containers of component decode-a are engine"


def test_the_grove_pathway_has_a_check_of_its_own():
    cluster = Cluster(grove=True)
    cluster.graph["metadata"]["annotations"] = {"nvidia.com/enable-grove": "false"}
    assert found(cluster) == {}


def test_two_faults_are_both_seen():
    cluster = Cluster()
    cluster.policy["labelKey"] = "example.com/rack"
    main = cluster.component("frontend")["podTemplate"]["spec"]["containers"][0]
    del main["env"]
    assert list(found(cluster)) == ["DYT0108", "DYT0110"]
