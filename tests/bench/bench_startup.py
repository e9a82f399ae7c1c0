"""How long a command line takes to say anything, beside the import of its parser alone.

    python -m tests.bench.bench_startup [--smoke]

Whole processes, from fork to exit, each row's two sides in turn: `dynctl --help` and the other
help pages beside ``python -c 'import typer'``, and what TAB asks for. Wall and CPU
time (user and system) of the same runs; the CPU time moves less on a busy machine.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.bench.harness import Row, bench_parser, print_table, row
from tests.http_servers import HttpServer

PARSER = ("-c", "import typer")
AIM = "0.67x"
WORKERS = 64


@dataclass(frozen=True, slots=True)
class Sample:
    """Milliseconds of one process; ``spoke``: it printed something."""

    wall: float
    cpu: float
    spoke: bool = True


def once(arguments: Sequence[str]) -> Sample:
    """One Python process, from fork to exit."""
    started = time.perf_counter_ns()
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        wall = (time.perf_counter_ns() - started) / 1e6
        process.returncode = os.waitstatus_to_exitcode(status)
    return Sample(wall, (used.ru_utime + used.ru_stime) * 1e3, bool(said))


def in_turn(sides: Sequence[Sequence[str]], turns: int) -> list[list[Sample]]:
    """The samples of each side, run one after the other; a first turn is not counted."""
    taken: list[list[Sample]] = [[] for _ in sides]
    for _ in range(turns + 1):
        for side, samples in zip(sides, taken, strict=True):
            samples.append(once(side))
    return [samples[1:] for samples in taken]


def middle(samples: Sequence[Sample]) -> Sample:
    """The median of each time."""
    return Sample(median(one.wall for one in samples), median(one.cpu for one in samples))


def help_rows(turns: int) -> list[Row]:
    """Ours beside the parser's import; a ratio of 0.67 is one and a half times as long."""
    rows: list[Row] = []
    pages = ("", "route", "serve frontend", "topology verify")
    for page in pages:
        sides = (("-m", "dynctl", *page.split(), "--help"), PARSER)
        ours, peer = map(middle, in_turn(sides, turns))
        name = " ".join(("dynctl", *page.split(), "--help"))
        aim = AIM if not page else ""
        rows.append(row(f"{name}, wall", "ms", ours.wall, peer.wall, aim))
        rows.append(row(f"{name}, CPU", "ms", ours.cpu, peer.cpu, aim))
    return rows


def completion_rows(turns: int) -> list[Row]:
    """What TAB waits for: words, a context of the file, a worker of 64 of a frontend. No peer."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, frontend() as url:
        config = Path(folder) / "config.toml"
        config.write_text(f"current = 'a'\n[contexts.a]\nfrontend = '{url}'\n", encoding="utf-8")
        os.environ["DYNCTL_CONFIG"] = str(config)
        os.environ["_DYNCTL_COMPLETE"] = "complete_bash"
        for line, what in (
            ("dynctl work", "a command"),
            ("dynctl serve frontend --rou", "an option"),
            ("dynctl context use a", "a context"),
            ("dynctl workers show w", f"one of {WORKERS} workers"),
        ):
            words = line.split()
            os.environ |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
            (samples,) = in_turn((("-m", "dynctl"),), turns)
            answered = 100 * sum(one.spoke for one in samples) / len(samples)
            rows.append(row(f"TAB for {what}, wall", "ms", middle(samples).wall, aim="< 250"))
            rows.append(row(f"TAB for {what}, CPU", "ms", middle(samples).cpu))
            rows.append(row(f"TAB for {what}, answered", "%", answered, aim="100"))
        del os.environ["_DYNCTL_COMPLETE"]
    return rows


@contextmanager
def frontend() -> Iterator[str]:
    """Something that answers ``GET /v1/workers`` as a frontend does."""
    rows = [
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
    body = json.dumps({"workers": rows}).encode()

    with HttpServer(lambda exchange: exchange.reply(body)) as server:
        yield server.url


def main() -> None:
    arguments = bench_parser(__doc__).parse_args()
    turns = 1 if arguments.smoke else 21
    print_table("start-up", [*help_rows(turns), *completion_rows(turns)])


if __name__ == "__main__":
    main()
