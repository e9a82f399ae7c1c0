"""A flip changes the winner, 99 % of it does not. The preference equals a sweep of the formula."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from router_core.changes import ConfigSet
from router_core.config import ROUTER_MODES
from router_core.counterfactual import flip, flips, loses, preference, with_load, with_weight
from router_core.decision import Decision
from router_core.taints import constraints, preference_multiplier
from tests.router_core.fleet import active, apply_all, request, router, stored, worker

NO_WEIGHT = "no weight in 0..1 can keep it local: use required or add decode workers"
LOADS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 600), st.integers(0, 40), st.integers(0, 3)),
    min_size=2,
    max_size=5,
)


def fleet(rows: list[tuple[int, int, int, int]], **settings: Any) -> Any:
    made = router(*(worker(i) for i in range(1, len(rows) + 1)), **settings)
    for i, (cached, tokens, blocks, requests) in enumerate(rows, start=1):
        if cached:
            apply_all(made, stored(i, cached))
        apply_all(made, active(i, f"load{i}", prefill_tokens=tokens, blocks=blocks))
        apply_all(made, *(active(i, f"more{i}-{n}") for n in range(requests)))
    return made


def applied(decision: Decision, change: str, worker_name: str | None, by: float) -> Decision:
    if worker_name is None:
        now = float(getattr(decision.parameters, change))
        return with_weight(decision, change, now + by)
    position = next(i for i, w in enumerate(decision.workers) if w.name == worker_name)
    return with_load(decision, position, change, int(by))


@given(LOADS, st.integers(1, 130), st.sampled_from([0.0, 0.5]), st.floats(0.1, 3), st.floats(0, 2))
def test_a_flip_changes_the_winner_and_99_percent_of_it_does_not(
    rows: list[tuple[int, int, int, int]],
    tokens: int,
    request_weight: float,
    scale: float,
    credit: float,
) -> None:
    made = fleet(
        rows,
        decode_active_request_weight=request_weight,
        prefill_load_scale=scale,
        overlap_score_credit=credit,
    )
    decision = made.plan(request(tokens)).final
    assert decision.winner is not None
    found = list(flips(decision))
    assert found, "some load of the winner always flips"
    assert found[0] == flip(decision)
    for one in found:
        assert loses(decision, applied(decision, one.change, one.worker, one.by)), one
        less = math.trunc(one.by * 0.99) if one.is_load else one.by * 0.99
        assert not loses(decision, applied(decision, one.change, one.worker, less)), one


@given(LOADS, st.integers(1, 130))
def test_a_flip_acts_on_the_live_router_too(
    rows: list[tuple[int, int, int, int]], tokens: int
) -> None:
    """The flip is booked as real load on a real router, not on the decision's own columns."""
    made = fleet(rows)
    decision = made.plan(request(tokens)).final
    one = flip(decision)
    assert one is not None
    assume(one.by > 0)
    ref = next(w for w in decision.workers if w.name == one.worker).worker_id

    def winner_with(by: int) -> str:
        live = fleet(rows)
        if one.change == "active_prefill_tokens":
            apply_all(live, active(ref, "flip", prefill_tokens=by))
        else:
            apply_all(live, active(ref, "flip", blocks=by))
        after = live.plan(request(tokens)).final
        low = min(after.costs)
        position = next(i for i, w in enumerate(after.workers) if w.name == one.worker)
        return "same" if after.costs[position] == low else "changed"

    assert winner_with(int(one.by)) == "changed"
    assert winner_with(math.trunc(one.by * 0.99)) == "same"


def test_weights_flip_on_the_live_router_too() -> None:
    made = fleet([(4, 0, 5, 0), (0, 0, 0, 0)])
    decision = made.plan(request(64)).final
    one = next(f for f in flips(decision) if not f.is_load)
    for share, expected in ((1.0, True), (0.99, False)):
        live = fleet([(4, 0, 5, 0), (0, 0, 0, 0)])
        now = getattr(decision.parameters, one.change)
        apply_all(live, ConfigSet({one.change: now + one.by * share}))
        after = live.plan(request(64)).final
        assert decision.winner is not None
        assert (min(after.costs) < after.costs[decision.winner]) is expected


@given(
    LOADS,
    st.integers(1, 130),
    st.sampled_from(sorted(set(ROUTER_MODES) - {"direct"})),
    st.sampled_from([0.0, 0.7]),
    st.floats(0, 1, exclude_max=True),
)
def test_replay_gives_the_same_decision(
    rows: list[tuple[int, int, int, int]],
    tokens: int,
    mode: str,
    temperature: float,
    sample: float,
) -> None:
    made = fleet(rows, router_mode=mode, router_temperature=temperature)
    decision = made.plan(request(tokens), samples=(sample, 0.0)).final
    again = decision.replay()
    assert (again.winner, list(again.costs)) == (decision.winner, list(decision.costs))
    for row in decision.rows():
        total = sum(term.weight * row.terms[term.name] for term in decision.terms)
        assert row.cost == pytest.approx(row.multiplier * total, abs=1e-9)


def test_no_flip_without_a_runner_up_or_above_temperature_zero() -> None:
    assert flip(fleet([(0, 0, 0, 0)]).plan(request(16)).final) is None
    warm = fleet([(0, 0, 0, 0), (0, 0, 9, 0)], router_temperature=0.5)
    assert flip(warm.plan(request(16)).final) is None


# -- preference ----------------------------------------------------------------------------


def preferring(
    weight: float, local: int, remote: int, extra: dict[str, float] | None = None
) -> Any:
    """A decode decision between one local and one remote worker of the given costs."""
    made = router(
        worker(1, "p", "prefill", zone="a", policy="preferred", weight=weight),
        worker(2, "local", "decode", zone="a", taints=frozenset({"gold"})),
        worker(3, "remote", "decode", zone="b"),
    )
    apply_all(
        made,
        active(2, "l", stage="decode", blocks=local),
        active(3, "r", stage="decode", blocks=remote),
    )
    return made, made.plan(request(8, constraints=constraints((), extra or {}))).final


@given(
    st.floats(0, 1),
    st.integers(0, 60),
    st.integers(0, 60),
    st.sampled_from([None, {"gold": 0.4}, {"gold": -0.7}]),
)
def test_the_meter_agrees_with_a_sweep_of_the_formula(
    weight: float, local: int, remote: int, extra: dict[str, float] | None
) -> None:
    _, decision = preferring(weight, local, remote, extra)
    meter = preference(decision)
    assert meter is not None
    assert meter.crossover == pytest.approx(math.exp(math.tanh(weight)))
    other = sum((extra or {}).values())

    def wins(w: float) -> bool:
        return local * preference_multiplier((other, w)) < remote

    swept = next((w / 1000 for w in range(1001) if wins(w / 1000)), None)
    if meter.smallest_weight is None:
        assert swept is None or swept == 1.0
    else:
        assert swept is not None
        assert meter.smallest_weight == pytest.approx(swept, abs=1.01e-3)
        assert wins(min(1.0, meter.smallest_weight + 1e-6)) or meter.smallest_weight > 1 - 2e-6
    if local == remote == 0:
        assert meter.verdict == "no effect: both cost 0, so a multiplier changes nothing"
    elif remote == 0:
        assert meter.verdict.startswith("no weight can keep it local")
    else:
        assert (meter.verdict == "local wins") is wins(weight)


@pytest.mark.parametrize(
    ("weight", "local", "remote", "verdict"),
    [
        (0.0, 4, 5, "local wins"),
        (0.0, 5, 5, "spills to another domain"),
        (-0.5, 2, 5, "local wins"),
        (-0.5, 4, 5, "spills to another domain"),
        (2.0, 12, 5, "local wins"),
        (2.0, 14, 5, NO_WEIGHT),
    ],
)
def test_weights_outside_0_to_1_of_a_request(
    weight: float, local: int, remote: int, verdict: str
) -> None:
    made = router(worker(1, "local", taints=frozenset({"gold"})), worker(2, "remote"))
    apply_all(made, active(1, "l", blocks=local), active(2, "r", blocks=remote))
    decision = made.plan(request(0, constraints=constraints((), {"gold": weight}))).final
    meter = preference(decision)
    assert meter is not None
    assert meter.verdict == verdict
    winner = decision.worker
    assert winner is not None
    if verdict == "local wins":
        assert winner.name == "local"


@pytest.mark.parametrize("ratio", [math.e, math.nextafter(math.e, 0), math.nextafter(math.e, 9)])
def test_no_weight_bridges_a_ratio_of_e(ratio: float) -> None:
    _, decision = preferring(1.0, 3, 1)
    position = [one.name for one in decision.workers].index("local")
    costs = [1.0, 1.0]
    multipliers = decision.inputs.multipliers
    costs[position] = ratio * multipliers[position]
    meter = preference(replace(decision, costs=costs))
    assert meter is not None
    assert (meter.smallest_weight, meter.verdict) == (None, NO_WEIGHT)


def test_a_flip_of_least_loaded_is_a_number_of_requests() -> None:
    made = router(worker(1), worker(2), router_mode="least-loaded")
    apply_all(made, active(2, "x"), active(2, "y"))
    found = flip(made.plan(request(16)).final)
    assert found is not None
    assert (found.change, found.by, found.worker, found.is_load) == (
        "active_requests",
        3,
        "w1",
        True,
    )
    apply_all(made, active(1, "a"), active(1, "b"), active(1, "c"))
    decision = made.plan(request(16)).final
    assert decision.worker is not None
    assert decision.worker.name == "w2"
    random = router(worker(1), worker(2), router_mode="random").plan(request(16)).final
    assert flip(random) is None


@pytest.mark.parametrize(
    ("local", "remote", "now", "smallest", "verdict"),
    [
        (13, 10, 1.3, math.atanh(math.log(1.3)), "local wins"),
        (10, 20, 0.5, 0.0, "local wins"),
        (
            22,
            10,
            2.2,
            None,
            "no weight in 0..1 can keep it local: use required or add decode workers",
        ),
        (21, 10, 2.1, math.atanh(math.log(2.1)), "spills to another domain"),
        (0, 0, None, None, "no effect: both cost 0, so a multiplier changes nothing"),
    ],
)
@pytest.mark.seed("router-topology: troubleshooting: preferred crosses")
def test_the_meter_in_numbers(
    local: int, remote: int, now: float | None, smallest: float | None, verdict: str
) -> None:
    _, decision = preferring(0.85, local, remote)
    meter = preference(decision)
    assert meter is not None
    assert meter.crossover == pytest.approx(1.996, abs=5e-4)
    assert meter.now == (None if now is None else pytest.approx(now))
    assert meter.smallest_weight == (None if smallest is None else pytest.approx(smallest))
    assert meter.verdict == verdict


def test_no_meter_without_a_preference() -> None:
    made = router(worker(1), worker(2))
    assert preference(made.plan(request(32)).final) is None
    decision = made.plan(request(32, constraints=constraints((), {"gold": 1.0}))).final
    meter = preference(decision)
    assert meter is not None
    assert meter.verdict == "no candidate has the taint"
    assert preference(replace(decision, costs=())) is None
