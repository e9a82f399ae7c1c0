"""Checks of worker starts, by pod status and the start of the logs: DYT06."""

from __future__ import annotations

from typing import Any

import pytest

from dynctl.findings.report import CheckResult, State
from dynctl.verify.checks.starts import START_CHECKS
from dynctl.verify.cluster_facts import StartLog, VerifyFacts
from dynctl.verify.join import join
from dynctl.wire.kubernetes.objects import Termination
from tests.dynctl.verify.scene import (
    DECODE,
    NOW,
    PREFILL,
    REFUSED,
    SPACE,
    A,
    B,
    Scene,
    subject,
    values,
)
from tests.dynctl.verify.whole_cluster import judged, skipped, wrong
from tests.kube.objects import ZONE

UNREAD, SKIPPED = (True, True), (True, False)
LINE = "topology file /etc/dynamo/topology/zone was not populated within 30s. Exiting."


def results(scene: Scene) -> dict[str, CheckResult]:
    return scene.judge(START_CHECKS)


def gave_up(scene: Scene, pod: str, *, running: bool = False) -> None:
    """Its last run ended because it waited in vain, and it never became ready."""
    scene.not_started(pod, running=running)
    scene.main(pod, last_end=Termination(1, "Error", NOW - 60))
    scene.log(pod, timed_out=LINE)


def test_a_healthy_deployment_passes():
    checks = results(Scene())
    assert {one.state for one in checks.values()} == {State.PASS}
    assert checks["DYT0602"].message == "12 of 12 logs"
    checks = judged(START_CHECKS, join(VerifyFacts()))
    assert {skipped(one) for one in checks.values()} == {SKIPPED}


# -- did it wait in vain ---------------------------------------------------------------------------


@pytest.mark.parametrize(("running", "now"), [(False, "CrashLoopBackOff"), (True, "waiting again")])
@pytest.mark.seed("router-topology: troubleshooting: worker exits during startup")
def test_a_worker_that_gave_up_is_found(running: bool, now: str):
    scene = Scene()
    gave_up(scene, DECODE, running=running)
    checks = results(scene)
    assert wrong(checks) == {"DYT0601": [subject(DECODE)]}
    assert values(checks["DYT0601"]) == [f"{now}; its log has: {LINE}"]


@pytest.mark.parametrize(("label", "file", "code"), [(None, "", "DYT0403"), (A, "", "DYT0503")])
@pytest.mark.seed("router-topology: troubleshooting: worker logs")
def test_the_reason_of_a_timeout_is_reported_at_the_first_broken_link(
    label: str | None, file: str, code: str
):
    scene = Scene()
    gave_up(scene, DECODE, running=True)
    scene.label(DECODE, ZONE, label)
    scene.files[SPACE, DECODE] = {}
    scene.file(DECODE, file)
    checks = results(scene)
    assert wrong(checks) == {}
    assert checks["DYT0601"].message == f"11 of 12 pods; the others: see {code}"


def test_variables_that_lead_it_astray_explain_its_wait():
    scene = Scene()
    gave_up(scene, DECODE)
    scene.env(DECODE, DYN_KV_TRANSFER_DOMAIN="rack")
    assert results(scene)["DYT0601"].message == ("11 of 12 pods; the others: see DYT0501, DYT0502")


def test_a_lost_race_that_was_made_good_is_a_warning():
    scene = Scene()
    scene.main(DECODE, restarts=1, last_end=Termination(1, "Error", NOW - 3500))
    scene.log(DECODE, timed_out=LINE)
    checks = results(scene)
    assert wrong(checks) == {"DYT0603": [subject(DECODE)]}
    assert values(checks["DYT0603"]) == [
        "did not get its topology in time 58 min ago and restarted; restarts: 1"
    ]


def test_what_an_earlier_run_registered_does_not_mean_that_this_one_started():
    scene = Scene()
    metadata = scene.metadata[DECODE]
    gave_up(scene, DECODE)
    scene.metadata[DECODE] = metadata
    assert wrong(results(scene)) == {"DYT0601": [subject(DECODE)]}


def test_another_crash_is_not_about_topology():
    scene = Scene()
    scene.not_started(DECODE)
    scene.main(DECODE, last_end=Termination(1, "Error", NOW - 60))
    checks = results(scene)
    assert wrong(checks) == {}
    assert checks["DYT0601"].state is State.PASS


def test_a_log_that_could_not_be_read_of_a_worker_that_may_have_given_up():
    scene = Scene()
    gave_up(scene, DECODE)
    scene.logs[SPACE, DECODE] = REFUSED
    assert skipped(results(scene)["DYT0601"]) == UNREAD
    del scene.logs[SPACE, DECODE]
    assert results(scene)["DYT0601"].message == (
        "11 of 12 pods; the others: not read (use --logs all)"
    )


def test_without_logs_only_restarts_leave_a_doubt():
    scene = Scene()
    scene.logs = {}
    checks = results(scene)
    assert checks["DYT0601"].state is checks["DYT0603"].state is State.PASS
    assert skipped(checks["DYT0602"]) == skipped(checks["DYT0604"]) == SKIPPED
    scene.main(DECODE, last_end=Termination(1))
    checks = results(scene)
    assert checks["DYT0603"].message == "11 of 12 pods; the others: not read (use --logs all)"
    scene.logs = dict.fromkeys([(SPACE, name) for name in scene.pods], REFUSED)
    checks = results(scene)
    assert skipped(checks["DYT0602"]) == skipped(checks["DYT0604"]) == UNREAD


# -- what it said it read --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"domains": {"zone": B}}, f"zone was {B}, the file has {A}"),
        ({"domains": {}}, f"zone was missing, the file has {A}"),
        ({"transfer_domain": "rack"}, "kv_transfer_domain was rack, the policy has zone"),
        ({"enforcement": "preferred"},
         "kv_transfer_enforcement was preferred, the policy has required"),
        ({"weight": 0.5}, "kv_transfer_preferred_weight was 0.5, the policy has none"),
    ],
)  # fmt: skip
def test_what_it_started_with_must_be_what_is_there(changes: dict[str, Any], says: str):
    scene = Scene()
    scene.log(DECODE, **changes)
    checks = results(scene)
    assert wrong(checks) == {"DYT0602": [subject(DECODE)]}
    assert values(checks["DYT0602"]) == [f"at start {says}"]


def test_without_files_the_label_is_compared():
    scene = Scene()
    scene.files = {}
    scene.log(DECODE, domains={"zone": B})
    assert values(results(scene)["DYT0602"]) == [f"at start zone was {B}, the pod label has {A}"]


@pytest.mark.parametrize(
    ("card", "log"),
    [
        ({"topology_domains": {"zone": B}}, {"domains": {"zone": B}}),
        ({"kv_transfer_enforcement": "preferred"}, {"enforcement": "preferred"}),
        ({"kv_transfer_preferred_weight": 0.5}, {"weight": 0.5}),
    ],
)
def test_differences_that_the_card_repeats_are_left_to_dyt0802(
    card: dict[str, Any], log: dict[str, Any]
):
    scene = Scene()
    scene.card(DECODE, **card)
    scene.log(DECODE, **log)
    assert wrong(results(scene)) == {}


def test_what_the_variables_say_is_judged_there():
    scene = Scene()
    scene.env(DECODE, DYN_KV_TRANSFER_ENFORCEMENT="preferred")
    scene.log(DECODE, enforcement="preferred")
    assert wrong(results(scene)) == {}


def test_a_weight_is_a_float32():
    scene = Scene(enforcement="preferred")
    scene.log(DECODE, weight=0.8500000238418579)
    assert wrong(results(scene)) == {}
    scene.log(DECODE, weight=0.8)
    assert values(results(scene)["DYT0602"]) == [
        "at start kv_transfer_preferred_weight was 0.8, the policy has 0.85"
    ]


@pytest.mark.seed("kubernetes-topology: pipeline: worker logs")
def test_a_log_without_the_line_is_a_warning():
    scene = Scene()
    scene.logs[SPACE, DECODE] = StartLog()
    checks = results(scene)
    assert wrong(checks) == {"DYT0604": [subject(DECODE)]}
    assert checks["DYT0602"].message == "11 of 12 logs; the others: see DYT0604"


def test_a_worker_without_any_topology_does_not_log_it_either():
    scene = Scene()
    scene.never_written(DECODE)
    scene.logs[SPACE, PREFILL] = StartLog()
    scene.card(PREFILL, topology_domains=None, taints=None)
    assert wrong(results(scene)) == {}


def test_further_ranks_and_pods_that_do_not_run_have_nothing_to_say():
    scene = Scene()
    for key, value in (("name", "x"), ("group-index", "0"), ("worker-index", "1")):
        scene.label(PREFILL, f"leaderworkerset.sigs.k8s.io/{key}", value)
    scene.logs[SPACE, PREFILL] = StartLog()
    scene.gone(PREFILL)
    scene.not_started(DECODE)
    checks = results(scene)
    assert wrong(checks) == {}
    assert checks["DYT0604"].message == "10 of 11 logs; the others: see DYT0410"
