"""A snapshot at any point plus the later changes gives the same state."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import router_core.changes as c
from router_core.busy import BusyTracker
from router_core.config import (
    PRESETS,
    SETTINGS,
    RouterConfig,
    find_setting,
    legacy_overlap_weight,
    preset,
)
from router_core.decision import Decision
from router_core.errors import ConfigError, SnapshotError
from router_core.events import BlocksRemoved, BlocksStored, Cleared
from router_core.index import IndexBound
from router_core.policies import FILTERS, PROFILES
from router_core.router import Router
from router_core.routing_view import Pin
from tests.router_core.fleet import MODEL, active, apply_all, request, router, stored, worker

IDS = st.integers(1, 4)
NAMES = st.sampled_from(["r1", "r2", "r3", "r4", "r5"])
SIGNAL = st.sampled_from([None, 10, 60])
FRACTION = st.sampled_from([None, 0.5])
INDEX_STATES = ["current", "gapped", "over_limit", "absent"]
ROLES = st.sampled_from(["aggregated", "prefill", "decode"])


RANKS = st.integers(0, 1)
REMOVED = BlocksRemoved(stored(1, 6, 0).event.block_hashes[2:3])  # type: ignore[union-attr]

#: Each draws its own fields only.
CHANGES: st.SearchStrategy[c.Change] = st.one_of(
    st.builds(
        c.WorkerUpserted,
        st.builds(
            worker,
            IDS,
            role=ROLES,
            zone=st.sampled_from([None, "a", "b"]),
            data_parallel_size=st.integers(1, 2),
            total_kv_blocks=st.sampled_from([None, 50]),
            kv_events=st.sampled_from([True, True, False]),
        ),
    ),
    st.builds(c.WorkerLost, IDS),
    st.builds(c.WorkerAvailability, IDS, st.sampled_from([None, "refused"])),
    st.builds(stored, IDS, st.integers(1, 6), st.integers(0, 2), RANKS),
    st.builds(c.KvEvent, IDS, RANKS, st.just(REMOVED)),
    st.builds(c.KvEvent, IDS, RANKS, st.just(Cleared())),
    st.builds(c.IndexMarked, IDS, RANKS, st.sampled_from(INDEX_STATES), st.just(2)),
    st.builds(c.IndexConnected, IDS, RANKS, st.booleans()),
    st.builds(
        c.Booked,
        NAMES,
        st.sampled_from(c.STAGES),
        IDS,
        RANKS,
        st.integers(0, 99),
        st.integers(0, 99).map(lambda tokens: request(tokens).sequence_hashes),
        st.integers(0, 3),
        predicted_s=st.sampled_from([None, None, 0.0, 100.0]),
    ),
    st.builds(c.PrefillDone, NAMES),
    st.builds(c.Progressed, NAMES),
    st.builds(c.OutputBlock, NAMES, st.sampled_from([None, 0.0, 0.5])),
    st.builds(c.Freed, NAMES, st.sampled_from([None, *c.STAGES])),
    st.builds(c.LoadReported, IDS, RANKS, SIGNAL, st.none(), st.sampled_from([None, 7])),
    st.builds(
        c.ThresholdsSet,
        st.just(MODEL),
        st.fixed_dictionaries({"active_decode_blocks_threshold": FRACTION}),
    ),
    st.builds(
        c.ConfigSet, st.fixed_dictionaries({"prefill_load_scale": st.sampled_from([1.0, 2.0])})
    ),
    st.just(c.Expired()),
)


def answers(made: Router) -> list[Any]:
    """The router's plans of a few requests."""
    said = []
    for wanted in (request(96), request(40, seed=1), request(40, pin_decode=Pin(1))):
        plan = made.plan(wanted, samples=(0.3, 0.6), detail=True)
        for made_decision in (plan.prefill, plan.decode):
            if made_decision is not None:
                said.append(whole(made_decision))
    return said


def whole(decision: Decision) -> tuple[Any, ...]:
    """All values of a decision, to compare two of them."""
    d = decision
    terms = [(term.name, term.unit, term.weight) for term in d.terms]
    return (
        (d.id, d.stage, d.mode, d.outcome, d.summary(), d.notes, d.overlap_modelled),
        (d.winner, d.refs, d.margin, d.tied, d.temperature, d.parameters),
        (terms, d.constraints, d.funnel, list(d.rows())),
    )


FIRST: list[c.Change] = [
    c.WorkerUpserted(worker(0, role="prefill", zone="a")),
    c.WorkerUpserted(worker(1, role="decode", zone="a", data_parallel_size=2)),
    c.WorkerUpserted(worker(2, total_kv_blocks=50)),
    stored(0, 6),
]


@settings(max_examples=60)
@given(st.lists(CHANGES, min_size=10, max_size=40).map(lambda steps: FIRST + steps), st.data())
def test_a_snapshot_plus_later_changes_equals_the_state(
    steps: list[c.Change], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(steps)))
    straight = Router()
    resumed = Router()
    for number, step in enumerate(steps):
        if number == cut:
            resumed = Router.restore(json.loads(json.dumps(straight.snapshot())))
        now = float(number * 40)
        first = straight.apply(step, now)
        if number >= cut:
            assert resumed.apply(step, now) == first
            resumed.sweep(100)
        straight.sweep(100)
    if cut == len(steps):
        resumed = Router.restore(json.loads(json.dumps(straight.snapshot())))
    for made in (resumed, straight):
        made.advance(float(len(steps) * 40))
    assert answers(resumed) == answers(straight)
    one, other = straight.snapshot(), resumed.snapshot()
    for part in ("config", "registry", "load", "busy", "rotation", "freshness"):
        assert one[part] == other[part], part


@settings(max_examples=60)
@given(st.lists(CHANGES, min_size=10, max_size=40).map(lambda steps: FIRST + steps), st.booleans())
def test_what_is_derived_is_what_follows_from_bookings_reports_and_workers(
    steps: list[c.Change], learns: bool
) -> None:
    """Sums, masks and leases after each change are those that a router computes that never had
    another state; of what left nothing stays."""
    made = Router(RouterConfig(), learns=learns)
    for number, step in enumerate(steps):
        if isinstance(step, c.Booked):
            step = replace(step, prompt_hashes=step.sequence_hashes)
        made.apply(step, float(number))
        registry, load = made.registry, made.load
        alive = [slot for worker_ in registry for slot in registry.slots(worker_.worker_id)]
        for slot in range(registry.capacity):
            own = [one for one in load if one.slot == slot]
            blocks = {block for one in own for block in one.sequence_hashes}
            count = len(blocks) + sum(one.anonymous_blocks + one.output_blocks for one in own)
            lowered = sum(one.adjustment for one in own)
            assert load.requests[slot] == len(own)
            assert load.booked_prefill(slot) == sum(one.prefill_tokens for one in own)
            assert 0 <= load.prefill_tokens[slot] <= load.booked_prefill(slot)
            assert load.decode_blocks[slot] == int(count + lowered + 0.5) >= 0
            assert slot in alive or not own
            row = made.freshness.get(slot)
            assert (row is not None) == (slot in alive)
            trust = "exact" if row is None else row.trust
            for name in ("degraded", "none", "estimated"):
                assert bool(getattr(made.freshness, name) >> slot & 1) == (trust == name)
        fresh = BusyTracker(registry, load)
        fresh.grow(registry.capacity)
        fresh.load_dump(made.busy.dump())
        assert (made.busy.mask, made.busy.busy_ranks) == (fresh.mask, fresh.busy_ranks)
        booked = {(one.request_id, one.stage) for one in load}
        assert made.learned.leases.keys() <= booked
    for worker_ in list(made.registry):
        made.apply(c.WorkerLost(worker_.worker_id), 1_000.0)
    swept(made)
    assert (len(made.load), len(made.learned), made.index.entry_count) == (0, 0, 0)
    assert (made.busy.mask, made.busy.busy_ranks, made.registry.alive) == (0, 0, 0)
    assert len(made.registry._free) == made.registry.capacity


def test_a_lost_worker_is_excluded_at_once_and_its_slot_is_reused_after_the_sweep() -> None:
    made = router(worker(1), worker(2))
    apply_all(made, stored(1, 6), active(1, "x", blocks=3), c.WorkerLost(1))
    assert {w.name for w in made.plan(request(96)).final.workers} == {"w2"}
    assert len(made.load) == 0
    apply_all(made, c.WorkerUpserted(worker(3)))
    assert made.registry.slot(3, 0) == 2
    while made.sweep(1):
        pass
    apply_all(made, c.WorkerUpserted(worker(4)))
    assert made.registry.slot(4, 0) == 0
    assert {row.worker.name: row.overlap_blocks for row in made.plan(request(96)).final.rows()} == {
        "w2": 0,
        "w3": 0,
        "w4": 0,
    }


def test_events_of_unknown_workers_and_parents_are_refused_with_a_reason() -> None:
    made = router(worker(1))
    assert made.apply(stored(9, 1), 0.0).code == "unknown_worker"
    assert made.apply(stored(1, 1, dp_rank=5), 0.0).code == "unknown_worker"
    event = stored(1, 2).event
    assert isinstance(event, BlocksStored)
    orphan = BlocksStored(12345, event.block_hashes, event.local_hashes)
    refused = made.apply(c.KvEvent(1, 0, orphan), 0.0)
    assert (refused.ok, refused.code) == (False, "unknown_parent")
    assert "12345" in refused.message


def test_two_workers_cannot_share_a_name() -> None:
    made = router(worker(1, "same"))
    before = made.snapshot()
    refused = made.apply(c.WorkerUpserted(worker(2, "same")), 0.0)
    assert (refused.code, "'same'" in refused.message) == ("invalid", True)
    assert made.snapshot() == before


def test_fewer_ranks_drop_slots_and_their_load() -> None:
    made = router(worker(1, data_parallel_size=2))
    apply_all(made, active(1, "x", dp_rank=1, blocks=4), c.WorkerUpserted(worker(1)))
    assert len(made.load) == 0
    assert [ref.dp_rank for ref in made.plan(request(16)).final.refs] == [0]


def test_missing_roles_are_named() -> None:
    assert "no worker is registered for model 'tiny'" in router().plan(request(16)).final.summary()
    only_prefill = router(worker(1, role="prefill")).plan(request(16)).final
    assert "no decode worker is registered" in only_prefill.summary()
    alone = router(worker(1, role="decode", can_prefill=False)).plan(request(16)).final
    assert (alone.outcome, "no prefill worker of 'tiny' is registered" in alone.summary()) == (
        "no_workers",
        True,
    )
    assert router(worker(1, role="decode")).plan(request(16)).ok


def test_without_an_available_prefill_worker_decode_workers_serve_alone() -> None:
    made = router(worker(1, role="prefill"), worker(2, role="decode"))
    apply_all(made, c.WorkerAvailability(1, "connection refused"))
    plan = made.plan(request(16))
    assert plan.prefill is None
    assert plan.final.stage == "aggregated"
    assert plan.ok


def test_snapshots_of_another_kind_are_refused() -> None:
    with pytest.raises(SnapshotError, match="schema"):
        Router.restore({"schema": 99})
    broken = router(worker(1)).snapshot()
    del broken["load"]
    with pytest.raises(SnapshotError, match="load"):
        Router.restore(broken)


def test_presets_and_bounds() -> None:
    assert preset("dynamo-0.9").overload_status_code == 503
    assert preset("dynamo-0.9").router_queue_threshold == 4.0
    assert preset("dynamo-1.6").overload_status_code == 529
    assert preset("dynamo-1.6").router_queue_threshold is None
    with pytest.raises(ConfigError, match=r"dynamo-0\.9"):
        preset("dynamo-2")
    for name in PRESETS:
        for bad in (
            {"router_temperature": -1.0},
            {"overlap_score_credit": float("inf")},
            {"nope": 1},
        ):
            with pytest.raises(ConfigError, match=next(iter(bad))):
                preset(name).with_values(bad)


def test_prefill_and_aggregated_workers_without_decode_serve_in_one_hop() -> None:
    made = router(worker(1, role="prefill"), worker(2))
    assert made.stages(MODEL) == ("aggregated",)
    assert made.plan(request(16)).final.worker == made.registry.get(2)
    apply_all(made, c.WorkerUpserted(worker(3, role="decode")))
    assert made.stages(MODEL) == ("prefill", "decode")


def test_allowed_workers_and_pins_of_an_aggregated_request() -> None:
    made = router(worker(1), worker(2), worker(3))
    plan = made.plan(request(16, allowed_worker_ids=frozenset({2, 3})), detail=True)
    assert {one.name for one in plan.final.workers} == {"w2", "w3"}
    (step,) = (one for one in plan.final.funnel if one.filter == "allowed")
    assert [one.reason.message for one in step.rejected] == ["is not in the allowed set"]
    both = request(16, allowed_worker_ids=frozenset({2, 3}), pin_prefill=Pin(3))
    assert {one.name for one in made.plan(both).final.workers} == {"w3"}
    outside = request(16, allowed_worker_ids=frozenset({2}), pin_decode=Pin(3))
    assert made.plan(outside).final.outcome == "pinned_ineligible"


@pytest.mark.parametrize("lost", [None, 2], ids=["all are available", "one is not"])
def test_a_plain_request_has_the_funnel_and_reasons_of_all_filters(lost: int | None) -> None:
    made, asked = router(worker(1), worker(2)), router(worker(1), worker(2))
    asked.profile = replace(PROFILES["kv"], filters=(*FILTERS,))
    assert asked.profile.filters is not FILTERS  # so each is asked
    plans = []
    for each in (made, asked):
        if lost is not None:
            apply_all(each, c.WorkerAvailability(lost, "no response"))
        plans.append(each.plan(request(16), detail=True))
    assert plans[0] == plans[1]
    rejected = [row.reason.message for step in plans[0].final.funnel for row in step.rejected]
    assert rejected == ([] if lost is None else ["no response"])


def test_a_new_rank_of_an_unavailable_worker_is_unavailable() -> None:
    made = router(worker(1), worker(2))
    apply_all(made, c.WorkerAvailability(1, "no response"))
    apply_all(made, c.WorkerUpserted(worker(1, data_parallel_size=2)))
    assert {one.name for one in made.plan(request(16)).final.workers} == {"w2"}
    apply_all(made, c.WorkerLost(1), c.WorkerUpserted(worker(1)))
    assert {one.name for one in made.plan(request(16)).final.workers} == {"w1", "w2"}


@pytest.mark.parametrize(("temperature", "plans"), [(0.0, 2), (1.0, 3), (0.0001, 2)])
def test_the_plan_of_each_prefill_worker_that_could_win(temperature: float, plans: int) -> None:
    made = router(
        worker(1, "pA", "prefill", zone="a", policy="required"),
        worker(2, "pB", "prefill", zone="b", policy="required"),
        worker(3, "pC", "prefill", zone="b", policy="required"),
        worker(4, "dA", "decode", zone="a"),
        worker(5, "dB", "decode", zone="b"),
        router_temperature=temperature,
    )
    apply_all(made, active(3, "x", stage="prefill", prefill_tokens=64))
    wanted = request(40)
    found = list(made.decode_by_prefill(wanted, made.plan(wanted)))
    pairs = [
        (one.prefill.worker.name, one.final.worker.name)
        for one in found
        if one.prefill is not None and one.prefill.worker is not None and one.final.worker
    ]
    assert pairs == [("pA", "dA"), ("pB", "dB"), ("pC", "dB")][:plans]
    apply_all(made, c.WorkerLost(4), c.WorkerLost(5))
    assert list(made.decode_by_prefill(wanted, made.plan(wanted))) == []


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("router_temperature", " 0.5 ", 0.5),
        ("router_temperature", "1", 1.0),
        ("overload_status_code", "503", 503),
        ("use_kv_events", "Off", False),
        ("use_kv_events", "yes", True),
        ("router_mode", "round_robin", "round-robin"),
        ("kv_transfer_domain", "none", None),
        ("active_prefill_tokens_threshold", "", None),
    ],
)
def test_settings_are_parsed_from_text(name: str, text: str, value: object) -> None:
    parsed = SETTINGS[name].parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("router_temperature", "warm", "router_temperature: expected a number, got 'warm'"),
        ("router_temperature", "nan", "expected a finite number"),
        ("router_temperature", "none", "expected a number, got 'none'"),
        ("overload_status_code", "5.5", "expected a whole number"),
        ("overload_status_code", "600", "expected at most 599, got 600"),
        ("overload_status_code", "399", "expected at least 400, got 399"),
        ("use_kv_events", "maybe", "expected true or false"),
        ("router_mode", "fastest", "expected one of kv, round-robin"),
    ],
)
def test_texts_that_are_not_a_value_are_refused(name: str, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        SETTINGS[name].parse(text)


@pytest.mark.parametrize("value", [None, True, "529", 529.0])
def test_values_of_another_type_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="overload_status_code: "):
        RouterConfig(overload_status_code=value)  # type: ignore[arg-type]


def test_an_unknown_setting_names_similar_ones() -> None:
    assert find_setting("router_mode").choices[0] == "kv"
    with pytest.raises(ConfigError, match="router_temp: no such setting; did you mean router_temp"):
        find_setting("router_temp")
    with pytest.raises(ConfigError, match=r"xyzzy: no such setting$"):
        RouterConfig().with_values({"xyzzy": 1})


def test_the_legacy_overlap_weight_of_zero_switches_the_credit_off() -> None:
    assert legacy_overlap_weight(1.5) == {"prefill_load_scale": 1.5}
    assert legacy_overlap_weight(0) == {"prefill_load_scale": 0.0, "overlap_score_credit": 0.0}


def test_events_of_other_tiers_are_not_indexed() -> None:
    made = router(worker(1))
    event = stored(1, 2).event
    assert isinstance(event, BlocksStored)
    other = BlocksStored(None, event.block_hashes, event.local_hashes, tier="host")
    assert made.apply(c.KvEvent(1, 0, other), 0.0).code == "ignored_tier"
    assert made.overlap_scores(request(32)) == {(1, 0): 0}
    apply_all(made, stored(1, 2))
    apply_all(made, c.KvEvent(1, 0, BlocksRemoved(event.block_hashes, tier="host")))
    assert made.overlap_scores(request(32)) == {(1, 0): 2}


def test_a_marked_index_counts_lost_batches() -> None:
    made = router(worker(1))
    assert made.apply(c.IndexMarked(9, 0, "gapped"), 0.0).code == "unknown_worker"
    apply_all(made, c.IndexMarked(1, 0, "gapped", 3), c.IndexMarked(1, 0, "gapped"), now=5.0)
    row = made.freshness[0]
    assert (row.index_state, row.gaps, row.index_at) == ("gapped", 4, 5.0)


def test_a_capture_does_not_change_with_the_router() -> None:
    made = router(worker(1), worker(2))
    apply_all(made, stored(1, 6), stored(2, 3), active(1, "x", blocks=3))
    captured, before = made.capture(), made.snapshot()
    apply_all(made, c.KvEvent(1, 0, Cleared()), stored(2, 6, 1), c.Freed("x"), c.WorkerLost(2))
    assert captured.document() == before
    assert made.snapshot() != before


def trusted(made: Router) -> list[str]:
    return [made.freshness[slot].trust for slot in made.registry.slots(1)]


def test_an_index_is_exact_only_while_nothing_is_missing() -> None:
    made = router(worker(1))
    assert trusted(made) == ["exact"]
    steps: list[tuple[c.Change, str, str]] = [
        (c.IndexConnected(1, 0, False), "disconnected", "degraded"),
        (c.IndexConnected(1, 0, True, recovering=True), "recovering", "degraded"),
        (c.IndexConnected(1, 0, True), "recovering", "degraded"),
        (c.IndexConnected(1, 0, True, recovering=False), "current", "exact"),
        (c.IndexMarked(1, 0, "gapped", 2), "gapped", "degraded"),
        (c.IndexMarked(1, 0, "over_limit"), "over_limit", "degraded"),
        (c.IndexMarked(1, 0, "absent"), "absent", "none"),
        (c.IndexMarked(1, 0, "current"), "current", "exact"),
    ]
    for change, state, trust in steps:
        assert made.apply(change, 0.0).ok
        [slot] = made.registry.slots(1)
        assert (made.freshness[slot].state, made.freshness[slot].trust) == (state, trust)
        assert made.freshness.degraded >> slot & 1 == (trust == "degraded")
        assert made.freshness.none >> slot & 1 == (trust == "none")
        again = Router.restore(json.loads(json.dumps(made.snapshot())))
        assert again.freshness[slot].trust == trust
        assert again.freshness.degraded == made.freshness.degraded
    apply_all(made, c.IndexMarked(1, 0, "gapped"), c.WorkerLost(1))
    assert made.freshness.degraded == 0


@pytest.mark.parametrize(
    ("rule", "counted"),
    [("discount", 2), ("load-only", 0), ("approximate", 0), ("full", 4), (None, 4)],
)
def test_what_an_incomplete_index_counts_for(rule: str | None, counted: int) -> None:
    """``None``: the index is exact, so the setting has no effect."""
    made = router(worker(1), worker(2), router_on_degraded=rule or "load-only")
    apply_all(made, stored(1, 4))
    if rule is not None:
        apply_all(made, c.IndexMarked(1, 0, "gapped"))
    decision = made.plan(request(tokens=4 * 16 + 1)).final
    first, second = decision.rows()
    assert (first.overlap_blocks, first.indexed_blocks) == (counted, 4)
    assert (first.index, second.index) == ("exact" if rule is None else "degraded", "exact")
    assert first.usable_blocks == 4, "what the engine is expected to reuse does not change"
    assert first.cost == second.cost - counted
    assert decision.replay().costs == decision.costs


def swept(made: Router) -> None:
    while made.sweep(10):
        pass


def test_a_rank_with_more_blocks_than_it_declares_starts_again() -> None:
    made = router(worker(1, total_kv_blocks=8), worker(2, total_kv_blocks=8))
    made.bound_index(IndexBound(slack=1.5, spare=0))
    apply_all(made, stored(1, 12), stored(2, 12))
    refused = made.apply(stored(1, 13, seed=1), 0.0)
    assert (refused.ok, refused.code) == (False, "over_limit")
    assert "25 blocks, expected at most 12" in refused.message
    held = {ref.worker_id: blocks for ref, blocks in made.overlap_scores(request(193)).items()}
    assert held == {1: 0, 2: 12}, "the other rank keeps its own"
    assert trusted(made) == ["degraded"]
    assert not made.index_is_empty(1, 0)
    assert made.apply(stored(1, 2), 0.0).code == "slot_dropped"
    swept(made)
    assert made.index_is_empty(1, 0)
    apply_all(made, c.IndexMarked(1, 0, "current"), stored(1, 5))
    assert made.overlap_scores(request(193))[(1, 0)] == 5  # type: ignore[index]
    apply_all(made, c.WorkerLost(1), c.WorkerUpserted(worker(1, total_kv_blocks=8)))
    swept(made)
    assert len(made.index.dump()["slots"]) == 1


def test_copies_beyond_what_a_rank_can_have_are_not_believed() -> None:
    """A client can make an engine report blocks that it reuses as stored, again and again."""
    made = router(worker(1, total_kv_blocks=8))
    made.bound_index(IndexBound(slack=1.0, spare=0))
    event = stored(1, 4)
    assert isinstance(event.event, BlocksStored)
    counted = replace(event, event=replace(event.event, counted=True))
    for _ in range(10):
        apply_all(made, counted)
    [slot] = made.registry.slots(1)
    assert made.index.block_count(slot) + made.index.copy_count(slot) <= 8
    for _ in range(2):
        apply_all(made, c.KvEvent(1, 0, BlocksRemoved(event.event.block_hashes)))
    assert made.index.block_count(slot) == 0


def test_all_ranks_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router_core.router._COMPARED_EVERY", 10)
    made = router(worker(1), worker(2))
    made.bound_index(IndexBound(total_blocks=30))
    apply_all(made, stored(1, 20), stored(2, 10, seed=1))
    apply_all(made, stored(2, 11, seed=1))  # this one stores, the other one is the largest
    states = [made.freshness[slot].index_state for slot in (0, 1)]
    assert states == ["over_limit", "current"]
    swept(made)
    assert made.index.table_size == 11
    unbounded = router(worker(1))
    unbounded.bound_index(IndexBound())
    apply_all(unbounded, stored(1, 100))


@pytest.mark.parametrize(
    "changed", [{"block_size": 32}, {"model": "other"}, {"kv_events": False}], ids=str
)
def test_the_index_of_a_worker_that_returns_as_another_starts_again(
    changed: dict[str, Any],
) -> None:
    """Blocks of another size match nothing, and equal tokens of another model are not its blocks.
    What runs there stays its load."""
    made = router(worker(1), worker(2))
    apply_all(made, stored(1, 4), stored(2, 4), active(1, "a", prefill_tokens=7, blocks=3))
    lower = stored(1, 2, seed=1)
    assert isinstance(lower.event, BlocksStored)
    apply_all(made, replace(lower, event=replace(lower.event, tier="host_pinned")))
    apply_all(made, c.WorkerUpserted(replace(worker(1), **changed)))
    [slot] = made.registry.slots(1)
    assert (made.index.block_count(slot), made.tiers.block_count(slot)) == (0, (0, 0))
    assert (made.load.prefill_tokens[slot], made.load.requests[slot]) == (7, 1)
    assert made.index.block_count(made.registry.slots(2)[0]) == 4
    asked = replace(request(65), model=made.registry.worker(slot).model)
    assert made.overlap_scores(asked)[made.registry.ref(slot)] == 0
    apply_all(made, c.WorkerUpserted(worker(1)), stored(1, 3))
    assert made.overlap_scores(request(65))[made.registry.ref(slot)] == 3
    apply_all(made, c.WorkerUpserted(replace(worker(1), aliases=("same",))))
    assert made.overlap_scores(request(65))[made.registry.ref(slot)] == 3, "another card alone"


def test_a_worker_that_begins_to_report_its_cache_is_not_estimated_any_more() -> None:
    """Its learned blocks and those of its events would be added up."""
    made = Router(RouterConfig(), learns=True)
    apply_all(made, c.WorkerUpserted(worker(1, kv_events=False)))
    asked = replace(request(65), chained=True)
    apply_all(made, made.booking(made.plan(asked).final, asked), c.Freed(asked.id))
    assert (made.freshness[0].state, made.cached_blocks(0)) == ("estimated", 4)
    apply_all(made, c.WorkerUpserted(worker(1)), stored(1, 4))
    assert (made.freshness[0].state, made.cached_blocks(0)) == ("current", 4)
    assert made.plan(request(65, "b")).final.overlap_blocks(0) == 4


def test_a_dropped_index_is_not_current_before_it_is_read_again() -> None:
    """The end of the reading in which a rank went over its bound shows that nothing was lost on the
    way, not that the dropped blocks are there."""
    made = router(worker(1, total_kv_blocks=8))
    made.bound_index(IndexBound(slack=1.0, spare=0))
    assert made.apply(stored(1, 9), 0.0).code == "over_limit"
    states = []
    for change in (
        c.IndexMarked(1, 0, "current"),
        c.KvEvent(1, 0, Cleared()),
        c.IndexMarked(1, 0, "current"),
    ):
        assert made.apply(change, 0.0).ok
        states.append(made.freshness[0].state)
    assert states == ["over_limit"] * 3, "the blocks are still swept, and new ones refused"
    swept(made)
    apply_all(made, c.IndexMarked(1, 0, "current"))
    assert made.freshness[0].state == "over_limit", "empty, and not read"
    apply_all(made, c.KvEvent(1, 0, Cleared()))
    assert (made.freshness[0].state, trusted(made)) == ("current", ["exact"])
    apply_all(made, stored(1, 5))
    assert made.overlap_scores(request(193))[made.registry.ref(0)] == 5
