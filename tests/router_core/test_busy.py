"""Busy thresholds compared with a live 1.6.1 frontend, and where ours differ."""

from __future__ import annotations

from typing import Any

import pytest

from router_core.changes import (
    Change,
    ConfigSet,
    Expired,
    Freed,
    LoadReported,
    PrefillDone,
    ThresholdsSet,
    WorkerLost,
    WorkerUpserted,
)
from router_core.config import ROUTER_MODES
from router_core.router import Router
from router_core.routing_view import Pin
from tests.router_core.fleet import MODEL, active, apply_all, request, router, worker


def fleet(**thresholds: Any) -> Any:
    """a (2 ranks, total 100), b (total 100, batch 1000), c (nothing known)."""
    made = router(
        worker(1, "a", data_parallel_size=2, total_kv_blocks=100),
        worker(2, "b", total_kv_blocks=100, max_num_batched_tokens=1000),
        worker(3, "c"),
    )
    if thresholds:
        apply_all(made, ThresholdsSet(MODEL, thresholds))
    return made


def decode(value: float) -> dict[str, float]:
    return {"active_decode_blocks_threshold": value}


def is_busy(made: Any, worker_id: int) -> bool:
    plan = made.plan(request(16, pin_decode=Pin(worker_id)))
    assert plan.final.outcome in ("selected", "all_busy")
    return bool(plan.final.outcome == "all_busy")


@pytest.mark.parametrize(
    ("threshold", "blocks", "busy"),
    [(0.5, 50, False), (0.5, 51, True), (1.0, 100, False), (0.0, 0, False), (0.0, 1, True)],
)
@pytest.mark.parametrize("signal", ["active_decode_blocks", "kv_used_blocks"])
@pytest.mark.seed("smart-routing-guide-0.9: thresholds: DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD")
def test_decode_threshold_is_strict_for_either_signal(
    threshold: float, blocks: int, busy: bool, signal: str
) -> None:
    made = fleet(**decode(threshold))
    apply_all(made, LoadReported(2, 0, **{signal: blocks}))
    assert is_busy(made, 2) is busy


def test_each_signal_keeps_its_value_until_it_is_reported_again() -> None:
    made = fleet(**decode(0.5))
    apply_all(made, LoadReported(2, 0, active_decode_blocks=51, kv_used_blocks=10))
    assert is_busy(made, 2)
    apply_all(made, LoadReported(2, 0, active_decode_blocks=50))
    assert not is_busy(made, 2)
    apply_all(made, LoadReported(2, 0, kv_used_blocks=51))
    apply_all(made, LoadReported(2, 0, active_decode_blocks=10))
    assert is_busy(made, 2)
    apply_all(made, LoadReported(2, 0, kv_used_blocks=50))
    assert not is_busy(made, 2)


@pytest.mark.parametrize("signal", ["active_decode_blocks", "kv_used_blocks"])
def test_a_report_of_zero_replaces_the_last_value(signal: str) -> None:
    made = fleet(**decode(0.5))
    apply_all(made, LoadReported(2, 0, **{signal: 51}), LoadReported(2, 0, **{signal: 0}))
    assert not is_busy(made, 2)


def test_fields_that_are_not_reported_keep_the_last_value() -> None:
    made = fleet(active_prefill_tokens_threshold=200)
    apply_all(made, LoadReported(2, 0, active_prefill_tokens=300), LoadReported(2, 0))
    assert is_busy(made, 2)


def test_a_changed_threshold_acts_at_once_in_both_directions() -> None:
    made = fleet()
    apply_all(made, LoadReported(2, 0, active_decode_blocks=90, kv_used_blocks=90))
    assert not is_busy(made, 2)
    apply_all(made, ThresholdsSet(MODEL, decode(0.5)))
    assert is_busy(made, 2)
    apply_all(made, ThresholdsSet(MODEL, decode(0.95)))
    assert not is_busy(made, 2)
    apply_all(made, ThresholdsSet(MODEL, decode(0.5)))
    apply_all(made, ThresholdsSet(MODEL, {"active_decode_blocks_threshold": None}))
    assert not is_busy(made, 2)


def test_a_worker_is_busy_only_when_all_ranks_of_its_card_are() -> None:
    made = fleet(**decode(0.5))
    apply_all(made, LoadReported(1, 0, active_decode_blocks=60))
    assert not is_busy(made, 1)
    # A busy rank of a worker that is not busy still takes requests.
    assert made.plan(request(16, pin_decode=Pin(1, 0))).ok
    apply_all(made, LoadReported(1, 1, active_decode_blocks=60))
    assert is_busy(made, 1)
    apply_all(made, LoadReported(1, 0, active_decode_blocks=50))
    assert not is_busy(made, 1)


def test_without_a_total_decode_blocks_never_make_a_worker_busy() -> None:
    made = fleet(**decode(0.1))
    apply_all(made, LoadReported(3, 0, active_decode_blocks=1000, kv_used_blocks=1000))
    assert not is_busy(made, 3)


@pytest.mark.parametrize(
    ("thresholds", "worker_id", "tokens", "busy"),
    [
        ({"active_prefill_tokens_threshold": 500}, 2, 500, False),
        ({"active_prefill_tokens_threshold": 500}, 2, 501, True),
        ({"active_prefill_tokens_threshold_frac": 0.2555}, 2, 255, False),
        ({"active_prefill_tokens_threshold_frac": 0.2555}, 2, 256, True),
        ({"active_prefill_tokens_threshold_frac": 0.2}, 3, 2_000_000, False),
        ({"active_prefill_tokens_threshold_frac": 0.2}, 3, 2_000_001, True),
    ],
)
@pytest.mark.seed("smart-routing-guide-0.9: thresholds: DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD")
def test_prefill_thresholds(
    thresholds: dict[str, float], worker_id: int, tokens: int, busy: bool
) -> None:
    reported, booked = fleet(**thresholds), fleet(**thresholds)
    apply_all(reported, LoadReported(worker_id, 0, active_prefill_tokens=tokens))
    apply_all(booked, active(worker_id, "x", prefill_tokens=tokens))
    assert is_busy(reported, worker_id) is busy
    assert is_busy(booked, worker_id) is busy
    apply_all(booked, PrefillDone("x"))
    assert not is_busy(booked, worker_id)


@pytest.mark.seed("smart-routing-guide-0.9: thresholds: DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD")
@pytest.mark.seed("smart-routing-guide-0.9: thresholds: either threshold")
def test_any_threshold_suffices() -> None:
    made = fleet(active_decode_blocks_threshold=0.9, active_prefill_tokens_threshold=10)
    apply_all(made, LoadReported(2, 0, active_decode_blocks=0, active_prefill_tokens=11))
    assert is_busy(made, 2)
    apply_all(made, LoadReported(2, 0, active_decode_blocks=91, active_prefill_tokens=0))
    assert is_busy(made, 2)


def test_a_report_of_zero_does_not_hide_what_the_router_booked() -> None:
    made = fleet(**decode(0.3))
    apply_all(made, active(2, "x", blocks=32), LoadReported(2, 0, active_decode_blocks=0))
    assert is_busy(made, 2)
    apply_all(made, Freed("x"))
    assert not is_busy(made, 2)


@pytest.mark.parametrize(
    "change", [PrefillDone("x"), Freed("x"), Freed("x", "aggregated"), Expired()]
)
def test_a_worker_is_not_busy_once_booked_prefill_ends(change: Change) -> None:
    made = fleet(active_prefill_tokens_threshold=10)
    made.apply(active(2, "x", prefill_tokens=40), 0.0)
    assert is_busy(made, 2)
    made.apply(change, 1000.0)
    assert made.load.prefill_tokens == [0, 0, 0, 0]
    assert not is_busy(made, 2)
    assert made.busy.mask == 0


def test_a_changed_default_threshold_applies_at_once() -> None:
    made = fleet()
    apply_all(made, LoadReported(2, 0, active_decode_blocks=51))
    assert not is_busy(made, 2)
    view = made.view(made.config.with_values(decode(0.5)))
    assert made.plan(request(16, pin_decode=Pin(2)), view=view).final.outcome == "all_busy"
    assert not is_busy(made, 2)
    apply_all(made, ConfigSet(decode(0.5)))
    assert is_busy(made, 2)
    assert made.apply(ConfigSet(decode(2.0)), 1.0).code == "invalid"
    assert is_busy(made, 2)


def test_thresholds_of_a_dry_run_replace_those_of_the_model() -> None:
    made = fleet(**decode(0.9))
    apply_all(made, LoadReported(2, 0, active_decode_blocks=51))
    view = made.view(made.config.with_values(decode(0.5)))
    assert made.plan(request(16, pin_decode=Pin(2)), view=view).final.outcome == "all_busy"
    assert not is_busy(made, 2)


def test_a_restored_router_has_the_thresholds_of_its_settings() -> None:
    made = router(worker(1, total_kv_blocks=100), **decode(0.5))
    copy = Router.restore(made.snapshot())
    apply_all(copy, LoadReported(1, 0, active_decode_blocks=51))
    assert is_busy(copy, 1)


def test_a_lost_worker_leaves_its_slot_not_busy() -> None:
    made = fleet(**decode(0.5))
    apply_all(made, LoadReported(2, 0, active_decode_blocks=51), WorkerLost(2))
    assert (made.busy.mask, made.busy.busy_ranks) == (0, 0)
    made.sweep()
    apply_all(made, WorkerUpserted(worker(4, "d", total_kv_blocks=100)))
    assert made.registry.slot(4, 0) == 2
    assert not is_busy(made, 4)


def test_signals_of_a_rank_have_value_limit_and_origin() -> None:
    made = fleet(active_decode_blocks_threshold=0.5, active_prefill_tokens_threshold_frac=0.0015)
    apply_all(made, LoadReported(2, 0, active_decode_blocks=51), active(2, "x", prefill_tokens=1))
    found = [(one.value, one.limit, one.over, one.reported) for one in made.busy.signals(2)]
    assert found == [
        (0, 50.0, False, False),
        (51, 50.0, True, True),
        (None, 50.0, False, True),
        (1, 1.0, False, False),
        (None, 1.0, False, True),
    ]
    assert [one.value for one in made.busy.reasons(2)] == [51]
    assert {one.limit for one in made.busy.signals(3)[:3]} == {None}


def test_signals_are_never_summed() -> None:
    made = fleet(**decode(0.5))
    apply_all(made, active(2, "x", blocks=10), LoadReported(2, 0, active_decode_blocks=45))
    assert not is_busy(made, 2)


def test_a_new_card_is_checked_again() -> None:
    made = fleet(**decode(0.5))
    apply_all(made, LoadReported(2, 0, active_decode_blocks=60))
    assert is_busy(made, 2)
    apply_all(made, WorkerUpserted(worker(2, "b", total_kv_blocks=200)))
    assert not is_busy(made, 2)


@pytest.mark.parametrize("mode", sorted(set(ROUTER_MODES) - {"direct"}))
@pytest.mark.seed("smart-routing-guide-0.9: busy workers: excluded")
def test_busy_workers_are_excluded_in_every_mode(mode: str) -> None:
    made = router(
        worker(1, total_kv_blocks=100),
        worker(2, total_kv_blocks=100),
        router_mode=mode,
        active_decode_blocks_threshold=0.5,
    )
    apply_all(made, LoadReported(1, 0, kv_used_blocks=99))
    for n in range(10):
        plan = made.plan(request(32, f"r{n}"), samples=(n / 10, 0.0))
        assert plan.final.worker is not None
        assert plan.final.worker.name == "w2"
    apply_all(made, LoadReported(2, 0, kv_used_blocks=99))
    assert made.plan(request(32)).final.outcome == "all_busy"


@pytest.mark.seed("smart-routing-guide-0.9: busy workers: excluded")
def test_the_reason_names_value_and_limit() -> None:
    made = fleet(active_decode_blocks_threshold=0.85, active_prefill_tokens_threshold=10_000)
    apply_all(made, LoadReported(2, 0, kv_used_blocks=91, active_prefill_tokens=10_240))
    plan = made.plan(request(16), detail=True)
    (rejection,) = (r for step in plan.final.funnel for r in step.rejected if step.filter == "busy")
    assert rejection.reason.code == "busy"
    assert rejection.reason.message == "91 used KV blocks reported > 0.85 of the KV blocks (85)"
    slot = made.registry.slot(2, 0)
    assert made.busy.reasons(slot)[1].message == "10,240 active prefill tokens reported > 10,000"


@pytest.mark.parametrize(
    "values",
    [
        decode(1.5),
        decode(-0.1),
        {"active_prefill_tokens_threshold": -5},
        {"active_prefill_tokens_threshold_frac": float("nan")},
        {"no_such": 1},
        {"active_prefill_tokens_threshold": 1.5},
    ],
)
def test_bad_thresholds_change_nothing(values: dict[str, Any]) -> None:
    made = fleet(**decode(0.5))
    before = made.snapshot()
    assert made.apply(ThresholdsSet(MODEL, values), 2.0).code == "invalid"
    assert made.snapshot() == before


def test_a_dry_run_with_one_other_threshold_keeps_those_of_the_model() -> None:
    """What an operator set for the model counts, unless the dry run sets that threshold itself."""
    made = router(worker(1), worker(2))
    assert made.apply(ThresholdsSet(MODEL, {"active_prefill_tokens_threshold": 10}), 0.0).ok
    apply_all(made, active(1, "x", prefill_tokens=50), active(2, "y", prefill_tokens=50))

    def outcome(**settings: Any) -> str:
        view = made.view(made.config.with_values(settings))
        return made.plan(request(32), view=view).final.outcome

    assert made.plan(request(32)).final.outcome == "all_busy"
    assert outcome(active_decode_blocks_threshold=0.9) == "all_busy"
    assert outcome(active_prefill_tokens_threshold=100) == "selected"
    assert outcome(active_prefill_tokens_threshold=49) == "all_busy"
    assert made.plan(request(32)).final.outcome == "all_busy", "a dry run changes nothing"
