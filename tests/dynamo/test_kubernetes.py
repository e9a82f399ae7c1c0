"""Real Dynamo registers in, and routes by, our Kubernetes API; `dynctl` looks at both.

Everything that these tests read of workers was written by Dynamo 1.6.1 itself: its objects, logs,
metrics and choices. They share one fleet, and leave it as they found it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from dynctl.adapters.ports import DiscoveryEntry, Listed
from dynctl.documents.route_result import RouteResult
from dynctl.health.deployment import Deployment, Registrations
from dynctl.sources.dynamo.frontend_pods import OUT_OF_REACH
from dynctl.wire.kubernetes.worker_metadata import instance_id, worker_metadata
from tests.dynamo.client import FrontendClient
from tests.dynamo.fleet import TINY_MODEL
from tests.dynamo.kube_fleet import GRAPH, NAMESPACE, VIEWER, KubeFleet
from tests.dynamo.kube_pods import MODEL, ZONES, components, mockers
from tests.dynamo.observed import possible
from tests.dynamo.ours import OurFrontend, frontend_of, wait
from tests.dynamo.processes import ProcessGroup
from tests.kube import objects
from tests.kube.client import Api
from tests.kube.objects import Component
from tests.kube.objects.accounts import VIEWER_RULES
from tests.ports import free_port

FROM_THERE = ("--discovery", "kubernetes")
ALL = ("--exec", "all", "--logs", "all", "--reach", "port-forward")
"""Everything that verify can read, and nothing but what the API server lets through."""
UNEVEN = {"DYT0902", "DYT0908"}
"""Warnings that this fleet deserves: of its three decode workers one is alone in its zone."""
MANIFEST = Path(__file__).parents[2] / "docs" / "deploy" / "kubernetes" / "frontend.yaml"
LONE = f"{GRAPH}-decode-b-0"
A, B = ZONES


@pytest.fixture(scope="module")
def fleet() -> Iterator[KubeFleet]:
    with KubeFleet() as found:
        # Workers publish their event sources a moment after the frontend counts them.
        found.wait_until(lambda: not registered(found).problems, "complete registrations")
        yield found
    assert not [pod.name for pod in found.pods.values() if pod.process.alive]


class Verified:
    """What `topology verify` said: exit code, checks by code, rows by worker."""

    def __init__(
        self, fleet: KubeFleet, *words: str, token: str = VIEWER, namespace: str = NAMESPACE
    ) -> None:
        done = fleet.dynctl(
            "topology", "verify", *ALL, "-o", "json", *words, token=token, namespace=namespace
        )
        assert done.out, done.err
        self.code, document = done.code, json.loads(done.out)
        self.checks: dict[str, dict[str, Any]] = {
            check["code"]: check for part in document["sections"] for check in part["checks"]
        }
        self.rows: dict[str, dict[str, Any]] = {row["worker"]: row for row in document["chain"]}

    def codes(self, state: str) -> set[str]:
        return {code for code, check in self.checks.items() if check["state"] == state}

    def subjects(self, code: str) -> list[str]:
        return [one["subject"] for one in self.checks[code]["findings"]]

    def values(self, code: str) -> list[str]:
        return [one["value"] for one in self.checks[code]["findings"]]

    def broken(self) -> dict[str, tuple[str, list[str]]]:
        """Worker -> its first broken link and the codes that say so."""
        return {
            name: (row["first_break"], row["codes"])
            for name, row in self.rows.items()
            if row["first_break"] or row["codes"]
        }


def registered(fleet: KubeFleet) -> Deployment:
    """What dynctl makes of the objects that the workers wrote."""
    entries = [
        DiscoveryEntry(key, value)
        for body in fleet.metadata().values()
        for key, value in worker_metadata(body).entries()
    ]
    registrations = Registrations()
    registrations.apply(Listed(tuple(entries)))
    return registrations.deployment()


def route(fleet: KubeFleet, prompt: str, *words: str) -> RouteResult:
    done = fleet.dynctl(
        *("route", prompt, *FROM_THERE, "--model-path", str(TINY_MODEL), "-o", "json"), *words
    )
    assert done.code == 0, done.err
    return msgspec.json.decode(done.out, type=RouteResult)


@contextmanager
def relabelled(fleet: KubeFleet, path: str, value: str, before: str) -> Iterator[None]:
    """As by `kubectl label --overwrite`."""
    with Api(fleet.server.url, "admin", user_agent="kubectl") as api:

        def write(text: str) -> None:
            patch = {"metadata": {"labels": {objects.ZONE: text}}}
            api.patch(path, patch, fieldManager="kubectl-label")

        write(value)
        try:
            yield
        finally:
            write(before)


# -- registration ----------------------------------------------------------------------------------


def test_workers_apply_their_metadata_and_dynctl_reads_it(fleet: KubeFleet) -> None:
    found, deployment = fleet.metadata(), registered(fleet)
    assert found.keys() == fleet.workers.keys()
    assert not deployment.problems
    assert {item.worker.worker_id for item in deployment.workers} == {
        instance_id(name) for name in found
    }
    by_id = {pod.worker_id: pod for pod in fleet.workers.values()}
    for item in deployment.workers:
        pod = by_id[item.worker.worker_id]
        assert item.worker.role.value == pod.role
        assert dict(item.worker.domains) == {"zone": pod.zone}
        assert item.card.runtime_config["kv_transfer_enforcement"] == "required"
    for name, body in found.items():
        read = worker_metadata(body)
        assert (read.owner, read.owner_uid) == (name, fleet.pods[name].body["metadata"]["uid"])
    applied = [one for one in fleet.server.requests if one.method == "PATCH"]
    user = f"system:serviceaccount:{NAMESPACE}:{GRAPH}-k8s-service-discovery"
    own = {(one.user, one.content_type) for one in applied if one.path.rpartition("/")[2] in found}
    assert own == {(user, "application/apply-patch+yaml")}
    managers = {
        one["manager"] for body in found.values() for one in body["metadata"]["managedFields"]
    }
    assert managers == {"dynamo-worker"}


# -- topology verify -------------------------------------------------------------------------------


def test_a_fleet_that_works_has_whole_chains_of_custody(fleet: KubeFleet) -> None:
    verified = Verified(fleet)
    assert (verified.code, verified.codes("fail"), verified.codes("warn")) == (0, set(), UNEVEN)
    assert verified.rows.keys() == fleet.workers.keys()
    assert not verified.broken()
    links = ("node", "label", "file", "card", "taint", "router")
    for name, row in verified.rows.items():
        assert {(row[link]["state"], row[link]["value"]) for link in links} == {
            ("same", fleet.pods[name].zone)
        }
    # Out of the logs of the processes, with Dynamo's own words and colours.
    assert verified.checks["DYT0602"]["message"] == "5 of 5 logs"
    assert verified.checks["DYT0604"]["message"] == "5 of 5 logs"
    assert verified.checks["DYT0904"]["message"] == "5 of 5 workers"
    assert verified.checks["DYT0703"]["state"] == "pass"
    assert not [code for code, check in verified.checks.items() if check.get("unread")]


def test_live_requests_stay_in_their_domain(fleet: KubeFleet) -> None:
    verified = Verified(fleet, "--probe", "4")
    assert (verified.code, verified.checks["DYT0905"]["state"]) == (0, "pass")
    assert verified.checks["DYT0905"]["message"] == "4 requests"


def test_a_pod_that_somebody_relabelled_is_found_at_its_label(fleet: KubeFleet) -> None:
    name = f"{GRAPH}-decode-a-1"
    with relabelled(fleet, f"/api/v1/namespaces/{NAMESPACE}/pods/{name}", B, before=A):
        verified = Verified(fleet)
        assert (verified.code, verified.codes("fail")) == (1, {"DYT0404"})
        assert verified.subjects("DYT0404") == [f"Pod {name}.{NAMESPACE}"]
        # The kubelet has not brought it to the file yet, which may take it a while.
        assert verified.codes("warn") == {*UNEVEN, "DYT0507"}
        assert verified.broken() == {name: ("pod label", ["DYT0404", "DYT0507"])}

        volume = fleet.pods[name].volume
        assert volume is not None
        volume.write({objects.ZONE: B})
        try:
            verified = Verified(fleet)
        finally:
            volume.write({objects.ZONE: A})
        # Then the file is the label's, and the worker still says what it read at its start.
        assert verified.codes("fail") == {"DYT0404", "DYT0802"}
        assert verified.subjects("DYT0802") == [f"Pod {name}.{NAMESPACE}"]


def test_a_node_that_was_relabelled_left_its_pods_behind(fleet: KubeFleet) -> None:
    node = fleet.pods[LONE].body["spec"]["nodeName"]
    with relabelled(fleet, f"/api/v1/nodes/{node}", "us-east-1c", before=B):
        verified = Verified(fleet)
    assert (verified.code, verified.codes("fail"), verified.codes("warn")) == (
        1,
        {"DYT0404"},
        UNEVEN,
    )
    assert verified.broken() == {LONE: ("pod label", ["DYT0404"])}


@pytest.mark.parametrize("by", ["its slice", "its pod"])
def test_a_zone_whose_decode_worker_is_not_ready_is_stranded(fleet: KubeFleet, by: str) -> None:
    """As the real frontend finds: what is prefilled there fails, and nothing else."""

    def served() -> list[int]:
        """The status of a request that is prefilled in each zone."""
        prefills = [fleet.pods[f"{GRAPH}-prefill-{zone}-0"].worker_id for zone in "ab"]
        pins = [{"prefill_worker_id": one} for one in prefills]
        return [fleet.frontend.complete(list(range(40)), nvext=pin).status for pin in pins]

    if by == "its slice":
        fleet.write_slices(unready=[LONE])
    else:
        fleet.set_ready(LONE, False)
    try:
        fleet.wait_counted({"prefill": 2, "decode": 2})
        # The routers of both hops follow what is counted.
        fleet.wait_until(lambda: served() == [200, 500], "zone b to be stranded")
        verified = Verified(fleet)
    finally:
        fleet.set_ready(LONE, True)
        fleet.wait_ready()
    assert (verified.code, verified.codes("fail")) == (1, {"DYT0702", "DYT0901"})
    assert verified.subjects("DYT0702") == [f"Pod {LONE}.{NAMESPACE}"]
    assert verified.values("DYT0702")[0].startswith(
        "not ready in" if by == "its slice" else "not Rea"
    )
    assert verified.values("DYT0901") == [f"zone {B} has 1 prefill and no decode workers ready"]
    assert verified.broken() == {LONE: ("router", ["DYT0702"])}
    fleet.wait_until(lambda: served() == [200, 200], "zone b to serve again")


def test_verify_changes_nothing(fleet: KubeFleet) -> None:
    since, ran, revision = len(fleet.server.requests), len(fleet.executed), _revision(fleet)
    assert Verified(fleet).code == 0
    mine = [one for one in fleet.server.requests[since:] if one.user == VIEWER]
    reviews = "selfsubjectaccessreviews", "subjectaccessreviews", "localsubjectaccessreviews"
    kinds = {(one.method, one.path.rpartition("/")[2]) for one in mine}
    assert {kind for kind in kinds if kind[0] != "GET"} == {("POST", name) for name in reviews}
    assert {("GET", "exec"), ("GET", "log"), ("GET", "portforward")} <= kinds
    # Of a small fleet every worker's file and directory is read.
    reads = [["cat", "/etc/dynamo/topology/zone"], ["ls", "-1p", "/etc/dynamo/topology"]]
    executed = fleet.executed[ran:]
    assert all(one in reads for one in executed), executed
    assert executed.count(reads[0]) == len(fleet.workers)
    assert {one.status for one in mine} <= {101, 200, 201}
    # Workers of Dynamo may write their metadata meanwhile: each revision has a request of theirs.
    others = [one for one in fleet.server.requests[since:] if one.user != VIEWER]
    written = [one for one in others if one.method != "GET" and one.status < 300]
    assert _revision(fleet) - revision <= len(written)


def _revision(fleet: KubeFleet) -> int:
    return fleet.server.store.revision


# -- a worker that may not register ----------------------------------------------------------------


def test_a_worker_without_its_role_stays_up_and_both_witnesses_tell_why(fleet: KubeFleet) -> None:
    namespace = "denied"
    fleet.deploy(namespace, "lone", [mockers("decode", "decode", A)], may_register=False)
    pod = fleet.pods["lone-decode-0"]
    fleet.wait_until(
        lambda: any("Failed to persist metadata" in line for line in pod.process.lines()),
        "the worker to be refused",
    )
    about_others = {"DYT0109"}  # There is no prefill worker beside it.
    verified = Verified(fleet, namespace=namespace)
    assert verified.code == 1
    assert verified.codes("fail") == {"DYT0703", *about_others}
    assert verified.subjects("DYT0703") == [
        f"ServiceAccount lone-k8s-service-discovery.{namespace}"
    ]
    assert {verified.checks[code]["message"] for code in ("DYT0702", "DYT0704")} == {
        "0 of 1 pod: see DYT0703"
    }
    assert verified.broken() == {"lone-decode-0": ("card", ["DYT0703"])}

    # Who may not ask what others may do learns it from the log.
    group = "authorization.k8s.io"
    fleet.add_viewer("incurious", [rule for rule in VIEWER_RULES if rule[0] != group])
    verified = Verified(fleet, token="incurious", namespace=namespace)
    assert verified.checks["DYT0703"]["state"] == "skip"
    assert verified.codes("fail") == {"DYT0704", *about_others}
    [value] = verified.values("DYT0704")
    assert value.startswith("no DynamoWorkerMetadata; its log has: Failed to persist metadata")
    assert verified.broken() == {"lone-decode-0": ("card", ["DYT0704"])}
    assert pod.process.alive
    assert not fleet.metadata(namespace)
    assert not pod.healthy()


# -- routing ---------------------------------------------------------------------------------------


def test_the_real_frontend_chooses_what_was_predicted(
    fleet: KubeFleet, finding: Callable[[str], None]
) -> None:
    verified, certain = [], 0
    for number in range(20):
        prompt = f"{('alpha', 'beta', 'gamma', 'delta')[number % 4]} " * 40 + f"question {number}"
        fleet.settled()
        result = route(fleet, prompt, "--reach", "direct")
        allowed = possible(result)
        placed = fleet.frontend.chat(prompt).placement
        verified.append((placed.prefill, placed.decode) in allowed)
        certain += len({prefill for prefill, _ in allowed}) == 1
        assert not [doubt for doubt in result.doubts if OUT_OF_REACH in doubt.what]
    finding(f"kubernetes: {sum(verified)} of {len(verified)} predicted, {certain} without a tie")
    assert verified == [True] * 20
    # All but the first of each kind are in the cache of one prefill worker.
    assert certain >= 16


@contextmanager
def ours(fleet: KubeFleet) -> Iterator[OurFrontend]:
    """Our frontend with the permissions of the manifest that is in the docs, and no more."""
    account, token = "dynctl-frontend", f"{NAMESPACE}.dynctl-frontend"
    for body in yaml.safe_load_all(MANIFEST.read_text()):
        if body["kind"] in ("Role", "RoleBinding"):
            body["metadata"]["namespace"] = NAMESPACE
            for subject in body.get("subjects", ()):
                subject["namespace"] = NAMESPACE
            fleet.server.store.create(body)
    fleet.server.add_service_account(token, NAMESPACE, account)
    ids = {pod.worker_id for pod in fleet.workers.values()}
    variables = {
        "KUBECONFIG": str(fleet.kubeconfig(token)),
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    }
    words = (*FROM_THERE, "--namespace", NAMESPACE)
    with frontend_of(fleet.directory, MODEL, ids, words, variables) as found:
        yield found


def cached(frontend: OurFrontend) -> dict[int, int]:
    """The blocks that it has read of each worker's cache, by the worker's id."""
    return {
        int(row["id"]): sum(rank["cached_blocks"] for rank in row["ranks"])
        for row in frontend.workers()
    }


def test_our_frontend_serves_the_pods_that_are_ready(fleet: KubeFleet) -> None:
    """Beside Dynamo's, with the same answers; also while the API server does not answer."""
    zone = {pod.worker_id: pod.zone for pod in fleet.workers.values()}
    with ours(fleet) as frontend:
        for word in ("zeta", "eta", "theta"):
            prompt, before = f"{word} " * 50, cached(frontend)
            first = frontend.chat(prompt, max_tokens=4)
            assert first.ok, first
            assert zone[first.placement.prefill or 0] == zone[first.placement.decode or 0]
            prefill = first.placement.prefill or 0
            wait(frontend, lambda: cached(frontend)[prefill] > before[prefill], "its blocks")  # noqa: B023
            wait(frontend, frontend.idle, "bookings to end")
            again = frontend.chat(prompt, max_tokens=4)
            assert again.placement.prefill == prefill
            theirs = fleet.frontend.chat(prompt, max_tokens=4)
            for part in ("prompt_tokens", "completion_tokens"):
                assert first.body["usage"][part] == theirs.body["usage"][part]

        lone = fleet.pods[LONE].worker_id
        fleet.set_ready(LONE, False)
        try:
            wait(frontend, lambda: lone not in frontend.ready(), "the pod to leave")
            wait(frontend, lambda: ("DYT0901", f"zone={B}") in frontend.conditions(), "its zone")
        finally:
            fleet.set_ready(LONE, True)
            fleet.wait_ready()
        wait(frontend, lambda: lone in frontend.ready(), "the pod to come back")

        def interrupted() -> bool:
            return any(code == "DISCOVERY_INTERRUPTED" for code, _ in frontend.conditions())

        gone = fleet.server.faults.answer("/apis", 503)
        try:
            fleet.server.faults.cut_watches()
            wait(frontend, interrupted, "the condition")
            assert len(frontend.ready()) == len(fleet.workers)
            assert frontend.chat("iota " * 50, max_tokens=2).ok
        finally:
            fleet.server.faults.remove(gone)
        wait(frontend, lambda: not interrupted(), "the cluster to be read again")


def test_through_the_api_server_caches_are_said_to_be_out_of_reach(fleet: KubeFleet) -> None:
    prompt = "epsilon " * 60
    served = fleet.frontend.chat(prompt).placement.prefill

    def overlaps(result: RouteResult) -> dict[int, int]:
        assert result.prefill is not None
        return {one.worker_id: one.overlap_blocks or 0 for one in result.prefill.candidates}

    assert served is not None
    found: list[RouteResult] = []

    def known() -> bool:
        """The worker stores its blocks a moment after its answer."""
        found.append(route(fleet, prompt, "--reach", "direct"))
        return overlaps(found[-1])[served] > 0

    fleet.wait_until(known, "the blocks to be in the worker's index")
    direct = found[-1]
    assert max(n for worker, n in overlaps(direct).items() if worker != served) < max(
        overlaps(direct).values()
    )

    forwarded = route(fleet, prompt, "--reach", "port-forward")
    assert any(OUT_OF_REACH in doubt.what for doubt in forwarded.doubts)
    assert set(overlaps(forwarded).values()) == {0}
    assert forwarded.winner.decode is not None
    # The load of it comes from the frontend all the same.
    assert forwarded.decode is not None
    assert forwarded.decode.freshness is not None
    assert forwarded.decode.freshness.load.source == "the /metrics of a frontend"
    words = ("--explain", "--all", "--reach", "port-forward", "--model-path", str(TINY_MODEL))
    screen = fleet.dynctl("route", prompt, *FROM_THERE, *words)
    assert screen.code == 0
    shown = " ".join(screen.out.split())
    assert "not reachable from here" in shown
    assert "caches of these workers unknown" in shown


# -- operating -------------------------------------------------------------------------------------


# Pods have an address that leads to them from here, as they have inside a cluster.
@pytest.mark.parametrize("reach", ["direct", "port-forward"])
def test_workers_and_domains_are_listed_by_the_names_of_pods(fleet: KubeFleet, reach: str) -> None:
    there = (*FROM_THERE, "--reach", reach)
    listed = fleet.dynctl("workers", "list", "-o", "json", *there)
    rows = {row["name"]: row for row in json.loads(listed.out)["workers"]}
    assert rows.keys() == fleet.workers.keys()
    assert {name: (row["worker_id"], row["role"]) for name, row in rows.items()} == {
        name: (pod.worker_id, pod.role) for name, pod in fleet.workers.items()
    }
    index = {rank["index"] for row in rows.values() if row["can_prefill"] for rank in row["ranks"]}
    assert index == {"current" if reach == "direct" else "absent"}
    assert (OUT_OF_REACH in listed.err) is (reach == "port-forward")
    shown = fleet.dynctl("workers", "show", LONE, *there)
    assert f"zone={B}" in shown.out
    domains = fleet.dynctl("topology", "show", *there)
    assert (listed.code, shown.code, domains.code) == (0, 0, 0)
    table = [line.split()[:3] for line in domains.out.splitlines()]
    assert table[1:] == [[A, "1", "2"], [B, "1", "1"]]


def test_check_finds_nothing_wrong_over_the_same_way(fleet: KubeFleet) -> None:
    done = fleet.dynctl("check", "-o", "json", *FROM_THERE)
    parts = json.loads(done.out)["sections"]
    found = {one["code"]: one for part in parts for one in part["checks"] if one["findings"]}
    assert (done.code, found) == (0, {})
    passed = {one["code"] for part in parts for one in part["checks"] if one["state"] == "pass"}
    # Discovery, the workers' local indexers, and the frontend's workers against those registered.
    assert {"DYR0101", "DYR0303", "DYR0407"} <= passed


def test_thresholds_are_set_in_the_frontends_pod(fleet: KubeFleet) -> None:
    there = (*FROM_THERE, "--reach", "port-forward")
    done = fleet.dynctl("thresholds", "set", "--active-decode-blocks", "0.97", *there)
    assert done.code == 0, done.err
    assert fleet.frontend.thresholds()["active_decode_blocks_threshold"] == 0.97
    read = fleet.dynctl("thresholds", "get", "-o", "json", *FROM_THERE, "--reach", "direct")
    assert read.code == 0, read.err
    assert "0.97" in read.out


# -- serve attach ----------------------------------------------------------------------------------


def test_the_real_frontend_serves_an_engine_whose_sidecar_registered_its_pod(
    fleet: KubeFleet,
) -> None:
    """`serve attach` in a pod, as the workers' service account, and Dynamo's frontend beside it."""
    namespace, port, events = "attached", free_port(), free_port()
    group = ProcessGroup(fleet.directory)
    engine = ["serve", "engine", "--name", "e", "--model", MODEL, "--model-path", str(TINY_MODEL)]
    engine += ["--port", str(port), "--kv-events", f"tcp://127.0.0.1:{events}"]
    sidecar = ["dynctl", "serve", "attach", "--engine", f"http://127.0.0.1:{port}"]
    sidecar += ["--model-path", str(TINY_MODEL)]
    try:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DYN")}
        group.start("engine", [sys.executable, "-m", "dynctl", *engine], environment)
        parts = [
            components(f"{namespace}-one")[0],
            Component("engine", "worker", args=tuple(sidecar)),
        ]
        fleet.deploy(namespace, "one", parts)
        fleet.wait_probed(namespace)
        pod = fleet.pods["one-engine-0"]
        frontend = FrontendClient(fleet.pods["one-frontend-0"].port, MODEL)
        fleet.wait_until(
            lambda: frontend.worker_counts().get("aggregated") == 1 and frontend.accepts(),
            "the frontend to count the engine",
        )
        fleet.wait_until(lambda: frontend.complete("first", max_tokens=1).ok, "an answer")
        text = "water and light and stones " * 12
        answer = frontend.complete(text, max_tokens=6)
        assert answer.ok, answer.body
        assert answer.placement.decode == pod.worker_id
        assert answer.body["usage"]["completion_tokens"] == 6
        # The events of the engine's cache reach the frontend.
        fleet.wait_until(
            lambda: float(frontend.complete(text, max_tokens=1).timing["kv_hit_rate"]) > 0.5,
            "the frontend to find the prompt in the engine's cache",
        )
        [(name, body)] = fleet.metadata(namespace).items()
        assert name == pod.name
        read = worker_metadata(body)
        assert (read.owner, read.owner_uid) == (name, pod.body["metadata"]["uid"])

        # A pod that is not ready gets no requests, and its entries stay.
        fleet.set_ready(pod.name, False)
        fleet.wait_until(
            lambda: not sum(frontend.worker_counts().values()), "the frontend to leave the pod"
        )
        assert fleet.metadata(namespace)
        fleet.set_ready(pod.name, True)
        fleet.wait_until(lambda: frontend.complete(text, max_tokens=1).ok, "the pod to come back")

        # With SIGTERM the sidecar takes its entries away before the pod is gone.
        pod.process.kill(signal.SIGTERM)
        assert not fleet.metadata(namespace)
        fleet.wait_until(
            lambda: not sum(frontend.worker_counts().values()), "the frontend to forget the pod"
        )
    finally:
        group.close()
        for one in [one for one in fleet.pods.values() if one.namespace == namespace]:
            if one.process.alive:
                one.process.kill()
            del fleet.pods[one.name]
