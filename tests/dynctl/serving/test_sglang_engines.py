"""Engines of SGLang: what they get where the client's own body would mean something else.

`tests/sglang` has the same against a real SGLang.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq.asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from dynctl.serving.engines.facts import build_worker, event_sources
from dynctl.serving.engines.worker_spec import parse_worker_spec
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.services.router_server import build_router
from dynctl.wire.engine_kinds.sglang.kind import facts_from_server_info
from tests.contract.zmq_publisher import ScriptedPublisher
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
        router = build_router(
            FrontendConfig(port=0, workers=(f"{url},name=e",), health=QUICK_HEALTH)
        )
        await router.start()
        try:
            await until(lambda: bool(router.service.models()))
            frontend = build_frontend(
                FrontendConfig(port=0, router_url=router.url, health=QUICK_HEALTH)
            )
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


async def test_endpoints_of_sglang_without_a_salt_take_no_salted_request() -> None:
    """They would answer from blocks that other clients share."""
    seen: Seen = []
    key = "sk-isolated-0123456"
    settings: dict[str, Any] = {"api_keys": (key,), "isolate_keys": True}
    bodies = {"/v1/messages": FIELDS["/v1/messages"], "/v1/embeddings": {"input": "x"}}
    async with engine(seen) as url:
        spec = f"{url},name=e"
        async with site([], workers=(spec,), model_path=None) as fleet:
            for path, fields in bodies.items():
                body = {"model": "tiny", "cache_salt": "mine", **fields}
                status, answer, _ = await fleet.post(path, body)
                assert (status, answer["error"]["param"]) == (501, "cache_salt"), path
        async with site([], workers=(spec,), model_path=None, **settings) as fleet:
            headers = {"authorization": f"Bearer {key}"}
            for path, fields in bodies.items():
                body = {"model": "tiny", **fields}
                assert (await fleet.post(path, body, headers=headers))[0] == 501, path
            assert not seen
            body = {"model": "tiny", **FIELDS["/v1/completions"]}
            assert (await fleet.post("/v1/completions", body, headers=headers))[0] == 200
            assert seen[-1][1]["cache_salt"]


def pairs(tokens: list[int], first: int, blocks: int) -> dict[str, Any]:
    """An event of blocks from number ``first`` on, as SGLang with EAGLE publishes it."""
    start = 16 * (first - 1)
    places = range(start, start + 16 * blocks)
    return {
        "type": "BlockStored",
        "block_hashes": [*range(first, first + blocks)],
        "parent_block_hash": first - 1 or None,
        "token_ids": [[tokens[i], tokens[i + 1]] for i in places],
        "block_size": 16,
        "medium": "GPU",
    }


async def test_prompts_match_the_caches_of_engines_with_eagle() -> None:
    """By what the events show, whatever the engine says about itself."""
    tokens = list(range(1000, 1066))
    context = zmq.asyncio.Context()
    publishers = [ScriptedPublisher(context), ScriptedPublisher(context)]
    sent = [0, 0]

    async def publish(number: int, *events: dict[str, Any]) -> None:
        payload = msgspec.msgpack.encode([1.0, events, 0])
        await publishers[number].send(sent[number], payload)
        sent[number] += 1

    async with engine([]) as url, engine([]) as other:
        workers = tuple(
            f"{address},name={name},kv-events={publisher.endpoint}"
            for address, name, publisher in zip((url, other), "ab", publishers, strict=True)
        )
        async with site([], workers=workers, model_path=None) as fleet:
            service = fleet.frontend.service

            async def cached() -> list[int]:
                await fleet.frontend.fleet.index.drained()
                _, answer, _ = await fleet.post("/v1/route", {"model": "tiny", "prompt": tokens})
                rows = sorted(answer["decode"]["candidates"], key=lambda row: row["worker"])
                return [row["overlap_blocks"] for row in rows]

            for publisher in publishers:
                await publisher.subscribed()
            await publish(0, pairs(tokens, 1, 2), pairs(tokens, 3, 1))
            await until(lambda: service.router.index.block_count(0) == 3)
            assert service.served.is_eagle("tiny")
            assert await cached() == [3, 0]
            single = {**pairs(tokens, 1, 2), "token_ids": tokens[:32]}
            await publish(1, single)
            await until(lambda: service.router.index.block_count(1) == 2)
            service.health()
            [mixed] = [one for one in service.conditions if one.code == "BLOCK_SIZE_MISMATCH"]
            assert (mixed.subject, "publishes single tokens" in mixed.message) == ("b", True)
            # The engines start again without EAGLE, and later with it.
            await publish(0, {"type": "AllBlocksCleared"}, single)
            await until(lambda: not service.served.is_eagle("tiny"))
            assert await cached() == [2, 2]
            assert all(one.code != "BLOCK_SIZE_MISMATCH" for one in service.conditions)
    for publisher in publishers:
        await publisher.die()
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("algorithm", "expected"), [("EAGLE3", True), ("NEXTN", True), ("NGRAM", False), (None, False)]
)
def test_the_description_of_an_engine_with_eagle(algorithm: str | None, expected: bool) -> None:
    facts = facts_from_server_info({**INFO, "speculative_algorithm": algorithm}, "127.0.0.1")
    spec = parse_worker_spec("http://127.0.0.1:1,name=a,kv-events=tcp://*:5557")
    worker = build_worker(spec, facts, model="m", block_size=16)
    assert worker.runtime_config.enable_eagle is expected
    [source] = event_sources(spec, facts, worker)
    assert source.expects_pairs is expected


async def test_an_answer_states_that_a_parent_is_missing_until_it_arrives() -> None:
    tokens = list(range(1000, 1040))
    context = zmq.asyncio.Context()
    publisher = ScriptedPublisher(context)

    def stored(name: int) -> dict[str, Any]:
        start = 16 * (name - 1)
        return {
            "type": "BlockStored",
            "block_hashes": [name],
            "parent_block_hash": name - 1 or None,
            "token_ids": tokens[start : start + 16],
            "block_size": 16,
        }

    async with engine([]) as url, engine([]) as other:
        workers = (f"{url},name=a,kv-events={publisher.endpoint}", f"{other},name=b")
        async with site([], workers=workers, model_path=None) as fleet:
            router = fleet.frontend.service.router

            async def route() -> tuple[str, int, str, str]:
                body = {"model": "tiny", "prompt": tokens}
                _, answer, _ = await fleet.post("/v1/route", body)
                [row] = [one for one in answer["decode"]["candidates"] if one["worker"] == "a"]
                doubts = [one["what"] for one in answer["doubts"] if one["code"] == "DYR0705"]
                async with fleet.client.get(fleet.url("/v1/workers")) as read:
                    [listed] = [w for w in (await read.json())["workers"] if w["name"] == "a"]
                state = listed["ranks"][0]["index"]
                return row["index"], row["overlap_blocks"], " ".join(doubts), state

            await publisher.subscribed()
            await publisher.send(0, msgspec.msgpack.encode([1.0, [stored(2)], 0]))
            await until(lambda: bool(router.index.detached))
            index, blocks, doubts, state = await route()
            assert (index, blocks, state) == ("degraded", 0, "unlinked")
            assert "it stores blocks after a block that its events do not name" in doubts
            await publisher.send(1, msgspec.msgpack.encode([2.0, [stored(1)], 0]))
            await until(lambda: router.index.block_count(0) == 2)
            assert await route() == ("exact", 2, "", "current")
    await publisher.die()
    context.destroy(linger=0)
