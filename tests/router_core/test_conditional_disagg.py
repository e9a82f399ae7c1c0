"""Conditional disaggregation: when a decode worker computes the prompt by itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core import (
    Bypass,
    Pin,
    PlanQuestion,
    Router,
    RoutingRequest,
    Session,
    Unknown,
    certain,
)
from router_core.changes import ConfigSet, Freed, WorkerAvailability
from router_core.conditional_disagg import POLICIES, BusyLine, BypassRule
from tests.router_core.fleet import active, apply_all, request, router, stored, worker

ON = {"conditional_disagg_enabled": True}


def fleet(**settings: Any) -> Router:
    """Two prefill and two decode workers; decode-1 has 6 blocks of the prompt 0 cached."""
    made = router(
        worker(1, "prefill-0", "prefill", max_num_batched_tokens=1000),
        worker(2, "prefill-1", "prefill", max_num_batched_tokens=1000),
        worker(3, "decode-0", "decode", total_kv_blocks=100),
        worker(4, "decode-1", "decode", total_kv_blocks=100),
        **{**ON, **settings},
    )
    apply_all(made, stored(4, 6))
    return made


def verdict(made: Router, tokens: int = 112, **more: Any) -> Bypass:
    return verdict_of(made, request(tokens, **more))


def verdict_of(made: Router, asked: RoutingRequest) -> Bypass:
    found = made.plan(asked).bypass
    assert found is not None
    return found


_lines = st.none() | st.builds(
    BusyLine, st.just("w"), st.integers(0, 20), st.none() | st.integers(0, 20).map(float)
)


@pytest.mark.seed("dynamo-1.6: skip the hop: isl_bounding")
@pytest.mark.seed("dynamo-1.6: skip the hop: prefill_load")
@pytest.mark.seed("dynamo-1.6: skip the hop: isl_or_load")
@pytest.mark.seed("dynamo-1.6: skip the hop: decode gate")
@given(
    policy=st.sampled_from(POLICIES),
    threshold=st.integers(0, 120),
    ratio=st.floats(0, 1),
    isl=st.integers(0, 200),
    cached=st.integers(0, 220),
    prefill=_lines,
    decode=_lines,
)
def test_the_rule_is_the_formula(
    policy: str,
    threshold: int,
    ratio: float,
    isl: int,
    cached: int,
    prefill: BusyLine | None,
    decode: BusyLine | None,
) -> None:
    eff_isl = max(0, isl - cached)
    short = eff_isl < threshold and eff_isl / max(isl, 1) < ratio
    busy = prefill is not None and prefill.limit is not None and prefill.value > prefill.limit
    wanted = {"isl-bounding": short, "prefill-load": busy, "isl-or-load": short or busy}[policy]
    calm = decode is None or (decode.limit is not None and not decode.value > decode.limit)
    rule = BypassRule(policy, threshold, ratio)
    bypassed, reason = rule.decide(isl, cached, prefill, decode)
    assert bypassed is (wanted and calm)
    # The reason names a condition that holds.
    holds = {
        "short_prefill": short,
        "prefill_busy": busy,
        "long_prefill": eff_isl >= threshold,
        "little_cached": not eff_isl / max(isl, 1) < ratio,
        "prefill_calm": not busy,
        "decode_busy": not calm and decode is not None and decode.limit is not None,
        "decode_size_unknown": decode is not None and decode.limit is None,
    }
    assert holds[reason]
    assert bypassed is (reason in ("short_prefill", "prefill_busy"))
    assert Bypass(bypassed, reason, rule, isl, cached, "d", prefill, decode).message


@pytest.mark.seed("dynamo-1.6: skip the hop: bypass")
def test_a_warm_decode_worker_does_everything() -> None:
    made = fleet()
    plan = made.plan(request(112))
    assert (plan.ok, plan.prefill) == (True, None)
    assert plan.decode is not None
    assert plan.decode.worker is not None
    assert (plan.decode.stage, plan.decode.worker.name) == ("aggregated", "decode-1")
    assert plan.bypass is not None
    assert (plan.bypass.eff_isl, plan.bypass.reason) == (16, "short_prefill")
    assert plan.bypass.message == (
        "prefill hop left out: decode-1 computes 16 of 112 prompt tokens < 2,048 and 14 % < 70 %"
    )
    # It is the cost of an aggregated worker: what it computes, and the blocks.
    costs = dict(zip((w.name for w in plan.decode.workers), plan.decode.costs, strict=True))
    assert costs == {"decode-0": 7 + 7, "decode-1": 7 - 6 + 7}
    # The booking counts what the worker computes.
    booked = made.booking(plan.decode, request(112))
    assert (booked.worker_id, booked.stage, booked.prefill_tokens) == (4, "aggregated", 16)


@pytest.mark.seed("dynamo-1.6: skip the hop: overlap credit on the decode hop")
def test_a_cold_prompt_takes_the_hop_and_the_decode_hop_keeps_its_credit() -> None:
    made = fleet()
    apply_all(made, stored(4, 2, seed=5))
    plan = made.plan(request(112, seed=5))
    assert plan.prefill is not None
    assert plan.decode is not None
    assert plan.bypass is not None
    assert (plan.bypass.bypassed, plan.bypass.reason) == (False, "little_cached")
    assert plan.bypass.message == (
        "prefill hop kept: decode-1 would compute 80 of 112 prompt tokens, 71 %, not below 70 %"
    )
    costs = dict(zip((w.name for w in plan.decode.workers), plan.decode.costs, strict=True))
    assert costs == {"decode-0": 7, "decode-1": 7 - 2}
    apply_all(made, ConfigSet({"conditional_disagg_enabled": False}))
    off = made.plan(request(112, seed=5))
    assert off.bypass is None
    assert off.decode is not None
    assert list(off.decode.costs) == [7, 7]


@pytest.mark.seed("dynamo-1.6: skip the hop: isl_bounding")
@pytest.mark.seed("dynamo-1.6: skip the hop: decode gate")
@pytest.mark.parametrize(
    ("settings", "tokens", "reason"),
    [
        ({"conditional_disagg_eff_isl_threshold": 17}, 112, "short_prefill"),
        ({"conditional_disagg_eff_isl_threshold": 16}, 112, "long_prefill"),
        ({"conditional_disagg_eff_isl_ratio_threshold": 0.25}, 128, "little_cached"),
        ({"conditional_disagg_eff_isl_ratio_threshold": 0.251}, 128, "short_prefill"),
        ({"conditional_disagg_policy": "prefill-load"}, 112, "prefill_calm"),
        ({"conditional_disagg_decode_busy_threshold": 0.07}, 112, "short_prefill"),
        ({"conditional_disagg_decode_busy_threshold": 0.07}, 113, "decode_busy"),
    ],
)
def test_thresholds_are_strict(settings: dict[str, Any], tokens: int, reason: str) -> None:
    assert verdict(fleet(**settings), tokens).reason == reason


@pytest.mark.seed("dynamo-1.6: skip the hop: prefill_load")
@pytest.mark.seed("dynamo-1.6: skip the hop: isl_or_load")
@pytest.mark.parametrize("policy", ["prefill-load", "isl-or-load"])
def test_a_busy_prefill_worker_is_left_out(policy: str) -> None:
    made = fleet(conditional_disagg_policy=policy, conditional_disagg_prefill_busy_threshold=0.5)
    apply_all(
        made,
        active(1, "a", stage="prefill", prefill_tokens=500),
        active(2, "b", stage="prefill", prefill_tokens=600),
    )
    assert verdict(made, 64, seed=9).reason == (
        "prefill_calm" if policy == "prefill-load" else "little_cached"
    )
    apply_all(made, active(1, "c", stage="prefill", prefill_tokens=1))
    found = verdict(made, 64, seed=9)
    assert (found.bypassed, found.reason) == (True, "prefill_busy")
    assert found.message == "prefill hop left out: prefill-0 has 501 active prefill tokens > 500"


def test_the_queue_threshold_is_the_line_where_no_other_is_set() -> None:
    made = fleet(conditional_disagg_policy="prefill-load", router_queue_threshold=0.5)
    apply_all(
        made,
        active(1, "a", stage="prefill", prefill_tokens=501),
        active(2, "b", stage="prefill", prefill_tokens=501),
    )
    assert verdict(made).reason == "prefill_busy"


def test_a_decode_worker_without_its_size_keeps_the_hop_behind_a_gate() -> None:
    made = router(
        worker(1, "p", "prefill"),
        worker(2, "d", "decode"),
        conditional_disagg_decode_busy_threshold=0.9,
        **ON,
    )
    apply_all(made, stored(2, 6))
    assert verdict(made).reason == "decode_size_unknown"


def test_the_gate_counts_a_block_that_is_active_already_once() -> None:
    made = fleet(conditional_disagg_decode_busy_threshold=0.1)
    held = made.plan(request(112, "held")).decode
    assert held is not None
    apply_all(made, made.booking(held, request(112, "held")))
    load = verdict(made, 108, pin_decode=Pin(4)).decode_load
    assert load is not None
    assert (load.value, load.limit) == (7 + 7 - 6, 10)


@pytest.mark.seed("dynamo-1.6: skip the hop: decode workers that cannot prefill")
def test_a_decode_worker_that_cannot_prefill_is_not_asked() -> None:
    workers = (
        worker(1, "p", "prefill"),
        worker(2, "able", "decode"),
        worker(3, "unable", "decode", can_prefill=False),
    )
    made = router(*workers, **ON)
    apply_all(made, stored(3, 6))
    found = verdict(made)
    assert (found.decode, found.bypassed) == ("able", False)
    # Dynamo does not look.
    apply_all(made, ConfigSet({"conditional_disagg_require_can_prefill": False}))
    found = verdict(made)
    assert (found.decode, found.bypassed) == ("unable", True)
    only = router(workers[0], workers[2], **ON)
    assert verdict(only).reason == "no_decode_worker"


def test_a_request_that_names_its_prefill_worker_keeps_the_hop() -> None:
    made = fleet()
    assert verdict(made, pin_prefill=Pin(1)).reason == "prefill_pinned"
    # A pinned decode worker is the one that is looked at.
    assert verdict(made, pin_decode=Pin(3)).reason == "little_cached"
    assert verdict(made, pin_decode=Pin(4)).reason == "short_prefill"


def test_a_session_stays_with_its_decode_worker_with_and_without_the_hop() -> None:
    made = fleet(router_session_affinity_ttl_secs=60.0)
    apply_all(made, stored(3, 6, seed=4))
    session = Session("s", at=1.0)
    first = made.plan(request(112, "first", seed=9, session=session, pin_prefill=Pin(1)))
    assert first.decode is not None
    assert first.decode.worker is not None
    name = first.decode.worker.name
    apply_all(made, made.booking(first.decode, request(112, "first", seed=9, session=session)))
    apply_all(made, Freed("first"))
    # The other decode worker has the next prompt of the session, and is not looked at.
    cold = request(112, "next", seed=0 if name == "decode-0" else 4, session=session)
    assert (verdict_of(made, cold).decode, verdict_of(made, cold).reason) == (name, "little_cached")
    warm = request(112, "warm", seed=4 if name == "decode-0" else 0, session=session)
    assert (verdict_of(made, warm).decode, verdict_of(made, warm).bypassed) == (name, True)


def test_a_prompt_without_tokens_keeps_the_hop() -> None:
    assert verdict(fleet(), overlap_modelled=False).reason == "not_tokenized"


def test_a_bypassed_request_follows_no_transfer_policy() -> None:
    made = router(
        worker(1, "p", "prefill", zone="a", policy="required"),
        worker(2, "near", "decode", zone="a"),
        worker(3, "far", "decode", zone="b"),
        **ON,
    )
    apply_all(made, stored(3, 6))
    plan = made.plan(request(112))
    assert plan.bypass is not None
    assert plan.bypass.bypassed
    assert plan.final.worker is not None
    assert plan.final.worker.name == "far"
    assert plan.implied == ()


def test_without_prefill_workers_there_is_no_hop_to_leave_out() -> None:
    made = fleet()
    apply_all(made, WorkerAvailability(1, "gone"), WorkerAvailability(2, "gone"))
    plan = made.plan(request(112))
    assert (plan.bypass, plan.final.stage) == (None, "aggregated")


def test_other_modes_do_not_look() -> None:
    assert fleet(router_mode="round-robin").plan(request(112)).bypass is None


def test_a_draw_between_decode_workers_is_named() -> None:
    """Two decode workers cost the same; only one of them has enough cached."""
    made = fleet()
    apply_all(made, active(4, "a", blocks=6))
    found = made.plan(request(112), detail=True).bypass
    assert found is not None
    assert (found.decode, found.drawn) == ("decode-0", True)


def test_a_verdict_that_other_inputs_may_change_is_not_certain() -> None:
    made = fleet()
    asked = request(112)
    question = PlanQuestion(made, asked, made.plan(asked), made.view())
    assert certain(question, [])
    assert not certain(question, [Unknown(overlap=True)])
    assert not certain(question, [Unknown({"conditional_disagg_eff_isl_threshold": [10]})])
    assert certain(question, [Unknown({"conditional_disagg_eff_isl_threshold": [20]})])


@pytest.mark.parametrize(("seed", "same"), [(0, False), (7, True)])
def test_whether_the_setting_matters_depends_on_what_decode_workers_cache(
    seed: int, same: bool
) -> None:
    made = fleet(conditional_disagg_enabled=False)
    apply_all(made, active(3, "a", stage="decode", blocks=1), active(2, "b", stage="prefill",
              prefill_tokens=5))  # fmt: skip
    asked = request(112, seed=seed)
    question = PlanQuestion(made, asked, made.plan(asked), made.view())
    assert certain(question, [Unknown({"conditional_disagg_enabled": [True]})]) is same


def test_state_and_settings_survive_a_snapshot() -> None:
    made = fleet()
    again = Router.restore(made.snapshot())
    assert again.plan(request(112)) == made.plan(request(112))
