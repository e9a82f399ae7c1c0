"""Results of runs: one JSON file each in ``results/``, from which docs/benchmarks.md is made."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench.harness import Row

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = Path(__file__).with_name("results")
#: The cost of a request that was measured before results were files.
EARLIER: Final = RESULTS / "earlier.json"
#: Significant digits that are kept: the others are noise.
_DIGITS: Final = 4


@dataclass(frozen=True, slots=True)
class Bench:
    """The rows of one benchmark. ``load``: the load average before it; ``seconds``: its time."""

    rows: tuple[Row, ...]
    load: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run. ``commit``: with ``+`` where files differ from it; ``date``: UTC, to the minute;
    ``machine``: CPU model, cores and Python; ``peers``: peer -> version."""

    commit: str
    date: str
    machine: str
    peers: Mapping[str, str]
    benches: Mapping[str, Bench]


def machine() -> str:
    """The machine: the numbers mean nothing without it."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}"


def commit() -> str:
    """The commit that is measured, with ``+`` where files differ from it; "" outside a checkout."""
    argv = ["git", "describe", "--always", "--dirty=+", "--abbrev=8", "--exclude=*"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def version_of(peer: str, program: str) -> str:
    """The version of a peer: of the package in its Python, or of a program that prints it."""
    code = f"import importlib.metadata as m; print(m.version({peer!r}))"
    argv = [program, "--version"] if peer == "envoy" else [program, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    return next((part for part in words[-1].split("/") if part.count(".") == 2), words[-1])


def now() -> str:
    return time.strftime("%Y-%m-%dT%H%MZ", time.gmtime())


def save(run: Run, directory: Path = RESULTS) -> Path:
    """Write a run to its file; returns the path."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{run.date}-{run.commit.rstrip('+') or 'unknown'}.json"
    document = asdict(run)
    for bench in document["benches"].values():
        bench["rows"] = [_short(row) for row in bench["rows"]]
    path.write_text(_lines(document), encoding="utf-8")
    return path


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what it does not have, its numbers in `_DIGITS` digits."""
    short = {}
    for name, value in row.items():
        if isinstance(value, float):
            short[name] = float(f"{value:.{_DIGITS}g}")
        elif value is not None and (value or name == "unit"):
            short[name] = value
    return short


def _lines(document: dict[str, Any]) -> str:
    """JSON with a line for each row, so that a change shows the rows that changed."""
    benches = document.pop("benches")
    lines = [json.dumps(document, indent=1)[:-2] + ',\n "benches": {']
    for name, bench in benches.items():
        rows = bench.pop("rows")
        lines.append(f'  "{name}": {json.dumps(bench)[:-1]}, "rows": [')
        lines += [f"   {json.dumps(row)}," for row in rows]
        lines[-1] = lines[-1].removesuffix(",")
        lines.append("  ]},")
    lines[-1] = lines[-1].removesuffix(",")
    return "\n".join([*lines, " }", "}", ""])


def read(path: Path) -> Run:
    """The run of a file."""
    document = json.loads(path.read_text(encoding="utf-8"))
    document["benches"] = {
        name: Bench(tuple(Row(**row) for row in bench["rows"]), bench["load"], bench["seconds"])
        for name, bench in document["benches"].items()
    }
    return Run(**document)


def saved_runs(directory: Path = RESULTS) -> Sequence[Run]:
    """All saved runs, the oldest first."""
    paths = sorted(path for path in directory.glob("*.json") if path.name != EARLIER.name)
    return [read(path) for path in paths]
