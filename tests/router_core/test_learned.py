"""The index learned from bookings: a naive model, its bounds, and what a router makes of it."""

from __future__ import annotations

from math import floor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import router_core.changes as c
from router_core.config import RouterConfig
from router_core.events import Cleared
from router_core.learned import LearnedIndex
from router_core.router import Router
from router_core.workers import Worker
from tests.router_core.fleet import apply_all, request, router, stored, worker

PATHS = [tuple(hash((root, depth)) & 0xFFFFFF for depth in range(6)) for root in range(3)]
#: Two prompts that part after two blocks.
PATHS += [(*PATHS[0][:2], 7, 8, 9)]


class Naive:
    """The same, by sorting everything each time."""

    def __init__(self, ttl: float, most: int, keep: float) -> None:
        self.ttl, self.most, self.keep = ttl, most, keep
        self.held: dict[tuple[int, int], tuple[float, int, int]] = {}
        self.turn = 0

    def _oldest(self, slot: int | None = None) -> list[tuple[int, int]]:
        """Oldest first, of one booking the deepest first."""
        keys = [key for key in self.held if slot is None or key[0] == slot]
        return sorted(keys, key=lambda key: self.held[key])

    def learn(self, slot: int, path: tuple[int, ...], now: float, capacity: int | None) -> None:
        self.turn += 1
        for depth, block in enumerate(path):
            self.held[slot, block] = (now, self.turn, -depth)
        if capacity:
            mine = self._oldest(slot)
            for key in mine[: max(0, len(mine) - capacity)]:
                del self.held[key]

    def sweep(self, now: float) -> None:
        self.held = {key: v for key, v in self.held.items() if v[0] + self.ttl > now}
        if len(self.held) > self.most:
            for key in self._oldest()[: len(self.held) - floor(self.most * self.keep)]:
                del self.held[key]

    def depth(self, slot: int, path: tuple[int, ...]) -> int:
        return next((n for n, b in enumerate(path) if (slot, b) not in self.held), len(path))


Step = tuple[int, int, tuple[int, ...], int, int | None]
#: Seconds since the last step, slot, prompt, its blocks (0: the slot is cleared) and the capacity.
STEP = st.tuples(
    st.integers(1, 40),
    st.integers(0, 2),
    st.sampled_from(PATHS),
    st.integers(0, 6),
    st.sampled_from([None, 0, 4, 8]),
)


@given(
    st.lists(STEP, max_size=40),
    st.sampled_from([5, 12, 100]),
    st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    st.integers(1, 7),
)
def test_it_matches_a_naive_model(
    steps: list[tuple[int, int, tuple[int, ...], int, int | None]],
    most: int,
    keep: float,
    piece: int,
) -> None:
    index, model, now = LearnedIndex(60.0, most, keep), Naive(60.0, most, keep), 0.0
    for later, slot, path, blocks, capacity in steps:
        now += later
        if blocks:
            index.learn(slot, path[:blocks], now, capacity)
            model.learn(slot, path[:blocks], now, capacity)
        else:
            index.clear(slot)
            model.held = {key: v for key, v in model.held.items() if key[0] != slot}
            assert not index.live >> slot & 1
        assert len(index) <= most + 2 * len(PATHS[0]), "bounded before any sweep"
        while index.sweep(piece, now):
            pass
        model.sweep(now)
        assert len(index) == len(model.held)
        again = LearnedIndex(60.0, most, keep)
        again.load(index.dump())
        for one in (index, index.copy(), again):
            for asked in PATHS:
                found = one.find_matches(asked, 0b111)
                assert [found.get(s) for s in range(3)] == [model.depth(s, asked) for s in range(3)]
        for one_slot in range(3):
            assert index.block_count(one_slot) == sum(key[0] == one_slot for key in model.held)
            assert index.is_free(one_slot) == (not index.block_count(one_slot))


def test_a_prompt_larger_than_the_rank_keeps_its_beginning() -> None:
    index = LearnedIndex()
    index.learn(0, PATHS[0], 0.0, 4)
    assert index.find_matches(PATHS[0], 1).get(0) == 4


def test_pruning_is_spread_over_many_steps() -> None:
    """No step visits more blocks than it may, and between them the rest still counts."""
    index = LearnedIndex(1_000.0, most=1_000, keep=0.5)
    for at in range(500):
        index.learn(0, (2 * at, 2 * at + 1), float(at))
    assert len(index) == 1_000
    index.learn(0, (5_000,), 500.0)
    assert len(index) == 999
    assert index.sweep(100)
    assert len(index) == 899
    while index.sweep(100):
        pass
    assert len(index) == 500
    assert index.find_matches((5_000,), 1).get(0) == 1


# -- in the router ---------------------------------------------------------------------------


def learning(*workers: Worker, **settings: Any) -> Router:
    made = Router(RouterConfig().with_values(settings), learns=True)
    apply_all(made, *map(c.WorkerUpserted, workers))
    return made


def booked(made: Router, name: str, at: float, tokens: int = 65, on: int = 0) -> None:
    """Route and book a request; ``on``: the worker that has to win."""
    asked = request(tokens, name)
    decision = made.plan(asked).final
    assert made.apply(made.booking(decision, asked), at).ok
    assert not on or decision.require().worker_id == on
    made.apply(c.Freed(name), at)


def test_a_booking_counts_as_cached_and_is_called_estimated() -> None:
    made = learning(worker(1, kv_events=False), worker(2, kv_events=False))
    first = made.plan(request(65)).final
    assert [row.index for row in first.rows()] == ["estimated", "estimated"]
    assert made.freshness[0].state == "estimated"
    booked(made, "a", 10.0, on=1)
    row, other = made.plan(request(65)).final.rows()
    assert (row.overlap_blocks, row.indexed_blocks, row.index) == (4, 4, "estimated")
    assert (other.overlap_blocks, other.index) == (0, "estimated")
    assert row.cost == other.cost - 4
    assert made.overlap_scores(request(65))[row.ref] == 4
    assert made.potential_loads(request(65))[row.ref].prefill_tokens == 1
    decision = made.plan(request(65)).final
    assert decision.replay().costs == decision.costs


def test_a_learned_prefix_is_forgotten_unless_it_is_hit() -> None:
    made = learning(worker(1, kv_events=False), router_ttl_secs=120.0)
    booked(made, "a", 0.0, tokens=65)
    booked(made, "b", 100.0, tokens=33)
    assert not made.sweep(now=119.0)
    assert made.overlap_scores(request(65)) == {made.registry.ref(0): 4}
    made.sweep(now=120.0)
    assert made.overlap_scores(request(65)) == {made.registry.ref(0): 2}
    made.sweep(now=220.0)
    assert made.overlap_scores(request(65)) == {made.registry.ref(0): 0}
    assert len(made.learned) == 0


def test_a_prefix_that_fills_the_prompt_reuses_one_block_less() -> None:
    made = learning(worker(1, kv_events=False))
    booked(made, "a", 0.0, tokens=64)
    assert made.plan(request(64)).final.usable_blocks(0) == 3


def test_a_rank_never_has_more_than_it_declares() -> None:
    made = learning(worker(1, kv_events=False, total_kv_blocks=3))
    booked(made, "a", 0.0, tokens=65)
    assert made.learned.block_count(0) == 3


def test_the_size_is_bounded_by_the_setting() -> None:
    made = learning(
        worker(1, kv_events=False), router_max_tree_size=10, router_prune_target_ratio=0.5
    )
    for name in "abcd":
        asked = request(65, name, seed=ord(name))
        made.apply(made.booking(made.plan(asked).final, asked), 0.0)
    while made.sweep():
        pass
    assert len(made.learned) <= 10


def test_a_restart_or_a_loss_of_the_worker_forgets() -> None:
    made = learning(worker(1, kv_events=False), worker(2, kv_events=False))
    booked(made, "a", 0.0, on=1)
    apply_all(made, c.KvEvent(1, 0, Cleared()))
    assert made.overlap_scores(request(65))[made.registry.ref(0)] == 0
    booked(made, "b", 0.0)
    apply_all(made, c.WorkerLost(1), c.WorkerLost(2))
    while made.sweep():
        pass
    assert len(made.learned) == 0


def test_a_router_that_does_not_learn_goes_by_load() -> None:
    made = router(worker(1, kv_events=False))
    booked(made, "a", 0.0)
    row = next(made.plan(request(65)).final.rows())
    assert (row.overlap_blocks, row.index) == (0, "none")


def test_a_worker_with_events_is_not_learned() -> None:
    made = learning(worker(1))
    booked(made, "a", 0.0)
    assert len(made.learned) == 0
    assert next(made.plan(request(65)).final.rows()).index == "exact"


def test_a_worker_that_stops_its_events_is_estimated_from_then_on() -> None:
    made = learning(worker(1))
    trusts = [made.freshness[0].trust]
    apply_all(made, c.WorkerUpserted(worker(1, kv_events=False)))
    assert [*trusts, made.freshness[0].trust] == ["exact", "estimated"]


@pytest.mark.parametrize(("lost", "counted"), [(False, 6), (True, 4)])
def test_approximate_counts_what_was_sent_while_events_are_missing(
    lost: bool, counted: int
) -> None:
    made = learning(worker(1), router_on_degraded="approximate")
    booked(made, "a", 0.0, tokens=65)
    apply_all(made, stored(1, 6))
    if lost:
        apply_all(made, c.IndexMarked(1, 0, "gapped"))
    row = next(made.plan(request(6 * 16 + 1)).final.rows())
    assert (row.overlap_blocks, row.indexed_blocks) == (counted, 6)
    assert row.index == ("degraded" if lost else "exact")


def test_a_snapshot_keeps_what_was_learned() -> None:
    made = learning(worker(1, kv_events=False), worker(2, kv_events=False))
    booked(made, "a", 5.0, on=1)
    again = Router.restore(made.snapshot())
    assert again.learns
    assert again.overlap_scores(request(65)) == made.overlap_scores(request(65))
    again.sweep(now=125.0)
    assert len(again.learned) == 0
