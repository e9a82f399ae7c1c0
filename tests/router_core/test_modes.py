"""The modes beside kv, and profiles with filters and scorers of a user's own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from router_core import (
    PROFILES,
    CandidateSet,
    CostInputs,
    CostParameters,
    Profile,
    Router,
    RoutingRequest,
    TermColumn,
    Worker,
    WorkerFilter,
)
from router_core.changes import Freed
from router_core.errors import ConfigError
from tests.router_core.fleet import active, apply_all, request, router, worker


def three(mode: str, **settings: Any) -> Any:
    return router(worker(30, "c"), worker(10, "a"), worker(20, "b"), router_mode=mode, **settings)


def winner(made: Any, n: int, sample: float = 0.0) -> str:
    return str(made.plan(request(32, f"r{n}"), samples=(sample, 0.0)).final.worker.name)


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


def test_random_is_uniform_over_the_sample() -> None:
    made = three("random")
    assert Counter(winner(made, n, n / 300) for n in range(300)) == {"a": 100, "b": 100, "c": 100}
    assert len(made.plan(request(32)).final.tied) == 3


def test_least_loaded_counts_requests_in_flight() -> None:
    made = three("least-loaded")
    apply_all(made, active(10, "x"), active(10, "y"), active(20, "z"))
    assert {winner(made, n, n / 50) for n in range(50)} == {"c"}
    apply_all(made, active(30, "w"))
    assert Counter(winner(made, n, n / 100) for n in range(100)) == {"b": 50, "c": 50}
    apply_all(made, Freed("x"), Freed("y"))
    assert {winner(made, n, n / 50) for n in range(50)} == {"a"}


@pytest.mark.parametrize("mode", ["round-robin", "random", "least-loaded"])
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


def test_the_temperature_belongs_to_kv() -> None:
    made = three("least-loaded", router_temperature=1.0)
    assert made.plan(request(32)).final.temperature == 0.0


def test_equal_costs_are_a_tie_only_without_a_temperature() -> None:
    cold = router(worker(1), worker(2)).plan(request(32)).final
    assert cold.tied == (0, 1)
    warm = router(worker(1), worker(2), router_temperature=1.0).plan(request(32)).final
    assert (warm.temperature, warm.tied) == (1.0, ())


@pytest.mark.parametrize("mode", ["power-of-two", "direct", "device-aware-weighted"])
def test_modes_that_are_not_built_are_refused_by_name(mode: str) -> None:
    with pytest.raises(ConfigError, match="not built yet"):
        three(mode)


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
