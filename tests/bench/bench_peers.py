"""What a frontend that starts has to read, with and without the index of another one.

    python -m tests.bench.bench_peers [--smoke]

Another process has four simulated engines and a frontend whose index is complete. Each engine has
published one batch of 32 blocks after another, as many as its replay socket keeps (16 MiB), or
more. Measured is a second frontend, from its start until the index of every rank is as complete as
it gets, and the CPU time of both processes meanwhile. *Complete* is the share of the blocks that it
has then.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from dynctl.serving.http.process import ServingProcess
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig
from dynctl.simulation.engine.cache_events import (
    CacheStored,
)
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.process import start_engine
from dynctl.tokenization import DEMO_MODEL_DIR, load_tokenizer
from tests.bench.harness import Row, bench_parser, print_table, row

ENGINES, BLOCKS, TOKENS = 4, 32, 16
#: Batches of an engine: as many as its replay socket keeps, and more.
KEPT, MORE = 4_000, 16_000


def prompt(number: int) -> CacheStored:
    """One prompt of new blocks."""
    draw = random.Random(number)
    hashes = tuple(draw.getrandbits(63) for _ in range(BLOCKS))
    tokens = tuple(draw.randbytes(BLOCKS * TOKENS))
    return CacheStored(None, hashes, tokens, None)


def config(workers: tuple[str, ...], *peers: str) -> FrontendConfig:
    return FrontendConfig(
        port=0,
        workers=workers,
        model_path=DEMO_MODEL_DIR,
        index_peers=peers,
        index_memory_bytes=1 << 40,
    )


def held(frontend: ServingProcess) -> int:
    router = frontend.service.router
    return sum(router.cached_blocks(slot) for slot in range(router.registry.capacity))


async def settled(frontend: ServingProcess) -> None:
    """Until no stream reads what its engine cached before, and everything read is applied."""
    runtime, router = frontend.fleet.index, frontend.service.router

    def reading() -> bool:
        slots = range(router.registry.capacity)
        return (
            runtime.waiting > 0
            or not all(state.connected for state in runtime.all_states().values())
            or any(router.freshness[slot].state == "recovering" for slot in slots)
        )

    while reading():  # noqa: ASYNC110  no event for it
        await asyncio.sleep(0.005)


async def serve(batches: int) -> None:
    """The process with the engines and the first frontend; ends with its standard input."""
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    engines = [
        await start_engine(
            EngineConfig(
                name=f"w{number}", total_blocks=batches * BLOCKS, kv_events_buffer_steps=100_000
            ),
            tokenizer,
        )
        for number in range(ENGINES)
    ]
    workers = tuple(f"{engine.url},name=w{n}" for n, engine in enumerate(engines))
    first = build_frontend(config(workers))
    await first.start()
    await settled(first)
    for at in range(batches):
        for number, engine in enumerate(engines):
            (publisher,) = engine.engine._publishers
            publisher.publish([prompt(at * ENGINES + number)])
        if at % 16 == 0:
            await asyncio.sleep(0)
    while held(first) < batches * BLOCKS * ENGINES:  # noqa: ASYNC110  no event for it
        await asyncio.sleep(0.01)
    print(json.dumps([first.url, workers]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await first.close()
    for engine in engines:
        await engine.close()


def cpu_of(process: int) -> float:
    """CPU seconds that a process took so far."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Start:
    """Seconds until clients are accepted and until the index is read, CPU seconds of both
    processes, blocks, batches that engines sent."""

    ready: float
    done: float
    own_cpu: float
    other_cpu: float
    blocks: int
    batches: int


async def start(other: int, workers: tuple[str, ...], *peers: str) -> Start:
    began, own_cpu, other_cpu = time.perf_counter(), time.process_time(), cpu_of(other)
    frontend = build_frontend(config(workers, *peers))
    await frontend.start()
    ready = time.perf_counter() - began
    await settled(frontend)
    done = time.perf_counter() - began
    batches = sum(state.batches for state in frontend.fleet.index.all_states().values())
    blocks = held(frontend)
    own_cpu, other_cpu = time.process_time() - own_cpu, cpu_of(other) - other_cpu
    await frontend.close()
    return Start(ready, done, own_cpu, other_cpu, blocks, batches)


def compared(batches: int) -> list[Row]:
    argv = [sys.executable, "-m", "tests.bench.bench_peers", "--serve", str(batches)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        url, workers = json.loads(process.stdout.readline())
        alone = uvloop.run(start(process.pid, tuple(workers)))
        helped = uvloop.run(start(process.pid, tuple(workers), url))
        assert process.stdin is not None
        process.stdin.close()
    all_blocks = batches * BLOCKS * ENGINES
    title = f"{all_blocks / 1e6:.2g}M blocks"
    rows = []
    for name, found in (("engines", alone), ("peer", helped)):
        of = f"{title}, from the {name}"
        rows += [
            row(f"{of}: clients are accepted after", "s", found.ready),
            row(f"{of}: index read after", "s", found.done),
            row(f"{of}: CPU of the frontend", "s", found.own_cpu),
            row(f"{of}: CPU of engines and peer", "s", found.other_cpu),
            row(f"{of}: batches read from engines", "", found.batches),
            row(f"{of}: complete", "%", 100 * found.blocks / all_blocks),
        ]
    return rows


def main() -> None:
    parser: argparse.ArgumentParser = bench_parser(__doc__)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        uvloop.run(serve(arguments.serve))
        return
    sizes = (40,) if arguments.smoke else (KEPT, MORE)
    print_table("a frontend starts", [one for size in sizes for one in compared(size)])


if __name__ == "__main__":
    assert Path(DEMO_MODEL_DIR).exists()
    main()
