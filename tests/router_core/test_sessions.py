"""Session affinity: what binds a session, when it stays, and to what it yields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import router_core.changes as c
from router_core.decision import Decision
from router_core.router import Router
from router_core.routing_view import Pin
from router_core.sessions import Session, SessionTable
from router_core.workers import WorkerWithDpRank
from tests.router_core.fleet import MODEL, apply_all, request, router, worker

TTL = {"router_session_affinity_ttl_secs": 60.0}
SOFT = {**TTL, "router_session_affinity_mode": "soft"}


def fleet(**settings: Any) -> Router:
    return router(*(worker(number) for number in (1, 2, 3)), **{**TTL, **settings})


def routed(
    made: Router, name: str, at: float, *, session: str | None = "s", **more: Any
) -> Decision:
    """Route and book a request of the session; it ends at once."""
    asked = replace(request(33, name, seed=sum(name.encode())), **more)
    if session is not None:
        asked = replace(asked, session=Session(session, at))
    plan = made.plan(asked)
    for hop in (plan.prefill, plan.decode):
        if hop is not None:
            assert made.apply(made.booking(hop, asked), at).ok
    made.apply(c.Freed(name), at)
    return plan.final


def load(made: Router, worker_id: int, blocks: int) -> None:
    name = f"load {worker_id} {len(made.load)}"
    booked = c.Booked(name, "aggregated", worker_id, 0, anonymous_blocks=blocks)
    assert made.apply(booked, 0.0).ok


@pytest.mark.seed("dynamo-1.6: session affinity: hard")
def test_a_session_stays_with_its_worker_whatever_it_costs() -> None:
    made = fleet()
    first = routed(made, "a", 0.0)
    assert first.session is None
    assert first.worker is not None
    load(made, first.worker.worker_id, 500)
    again = routed(made, "b", 26.0)
    assert again.ref == first.ref
    assert again.session_kept
    assert again.session is not None
    assert (again.session.name, again.session.left_s) == (first.worker.name, 34.0)
    assert (again.funnel[-1].filter, again.funnel[-1].entered, again.funnel[-1].left) == (
        "session",
        3,
        1,
    )
    other = routed(made, "c", 26.0, session="t")
    assert other.ref != first.ref, "another session goes by cost"
    without = routed(made, "d", 26.0, session=None)
    assert (without.ref != first.ref, without.session) == (True, None)


@pytest.mark.seed("dynamo-1.6: session affinity: idle TTL")
def test_a_binding_ends_its_time_after_the_last_request_has_ended() -> None:
    made = fleet()
    first = routed(made, "a", 0.0)
    assert first.worker is not None
    load(made, first.worker.worker_id, 500)
    assert routed(made, "b", 59.0).session_kept
    running = replace(request(33, "long"), session=Session("s", 118.0))
    made.apply(made.booking(made.plan(running).final, running), 118.0)
    made.sweep(now=1_000.0)
    assert routed(made, "c", 1_000.0).session_kept, "a request of it runs"
    made.apply(c.Freed("long"), 2_000.0)
    assert routed(made, "d", 2_059.0).session_kept
    moved = routed(made, "e", 2_119.0)
    assert moved.session is None
    assert moved.ref != first.ref
    made.sweep(now=5_000.0)
    assert len(made.sessions) == 0


@pytest.mark.parametrize("how", ["busy", "available", "allowed", "lost"])
def test_a_session_yields_to_a_worker_that_cannot_answer(how: str) -> None:
    made = fleet(active_decode_blocks_threshold=0.5)
    apply_all(made, *(c.WorkerUpserted(worker(n, total_kv_blocks=100)) for n in (1, 2, 3)))
    first = routed(made, "a", 0.0)
    assert first.worker is not None
    chosen = first.worker.worker_id
    more: dict[str, Any] = {}
    if how == "busy":
        apply_all(made, c.LoadReported(chosen, 0, kv_used_blocks=90))
    elif how == "available":
        apply_all(made, c.WorkerAvailability(chosen, "no response"))
    elif how == "allowed":
        more["allowed_worker_ids"] = frozenset({1, 2, 3} - {chosen})
    else:
        apply_all(made, c.WorkerLost(chosen))
    moved = routed(made, "b", 1.0, **more)
    assert moved.worker is not None
    assert moved.worker.worker_id != chosen
    if how == "lost":
        assert moved.session is None
    else:
        assert moved.session is not None
        assert (moved.session.excluded, moved.session_kept) == (how, False)
    assert routed(made, "c", 2.0).ref == moved.ref, "it moved there"


@pytest.mark.seed("dynamo-1.6: session affinity: pins")
def test_a_pin_wins_and_moves_no_session() -> None:
    """As the SelectionService of Dynamo 1.6.1 does."""
    made = fleet()
    first = routed(made, "a", 0.0)
    assert first.worker is not None
    other = first.worker.worker_id % 3 + 1
    pinned = routed(made, "b", 1.0, pin_decode=Pin(other))
    assert pinned.worker is not None
    assert pinned.worker.worker_id == other
    assert pinned.session is None
    assert routed(made, "c", 2.0).ref == first.ref


def test_only_bookings_bind() -> None:
    made = fleet()
    for number in range(3):
        made.plan(replace(request(33, f"r{number}"), session=Session("s", 0.0)))
    assert len(made.sessions) == 0


@pytest.mark.seed("dynamo-1.6: session affinity: both hops")
def test_both_hops_keep_their_worker() -> None:
    workers = [worker(n, role="prefill" if n < 3 else "decode") for n in (1, 2, 3, 4)]
    made = router(*workers, **TTL)
    routed(made, "a", 0.0)
    asked = replace(request(33, "b"), session=Session("s", 1.0))
    plan = made.plan(asked)
    assert plan.prefill is not None
    assert plan.decode is not None
    for hop in (plan.prefill, plan.decode):
        assert hop.session_kept
        assert hop.worker is not None
        booked = c.Booked(hop.stage, hop.stage, hop.worker.worker_id, 0, 9_000, (), 900)
        assert made.apply(booked, 1.0).ok
    again = made.plan(asked)
    assert again.prefill is not None
    assert again.decode is not None
    assert (again.prefill.ref, again.decode.ref) == (plan.prefill.ref, plan.decode.ref)


@pytest.mark.parametrize("mode", ["round-robin", "random", "least-loaded"])
@pytest.mark.parametrize("affinity", ["hard", "soft"])
def test_sessions_stay_in_every_mode(mode: str, affinity: str) -> None:
    made = fleet(router_mode=mode, router_session_affinity_mode=affinity)
    first = routed(made, "a", 0.0)
    for number in range(6):
        decision = made.plan(
            replace(request(33, f"r{number}"), session=Session("s", 1.0)), samples=(0.9, 0.9)
        ).final
        assert decision.ref == first.ref
        assert decision.replay().ref == first.ref


@pytest.mark.seed("dynamo-1.6: session affinity: soft")
@given(st.lists(st.integers(0, 200), min_size=3, max_size=3), st.sampled_from([0.0, 16.0, 64.0]))
def test_a_soft_session_stays_until_it_costs_more_than_its_bound(
    loads: list[int], bound: float
) -> None:
    made = router(
        *(worker(n) for n in (1, 2, 3)), **SOFT, router_session_affinity_yield_blocks=bound
    )
    first = routed(made, "a", 0.0)
    for number, blocks in enumerate(loads, 1):
        load(made, number, blocks)
    free = made.plan(request(33, "free")).final
    asked = replace(request(33, "b"), session=Session("s", 1.0))
    decision = made.plan(asked).final
    assert first.ref is not None
    at = list(free.refs).index(first.ref)
    extra = free.costs[at] - min(free.costs)
    if extra < bound:
        assert decision.session_kept
    elif extra > bound:
        assert decision.ref in {free.refs[i] for i in (free.tied or (free.winner or 0,))}
        assert not decision.session_kept
    assert decision.replay().costs == decision.costs
    assert [
        cost - more for cost, more in zip(decision.costs, _added(decision), strict=True)
    ] == pytest.approx(free.costs)


def _added(decision: Decision) -> list[float]:
    assert decision.inputs is not None
    column = decision.inputs.column("session_affinity")
    assert column is not None
    return list(column.values)


def test_a_snapshot_keeps_the_sessions() -> None:
    made = fleet()
    routed(made, "a", 0.0)
    asked = replace(request(33, "b"), session=Session("s", 1.0))
    first = made.plan(asked).final
    made.apply(made.booking(first, asked), 1.0)
    again = Router.restore(made.snapshot())
    assert again.plan(asked).final.session == made.plan(asked).final.session
    again.apply(c.Freed("b"), 500.0)
    assert again.plan(replace(asked, session=Session("s", 559.0))).final.session_kept


def test_switching_it_off_forgets_the_sessions() -> None:
    made = fleet()
    routed(made, "a", 0.0)
    apply_all(made, c.ConfigSet({"router_session_affinity_ttl_secs": None}))
    assert len(made.sessions) == 0
    assert routed(made, "b", 1.0).session is None
    assert len(made.sessions) == 0


def test_the_table_is_bounded() -> None:
    table = SessionTable(60.0, most=100)
    for number in range(1_000):
        ref = WorkerWithDpRank(number)
        table.bind(f"s{number}", MODEL, "decode", ref, f"r{number}", float(number) / 1_000)
        table.end(f"r{number}", "decode", float(number) / 1_000)
    assert len(table) == 100
    assert table.find(Session("s999", 1.0), MODEL, "decode") is not None
    assert table.find(Session("s0", 1.0), MODEL, "decode") is None
    assert table.find(Session("s999", 1.0), "another model", "decode") is None
    table.expire(100.0)
    assert len(table) == 0


SESSION_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("book"), st.sampled_from("abcd"), st.sampled_from("xy")),
        st.tuples(st.just("free"), st.sampled_from("abcd")),
        st.tuples(st.just("lose"), st.integers(1, 3)),
        st.tuples(st.just("back"), st.integers(1, 3)),
        st.tuples(st.just("expire")),
    ),
    max_size=30,
)


@given(SESSION_STEPS)
def test_the_requests_of_a_session_are_those_that_are_booked(steps: list[tuple[Any, ...]]) -> None:
    """However requests end, also with their worker: none keeps a binding for ever."""
    made = fleet()
    for at, step in enumerate(steps):
        match step:
            case ("book", name, session):
                asked = replace(request(33, name), session=Session(session, float(at)))
                decision = made.plan(asked).final
                if decision.winner is not None:
                    made.apply(made.booking(decision, asked), float(at))
            case ("free", name):
                made.apply(c.Freed(name), float(at))
            case ("lose", number):
                made.apply(c.WorkerLost(number), float(at))
            case ("back", number):
                made.apply(c.WorkerUpserted(worker(number)), float(at))
            case _:
                made.apply(c.Expired(), float(at))
        booked = {(one.request_id, one.stage) for one in made.load}
        assert made.sessions.running.keys() == booked
        bound = made.sessions._bound.values()
        assert sum(one.running for one in bound) == len(booked)
    for name in "abcd":
        made.apply(c.Freed(name), 100.0)
    made.sweep(now=1_000.0)
    assert len(made.sessions) == 0
