"""The CPU time of what a router does for all of its workers at once, by turn of the event loop.

A frontend that does not listen, with 1,000 workers that do not exist; no requests, an empty index.
The longest turn, in milliseconds, best of some calls.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final
from unittest.mock import Mock

from dynctl.serving.engines.fleet import Member
from dynctl.serving.engines.worker_spec import WorkerSpec
from dynctl.serving.http.process import ServingProcess
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig
from router_core import LoadReported, ModelRuntimeConfig, Worker
from tests.bench.harness import Options, Row, row

_CALLS: Final = 7


def turns(work: Awaitable[Any]) -> list[float]:
    """The CPU time of each turn, in milliseconds. The work waits for nothing but its turns."""
    steps = work.__await__()
    taken: list[float] = []
    while True:
        began = time.thread_time()
        try:
            next(steps)
        except StopIteration:
            return [*taken, (time.thread_time() - began) * 1000]
        taken.append((time.thread_time() - began) * 1000)


def worker(number: int) -> Worker:
    card = ModelRuntimeConfig(
        total_kv_blocks=20_000,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        topology_domains={"zone": f"z{number % 8}", "rack": f"r{number % 40}"},
    )
    return Worker(number, f"w{number}", "m", runtime_config=card)


def filled(workers: int) -> ServingProcess:
    frontend = build_frontend(FrontendConfig(port=0, log_level="error"))
    fleet = frontend.fleet
    for number in range(1, workers + 1):
        joined = worker(number)
        assert frontend.service.membership.upsert(joined).ok
        frontend.service.apply(LoadReported(number, 0, 10, 10, 5))
        spec = WorkerSpec(f"http://127.0.0.1:{number}", joined.name, instance_id=number)
        member = Member(spec, "file", worker=joined, problem=None, probed=True)
        fleet._members[joined.name] = fleet._by_id[number] = member
    return frontend


async def measured(workers: int, calls: int) -> list[Row]:
    frontend = filled(workers)
    service, administration = frontend.service, frontend.administration

    async def health() -> None:
        service._health._evaluated = None
        await service.refresh_health()

    async def leave_and_join() -> None:
        service.membership.remove(5)
        await asyncio.sleep(0)
        assert service.membership.upsert(worker(5)).ok

    first, again = Mock(query={}), Mock(query={"cards": administration.feed.read().cards})
    jobs: dict[str, Callable[[], Awaitable[Any]]] = {
        "health": health,
        "GET /v1/workers": lambda: administration.control.workers(first),
        "GET /v1/fleet, next reading": lambda: administration.feed.handle(again),
        "GET /v1/fleet, first reading": lambda: administration.feed.handle(first),
        "GET /metrics": lambda: administration.metrics.handle(first),
        "a worker leaves and joins": leave_and_join,
    }
    taken = []
    for name, job in jobs.items():
        longest = min(max(turns(job())) for _ in range(calls))
        taken.append(row(f"{workers:,} workers, {name}: longest turn", "ms", longest, aim="< 10"))
    await frontend.close()
    return taken


def rows(options: Options) -> Iterator[Row]:
    yield from asyncio.run(measured(50, 1) if options.smoke else measured(1000, _CALLS))
