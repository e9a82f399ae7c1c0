"""Every benchmark runs, in its smallest form. How fast anything is, is not tested."""

import asyncio
import math
import tomllib
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.bench.cpu_clock import CpuClock, CpuSelector
from tests.bench.harness import NAMES, Median, Options, Row, in_own_process, row, rows_of
from tests.bench.results import Bench, Run, read, save
from tests.docs.benchmarks_page import benchmarks_page

FILES = sorted((Path(__file__).parent / "bench").glob("bench_*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_runs(name: str) -> None:
    rows = in_own_process(rows_of, name, Options(smoke=True))
    assert rows
    assert all(math.isfinite(measured.value) for measured in rows)
    assert len({measured.name for measured in rows}) == len(rows)
    assert {measured.met for measured in rows} <= {True, False, None}


def test_time_passes_while_the_thread_works_and_where_it_waits() -> None:
    clock, taken = CpuClock(), []
    selector = CpuSelector(clock)
    selector.arrivals = arrivals = Mock(**{"due.return_value": 1 << 62})

    def arrive(_: int) -> bool:
        return not sum(range(300_000))  # work that takes no time

    async def measure() -> None:
        arrivals.arrive = arrive
        for wait_s in (100.0, 0.0):
            began, worked = clock.ns(), clock.worked()
            await asyncio.sleep(wait_s)
            taken.append((clock.ns() - began - (clock.worked() - worked)) / 1e9)

    loop = partial(asyncio.SelectorEventLoop, selector)
    with clock.installed(), asyncio.Runner(loop_factory=loop) as runner:
        runner.run(measure())
    assert taken == [pytest.approx(100.0, abs=1e-3), pytest.approx(0.0, abs=1e-3)]


def test_all_benchmarks_are_part_of_the_run() -> None:
    assert sorted(f"bench_{name}" for name in NAMES) == [path.stem for path in FILES]


def test_a_saved_run_is_read_again(tmp_path: Path) -> None:
    rows = (
        row("a request", "us", Median.of([2.0, 1.0, 4.0]), 3.0, "2x"),
        row("requests", "", 123456.0, None, "20,000", better="higher"),
    )
    run = Run(
        "12345678+", "2026-11-27T0255Z", "2 cores", {"smg": "1.13.0"}, {"b": Bench(rows, 1, 2)}
    )
    path = save(run, tmp_path)
    again = read(path)
    assert path.name == "2026-11-27T0255Z-12345678.json"
    assert again.benches["b"].rows[0] == Row("a request", "us", 2.0, 3.0, 1.5, 1.5, "2x")
    assert [measured.met for measured in again.benches["b"].rows] == [False, True]
    assert again.benches["b"].rows[1].value == 123500.0
    assert (again.commit, again.peers) == (run.commit, run.peers)


def test_the_page_is_short() -> None:
    assert len(benchmarks_page().splitlines()) <= 150


def test_a_dearer_request_fails_the_guard(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.bench import guard
    from tests.bench.bench_frontend import Result, Results
    from tests.bench.contestants import BARE, BY_LOAD, FLOOR

    committed = tomllib.loads(guard.GUARD.read_text(encoding="utf-8"))

    def costs(cpu_us: float) -> Result:
        return Result(Median(cpu_us), Median(1), Median(1), Median(1))

    def results(times: float) -> Results:
        return {
            case: {
                BY_LOAD: costs(100 * committed[key] * times),
                BARE: costs(100.0),
                FLOOR: costs(50.0),
            }
            for key, case in guard.GUARDED.items()
        }

    limit = committed["free"] * (1 + guard.MARGIN)
    assert guard.guard(results(1 + guard.MARGIN - 0.01), quiet=True) == 0
    assert guard.guard(results(1 + guard.MARGIN + 0.01), quiet=True) == 1
    judged = capsys.readouterr().out
    assert (
        f"free: CPU relative to bare aiohttp proxy: {limit * 1.16 / 1.15:.2f}, expected < "
        in judged
    )
    assert guard.guard(results(2.0), quiet=False) == 0
    assert "not judged" in capsys.readouterr().out
