"""`dynctl topology verify` on a cluster: its formats, its options, and what it asks for.

Nothing here changes a cluster after it was made, so that two of them serve all tests.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from tests.kube.actors import Simulation, living
from tests.kube.api_server.server import Request
from tests.kube.api_server.streams import run as run_in_container
from tests.kube.command_line import Run
from tests.kube.objects import ZONE

VERIFY = ("topology", "verify")
WORKERS = 12
STALE = "my-llm-decode-a-0"
REVIEWS = ("selfsubjectaccessreviews", "subjectaccessreviews", "localsubjectaccessreviews")


@contextlib.contextmanager
def watched(sim: Simulation, folder: Path) -> Iterator[Simulation]:
    """With $KUBECONFIG of a viewer, and no request yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(sim.viewer_kubeconfig(folder / "kubeconfig")))
        sim.server.requests.clear()
        yield sim


@pytest.fixture(scope="module")
def whole() -> Iterator[Simulation]:
    with living() as sim:
        yield sim


@pytest.fixture(scope="module")
def torn() -> Iterator[Simulation]:
    """One pod's label is another one than its node's."""
    with living() as sim:
        sim.edit("Pod", STALE, {"metadata": {"labels": {ZONE: "us-east-1z"}}})
        sim.settle()
        sim.advance(600)
        yield sim


@pytest.fixture
def healthy(whole: Simulation, tmp_path: Path) -> Iterator[Simulation]:
    with watched(whole, tmp_path) as sim:
        yield sim


@pytest.fixture
def broken(torn: Simulation, tmp_path: Path) -> Iterator[Simulation]:
    with watched(torn, tmp_path) as sim:
        yield sim


def streams(sim: Simulation, part: str) -> list[Request]:
    return [one for one in sim.server.requests if one.path.endswith(f"/{part}")]


# -- formats ---------------------------------------------------------------------------------------


def test_json_holds_every_check_and_a_row_a_worker(healthy: Simulation, dynctl: Run) -> None:
    ran = dynctl(*VERIFY, "-o", "json", "--exec", "all")

    assert (ran.code, ran.err) == (0, "")
    report = ran.json
    assert (report["kind"], report["schema"]) == ("VerifyReport", 1)
    assert report["sources"][0].endswith(", prod: prod/my-llm")
    assert report["sources"][1:] == ["frontend Pod my-llm-frontend-0.prod"]
    states = Counter(check["state"] for check in ran.checks.values())
    result = report["summary"]
    assert states == {"pass": result["passed"], "skip": result["skipped"]}
    assert len(report["chain"]) == WORKERS
    for row in report["chain"]:
        zone = row["node"]["value"]
        links = [row[name] for name in ("node", "label", "file", "card", "taint", "router")]
        assert {(link["state"], link["value"]) for link in links} == {("same", zone)}
        assert (row["graph"], row["domain"], row["first_break"]) == ("prod/my-llm", "zone", None)
        assert row["codes"] == []


def test_json_of_a_break_holds_what_was_read(broken: Simulation, dynctl: Run) -> None:
    ran = dynctl(*VERIFY, "-o", "json")

    assert ran.code == 1
    assert ran.reported == {"DYT0404", "DYT0802"}
    pod = f"Pod {STALE}.prod"
    assert ran.values("DYT0404") == {
        pod: f"{ZONE} is us-east-1z, its node gpu-a-0 has us-east-1a",
    }
    assert ran.values("DYT0802") == {pod: "zone is us-east-1a, the file has us-east-1z"}
    [row] = [one for one in ran.json["chain"] if one["worker"] == STALE]
    assert row["first_break"] == "pod label"
    assert row["codes"] == ["DYT0404", "DYT0802"]
    assert (row["node"]["value"], row["label"]["value"]) == ("us-east-1a", "us-east-1z")
    assert (row["file"]["value"], row["card"]["value"]) == ("us-east-1z", "us-east-1a")
    assert (row["label"]["state"], row["card"]["state"]) == ("differs", "differs")


def test_yaml_and_json_are_equal(broken: Simulation, dynctl: Run) -> None:
    as_json = dynctl(*VERIFY, "-o", "json").json
    as_yaml = yaml.safe_load(dynctl(*VERIFY, "-o", "yaml").out)

    assert as_yaml == as_json


def test_junit_counts_what_the_report_counts(broken: Simulation, dynctl: Run) -> None:
    ran = dynctl(*VERIFY, "-o", "junit")
    summary = dynctl(*VERIFY, "-o", "json").json["summary"]
    root = ElementTree.fromstring(ran.out)

    assert ran.code == 1
    assert root.tag == "testsuites"
    assert root.get("failures") == str(summary["failed"]) == "2"
    assert root.get("skipped") == str(summary["skipped"])
    failed = [case for case in root.iter("testcase") if case.find("failure") is not None]
    assert [case.get("name", "").split()[0] for case in failed] == ["DYT0404", "DYT0802"]
    message = failed[0].find("failure")
    assert message is not None
    assert "us-east-1z" in (message.get("message") or "")


def test_lines_and_names_are_of_findings(broken: Simulation, dynctl: Run) -> None:
    lines = [json.loads(line) for line in dynctl(*VERIFY, "-o", "jsonl").out.splitlines()]

    assert {one["code"] for one in lines if one.get("state") == "fail"} == {"DYT0404", "DYT0802"}
    assert {one["worker"] for one in lines if one.get("first_break")} == {STALE}
    assert dynctl(*VERIFY, "-o", "name").out.split() == ["DYT0404", "DYT0802"]


@pytest.mark.parametrize("width", [64, 80, 100, 200])
@pytest.mark.parametrize("wide", [False, True])
def test_no_line_is_wider_than_the_terminal(
    broken: Simulation, dynctl: Run, width: int, wide: bool
) -> None:
    lines = dynctl(*VERIFY, *(["-o", "wide"] if wide else []), width=width).out.splitlines()
    in_table = [line for line in lines if line.startswith(("my-llm", "..", "WORKER"))]

    assert [line for line in lines if len(line) > width and line not in in_table] == []
    if width >= 80:
        assert [line for line in in_table if len(line) > width] == []


def test_on_a_narrow_terminal_messages_keep_their_beginning(
    healthy: Simulation, dynctl: Run
) -> None:
    lines = dynctl(*VERIFY).out.splitlines()
    passed = {line.split()[1]: line.partition(": ")[2] for line in lines if line.startswith("pass")}
    whole = dynctl(*VERIFY, width=200).out

    for code, says in passed.items():
        [line] = [one for one in whole.splitlines() if one.startswith(f"pass {code}")]
        assert line.partition(": ")[2].startswith(says.removesuffix(" .."))
    assert passed["DYT0503"] == "12 of 12 pods"
    assert passed["DYT0207"] == "us-east-1a 2, us-east-1b 2 .."
    assert sum(says.endswith(" ..") for says in passed.values()) < len(passed) / 4


def test_a_healthy_cluster_reads_as_one(healthy: Simulation, dynctl: Run) -> None:
    ran = dynctl(*VERIFY, "--exec", "all", "--logs", "all")

    assert (ran.code, ran.err) == (0, "")
    assert "FAIL" not in ran.out
    assert "WARN" not in ran.out
    assert "12 workers  ok    ok     ok    ok    ok     ok\n" in ran.out
    assert " 0 warnings, 0 failed, " in ran.out
    assert "not covered by any check: the KV transfer itself (NIXL, RDMA)" in ran.out


def test_a_broken_cluster_shows_the_place_and_the_fix(broken: Simulation, dynctl: Run) -> None:
    lines = dynctl(*VERIFY).out.splitlines()

    place = lines.index("FAIL DYT0404 pod label matches the node label")
    result = " ".join(line.strip() for line in lines[place : place + 9])
    assert f"Pod {STALE}.prod: {ZONE} is us-east-1z, its node gpu-a-0 has us-east-1a" in result
    assert f"fix       kubectl delete pod {STALE} -n prod" in result
    assert "more      dynctl explain DYT0404" in result
    assert [line for line in lines if line.startswith("..decode-a-0 ")]


# -- options ---------------------------------------------------------------------------------------


def test_the_list_of_checks_needs_no_cluster(dynctl: Run) -> None:
    ran = dynctl(*VERIFY, "--list-checks")

    assert (ran.code, ran.err) == (0, "")
    codes = [line.split()[0] for line in ran.out.splitlines()[1:]]
    assert codes == sorted(codes)
    assert {code[:5] for code in codes} >= {f"DYT0{number}" for number in range(10)}
    assert dynctl(*VERIFY, "--list-checks", "-o", "json").json["kind"] == "CodeList"


def test_suppressed_findings_do_not_fail(broken: Simulation, dynctl: Run) -> None:
    both = ("--suppress", f"DYT0404=Pod {STALE}.*", "--suppress", "dyt0802")
    ran = dynctl(*VERIFY, "-o", "json", *both)

    assert ran.code == 0
    assert ran.checks["DYT0404"]["message"] == "suppressed"
    assert ran.checks["DYT0802"]["message"] == "suppressed"
    other = ("--suppress", "DYT0404=Pod my-llm-decode-b-*", "--suppress", "DYT0802")
    assert dynctl(*VERIFY, *other).code == 1


def test_warnings_fail_with_fail_on_warn(whole: Simulation, dynctl: Run, tmp_path: Path) -> None:
    whole.server.add_user("half", "half")
    kubeconfig = whole.server.kubeconfig(tmp_path / "half", token="half", namespace="prod")
    with allowed(whole, "half", "pods", "list"):
        assert dynctl(*VERIFY, "--kubeconfig", kubeconfig).code == 0
        assert dynctl(*VERIFY, "--kubeconfig", kubeconfig, "--fail-on", "warn").code == 1


@contextlib.contextmanager
def allowed(sim: Simulation, user: str, resource: str, *verbs: str) -> Iterator[None]:
    """In the namespace prod alone, and nothing else."""
    version = "rbac.authorization.k8s.io/v1"
    metadata = {"name": f"only-{user}", "namespace": "prod"}
    rule = {"apiGroups": [""], "resources": [resource], "verbs": list(verbs)}
    group = {"apiGroup": "rbac.authorization.k8s.io"}
    sim.store.create({"apiVersion": version, "kind": "Role", "metadata": metadata, "rules": [rule]})
    sim.store.create(
        {
            "apiVersion": version,
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {**group, "kind": "Role", "name": metadata["name"]},
            "subjects": [{**group, "kind": "User", "name": user}],
        }
    )
    yield
    for kind in ("RoleBinding", "Role"):
        sim.store.delete(kind, metadata["name"], "prod")


def test_rights_to_the_pods_of_a_namespace_are_enough_for_an_answer(
    whole: Simulation, dynctl: Run, tmp_path: Path
) -> None:
    whole.server.add_user("poor", "poor")
    kubeconfig = whole.server.kubeconfig(tmp_path / "poor", token="poor", namespace="prod")
    with allowed(whole, "poor", "pods", "list"):
        ran = dynctl(*VERIFY, "--kubeconfig", kubeconfig, "-o", "json")
        screen = dynctl(*VERIFY, "--kubeconfig", kubeconfig).out

    assert ran.code == 0
    assert ran.reported == {"DYT0004"}
    assert len(ran.checks["DYT0004"]["findings"]) > 10
    assert ran.checks["DYT0403"]["message"] == "12 of 12 pods"
    assert ran.checks["DYT0503"]["state"] == "skip"
    assert ran.checks["DYT0503"]["unread"]
    assert {row["label"]["state"] for row in ran.json["chain"]} == {"same"}
    assert "no permission to list nodes (DYT0004)" in screen
    assert "cannot list resource" not in screen
    # One reason of twelve pods is said once.
    assert ran.checks["DYT0503"]["message"].count("no permission to get pods/exec in prod") == 1


@pytest.mark.parametrize(
    ("how", "many"), [("auto", WORKERS), ("all", WORKERS), ("sample", 4), ("none", 0)]
)
def test_files_and_logs_are_read_as_specified(
    healthy: Simulation, dynctl: Run, how: str, many: int
) -> None:
    assert dynctl(*VERIFY, "--exec", how, "--logs", how).code == 0

    # The file of the domain, and the names in its directory.
    assert len(streams(healthy, "exec")) == 2 * many
    assert len(streams(healthy, "log")) == many


def test_what_was_not_read_is_not_passed(healthy: Simulation, dynctl: Run) -> None:
    ran = dynctl(*VERIFY, "--exec", "sample", "--logs", "sample", "-o", "json")

    for code, option in (("DYT0503", "--exec"), ("DYT0504", "--exec"), ("DYT0602", "--logs")):
        check = ran.checks[code]
        assert check["state"] == "skip"
        assert check["message"] == f"4 of 12 pods; the others: not read (use {option} all)".replace(
            "pods", "logs" if option == "--logs" else "pods"
        )
    states = Counter(row["file"]["state"] for row in ran.json["chain"])
    assert states == {"same": 4, "unknown": 8}


# -- verify changes nothing ------------------------------------------------------------------------


@contextlib.contextmanager
def recorded(sim: Simulation) -> Iterator[list[list[str]]]:
    """Every command that is run in a container meanwhile."""
    commands: list[list[str]] = []

    def spied(files: Any) -> Callable[[list[str]], Any]:
        def ran(command: list[str]) -> Any:
            commands.append(command)
            return run_in_container(files, command)

        return ran

    before = dict(sim.server.exec_files)
    for key, files in before.items():
        sim.server.exec_files[key] = spied(files)
    yield commands
    sim.server.exec_files.update(before)


def test_verify_changes_nothing(healthy: Simulation, dynctl: Run) -> None:
    view = healthy.frontends.views["prod", "my-llm-frontend-0"]
    view.requests.clear()
    before = healthy.objects()
    with recorded(healthy) as commands:
        assert dynctl(*VERIFY, "--exec", "all", "--logs", "all").code == 0

    for one in healthy.server.requests:
        if one.method == "POST":
            assert one.path.rpartition("/")[2] in REVIEWS
        else:
            assert one.method == "GET"
    assert healthy.objects() == before
    assert Counter(map(tuple, commands)) == {
        ("cat", "/etc/dynamo/topology/zone"): WORKERS,
        ("ls", "-1p", "/etc/dynamo/topology"): WORKERS,
    }
    assert view.requests
    assert {line.split()[0] for line in view.requests} == {"GET"}


def test_all_that_verify_asks_for_is_in_its_list_of_permissions(
    healthy: Simulation, dynctl: Run
) -> None:
    assert dynctl(*VERIFY).code == 0

    assert [one for one in healthy.server.requests if one.status in (401, 403)] == []


# -- the plan --------------------------------------------------------------------------------------


def sent(sim: Simulation) -> Counter[str]:
    """How many requests of each kind the API server got. A port-forward has several connections."""
    kinds: Counter[str] = Counter()
    forwarded = {request.path for request in streams(sim, "portforward")}
    if forwarded:
        kinds["portforward"] = len(forwarded)
    for request in sim.server.requests:
        part = request.path.rsplit("/", 1)[-1]
        if part in REVIEWS:
            kinds["access review"] += 1
        elif part in ("exec", "log"):
            kinds[part] += 1
        elif part != "portforward":
            kinds["read"] += 1
    return kinds


def planned(rows: list[dict[str, Any]]) -> Counter[str]:
    kinds: Counter[str] = Counter()
    names = {"get": "read", "list": "read", "port-forward": "portforward"}
    for row in rows:
        kinds[names.get(row["request"], row["request"])] += row["count"]
    return kinds


@pytest.mark.parametrize(
    "options",
    [(), ("--exec", "none"), ("--exec", "sample", "--logs", "none"), ("--logs", "all")],
    ids=" ".join,
)
def test_a_plan_is_what_verify_then_asks(
    healthy: Simulation, dynctl: Run, options: tuple[str, ...]
) -> None:
    plan = dynctl(*VERIFY, "--plan", *options, "-o", "json")
    rehearsal = sent(healthy)
    healthy.server.requests.clear()
    dynctl(*VERIFY, *options)
    real = sent(healthy)

    assert (plan.code, plan.json["kind"]) == (0, "TopologyVerifyPlan")
    assert planned(plan.json["requests"]) == real
    # It reads what it counts, and enters no pod.
    entering = ("exec", "log", "portforward")
    assert rehearsal == Counter({k: n for k, n in real.items() if k not in entering})


def test_a_plan_names_the_options_that_leave_requests_out(
    healthy: Simulation, dynctl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = dynctl(*VERIFY, "--plan").out
    assert "no pod was entered" in shown
    for option in ("--exec none", "--exec sample", "--logs none", "--frontend URL"):
        assert option in shown
    assert "my-llm-" in dynctl(*VERIFY, "--plan", "-o", "wide").out
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, dynctl(*VERIFY, "--plan").out.splitlines())) <= 80
    url = "http://127.0.0.1:9"
    rows = dynctl(*VERIFY, "--plan", "--frontend", url, "-o", "json").json["requests"]
    assert [row["names"] for row in rows if row["request"] == "http"] == [[url]]
    assert not [row for row in rows if row["request"] == "port-forward"]


def test_a_plan_is_for_a_cluster(dynctl: Run, tmp_path: Path) -> None:
    for options in (("--path", str(tmp_path)), ("--discovery", "file", "--file-kv", str(tmp_path))):
        ran = dynctl(*VERIFY, "--plan", *options)
        assert ran.code == 2
        assert "--plan: is for a cluster" in ran.err
