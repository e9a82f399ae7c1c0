"""Benchmarks, each in a process of its own: ``python -m tests.bench [NAME ..] [--save]``.

`make bench` runs all of them, `make bench BENCH=index` one, `make bench PEERS=1` the peers beside
ours, and SAVE=1 keeps the rows in a file of tests/bench/results, from which `make docs` makes
docs/benchmarks.md.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench import results
from tests.bench.harness import NAMES, Options, Row, in_own_process, rows_of


def table_of(name: str, rows: Sequence[Row]) -> Table:
    table = Table(title=name, title_justify="left")
    for column in ("what", "unit", "ours", "spread", "peer", "ratio", "aim"):
        table.add_column(column, justify="left" if column in ("what", "unit", "aim") else "right")
    for row in rows:
        table.add_row(
            row.name,
            row.unit,
            number(row.value),
            "" if row.spread is None else f"{row.spread:.0%}",
            "" if row.peer is None else number(row.peer),
            "" if row.ratio is None else f"{row.ratio:.2f}x",
            row.aim if row.met is not False else f"{row.aim} missed",
        )
    return table


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def run(names: Sequence[str], options: Options, *, save: bool) -> list[str]:
    """Run benchmarks one after the other, and show the rows of each; ``save`` keeps them, those of
    a run that is interrupted too. Returns those that failed."""
    versions = {name: results.version_of(name, path) for name, path in options.peers.items()}
    date, commit, machine = results.now(), results.commit(), results.machine()
    console = Console(width=120)
    console.print(f"{machine}, commit {commit or 'unknown'}", highlight=False)
    benches: dict[str, results.Bench] = {}
    failed = []
    for name in names:
        load, began = os.getloadavg()[0], time.monotonic()
        try:
            rows = in_own_process(rows_of, name, options)
        except Exception:
            console.print_exception(max_frames=5)
            failed.append(name)
            continue
        seconds = time.monotonic() - began
        benches[name] = results.Bench(rows, round(load, 1), round(seconds, 1))
        console.print(table_of(name, rows))
        console.print(f"{seconds:.0f} s, load average {load:.1f} before\n", highlight=False)
        if save:
            saved = results.save(results.Run(commit, date, machine, versions, benches))
            console.print(str(saved), highlight=False)
    return failed


def peer(text: str) -> tuple[str, str]:
    """NAME=PROGRAM. The path is made absolute, but no link is followed: a Python of an environment
    is one."""
    name, found, path = text.partition("=")
    if not found or not Path(path).exists():
        raise argparse.ArgumentTypeError(
            f"{text}: expected NAME=PROGRAM with a program that exists"
        )
    return name, str(Path(path).absolute())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--peer", action="append", type=peer, default=[], metavar="NAME=PROGRAM")
    parser.add_argument("--smoke", action="store_true", help="the smallest run of each")
    parser.add_argument("--save", action="store_true", help="keep the rows in tests/bench/results")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(NAMES)}")
    options = Options(arguments.smoke, dict(arguments.peer))
    if failed := run(arguments.names or NAMES, options, save=arguments.save):
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
