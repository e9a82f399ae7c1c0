"""Prefill and decode on different engines: vLLM's hand-off, SGLang's, and topology."""

from typing import Any

import msgspec
import pytest

from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.flow import Answer, Course
from dynctl.serving.engines.response_stream import chunk_of, content_of
from dynctl.serving.http.inference_responses import PrefillReuse
from dynctl.serving.telemetry.observers import RequestRecord, ServiceObserver
from router_core import Booked, RouterConfig
from tests.dynctl.serving.fleets import (
    SLOW_HEALTH,
    WORDS,
    chat_body,
    site,
    text_of,
    until,
    zone,
)

IDS = {"extra_fields": ["worker_id", "timing"]}


def two_zones():
    return [
        {"name": f"{role}-{z}0", "role": role, **zone(f"zone-{z}")}
        for z in "ab"
        for role in ("prefill", "decode")
    ]


def names(fleet, worker_id):
    registry = fleet.service.router.registry
    return (
        registry.get(worker_id["prefill_worker_id"]).name,
        registry.get(worker_id["decode_worker_id"]).name,
    )


@pytest.mark.seed("router-guide: modes: Frontend + KV (Disaggregated)")
@pytest.mark.seed("router-guide: topology: Disaggregated")
async def test_prefill_hands_its_blocks_to_decode_in_the_same_zone():
    async with site(two_zones()) as fleet:
        for i in range(4):
            status, body, _ = await fleet.chat(f"{i} {WORDS * 4}", max_tokens=5, nvext=IDS)
            assert status == 200, body
            assert body["usage"]["completion_tokens"] == 5
            prefill, decode = names(fleet, body["nvext"]["worker_id"])
            assert prefill.split("-")[1] == decode.split("-")[1]
        await fleet.idle()
        ran = [e for n, e in fleet.engines.items() if n.startswith("prefill")]
        assert all(len(engine.engine.held) == 0 for engine in ran)  # the blocks were pulled


async def test_a_disaggregated_stream():
    async with site(two_zones()) as fleet:
        status, events, _ = await fleet.stream(WORDS * 4, max_tokens=5)
        assert status == 200
        assert events[-1] == "[DONE]"
        assert text_of(events)
        await fleet.idle()


async def test_bootstrap_engines_get_both_halves_at_once():
    engines: list[dict[str, Any]] = [
        {"name": "p0", "role": "prefill", "data_parallel_size": 2},
        {"name": "d0", "role": "decode"},
    ]
    async with site(engines, specs={"p0": ",bootstrap={address}"}) as fleet:
        for i in range(4):
            status, events, _ = await fleet.stream(f"{i} {WORDS * 4}", max_tokens=5)
            assert status == 200, events
            assert events[-1] == "[DONE]"
            assert text_of(events)
        await fleet.idle()


@pytest.mark.parametrize("bootstrap", [False, True])
async def test_the_prefill_worker_carries_no_load_once_prefill_is_done(bootstrap):
    engines: list[dict[str, Any]] = [
        {"name": "p0", "role": "prefill"},
        {"name": "d0", "role": "decode", "speedup_ratio": 1.0, "decode_itl_ms": 50.0},
    ]
    specs = {"p0": ",bootstrap={address}"} if bootstrap else {}
    async with site(engines, specs=specs) as fleet:
        body = chat_body(WORDS * 4, stream=True, max_tokens=500)
        async with fleet.client.post(fleet.url("/v1/chat/completions"), json=body) as answer:
            await answer.content.readany()
            await until(lambda: fleet.load()["p0"] == (0, 0, 0))
            assert fleet.load()["d0"][0] == 1
        await fleet.idle()


class Hops(ServiceObserver):
    """The hops that were booked: (stage, worker)."""

    def __init__(self) -> None:
        self.booked: list[tuple[str, str]] = []

    def on_hop(self, decision, request, record) -> None:
        self.booked.append((decision.stage, decision.worker.name))


@pytest.mark.seed("router-guide: modes: Least-Loaded")
@pytest.mark.seed("router-guide: topology: Disaggregated")
@pytest.mark.parametrize(
    ("mode", "waits"),
    [
        ("least-loaded", True),
        ("power-of-two", True),
        ("device-aware-weighted", True),
        ("kv", False),
    ],
)
async def test_modes_that_count_requests_wait_for_prefill(mode, waits):
    """Least-loaded in the guide: it skips bootstrap and falls back to synchronous prefill."""
    engines: list[dict[str, Any]] = [
        {"name": "p0", "role": "prefill"},
        {"name": "d0", "role": "decode"},
    ]
    config = RouterConfig(router_mode=mode)
    async with site(engines, specs={"p0": ",bootstrap={address}"}, router=config) as fleet:
        at_decode = []

        class Loads(ServiceObserver):
            def on_hop(self, decision, request, record) -> None:
                if decision.stage == "decode":
                    at_decode.append(fleet.load()["p0"][0])

        fleet.service.observers.append(Loads())
        status, events, _ = await fleet.stream(WORDS * 4, max_tokens=5)
        assert (status, events[-1]) == (200, "[DONE]")
        assert text_of(events)
        assert at_decode == [0 if waits else 1]
        await fleet.idle()


@pytest.mark.parametrize(("kind", "reached"), [("connect", False), ("reset", True)])
async def test_prefill_runs_again_only_where_decode_may_have_taken_its_blocks(
    monkeypatch, kind, reached
):
    engines: list[dict[str, Any]] = [
        {"name": "p0", "role": "prefill"},
        {"name": "d0", "role": "decode"},
        {"name": "d1", "role": "decode"},
    ]
    async with site(engines, health=SLOW_HEALTH) as fleet:
        hops = Hops()
        fleet.service.observers.append(hops)
        busy = fleet.service.router.registry.by_name("d1").worker_id
        fleet.service.apply(Booked("other", "decode", busy, 0, anonymous_blocks=1_000))
        open_upstream = fleet.frontend.core.upstream.open

        async def fails_at_d0(url, body, headers, **more):
            if url.startswith(fleet.engines["d0"].url):
                raise UpstreamFailure(kind, "d0 failed")
            return await open_upstream(url, body, headers, **more)

        monkeypatch.setattr(fleet.frontend.core.upstream, "open", fails_at_d0)
        status, body, _ = await fleet.chat(WORDS * 4, max_tokens=3)
        assert status == 200, body
        prefill, failed, answered = ("prefill", "p0"), ("decode", "d0"), ("decode", "d1")
        again = [prefill] if reached else []
        assert hops.booked == [prefill, failed, *again, answered]
        fleet.service.free("other")
        await fleet.idle()


# -- conditional disaggregation ----------------------------------------------------------------

SKIPPING = RouterConfig(conditional_disagg_enabled=True)
ONE_OF_EACH: list[dict[str, Any]] = [
    {"name": "p0", "role": "prefill"},
    {"name": "d0", "role": "decode"},
    {"name": "d1", "role": "decode"},
]
SKIPPED = "x-dynctl-prefill-skipped"


async def warmed(fleet) -> str:
    """The decode worker that served a first turn, once the router knows what it cached."""
    await fleet.connected()
    status, body, headers = await fleet.chat(WORDS * 8, max_tokens=3, nvext=IDS)
    assert status == 200, body
    assert SKIPPED not in headers
    prefill, warm = map(str, names(fleet, body["nvext"]["worker_id"]))
    assert prefill == "p0"
    router = fleet.service.router
    (slot,) = router.registry.slots(router.registry.by_name(warm).worker_id)
    await until(lambda: router.index.block_count(slot) >= 8)
    await fleet.idle()
    return warm


@pytest.mark.seed("dynamo-1.6: skip the hop: bypass")
async def test_a_warm_decode_worker_takes_a_short_follow_up_itself():
    async with site(ONE_OF_EACH, router=SKIPPING) as fleet:
        warm = await warmed(fleet)
        hops = Hops()
        fleet.service.observers.append(hops)
        text = WORDS * 8 + "and then?"
        status, answer, headers = await fleet.chat(text, max_tokens=3, nvext=IDS)
        assert status == 200, answer
        assert hops.booked == [("aggregated", warm)]
        assert headers[SKIPPED] == "short_prefill"
        assert answer["usage"]["completion_tokens"] == 3
        status, past = await fleet.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
        assert status == 200
        assert past["prefill"] is None
        assert past["bypass"]["decode"] == warm
        assert past["bypass"]["message"].startswith(f"prefill hop left out: {warm} computes ")
        # A prompt that no decode worker knows takes the hop.
        status, answer, headers = await fleet.chat("other " * 100, max_tokens=3)
        assert status == 200, answer
        assert SKIPPED not in headers
        assert [stage for stage, _ in hops.booked] == ["aggregated", "prefill", "decode"]
        _, page = await fleet.get("/metrics")
        counts = 'dynctl_conditional_disagg_total{{bypassed="{}",reason="{}"}} {}'
        assert counts.format("true", "short_prefill", 1) in page.decode()
        assert counts.format("false", "little_cached", 2) in page.decode()
        await fleet.idle()


@pytest.mark.seed("dynamo-1.6: skip the hop: bypass")
async def test_what_a_bypassed_request_computes_is_booked_on_the_decode_worker_and_freed():
    async with site(ONE_OF_EACH, router=SKIPPING) as fleet:
        warm = await warmed(fleet)
        seen: dict[str, tuple[int, int, int]] = {}

        class Loads(ServiceObserver):
            def on_hop(self, decision, request, record) -> None:
                seen.update(fleet.load())

        fleet.service.observers.append(Loads())
        status, events, headers = await fleet.stream(WORDS * 8 + "and then?", max_tokens=5)
        assert (status, events[-1]) == (200, "[DONE]")
        assert headers[SKIPPED] == "short_prefill"
        requests, tokens, blocks = seen[warm]
        assert requests == 1
        assert 0 < tokens < 64  # what is not cached
        assert blocks >= 8
        assert seen["p0"] == (0, 0, 0)
        await fleet.idle()


@pytest.mark.seed("dynamo-1.6: skip the hop: bypass")
async def test_a_bypassed_decode_that_fails_is_tried_elsewhere_with_the_hop(monkeypatch):
    async with site(ONE_OF_EACH, router=SKIPPING, health=SLOW_HEALTH) as fleet:
        warm = await warmed(fleet)
        hops = Hops()
        fleet.service.observers.append(hops)
        open_upstream = fleet.frontend.core.upstream.open

        async def fails(url, body, headers, **more):
            if url.startswith(fleet.engines[warm].url):
                raise UpstreamFailure("reset", f"{warm} failed")
            return await open_upstream(url, body, headers, **more)

        monkeypatch.setattr(fleet.frontend.core.upstream, "open", fails)
        status, body, headers = await fleet.chat(WORDS * 8 + "and then?", max_tokens=3)
        assert status == 200, body
        assert SKIPPED not in headers
        other = "d1" if warm == "d0" else "d0"
        assert hops.booked == [("aggregated", warm), ("prefill", "p0"), ("decode", other)]
        await fleet.idle()


@pytest.mark.seed("dynamo-1.6: skip the hop: decode workers that cannot prefill")
async def test_a_decode_worker_that_cannot_prefill_gets_the_hop():
    engines: list[dict[str, Any]] = [
        {"name": "p0", "role": "prefill"},
        {"name": "d0", "role": "decode", "can_prefill": False},
    ]
    async with site(engines, router=SKIPPING) as fleet:
        assert await warmed(fleet) == "d0"
        status, body, headers = await fleet.chat(WORDS * 8 + "and then?", max_tokens=3)
        assert status == 200, body
        assert SKIPPED not in headers
        _, past = await fleet.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
        assert past["bypass"]["reason"] == "no_decode_worker"


async def test_without_the_setting_nothing_is_said_about_it():
    async with site(ONE_OF_EACH) as fleet:
        await warmed(fleet)
        status, _, headers = await fleet.chat(WORDS * 8 + "and then?", max_tokens=3)
        assert status == 200
        _, past = await fleet.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
        assert "bypass" not in past
        assert past["prefill"] is not None


# -- usage -----------------------------------------------------------------------------------------

WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": WORDS * 4}]},
    "completions": {"prompt": WORDS * 4},
    "messages": {"messages": [{"role": "user", "content": WORDS * 4}]},
    "responses": {"input": WORDS * 4},
}


def reported_reuse(document: Any) -> tuple[int, int] | None:
    """Prompt tokens and reused ones of a response, or of the last event with usage."""
    holders = (document, document.get("response"), document.get("message"))
    usages = [holder["usage"] for holder in holders if holder and holder.get("usage")]
    if not usages:
        return None
    usage = usages[-1]
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if "total_tokens" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached


@pytest.mark.parametrize("bootstrap", [False, True], ids=["one-after-the-other", "pair"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", REQUESTS)
async def test_usage_reports_what_the_prefill_engine_reused(api, stream, bootstrap):
    """The decode engine has none of the prompt's blocks, or all of them by the hand-off."""
    engines = [{"name": "p0", "role": "prefill"}, {"name": "d0", "role": "decode"}]
    specs = {"p0": ",bootstrap={address}"} if bootstrap else {}
    body = {"model": "demo", "max_tokens": 4, **REQUESTS[api], **(WITH_USAGE if stream else {})}
    if api == "responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    if api in ("messages", "responses"):
        body.pop("stream_options", None)
    prefill_reused = []
    async with site(engines, specs=specs) as fleet:

        class Reuse(ServiceObserver):
            def on_finished(self, record) -> None:
                prefill_reused.append(record.cached_tokens)

        fleet.service.observers.append(Reuse())
        reported = []
        for round_number in range(3):
            if round_number == 1:  # the decode engine loses what it has pulled
                for rank in fleet.engines["d0"].engine.ranks:
                    rank.scheduler.forget()
            async with fleet.client.post(fleet.url(f"/v1/{api}"), json=body) as answer:
                raw = await answer.read()
                assert answer.status == 200, raw
                documents = [event for event in data_of(raw) if isinstance(event, dict)]
            reported.append([pair for pair in map(reported_reuse, documents) if pair][-1])
            await fleet.idle()
    assert [cached for _, cached in reported] == prefill_reused
    assert reported[0][1] == 0
    assert reported[1][1] == reported[2][1] > 0
    assert len({prompt for prompt, _ in reported}) == 1


def data_of(raw: bytes) -> list[Any]:
    """The document of a whole response, or those of a stream's events."""
    if raw.startswith(b"{"):
        return [msgspec.json.decode(raw)]
    lines = [line.removeprefix(b"data:").strip() for line in raw.split(b"\n") if b"data:" in line]
    return [msgspec.json.decode(line) for line in lines if line != b"[DONE]"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_number_that_the_prefill_engine_does_not_report_is_unknown(monkeypatch, stream):
    """The decode engine's is that of another cache."""
    engines = [{"name": "p0", "role": "prefill"}, {"name": "d0", "role": "decode"}]
    monkeypatch.setattr(RequestRecord, "take_usage", lambda *_, **__: None)
    async with site(engines) as fleet:
        body = chat_body(WORDS * 4, **(WITH_USAGE if stream else {}))
        async with fleet.client.post(fleet.url("/v1/chat/completions"), json=body) as answer:
            usage = data_of(await answer.read())[-1]["usage"]
    assert usage["prompt_tokens"] > 0
    assert "cached_tokens" not in usage["prompt_tokens_details"]


def test_chunks_that_pass_unread_get_the_number_of_the_prefill_engine():
    record = RequestRecord("d", "d", "chat_completions", 0.0, 0.0, cached_tokens=64)
    written: list[bytes] = []
    write = PrefillReuse(Answer(None, b"", Course(None), True), record).piping(written.append)  # type: ignore[arg-type]
    token = chunk_of(b'data: {"choices":[{"delta":{"content":"\\"prompt_tokens\\""}}]}\n\n')
    usage = {"prompt_tokens": 100, "total_tokens": 108, "prompt_tokens_details": None}
    last = b"data: " + msgspec.json.encode({"choices": [], "usage": usage}) + b"\n\n"
    write(token)
    write(token + chunk_of(last) + chunk_of(b"data: [DONE]\n\n"))
    assert written[0] == token
    events = content_of(written[1]).split(b"\n\n")
    assert events[0] + b"\n\n" == content_of(token)
    details = msgspec.json.decode(events[1].removeprefix(b"data: "))["usage"]
    assert details == {**usage, "prompt_tokens_details": {"cached_tokens": 64}}
    assert events[2:] == [b"data: [DONE]", b""]
