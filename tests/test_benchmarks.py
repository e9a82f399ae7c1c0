"""Every benchmark runs, in its smallest form. How fast anything is, is not tested."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import patience

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "tests" / "bench").glob("bench_*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.bench.{name}", "--smoke"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = [row for result in results for row in result.get("rows", ())]
    assert rows, done.stdout
    assert all(math.isfinite(row["ours"]) for row in rows)


def test_all_benchmarks_are_part_of_the_run() -> None:
    from tests.bench.__main__ import NAMES as named

    assert sorted(f"bench_{name}" for name in named) == NAMES
