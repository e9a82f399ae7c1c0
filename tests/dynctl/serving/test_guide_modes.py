"""The tables of the router guide, row by row: a frontend started with the row's flag, and engines
that answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest

from dynctl.settings.router_settings import resolve
from router_core import Booked, RouterConfig
from tests.dynctl.serving.fleets import WORDS, site, until

THREE: list[dict[str, Any]] = [{"name": f"a{n}"} for n in range(3)]
SPLIT: list[dict[str, Any]] = [
    {"name": f"{role}-{n}", "role": role} for role in ("prefill", "decode") for n in range(2)
]
WANTED = {"extra_fields": ["worker_id"]}


def flags(mode: str, *more: str) -> RouterConfig:
    """The settings of ``serve frontend --router-mode MODE`` with switches."""
    given: dict[str, str | bool] = {"--router-mode": mode}
    given |= {one.replace("--no-", "--"): not one.startswith("--no-") for one in more}
    return resolve(given, {}).config


async def placed(fleet: Any, text: str) -> dict[str, str]:
    """Hop -> the worker that served it."""
    status, body, _ = await fleet.chat(text, max_tokens=2, nvext=WANTED)
    assert status == 200, body
    registry = fleet.service.router.registry
    found = body["nvext"]["worker_id"]
    return {hop: registry.get(found[f"{hop}_worker_id"]).name for hop in ("prefill", "decode")}


async def answered_by(fleet: Any, count: int) -> list[str]:
    """The workers that answered requests one after another."""
    return [(await placed(fleet, f"request {n}"))["decode"] for n in range(count)]


def busy(fleet: Any, name: str, count: int, stage: Any = "aggregated", **load: Any) -> None:
    """Requests that stay in flight on a worker."""
    worker = fleet.service.router.registry.by_name(name)
    for n in range(count):
        booked = Booked(f"{name}-{n}", stage, worker.worker_id, 0, **load)
        assert fleet.service.apply(booked).ok


def blocks(fleet: Any, name: str) -> int:
    router = fleet.service.router
    (slot,) = router.registry.slots(router.registry.by_name(name).worker_id)
    return int(router.cached_blocks(slot))


@pytest.mark.seed("router-guide: modes: Frontend + Round-Robin")
@pytest.mark.seed("router-guide: modes: Round-Robin")
async def test_round_robin_cycles_through_the_workers_in_order() -> None:
    async with site(THREE, router=flags("round-robin")) as fleet:
        busy(fleet, "a0", 5, prefill_tokens=5_000, anonymous_blocks=50)
        found = await answered_by(fleet, 9)
        assert Counter(found) == {"a0": 3, "a1": 3, "a2": 3}
        assert found[:3] == found[3:6] == found[6:]


@pytest.mark.seed("router-guide: modes: Frontend + Random")
@pytest.mark.seed("router-guide: modes: Random")
async def test_random_selects_any_worker_whatever_its_load(monkeypatch: Any) -> None:
    async with site(THREE, router=flags("random")) as fleet:
        busy(fleet, "a0", 5, prefill_tokens=5_000, anonymous_blocks=50)
        # Each decision draws two samples, one for a second hop.
        samples = cycle([sample for n in range(6) for sample in (n / 6, 0.0)])
        monkeypatch.setattr(fleet.service, "sample", lambda: next(samples))
        assert Counter(await answered_by(fleet, 6)) == {"a0": 2, "a1": 2, "a2": 2}


@pytest.mark.seed("router-guide: modes: Frontend + KV (Aggregated)")
@pytest.mark.seed("router-guide: modes: KV")
@pytest.mark.seed("router-guide: events: ZMQ")
@pytest.mark.seed("router-guide: topology: Aggregated")
async def test_kv_weighs_cached_blocks_against_load() -> None:
    async with site(THREE, router=flags("kv")) as fleet:
        await fleet.connected()
        prompt = WORDS * 12
        first = await placed(fleet, prompt)
        home = first["decode"]
        assert first["prefill"] == home  # the whole request in one worker
        await fleet.idle()
        await until(lambda: blocks(fleet, home) > 5)
        assert [(await placed(fleet, prompt))["decode"] for _ in range(3)] == [home] * 3
        busy(fleet, home, 1, prefill_tokens=100_000, anonymous_blocks=1_000)
        assert (await placed(fleet, prompt))["decode"] != home


@pytest.mark.seed("router-guide: modes: Frontend + KV (Disaggregated)")
@pytest.mark.seed("router-guide: topology: Disaggregated")
@pytest.mark.seed("smart-routing-guide-0.9: verification: prefill by cache, decode by load")
async def test_kv_routes_to_prefill_by_cache_and_to_decode_by_load() -> None:
    async with site(SPLIT, router=flags("kv")) as fleet:
        await fleet.connected()
        prompt = WORDS * 12
        first = await placed(fleet, prompt)
        home = first["prefill"]
        await fleet.idle()
        await until(lambda: blocks(fleet, home) > 5)
        busy(fleet, "decode-0", 1, "decode", anonymous_blocks=1_000)
        for _ in range(3):
            assert await placed(fleet, prompt) == {"prefill": home, "decode": "decode-1"}


@pytest.mark.seed("router-guide: topology: Disaggregated")
async def test_prefill_workers_that_register_turn_disaggregation_on() -> None:
    async with site([SPLIT[2], *SPLIT[:1]], api_token="t0ken") as fleet:
        operator = {"authorization": "Bearer t0ken"}
        router = fleet.service.router
        assert router.stages("demo") == ("prefill", "decode")
        removed = f"/v1/workers/{SPLIT[0]['name']}"
        async with fleet.client.delete(fleet.url(removed), headers=operator) as answer:
            assert answer.status == 200
        assert router.stages("demo") == ("aggregated",)
        assert await answered_by(fleet, 2) == ["decode-0", "decode-0"]
        again = {"url": fleet.engines["prefill-0"].url, "name": "prefill-0", "role": "prefill"}
        status, _, _ = await fleet.post("/v1/workers", again, headers=operator)
        assert status in (200, 201)
        await until(lambda: router.stages("demo") == ("prefill", "decode"))
        assert await placed(fleet, "hello") == {"prefill": "prefill-0", "decode": "decode-0"}


@pytest.mark.seed("router-guide: modes: Frontend + Least-Loaded")
@pytest.mark.seed("router-guide: modes: Least-Loaded")
async def test_least_loaded_counts_this_routers_requests_in_flight() -> None:
    async with site(THREE, router=flags("least-loaded")) as fleet:
        busy(fleet, "a0", 2)
        busy(fleet, "a1", 1, prefill_tokens=9_000)
        assert await answered_by(fleet, 3) == ["a2", "a2", "a2"]
        busy(fleet, "a2", 3)
        # Tokens and blocks do not count, only requests.
        assert await answered_by(fleet, 3) == ["a1", "a1", "a1"]


@pytest.mark.seed("dynamo-1.6: modes: power-of-two")
async def test_power_of_two_never_takes_the_most_loaded() -> None:
    async with site(THREE, router=flags("power-of-two")) as fleet:
        busy(fleet, "a0", 3)
        busy(fleet, "a1", 1)
        found = Counter(await answered_by(fleet, 24))
        assert set(found) <= {"a1", "a2"}
        status, listed = await fleet.get("/v1/decisions?limit=1")
        assert status == 200
        _, past = await fleet.get(f"/v1/decisions/{listed['decisions'][0]['id']}")
        assert len(past["decode"]["drawn"]) == 2
        assert 0 <= past["decode"]["sample"] < 1


@pytest.mark.seed("router-guide: modes: Frontend + Device-Aware Weighted")
@pytest.mark.seed("router-guide: modes: Device-Aware Weighted")
async def test_device_aware_weighted_divides_load_by_throughput() -> None:
    devices = {"a0": ",device=cpu"}
    async with site(THREE, specs=devices, router=flags("device-aware-weighted")) as fleet:
        # The default ratio is 8: 15 requests on two accelerators allow none on one CPU worker.
        busy(fleet, "a1", 8)
        busy(fleet, "a2", 7)
        assert await answered_by(fleet, 2) == ["a2", "a2"]
        busy(fleet, "a2", 1, "decode")
        assert await answered_by(fleet, 2) == ["a0", "a0"]


@pytest.mark.seed("router-guide: events: Approximate")
async def test_without_events_the_cache_is_predicted_from_routed_requests() -> None:
    async with site(THREE, router=flags("kv", "--no-router-kv-events")) as fleet:
        prompt = WORDS * 12
        home = (await placed(fleet, prompt))["decode"]
        await fleet.idle()
        assert blocks(fleet, home) > 5
        assert [(await placed(fleet, prompt))["decode"] for _ in range(3)] == [home] * 3


def _names(rows: Sequence[dict[str, Any]]) -> set[str]:
    return {row["name"] for row in rows}


@pytest.mark.seed("router-guide: deployments: Frontend-embedded")
async def test_the_embedded_router_has_its_metrics_on_the_frontends_port() -> None:
    async with site(THREE, router=flags("kv")) as fleet:
        await placed(fleet, "hello")
        status, metrics = await fleet.get("/metrics")
        assert status == 200
        assert b"dynctl_decisions_total{" in metrics
        assert b"dynamo_frontend_requests_started_total{" in metrics
        _, found = await fleet.get("/v1/workers")
        assert _names(found["workers"]) == {"a0", "a1", "a2"}
