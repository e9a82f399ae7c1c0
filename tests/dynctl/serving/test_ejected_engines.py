"""Engines that hang, fail or only seem to: their requests move, and they come back."""

from __future__ import annotations

import asyncio

import pytest

from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.routing.config import EjectionLimits, HealthConfig, Limits
from tests.dynctl.serving.fleets import Site, site, until
from tests.dynctl.serving.hostile import GOOD, answers, hangs, hostile, specs
from tests.waiting import patience

JSON = b'{"choices": []}'
EJECT = EjectionLimits(failures=3, pause_s=0.2, max_pause_s=0.8)
HEALTH = HealthConfig(interval_s=0.1, timeout_s=0.3, ejection=EJECT)
good_stream, good_body = answers(GOOD), answers(JSON, "application/json")


def reason(fleet: Site, name: str) -> str | None:
    registry = fleet.service.router.registry
    found: str | None = registry.unavailable_reason(registry.by_name(name).worker_id)
    return found


def holds(fleet: Site, code: str, subject: str) -> bool:
    return fleet.service.conditions.get(code, subject) is not None


async def test_requests_at_a_hung_engine_move_and_it_is_ejected():
    limits = Limits(first_output_s=patience(0.3))
    async with (
        hostile(hangs, good_stream) as engines,
        site([], workers=specs(engines), health=HEALTH, limits=limits) as fleet,
    ):
        answered = await asyncio.gather(*(fleet.stream(f"{i}") for i in range(20)))
        assert {status for status, _, _ in answered} == {200}
        assert engines[0].seen > 0
        kinds = {kind for _, kind in fleet.service.engine_failures}
        assert "timeout" in kinds
        await fleet.idle()
        seen = engines[0].seen
        await fleet.stream("once more")
        assert holds(fleet, "WORKER_EJECTED", "e0") or engines[0].seen == seen + 1


async def test_an_ejected_engine_gives_its_waiting_requests_back_at_once():
    async with (
        hostile(hangs, good_body) as engines,
        site([], workers=specs(engines), health=HEALTH) as fleet,
    ):
        waiting = [asyncio.create_task(fleet.chat(f"{i}")) for i in range(20)]
        await until(lambda: engines[0].seen > 0)
        engines[0].healthy = hangs
        assert {(await one)[0] for one in waiting} == {200}
        assert fleet.service.engine_failures["e0", "ejected"] > 0
        assert "did not respond" in (reason(fleet, "e0") or "")
        await fleet.idle()


async def test_a_trial_ends_the_ejection_or_makes_it_longer():
    limits = Limits(first_output_s=patience(0.3))
    async with (
        hostile(hangs, good_stream) as engines,
        site([], workers=specs(engines), health=HEALTH, limits=limits) as fleet,
    ):
        member = fleet.frontend.fleet.get("e0")
        assert member is not None

        async def ask() -> None:
            assert (await fleet.stream("x"))[0] == 200

        def ejected() -> bool:
            return member.ejection.state != "in"

        while not ejected():
            await ask()
        tried = engines[0].seen
        while engines[0].seen < tried + 2:  # two trials fail
            await ask()
            await asyncio.sleep(0.02)
        assert member.ejection.reason() is not None
        engines[0].behave = good_stream
        while ejected():
            await ask()
            await asyncio.sleep(0.02)
        assert reason(fleet, "e0") is None
        assert not holds(fleet, "WORKER_EJECTED", "e0")
        await fleet.idle()


async def test_while_most_probes_fail_all_workers_in_doubt_get_requests():
    async with (
        hostile(good_stream, good_stream, good_stream) as engines,
        site([], workers=specs(engines), health=HEALTH) as fleet,
    ):
        engines[0].healthy = hangs
        await until(lambda: reason(fleet, "e0") is not None)
        assert not holds(fleet, "TOO_FEW_WELL", "demo aggregated")
        engines[1].healthy = engines[2].healthy = hangs
        await until(lambda: holds(fleet, "TOO_FEW_WELL", "demo aggregated"))
        assert {reason(fleet, name) for name in ("e0", "e1", "e2")} == {None}
        assert {(await fleet.stream(f"{i}"))[0] for i in range(6)} == {200}
        # They get requests, and no screen shows them as well.
        _, listed = await fleet.get("/v1/workers")
        assert {row["status"] for row in listed["workers"]} == {"in doubt"}
        assert all("did not respond" in row["reason"] for row in listed["workers"])
        assert not holds(fleet, "MODEL_NOT_SERVED", "demo")
        for engine in engines:
            engine.healthy = answers(b"", "text/plain")
        await until(lambda: not holds(fleet, "TOO_FEW_WELL", "demo aggregated"))
        await until(lambda: all(reason(fleet, name) is None for name in ("e0", "e1", "e2")))


async def test_an_engine_that_reports_an_error_gets_nothing_even_in_a_panic():
    async with (
        hostile(good_stream, good_stream, good_stream) as engines,
        site([], workers=specs(engines), health=HEALTH) as fleet,
    ):
        engines[0].healthy = answers(b"", "text/plain", 503)
        engines[1].healthy = engines[2].healthy = hangs
        await until(lambda: holds(fleet, "TOO_FEW_WELL", "demo aggregated"))
        await until(lambda: reason(fleet, "e0") == "/health returned status 503")
        assert reason(fleet, "e1") is reason(fleet, "e2") is None
        engines[1].healthy = engines[2].healthy = answers(b"", "text/plain", 503)
        await until(lambda: reason(fleet, "e1") is not None and reason(fleet, "e2") is not None)
        assert (await fleet.stream("x"))[0] == 503


async def test_without_a_panic_threshold_nobody_is_tried():
    health = HealthConfig(interval_s=0.1, timeout_s=0.2, panic_threshold=0.0)
    async with (
        hostile(good_stream) as engines,
        site([], workers=specs(engines), health=health) as fleet,
    ):
        engines[0].healthy = hangs
        await until(lambda: reason(fleet, "e0") is not None)
        assert (await fleet.stream("x"))[0] == 503


async def test_a_probe_that_fails_while_our_own_loop_is_late_is_excused(
    monkeypatch: pytest.MonkeyPatch,
):
    health = HealthConfig(interval_s=0.05, timeout_s=0.1, panic_threshold=0.0)
    async with (
        hostile(good_stream) as engines,
        site([], workers=specs(engines), health=health) as fleet,
    ):
        monkeypatch.setattr(fleet.service, "loop_late_since", lambda _began: 0.09)
        engines[0].healthy = hangs
        await until(lambda: fleet.service.probes_excused >= 5)
        await until(lambda: reason(fleet, "e0") is not None)  # excuses have a bound
        assert fleet.service.probes_excused == 5
        _, metrics = await fleet.get("/metrics")
        assert "dynctl_probes_excused_total 5" in metrics.decode()


async def test_requests_that_fail_while_this_process_stands_still_blame_no_engine():
    async with site([{"name": "a0"}]) as fleet:
        member = fleet.frontend.fleet.get("a0")
        assert member is not None
        sent_at = fleet.service.clock() - 1
        silent = UpstreamFailure("timeout", "a0 sent no output")
        fleet.service.loop_was_late(20.0)
        for _ in range(10):
            fleet.frontend.fleet.report_failure(member.spec.worker_id, silent, sent_at)
        assert member.reason is None
        fleet.frontend.fleet.report_failure(
            member.spec.worker_id, silent, fleet.service.clock() + 1
        )
        assert member.ejection.state == "out"


async def test_a_host_that_does_not_respond_once_ejects_no_engine():
    async with site([{"name": "a0"}]) as fleet:
        member = fleet.frontend.fleet.get("a0")
        assert member is not None
        silent = UpstreamFailure("vanished", "its host has not responded for 2 s")
        for _ in range(EjectionLimits().failures):
            assert member.ejection.state == "in"
            fleet.frontend.fleet.report_failure(
                member.spec.worker_id, silent, fleet.service.clock()
            )
        assert member.ejection.state == "out"


async def test_the_event_loop_measures_how_late_it_is():
    async with site([{"name": "a0"}]) as fleet:
        began = fleet.service.clock()
        assert fleet.service.loop_late_since(began) < 0.3
        fleet.service.loop_was_late(0.5)
        assert fleet.service.loop_late_since(began) >= 0.5
        assert fleet.service.loop_late_since(fleet.service.clock() + 1) == 0
