"""`dynctl topology verify` with several graphs, incomplete graphs, and other objects."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynctl.adapters.kubernetes.cluster import open_cluster
from dynctl.adapters.ports import Cluster
from dynctl.verify.checks.all import verify
from dynctl.verify.gather.cluster import Wanted, gather
from tests.kube import crds, deployment, objects
from tests.kube.actors import Simulation, living
from tests.kube.actors.worker import with_config
from tests.kube.command_line import Run
from tests.kube.faults import FAULTS, fault_of, injected
from tests.kube.objects import ZONE, Json, small
from tests.kube.objects.events import event, label_missing
from tests.waiting import patience

VERIFY = ("topology", "verify")
DECODE = "my-llm-decode-a-0"
CRD = "dynamographdeployments.nvidia.com"


def namespace(sim: Simulation, name: str) -> None:
    sim.store.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})


def deploy(sim: Simulation, space: str, name: str, policy: Json | None) -> None:
    """A graph of 2 prefill and 4 decode workers in two zones, an hour old."""
    zones = ("us-east-1a", "us-east-1b")
    parts = deployment.components(zones, prefill=1, decode=2)
    sim.kubectl_apply(objects.graph(space, name, parts, policy=policy))
    sim.settle()
    sim.advance(3600)


def relabel(sim: Simulation, space: str, pod: str) -> None:
    sim.edit("Pod", pod, {"metadata": {"labels": {ZONE: "us-east-1z"}}}, space)
    sim.settle()
    sim.advance(600)


@pytest.fixture(scope="module")
def crowd() -> Iterator[Simulation]:
    """prod: my-llm and soft, whole. test: my-llm, which has a stale label."""
    with living() as sim:
        deploy(sim, "prod", "soft", deployment.policy(enforcement="preferred", weight=0.5))
        namespace(sim, "test")
        deploy(sim, "test", "my-llm", deployment.policy())
        relabel(sim, "test", DECODE)
        yield sim


def kubeconfig(sim: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = sim.viewer_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


@pytest.fixture
def several(crowd: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulation:
    kubeconfig(crowd, tmp_path, monkeypatch)
    crowd.server.requests.clear()
    return crowd


# -- several graphs --------------------------------------------------------------------------------


def test_all_namespaces_and_subjects_name_theirs(several: Simulation, dynctl: Run) -> None:
    ran = dynctl(*VERIFY, "-A", "-o", "json")

    assert ran.code == 1
    graphs = "all namespaces: prod/my-llm, prod/soft, test/my-llm"
    assert ran.json["sources"][0].endswith(graphs)
    assert len(ran.json["sources"]) == 1 + 3
    assert ran.reported == {"DYT0404", "DYT0802"}
    assert [*ran.values("DYT0404")] == [f"Pod {DECODE}.test"]
    broken = [row for row in ran.json["chain"] if row["first_break"]]
    assert [(row["worker"], row["namespace"]) for row in broken] == [(DECODE, "test")]
    assert len(ran.json["chain"]) == 12 + 6 + 6


def test_the_table_distinguishes_pods_with_one_name(several: Simulation, dynctl: Run) -> None:
    narrow, wide = dynctl(*VERIFY, "-A").out, dynctl(*VERIFY, "-A", width=200).out

    [row] = [one for one in narrow.splitlines() if "DYT0404 +1" in one]
    assert row.split()[0].endswith("decode-a-0.test")
    assert len(row) <= 80
    assert f"{DECODE}.test" in wide
    assert "test/my-llm" in wide


def test_one_broken_namespace_does_not_fail_another(several: Simulation, dynctl: Run) -> None:
    assert dynctl(*VERIFY, "-n", "prod").code == 0
    assert dynctl(*VERIFY, "-n", "test").code == 1


@pytest.mark.parametrize(
    ("words", "graphs", "workers"),
    [
        (("--dgd", "soft"), "prod: prod/soft", 6),
        (("--dgd", "my-llm"), "prod: prod/my-llm", 12),
        (("--dgd", "soft", "--dgd", "my-llm"), "prod: prod/my-llm, prod/soft", 18),
    ],
)
def test_graphs_are_chosen_by_name(
    several: Simulation, dynctl: Run, words: tuple[str, ...], graphs: str, workers: int
) -> None:
    ran = dynctl(*VERIFY, *words, "-o", "json")

    assert ran.code == 0
    assert ran.json["sources"][0].endswith(f", {graphs}")
    # The other graph's workers are in no row and in no sum.
    assert len(ran.json["chain"]) == workers
    assert ran.checks["DYT0801"]["message"] == f"{workers} of {workers} workers"
    queries = [one.query for one in several.server.requests if one.path.endswith("/prod/pods")]
    names = [word for word in words if word != "--dgd"]
    assert queries[0]["labelSelector"].endswith(f" in ({','.join(names)})")


def test_an_enforcement_applies_to_its_own_graph(several: Simulation, dynctl: Run) -> None:
    checks = dynctl(*VERIFY, "-o", "json").checks

    assert checks["DYT0102"]["message"] == (
        "my-llm.prod: zone, required; soft.prod: zone, preferred 0.5"
    )
    assert checks["DYT0901"]["message"].startswith("us-east-1a 2 prefill 4 decode")
    assert checks["DYT0906"]["message"].startswith("us-east-1a 1 prefill 2 decode")


# -- graphs that are not whole ---------------------------------------------------------------------


def without_policy(graph: Json) -> Json:
    del graph["spec"]["experimental"]
    return graph


def test_a_graph_without_a_policy_shows_its_zones(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with living(change=without_policy) as sim:
        kubeconfig(sim, tmp_path, monkeypatch)
        ran = dynctl(*VERIFY, "-o", "json")
        screen = dynctl(*VERIFY).out
        strict = dynctl(*VERIFY, "--fail-on", "warn")

    assert (ran.code, strict.code) == (0, 1)
    assert ran.reported == {"DYT0102"}
    assert ran.values("DYT0102") == {
        "DynamoGraphDeployment my-llm.prod": "no spec.experimental.kvTransferPolicy; its workers "
        "run in us-east-1a (4 decode, 2 prefill), us-east-1b (4 decode, 2 prefill): KV cache "
        "can cross zones"
    }
    assert "fix       add spec.experimental.kvTransferPolicy with labelKey:" in screen
    # What needs a policy is passed over in a line or two a section.
    assert len(screen.splitlines()) < 90


def test_workers_of_one_zone_cross_nothing_without_a_policy(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with living(change=without_policy, zones=("us-east-1a",)) as sim:
        kubeconfig(sim, tmp_path, monkeypatch)
        [value] = dynctl(*VERIFY, "-o", "json").values("DYT0102").values()

    assert value.endswith("all its workers run in us-east-1a, so no KV cache crosses zones now")


def test_pods_that_a_deleted_graph_has_left(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with living() as sim:
        sim.operator.on = False
        for pod in sim.pods():
            sim.edit("Pod", pod, {"metadata": {"ownerReferences": None}})
        sim.store.delete("DynamoGraphDeployment", "my-llm", "prod")
        sim.settle()
        kubeconfig(sim, tmp_path, monkeypatch)
        ran = dynctl(*VERIFY, "-o", "json")
        named = dynctl(*VERIFY, "--dgd", "my-llm", "-o", "json")

    assert ran.code == named.code == 1
    assert ran.reported == named.reported == {"DYT0101"}
    subject = "DynamoGraphDeployment my-llm.prod"
    assert ran.values("DYT0101") == {subject: "does not exist, but has 13 pods"}


def served(names: tuple[str, ...]) -> list[Json]:
    """Versions of the graphs' definition, of which only these are served."""
    versions: list[Json] = copy.deepcopy(crds.graph_crd()["spec"]["versions"])
    known = {one["name"]: one for one in versions}
    for name in names:
        if name not in known:
            versions.append({**copy.deepcopy(versions[0]), "name": name, "storage": False})
    return [{**one, "served": one["name"] in names} for one in versions]


def test_a_cluster_of_the_older_version_alone(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with living() as sim:
        versions = {"spec": {"versions": served(("v1alpha1",))}}
        sim.edit("CustomResourceDefinition", CRD, versions, "")
        kubeconfig(sim, tmp_path, monkeypatch)
        sim.server.requests.clear()
        ran = dynctl(*VERIFY, "-o", "json")
        lists = [one.path for one in sim.server.requests if one.path.endswith("/" + CRD[:22])]

    assert ran.code == 0
    assert ran.reported == set()
    assert ran.checks["DYT0002"]["message"] == "v1alpha1"
    assert lists == ["/apis/nvidia.com/v1alpha1/namespaces/prod/dynamographdeployments"]


def test_a_cluster_of_a_version_to_come(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is not readable: its policy comes from its pods."""
    with living() as sim:
        sim.edit("CustomResourceDefinition", CRD, {"spec": {"versions": served(("v2",))}}, "")
        kubeconfig(sim, tmp_path, monkeypatch)
        ran = dynctl(*VERIFY, "-o", "json")

    assert ran.code == 1
    assert ran.reported == {"DYT0002"}
    assert [*ran.values("DYT0002").values()] == ["is served only as v2"]
    assert ran.checks["DYT0101"]["unread"]
    assert ran.checks["DYT0403"]["message"] == "12 of 12 pods"


# -- other deployments ----------------------------------------------------------------------------


@pytest.mark.parametrize("mine", [True, False])
def test_an_event_counts_for_the_pod_that_it_is_about(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: bool
) -> None:
    """One of an earlier pod of the same name has another uid."""
    with living() as sim:
        pod = sim.pod(DECODE)
        if not mine:
            pod["metadata"]["uid"] = "1de81e3c-8b1c-4d35-9a1a-d9a0d3d1f0aa"
        sim.store.create(label_missing(pod, ZONE, at=sim.clock.now - 60))
        kubeconfig(sim, tmp_path, monkeypatch)
        ran = dynctl(*VERIFY, "-o", "json")

    assert ran.reported == ({"DYT0405"} if mine else set())


def test_thousands_of_unrelated_pods_are_not_downloaded(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with living() as sim:
        kubeconfig(sim, tmp_path, monkeypatch)
        before = requests_of(sim, dynctl)
        for number in range(5000):
            sim.store.create(unrelated(number))
        after = requests_of(sim, dynctl)

    assert after == before
    pods = [query for path, query in after if path == "/api/v1/namespaces/prod/pods"]
    selector = "nvidia.com/dynamo-graph-deployment-name"
    assert pods == [{"labelSelector": selector, "limit": "500"}]


def requests_of(sim: Simulation, dynctl: Run) -> list[tuple[str, dict[str, str]]]:
    """Of one run that passes, without an order."""
    sim.server.requests.clear()
    assert dynctl(*VERIFY, "-o", "json").code == 0
    result = [(one.path, dict(one.query)) for one in sim.server.requests]
    return sorted(result, key=str)


def unrelated(number: int) -> dict[str, Any]:
    return small.running(small.pod(f"web-{number}", "prod", "gpu-a-0", app="web"))


# -- what workers register -------------------------------------------------------------------------


def test_what_a_card_holds_moves_no_cursor_and_breaks_no_table(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = {
        "my-llm-decode-a-0": with_config(taints=["dynamo.topology/zone=\x1b[2J", 5]),
        "my-llm-decode-a-1": with_config(topology_domains=["zone"], kv_transfer_domain=7),
        "my-llm-decode-a-2": with_config(topology_domains={"zone": "x" * 5000}),
    }
    with living() as sim:
        kubeconfig(sim, tmp_path, monkeypatch)
        sim.workers.publish |= cards
        sim.recreate(*cards)
        sim.settle()
        sim.advance(600)
        ran = dynctl(*VERIFY, "-o", "json")
        screens = [dynctl(*VERIFY, width=width).out for width in (80, 200)]

    assert ran.code == 1
    result = ran.values("DYT0704")
    assert [*result] == ["Pod my-llm-decode-a-0.prod", "Pod my-llm-decode-a-1.prod"]
    assert "taints: expected a list of strings, got" in result["Pod my-llm-decode-a-0.prod"]
    assert "topology_domains: expected a mapping" in result["Pod my-llm-decode-a-1.prod"]
    assert "Pod my-llm-decode-a-2.prod" in ran.values("DYT0802")
    for screen, width in zip(screens, (80, 200), strict=True):
        assert screen.replace("\n", "").isprintable()
        rows = [line for line in screen.splitlines() if "decode-a-2 " in line]
        assert rows
        assert all(len(line) <= width for line in rows)


def test_workers_that_register_elsewhere_are_not_taken_for_broken(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with living(discovery="etcd") as sim:
        kubeconfig(sim, tmp_path, monkeypatch)
        sim.server.requests.clear()
        ran = dynctl(*VERIFY, "-o", "json")
        execs = [one for one in sim.server.requests if one.path.endswith("/exec")]

    assert ran.code == 0
    assert ran.reported == set()
    assert ran.checks["DYT0707"]["message"].endswith("(use --discovery etcd)")
    why = "registered in etcd (use --discovery etcd)"
    for row in ran.json["chain"]:
        assert (row["card"]["state"], row["card"]["why"]) == ("unknown", why)
        assert row["first_break"] is None
    # They are read as any others are: every pod of a small fleet.
    assert {one.path for one in execs} == {
        f"/api/v1/namespaces/prod/pods/{row['worker']}/exec" for row in ran.json["chain"]
    }


# -- what changes meanwhile ------------------------------------------------------------------------


class Meddled:
    """A cluster in which a pod is replaced right after the first list of pods was read.

    All other lists wait for that, so that they have the new pod.
    """

    def __init__(self, cluster: Cluster, replace: Callable[[], None]) -> None:
        self._cluster, self._replace = cluster, replace
        self._replaced = threading.Event()
        self.lists_of_pods = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def pages(self, path: str, *words: Any, **named: Any) -> Iterator[Mapping[str, Any]]:
        if not path.endswith("/pods"):
            assert self._replaced.wait(patience(30))
            yield from self._cluster.pages(path, *words, **named)
            return
        yield from [*self._cluster.pages(path, *words, **named)]
        self.lists_of_pods += 1
        if not self._replaced.is_set():
            self._replace()
            self._replaced.set()


def test_a_pod_that_is_replaced_between_two_lists_is_no_fault(tmp_path: Path) -> None:
    with living(prefill=2, decode=2) as sim:

        def replaced() -> None:
            sim.recreate(DECODE)
            sim.settle()
            sim.advance(600)

        path = sim.viewer_kubeconfig(tmp_path / "kubeconfig")
        cluster = open_cluster(kubeconfig=path, context=None, timeout=10)
        try:
            meddled = Meddled(cluster, replaced)
            facts = gather(meddled, Wanted("prod"))
        finally:
            cluster.close()

    report = verify(facts)
    assert [one.code for one in report.checks if one.findings] == []
    assert meddled.lists_of_pods == 2


# -- events about workers that do not run ----------------------------------------------------------


def test_the_events_of_stopped_and_missing_workers_are_read(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with injected(fault_of(FAULTS, "pod-not-scheduled")) as sim:
        path = sim.viewer_kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(path))
        message = "0/4 nodes are available: 2 node(s) were unschedulable."
        sim.store.create(event(sim.pod(DECODE), "FailedScheduling", message, at=sim.clock.now))
        sim.server.requests.clear()
        ran = dynctl(*VERIFY, "-o", "json")
        selectors = [
            request.query.get("fieldSelector")
            for request in sim.server.requests
            if request.path.endswith("/events")
        ]

    assert selectors == [
        "reason=TopologyLabelMissing",
        f"involvedObject.name={DECODE},type=Warning",
    ]
    [finding] = ran.checks["DYT0410"]["findings"]
    assert f"; event FailedScheduling, 0 s ago: {message}" in finding["value"]
    assert finding["fix"].endswith("decode-a: kubectl edit dynamographdeployment my-llm -n prod")
