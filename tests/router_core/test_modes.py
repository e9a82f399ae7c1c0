"""The modes beside kv, and profiles with filters and scorers of a user's own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from router_core import (
    PROFILES,
    CandidateSet,
    CostInputs,
    CostParameters,
    Flip,
    Pin,
    Profile,
    Router,
    RoutingRequest,
    TermColumn,
    Worker,
    WorkerFilter,
    flip,
    flips,
)
from router_core.changes import Booked, ConfigSet, Freed, WorkerAvailability, WorkerLost
from router_core.cost import draw_two, pair_probabilities
from router_core.counterfactual import loses, with_load
from router_core.devices import DeviceBudget
from router_core.errors import ConfigError
from tests.router_core.fleet import active, apply_all, request, router, worker


def three(mode: str, **settings: Any) -> Any:
    return router(worker(30, "c"), worker(10, "a"), worker(20, "b"), router_mode=mode, **settings)


def winner(made: Any, n: int, sample: float = 0.0) -> str:
    return str(made.plan(request(32, f"r{n}"), samples=(sample, 0.0)).final.worker.name)


@pytest.mark.seed("router-guide: modes: Frontend + Round-Robin")
@pytest.mark.seed("router-guide: modes: Round-Robin")
def test_round_robin_cycles_in_ascending_id_order_and_ignores_load() -> None:
    made = three("round-robin")
    apply_all(made, active(10, "x", blocks=100))
    # The booking above was one turn.
    seen = []
    for n in range(6):
        plan = made.plan(request(32, f"r{n}"))
        seen.append(plan.final.worker.name)
        apply_all(made, made.booking(plan.final, request(32, f"r{n}")))
    assert seen == ["b", "c", "a", "b", "c", "a"]


def test_a_dry_run_does_not_move_the_round_robin_position() -> None:
    made = three("round-robin")
    assert {winner(made, n) for n in range(5)} == {"a"}
    assert [t.name for t in made.plan(request(32)).final.terms] == ["turns_until_due"]


@pytest.mark.seed("router-guide: modes: Frontend + Random")
@pytest.mark.seed("router-guide: modes: Random")
def test_random_is_uniform_over_the_sample() -> None:
    made = three("random")
    assert Counter(winner(made, n, n / 300) for n in range(300)) == {"a": 100, "b": 100, "c": 100}
    assert len(made.plan(request(32)).final.tied) == 3


@pytest.mark.seed("router-guide: modes: Frontend + Least-Loaded")
@pytest.mark.seed("router-guide: modes: Least-Loaded")
def test_least_loaded_counts_requests_in_flight() -> None:
    made = three("least-loaded")
    apply_all(made, active(10, "x"), active(10, "y"), active(20, "z"))
    assert {winner(made, n, n / 50) for n in range(50)} == {"c"}
    apply_all(made, active(30, "w"))
    assert Counter(winner(made, n, n / 100) for n in range(100)) == {"b": 50, "c": 50}
    apply_all(made, Freed("x"), Freed("y"))
    assert {winner(made, n, n / 50) for n in range(50)} == {"a"}


@pytest.mark.parametrize("mode", sorted(set(PROFILES) - {"kv", "direct"}))
def test_required_topology_holds_in_every_mode(mode: str) -> None:
    made: Any = router(
        worker(1, "pA", "prefill", zone="a", policy="required"),
        worker(2, "dA", "decode", zone="a"),
        worker(3, "dB", "decode", zone="b"),
        router_mode=mode,
    )
    for n in range(12):
        plan = made.plan(request(32, f"r{n}"), samples=(n / 12, n / 12))
        assert plan.final.worker.name == "dA"
        apply_all(made, made.booking(plan.final, request(32, f"r{n}")))


def test_taints_can_be_left_to_kv_as_in_dynamo() -> None:
    made = router(
        worker(1, "pA", "prefill", zone="a", policy="required"),
        worker(2, "dA", "decode", zone="a"),
        worker(3, "dB", "decode", zone="b"),
        router_mode="round-robin",
        router_taints_in_all_modes=False,
    )
    seen = set()
    for n in range(4):
        plan: Any = made.plan(request(32, f"r{n}"))
        seen.add(plan.decode.worker.name)
        assert plan.implied == ()
        assert "does not apply taints" in plan.decode.notes[0]
        assert plan.prefill.notes == ()
        apply_all(made, made.booking(plan.decode, request(32, f"r{n}")))
    assert seen == {"dA", "dB"}
    apply_all(made, ConfigSet({"router_mode": "kv"}))
    assert made.plan(request(32)).final.worker == made.registry.by_name("dA")


def test_the_temperature_belongs_to_kv() -> None:
    made = three("least-loaded", router_temperature=1.0)
    assert made.plan(request(32)).final.temperature == 0.0


def test_equal_costs_are_a_tie_only_without_a_temperature() -> None:
    cold = router(worker(1), worker(2)).plan(request(32)).final
    assert cold.tied == (0, 1)
    warm = router(worker(1), worker(2), router_temperature=1.0).plan(request(32)).final
    assert (warm.temperature, warm.tied) == (1.0, ())


@pytest.mark.seed("dynamo-1.6: modes: power-of-two")
def test_power_of_two_takes_the_better_of_two_drawn_workers() -> None:
    """3, 1 and 0 requests in flight: as observed on Dynamo 1.6.1, 0, one third, two thirds."""
    made = three("power-of-two")
    apply_all(made, *(active(10, f"a{n}") for n in range(3)), active(20, "b0"))
    won = Counter(winner(made, n, n / 300) for n in range(300))
    assert won == {"b": 100, "c": 200}
    decision = made.plan(request(32)).final
    assert decision.probabilities() == [pytest.approx(p) for p in (2 / 3, 0, 1 / 3)]
    assert decision.tied == ()


def test_of_an_equal_pair_the_first_drawn_wins() -> None:
    made = three("power-of-two")
    for n in range(60):
        decision = made.plan(request(32), samples=(n / 60, 0.0)).final
        assert decision.pair is not None
        assert decision.winner == decision.pair[0]
        assert decision.runner_up == decision.pair[1]
        assert flip(decision) == Flip("active_requests", 1, decision.worker.name)


def test_power_of_two_needs_no_second_worker() -> None:
    decision = router(worker(1), router_mode="power-of-two").plan(request(32)).final
    assert (decision.winner, decision.pair, decision.probabilities()) == (0, None, [1.0])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=7), st.floats(0, 1, exclude_max=True))
def test_the_pair_of_a_sample_is_distinct_and_decides(loads: list[int], sample: float) -> None:
    count = len(loads)
    first, second = draw_two(count, sample)
    assert first != second
    assert 0 <= min(first, second) <= max(first, second) < count
    wins = Counter[int]()
    pairs = count * (count - 1)
    for number in range(pairs):
        pair = draw_two(count, (number + 0.5) / pairs)
        wins[pair[0] if loads[pair[0]] <= loads[pair[1]] else pair[1]] += 1
    assert pair_probabilities(loads) == pytest.approx([wins[i] / pairs for i in range(count)])


def mixed(cpus: int, accelerators: int, **settings: Any) -> Any:
    """CPU workers with ids from 1, accelerators with ids from 11."""
    return router(
        *(worker(n, f"cpu{n}", device="cpu") for n in range(1, cpus + 1)),
        *(worker(n, f"gpu{n}", device="cuda") for n in range(11, 11 + accelerators)),
        router_mode="device-aware-weighted",
        **settings,
    )


@pytest.mark.seed("router-guide: modes: Frontend + Device-Aware Weighted")
@pytest.mark.seed("router-guide: modes: Device-Aware Weighted")
@pytest.mark.parametrize(
    ("on_gpus", "on_cpu", "next_class"),
    [(0, 0, "gpu"), (3, 0, "gpu"), (4, 0, "cpu"), (7, 0, "cpu"), (8, 1, "cpu"), (8, 2, "gpu")],
)
@pytest.mark.seed("router-guide: modes: normalized load")
def test_device_aware_weighted_compares_the_classes_as_observed(
    on_gpus: int, on_cpu: int, next_class: str
) -> None:
    """One CPU worker, two accelerators, ratio 2: allowed = floor(sum / 4), as on Dynamo 1.6.1."""
    made = mixed(1, 2, encoder_cuda_to_cpu_ratio=2.0)
    apply_all(made, *(active(11 + n % 2, f"g{n}") for n in range(on_gpus)))
    apply_all(made, *(active(1, f"c{n}") for n in range(on_cpu)))
    decision = made.plan(request(32), samples=(0.9, 0.0)).final
    assert decision.worker.name.startswith(next_class)
    assert decision.budget == DeviceBudget(2.0, 1, on_cpu, 2, on_gpus)
    assert decision.budget.allowed_cpu == on_gpus // 4


def test_an_idle_fleet_sends_to_an_accelerator() -> None:
    made = mixed(2, 2)
    assert {winner(made, n, n / 50) for n in range(50)} == {"gpu11", "gpu12"}


@pytest.mark.seed("router-guide: modes: normalized load")
def test_the_ninth_running_request_is_the_first_of_a_cpu_worker() -> None:
    """One worker of each class, ratio 8: without rounding down it would be the second."""
    made = mixed(1, 1)
    placed = []
    for number in range(10):
        placed.append(winner(made, number))
        apply_all(made, active(1 if placed[-1] == "cpu1" else 11, f"r{number}"))
    assert placed == ["gpu11"] * 8 + ["cpu1", "gpu11"]


def test_cpu_workers_get_nothing_until_the_accelerators_have_the_ratio() -> None:
    """The budget is rounded down: with one worker of each, 7 requests of 8 allow none."""
    made = mixed(1, 1)
    apply_all(made, *(active(11, f"g{n}") for n in range(7)))
    assert winner(made, 1) == "gpu11"
    apply_all(made, active(11, "g7"))
    assert winner(made, 2) == "cpu1"


@pytest.mark.seed("router-guide: modes: one device class")
@pytest.mark.parametrize(("cpus", "accelerators"), [(3, 0), (0, 3)])
def test_with_one_device_class_the_least_loaded_wins(cpus: int, accelerators: int) -> None:
    made = mixed(cpus, accelerators)
    first = 1 if cpus else 11
    apply_all(made, active(first, "x"), active(first + 1, "y"))
    decision = made.plan(request(32)).final
    assert decision.worker.worker_id == first + 2
    assert decision.budget is not None
    assert not decision.budget.has_both_classes


def test_a_worker_of_an_unknown_device_is_an_accelerator() -> None:
    made = router(
        worker(1, "cpu", device="cpu"),
        worker(2, "unknown"),
        router_mode="device-aware-weighted",
    )
    assert winner(made, 1) == "unknown"


def test_a_worker_with_two_ranks_is_one_worker_of_its_class() -> None:
    made = router(
        worker(1, "cpu", device="cpu"),
        worker(2, "gpu", data_parallel_size=2),
        router_mode="device-aware-weighted",
        encoder_cuda_to_cpu_ratio=2.0,
    )
    apply_all(made, active(2, "g0"), active(2, "g1", dp_rank=1))
    decision: Any = made.plan(request(32)).final
    assert (decision.budget.accelerators, decision.budget.allowed_cpu) == (1, 1)
    assert decision.worker.name == "cpu"


@given(
    st.lists(st.integers(0, 9), max_size=4),
    st.lists(st.integers(0, 9), max_size=4),
    st.floats(1, 9),
    st.floats(0, 1, exclude_max=True),
)
def test_the_winner_is_the_least_loaded_of_the_class_with_the_lower_normalized_load(
    on_cpus: list[int], on_gpus: list[int], ratio: float, sample: float
) -> None:
    assume(on_cpus or on_gpus)
    made = mixed(len(on_cpus), len(on_gpus), encoder_cuda_to_cpu_ratio=ratio)
    loads = dict(enumerate(on_cpus, start=1)) | dict(enumerate(on_gpus, start=11))
    for number, count in loads.items():
        apply_all(made, *(active(number, f"{number}-{n}") for n in range(count)))
    decision = made.plan(request(32), samples=(sample, 0.0)).final
    chosen = decision.worker.worker_id
    group = {n: count for n, count in loads.items() if (n < 11) is (chosen < 11)}
    assert loads[chosen] == min(group.values())
    if on_cpus and on_gpus and chosen < 11:
        assert sum(on_cpus) / len(on_cpus) < sum(on_gpus) / (len(on_gpus) * ratio)
    assert decision.replay() == decision
    assert sum(decision.probabilities()) == pytest.approx(1)
    for one in flips(decision):
        position = decision.winner
        assert loses(decision, with_load(decision, position, one.change, int(one.by)))
        assert not loses(decision, with_load(decision, position, one.change, int(one.by) - 1))


@pytest.mark.seed("router-guide: modes: Frontend + Direct")
@pytest.mark.seed("router-guide: modes: Direct")
def test_direct_sends_to_the_worker_that_the_request_names() -> None:
    made = three("direct")
    apply_all(made, *(active(20, f"x{n}", prefill_tokens=900, blocks=90) for n in range(9)))
    decision = made.plan(request(32, pin_decode=Pin(20))).final
    assert (decision.worker.name, decision.tied) == ("b", ())


def test_direct_refuses_a_request_that_names_no_worker() -> None:
    decision = three("direct").plan(request(32), detail=True).final
    assert decision.outcome == "not_pinned"
    assert decision.summary() == "mode direct: the request names no worker"
    assert decision.emptied_by().filter == "direct"
    assert {one.reason.code for one in decision.emptied_by().rejected} == {"not_pinned"}


def test_direct_has_no_fallback() -> None:
    made = three("direct")
    apply_all(made, WorkerLost(20))
    assert made.plan(request(32, pin_decode=Pin(20))).final.outcome == "pinned_ineligible"


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        (None, 2, "mode direct: the request names no prefill worker"),
        (1, None, "mode direct: the request names no decode worker"),
    ],
)
def test_direct_needs_a_worker_for_each_hop(
    prefill: int | None, decode: int | None, message: str
) -> None:
    made = router(
        worker(1, "p", "prefill", zone="a", policy="required"),
        worker(2, "d", "decode", zone="a"),
        router_mode="direct",
    )
    pins: dict[str, Any] = {
        "pin_prefill": None if prefill is None else Pin(prefill),
        "pin_decode": None if decode is None else Pin(decode),
    }
    plan = made.plan(request(32, **pins))
    assert (plan.ok, plan.final.summary()) == (False, message)
    both: Any = made.plan(request(32, pin_prefill=Pin(1), pin_decode=Pin(2)))
    assert [hop.worker.name for hop in (both.prefill, both.decode)] == ["p", "d"]


@pytest.mark.parametrize("mode", ["power-of-two", "device-aware-weighted", "direct"])
def test_a_restored_router_decides_the_same(mode: str) -> None:
    made = mixed(2, 2, encoder_cuda_to_cpu_ratio=1.0)
    apply_all(made, ConfigSet({"router_mode": mode}))
    apply_all(made, active(11, "x"), active(12, "y"), active(1, "z"))
    copy = Router.restore(made.snapshot())
    asking = request(32, pin_decode=Pin(1))
    for n in range(20):
        samples = (n / 20, n / 20)
        assert copy.plan(asking, samples=samples) == made.plan(asking, samples=samples)


@pytest.mark.parametrize("mode", sorted(PROFILES))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["aggregated", "prefill", "decode"]),
            st.booleans(),
            st.booleans(),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_request_without_wishes_passes_the_same_filters_as_in_a_dry_run(
    mode: str, rows: list[tuple[str, bool, bool, int]]
) -> None:
    made = router(
        *(worker(n, role=row[0], can_prefill=row[1]) for n, row in enumerate(rows, 1)),
        router_mode=mode,
        active_prefill_tokens_threshold=20,
    )
    for number, (_, _, available, requests) in enumerate(rows, 1):
        made.apply(WorkerAvailability(number, None if available else "ejected"), 0.0)
        for turn in range(requests):
            made.apply(Booked(f"{number}-{turn}", "aggregated", number, 0, prefill_tokens=16), 0.0)
    plain, explained = (made.plan(request(33), detail=detail) for detail in (False, True))
    for quick, whole in ((plain.prefill, explained.prefill), (plain.decode, explained.decode)):
        if quick is not None and whole is not None:
            counts = [(step.filter, step.entered, step.left) for step in whole.funnel]
            assert [(step.filter, step.entered, step.left) for step in quick.funnel] == counts
            assert (quick.winner, quick.refs) == (whole.winner, whole.refs)


def spot(name: str) -> WorkerFilter:
    return WorkerFilter("spot", lambda worker, request: worker.name != name, "is a spot worker")


def test_a_filter_of_a_users_own_excludes_workers_with_its_reason() -> None:
    made = router(worker(1, "a"), worker(2, "b"))
    made.profile = PROFILES["kv"].with_filters(spot("a"))
    decision = made.plan(request(32), detail=True).final
    assert decision.worker is not None
    assert (decision.worker.name, decision.mode) == ("b", "kv")
    (step,) = (one for one in decision.funnel if one.filter == "spot")
    assert [(one.worker.name, one.reason.message) for one in step.rejected] == [
        ("a", "is a spot worker")
    ]
    made.profile = None
    assert len(made.plan(request(32)).final.costs) == 2


def test_a_filter_gets_the_request_and_only_workers_of_its_model() -> None:
    seen = []

    def passes(one: Worker, asking: RoutingRequest) -> bool:
        seen.append((one.name, asking.id))
        return True

    made = router(worker(1, "a"), Worker(2, "other", "another-model"))
    made.profile = PROFILES["kv"].with_filters(WorkerFilter("seen", passes))
    assert made.plan(request(32, "r7")).ok
    assert seen == [("a", "r7")]


def test_filters_of_a_users_own_come_before_those_of_load() -> None:
    names = [one.name for one in PROFILES["kv"].with_filters(spot("a")).filters]
    assert names.index("taints") < names.index("spot") < names.index("decode_capacity")
    alone = Profile("mine", (), PROFILES["kv"].scorer).with_filters(spot("a"))
    assert [one.name for one in alone.filters] == ["spot"]


def test_the_capacity_guard_uses_the_filters_of_a_users_own() -> None:
    made = router(
        worker(1, "pA", "prefill", zone="a", policy="required"),
        worker(2, "pB", "prefill", zone="b", policy="required"),
        worker(3, "dA", "decode", zone="a"),
        worker(4, "dB", "decode", zone="b"),
    )
    made.profile = PROFILES["kv"].with_filters(spot("dA"))
    plan = made.plan(request(32), samples=(0.0, 0.0))
    assert plan.prefill is not None
    assert plan.prefill.worker is not None
    assert plan.prefill.worker.name == "pB"
    assert plan.ok


def test_a_scorer_of_a_users_own_needs_a_mode_name_of_its_own() -> None:
    def by_id(
        inputs: CostInputs, parameters: CostParameters, candidates: CandidateSet, turn: int
    ) -> tuple[TermColumn, ...]:
        return (TermColumn("id", "ids", 1.0, [-ref.worker_id for ref in candidates.refs]),)

    with pytest.raises(ConfigError, match="another mode name"):
        Router(profile=Profile("kv", PROFILES["kv"].filters, by_id))
    made = router(worker(1, "a"), worker(2, "b"))
    made.profile = Profile("by-id", PROFILES["kv"].filters, by_id)
    decision = made.plan(request(32)).final
    assert (decision.mode, decision.winner, decision.replay().winner) == ("by-id", 1, 1)
    copy = Router.restore(made.snapshot(), made.profile)
    assert copy.plan(request(32)).final.winner == 1
