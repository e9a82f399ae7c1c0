"""A frontend before plain engines, beside two bare proxies and routers in Rust.

Four engines that cost nothing answer with 32 events, each a write of its own; prompts of about 140
and 2,000 tokens, no two equal; 64 streams, each sending its next request when the last is answered.
The frontend's process tree has one core, load generator and engines share the other. All
contestants run all the time and are measured one after the other, round by round. CPU is user and
system time of the process tree per finished request.

*Paced* means that the engines write an event every 2 ms, so that no contestant saves work by
passing on several events at once. Paced answers have 32 events, and 128: the difference is what a
chunk costs. The raw proxy is the floor: the reads and writes of uvloop, without routing, checks or
accounts.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import uvloop

from tests.bench import sse_upstream
from tests.bench.contestants import (
    BARE,
    BY_LOAD,
    ENGINES,
    FLOOR,
    LOAD_CORE,
    TOKENIZING,
    Contestant,
    commands,
    with_core,
)
from tests.bench.harness import Median, Options, Row, row
from tests.bench.load_generator import Measured, Prompts, load

PACE_S = 0.002
STREAMS = 64


@dataclass(frozen=True)
class Case:
    """One load: its name, prompt length in tokens, whether engines are paced, events an answer."""

    name: str
    tokens: int
    paced: bool = False
    chunks: int = sse_upstream.CHUNKS


FREE, PACED = Case("free", 140), Case("paced", 140, paced=True)
LONG, MANY_TOKENS = Case("paced, 128 events", 140, True, 128), Case("free, 2,000 tokens", 2000)


@dataclass(frozen=True)
class Result:
    """Medians over the rounds: CPU us a request, requests a second, ms to the first event."""

    cpu_us: Median
    rate: Median
    first_p50_ms: Median
    first_p99_ms: Median


Results = dict[Case, dict[str, Result]]


async def measure_all(
    cases: Sequence[Case],
    rounds: int,
    seconds: float,
    peers: Mapping[str, str],
    *,
    without: frozenset[str] = frozenset(),
    streams: int = STREAMS,
) -> Results:
    """Run every contestant on every case, but those ``without``."""
    pacer = sse_upstream.Pacer()
    engines = await sse_upstream.serve(pacer, ENGINES)
    urls = [f"http://127.0.0.1:{sse_upstream.port_of(engine)}" for engine in engines]
    prompts = {case.tokens: Prompts(case.tokens) for case in cases}
    results: Results = {}
    with ExitStack() as stack:
        running = []
        for command in commands(urls, peers):
            if command.name not in without:
                # Starting blocks, and the frontend asks our engines meanwhile.
                contestant = Contestant(command)
                running.append(await asyncio.to_thread(stack.enter_context, contestant))
        for case in cases:
            pacer.pace_s = PACE_S if case.paced else 0.0
            pacer.pieces = sse_upstream.pieces_of(case.chunks)
            windows: dict[str, list[Measured]] = {contestant.name: [] for contestant in running}
            for _ in range(rounds):
                for contestant in running:
                    measured = await load(
                        contestant.port,
                        prompts[case.tokens],
                        streams,
                        seconds,
                        cpu=contestant.cpu_s,
                        chunks=case.chunks,
                    )
                    windows[contestant.name].append(measured)
            results[case] = {name: summary(taken) for name, taken in windows.items()}
    for engine in engines:
        engine.close()
    return results


def summary(windows: Sequence[Measured]) -> Result:
    return Result(
        cpu_us=Median.of([window.cpu_us for window in windows]),
        rate=Median.of([window.rate for window in windows]),
        first_p50_ms=Median.of([window.quantile(0.5) for window in windows]),
        first_p99_ms=Median.of([window.quantile(0.99) for window in windows]),
    )


#: Peer -> the aim for the CPU of a request, free and paced.
_AIMS: Final = {
    BARE: ("1.11x", "1.33x"),
    FLOOR: ("", ""),
    "sglang-router": ("1x", "0.91x"),
    "smg": ("1.43x", "1.11x"),
}


def request_rows(case: Case, results: Mapping[str, Result]) -> Iterator[Row]:
    """What a request costs beside each peer."""
    ours = results[BY_LOAD]
    for peer, aims in _AIMS.items():
        if peer in results:
            aim = aims[case.paced] if case.tokens == FREE.tokens else ""
            name = f"{case.name}: CPU, beside {peer}"
            yield row(name, "us/req", ours.cpu_us, results[peer].cpu_us, aim)


def rows(options: Options) -> Iterator[Row]:
    rounds, seconds, streams = (1, 0.2, 4) if options.smoke else (6, 0.6, STREAMS)
    cases = [FREE, PACED, LONG, MANY_TOKENS]
    with_core(LOAD_CORE)
    results = uvloop.run(measure_all(cases, rounds, seconds, options.peers, streams=streams))
    for case in (FREE, PACED, MANY_TOKENS):
        yield from request_rows(case, results[case])
    tokens = results[MANY_TOKENS]
    more = tokens[TOKENIZING].cpu_us.value - tokens[BY_LOAD].cpu_us.value
    yield row(f"{MANY_TOKENS.name}: tokenizing and the index, on top", "us/req", more, aim="< 500")
    ours, bare = results[PACED][BY_LOAD], results[PACED][BARE]
    yield row(f"paced: first event p50, beside {BARE}", "ms", ours.first_p50_ms, bare.first_p50_ms)
    yield row(f"paced: first event p99, beside {BARE}", "ms", ours.first_p99_ms, bare.first_p99_ms)
    chunks = LONG.chunks - PACED.chunks
    chunk = {
        name: (long.cpu_us.value - results[PACED][name].cpu_us.value) / chunks
        for name, long in results[LONG].items()
    }
    for peer in (BARE, "sglang-router", "smg"):
        if peer in chunk:
            yield row(f"one chunk more, beside {peer}", "us", chunk[BY_LOAD], chunk[peer])
