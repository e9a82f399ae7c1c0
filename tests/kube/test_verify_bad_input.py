"""Wrong input of `dynctl topology verify`, and clusters that cannot respond.

Each error names the object and what to do, with the right exit code: 2 for wrong input, 3 for an
unreachable cluster or missing objects.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kube.actors import Simulation, living, simulation
from tests.kube.actors.simulation import VIEWER_TOKEN
from tests.kube.command_line import Run

VERIFY = ("topology", "verify")
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def secure() -> Iterator[Simulation]:
    """Over TLS; nothing changes it."""
    with living(tls=True) as sim:
        yield sim


@pytest.fixture
def kubeconfig(secure: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a viewer, and named by $KUBECONFIG."""
    path = secure.viewer_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    """A cluster with Dynamo's operator and no graph, to be spoiled."""
    with simulation() as sim:
        path = sim.viewer_kubeconfig(tmp_path / "kubeconfig", namespace="default")
        monkeypatch.setenv("KUBECONFIG", str(path))
        yield sim


def changed(path: Path, change: Change) -> Path:
    config = yaml.safe_load(path.read_text())
    change(config)
    other = path.with_name("changed")
    other.write_text(yaml.safe_dump(config))
    return other


def cluster_of(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["clusters"][0]["cluster"]
    return found


def user_of(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["users"][0]["user"]
    return found


# -- which cluster ---------------------------------------------------------------------------------


def test_no_cluster_at_all(dynctl: Run) -> None:
    ran = dynctl(*VERIFY)

    error, hint = ran.error
    assert ran.code == 2
    assert error.startswith("no cluster is configured: --kubeconfig and $KUBECONFIG are not set")
    assert "--kubeconfig FILE" in hint


def test_a_kubeconfig_that_is_not_there(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "gone"))

    assert dynctl(*VERIFY).code == 2
    assert (
        f"$KUBECONFIG is {tmp_path / 'gone'}: the file does not exist" in dynctl(*VERIFY).error[0]
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a: [unclosed", "is not YAML (line 2, column 1)"),
        (b"only words", "is not a kubeconfig: expected a mapping with clusters"),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"", "defines no cluster"),
    ],
)
def test_a_kubeconfig_that_cannot_be_read(
    dynctl: Run, tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "config"
    path.write_bytes(content)
    ran = dynctl(*VERIFY, "--kubeconfig", path)

    assert ran.code == 2
    assert ran.error[0].startswith(f"kubeconfig {path} ")
    assert says in ran.error[0]


def test_an_unknown_context_of_the_kubeconfig(kubeconfig: Path, dynctl: Run) -> None:
    ran = dynctl(*VERIFY, "--kube-context", "prdo")

    assert ran.code == 2
    assert ran.error == (
        f"--kube-context prdo: no such context in {kubeconfig}",
        "defined: test",
    )


def test_a_context_of_the_kubeconfig_is_suggested(kubeconfig: Path, dynctl: Run) -> None:
    ran = dynctl(*VERIFY, "--context", "test")

    assert ran.code == 2
    error, hint = ran.error
    assert error == "--context test: unknown context"
    assert "did you mean --kube-context test?" in hint


def test_an_unknown_context_is_an_error(kubeconfig: Path, dynctl: Run) -> None:
    ran = dynctl(*VERIFY, "--context", "nope")

    assert ran.code == 2
    assert "--kube-context" not in ran.err


def test_two_kubeconfigs_are_laid_over_each_other(
    secure: Simulation, dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    server = secure.server
    with simulation() as other:
        config = yaml.safe_load(other.viewer_kubeconfig(first, "default").read_text())
        first.write_text(yaml.safe_dump(renamed(config, "empty")))
        config = yaml.safe_load(secure.viewer_kubeconfig(second).read_text())
        second.write_text(yaml.safe_dump(renamed(config, "full")))
        monkeypatch.setenv("KUBECONFIG", os.pathsep.join((str(first), str(second))))

        of_first = dynctl(*VERIFY)
        of_second = dynctl(*VERIFY, "--kube-context", "full", "-o", "json")

    assert of_first.code == 3
    assert f"in namespace default of empty ({other.server.url})" in of_first.error[0]
    assert of_second.code == 0
    assert of_second.json["sources"][0] == f"full ({server.url}), prod: prod/my-llm"


def renamed(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Its one context, cluster and user have this name."""
    for kind in ("clusters", "users", "contexts"):
        config[kind][0]["name"] = name
    config["contexts"][0]["context"] |= {"cluster": name, "user": name}
    return config | {"current-context": name}


# -- a server that does not answer -----------------------------------------------------------------


def test_an_expired_token(kubeconfig: Path, dynctl: Run) -> None:
    other = changed(kubeconfig, lambda config: user_of(config).update(token="expired"))
    ran = dynctl(*VERIFY, "--kubeconfig", other)

    assert ran.code == 3
    error, hint = ran.error
    assert "does not accept the credentials of context test (expired token?)" in error
    assert "kubectl --context test auth whoami" in hint


def nobody_listens() -> str:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"https://127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: cluster_of(c).update(server=nobody_listens()), "connection refused"),
        (lambda c: cluster_of(c).update(server="https://nowhere.invalid"), "unknown host name"),
        (lambda c: cluster_of(c).pop("certificate-authority-data"), "is not accepted"),
        (
            lambda c: cluster_of(c).update(server=cluster_of(c)["server"].replace("https", "http")),
            "is not reachable",
        ),
    ],
    ids=["refused", "unknown name", "unknown authority", "no TLS"],
)
def test_a_server_that_cannot_be_reached(
    kubeconfig: Path, dynctl: Run, change: Change, says: str
) -> None:
    ran = dynctl(*VERIFY, "--kubeconfig", changed(kubeconfig, change))

    assert ran.code == 3
    assert "context test" in ran.error[0]
    assert says in ran.error[0]
    assert ran.error[1]


def test_a_server_without_a_response(plain: Simulation, dynctl: Run) -> None:
    plain.server.faults.hang("/version", 30)
    ran = dynctl(*VERIFY, "--timeout", "0.5")

    assert ran.code == 4
    assert ran.error[0].endswith("is not reachable: no response within 0.5 s")


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_that_is_ill_is_named(plain: Simulation, dynctl: Run, status: int) -> None:
    plain.server.faults.answer("", status, message="etcdserver: no leader")
    ran = dynctl(*VERIFY)

    assert ran.code == 3
    says = f"unexpected response to GET /version: etcdserver: no leader (HTTP {status})"
    assert ran.error[0] == f"test ({plain.server.url}): {says}"


def test_a_version_that_is_kept_secret_hinders_nothing(
    secure: Simulation, kubeconfig: Path, dynctl: Run
) -> None:
    secure.server.faults.answer("/version", 403)
    ran = dynctl(*VERIFY, "-o", "json")
    secure.server.faults.clear()

    assert ran.code == 0
    assert ran.checks["DYT0001"]["message"] == "version unknown"


@pytest.mark.parametrize("seconds", [30, 0], ids=["silent", "refused"])
def test_a_stopped_kubelet_is_named_and_asked_once(
    secure: Simulation, kubeconfig: Path, dynctl: Run, seconds: float
) -> None:
    nodes = {
        pod["metadata"]["name"]: pod["spec"]["nodeName"]
        for pod in secure.store.list("Pod", "prod")
        if "frontend" not in pod["metadata"]["name"]
    }
    node = nodes["my-llm-decode-a-0"]
    fault = secure.server.faults.stop_kubelet(node, seconds)
    ran = dynctl(*VERIFY, "--timeout", "2", "-o", "json")
    secure.server.faults.clear()

    reason = "no response within 2 s; the API server responds"
    if not seconds:
        refused = "dial tcp 192.0.2.7:10250: connect: connection refused"
        reason = f"error dialing backend: {refused}"
    there = sorted(name for name in nodes if nodes[name] == node)
    assert len(there) > 1
    silent = f"node {node} does not respond to exec ({reason}): {', '.join(there)} not read"
    assert ran.checks["DYT0503"]["message"] == f"files: {silent}"
    assert ran.checks["DYT0602"]["message"] == f"logs: {silent}"
    assert "is not reachable" not in ran.out
    assert fault.met == 1


# -- a cluster without Dynamo ----------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("-A",), ("--dgd", "my-llm")])
def test_no_definitions(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    with simulation(definitions=()) as sim:
        monkeypatch.setenv("KUBECONFIG", str(sim.viewer_kubeconfig(tmp_path / "k")))
        ran = dynctl(*VERIFY, *more)

    assert ran.code == 3
    assert ran.error[0].endswith(
        "serves no dynamographdeployments.nvidia.com: Dynamo is not installed"
    )
    assert "--kube-context NAME" in ran.error[1]


def test_definitions_and_no_graph_anywhere(plain: Simulation, dynctl: Run) -> None:
    here, everywhere = dynctl(*VERIFY), dynctl(*VERIFY, "-A")

    assert (here.code, everywhere.code) == (3, 3)
    assert here.error[0].startswith("no DynamoGraphDeployment in namespace default of test")
    assert here.error[1].startswith("no other namespace has one: kubectl apply -f FILE")
    assert everywhere.error[0].startswith("no DynamoGraphDeployment in any namespace of test")
    assert "-A" not in everywhere.error[1]


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (
            ("-n", "default"),
            "no DynamoGraphDeployment in namespace default of test",
            "graphs are in namespace prod: -n prod, or -A for all",
        ),
        (
            ("-n", "default", "--dgd", "my-llm"),
            "no DynamoGraphDeployment my-llm in namespace default of test",
            "it is in namespace prod: -n prod",
        ),
        (
            ("--dgd", "my-lm"),
            "no DynamoGraphDeployment my-lm in namespace prod of test",
            "existing: my-llm",
        ),
        (
            ("-n", "default", "--dgd", "my-lm"),
            "no DynamoGraphDeployment my-lm in namespace default of test",
            "existing: my-llm in prod",
        ),
        (
            ("-A", "--dgd", "my-lm"),
            "no DynamoGraphDeployment my-lm in any namespace of test",
            "existing: my-llm",
        ),
    ],
)
def test_missing_graphs_are_looked_up_in_other_namespaces(
    kubeconfig: Path, dynctl: Run, words: tuple[str, ...], error: str, hint: str
) -> None:
    ran = dynctl(*VERIFY, *words)

    assert ran.code == 3
    assert ran.error[0].startswith(error)
    assert ran.error[1] == hint


def test_a_namespace_that_does_not_exist(secure: Simulation, dynctl: Run, tmp_path: Path) -> None:
    """With permission to read namespaces the message is exact; a viewer has none."""
    administrator = secure.server.kubeconfig(tmp_path / "admin")
    viewer = secure.server.kubeconfig(tmp_path / "viewer", token=VIEWER_TOKEN)
    result = dynctl(*VERIFY, "-n", "nope", "--kubeconfig", administrator)
    without_permission = dynctl(*VERIFY, "-n", "nope", "--kubeconfig", viewer)

    graphs = "graphs are in namespace prod: -n prod, or -A for all"
    assert result.code == without_permission.code == 3
    assert result.error[1] == f"the namespace does not exist; {graphs}"
    assert without_permission.error[1] == graphs


def test_who_may_read_nothing_gets_no_answer(
    secure: Simulation, dynctl: Run, tmp_path: Path
) -> None:
    secure.server.add_user("nobody", "nobody")
    path = secure.server.kubeconfig(tmp_path / "nobody", token="nobody", namespace="prod")
    ran = dynctl(*VERIFY, "--kubeconfig", path)

    assert ran.code == 3
    error, hint = ran.error
    assert error.startswith("graphs and pods are not readable in namespace prod of test")
    assert error.endswith("no permission to list pods in prod (DYT0004)")
    assert "dynctl explain DYT0004" in hint


# -- what was typed --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--dgd", "My LLM)"), "--dgd 'My LLM)': invalid name of a DynamoGraphDeployment"),
        (("--dgd", ""), "--dgd '': invalid name of a DynamoGraphDeployment"),
        (("-n", "prod", "-A"), "-n prod and -A: one namespace, and all of them"),
        (("-n", "Prod!"), "-n Prod!: not a namespace name"),
        (("--fail-on", "error"), "--fail-on error: expected one of fail, skip, warn"),
        (("--exec", "some"), "--exec some: expected one of auto, all, sample, none"),
        (("--logs", "some"), "--logs some: expected one of auto, all, sample, none"),
        (("--suppress", "DYT9999"), "--suppress DYT9999: unknown code"),
        (("--suppress", "DYT0403="), "--suppress DYT0403=: no subject"),
        (("--probe", "-1"), "--probe '-1': expected at least 0"),
        (("--probe", "5000"), "--probe '5000': expected at most 1000"),
        (("--wait", "soon"), "'soon': expected a duration of"),
        (("--reach", "x"), "--reach x: expected one of auto, direct, port-forward"),
        (("--path", "/tmp", "-n", "prod", "-A"), "remove -n, -A"),
        (("--path", "/tmp", "--probe", "2"), "remove --probe"),
        (
            ("--path", "/tmp", "--domain", "../etc"),
            "--domain '../etc': expected the name of a file",
        ),
        (("--domain", "zone"), "--domain zone: only with --path DIR"),
        (("--demo",), "--demo: this deployment has no topology pipeline"),
        (("--view", "x.json"), "--view: this deployment has no topology pipeline"),
        (("-f", "x.yaml", "--dgd", "my-llm"), "--file checks manifests, not a cluster"),
        (("-f", "x.yaml", "-n", "prod"), "remove -n"),
        (("--discovery", "consul"), "--discovery consul: unknown discovery backend"),
        (("--discovery", "memory"), "--discovery memory: this discovery backend lives inside"),
    ],
)
def test_what_cannot_be_meant(
    kubeconfig: Path, dynctl: Run, words: tuple[str, ...], says: str
) -> None:
    ran = dynctl(*VERIFY, *words)

    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a: [unclosed", "manifest.yaml, line 2, column 1: invalid YAML"),
        (b"a: \xff\x80", "manifest.yaml"),
        (b"just words", "manifest.yaml"),
        (b"", "nothing to check: expected a DynamoGraphDeployment"),
        (b"kind: Pod\napiVersion: v1\nmetadata: {name: a}\n", "found Pod (v1)"),
    ],
)
def test_a_manifest_that_is_none(dynctl: Run, tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "manifest.yaml"
    path.write_bytes(content)
    ran = dynctl(*VERIFY, "-f", path)

    assert ran.code == 2
    assert says in ran.error[0]
