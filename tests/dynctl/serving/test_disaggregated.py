"""Prefill and decode on different engines: vLLM's hand-off, SGLang's, and topology."""

from typing import Any

import pytest

from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.telemetry.observers import ServiceObserver
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
@pytest.mark.seed("router-guide: topologies: Disaggregated")
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
        open_upstream = fleet.frontend.upstream.open

        async def fails_at_d0(url, body, headers, **more):
            if url.startswith(fleet.engines["d0"].url):
                raise UpstreamFailure(kind, "d0 failed")
            return await open_upstream(url, body, headers, **more)

        monkeypatch.setattr(fleet.frontend.upstream, "open", fails_at_d0)
        status, body, _ = await fleet.chat(WORDS * 4, max_tokens=3)
        assert status == 200, body
        prefill, failed, answered = ("prefill", "p0"), ("decode", "d0"), ("decode", "d1")
        again = [prefill] if reached else []
        assert hops.booked == [prefill, failed, *again, answered]
        fleet.service.free("other")
        await fleet.idle()
