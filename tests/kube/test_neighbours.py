"""Other commands that read a cluster: topology plan and show, workers, check,
thresholds and lint --against.
"""

from __future__ import annotations

import copy
import dataclasses
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynctl.base.errors import Unreachable
from dynctl.base.options import GlobalOptions
from dynctl.sources.dynamo.frontend_pods import pod_log
from tests.kube import deployment, objects
from tests.kube.actors import Simulation, living, simulation
from tests.kube.command_line import Run
from tests.kube.objects import Json

KUBERNETES = ("--discovery", "kubernetes")
FRONTEND = ("prod", "my-llm-frontend-0")
MODEL = "Qwen/Qwen3-0.6B"
ZONES = ("us-east-1a", "us-east-1b")
BEYOND = (
    "note: cache contents of all workers may be out of date: not reachable from here (it needs the "
    "cluster's own network)"
)


@pytest.fixture(scope="module")
def living_cluster() -> Iterator[Simulation]:
    """prod: my-llm, 4 prefill and 8 decode workers. test: small, 2 and 4."""
    with living() as sim:
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "test"}}
        sim.store.create(space)
        parts = deployment.components(ZONES, prefill=1, decode=2)
        sim.apply(objects.graph("test", "small", parts, policy=deployment.policy()))
        sim.settle()
        sim.advance(600)
        yield sim


@pytest.fixture
def cluster(
    living_cluster: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Simulation:
    path = living_cluster.viewer_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(path))
    living_cluster.server.requests.clear()
    return living_cluster


# -- topology plan ---------------------------------------------------------------------------------


def counted(document: Any) -> dict[str, tuple[int, int]]:
    return {row["value"]: (row["prefill"], row["decode"]) for row in document["rows"]}


@pytest.mark.parametrize(
    ("words", "each"),
    [
        (("-n", "prod"), (2, 4)),
        (("-n", "test"), (1, 2)),
        (("--dgd", "my-llm"), (2, 4)),
        (("-A", "--dgd", "small"), (1, 2)),
    ],
)
def test_a_plan_counts_the_pods_of_a_cluster(
    cluster: Simulation, dynctl: Run, words: tuple[str, ...], each: tuple[int, int]
) -> None:
    ran = dynctl("topology", "plan", *words, "-o", "json")

    assert (ran.code, ran.err) == (0, "")
    assert counted(ran.json) == dict.fromkeys(ZONES, each)
    assert not [one.path for one in cluster.server.requests if "/pods/" in one.path]


def test_a_plan_of_all_namespaces_keeps_pools_apart(cluster: Simulation, dynctl: Run) -> None:
    ran = dynctl("topology", "plan", "-A")

    assert ran.code == 0
    assert ", all namespaces; " in " ".join(ran.out.split())
    rows = [line for line in ran.out.splitlines() if "us-east-1a" in line]
    assert any("prod/my-llm" in line for line in rows)
    assert any("test/small" in line for line in rows)


def test_a_plan_prints_what_would_add_workers(cluster: Simulation, dynctl: Run) -> None:
    ran = dynctl("topology", "plan", "-n", "prod", "--ratio", "1:3")

    assert ran.code == 0
    assert "+2 decode" in ran.out
    assert "kubectl patch dynamographdeployments.v1beta1.nvidia.com my-llm -n prod" in ran.out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--dgd", "nope"), 3, "no DynamoGraphDeployment nope in namespace prod"),
        (("-n", "nope"), 3, "no DynamoGraphDeployment in namespace nope"),
        (("--dgd", "No!"), 2, "--dgd 'No!': invalid name of a DynamoGraphDeployment"),
        (("--kube-context", "nope"), 2, "--kube-context nope: no such context"),
        (("-n", "prod", "--demo"), 2, "are different sources; specify only one"),
    ],
)
def test_a_plan_of_what_is_not_there(
    cluster: Simulation, dynctl: Run, words: tuple[str, ...], code: int, says: str
) -> None:
    ran = dynctl("topology", "plan", *words)

    assert (ran.code, ran.out) == (code, "")
    assert says in ran.err


# -- frontends of the cluster ---------------------------------------------------------------------


def test_domains_are_shown_from_discovery_and_a_frontend(cluster: Simulation, dynctl: Run) -> None:
    ran = dynctl("topology", "show", *KUBERNETES, "-o", "json")

    assert ran.code == 0
    rows = {row["value"]: row for row in ran.json["rows"]}
    for zone in ZONES:
        assert (rows[zone]["prefill"]["ready"], rows[zone]["decode"]["ready"]) == (2, 4)
    assert ran.err.splitlines() == [BEYOND]


def test_workers_are_listed_by_their_pods(cluster: Simulation, dynctl: Run) -> None:
    ran = dynctl("workers", "list", *KUBERNETES, "-o", "name")
    shown = dynctl("workers", "show", "my-llm-decode-a-0", *KUBERNETES, "-o", "json")

    assert ran.code == shown.code == 0
    names = [pod for pod in cluster.pods() if pod.startswith(("my-llm-p", "my-llm-d"))]
    assert sorted(ran.out.split()) == sorted(names)
    assert "zone=us-east-1a" in str(shown.json) or "us-east-1a" in str(shown.json)


def test_check_names_frontends_by_their_pods(cluster: Simulation, dynctl: Run) -> None:
    ran = dynctl("check", *KUBERNETES, "-o", "json")

    assert ran.code == 0
    assert ran.reported == set()
    assert ran.json["sources"][1:] == ["Pod my-llm-frontend-0.prod"]
    assert ran.checks["DYR0406"]["message"] == MODEL
    assert ran.checks["DYR0407"]["message"] == "12 workers"
    assert ran.checks["DYR0501"]["message"] == "1.6.1"
    assert "127.0.0.1" not in str([part["checks"] for part in ran.json["sections"]][3])


def test_graphs_of_one_model_are_judged_each_by_itself(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode workers of one graph serve no request of the other, whose zone b has none."""
    with living() as sim:
        monkeypatch.setenv("KUBECONFIG", str(sim.viewer_kubeconfig(tmp_path / "k")))
        parts = deployment.components(ZONES, prefill=1, decode=2)
        sim.apply(objects.graph("prod", "small", parts, policy=deployment.policy()))
        sim.settle()
        healthy = dynctl("check", *KUBERNETES, "-o", "json")
        sim.regraph(
            lambda found: [
                dataclasses.replace(one, replicas=0) if one.name == "decode-b" else one
                for one in found
            ]
        )
        sim.settle()
        broken = dynctl("check", *KUBERNETES, "-o", "json")
        shown = dynctl("topology", "show", *KUBERNETES, "-o", "json")

    assert healthy.reported == set()
    assert healthy.checks["DYR0407"]["message"] == "18 workers"
    assert healthy.checks["DYR0412"]["message"].startswith("each graph has one frontend")
    assert broken.reported == {"DYR0210"}
    rows = {row["value"]: row for row in shown.json["rows"]}
    [stranded] = rows["us-east-1b"]["stranded"]
    assert stranded["workers"] == ["my-llm-prefill-b-0", "my-llm-prefill-b-1"]
    assert rows["us-east-1a"]["stranded"] == []


def test_pods_of_one_name_in_two_namespaces_are_refused_or_told_apart(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with living(prefill=1, decode=1) as sim:
        monkeypatch.setenv("KUBECONFIG", str(sim.viewer_kubeconfig(tmp_path / "k")))
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "test"}}
        sim.store.create(space)
        parts = deployment.components(ZONES, prefill=1, decode=1)
        sim.apply(objects.graph("test", "my-llm", parts, policy=deployment.policy()))
        sim.settle()
        ran = [dynctl(*words, *KUBERNETES, "-A") for words in (("workers", "list"), ("check",))]
        one = dynctl("workers", "list", *KUBERNETES, "-n", "test", "-o", "name")
        # A frontend of prod has workers with the ids of those of test.
        host, port = sim.frontends.address("prod", "my-llm-frontend-0")
        url = f"http://{host}:{port}"
        verified = dynctl("topology", "verify", "-A", "--frontend", url, "-o", "json")

    for each in ran:
        assert each.code == 2
        assert each.error[0].startswith("4 workers have the id of a worker in another namespace")
    assert len(one.out.split()) == 4
    check = verified.checks["DYT0904"]
    assert (check["state"], check["unread"]) == ("skip", True)
    assert "prod/my-llm and test/my-llm have the same ids" in check["message"]


def test_check_reports_why_it_found_no_frontend(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with living() as sim:
        monkeypatch.setenv("KUBECONFIG", str(sim.viewer_kubeconfig(tmp_path / "k")))
        sim.forbid("get", "pods/portforward")
        ran = dynctl("check", *KUBERNETES, "-o", "json")
        shown = dynctl("topology", "show", *KUBERNETES)

    assert ran.code == shown.code == 0
    why = "no permission to get pods/portforward in prod"
    assert ran.checks["DYR0401"] | {"state": "skip", "unread": True} == ran.checks["DYR0401"]
    assert ran.checks["DYR0401"]["message"] == f"the cluster's frontends: {why}"
    assert f"note: the cluster's frontends are unknown: {why}" in shown.err


def test_a_frontend_that_is_silent_hides_nothing_else(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with living(frontends=2) as sim:
        monkeypatch.setenv("KUBECONFIG", str(sim.viewer_kubeconfig(tmp_path / "k")))
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            sim.server.forwards[(*FRONTEND, 8000)] = held.getsockname()
        checked = dynctl("check", *KUBERNETES, "-o", "json")
        shown = dynctl("topology", "show", *KUBERNETES)
        verified = dynctl("topology", "verify", "-o", "json")

    pod = "Pod my-llm-frontend-0.prod"
    assert checked.code == 1
    assert checked.reported == {"DYR0401"}
    assert [*checked.values("DYR0401")] == [pod]
    assert "127.0.0.1" not in str(checked.checks["DYR0401"])
    assert shown.code == 0
    assert "note: my-llm-frontend-0.prod does not answer: " in shown.err
    assert verified.code == 0
    assert {row["router"]["state"] for row in verified.json["chain"]} == {"same"}
    assert verified.checks["DYT0904"]["message"].startswith(f"{pod} does not answer: ")


def test_thresholds_are_read_and_set_through_the_cluster(cluster: Simulation, dynctl: Run) -> None:
    view = cluster.frontends.views[FRONTEND]
    view.requests.clear()
    dry = dynctl("thresholds", "set", *KUBERNETES, "--active-decode-blocks", "0.85", "--dry-run")

    assert dry.code == 0
    assert not [line for line in view.requests if line.startswith("POST")]
    done = dynctl("thresholds", "set", *KUBERNETES, "--active-decode-blocks", "0.85")
    result = dynctl("thresholds", "get", *KUBERNETES, "-o", "json")
    assert done.code == result.code == 0
    assert view.thresholds["active_decode_blocks_threshold"] == 0.85
    assert "0.85" in result.out
    view.thresholds["active_decode_blocks_threshold"] = None


@pytest.mark.parametrize("words", [("topology", "show"), ("workers", "list")])
def test_no_worker_registered_in_this_namespace(
    cluster: Simulation, dynctl: Run, words: tuple[str, ...]
) -> None:
    ran = dynctl(*words, *KUBERNETES, "-n", "default")

    assert ran.code == 2
    assert ran.error[0].endswith("namespace default: no worker is registered")
    assert "-n NAMESPACE" in ran.error[1]


def test_a_cluster_without_dynamo_is_unreachable_for_all(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with simulation(definitions=()) as sim:
        monkeypatch.setenv("KUBECONFIG", str(sim.viewer_kubeconfig(tmp_path / "k")))
        ran = dynctl("topology", "show", *KUBERNETES)

    assert ran.code == 3
    assert "does not serve dynamoworkermetadatas" in ran.error[0]


# -- topology lint --against -----------------------------------------------------------------------


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., Path]:
    """The graph that runs in prod, changed, as a file."""

    def write(change: Callable[[Json], object] = lambda graph: None, *zones: str) -> Path:
        parts = deployment.components(zones or ZONES)
        graph = objects.graph("prod", "my-llm", parts, policy=deployment.policy())
        body = copy.deepcopy(graph)
        change(body)
        path = tmp_path / "graph.yaml"
        path.write_text(yaml.safe_dump(body))
        return path

    return write


def policy_of(graph: Json) -> Json:
    found: Json = graph["spec"]["experimental"]["kvTransferPolicy"]
    return found


def lint(dynctl: Run, path: Path, *more: str) -> Any:
    return dynctl("topology", "lint", "-f", path, "--against", ".", "-o", "json", *more)


def test_what_runs_can_be_applied_again(
    cluster: Simulation, dynctl: Run, manifest: Callable[..., Path]
) -> None:
    ran = lint(dynctl, manifest())

    assert ran.code == 0
    assert ran.reported == set()
    assert ran.checks["DYT0112"]["message"] == "1 of 1 graphs are in the cluster"
    assert not [one for one in cluster.server.requests if "/pods/" in one.path]
    assert {one.method for one in cluster.server.requests} <= {"GET", "POST"}


def test_a_policy_that_runs_cannot_be_changed(
    cluster: Simulation, dynctl: Run, manifest: Callable[..., Path]
) -> None:
    def weaken(graph: Json) -> None:
        policy_of(graph).update(enforcement="preferred", preferredWeight=0.5)

    ran = lint(dynctl, manifest(weaken))

    assert ran.code == 1
    assert ran.reported == {"DYT0112"}
    [value] = ran.values("DYT0112").values()
    assert "spec.experimental.kvTransferPolicy is immutable" in value
    assert "enforcement from required to preferred" in value


def test_workers_must_be_pinned_to_values_that_nodes_have(
    cluster: Simulation, dynctl: Run, manifest: Callable[..., Path]
) -> None:
    ran = lint(dynctl, manifest(lambda graph: None, "us-east-1a", "us-west-9z"))

    assert ran.code == 1
    assert ran.reported == {"DYT0215"}
    result = [one["value"] for one in ran.checks["DYT0215"]["findings"]]
    assert len(result) == 2
    assert all("nodes have: us-east-1a, us-east-1b" in one for one in result)


def test_a_graph_without_a_namespace_is_that_of_the_context(
    cluster: Simulation, dynctl: Run, manifest: Callable[..., Path]
) -> None:
    def loose(graph: Json) -> None:
        del graph["metadata"]["namespace"]
        policy_of(graph).update(domain="rack")

    here = lint(dynctl, manifest(loose))
    there = lint(dynctl, manifest(loose), "-n", "default")

    assert "DYT0112" in here.reported
    assert there.checks["DYT0112"]["message"] == "none of these graphs is in the cluster yet"


def test_a_cluster_that_is_not_named_right(
    cluster: Simulation, dynctl: Run, manifest: Callable[..., Path]
) -> None:
    ran = dynctl("topology", "lint", "-f", manifest(), "--against", "prdo")

    assert ran.code == 2
    assert ran.error[0].startswith("--against prdo: no such context in ")
    assert ran.error[1] == "defined: test"


# -- a node that does not respond ------------------------------------------------------------------


@pytest.fixture(params=[30, 0], ids=["silent", "refused"])
def stopped_kubelet(cluster: Simulation, request: pytest.FixtureRequest) -> Iterator[str]:
    """Under the frontend of prod; how commands name it."""
    node = cluster.pod(FRONTEND[1])["spec"]["nodeName"]
    fault = cluster.server.faults.stop_kubelet(node, request.param)
    reason = "no response within 2 s; the API server responds"
    if not request.param:
        reason = "error dialing backend: dial tcp 192.0.2.7:10250: connect: connection refused"
    pod = f"Pod {FRONTEND[1]}.{FRONTEND[0]}"
    yield f"{pod}: node {node} does not respond to port-forward ({reason})"
    assert fault.met >= 1
    cluster.server.faults.clear()


def test_lists_of_workers_name_the_node_and_go_on(stopped_kubelet: str, dynctl: Run) -> None:
    ran = dynctl("workers", "list", *KUBERNETES, "-n", "prod", "--timeout", "2", "-o", "json")
    assert (ran.code, len(ran.json["workers"])) == (0, 12)
    assert f"note: {stopped_kubelet}" in ran.err
    assert "is not reachable" not in ran.err


def test_the_dashboard_and_check_name_the_node(stopped_kubelet: str, dynctl: Run) -> None:
    ran = dynctl("top", "--once", *KUBERNETES, "-n", "prod", "--timeout", "2", "-o", "json")
    assert ran.code == 0
    assert ran.json["snapshot"]["told"]["queue"]["unknown"] == stopped_kubelet
    ran = dynctl("check", *KUBERNETES, "-n", "prod", "--timeout", "2", "-o", "json")
    (subject, why) = next(iter(ran.values("DYR0401").items()))
    assert f"{subject}: {why}" == stopped_kubelet


def test_thresholds_are_not_set_while_a_frontend_is_silent(
    stopped_kubelet: str, dynctl: Run
) -> None:
    words = ("thresholds", "set", MODEL, "--active-prefill-tokens", "5", "-y")
    ran = dynctl(*words, *KUBERNETES, "-n", "prod", "--timeout", "2")
    assert (ran.code, ran.error[0]) == (3, stopped_kubelet)


def test_the_log_of_a_worker_on_a_stopped_node_names_the_node(cluster: Simulation) -> None:
    worker = "my-llm-decode-a-0"
    node = cluster.pod(worker)["spec"]["nodeName"]
    cluster.server.faults.stop_kubelet(node, 30)
    options = GlobalOptions(namespace="prod", timeout=2.0)
    with pytest.raises(Unreachable) as silent:
        pod_log(options, worker)
    cluster.server.faults.clear()
    says = f"node {node} does not respond to log (no response within 2 s; the API server responds)"
    assert silent.value.message == f"not read: {says}"
