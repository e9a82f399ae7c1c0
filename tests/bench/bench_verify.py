"""What `dynctl topology verify` costs on a large cluster: CPU, memory, requests.

The API server of the tests holds 2,000 nodes and 1,000 worker pods of one deployment; dynctl runs
as a process of its own with its sample of pods. CPU and memory are dynctl's alone.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.bench.harness import Options, Row, row
from tests.kube import crds, deployment
from tests.kube.api_server import ApiServer, Ran

NODES, WORKERS = 2000, 1000


def fill(server: ApiServer, nodes: int, workers: int) -> None:
    """The healthy deployment of so many nodes and worker pods."""
    crds.install(server)
    bodies = deployment.scaled(nodes=nodes, workers=workers)
    for body in bodies:
        server.store.create(body)
    for (namespace, pod), files in deployment.files(bodies).items():
        answer = Ran(stdout=files["zone"].encode())
        server.exec_files[namespace, pod, "main"] = partial(_always, answer)
    for (namespace, pod), log in deployment.logs(bodies).items():
        server.logs[namespace, pod, "main", False] = log


def _always(answer: Ran, _command: list[str]) -> Ran:
    return answer


def rows(options: Options) -> Iterator[Row]:
    nodes, workers = (40, 24) if options.smoke else (NODES, WORKERS)
    with tempfile.TemporaryDirectory() as folder, ApiServer() as server:
        fill(server, nodes, workers)
        kubeconfig = server.kubeconfig(Path(folder) / "kubeconfig", namespace="prod")
        argv = [
            sys.executable,
            "-m",
            "dynctl",
            "topology",
            "verify",
            "--kubeconfig",
            str(kubeconfig),
        ]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, process.returncode
        name = f"{nodes:,} nodes, {workers:,} pods"
        yield row(f"{name}: CPU", "s", usage.ru_utime + usage.ru_stime)
        # Linux reports KiB.
        yield row(f"{name}: peak memory", "MB", usage.ru_maxrss * 1024 / 1e6)
        yield row(f"{name}: requests", "", float(len(server.requests)))
