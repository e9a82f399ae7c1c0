"""Checks of capacity by domain, routers and live requests: DYT09."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynctl.adapters.ports import AccessReview
from dynctl.findings.report import CheckResult, State
from dynctl.verify.checks.capacity import CAPACITY_CHECKS, NO_ROUTER
from dynctl.verify.cluster_facts import ProbeAnswer, Registry, RouterView, VerifyFacts
from dynctl.verify.join import JoinedFacts, join
from dynctl.wire.kubernetes.worker_metadata import instance_id
from tests.dynctl.verify.scene import (
    DECODE,
    FRONTEND,
    GRAPH,
    PREFILL,
    REFUSED,
    A,
    B,
    Scene,
    subject,
    values,
)
from tests.dynctl.verify.whole_cluster import judged, skipped, wrong

UNREAD, SKIPPED = (True, True), (True, False)
REQUIRED = ("DYT0901", "DYT0902", "DYT0903", "DYT0907", "DYT0908")
PREFERRED = ("DYT0906", "DYT0909")
MODEL = "Qwen/Qwen3-0.6B"
COUNTED = f"{A} 2 prefill 4 decode, {B} 2 prefill 4 decode"
BARE: dict[str, Any] = dict.fromkeys(("topology_domains", "taints"))


def results(scene: Scene) -> dict[str, CheckResult]:
    return scene.judge(CAPACITY_CHECKS)


def registered(scene: Scene) -> JoinedFacts:
    """The same workers and routers, without Kubernetes."""
    routers = tuple(replace(one, graph="") for one in scene.routers)
    return join(VerifyFacts(registry=Registry("etcd", scene.registered()), routers=routers))


def not_ready(scene: Scene, *pods: str) -> None:
    for pod in pods:
        scene.pod(pod, ready=False)


def decode(zone: str) -> list[str]:
    return [f"my-llm-decode-{zone}-{number}" for number in range(4)]


def prefill(zone: str) -> list[str]:
    return [f"my-llm-prefill-{zone}-{number}" for number in range(2)]


def test_a_healthy_deployment_passes():
    checks = results(Scene())
    assert {checks[code].state for code in (*REQUIRED, "DYT0904")} == {State.PASS}
    assert {skipped(checks[code]) for code in (*PREFERRED, "DYT0905")} == {SKIPPED}
    assert checks["DYT0901"].message == COUNTED
    assert checks["DYT0904"].message == "12 of 12 workers"
    checks = results(Scene(enforcement="preferred"))
    assert {checks[code].state for code in (*PREFERRED, "DYT0904")} == {State.PASS}
    assert {skipped(checks[code]) for code in REQUIRED} == {SKIPPED}


def test_without_anything_nothing_is_judged():
    checks = judged(CAPACITY_CHECKS, join(VerifyFacts()))
    assert {skipped(one) for one in checks.values()} == {SKIPPED}


def test_what_workers_registered_could_not_be_read():
    scene = Scene()
    scene.changes["metadata"] = REFUSED
    checks = results(scene)
    assert {skipped(checks[code]) for code in (*REQUIRED, "DYT0904")} == {UNREAD}
    scene.changes = {"pods": REFUSED}
    checks = results(scene)
    assert {skipped(checks[code]) for code in (*REQUIRED, *PREFERRED, "DYT0904")} == {UNREAD}


# -- capacity by domain ----------------------------------------------------------------------------


@pytest.mark.seed("router-topology: troubleshooting: required returns no endpoint")
@pytest.mark.seed("kubernetes-topology: troubleshooting: required fails requests")
def test_a_domain_without_ready_decode_strands_its_prefill():
    scene = Scene()
    not_ready(scene, *decode("b"))
    checks = results(scene)
    assert wrong(checks) == {"DYT0901": [GRAPH]}
    assert values(checks["DYT0901"]) == [f"zone {B} has 2 prefill and no decode workers ready"]


def test_a_ready_pod_without_a_ready_endpoint_does_not_serve():
    scene = Scene()
    scene.endpoints = [
        replace(one, ready=False) if one.pod in decode("b") else one for one in scene.endpoints
    ]
    checks = results(scene)
    assert wrong(checks) == {"DYT0901": [GRAPH]}
    # Elsewhere it registers by itself, whatever slices say.
    scene = Scene(discovery="etcd")
    scene.registry = Registry("etcd", Scene().registered())
    assert not scene.endpoints
    assert results(scene)["DYT0901"].state is State.PASS


def test_preferred_crosses_where_required_strands():
    scene = Scene(enforcement="preferred")
    not_ready(scene, *decode("b"))
    assert wrong(results(scene)) == {"DYT0906": [GRAPH]}


def test_a_domain_hangs_on_one_decode_worker():
    scene = Scene(decode=2)
    not_ready(scene, "my-llm-decode-b-0")
    checks = results(scene)
    assert wrong(checks) == {"DYT0902": [GRAPH], "DYT0908": [GRAPH]}
    assert values(checks["DYT0902"]) == [f"zone {B} has one decode worker ready"]
    assert values(checks["DYT0908"]) == [f"{B} has 1:0.5, {A} has 1:1"]


def test_decode_without_prefill_is_idle():
    scene = Scene()
    not_ready(scene, *prefill("b"))
    checks = results(scene)
    assert wrong(checks) == {"DYT0907": [GRAPH]}
    assert values(checks["DYT0907"]) == [f"zone {B} has 4 decode and no prefill workers ready"]


def test_where_no_prefill_is_ready_nothing_is_stranded_and_nothing_passes():
    scene = Scene()
    not_ready(scene, *prefill("a"), *prefill("b"))
    checks = results(scene)
    assert wrong(checks) == {}
    assert checks["DYT0901"].message == "my-llm.prod: no ready prefill worker with a zone"
    assert {skipped(checks[c]) for c in ("DYT0901", "DYT0902", "DYT0907", "DYT0908")} == {SKIPPED}


def test_where_no_worker_is_registered_nothing_can_be_counted():
    scene = Scene()
    scene.metadata = {}
    checks = results(scene)
    assert {skipped(checks[code]) for code in REQUIRED} == {SKIPPED}
    assert checks["DYT0901"].message == "my-llm.prod: no worker is ready and registered (DYT0704)"


def test_an_aggregated_graph_is_not_judged():
    scene = Scene(prefill=0)
    checks = results(scene)
    assert {skipped(checks[code]) for code in REQUIRED} == {SKIPPED}
    assert checks["DYT0901"].message == "my-llm.prod: not disaggregated (DYT0109, DYT0115)"


def test_metadata_of_a_deleted_pod_is_not_capacity():
    scene = Scene()
    for name in decode("b"):
        scene.metadata[name] = replace(scene.metadata[name], owner_uid="gone")
    assert wrong(results(scene))["DYT0901"] == [GRAPH]


def test_a_decode_worker_counts_in_the_domain_of_its_taint():
    scene = Scene()
    for name in decode("b"):
        scene.card(name, taints=[f"dynamo.topology/zone={A}"])
    checks = results(scene)
    assert values(checks["DYT0901"]) == [f"zone {B} has 2 prefill and no decode workers ready"]


def test_a_decode_worker_with_taints_of_two_domains_serves_both():
    scene = Scene()
    for name in decode("b"):
        scene.card(name, taints=[f"dynamo.topology/zone={zone}" for zone in (A, B)])
    not_ready(scene, *decode("a"))
    assert "DYT0901" not in wrong(results(scene))


def in_namespace(scene: Scene, name: str, *pods: str) -> None:
    """Register workers in a Dynamo namespace of their own, as another generation does."""
    for pod in pods:
        item = scene.metadata[pod]
        data = {
            bucket: {
                f"{name}/{key.partition('/')[2]}": {**one, "namespace": name}
                for key, one in entries.items()
            }
            if bucket in ("endpoints", "model_cards")
            else {}
            for bucket, entries in item.data.items()
        }
        scene.metadata[pod] = replace(item, data=data)


def test_prefill_hands_over_within_its_generation():
    scene = Scene()
    in_namespace(scene, "new", *decode("b"))
    checks = results(scene)
    [text] = values(checks["DYT0901"])
    assert text.startswith(f"zone {B} has 2 prefill and no decode workers ready in Dynamo namesp")
    in_namespace(scene, "new", *prefill("b"))
    assert "DYT0901" not in wrong(results(scene))


def test_generations_of_one_role_each_serve_nothing():
    scene = Scene()
    in_namespace(scene, "new", *decode("a"), *decode("b"))
    assert len(values(results(scene)["DYT0901"])) == 2


@pytest.mark.parametrize(
    ("card", "why"),
    [
        ({"taints": ["other"]}, f"its card has {A} (DYT0804)"),
        (BARE, "its card has no zone"),
    ],
)
def test_a_decode_worker_without_the_taint_is_never_chosen(card: dict[str, Any], why: str):
    scene = Scene()
    scene.card(DECODE, **card)
    checks = results(scene)
    assert wrong(checks)["DYT0903"] == [subject(DECODE)]
    assert values(checks["DYT0903"]) == [f"taint dynamo.topology/zone is missing, {why}"]
    scene = Scene(enforcement="preferred")
    scene.card(DECODE, **card)
    assert wrong(results(scene)) == {"DYT0909": [subject(DECODE)]}


def test_a_prefill_worker_without_the_taint_is_chosen_all_the_same():
    scene = Scene()
    scene.card(PREFILL, taints=[])
    assert wrong(results(scene)) == {}


def test_two_models_of_a_graph_are_pools_of_their_own():
    scene = Scene()
    for name in [*decode("b"), *prefill("a")]:
        item = scene.metadata[name]
        [(key, card)] = item.data["model_cards"].items()
        renamed = {key: {**card, "card_json": {**card["card_json"], "display_name": "other"}}}
        scene.metadata[name] = replace(item, data={**item.data, "model_cards": renamed})
    checks = results(scene)
    assert values(checks["DYT0901"]) == [
        f"zone {B} has 2 prefill and no decode workers ready for {MODEL}",
        f"zone {A} has 2 prefill and no decode workers ready for other",
    ]


def test_registered_workers_count_without_kubernetes():
    scene = Scene()
    checks = judged(CAPACITY_CHECKS, registered(scene))
    assert {checks[code].state for code in (*REQUIRED, "DYT0904")} == {State.PASS}
    assert checks["DYT0901"].message == COUNTED
    for name in decode("b"):
        scene.gone(name)
    assert wrong(judged(CAPACITY_CHECKS, registered(scene))) == {"DYT0901": [f"Model {MODEL}"]}
    for name in scene.metadata:
        scene.card(name, kv_transfer_domain=None, kv_transfer_enforcement=None)
    checks = judged(CAPACITY_CHECKS, registered(scene))
    assert {skipped(checks[code]) for code in REQUIRED} == {SKIPPED}


# -- routers ---------------------------------------------------------------------------------------


def test_a_worker_that_the_router_misses_is_found():
    scene = Scene()
    scene.unknown(DECODE)
    checks = results(scene)
    assert wrong(checks) == {"DYT0904": [subject(DECODE)]}
    assert values(checks["DYT0904"]) == [
        f"worker {instance_id(DECODE):x} is unknown to {subject(FRONTEND)}"
    ]


def test_a_worker_that_the_router_misses_is_found_even_without_its_taint():
    scene = Scene()
    scene.card(DECODE, taints=[])
    scene.unknown(DECODE)
    checks = wrong(results(scene))
    assert checks["DYT0903"] == checks["DYT0904"] == [subject(DECODE)]


def test_undiscoverable_workers_are_left_to_earlier_codes():
    scene = Scene()
    scene.endpoints = [one for one in scene.endpoints if one.pod != DECODE]
    not_ready(scene, PREFILL)
    scene.unknown(DECODE)
    scene.unknown(PREFILL)
    checks = results(scene)
    assert "DYT0904" not in wrong(checks)
    assert checks["DYT0904"].message == "10 of 12 workers; the others: see DYT0702"


def test_without_routers_the_check_never_passes():
    scene = Scene()
    scene.routers = []
    checks = results(scene)
    assert skipped(checks["DYT0904"]) == SKIPPED
    assert checks["DYT0904"].message == NO_ROUTER
    review = AccessReview("create", "pods/portforward", "", "prod")
    scene.changes["access"] = {review: False}
    assert skipped(results(scene)["DYT0904"]) == UNREAD


def test_an_unreadable_router_is_unread_and_others_count():
    scene = Scene()
    scene.routers.append(RouterView("Pod my-llm-frontend-1.prod", "prod/my-llm", REFUSED))
    assert skipped(results(scene)["DYT0904"]) == UNREAD
    scene.unknown(DECODE)
    checks = results(scene)
    assert wrong(checks) == {"DYT0904": [subject(DECODE)]}
    assert checks["DYT0904"].message == "unavailable: forbidden"


def test_a_router_of_another_graph_does_not_count():
    scene = Scene()
    scene.routers = [replace(scene.routers[0], graph="prod/other", workers=frozenset())]
    checks = results(scene)
    assert checks["DYT0904"].message == "0 of 12 workers: no router of prod/my-llm was queried"


def test_a_router_that_was_named_by_url_is_of_the_only_graph():
    scene = Scene()
    scene.routers = [RouterView("http://localhost:8000", "", frozenset({1}))]
    assert len(results(scene)["DYT0904"].findings) == 12


# -- live requests ---------------------------------------------------------------------------------


def probed(scene: Scene, *answers: tuple[int, str, str | None, str | None]) -> CheckResult:
    """``answers``: status, message, prefill and decode pod."""
    scene.probe = tuple(
        ProbeAnswer(
            subject(FRONTEND),
            status,
            message,
            None if first is None else instance_id(first),
            None if second is None else instance_id(second),
        )
        for status, message, first, second in answers
    )
    return results(scene)["DYT0905"]


def test_requests_within_their_domain_pass():
    result = probed(
        Scene(), (200, "", PREFILL, DECODE), (200, "", "my-llm-prefill-b-0", decode("b")[0])
    )
    assert (result.state, result.message) == (State.PASS, "2 requests")


def test_requests_that_fail_or_cross_are_counted():
    failed = (500, "Failed to generate\ncompletions", None, None)
    result = probed(Scene(), failed, failed, (200, "", PREFILL, decode("b")[1]))
    assert [one.subject for one in result.findings] == [subject(FRONTEND)] * 2
    assert values(result) == [
        "2 of 3 requests: HTTP 500 Failed to generate completions",
        f"1 of 3 requests: prefill by {PREFILL} in {A}, decode by my-llm-decode-b-1 in {B}",
    ]


def test_a_decode_worker_without_a_taint_is_across():
    scene = Scene()
    scene.card(DECODE, taints=[])
    assert values(probed(scene, (200, "", PREFILL, DECODE)))[0].endswith("in no zone")


def test_preferred_requests_may_cross():
    scene = Scene(enforcement="preferred")
    result = probed(scene, (200, "", PREFILL, decode("b")[1]), (200, "", None, None))
    assert result.state is State.PASS


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((200, "", None, None), "the response does not name the workers that served it"),
        ((200, "", PREFILL, "unknown-pod"), "an unregistered worker served a request"),
        ((404, "no such model", None, None), "HTTP 404 no such model"),
        ((0, "connection refused", None, None), "connection refused"),
    ],
)  # fmt: skip
def test_incomplete_responses_never_pass(answer: Any, why: str):
    result = probed(Scene(), answer)
    assert skipped(result) == UNREAD
    assert result.message == f"{subject(FRONTEND)}: {why}"


def test_without_requests_the_probe_never_passes():
    assert skipped(probed(Scene())) == UNREAD


def test_a_frontend_is_named_by_its_url():
    scene = Scene()
    scene.probe = (ProbeAnswer("http://localhost:8000", 503, "busy"),)
    assert wrong(results(scene)) == {"DYT0905": ["Frontend http://localhost:8000"]}
