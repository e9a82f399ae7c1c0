"""What `dynctl topology verify` costs on a large cluster: CPU, memory, requests.

    python -m tests.bench.bench_verify [--smoke]

The API server of the tests holds 2,000 nodes and 1,000 worker pods of one deployment; dynctl runs
as a process of its own, first without reading any pod, then with its sample. CPU and memory are
dynctl's alone; the time is the two together on one machine, so it says little.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.bench.harness import Row, bench_parser, print_table, row
from tests.kube import crds, deployment
from tests.kube.api_server import ApiServer, Ran

NODES, WORKERS = 2000, 1000


@contextmanager
def cluster(nodes: int, workers: int) -> Iterator[ApiServer]:
    """The healthy deployment of so many nodes and worker pods."""
    with ApiServer() as server:
        crds.install(server)
        bodies = deployment.scaled(nodes=nodes, workers=workers)
        for body in bodies:
            server.store.create(body)
        for (namespace, pod), files in deployment.files(bodies).items():
            answer = Ran(stdout=files["zone"].encode())
            server.exec_files[namespace, pod, "main"] = partial(_always, answer)
        for (namespace, pod), log in deployment.logs(bodies).items():
            server.logs[namespace, pod, "main", False] = log
        yield server


def _always(answer: Ran, _command: list[str]) -> Ran:
    return answer


def verify(server: ApiServer, kubeconfig: Path, name: str, options: Sequence[str]) -> list[Row]:
    """One run of the command, as four rows."""
    argv = [sys.executable, "-m", "dynctl", "topology", "verify", "--kubeconfig", str(kubeconfig)]
    server.requests.clear()
    began = time.perf_counter()
    with subprocess.Popen([*argv, *options], stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    took = time.perf_counter() - began
    if process.returncode != 0:
        raise SystemExit(f"dynctl topology verify ended with {process.returncode}")
    return [
        row(f"{name}: CPU", "s", usage.ru_utime + usage.ru_stime),
        row(f"{name}: peak memory", "MB", _megabytes(usage)),
        row(f"{name}: requests", "", float(len(server.requests))),
        row(f"{name}: time with the server beside it", "s", took),
    ]


def _megabytes(usage: resource.struct_rusage) -> float:
    return usage.ru_maxrss * 1024 / 1e6  # Linux reports KiB


def main() -> None:
    smoke = bench_parser(__doc__).parse_args().smoke
    nodes, workers = (40, 24) if smoke else (NODES, WORKERS)
    with tempfile.TemporaryDirectory() as folder, cluster(nodes, workers) as server:
        kubeconfig = server.kubeconfig(Path(folder) / "kubeconfig", namespace="prod")
        rows = verify(server, kubeconfig, "lists alone", ["--exec", "none", "--logs", "none"])
        rows += verify(server, kubeconfig, "with its sample", [])
    print_table(f"topology verify, {nodes:,} nodes, {workers:,} worker pods", rows)


if __name__ == "__main__":
    main()
