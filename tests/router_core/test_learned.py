"""The index learned from bookings: a naive model, its bounds, and what a router makes of it."""

from __future__ import annotations

from dataclasses import replace
from math import floor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import router_core.changes as c
from router_core.config import RouterConfig
from router_core.events import BlocksStored, Cleared
from router_core.hashing import hash_prompt
from router_core.learned import LearnedIndex, RecencyIndex
from router_core.router import Router
from router_core.workers import Worker
from tests.router_core.fleet import apply_all, prompt, request, router, stored, worker

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


@pytest.mark.seed("router-guide: events: Approximate")
@pytest.mark.seed("smart-routing-guide-0.9: engines: TensorRT-LLM events")
@pytest.mark.seed("router-topology: backend support: TensorRT-LLM")
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


@pytest.mark.seed("smart-routing-guide-0.9: tuning: no KV events")
@pytest.mark.seed("smart-routing-guide-0.9: tuning: --router-ttl")
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


@pytest.mark.seed("smart-routing-guide-0.9: tuning: --router-max-tree-size")
@pytest.mark.seed("smart-routing-guide-0.9: tuning: --router-prune-target-ratio")
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


# -- the policy lru --------------------------------------------------------------------------


class NaiveRecency:
    """One rank under the policy lru, by sorting everything each time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.running: dict[str, tuple[int, ...]] = {}
        self.ended: dict[int, tuple[int, int]] = {}
        self.turn = 0

    @property
    def used(self) -> set[int]:
        return {block for path in self.running.values() for block in path}

    def book(self, name: str, path: tuple[int, ...]) -> None:
        self.running[name] = path
        for block in path:
            self.ended.pop(block, None)
        self._trim()

    def _trim(self) -> None:
        over = len(self.used) + len(self.ended) - self.capacity
        for block in sorted(self.ended, key=lambda block: self.ended[block])[: max(0, over)]:
            del self.ended[block]

    def end(self, name: str) -> None:
        self.turn += 1
        path = self.running.pop(name)
        for depth, block in enumerate(path):
            if block not in self.used:
                self.ended[block] = (self.turn, -depth)
        self._trim()

    def depth(self, path: tuple[int, ...]) -> int:
        has = self.used | set(self.ended)
        return next((n for n, block in enumerate(path) if block not in has), len(path))


@pytest.mark.seed("dynamo-1.6: approximate mode: LRU by advertised capacity")
@given(
    st.lists(st.tuples(st.sampled_from(PATHS), st.integers(1, 6), st.booleans()), max_size=30),
    st.integers(1, 14),
)
def test_the_policy_lru_matches_a_naive_model(
    steps: list[tuple[tuple[int, ...], int, bool]], capacity: int
) -> None:
    """Blocks in use stay, of the others those whose last request ended first go first."""
    index, model, running = RecencyIndex(), NaiveRecency(capacity), []
    for number, (path, blocks, ends) in enumerate(steps):
        name = str(number)
        index.learn(3, path[:blocks], 1.0, capacity, (name, "aggregated"))
        model.book(name, path[:blocks])
        running.append(name)
        if ends:
            done = running.pop(number % len(running))
            index.end((done, "aggregated"), 1.0)
            model.end(done)
        assert not index.sweep(1_000, 1e9), "time changes nothing"
        again = RecencyIndex()
        again.load(index.dump())
        for one in (index, index.copy(), again):
            assert one.block_count(3) == len(one) == len(model.used) + len(model.ended)
            for asked in PATHS:
                assert one.find_matches(asked, 0b1000).get(3) == model.depth(asked)
    assert index.block_count(3) <= max(capacity, len(model.used))
    index.clear(3)
    assert index.block_count(3) == 0
    assert index.find_matches(PATHS[0], 0b1000).get(3) == 0
    for name in running:
        index.end((name, "aggregated"), 1.0)
    while index.sweep(3):
        pass
    assert index.is_free(3)
    assert len(index) == 0


def test_lru_keeps_what_runs_and_forgets_what_ended_first() -> None:
    made = learning(
        worker(1, kv_events=False, total_kv_blocks=8),
        use_kv_events=False,
        router_approximate_cache_policy="lru",
    )
    old, kept, new = (request(65, name, seed=seed) for seed, name in enumerate("abc"))
    for asked in (old, kept):
        made.apply(made.booking(made.plan(asked).final, asked), 0.0)
    made.apply(c.Freed("a"), 1.0)
    made.sweep(now=100_000.0)
    assert made.cached_blocks(0) == 8, "no time limit"
    made.apply(made.booking(made.plan(new).final, new), 100_000.0)
    held = [made.overlap_scores(one)[made.registry.ref(0)] for one in (old, kept, new)]
    assert held == [0, 4, 4]
    again = Router.restore(made.snapshot())
    again.apply(c.Freed("b"), 100_001.0)
    again.apply(again.booking(again.plan(old).final, request(65, "d")), 100_002.0)
    held = [again.overlap_scores(one)[again.registry.ref(0)] for one in (old, kept, new)]
    assert held == [4, 0, 4], "the snapshot has the running requests"


def test_without_a_declared_capacity_lru_goes_by_time() -> None:
    made = learning(
        worker(1, kv_events=False), use_kv_events=False, router_approximate_cache_policy="lru"
    )
    booked(made, "a", 0.0)
    assert made.cached_blocks(0) == 4
    made.sweep(now=120.0)
    assert made.cached_blocks(0) == 0
    booked(made, "b", 130.0)
    apply_all(made, c.WorkerUpserted(worker(1, kv_events=False, total_kv_blocks=100)), now=131.0)
    booked(made, "c", 132.0)
    made.sweep(now=1_000.0)
    assert made.cached_blocks(0) == 4, "from now on by its capacity"
    apply_all(made, c.ConfigSet({"router_approximate_cache_policy": "ttl"}))
    assert made.cached_blocks(0) == 0


# -- requests that fail, and decode hops -----------------------------------------------------


@pytest.mark.parametrize("policy", ["ttl", "lru"])
def test_a_prompt_that_never_reached_its_engine_is_unlearned(policy: str) -> None:
    made = learning(
        worker(1, kv_events=False, total_kv_blocks=99),
        use_kv_events=False,
        router_approximate_cache_policy=policy,
    )
    booked(made, "a", 0.0, tokens=33)
    for name, tokens in (("b", 65), ("c", 49)):
        asked = request(tokens, name)
        made.apply(made.booking(made.plan(asked).final, asked), 0.0)
    made.apply(c.Freed("b", "aggregated", computed=False), 0.0)
    # Blocks 1 and 2 were there before, and c may have computed block 3.
    assert made.overlap_scores(request(65)) == {made.registry.ref(0): 3}
    made.apply(c.Freed("c", computed=False), 0.0)
    assert made.overlap_scores(request(65)) == {made.registry.ref(0): 2}
    assert made.cached_blocks(0) == 2


@pytest.mark.parametrize("kind", [LearnedIndex, RecencyIndex])
@given(
    st.lists(
        st.tuples(
            st.integers(0, 4), st.integers(0, 1), st.sampled_from(PATHS), st.integers(1, 6),
            st.booleans(), st.booleans(),
        ),
        max_size=30,
    )
)  # fmt: skip
def test_a_block_counts_while_a_booking_may_bring_it_and_if_one_did(
    kind: type[LearnedIndex], steps: list[tuple[int, int, tuple[int, ...], int, bool, bool]]
) -> None:
    """Whatever bookings of the same prompts run at a time, those that fail leave no credit."""
    index = kind()
    hop: c.Stage = "aggregated"
    running: dict[int, tuple[int, tuple[int, ...]]] = {}
    brought: set[tuple[int, int]] = set()
    for now, (number, slot, path, blocks, computed, restores) in enumerate(steps):
        if number in running:
            ended_slot, ended = running.pop(number)
            index.end((str(number), hop), float(now), computed=computed)
            if computed:
                brought |= {(ended_slot, block) for block in ended}
        else:
            running[number] = slot, path[:blocks]
            index.learn(slot, path[:blocks], float(now), None, (str(number), hop))
        held = brought | {(slot, b) for slot, blocks in running.values() for b in blocks}
        if restores:
            again = kind()
            again.load(index.dump())
            index = again
        for asked in PATHS:
            found = index.find_matches(asked, 0b11)
            for slot in range(2):
                depth = next((n for n, b in enumerate(asked) if (slot, b) not in held), len(asked))
                assert found.get(slot) == depth
        assert len(index) == len(held)


def test_a_decode_worker_has_the_prompt_after_the_hand_off() -> None:
    """As in Dynamo. It counts once the decode workers compute prompts themselves."""
    made = learning(
        worker(1, kv_events=False, role="prefill"), worker(2, kv_events=False, role="decode")
    )
    asked = request(65)
    plan = made.plan(asked)
    assert plan.prefill is not None
    assert plan.decode is not None
    for hop in (plan.prefill, plan.decode):
        assert made.apply(made.booking(hop, asked), 0.0).ok
    assert [made.cached_blocks(slot) for slot in (0, 1)] == [4, 4]
    assert next(made.plan(asked).decode.rows()).overlap_blocks == 0  # type: ignore[union-attr]
    apply_all(made, c.WorkerLost(1))
    assert [row.overlap_blocks for row in made.plan(asked).final.rows()] == [4]


# -- predict-on-route ------------------------------------------------------------------------


@pytest.mark.seed("dynamo-1.6: approximate mode: predict-on-route beside real events")
def test_a_booking_counts_until_its_events_should_have_arrived() -> None:
    made = learning(worker(1), worker(2), router_predicted_ttl_secs=3.0)
    made.plan(request(65))
    assert not made.predicted.live, "a choice that is not booked teaches nothing"
    booked(made, "a", 0.0, on=1)
    decision = made.plan(request(65)).final
    rows = {row.worker.worker_id: row for row in decision.rows()}
    assert (rows[1].overlap_blocks, rows[1].predicted_blocks, rows[1].index) == (4, 4, "exact")
    assert (rows[2].overlap_blocks, rows[2].predicted_blocks) == (0, 0)
    assert rows[1].cost == rows[2].cost - 4
    assert rows[1].usable_blocks == rows[1].indexed_blocks == 4
    assert decision.replay().costs == decision.costs
    again = Router.restore(made.snapshot())
    assert next(again.plan(request(65)).final.rows()).predicted_blocks == 4
    made.sweep(now=3.0)
    assert next(made.plan(request(65)).final.rows()).overlap_blocks == 0


@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=2),
    st.lists(st.integers(0, 6), min_size=2, max_size=2),
    st.sampled_from(["current", "gapped"]),
    st.sampled_from(["discount", "load-only", "full", "approximate"]),
)
def test_of_events_and_predictions_the_larger_counts(
    events: list[int], sent: list[int], state: str, rule: str
) -> None:
    made = learning(worker(1), worker(2), router_predicted_ttl_secs=3.0, router_on_degraded=rule)
    for number, (shown, routed) in enumerate(zip(events, sent, strict=True), 1):
        if shown:
            apply_all(made, stored(number, shown))
        if routed:
            asked = replace(
                request(16 * routed + 1, f"r{number}"), allowed_worker_ids=frozenset({number})
            )
            booked_one = made.booking(made.plan(asked).final, asked)
            assert made.apply(booked_one, 0.0).ok
    apply_all(made, c.IndexMarked(1, 0, state))  # type: ignore[arg-type]
    without = replace(made.view(), predicted=LearnedIndex())
    primary = [row.overlap_blocks for row in made.plan(request(97), view=without).final.rows()]
    rows = list(made.plan(request(97)).final.rows())
    for at, row in enumerate(rows):
        degraded = at == 0 and state == "gapped"
        counts = not (degraded and rule == "load-only")
        assert row.overlap_blocks == max(primary[at], sent[at] if counts else 0)
        assert row.predicted_blocks == row.overlap_blocks - primary[at]
        # Under this rule what was sent counts in place of the index.
        assert row.indexed_blocks >= row.overlap_blocks or (degraded and rule == "approximate")


def test_lower_tiers_count_behind_a_prediction_only() -> None:
    made = learning(worker(1), router_predicted_ttl_secs=3.0)
    below = hash_prompt(prompt(97), 16)
    apply_all(
        made,
        c.KvEvent(
            1, 0, BlocksStored(None, below.sequence[:3], below.local[:3], tier="host_pinned")
        ),
    )
    asked = request(97)
    asked = replace(asked, local_hashes=below.local)
    assert next(made.plan(asked).final.rows()).host_blocks == 3
    short = request(33, "short")
    made.apply(made.booking(made.plan(short).final, short), 0.0)
    row = next(made.plan(asked).final.rows())
    assert (row.overlap_blocks, row.predicted_blocks, row.host_blocks) == (2, 2, 1)


def test_predictions_end_with_the_setting_the_restart_and_the_failed_request() -> None:
    made = learning(worker(1), router_predicted_ttl_secs=3.0)

    def predicted() -> int:
        return next(made.plan(request(65)).final.rows()).predicted_blocks

    booked(made, "a", 0.0)
    apply_all(made, c.KvEvent(1, 0, Cleared()))
    assert predicted() == 0
    asked = request(65, "b")
    made.apply(made.booking(made.plan(asked).final, asked), 0.0)
    made.apply(c.Freed("b", computed=False), 0.0)
    assert predicted() == 0
    booked(made, "c", 0.0)
    assert predicted() == 4
    apply_all(made, c.ConfigSet({"router_predicted_ttl_secs": None}))
    assert predicted() == 0
    apply_all(made, c.ConfigSet({"router_predicted_ttl_secs": 3.0, "use_kv_events": False}))
    booked(made, "d", 0.0)
    assert predicted() == 0, "it needs KV events"
