"""What became of each request: the memory, `why`, the log and the recording know it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
import pytest
from msgspec.structs import replace

from dynctl.documents.decisions import ClientResponse, decision_row
from dynctl.documents.errors import EngineAttempt
from dynctl.serving.records.decision_log import end_line
from dynctl.serving.records.decision_memory import MAX_ENDS, DecisionMemory
from dynctl.serving.telemetry.observers import ServiceObserver
from dynctl.sources.client import FrontendClient
from tests.dynctl.serving.fleets import SLOW_HEALTH, WORDS, Site, chat_body, site
from tests.dynctl.serving.gateways import gateway, set_headers
from tests.dynctl.serving.hostile import DONE, EVENT, GOOD, answers, hostile, specs, streams
from tests.dynctl.serving.routed import request, router, worker
from tests.dynctl.serving.test_remote import several
from tests.waiting import until

TWO = [{"name": "a0"}, {"name": "a1"}]
FAILED = b'{"error": {"message": "SECRET PROMPT", "code": 500}}'
NAMED_ERROR = b'event: error\ndata: {"message": "SECRET PROMPT", "code": 500}\n\n'
OBJECT_ERROR = b'data: {"object":"error","message":"SECRET PROMPT","code":500}\n\n'


async def history(fleet: Site, decision: str) -> dict[str, Any]:
    """The past decision when its request has ended."""
    found: dict[str, Any] = {}

    async def ended() -> bool:
        nonlocal found
        status, found = await fleet.get(f"/v1/decisions/{decision}")
        assert status == 200, found
        return bool(found["response"]["state"] != "running")

    async with asyncio.timeout(20):
        while not await ended():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


async def asked(fleet: Site, *, stream: bool = True, **fields: Any) -> tuple[int, bytes, str]:
    """Status, body and decision of a request."""
    body = chat_body("hi", stream=stream, **fields)
    async with fleet.client.post(fleet.url("/v1/chat/completions"), json=body) as answer:
        return answer.status, await answer.read(), answer.headers["x-dynctl-decision"]


def problems(response: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Each attempt's worker, and whether it failed."""
    return [(one["worker"], bool(one["problem"])) for one in response["attempts"]]


async def test_an_answer_has_its_status_times_and_tokens():
    async with site(TWO) as fleet:
        status, _, headers = await fleet.stream(WORDS, max_tokens=5)
        assert status == 200
        found = (await history(fleet, headers["x-dynctl-decision"]))["response"]
        assert (found["state"], found["status"], found["error"]) == ("complete", 200, "")
        assert 0 < found["ttft_s"] <= found["duration_s"]
        # The engine reports usage only where the client wants it.
        assert found["output_tokens"] is None
        assert found["output_events"] >= 5
        assert found["prompt_tokens"] > 1
        (worker_and_failure,) = problems(found)
        assert worker_and_failure[1] is False
        # Without a stream the first output is the whole answer: that is no time to first token.
        _, _, headers = await fleet.chat(max_tokens=5)
        found = (await history(fleet, headers["x-dynctl-decision"]))["response"]
        assert (found["state"], found["ttft_s"], found["output_tokens"]) == ("complete", None, 5)
        usage = {"include_usage": True}
        _, _, headers = await fleet.stream(WORDS, max_tokens=5, stream_options=usage)
        found = (await history(fleet, headers["x-dynctl-decision"]))["response"]
        assert (found["output_tokens"], found["output_events"]) == (5, None)


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ((EVENT,), "ended its stream without [DONE]"),
        ((EVENT, b"data: " + FAILED + b"\n\n", DONE), "reported an error in its stream"),
        ((EVENT, b"data:" + FAILED + b"\n\n", DONE), "reported an error in its stream"),
        ((EVENT, b"data: " + FAILED + b"\n\n"), "reported an error in its stream"),
        ((EVENT, b"event: error\ndata: " + FAILED + b"\n\n"), "reported an error in its stream"),
        ((EVENT, NAMED_ERROR, DONE), "reported an error in its stream"),
        ((EVENT, OBJECT_ERROR, DONE), "reported an error in its stream"),
    ],
    ids=[
        *("no end", "error event", "error event without a space", "error event and no end"),
        *("named event and no end", "named event", "object error"),
    ],
)
@pytest.mark.parametrize("extra", [None, {"extra_fields": ["timing"]}], ids=["plain", "annotated"])
async def test_a_stream_that_died_is_cut_and_has_a_log_line(pieces, problem, extra, caplog):
    caplog.set_level(logging.INFO)
    async with (
        hostile(streams(*pieces)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        status, _, decision = await asked(fleet, **({} if extra is None else {"nvext": extra}))
        assert status == 200
        whole = await history(fleet, decision)
        found = whole["response"]
        assert (found["state"], found["status"]) == ("cut", 200)
        assert problem in found["error"]
        assert found["ttft_s"] is not None
        assert problems(found) == [("e0", True)]
        (line,) = [one for one in caplog.messages if one.startswith("Finished")]
        assert f'request_id="{decision}" outcome=cut status=200' in line
        assert problem in line
        assert "SECRET" not in json.dumps(whole) + "".join(caplog.messages)


@pytest.mark.parametrize("event", [b"data: " + FAILED + b"\n\n", NAMED_ERROR, OBJECT_ERROR])
async def test_an_error_event_before_any_output_is_the_answer_of_an_engine_that_failed(event):
    async with (
        hostile(streams(event, DONE)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        status, _, decision = await asked(fleet)
        found = (await history(fleet, decision))["response"]
        assert (status, found["state"], found["status"]) == (500, "failed", 500)
        assert found["error"].endswith("reported an error in its stream")
        assert found["attempts"][0]["problem"].endswith("reported an error in its stream")


async def test_an_error_event_is_passed_on_as_the_only_one():
    async with (
        hostile(streams(EVENT, b"data: " + FAILED + b"\n\n")) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        _, body, _ = await asked(fleet)
        assert body.count(b'"error"') == 1


@pytest.mark.parametrize("event", [b'{"error": null, "choices": []}', b'{"object":"chat","n":1}'])
async def test_an_event_without_an_error_is_no_failure(event):
    async with (
        hostile(streams(EVENT, b"data: " + event + b"\n\n", DONE)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        _, _, decision = await asked(fleet)
        assert (await history(fleet, decision))["response"]["state"] == "complete"


async def test_text_that_looks_like_an_error_event_is_no_failure():
    text = json.dumps({"choices": [{"delta": {"content": 'data: {"error": 1}'}}]}).encode()
    async with (
        hostile(streams(b"data: " + text + b"\n\n", DONE)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        _, _, decision = await asked(fleet)
        assert (await history(fleet, decision))["response"]["state"] == "complete"
        assert not fleet.service.engine_failures


@pytest.mark.parametrize("status", [400, 404])
async def test_an_error_of_the_request_is_failed_without_a_warning(status, caplog):
    caplog.set_level(logging.WARNING)
    async with (
        hostile(answers(FAILED, "application/json", status)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        got, _, decision = await asked(fleet)
        assert got == status
        whole = await history(fleet, decision)
        found = whole["response"]
        assert (found["state"], found["status"]) == ("failed", status)
        assert found["error"].endswith(f"returned status {status}")
        assert problems(found) == [("e0", True)]
        assert "SECRET" not in json.dumps(whole)
        assert not [one for one in caplog.messages if one.startswith("Finished")]


async def test_both_halves_of_a_retry_say_so_and_the_failed_engine_is_named():
    async with (
        hostile(answers(b"", "application/json", 503), answers(GOOD)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        decision = ""
        while not engines[0].seen:
            status, _, decision = await asked(fleet)
            assert status == 200
        found = await history(fleet, decision)
        assert found["response"]["state"] == "complete"
        assert problems(found["response"]) == [("e0", True), ("e1", False)]
        (earlier,) = found["earlier"]
        assert earlier["response"]["state"] == "retried"
        assert earlier["response"]["error"].endswith("returned status 503")
        (rejected,) = [row for step in found["decode"]["funnel"] for row in step["rejected"]]
        assert rejected["code"] == "excluded"
        assert rejected["message"].startswith(
            "this attempt excludes it because it just failed: http://"
        )
        _, listed = await fleet.get("/v1/decisions?outcome=retried")
        assert [row["id"] for row in listed["decisions"]] == [decision]


async def test_an_engines_error_is_not_explained_by_a_filter():
    """The only other worker is cordoned, so the client gets the error of the one that failed."""
    async with (
        hostile(answers(b"", "application/json", 500), answers(GOOD)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        assert (await fleet.post("/v1/workers/e1/cordon", {}))[0] == 200
        status, _, decision = await asked(fleet)
        assert status == 500
        found = await history(fleet, decision)
        response = found["response"]
        assert (response["state"], response["status"]) == ("failed", 500)
        assert problems(response) == [("e0", True)]
        _, failed = await fleet.get("/v1/decisions?outcome=failed")
        assert [row["id"] for row in failed["decisions"]] == [decision]
        _, refused = await fleet.get("/v1/decisions?outcome=refused")
        assert refused["decisions"] == []
        # Without an engine that failed it is the router's own refusal.
        assert (await fleet.post("/v1/workers/e0/cordon", {}))[0] == 200
        status, _, decision = await asked(fleet)
        response = (await history(fleet, decision))["response"]
        assert (response["state"], response["status"]) == ("refused", status)
        assert response["attempts"] == []
        assert "cordoned" in response["error"]


async def test_a_client_that_left_is_cancelled():
    async with site([{"name": "a0", "speedup_ratio": 1.0, "decode_itl_ms": 50.0}]) as fleet:
        body = chat_body("hi", stream=True, max_tokens=500)
        async with fleet.client.post(fleet.url("/v1/chat/completions"), json=body) as answer:
            await answer.content.readany()
            decision = answer.headers["x-dynctl-decision"]
            _, running = await fleet.get(f"/v1/decisions/{decision}")
            assert running["response"]["state"] == "running"
        found = (await history(fleet, decision))["response"]
        assert (found["state"], found["status"]) == ("cancelled", 200)
        assert found["ttft_s"] is not None
        slow = chat_body("hi", max_tokens=500)
        with pytest.raises(TimeoutError):
            await fleet.client.post(
                fleet.url("/v1/chat/completions"),
                json=slow,
                timeout=aiohttp.ClientTimeout(total=0.2),
            )
        await fleet.idle()
        _, listed = await fleet.get("/v1/decisions?outcome=cancelled&limit=1")
        assert listed["decisions"][0]["response"]["status"] == 499


async def test_both_hops_of_a_hand_off_are_attempts():
    pair = [{"name": "p0", "role": "prefill"}, {"name": "d0", "role": "decode"}]
    async with site(pair) as fleet:
        status, _, headers = await fleet.stream(WORDS, max_tokens=3)
        assert status == 200
        found = (await history(fleet, headers["x-dynctl-decision"]))["response"]
        stages = [(one["worker"], one["stage"]) for one in found["attempts"]]
        assert stages == [("p0", "prefill"), ("d0", "decode")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_during_the_prefill_hop_is_cancelled(stream):
    slow = {"name": "p0", "role": "prefill", "speedup_ratio": 0.001}
    async with site([slow, {"name": "d0", "role": "decode"}]) as fleet:
        with pytest.raises(TimeoutError):
            await fleet.client.post(
                fleet.url("/v1/chat/completions"),
                json=chat_body(WORDS, stream=stream, max_tokens=5),
                timeout=aiohttp.ClientTimeout(total=0.3),
            )
        await fleet.idle()
        _, listed = await fleet.get("/v1/decisions?outcome=cancelled")
        (row,) = listed["decisions"]
        assert row["response"]["status"] == 499
        assert problems(row["response"]) == [("p0", False)]


async def test_why_prints_what_the_endpoint_has():
    async with site(TWO) as fleet:
        _, _, headers = await fleet.chat(max_tokens=2)
        decision = headers["x-dynctl-decision"]
        plain = await history(fleet, decision)
        client = FrontendClient(fleet.frontend.url)
        read = await asyncio.to_thread(client.decision, decision)
        assert msgspec.json.decode(msgspec.json.encode(read)) == plain


async def test_the_ends_of_requests_follow_the_decisions():
    """A reader that has seen a running request gets its end."""
    async with site([{"name": "a0", "speedup_ratio": 1.0, "decode_itl_ms": 20.0}]) as fleet:
        body = chat_body("hi", stream=True, max_tokens=30)
        async with fleet.client.post(fleet.url("/v1/chat/completions"), json=body) as answer:
            await answer.content.readany()
            _, first = await fleet.get("/v1/decisions?ends=0")
            assert [row["response"]["state"] for row in first["decisions"]] == ["running"]
            assert (first["ended"], first["ends"]) == ([], 0)
            cursors = f"since={first['cursor']}&ends={first['ends']}"
            waiting = asyncio.create_task(fleet.get(f"/v1/decisions?{cursors}&wait=20"))
            await answer.read()
        _, later = await waiting
        assert later["decisions"] == []
        assert [row["response"]["state"] for row in later["ended"]] == ["complete"]
        assert later["ends"] == 1
        _, other = await fleet.get(f"/v1/decisions?{cursors}&outcome=failed")
        assert other["ended"] == []
        _, plain = await fleet.get("/v1/decisions")
        assert "ended" not in plain


async def test_a_router_process_gets_the_outcomes_of_its_frontends():
    async with several(frontends=1, router={"health": SLOW_HEALTH}) as fleet:
        frontend, router_site = fleet.frontends[0], Site(fleet.router, fleet.client)
        _, _, headers = await frontend.stream(WORDS, max_tokens=4)
        found = await history(router_site, headers["x-dynctl-decision"])
        assert (found["response"]["state"], found["response"]["status"]) == ("complete", 200)
        assert found["response"]["output_events"] >= 4
        assert found["response"]["ttft_s"] > 0
        for engine in fleet.engines.values():
            engine.engine.faults.update({"refuse": 503})
        status, _, headers = await frontend.chat()
        assert status == 503
        decision = headers["x-dynctl-decision"]
        memory = fleet.router.core.memory

        def failed() -> bool:
            kept = memory.get(decision)
            return kept is not None and memory.response(kept).state == "failed"

        await until(failed)
        found = await history(router_site, decision)
        assert {name for name, broke in problems(found["response"]) if broke} == {"a0", "b0"}
        assert {row["response"]["state"] for row in found["earlier"]} == {"retried"}
        messages = [r["message"] for s in found["decode"]["funnel"] for r in s["rejected"]]
        assert all("because it just failed" in one for one in messages)


async def test_a_gateways_pick_has_what_the_gateway_shows():
    async with gateway(({"name": "a"}, {"name": "b"})) as fleet:

        async def picked() -> Any:
            stream = fleet.request()
            await stream.ask(chat_body(WORDS, stream=True))
            await stream.answer()
            return stream

        stream = await picked()
        await stream.response(404, end=True)
        decision = set_headers(await stream.answer())["x-dynctl-decision"]
        found = (await history(fleet, decision))["response"]
        assert (found["state"], found["status"]) == ("failed", 404)
        assert found["attempts"][0]["problem"].endswith("answered with status 404")
        stream = await picked()
        await stream.response()
        decision = set_headers(await stream.answer())["x-dynctl-decision"]
        await stream.body(b"data: {}\n\n", kind="response_body")
        await stream.answer()
        stream.call.cancel()
        found = (await history(fleet, decision))["response"]
        assert (found["state"], found["status"]) == ("cut", 200)
        assert "its client left, or the engine failed" in found["error"]
        stream = await picked()
        stream.call.cancel()
        await fleet.idle()
        _, listed = await fleet.get("/v1/decisions?outcome=unknown")
        (row,) = listed["decisions"]
        assert row["response"]["status"] is None
        assert row["response"]["error"] == "the gateway reported no response"


HOOKS = [name for name in vars(ServiceObserver) if name.startswith("on_")]


async def test_an_observer_that_fails_fails_no_request(caplog):
    def broken(self, *values):
        raise RuntimeError(f"broken {len(values)}")

    observer = type("Broken", (ServiceObserver,), dict.fromkeys(HOOKS, broken))()
    async with site(TWO) as fleet:
        others = list(fleet.service.observers)
        for other in others:
            fleet.service.observers.remove(other)
        fleet.service.observers += [observer, *others]
        fleet.service.add_tap(broken)
        assert (await fleet.chat())[0] == 200
        assert (await fleet.post("/v1/completions", {"model": "demo", "prompt": "hi"}))[0] == 200
        fleet.service.note("canary", "tiny", "a step")
        assert any(
            one.code == "BACKGROUND_TASK_FAILED" and one.subject == "observer of Broken"
            for one in fleet.service.conditions
        )
        assert caplog.text.count("background task failed: observer of Broken") == 1
        _, listed = await fleet.get("/v1/decisions")
        assert {row["response"]["state"] for row in listed["decisions"]} == {"complete"}


# -- the memory ------------------------------------------------------------------------------------


def test_a_response_costs_its_bytes_and_goes_with_its_decisions():
    made = router(worker(1), worker(2))
    memory = DecisionMemory()
    memory.record(made.plan(request(request_id="one")), 1.0)
    before = memory.size
    memory.respond("one", ClientResponse("failed", 500, "e" * 100))
    assert memory.size >= before + 100
    memory.respond("one", ClientResponse("complete", 200))
    assert before < memory.size < before + 500
    memory.respond("other", ClientResponse("complete", 200))
    assert memory.ended == 2
    memory.max_bytes = 1
    memory.record(made.plan(request(request_id="two")), 2.0)
    assert (len(memory), memory.size) == (0, 0)
    assert memory.ended_since(0, memory.recorded, 10) == []


def test_ends_are_bounded_and_a_cursor_of_another_process_gets_none():
    made = router(worker(1), worker(2))
    memory = DecisionMemory()
    memory.record(made.plan(request(request_id="one")), 1.0)
    for _ in range(MAX_ENDS + 10):
        memory.respond("one", ClientResponse("complete", 200))
    assert len(memory.ended_since(0, memory.recorded, 10**6)) == 1
    assert memory.ended_since(memory.ended, memory.recorded, 10) == []
    assert memory.ended_since(memory.ended + 1, memory.recorded, 10) == []
    # Decisions that the reader gets as such are not repeated.
    assert memory.ended_since(0, 0, 10) == []


def test_an_earlier_attempt_has_its_own_failures_only():
    attempts = (
        EngineAttempt("w1", "aggregated", "refused the connection"),
        EngineAttempt("w2", "aggregated", "returned status 500"),
        EngineAttempt("w3", "aggregated"),
    )
    whole = ClientResponse("complete", 200, attempts=attempts)
    earlier = whole.of_earlier({"w2"})
    assert (earlier.state, earlier.status) == ("retried", None)
    assert earlier.error == "returned status 500"
    assert earlier.attempts == attempts[1:2]
    assert replace(whole, attempts=()).of_earlier({"w2"}) == ClientResponse("retried")


def test_another_routers_choice_has_an_unknown_response():
    plan = router(worker(1)).plan(request())
    assert decision_row(plan, at=1.0, whole=True).response.state == "unknown"


def test_the_line_of_an_end_is_one_line():
    response = ClientResponse(
        "failed", 502, "x", None, 0.25, 10, None, None, None,
        (EngineAttempt("w1", "decode", "bad\nthing"), EngineAttempt("w2", "decode", "x")),
    )  # fmt: skip
    assert end_line("a\nb", response) == (
        'Finished request_id="a\\nb" outcome=failed status=502 ttft_s=None duration_s=0.250'
        " prompt_tokens=10 output_tokens=None output_events=None failed_attempts=2:"
        " w1 (decode): bad thing; w2 (decode): x"
    )
