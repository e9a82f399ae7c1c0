"""Checks of discovery: backends, EndpointSlices, metadata, permissions: DYT07."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynctl.adapters.ports import AccessReview
from dynctl.findings.report import CheckResult, State
from dynctl.verify.chain import LinkName
from dynctl.verify.checks.discovery import DISCOVERY_CHECKS
from dynctl.verify.cluster_facts import Account, Registry, VerifyFacts
from dynctl.verify.join import join
from dynctl.wire.kubernetes.names import DISCOVERY_BACKEND_LABEL
from dynctl.wire.kubernetes.worker_metadata import WorkerMetadata, instance_id
from tests.dynctl.verify.scene import (
    DECODE,
    FRONTEND,
    NOW,
    PREFILL,
    REFUSED,
    SPACE,
    Scene,
    deployment_of,
    subject,
    values,
)
from tests.dynctl.verify.whole_cluster import judged, skipped, wrong
from tests.kube.objects import ZONE

UNREAD, SKIPPED = (True, True), (True, False)
ACCOUNT = "ServiceAccount my-llm-k8s-service-discovery.prod"
OTHER_UID = "11111111-2222-3333-4444-555555555555"
IN_KUBERNETES = ("DYT0702", "DYT0703", "DYT0704", "DYT0705", "DYT0706")


def results(scene: Scene) -> dict[str, CheckResult]:
    return scene.judge(DISCOVERY_CHECKS)


def in_etcd() -> Scene:
    """A deployment that registers in etcd, where its workers' cards are."""
    scene, kubernetes = Scene(discovery="etcd"), Scene()
    scene.registry = Registry("etcd http://etcd:2379", deployment_of(kubernetes.metadata.values()))
    return scene


def test_a_healthy_deployment_passes():
    checks = results(Scene())
    assert {one.state for code, one in checks.items() if code != "DYT0707"} == {State.PASS}
    assert skipped(checks["DYT0707"]) == SKIPPED
    assert list(checks) == sorted(checks)
    assert checks["DYT0701"].message == "kubernetes"
    checks = judged(DISCOVERY_CHECKS, join(VerifyFacts()))
    assert {skipped(one) for one in checks.values()} == {SKIPPED}


# -- backends --------------------------------------------------------------------------------------


def test_a_worker_in_another_backend_is_not_found_by_the_frontend():
    scene = Scene()
    scene.env(DECODE, DYN_DISCOVERY_BACKEND="etcd")
    checks = results(scene)
    assert wrong(checks) == {"DYT0701": [subject(DECODE)]}
    assert values(checks["DYT0701"]) == ["registers in etcd, the frontend uses kubernetes"]
    assert checks["DYT0702"].message == "11 of 11 pods"


def test_the_frontend_decides_what_is_right():
    scene = Scene(discovery="etcd")
    scene.env(FRONTEND, DYN_DISCOVERY_BACKEND="kubernetes")
    checks = results(scene)
    assert len(checks["DYT0701"].findings) == 12
    assert values(checks["DYT0701"])[0] == "registers in etcd, the frontend uses kubernetes"


def test_without_a_frontend_most_workers_decide():
    scene = Scene()
    del scene.pods[FRONTEND]
    scene.env(DECODE, DYN_DISCOVERY_BACKEND="file")
    checks = results(scene)
    assert values(checks["DYT0701"]) == [
        "registers in file, the majority of its graph uses kubernetes"
    ]


def test_the_label_is_used_without_the_variable():
    scene = Scene()
    scene.env(DECODE, DYN_DISCOVERY_BACKEND=None)
    assert scene.pods[DECODE].labels[DISCOVERY_BACKEND_LABEL] == "kubernetes"
    assert wrong(results(scene)) == {}


def test_a_pod_without_a_backend_is_a_warning_only():
    scene = Scene()
    scene.env(DECODE, DYN_DISCOVERY_BACKEND=None)
    scene.label(DECODE, DISCOVERY_BACKEND_LABEL, None)
    scene.pod(DECODE, ready=False)
    checks = results(scene)
    assert wrong(checks) == {"DYT0708": [subject(DECODE)]}
    for name in scene.pods:
        scene.env(name, DYN_DISCOVERY_BACKEND=None)
        scene.label(name, DISCOVERY_BACKEND_LABEL, None)
    checks = results(scene)
    assert {skipped(checks[code]) for code in ("DYT0701", *IN_KUBERNETES)} == {SKIPPED}


# -- EndpointSlices --------------------------------------------------------------------------------


def test_a_pod_that_is_not_ready_is_never_found():
    scene = Scene()
    scene.pod(DECODE, ready=False)
    checks = results(scene)
    assert wrong(checks) == {"DYT0702": [subject(DECODE)]}
    assert values(checks["DYT0702"]) == ["not Ready"]
    assert "readinessProbe" in checks["DYT0702"].findings[0].fix


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (None, "in no EndpointSlice with label nvidia.com/dynamo-discovery-enabled=true"),
        ({"labels": {}},
         "in no EndpointSlice with label nvidia.com/dynamo-discovery-enabled=true"),
        ({"uid": OTHER_UID},
         f"EndpointSlice my-llm-decode-a-0 has an earlier pod with this name (uid {OTHER_UID})"),
        ({"ready": False}, "not ready in EndpointSlice my-llm-decode-a-0"),
    ],
)  # fmt: skip
def test_a_pod_must_be_in_a_slice_of_discovery(change: dict[str, Any] | None, says: str):
    scene = Scene()
    changed = [
        replace(one, **(change or {})) if one.pod == DECODE else one
        for one in scene.endpoints
        if one.pod != DECODE or change is not None
    ]
    scene.endpoints = changed
    checks = results(scene)
    assert wrong(checks) == {"DYT0702": [subject(DECODE)]}
    assert values(checks["DYT0702"]) == [says]


def test_a_slice_without_a_uid_counts():
    scene = Scene()
    scene.endpoints = [replace(one, uid="") for one in scene.endpoints]
    assert wrong(results(scene)) == {}


def test_slices_that_could_not_be_read_are_unread_and_readiness_is_judged_all_the_same():
    scene = Scene()
    scene.changes["endpoints"] = REFUSED
    checks = results(scene)
    assert skipped(checks["DYT0702"]) == skipped(checks["DYT0709"]) == UNREAD
    scene.pod(DECODE, ready=False)
    assert wrong(results(scene)) == {"DYT0702": [subject(DECODE)]}


def test_pods_that_do_not_run_or_wait_are_left_to_earlier_codes():
    scene = Scene()
    scene.not_started(DECODE)
    scene.not_started(PREFILL, running=True)
    scene.label(PREFILL, ZONE, None)
    checks = results(scene)
    assert wrong(checks) == {}
    rest = "10 of 12 pods; the others: see DYT0403, DYT0410"
    assert checks["DYT0702"].message == checks["DYT0704"].message == rest


@pytest.mark.seed("kubernetes-topology: troubleshooting: worker waits for topology")
def test_a_starting_worker_is_one_finding():
    scene = Scene()
    scene.not_started(DECODE, running=True)
    checks = results(scene)
    assert wrong(checks) == {"DYT0702": [subject(DECODE)]}
    assert checks["DYT0704"].message == "11 of 12 pods; the others: see DYT0702"


def test_further_ranks_are_not_looked_for():
    scene = Scene()
    for key, value in (("name", "x"), ("group-index", "0"), ("worker-index", "1")):
        scene.label(DECODE, f"leaderworkerset.sigs.k8s.io/{key}", value)
    scene.pod(DECODE, ready=False)
    scene.gone(DECODE)
    checks = results(scene)
    assert wrong(checks) == {}
    assert checks["DYT0702"].message == "11 of 11 pods"


# -- permissions -----------------------------------------------------------------------------------


def denied(scene: Scene, *resources: str) -> None:
    [account] = scene.accounts
    assert isinstance(account.allowed, dict)
    allowed = {one: one.resource not in resources for one in account.allowed}
    scene.accounts = (Account(account.user, allowed),)


def test_an_account_that_may_not_register_is_found_before_what_follows():
    scene = Scene()
    denied(scene, "dynamoworkermetadatas")
    for name in list(scene.metadata):
        scene.gone(name)
    checks = results(scene)
    assert wrong(checks) == {"DYT0703": [ACCOUNT]}
    assert values(checks["DYT0703"]) == [
        "cannot create dynamoworkermetadatas.nvidia.com, patch dynamoworkermetadatas.nvidia.com, "
        "list dynamoworkermetadatas.nvidia.com in prod"
    ]
    assert checks["DYT0704"].message == "0 of 12 pods: see DYT0703"


def test_who_may_not_register_is_never_ready():
    scene = Scene()
    denied(scene, "dynamoworkermetadatas")
    for name in list(scene.metadata):
        scene.not_started(name, running=True)
        scene.log(name, domains={"zone": "us-east-1a"}, not_persisted="Failed to persist metadata")
    checks = results(scene)
    assert wrong(checks) == {"DYT0703": [ACCOUNT]}
    assert {checks[code].message for code in ("DYT0702", "DYT0704")} == {
        "0 of 12 pods: see DYT0703"
    }


def test_a_registered_worker_is_not_ready_for_another_reason():
    scene = Scene()
    denied(scene, "dynamoworkermetadatas")
    scene.pod(DECODE, ready=False)
    assert wrong(results(scene)) == {"DYT0702": [subject(DECODE)], "DYT0703": [ACCOUNT]}


def test_an_account_that_may_not_read_slices_can_register():
    scene = Scene()
    denied(scene, "endpointslices")
    scene.gone(DECODE)
    assert wrong(results(scene)) == {"DYT0703": [ACCOUNT], "DYT0704": [subject(DECODE)]}


def test_unreviewed_accounts_never_pass():
    scene = Scene()
    [account] = scene.accounts
    scene.accounts = (Account(account.user, REFUSED),)
    assert skipped(results(scene)["DYT0703"]) == UNREAD
    review = AccessReview("create", "dynamoworkermetadatas", "nvidia.com", SPACE)
    scene.accounts = (Account("system:serviceaccount:prod:other", {review: False}),)
    assert skipped(results(scene)["DYT0703"]) == SKIPPED


# -- metadata --------------------------------------------------------------------------------------


def test_a_ready_worker_without_metadata_is_found():
    scene = Scene()
    scene.gone(DECODE)
    checks = results(scene)
    assert wrong(checks) == {"DYT0704": [subject(DECODE)]}
    assert values(checks["DYT0704"]) == ["no DynamoWorkerMetadata"]


def test_a_failed_registration_in_the_log_counts_before_the_pod_is_ready():
    scene = Scene()
    scene.not_started(DECODE, running=True)
    scene.log(DECODE, domains={"zone": "us-east-1a"}, not_persisted="Failed to persist metadata")
    checks = results(scene)
    # It never becomes Ready because of that: no fault of its own.
    assert wrong(checks) == {"DYT0704": [subject(DECODE)]}
    assert checks["DYT0702"].message == "11 of 12 pods; the others: see DYT0704"
    assert values(checks["DYT0704"]) == [
        "no DynamoWorkerMetadata; its log has: Failed to persist metadata"
    ]


def test_a_resource_that_is_not_served_is_named_as_the_reason():
    scene = Scene()
    scene.metadata = {}
    scene.changes["served"] = {"dynamographdeployments.nvidia.com": ("v1beta1",)}
    checks = results(scene)
    assert values(checks["DYT0704"])[0].endswith("does not serve this resource (DYT0005)")


def test_metadata_that_could_not_be_read_is_unread():
    scene = Scene()
    scene.changes["metadata"] = REFUSED
    checks = results(scene)
    codes = ("DYT0704", "DYT0705", "DYT0706", "DYT0709")
    assert {skipped(checks[code]) for code in codes} == {UNREAD}


def test_metadata_with_an_unreadable_card_is_not_a_registration():
    scene = Scene()
    item = scene.metadata[DECODE]
    broken = {key: {"card_json": 3} for key in item.data["model_cards"]}
    scene.metadata[DECODE] = replace(item, data={**item.data, "model_cards": broken})
    assert values(results(scene)["DYT0704"]) == [
        "its DynamoWorkerMetadata has no readable model card: "
        "Expected `object`, got `int` - at `$.card_json`"
    ]


def test_a_card_that_routers_reject_is_not_a_registration():
    scene = Scene()
    scene.card(DECODE, taints=[{"odd": 1}, 3])
    assert wrong(results(scene)) == {"DYT0704": [subject(DECODE)]}


def without_card(scene: Scene) -> None:
    item = scene.metadata[DECODE]
    scene.metadata[DECODE] = replace(item, data={**item.data, "model_cards": {}})


def test_endpoints_without_a_model_card_are_a_failure():
    scene = Scene()
    without_card(scene)
    checks = results(scene)
    assert wrong(checks) == {"DYT0710": [subject(DECODE)]}
    assert checks["DYT0710"].state is State.FAIL
    scene.pod(DECODE, ready=False)
    assert wrong(results(scene)) == {"DYT0702": [subject(DECODE)]}


def test_an_encoder_has_no_model_card():
    scene = Scene()
    without_card(scene)
    scene.label(DECODE, "nvidia.com/dynamo-component", "EncodeWorker")
    assert "DYT0710" not in wrong(results(scene))
    [row] = [one for one in scene.joined().workers if one.name == DECODE]
    assert row.chain is not None
    assert row.chain[LinkName.CARD].unknown == "an encoder registers no model"


@pytest.mark.parametrize(
    ("owner", "says"),
    [(OTHER_UID, f"the pod with uid {OTHER_UID}"), ("", "no pod")],
)
def test_metadata_of_an_earlier_pod_is_found(owner: str, says: str):
    scene = Scene()
    scene.metadata[DECODE] = replace(scene.metadata[DECODE], owner_uid=owner)
    checks = results(scene)
    assert wrong(checks) == {"DYT0705": [subject(DECODE)]}
    assert values(checks["DYT0705"]) == [f"DynamoWorkerMetadata {DECODE} belongs to {says}"]


def test_a_containers_object_may_be_called_like_another_pod():
    scene = Scene()
    # The pod PREFILL registers by its container x, in an object called like the pod DECODE.
    pod = scene.pods[PREFILL]
    own = replace(scene.metadata[DECODE], name=f"{DECODE}-x", owner=DECODE)
    taken = replace(scene.metadata[DECODE], owner=PREFILL, owner_uid=pod.uid)
    scene.metadata = {**scene.metadata, DECODE: taken, "own": _renamed(own)}
    assert "DYT0705" not in wrong(results(scene))


def _renamed(item: WorkerMetadata) -> WorkerMetadata:
    """The same with the id of its new name."""
    number = instance_id(item.name)
    data = {
        bucket: {
            f"{key.rpartition('/')[0]}/{number:x}": {**one, "instance_id": number}
            for key, one in entries.items()
        }
        for bucket, entries in item.data.items()
    }
    return replace(item, data=data)


def test_metadata_without_a_pod_is_found_in_whole_namespaces():
    scene = Scene()
    item = scene.metadata[DECODE]
    scene.metadata["old"] = replace(item, name="old", owner="old", owner_uid=OTHER_UID)
    checks = results(scene)
    assert wrong(checks) == {"DYT0709": ["DynamoWorkerMetadata old.prod"]}
    assert values(checks["DYT0709"]) == ["pod old does not exist, created 60 min ago"]
    scene.changes["wanted"] = ("my-llm",)
    assert wrong(results(scene)) == {"DYT0709": ["DynamoWorkerMetadata old.prod"]}
    scene.changes["other_pods"] = (("prod", "old"),)
    assert wrong(results(scene)) == {}
    scene.changes["other_pods"] = REFUSED
    assert skipped(results(scene)["DYT0709"]) == UNREAD
    scene.changes = {"wanted": ("other",)}
    assert "DYT0709" not in wrong(results(scene))
    scene.changes = {"namespaces": ("other",)}
    assert wrong(results(scene)) == {}


def test_a_pod_without_an_operator_is_an_owner_too():
    scene = Scene()
    item = scene.metadata[DECODE]
    scene.metadata["bare"] = replace(item, name="bare", owner="bare", owner_uid=OTHER_UID)
    scene.endpoints.append(replace(scene.endpoints[0], pod="bare", uid=OTHER_UID))
    assert wrong(results(scene)) == {}


def test_an_id_that_is_not_the_names_is_found():
    scene = Scene()
    item = scene.metadata[DECODE]
    data = {
        bucket: {
            f"{key.rpartition('/')[0]}/{7:x}": {**one, "instance_id": 7}
            for key, one in entries.items()
        }
        for bucket, entries in item.data.items()
    }
    scene.metadata[DECODE] = replace(item, data=data)
    checks = results(scene)
    assert wrong(checks) == {"DYT0706": [subject(DECODE)]}
    [finding] = checks["DYT0706"].findings
    assert finding.value == f"DynamoWorkerMetadata {DECODE} registers 7"
    assert finding.expected == f"{instance_id(DECODE):x}, the hash of its name"


def test_a_key_that_is_not_as_its_value_is_found():
    scene = Scene()
    item = scene.metadata[DECODE]
    moved = {f"{key[:-3]}abc": one for key, one in item.data["endpoints"].items()}
    scene.metadata[DECODE] = replace(item, data={**item.data, "endpoints": moved})
    assert wrong(results(scene)) == {"DYT0706": [subject(DECODE)]}


# -- other backends --------------------------------------------------------------------------------


def test_workers_of_etcd_are_looked_for_in_etcd():
    checks = results(in_etcd())
    assert checks["DYT0707"].state is State.PASS
    assert checks["DYT0707"].message == "12 of 12 pods"
    assert {skipped(checks[code]) for code in IN_KUBERNETES} == {SKIPPED}


def test_a_ready_worker_that_is_not_in_etcd_is_found():
    scene, kubernetes = in_etcd(), Scene()
    del kubernetes.metadata[DECODE]
    scene.registry = Registry("etcd http://etcd:2379", kubernetes.registered())
    checks = results(scene)
    assert wrong(checks) == {"DYT0707": [subject(DECODE)]}
    assert values(checks["DYT0707"]) == ["runs and is not registered in etcd http://etcd:2379"]
    scene.pod(DECODE, ready=False)
    assert wrong(results(scene)) == {"DYT0707": [subject(DECODE)]}
    scene.main(DECODE, running_since=None)
    checks = results(scene)
    assert wrong(checks) == {}
    assert checks["DYT0707"].message == "11 of 12 pods; the others: see DYT0410"


def test_a_missing_or_unreachable_registry_never_passes():
    scene = Scene(discovery="etcd")
    checks = results(scene)
    assert skipped(checks["DYT0707"]) == SKIPPED
    assert checks["DYT0707"].message == "workers register in etcd (use --discovery etcd)"
    scene.registry = Registry("etcd http://etcd:2379", REFUSED)
    assert skipped(results(scene)["DYT0707"]) == UNREAD


def test_times_do_not_go_back():
    scene = Scene()
    item = scene.metadata[DECODE]
    scene.metadata["old"] = replace(
        item, name="old", owner="old", owner_uid=OTHER_UID, created=NOW + 5
    )
    assert values(results(scene)["DYT0709"]) == ["pod old does not exist, created 0 s ago"]
