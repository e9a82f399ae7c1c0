"""Checks of Dynamo's operators: DYT03."""

from __future__ import annotations

from typing import Any

import pytest

from dynctl.adapters.ports import AccessReview
from dynctl.findings.report import CheckResult, State
from dynctl.verify.checks.operators import OPERATOR_CHECKS, Scope, scope, version
from dynctl.verify.cluster_facts import Account, VerifyFacts
from dynctl.verify.join import join
from dynctl.wire.kubernetes.objects import KubeDeployment
from tests.dynctl.verify.whole_cluster import (
    OPERATOR,
    OPERATOR_ACCESS,
    REFUSED,
    Cluster,
    judged,
    skipped,
    wrong,
)
from tests.kube.objects import accounts

DEPLOYMENT = f"Deployment {accounts.OPERATOR_NAME}.{accounts.OPERATOR_NAMESPACE}"
ACCOUNT = f"ServiceAccount {accounts.OPERATOR_NAME}.{accounts.OPERATOR_NAMESPACE}"
NODES, PODS, GROVE = OPERATOR_ACCESS
PODS_IN = AccessReview("patch", "pods", "", "prod")
OLD_GROVE = AccessReview("get", "clustertopologies", "grove.io")


def operator(name: str = "op", namespace: str = "system", **changes: Any) -> KubeDeployment:
    result: dict[str, Any] = {"replicas": 1, "ready": 1, "images": ("x/kubernetes-operator:1.6.1",)}
    return KubeDeployment(namespace, name, name, **{**result, **changes})


def results(cluster: Cluster | None = None, **changes: Any) -> dict[str, CheckResult]:
    return judged(OPERATOR_CHECKS, (cluster or Cluster()).joined(**changes))


def found(cluster: Cluster | None = None, **changes: Any) -> dict[str, list[str]]:
    return wrong(results(cluster, **changes))


@pytest.mark.parametrize("grove", [False, True])
def test_a_healthy_operator(grove: bool):
    checks = results(Cluster(grove=grove))
    assert {one.state for one in checks.values()} == {State.PASS}
    assert list(checks) == sorted(checks)
    assert checks["DYT0301"].message == f"1.6 ({DEPLOYMENT})"
    assert checks["DYT0304"].message == "kubernetes-operator:1.6.1"


def test_unreadable_lists_skip_the_checks_with_the_reason():
    checks = results(operators=REFUSED)
    assert {skipped(one) for one in checks.values()} == {(True, True)}
    checks = judged(OPERATOR_CHECKS, join(VerifyFacts()))
    assert {skipped(one) for one in checks.values()} == {(True, False)}


def test_without_a_policy_its_version_and_rights_do_not_matter():
    cluster = Cluster()
    del cluster.graph["spec"]["experimental"]
    checks = results(cluster, operators=(operator(images=("operator:1.1.0",)),))
    assert wrong(checks) == {}
    assert skipped(checks["DYT0303"]) == skipped(checks["DYT0304"]) == (True, False)


# -- there -----------------------------------------------------------------------------------------


def test_a_missing_operator_is_one_finding():
    checks = results(operators=())
    assert wrong(checks) == {"DYT0301": ["Deployment dynamo-operator"]}
    assert checks["DYT0301"].state is State.WARN
    assert {skipped(checks[code]) for code in checks if code != "DYT0301"} == {(True, False)}


def test_an_operator_that_watches_another_namespace_is_none():
    elsewhere = operator(args=("--restrictedNamespace=staging",))
    checks = results(operators=(elsewhere,))
    assert wrong(checks) == {"DYT0301": ["Deployment dynamo-operator"]}
    assert (
        "watches prod (the cluster has: Deployment op.system)"
        in checks["DYT0301"].findings[0].value
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ready": 0}, "0 of 1 replicas are ready"),
        ({"ready": 0, "replicas": 0}, "is scaled to 0 replicas"),
        ({"ready": 1, "replicas": 3}, ""),
    ],
)
def test_an_operator_must_be_ready(changes: dict[str, Any], says: str):
    checks = results(operators=(operator(**changes),))
    assert [one.value for one in checks["DYT0301"].findings] == ([says] if says else [])


# -- new enough ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (("nvcr.io/nvidia/ai-dynamo/kubernetes-operator:1.6.1",), (1, 6)),
        (("host:5000/dynamo-operator:v1.2.0-rc1@sha256:abc",), (1, 2)),
        (("gcr.io/kube-rbac-proxy:v0.15.0", "x/dynamo-operator:1.10"), (1, 10)),
        (("a:0.1", "b:0.2"), None),
        (("x/operator@sha256:abc",), None),
        (("host:5000/operator",), None),
        (("x/operator:latest",), None),
        (("x/operator:20260512.1",), None),
        (("x/operator:1.2345",), None),
        ((), None),
    ],
)
def test_versions_by_the_tag_of_the_image(images: tuple[str, ...], expected: Any):
    assert version(operator(images=images)) == expected


def test_an_operator_older_than_the_policy():
    checks = results(operators=(operator(images=("x/operator:1.1.9",)),))
    assert wrong(checks) == {"DYT0304": ["Deployment op.system"]}
    assert checks["DYT0304"].state is State.FAIL
    assert checks["DYT0304"].findings[0].value == "x/operator:1.1.9 is older than 1.2"


def test_an_image_without_a_version_is_not_checked():
    checks = results(operators=(operator(images=("x/operator:main",)),))["DYT0304"]
    assert (skipped(checks), checks.message) == ((True, False), "x/operator:main: version unknown")


# -- one -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), Scope()),
        (("--leader-elect",), Scope()),
        (("--restrictedNamespace=prod",), Scope("prod")),
        (("--restrictedNamespace", "prod"), Scope("prod")),
        (("--namespace=prod",), Scope("prod")),
        (("--restrictedNamespace=",), Scope()),
        (("--config=/etc/operator.yaml",), Scope(known=False)),
        (("--config=/etc/operator.yaml", "--restrictedNamespace=prod"), Scope("prod")),
    ],
)
def test_what_an_operator_watches(args: tuple[str, ...], expected: Scope):
    assert scope(operator(args=args)) == expected


WIDE, OTHER = operator("wide"), operator("wide", "other")
HERE = operator("here", args=("--restrictedNamespace=prod",))
HERE_TOO = operator("here", "prod", args=("--restrictedNamespace=prod",))
ELSEWHERE = operator("there", args=("--restrictedNamespace=staging",))
CONFIGURED = operator("configured", args=("--config=/etc/operator.yaml",))


@pytest.mark.parametrize(
    ("operators", "expected"),
    [
        ((WIDE, OTHER), ["Namespace prod"]),
        ((HERE, HERE_TOO), ["Namespace prod"]),
        ((WIDE, HERE), []),
        ((WIDE, OTHER, HERE), []),
        ((WIDE, ELSEWHERE), []),
        ((WIDE, operator("off", replicas=0, ready=0)), []),
        ((WIDE,), []),
    ],
)
def test_operators_in_charge_of_one_namespace(operators: Any, expected: list[str]):
    checks = results(operators=operators)
    assert wrong(checks).get("DYT0302", []) == expected
    assert skipped(checks["DYT0302"]) == (False, False)


def test_an_operator_whose_configuration_is_not_read():
    checks = results(operators=(WIDE, CONFIGURED))["DYT0302"]
    assert skipped(checks) == (True, False)
    assert (
        checks.message
        == "Deployment configured.system: its namespaces are in an unread configuration file"
    )
    assert results(operators=(CONFIGURED,))["DYT0302"].state is State.PASS
    assert results(operators=(HERE, CONFIGURED))["DYT0302"].state is State.PASS


# -- able ------------------------------------------------------------------------------------------


def may(**allowed: Any) -> dict[str, Any]:
    """The operator's account: all needed permissions, with changes."""
    answers = {NODES: True, PODS: True, GROVE: True, **allowed.pop("answers", {})}
    return {"operator_accounts": (Account(OPERATOR, answers),), **allowed}


@pytest.mark.seed("kubernetes-topology: troubleshooting: rights of the controller")
def test_nodes_that_it_may_not_read():
    checks = results(**may(answers={NODES: False}))
    assert wrong(checks) == {"DYT0303": [ACCOUNT]}
    assert checks["DYT0303"].state is State.FAIL
    [finding] = checks["DYT0303"].findings
    assert finding.value.startswith("cannot get nodes: it cannot read node labels")
    assert '{apiGroups: [""], resources: ["nodes"], verbs: ["get"]}' in finding.fix


def test_pods_that_it_may_not_patch():
    assert found(**may(answers={PODS: False})) == {"DYT0303": [ACCOUNT]}
    checks = results(**may(answers={PODS: False, PODS_IN: False}))["DYT0303"]
    assert [one.value for one in checks.findings] == [
        "cannot patch pods in prod: it cannot write the copied label"
    ]


def test_rights_in_the_namespace_are_enough_for_pods():
    assert found(**may(answers={PODS: False, PODS_IN: True})) == {}


def test_an_operator_of_one_namespace_needs_no_cluster_wide_pods():
    name = accounts.OPERATOR_NAME
    restricted = operator(name, accounts.OPERATOR_NAMESPACE, args=("--restrictedNamespace=prod",))
    checks = results(**may(answers={PODS: False}, operators=(restricted,)))["DYT0303"]
    assert skipped(checks) == (True, True)
    # Nodes belong to no namespace, so there the answer counts.
    both = results(**may(answers={PODS: False, NODES: False}, operators=(restricted,)))["DYT0303"]
    assert [one.value.partition(":")[0] for one in both.findings] == ["cannot get nodes"]
    assert both.message.startswith("unavailable: ")


@pytest.mark.seed("dep-topology: admission failures: Grove not installed")
def test_grove_topologies_matter_where_a_policy_names_one():
    assert found(**may(answers={GROVE: False})) == {}
    grove = Cluster(grove=True)
    assert found(grove, **may(answers={GROVE: False})) == {"DYT0303": [ACCOUNT]}
    assert found(grove, **may(answers={GROVE: False, OLD_GROVE: True})) == {}
    checks = results(grove, **may(answers={GROVE: False, OLD_GROVE: False}))["DYT0303"]
    assert len(checks.findings) == 1


def test_refused_reviews_are_not_permissions():
    checks = results(operator_accounts=(Account(OPERATOR, REFUSED),))["DYT0303"]
    assert (skipped(checks), checks.message) == ((True, True), f"{ACCOUNT}: forbidden")
    assert skipped(results(operator_accounts=())["DYT0303"]) == (True, False)


def test_accounts_of_operators_that_watch_other_namespaces_do_not_matter():
    other = Account("system:serviceaccount:system:there", {NODES: False})
    mine = Account("system:serviceaccount:system:wide", {NODES: True})
    checks = results(operators=(WIDE, ELSEWHERE), operator_accounts=(mine, other))
    assert wrong(checks) == {}
