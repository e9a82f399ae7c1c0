"""The decision memory: what is kept whole, what in brief, and that it stays within its bytes."""

import gc
import tracemalloc
from dataclasses import replace

import pytest
from msgspec import UNSET

from dynctl.documents.decisions import decision_row
from dynctl.documents.route_of_plan import decision_result
from dynctl.documents.route_result import PrefillPrediction
from dynctl.serving.records.decision_memory import DecisionMemory
from dynctl.serving.records.decision_storage import BriefHop, PackedHop, brief, pack
from dynctl.serving.routing.prompts import NOT_MODELLED
from dynctl.serving.telemetry.observers import RequestRecord
from router_core import Booked, PredictedPrefill, WorkerLost, WorkerUpserted, constraints, flip
from router_core.config import ROUTER_MODES
from tests.dynctl.serving.routed import request, router, store, worker

ZONES = {"kv_transfer_domain": "zone", "kv_transfer_enforcement": "required"}


def zoned():
    made = router(
        worker(1, "prefill", zone="a", policy=ZONES),
        worker(2, "prefill", zone="b", policy=ZONES),
        worker(3, "decode", zone="a"),
        worker(4, "decode", zone="b"),
        worker(5, "decode", zone="b"),
    )
    store(made, 2, range(32))
    return made


def test_a_brief_plan_keeps_winner_runner_up_terms_and_counts():
    made = zoned()
    memory = DecisionMemory(sample_every=2, small_fleet=0)
    memory.record(made.plan(request(request_id="sampled")), 1.0)
    plan = made.plan(request(request_id="second"))
    memory.record(plan, 2.0)
    kept = memory.get("second")
    assert kept is not None
    assert not kept.whole
    assert kept.at == 2.0
    again = kept.plan
    for before, after in ((plan.prefill, again.prefill), (plan.decode, again.decode)):
        assert before is not None
        assert after is not None
        assert after.ref == before.ref
        assert after.margin == before.margin
        assert after.parameters == before.parameters
        assert after.constraints == before.constraints
        counts = [(step.filter, step.entered, step.left) for step in before.funnel]
        assert [(s.filter, s.entered, s.left) for s in after.funnel] == counts
        row = next(r for r in before.rows() if r.ref == before.ref)
        assert replace(next(after.rows()), probability=row.probability) == row
        assert after.replay().ref == before.ref
    assert again.implied == plan.implied


def test_a_brief_hop_of_many_says_what_is_gone():
    made = router(*(worker(i) for i in range(1, 6)))
    store(made, 3, range(32))
    store(made, 4, range(16))
    hop = brief(made.plan(request()).final)
    after = hop.expand()
    assert [w.worker_id for w in after.workers] == [3, 4]
    assert after.notes == ("kept in brief: 2 of 5 scored candidates",)


def test_the_only_candidate_has_no_runner_up():
    hop = brief(router(worker(1)).plan(request()).final).expand()
    assert hop.runner_up is None
    assert hop.margin is None
    assert hop.notes == ()


@pytest.mark.parametrize("mode", sorted(set(ROUTER_MODES) - {"direct"}))
def test_every_mode_can_be_kept_either_way(mode):
    decision = router(worker(1), worker(2), worker(3), router_mode=mode).plan(request()).final
    assert brief(decision).expand().ref == decision.ref
    packed = pack(decision).expand()
    assert decision_result(packed) == decision_result(decision)
    assert flip(packed) == flip(decision)


def test_costs_that_were_not_computed_for_all_follow_from_what_is_kept():
    made = router(*(worker(i) for i in range(1, 101)))
    for number, length in ((3, 32), (4, 16), (70, 32)):
        store(made, number, range(length))
    for number in range(1, 90):
        made.apply(Booked(f"b{number}", "aggregated", number, 0, 7 * number, (), number % 5), 0.0)
    made.plan(request())  # the order of load is made when it is wanted a second time
    followed = 0
    for sample in (0.0, 0.4, 0.999):
        plan = made.plan(request(request_id=f"r{sample}"), samples=(sample, sample))
        decision = plan.final
        followed += decision.costs_follow
        kept = pack(decision)
        after = kept.expand()
        assert not after.costs_follow
        assert after == decision
        assert (after.winner, after.runner_up) == (decision.winner, decision.runner_up)
        assert decision_result(after) == decision_result(decision)
    assert followed == 3


def test_predicted_blocks_survive_in_both_forms():
    made = router(worker(1), worker(2), router_predicted_ttl_secs=5.0)
    made.apply(made.booking(made.plan(request()).final, request()), 0.0)
    decision = made.plan(request(request_id="again")).final
    assert any(row.predicted_blocks for row in decision.rows())
    assert list(pack(decision).expand().rows()) == list(decision.rows())
    for row in brief(decision).expand().rows():
        [whole] = [one for one in decision.rows() if one.ref == row.ref]
        assert row.predicted_blocks == whole.predicted_blocks
    shown = decision_result(decision).candidates
    assert [type(row.predicted_blocks) is int for row in shown] == [
        bool(row.predicted_blocks) for row in decision.rows()
    ]


def test_what_a_prefill_load_model_leaves_and_predicts_survives_in_both_forms():
    made = router(worker(1), worker(2), worker(3))
    made.apply(Booked("r", "aggregated", 1, 0, 100, predicted_s=10.0), 0.0)
    made.advance(5.0)
    decision = made.plan(request()).final
    decision = replace(decision, predicted=PredictedPrefill("m", 34, 0, 1.5))
    for after in (pack(decision).expand(), brief(decision).expand()):
        assert after.predicted == decision.predicted
        assert after.inputs is not None
        assert after.inputs.booked_tokens is not None
        for row in after.rows():
            [before] = [one for one in decision.rows() if one.ref == row.ref]
            assert replace(row, probability=before.probability) == before
    shown = decision_result(decision)
    assert [row.booked_prefill_tokens for row in shown.candidates] == [100, 0, 0]
    assert shown.prefill_load == PrefillPrediction("m", 34, 0, 1.5)
    plain = decision_result(made.plan(request()).final)
    assert plain.prefill_load is UNSET


def test_packed_preferences_survive():
    made = router(worker(1, zone="a"), worker(2, zone="b"))
    wanted = constraints((), {"dynamo.topology/zone=b": 0.85})
    decision = made.plan(request(constraints=wanted)).final
    assert decision_result(pack(decision).expand()) == decision_result(decision)
    assert brief(decision).expand().costs[0] == min(decision.costs)


def test_refusals_and_noted_plans_are_always_whole():
    made = zoned()
    memory = DecisionMemory(sample_every=1000, small_fleet=0)
    memory.record(made.plan(request(request_id="first")), 0.0)
    refused = made.plan(request(request_id="no", constraints=constraints(["gpu=b200"])))
    memory.record(refused, 0.0)
    plan = made.plan(request(request_id="noted"))
    assert plan.decode is not None
    memory.record(replace(plan, decode=replace(plan.decode, notes=("odd",))), 0.0)
    unknown = replace(plan.decode, notes=(NOT_MODELLED,), overlap_modelled=False)
    memory.record(replace(plan, id="ordinary", decode=unknown), 0.0)
    whole = {kept.id: kept.whole for kept in memory.recent()}
    assert whole == {"ordinary": False, "noted": True, "no": True, "first": True}
    kept = memory.get("no")
    assert kept is not None
    assert kept.plan.final.summary() == refused.final.summary()
    assert kept.plan.final.funnel[-1].rejected


def test_filters():
    made = zoned()
    memory = DecisionMemory(small_fleet=0)
    for i in range(4):
        memory.record(made.plan(request(request_id=f"p{i}")), float(i))
    bound = constraints(["dynamo.topology/zone=c"])
    memory.record(made.plan(request(request_id="lost", constraints=bound)), 9.0)
    memory.record(made.plan(request(request_id="other", model="nope")), 10.0)

    def ids(**filters):
        return [kept.id for kept in memory.recent(**filters)]

    assert ids() == ["other", "lost", "p3", "p2", "p1", "p0"]
    assert ids(n=2) == ["other", "lost"]
    assert ids(outcome="selected") == ["p3", "p2", "p1", "p0"]
    assert ids(outcome="refused") == ["other", "lost"]
    assert ids(outcome="no_eligible_worker") == ["lost"]
    assert ids(model="nope") == ["other"]
    assert ids(worker="prefill-2") == ids(worker="2") == ["p3", "p2", "p1", "p0"]
    assert ids(worker="prefill-1") == []
    assert ids(domain="zone=b") == ids(domain="b") == ["p3", "p2", "p1", "p0"]
    assert ids(domain="zone=c") == ids(domain="c") == ["lost"]
    assert ids(domain="rack=b") == []


def test_reasons_are_those_of_the_largest_part_of_the_cost():
    made = router(worker(1), worker(2), worker(3))
    reasons = {}

    def reason(name, **fields):
        plan = made.plan(request(request_id=name, **fields))
        reasons[name] = decision_row(plan, at=1.0, whole=True).why

    reason("even")
    store(made, 2, range(32))
    reason("cached")
    assert made.apply(Booked("busy", "aggregated", 2, 0, prefill_tokens=4000), 0.0).ok
    assert made.apply(Booked("busier", "aggregated", 3, 0, prefill_tokens=4000), 0.0).ok
    reason("loaded")
    reason("refused", model="nope")
    for gone in (1, 2):
        assert made.apply(WorkerLost(gone), 0.0).ok
    reason("alone")
    assert reasons == {
        "even": "tie",
        "cached": "cache",
        "loaded": "load",
        "refused": "",
        "alone": "only one",
    }


def test_what_topology_moved_is_found_in_both_forms():
    made = router(
        worker(1, "prefill", zone="a", policy=ZONES),
        worker(2, "prefill", zone="b", policy=ZONES),
        worker(3, "decode", zone="a"),
    )
    store(made, 2, range(32))
    for small_fleet in (0, 100):
        memory = DecisionMemory(small_fleet=small_fleet, sample_every=10)
        memory.record(made.plan(request(request_id="first")), 1.0)
        memory.record(made.plan(request(request_id="second")), 2.0)
        bound = constraints(["dynamo.topology/zone=b"])
        memory.record(made.plan(request(request_id="lost", constraints=bound)), 3.0)
        found = memory.recent(moved=True)
        assert [kept.id for kept in found] == ["second", "first"]
        rows = [decision_row(kept.plan, at=kept.at, whole=kept.whole) for kept in found]
        assert {row.moved for row in rows} == {"1 left out: no decode there"}
    assert not DecisionMemory().recent(moved=True)
    calm, memory = zoned(), DecisionMemory()
    memory.record(calm.plan(request(request_id="calm")), 1.0)
    assert memory.recent(moved=True) == []


def test_attempts_of_one_request_are_told_apart():
    made = router(worker(1), worker(2))
    memory = DecisionMemory(small_fleet=0)
    memory.record(made.plan(request()), 1.0)
    memory.record(made.plan(request(allowed_worker_ids=frozenset({2}))), 2.0)
    assert [kept.at for kept in memory.attempts("r1")] == [1.0, 2.0]
    last = memory.get("r1")
    assert last is not None
    assert [w.worker_id for w in last.winners()] == [2]
    assert memory.get("never") is None


def test_the_oldest_leave_and_their_ids_with_them():
    made = router(worker(1), worker(2))
    memory = DecisionMemory(max_bytes=40_000, small_fleet=0)
    for i in range(100):
        memory.record(made.plan(request(request_id=f"p{i}")), float(i))
    assert memory.size <= 40_000
    assert memory.recorded == 100
    assert memory.evicted == 100 - len(memory)
    assert memory.get("p0") is None
    assert memory.get("p99") is not None
    kept = memory.recent(1000)
    hops = [hop for one in kept for hop in (one.prefill, one.decode)]
    columns = {id(hop.workers): hop.workers for hop in hops if isinstance(hop, PackedHop)}
    cards = {id(worker) for one in kept for worker in one.cards()}
    cards |= {id(worker) for column in columns.values() for worker in column}
    candidates = sum(map(len, columns.values()))
    assert candidates
    assert memory.size == sum(one.size for one in kept) + 1_600 * len(cards) + 16 * candidates
    assert [one.id for one in kept] == [f"p{99 - i}" for i in range(len(kept))]


def test_nothing_is_kept_without_bytes():
    memory = DecisionMemory(max_bytes=0, small_fleet=0)
    memory.record(router(worker(1)).plan(request()), 0.0)
    assert len(memory) == memory.size == 0


def test_a_plan_larger_than_the_memory_leaves_it_empty():
    memory = DecisionMemory(max_bytes=100, small_fleet=0)
    memory.record(router(worker(1)).plan(request()), 0.0)
    assert len(memory) == memory.size == 0


@pytest.mark.parametrize("sample_every", [1, 1_000_000])
@pytest.mark.parametrize("workers", [2, 64])
def test_estimated_bytes_cover_the_real_ones(workers, sample_every):
    made = router(*(worker(i, zone="abc"[i % 3]) for i in range(1, workers + 1)))
    made.plan(request())
    memory = DecisionMemory(sample_every=sample_every, small_fleet=0)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for i in range(300):
        memory.record(made.plan(request(request_id=f"request-{i}")), float(i))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used <= memory.size <= 2 * used


def test_refusals_are_covered_too():
    made = router(*(worker(i) for i in range(1, 40)))
    memory = DecisionMemory(small_fleet=0)
    wanted = constraints(["gpu=b200"])
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for i in range(100):
        memory.record(made.plan(request(request_id=f"request-{i}", constraints=wanted)), 0.0)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used <= memory.size <= 3 * used


def test_cards_of_a_fleet_that_keeps_changing_are_covered():
    """Plans of before a change hold the cards of then, which no other plan does any more."""
    memory = DecisionMemory(sample_every=2, small_fleet=0)
    made = router()

    def publish_again(generation):
        for i in range(1, 21):
            one = worker(i, name=f"worker-{i}-of-generation-{generation}", zone="abc"[i % 3])
            assert made.apply(WorkerUpserted(one), 0.0).ok

    publish_again(0)
    made.plan(request())
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for i in range(100):
        publish_again(i)
        memory.record(made.plan(request(request_id=f"request-{i}")), 0.0)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used <= memory.size <= 2 * used


def test_an_empty_memory_holds_nothing():
    made = router(*(worker(i) for i in range(1, 5)))
    memory = DecisionMemory(max_bytes=12_000, small_fleet=0)
    for i in range(50):
        wanted = constraints(["gpu=b200"]) if i % 3 else constraints()
        memory.record(made.plan(request(request_id=f"p{i}", constraints=wanted)), 0.0)
    while len(memory):
        memory._forget_oldest()
    assert memory.size == 0
    assert not memory._cards
    assert not memory._by_id


def test_it_listens_to_the_service():
    memory = DecisionMemory(small_fleet=0)
    plan = router(worker(1)).plan(request())
    memory.on_decision(plan, request(), RequestRecord("r1", "q", "chat", 5.0, 1_000.0))
    kept = memory.get("r1")
    assert kept is not None
    assert kept.at == 1_000.0


def test_brief_wants_a_winner():
    with pytest.raises(ValueError, match="has no winner; keep refusals whole"):
        brief(router().plan(request()).final)


def test_bad_bounds_are_named():
    with pytest.raises(ValueError, match="got -1 and 16"):
        DecisionMemory(-1, small_fleet=0)


def test_winners_of_both_forms():
    made = zoned()
    memory = DecisionMemory(sample_every=2, small_fleet=0)
    for i in range(2):
        memory.record(made.plan(request(request_id=f"p{i}")), 0.0)
    whole, short = memory.get("p0"), memory.get("p1")
    assert whole is not None
    assert short is not None
    assert isinstance(short.prefill, BriefHop)
    assert [w.name for w in whole.winners()] == [w.name for w in short.winners()]


def test_small_fleets_are_kept_whole():
    made = zoned()
    memory = DecisionMemory(sample_every=1000)
    for i in range(3):
        memory.record(made.plan(request(request_id=f"p{i}")), 0.0)
    for i in range(3):
        kept = memory.get(f"p{i}")
        assert kept is not None
        assert kept.whole
