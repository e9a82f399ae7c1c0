"""Checks of the operator's settings in worker pods and of topology files: DYT05."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynctl.findings.report import CheckResult, State
from dynctl.health.facts import Unread
from dynctl.verify.checks.files import FILE_CHECKS
from dynctl.verify.cluster_facts import MountFacts, TopologyFile, VerifyFacts
from dynctl.verify.join import join
from dynctl.wire.kubernetes.names import MOUNT_PATH, TOPOLOGY_VOLUME
from dynctl.wire.kubernetes.objects import DownwardItem, LabelWrite, Mount, Volume
from tests.dynctl.verify.scene import (
    DECODE,
    GRAPH,
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
from tests.dynctl.verify.whole_cluster import Cluster, judged, skipped, wrong
from tests.kube.objects import ZONE

UNREAD, SKIPPED = (True, True), (True, False)
READING = ("DYT0503", "DYT0504", "DYT0507")


def results(scene: Scene) -> dict[str, CheckResult]:
    return scene.judge(FILE_CHECKS)


def volume(scene: Scene, pod: str, **changes: Any) -> None:
    """Change the topology volume of a pod; without changes it is removed."""
    others = tuple(one for one in scene.pods[pod].volumes if one.name != TOPOLOGY_VOLUME)
    [mine] = [one for one in scene.pods[pod].volumes if one.name == TOPOLOGY_VOLUME]
    scene.pod(pod, volumes=(*others, replace(mine, **changes)) if changes else others)


def written(scene: Scene, pod: str, seconds: float) -> None:
    """The label was written so long ago."""
    scene.pod(pod, label_writes=(LabelWrite("manager", frozenset({ZONE}), NOW - seconds),))


@pytest.mark.parametrize("wanted", [{}, {"grove": True}, {"enforcement": "preferred"}])
def test_a_healthy_deployment_passes(wanted: dict[str, Any]):
    checks = results(Scene(**wanted))
    assert {one.state for one in checks.values()} == {State.PASS}
    assert list(checks) == sorted(checks)
    assert checks["DYT0503"].message == "12 of 12 pods"


def test_without_a_cluster_or_a_mount_nothing_is_judged():
    checks = judged(FILE_CHECKS, join(VerifyFacts()))
    assert {skipped(one) for one in checks.values()} == {SKIPPED}


# -- variables -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("DYN_KV_TRANSFER_DOMAIN", "rack", "is rack, expected zone"),
        ("DYN_KV_TRANSFER_DOMAIN", None, "is not set, expected zone"),
        ("DYN_KV_TRANSFER_ENFORCEMENT", "preferred", "is preferred, expected required"),
        ("DYN_KV_TRANSFER_PREFERRED_WEIGHT", "0.5", "is 0.5, expected no variable"),
        ("DYN_TOPOLOGY_ENABLED", "false", "is false, expected true"),
        ("DYN_TOPOLOGY_MOUNT_PATH", "", "is empty, expected /etc/dynamo/topology"),
    ],
)
@pytest.mark.seed("kubernetes-topology: pipeline: environment")
def test_variables_must_be_the_policys(name: str, value: str | None, says: str):
    scene = Scene()
    scene.env(DECODE, **{name: value})
    checks = results(scene)
    assert wrong(checks) == {"DYT0501": [subject(DECODE)]}
    assert values(checks["DYT0501"]) == [f"{name} {says}"]


def test_a_variable_that_comes_from_elsewhere_is_not_the_operators():
    scene = Scene()
    env = {**scene.container(DECODE).env, "DYN_KV_TRANSFER_DOMAIN": None}
    scene.main(DECODE, env=env)
    assert values(results(scene)["DYT0501"]) == [
        "DYN_KV_TRANSFER_DOMAIN has no literal value, expected zone"
    ]


@pytest.mark.parametrize(
    ("weight", "right"),
    [("0.85", True), ("0.8500000238418579", True), ("0.86", False), ("nan", False), ("x", False)],
)
def test_a_weight_is_a_float32(weight: str, right: bool):
    scene = Scene(enforcement="preferred")
    scene.env(DECODE, DYN_KV_TRANSFER_PREFERRED_WEIGHT=weight)
    assert wrong(results(scene)) == ({} if right else {"DYT0501": [subject(DECODE)]})


def test_a_pod_without_a_container_main_is_left_to_the_graphs_check():
    scene = Scene()
    scene.main(DECODE, name="engine")
    checks = results(scene)
    assert wrong(checks) == {}
    assert checks["DYT0501"].message == "11 of 12 pods; the others: see DYT0119"
    assert checks["DYT0503"].message == "11 of 12 pods; the others: see DYT0119"


def test_pods_without_operator_settings_are_left_to_dyt0402():
    scene = Scene()
    scene.never_written(DECODE)
    checks = results(scene)
    assert wrong(checks) == {}
    assert checks["DYT0502"].message == "11 of 12 pods; the others: see DYT0402"


# -- volume and mount ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "no volume topology-labels"),
        ({"kind": "configMap"}, "volume topology-labels is of kind configMap"),
        ({"items": ()}, "volume topology-labels has no file zone"),
        ({"items": (DownwardItem("zone", "metadata.labels['x']"),)},
         f"file zone has metadata.labels['x'], expected metadata.labels['{ZONE}']"),
    ],
)  # fmt: skip
def test_the_volume_must_show_the_policys_labels(changes: dict[str, Any], says: str):
    scene = Scene()
    volume(scene, DECODE, **changes)
    scene.file(DECODE, None)
    checks = results(scene)
    assert wrong(checks) == {"DYT0502": [subject(DECODE)]}
    assert values(checks["DYT0502"]) == [says]


@pytest.mark.parametrize(
    ("mounts", "says"),
    [
        ((), f"nothing is mounted at {MOUNT_PATH}"),
        ((Mount("data", MOUNT_PATH, True),), f"the volume data is mounted at {MOUNT_PATH}"),
        ((Mount(TOPOLOGY_VOLUME, MOUNT_PATH),), f"{MOUNT_PATH} is mounted read-write"),
    ],
)
def test_the_volume_must_be_mounted_read_only(mounts: tuple[Mount, ...], says: str):
    scene = Scene()
    scene.main(DECODE, mounts=mounts)
    checks = results(scene)
    assert wrong(checks) == {"DYT0502": [subject(DECODE)]}
    assert values(checks["DYT0502"]) == [says]


def test_a_part_of_the_volume_is_never_updated():
    scene = Scene()
    scene.main(DECODE, mounts=(Mount(TOPOLOGY_VOLUME, MOUNT_PATH, True, "zone"),))
    checks = results(scene)
    assert wrong(checks) == {"DYT0502": [subject(DECODE)]}
    assert values(checks["DYT0502"]) == [
        "zone of the volume is mounted (subPath), which is never updated"
    ]


def test_a_projected_volume_shows_the_same_files():
    cluster = Cluster()
    pod = cluster.one("Pod", DECODE)
    [body] = [one for one in pod["spec"]["volumes"] if one["name"] == TOPOLOGY_VOLUME]
    source = {"downwardAPI": body.pop("downwardAPI")}
    body["projected"] = {"sources": [{"configMap": {"name": "other"}}, source]}
    assert judged(FILE_CHECKS, cluster.joined())["DYT0502"].state is State.PASS
    source["downwardAPI"]["items"] = []
    assert judged(FILE_CHECKS, cluster.joined())["DYT0502"].state is State.FAIL


def test_a_mount_that_is_writable_hides_no_second_fault():
    scene = Scene()
    scene.main(DECODE, mounts=(Mount(TOPOLOGY_VOLUME, MOUNT_PATH),))
    scene.file(DECODE, "")
    assert wrong(results(scene)) == {"DYT0502": [subject(DECODE)], "DYT0503": [subject(DECODE)]}


# -- what the files hold ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "invalid", "says"),
    [
        (None, "", "file zone does not exist"),
        ("", "", "file zone is empty"),
        (" \n", "", "file zone is empty"),
        ("", "is not UTF-8", "file zone is not UTF-8"),
        ("", "is larger than 4,096 bytes", "file zone is larger than 4,096 bytes"),
    ],
)
@pytest.mark.seed("dep-topology: startup failures: topology files not present")
def test_a_file_must_hold_a_value(content: str | None, invalid: str, says: str):
    scene = Scene()
    scene.file(DECODE, content, invalid=invalid)
    checks = results(scene)
    assert wrong(checks) == {"DYT0503": [subject(DECODE)]}
    assert values(checks["DYT0503"]) == [f"{says}, the pod label is {A}"]


def test_the_file_of_a_label_that_is_missing_is_empty_rightly():
    scene = Scene()
    scene.label(DECODE, ZONE, None)
    scene.file(DECODE, "")
    assert wrong(results(scene)) == {}


@pytest.mark.seed("kubernetes-topology: pipeline: projected file")
def test_a_file_that_is_not_as_the_label_is_found():
    scene = Scene()
    scene.file(DECODE, B)
    checks = results(scene)
    assert wrong(checks) == {"DYT0504": [subject(DECODE)]}
    assert values(checks["DYT0504"]) == [f"file zone has {B}, the pod label {A}"]


@pytest.mark.parametrize("content", [B, "", "\n"])
@pytest.mark.parametrize(("seconds", "late"), [(90.0, False), (91.0, True)])
def test_the_kubelet_has_a_minute_and_a_half(content: str, seconds: float, late: bool):
    scene = Scene()
    scene.file(DECODE, content)
    written(scene, DECODE, seconds)
    code = ("DYT0504" if content == B else "DYT0503") if late else "DYT0507"
    assert wrong(results(scene)) == {code: [subject(DECODE)]}


def test_a_label_written_in_the_future_is_not_fresh():
    scene = Scene()
    scene.pod(DECODE, label_writes=(LabelWrite("manager", frozenset({ZONE}), NOW + 7200),))
    scene.file(DECODE, B)
    assert wrong(results(scene)) == {"DYT0504": [subject(DECODE)]}


def test_a_label_is_not_older_than_its_pod():
    scene = Scene()
    scene.file(DECODE, B)
    scene.pod(DECODE, label_writes=(), created=NOW - 20)
    checks = results(scene)
    assert wrong(checks) == {"DYT0507": [subject(DECODE)]}
    assert values(checks["DYT0507"]) == [f"file zone has {B}, the pod label is {A} since 20 s"]
    scene.pod(DECODE, created=None)
    assert wrong(results(scene)) == {"DYT0504": [subject(DECODE)]}


def test_an_invalid_file_is_a_finding_at_once():
    scene = Scene()
    scene.file(DECODE, "", invalid="is not UTF-8")
    written(scene, DECODE, 1)
    assert wrong(results(scene)) == {"DYT0503": [subject(DECODE)]}


def test_every_level_has_a_file():
    scene = Scene(grove=True)
    scene.file(DECODE, "", domain="rack")
    assert values(results(scene)["DYT0503"])[0].startswith("file rack is empty, the pod label is ")


def test_unread_files_are_counted_and_refused_ones_reported():
    scene = Scene()
    del scene.files[SPACE, DECODE]
    assert results(scene)["DYT0503"].message == (
        "11 of 12 pods; the others: not read (use --exec all)"
    )
    scene.files[SPACE, DECODE] = REFUSED
    assert {skipped(results(scene)[code]) for code in READING} == {UNREAD}
    scene.file(PREFILL, B)
    checks = results(scene)
    assert wrong(checks) == {"DYT0504": [subject(PREFILL)]}
    assert checks["DYT0504"].message == "unavailable: files: forbidden"
    scene.files = {}
    assert {skipped(results(scene)[code]) for code in READING} == {SKIPPED}


def test_a_worker_that_does_not_run_has_no_files():
    scene = Scene()
    scene.not_started(DECODE)
    checks = results(scene)
    assert wrong(checks) == {}
    assert checks["DYT0503"].message == "11 of 12 pods; the others: see DYT0410"


# -- what should not be there ----------------------------------------------------------------------


def test_domains_outside_the_policy_are_found():
    scene = Scene()
    items = (
        DownwardItem("zone", f"metadata.labels['{ZONE}']"),
        DownwardItem("rack", "metadata.labels['rack']"),
        DownwardItem(".hidden", "metadata.labels['x']"),
    )
    volume(scene, DECODE, items=items)
    scene.card(PREFILL, topology_domains={"zone": A, "host": "h1"})
    checks = results(scene)
    assert wrong(checks) == {"DYT0505": [subject(DECODE), subject(PREFILL)]}
    assert values(checks["DYT0505"]) == ["rack in addition to zone", "host in addition to zone"]


def test_levels_of_a_grove_topology_are_domains_of_the_policy():
    assert wrong(results(Scene(grove=True))) == {}


def test_manifest_settings_that_the_operator_owns_are_found_by_lint():
    scene = Scene()
    [graph] = scene.facts.graphs  # type: ignore[misc]
    spec = graph.body["spec"]
    added = {"name": "DYN_TOPOLOGY_ENABLED", "value": "false"}
    parts = []
    for one in spec["components"]:
        pod = one["podTemplate"]
        [main] = pod["spec"]["containers"]
        env = [*main.get("env", ()), *([added] if one["name"] == "decode-a" else [])]
        inner = {**pod["spec"], "containers": [{**main, "env": env}]}
        parts.append({**one, "podTemplate": {**pod, "spec": inner}})
    body = {**graph.body, "spec": {**spec, "components": parts}}
    scene.changes["graphs"] = (replace(graph, body=body),)
    checks = results(scene)
    assert wrong(checks) == {"DYT0506": [GRAPH]}
    scene.changes["graphs"] = REFUSED
    assert skipped(results(scene)["DYT0506"]) == UNREAD


# -- one mount -------------------------------------------------------------------------------------


def mounted(domain: str, files: Any) -> dict[str, CheckResult]:
    mount = MountFacts("/etc/dynamo/topology", domain, files)
    return judged(FILE_CHECKS, join(VerifyFacts(mount=mount)))


def of(**contents: str | None) -> dict[str, TopologyFile]:
    return {name: TopologyFile(content) for name, content in contents.items()}


def test_a_mount_with_its_domain_passes():
    checks = mounted("zone", of(zone=A))
    assert checks["DYT0503"].state is checks["DYT0505"].state is State.PASS
    assert checks["DYT0503"].message == f"zone={A}"
    assert checks["DYT0505"].message == "zone"
    others = {code for code, one in checks.items() if skipped(one) == SKIPPED}
    assert others == {"DYT0501", "DYT0502", "DYT0504", "DYT0506", "DYT0507"}


@pytest.mark.parametrize(
    ("domain", "files", "says"),
    [
        ("zone", of(zone=""), "file zone is empty"),
        ("zone", of(zone=None), "file zone does not exist"),
        ("zone", of(rack="r1"), "file zone does not exist"),
        ("zone", {"zone": TopologyFile("", "is not UTF-8")}, "file zone is not UTF-8"),
        ("", of(zone="", rack=""), "file zone is empty; file rack is empty"),
        ("", {}, "no files"),
        ("", {**of(zone=A), "rack": TopologyFile("", "has 2 lines")}, "file rack has 2 lines"),
    ],
)
def test_a_mount_without_a_value_fails(domain: str, files: Any, says: str):
    checks = mounted(domain, files)
    assert values(checks["DYT0503"]) == [says]
    assert checks["DYT0503"].findings[0].subject == "Mount /etc/dynamo/topology"


def test_any_value_will_do_where_no_domain_was_named():
    checks = mounted("", of(zone=A, rack=""))
    assert checks["DYT0503"].state is State.PASS
    assert skipped(checks["DYT0505"]) == SKIPPED


def test_other_domains_in_a_mount_are_found():
    checks = mounted("zone", {**of(zone=A, rack="r1", host=""), "x": TopologyFile("", "is odd")})
    assert wrong(checks) == {"DYT0505": ["Mount /etc/dynamo/topology"]}
    assert values(checks["DYT0505"]) == ["rack, x in addition to zone"]


def test_a_directory_that_is_not_there_is_a_fault_and_has_no_strays():
    mount = MountFacts("/mnt/t", "zone", {}, absent="the directory does not exist")
    checks = judged(FILE_CHECKS, join(VerifyFacts(mount=mount)))
    assert wrong(checks) == {"DYT0503": ["Mount /mnt/t"]}
    assert values(checks["DYT0503"]) == ["the directory does not exist"]
    assert skipped(checks["DYT0505"]) == SKIPPED


def test_a_mount_that_cannot_be_read_is_unread():
    checks = mounted("zone", Unread("/etc/dynamo/topology: Permission denied"))
    assert skipped(checks["DYT0503"]) == skipped(checks["DYT0505"]) == UNREAD


def test_a_mount_beside_a_cluster_is_judged_with_it():
    scene = Scene()
    scene.mount = MountFacts("/mnt/t", "zone", of(zone="", rack="r1"))
    scene.file(DECODE, "")
    checks = results(scene)
    assert wrong(checks) == {
        "DYT0503": ["Mount /mnt/t", subject(DECODE)],
        "DYT0505": ["Mount /mnt/t"],
    }


def test_a_volume_of_another_name_is_not_the_operators():
    scene = Scene()
    others = tuple(replace(one, name="x") for one in scene.pods[DECODE].volumes)
    scene.pod(DECODE, volumes=(*others, Volume("y", "downwardAPI")))
    assert values(results(scene)["DYT0502"]) == ["no volume topology-labels"]
