"""Session affinity over HTTP: the headers, the separation of clients, and what is never shown."""

from __future__ import annotations

import json
from itertools import cycle
from typing import Any, ClassVar

import pytest

from dynctl.serving.telemetry.observers import ServiceObserver
from router_core import RouterConfig
from tests.dynctl.serving.fleets import WORDS, Site, chat_body, site
from tests.dynctl.serving.test_remote import several

ENGINES = [{"name": name} for name in ("a0", "a1", "a2")]
DISAGGREGATED = [
    *({"name": name, "role": "prefill"} for name in ("p0", "p1")),
    *({"name": name, "role": "decode"} for name in ("d0", "d1")),
]
HOUR = RouterConfig(router_session_affinity_ttl_secs=3600.0)
SECRET = "the-session-of-alice"


async def sent(fleet: Site, number: int, **headers: str) -> dict[str, Any]:
    """The winners of a chat with another prompt each time."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = chat_body(f"{number} " + WORDS * 2)
    async with fleet.client.post(
        fleet.url("/v1/chat/completions"), json=body, headers=named
    ) as answer:
        assert answer.status == 200, await answer.text()
        decision = answer.headers["x-dynctl-decision"]
    await fleet.idle()
    shown: dict[str, Any] = (await fleet.get(f"/v1/decisions/{decision}"))[1]
    assert SECRET not in json.dumps(shown)
    return shown


@pytest.mark.seed("dynamo-1.6: session affinity: x-session-id, x-dynamo-session-id")
@pytest.mark.parametrize("header", ["x_session_id", "x_dynamo_session_id"])
async def test_requests_of_a_session_go_to_one_worker(header: str) -> None:
    async with site(ENGINES, router=HOUR) as fleet:
        samples = iter([0.0, 0.4, 0.7, 0.99] * 100)
        fleet.service.sample = lambda: next(samples)
        shown = [await sent(fleet, number, **{header: SECRET}) for number in range(6)]
        workers = {one["winner"]["decode"]["worker"] for one in shown}
        assert len(workers) == 1
        assert "session" not in shown[0]["decode"]
        row = shown[-1]["decode"]["session"]
        assert (row["kept"], {row["worker"]}) == (True, workers)
        assert 3_500 < row["left_s"] <= 3_600
        assert shown[-1]["decode"]["funnel"][-1]["filter"] == "session"
        free = [await sent(fleet, number) for number in range(10, 16)]
        assert len({one["winner"]["decode"]["worker"] for one in free}) > 1
        assert all("session" not in one["decode"] for one in free)


async def test_both_hops_of_a_disaggregated_fleet_stay() -> None:
    async with site(DISAGGREGATED, router=HOUR) as fleet:
        samples = iter([0.0, 0.9] * 100)
        fleet.service.sample = lambda: next(samples)
        shown = [await sent(fleet, number, x_session_id=SECRET) for number in range(4)]
        for hop in ("prefill", "decode"):
            assert len({one["winner"][hop]["worker"] for one in shown}) == 1
            assert all(one[hop]["session"]["kept"] for one in shown[1:])


async def test_a_session_moves_when_its_worker_leaves() -> None:
    async with site(ENGINES, router=HOUR) as fleet:
        first = (await sent(fleet, 0, x_session_id=SECRET))["winner"]["decode"]["worker"]
        await fleet.frontend.fleet.remove(first)
        moved = (await sent(fleet, 1, x_session_id=SECRET))["winner"]["decode"]["worker"]
        assert moved != first
        assert (await sent(fleet, 2, x_session_id=SECRET))["winner"]["decode"]["worker"] == moved


async def test_two_clients_with_one_session_id_have_two_sessions() -> None:
    keys = ("sk-alice", "sk-bob")
    async with site(ENGINES, router=HOUR, api_keys=keys, api_token="t0k") as fleet:
        fleet.client.headers["authorization"] = "Bearer t0k"
        alice, bob = (f"Bearer {key}" for key in keys)
        await sent(fleet, 0, x_session_id=SECRET, authorization=alice)
        assert (
            "session"
            not in (await sent(fleet, 1, x_session_id=SECRET, authorization=bob))["decode"]
        )
        kept = await sent(fleet, 2, x_session_id=SECRET, authorization=alice)
        assert kept["decode"]["session"]["kept"]
        assert len(fleet.service.router.sessions) == 2
        # A dry run of the operator has a session of its own.
        _, shown, _ = await fleet.post("/v1/route", chat_body("hello"))
        assert "session" not in shown["decode"]


async def test_a_session_id_is_in_no_log_metric_or_engine_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Keeps(ServiceObserver):
        """What every observer gets to see."""

        seen: ClassVar[list[str]] = []

        def on_decision(self, plan: Any, request: Any, record: Any) -> None:
            self.seen.append(repr((plan, record)))

        def on_finished(self, record: Any) -> None:
            self.seen.append(repr(record))

    caplog.set_level("DEBUG")
    async with site([{"name": "a0"}], router=HOUR) as fleet:
        keeps = Keeps()
        fleet.service.observers.append(keeps)
        await sent(fleet, 0, x_session_id=SECRET)
        await sent(fleet, 1, x_session_id=SECRET)
        _, metrics = await fleet.get("/metrics")
        view = fleet.service.router.snapshot()
    assert keeps.seen
    for text in (caplog.text, str(metrics), repr(view), *keeps.seen):
        assert SECRET not in text


async def test_a_dry_run_finds_the_session_and_binds_none() -> None:
    async with site(ENGINES, router=HOUR) as fleet:
        headers = {"x-dynamo-session-id": SECRET}

        async def dry() -> Any:
            async with fleet.client.post(
                fleet.url("/v1/route"), json=chat_body("hello"), headers=headers
            ) as answer:
                return (await answer.json())["decode"].get("session")

        assert await dry() is None
        assert len(fleet.service.router.sessions) == 0
        first = await sent(fleet, 0, x_dynamo_session_id=SECRET)
        found = await dry()
        assert (found["worker"], found["kept"]) == (first["winner"]["decode"]["worker"], True)


async def test_a_session_id_that_is_too_long_is_refused_without_repeating_it() -> None:
    async with site([{"name": "a0"}], router=HOUR) as fleet:
        body, headers = chat_body("hello"), {"x-session-id": "x" * 257}
        url = fleet.url("/v1/chat/completions")
        async with fleet.client.post(url, json=body, headers=headers) as answer:
            text = await answer.text()
            assert answer.status == 400
        assert "x-session-id: expected at most 256 bytes" in text
        assert "xxxx" not in text
        headers["x-session-id"] = "é" * 128
        async with fleet.client.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200


async def test_without_the_setting_the_header_changes_nothing() -> None:
    async with site([{"name": "a0"}]) as fleet:
        shown = await sent(fleet, 0, x_session_id="x" * 300)
        assert "session" not in shown["decode"]
        assert len(fleet.service.router.sessions) == 0


async def test_frontends_of_one_router_share_their_sessions() -> None:
    async with several(router={"router": HOUR}) as fleet:
        chosen = set()
        fleet.router.service.sample = cycle([0.0, 0.4, 0.9]).__next__
        for number in range(6):
            one = fleet.frontends[number % 2]
            async with one.client.post(
                one.url("/v1/chat/completions"),
                json=chat_body(f"{number} " + WORDS * 2, nvext={"extra_fields": ["worker_id"]}),
                headers={"x-session-id": SECRET},
            ) as answer:
                assert answer.status == 200
                chosen.add((await answer.json())["nvext"]["worker_id"]["decode_worker_id"])
        assert len(chosen) == 1
        assert len(fleet.router.service.router.sessions) == 1
