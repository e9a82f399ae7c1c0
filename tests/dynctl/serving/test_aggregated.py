"""An aggregated fleet: chat and completions through the frontend, streamed and whole."""

import asyncio
from typing import Any

import pytest

from tests.dynctl.serving.fleets import WORDS, chat_body, site, text_of, until
from tests.waiting import patience

TWO = [{"name": "a0"}, {"name": "a1"}]


async def test_a_streamed_chat_is_answered_as_the_engine_sends_it():
    async with site(TWO) as fleet:
        status, events, headers = await fleet.stream(
            max_tokens=6, stream_options={"include_usage": True}
        )
        assert status == 200
        assert headers["content-type"].startswith("text/event-stream")
        assert events[-1] == "[DONE]"
        assert events[-2]["usage"]["completion_tokens"] == 6
        assert text_of(events)
        await fleet.idle()


async def test_output_tokens_are_counted_with_and_without_a_stream():
    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    timing: dict[str, Any] = {"nvext": {"extra_fields": ["timing"]}}
    plain: dict[str, Any] = {}
    async with site(TWO) as fleet:

        async def counted(tokens: int) -> None:
            line = b'dynamo_frontend_output_tokens_total{model="demo"} %d\n' % tokens
            async with asyncio.timeout(patience(10)):
                text = b""
                while line not in text:
                    _, text = await fleet.get("/metrics")

        for number, fields in enumerate((plain, usage, timing), 1):
            status, _, _ = await fleet.chat(max_tokens=5, **fields)
            assert status == 200
            await counted(5 * number)
        # Without usage each event of the stream counts, but not the role and [DONE].
        _, events, _ = await fleet.stream(max_tokens=5)
        await counted(15 + len(events) - 2)


@pytest.mark.seed("router-guide: deployments: Frontend-embedded")
@pytest.mark.seed("router-guide: topology: Aggregated")
async def test_a_chat_in_one_piece_and_its_headers():
    async with site(TWO) as fleet:
        status, body, headers = await fleet.post(
            "/v1/chat/completions",
            chat_body("hi", max_tokens=4),
            headers={"x-request-id": "mine-1"},
        )
        assert status == 200
        assert body["usage"]["completion_tokens"] == 4
        assert headers["x-request-id"] == "mine-1"
        assert body["id"] == "chatcmpl-mine-1"  # the engine got the id
        assert headers["x-dynctl-decision"]
        await fleet.idle()


async def test_completions_take_text_and_token_ids():
    async with site(TWO) as fleet:
        for prompt in ("once upon a time", [1, 2, 3, 4]):
            status, body, _ = await fleet.post(
                "/v1/completions", {"model": "demo", "prompt": prompt, "max_tokens": 3}
            )
            assert (status, body["usage"]["completion_tokens"]) == (200, 3)


@pytest.mark.seed("router-guide: modes: Frontend + KV (Aggregated)")
async def test_a_cached_prefix_brings_the_next_request_to_the_same_engine():
    async with site(TWO) as fleet:
        prompt = WORDS * 12
        _, first, _ = await fleet.chat(prompt, nvext={"extra_fields": ["worker_id", "timing"]})
        chosen = first["nvext"]["worker_id"]["decode_worker_id"]
        assert first["nvext"]["timing"]["kv_hit_rate"] == 0.0
        registry = fleet.service.router.registry
        slot = registry.slots(chosen)[0]
        await until(lambda: fleet.service.router.index.block_count(slot) > 5)
        for _ in range(3):
            _, again, _ = await fleet.chat(prompt, nvext={"extra_fields": ["worker_id", "timing"]})
            assert again["nvext"]["worker_id"]["decode_worker_id"] == chosen
            assert again["nvext"]["timing"]["kv_hit_rate"] > 0.9
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_models_and_readiness():
    async with site(TWO) as fleet:
        _, models = await fleet.get("/v1/models")
        assert [row["id"] for row in models["data"]] == ["demo"]
        assert (await fleet.get("/v1/models/demo"))[0] == 200
        assert (await fleet.get("/v1/models/demo/ready"))[1]["ready"] is True
        assert (await fleet.get("/v1/models/nope"))[0] == 404
        assert (await fleet.get("/live"))[0] == (await fleet.get("/health"))[0] == 200
        assert (await fleet.get("/ready"))[0] == 200
        status, rows = await fleet.get("/v1/workers")
        assert status == 200
        assert {row["name"]: row["status"] for row in rows["workers"]} == {
            "a0": "ready",
            "a1": "ready",
        }


async def test_adapters_are_routed_by_their_model_and_keep_their_prefixes_apart():
    async with site([{"name": "a0", "lora": ("tuned",)}]) as fleet:
        _, models = await fleet.get("/v1/models")
        assert [(row["id"], row.get("parent")) for row in models["data"]] == [
            ("demo", None),
            ("tuned", "demo"),
        ]
        body = chat_body(WORDS * 6, max_tokens=2)
        router = fleet.service.router
        slot = router.registry.slots(router.registry.by_name("a0").worker_id)[0]
        status, answer, _ = await fleet.post("/v1/chat/completions", {**body, "model": "tuned"})
        assert (status, answer["model"]) == (200, "tuned")
        await until(lambda: router.index.block_count(slot) > 3)
        for model, expected in (("tuned", True), ("demo", False)):
            _, result, _ = await fleet.post("/v1/route", {**body, "model": model})
            assert bool(result["decode"]["candidates"][0]["overlap_blocks"]) is expected
        assert (await fleet.get("/v1/models/tuned/ready"))[1]["ready"] is True
        assert (await fleet.post("/v1/route", {**body, "model": "other"}))[0] == 404


async def test_each_data_parallel_rank_has_a_cache_of_its_own():
    async with site([{"name": "a0", "data_parallel_size": 2}]) as fleet:
        router = fleet.service.router
        worker = router.registry.by_name("a0")
        slots = router.registry.slots(worker.worker_id)
        pin = {"decode_worker_id": worker.worker_id, "dp_rank": 1}
        await fleet.chat(WORDS * 6, max_tokens=2, nvext=pin)
        await until(lambda: router.index.block_count(slots[1]) > 3)
        assert router.index.block_count(slots[0]) == 0
        ids = {"extra_fields": ["worker_id"]}
        _, body, _ = await fleet.chat(WORDS * 6, max_tokens=2, nvext=ids)
        assert body["nvext"]["worker_id"]["decode_dp_rank"] == 1
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
