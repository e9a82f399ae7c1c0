"""`dynctl topology sync` in a living cluster whose operator copies no labels.

The command runs with the permissions that `topology render --controller` prints, and no others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynctl.adapters.kubernetes.cluster import KubernetesWriter, open_cluster
from dynctl.adapters.ports import Cluster, ClusterWriter
from dynctl.manifests.render import StalePolicy, sync_controller
from dynctl.serving.topology_sync.controller import Controller
from dynctl.serving.topology_sync.copies import CopyState
from dynctl.serving.topology_sync.election import DURATION_S, RENEW_S, LeaderElection
from dynctl.serving.topology_sync.status import status_server
from dynctl.serving.topology_sync.writing import PodSync
from tests.kube.actors import Simulation, living
from tests.kube.command_line import Run
from tests.kube.objects import ZONE, Json
from tests.waiting import until_now

HOME, NAME = "dynctl-system", "dynctl-topology-sync"
POD = "my-llm-decode-a-0"
OTHER = "my-llm-decode-b-0"
GROVE_LABEL = "nvidia.com/dynamo-topology.zone"


@contextmanager
def unlabelled(**start: Any) -> Iterator[Simulation]:
    """Two zones whose workers wait for labels: the operator's label controller does not run."""
    given = start.pop("prepare", lambda sim: None)

    def prepare(sim: Simulation) -> None:
        sim.labels.on = False
        given(sim)

    with living(prefill=1, decode=1, age=0, prepare=prepare, **start) as sim:
        sim.store.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": HOME}})
        for body in sync_controller(HOME, "example/dynctl:1", watched=None, stale="report")[
            "items"
        ]:
            if body["kind"] != "Deployment":
                sim.store.create(body)
        sim.account(HOME, NAME)
        yield sim


def kubeconfig(sim: Simulation, tmp_path: Path) -> Path:
    return sim.server.kubeconfig(tmp_path / "kubeconfig", token=f"{HOME}.{NAME}", namespace=HOME)


def label(sim: Simulation, pod: str = POD, key: str = ZONE) -> str | None:
    found: str | None = sim.pod(pod)["metadata"]["labels"].get(key)
    return found


def events(sim: Simulation) -> list[tuple[str, str]]:
    """(pod, reason) of the events of our controller."""
    return [
        (one["involvedObject"]["name"], one["reason"])
        for one in sim.store.list("Event")
        if one["reportingComponent"] == NAME
    ]


def relabel_node_of(sim: Simulation, pod: str, zone: str | None) -> None:
    node = sim.pod(pod)["spec"]["nodeName"]
    sim.edit("Node", node, {"metadata": {"labels": {ZONE: zone}}}, "")


def rows(ran: Any) -> dict[str, Json]:
    return {row["pod"]: row for row in ran.json["rows"]}


# -- once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("grove", "key"), [(False, ZONE), (True, GROVE_LABEL)])
@pytest.mark.seed("dep-topology: pod labels: copy without Grove")
def test_labels_are_copied_and_the_workers_start(
    grove: bool, key: str, dynctl: Run, tmp_path: Path
) -> None:
    with unlabelled(grove=grove) as sim:
        assert label(sim, key=key) is None
        ran = dynctl(
            *("topology", "sync", "--once", "-A", "-o", "json"),
            *("--kubeconfig", kubeconfig(sim, tmp_path)),
        )
        assert ran.code == 0, ran.err
        assert label(sim, key=key) == "us-east-1a"
        assert label(sim, OTHER, key) == "us-east-1b"
        sim.settle()
        sim.advance(600)
        checked = dynctl(
            *("topology", "verify", "-n", "prod", "-o", "json"),
            *("--kubeconfig", sim.viewer_kubeconfig(tmp_path / "viewer")),
        )
    assert {row["state"] for row in ran.json["rows"]} == {"missing"}
    assert all(row["written"] for row in ran.json["rows"])
    # The workers ended once, because the labels came later than 30 s after their start.
    assert (checked.code, checked.reported) == (0, {"DYT0603", "DYT0902"})
    assert len(checked.json["chain"]) == 4


def test_a_dry_run_writes_nothing(dynctl: Run, tmp_path: Path) -> None:
    with unlabelled() as sim:
        before = sim.store.revision
        ran = dynctl(
            *("topology", "sync", "--once", "--dry-run", "-A"),
            *("--kubeconfig", kubeconfig(sim, tmp_path)),
        )
        assert sim.store.revision == before
        names = dynctl(
            *("topology", "sync", "--once", "--dry-run", "-A", "-o", "name"),
            *("--kubeconfig", kubeconfig(sim, tmp_path)),
        )
    assert ran.code == 0
    assert "dry run: nothing was written; 4 labels would be written" in ran.out
    assert f"prod/{POD}" in names.out.splitlines()


@dataclass(frozen=True)
class Case:
    """A fault, what the row of POD says of it, and what is in the cluster afterwards."""

    name: str
    do: Callable[[Simulation], object]
    state: str
    has: str | None
    reason: str = ""
    stale: str = "report"
    code: int = 1
    start: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


def _annotate(key: str, value: str | None) -> Callable[[Simulation], object]:
    return lambda sim: sim.edit("Pod", POD, {"metadata": {"annotations": {key: value}}})


def _labelled(sim: Simulation) -> None:
    sim.edit("Pod", POD, {"metadata": {"labels": {ZONE: "us-east-1z"}}})


def _labelled_before_the_start(sim: Simulation) -> None:
    _labelled(sim)
    sim.edit("Pod", POD, {"status": {"containerStatuses": None}})


def _labelled_and_started(sim: Simulation) -> None:
    _labelled(sim)
    sim.settle()
    sim.advance(60)


def _node_gone(sim: Simulation) -> None:
    sim.store.delete("Node", sim.pod(POD)["spec"]["nodeName"], "")


def _no_label_and_no_events(sim: Simulation) -> None:
    relabel_node_of(sim, POD, None)
    sim.forbid("create", "events", NAME)


def _forbid(verb: str, resource: str) -> Callable[[Simulation], object]:
    return lambda sim: sim.forbid(verb, resource, NAME)


CASES = (
    Case("node-lacks-the-label", lambda sim: relabel_node_of(sim, POD, None), "node-lacks-label",
         None, "TopologyLabelMissing"),
    Case("label-differs", _labelled, "stale", "us-east-1z", "TopologyLabelStale"),
    Case("label-differs-before-the-start", _labelled_before_the_start, "repair", "us-east-1a",
         "TopologyLabelReplaced", "starting", 0),
    Case("label-differs-after-the-start", _labelled_and_started, "stale", "us-east-1z",
         "TopologyLabelStale", "starting"),
    Case("label-differs-and-is-always-replaced", _labelled_and_started, "repair", "us-east-1a",
         "TopologyLabelReplaced", "always", 0),
    Case("node-is-gone", _node_gone, "node-unknown", None),
    Case("key-is-no-key", _annotate("nvidia.com/topology-label-key", "a b"), "invalid", None,
         "TopologyLabelKeyInvalid"),
    Case("no-such-topology", _annotate("nvidia.com/topology-cluster-topology-name", "none"),
         "no-topology", None, "TopologyNotFound", start={"grove": True}),
    Case("topologies-may-not-be-read", _forbid("list", "clustertopologybindings"), "unread", None,
         start={"grove": True}),
    Case("pods-may-not-be-patched", _forbid("patch", "pods"), "missing", None,
         problem="no permission to patch pods in prod"),
    Case("events-may-not-be-written", _no_label_and_no_events, "node-lacks-label", None,
         problem="no permission to create events in prod"),
    Case("healthy", lambda sim: None, "missing", "us-east-1a", code=0),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_fault_is_named_and_nothing_is_invented(
    case: Case, dynctl: Run, tmp_path: Path
) -> None:
    with unlabelled(**case.start) as sim:
        case.do(sim)
        ran = dynctl(
            *("topology", "sync", "--once", "-n", "prod", "--stale", case.stale, "-o", "json"),
            *("--kubeconfig", kubeconfig(sim, tmp_path)),
        )
        key = GROVE_LABEL if case.start.get("grove") else ZONE
        has, seen = label(sim, key=key), events(sim)
    row = rows(ran)[POD]
    assert (ran.code, row["state"], has) == (case.code, case.state, case.has), ran.err
    assert row["problem"] == case.problem
    # Its neighbours on the node may have the same problem; pods without one have no event.
    assert {one for one in seen if one[0] == POD} == (
        {(POD, case.reason)} if case.reason else set()
    )
    assert {reason for _, reason in seen} <= {case.reason}
    if case.state in ("missing", "repair") and not case.problem:
        assert row["message"] == "" or "replaced" in row["message"]
    else:
        assert row["message"] or row["problem"]


def test_without_a_pod_that_names_a_label_nothing_is_done(dynctl: Run, tmp_path: Path) -> None:
    with unlabelled() as sim:
        ran = dynctl(
            *("topology", "sync", "--once", "-n", HOME),
            *("--kubeconfig", kubeconfig(sim, tmp_path)),
        )
    assert ran.code == 0
    assert ran.out.startswith("no pod names a topology label or a topology")


def test_missing_permission_to_list_is_named(dynctl: Run, tmp_path: Path) -> None:
    with unlabelled() as sim:
        sim.forbid("list", "nodes", NAME)
        ran = dynctl("topology", "sync", "--once", "-A", "--kubeconfig", kubeconfig(sim, tmp_path))
    assert ran.code == 3
    message, hint = ran.error
    assert message == "not allowed to list nodes in all namespaces"
    assert 'apiGroups: [""], resources: [nodes], verbs: [get, list, watch]' in hint


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--stale", "never"), "--stale never: expected report or starting or always"),
        (("-n", "Prod"), "-n Prod: not a namespace name"),
    ],
)
def test_bad_options_are_refused(
    words: tuple[str, ...], message: str, dynctl: Run, tmp_path: Path
) -> None:
    with unlabelled() as sim:
        ran = dynctl(
            "topology", "sync", "--once", *words, "--kubeconfig", kubeconfig(sim, tmp_path)
        )
    assert ran.code == 2
    assert ran.error[0].startswith(message)


# -- running ---------------------------------------------------------------------------------------


@dataclass
class Running:
    """A controller in a thread, and what it says."""

    controller: Controller
    said: list[str]

    def until_said(self, part: str) -> None:
        until_now(lambda: any(part in one for one in self.said))


def clients(sim: Simulation, tmp_path: Path) -> tuple[Cluster, ClusterWriter]:
    cluster = open_cluster(kubeconfig=kubeconfig(sim, tmp_path), context=None, timeout=10)
    return cluster, KubernetesWriter(cluster)


@contextmanager
def running(
    sim: Simulation,
    tmp_path: Path,
    *,
    policy: StalePolicy = StalePolicy.REPORT,
    elect: str = "",
    monotonic: Callable[[], float] | None = None,
) -> Iterator[Running]:
    """``elect``: the identity of a candidate; empty: no election."""
    cluster, writer = clients(sim, tmp_path)
    sync = PodSync(cluster, writer, policy)
    election = None
    if elect:
        clock = monotonic or time.monotonic
        election = LeaderElection(
            cluster, writer, HOME, NAME, elect, monotonic=clock, now=lambda: sim.clock.now
        )
        candidate = election
        sync.write_while(lambda: candidate.leads)
    said: list[str] = []
    controller = Controller(cluster, "prod", sync, election, said.append)
    thread = threading.Thread(target=controller.run)
    thread.start()
    try:
        yield Running(controller, said)
    finally:
        controller.stop()
        cluster.close()
        thread.join()


def test_a_label_that_a_node_gets_later_is_copied(tmp_path: Path) -> None:
    with unlabelled(prepare=lambda sim: None) as sim:
        relabel_node_of(sim, POD, None)
        with running(sim, tmp_path) as one:
            until_now(lambda: label(sim, OTHER) == "us-east-1b")
            one.until_said("does not have required topology label")
            relabel_node_of(sim, POD, "us-east-1a")
            until_now(lambda: label(sim) == "us-east-1a")
        assert (POD, "TopologyLabelMissing") in events(sim)


def test_a_node_that_is_relabelled_makes_its_pods_stale(tmp_path: Path) -> None:
    with unlabelled() as sim, running(sim, tmp_path) as one:
        until_now(lambda: label(sim) == "us-east-1a")
        relabel_node_of(sim, POD, "us-east-1c")
        until_now(lambda: (POD, "TopologyLabelStale") in events(sim))
        assert label(sim) == "us-east-1a"
        text = one.controller.metrics()
        until_now(
            lambda: (
                'dynctl_topology_sync_labels{state="stale"} ' in one.controller.metrics()
                and 'labels{state="stale"} 0' not in one.controller.metrics()
            ),
        )
        assert 'dynctl_topology_sync_labels_written_total{result="written"} 4' in text


def test_a_pod_that_is_created_again_is_labelled_again(tmp_path: Path) -> None:
    with unlabelled() as sim, running(sim, tmp_path):
        until_now(lambda: label(sim) == "us-east-1a")
        before = sim.pod(POD)["metadata"]["uid"]
        sim.recreate(POD)
        sim.settle()
        assert sim.pod(POD)["metadata"]["uid"] != before
        until_now(lambda: label(sim) == "us-east-1a")


def test_a_lost_api_server_is_followed_again(tmp_path: Path) -> None:
    with unlabelled() as sim, running(sim, tmp_path):
        until_now(lambda: label(sim) == "us-east-1a")
        sim.server.faults.answer("/api/v1/nodes", 503, times=3)
        sim.server.faults.answer("/api/v1/namespaces/prod/pods", 503, times=3)
        sim.server.faults.cut_watches()
        relabel_node_of(sim, POD, "us-east-1c")
        until_now(lambda: (POD, "TopologyLabelStale") in events(sim))


def test_a_refused_patch_is_tried_again(tmp_path: Path) -> None:
    with unlabelled() as sim:
        role = sim.store.get("ClusterRole", NAME)
        sim.forbid("patch", "pods", NAME)
        with running(sim, tmp_path) as one:
            one.until_said("no permission to patch pods in prod")
            current = sim.store.get("ClusterRole", NAME)
            sim.store.update({**current, "rules": role["rules"]})
            until_now(lambda: label(sim) == "us-east-1a")


def test_health_and_metrics_are_served(tmp_path: Path) -> None:
    with (
        unlabelled() as sim,
        running(sim, tmp_path) as one,
        status_server(one.controller, "127.0.0.1", 0) as port,
    ):
        url = f"http://127.0.0.1:{port}"
        until_now(lambda: httpx.get(f"{url}/readyz").status_code == 200)
        until_now(
            lambda: (
                'dynctl_topology_sync_labels{state="current"} 4' in httpx.get(f"{url}/metrics").text
            ),
        )
        assert httpx.get(f"{url}/healthz").text == "ok\n"
        assert httpx.get(f"{url}/").status_code == 404
        assert httpx.post(f"{url}/metrics").status_code == 501


# -- election --------------------------------------------------------------------------------------


def test_one_of_two_writes_and_the_other_takes_over(tmp_path: Path) -> None:
    with unlabelled() as sim, running(sim, tmp_path, elect="first") as first:
        first.until_said("first leads")
        with running(sim, tmp_path, elect="second") as second:
            until_now(lambda: label(sim) == "us-east-1a")
            until_now(lambda: second.controller.ready)
            assert not second.controller.leads
            first.controller.stop()
            second.until_said("second leads")
            sim.edit("Pod", POD, {"metadata": {"labels": {ZONE: None}}})
            until_now(lambda: label(sim) == "us-east-1a")


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def candidates(
    tmp_path: Path,
) -> Iterator[tuple[Simulation, LeaderElection, LeaderElection, Clock]]:
    with unlabelled() as sim:
        cluster, writer = clients(sim, tmp_path)
        clock = Clock()
        one, other = (
            LeaderElection(cluster, writer, HOME, NAME, name, monotonic=clock, now=clock)
            for name in ("one", "other")
        )
        yield sim, one, other, clock
        cluster.close()


Candidates = tuple[Simulation, LeaderElection, LeaderElection, Clock]


def test_a_holder_that_dies_is_replaced_after_the_duration(candidates: Candidates) -> None:
    sim, one, other, clock = candidates
    assert one.attempt()
    assert not other.attempt()
    clock.at += DURATION_S - 0.1
    assert not one.leads
    assert not other.attempt()
    clock.at += 0.1
    assert other.attempt()
    assert not one.attempt()
    lease = sim.store.get("Lease", NAME, HOME)
    assert lease["spec"]["holderIdentity"] == "other"
    assert lease["spec"]["leaseTransitions"] == 1


def test_a_holder_stops_before_another_may_begin(candidates: Candidates) -> None:
    sim, one, other, clock = candidates
    assert one.attempt()
    assert not other.attempt()
    sim.server.faults.answer(f"/apis/coordination.k8s.io/v1/namespaces/{HOME}/leases", 500, times=9)
    clock.at += RENEW_S - 0.1
    assert one.attempt()
    assert one.problem
    clock.at += 0.2
    assert not one.leads
    assert not other.attempt()


def test_a_renewed_lease_is_not_taken(candidates: Candidates) -> None:
    _, one, other, clock = candidates
    assert one.attempt()
    for _ in range(20):
        clock.at += 2
        assert one.attempt()
        assert not other.attempt()


def test_a_released_lease_is_taken_at_once(candidates: Candidates) -> None:
    _, one, other, clock = candidates
    assert one.attempt()
    assert not other.attempt()
    one.release()
    assert not one.leads
    clock.at += 1
    assert other.attempt()


def test_without_permission_no_candidate_leads(candidates: Candidates) -> None:
    sim, one, _, _ = candidates
    role = sim.store.get("Role", f"{NAME}-lease", HOME)
    sim.store.update({**role, "rules": []})
    assert not one.attempt()
    assert "leases" in one.problem


def test_states_are_all_in_the_document() -> None:
    assert {state.value for state in CopyState} >= {case.state for case in CASES}
