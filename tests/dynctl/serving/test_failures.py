"""Engines that refuse, die, hang or come back; clients that leave. Load always returns to zero."""

import asyncio
import random
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dynctl.base.options import GlobalOptions
from dynctl.findings.report import Report
from dynctl.health.checks.run import judge
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.process import start_engine
from dynctl.sources.dynamo.check_facts import gather
from router_core import Booked
from tests.dynctl.serving.fleets import (
    QUICK_ENGINE,
    SLOW_HEALTH,
    TOKENIZER,
    WORDS,
    chat_body,
    site,
    text_of,
    until,
    zone,
)
from tests.dynctl.serving.test_remote import several
from tests.waiting import patience

TWO = [{"name": "a0"}, {"name": "a1"}]
IDS = {"extra_fields": ["worker_id"]}


def set_fault(fleet, name, **faults):
    fleet.engines[name].engine.faults.update(faults)


async def checked(fleet) -> Report:
    """What `dynctl check --frontend URL` reports."""
    options = GlobalOptions(frontend=(fleet.frontend.url,))
    return judge(await asyncio.to_thread(gather, options))


def unavailable(fleet, name):
    registry = fleet.service.router.registry
    worker = registry.by_name(name)
    return None if worker is None else registry.unavailable_reason(worker.worker_id)


async def test_an_engine_that_is_gone_is_ejected_by_the_first_request_and_another_answers():
    async with site(TWO, health=SLOW_HEALTH, api_token="t0k") as fleet:
        await fleet.engines["a0"].close()
        await fleet.engines["a1"].close()
        fleet.client.headers["authorization"] = "Bearer t0k"
        engine = await start_engine(EngineConfig(**QUICK_ENGINE, name="a2"), TOKENIZER)
        try:
            await fleet.post("/v1/workers", {"url": engine.url, "name": "a2"})
            for _ in range(4):
                status, body, _ = await fleet.chat(max_tokens=2, nvext=IDS)
                assert status == 200, body
            gone = [unavailable(fleet, n) for n in ("a0", "a1")]
            assert any(gone)
            assert all("refused the connection" in reason for reason in gone if reason)
        finally:
            await engine.close()


async def test_when_no_engine_is_left_the_refusal_says_who_failed_and_how():
    async with site(TWO) as fleet:
        for engine in fleet.engines.values():
            await engine.close()
        status, body, headers = await fleet.chat()
        assert status == 503
        details = body["error"]["dynctl"]
        assert details["filter"] == "available"
        assert {row["worker"] for row in details["rejected"]} == {"a0", "a1"}
        assert "refused the connection" in details["rejected"][0]["message"]
        assert "responding again" in details["what_would_admit"]
        assert int(headers["retry-after"]) >= 1
        await fleet.idle()


async def test_an_error_before_the_first_token_is_retried_elsewhere():
    async with site(TWO) as fleet:
        set_fault(fleet, "a0", refuse=500)
        set_fault(fleet, "a1", refuse=0)
        for _ in range(6):
            status, events, _ = await fleet.stream(max_tokens=3)
            assert status == 200
            assert events[-1] == "[DONE]"
        await fleet.idle()


async def test_the_engines_own_words_come_back_when_all_of_them_fail():
    async with site(TWO, health=SLOW_HEALTH) as fleet:
        for name in fleet.engines:
            set_fault(fleet, name, refuse=503)
        status, body, _ = await fleet.chat()
        assert status == 503
        assert "refuses requests" in body["error"]["message"]
        assert {row["worker"] for row in body["error"]["dynctl"]["attempts"]} == {"a0", "a1"}
        await fleet.idle()


NO_EVENTS = {"kv_events": "", "replay": ""}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [400, 500, 503])
async def test_an_engine_that_answers_only_errors_earns_no_cache_credit(stream: bool, status: int):
    """With estimated caches repeated prompts would be drawn to it until it is ejected."""
    engines = [{"name": "a0", **NO_EVENTS}]
    async with site(engines, health=SLOW_HEALTH) as fleet:
        set_fault(fleet, "a0", refuse=status)
        router = fleet.service.router

        async def asked() -> int:
            body = chat_body(f"same {WORDS}", max_tokens=2, stream=stream)
            answer, _, _ = await fleet.post("/v1/chat/completions", body)
            return answer

        async with asyncio.TaskGroup() as group:  # at the same time, and one after the other
            tasks = [group.create_task(asked()) for _ in range(2)]
        assert 200 not in {task.result() for task in tasks}
        assert await asked() != 200
        await fleet.idle()
        assert router.cached_blocks(0) == 0
        set_fault(fleet, "a0", refuse=0)
        member = fleet.frontend.fleet.get("a0")
        assert member is not None
        member.probe_now.set()
        await until(lambda: unavailable(fleet, "a0") is None)
        async with asyncio.timeout(patience(10)):
            while await asked() != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert router.cached_blocks(0) > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_a_client_left_before_its_output_earns_no_cache_credit(stream: bool):
    engines = [{"name": "a0", **NO_EVENTS, "speedup_ratio": 1.0, "prefill_tokens_per_s": 1.0}]
    async with site(engines, health=SLOW_HEALTH) as fleet:
        body = chat_body(f"same {WORDS}", max_tokens=2, stream=stream)
        task = asyncio.create_task(fleet.post("/v1/chat/completions", body))
        await until(lambda: fleet.load()["a0"][0] == 1)
        assert fleet.service.router.cached_blocks(0) > 0, "the next one would be sent there too"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await fleet.idle()
        assert fleet.service.router.cached_blocks(0) == 0


async def test_the_router_of_several_frontends_gives_no_credit_for_errors_either():
    engines = ({"name": "a0", **NO_EVENTS},)
    async with several(engines, router={"health": SLOW_HEALTH}) as fleet:
        fleet.engines["a0"].engine.faults.update({"refuse": 400})
        for site_ in fleet.frontends:
            status, _, _ = await site_.chat(f"same {WORDS}")
            assert status == 400
        await until(lambda: fleet.booked() == 0)
        assert fleet.router.service.router.cached_blocks(0) == 0
        fleet.engines["a0"].engine.faults.update({"refuse": 0})
        status, _, _ = await fleet.frontends[0].chat(f"same {WORDS}")
        assert status == 200
        assert fleet.router.service.router.cached_blocks(0) > 0


async def test_a_clients_mistake_is_answered_by_the_engine_and_not_retried():
    async with site(TWO) as fleet:
        status, body, _ = await fleet.chat(stop=5)
        assert status == 400
        assert len(body["error"]["dynctl"]["attempts"]) == 1
        assert "stop" in body["error"]["message"]
        assert (await fleet.chat())[0] == 200
        assert unavailable(fleet, "a0") is None
        await fleet.idle()


async def test_a_stream_that_breaks_ends_with_an_error_event():
    async with site([{"name": "a0"}]) as fleet:
        set_fault(fleet, "a0", die_mid_stream_after=3)
        status, events, _ = await fleet.stream(max_tokens=20)
        assert status == 200
        assert text_of(events)  # what came before the break was passed on
        assert events[-1]["error"]["type"] == "upstream_error"
        await fleet.idle()


async def test_a_client_that_leaves_stops_the_engine():
    async with site([{"name": "a0", "speedup_ratio": 1.0, "decode_itl_ms": 50.0}]) as fleet:
        body = chat_body("hi", stream=True, max_tokens=500)
        async with fleet.client.post(fleet.url("/v1/chat/completions"), json=body) as answer:
            await answer.content.readany()
            assert fleet.load()["a0"][0] == 1
            assert fleet.engines["a0"].engine.active_requests == 1
        await fleet.idle()
        await until(lambda: fleet.engines["a0"].engine.active_requests == 0)


async def test_a_client_that_leaves_before_the_first_token_stops_the_engine():
    async with site([{"name": "a0", "speedup_ratio": 1.0, "prefill_tokens_per_s": 2.0}]) as fleet:
        body = chat_body(WORDS, stream=True)
        with pytest.raises(TimeoutError):
            await fleet.client.post(
                fleet.url("/v1/chat/completions"),
                json=body,
                timeout=aiohttp.ClientTimeout(total=0.3),
            )
        await fleet.idle()
        await until(lambda: fleet.engines["a0"].engine.active_requests == 0)


async def test_an_engine_that_comes_back_starts_with_an_empty_index():
    async with site([{"name": "a0"}]) as fleet:
        router = fleet.service.router
        await fleet.chat(WORDS * 8)
        slot = router.registry.slots(router.registry.by_name("a0").worker_id)[0]
        await until(lambda: router.index.block_count(slot) > 0)
        old = fleet.engines["a0"]
        port = old.engine.port
        await old.close()
        await until(lambda: unavailable(fleet, "a0") is not None)
        assert router.index.block_count(slot) == 0  # its process is gone, and its cache with it
        again = await start_engine(EngineConfig(**QUICK_ENGINE, name="a0", port=port), TOKENIZER)
        try:
            await until(lambda: unavailable(fleet, "a0") is None)
            assert router.index.block_count(slot) == 0
            status, _, _ = await fleet.chat(WORDS * 8)
            assert status == 200
            await until(lambda: router.index.block_count(slot) > 0)
        finally:
            await again.close()


async def test_an_engine_that_was_only_unwell_keeps_its_index():
    async with site([{"name": "a0", "replay": ""}]) as fleet:
        router = fleet.service.router
        await fleet.connected()
        await fleet.chat(WORDS * 8)
        slot = router.registry.slots(router.registry.by_name("a0").worker_id)[0]
        await until(lambda: router.index.block_count(slot) > 5)
        held = router.index.block_count(slot)
        set_fault(fleet, "a0", refuse=500)
        await until(lambda: unavailable(fleet, "a0") == "/health returned status 500")
        set_fault(fleet, "a0", refuse=0)
        await until(lambda: unavailable(fleet, "a0") is None)
        assert router.index.block_count(slot) == held


async def test_decode_workers_that_go_between_the_hops_move_the_pair_to_the_other_zone():
    engines = [
        {"name": f"{role}-{z}0", "role": role, **zone(f"zone-{z}")}
        for z in "ab"
        for role in ("prefill", "decode")
    ]
    # Zone a's prefill is slow, so that its decode worker can go while it runs.
    async with site(engines, health=SLOW_HEALTH) as fleet:
        set_fault(fleet, "prefill-a0", slow_factor=400.0)
        registry = fleet.service.router.registry
        pinned = registry.by_name("prefill-a0").worker_id
        # Only the first choice goes to zone a: zone b looks loaded until then.
        busy = registry.by_name("prefill-b0").worker_id
        fleet.service.apply(Booked("other", "prefill", busy, 0, prefill_tokens=10_000))
        sent = asyncio.create_task(fleet.chat(WORDS * 8, max_tokens=3, nvext=IDS))
        await until(lambda: fleet.engines["prefill-a0"].engine.active_requests == 1)
        await fleet.frontend.fleet.remove("decode-a0")
        fleet.service.free("other")
        status, body, _ = await sent
        assert status == 200, body
        chosen = body["nvext"]["worker_id"]
        assert chosen["prefill_worker_id"] != pinned
        assert registry.get(chosen["decode_worker_id"]).name == "decode-b0"
        await fleet.idle()


async def test_without_a_prefill_worker_decode_answers_alone_where_it_can():
    engines = [{"name": "p0", "role": "prefill"}, {"name": "d0", "role": "decode"}]
    async with site(engines) as fleet:
        assert (await fleet.chat())[0] == 200
        await fleet.engines["p0"].close()
        status, body, _ = await fleet.chat(nvext=IDS)
        assert status == 200, body
        registry = fleet.service.router.registry
        assert registry.get(body["nvext"]["worker_id"]["decode_worker_id"]).name == "d0"
        await fleet.idle()


async def test_without_a_prefill_worker_the_missing_role_is_named():
    engines: list[dict[str, Any]] = [
        {"name": "p0", "role": "prefill"},
        {"name": "d0", "role": "decode", "can_prefill": False},
    ]
    async with site(engines) as fleet:
        await fleet.engines["p0"].close()
        await fleet.chat()
        status, body, _ = await fleet.chat()
        assert status == 503
        assert "no prefill worker" in body["error"]["message"]
        _, ready = await fleet.get("/v1/models/demo/ready")
        assert ready["ready"] is False
        assert "prefill" in ready["reason"]
        await fleet.idle()


@pytest.mark.parametrize("kind", ["aggregated", "disaggregated", "bootstrap"])
async def test_load_returns_to_zero_after_any_mix_of_failures(kind):
    engines: list[dict[str, Any]] = [{"name": f"a{i}"} for i in range(3)]
    specs = {}
    if kind != "aggregated":
        engines = [{"name": f"{r[0]}{i}", "role": r} for i in "01" for r in ("prefill", "decode")]
    if kind == "bootstrap":
        specs = dict.fromkeys(("p0", "p1"), ",bootstrap={address}")
    chance = random.Random(7)
    async with site(engines, specs=specs) as fleet:
        seen: set[int | str] = set()

        async def one(i):
            text = f"{i} " + WORDS * chance.randint(1, 6)
            fields = {"max_tokens": chance.randint(1, 12), "stream": chance.random() < 0.7}
            wait = chance.choice([0.02, 0.1, 5.0])
            timeout = aiohttp.ClientTimeout(total=wait)
            try:
                async with fleet.client.post(
                    fleet.url("/v1/chat/completions"),
                    json=chat_body(text, **fields),
                    timeout=timeout,
                ) as answer:
                    await answer.read()
                    seen.add(answer.status)
            except TimeoutError:
                seen.add("left")

        async def trouble():
            for _ in range(12):
                name = chance.choice(list(fleet.engines))
                set_fault(fleet, name, **chance.choice(FAULTS))
                await asyncio.sleep(0.03)
                set_fault(fleet, name, slow_factor=1.0, refuse=0, die_mid_stream_after=0)

        async def requests():
            for wave in range(6):
                await asyncio.gather(*(one(20 * wave + i) for i in range(20)))

        await asyncio.gather(requests(), trouble())
        assert 200 in seen
        await fleet.idle()
        assert not fleet.service.held
        assert fleet.frontend.core.inference.in_flight == 0
        assert len(fleet.service.router.load) == 0


FAULTS: list[dict[str, Any]] = [
    {"refuse": 500},
    {"refuse": 503},
    {"die_mid_stream_after": 2},
    {"slow_factor": 20.0},
]


async def test_a_slow_client_gets_everything_and_holds_up_only_itself(plain_stream):
    url, whole = plain_stream
    async with site([], workers=(f"{url},name=e,model=m",)) as fleet:
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]}
        timeout = aiohttp.ClientTimeout(total=20)
        async with fleet.client.post(
            fleet.url("/v1/chat/completions"), json=body, timeout=timeout
        ) as answer:
            await asyncio.sleep(0.3)  # meanwhile the buffers between us fill up
            got = await answer.read()
        assert got == whole
        await fleet.idle()


@pytest.fixture
async def plain_stream():
    """An engine that streams 16 MB as fast as it is read: (its url, the stream)."""
    event = b'data: {"x": "' + b"x" * 4000 + b'"}\n\n'
    count = 4000

    async def chat(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(count):
            await response.write(event)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    server = TestServer(app)
    await server.start_server()
    yield str(server.make_url("")).rstrip("/"), event * count + b"data: [DONE]\n\n"
    await server.close()


async def test_check_fails_when_all_engines_are_dead():
    async with site(TWO) as fleet:
        await until(lambda: not len(fleet.service.conditions))
        assert (await checked(fleet)).passes("warn")
        for engine in fleet.engines.values():
            await engine.close()
        await until(lambda: all(unavailable(fleet, name) for name in ("a0", "a1")))
        report = await checked(fleet)
        failed = {check.code: check.findings for check in report.checks if check.state == "fail"}
        assert failed.keys() == {"MODEL_NOT_SERVED", "WORKER_UNREACHABLE"}
        assert [one.subject for one in failed["WORKER_UNREACHABLE"]] == ["a0", "a1"]
        [refused] = failed["MODEL_NOT_SERVED"]
        assert refused.value.startswith("0/2 aggregated workers are ready")
        assert not report.passes("fail")
