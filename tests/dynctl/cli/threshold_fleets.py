"""Frontends whose load a test sets: ours with their handlers, Dynamo's as 1.6.1 was measured."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from dynctl.documents.workers import worker_rows
from dynctl.serving.http.admin import Admin
from dynctl.serving.http.errors import error_middleware
from dynctl.serving.records.decision_memory import DecisionMemory
from dynctl.serving.routing.service import RoutingService
from router_core import THRESHOLD_SETTINGS, Change, LoadReported, Worker
from tests.golden.fleets import worker
from tests.http_servers import Exchange, HttpServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Replica:
    """One frontend of ours. ``on_post``: what a POST to it gets instead of its own answer, by its
    number from 1; None lets it through."""

    def __init__(self, workers: Sequence[Worker], token: str | None) -> None:
        self.service = RoutingService(sample=lambda: 0.0)
        for one in workers:
            assert self.service.membership.upsert(one).ok
        self.token = token
        self.url = ""
        self.posts: list[str] = []
        #: The body of GET /metrics; None: 404.
        self.metrics: str | None = ""
        #: Called before the metrics are answered, with the number of the reading from 1.
        self.on_read: Callable[[int], None] = lambda number: None
        self.reads = 0
        self.on_post: Callable[[int], web.StreamResponse | None] = lambda number: None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.runner: web.AppRunner | None = None

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        app = web.Application(middlewares=[error_middleware, self._fails])
        app.add_routes(Admin(self.service, DecisionMemory(1 << 20), token=self.token).routes())
        app.router.add_get("/v1/workers", self._workers)
        app.router.add_get("/metrics", self._metrics)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    def apply(self, *changes: Change) -> None:
        """In the frontend's own thread, as its own events."""
        assert self.loop is not None

        async def applied() -> None:
            for change in changes:
                assert self.service.apply(change).ok

        asyncio.run_coroutine_threadsafe(applied(), self.loop).result(10)

    def report(self, worker_id: int, used: int, rank: int = 0) -> None:
        self.apply(LoadReported(worker_id, rank, kv_used_blocks=used))

    def stop(self) -> None:
        assert self.loop is not None
        asyncio.run_coroutine_threadsafe(self._stop(), self.loop).result(10)

    async def _stop(self) -> None:
        assert self.runner is not None
        for site in tuple(self.runner.sites):
            await site.stop()
        # A connection that was accepted just before gets its transport now, which cleanup closes.
        await asyncio.sleep(0.05)
        await self.runner.cleanup()
        await asyncio.sleep(0)

    def thresholds(self) -> dict[str, Any]:
        return self.service.router.busy.thresholds("tiny").to_dict()

    async def _workers(self, _: web.Request) -> web.Response:
        rows = worker_rows(self.service.router, self.service.clock())
        body = msgspec.json.encode({"workers": rows})
        return web.Response(body=body, content_type="application/json")

    async def _metrics(self, _: web.Request) -> web.Response:
        self.reads += 1
        self.on_read(self.reads)
        if self.metrics is None:
            raise web.HTTPNotFound
        return web.Response(text=self.metrics)

    @web.middleware
    async def _fails(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "POST":
            self.posts.append(request.path)
            instead = self.on_post(len(self.posts))
            if instead is not None:
                return instead
        return await handler(request)


class Replicas:
    """Frontends of ours, each with its own state, in a thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._replicas: list[Replica] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in self._replicas:
            one.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add(self, workers: Sequence[Worker] | None = None, token: str | None = None) -> Replica:
        made = Replica(FLEET if workers is None else workers, token)
        asyncio.run_coroutine_threadsafe(made.start(), self._loop).result(10)
        self._replicas.append(made)
        return made


#: Each with 4,096 KV blocks and 8,192 batched tokens; the last has two ranks.
FLEET = (worker("a", "aggregated", 1), worker("b", "aggregated", 2, ranks=2))
A, B = (one.worker_id for one in FLEET)


# -- Dynamo ----------------------------------------------------------------------------------------


class DynamoStandIn(HttpServer):
    """A Dynamo frontend that routes by kv over one aggregated worker, 7, of 100 blocks.

    As measured on 1.6.1: thresholds are stored at once and act when load is reported next; a worker
    that was over when it reported stays refused until it reports again. ``own``: prefill tokens
    that it counts itself. ``chats``: the dry runs that it got.
    """

    def __init__(self, *, kv: bool = True, model: str = "tiny") -> None:
        super().__init__()
        self.model = model
        self.kv = kv
        self.held: dict[str, Any] = dict.fromkeys(THRESHOLD_SETTINGS)
        self.used = 0
        self.own = 0
        self.latched = False
        self.chats: list[Mapping[str, Any]] = []

    def report(self, used: int) -> None:
        """The worker reports its used blocks: the only time at which it is judged."""
        fraction = self.held["active_decode_blocks_threshold"]
        self.used = used
        self.latched = fraction is not None and used > fraction * 100

    def metrics(self) -> str:
        lines = [
            f'dynamo_frontend_model_ready{{model="{self.model}"}} 1',
            f'dynamo_frontend_model_total_kv_blocks{{model="{self.model}"}} 100',
            f'dynamo_frontend_model_max_num_batched_tokens{{model="{self.model}"}} 8192',
        ]
        if self.kv:
            rank = 'dp_rank="0",worker_id="7",worker_type="decode"'
            lines += [
                'dynamo_component_router_worker_registered{dp_rank="0",router_worker_id="7",'
                'worker_type="decode"} 1',
                f"dynamo_frontend_worker_active_prefill_tokens{{{rank}}} {self.own}",
                f"dynamo_frontend_worker_active_decode_blocks{{{rank}}} 0",
            ]
        return "".join(f"{line}\n" for line in lines)

    def respond(self, exchange: Exchange) -> None:
        status, body = self._posted(exchange) if exchange.body else self._read(exchange.path)
        exchange.reply((body if isinstance(body, str) else json.dumps(body)).encode(), status)

    def _read(self, path: str) -> tuple[int, Any]:
        match path:
            case "/busy_threshold":
                return 200, {"thresholds": [{"model": self.model, **self.held}]}
            case "/metrics":
                return 200, self.metrics()
            case "/openapi.json":
                about = {"title": "NVIDIA Dynamo OpenAI Frontend", "version": "1.6.1"}
                return 200, {"info": about}
            case _:
                message = f"Route not found: GET {path}"
                return 404, {"message": message, "type": "Not Found", "code": 404}

    def _posted(self, exchange: Exchange) -> tuple[int, Any]:
        body = json.loads(exchange.body)
        if exchange.path == "/busy_threshold":
            self.held |= {
                k: v for k, v in body.items() if k in THRESHOLD_SETTINGS and v is not None
            }
            return 200, {"model": self.model, **self.held}
        self.chats.append(body["nvext"])
        if self.latched:
            overload = "Service temporarily overloaded"
            return 529, {"message": overload, "type": "Overloaded", "code": 529}
        return 200, {"nvext": {"worker_id": {"decode_worker_id": 7}}}
