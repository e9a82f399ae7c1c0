"""The simulator beside what it simulates: one workload through three fleets of the same engines.

`serve frontend` with engine processes and a Dynamo with mock workers run it in real time, the
simulator in virtual time. Errors of hit rates are judged with room for choices that timing changes;
errors of the median time to the first token are printed only, since a busy machine adds to it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import httpx

from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.replay.fleet import ReplayPolicy, SimulatedFleet, SimulatedWorker
from dynctl.simulation.replay.simulation import simulate
from dynctl.simulation.replay.workloads import generate, workload
from dynctl.wire.traces import TraceRequest
from router_core import RouterConfig
from tests.dynamo.client import tokens_of
from tests.dynamo.fleet import DYNAMO_PYTHON, TINY_MODEL, DynamoFleet, WorkerPlan
from tests.dynamo.processes import ProcessGroup
from tests.ports import free_port
from tests.waiting import until_now

WORKERS = 4
BLOCK = 16
#: Few enough that prefixes are evicted.
BLOCKS = 700
PREFILL_TOKENS_PER_S = 12_000.0
ITL_MS = 10.0
#: Difference of hit rates that is allowed; the aim is 0.01.
ALLOWED = 0.05
REQUESTS = 300

TRACE = list(
    generate(
        workload(
            "chat",
            [
                f"requests={REQUESTS}", "rate=14", "prompts=16", "prompt_tokens=480", "turns=3",
                "turn_tokens=100", "output_tokens=20", "think_s=2", "longest_tokens=2000",
            ],
        ),
        seed=5,
        block_size=BLOCK,
    )
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Share of prompt tokens that engines reused, and the median time to the first token.

    ``idle_s``: what one request needs beyond its engine's time where nothing else runs: clients,
    sockets and frontends are not simulated.
    """

    hit_rate: float
    ttft_s: float
    idle_s: float = 0.0


async def _send(
    client: aiohttp.ClientSession, url: str, request: TraceRequest, due: float, *, timed: bool
) -> tuple[int, int, float]:
    """Prompt tokens, those reused, and seconds to the first token: as a stream shows it, or, where
    ``timed``, as the frontend reports it (tokens of a mock worker have no text, and a stream of
    Dynamo begins with the first text)."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": tokens_of(request),
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
    }
    if timed:
        body["nvext"] = {"extra_fields": ["timing"]}
    else:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    began = time.perf_counter()
    first = None
    usage: dict[str, Any] = {}
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        if timed:
            document = await answer.json()
            usage, first = document["usage"], document["nvext"]["timing"]["ttft_ms"] / 1e3
        else:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if first is None and event.get("choices"):
                        first = time.perf_counter() - began
                    usage = event.get("usage") or usage
    assert first is not None
    details = usage.get("prompt_tokens_details") or {}
    return usage["prompt_tokens"], details.get("cached_tokens") or 0, first


async def _run(url: str, requests: Sequence[TraceRequest], *, timed: bool) -> Measured:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        short = [
            TraceRequest(0.0, f"idle-{number}", BLOCK, 2, (-1 - number,), BLOCK)
            for number in range(9)
        ]
        alone = [(await _send(client, url, one, 0.0, timed=timed))[2] for one in short]
        start = time.perf_counter() + 0.5 - requests[0].at
        sent = (_send(client, url, one, start + one.at, timed=timed) for one in requests)
        done = await asyncio.gather(*sent)
    prompt = sum(tokens for tokens, _, _ in done)
    cached = sum(tokens for _, tokens, _ in done)
    idle = median(alone) - BLOCK / PREFILL_TOKENS_PER_S
    return Measured(cached / prompt, median(first for _, _, first in done), idle)


def measure(url: str, *, timed: bool = False) -> Measured:
    return asyncio.run(_run(url, TRACE, timed=timed))


def simulated() -> Measured:
    engine = EngineConfig(
        block_size=BLOCK,
        total_blocks=BLOCKS,
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
        decode_itl_ms=ITL_MS,
    )
    workers = tuple(SimulatedWorker(number) for number in range(1, WORKERS + 1))
    result = simulate(TRACE, SimulatedFleet(workers, engine), ReplayPolicy("kv", RouterConfig()), 1)
    assert result.counts.finished == REQUESTS
    assert result.ttft_s.p50 is not None
    return Measured(result.cache.hit_rate, result.ttft_s.p50)


def compared(name: str, real: Measured, model: Measured, finding: Callable[[str], None]) -> None:
    points = (model.hit_rate - real.hit_rate) * 100
    finding(
        f"calibration, {REQUESTS} requests, {name}: hit rate {real.hit_rate:.1%}, simulated "
        f"{model.hit_rate:.1%} ({points:+.1f} points); median TTFT {real.ttft_s * 1e3:.1f} ms, "
        f"{real.idle_s * 1e3:.1f} ms of it when idle, simulated {model.ttft_s * 1e3:.1f} ms "
        f"({model.ttft_s / (real.ttft_s - real.idle_s) - 1:+.0%} of the rest)"
    )
    assert abs(points) <= ALLOWED * 100


def test_the_simulator_beside_serve_frontend_with_engine_processes(
    tmp_path: Path, finding: Callable[[str], None]
) -> None:
    group = ProcessGroup(tmp_path)
    try:
        engines = []
        for number in range(WORKERS):
            port = free_port()
            command = [
                sys.executable, "-m", "dynctl", "serve", "engine", "--port", str(port),
                "--name", f"engine-{number}", "--model", "tiny", "--model-path", str(TINY_MODEL),
                "--block-size", str(BLOCK), "--total-blocks", str(BLOCKS),
                "--prefill-tokens-per-s", f"{PREFILL_TOKENS_PER_S:g}",
                "--decode-itl-ms", f"{ITL_MS:g}",
            ]  # fmt: skip
            group.start(f"engine-{number}", command, _environment())
            engines.append(f"http://127.0.0.1:{port}")
        port = free_port()
        command = [sys.executable, "-m", "dynctl", "serve", "frontend", "--http-port", str(port)]
        command += [word for one in engines for word in ("--worker", one)]
        frontend = group.start("frontend", command, _environment())
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            assert frontend.alive, frontend.tail()
            try:
                loads = httpx.get(f"{url}/v1/fleet", trust_env=False).json()["loads"]
            except (httpx.HTTPError, KeyError, ValueError):
                return False
            # An engine that was not read yet has none.
            ranks = [rank for load in loads for rank in load.get("ranks", ())]
            return len(ranks) == WORKERS and all(one["index"] == "current" for one in ranks)

        until_now(ready, 60)
        compared("serve frontend", measure(url), simulated(), finding)
    finally:
        group.close()


def test_the_simulator_beside_a_dynamo_with_mock_workers(
    tmp_path: Path, finding: Callable[[str], None]
) -> None:
    timing = tmp_path / "timing.npz"
    write = (
        "import sys, numpy as np; path, speed, itl = sys.argv[1], *map(float, sys.argv[2:]);"
        "isl = np.linspace(0.0, 8192.0, 513); grid = np.linspace(0.0, 1e5, 5);"
        "np.savez(path, prefill_isl=isl, prefill_ttft_ms=isl / speed * 1e3,"
        " decode_active_kv_tokens=grid, decode_context_length=grid + 1,"
        " decode_itl=np.full((5, 5), itl))"
    )
    numbers = [f"{PREFILL_TOKENS_PER_S:g}", f"{ITL_MS:g}"]
    subprocess.run([DYNAMO_PYTHON, "-c", write, str(timing), *numbers], check=True)
    plans = [WorkerPlan(f"worker-{number}") for number in range(WORKERS)]
    arguments = ("--planner-profile-data", str(timing))
    with DynamoFleet(
        plans, worker_args=arguments, blocks=BLOCKS, block_size=BLOCK, speedup=1
    ) as fleet:
        compared("Dynamo", measure(fleet.frontend.url, timed=True), simulated(), finding)


def _environment() -> dict[str, str]:
    import os

    return {k: v for k, v in os.environ.items() if not k.startswith(("DYN", "ETCD", "NATS"))}
