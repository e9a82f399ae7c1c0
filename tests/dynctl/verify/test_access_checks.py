"""Checks of the cluster and of the user's permissions: DYT00."""

from __future__ import annotations

from typing import Any

import pytest

from dynctl.adapters.ports import AccessReview
from dynctl.findings.report import CheckResult, State
from dynctl.health.facts import Unread
from dynctl.verify.checks.access import ACCESS_CHECKS
from dynctl.verify.cluster_facts import GraphSchema, VerifyFacts
from dynctl.verify.join import JoinedFacts, join
from tests.dynctl.verify.whole_cluster import (
    ACCESS,
    FIELDS,
    REFUSED,
    SERVED,
    Cluster,
    judged,
    skipped,
    wrong,
)

GRAPHS = "CustomResourceDefinition dynamographdeployments.nvidia.com"


def results(cluster: Cluster | None = None, **changes: Any) -> dict[str, CheckResult]:
    return judged(ACCESS_CHECKS, (cluster or Cluster()).joined(**changes))


def test_a_healthy_cluster_passes_with_its_versions():
    checks = results()
    assert {one.state for one in checks.values()} == {State.PASS}
    assert list(checks) == sorted(checks)
    assert checks["DYT0001"].message == "Kubernetes v1.33.1"
    assert checks["DYT0003"].message == "v1alpha1, v1beta1"
    assert checks["DYT0004"].message == "4 of 4 permissions"


def test_an_unknown_version_is_not_a_fault():
    assert "version unknown" in results(version="")["DYT0001"].message


def test_without_a_cluster_nothing_is_judged():
    checks = judged(ACCESS_CHECKS, join(VerifyFacts()))
    assert {skipped(one) for one in checks.values()} == {(True, False)}


def served(**versions: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """``SERVED`` with other versions of a resource, by the first word of its name."""
    found = {key: versions.get(key.partition(".")[0], value) for key, value in SERVED.items()}
    return {key: value for key, value in found.items() if value}


@pytest.mark.parametrize(
    ("versions", "says"), [((), "is not served"), (("v2",), "is served only as v2")]
)
def test_graphs_must_be_served_in_a_version_that_can_be_read(versions: Any, says: str):
    checks = results(served=served(dynamographdeployments=versions))
    assert wrong(checks) == {"DYT0002": [GRAPHS]}
    assert checks["DYT0002"].findings[0].value == says


def test_metadata_must_be_served_where_workers_register_there():
    checks = results(served=served(dynamoworkermetadatas=()))
    assert list(wrong(checks)) == ["DYT0005"]
    assert checks["DYT0005"].findings[0].value.endswith("register in it: 12")
    checks = results(Cluster(discovery="etcd"), served=served(dynamoworkermetadatas=()))
    assert skipped(checks["DYT0005"]) == (True, False)


def test_unreadable_served_resources_skip_the_checks():
    checks = results(served=REFUSED)
    assert skipped(checks["DYT0002"]) == skipped(checks["DYT0005"]) == (True, True)


OLD = GraphSchema("v1alpha1", frozenset())
KNOWN = GraphSchema("v1beta1", frozenset(FIELDS))


def test_a_definition_without_the_policy_fails_even_where_no_graph_has_one():
    cluster = Cluster()
    del cluster.graph["spec"]["experimental"]
    checks = results(cluster, schemas=(OLD,))
    assert wrong(checks) == {"DYT0003": [GRAPHS]}
    assert checks["DYT0003"].findings[0].value.startswith("v1alpha1: no property spec.experimental")


@pytest.mark.parametrize(
    ("schemas", "says"),
    [
        ((OLD, KNOWN), "v1beta1; not in v1alpha1"),
        (
            (GraphSchema("v1beta1", frozenset({"labelKey", "domain"})),),
            "v1beta1; labelKey only",
        ),
    ],
)
def test_versions_without_the_policy_are_named(schemas: Any, says: str):
    result = results(schemas=schemas)["DYT0003"]
    assert (result.state, result.message) == (State.PASS, says)


@pytest.mark.parametrize(
    ("schemas", "unread"),
    [
        (REFUSED, True),
        ((), False),
        ((GraphSchema("v1alpha1", frozenset(), open=True),), False),
    ],
)
def test_an_open_definition_never_passes(schemas: Any, unread: bool):
    assert skipped(results(schemas=schemas)["DYT0003"]) == (True, unread)


def test_each_denied_verb_is_a_warning_with_the_rule_that_allows_it():
    checks = results(access={**dict.fromkeys(ACCESS, True), ACCESS[0]: False, ACCESS[2]: False})
    assert wrong(checks) == {"DYT0004": ["Resource nodes", "Resource pods/exec"]}
    nodes, exec_ = checks["DYT0004"].findings
    assert checks["DYT0004"].state is State.WARN
    assert nodes.value.startswith("list is denied: node labels are not compared")
    assert nodes.fix.endswith('{apiGroups: [""], resources: ["nodes"], verbs: ["list"]}')
    assert exec_.value.startswith("create is denied in prod: topology files")
    assert exec_.fix.endswith('resources: ["pods/exec"], verbs: ["create", "get"]}')


def test_a_verb_that_is_denied_in_many_namespaces_is_one_finding():
    reviews = [AccessReview("list", "pods", "", f"team-{place}") for place in range(50)]
    checks = results(access=dict.fromkeys(reviews, False))
    [finding] = checks["DYT0004"].findings
    assert "denied in team-0, team-1, team-10 and 47 more" in finding.value


def test_an_access_review_that_is_refused_is_not_a_permission():
    checks = results(access={ACCESS[0]: Unread("no access reviews"), ACCESS[1]: True})["DYT0004"]
    assert skipped(checks) == (True, True)
    assert checks.message == "list nodes: no access reviews"
    both = results(access={ACCESS[0]: Unread("no access reviews"), ACCESS[1]: False})["DYT0004"]
    assert both.message == "unavailable: list nodes: no access reviews"
    assert skipped(results(access={})["DYT0004"]) == (True, False)


def test_every_lost_check_is_a_code(every_review: tuple[AccessReview, ...]):
    checks = results(access=dict.fromkeys(every_review, False))
    for one in checks["DYT0004"].findings:
        assert "what needs it is skipped" not in one.value, one.subject


@pytest.fixture
def every_review() -> tuple[AccessReview, ...]:
    from dynctl.verify.gather.permissions import verify_reviews

    return verify_reviews("prod", ("clustertopologies", "clustertopologybindings"))


def test_the_checks_need_no_workers():
    assert judged(ACCESS_CHECKS, JoinedFacts(VerifyFacts(cluster=Cluster().facts(pods=()))))
