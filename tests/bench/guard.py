"""Fails where a request costs more beside the bare proxy than guard.toml allows.

    python -m tests.bench.guard [--peer NAME=PYTHON] [--rounds N]

`make bench-guard` runs it: the two loads of bench_frontend with 140 tokens, with more rounds.
"""

import argparse
import os
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import uvloop
from rich.console import Console

from tests.bench.__main__ import peer, table_of
from tests.bench.bench_frontend import FREE, PACED, Case, Results, measure_all
from tests.bench.contestants import BARE, BY_LOAD, LOAD_CORE, TOKENIZING, with_core
from tests.bench.harness import Row, row

GUARD: Final = Path(__file__).with_name("guard.toml")
#: Share above the committed ratio that fails.
MARGIN: Final = 0.15
#: Loads of the guard by their key in the file.
GUARDED: Final = {case.name: case for case in (FREE, PACED)}
#: The bare proxy costs a third more where chunks arrive one by one, and that varies between runs: a
#: request that got dearer is above the limit in each of so many.
TRIES: Final = 3
#: Load average above which other work changes what batches of chunks cost, and so the ratio.
IDLE: Final = 1.0
#: Seconds that the load of earlier suites gets to pass.
WAIT_S: Final = 90


def idle() -> bool:
    """Wait until the machine has no other work; False if it still has some after `WAIT_S`."""
    end = time.monotonic() + WAIT_S
    while os.getloadavg()[0] > IDLE:
        if time.monotonic() >= end:
            return False
        time.sleep(5)
    return True


def judged(results: Results, committed: Mapping[str, float]) -> list[Row]:
    """CPU of a request relative to the other contestants: of the bare proxy with the committed
    ratio plus the margin as aim."""
    rows = []
    for key, case in GUARDED.items():
        cpu = {name: result.cpu_us.value for name, result in results[case].items()}
        ours = cpu.pop(BY_LOAD)
        for name, theirs in cpu.items():
            aim = f"< {committed[key] * (1 + MARGIN):.2f}" if name == BARE else ""
            rows.append(row(f"{key}: CPU relative to {name}", "x", ours / theirs, aim=aim))
    return rows


def guard(results: Results, quiet: bool) -> int:
    """Show what a request costs relative to the others; 1 if it costs more than is committed.

    ``quiet``: the machine had no other work; else nothing is judged.
    """
    rows = judged(results, tomllib.loads(GUARD.read_text(encoding="utf-8")))
    Console(width=120).print(table_of("what a request costs", rows))
    if not quiet:
        print(f"not judged: the load average stayed above {IDLE} for {WAIT_S} s; run it alone")
        return 0
    dearer = [failed for failed in rows if failed.met is False]
    for failed in dearer:
        print(
            f"{failed.name}: {failed.value:.2f}, expected {failed.aim}. A request got dearer: make "
            f"it cheaper, or write the new ratio and its reason to {GUARD.name}"
        )
    return 1 if dearer else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="append", type=peer, default=[], metavar="NAME=PYTHON")
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    cases: list[Case] = list(GUARDED.values())
    without = frozenset({TOKENIZING})
    with_core(LOAD_CORE)
    quiet = idle()
    for _ in range(TRIES):
        measuring = measure_all(cases, arguments.rounds, 0.6, dict(arguments.peer), without=without)
        if guard(uvloop.run(measuring), quiet) == 0:
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
