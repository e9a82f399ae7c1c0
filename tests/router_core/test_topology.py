"""Prefill to decode: the reference's cases, the proposal's table, and the capacity guard."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core.changes import (
    LoadReported,
    Stage,
    ThresholdsSet,
    WorkerAvailability,
    WorkerLost,
    WorkerUpserted,
)
from router_core.decision import AllWorkersBusy, NoEligibleWorker
from router_core.errors import ConstraintError, PolicyUnderivable, WorkerError
from router_core.routing_view import Pin
from router_core.taints import canonical_taint, constraints, topology_of
from router_core.topology import UNCONSTRAINED, RouterPolicy, implied_constraints, policy_conflict
from router_core.workers import MAX_RANKS, ModelRuntimeConfig, Role, Worker
from tests.router_core.fleet import MODEL, active, apply_all, request, router, stored, worker

ZONE_A = canonical_taint("zone", "a")


def names(decision: Any) -> set[str]:
    return {one.name for one in decision.workers}


def unchecked(worker_id: int, **runtime: Any) -> Worker:
    """A card without validation, as some live deployments publish."""
    config = ModelRuntimeConfig(**runtime, validate=False)
    return Worker(worker_id, f"x{worker_id}", MODEL, Role.PREFILL, runtime_config=config)


# -- derivation ----------------------------------------------------------------------------


def test_unknown_worker_is_unconstrained_unless_a_sibling_requires() -> None:
    relaxed = worker(1, role="prefill", zone="a")
    strict = worker(2, "strict", role="prefill", zone="a", policy="required")
    assert implied_constraints(None, [relaxed], None).constraints == ()
    with pytest.raises(PolicyUnderivable, match="strict"):
        implied_constraints(None, [relaxed, strict], None)


def test_worker_without_policy_is_unconstrained_even_if_siblings_require() -> None:
    strict = worker(2, role="prefill", zone="a", policy="required")
    assert (
        implied_constraints(worker(1, role="prefill", zone="a"), [strict], None).constraints == ()
    )


@pytest.mark.parametrize(
    ("runtime", "said"),
    [
        ({"kv_transfer_domain": "zone", "kv_transfer_enforcement": "required"}, "topology_domains"),
        ({"topology_domains": {"zone": "a"}, "kv_transfer_domain": "zone"}, "without"),
        (
            {
                "topology_domains": {"zone": "a"},
                "kv_transfer_domain": "zone",
                "kv_transfer_enforcement": "preferred",
            },
            "kv_transfer_preferred_weight is missing",
        ),
    ],
)
@pytest.mark.seed("router-topology: enforcement: fail-closed")
def test_underivable_policies_name_worker_and_domain(runtime: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyUnderivable) as error:
        implied_constraints(unchecked(1, **runtime), [], None)
    assert said in str(error.value)
    assert "x1" in str(error.value)
    assert "'zone'" in str(error.value)


@pytest.mark.seed("router-topology: runtime contract: kv_transfer_preferred_weight")
@pytest.mark.seed("router-topology: enforcement: required")
def test_required_and_preferred_carry_taint_weight_and_origin() -> None:
    (required,) = implied_constraints(
        worker(1, role="prefill", zone="a", policy="required"), [], None
    ).constraints
    assert (required.taint, required.kind, required.weight) == (ZONE_A, "required", None)
    assert required.origin == "kv-transfer policy of worker w1"
    (preferred,) = implied_constraints(
        worker(1, role="prefill", zone="a", policy="preferred", weight=0.85), [], None
    ).constraints
    assert (preferred.taint, preferred.kind, preferred.weight) == (ZONE_A, "preferred", 0.85)


@pytest.mark.seed("router-topology: enforcement: merged constraints")
def test_merge_keeps_the_request_and_overwrites_its_weight_for_the_policys_taint() -> None:
    own = constraints(["gold"], {ZONE_A: -5.0, "rack": 0.5})
    derived = implied_constraints(
        worker(1, role="prefill", zone="a", policy="preferred", weight=0.85), [], None
    )
    merged = own.merge(derived.constraints)
    assert [item.taint for item in merged.required] == ["gold"]
    assert {item.taint: item.weight for item in merged.preferred} == {ZONE_A: 0.85, "rack": 0.5}
    assert {item.taint: item.origin for item in merged.preferred}["rack"] == "request"


# -- observed fleet ------------------------------------------------------------------------


def observed_fleet(**settings: Any) -> Any:
    """The fleet of the observations: prefill pA pR pZ pN, decode dA dB dN."""
    return router(
        worker(1, "pA", "prefill", zone="a", policy="preferred", weight=0.85),
        worker(2, "pR", "prefill", zone="a", policy="required"),
        worker(3, "pZ", "prefill", zone="z", policy="required"),
        worker(4, "pN", "prefill"),
        worker(5, "dA", "decode", zone="a"),
        worker(6, "dB", "decode", zone="b"),
        worker(7, "dN", "decode"),
        **settings,
    )


@pytest.mark.parametrize(
    ("prefill", "wish", "decode", "cost"),
    [
        (1, {}, {"dA"}, 1.0021),
        (1, {"dynamo.topology/zone=b": 1.0}, {"dB"}, 0.9338),
        (1, {ZONE_A: -5.0}, {"dA"}, 1.0021),
        (2, {}, {"dA"}, 2.0),
        (4, {}, {"dA", "dB", "dN"}, 2.0),
    ],
)
def test_observed_edges(
    prefill: int, wish: dict[str, float], decode: set[str], cost: float
) -> None:
    wanted = request(40, pin_prefill=Pin(prefill), constraints=constraints((), wish))
    plan = observed_fleet(decode_capacity_guard=False).plan(wanted)
    assert plan.decode is not None
    lowest = min(plan.decode.costs)
    best = {
        w.name for w, c in zip(plan.decode.workers, plan.decode.costs, strict=True) if c == lowest
    }
    assert best == decode
    assert lowest == pytest.approx(cost, abs=6e-5)


@pytest.mark.seed("router-topology: enforcement: fail-closed")
def test_required_without_decode_in_the_domain_is_refused_before_dispatch() -> None:
    plan = observed_fleet(decode_capacity_guard=False).plan(request(40, pin_prefill=Pin(3)))
    assert plan.prefill is not None
    assert plan.prefill.winner is not None
    assert plan.refusal is plan.decode
    assert plan.decode is not None
    assert plan.decode.outcome == "no_eligible_worker"
    with pytest.raises(NoEligibleWorker, match="0/3 workers eligible: 3 missing taint"):
        plan.decode.require()


@pytest.mark.parametrize(
    ("pin_prefill", "pin_decode", "required", "outcome"),
    [
        (2, 6, (), "pinned_ineligible"),
        (1, 6, (), "selected"),
        (4, 7, (), "selected"),
        (1, None, ("dynamo.topology/zone=b",), "pinned_ineligible"),
        (99, None, (), "pinned_ineligible"),
    ],
)
def test_pins(
    pin_prefill: int, pin_decode: int | None, required: tuple[str, ...], outcome: str
) -> None:
    wanted = request(
        40,
        pin_prefill=Pin(pin_prefill),
        pin_decode=None if pin_decode is None else Pin(pin_decode),
        constraints=constraints(required),
    )
    assert observed_fleet(decode_capacity_guard=False).plan(wanted).final.outcome == outcome


# -- the proposal's "Runtime routing" table, under the router's own policy --------------------


def policy_fleet(enforcement: str, *workers: Worker, **settings: Any) -> Any:
    settings |= {"kv_transfer_domain": "zone", "kv_transfer_enforcement": enforcement}
    return router(*workers, **settings)


def two_zones(*, decode_in_a: bool) -> list[Worker]:
    fleet = [worker(1, "pA", "prefill", zone="a"), worker(3, "dB", "decode", zone="b")]
    if decode_in_a:
        fleet.append(worker(2, "dA", "decode", zone="a"))
    return fleet


@pytest.mark.seed("dep-topology: routing failures: no same-domain decode workers: fail")
@pytest.mark.seed("dep-topology: routing failures: no same-domain decode workers: fallback")
def test_row_1_no_same_domain_decode() -> None:
    refused = policy_fleet("required", *two_zones(decode_in_a=False)).plan(request(40))
    assert refused.final.outcome == "no_eligible_worker"
    crossing = policy_fleet("fallback", *two_zones(decode_in_a=False)).plan(request(40))
    assert crossing.ok
    assert crossing.relaxed
    assert "fallback policy crosses" in crossing.final.notes[-1]
    local = policy_fleet("fallback", *two_zones(decode_in_a=True)).plan(request(40))
    assert local.final.worker is not None
    assert (local.final.worker.name, local.relaxed) == ("dA", False)


@pytest.mark.seed("dep-topology: routing failures: worker without the level: fail")
@pytest.mark.seed("dep-topology: routing failures: worker without the level: fallback")
def test_row_2_workers_that_lack_the_level() -> None:
    bare = worker(4, "dN", "decode")
    for enforcement in ("required", "fallback"):
        plan = policy_fleet(enforcement, *two_zones(decode_in_a=True), bare).plan(request(40))
        assert names(plan.final) == {"dA"}
    crossing = policy_fleet("fallback", *two_zones(decode_in_a=False), bare).plan(request(40))
    assert names(crossing.final) == {"dB", "dN"}
    unlabelled = worker(5, "pN", "prefill")
    strict = policy_fleet("required", *two_zones(decode_in_a=True), unlabelled)
    apply_all(strict, stored(5, 2))
    plan = strict.plan(request(40), detail=True)
    assert plan.prefill is not None
    assert names(plan.prefill) == {"pA"}
    (rejection,) = (
        r for step in plan.prefill.funnel for r in step.rejected if r.worker.name == "pN"
    )
    assert rejection.reason.code == "missing_domain"


@pytest.mark.seed("dep-topology: routing failures: level unset")
def test_row_3_level_unset_filters_nothing() -> None:
    plan = router(*two_zones(decode_in_a=True)).plan(request(40))
    assert names(plan.final) == {"dA", "dB"}
    assert plan.implied == ()


@pytest.mark.seed("dep-topology: routing failures: prefill without decode: fail")
@pytest.mark.parametrize("enforcement", ["required", "fallback"])
@pytest.mark.seed("dep-topology: routing failures: prefill without decode: fallback")
def test_row_4_prefill_prefers_domains_with_decode(enforcement: str) -> None:
    fleet = policy_fleet(
        enforcement, *two_zones(decode_in_a=False), worker(6, "pB", "prefill", zone="b")
    )
    apply_all(fleet, stored(1, 2))
    plan = fleet.plan(request(40), detail=True)
    assert plan.prefill is not None
    assert plan.prefill.worker is not None
    assert plan.prefill.worker.name == "pB"
    assert plan.ok
    assert not plan.relaxed
    off = policy_fleet(
        enforcement,
        *two_zones(decode_in_a=False),
        worker(6, "pB", "prefill", zone="b"),
        decode_capacity_guard=False,
    )
    apply_all(off, stored(1, 2))
    assert off.plan(request(40)).prefill.worker.name == "pA"


@pytest.mark.parametrize("policy", [None, RouterPolicy("zone", "fallback")])
def test_a_prefill_worker_without_the_domain_is_unconstrained(policy: RouterPolicy | None) -> None:
    assert implied_constraints(worker(1, role="prefill"), [], policy) == UNCONSTRAINED
    preferred = RouterPolicy("zone", "preferred", 0.5)
    assert implied_constraints(worker(1, role="prefill"), [], preferred) == UNCONSTRAINED
    with pytest.raises(PolicyUnderivable, match="publishes no topology domain 'zone'"):
        implied_constraints(worker(1, role="prefill"), [], RouterPolicy("zone", "required"))


def test_a_preferred_router_policy_prefers_the_workers_domain() -> None:
    prefill = worker(1, role="prefill", zone="a")
    implied = implied_constraints(prefill, [], RouterPolicy("zone", "preferred", 0.5))
    (item,) = implied.constraints
    assert (item.taint, item.kind, item.weight, item.origin) == (
        ZONE_A,
        "preferred",
        0.5,
        "router policy",
    )
    assert not implied.relaxable


def test_fallback_does_not_cross_to_avoid_busy_workers() -> None:
    fleet = policy_fleet(
        "fallback", *two_zones(decode_in_a=True), active_prefill_tokens_threshold=10
    )
    apply_all(fleet, LoadReported(2, 0, active_prefill_tokens=11))
    plan = fleet.plan(request(40))
    assert (plan.ok, plan.relaxed, plan.final.outcome) == (False, False, "all_busy")


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.seed("dep-topology: routing failures: no same-domain decode workers: fallback")
def test_the_refusal_of_busy_decode_workers_says_what_fallback_means(guard: bool) -> None:
    fleet = policy_fleet(
        "fallback",
        *two_zones(decode_in_a=True),
        active_prefill_tokens_threshold=10,
        decode_capacity_guard=guard,
    )
    apply_all(fleet, LoadReported(2, 0, active_prefill_tokens=11))
    plan = fleet.plan(request(40), detail=True)
    assert plan.refusal is not None
    assert plan.refusal.outcome == "all_busy"
    assert "busy; the fallback policy crosses" in plan.refusal.summary()
    assert "only where it has none" in plan.refusal.summary()
    for hop in (plan.prefill, plan.decode):
        assert not [s for s in (hop.funnel if hop is not None else ()) if s.skipped]
    apply_all(fleet, WorkerLost(2))
    assert fleet.plan(request(40)).relaxed, "a domain without decode workers is crossed"


@pytest.mark.seed("dep-topology: routing failures: prefill without decode: fail")
def test_without_the_guard_a_refusal_names_the_domains_that_could_serve_the_request() -> None:
    workers = [*two_zones(decode_in_a=False), worker(6, "pB", "prefill", zone="b")]
    fleet = policy_fleet("required", *workers, decode_capacity_guard=False)
    apply_all(fleet, stored(1, 2))
    plan = fleet.plan(request(40))
    assert plan.refusal is plan.decode
    assert plan.final.notes == (
        "dynamo.topology/zone=b has prefill and decode workers for this request: with "
        "decode_capacity_guard such domains are chosen",
    )
    apply_all(fleet, WorkerLost(6))
    assert fleet.plan(request(40)).final.notes == ()


def test_fallback_without_any_decode_worker_is_refused_before_dispatch() -> None:
    fleet = policy_fleet("fallback", *two_zones(decode_in_a=True))
    for worker_id in (2, 3):
        apply_all(fleet, WorkerAvailability(worker_id, "connection refused"))
    plan = fleet.plan(request(40))
    assert plan.prefill.winner is None
    assert plan.decode is None


def test_a_required_router_policy_admits_prefill_workers_with_a_policy_of_their_own() -> None:
    own = worker(
        5,
        "pR",
        "prefill",
        topology_domains={"rack": "r1"},
        kv_transfer_domain="rack",
        kv_transfer_enforcement="required",
    )
    decode = worker(6, "dR", "decode", topology_domains={"rack": "r1"})
    plan = policy_fleet("required", own, decode).plan(request(40))
    assert plan.final.worker.name == "dR"


def test_a_worker_that_drops_its_own_policy_falls_under_the_routers() -> None:
    decode = worker(6, "dA", "decode", zone="a")
    own = worker(
        5,
        "pR",
        "prefill",
        topology_domains={"rack": "r1"},
        kv_transfer_domain="rack",
        kv_transfer_enforcement="preferred",
        kv_transfer_preferred_weight=0.5,
    )
    fleet = policy_fleet("required", own, decode)
    assert fleet.plan(request(40)).ok
    apply_all(fleet, WorkerUpserted(worker(5, "pR", "prefill")))
    plan = fleet.plan(request(40), detail=True)
    assert [one.filter for one in plan.prefill.funnel if not one.left] == ["domain"]


def test_a_decode_worker_whose_new_card_allows_prefill_serves_alone() -> None:
    fleet = router(worker(1, "d", "decode", can_prefill=False))
    assert not fleet.plan(request(40)).ok
    apply_all(fleet, WorkerUpserted(worker(1, "d", "decode", can_prefill=True)))
    assert fleet.plan(request(40)).ok


@pytest.mark.seed("kubernetes-topology: pipeline: policy comes from workers")
def test_a_workers_own_policy_wins_and_the_conflict_is_named() -> None:
    own = worker(1, "pA", "prefill", zone="a", policy="preferred", weight=0.3)
    policy = RouterPolicy("zone", "required")
    (item,) = implied_constraints(own, [], policy).constraints
    assert (item.kind, item.weight) == ("preferred", 0.3)
    assert "preferred 0.3 zone" in (policy_conflict(own, policy) or "")
    assert policy_conflict(own, RouterPolicy("zone", "preferred", 0.3)) is None
    assert policy_conflict(worker(2, role="prefill", zone="a"), policy) is None


# -- the guard -----------------------------------------------------------------------------


def guarded(**settings: Any) -> Any:
    return router(
        worker(1, "pA", "prefill", zone="a", policy="required"),
        worker(2, "pB", "prefill", zone="b", policy="required"),
        worker(3, "dA", "decode", zone="a", total_kv_blocks=100),
        worker(4, "dB", "decode", zone="b", total_kv_blocks=100),
        **settings,
    )


def test_guard_moves_a_request_away_from_a_zone_that_lost_its_decode_workers() -> None:
    fleet = guarded()
    apply_all(fleet, stored(1, 2))
    assert fleet.plan(request(40)).final.worker.name == "dA"
    apply_all(fleet, WorkerLost(3))
    plan = fleet.plan(request(40), detail=True)
    assert (plan.prefill.worker.name, plan.final.worker.name) == ("pB", "dB")
    step = next(step for step in plan.prefill.funnel if step.filter == "decode_capacity")
    assert (step.entered, step.left) == (2, 1)
    assert step.rejected[0].reason.message == "zone=a has no eligible decode worker"


@pytest.mark.parametrize("how", ["lost", "unavailable", "busy"])
def test_guard_counts_only_decode_workers_that_could_take_the_request(how: str) -> None:
    fleet = guarded(active_decode_blocks_threshold=0.5)
    apply_all(fleet, stored(1, 2))
    if how == "lost":
        apply_all(fleet, WorkerLost(3))
    elif how == "unavailable":
        apply_all(fleet, WorkerAvailability(3, "connection refused"))
    else:
        apply_all(fleet, LoadReported(3, 0, kv_used_blocks=51))
    assert fleet.plan(request(40)).prefill.worker.name == "pB"


def test_guard_refuses_before_dispatch_when_no_domain_has_capacity() -> None:
    fleet = guarded()
    apply_all(fleet, WorkerLost(3), WorkerLost(4))
    # Another decode worker is there, but in no domain that has prefill.
    assert fleet.apply(_upsert(worker(9, "dZ", "decode", zone="z")), 1.0).ok
    plan = fleet.plan(request(40), detail=True)
    assert plan.prefill.winner is None
    assert plan.decode is None
    assert plan.prefill.outcome == "no_eligible_worker"
    assert "no decode capacity (zone=a has no eligible decode worker)" in plan.prefill.summary()


def test_guard_reports_all_busy_when_only_busy_decode_workers_are_left() -> None:
    fleet = guarded()
    apply_all(
        fleet,
        ThresholdsSet(MODEL, {"active_decode_blocks_threshold": 0.5}),
        LoadReported(3, 0, kv_used_blocks=51),
        LoadReported(4, 0, kv_used_blocks=51),
    )
    plan = fleet.plan(request(40))
    assert plan.prefill.outcome == "all_busy"
    with pytest.raises(AllWorkersBusy):
        plan.prefill.require()


def test_guard_does_not_call_a_pin_across_domains_busy() -> None:
    plan = guarded().plan(request(40, pin_prefill=Pin(1), pin_decode=Pin(4)))
    assert plan.prefill.outcome == "pinned_ineligible"


def test_guard_excludes_prefill_workers_whose_policy_cannot_be_applied() -> None:
    broken = unchecked(1, kv_transfer_domain="zone", kv_transfer_enforcement="required")
    fleet = router(broken, worker(2, "pF", "prefill"), worker(3, "dA", "decode"))
    apply_all(fleet, stored(1, 2))
    plan = fleet.plan(request(40), detail=True)
    assert plan.ok
    assert plan.prefill is not None
    assert names(plan.prefill) == {"pF"}
    (step,) = (one for one in plan.prefill.funnel if one.filter == "decode_capacity")
    assert [one.reason.code for one in step.rejected] == ["policy_underivable"]
    unguarded = router(broken, worker(3, "dA", "decode"), decode_capacity_guard=False)
    assert unguarded.plan(request(40)).final.outcome == "policy_underivable"


def test_guard_follows_changed_policies() -> None:
    fleet = guarded()
    apply_all(fleet, WorkerLost(3))
    assert names(fleet.plan(request(40)).prefill) == {"pB"}
    apply_all(fleet, WorkerUpserted(worker(1, "pA", "prefill", zone="a")))
    assert names(fleet.plan(request(40)).prefill) == {"pA", "pB"}


def test_guard_does_not_apply_to_preferred() -> None:
    fleet = router(
        worker(1, "pA", "prefill", zone="a", policy="preferred", weight=0.85),
        worker(2, "pB", "prefill", zone="b", policy="preferred", weight=0.85),
        worker(4, "dB", "decode", zone="b"),
    )
    apply_all(fleet, stored(1, 2))
    plan = fleet.plan(request(40))
    assert plan.prefill is not None
    assert plan.prefill.worker is not None
    assert plan.prefill.worker.name == "pA"
    assert "decode_capacity" not in {step.filter for step in plan.prefill.funnel}


@pytest.mark.seed("dep-topology: compatibility: None does not filter")
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["prefill", "decode"]),
            st.sampled_from([None, "a", "b"]),
            st.integers(0, 5),
        ),
        min_size=2,
        max_size=8,
    ),
    st.integers(16, 120),
    st.booleans(),
)
def test_without_a_policy_topology_changes_nothing(
    shape: list[tuple[str, str | None, int]], tokens: int, guard: bool
) -> None:
    """Decisions with topology metadata but no policy equal those of a router without any."""
    with_topology = router(decode_capacity_guard=guard)
    without = router(decode_capacity_guard=False)
    for i, (role, zone, load) in enumerate(shape, start=1):
        for fleet, where in ((with_topology, zone), (without, None)):
            apply_all(fleet, _upsert(worker(i, role=role, zone=where)))
            apply_all(fleet, stored(i, load), active(i, f"b{i}", stage="decode", blocks=load))
    ours, theirs = (f.plan(request(tokens)) for f in (with_topology, without))
    for one, other in ((ours.prefill, theirs.prefill), (ours.decode, theirs.decode)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert _essence(one) == _essence(other)


def _essence(decision: Any) -> Any:
    funnel = [(step.filter, step.entered, step.left) for step in decision.funnel]
    return decision.outcome, decision.ref, list(decision.costs), funnel


def _upsert(one: Worker) -> Any:
    from router_core.changes import WorkerUpserted

    return WorkerUpserted(one)


# -- registration --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runtime", "said"),
    [
        ({"topology_domains": {"zone": ""}}, "value of topology domain 'zone'"),
        ({"topology_domains": {"zone": " a"}}, "white space"),
        ({"topology_domains": {"zo=ne": "a"}}, "topology domain"),
        ({"topology_domains": {"zone": "a=b"}}, "'a=b'"),
        ({"kv_transfer_domain": "zone"}, "must reference a key in topology_domains"),
        ({"kv_transfer_enforcement": "required"}, "requires kv_transfer_domain"),
        (
            {
                "topology_domains": {"zone": "a"},
                "kv_transfer_domain": "zone",
                "kv_transfer_enforcement": "sometimes",
            },
            "must be 'required' or 'preferred', got 'sometimes'",
        ),
        ({"total_kv_blocks": -1}, "total_kv_blocks"),
        ({"data_parallel_size": 0}, "data_parallel_size"),
    ],
)
def test_registration_refuses(runtime: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkerError) as error:
        ModelRuntimeConfig(**runtime)
    assert said in str(error.value)


@pytest.mark.parametrize("weight", [None, 1.5, -0.1, float("nan"), float("inf")])
def test_registration_refuses_weights(weight: float | None) -> None:
    with pytest.raises(WorkerError, match="kv_transfer_preferred_weight"):
        worker(1, zone="a", policy="preferred", weight=weight)
    if weight is not None:
        with pytest.raises(WorkerError, match="only allowed when"):
            worker(1, zone="a", policy="required", weight=weight)


@pytest.mark.seed("router-topology: runtime contract: taints")
def test_canonical_taints_are_rebuilt_and_forged_ones_dropped() -> None:
    config = ModelRuntimeConfig(
        taints=frozenset({"dynamo.topology/zone=fake", "gold"}),
        topology_domains={"zone": "us-east-1a", "rack": "rack-22"},
    )
    assert config.taints == {
        "gold",
        "dynamo.topology/zone=us-east-1a",
        "dynamo.topology/rack=rack-22",
    }
    assert ModelRuntimeConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("weight", [float("inf"), float("-inf"), float("nan")])
def test_weights_of_preferred_taints_are_finite(weight: float) -> None:
    with pytest.raises(ConstraintError, match="'gold': expected a finite weight"):
        constraints(preferred={"gold": weight})


def test_a_required_taint_given_twice_is_one_constraint() -> None:
    assert [item.taint for item in constraints(["gold", "ssd", "gold"]).items] == ["gold", "ssd"]


@pytest.mark.parametrize(
    ("taint", "parts"),
    [
        ("dynamo.topology/zone=a", ("zone", "a")),
        ("dynamo.topology/zone=a=b", ("zone", "a=b")),
        ("dynamo.topology/zone=", None),
        ("dynamo.topology/=a", None),
        ("dynamo.topology/zone", None),
        ("zone=a", None),
    ],
)
def test_topology_of_a_taint(taint: str, parts: tuple[str, str] | None) -> None:
    assert topology_of(taint) == parts


def test_a_worker_has_at_most_1024_ranks() -> None:
    assert ModelRuntimeConfig(data_parallel_size=MAX_RANKS).data_parallel_size == 1024
    with pytest.raises(WorkerError, match="expected at most 1024, got 1025"):
        ModelRuntimeConfig(data_parallel_size=MAX_RANKS + 1)


# -- one hop alone -----------------------------------------------------------------------------


@pytest.mark.seed("router-guide: modes: Standalone Router")
@given(
    policies=st.lists(st.sampled_from(["required", "preferred", None]), min_size=2, max_size=2),
    zones=st.lists(st.sampled_from(["a", "b"]), min_size=3, max_size=3),
    loads=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    fallback=st.booleans(),
)
def test_a_decode_hop_alone_is_that_after_its_prefill_worker(
    policies: list[str | None], zones: list[str], loads: list[int], fallback: bool
) -> None:
    prefills = [
        worker(
            number,
            f"p{number}",
            "prefill",
            zone="ab"[number],
            policy=policy,
            weight=0.5 if policy == "preferred" else None,
        )
        for number, policy in enumerate(policies)
    ]
    decodes = [worker(10 + n, f"d{n}", "decode", zone=zone) for n, zone in enumerate(zones)]
    own = {"kv_transfer_domain": "zone", "kv_transfer_enforcement": "fallback"} if fallback else {}
    made = router(*prefills, *decodes, decode_capacity_guard=False, **own)
    for number, blocks in enumerate(loads):
        if blocks:
            apply_all(made, active(10 + number, f"r{number}", stage="decode", blocks=blocks))
    wanted = request(40)
    whole = made.plan(wanted)
    assert whole.prefill is not None
    alone = made.plan_hop(wanted, "decode", after=whole.prefill.worker)
    assert (alone.prefill, alone.decode) == (None, whole.decode)
    assert (alone.implied, alone.relaxed) == (whole.implied, whole.relaxed)
    # A pool without decode workers chooses the same prefill worker, and names the same constraints.
    pool = router(*prefills, **own)
    first = pool.plan_hop(wanted, "prefill")
    assert first.prefill is not None
    assert (first.prefill.worker, first.decode) == (whole.prefill.worker, None)
    assert (first.implied, first.ok) == (whole.implied, True)


def test_a_hop_alone_is_prefill_or_decode() -> None:
    made = router(worker(1))
    with pytest.raises(ValueError, match="stage: expected prefill or decode, got 'aggregated'"):
        made.plan_hop(request(16), "aggregated")
    stages: tuple[Stage, ...] = ("prefill", "decode")
    for stage in stages:
        plan = made.plan_hop(request(16), stage)
        assert plan.final.summary() == f"no {stage} worker is registered for model 'tiny'"


@pytest.mark.parametrize(
    "policy", [{"kv_transfer_enforcement": "fallback"}, {"kv_transfer_preferred_weight": 0.5}]
)
def test_a_prefill_worker_without_the_level_is_noted(policy: dict[str, Any]) -> None:
    """The router's policy does not apply to its requests, and the decision says so."""
    values = {"kv_transfer_domain": "zone", "kv_transfer_enforcement": "preferred"} | policy
    workers = worker(1, "pN", "prefill"), worker(2, "dA", "decode")
    plan = router(*workers, **values).plan(request(40), detail=True)
    assert plan.ok
    assert plan.implied == ()
    assert plan.decode is not None
    (note,) = plan.decode.notes
    assert "pN publishes no topology domain" in note
    assert values["kv_transfer_enforcement"] in note
    ignored = router(*workers, **values, router_mode="random", router_taints_in_all_modes=False)
    assert ignored.plan(request(40)).final.notes == ()
