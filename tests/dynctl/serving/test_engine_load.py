"""The load of engines that are no simulation of ours: vLLM's metrics, and none at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dynctl.documents.fleet_load import joined_rows
from dynctl.serving.http.process import ServingProcess
from dynctl.serving.routing.config import HealthConfig
from router_core import ThresholdsSet
from tests.dynctl.serving.fleets import site, until
from tests.waiting import patience

QUICK = HealthConfig(interval_s=0.05, timeout_s=patience(1.0))


class Vllm:
    """Serves a model name and metrics; ``text`` None: has no metrics."""

    def __init__(self) -> None:
        self.text: str | None = self.metrics(waiting=4, usage=0.5)
        self.asked = 0
        self.url = ""

    @staticmethod
    def metrics(*, waiting: int, usage: float) -> str:
        return (
            f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}.0\n'
            f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage}\n'
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0\n'
        )

    def app(self) -> web.Application:
        async def health(_: web.Request) -> web.Response:
            return web.Response()

        async def models(_: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [{"id": "m"}]})

        async def metrics(_: web.Request) -> web.Response:
            self.asked += 1
            if self.text is None:
                raise web.HTTPNotFound
            return web.Response(text=self.text)

        app = web.Application()
        app.router.add_get("/health", health)
        app.router.add_get("/v1/models", models)
        app.router.add_get("/metrics", metrics)
        return app


@pytest.fixture
async def vllm() -> AsyncIterator[Vllm]:
    made = Vllm()
    async with TestServer(made.app()) as server:
        made.url = str(server.make_url("")).rstrip("/")
        yield made


def rank(frontend: ServingProcess) -> Any:
    read = frontend.administration.feed.read()
    (row,) = joined_rows(read.workers or (), read.loads)
    return row, row.ranks[0]


async def test_its_cache_and_its_queue_are_told(vllm: Vllm):
    async with site([], workers=(f"{vllm.url},name=v",), health=QUICK) as fleet:
        row, found = rank(fleet.frontend)
        assert row.runtime_config["total_kv_blocks"] == 1000
        assert (found.reported.kv_used_blocks, found.reported.waiting_requests) == (500, 4)
        assert found.load_age_s is not None
        vllm.text = vllm.metrics(waiting=0, usage=0.999)
        await until(lambda: rank(fleet.frontend)[1].reported.kv_used_blocks == 999)
        assert rank(fleet.frontend)[1].reported.waiting_requests == 0


async def test_a_threshold_counts_what_the_engine_says(vllm: Vllm):
    async with site([], workers=(f"{vllm.url},name=v",), health=QUICK) as fleet:
        limit = {"active_decode_blocks_threshold": 0.4}
        assert fleet.service.apply(ThresholdsSet("m", limit)).ok
        row, found = rank(fleet.frontend)
        assert row.busy
        assert "500 used KV blocks reported" in found.busy_reasons[0]


async def test_the_engines_size_replaces_a_typed_one_and_a_condition_says_so(vllm: Vllm):
    worker = f"{vllm.url},name=v,total-blocks=400"
    async with site([], workers=(worker,), health=QUICK) as fleet:
        row, found = rank(fleet.frontend)
        assert row.runtime_config["total_kv_blocks"] == 1000
        assert found.reported.kv_used_blocks == 500
        condition = fleet.service.conditions.get("SPEC_DIFFERS_FROM_ENGINE", "v")
        assert condition.message == (
            "total-blocks=400 is set and the engine reports 1000: the engine's value is used"
        )


async def test_an_engine_without_metrics_is_not_asked_all_the_time(vllm: Vllm):
    vllm.text = None
    async with site([], workers=(f"{vllm.url},name=v",), health=QUICK) as fleet:
        await until(lambda: vllm.asked >= 2)
        await asyncio.sleep(0.3)
        assert vllm.asked == 2
        _, found = rank(fleet.frontend)
        assert (found.reported.kv_used_blocks, found.reported.waiting_requests) == (None, None)
        assert found.load_age_s is None
