"""Checks of node labels and of Grove topologies: DYT02."""

from __future__ import annotations

from typing import Any

import pytest

from dynctl.findings.report import CheckResult, State
from dynctl.manifests.lint.levels import LEVEL_CHECKS as LINT
from dynctl.verify.checks.nodes import NODE_CHECKS
from dynctl.verify.cluster_facts import VerifyFacts
from dynctl.verify.join import join
from tests.dynctl.verify.whole_cluster import REFUSED, SERVED, Cluster, judged, skipped, wrong
from tests.kube import objects
from tests.kube.objects import ZONE
from tests.kube.objects.nodes import RACK

GRAPH = "DynamoGraphDeployment my-llm.prod"
TOPOLOGY = "ClusterTopologyBinding cluster-levels"
A, B = "us-east-1a", "us-east-1b"


def results(cluster: Cluster, **changes: Any) -> dict[str, CheckResult]:
    return judged(NODE_CHECKS, cluster.joined(**changes))


def found(cluster: Cluster, **changes: Any) -> dict[str, list[str]]:
    return wrong(results(cluster, **changes))


def skips(result: dict[str, CheckResult], *, unread: bool) -> list[str]:
    return [code for code, one in result.items() if skipped(one) == (True, unread)]


GROVE_ONLY = ["DYT0201", "DYT0202", "DYT0203", "DYT0204", "DYT0208", "DYT0209", "DYT0210"]


def test_a_healthy_cluster_with_a_label_key():
    checks = results(Cluster())
    assert list(checks) == sorted(checks)
    assert {check.code for check in LINT} <= set(checks)
    assert skips(checks, unread=False) == [*GROVE_ONLY, "DYT0214"]
    assert wrong(checks) == {}
    assert checks["DYT0205"].message == "4 of 4 nodes with workers"
    assert checks["DYT0206"].message == f"4 of 4 nodes ({ZONE})"
    assert checks["DYT0207"].message == f"{A} 2, {B} 2 ({ZONE})"
    assert checks["DYT0212"].message == f"2 values ({ZONE})"


def test_a_healthy_cluster_with_grove():
    checks = results(Cluster(grove=True))
    assert {one.state for one in checks.values()} == {State.PASS}
    assert checks["DYT0201"].message == TOPOLOGY


def test_without_a_policy_nothing_is_judged():
    cluster = Cluster()
    del cluster.graph["spec"]["experimental"]
    assert skips(results(cluster), unread=False) == [check.code for check in NODE_CHECKS]


def test_without_a_cluster_nothing_is_judged():
    checks = judged(NODE_CHECKS, join(VerifyFacts()))
    assert skips(checks, unread=False) == [check.code for check in NODE_CHECKS]


@pytest.mark.parametrize("listing", ["nodes", "pods"])
def test_without_nodes_or_pods_labels_are_not_judged(listing: str):
    checks = results(Cluster(grove=True), **{listing: REFUSED})
    labels = ["DYT0205", "DYT0206", "DYT0207", "DYT0208", "DYT0212", "DYT0213", "DYT0214"]
    assert skips(checks, unread=True) == labels
    assert wrong(checks) == {}


def test_without_topologies_no_level_is_known():
    checks = results(Cluster(grove=True), topologies=REFUSED)
    assert skips(checks, unread=True) == [code for code in checks if code != "DYT0203"]
    # A graph that names a label itself is judged all the same.
    cluster = Cluster(grove=True)
    cluster.bodies += Cluster(name="other").all("DynamoGraphDeployment")
    checks = results(cluster, topologies=REFUSED)
    assert checks["DYT0206"].state is State.SKIP
    assert "my-llm.prod: the levels of cluster-levels: forbidden" in checks["DYT0206"].message
    assert wrong(results(Cluster(), topologies=REFUSED)) == {}


def test_without_graphs_the_label_comes_from_their_pods():
    checks = results(Cluster(), graphs=REFUSED)
    assert checks["DYT0205"].state is State.PASS
    assert skips(checks, unread=True) == ["DYT0202", "DYT0206", "DYT0209", "DYT0210", "DYT0211"]


# -- Grove -----------------------------------------------------------------------------------------


@pytest.mark.seed("dep-topology: admission failures: ClusterTopology not found")
def test_a_topology_that_is_not_there_is_one_fault():
    cluster = Cluster(grove=True)
    cluster.policy["clusterTopologyName"] = "levels"
    checks = results(cluster)
    assert wrong(checks) == {"DYT0201": [GRAPH]}
    assert checks["DYT0201"].findings[0].value == (
        "no topology is named levels (the cluster has: cluster-levels)"
    )
    assert checks["DYT0202"].message == "levels: does not exist (DYT0201)"


def test_a_topology_under_the_older_kind():
    cluster = Cluster(grove=True)
    cluster.one("ClusterTopologyBinding")["kind"] = "ClusterTopology"
    assert found(cluster) == {}


@pytest.mark.seed("dep-topology: admission failures: level not in ClusterTopology")
def test_a_domain_that_is_not_a_level():
    cluster = Cluster(grove=True)
    cluster.policy["domain"] = "block"
    checks = results(cluster)
    assert wrong(checks) == {"DYT0202": [GRAPH]}
    assert checks["DYT0202"].findings[0].value == (
        "the operator's webhook would refuse it: spec.experimental.kvTransferPolicy.domain "
        '"block" does not exist in ClusterTopology "cluster-levels"; available domains: '
        "[zone, rack]"
    )


@pytest.mark.seed("dep-topology: admission failures: Grove not installed")
def test_grove_may_be_off():
    cluster = Cluster(grove=True)
    cluster.graph["metadata"]["annotations"] = {"nvidia.com/enable-grove": "false"}
    checks = results(cluster)
    assert wrong(checks) == {"DYT0203": [GRAPH]}
    assert checks["DYT0203"].findings[0].fix == (
        "kubectl annotate dynamographdeployment my-llm -n prod nvidia.com/enable-grove-"
    )


def without_cliques(cluster: Cluster) -> None:
    for pod in cluster.all("Pod"):
        labels = pod["metadata"]["labels"]
        for key in [one for one in labels if one.startswith("grove.io/")]:
            del labels[key]


def test_grove_may_not_be_installed_or_not_used():
    cluster = Cluster(grove=True)
    without_cliques(cluster)
    served = {key: value for key, value in SERVED.items() if "podcliquesets" not in key}
    assert found(cluster, served=served) == {"DYT0203": [GRAPH]}
    assert found(cluster, grove_sets=()) == {"DYT0203": [GRAPH]}
    assert skipped(results(cluster, grove_sets=REFUSED)["DYT0203"]) == (True, True)
    assert skipped(results(cluster, served=REFUSED)["DYT0203"]) == (True, True)
    # Pods of Grove prove the pathway whatever the set is called.
    cluster.all("Pod")[3]["metadata"]["labels"]["grove.io/podclique"] = "x"
    assert found(cluster, grove_sets=()) == {}


def test_a_scheduler_that_has_other_levels():
    cluster = Cluster(grove=True)
    status = cluster.one("ClusterTopologyBinding")["status"]["schedulerTopologyStatuses"]
    status[0].update(inSync=False, message="levels differ")
    checks = results(cluster)
    assert wrong(checks) == {"DYT0204": [TOPOLOGY]}
    assert checks["DYT0204"].findings[0].value == (
        "scheduler kai-scheduler: its topology cluster-levels is not in sync: levels differ"
    )


def test_topologies_that_no_graph_names_are_not_judged():
    cluster = Cluster()
    levels = [("rack", RACK), ("zone", ZONE)]
    cluster.bodies.append(objects.cluster_topology(levels, name="other", in_sync=False))
    assert found(cluster) == {}


def test_levels_in_the_wrong_order_are_not_also_found_to_span():
    cluster = Cluster(grove=True)
    cluster.one("ClusterTopologyBinding")["spec"]["levels"].reverse()
    checks = results(cluster)
    assert wrong(checks) == {"DYT0210": [TOPOLOGY]}
    assert checks["DYT0208"].message == "cluster-levels: the levels are not in order (DYT0210)"


@pytest.mark.seed("kubernetes-topology: pipeline: placement")
def test_placement_by_another_domain():
    cluster = Cluster(grove=True)
    constraint = {"clusterTopologyName": "cluster-levels", "packDomain": "rack"}
    cluster.graph["spec"]["topologyConstraint"] = constraint
    assert found(cluster) == {"DYT0211": [GRAPH]}


def test_a_rack_that_spans_zones():
    cluster = Cluster(grove=True)
    cluster.labels("gpu-b-0")[RACK] = cluster.labels("gpu-a-0")[RACK]
    checks = results(cluster)
    assert wrong(checks) == {"DYT0208": [TOPOLOGY]}
    assert checks["DYT0208"].findings[0].value == (
        f"rack values in several zone values: {A}-r0 ({A}, {B})"
    )


BLOCK, REGION = "example.com/block", "topology.kubernetes.io/region"


def test_a_rack_spans_zones_on_a_node_without_the_level_between():
    cluster = Cluster(grove=True)
    levels = cluster.one("ClusterTopologyBinding")["spec"]["levels"]
    levels.insert(1, {"domain": "block", "key": BLOCK})
    for node in cluster.all("Node"):
        node["metadata"]["labels"][BLOCK] = f"{node['metadata']['labels'][ZONE]}-b0"
    del cluster.labels("gpu-b-0")[BLOCK]
    cluster.labels("gpu-b-0")[RACK] = cluster.labels("gpu-a-0")[RACK]
    checks = results(cluster)
    assert wrong(checks)["DYT0208"] == [TOPOLOGY]
    assert [one.value for one in checks["DYT0208"].findings] == [
        f"rack values in several zone values: {A}-r0 ({A}, {B})"
    ]


def in_regions(cluster: Cluster, *regions: str) -> None:
    """The first node of each zone is in the first region, the second in the last one."""
    for node in cluster.all("Node"):
        second = node["metadata"]["name"].endswith("-1")
        node["metadata"]["labels"][REGION] = regions[-1] if second else regions[0]


def test_a_zone_in_two_regions_is_one_zone_for_the_router():
    cluster = Cluster()
    in_regions(cluster, "us-east-1", "eu-west-1")
    checks = results(cluster)
    assert wrong(checks) == {"DYT0208": [f"Label {ZONE}"]}
    assert checks["DYT0208"].findings[0].value == (
        f"zone values in several region values: {A} (eu-west-1, us-east-1), "
        f"{B} (eu-west-1, us-east-1)"
    )


def test_a_zone_in_one_region_passes():
    cluster = Cluster()
    in_regions(cluster, "us-east-1")
    assert results(cluster)["DYT0208"].state is State.PASS


def test_a_region_of_nodes_without_workers_does_not_count():
    cluster = Cluster()
    in_regions(cluster, "us-east-1")
    spare(cluster, labels={REGION: "eu-west-1"}, zone=A, taints=["other"])
    assert results(cluster)["DYT0208"].state is State.PASS


@pytest.mark.parametrize(
    ("key", "domain", "spans"),
    [
        ("example.com/rack", "rack", True),
        ("example.com/r", "rack", True),
        ("example.com/rack", "group", True),
        # Whether a fabric is part of a zone is not known.
        ("example.com/fabric", "fabric", False),
    ],
)
def test_a_rack_of_a_label_key_in_two_zones(key: str, domain: str, spans: bool):
    cluster = Cluster()
    cluster.policy.update(labelKey=key, domain=domain)
    for node in cluster.all("Node"):
        node["metadata"]["labels"][key] = f"r{node['metadata']['name'][-1]}"
    assert ("DYT0208" in found(cluster)) is spans


# -- labels that are not there ---------------------------------------------------------------------


@pytest.mark.seed("kubernetes-topology: pipeline: label of the nodes")
def test_a_node_with_workers_and_without_the_label():
    cluster = Cluster()
    del cluster.labels("gpu-a-0")[ZONE]
    checks = results(cluster)
    assert wrong(checks) == {"DYT0205": ["Node gpu-a-0"]}
    [finding] = checks["DYT0205"].findings
    assert finding.value == f"label {ZONE} is missing; 3 worker pods on it"
    command = f"kubectl label node gpu-a-0 {ZONE}=us-east-1a"
    assert finding.fix == f"{command}, as its workers have it: they need no restart"


def test_pods_that_have_ended_host_nothing():
    cluster = Cluster()
    del cluster.labels("gpu-a-0")[ZONE]
    for pod in cluster.all("Pod"):
        if pod["spec"].get("nodeName") == "gpu-a-0":
            pod["status"]["phase"] = "Failed"
    assert found(cluster) == {}


def test_a_node_that_the_cluster_does_not_list_has_no_label_that_is_known():
    cluster = Cluster()
    cluster.bodies.remove(cluster.one("Node", "gpu-a-0"))
    result = results(cluster)["DYT0205"]
    assert skipped(result) == (True, False)
    assert result.message == "the cluster has no node gpu-a-0, where worker pods run"


def test_two_graphs_on_a_node_are_both_deleted_from_it():
    cluster = Cluster()
    other = Cluster(name="other")
    cluster.bodies += [*other.all("Pod"), other.graph]
    del cluster.labels("gpu-a-0")[ZONE]
    for pod in cluster.all("Pod"):
        pod["metadata"]["labels"].pop(ZONE, None)
    [finding] = results(cluster)["DYT0205"].findings
    assert finding.value.endswith("; 6 worker pods on it")
    assert finding.fix.startswith(
        f"kubectl label node gpu-a-0 {ZONE}=VALUE, then kubectl delete pod -n prod "
        "-l nvidia.com/dynamo-graph-deployment-name=my-llm --field-selector spec.nodeName=gpu-a-0"
    )
    assert finding.fix.count("kubectl delete pod -n prod") == 2
    assert finding.fix.endswith(" (ends 6 serving workers; one after the other is enough)")


def test_a_missing_further_level_does_not_stop_workers():
    cluster = Cluster(grove=True)
    del cluster.labels("gpu-a-0")[RACK]
    checks = results(cluster)
    assert wrong(checks) == {"DYT0214": ["Node gpu-a-0"]}
    assert checks["DYT0214"].state is State.WARN


def spare(cluster: Cluster, name: str = "spare", **wanted: Any) -> None:
    cluster.bodies.append(objects.node(name, **wanted))


def unpinned(**wanted: Any) -> Cluster:
    return Cluster(pinned=False, **wanted)


def test_nodes_on_which_the_next_worker_may_start():
    cluster = unpinned()
    for place in range(5):
        spare(cluster, f"spare-{place}")
    checks = results(cluster)
    assert wrong(checks) == {"DYT0206": [f"Label {ZONE}"]}
    [finding] = checks["DYT0206"].findings
    assert finding.value == (
        "missing on 5 nodes on which a worker may start: spare-0, spare-1, spare-2 and 2 more"
    )
    assert finding.fix.startswith(f"kubectl label node spare-0 {ZONE}=VALUE, or")


@pytest.mark.parametrize("wanted", [{"cordoned": True}, {"ready": False}, {"taints": ["gpu"]}])
def test_nodes_on_which_no_worker_starts(wanted: dict[str, Any]):
    cluster = unpinned()
    spare(cluster, **wanted)
    assert found(cluster) == {}


@pytest.mark.parametrize(("gpus", "expected"), [("8", ["DYT0206"]), ("0", []), (None, [])])
def test_a_node_without_gpus_runs_no_worker_that_needs_one(gpus: str | None, expected: list[str]):
    cluster = unpinned()
    spare(cluster)
    allocatable = cluster.one("Node", "spare")["status"]["allocatable"]
    allocatable["nvidia.com/gpu"] = gpus
    if gpus is None:
        del allocatable["nvidia.com/gpu"]
    for pod in cluster.all("Pod"):
        limits = {"cpu": "4", "nvidia.com/gpu": "1"}
        pod["spec"]["containers"][0]["resources"] = {"limits": limits}
    assert list(found(cluster)) == expected


def test_a_taint_that_the_template_tolerates():
    cluster = unpinned()
    spare(cluster, taints=["gpu"])
    tolerations = [{"key": "gpu", "operator": "Exists"}]
    cluster.component("decode")["podTemplate"]["spec"]["tolerations"] = tolerations
    assert found(cluster) == {"DYT0206": [f"Label {ZONE}"]}


@pytest.mark.parametrize(
    ("labels", "expected"), [({"pool": "gpu"}, ["DYT0206"]), ({"pool": "cpu"}, []), ({}, [])]
)
def test_a_selector_by_any_label_decides(labels: dict[str, str], expected: list[str]):
    cluster = unpinned()
    spare(cluster, labels=labels)
    for name in ("prefill", "decode"):
        cluster.component(name)["podTemplate"]["spec"]["nodeSelector"] = {"pool": "gpu"}
    assert list(found(cluster)) == expected


def test_pinned_workers_start_nowhere_without_the_label():
    cluster = Cluster()
    spare(cluster)
    assert found(cluster) == {}


# -- values ----------------------------------------------------------------------------------------


def test_an_empty_value():
    cluster = unpinned()
    cluster.labels("gpu-a-0")[ZONE] = ""
    spare(cluster, zone="")
    spare(cluster, "off", zone="", cordoned=True)
    checks = results(cluster)
    assert wrong(checks) == {"DYT0207": ["Node gpu-a-0", "Node spare"]}
    assert checks["DYT0207"].state is State.FAIL
    first, second = checks["DYT0207"].findings
    assert first.fix.startswith(f"kubectl label node --overwrite gpu-a-0 {ZONE}=VALUE, then kub")
    assert second.fix == f"kubectl label node --overwrite spare {ZONE}=VALUE"


def test_one_value_for_all():
    checks = results(Cluster(zones=(A,)))
    assert wrong(checks) == {"DYT0212": [f"Label {ZONE}"]}
    assert checks["DYT0212"].state is State.WARN
    assert (
        checks["DYT0212"].findings[0].value
        == f"all nodes with this label (2 nodes) have the value {A}"
    )


def test_values_that_differ_by_case_alone():
    cluster = Cluster()
    cluster.labels("gpu-a-0")[ZONE] = "US-East-1a"
    checks = results(cluster)
    assert wrong(checks) == {"DYT0213": [f"Label {ZONE}"]}
    [finding] = checks["DYT0213"].findings
    assert finding.value == f"{A} (1 node), US-East-1a (1 node)"
    assert finding.fix.startswith(f"kubectl label node --overwrite gpu-a-0 {ZONE}={A}, then kub")


def test_two_faults_are_both_seen():
    cluster = Cluster(grove=True)
    del cluster.labels("gpu-a-0")[ZONE]
    cluster.labels("gpu-b-1")[ZONE] = ""
    result = found(cluster)
    assert result == {"DYT0205": ["Node gpu-a-0"], "DYT0207": ["Node gpu-b-1"]}


def test_many_pods_of_a_node_are_one_finding():
    cluster = Cluster(prefill=50, decode=150, nodes_per_zone=4, pinned=False)
    for name in ("gpu-a-3", "gpu-b-0"):
        del cluster.labels(name)[ZONE]
    checks = results(cluster)
    assert wrong(checks) == {"DYT0205": ["Node gpu-a-3", "Node gpu-b-0"]}
    assert checks["DYT0205"].findings[0].value == f"label {ZONE} is missing; 49 worker pods on it"
