"""The CPU time of what a router does for all of its workers at once, by turn of the event loop.

    python -m tests.bench.bench_turns [--workers N]

A frontend that does not listen, with workers that do not exist; no requests, an empty index. Each
row: the longest turn and the sum of all turns, in milliseconds, best of some calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final
from unittest.mock import Mock

from dynctl.serving.engines.fleet import Member
from dynctl.serving.engines.worker_spec import WorkerSpec
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig
from router_core import LoadReported, ModelRuntimeConfig, Worker
from tests.bench.harness import Row, bench_parser, print_table, row

_CALLS: Final = 7


def turns(work: Awaitable[Any]) -> list[float]:
    """The CPU time of each turn, in milliseconds. The work waits for nothing but its turns."""
    steps = work.__await__()
    found: list[float] = []
    while True:
        began = time.thread_time()
        try:
            next(steps)
        except StopIteration:
            return [*found, (time.thread_time() - began) * 1000]
        found.append((time.thread_time() - began) * 1000)


def worker(number: int) -> Worker:
    card = ModelRuntimeConfig(
        total_kv_blocks=20_000,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        topology_domains={"zone": f"z{number % 8}", "rack": f"r{number % 40}"},
    )
    return Worker(number, f"w{number}", "m", runtime_config=card)


async def measure(workers: int, calls: int) -> list[Row]:
    frontend = build_frontend(FrontendConfig(port=0, log_level="error"))
    service, fleet = frontend.service, frontend.fleet
    for number in range(1, workers + 1):
        one = worker(number)
        assert service.upsert_worker(one).ok
        service.apply(LoadReported(number, 0, 10, 10, 5))
        spec = WorkerSpec(f"http://127.0.0.1:{number}", one.name, instance_id=number)
        member = Member(spec, "file", worker=one, problem=None, probed=True)
        fleet._members[one.name] = fleet._by_id[number] = member

    async def health() -> None:
        service._health._evaluated = None
        await service.refresh_health()

    async def leave_and_join() -> None:
        service.remove_worker(5)
        await asyncio.sleep(0)
        assert service.upsert_worker(worker(5)).ok

    first, next_one = (
        Mock(query={}),
        Mock(query={"cards": frontend.administration.feed.read().cards}),
    )
    jobs: dict[str, Callable[[], Awaitable[Any]]] = {
        "health": health,
        "GET /v1/workers": lambda: frontend.administration.control.workers(first),
        "GET /v1/fleet, next reading": lambda: frontend.administration.feed.handle(next_one),
        "GET /v1/fleet, first reading": lambda: frontend.administration.feed.handle(first),
        "GET /metrics": lambda: frontend.administration.metrics.handle(first),
        "a worker leaves and joins": leave_and_join,
    }
    rows: list[Row] = []
    for name, job in jobs.items():
        found = min((turns(job()) for _ in range(calls)), key=max)
        rows.append(row(f"{name}: longest turn", "ms CPU", max(found), aim="< 10"))
        rows.append(row(f"{name}: all turns", "ms CPU", sum(found)))
    await frontend.close()
    return rows


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    arguments = parser.parse_args()
    workers, calls = (50, 1) if arguments.smoke else (arguments.workers, _CALLS)
    print_table(f"turns of {workers:,} workers", asyncio.run(measure(workers, calls)))


if __name__ == "__main__":
    main()
