"""Lint with a cluster: the graph changes in the file, the cluster stays the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dynctl.findings.report import CheckResult, Report, State
from dynctl.health.facts import Unread
from dynctl.manifests.files import Manifest
from dynctl.verify.cluster_facts import VerifyFacts
from dynctl.verify.cluster_lint import SECTION, lint_report
from tests.dynctl.verify.whole_cluster import Cluster


def judged(cluster: Cluster, graph: dict[str, Any], **changes: Any) -> Report:
    facts = VerifyFacts(cluster=cluster.facts(**changes))
    return lint_report([Manifest("deploy.yaml", graph)], facts, "prod")


def result(report: Report, code: str) -> CheckResult:
    section = next(one for one in report.sections if one.name == SECTION)
    return next(one for one in section.checks if one.code == code)


def file_of(cluster: Cluster) -> dict[str, Any]:
    graph = copy.deepcopy(cluster.graph)
    graph["metadata"].pop("namespace")
    return graph


def test_a_file_that_is_what_runs_has_nothing_against_it() -> None:
    cluster = Cluster()
    report = judged(cluster, file_of(cluster))

    states = {one.code: one.state for one in report.checks if one.section == SECTION}
    assert State.FAIL not in states.values()
    assert states["DYT0112"] is State.PASS
    assert states["DYT0215"] is State.PASS


def test_a_changed_policy_of_a_running_graph_is_refused_before_it_is_applied() -> None:
    cluster = Cluster()
    graph = file_of(cluster)
    graph["spec"]["experimental"]["kvTransferPolicy"].update(
        enforcement="preferred", preferredWeight=0.85
    )

    check = result(judged(cluster, graph), "DYT0112")

    assert check.state is State.FAIL
    assert "enforcement from required to preferred" in check.findings[0].value


def test_a_graph_that_is_new_changes_nothing() -> None:
    cluster = Cluster()
    graph = file_of(cluster)
    graph["metadata"]["name"] = "another"

    check = result(judged(cluster, graph), "DYT0112")

    assert check.state is State.SKIP
    assert not check.unread


def test_graphs_that_may_not_be_read_are_not_called_unchanged() -> None:
    cluster = Cluster()
    check = result(judged(cluster, file_of(cluster), graphs=Unread("forbidden")), "DYT0112")

    assert check.state is State.SKIP
    assert check.unread


def test_a_zone_that_no_node_has_is_found() -> None:
    cluster = Cluster()
    graph = file_of(cluster)
    component = next(o for o in graph["spec"]["components"] if o["name"] == "decode-b")
    component["podTemplate"]["spec"]["nodeSelector"] = {"topology.kubernetes.io/zone": "us-east-1c"}

    check = result(judged(cluster, graph), "DYT0215")

    assert check.state is State.FAIL
    assert check.findings[0].subject == "DynamoGraphDeployment my-llm.prod"
    assert "decode-b" in check.findings[0].value
    assert "us-east-1c" in check.findings[0].value
    assert "us-east-1a, us-east-1b" in check.findings[0].value


def test_nodes_without_the_label_that_the_file_names_are_found() -> None:
    cluster = Cluster(pinned=False)
    graph = file_of(cluster)
    graph["spec"]["experimental"]["kvTransferPolicy"]["labelKey"] = "example.com/row"
    graph["metadata"]["name"] = "another"

    check = result(judged(cluster, graph), "DYT0206")

    assert check.state in (State.WARN, State.FAIL)
    assert "example.com/row" in check.findings[0].value + check.findings[0].subject


@pytest.mark.seed("dep-topology: admission failures: ClusterTopology not found")
def test_a_grove_topology_that_is_not_there_is_found() -> None:
    cluster = Cluster()
    graph = file_of(cluster)
    policy = graph["spec"]["experimental"]["kvTransferPolicy"]
    policy.pop("labelKey")
    policy["clusterTopologyName"] = "nowhere"
    graph["metadata"]["name"] = "another"

    assert result(judged(cluster, graph), "DYT0201").state is State.FAIL


@pytest.mark.seed("dep-topology: admission failures: level not in ClusterTopology")
def test_a_domain_outside_the_levels_of_the_clusters_topology_is_found() -> None:
    cluster = Cluster(grove=True)
    graph = file_of(cluster)
    graph["spec"]["experimental"]["kvTransferPolicy"]["domain"] = "row"
    graph["metadata"]["name"] = "another"

    check = result(judged(cluster, graph), "DYT0202")

    assert check.state is State.FAIL
    assert "row" in check.findings[0].value


def test_a_graph_that_is_not_applied_yet_needs_no_clique_set() -> None:
    cluster = Cluster(grove=True)
    graph = file_of(cluster)
    graph["metadata"]["name"] = "another"
    report = judged(cluster, graph)

    assert result(report, "DYT0202").state is State.PASS
    assert not [one.code for one in report.checks if one.state is State.FAIL]
