"""The simulated cluster and its faults behave like the real components."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynctl.verify.join import join
from dynctl.wire.dynamo.frontend_metrics import read_frontend_metrics
from dynctl.wire.dynamo.worker_log import read_start_log
from dynctl.wire.kubernetes.worker_metadata import instance_id
from tests.kube import deployment, objects
from tests.kube.actors import Simulation, living, simulation
from tests.kube.actors.scheduler import fits
from tests.kube.actors.simulation import OPERATOR_ROLE
from tests.kube.actors.worker import without_topology
from tests.kube.deployment import LEVELS, card_config
from tests.kube.facts import facts_of
from tests.kube.objects import ZONE, Component, Json

ONE = "my-llm-decode-a-0"


@pytest.fixture
def sim() -> Iterator[Simulation]:
    """A small deployment that is up: one prefill and two decode workers a zone."""
    with living(prefill=1, decode=2) as found:
        yield found


def breaks(sim: Simulation) -> list[tuple[str, str]]:
    """``(pod, link)`` of the first break of each worker's chain."""
    facts = facts_of(sim.objects(), files=sim.files(), logs=sim.logs(), now=sim.clock.now)
    return [
        (worker.name, str(first.link))
        for worker in join(facts).workers
        for chain in worker.chains.values()
        if (first := next(chain.breaks(), None)) is not None
    ]


def label(sim: Simulation, name: str = ONE) -> str | None:
    found: str | None = sim.pod(name)["metadata"]["labels"].get(ZONE)
    return found


def events(sim: Simulation) -> list[str]:
    return [one["message"] for one in sim.store.list("Event")]


def main_status(sim: Simulation, name: str = ONE) -> Json:
    found: Json = sim.pod(name)["status"]["containerStatuses"][0]
    return found


def label_nodes(sim: Simulation, zone: str | None) -> None:
    for node in sim.store.list("Node"):
        sim.edit("Node", node["metadata"]["name"], {"metadata": {"labels": {ZONE: zone}}}, "")


def unlabel(sim: Simulation) -> None:
    label_nodes(sim, None)


def test_nothing_is_left_behind():
    before = threading.active_count()
    with living(prefill=1, decode=1) as sim:
        root = sim.sandbox("my-llm-decode-a-0").root
        assert root.is_dir()
    assert not root.exists()
    # A thread of an earlier test may end meanwhile.
    assert threading.active_count() <= before


def test_registered_elsewhere_with_another_backend():
    with living(prefill=1, decode=1, discovery="etcd") as sim:
        assert not sim.store.list("dwm")
        assert not sim.store.list("endpointslices")
        assert {name for _, name in sim.workers.elsewhere} == set(
            sim.pods("prefill") + sim.pods("decode")
        )


# -- the operator ----------------------------------------------------------------------------------


def test_a_deleted_pod_comes_back_as_another_one(sim: Simulation):
    before = sim.pod(ONE)["metadata"]["uid"]
    sim.recreate(ONE)
    assert ONE not in {one["metadata"]["name"] for one in sim.store.list("dwm")}
    sim.settle()
    uid = sim.pod(ONE)["metadata"]["uid"]
    assert uid != before
    assert sim.store.get("dwm", ONE, "prod")["metadata"]["ownerReferences"][0]["uid"] == uid
    assert not breaks(sim)


def test_a_graph_scales_in_both_directions(sim: Simulation):
    def scaled(found: list[Component]) -> list[Component]:
        return [
            dataclasses.replace(one, replicas=3 if one.name == "decode-a" else 0)
            if one.name.startswith("decode")
            else one
            for one in found
        ]

    hashes = {sim.pod(one)["metadata"]["labels"]["nvidia.com/dynamo-worker-hash"] for one in [ONE]}
    sim.regraph(scaled)
    sim.settle()
    assert sim.pods("decode") == [f"my-llm-decode-a-{number}" for number in range(3)]
    assert {
        sim.pod(one)["metadata"]["labels"]["nvidia.com/dynamo-worker-hash"]
        for one in sim.pods("decode")
    } == hashes


def test_a_rolling_update_can_stand_still(sim: Simulation):
    def updated(found: list[Component]) -> list[Component]:
        return [dataclasses.replace(one, image="example/engine:2") for one in found]

    sim.operator.may_replace = 2
    sim.regraph(updated)
    sim.settle()
    workers = [sim.pod(one) for one in sim.pods() if "frontend" not in one]
    hashes = [one["metadata"]["labels"]["nvidia.com/dynamo-worker-hash"] for one in workers]
    assert sorted(map(hashes.count, set(hashes))) == [2, 4]
    sim.operator.may_replace = None
    sim.settle()
    assert not breaks(sim)


def test_a_graph_is_successful_once_its_pods_are_ready():
    with simulation() as sim:
        sim.apply(*deployment.nodes(["us-east-1a"], 1))
        sim.kubelet.unready = {"g-decode-0"}
        parts = [Component("decode", "decode")]
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "prod"}}
        sim.store.create(space)
        sim.kubectl_apply(objects.graph("prod", "g", parts, policy=deployment.policy()))
        sim.settle()
        state = sim.store.get("dgd", "g", "prod")["status"]["state"]
        sim.kubelet.unready = set()
        sim.settle()
        assert (state, sim.store.get("dgd", "g", "prod")["status"]["state"]) == (
            "pending",
            "successful",
        )


# -- the scheduler ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "fitting"),
    [
        ({}, ["plain"]),
        ({"nodeSelector": {ZONE: "a"}}, ["plain"]),
        ({"nodeSelector": {ZONE: "b"}}, []),
        ({"operator": "In", "values": ["a", "c"]}, ["plain"]),
        ({"operator": "NotIn", "values": ["a"]}, []),
        ({"operator": "Exists"}, ["plain"]),
        ({"operator": "DoesNotExist"}, []),
    ],
)
def test_pods_go_where_they_fit(spec: Json, fitting: list[str]):
    if "operator" in spec:
        term = {"matchExpressions": [{"key": ZONE, **spec}]}
        required = {"nodeSelectorTerms": [term]}
        affinity = {"requiredDuringSchedulingIgnoredDuringExecution": required}
        spec = {"affinity": {"nodeAffinity": affinity}}
    nodes = [
        objects.node("plain", zone="a"),
        objects.node("cordoned", zone="a", cordoned=True),
        objects.node("tainted", zone="a", taints=["dedicated"]),
    ]
    there = [one["metadata"]["name"] for one in nodes if fits({"spec": spec}, one)]
    assert there == fitting


def test_a_pod_without_a_node_waits_with_a_condition(sim: Simulation):
    for name in ("gpu-a-0", "gpu-a-1"):
        sim.edit("Node", name, {"spec": {"unschedulable": True}}, "")
    sim.recreate(ONE)
    sim.settle()
    conditions = sim.pod(ONE)["status"]["conditions"]
    assert [(one["type"], one["status"], one["reason"]) for one in conditions] == [
        ("PodScheduled", "False", "Unschedulable")
    ]


# -- the label controller --------------------------------------------------------------------------


def test_it_copies_every_level_of_a_grove_topology():
    with living(prefill=1, decode=1, grove=True) as sim:
        labels = sim.pod("my-llm-decode-b-0")["metadata"]["labels"]
    assert labels["nvidia.com/dynamo-topology.zone"] == "us-east-1b"
    assert labels["nvidia.com/dynamo-topology.rack"] == "us-east-1b-r0"
    assert {domain for domain, _ in LEVELS} == {"zone", "rack"}


def test_a_removed_label_is_copied_again_and_a_changed_one_is_not(sim: Simulation):
    sim.edit("Pod", ONE, {"metadata": {"labels": {ZONE: None}}})
    sim.settle()
    assert label(sim) == "us-east-1a"
    sim.edit("Pod", ONE, {"metadata": {"labels": {ZONE: "elsewhere"}}})
    sim.settle()
    assert label(sim) == "elsewhere"


def test_it_does_not_see_that_a_node_is_relabelled(sim: Simulation):
    node = sim.pod(ONE)["spec"]["nodeName"]
    sim.edit("Node", node, {"metadata": {"labels": {ZONE: "us-east-1c"}}}, "")
    sim.advance(3600)
    sim.restart_operator()
    sim.settle()
    assert label(sim) == "us-east-1a"
    assert (ONE, "pod label") in breaks(sim)


@pytest.mark.parametrize(
    ("generation", "result"),
    [
        (
            "1.2",
            f'Node "gpu-us-east-1a-0" does not have required topology label "{ZONE}"; topology '
            "metadata will remain unavailable",
        ),
        (
            "newer",
            f'Node "gpu-us-east-1a-0" does not have required topology label "{ZONE}"; topology '
            f'metadata for "{ZONE}" will remain unavailable',
        ),
    ],
)
def test_a_late_node_label_is_seen_after_a_restart_of_the_operator(generation: Any, result: str):
    def prepare(sim: Simulation) -> None:
        sim.labels.generation = generation
        unlabel(sim)

    zones = ["us-east-1a"]
    with living(zones=zones, prefill=1, decode=1, pinned=False, prepare=prepare, age=0) as sim:
        assert result in events(sim)
        label_nodes(sim, "us-east-1a")
        sim.advance(3600)
        assert label(sim, "my-llm-decode-0") is None
        sim.restart_operator()
        sim.advance(600)
        assert label(sim, "my-llm-decode-0") == "us-east-1a"
        assert not breaks(sim)


def test_without_the_right_to_read_nodes_it_writes_no_event_and_tries_again():
    def prepare(sim: Simulation) -> None:
        sim.forbid("get", "nodes", OPERATOR_ROLE)

    with living(prefill=1, decode=1, prepare=prepare, age=60) as sim:
        assert label(sim) is None
        assert not events(sim)
        assert 'cannot get resource "nodes"' in sim.labels.log[0]
        rules = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
        role = sim.store.get("ClusterRole", OPERATOR_ROLE)
        sim.store.update({**role, "rules": role["rules"] + rules})
        sim.advance(1200)
        assert label(sim) == "us-east-1a"


def test_changing_the_annotation_makes_it_look_again(sim: Simulation):
    name = "nvidia.com/topology-label-key"
    sim.edit("Pod", ONE, {"metadata": {"annotations": {name: "kubernetes.io/hostname"}}})
    sim.settle()
    found = sim.pod(ONE)
    assert found["metadata"]["labels"]["kubernetes.io/hostname"] == found["spec"]["nodeName"]


# -- the kubelet and the process -------------------------------------------------------------------


def test_the_volume_has_the_layout_of_the_downward_api(sim: Simulation):
    mount = sim.sandbox(ONE).root / "etc/dynamo/topology"
    assert (mount / "zone").is_symlink()
    assert (mount / "zone").readlink() == Path("..data/zone")
    assert (mount / "zone").read_text() == "us-east-1a"
    assert (mount / "..data").readlink().name.startswith("..2026_")


def test_files_follow_labels_with_a_lag(sim: Simulation):
    sim.kubelet.lag = 60
    sim.edit("Pod", ONE, {"metadata": {"labels": {ZONE: "us-east-1z"}}})
    sim.advance(59)
    assert sim.files()["prod", ONE] == {"zone": "us-east-1a"}
    sim.advance(1)
    assert sim.files()["prod", ONE] == {"zone": "us-east-1z"}
    sim.kubelet.lags[ONE] = None
    sim.edit("Pod", ONE, {"metadata": {"labels": {ZONE: "us-east-1y"}}})
    sim.advance(3600)
    assert sim.files()["prod", ONE] == {"zone": "us-east-1z"}


def test_a_worker_gives_up_after_half_a_minute_and_is_started_again(sim: Simulation):
    sim.labels.on = False
    sim.recreate(ONE)
    sim.advance(33)
    assert main_status(sim)["state"].keys() == {"running"}
    sim.advance(1)
    status = main_status(sim)
    assert status["lastState"]["terminated"]["exitCode"] == 1
    assert (status["restartCount"], status["ready"]) == (1, False)
    log = sim.server.logs["prod", ONE, "main", True]
    assert read_start_log(log.splitlines()).timed_out.endswith("transfer domain. Exiting.")
    assert log.count("Waiting for topology domain zone in /etc/dynamo/topology (") == 30
    sim.labels.on = True
    sim.labels.restart()
    sim.settle()
    assert main_status(sim)["ready"]
    assert main_status(sim)["restartCount"] == 1
    assert "Topology config: TopologyConfig(" in sim.logs()["prod", ONE]


def test_a_worker_that_never_gets_its_topology_stays_in_back_off(sim: Simulation):
    sim.labels.on = False
    sim.recreate(ONE)
    sim.settle()
    sim.advance(1800)
    status = main_status(sim)
    assert status["restartCount"] > 4
    assert not status["ready"]
    assert ONE not in {one["metadata"]["name"] for one in sim.store.list("dwm")}


def test_a_worker_reads_its_topology_only_at_its_start(sim: Simulation):
    sim.edit("Pod", ONE, {"metadata": {"labels": {ZONE: "us-east-1z"}}})
    sim.settle()
    assert card_config(sim.store.get("dwm", ONE, "prod"))["topology_domains"] == {
        "zone": "us-east-1a"
    }
    sim.kubelet.restart(ONE)
    sim.settle()
    assert card_config(sim.store.get("dwm", ONE, "prod"))["topology_domains"] == {
        "zone": "us-east-1z"
    }
    assert main_status(sim)["lastState"]["terminated"]["exitCode"] == 137


# -- discovery -------------------------------------------------------------------------------------


def test_a_worker_without_permission_runs_on_and_logs_it(sim: Simulation):
    sim.store.delete("rolebinding", "my-llm-k8s-service-discovery-rolebinding", "prod")
    sim.recreate(ONE)
    sim.settle()
    assert "running" in main_status(sim)["state"]
    assert not main_status(sim)["ready"]
    assert ONE not in {one["metadata"]["name"] for one in sim.store.list("dwm")}
    result = read_start_log(sim.logs()["prod", ONE].splitlines()).not_persisted
    assert "Failed to persist metadata to CR, rolling back local state" in result
    assert "is forbidden" in result


def test_what_workers_publish_can_be_changed(sim: Simulation):
    sim.workers.publish[ONE] = without_topology
    sim.recreate(ONE)
    sim.settle()
    assert (ONE, "card") in breaks(sim)


def test_slices_follow_readiness_and_uids(sim: Simulation):
    def ready(name: str) -> dict[str, bool]:
        return {
            end["targetRef"]["uid"]: end["conditions"]["ready"]
            for one in sim.store.list("endpointslices")
            for end in one["endpoints"]
            if end["targetRef"]["name"] == name
        }

    uid = sim.pod(ONE)["metadata"]["uid"]
    assert ready(ONE) == {uid: True}
    sim.kubelet.unready = {ONE}
    sim.settle()
    assert ready(ONE) == {uid: False}
    sim.slices.on = False
    sim.recreate(ONE)
    sim.settle()
    assert ready(ONE) == {uid: False}
    sim.slices.on, sim.slices.ignores = True, {ONE}
    sim.settle()
    assert ready(ONE) == {}


# -- frontends -------------------------------------------------------------------------------------


def test_a_frontend_lists_its_workers_and_serves_within_the_domain(sim: Simulation):
    host, port = sim.server.forwards["prod", "my-llm-frontend-0", 8000]
    url = f"http://{host}:{port}"
    ids = {name: instance_id(name) for name in sim.pods() if "frontend" not in name}
    metrics = read_frontend_metrics(httpx.get(f"{url}/metrics", trust_env=False).content)
    assert {number for number, _ in metrics.registered} == set(ids.values())
    body = {"model": "m", "messages": []}
    for _ in range(4):
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False)
        served = answer.json()["nvext"]["worker_id"]
        names = {number: name for name, number in ids.items()}
        zones = [names[served[key]].split("-")[-2] for key in served]
        assert len(set(zones)) == 1
    sim.regraph(lambda found: [one for one in found if one.name != "decode-a"])
    sim.settle()
    answers = [
        httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False) for _ in range(2)
    ]
    assert sorted(one.status_code for one in answers) == [200, 500]
    assert "Failed to generate completions" in [one.json().get("message") for one in answers]


def test_a_frontend_can_miss_a_worker(sim: Simulation):
    sim.frontends.misses["my-llm-frontend-0"] = {ONE}
    sim.settle()
    view = sim.frontends.views["prod", "my-llm-frontend-0"]
    assert len(view.workers) == 5
    assert instance_id(ONE) not in {one.number for one in view.workers}
