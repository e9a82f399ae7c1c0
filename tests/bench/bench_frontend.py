"""A frontend before plain engines, beside two bare proxies and three routers in Rust.

    python -m tests.bench.bench_frontend [--sglang-python PATH] [--smg-python PATH]
                                         [--vllm-python PATH] [--guard] [--smoke]

Four engines that cost nothing answer with 32 events, each a write of its own; prompts of about 140
and 2,000 tokens, no two equal; 1, 16, 64 and 256 streams, each sending its next request when the
last is answered. The frontend's process tree has one core, load generator and engines share the
other. All contestants run all the time and are measured one after the other, round by round;
medians of the rounds. CPU is user and system time of the process tree per finished request.

*Paced* means that the engines write an event every 2 ms, so that no contestant saves work by
passing on several events at once; the offered load is then the same for all that keep up. Paced
answers have 32 events, and 128: the difference is what a chunk costs. The raw proxy is the floor:
the reads and writes of uvloop, without routing, checks or accounts.

`--guard` measures the two loads of ``guard.toml`` only, and fails where a request costs more than
the file allows; `make bench-guard` runs it.
"""

import asyncio
import json
import os
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

import uvloop
from rich.console import Console
from rich.table import Table

from tests.bench import sse_upstream
from tests.bench.contestants import (
    BARE,
    BY_LOAD,
    FLOOR,
    LOAD_CORE,
    TOKENIZING,
    Contestant,
    commands,
    with_core,
)
from tests.bench.harness import Row, bench_parser, print_table, row
from tests.bench.load_generator import Measured, Prompts, load

ENGINES = 4
PACE_S = 0.002
ALONE = "load and engines alone"


@dataclass(frozen=True)
class Case:
    """One load: prompt length in tokens, concurrent streams, and whether engines are paced."""

    tokens: int
    streams: int
    paced: bool = False
    chunks: int = sse_upstream.CHUNKS

    def __str__(self) -> str:
        more = f", {self.chunks} chunks" if self.chunks != sse_upstream.CHUNKS else ""
        paced = ", paced" if self.paced else ""
        return f"{self.tokens:,} tokens, {self.streams} streams{paced}{more}"


@dataclass(frozen=True)
class Result:
    """Medians over the rounds: requests a second, CPU us a request, ms to the first event."""

    rate: float
    cpu_us: float
    first_p50_ms: float
    first_p99_ms: float


CASES = [Case(tokens, streams) for tokens in (140, 2000) for streams in (1, 16, 64, 256)]
PACED, LONG = Case(140, 64, paced=True), Case(140, 64, paced=True, chunks=128)
CASES += [PACED, LONG]
Results = dict[Case, dict[str, Result]]


async def measure_all(
    cases: Sequence[Case],
    rounds: int,
    seconds: float,
    peers: Mapping[str, str | None],
    without: frozenset[str] = frozenset(),
) -> Results:
    """Run every contestant on every case, but those ``without``."""
    pacer = sse_upstream.Pacer()
    engines = await sse_upstream.serve(pacer, ENGINES)
    urls = [f"http://127.0.0.1:{sse_upstream.port_of(engine)}" for engine in engines]
    prompts = {tokens: Prompts(tokens) for tokens in {case.tokens for case in cases}}
    taken: dict[Case, dict[str, list[Measured]]] = {}
    with ExitStack() as stack:
        running = []
        for command in commands(urls, peers):
            if command.name in without:
                continue
            contestant = Contestant(command)
            # Starting blocks, and the frontend asks our engines meanwhile.
            await asyncio.to_thread(contestant.__enter__)
            stack.callback(contestant.close)
            running.append(contestant)
        for case in cases:
            pacer.pace_s = PACE_S if case.paced else 0.0
            pacer.pieces = sse_upstream.pieces_of(case.chunks)
            of_case: dict[str, list[Measured]] = taken.setdefault(case, {})
            alone = sse_upstream.port_of(engines[0])
            first = await load(
                alone, prompts[case.tokens], case.streams, seconds, chunks=case.chunks
            )
            of_case[ALONE] = [first]
            for _ in range(rounds):
                for contestant in running:
                    measured = await load(
                        contestant.port,
                        prompts[case.tokens],
                        case.streams,
                        seconds,
                        cpu=contestant.cpu_s,
                        chunks=case.chunks,
                    )
                    of_case.setdefault(contestant.name, []).append(measured)
    for engine in engines:
        engine.close()
    return {
        case: {name: summary(windows) for name, windows in of_case.items()}
        for case, of_case in taken.items()
    }


def summary(windows: Sequence[Measured]) -> Result:
    return Result(
        rate=median(window.rate for window in windows),
        cpu_us=median(window.cpu_us for window in windows),
        first_p50_ms=median(window.quantile(0.5) for window in windows),
        first_p99_ms=median(window.quantile(0.99) for window in windows),
    )


def show(results: Results) -> None:
    """Every contestant's numbers, a section a case; then one JSON line."""
    table = Table(title="frontend before plain engines", title_justify="left")
    for column in ("load", "frontend"):
        table.add_column(column)
    for column in ("req/s", "CPU us/req", "first p50 ms", "first p99 ms"):
        table.add_column(column, justify="right")
    for case, by_name in results.items():
        for number, (name, result) in enumerate(by_name.items()):
            table.add_row(
                str(case) if number == 0 else "",
                name,
                f"{result.rate:,.0f}",
                "-" if name == ALONE else f"{result.cpu_us:,.0f}",
                f"{result.first_p50_ms:,.2f}",
                f"{result.first_p99_ms:,.2f}",
                end_section=number == len(by_name) - 1,
            )
    Console(width=110).print(table)
    plain = [
        {"load": str(case), "frontend": name, **asdict(result)}
        for case, by_name in results.items()
        for name, result in by_name.items()
    ]
    print(json.dumps({"frontends": plain}))


def rows_of(results: Results) -> list[Row]:
    """What the aims speak of: the loads with 64 streams, and what a chunk costs."""
    rows: list[Row] = []
    for case, by_name in results.items():
        if case.streams != 64:
            continue
        ours = by_name[BY_LOAD]
        # At most 1.1 times the CPU of sglang-router, 1.3 times where the engines do not pause.
        aim = "0.91x" if case.paced else "0.77x"
        for peer, cpu_aim in (("sglang-router", aim), ("smg", "1x"), ("vllm-router", "1x")):
            theirs = by_name.get(peer)
            if theirs is None:
                continue
            name = f"{case}: {peer}"
            rows.append(row(f"{name}, CPU", "us/req", ours.cpu_us, theirs.cpu_us, cpu_aim))
            if not case.paced:
                rows.append(row(name, "req/s", ours.rate, theirs.rate, "1x", better="higher"))
        for proxy in (BARE, FLOOR):
            theirs = by_name[proxy]
            rows.append(row(f"{case}: {proxy}, CPU", "us/req", ours.cpu_us, theirs.cpu_us))
        tokenizing = by_name[TOKENIZING].cpu_us - ours.cpu_us
        rows.append(row(f"{case}: tokenizing on top", "us/req", tokenizing))
    if PACED in results and LONG in results:
        chunk = {
            name: (long.cpu_us - results[PACED][name].cpu_us) / (LONG.chunks - PACED.chunks)
            for name, long in results[LONG].items()
        }
        rows += [
            row(f"one chunk more, paced: {name}", "us CPU", chunk[BY_LOAD], theirs)
            for name, theirs in chunk.items()
            if name not in (ALONE, BY_LOAD, TOKENIZING)
        ]
    return rows


GUARD: Final = Path(__file__).with_name("guard.toml")
#: Share above the committed ratio that fails.
MARGIN: Final = 0.15
#: Loads of the guard by their section in the file.
GUARDED: Final = {"free": Case(140, 64), "paced": PACED}


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
    """CPU of a request relative to the proxies: of the bare one with the committed ratio plus the
    margin as aim, of the floor without."""
    rows = []
    for section, case in GUARDED.items():
        cpu = {name: result.cpu_us for name, result in results[case].items()}
        bare, floor = (cpu[BY_LOAD] / cpu[proxy] for proxy in (BARE, FLOOR))
        limit = committed[section] * (1 + MARGIN)
        rows.append(row(f"{section}: CPU relative to {BARE}", "x", bare, aim=f"< {limit:.2f}"))
        rows.append(row(f"{section}: CPU relative to {FLOOR}", "x", floor))
    return rows


def guard(results: Results, quiet: bool) -> int:
    """Show what a request costs relative to the proxies; 1 if it costs more than is committed.

    ``quiet``: the machine had no other work; else nothing is judged.
    """
    rows = judged(results, tomllib.loads(GUARD.read_text(encoding="utf-8")))
    print_table("what a request costs", rows)
    if not quiet:
        print(f"not judged: the load average stayed above {IDLE} for {WAIT_S} s; run it alone")
        return 0
    dearer = [item for item in rows if item.met is False]
    for item in dearer:
        print(
            f"{item.name}: {item.ours:.2f}, expected {item.aim}. A request got dearer: make it "
            f"cheaper, or write the new ratio and its reason to {GUARD.name}"
        )
    return 1 if dearer else 0


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--sglang-python", help="a Python that has sglang-router installed")
    parser.add_argument("--smg-python", help="a Python that has smg installed")
    parser.add_argument("--vllm-python", help="a Python that has vllm-router installed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.6, help="of one measurement")
    parser.add_argument("--paced", action="store_true", help="only the loads of paced engines")
    parser.add_argument("--guard", action="store_true", help="fail if a request got dearer")
    arguments = parser.parse_args()
    cases, rounds, seconds = CASES, arguments.rounds, arguments.seconds
    if arguments.guard:
        cases = list(GUARDED.values())
    elif arguments.paced:
        cases = [PACED, LONG]
    if arguments.smoke:
        cases, rounds, seconds = [Case(140, 64)], 1, 0.2
    peers = {
        "sglang-router": arguments.sglang_python,
        "smg": arguments.smg_python,
        "vllm-router": arguments.vllm_python,
    }
    with_core(LOAD_CORE)
    if arguments.guard:
        quiet = idle()
        for _ in range(TRIES):
            results = uvloop.run(
                measure_all(cases, rounds, seconds, peers, frozenset({TOKENIZING}))
            )
            show(results)
            if guard(results, quiet) == 0:
                return 0
        return 1
    results = uvloop.run(measure_all(cases, rounds, seconds, peers))
    show(results)
    print_table("frontend at 64 streams, routed by load", rows_of(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
