"""How long a command line takes, beside the import of its parser alone.

Whole processes, from fork to exit, each row's two sides in turn: help pages beside
``python -c 'import typer'``, and TAB for a command and for a live worker.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.bench.harness import Options, Row, alternate, row
from tests.http_servers import HttpServer

PARSER = ("-c", "import typer")
WORKERS = 64


def cpu_ms(arguments: tuple[str, ...]) -> float:
    """CPU milliseconds of one Python process."""
    return _once(arguments)[1]


def wall_ms(arguments: tuple[str, ...]) -> float:
    return _once(arguments)[0]


def _once(arguments: tuple[str, ...]) -> tuple[float, float]:
    started = time.perf_counter_ns()
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        wall = (time.perf_counter_ns() - started) / 1e6
        process.returncode = os.waitstatus_to_exitcode(status)
    assert output or arguments == PARSER, arguments
    return wall, (usage.ru_utime + usage.ru_stime) * 1e3


def rows(options: Options) -> Iterator[Row]:
    turns = 1 if options.smoke else 11
    for page, aim in (("", "0.67x"), ("route", "")):
        sides = (("-m", "dynctl", *page.split(), "--help"), PARSER)
        ours, peer = alternate([partial(cpu_ms, side) for side in sides], turns)
        name = " ".join(("dynctl", *page.split(), "--help"))
        yield row(f"{name}, CPU (peer: import typer)", "ms", ours, peer, aim)
    with tempfile.TemporaryDirectory() as folder, frontend() as url:
        config = Path(folder) / "config.toml"
        config.write_text(f"current = 'a'\n[contexts.a]\nfrontend = '{url}'\n", encoding="utf-8")
        os.environ |= {"DYNCTL_CONFIG": str(config), "_DYNCTL_COMPLETE": "complete_bash"}
        for line, what in (("dynctl work", "a command"), ("dynctl workers show w", "a worker")):
            words = line.split()
            os.environ |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
            (taken,) = alternate([partial(wall_ms, ("-m", "dynctl"))], turns)
            yield row(f"TAB for {what}, wall time", "ms", taken, aim="< 250")


@contextmanager
def frontend() -> Iterator[str]:
    """A server that answers ``GET /v1/workers`` as a frontend does."""
    workers = [
        {
            "name": f"worker-{number}",
            "worker_id": number,
            "model": "a-model",
            "role": "decode",
            "domains": {"zone": f"zone-{number % 4}"},
            "runtime_config": {"total_kv_blocks": 4096, "taints": [f"zone-{number % 4}"]},
            "ranks": [{"dp_rank": 0, "active_requests": 3, "cached_blocks": 1000}],
        }
        for number in range(WORKERS)
    ]
    body = json.dumps({"workers": workers}).encode()
    with HttpServer(lambda exchange: exchange.reply(body)) as server:
        yield server.url
