"""Engines of SGLang: what they get where the client's own body would mean something else.

`tests/sglang` has the same against a real SGLang.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dynctl.serving.config import FrontendConfig
from dynctl.serving.http.router_server import RouterProcess
from dynctl.serving.http.server import Frontend
from tests.dynctl.serving.fleets import QUICK_HEALTH, Site, site
from tests.waiting import until

INFO = {"page_size": 16, "max_total_num_tokens": 16_000, "served_model_name": "tiny"}
MODELS = [{"id": "tiny", "max_model_len": 4096}, {"id": "tuned", "parent": "tiny"}]
PROMPT = [{"role": "user", "content": "x"}]
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"choices": []},
    "/v1/completions": {"choices": []},
    "/v1/messages": {"content": []},
    "/v1/responses": {"output": []},
}
FIELDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": PROMPT},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": PROMPT, "max_tokens": 1},
}
Seen = list[tuple[str, dict[str, Any]]]


@asynccontextmanager
async def engine(seen: Seen) -> AsyncIterator[str]:
    """The address of an engine that describes itself as SGLang does."""

    async def answer(request: web.Request) -> web.Response:
        if request.method == "POST":
            body = await request.json()
            if request.path == "/tokenize":
                return web.json_response({"tokens": list(range(40)), "count": 40})
            seen.append((request.path, body))
            return web.json_response(ANSWERS[request.path] | {"model": body["model"]})
        answers = {"/server_info": INFO, "/v1/models": {"data": MODELS}, "/health": {}}
        if request.path not in answers:
            raise web.HTTPNotFound
        return web.json_response(answers[request.path])

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


async def check(fleet: Site, seen: Seen) -> None:
    """Adapters are named as SGLang reads them, and all else is the client's body."""
    for path, fields in FIELDS.items():
        for model in ("tiny", "tuned"):
            status, answer, _ = await fleet.post(path, {"model": model, **fields})
            assert status == 200, answer
            got_path, got = seen.pop()
            assert got_path == path
            if model == "tiny":
                assert got == {"model": model, **fields}
            elif path == "/v1/messages":
                assert got == {"model": "tiny:tuned", **fields}
            else:
                assert got == {"model": model, **fields, "lora_path": "tuned"}
    body = {"model": "tuned", "input": "x"}
    status, answer, _ = await fleet.post("/v1/responses", body)
    assert (status, answer["error"]["param"], seen) == (501, "model", [])
    assert (await fleet.post("/v1/responses", body | {"model": "tiny"}))[0] == 200
    seen.clear()


async def test_adapters_are_named_as_sglang_reads_them() -> None:
    seen: Seen = []
    async with engine(seen) as url, site([], workers=(f"{url},name=e",), model_path=None) as fleet:
        await check(fleet, seen)


async def test_frontends_of_a_router_know_what_is_sglang() -> None:
    seen: Seen = []
    async with engine(seen) as url:
        router = RouterProcess(
            FrontendConfig(port=0, workers=(f"{url},name=e",), health=QUICK_HEALTH)
        )
        await router.start()
        try:
            await until(lambda: bool(router.service.models()))
            frontend = Frontend(FrontendConfig(port=0, router_url=router.url, health=QUICK_HEALTH))
            await frontend.start()
            try:
                async with aiohttp.ClientSession() as client:
                    await check(Site(frontend, client), seen)
            finally:
                await frontend.close()
        finally:
            await router.close()


@pytest.mark.parametrize("name", ["lora_path", "extra_key"])
async def test_keys_that_a_client_gives_to_sglang_are_a_doubt(name: str) -> None:
    seen: Seen = []
    async with engine(seen) as url, site([], workers=(f"{url},name=e",), model_path=None) as fleet:
        cases: tuple[tuple[dict[str, Any], bool], ...] = (({}, True), ({name: "k"}, False))
        for more, modelled in cases:
            body = {"model": "tiny", "messages": PROMPT, **more}
            _, result, _ = await fleet.post("/v1/route", body)
            notes = [doubt["what"] for doubt in result["doubts"]]
            assert any(name in note for note in notes) is not modelled, notes
