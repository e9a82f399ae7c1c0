"""Every benchmark runs, in its smallest form. How fast anything is, is not tested."""

import json
import math
import subprocess
import sys
import tomllib
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


def test_a_dearer_request_fails_the_guard(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.bench import bench_frontend as bench
    from tests.bench.contestants import BARE, BY_LOAD, FLOOR

    committed = tomllib.loads(bench.GUARD.read_text(encoding="utf-8"))

    def results(times: float) -> bench.Results:
        bare, floor = bench.Result(1, 100.0, 1, 1), bench.Result(1, 50.0, 1, 1)
        return {
            case: {
                BY_LOAD: bench.Result(1, 100 * committed[section] * times, 1, 1),
                BARE: bare,
                FLOOR: floor,
            }
            for section, case in bench.GUARDED.items()
        }

    assert bench.guard(results(1 + bench.MARGIN - 0.01), quiet=True) == 0
    assert bench.guard(results(1 + bench.MARGIN + 0.01), quiet=True) == 1
    assert "free: CPU relative to bare aiohttp proxy: 2.26, expected < " in capsys.readouterr().out
    assert bench.guard(results(2.0), quiet=False) == 0
    assert "not judged" in capsys.readouterr().out
