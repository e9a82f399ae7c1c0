"""nvext and headers: dry runs, pins, constraints, salts, extra fields; what engines get to see."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router_core import RouterConfig
from tests.dynctl.serving.fleets import WORDS, chat_body, events_of, site, until, zone

IDS = {"extra_fields": ["worker_id", "timing"]}
TWO = [{"name": "a0"}, {"name": "a1"}]
ZONES = [
    {"name": f"{role}-{z}0", "role": role, **zone(f"zone-{z}")}
    for z in "ab"
    for role in ("prefill", "decode")
]


def id_of(fleet, name):
    return fleet.service.router.registry.by_name(name).worker_id


async def test_a_dry_run_names_both_hops_and_books_nothing():
    async with site(ZONES) as fleet:
        dry = {"annotations": ["query_instance_id:"]}
        status, body, headers = await fleet.chat(WORDS, nvext=dry)
        assert status == 200
        assert body["choices"][0]["finish_reason"] is None
        assert body["choices"][0]["message"]["content"] is None
        found = body["nvext"]["worker_id"]
        assert set(found) == {
            "prefill_worker_id",
            "prefill_dp_rank",
            "decode_worker_id",
            "decode_dp_rank",
        }
        assert len(body["nvext"]["token_ids"]) > 10
        assert headers["x-dynctl-decision"]
        assert all(row == (0, 0, 0) for row in fleet.load().values())
        assert sum(e.engine.active_requests for e in fleet.engines.values()) == 0

        status, events, _ = await fleet.stream(WORDS, nvext=dry)
        assert (status, len(events), events[-1]) == (200, 2, "[DONE]")
        assert events[0]["nvext"]["token_ids"]


async def test_without_the_colon_the_request_runs():
    async with site(TWO) as fleet:
        _, body, _ = await fleet.chat(nvext={"annotations": ["query_instance_id"]}, max_tokens=2)
        assert body["usage"]["completion_tokens"] == 2


async def test_pins_in_the_body_and_in_headers():
    async with site(ZONES) as fleet:
        pins = {
            "prefill_worker_id": id_of(fleet, "prefill-b0"),
            "decode_worker_id": id_of(fleet, "decode-b0"),
        }
        for _ in range(3):
            _, body, _ = await fleet.chat(nvext={**pins, **IDS})
            assert body["nvext"]["worker_id"]["prefill_worker_id"] == pins["prefill_worker_id"]
            assert body["nvext"]["worker_id"]["decode_worker_id"] == pins["decode_worker_id"]
        headers = {"x-prefill-instance-id": str(id_of(fleet, "prefill-a0"))}
        _, body, _ = await fleet.post(
            "/v1/chat/completions", chat_body("hi", nvext=IDS), headers=headers
        )
        assert body["nvext"]["worker_id"]["decode_worker_id"] == id_of(fleet, "decode-a0")


async def test_a_pin_against_the_policy_is_refused_with_both_values():
    # Without the capacity guard, which would refuse the prefill hop already.
    async with site(ZONES, router=RouterConfig(decode_capacity_guard=False)) as fleet:
        pins = {
            "prefill_worker_id": id_of(fleet, "prefill-a0"),
            "decode_worker_id": id_of(fleet, "decode-b0"),
        }
        status, body, _ = await fleet.chat(nvext=pins)
        assert status == 503
        details = body["error"]["dynctl"]
        assert details["outcome"] == "pinned_ineligible"
        assert details["rejected"][0]["limit"] == "dynamo.topology/zone=zone-a"
        assert details["rejected"][0]["value"] == "zone-b"
        assert details["constraints"][0]["origin"] == "kv-transfer policy of worker prefill-a0"


@pytest.mark.parametrize("field", ["decode_worker_id", "prefill_worker_id", "backend_instance_id"])
async def test_a_pin_on_nobody_is_a_400(field):
    async with site(TWO) as fleet:
        status, body, _ = await fleet.chat(nvext={field: 12345})
        assert status == 400
        assert "12345" in body["error"]["message"]
        assert body["error"]["code"] == "unknown_worker"


@pytest.mark.seed("router-guide: modes: Frontend + Direct")
@pytest.mark.seed("router-guide: modes: Direct")
@pytest.mark.parametrize("way", ["header", "nvext", "backend_instance_id"])
async def test_direct_sends_where_the_request_says(way):
    async with site(TWO, router=RouterConfig(router_mode="direct")) as fleet:
        for name in ("a1", "a0", "a1"):
            chosen = id_of(fleet, name)
            if way == "header":
                body = chat_body("hi", nvext=IDS)
                headers = {"x-dynamo-worker-instance-id": str(chosen)}
                _, answer, _ = await fleet.post("/v1/chat/completions", body, headers=headers)
            else:
                field = "decode_worker_id" if way == "nvext" else way
                _, answer, _ = await fleet.chat("hi", nvext={field: chosen, **IDS})
            assert answer["nvext"]["worker_id"]["decode_worker_id"] == chosen


@pytest.mark.seed("dynamo-1.6: modes: direct without a worker id")
async def test_direct_without_a_worker_is_a_400_that_names_header_and_field():
    async with site(ZONES, router=RouterConfig(router_mode="direct")) as fleet:
        status, body, _ = await fleet.chat("hi")
        error = body["error"]
        assert (status, error["code"], error["param"]) == (
            400,
            "worker_required",
            "nvext.prefill_worker_id",
        )
        assert error["message"] == (
            "mode direct: the request names no prefill worker; set the header "
            "x-prefill-instance-id or nvext.prefill_worker_id"
        )
        pin = {"prefill_worker_id": id_of(fleet, "prefill-a0")}
        status, body, _ = await fleet.chat("hi", nvext=pin)
        assert (status, body["error"]["param"]) == (400, "nvext.decode_worker_id")
        # An unknown worker is a 400 too, as in Dynamo, and nothing else is tried.
        status, body, _ = await fleet.chat("hi", nvext={"decode_worker_id": 1, **pin})
        assert (status, body["error"]["code"]) == (400, "unknown_worker")
        assert all(row == (0, 0, 0) for row in fleet.load().values())


async def test_required_taints_choose_the_zone():
    async with site(ZONES) as fleet:
        taint = "dynamo.topology/zone=zone-b"
        nvext: dict[str, Any] = {"routing_constraints": {"required_taints": [taint]}, **IDS}
        for _ in range(3):
            status, body, _ = await fleet.chat(nvext=nvext)
            assert status == 200
            assert body["nvext"]["worker_id"]["decode_worker_id"] == id_of(fleet, "decode-b0")
        nvext = {"routing_constraints": {"required_taints": [taint[:-1] + "z"]}, **IDS}
        status, body, _ = await fleet.chat(nvext=nvext)
        assert status == 503
        details = body["error"]["dynctl"]
        assert details["filter"] == "taints"
        assert details["what_would_admit"].endswith("with the taint dynamo.topology/zone=zone-z")
        assert {row["worker"] for row in details["rejected"]} == {"prefill-a0", "prefill-b0"}


async def test_streams_carry_workers_first_and_timing_before_done():
    async with site(TWO) as fleet:
        status, events, _ = await fleet.stream(max_tokens=4, nvext=IDS)
        assert status == 200
        assert events[0]["nvext"]["worker_id"]["decode_worker_id"] in {
            id_of(fleet, "a0"),
            id_of(fleet, "a1"),
        }
        assert events[-1] == "[DONE]"
        timing = events[-2]["nvext"]["timing"]
        assert timing["total_time_ms"] >= timing["ttft_ms"] > 0
        assert len([e for e in events if isinstance(e, dict) and "nvext" in e]) == 2
        names = ("id", "object", "created", "model")
        first, extra = ([one[name] for name in names] for one in (events[0], events[-2]))
        assert extra == first
        body = {"model": "demo", "prompt": WORDS, "max_tokens": 4, "stream": True, "nvext": IDS}
        async with fleet.client.post(fleet.url("/v1/completions"), json=body) as answer:
            lines = [line async for line in answer.content if line.startswith(b"data: {")]
        first, extra = (json.loads(line[6:]) for line in (lines[0], lines[-1]))
        assert "timing" in extra["nvext"]
        assert (extra["object"], extra["id"]) == ("text_completion", first["id"])


async def test_salts_keep_prefixes_apart():
    async with site(TWO) as fleet:
        prompt = WORDS * 8
        await fleet.connected()
        await fleet.chat(prompt)
        router = fleet.service.router
        slots = [slot for one in router.registry for slot in router.registry.slots(one.worker_id)]
        await until(lambda: any(router.index.block_count(slot) > 3 for slot in slots))
        dry = {"annotations": ["query_instance_id:"]}
        async with fleet.client.post(
            fleet.url("/v1/route"), json=chat_body(prompt, nvext=dry)
        ) as answer:
            plain = await answer.json()
        async with fleet.client.post(
            fleet.url("/v1/route"), json=chat_body(prompt, nvext={"cache_salt": "tenant-1"})
        ) as answer:
            salted = await answer.json()
        assert max(c["overlap_blocks"] for c in plain["decode"]["candidates"]) > 3
        assert max(c["overlap_blocks"] for c in salted["decode"]["candidates"]) == 0
        assert len(router.load) == 0


async def test_adapters_and_salts_are_part_of_what_is_cached(caplog):
    """Predicted blocks against what the engine reports as reused, with everything mixed."""
    caplog.set_level("DEBUG")
    async with site([{"name": "a0", "lora": ("tuned",)}], log_decisions="all") as fleet:
        await fleet.connected()
        prompt = WORDS * 8
        tops: list[dict[str, Any]] = [
            {},
            {"cache_salt": "secret-1"},
            {"cache_salt": "secret-2"},
            {"nvext": {"cache_salt": "secret-3"}},
            {"model": "tuned"},
            {"model": "tuned", "cache_salt": "secret-1"},
        ]

        async def predicted(top: dict[str, Any]) -> dict[str, Any]:
            body = chat_body(prompt, **top)
            async with fleet.client.post(fleet.url("/v1/route"), json=body) as answer:
                found = await answer.json()
            assert "secret" not in str(found)
            decode: dict[str, Any] = found["decode"]
            return decode

        index = fleet.service.router.index
        for top in tops:
            before = await predicted(top)
            assert before["candidates"][0]["overlap_blocks"] == 0, top
            assert before["salted"] == ("salt" in str(top))
            assert before["lora"] == top.get("model")
            known = index.entry_count
            _, first, _ = await fleet.chat(prompt, **top)
            assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            stored: int = known + first["usage"]["prompt_tokens"] // 16

            def indexed(stored: int = stored) -> bool:
                return bool(index.entry_count >= stored)

            await until(indexed)
            now = await predicted(top)
            _, second, _ = await fleet.chat(prompt, **top)
            reused = second["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert now["candidates"][0]["overlap_blocks"] * 16 == reused > 0
    assert "secret" not in caplog.text


async def test_an_invalid_salt_is_refused_without_showing_it():
    async with site(TWO) as fleet:
        for salt in ("", "x" * 2000, 7):
            status, body, _ = await fleet.chat(cache_salt=salt)
            assert status == 400
            assert body["error"]["param"] == "cache_salt"
            assert "xxx" not in str(body)


async def test_engines_never_see_nvext_nor_our_token(engine_log):
    seen, url = engine_log
    spec = f"{url},name=e,model=m"
    forwarding = spec + ",forward-authorization=true"
    async with site([], workers=(forwarding,), api_token="secret-1") as fleet:
        messages = [{"role": "user", "content": "x"}]
        body: dict[str, Any] = {"model": "m", "messages": messages, "vendor_field": [1]}
        body |= {"nvext": {"extra_fields": [], "cache_salt": "s"}}
        headers = {"authorization": "Bearer secret-1", "traceparent": "00-1-2-01"}
        status, _, _ = await fleet.post("/v1/chat/completions", body, headers=headers)
        assert status == 200
        got, got_headers = seen[-1]
        assert got["vendor_field"] == [1]  # unknown fields reach the engine
        assert "nvext" not in got
        assert got["cache_salt"] == "s"
        assert "authorization" not in got_headers
        assert got_headers["traceparent"] == "00-1-2-01"
        headers = {"authorization": "Bearer for-the-engine"}
        await fleet.post("/v1/chat/completions", body, headers=headers)
        assert seen[-1][1]["authorization"] == "Bearer for-the-engine"
    async with site([], workers=(spec,)) as fleet:
        await fleet.post("/v1/chat/completions", body, headers=headers)
        assert "authorization" not in seen[-1][1]  # only engines that are trusted with it


async def test_data_parallel_ranks_are_handed_on(engine_log):
    seen, url = engine_log
    async with site([], workers=(f"{url},name=e,model=m,dp=4",)) as fleet:
        nvext = {"decode_worker_id": id_of(fleet, "e"), "dp_rank": 2}
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "nvext": nvext}
        assert (await fleet.post("/v1/chat/completions", body))[0] == 200
        assert seen[-1][1]["x-data-parallel-rank"] == "2"
        nvext["dp_rank"] = 9
        status, refused, _ = await fleet.post("/v1/chat/completions", body)
        assert status == 400
        assert "rank 9" in refused["error"]["message"]


async def test_streams_are_annotated_however_their_events_are_cut():
    event = '{"choices":[{"index":0,"delta":{"content":"é"}}]}'
    raw = f"data: {event}\r\n\r\ndata: {event}\r\n\r\ndata: [DONE]\r\n\r\n".encode()
    for at in (1, 9, 50, len(raw) // 2, len(raw) - 3):

        async def chat(request: web.Request, cut: int = at) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for piece in (raw[:cut], raw[cut:]):
                await response.write(piece)
                await asyncio.sleep(0.01)
            return response

        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        server = TestServer(app)
        await server.start_server()
        try:
            url = str(server.make_url("")).rstrip("/")
            async with site([], workers=(f"{url},name=e,model=m",)) as fleet:
                body = {"model": "m", "stream": True, "nvext": IDS}
                body |= {"messages": [{"role": "user", "content": "x"}]}
                async with fleet.client.post(
                    fleet.url("/v1/chat/completions"), json=body
                ) as answer:
                    events = events_of(await answer.read())
            assert len(events) == 4
            assert events[0]["nvext"]["worker_id"]["decode_worker_id"]
            assert events[0]["choices"] == events[1]["choices"]
            assert events[2]["nvext"]["timing"]["ttft_ms"] > 0
            assert events[3] == "[DONE]"
        finally:
            await server.close()


async def test_an_unknown_nvext_key_lists_the_known_ones():
    async with site(TWO) as fleet:
        status, body, _ = await fleet.chat(nvext={"decode_worker": 1})
        assert status == 400
        assert "decode_worker_id" in body["error"]["message"]
        assert body["error"]["param"] == "nvext.decode_worker"


def test_the_test_reads_events_as_clients_do():
    assert events_of(b'data: {"a":1}\n\ndata: [DONE]\n\n') == [{"a": 1}, "[DONE]"]


async def test_a_prompt_that_is_cached_entirely_reuses_one_block_less():
    """Engines always compute the last token, so a frontend does not count its block."""
    async with site([{"name": "a0"}]) as fleet:
        await fleet.connected()
        index = fleet.service.router.index
        body = {"model": "demo", "prompt": list(range(100, 164)), "max_tokens": 1}
        assert (await fleet.post("/v1/completions", body))[0] == 200
        await until(lambda: index.entry_count == 4)
        status, answer, _ = await fleet.post("/v1/completions", body)
        assert status == 200
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        async with fleet.client.post(fleet.url("/v1/route"), json=body) as response:
            row = (await response.json())["decode"]["candidates"][0]
        assert (row["overlap_blocks"], row["usable_blocks"]) == (3, 3)
        longer = {**body, "prompt": list(range(100, 165))}
        async with fleet.client.post(fleet.url("/v1/route"), json=longer) as response:
            row = (await response.json())["decode"]["candidates"][0]
        assert (row["overlap_blocks"], row["usable_blocks"]) == (4, 4)
