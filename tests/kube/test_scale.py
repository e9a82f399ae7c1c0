"""Verify on 2,000 nodes and 1,000 worker pods: the number of requests, not the time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from dynctl.base.options import GlobalOptions
from dynctl.verify.verification import VerifyOptions, run_verify
from tests.kube import crds, deployment
from tests.kube.api_server import ApiServer
from tests.kube.api_server.streams import Ran

NODES, WORKERS = 2000, 1000
PAGE = 500


@pytest.fixture(scope="module")
def large() -> Iterator[ApiServer]:
    with ApiServer() as server:
        crds.install(server)
        bodies = deployment.scaled(nodes=NODES, workers=WORKERS)
        for body in bodies:
            server.store.create(body)
        for (namespace, pod), files in deployment.files(bodies).items():
            content = files["zone"].encode()
            server.exec_files[namespace, pod, "main"] = partial(_cat, content)
        for (namespace, pod), log in deployment.logs(bodies).items():
            server.logs[namespace, pod, "main", False] = log
        yield server


def _cat(content: bytes, command: list[str]) -> Ran:
    assert command[0] in ("cat", "ls")
    return Ran(stdout=content if command[0] == "cat" else b"zone\n")


def requests(server: ApiServer, tmp_path: Path, wanted: VerifyOptions) -> Counter[str]:
    """Requests by what they are about; names of pods are left out."""
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", namespace="prod")
    server.requests.clear()
    report = run_verify(GlobalOptions(kubeconfig=kubeconfig), wanted)
    assert report.summary.failed == 0
    assert len(report.chain) == WORKERS
    return Counter(re.sub(r"/pods/[^/]+/", "/pods/NAME/", one.path) for one in server.requests)


def test_lists_are_read_in_pages_and_no_pod_is_read(large: ApiServer, tmp_path: Path) -> None:
    calls = requests(large, tmp_path, VerifyOptions(exec="none", logs="none"))
    forwards = calls.pop("/api/v1/namespaces/prod/pods/NAME/portforward", 0)

    assert calls["/api/v1/nodes"] == NODES // PAGE
    assert calls["/api/v1/namespaces/prod/pods"] <= (WORKERS + 10) // PAGE + 1
    assert not [path for path in calls if "/pods/" in path]
    assert calls.total() <= 60
    assert forwards <= 2 * 4  # four frontends, whatever the number of workers


def test_a_sample_reads_one_worker_a_component_and_domain(large: ApiServer, tmp_path: Path) -> None:
    calls = requests(large, tmp_path, VerifyOptions())

    # Prefill and decode in two zones; a file and its directory each.
    assert calls["/api/v1/namespaces/prod/pods/NAME/exec"] == 2 * 4
    assert calls["/api/v1/namespaces/prod/pods/NAME/log"] == 4
