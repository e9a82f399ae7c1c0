"""`route --explain`: columns that only some answers have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from dynctl.documents.decisions import ClientResponse, past_decision
from dynctl.documents.errors import EngineAttempt
from dynctl.documents.route_of_plan import route_result
from dynctl.documents.route_result import BypassRow, PrefillPrediction, RouteResult
from dynctl.documents.view import SavedView, decode_view, encode_view
from dynctl.screens.canvas import Canvas
from dynctl.screens.route import ExplainScreen, _sentence, route_short
from dynctl.sources.query import RouteQuery
from dynctl.sources.view import ViewSource
from router_core import (
    BlocksStored,
    Booked,
    Enqueued,
    Freed,
    IndexConnected,
    IndexMarked,
    KvEvent,
    ModelRuntimeConfig,
    QueueFull,
    Router,
    RouterConfig,
    RoutingRequest,
    Session,
    Worker,
    WorkerAvailability,
    WorkerUpserted,
)
from router_core.hashing import local_block_hashes
from router_core.lower_tiers import DISK, HOST
from tests.router_core.fleet import apply_all, prompt, request, router, stored, worker
from tests.router_core.test_lower_tiers import store


def test_blocks_in_lower_tiers_have_columns_where_there_are_any() -> None:
    made = router(worker(1), worker(2))
    made.apply(KvEvent(2, 0, store(0, 2, "device")), 0.0)

    def lines() -> list[list[str]]:
        result = ViewSource(SavedView(made, 0.0), "x").route(RouteQuery(token_ids=prompt(128)))
        text = ExplainScreen(True)(result, Canvas(100))
        return [line.split() for line in text.splitlines()]

    assert not any("host" in line for line in lines())
    for event in (store(0, 1, "device"), store(1, 2, HOST), store(2, 4, DISK)):
        made.apply(KvEvent(1, 0, event), 0.0)
    drawn = lines()
    head = next(line for line in drawn if "worker" in line and "cost" in line)
    assert head[:6] == ["worker", "cached", "host", "disk", "prefill", "decode"]
    winner = next(line for line in drawn if line[:2] == [">", "w1"])
    assert winner[2:7] == ["1", "1", "2", "5.750", "8.000"]


def test_what_is_left_of_the_prefill_load_is_shown_with_its_model() -> None:
    made = router(*(worker(number) for number in range(1, 7)))
    for number in range(1, 6):
        predicted = Booked(f"r{number}", "aggregated", number, 0, 1000, predicted_s=10.0 * number)
        assert made.apply(predicted, 0.0).ok
    source = ViewSource(SavedView(made, 5.0), "x")
    result = source.route(RouteQuery(token_ids=prompt(128)))
    assert result.decode is not None
    rows = {row.worker: row for row in result.decode.candidates}
    assert (rows["w1"].active_prefill_tokens, rows["w1"].booked_prefill_tokens) == (500, 1000)
    assert (rows["w6"].active_prefill_tokens, rows["w6"].booked_prefill_tokens) == (0, 0)
    text = ExplainScreen(True)(result, Canvas(130))
    assert "500 of 1,000" in text
    words = " ".join(text.split())
    expected = "left of those booked: 500 of 1,000 on w1, 750 of 1,000 on w2, 834 of 1,000 on w3"
    assert f"{expected} and 2 more" in words
    # A frontend adds what it predicts for the request itself.
    load = PrefillPrediction("estimate for h200_sxm, tp 1", 128, 0, 0.0123)
    hop = msgspec.structs.replace(result.decode, prefill_load=load)
    text = ExplainScreen(True)(msgspec.structs.replace(result, decode=hop), Canvas(130))
    expected = "prefill of 128 tokens is predicted to take 12.3 ms (estimate for h200_sxm, tp 1)"
    assert expected in " ".join(text.split())


def test_predicted_blocks_have_a_column_and_a_doubt() -> None:
    made = router(worker(1), worker(2), router_predicted_ttl_secs=5.0)
    asked = request(128)
    made.apply(made.booking(made.plan(asked).final, asked), 0.0)
    result = ViewSource(SavedView(made, 0.0), "x").route(RouteQuery(token_ids=prompt(128)))
    lines = [line.split() for line in ExplainScreen(True)(result, Canvas(100)).splitlines()]
    head = next(line for line in lines if "worker" in line and "cost" in line)
    assert head[:3] == ["worker", "cached", "predicted"]
    assert next(line for line in lines if line[:2] == [">", "w1"])[2:4] == ["8", "8"]
    assert [one.code for one in result.doubts if one.code == "DYR0763"] == ["DYR0763"]
    again = decode_view(encode_view(made.capture(), now=0.0)).router
    assert next(again.plan(asked).final.rows()).predicted_blocks == 8


def test_an_index_that_is_not_read_yet_is_a_doubt() -> None:
    """No condition holds for it: no event is lost."""
    made = router(worker(1), worker(2))
    for number, recovering in ((1, False), (2, True)):
        made.apply(IndexMarked(number, 0, "current"), 0.0)
        made.apply(IndexConnected(number, 0, True, recovering=recovering), 0.0)
    asked = request(128)
    chosen = BlocksStored(None, tuple(range(1, 5)), tuple(local_block_hashes(prompt(64), 16)))
    assert made.apply(KvEvent(1, 0, chosen), 0.0).ok
    result = route_result(made, asked, made.plan(asked), now=0.0)
    [doubted] = result.doubts
    assert (doubted.code, doubted.matters, result.certain) == ("DYR0705", True, False)
    assert doubted.what.startswith(
        "cache contents of w2 may be out of date: what was cached before"
    )


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_the_worker_of_a_session_is_named(mode: str) -> None:
    settings = {
        "router_session_affinity_ttl_secs": 60.0,
        "router_session_affinity_mode": mode,
        "router_session_affinity_yield_blocks": 10.0,
    }
    made = router(worker(1), worker(2), **settings)
    asked = replace(request(34), session=Session("key", 26.0))
    first = replace(asked, id="first", session=Session("key", 0.0))
    made.apply(made.booking(made.plan(first).final, first), 0.0)
    made.apply(Freed("first"), 0.0)

    def shown() -> str:
        plan = made.plan(asked, detail=True)
        result = route_result(made, asked, plan, now=26.0)
        assert result.decode is not None
        return ExplainScreen(True)(result, Canvas(200))

    assert "session affinity: w1, 34 s left" in shown()
    made.apply(made.booking(made.plan(asked).final, replace(asked, id="more", session=None)), 0.0)
    if mode == "soft":
        more = replace(request(161, seed=5), id="load")
        on_first = replace(made.booking(made.plan(more).final, more), worker_id=1)
        made.apply(on_first, 0.0)
        assert "session affinity: w1 costs" in shown()
        assert "more, so the session moves" in shown()
    apply_all(made, WorkerAvailability(1, "no response"))
    assert "session affinity: w1 is excluded (available), so the session moves" in shown()


def test_a_saved_view_has_running_estimates_and_no_sessions() -> None:
    settings = {
        "use_kv_events": False,
        "router_approximate_cache_policy": "lru",
        "router_session_affinity_ttl_secs": 60.0,
    }
    made = Router(RouterConfig().with_values(settings), learns=True)
    for one in (worker(1, kv_events=False, total_kv_blocks=99), worker(2, kv_events=False)):
        apply_all(made, WorkerUpserted(one))
    for name in ("a", "b"):
        asked = replace(request(65, name, seed=len(name)), session=Session("key", 0.0))
        made.apply(made.booking(made.plan(asked).final, asked), 0.0)
    data = encode_view(made.capture(), now=0.0)
    assert b"sessions" not in data
    again = decode_view(data).router
    assert [again.cached_blocks(slot) for slot in (0, 1)] == [
        made.cached_blocks(slot) for slot in (0, 1)
    ]
    assert len(again.sessions) == 0


@pytest.mark.seed("dynamo-1.6: skip the hop: bypass")
def test_why_the_prefill_hop_is_left_out_or_kept_is_shown() -> None:
    made = router(
        worker(1, "prefill-0", "prefill"),
        worker(2, "decode-0", "decode"),
        worker(3, "decode-1", "decode"),
        conditional_disagg_enabled=True,
    )
    apply_all(made, stored(3, 6))

    def shown(tokens: list[int], *settings: str) -> tuple[RouteResult, str, str]:
        saved = decode_view(encode_view(made.capture(), now=0.0, preset="dynamo-1.6"))
        query = RouteQuery(token_ids=tokens, assignments=settings)
        result = ViewSource(saved, "x").route(query)
        canvas = Canvas(120)
        return result, ExplainScreen()(result, canvas), route_short(result, canvas)

    result, explained, short = shown(prompt(112))
    sentence = (
        "prefill hop left out: decode-1 computes 16 of 112 prompt tokens < 2,048 and 14 % < 70 %"
    )
    assert f"hop      {sentence}" in explained
    assert f"hop     {sentence}" in short
    assert "1 aggregated" in explained
    assert isinstance(result.bypass, BypassRow)
    assert (result.bypass.bypassed, result.bypass.reason) == (True, "short_prefill")
    assert msgspec.json.decode(msgspec.json.encode(result), type=RouteResult) == result
    # Where the hop stays, the decode hop credits cached blocks, and both screens have them.
    result, explained, short = shown(prompt(112), "bypass_eff_isl_threshold=10")
    assert "hop      prefill hop kept: decode-1 would compute 16 of 112" in explained
    winner = next(line.split() for line in explained.splitlines() if "> decode-1" in line)
    assert winner[1:6] == ["decode-1", "6", "-", "1.000", "1.000"]
    assert "6 of 7" in next(line for line in short.splitlines() if line.startswith("decode"))
    # Without the setting nothing of it is there.
    result, explained, _ = shown(prompt(112), "conditional_disagg=false")
    assert b"bypass" not in msgspec.json.encode(result)
    assert "prefill hop" not in explained
    winner = next(line.split() for line in explained.splitlines() if "> decode-" in line)
    assert winner[2] == "-"


def waiting_plan() -> tuple[Any, Any, Any]:
    """(router, request, plan) of a request that has to wait behind another one."""
    made = Router(RouterConfig(router_queue_threshold=1.0))
    for number in (1, 2):
        card = ModelRuntimeConfig(max_num_batched_tokens=100)
        made.apply(WorkerUpserted(Worker(number, f"w{number}", "demo", runtime_config=card)), 0.0)
        load = Booked(f"load-{number}", "aggregated", number, 0, prefill_tokens=110 * number)
        made.apply(load, 0.0)
    first = RoutingRequest("first", "demo", 20, 16, arrived_at=1.0)
    entering = made.entering(made.plan(first), first)
    assert isinstance(entering, Enqueued)
    assert made.apply(entering, 1.0).ok
    asked = RoutingRequest("r1", "demo", 20, 16, arrived_at=2.0)
    return made, asked, made.plan(asked)


def explained(made: Any, asked: Any, plan: Any) -> str:
    result = route_result(made, asked, plan, now=5.0)
    return " ".join(ExplainScreen()(result, Canvas(200)).split())


def test_a_request_that_waits_is_explained() -> None:
    made, asked, plan = waiting_plan()
    text = explained(made, asked, plan)
    assert (
        "the request waits in the router queue, class default, behind 1 other: all 2 eligible "
        "ranks hold more active prefill tokens than 1 x max_num_batched_tokens (w1 has 10 too "
        "many) and 1 of its class waits already. It is decided again when it leaves the queue."
    ) in text
    assert "answer w1, after a wait in the router queue" in text


def test_a_request_that_waited_is_explained_in_the_past() -> None:
    made, asked, plan = waiting_plan()
    text = explained(made, asked, plan.after_wait(plan, 2.5))
    assert (
        "the request waited 2.500 s in the router queue, class default, behind 1 other: all 2 "
        "eligible ranks held more active prefill tokens than 1 x max_num_batched_tokens and 1 of "
        "its class waited already. It was decided when it left the queue."
    ) in text
    assert "after a wait" not in text
    assert "DYR0713" not in text


def test_a_request_that_was_turned_away_names_the_limit() -> None:
    made, asked, plan = waiting_plan()
    refused = plan.turned_away(QueueFull("default", "total_requests", 1, 1))
    assert not refused.ok
    text = explained(made, asked, refused)
    assert "answer none: 1 request waits in the router queue, the limit is 1" in text
    assert "stopped by the router queue: its limit of total_requests is 1" in text


@pytest.mark.parametrize(
    ("response", "line"),
    [
        (
            ClientResponse("complete", 200, "", 0.0123, 2.5, 472, 448, 5),
            "outcome  200, complete; first output after 12 ms, 2.50 s in all, 472 prompt tokens"
            " (448 cached), 5 output tokens",
        ),
        (
            ClientResponse("cut", 200, "w1 closed the connection", 0.1, 0.3, output_events=7),
            "outcome  200, cut in mid-response: w1 closed the connection; first output after"
            " 100 ms, 300 ms in all, ~7 output tokens",
        ),
        (
            ClientResponse("cancelled", 499, duration_s=11.4),
            "outcome  cancelled: the client left before an engine got the request; 11 s in all",
        ),
        (ClientResponse("cancelled", 200), "outcome  200, cancelled: the client left in"),
        (ClientResponse("failed", 404, "returned 404"), "outcome  404, failed: returned 404"),
        (ClientResponse("running"), "outcome  the request is running"),
        (ClientResponse("unknown", error="no report"), "outcome  unknown: no report"),
    ],
)
def test_what_the_client_got_is_below_the_answer(response: ClientResponse, line: str) -> None:
    plan = router(worker(1), worker(2)).plan(request(80), detail=True)
    past = past_decision(plan, at=1.0, whole=True, response=response)
    text = ExplainScreen()(past, Canvas(200))
    assert line in text
    assert text.index("answer   w") < text.index("outcome ")
    assert "outcome" not in ExplainScreen()(past_decision(plan, at=1.0, whole=True), Canvas(200))


def test_the_error_of_an_engine_is_not_explained_by_the_filter_that_stopped_a_retry() -> None:
    made = router(worker(1), worker(2))
    apply_all(made, WorkerAvailability(2, "cordoned"))
    again = replace(
        request(80), allowed_worker_ids=frozenset({2}), excluded=((1, "it just failed"),)
    )
    plan = made.plan(again)
    assert not plan.ok
    attempts = (EngineAttempt("w1", "aggregated", "returned status 500"),)
    failed = ClientResponse("failed", 500, "returned status 500", attempts=attempts)
    text = ExplainScreen()(past_decision(plan, at=1.0, whole=True, response=failed), Canvas(200))
    assert "\nanswer " not in text
    assert "\nstopped " not in text
    assert "x w1 it just failed" in " ".join(text.split())
    assert "retry    no other worker could take the request: 0/2 workers eligible: " in text
    assert "outcome  500, failed: returned status 500\n" in text
    assert "engines  1. w1 (aggregated): returned status 500\n" in text
    # The same plan as the router's own refusal.
    refused = ClientResponse("refused", 503, "the reason that the answer has")
    text = ExplainScreen()(past_decision(plan, at=1.0, whole=True, response=refused), Canvas(200))
    assert "stopped  by the available filter" in text
    assert "outcome  503, refused\n" in text


def test_what_resolves_a_doubt_is_a_sentence_but_commands_stay_as_they_are_typed() -> None:
    assert _sentence("set it: --set NAME=VALUE") == "Set it: --set NAME=VALUE"
    for command in ("dynctl check shows the cause", "--explain shows the chance"):
        assert _sentence(command) == command
