"""The cost formula against every number that the guides and a live 1.6.1 router show."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core.changes import Booked, ConfigSet, Freed, PrefillDone, Stage
from router_core.config import SETTINGS, RouterConfig, preset
from router_core.cost import CostInputs, CostParameters, pick, probabilities, total_costs
from router_core.load import PotentialLoad
from router_core.routing_view import WhatIf
from router_core.taints import constraints, preference_multiplier
from router_core.terms import kv_terms
from router_core.workers import Role
from tests.router_core.fleet import active, apply_all, costs, request, router, stored, worker


def formula(
    isl: int, overlap: int, *, scale: float = 1.0, stage: Stage = "aggregated", **loads: int
) -> float:
    """The cost of one candidate, straight from the formula."""
    config = preset("dynamo-1.6").with_values({"prefill_load_scale": scale})
    inputs = CostInputs(
        isl_tokens=isl,
        block_size=16,
        prompt_blocks=isl // 16,
        overlap_blocks=[overlap],
        prefill_tokens=[loads.get("prefill_tokens", 0)],
        active_blocks=[loads.get("active_blocks", 0)],
        shared_blocks=[loads.get("shared_blocks", 0)],
        active_requests=[loads.get("active_requests", 0)],
    )
    return total_costs(kv_terms(inputs, CostParameters.for_stage(config, stage)), None, 1)[0]


@pytest.mark.parametrize(
    ("logged", "isl", "overlap", "scale", "stage"),
    [
        (5.188, 34, 0, 1.5, "aggregated"),
        (5.375, 36, 0, 1.5, "aggregated"),
        (3.875, 36, 1, 1.5, "aggregated"),
        (4.125, 44, 0, 1.5, "prefill"),
        (2.250, 40, 1, 1.5, "prefill"),
        (3.750, 40, 0, 1.5, "prefill"),
        (2.000, 44, 0, 1.5, "decode"),
    ],
)
@pytest.mark.seed("smart-routing-guide-0.9: cost: log lines")
def test_log_lines_of_the_0_9_guide(
    logged: float, isl: int, overlap: int, scale: float, stage: Stage
) -> None:
    assert f"{formula(isl, overlap, scale=scale, stage=stage):.3f}" == f"{logged:.3f}"


@pytest.mark.seed("router-guide: arguments: --router-kv-overlap-score-weight")
@pytest.mark.seed("smart-routing-guide-0.9: cost: worker selection example")
def test_worked_table_of_the_0_9_guide() -> None:
    # 160 tokens are 10 blocks; the table gives decode blocks in all, so without the new ones.
    table = {"w1": (2, 10, 18.0), "w2": (5, 5, 10.0), "w3": (8, 9, 11.0)}
    fleet = router(*(worker(i + 1, name) for i, name in enumerate(table)))
    for i, (cached, _, _) in enumerate(table.values()):
        apply_all(fleet, stored(i + 1, cached))
    wanted = request(160)
    plan = fleet.plan(wanted)
    assert plan.decode is not None
    prefill = {row.worker.name: row.prefill_blocks or 0.0 for row in plan.decode.rows()}
    assert prefill == {"w1": 8.0, "w2": 5.0, "w3": 2.0}
    expected = {name: prefill[name] + decode for name, (_, decode, _) in table.items()}
    assert expected == {name: total for name, (_, _, total) in table.items()}
    # The same through the router: the prompt's own ten blocks count alike everywhere.
    for i, (_, decode, _) in enumerate(table.values()):
        apply_all(fleet, active(i + 1, f"busy{i}", blocks=decode))
    assert costs(fleet, wanted) == {name: total + 10 for name, (_, _, total) in table.items()}
    assert fleet.plan(wanted).final.worker is not None
    assert fleet.plan(wanted).final.worker.name == "w2"  # type: ignore[union-attr]


def test_observed_costs_of_an_aggregated_pool() -> None:
    """1.6.1, observed: X and Y are 40 tokens, Z is 64 and starts with X's first 32."""
    x, y, z = request(40, "x"), request(40, "y", seed=7), request(64, "z")
    fleet = router(worker(1, "a"), worker(2, "b"))

    def row() -> tuple[float, float, float]:
        return tuple(costs(fleet, one)["a"] for one in (x, y, z))  # type: ignore[return-value]

    def hold(name: str, what: str) -> None:
        wanted = {"x": x, "y": y}[what]
        booked = fleet.booking(fleet.plan(wanted, samples=(0.0, 0.0)).final, wanted)
        apply_all(
            fleet,
            type(booked)(name, "aggregated", 1, 0, booked.prefill_tokens, booked.sequence_hashes),
        )

    assert row() == (4.5, 4.5, 8.0)
    hold("x1", "x")
    assert row() == (7.0, 9.0, 10.5)
    hold("x2", "x")
    assert row()[:2] == (9.5, 11.5)
    apply_all(fleet, PrefillDone("x1"), PrefillDone("x2"))
    assert row() == (4.5, 6.5, 8.0)
    hold("y1", "y")
    apply_all(fleet, PrefillDone("y1"))
    assert row() == (6.5, 6.5, 10.0)
    apply_all(fleet, Freed("x1"), Freed("x2"), Freed("y1"))
    assert row() == (4.5, 4.5, 8.0)
    apply_all(fleet, stored(1, 1))
    assert row()[:2] == (3.5, 4.5)
    booked = fleet.booking(fleet.plan(x).final, x)
    assert booked.worker_id == 1
    assert booked.prefill_tokens == 24
    apply_all(fleet, booked)
    assert row()[:2] == (5.0, 8.0)
    assert costs(fleet, x)["b"] == 4.5


def test_observed_without_kv_reuse() -> None:
    x, y = request(40, "x"), request(40, "y", seed=7)
    fleet = router(worker(1, "a"), router_assume_kv_reuse=False)
    for name in ("x1", "x2"):
        booked = fleet.booking(fleet.plan(x).final, x)
        apply_all(fleet, type(booked)(name, "aggregated", 1, 0, 0, (), booked.anonymous_blocks))
    assert (costs(fleet, x)["a"], costs(fleet, y)["a"]) == (8.5, 8.5)


def test_observed_costs_of_a_disaggregated_pool() -> None:
    x, y = request(40, "x"), request(72, "y")
    fleet = router(*(worker(i, role=r) for i, r in enumerate(("prefill", "decode"), start=1)))
    assert costs(fleet, x, "prefill") == {"w1": 2.5}
    assert costs(fleet, y, "prefill") == {"w1": 4.5}
    assert costs(fleet, x) == {"w2": 2.0}
    assert costs(fleet, y) == {"w2": 4.0}
    plan = fleet.plan(x)
    assert plan.prefill is not None
    booked = fleet.booking(plan.prefill, x)
    apply_all(fleet, booked)
    assert (booked.prefill_tokens, booked.sequence_hashes, booked.anonymous_blocks) == (40, (), 0)
    assert costs(fleet, x, "prefill") == {"w1": 5.0}
    assert costs(fleet, y, "prefill") == {"w1": 7.0}
    assert costs(fleet, x) == {"w2": 2.0}
    apply_all(fleet, Freed("x"))
    apply_all(fleet, fleet.booking(fleet.plan(x).final, x))
    # Decode blocks are not shared: the same prompt counts again.
    assert costs(fleet, x) == {"w2": 4.0}
    assert costs(fleet, y) == {"w2": 6.0}
    apply_all(fleet, Freed("x"), stored(1, 2))
    assert costs(fleet, x, "prefill") == {"w1": 0.5}
    plan = fleet.plan(x)
    assert plan.prefill is not None
    apply_all(fleet, fleet.booking(plan.prefill, x))
    assert costs(fleet, x, "prefill") == {"w1": 1.0}


@pytest.mark.parametrize(
    ("cost", "weights", "observed"),
    [
        (15, [0.85], 7.5155989),
        (30, [0.85], 15.0311979),
        (2, [0.85], 1.0021),
        (2, [1.0], 0.9338),
        (2, [0.85, 0.5], 0.8345),
        (6.25, [0.85, 0.5], 2.6079),
    ],
)
@pytest.mark.seed("kubernetes-topology: pipeline: preferredWeight is not a probability")
def test_observed_preference_multipliers(
    cost: float, weights: list[float], observed: float
) -> None:
    assert cost * preference_multiplier(weights) == pytest.approx(observed, abs=6e-5)


@pytest.mark.parametrize(
    ("weight", "multiplier"),
    [(0.1, 0.9051), (0.5, 0.6299), (0.85, 0.5010), (1.0, 0.4669), (1e9, 0.3679), (0.0, 1.0)],
)
@pytest.mark.seed("router-topology: enforcement: preferred")
def test_multiplier_table(weight: float, multiplier: float) -> None:
    assert preference_multiplier([weight]) == pytest.approx(multiplier, abs=6e-5)


def test_a_preference_has_no_effect_at_cost_zero_and_none_on_a_pinned_request() -> None:
    fleet = router(worker(1, taints=frozenset({"gold"})), worker(2))
    wish = constraints((), {"gold": 1.0})
    assert set(costs(fleet, request(0, constraints=wish)).values()) == {0.0}
    assert costs(fleet, request(32, constraints=wish))["w1"] < costs(fleet, request(32))["w1"]
    from router_core.routing_view import Pin

    pinned = request(32, constraints=wish, pin_decode=Pin(1))
    assert costs(fleet, pinned) == {"w1": 4.0}


@pytest.mark.seed("smart-routing-guide-0.9: tuning: overlap weight: 0")
def test_credit_zero_ignores_caches_but_books_only_uncached_tokens() -> None:
    fleet = router(worker(1), worker(2), overlap_score_credit=0.0)
    apply_all(fleet, stored(1, 4))
    assert costs(fleet, request(64)) == {"w1": 8.0, "w2": 8.0}
    plan = fleet.plan(request(64))
    assert fleet.booking(plan.final, request(64)).prefill_tokens == 0


@pytest.mark.seed("router-guide: arguments: --router-track-prefill-tokens")
def test_without_prefill_tracking_the_credit_is_taken_from_decode_blocks() -> None:
    fleet = router(worker(1), worker(2), router_track_prefill_tokens=False)
    apply_all(fleet, stored(1, 3))
    assert costs(fleet, request(64)) == {"w1": 1.0, "w2": 4.0}


def test_credit_decay_lowers_the_credit_of_more_loaded_workers() -> None:
    fleet = router(worker(1), worker(2), overlap_score_credit_decay=1.0)
    apply_all(fleet, stored(1, 4), active(1, "busy", prefill_tokens=64))
    # P is 4 blocks above the least loaded, the prompt has 4 blocks: decay 1 / (1 + 4/4).
    assert costs(fleet, request(64))["w1"] == pytest.approx((64 + 64) / 16 - 4 / 2 + 4)


def test_credit_decay_counts_from_the_least_loaded_and_rounds_the_prompt_up() -> None:
    fleet = router(worker(1), worker(2), overlap_score_credit_decay=1.0)
    apply_all(fleet, stored(1, 3))
    apply_all(fleet, active(1, "x", prefill_tokens=96), active(2, "y", prefill_tokens=32))
    # P - min P is 4 blocks, 56 tokens are 4 blocks: decay 1 / (1 + 4/4), credit 3 / 2.
    assert costs(fleet, request(56))["w1"] == pytest.approx((96 + 56) / 16 - 1.5 + 3)


def test_credit_does_not_decay_without_prefill_tracking() -> None:
    fleet = router(
        worker(1),
        worker(2),
        overlap_score_credit_decay=1.0,
        router_track_prefill_tokens=False,
    )
    apply_all(fleet, stored(1, 3), active(1, "x", prefill_tokens=64))
    assert costs(fleet, request(64)) == {"w1": 1.0, "w2": 4.0}


def test_without_kv_reuse_blocks_of_running_requests_are_not_shared() -> None:
    fleet = router(worker(1), router_assume_kv_reuse=False)
    running = Booked("x", "aggregated", 1, 0, 0, request(64).sequence_hashes)
    apply_all(fleet, running)
    assert costs(fleet, request(64)) == {"w1": 4.0 + 4 + 4}


def test_a_decode_decision_has_no_overlap() -> None:
    fleet = router(worker(1, role="prefill"), worker(2, role="decode"))
    apply_all(fleet, stored(2, 4))
    assert [row.overlap_blocks for row in fleet.plan(request(64)).final.rows()] == [0]


def test_pretended_load_changes_the_cost_and_stops_at_zero() -> None:
    fleet = router(worker(1), worker(2))
    apply_all(fleet, active(1, "x", prefill_tokens=32, blocks=2))
    more = WhatIf({0: 16, 1: 32}, {1: 3})
    found = fleet.plan(request(64), view=fleet.view(what_if=more)).final
    assert [row.cost for row in found.rows()] == [3.0 + 4 + 2 + 4, 2.0 + 4 + 3 + 4]
    less = WhatIf({0: -100}, {0: -100})
    found = fleet.plan(request(64), view=fleet.view(what_if=less)).final
    assert [row.cost for row in found.rows()] == [8.0, 8.0]
    assert costs(fleet, request(64)) == {"w1": 3.0 - 1 + 4 + 2 + 4, "w2": 8.0}


def test_potential_loads_count_cached_and_shared_blocks_once() -> None:
    fleet = router(worker(1), worker(2, data_parallel_size=2))
    running = Booked("x", "aggregated", 2, 1, 40, request(32).sequence_hashes)
    apply_all(fleet, stored(1, 2), running)
    wanted = request(70)
    assert fleet.overlap_scores(wanted) == {(1, 0): 2, (2, 0): 0, (2, 1): 0}
    assert fleet.potential_loads(wanted) == {
        (1, 0): PotentialLoad(70 - 32, 4),
        (2, 0): PotentialLoad(70, 4),
        (2, 1): PotentialLoad(40 + 70, 4),
    }


def test_active_request_weight_is_a_term_only_when_it_is_set() -> None:
    fleet = router(worker(1), worker(2))
    apply_all(fleet, active(1, "a"), active(1, "b"))
    assert [t.name for t in fleet.plan(request(16)).final.terms] == [
        "prefill_blocks",
        "decode_blocks",
    ]
    apply_all(fleet, ConfigSet({"decode_active_request_weight": 3.0}))
    assert costs(fleet, request(16)) == {"w1": 8.0, "w2": 2.0}


@pytest.mark.parametrize(
    ("temperature", "costs_seen", "predicted"),
    [
        (0.5, [4.5, 6.5, 10.5], (0.607, 0.311, 0.082)),
        (1.0, [0.0, 0.5, 1.0], (0.506, 0.307, 0.186)),
    ],
)
@pytest.mark.seed("router-guide: arguments: --router-temperature")
def test_softmax_is_range_normalised(
    temperature: float, costs_seen: list[float], predicted: tuple[float, ...]
) -> None:
    chances = probabilities(costs_seen, temperature)
    assert chances == pytest.approx(predicted, abs=1e-3)
    draws = Counter(pick(costs_seen, temperature, i / 10_000) for i in range(10_000))
    for index, chance in enumerate(chances):
        assert draws[index] / 10_000 == pytest.approx(chance, abs=2e-3)


def test_a_sample_above_the_rounded_sum_picks_the_last_likely_candidate() -> None:
    values = [5.0, 0.0, 8.0, 8.0, 9.0, 9.0]
    sample = math.nextafter(1.0, 0.0)
    assert sum(probabilities(values, 0.5)) <= sample
    assert pick(values, 0.5, sample) == 5


@pytest.mark.seed("smart-routing-guide-0.9: tuning: temperature 0.0")
@pytest.mark.seed("smart-routing-guide-0.9: cost: equal costs")
def test_exact_ties_are_uniform() -> None:
    draws = Counter(pick([2.0, 1.0, 1.0, 3.0, 1.0], 0.0, i / 300) for i in range(300))
    assert draws == {1: 100, 2: 100, 4: 100}


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.1, 0.5, 2.0]),
    st.floats(0, 1, exclude_max=True),
)
def test_pick_is_always_a_likely_candidate(
    values: list[float], temperature: float, sample: float
) -> None:
    chances = probabilities(values, temperature)
    assert math.isclose(math.fsum(chances), 1.0, rel_tol=1e-9)
    assert chances[pick(values, temperature, sample)] > 0


@given(
    st.integers(1, 4000),
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50_000), st.integers(0, 5_000)),
        min_size=1,
        max_size=6,
    ),
    st.floats(0, 4),
    st.floats(0, 3),
)
@pytest.mark.seed("router-guide: modes: KV")
@pytest.mark.seed("smart-routing-guide-0.9: cost: combined cost")
def test_columns_equal_the_formula_written_out(
    isl: int, rows: list[tuple[int, int, int]], scale: float, credit: float
) -> None:
    config = preset("dynamo-1.6").with_values(
        {"prefill_load_scale": scale, "overlap_score_credit": credit}
    )
    blocks = isl // 16
    overlap = [min(o, blocks) for o, _, _ in rows]
    inputs = CostInputs(
        isl,
        16,
        blocks,
        overlap,
        [p for _, p, _ in rows],
        [d for _, _, d in rows],
        None,
        [0] * len(rows),
    )
    terms = kv_terms(inputs, CostParameters.for_stage(config, "aggregated"))
    for (_, p, d), o, cost in zip(rows, overlap, total_costs(terms, None, len(rows)), strict=True):
        expected = scale * max(0.0, (p + isl) / 16 - credit * o) + d + blocks
        assert cost == pytest.approx(expected, rel=1e-12)


@pytest.mark.seed("smart-routing-guide-0.9: tuning: overlap weight: 0")
def test_weight_zero_counts_blocks_and_not_requests() -> None:
    """As in Dynamo 1.6.1: four requests with one prompt are the blocks of one."""
    pure = {"prefill_load_scale": 0.0, "overlap_score_credit": 0.0}
    hashes = tuple(request(64).sequence_hashes)
    for weight, loads in ((0.0, {"w1": 8.0, "w2": 8.0}), (1.0, {"w1": 12.0, "w2": 9.0})):
        fleet = router(worker(1), worker(2), decode_active_request_weight=weight, **pure)
        for number in range(5):
            holder = 1 if number < 4 else 2
            booked = Booked(f"r{number}", "aggregated", holder, 0, sequence_hashes=hashes)
            apply_all(fleet, booked)
        other = request(64, seed=1)
        assert costs(fleet, other) == loads


@pytest.mark.seed("smart-routing-guide-0.9: tuning: temperature 1.0+")
@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.731), (2.0, 0.622), (10.0, 0.525)])
@pytest.mark.parametrize("dearer", [1.01, 2.0, 1e6])
def test_of_two_workers_the_cheaper_one_is_never_even(
    temperature: float, share: float, dearer: float
) -> None:
    assert probabilities([1.0, dearer], temperature)[0] == pytest.approx(share, abs=5e-4)


#: A cost setting, and settings with which it has no effect.
WITHOUT_EFFECT = [
    ("overlap_score_credit", {"prefill_load_scale": 0.0}),
    ("overlap_score_credit_decay", {"router_track_prefill_tokens": False}),
    ("overlap_score_credit_decay", {"overlap_score_credit": 0.0}),
    ("overlap_score_credit_decay", {"prefill_load_scale": 0.0}),
    ("prefill_load_scale", {"router_track_prefill_tokens": False}),
    ("router_assume_kv_reuse", {"router_track_active_blocks": False}),
]


@pytest.mark.parametrize(("name", "others"), WITHOUT_EFFECT)
@given(
    value=st.floats(0, 5),
    cached=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    running=st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
def test_a_cost_setting_whose_condition_does_not_hold_changes_no_cost(
    name: str, others: dict[str, object], value: float, cached: list[int], running: list[int]
) -> None:
    """What is named as without effect at the start has none on any hop."""
    given_value = value > 2.5 if SETTINGS[name].type is bool else value

    def all_costs(**settings: object) -> list[dict[str, float]]:
        roles = (Role.AGGREGATED, Role.AGGREGATED), (Role.PREFILL, Role.DECODE)
        found = []
        for pair in roles:
            fleet = router(
                *(worker(n + 1, role=pair[n % 2]) for n in range(4)), **others, **settings
            )
            for n in range(4):
                if cached[n]:
                    apply_all(fleet, stored(n + 1, cached[n]))
                held = (active(n + 1, f"{n}-{k}", prefill_tokens=k * 16) for k in range(running[n]))
                apply_all(fleet, *held)
            plan = fleet.plan(request(96))
            hops = [hop for hop in (plan.prefill, plan.decode) if hop is not None]
            found += [{one.worker.name: one.cost for one in hop.rows()} for hop in hops]
        return found

    setting = SETTINGS[name]
    config = RouterConfig().with_values({**others, name: given_value})
    assert not all(only.holds(config) for only in setting.only)
    assert all_costs(**{name: given_value}) == all_costs()
