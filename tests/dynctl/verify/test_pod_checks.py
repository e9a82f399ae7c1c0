"""Checks of worker pods and of the labels that the operator copies to them: DYT04."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynctl.findings.report import CheckResult, State
from dynctl.verify.checks.pods import POD_CHECKS
from dynctl.verify.cluster_facts import VerifyFacts
from dynctl.verify.join import join
from dynctl.wire.kubernetes.names import (
    CLUSTER_TOPOLOGY_ANNOTATION,
    DOMAIN_LABEL_PREFIX,
    LABEL_KEY_ANNOTATION,
    LABEL_MISSING_REASON,
    WORKER_HASH_LABEL,
)
from dynctl.wire.kubernetes.objects import ObjectEvent, Termination
from tests.dynctl.verify.scene import (
    DECODE,
    GRAPH,
    NODE,
    NOW,
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


def results(scene: Scene) -> dict[str, CheckResult]:
    return scene.judge(POD_CHECKS)


def edited_graph(scene: Scene, **changes: Any) -> None:
    """Change fields of the graph's spec."""
    [graph] = scene.facts.graphs  # type: ignore[misc]
    body = {**graph.body, "spec": {**graph.body["spec"], **changes}}
    scene.changes["graphs"] = (replace(graph, body=body),)


def components(scene: Scene) -> list[dict[str, Any]]:
    [graph] = scene.facts.graphs  # type: ignore[misc]
    return [dict(one) for one in graph.body["spec"]["components"]]


def event(scene: Scene, pod: str = DECODE, **changes: Any) -> None:
    message = (
        f'Node "{NODE}" does not have required topology label "{ZONE}"; topology metadata will '
        "remain unavailable"
    )
    uid = scene.pods[pod].uid
    result = ObjectEvent(SPACE, pod, uid, LABEL_MISSING_REASON, message, 2, NOW - 600)
    scene.events.append(replace(result, **changes))


def test_a_healthy_deployment_passes():
    checks = results(Scene())
    assert list(checks) == sorted(checks)
    assert {one.state for code, one in checks.items() if code != "DYT0407"} == {State.PASS}
    assert checks["DYT0401"].message == "12 of 12"
    assert checks["DYT0403"].message == "12 of 12 pods"


def test_a_healthy_grove_deployment_passes():
    checks = results(Scene(grove=True))
    assert {one.state for code, one in checks.items() if code != "DYT0407"} == {State.PASS}


def test_without_a_cluster_nothing_is_judged():
    checks = judged(POD_CHECKS, join(VerifyFacts()))
    assert {skipped(one) for one in checks.values()} == {SKIPPED}


def test_pods_that_could_not_be_read_are_never_a_pass():
    scene = Scene()
    scene.changes["pods"] = REFUSED
    checks = results(scene)
    assert {skipped(one) for code, one in checks.items() if code != "DYT0406"} == {UNREAD}


def test_unreadable_graphs_are_checked_by_their_pods():
    scene = Scene()
    scene.changes["graphs"] = REFUSED
    checks = results(scene)
    assert checks["DYT0403"].state is State.PASS
    assert skipped(checks["DYT0406"]) == UNREAD
    assert skipped(checks["DYT0409"]) == SKIPPED


def test_neither_graphs_nor_a_policy_in_pods_is_unread():
    scene = Scene()
    scene.changes |= {"graphs": REFUSED, "pods": ()}
    assert skipped(results(scene)["DYT0403"]) == UNREAD


def test_a_graph_without_a_policy_is_not_judged():
    scene = Scene()
    edited_graph(scene, experimental={})
    checks = results(scene)
    assert skipped(checks["DYT0401"]) == skipped(checks["DYT0403"]) == SKIPPED


# -- are they there --------------------------------------------------------------------------------


def test_a_graph_without_pods_is_found_once():
    scene = Scene()
    scene.pods = {}
    checks = results(scene)
    assert wrong(checks) == {"DYT0401": [GRAPH]}
    assert values(checks["DYT0401"]) == ["no worker pod, expected 12"]
    assert skipped(checks["DYT0403"]) == skipped(checks["DYT0409"]) == SKIPPED


def test_a_graph_that_is_scaled_to_nothing_is_right():
    scene = Scene()
    scene.pods = {}
    edited_graph(scene, components=[{**one, "replicas": 0} for one in components(scene)])
    assert wrong(results(scene)) == {}


def test_a_graph_that_is_being_deleted_lacks_no_pods():
    scene = Scene()
    scene.pods = {name: replace(one, deleting=True) for name, one in scene.pods.items()}
    [graph] = scene.facts.graphs  # type: ignore[misc]
    about = {**graph.body["metadata"], "deletionTimestamp": "2026-11-21T11:59:00Z"}
    scene.changes["graphs"] = (replace(graph, body={**graph.body, "metadata": about}),)
    assert wrong(results(scene)) == {}


def test_pods_that_ended_or_are_being_deleted_do_not_count():
    scene = Scene()
    scene.pod(DECODE, phase="Failed", ready=False)
    scene.pod(PREFILL, deleting=True)
    checks = results(scene)
    assert wrong(checks) == {"DYT0409": [GRAPH, GRAPH]}
    assert values(checks["DYT0409"]) == ["prefill-a has 1 of 2 pods", "decode-a has 3 of 4 pods"]


def test_replicas_over_several_nodes_need_as_many_pods():
    scene = Scene()
    several = [
        {**one, "multinode": {"nodeCount": 2}} if one["name"] == "decode-a" else one
        for one in components(scene)
    ]
    edited_graph(scene, components=several)
    checks = results(scene)
    assert values(checks["DYT0401"]) == []
    assert values(checks["DYT0409"]) == ["decode-a has 4 of 8 pods"]


def test_a_pending_pod_is_there_and_does_not_run():
    scene = Scene()
    scene.not_started(DECODE)
    scene.pod(DECODE, phase="Pending", node="", scheduled=None)
    scene.main(DECODE, waiting="")
    scene.label(DECODE, ZONE, None)
    checks = results(scene)
    assert wrong(checks) == {"DYT0410": [subject(DECODE)]}
    assert values(checks["DYT0410"]) == ["Pending for 60 min: not scheduled"]
    [finding] = checks["DYT0410"].findings
    assert finding.fix == f"find the reason: kubectl describe pod {DECODE} -n {SPACE}"
    assert checks["DYT0403"].message == "11 of 12 pods; the others: see DYT0410"


@pytest.mark.parametrize(
    ("main", "says"),
    [
        ({"waiting": "ImagePullBackOff"}, "Running for 60 min: ImagePullBackOff"),
        ({"waiting": ""}, f"Running for 60 min: not started on {NODE}"),
        (
            {"waiting": "", "last_end": Termination(137)},
            "Running for 60 min: ended with exit code 137",
        ),
    ],
)
def test_an_engine_that_does_not_run_is_found_with_its_reason(main: dict[str, Any], says: str):
    scene = Scene()
    scene.main(DECODE, running_since=None, **main)
    assert values(results(scene)["DYT0410"]) == [says]


EDIT = "component decode-a: kubectl edit dynamographdeployment my-llm -n prod"
LOGS = f"kubectl logs {DECODE} -n {SPACE} --previous"


@pytest.mark.parametrize(
    ("waiting", "reason", "message", "fix"),
    [
        (
            "ImagePullBackOff",
            "Failed",
            'Failed to pull image "engine:9": not found',
            f"correct image engine:9, or its pull secret, in {EDIT}",
        ),
        (
            "CreateContainerConfigError",
            "Failed",
            'Error: secret "token" not found',
            f"create the Secret or ConfigMap that the event names, or correct {EDIT}",
        ),
        (
            "CrashLoopBackOff",
            "BackOff",
            "Back-off restarting failed container main",
            f"{LOGS}; then correct {EDIT}, or apply the graph as it was before",
        ),
    ],
)
def test_the_event_of_a_stopped_engine_and_its_fix(
    waiting: str, reason: str, message: str, fix: str
):
    scene = Scene()
    scene.main(DECODE, running_since=None, waiting=waiting, image="engine:9")
    uid = scene.pods[DECODE].uid
    event = ObjectEvent(SPACE, DECODE, uid, reason, message, at=NOW - 30)
    older = replace(event, message="an older one", at=NOW - 60)
    earlier_pod = replace(event, message="of the pod before", uid="other", at=NOW)
    bare = replace(event, message=f"Error: {waiting}", at=NOW - 1)
    scene.warnings += [event, older, earlier_pod, bare]
    [finding] = results(scene)["DYT0410"].findings
    assert finding.value == f"Running for 60 min: {waiting}; event {reason}, 30 s ago: {message}"
    assert finding.fix == fix


@pytest.mark.parametrize("place", ["pod", "component", "graph"])
def test_a_crash_under_recreate_names_the_pods_that_are_left(place: str):
    scene = Scene()
    strategy = {"nvidia.com/deployment-strategy": "Recreate"}
    for number in range(4):
        name = f"my-llm-decode-a-{number}"
        scene.main(name, running_since=None, waiting="CrashLoopBackOff")
        scene.pod(name, ready=False)
        if place == "pod":
            scene.annotate(name, *next(iter(strategy.items())))
    if place == "component":
        annotated = [
            {**one, "podTemplate": {**one["podTemplate"], "metadata": {"annotations": strategy}}}
            if one["name"] == "decode-a"
            else one
            for one in components(scene)
        ]
        edited_graph(scene, components=annotated)
    if place == "graph":
        edited_graph(scene, annotations=strategy)
    findings = results(scene)["DYT0410"].findings
    assert len(findings) == 4
    under = "under Recreate the earlier pods ended first: 0 of 4 pods of decode-a are ready"
    assert findings[0].value == f"Running for 60 min: CrashLoopBackOff; {under}"
    assert findings[0].fix == f"{LOGS}; then apply the graph as it was before, or correct {EDIT}"


def test_pods_that_a_quota_refuses():
    scene = Scene()
    scene.pod(DECODE, deleting=True)
    message = 'pods "my-llm-decode-a-" is forbidden: exceeded quota: gpus, used: pods=11'
    refused = ObjectEvent(
        SPACE, "my-llm-decode-a-7c9f", "u", "FailedCreate", message, at=NOW - 5, kind="ReplicaSet"
    )
    of_another = replace(refused, name="other-decode-a-7c9f", message="of another graph", at=NOW)
    scene.warnings += [refused, of_another]
    [finding] = results(scene)["DYT0409"].findings
    event = f"; event FailedCreate of ReplicaSet my-llm-decode-a-7c9f, 5 s ago: {message}"
    assert finding.value == f"decode-a has 3 of 4 pods{event}"
    fix = "raise quota gpus, or free a part of it: kubectl describe resourcequota gpus -n prod"
    assert finding.fix == fix


# -- what the operator wrote -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (LABEL_KEY_ANNOTATION, None, f"{LABEL_KEY_ANNOTATION} is not set, the policy has {ZONE}"),
        (LABEL_KEY_ANNOTATION, "x/rack", f"{LABEL_KEY_ANNOTATION} is x/rack, the policy has "
         f"{ZONE}"),
        (CLUSTER_TOPOLOGY_ANNOTATION, "levels", f"{CLUSTER_TOPOLOGY_ANNOTATION} is levels, "
         "the policy has another source"),
    ],
)  # fmt: skip
def test_an_annotation_must_name_the_policys_source(key: str, value: str | None, says: str):
    scene = Scene()
    scene.annotate(DECODE, key, value)
    checks = results(scene)
    assert wrong(checks) == {"DYT0402": [subject(DECODE)]}
    assert values(checks["DYT0402"]) == [says]


@pytest.mark.seed("kubernetes-topology: pipeline: annotation")
def test_a_missing_annotation_is_the_only_finding():
    scene = Scene()
    scene.annotate(DECODE, LABEL_KEY_ANNOTATION, None)
    scene.label(DECODE, ZONE, None)
    checks = results(scene)
    assert wrong(checks) == {"DYT0402": [subject(DECODE)]}
    assert checks["DYT0403"].message == "11 of 12 pods; the others: see DYT0402"


def test_a_pod_without_operator_settings_is_one_finding():
    scene = Scene()
    scene.never_written(DECODE)
    scene.label(DECODE, ZONE, None)
    checks = results(scene)
    assert wrong(checks) == {"DYT0402": [subject(DECODE)]}
    assert values(checks["DYT0402"]) == [
        "the pod has no part of the policy: no annotation, no variables, no volume"
    ]


@pytest.mark.seed("kubernetes-topology: pipeline: copied label")
def test_a_label_that_was_not_copied_is_found_with_what_the_node_says():
    scene = Scene()
    scene.label(DECODE, ZONE, None)
    checks = results(scene)
    assert wrong(checks) == {"DYT0403": [subject(DECODE)]}
    assert values(checks["DYT0403"]) == [
        f"label {ZONE} is missing, scheduled 60 min ago on {NODE} ({A})"
    ]
    assert checks["DYT0403"].findings[0].fix == (
        "check that the operator runs and has its permissions (DYT03), then " + restart_fix(DECODE)
    )


@pytest.mark.seed("kubernetes-topology: troubleshooting: no copied label")
def test_the_operators_event_is_part_of_the_finding():
    scene = Scene()
    scene.label(DECODE, ZONE, None)
    event(scene)
    checks = results(scene)
    assert wrong(checks) == {"DYT0403": [subject(DECODE)]}
    [finding] = checks["DYT0403"].findings
    assert "event: Node" in finding.value
    assert finding.fix == restart_fix(DECODE)


@pytest.mark.parametrize(("seconds", "code"), [(30.0, "DYT0411"), (31.0, "DYT0403")])
def test_the_operator_has_half_a_minute_to_copy(seconds: float, code: str):
    scene = Scene()
    scene.label(DECODE, ZONE, None)
    scene.pod(DECODE, scheduled=NOW - seconds)
    assert wrong(results(scene)) == {code: [subject(DECODE)]}


def test_a_time_in_the_future_is_not_young():
    scene = Scene()
    scene.label(DECODE, ZONE, None)
    scene.pod(DECODE, scheduled=NOW + 7200)
    checks = results(scene)
    assert wrong(checks) == {"DYT0403": [subject(DECODE)]}
    assert " ago" not in values(checks["DYT0403"])[0]


def test_without_a_time_of_scheduling_the_pods_own_counts():
    scene = Scene()
    scene.label(DECODE, ZONE, None)
    scene.pod(DECODE, scheduled=None, created=NOW - 5)
    assert wrong(results(scene)) == {"DYT0411": [subject(DECODE)]}
    scene.pod(DECODE, created=None)
    assert wrong(results(scene)) == {"DYT0403": [subject(DECODE)]}


def test_a_node_without_the_label_is_left_to_dyt0205():
    scene = Scene()
    scene.node(NODE, ZONE, None)
    for pod in [one.name for one in scene.pods.values() if one.node == NODE]:
        scene.label(pod, ZONE, None)
    checks = results(scene)
    assert wrong(checks) == {}
    assert checks["DYT0403"].message == "9 of 12 pods; the others: see DYT0205"


def test_a_missing_label_is_found_even_where_nodes_could_not_be_read():
    scene = Scene()
    scene.changes["nodes"] = REFUSED
    scene.label(DECODE, ZONE, None)
    checks = results(scene)
    assert wrong(checks) == {"DYT0403": [subject(DECODE)]}
    assert skipped(checks["DYT0404"]) == UNREAD


def test_every_level_of_a_grove_topology_is_copied():
    scene = Scene(grove=True)
    scene.label(DECODE, f"{DOMAIN_LABEL_PREFIX}rack", None)
    checks = results(scene)
    assert wrong(checks) == {"DYT0403": [subject(DECODE)]}
    assert f"label {DOMAIN_LABEL_PREFIX}rack is missing" in values(checks["DYT0403"])[0]


def test_levels_that_could_not_be_read_leave_labels_unjudged():
    scene = Scene(grove=True)
    scene.changes["topologies"] = REFUSED
    checks = results(scene)
    assert {skipped(checks[code]) for code in ("DYT0403", "DYT0404", "DYT0405")} == {UNREAD}
    scene.changes["topologies"] = ()
    assert skipped(results(scene)["DYT0403"]) == SKIPPED


def test_a_label_that_is_not_its_nodes_is_found_by_value():
    scene = Scene()
    scene.node(NODE, ZONE, B)
    checks = results(scene)
    pods = [name for name, one in scene.pods.items() if one.node == NODE and "front" not in name]
    assert wrong(checks) == {"DYT0404": sorted(map(subject, pods))}
    assert values(checks["DYT0404"])[0] == f"{ZONE} is {A}, its node {NODE} has {B}"
    other_way = f"kubectl label node {NODE} --overwrite {ZONE}={A}"
    fix = f"{restart_fix(DECODE)}; or, if the node is wrong: {other_way}"
    assert checks["DYT0404"].findings[0].fix == fix


def test_the_node_may_be_wrong_only_if_its_pods_agree():
    scene = Scene()
    scene.label(DECODE, ZONE, B)
    [finding] = results(scene)["DYT0404"].findings
    assert finding.fix == restart_fix(DECODE)


def test_labels_that_are_not_compared_never_pass():
    scene = Scene()
    scene.pod(DECODE, node="ghost")
    result = results(scene)["DYT0404"]
    assert skipped(result) == SKIPPED
    assert result.message == "11 of 12 pods; the others: the cluster has no node ghost"
    scene.pod(DECODE, node="")
    assert results(scene)["DYT0404"].message == "11 of 12 pods; the others: see DYT0410"


def test_a_label_of_the_template_is_cured_in_the_template():
    scene = Scene()
    labelled = {"metadata": {"labels": {ZONE: B}}}
    edited = [
        {**one, "podTemplate": {**one["podTemplate"], **labelled}}
        if one["name"] == "decode-a"
        else one
        for one in components(scene)
    ]
    edited_graph(scene, components=edited)
    scene.label(DECODE, ZONE, B)
    checks = results(scene)
    assert wrong(checks) == {"DYT0404": [subject(DECODE)], "DYT0406": [GRAPH]}
    assert checks["DYT0404"].findings[0].fix == "remove the label from the pod template (DYT0406)"


# -- events ----------------------------------------------------------------------------------------


def test_an_event_about_a_label_that_is_there_now_is_a_warning():
    scene = Scene()
    event(scene)
    checks = results(scene)
    assert wrong(checks) == {"DYT0405": [subject(DECODE)]}
    assert values(checks["DYT0405"])[0].startswith(
        "event TopologyLabelMissing: 2 times, last 10 min ago; the label is present now: "
    )


def test_events_of_an_earlier_pod_of_that_name_do_not_count():
    scene = Scene()
    event(scene, uid="11111111-2222-3333-4444-555555555555")
    assert wrong(results(scene)) == {}


def test_an_event_about_another_level_is_not_over_with_this_one():
    scene = Scene(grove=True)
    key = f"{DOMAIN_LABEL_PREFIX}rack"
    scene.label(DECODE, key, None)
    event(scene, message=f'no label "x"; topology metadata for "{key}" will remain unavailable')
    assert "DYT0405" not in wrong(results(scene))
    event(scene, message=f'topology metadata for "{DOMAIN_LABEL_PREFIX}zone" will remain')
    assert wrong(results(scene))["DYT0405"] == [subject(DECODE)]


def test_events_that_could_not_be_read_are_skipped_and_do_not_hinder_others():
    scene = Scene()
    scene.changes["events"] = REFUSED
    scene.label(DECODE, ZONE, None)
    checks = results(scene)
    assert skipped(checks["DYT0405"]) == UNREAD
    assert wrong(checks) == {"DYT0403": [subject(DECODE)]}


# -- replicas and generations ----------------------------------------------------------------------


def of_replica(scene: Scene, pod: str, rank: int) -> None:
    scene.label(pod, "leaderworkerset.sigs.k8s.io/name", "my-llm-decode-a")
    scene.label(pod, "leaderworkerset.sigs.k8s.io/group-index", "0")
    scene.label(pod, "leaderworkerset.sigs.k8s.io/worker-index", str(rank))


def test_ranks_of_one_replica_belong_in_one_domain():
    scene = Scene()
    of_replica(scene, DECODE, 0)
    of_replica(scene, "my-llm-decode-a-1", 1)
    assert results(scene)["DYT0407"].state is State.PASS
    of_replica(scene, "my-llm-decode-b-0", 2)
    checks = results(scene)
    assert wrong(checks) == {"DYT0407": [subject(DECODE)]}
    assert values(checks["DYT0407"]) == [f"the ranks of my-llm-decode-a-0 are in {A}, {B}"]


def test_a_stale_label_does_not_spread_a_replica():
    scene = Scene()
    of_replica(scene, DECODE, 0)
    of_replica(scene, "my-llm-decode-a-1", 1)
    scene.label(DECODE, ZONE, B)
    assert wrong(results(scene)) == {"DYT0404": [subject(DECODE)]}


def test_two_generations_are_found():
    scene = Scene()
    scene.label(DECODE, WORKER_HASH_LABEL, "0ldf00d")
    checks = results(scene)
    assert wrong(checks) == {"DYT0408": [GRAPH]}
    assert values(checks["DYT0408"])[0].startswith("2 generations of workers: ")
    assert values(checks["DYT0408"])[0].endswith(" 11 pods, 0ldf00d 1 pod")


def test_without_generations_the_check_is_skipped():
    scene = Scene()
    for name in list(scene.pods):
        scene.label(name, WORKER_HASH_LABEL, None)
    assert skipped(results(scene)["DYT0408"]) == SKIPPED


def test_two_faults_are_both_seen():
    scene = Scene()
    scene.label(DECODE, ZONE, None)
    scene.label(PREFILL, ZONE, B)
    assert wrong(results(scene)) == {
        "DYT0403": [subject(DECODE)],
        "DYT0404": [subject(PREFILL)],
    }
