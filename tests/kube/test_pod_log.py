"""The log of a worker's pod, as `top` shows it: bounded, safe on a terminal, or why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynctl.base.errors import DynctlError, Unreachable, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.documents.workers import WorkerRow
from dynctl.sources.dynamo.frontend_pods import LOG_LINES, pod_log
from dynctl.top.process_log import log_reader
from tests.dynctl.adapters.kube_lab import with_pods
from tests.kube.api_server import ApiServer


def options(kubeconfig: Path, namespace: str | None = "lab") -> GlobalOptions:
    return GlobalOptions(
        kubeconfig=kubeconfig, namespace=namespace, all_namespaces=namespace is None
    )


@pytest.mark.parametrize("namespace", ["lab", None])
def test_the_last_lines_of_a_pod(
    api_server: ApiServer, kubeconfig: Path, namespace: str | None
) -> None:
    with_pods(api_server, 1)
    text = "".join(f"line {number}\n" for number in range(1000))
    api_server.logs["lab", "w-00", "main", False] = text + "red \x1b[31m and\ttab\n"
    place, *lines = log_reader(options(kubeconfig, namespace))(
        WorkerRow("w-00", 1, "demo", "decode")
    )
    assert place == f"pod w-00, container main: the last {LOG_LINES} lines"
    assert len(lines) == LOG_LINES
    assert lines[-2:] == ["line 999", "red ?[31m and   tab"]


def test_a_log_without_lines_and_a_line_without_end(
    api_server: ApiServer, kubeconfig: Path
) -> None:
    with_pods(api_server, 2)
    assert pod_log(options(kubeconfig), "w-00") == ["pod w-00, container main: no lines yet"]
    api_server.logs["lab", "w-01", "main", False] = "x" * 1_000_000
    (_, line) = pod_log(options(kubeconfig), "w-01")
    assert len(line) == 2000


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("w-07", "not read: no pod w-07 in namespace lab"),
        ("Engine 7,metadata.name=w-00", "is not the name of a pod"),
    ],
)
def test_a_worker_without_a_pod_says_why(
    api_server: ApiServer, kubeconfig: Path, name: str, problem: str
) -> None:
    with_pods(api_server, 1)
    with pytest.raises(UsageProblem, match=problem):
        pod_log(options(kubeconfig), name)


def test_missing_permission_is_named(tmp_path: Path) -> None:
    with ApiServer(rbac=True) as server:
        with_pods(server, 1)
        server.add_user("t", "viewer")
        path = server.kubeconfig(tmp_path / "kubeconfig", token="t")
        with pytest.raises(Unreachable, match="not read: no permission to list pods in lab"):
            pod_log(options(path), "w-00")


def test_without_a_cluster_the_reason_and_the_way_are_named() -> None:
    row = WorkerRow("a", 1, "demo", "aggregated", endpoint="http://127.0.0.1:8101")
    with pytest.raises(DynctlError) as caught:
        log_reader(GlobalOptions(frontend=("http://127.0.0.1:8000",)))(row)
    assert caught.value.message.startswith(
        "not read: the router knows the worker at http://127.0.0.1:8101, not where its process"
    )
    assert "--kube-context NAME -n NAMESPACE" in caught.value.hint
