"""What a source does not know becomes a doubt; the answer shows which doubts can change it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dynctl.base.quantities import chance
from dynctl.documents.doubts import Doubt, Varies, distinct, doubt
from dynctl.documents.route_result import RouteResult
from dynctl.health.deployment import Problem, ProblemCode
from dynctl.screens.canvas import Canvas
from dynctl.screens.route import ExplainScreen, route_short
from dynctl.sources.dynamo.router_state import (
    index_doubts,
    registration_doubts,
    take_load,
    take_settings,
)
from dynctl.sources.query import RouteQuery
from dynctl.sources.view import ViewSource
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics, RankLoad
from router_core import Change, Router, Worker, WorkerUpserted
from tests.golden.fleets import TOKENS, two_zones

KV = FrontendMetrics(kv_routing=True, kv_events=True)


def observed(*cards: dict[str, Any] | None, **more: Any) -> Any:
    """An observer with workers that have these router settings in their cards."""
    router = Router()

    def apply(change: Change) -> None:
        router.apply(change, 0.0)

    workers = []
    for number, one in enumerate(cards, 1):
        worker = Worker(number, f"w{number}", "tiny")
        apply(WorkerUpserted(worker))
        registered = SimpleNamespace(router_config=one)
        workers.append(SimpleNamespace(card=registered, worker=worker, sources={}))
    load = SimpleNamespace(
        since=0.0, added=0, reports=0, routers=set(), reported=set(), over=set(), earlier={}
    )
    problems = more.pop("problems", ())
    found = {
        "deployment": SimpleNamespace(
            workers=workers,
            problems=problems,
            worker_sets=(),
            sequences=more.pop("sequences", ("a channel",)),
        ),
        "problems": problems,
        "router": router,
        "apply": apply,
        "load": load,
        **more,
    }
    return SimpleNamespace(**found)


def card(**values: Any) -> dict[str, Any]:
    mode = values.pop("router_mode", "k_v")
    return {"router_mode": mode, "kv_router_config": values}


def codes(doubts: list[Doubt]) -> list[str]:
    return [one.code for one in doubts]


def test_without_settings_and_frontends_everything_is_open():
    _, doubts = take_settings(observed(None), {}, [])
    assert codes(doubts) == ["DYR0711", "DYR0712", "DYR0714"]
    open_settings = doubts[0].varies
    assert open_settings is not None
    assert {"router_mode", "use_kv_events", "overlap_score_credit"} <= set(open_settings.settings)


def test_metrics_of_a_frontend_show_its_mode_and_its_events():
    _, doubts = take_settings(observed(None), {}, [KV])
    assert codes(doubts) == ["DYR0711", "DYR0712"]
    assert doubts[0].varies is not None
    assert not {"router_mode", "use_kv_events"} & set(doubts[0].varies.settings)
    _, doubts = take_settings(observed(None), {}, [replace(KV, kv_events=False)])
    assert codes(doubts) == ["DYR0711", "DYR0712", "DYR0718"]
    unknown = FrontendMetrics()
    _, doubts = take_settings(observed(None), {}, [KV, unknown])
    assert doubts[0].varies is not None
    assert "router_mode" in doubts[0].varies.settings


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"use_kv_events": False}, ["DYR0718"]),
        ({"router_queue_threshold": 2.0}, ["DYR0713"]),
        ({"router_mode": "round_robin"}, ["DYR0716"]),
        ({"router_mode": "direct"}, []),
        ({"router_mode": "power_of_two_choices"}, ["DYR0744"]),
        ({"router_mode": "device_aware_weighted"}, ["DYR0744"]),
        ({"router_mode": "sticky"}, ["DYR0717"]),
        pytest.param(
            {"shared_cache_type": "lmcache"},
            ["DYR0717"],
            marks=pytest.mark.seed("dynamo-1.6: tiers: shared cache"),
        ),
        ({"a_setting_of_tomorrow": 3}, ["DYR0717"]),
    ],
)
def test_settings_of_the_cards_that_are_not_predictable(
    settings: dict[str, Any], expected: list[str]
):
    assumptions, doubts = take_settings(observed(card(**settings)), {}, [])
    assert codes(doubts) == expected
    assert assumptions == ["router settings are those that the workers' cards advertise"]


def test_load_of_frontends_is_sums_and_may_count_requests_twice():
    metrics = replace(KV, rank_loads={(1, 0): RankLoad(4, 0)})
    _, doubts = take_load(observed(None), [metrics])
    assert codes(doubts) == ["DYR0715"]
    _, doubts = take_load(observed(None), [metrics, replace(metrics, kv_routing=False)])
    assert codes(doubts) == ["DYR0716", "DYR0709", "DYR0715"]
    assert doubts[1].varies == Varies(load="fewer", copies=2)
    mirrored = observed({"kv_router_config": {"router_replica_sync": True}})
    assert codes(take_load(mirrored, [metrics, metrics])[1]) == ["DYR0715"]


def test_load_that_nobody_reports_is_unknown():
    assert codes(take_load(observed(None), [])[1]) == ["DYR0707"]
    some = observed(None)
    some.load.added = 3
    assert codes(take_load(some, [])[1]) == ["DYR0708"]


def test_an_index_that_is_not_current_and_contradictions():
    worker = SimpleNamespace(worker_id=7, name="prefill-a0")
    stale = observed(not_current=lambda: {(7, 0): "recovery is running", (7, 1): "-"})
    stale.deployment.workers = [SimpleNamespace(worker=worker)]
    found = index_doubts(stale)
    assert [one.varies for one in found] == [Varies(overlap=True, workers=["prefill-a0"])] * 2
    router = Router()
    for number, name in enumerate(("other", "prefill-a0"), start=6):
        router.apply(WorkerUpserted(Worker(number, name, "tiny")), 0.0)
    stale.router = router
    slots = [router.registry.slots(number)[0] for number in (6, 7)]
    for number, slot in enumerate(slots):  # each engine has a name of its own for the same block
        router.index.store(slot, None, [100 + number], [5])
    assert [one.code for one in index_doubts(stale)] == ["DYR0705", "DYR0705", "DYR0761"]
    problems = [
        Problem(ProblemCode.ROUTER_CONFIGS_DIFFER, "tiny", "two configurations"),
        Problem(ProblemCode.EVENTS_MISSING, "w", "no events"),
    ]
    contradiction, silent = registration_doubts(observed(problems=problems))
    assert (contradiction.code, contradiction.what) == ("DYR0719", "two configurations")
    assert (silent.code, silent.what) == ("DYR0790", "w register no KV events that dynctl reads")
    assert silent.matters


# -- the answer ------------------------------------------------------------------------------------


def routed(*doubts: Doubt, **query: Any) -> RouteResult:
    """Two zones: prefill-a0 wins by one block, decode-a0 is the only one."""
    view = replace(two_zones().view, doubts=doubts)
    return ViewSource(view, "x").route(RouteQuery(token_ids=TOKENS, **query))


TEMPERATURE = doubt("DYR0712", varies=Varies(settings={"router_temperature": [0.5]}))
SETTINGS = doubt(
    "DYR0711",
    varies=Varies(settings={"prefill_load_scale": [2.0], "overlap_score_credit": [0.5, 0.0]}),
    preset="dynamo-1.6",
)


def test_the_doubt_names_the_setting_and_the_share_of_the_winner():
    result = routed(TEMPERATURE)
    [found] = result.doubts
    assert found.matters
    assert not result.certain
    assert found.effect.startswith("with router_temperature=0.5 prefill-b")
    assert found.effect.endswith("could win, prefill-a0 would get 88 %")
    screen = route_short(result, Canvas(80))
    assert "doubts  1 could change the answer\n  DYR0712  the frontend's router_temp" in screen


def test_a_setting_that_was_set_is_known():
    result = routed(TEMPERATURE, assignments=("router_temperature=0",))
    assert (result.doubts, result.certain) == ([], True)
    narrower = routed(SETTINGS, assignments=("overlap_score_credit=1",))
    assert [one.matters for one in narrower.doubts] == [False]
    assert narrower.certain
    screen = ExplainScreen()(narrower, Canvas(80))
    assert "certain  no doubt can change the answer (1 doubt: --all)" in screen
    assert "DYR0711" not in screen
    assert "DYR0711" in ExplainScreen(show_all=True)(narrower, Canvas(80))


def test_a_refusal_that_a_threshold_makes_is_doubted():
    """prefill-b1 is busy by its threshold; without one it would be chosen."""
    limit = "active_prefill_tokens_threshold"
    unknown = doubt("DYR0714", varies=Varies(settings={limit: [50_000]}), why="-")
    result = routed(unknown, pin_prefill="prefill-b1")
    assert not result.ok
    assert not result.certain
    [found] = result.doubts
    assert found.effect == f"with {limit}=50000 prefill-b1 would win the prefill hop"


def test_only_the_setting_that_changes_the_answer_is_named():
    [found] = routed(SETTINGS).doubts
    assert found.effect.startswith("with overlap_score_credit=0")
    assert "prefill_load_scale" not in found.effect


def test_doubts_that_matter_only_together_are_all_named():
    """prefill-a0 is ahead by 0.125 blocks: less credit costs 0.1, its decay 0.08, both 0.17."""
    credit = doubt("DYR0711", varies=Varies(settings={"overlap_score_credit": [0.9]}), preset="-")
    decay = doubt("DYR0704", varies=Varies(settings={"overlap_score_credit_decay": [0.3]}), why="-")
    load = ("load.prefill-a0.prefill_tokens=+14",)
    assert routed(credit, assignments=load).certain
    assert routed(decay, assignments=load).certain
    both = routed(credit, decay, assignments=load)
    assert not both.certain
    assert [one.matters for one in both.doubts] == [True, True]
    assert both.doubts[0].effect == "together with the other doubts another worker can win"


def test_doubts_are_distinct_and_shares_are_never_rounded_to_nothing():
    assert distinct([TEMPERATURE, TEMPERATURE, SETTINGS]) == [TEMPERATURE, SETTINGS]
    shares = (0.0, 0.001, 0.5, 0.999, 1.0)
    assert [chance(share) for share in shares] == [
        "0 %", "less than 1 %", "50 %", "more than 99 %", "100 %",
    ]  # fmt: skip
