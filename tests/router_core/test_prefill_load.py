"""The prefill load model: tokens of running prefills fall with time as in Dynamo 1.6."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router_core.changes import Booked, Expired, Freed, PrefillDone, ThresholdsSet, WorkerLost
from router_core.decision import PredictedPrefill
from router_core.router import Router
from router_core.routing_view import WhatIf
from tests.router_core.fleet import MODEL, apply_all, request, router, worker


def prefill(name: str, tokens: int, seconds: float | None = None, worker_id: int = 1) -> Booked:
    return Booked(name, "aggregated", worker_id, 0, tokens, predicted_s=seconds)


def left(made: Router, now: float, worker_id: int = 1) -> int:
    made.advance(now)
    slot = made.registry.slot(worker_id, 0)
    assert slot is not None
    return made.load.prefill_tokens[slot]


@pytest.mark.seed("router-guide: prefill load: oldest active prefill")
def test_the_oldest_prefill_falls_and_the_next_begins_when_it_ends() -> None:
    made = router(worker(1))
    apply_all(made, prefill("a", 1000, 10.0), prefill("b", 600, 6.0), now=0.0)
    assert [left(made, now) for now in (0.0, 2.5, 5.0)] == [1600, 1350, 1100]
    # It ends early; the next one is the anchor from then on, not from when it was booked.
    made.apply(PrefillDone("a"), 5.0)
    assert [left(made, now) for now in (5.0, 8.0, 11.0)] == [600, 300, 0]
    made.apply(Freed("b"), 12.0)
    assert left(made, 12.0) == 0
    assert not made.load.decaying


@pytest.mark.seed("dynamo-1.6: load tracking: prefill load model")
def test_a_prefill_that_takes_longer_than_predicted_eats_into_the_next() -> None:
    made = router(worker(1))
    apply_all(made, prefill("a", 1000, 10.0), prefill("b", 600, 6.0), now=0.0)
    assert [left(made, now) for now in (10.0, 12.0, 16.0, 99.0)] == [600, 400, 0, 0]
    made.apply(Freed("a"), 99.0)
    assert left(made, 99.0) == 600


def test_behind_a_prefill_without_a_duration_nothing_falls() -> None:
    made = router(worker(1))
    apply_all(made, prefill("a", 1000), prefill("b", 600, 6.0), now=0.0)
    assert left(made, 50.0) == 1600
    made.apply(PrefillDone("a"), 50.0)
    assert left(made, 53.0) == 300


def test_before_a_prefill_without_a_duration_only_the_oldest_falls_and_rounds_up() -> None:
    made = router(worker(1))
    apply_all(made, prefill("a", 1001, 10.0), prefill("b", 600), now=0.0)
    assert [left(made, now) for now in (5.0, 10.0, 20.0)] == [501 + 600, 600, 600]
    made.apply(PrefillDone("b"), 20.0)
    # All of the rest have a duration: it rounds down what is done.
    assert left(made, 5.0) == 1001 - 500


@pytest.mark.parametrize("others", [(), (prefill("b", 600, 6.0),), (prefill("b", 600),)])
def test_a_duration_of_zero_counts_no_tokens_of_its_own(others: tuple[Booked, ...]) -> None:
    made = router(worker(1))
    apply_all(made, prefill("a", 1000, 0.0), *others, now=1.0)
    assert left(made, 1.0) == (600 if others else 0)


def test_time_that_goes_back_and_tiny_durations_do_no_harm() -> None:
    made = router(worker(1))
    apply_all(made, prefill("a", 100, 5e-324), now=5.0)
    assert [left(made, now) for now in (0.0, 5.0, 5.1)] == [100, 100, 0]


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_duration_out_of_bounds_is_refused(seconds: float) -> None:
    made = router(worker(1))
    applied = made.apply(prefill("a", 10, seconds), 0.0)
    assert (applied.code, len(made.load)) == ("invalid", 0)
    assert "predicted_s: expected 0 or more" in applied.message


def test_without_a_duration_the_column_is_read_as_it_is() -> None:
    made = router(worker(1))
    apply_all(made, prefill("a", 1000), now=0.0)
    assert not made.load.decaying
    inputs = made.plan(request(64)).final.inputs
    assert inputs is not None
    assert (inputs.prefill_tokens, inputs.booked_tokens) == ([1000], None)


def test_a_decision_has_what_is_left_and_what_was_booked() -> None:
    made = router(worker(1), worker(2))
    apply_all(made, prefill("a", 1000, 10.0), prefill("b", 500, worker_id=2), now=0.0)
    wanted = request(64)
    made.advance(6.0)
    decision = made.plan(wanted).final
    rows = {row.worker.name: row for row in decision.rows()}
    assert decision.worker is not None
    assert decision.worker.name == "w1"  # 400 tokens against 500; booked were 1000
    assert (rows["w1"].active_prefill_tokens, rows["w1"].booked_prefill_tokens) == (400, 1000)
    assert (rows["w2"].active_prefill_tokens, rows["w2"].booked_prefill_tokens) == (500, 500)
    assert decision.replay().costs == decision.costs
    # A dry run with another load counts from what is left.
    shifted = made.plan(wanted, view=made.view(what_if=WhatIf({0: 50}))).final
    first = next(iter(shifted.rows()))
    assert (first.active_prefill_tokens, first.booked_prefill_tokens) == (450, 1050)


def test_a_dry_run_without_the_model_counts_all_that_was_booked() -> None:
    made = router(
        worker(1), worker(2), router_prefill_load_model="aic",
        active_prefill_tokens_threshold=900,
    )  # fmt: skip
    apply_all(made, prefill("a", 1000, 10.0), prefill("b", 500, worker_id=2), now=0.0)
    made.advance(6.0)
    other = made.view(replace(made.config, router_prefill_load_model="none"))
    decision = made.plan(request(64), view=other, detail=True).final
    assert [(row.worker.name, row.active_prefill_tokens) for row in decision.rows()] == [
        ("w2", 500)
    ]
    assert "1,000 active prefill tokens > 900" in decision.funnel[-1].rejected[0].reason.message
    assert [row.active_prefill_tokens for row in made.plan(request(64)).final.rows()] == [400, 500]


def test_a_busy_rank_is_free_again_when_its_tokens_have_fallen() -> None:
    made = router(worker(1))
    apply_all(made, ThresholdsSet(MODEL, {"active_prefill_tokens_threshold": 400}), now=0.0)
    apply_all(made, prefill("a", 1000, 10.0), now=0.0)
    assert made.plan(request(64)).final.outcome == "all_busy"
    made.advance(5.9)
    assert made.plan(request(64)).final.outcome == "all_busy"
    made.advance(6.0)
    assert made.plan(request(64)).final.outcome == "selected"


def test_the_prediction_of_a_decision_is_booked() -> None:
    made = router(worker(1))
    wanted = request(64)
    decision = made.plan(wanted).final
    assert made.booking(decision, wanted).predicted_s is None
    predicted = replace(decision, predicted=PredictedPrefill("m", 64, 0, 2.0))
    apply_all(made, made.booking(predicted, wanted), now=0.0)
    assert left(made, 1.0) == 32


NAMES = st.sampled_from(["r1", "r2", "r3", "r4"])
SECONDS = st.one_of(st.none(), st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0]))
STEP = st.tuples(
    st.sampled_from(["book", "book", "done", "free", "expire"]),
    NAMES,
    st.integers(1, 2),
    st.integers(0, 3000),
    SECONDS,
    st.sampled_from([0.0, 0.01, 0.5, 1.0, 7.0]),
)


@dataclass
class Naive:
    """The reference's rule over a list of the prefills of one rank, with exact fractions."""

    prefills: list[tuple[str, int, float | None]] = field(default_factory=list)
    since: float = 0.0

    def begin(self, name: str, tokens: int, seconds: float | None, now: float) -> None:
        if not self.prefills:
            self.since = now
        self.prefills.append((name, tokens, seconds))

    def end(self, name: str, now: float) -> None:
        if self.prefills and self.prefills[0][0] == name:
            self.since = now
        self.prefills = [one for one in self.prefills if one[0] != name]

    def full(self) -> int:
        return sum(tokens for _, tokens, _ in self.prefills)

    def left(self, now: float) -> int:
        if not self.prefills or self.prefills[0][2] is None:
            return self.full()
        _, own, seconds = self.prefills[0]
        assert seconds is not None
        elapsed = Fraction(max(0.0, now - self.since))
        done = elapsed / Fraction(seconds) if seconds else Fraction(1)
        if all(one[2] is not None for one in self.prefills):
            return max(0, self.full() - math.floor(own * done))
        return self.full() - own + math.ceil(own * (1 - min(Fraction(1), done)))


@given(st.lists(STEP, max_size=30))
@example([("book", "r1", 1, 1000, 0.1, 0.0), ("book", "r2", 1, 7, None, 0.5)])
def test_what_is_left_follows_the_rule_and_stays_within_bounds(
    steps: list[tuple[str, str, int, int, float | None, float]],
) -> None:
    made = router(worker(1), worker(2), active_request_expiry_secs=5.0)
    naive, where, seen, now = {1: Naive(), 2: Naive()}, {}, {}, 0.0
    for what, name, who, tokens, seconds, later in steps:
        before = [left(made, now, one) for one in (1, 2)]
        fallen = [left(made, now + later, one) for one in (1, 2)]
        assert all(0 <= new <= old for new, old in zip(fallen, before, strict=True))
        now += later
        gone = [name]
        if what == "book":
            if made.apply(prefill(name, tokens, seconds, who), now).ok:
                where[name], seen[name] = who, now
                if tokens:
                    naive[who].begin(name, tokens, seconds, now)
            gone = []
        elif what == "expire":
            made.apply(Expired(), now)
            gone = [one for one, at in seen.items() if now - at > 5.0]
        else:
            made.apply(PrefillDone(name) if what == "done" else Freed(name), now)
        for one in gone:
            if one in where:
                naive[where[one]].end(one, now)
                if what == "done":
                    seen[one] = now
                else:
                    del where[one], seen[one]
        copy = Router.restore(json.loads(json.dumps(made.snapshot())))
        assert copy.snapshot() == made.snapshot()
        for router_, at in ((made, now), (made, now + 0.25), (copy, now + 0.25)):
            for worker_id, expected in naive.items():
                slot = router_.registry.slot(worker_id, 0)
                assert slot is not None
                # Floats may be on the other side of a whole token.
                assert left(router_, at, worker_id) == pytest.approx(expected.left(at), abs=1)
                assert router_.load.booked_prefill(slot) == expected.full()
    apply_all(made, WorkerLost(1), WorkerLost(2), now=now)
    assert (made.load.prefill_tokens, made.load.decaying) == ([0, 0], {})
