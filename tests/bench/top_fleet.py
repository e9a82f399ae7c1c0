"""A frontend's endpoints over a synthetic fleet, for `bench_top`.

    python -m tests.bench.top_fleet WORKERS

Prints its URL and serves until SIGTERM. The router, its decisions and the
answers are the real ones; requests and engines are those of the embedded demo.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time

from aiohttp import web

from dynctl.serving.http.admin import Admin
from dynctl.serving.http.fleet_endpoints import FLEET_PATH, FleetFeed
from dynctl.serving.records.decision_memory import DecisionMemory
from dynctl.serving.records.metrics import Metrics
from dynctl.serving.routing.service import RoutingService
from dynctl.sources.demo.fleet import demo_worker
from dynctl.sources.demo.traffic import DemoTraffic
from router_core import RouterConfig, Worker

ZONES = "abcde"
#: Requests a second.
RATE = 10.0


def workers(count: int) -> list[Worker]:
    """A third of them prefill, over five zones."""
    return [
        demo_worker(
            "prefill" if number % 3 == 0 else "decode", ZONES[number % 5], number, number + 1
        )
        for number in range(count)
    ]


async def serve(count: int) -> None:
    now = 0.0

    def tick(to: float) -> None:
        nonlocal now
        now = to

    service = RoutingService(RouterConfig(), clock=lambda: now)
    memory = DecisionMemory()
    metrics = Metrics(service, router_id=1, memory=memory)
    service.observers += [metrics, memory]
    traffic = DemoTraffic(service, workers(count), tick, rate=RATE, events=False)
    feed = FleetFeed(
        service, memory, transfers=metrics.transfers, waiting=traffic.waiting,
        in_flight=lambda: traffic.in_flight,
    )  # fmt: skip
    app = web.Application()
    app.router.add_get(FLEET_PATH, feed.handle)
    app.add_routes(Admin(service, memory, preset="dynamo-1.6").routes())
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    traffic.start(0.0)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    print(f"http://127.0.0.1:{port}", flush=True)
    began = time.monotonic()
    while not ended.is_set():
        traffic.advance(time.monotonic() - began)
        await asyncio.sleep(0.1)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
