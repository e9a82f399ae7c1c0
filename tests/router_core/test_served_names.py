"""Workers that serve several names, and requests that are limited to one set of workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core import Router, RoutingRequest, Session, Worker, WorkerLost, WorkerUpserted
from tests.router_core.fleet import MODEL, prompt, request, router, worker


def named(worker_id: int, *sets: str, role: str = "aggregated", **lists: Any) -> Worker:
    return replace(worker(worker_id, role=role), worker_sets=sets, **lists)


def chosen_from(made: Router, **fields: Any) -> set[str]:
    plan = made.plan(replace(request(40), **fields), detail=True)
    return {one.name for one in plan.final.workers}


def test_a_worker_is_reached_by_its_model_its_aliases_and_its_adapters() -> None:
    made = router(named(1, aliases=("other",)), named(2, adapters=("law",)), named(3))
    assert made.registry.models() == (MODEL,)
    assert set(made.registry.served_names()) == {MODEL, "other", "law"}
    assert chosen_from(made) == {"w1", "w2", "w3"}
    assert chosen_from(made, model="other") == {"w1"}
    assert chosen_from(made, model="law") == {"w2"}
    made.apply(WorkerUpserted(named(2)), 1.0)
    assert made.plan(replace(request(40), model="law")).final.outcome == "no_workers"
    made.apply(WorkerLost(1), 2.0)
    assert made.registry.served_names() == (MODEL,)


def test_a_set_of_workers_limits_the_candidates_and_is_a_step_of_the_funnel() -> None:
    made = router(named(1, "a"), named(2, "b"), named(3))
    decision = made.plan(replace(request(40), worker_set="b"), detail=True).final
    assert decision.worker is not None
    assert decision.worker.name == "w2"
    step = next(step for step in decision.funnel if step.filter == "worker_set")
    reasons = {one.worker.name: one.reason.message for one in step.rejected}
    assert reasons == {
        "w1": "belongs to the worker set a",
        "w3": "belongs to no worker set",
    }
    assert "worker_set" not in {step.filter for step in made.plan(request(40)).final.funnel}


def test_the_hops_are_those_of_the_set() -> None:
    made = router(
        named(1, "together"), named(2, "apart", role="prefill"), named(3, "apart", role="decode")
    )
    assert made.stages(MODEL, "together") == ("aggregated",)
    assert made.stages(MODEL, "apart") == ("prefill", "decode")
    apart = made.plan(replace(request(40), worker_set="apart"))
    assert apart.prefill is not None
    assert apart.prefill.worker is not None
    assert apart.final.worker is not None
    assert (apart.prefill.worker.name, apart.final.worker.name) == ("w2", "w3")


@pytest.mark.seed("dep-topology: future work: multi-pool")
def test_the_transfer_constraint_applies_inside_each_set() -> None:
    def of_pool(worker_id: int, pool: str, role: str, zone: str) -> Worker:
        made = worker(worker_id, role=role, zone=zone, policy="required")
        return replace(made, worker_sets=(pool,))

    fleet = [
        *(of_pool(1, "short", "prefill", "a"), of_pool(2, "short", "decode", "a")),
        *(of_pool(3, "short", "decode", "b"), of_pool(4, "long", "prefill", "b")),
        *(of_pool(5, "long", "decode", "a"), of_pool(6, "long", "decode", "b")),
    ]
    made = router(*fleet)
    for pool, expected in (("short", ["w1", "w2"]), ("long", ["w4", "w6"])):
        plan = made.plan(replace(request(40), worker_set=pool))
        hops = (plan.prefill, plan.final)
        assert [hop.worker.name for hop in hops if hop and hop.worker] == expected


def test_other_names_and_sets_survive_a_snapshot() -> None:
    made = router(named(1, "a", aliases=("other",), adapters=("law",)), named(2, "b"))
    again = Router.restore(made.snapshot())
    assert list(again.registry) == list(made.registry)
    assert again.registry.worker_set("a") == made.registry.worker_set("a")
    assert "worker_sets" not in router(worker(1)).snapshot()["registry"]["workers"][0]


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (16, 0), (17, 1), (32, 1), (33, 2), (48, 2)]
)
def test_a_block_of_speculative_decoding_needs_the_token_behind_it(
    tokens: int, blocks: int
) -> None:
    made = RoutingRequest("r", MODEL, tokens, 16, is_eagle=True)
    assert made.prompt_blocks == blocks
    assert len(prompt(tokens)) == tokens


NAMES = st.lists(st.sampled_from(["x", "y", "z"]), max_size=2, unique=True).map(tuple)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.booleans(), NAMES, NAMES, NAMES), min_size=1, max_size=12
    )
)
def test_masks_are_those_of_the_registered_workers(
    steps: list[tuple[int, bool, tuple[str, ...], tuple[str, ...], tuple[str, ...]]],
) -> None:
    """However workers come, change and go, each name reaches exactly the workers that serve it."""
    made = Router()
    for worker_id, comes, aliases, adapters, sets in steps:
        change = named(worker_id, *sets, aliases=aliases, adapters=adapters)
        made.apply(WorkerUpserted(change) if comes else WorkerLost(worker_id), 0.0)
    registry = made.registry
    present = list(registry)
    for name in (MODEL, "x", "y", "z"):
        serving = {w.worker_id for w in present if name in w.served_names}
        assert registry.model(name) == registry.mask_of(serving)
        members = {w.worker_id for w in present if name in w.worker_sets}
        assert registry.worker_set(name) == registry.mask_of(members)
    assert set(registry.served_names()) == {name for w in present for name in w.served_names}
    assert set(registry.models()) == {w.model for w in present}


@given(
    st.lists(
        st.tuples(st.sampled_from(["aggregated", "prefill", "decode"]), NAMES, NAMES),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["x", "y", "z"]),
    st.booleans(),
)
def test_the_workers_of_a_request_serve_its_name_or_say_that_they_do_not(
    rows: list[tuple[str, tuple[str, ...], tuple[str, ...]]], name: str, queued: bool
) -> None:
    """Whatever names the workers of a model have, no hop goes to a worker without the name."""
    workers = [
        named(number, role=role, aliases=aliases, adapters=adapters)
        for number, (role, aliases, adapters) in enumerate(rows, 1)
    ]
    made = router(*workers, **({"router_queue_threshold": 1.0} if queued else {}))
    plan = made.plan(replace(request(40), served_name=name), detail=True)
    for hop in (plan.prefill, plan.decode):
        if hop is None:
            continue
        assert all(name in one.served_names for one in hop.workers)
        step = next(step for step in hop.funnel if step.filter == "served_name")
        without = {one.name for one in workers if name not in one.served_names}
        assert {one.worker.name for one in step.rejected} == without
        assert {one.reason.message for one in step.rejected} <= {f"does not serve the name {name}"}
    serving = {one.role.value for one in workers if name in one.served_names}
    if not serving:
        assert plan.final.outcome == "no_workers"
        assert plan.final.summary() == f"no worker of model '{MODEL}' serves the name '{name}'"
    if "aggregated" in serving or {"prefill", "decode"} <= serving:
        assert plan.ok


def test_a_pool_of_prefill_workers_without_the_name_is_not_used_for_it() -> None:
    made = router(
        named(1, role="prefill"),
        named(2, role="decode"),
        named(3, aliases=("other",)),
    )
    assert made.stages(MODEL) == ("prefill", "decode")
    assert made.stages(MODEL, None, "other") == ("aggregated",)
    plan = made.plan(replace(request(40), served_name="other"))
    assert (plan.prefill, plan.final.worker and plan.final.worker.name) == (None, "w3")
    made.apply(WorkerUpserted(named(1, role="prefill", aliases=("third",))), 0.0)
    alone = made.plan(replace(request(40), served_name="third"))
    assert alone.final.summary() == f"no decode worker of model '{MODEL}' serves the name 'third'"
    hop = made.plan_hop(replace(request(40), served_name="third"), "decode")
    assert hop.final.summary() == f"no decode worker of model '{MODEL}' serves the name 'third'"


def test_requests_for_an_alias_or_an_adapter_take_turns_as_those_for_the_model() -> None:
    made = router(
        *(named(number, aliases=("other",), adapters=("law",)) for number in (1, 2, 3)),
        router_mode="round-robin",
    )
    names = []
    for number, model in enumerate((MODEL, "other", "other", "law", MODEL, "law")):
        asked = replace(request(40, f"r{number}"), model=model)
        decision = made.plan(asked).final
        assert decision.worker is not None
        names.append(decision.worker.name)
        assert made.apply(made.booking(decision, asked), 0.0).ok
    assert names == ["w1", "w2", "w3", "w1", "w2", "w3"]


def test_the_session_of_an_alias_is_that_of_its_model() -> None:
    made = router(
        *(named(number, aliases=("other",)) for number in (1, 2, 3)),
        router_session_affinity_ttl_secs=60.0,
    )
    for number, model in enumerate(("other", MODEL, "other")):
        asked = replace(request(40, f"r{number}"), model=model, session=Session("s", 0.0))
        decision = made.plan(asked).final
        assert (decision.session is not None) == (number > 0)
        assert decision.worker is not None
        assert decision.worker.name == "w1", "although it has the most load"
        assert made.apply(made.booking(decision, asked), 0.0).ok
