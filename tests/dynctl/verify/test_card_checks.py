"""Checks of the topology in model cards: DYT08."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynctl.findings.report import CheckResult, State
from dynctl.verify.checks.cards import CARD_CHECKS
from dynctl.verify.checks.discovery import DISCOVERY_CHECKS
from dynctl.verify.cluster_facts import Registry, VerifyFacts
from dynctl.verify.join import JoinedFacts, join
from tests.dynctl.verify.scene import (
    DECODE,
    GRAPH,
    PREFILL,
    REFUSED,
    SPACE,
    A,
    B,
    Scene,
    restart_fix,
    subject,
    values,
)
from tests.dynctl.verify.whole_cluster import judged, skipped, wrong
from tests.kube.objects import ZONE

UNREAD, SKIPPED = (True, True), (True, False)
BARE: dict[str, Any] = dict.fromkeys(
    ("topology_domains", "taints", "kv_transfer_domain", "kv_transfer_enforcement")
)
OF_GRAPHS = ("DYT0802", "DYT0803")


def results(scene: Scene) -> dict[str, CheckResult]:
    return scene.judge(CARD_CHECKS)


def registered(scene: Scene) -> JoinedFacts:
    """The same workers, without Kubernetes."""
    return join(VerifyFacts(registry=Registry("etcd", scene.registered())))


@pytest.mark.parametrize("wanted", [{}, {"grove": True}, {"enforcement": "preferred"}])
def test_a_healthy_deployment_passes(wanted: dict[str, Any]):
    checks = results(Scene(**wanted))
    assert {one.state for one in checks.values()} == {State.PASS}
    assert {one.message for one in checks.values()} == {"12 of 12 workers"}


def test_without_anything_nothing_is_judged():
    checks = judged(CARD_CHECKS, join(VerifyFacts()))
    assert {skipped(one) for one in checks.values()} == {SKIPPED}


def test_what_workers_registered_could_not_be_read():
    scene = Scene()
    scene.changes["metadata"] = REFUSED
    assert {skipped(one) for one in results(scene).values()} == {UNREAD}
    scene = Scene(discovery="etcd")
    checks = results(scene)
    assert {skipped(one) for one in checks.values()} == {SKIPPED}
    assert checks["DYT0801"].message == "0 of 12 workers: registered in etcd (use --discovery etcd)"
    scene.registry = Registry("etcd", REFUSED)
    assert {skipped(one) for one in results(scene).values()} == {UNREAD}


# -- against the link before -----------------------------------------------------------------------


def test_a_card_without_topology_is_found_once():
    scene = Scene()
    scene.card(DECODE, **BARE)
    checks = results(scene)
    assert wrong(checks) == {"DYT0801": [subject(DECODE)]}
    assert values(checks["DYT0801"]) == [f"its model card has no zone, the file has {A}"]


def test_a_card_is_compared_with_the_label_where_files_were_not_read():
    scene = Scene()
    scene.files = {}
    scene.card(DECODE, **BARE)
    scene.card(PREFILL, topology_domains={"zone": B}, taints=[f"dynamo.topology/zone={B}"])
    checks = results(scene)
    assert values(checks["DYT0801"]) == [f"its model card has no zone, the pod label has {A}"]
    assert values(checks["DYT0802"]) == [f"zone is {B}, the pod label has {A}"]


def test_a_level_that_is_missing_is_found():
    scene = Scene(grove=True)
    scene.card(DECODE, topology_domains={"zone": A}, taints=[f"dynamo.topology/zone={A}"])
    assert values(results(scene)["DYT0801"])[0].startswith("its model card has no rack, the file")


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"DYN_TOPOLOGY_ENABLED": None}, "DYT0501"),
        ({"DYN_TOPOLOGY_MOUNT_PATH": "/elsewhere"}, "DYT0501"),
    ],
)
def test_differences_from_wrong_variables_are_left_to_dyt0501(env: dict[str, Any], code: str):
    scene = Scene()
    scene.env(DECODE, **env)
    scene.card(DECODE, **BARE)
    checks = results(scene)
    assert wrong(checks) == {}
    assert checks["DYT0801"].message == f"11 of 12 workers; the others: see {code}"


def test_differences_from_a_wrong_volume_are_left_to_dyt0502():
    scene = Scene()
    scene.pod(DECODE, volumes=())
    scene.files[SPACE, DECODE] = REFUSED
    scene.card(DECODE, **BARE)
    checks = results(scene)
    assert wrong(checks) == {}
    assert checks["DYT0801"].message == "11 of 12 workers; the others: see DYT0502"


def test_a_pod_without_its_label_has_an_empty_card_rightly():
    scene = Scene()
    scene.label(DECODE, ZONE, None)
    scene.file(DECODE, "")
    scene.card(DECODE, **BARE)
    assert wrong(results(scene)) == {}


def test_a_card_of_before_is_found_by_value():
    scene = Scene()
    scene.card(DECODE, topology_domains={"zone": B}, taints=[f"dynamo.topology/zone={B}"])
    checks = results(scene)
    assert wrong(checks) == {"DYT0802": [subject(DECODE)]}
    assert values(checks["DYT0802"]) == [f"zone is {B}, the file has {A}"]
    assert checks["DYT0802"].findings[0].fix == restart_fix(DECODE)


def test_a_card_that_matches_a_wrong_file_is_not_a_second_fault():
    scene = Scene()
    scene.file(DECODE, B)
    scene.card(DECODE, topology_domains={"zone": B}, taints=[f"dynamo.topology/zone={B}"])
    assert wrong(results(scene)) == {}


def test_cards_that_a_pod_which_is_gone_wrote_are_not_judged():
    scene = Scene()
    scene.metadata[DECODE] = replace(scene.metadata[DECODE], owner_uid="gone")
    scene.card(DECODE, topology_domains={"zone": B})
    checks = results(scene)
    assert wrong(checks) == {}
    assert checks["DYT0802"].message == "11 of 12 workers; the others: see DYT0705"


@pytest.mark.parametrize("ready", [True, False])
def test_an_unregistered_worker_is_left_to_earlier_codes(ready: bool):
    scene = Scene()
    scene.gone(DECODE)
    scene.pod(DECODE, ready=ready)
    checks = results(scene)
    assert wrong(checks) == {}
    code = "DYT0704" if ready else "DYT0702"
    assert checks["DYT0801"].message == f"11 of 12 workers; the others: see {code}"


def test_further_ranks_have_no_cards():
    scene = Scene()
    for key, value in (("name", "x"), ("group-index", "0"), ("worker-index", "1")):
        scene.label(DECODE, f"leaderworkerset.sigs.k8s.io/{key}", value)
    scene.gone(DECODE)
    assert results(scene)["DYT0801"].message == "11 of 11 workers"


# -- the policy ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("kv_transfer_domain", "rack", "is rack, the policy has zone"),
        ("kv_transfer_domain", None, "is not set, the policy has zone"),
        ("kv_transfer_enforcement", "preferred", "is preferred, the policy has required"),
        ("kv_transfer_preferred_weight", 0.5, "is 0.5, the policy has none"),
    ],
)
def test_a_card_has_the_policy_of_the_graph(field: str, value: Any, says: str):
    scene = Scene()
    scene.card(DECODE, **{field: value})
    checks = results(scene)
    assert wrong(checks) == {"DYT0803": [subject(DECODE)]}
    assert values(checks["DYT0803"]) == [f"{field} {says}"]


@pytest.mark.parametrize(
    ("weight", "right"), [(0.8500000238418579, True), (0.851, False), (None, False)]
)
def test_a_weight_is_a_float32(weight: Any, right: bool):
    scene = Scene(enforcement="preferred")
    scene.card(DECODE, kv_transfer_preferred_weight=weight)
    assert wrong(results(scene)) == ({} if right else {"DYT0803": [subject(DECODE)]})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("kv_transfer_preferred_weight", "odd", "got 'odd'"),
        ("kv_transfer_preferred_weight", True, "got True"),
        ("kv_transfer_enforcement", ["x"], "must be 'required' or 'preferred', got ['x']"),
    ],
)
def test_a_card_with_a_value_of_another_type_is_no_readable_one(field: str, value: Any, says: str):
    """No router takes it, so the check of registrations names it."""
    scene = Scene()
    scene.card(DECODE, **{field: value})
    checks = scene.judge([*DISCOVERY_CHECKS, *CARD_CHECKS])
    assert wrong(checks) == {"DYT0704": [subject(DECODE)]}
    (text,) = values(checks["DYT0704"])
    assert "no readable model card" in text
    assert says in text


def test_a_card_that_matches_wrong_variables_is_left_to_dyt0501():
    scene = Scene(enforcement="preferred")
    scene.env(DECODE, DYN_KV_TRANSFER_PREFERRED_WEIGHT="0.5")
    scene.card(DECODE, kv_transfer_preferred_weight=0.5)
    assert "DYT0803" not in wrong(results(scene))
    scene.card(DECODE, kv_transfer_preferred_weight=0.6)
    assert "DYT0803" in wrong(results(scene))


# -- taints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("taints", [None, [], ["other"], [f"dynamo.topology/zone={B}"]])
def test_every_domain_has_its_taint(taints: Any):
    scene = Scene()
    scene.card(DECODE, taints=taints)
    checks = results(scene)
    assert wrong(checks) == {"DYT0804": [subject(DECODE)]}
    assert values(checks["DYT0804"]) == [f"no taint dynamo.topology/zone={A}"]


def test_the_taints_of_other_levels_count_as_well():
    scene = Scene(grove=True)
    scene.card(DECODE, taints=[f"dynamo.topology/zone={A}"])
    checks = results(scene)
    assert wrong(checks) == {"DYT0804": [subject(DECODE)]}
    assert values(checks["DYT0804"])[0].startswith("no taint dynamo.topology/rack=")


def test_without_topology_there_is_nothing_to_taint():
    scene = Scene()
    for name in scene.metadata:
        scene.card(name, **BARE)
    assert skipped(results(scene)["DYT0804"]) == SKIPPED


# -- one policy a model ----------------------------------------------------------------------------


def without_policy(scene: Scene) -> None:
    """The graph has no policy; its workers publish one by hand."""
    [graph] = scene.facts.graphs  # type: ignore[misc]
    spec = {**graph.body["spec"], "experimental": {}}
    scene.changes["graphs"] = (replace(graph, body={**graph.body, "spec": spec}),)


def test_workers_of_a_graph_without_a_policy_must_agree():
    scene = Scene()
    without_policy(scene)
    assert wrong(results(scene)) == {}
    scene.card(DECODE, kv_transfer_enforcement="preferred", kv_transfer_preferred_weight=0.5)
    checks = results(scene)
    assert wrong(checks) == {"DYT0805": [GRAPH]}
    [says] = values(checks["DYT0805"])
    assert says.startswith("workers of Qwen/Qwen3-0.6B publish zone required: ")
    assert says.endswith(f" and 8 more; zone preferred 0.5: {DECODE}")
    assert {skipped(checks[code]) for code in OF_GRAPHS} == {SKIPPED}


def test_a_worker_that_differs_from_its_graph_is_one_finding():
    scene = Scene()
    scene.card(DECODE, kv_transfer_enforcement="preferred", kv_transfer_preferred_weight=0.5)
    scene.card(PREFILL, **BARE)
    assert wrong(results(scene)) == {"DYT0801": [subject(PREFILL)], "DYT0803": [subject(DECODE)]}


# -- without Kubernetes ----------------------------------------------------------------------------


def test_registered_workers_are_checked_without_a_cluster():
    checks = judged(CARD_CHECKS, registered(Scene()))
    assert checks["DYT0801"].message == "12 of 12 workers"
    assert {checks[code].state for code in ("DYT0801", "DYT0804", "DYT0805")} == {State.PASS}
    assert {skipped(checks[code]) for code in OF_GRAPHS} == {SKIPPED}


def test_a_worker_without_topology_among_others_is_found():
    scene = Scene()
    scene.card(DECODE, **BARE)
    checks = judged(CARD_CHECKS, registered(scene))
    assert [one.value for one in checks["DYT0801"].findings] == [
        "publishes no topology, 11 of 12 workers of Qwen/Qwen3-0.6B do"
    ]
    assert set(wrong(checks)) == {"DYT0801"}


def test_a_worker_without_the_domain_of_a_policy_is_found():
    scene = Scene()
    scene.card(DECODE, topology_domains={"rack": "r1"}, taints=["dynamo.topology/rack=r1"])
    checks = judged(CARD_CHECKS, registered(scene))
    assert set(wrong(checks)) == {"DYT0801"}
    assert values(checks["DYT0801"]) == [
        "publishes no zone, 11 of 12 workers of Qwen/Qwen3-0.6B do"
    ]


def test_a_domain_without_a_policy_is_not_needed():
    scene = Scene()
    domains = {"zone": "us-east-1a", "rack": "r1"}
    taints = [f"dynamo.topology/{name}={value}" for name, value in domains.items()]
    scene.card(DECODE, topology_domains=domains, taints=taints)
    assert wrong(judged(CARD_CHECKS, registered(scene))) == {}
    scene.card(DECODE, kv_transfer_domain=["rack"])
    assert "DYT0801" not in wrong(judged(CARD_CHECKS, registered(scene)))


def test_workers_without_any_topology_are_not_a_fault():
    scene = Scene()
    for name in scene.metadata:
        scene.card(name, **BARE)
    checks = judged(CARD_CHECKS, registered(scene))
    assert wrong(checks) == {}
    assert skipped(checks["DYT0801"]) == SKIPPED


def test_registered_workers_that_disagree_are_found():
    scene = Scene()
    scene.card(DECODE, taints=[])
    scene.card(PREFILL, kv_transfer_enforcement="preferred", kv_transfer_preferred_weight=0.5)
    checks = judged(CARD_CHECKS, registered(scene))
    assert set(wrong(checks)) == {"DYT0804", "DYT0805"}
    assert wrong(checks)["DYT0805"] == ["Model Qwen/Qwen3-0.6B"]


def test_an_unreadable_registry_never_passes():
    refused = join(VerifyFacts(registry=Registry("etcd", REFUSED)))
    checks = judged(CARD_CHECKS, refused)
    assert {skipped(checks[code]) for code in ("DYT0801", "DYT0804", "DYT0805")} == {UNREAD}
    scene = Scene()
    scene.metadata = {}
    checks = judged(CARD_CHECKS, registered(scene))
    assert {skipped(one) for one in checks.values()} == {SKIPPED}
