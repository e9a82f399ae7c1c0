"""Live graphs and their policies: DYT01 on a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynctl.findings.report import CheckResult, State
from dynctl.manifests.lint.run import LINT_SECTIONS
from dynctl.verify.checks.graphs import LIVE_GRAPH_CHECKS
from dynctl.verify.cluster_facts import VerifyFacts
from dynctl.verify.join import join
from dynctl.verify.live_graphs import LAST_APPLIED, last_applied, lint_facts
from tests.dynctl.verify.whole_cluster import REFUSED, Cluster, judged, skipped, wrong

GRAPH = "DynamoGraphDeployment my-llm.prod"
AGAIN = "a live policy cannot be edited: delete the graph, then apply it again"
_, LINT = LINT_SECTIONS[0]


def results(cluster: Cluster, **changes: Any) -> dict[str, CheckResult]:
    return judged(LIVE_GRAPH_CHECKS, cluster.joined(**changes))


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
    checks = results(cluster)
    assert {one.code for one in checks.values() if one.state is not State.PASS} == set()
    assert checks["DYT0101"].message == "my-llm.prod"
    assert checks["DYT0102"].message == "my-llm.prod: zone, required"
    assert checks["DYT0109"].message == "4 prefill, 8 decode"
    assert checks["DYT0113"].message == "successful"


def test_every_rule_of_lint_is_judged_on_live_graphs():
    codes = [check.code for check in LIVE_GRAPH_CHECKS]
    assert {check.code for check in LINT} <= set(codes)
    assert codes == sorted(set(codes))


def test_unreadable_lists_skip_the_checks_with_the_reason():
    assert {skipped(one) for one in results(Cluster(), graphs=REFUSED).values()} == {(True, True)}
    checks = judged(LIVE_GRAPH_CHECKS, join(VerifyFacts()))
    assert {skipped(one) for one in checks.values()} == {(True, False)}


# -- the graph -------------------------------------------------------------------------------------


@pytest.mark.seed("dep-topology: admission failures: ClusterTopology not found")
def test_a_name_that_is_not_there():
    result = found(Cluster(), wanted=("my-llm", "my-lm"))
    assert result == {"DYT0101": ["DynamoGraphDeployment my-lm"]}
    assert says(Cluster(), "DYT0101", wanted=("my-llm", "my-lm")) == "does not exist in prod"


def test_pods_without_their_graph():
    checks = results(Cluster(), graphs=())
    assert wrong(checks) == {"DYT0101": [GRAPH]}
    [finding] = checks["DYT0101"].findings
    assert finding.value == "does not exist, but has 13 pods"
    assert "kubectl delete pods -n prod -l nvidia.com/dynamo-graph-" in finding.fix
    assert checks["DYT0102"].message == "no DynamoGraphDeployment"


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
    checks = results(cluster)
    assert wrong(checks) == ({"DYT0113": [GRAPH]} if text else {})
    if text:
        assert checks["DYT0113"].findings[0].value.startswith(text)
        assert (
            checks["DYT0113"].findings[0].fix.startswith("kubectl describe dynamographdeployment")
        )


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
    checks = results(cluster)
    assert wrong(checks) == {code: [GRAPH]}
    [finding] = checks[code].findings
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
def test_graphs_that_kubernetes_accepts_are_still_found(policy: dict[str, Any], code: str):
    cluster = Cluster()
    cluster.graph["spec"]["experimental"]["kvTransferPolicy"] = policy
    assert found(cluster) == {code: [GRAPH]}


def test_a_graph_without_a_policy_is_blind_to_topology():
    cluster = Cluster()
    del cluster.graph["spec"]["experimental"]
    checks = results(cluster)
    assert wrong(checks) == {"DYT0102": [GRAPH]}
    assert checks["DYT0102"].state is State.WARN
    [finding] = checks["DYT0102"].findings
    assert "delete it first" in finding.fix
    assert finding.value == (
        "no spec.experimental.kvTransferPolicy; its workers run in us-east-1a (4 decode, "
        "2 prefill), us-east-1b (4 decode, 2 prefill): KV cache can cross zones"
    )
    assert skipped(checks["DYT0105"]) == (True, False)


def test_a_policy_that_was_applied_and_dropped_is_its_own_fault():
    cluster = Cluster()
    apply(cluster)
    del cluster.graph["spec"]["experimental"]
    checks = results(cluster)
    assert wrong(checks) == {"DYT0120": [GRAPH]}
    assert checks["DYT0120"].state is State.FAIL
    assert (
        "kubectl delete dynamographdeployment my-llm -n prod" in checks["DYT0120"].findings[0].fix
    )
    assert checks["DYT0102"].state is State.SKIP


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


@pytest.mark.seed("dep-topology: names: kvCacheTransferTopology")
def test_a_draft_that_the_api_server_dropped_is_read_from_what_was_applied():
    cluster = Cluster()
    parts = cluster.graph["spec"]["components"]
    draft = {"level": "zone", "mismatchPolicy": "fail"}
    del cluster.graph["spec"]["experimental"]
    apply(cluster, components=[{**parts[0], "kvCacheTransferTopology": draft}, *parts[1:]])
    checks = results(cluster)
    assert wrong(checks) == {"DYT0103": [GRAPH]}
    [finding] = checks["DYT0103"].findings
    assert finding.value.startswith("last applied spec.components[0]: kvCacheTransferTopology is")
    assert finding.fix == (
        "write spec.experimental.kvTransferPolicy: {labelKey: topology.kubernetes.io/zone, "
        f"domain: zone, enforcement: required}}; {AGAIN}"
    )


def test_a_live_draft_is_one_finding():
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


@pytest.mark.seed("dep-topology: pod labels: grove.io/topology labels")
def test_labels_of_drafts_on_pods_are_one_finding():
    cluster = Cluster()
    for pod in cluster.all("Pod"):
        pod["metadata"]["labels"]["grove.io/topology.zone"] = "us-east-1a"
    checks = results(cluster)
    assert wrong(checks) == {"DYT0103": ["Pod my-llm-decode-a-0.prod"]}
    assert says(cluster, "DYT0103").startswith(
        "metadata.labels, in this and 12 more pods: the label grove.io/topology.zone is a draft "
    )


@pytest.mark.seed("dep-topology: pod labels: /etc/podinfo/topology")
def test_the_mount_of_a_draft_is_found_at_its_source():
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


@pytest.mark.parametrize(
    "annotation", ["", "{", "[]", "1", "null", '{"kind": "Pod"}', "[" * 100_000]
)
@pytest.mark.usefixtures("no_collection")
def test_an_invalid_last_applied_annotation_is_ignored(annotation: str):
    cluster = Cluster()
    cluster.graph["metadata"]["annotations"] = {LAST_APPLIED: annotation}
    [graph] = lint_facts(cluster.joined()).graphs
    assert last_applied(graph) is None
    assert found(cluster) == {}


@pytest.mark.parametrize("odd", [None, 1, "text", [], {}, {"kvTransferPolicy": 1}])
def test_invalid_applied_policies_do_not_crash(odd: Any):
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


@pytest.mark.seed("router-topology: operational notes: disaggregated only")
def test_roles_come_from_cards_if_the_manifest_has_none():
    cluster = Cluster()
    one_typed_worker(cluster)
    follow(cluster)
    checks = results(cluster)
    assert wrong(checks) == {}
    assert checks["DYT0109"].message == "4 prefill, 8 decode"
    # Without cards all roles are unknown, so the graph looks aggregated.
    assert list(found(cluster, metadata=())) == ["DYT0115"]


def test_partly_specified_roles_are_found():
    cluster = Cluster()
    one_typed_worker(cluster)
    follow(cluster)
    result = cluster.facts().metadata
    assert isinstance(result, tuple)
    some = tuple(one for one in result if "-prefill-a-" not in one.name)
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


@pytest.mark.seed("router-guide: deployments: DYN_ROUTER_MODE of the frontend")
@pytest.mark.seed("router-topology: operational notes: router mode kv")
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
