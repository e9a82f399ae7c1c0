"""The modes beside kv, each explained by the same Decision."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

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


@pytest.mark.parametrize("mode", ["power-of-two", "direct", "device-aware-weighted"])
def test_modes_that_are_not_built_are_refused_by_name(mode: str) -> None:
    with pytest.raises(ConfigError, match="not built yet"):
        three(mode)
