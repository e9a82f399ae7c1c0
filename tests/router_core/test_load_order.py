"""Decisions by the order of load are those of the whole columns, at the same rounding."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from router_core import (
    BlocksStored,
    Booked,
    CostInputs,
    CostParameters,
    Freed,
    KvEvent,
    ModelRuntimeConfig,
    OutputBlock,
    PrefillDone,
    Router,
    RouterConfig,
    RoutingRequest,
    TermColumn,
    Worker,
    WorkerAvailability,
    WorkerLost,
    WorkerUpserted,
    kv_terms,
    sequence_hashes,
)
from router_core import policies as policies_module
from router_core import selection as selection_module
from router_core.cost_inputs import cost_inputs
from router_core.load_order import LazyColumn, LoadOrder, LoadOrders
from router_core.worker_sets import nth_slot, slots_of

ALWAYS, NEVER = 2, 1 << 30


def local_of(document: int, blocks: int) -> list[int]:
    return [1 + document * 1000 + at for at in range(blocks)]


def chain(document: int, blocks: int) -> list[int]:
    return sequence_hashes(local_of(document, blocks))


def stored(worker: int, document: int, blocks: int) -> KvEvent:
    local = local_of(document, blocks)
    return KvEvent(worker, 0, BlocksStored(None, chain(document, blocks), local))


class Fleet:
    """A router whose state changes at random."""

    def __init__(self, seed: int, values: dict[str, object]) -> None:
        self.draw = random.Random(seed)
        self.router = Router(RouterConfig().with_values(values))
        self.count = self.draw.choice((3, 20, 70))
        self.size = self.draw.choice((7, 16))
        for number in range(self.count):
            self.join(number + 1)
        self.active: list[str] = []
        self.made = 0

    def join(self, worker: int) -> None:
        card = ModelRuntimeConfig(total_kv_blocks=1000, max_num_batched_tokens=8192)
        found = Worker(worker, f"w{worker}", "m", block_size=self.size, runtime_config=card)
        assert self.router.apply(WorkerUpserted(found), 0.0).ok

    def request(self) -> RoutingRequest:
        hashes = chain(self.draw.randrange(4), self.draw.randrange(0, 12))
        tokens = max(1, len(hashes) * self.size + self.draw.randrange(self.size))
        self.made += 1
        return RoutingRequest(f"r{self.made}", "m", tokens, self.size, hashes)

    def change(self) -> None:
        draw, router = self.draw, self.router
        kind, worker = draw.randrange(9), draw.randrange(self.count) + 1
        if kind < 4:
            request = self.request()
            # Few distinct loads, so that many ranks tie.
            booked = Booked(
                request.id, "aggregated", worker, 0,
                prefill_tokens=draw.choice((0, 16, 48, 100)),
                sequence_hashes=request.sequence_hashes,
                anonymous_blocks=draw.choice((0, 1)),
            )  # fmt: skip
            if router.apply(booked, 0.0).ok:
                self.active.append(request.id)
        elif kind == 4 and self.active:
            router.apply(PrefillDone(draw.choice(self.active)), 0.0)
        elif kind == 5 and self.active:
            router.apply(Freed(self.active.pop(draw.randrange(len(self.active)))), 0.0)
        elif kind == 6 and self.active:
            router.apply(OutputBlock(draw.choice(self.active), draw.choice((None, 0.3))), 0.0)
        elif kind == 7:
            router.apply(stored(worker, draw.randrange(4), draw.randrange(1, 12)), 0.0)
        elif draw.random() < 0.3:
            router.apply(WorkerAvailability(worker, draw.choice((None, None, "down"))), 0.0)
        elif draw.random() < 0.2:
            router.apply(WorkerLost(worker), 0.0)
            router.sweep(10**6, 0.0)
            self.join(worker)


def large_fleet(values: dict[str, object]) -> Fleet:
    seeds = random.Random(3)
    while (fleet := Fleet(seeds.randrange(1000), values)).count < 70:
        pass
    return fleet


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "prefill_load_scale": st.sampled_from((0.0, 0.1, 1.5)),
        "overlap_score_credit": st.sampled_from((0.0, 0.3, 1.0, 2.0)),
        "router_track_prefill_tokens": st.booleans(),
        "router_track_active_blocks": st.booleans(),
        "router_assume_kv_reuse": st.booleans(),
        "overlap_score_credit_decay": st.sampled_from((0.0, 0.5)),
        "decode_active_request_weight": st.sampled_from((0.0, 1.0)),
    },
)


@given(st.integers(0, 2**32), SETTINGS)
def test_the_order_of_load_changes_no_decision(seed, values):
    fleet = Fleet(seed, values)
    router, draw = fleet.router, fleet.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection_module, "_SMALL_CLASS", draw.choice((0, 2, 16)))
        for _ in range(12):
            for _ in range(draw.randrange(6)):
                fleet.change()
            request = fleet.request()
            sample = draw.choice((0.0, 0.5, 0.999, draw.random()))
            made = []
            # Twice, because an order is made when it is wanted a second time.
            for least in (ALWAYS, ALWAYS, NEVER):
                patch.setattr(selection_module, "_ORDERED_FROM", least)
                plan = router.plan(request, samples=(sample, 0.0))
                assert plan.decode is not None
                made.append(plan.decode)
            _, found, plain = made
            assert found.winner == plain.winner
            assert found.runner_up == plain.runner_up
            if found.winner is None:
                continue
            event("quick" if isinstance(found.costs, LazyColumn) else "whole")
            # What is computed for a few ranks is what the whole columns have, to the last bit.
            seen = (found.winner, found.runner_up)
            for at in (one for one in seen if one is not None):
                assert found.costs[at] == plain.costs[at]
                assert [t.values[at] for t in found.terms] == [t.values[at] for t in plain.terms]
            assert found.margin == plain.margin
            assert found == plain
            assert found.tied == plain.tied
            assert found.replay() == plain.replay()
            assert list(found.rows()) == list(plain.rows())


def test_of_ranks_that_hold_equally_much_only_the_first_by_load_are_scored():
    fleet = large_fleet({})
    for worker in range(1, 36):
        assert fleet.router.apply(stored(worker, 0, 8), 0.0).ok
    for worker in range(1, 71):
        booked = Booked(f"b{worker}", "aggregated", worker, 0, prefill_tokens=worker,
                        sequence_hashes=chain(0, 3) if worker % 2 else ())  # fmt: skip
        assert fleet.router.apply(booked, 0.0).ok
    request = RoutingRequest("r", "m", 12 * fleet.size, fleet.size, chain(0, 11))
    fleet.router.plan(request)
    decision = fleet.router.plan(request).decode
    assert decision is not None
    assert isinstance(decision.costs, LazyColumn)
    # Two of each class: with and without cached blocks, with and without blocks of requests.
    assert len(decision.costs.known) <= 8
    assert decision.overlap_blocks(decision.winner or 0) == 8
    assert decision.inputs is not None
    assert decision.inputs.most_overlap == 8 == max(decision.inputs.overlap_blocks)


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("sample", [0.0, 0.999])
def test_a_credit_above_the_prompt_makes_ranks_equal_that_the_order_of_load_tells_apart(
    tracked, sample, monkeypatch
):
    values = {"overlap_score_credit": 2.0, "router_track_prefill_tokens": tracked}
    fleet = large_fleet(values)
    request = RoutingRequest("r", "m", 9 * fleet.size, fleet.size, chain(0, 9))
    for worker in range(1, 71):
        assert fleet.router.apply(stored(worker, 0, 9), 0.0).ok
        # The second half is behind in the order, and not dearer: its prefill is credited whole.
        tokens, blocks = (0, worker % 3 + 3) if worker <= 35 else (6 * fleet.size, 1 - tracked)
        booked = Booked(f"b{worker}", "aggregated", worker, 0, prefill_tokens=tokens,
                        sequence_hashes=(), anonymous_blocks=blocks)  # fmt: skip
        assert fleet.router.apply(booked, 0.0).ok
    fleet.router.plan(request)
    found = fleet.router.plan(request, samples=(sample, 0.0)).decode
    monkeypatch.setattr(selection_module, "_ORDERED_FROM", NEVER)
    assert found == fleet.router.plan(request, samples=(sample, 0.0)).decode


@dataclass(frozen=True, slots=True)
class MoreInputs(CostInputs):
    """Inputs with a column that the order of load does not know."""

    wear: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class MoreParameters(CostParameters):
    """Parameters with a weight that the order of load does not know."""

    request_weight: float = 0.0


def _with_wear(inputs: CostInputs) -> MoreInputs:
    values: dict[str, Any] = {one.name: getattr(inputs, one.name) for one in fields(CostInputs)}
    # The rank that would win without it is the dearest.
    wear = [25_000.0 if at == 0 else 0.0 for at in range(len(inputs.prefill_tokens))]
    return MoreInputs(**values, wear=wear)


def _more_terms(inputs: CostInputs, parameters: CostParameters) -> tuple[TermColumn, ...]:
    terms = kv_terms(inputs, parameters)
    wear = getattr(inputs, "wear", None)
    if wear is not None:
        terms += (TermColumn("wear", "blocks", 1.0, wear),)
    weight = getattr(parameters, "request_weight", 0.0)
    if weight:
        terms += (TermColumn("requests", "requests", weight, inputs.active_requests),)
    return terms


def _always_requests(inputs: CostInputs, parameters: CostParameters) -> tuple[TermColumn, ...]:
    terms = kv_terms(inputs, parameters)
    return (*terms, TermColumn("requests", "requests", 100.0, inputs.active_requests))


@pytest.mark.parametrize("kind", ["an input", "a parameter", "a term"])
@pytest.mark.parametrize("count", [63, 64, 200])
def test_what_the_order_of_load_does_not_know_is_in_the_cost_on_both_sides_of_64_ranks(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router()
    for number in range(1, count + 1):
        found = Worker(number, f"w{number}", "m")
        assert router.apply(WorkerUpserted(found), 0.0).ok
        # Little load in blocks, many requests, on the first.
        for at in range(9 if number == 1 else 1):
            booked = Booked(f"{number}-{at}", "aggregated", number, 0, prefill_tokens=0,
                            anonymous_blocks=0 if number == 1 else 2)  # fmt: skip
            assert router.apply(booked, 0.0).ok
    request = RoutingRequest("r", "m", 64, 16)
    plain = router.plan(request).decode
    assert plain is not None
    assert plain.winner == 0
    if kind == "an input":
        monkeypatch.setattr(
            selection_module, "cost_inputs", lambda *given: _with_wear(cost_inputs(*given))
        )
    elif kind == "a parameter":
        known = CostParameters.for_stage(router.config, "aggregated")
        values: dict[str, Any] = {one.name: getattr(known, one.name) for one in fields(known)}
        more = MoreParameters(**values, request_weight=100.0)
        monkeypatch.setattr(CostParameters, "for_stage", lambda *_: more)
        monkeypatch.setattr(router, "_live", None)
    terms = _always_requests if kind == "a term" else _more_terms
    for module in (policies_module, selection_module):
        monkeypatch.setattr(module, "kv_terms", terms)
    for _ in range(3):  # an order is made when it is wanted a second time
        decision = router.plan(request).decode
        assert decision is not None
        assert decision.winner == 1
        assert not isinstance(decision.costs, LazyColumn)
        assert decision.terms[-1].values[1] == (0.0 if kind == "an input" else 1)


def test_every_input_and_parameter_is_known_or_makes_the_whole_columns_decide() -> None:
    """A new field is not known until it is named."""
    others = {one.name for one in fields(CostInputs)} - selection_module._KNOWN_INPUTS
    assert others == {
        *("multipliers", "host_blocks", "disk_blocks", "following", "added"),
    }
    weights = {one.name for one in fields(CostParameters)} - selection_module._KNOWN_PARAMETERS
    assert weights == {"overlap_score_credit_decay", "decode_active_request_weight"}


def test_the_order_is_used():
    fleet = large_fleet({})
    for _ in range(100):
        fleet.change()
    fleet.router.plan(fleet.request())
    plan = fleet.router.plan(fleet.request())
    assert plan.decode is not None
    assert isinstance(plan.decode.costs, LazyColumn)
    assert len(plan.decode.costs.known) < 30 < len(plan.decode.costs)
    assert isinstance(plan.decode.terms[0].values, LazyColumn)
    assert [*replace(plan.decode).costs] == [*plan.decode.costs]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_an_order_follows_changes(changes):
    tokens, blocks = [0] * 10, [0] * 10
    mask = 0b1111101111
    order, fresh = LoadOrder(mask, 0.5, 1.0), LoadOrder(mask, 0.5, 1.0)
    order.renew(tokens, blocks)
    for slot, more, held in changes:
        tokens[slot], blocks[slot] = more, held
        order.update([slot], tokens, blocks)
    fresh.renew(tokens, blocks)
    for within in (mask, 0b11, 0b1010101010 & mask):
        assert order.cheapest(within, 3.0) == fresh.cheapest(within, 3.0)
    groups = order.cheapest(mask, 0.0) or []
    costs = sorted({0.5 * tokens[s] + blocks[s] for s in slots_of(mask)})
    covered = {0.5 * tokens[s] + blocks[s] for group in groups for s in slots_of(group)}
    assert costs[0] in covered


def test_orders_forget_changes_beyond_their_bound_and_begin_again():
    orders, tokens, blocks = LoadOrders(), [0] * 4, [0] * 4
    arguments = (0b1111, 1.0, 1.0, tokens, blocks)

    def cheapest() -> list[int] | None:
        found = orders.order(*arguments)
        return None if found is None else found.cheapest(0b1111, 0.0)

    assert cheapest() is None
    assert cheapest() == [0b1111]
    for number in range(10_000):
        tokens[number % 4] += 1
        orders.note_change(number % 4)
    tokens[2] = 0
    orders.note_change(2)
    assert (cheapest() or [0])[0] == 0b100


def test_the_order_of_ranks_of_which_few_came_or_went_is_there_at_once() -> None:
    draw, orders = random.Random(1), LoadOrders()
    tokens, blocks = (
        [draw.randrange(9) for _ in range(200)],
        [draw.randrange(3) for _ in range(200)],
    )
    all_ranks = (1 << 199) - 1
    for _ in range(2):
        orders.order(all_ranks, 0.5, 1.0, tokens, blocks)
    for number in range(40):
        mask = all_ranks & ~(1 << draw.randrange(199)) | 1 << 199
        slot = draw.randrange(200)
        tokens[slot] = number
        orders.note_change(slot)
        order, fresh = orders.order(mask, 0.5, 1.0, tokens, blocks), LoadOrder(mask, 0.5, 1.0)
        fresh.renew(tokens, blocks)
        assert order is not None
        for within in (mask, draw.randrange(mask) & mask):
            assert order.cheapest(within, 3.0) == fresh.cheapest(within, 3.0)
        assert orders.order(mask & (1 << 100) - 1, 0.5, 1.0, tokens, blocks) is None
        assert orders.order(mask, 0.5, 2.0, tokens, blocks) is None


@given(st.integers(1, 1 << 80), st.data())
def test_the_nth_slot(mask, data):
    number = data.draw(st.integers(0, mask.bit_count() - 1))
    assert nth_slot(mask, number) == slots_of(mask)[number]


def test_a_settled_decision_has_its_winner_alone():
    fleet = large_fleet({})
    for _ in range(100):
        fleet.change()
    fleet.router.plan(fleet.request())
    plan = fleet.router.plan(fleet.request(), samples=(0.7, 0.0))
    settled = plan.settled()
    before, after = plan.decode, settled.decode
    assert before is not None
    assert after is not None
    assert len(after.workers) == len(after.costs) == len(after.refs) == 1
    for name in ("worker", "ref", "cached_tokens", "funnel", "id", "outcome", "sample"):
        assert getattr(after, name) == getattr(before, name)
    assert after.costs[0] == before.costs[before.winner or 0]
    assert next(after.rows()).terms == list(before.rows())[before.winner or 0].terms
    assert settled.settled() is settled


def test_a_decision_of_a_small_fleet_is_settled_as_it_is():
    router = Router()
    card = ModelRuntimeConfig(total_kv_blocks=1000)
    for number in (1, 2):
        router.apply(WorkerUpserted(Worker(number, f"w{number}", "m", runtime_config=card)), 0.0)
    plan = router.plan(RoutingRequest("r", "m", 100, 16))
    assert plan.settled() is plan
