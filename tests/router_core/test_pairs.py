"""The cost of distance, and prefill and decode chosen as a pair, against exhaustive search."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core import (
    BEYOND,
    ConfigError,
    Decision,
    Link,
    Router,
    RouterConfig,
    RoutingPlan,
    RoutingRequest,
    Session,
    Stage,
    TransferTable,
    TransferTableSet,
    Unknown,
    Worker,
    WorkerUpserted,
    canonical_taint,
    certain,
    constraints,
    flips,
    parse_domains,
)
from router_core.changes import ConfigSet, WorkerLost
from router_core.counterfactual import with_weight
from router_core.routing_view import Pin
from router_core.selection import SIZE_UNKNOWN
from router_core.sensitivity import PlanQuestion
from router_core.workers import ModelRuntimeConfig
from tests.router_core.fleet import active, apply_all, request, router, stored, worker

#: A rack is ten times as fast as its zone, and all else is far away. 1,024 bytes per token.
TABLE = TransferTable(
    (("rack", Link(0.001, 1_024_000.0)), ("zone", Link(0.01, 102_400.0))),
    Link(0.1, 10_240.0),
    1_024,
)
WEIGHT = {"router_kv_transfer_weight": 50.0, "router_kv_transfer_qos": "qos.yaml"}
BEST = {"router_pair_selection": "best"}


def place(worker_id: int, name: str, role: str, zone: str, rack: str, **more: Any) -> Worker:
    domains = {"zone": zone, "rack": rack}
    return worker(worker_id, name, role, topology_domains=domains, **more)


def with_table(made: Router, table: TransferTable = TABLE) -> Router:
    apply_all(made, TransferTableSet(table))
    return made


def fleet(**settings: Any) -> Router:
    """A prefill worker in rack 1 of zone a; decode workers in its rack, its zone, and beyond."""
    return with_table(
        router(
            place(1, "p", "prefill", "a", "1"),
            place(2, "near", "decode", "a", "1"),
            place(3, "zone", "decode", "a", "2"),
            place(4, "far", "decode", "b", "1"),
            **{**WEIGHT, **settings},
        )
    )


def decode_of(plan: RoutingPlan) -> Decision:
    assert plan.decode is not None
    return plan.decode


def term(decision: Decision, name: str = "transfer") -> dict[str, float]:
    (column,) = [one for one in decision.terms if one.name == name]
    return {w.name: v for w, v in zip(decision.workers, column.values, strict=True)}


# -- the cost of distance ------------------------------------------------------------------


@pytest.mark.seed("dep-topology: future work: KV transfer cost scoring")
@pytest.mark.seed("dep-topology: future work: bytes of the KV cache")
def test_the_transfer_term_of_the_proposal_with_its_weight_of_50() -> None:
    decision = decode_of(fleet().plan(request(160)))
    # 160 tokens of 1,024 bytes: 163,840 bytes.
    seconds = {"near": 0.001 + 0.16, "zone": 0.01 + 1.6, "far": 0.1 + 16.0}
    assert term(decision) == pytest.approx(seconds)
    costs = {row.worker.name: row.cost for row in decision.rows()}
    assert costs == pytest.approx({"near": 18.05, "zone": 90.5, "far": 815.0})
    (column,) = [one for one in decision.terms if one.name == "transfer"]
    assert (column.unit, column.weight) == ("seconds", 50.0)
    levels = {row.worker.name: row.transfer_level for row in decision.rows()}
    # A rack of the same name in another zone is another rack.
    assert levels == {"near": "rack", "zone": "zone", "far": BEYOND}


@pytest.mark.seed("dep-topology: future work: KV transfer cost scoring")
def test_load_outweighs_distance_where_the_sum_is_lower() -> None:
    made = fleet()
    apply_all(made, active(2, "x", stage="decode", blocks=72))
    assert decode_of(made.plan(request(160))).worker == made.registry.by_name("near")
    apply_all(made, active(2, "y", stage="decode", blocks=1))
    assert decode_of(made.plan(request(160))).worker == made.registry.by_name("zone")


@pytest.mark.seed("dep-topology: future work: soft scoring composes with the hard filter")
def test_the_required_domain_excludes_and_the_distance_ranks_the_rest() -> None:
    made = fleet(kv_transfer_domain="zone")
    apply_all(made, active(2, "x", stage="decode", blocks=500))
    decision = decode_of(made.plan(request(160)))
    assert {one.name for one in decision.workers} == {"near", "zone"}
    assert decision.worker == made.registry.by_name("zone")


def test_without_a_weight_or_a_table_there_is_no_term() -> None:
    plain = router(*(w for w in fleet().registry))
    for made in (plain, with_table(router(*plain.registry)), router(*plain.registry, **WEIGHT)):
        decision = decode_of(made.plan(request(160)))
        assert [one.name for one in decision.terms] == ["decode_blocks"]
        assert decision.inputs is not None
        assert decision.inputs.added is None
    assert "kv_transfer_weight" not in decode_of(plain.plan(request(160))).parameters.to_dict()


@pytest.mark.seed("dep-topology: future work: bytes of the KV cache")
def test_an_unknown_size_of_the_kv_cache_is_a_note_and_no_term() -> None:
    made = with_table(fleet(), replace(TABLE, bytes_per_token=None))
    decision = decode_of(made.plan(request(160)))
    assert decision.notes == (SIZE_UNKNOWN,)
    assert [one.name for one in decision.terms] == ["decode_blocks"]
    made = with_table(fleet(), replace(TABLE, bytes_per_token=None, by_model={"tiny": 1_024}))
    assert decode_of(made.plan(request(160))).notes == ()


def test_an_adapter_has_the_size_of_its_model() -> None:
    made = with_table(fleet(**BEST), replace(TABLE, bytes_per_token=None, by_model={"tiny": 1_024}))
    for one in tuple(made.registry):
        apply_all(made, WorkerUpserted(replace(one, adapters=("lora",))))
    plan = made.plan(replace(request(160), model="lora"))
    assert term(decode_of(plan))["near"] == pytest.approx(0.161)
    assert plan.prefill is not None
    assert min(plan.prefill.costs) == 10 + min(decode_of(plan).costs)


def test_decisions_with_distances_replay_and_flip() -> None:
    decision = decode_of(fleet().plan(request(160)))
    assert decision.replay() == decision
    found = {one.change: one for one in flips(decision)}
    assert found["active_decode_blocks"].by == 73
    apart = {
        row.worker.name: row.cost for row in with_weight(decision, "kv_transfer_weight", 0).rows()
    }
    assert apart == {"near": 10, "zone": 10, "far": 10}


@pytest.mark.seed("dep-topology: future work: prefill near the frontend")
def test_the_frontends_own_domains_add_the_latency_to_the_first_hop() -> None:
    made = with_table(
        router(
            place(1, "here", "prefill", "a", "1"),
            place(2, "there", "prefill", "b", "1"),
            place(3, "d", "decode", "a", "1"),
            **WEIGHT,
            router_own_domains="zone=a",
        )
    )
    plan = made.plan(request(160))
    assert plan.prefill is not None
    assert term(plan.prefill) == {"here": 0.01, "there": 0.1}
    assert plan.prefill.worker == made.registry.by_name("here")
    apply_all(made, active(1, "x", stage="prefill", prefill_tokens=80))
    assert made.plan(request(160)).prefill.worker.name == "there"  # type: ignore[union-attr]
    # 4.5 blocks of latency are 72 tokens.
    apply_all(made, ConfigSet({"router_own_domains": "zone=b,rack=9"}))
    assert term(made.plan(request(160)).prefill) == {"here": 0.1, "there": 0.01}  # type: ignore[arg-type]


def test_one_pool_near_the_frontend() -> None:
    made = with_table(
        router(
            worker(1, "here", zone="a"),
            worker(2, "there", zone="b"),
            **WEIGHT,
            router_own_domains="zone=a",
        )
    )
    assert term(made.plan(request(160)).final) == {"here": 0.01, "there": 0.1}


@pytest.mark.parametrize("text", ["zone", "zone=", "=a", "zone=a,", "zone=a=b", "zone=a,zone=b"])
def test_own_domains_are_checked(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^router_own_domains: .*(zone|=a)"):
        RouterConfig(router_own_domains=text)
    assert parse_domains(" zone = a , rack=r-1 ") == {"zone": "a", "rack": "r-1"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"levels": ()}, "expected 1 to 16"),
        ({"levels": (("zone", Link(0, 1)),) * 2}, "each level once"),
        ({"levels": (("beyond", Link(0, 1)),)}, "each level once"),
        ({"bytes_per_token": 0}, "bytes_per_token: expected"),
        ({"by_model": {"m": -1.0}}, "bytes_per_token: expected"),
    ],
)
def test_a_table_is_checked(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        replace(TABLE, **change)


@pytest.mark.parametrize("link", [(-1.0, 1.0), (0.0, 0.0), (float("nan"), 1.0), (0.0, 1e20)])
def test_a_link_is_checked(link: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match=r"^(latency|bandwidth): expected"):
        Link(*link)


def test_a_snapshot_keeps_the_table() -> None:
    made = fleet(**BEST)
    again = Router.restore(made.snapshot())
    assert again.transfer == TABLE
    assert again.plan(request(160)) == made.plan(request(160))
    assert "transfer" not in router().snapshot()


# -- pairs ---------------------------------------------------------------------------------


def test_greedy_loses_where_the_idle_prefill_worker_is_far_from_idle_decode_workers() -> None:
    def two(**settings: Any) -> Router:
        made = with_table(
            router(
                place(1, "prefill-a", "prefill", "a", "1"),
                place(2, "prefill-b", "prefill", "b", "2"),
                place(3, "decode-b", "decode", "b", "2"),
                **{**WEIGHT, **settings},
            )
        )
        apply_all(made, active(2, "x", stage="prefill", prefill_tokens=32))
        return made

    def total(plan: RoutingPlan) -> float:
        assert plan.prefill is not None
        own = plan.prefill.own_costs[plan.prefill.winner or 0]
        return own + min(decode_of(plan).costs)

    greedy, best = two().plan(request(160)), two(**BEST).plan(request(160))
    assert greedy.prefill is not None
    assert best.prefill is not None
    assert greedy.prefill.worker == two().registry.by_name("prefill-a")
    assert total(greedy) == pytest.approx(825.0)
    assert best.prefill.worker == two().registry.by_name("prefill-b")
    assert total(best) == pytest.approx(30.05)
    # The cost of the prefill hop is that of the pair.
    assert min(best.prefill.costs) == total(best)
    assert best.prefill.margin == pytest.approx(825.0 - 30.05)
    assert best.prefill.replay() == best.prefill


def test_the_decode_hop_that_is_decided_again_stays_with_its_prefill_worker() -> None:
    made = fleet(**BEST)
    first = made.plan(request(160))
    assert first.prefill is not None
    apply_all(made, WorkerLost(2))
    again = made.continue_plan(request(160), first.prefill)
    assert decode_of(again).worker == made.registry.by_name("zone")
    assert term(decode_of(again))["zone"] == pytest.approx(1.61)


def test_pairs_need_a_decode_worker_even_without_the_guard() -> None:
    made = with_table(
        router(
            place(1, "stranded", "prefill", "a", "1", policy=None),
            place(2, "p", "prefill", "b", "1"),
            place(3, "d", "decode", "b", "1"),
            kv_transfer_domain="zone",
            decode_capacity_guard=False,
            **BEST,
        )
    )
    apply_all(made, active(2, "x", stage="prefill", prefill_tokens=3_200))
    assert made.plan(request(160)).ok
    apply_all(made, WorkerLost(3))
    assert made.plan(request(160)).prefill.outcome == "no_eligible_worker"  # type: ignore[union-attr]


@pytest.mark.parametrize(("mode", "chosen"), [("hard", "p1"), ("soft", "p2")])
def test_the_next_hop_is_that_of_the_requests_session(mode: str, chosen: str) -> None:
    made = router(
        worker(1, "p1", "prefill", zone="a", policy="required"),
        worker(2, "p2", "prefill", zone="b", policy="required"),
        worker(3, "d1", "decode", zone="a"),
        worker(4, "d2", "decode", zone="b"),
        worker(5, "d3", "decode", zone="b"),
        router_session_affinity_ttl_secs=60.0,
        router_session_affinity_mode=mode,
        router_session_affinity_yield_blocks=2.0,
        **BEST,
    )
    # The session is bound to d3, which is loaded more than the others.
    bound = replace(active(5, "s1", stage="decode", blocks=9), session="s")
    apply_all(made, bound, active(3, "x", stage="decode", blocks=4))
    wanted = request(160, session=Session("s", 2.0))
    plan = made.plan(wanted)
    assert plan.prefill is not None
    assert plan.prefill.worker == made.registry.by_name(chosen)
    # d1 has 4 blocks and the session's worker 9; d2 has none, and softly costs 2 more.
    after = {"hard": {"p1": 14.0, "p2": 19.0}, "soft": {"p1": 14.0, "p2": 12.0}}[mode]
    rows = {row.worker.name: row.following for row in plan.prefill.rows()}
    assert rows == after


def test_modes_without_costs_in_blocks_choose_hop_by_hop() -> None:
    made = fleet(**BEST, router_mode="least-loaded")
    plan = made.plan(request(160))
    assert plan.prefill is not None
    assert plan.prefill.inputs is not None
    assert plan.prefill.inputs.following is None


def test_with_unknown_load_a_pair_is_not_certain() -> None:
    made = with_table(
        router(
            place(1, "p1", "prefill", "a", "1"),
            place(2, "p2", "prefill", "b", "2"),
            place(3, "d1", "decode", "a", "1"),
            place(4, "d2", "decode", "b", "2"),
            **{**WEIGHT, **BEST},
        )
    )
    apply_all(made, active(2, "x", stage="prefill", prefill_tokens=32))
    wanted = request(160)
    question = PlanQuestion(made, wanted, made.plan(wanted), made.view())
    assert certain(question, [])
    assert not certain(question, [Unknown(load="more")])


# -- against exhaustive search -------------------------------------------------------------

#: Sums of these are exact in floating point, so that ties are ties.
LOADS = st.sampled_from([0, 16, 16, 32, 64, 160])
DOMAINS = st.fixed_dictionaries(
    {},
    optional={
        "zone": st.sampled_from(["a", "b", "c"]),
        "rack": st.sampled_from(["1", "2"]),
        "host": st.sampled_from(["x", "y", "z", "v"]),
    },
)
POLICIES = st.sampled_from([None, None, "required", "preferred"])
#: Links in powers of two, narrow to wide; also ones where a narrow level is the slower.
LINKS = st.builds(
    Link, st.sampled_from([0.0, 0.125, 0.5, 2.0]), st.sampled_from([2.0**10, 2.0**14, 2.0**20])
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Router, RoutingRequest]:
    settings: dict[str, Any] = {"router_pair_selection": "best"}
    if draw(st.booleans()):
        settings |= {"router_kv_transfer_weight": draw(st.sampled_from([0.5, 1.0, 8.0]))}
        settings |= {"router_kv_transfer_qos": "f"}
        if draw(st.booleans()):
            settings |= {"router_own_domains": draw(st.sampled_from(["zone=a", "rack=1,zone=b"]))}
    if draw(st.booleans()):
        kind = draw(st.sampled_from(["required", "preferred", "fallback"]))
        settings |= {"kv_transfer_domain": draw(st.sampled_from(["zone", "rack"]))}
        settings |= {"kv_transfer_enforcement": kind}
        if kind == "preferred":
            settings |= {"kv_transfer_preferred_weight": 0.5}
    # A decode worker with a cached prefix costs less then, whether the hop is skipped or not.
    settings |= {"conditional_disagg_enabled": draw(st.booleans())}
    if draw(st.booleans()):
        mode = draw(st.sampled_from(["hard", "soft"]))
        settings |= {"router_session_affinity_ttl_secs": 60.0}
        settings |= {"router_session_affinity_mode": mode}
        if mode == "soft":
            settings |= {"router_session_affinity_yield_blocks": draw(st.sampled_from([1.0, 8.0]))}
    settings |= {"decode_active_request_weight": draw(st.sampled_from([0.0, 2.0]))}
    made = router(**settings)
    levels = draw(st.permutations(["host", "rack", "zone"]))[: draw(st.integers(1, 3))]
    sized = draw(st.booleans())
    apply_all(
        made,
        TransferTableSet(
            TransferTable(
                tuple((name, draw(LINKS)) for name in levels), draw(LINKS), 64 if sized else None
            )
        ),
    )
    counts = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    for number in range(sum(counts)):
        role = "prefill" if number < counts[0] else "decode"
        domains = draw(DOMAINS)
        policy = draw(POLICIES) if role == "prefill" and "zone" in domains else None
        more: dict[str, Any] = {"topology_domains": domains}
        if policy is not None:
            more |= {"kv_transfer_domain": "zone", "kv_transfer_enforcement": policy}
            more |= {"kv_transfer_preferred_weight": 0.5 if policy == "preferred" else None}
        one = worker(number + 1, None, role, **more)
        apply_all(made, WorkerUpserted(one))
        load = draw(LOADS)
        if load and role == "prefill":
            apply_all(made, active(number + 1, f"b{number}", stage="prefill", prefill_tokens=load))
        elif load:
            apply_all(made, active(number + 1, f"b{number}", stage="decode", blocks=load // 16))
        elif draw(st.booleans()):
            apply_all(made, stored(number + 1, draw(st.integers(1, 4))))
    taint = canonical_taint("zone", draw(st.sampled_from(["a", "b"])))
    limits = draw(
        st.sampled_from([constraints(), constraints(preferred={taint: 0.25}), constraints([taint])])
    )
    pin = draw(st.sampled_from([None, None, None, Pin(counts[0] + 1)]))
    session = None
    if draw(st.booleans()):
        session = Session("s", 2.0)
        bound = draw(st.sets(st.integers(1, sum(counts)), max_size=2))
        for number in bound:
            stage: Stage = "prefill" if number <= counts[0] else "decode"
            begun = active(number, f"s{number}", stage=stage)
            apply_all(made, replace(begun, session="s"))
    return made, request(64, constraints=limits, pin_decode=pin, session=session)


def searched(made: Router, wanted: RoutingRequest, plan: RoutingPlan) -> dict[Any, float]:
    """The sum of every pair: each prefill candidate with each decode candidate after it."""
    assert plan.prefill is not None
    found = {}
    for position, own in enumerate(plan.prefill.own_costs):
        after = made.continue_plan(wanted, replace(plan.prefill, winner=position)).decode
        assert after is not None
        for ref, cost in zip(after.refs, after.costs, strict=True):
            found[plan.prefill.refs[position], ref] = own + cost
    return found


@given(cases())
def test_the_pair_has_the_lowest_sum_of_all_pairs(case: tuple[Router, RoutingRequest]) -> None:
    made, wanted = case
    plan = made.plan(wanted)
    greedy = made.plan(
        wanted, view=made.view(made.config.with_values({"router_pair_selection": "greedy"}))
    )
    assert plan.ok == greedy.ok
    if not plan.ok or plan.prefill is None:
        return
    assert greedy.prefill is not None
    # The candidates are those of greedy: only the choice between them differs.
    assert plan.prefill.refs == greedy.prefill.refs
    assert list(plan.prefill.own_costs) == list(greedy.prefill.own_costs)
    sums = searched(made, wanted, plan)
    lowest = min(sums.values())
    position = plan.prefill.winner
    assert position is not None
    assert plan.prefill.costs[position] == lowest
    assert sums[plan.prefill.ref, decode_of(plan).ref] == lowest
    for place, ref in enumerate(plan.prefill.refs):
        assert plan.prefill.costs[place] == min(c for (p, _), c in sums.items() if p == ref)
    # Every pair of the lowest sum can be drawn, and no other.
    drawn = set()
    for first in range(12):
        for second in range(6):
            one = made.plan(wanted, samples=(first / 12 + 0.01, second / 6 + 0.01))
            if one.prefill is not None:
                drawn.add((one.prefill.ref, decode_of(one).ref))
    exact = {pair for pair, cost in sums.items() if Fraction(cost) == Fraction(lowest)}
    assert drawn <= exact
    if plan.bypass is not None and plan.bypass.drawn:
        return
    if wanted.constraints.preferred or any("preferred" in str(i) for i in plan.implied):
        return  # sums with multipliers are rounded: different sums may look equal
    assert drawn == exact


@given(cases())
def test_the_class_of_a_pair_is_the_narrowest_level_on_which_both_agree(
    case: tuple[Router, RoutingRequest],
) -> None:
    made, wanted = case
    plan = made.plan(wanted)
    if not plan.ok or plan.prefill is None or decode_of(plan).inputs is None:
        return
    inputs = decode_of(plan).inputs
    column = None if inputs is None else inputs.column("transfer")
    levels = None if column is None else column.labels
    table, source = made.transfer, plan.prefill.worker
    assert table is not None
    assert source is not None
    if levels is None:
        assert not (made.config.router_kv_transfer_weight and table.bytes_per_token)
        return
    for one, level in zip(decode_of(plan).workers, levels, strict=True):
        expected = BEYOND
        for name in reversed(table.names):
            here, there = source.domains.get(name), one.domains.get(name)
            if None not in (here, there) and here != there:
                break
            if here is not None and here == there:
                expected = name
        assert level == expected


def test_one_hop_alone_is_chosen_without_what_follows() -> None:
    """In a pool of prefill workers no decode worker is known, so that pairs cannot be compared; a
    worker whose policy cannot be applied is a refusal and no exception."""
    broken = replace(
        worker(2, role="prefill"),
        runtime_config=ModelRuntimeConfig(kv_transfer_domain="zone", validate=False),
    )
    made = router(
        worker(1, role="prefill", zone="a", policy="required"), broken, router_pair_selection="best"
    )
    apply_all(made, active(2, "x", stage="prefill", prefill_tokens=1_000))
    plan = made.plan_hop(request(33), "prefill")
    assert plan.prefill is not None
    assert plan.prefill.worker is not None
    assert plan.prefill.worker.name == "w1"
    apply_all(made, active(1, "y", stage="prefill", prefill_tokens=9_000))
    refused = made.plan_hop(request(33, "r2"), "prefill").prefill
    assert refused is not None
    assert refused.outcome == "policy_underivable"
    assert "worker w2 configured kv_transfer_domain='zone'" in (refused.message or "")
