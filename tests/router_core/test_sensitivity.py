"""An answer that is called certain holds whatever the unknown inputs are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from router_core.changes import ThresholdsSet
from router_core.decision import RoutingPlan
from router_core.router import Router
from router_core.sensitivity import PlanQuestion, Unknown, certain, consequences, waits
from tests.router_core.fleet import MODEL, active, apply_all, request, router, stored, worker

RANGES: dict[str, list[Any]] = {
    "overlap_score_credit": [0.0, 0.5, 2.0],
    "overlap_score_credit_decay": [0.5, 2.0],
    "prefill_load_scale": [0.0, 2.0],
    "decode_active_request_weight": [1.0],
    "router_track_active_blocks": [False],
    "router_track_prefill_tokens": [False],
    "router_assume_kv_reuse": [False],
    "router_temperature": [0.5],
    "router_mode": [
        "least-loaded",
        "round-robin",
        "random",
        "power-of-two",
        "device-aware-weighted",
    ],
    "active_prefill_tokens_threshold": [20],
    "active_decode_blocks_threshold": [0.1],
}
#: Modes that count running requests and do more than compare them.
COUNTING = ("power-of-two", "device-aware-weighted")
SETTINGS = st.lists(st.sampled_from(sorted(RANGES)), max_size=3, unique=True)
#: What one worker has: cached blocks, prefill tokens, blocks of other prompts, this prompt running.
ROWS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 300), st.integers(0, 40), st.booleans()),
    min_size=1,
    max_size=4,
)
DISTANT = [(6, 0, 0, False), (0, 3000, 900, False)]
"""A winner by far, which stays the winner under many settings."""


def fleet(count: int, split: bool, values: dict[str, Any]) -> Router:
    roles = ("prefill", "decode") if split and count > 1 else ("aggregated",)
    workers = (
        worker(
            i,
            role=roles[(i - 1) % len(roles)],
            total_kv_blocks=1000,
            device="cpu" if i % 3 == 0 else None,
        )
        for i in range(1, count + 1)
    )
    return router(*workers, decode_capacity_guard=False, **values)


def book(target: Router, number: int, name: str, tokens: int, blocks: int, running: Any) -> None:
    role = target.registry.get(number)
    assert role is not None
    change = active(number, name, stage=role.role.value, prefill_tokens=tokens, blocks=blocks)
    if running is not None:
        change = replace(change, sequence_hashes=running)
    if tokens or blocks or running is not None:
        apply_all(target, change)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Router, PlanQuestion, list[Unknown]]:
    """(the router as it is, the plan on what is known of it, what is unknown)."""
    wanted = request(draw(st.integers(1, 120)))
    rows = draw(st.one_of(ROWS, st.just(DISTANT)))
    numbers = st.sets(st.integers(1, len(rows)))
    load: Any = draw(st.sampled_from(["known", "more", "fewer", "shared", "prefill"]))
    copies, loaded, stale = draw(st.integers(1, 3)), draw(numbers), draw(numbers)
    names = draw(SETTINGS)
    base: dict[str, Any] = {}
    if draw(st.booleans()):
        base["active_prefill_tokens_threshold"] = draw(st.sampled_from([50, 200, 5000]))
    if draw(st.booleans()):
        base["router_mode"] = draw(st.sampled_from(["least-loaded", *COUNTING]))
        base["encoder_cuda_to_cpu_ratio"] = draw(st.sampled_from([1.0, 2.0]))
    split = draw(st.booleans())
    if split and draw(st.booleans()):
        base["router_pair_selection"] = "best"
    known = fleet(len(rows), split, base)
    values = {name: draw(st.sampled_from(RANGES[name])) for name in names if draw(st.booleans())}
    real = fleet(len(rows), split, base | values)
    for number, (cached, tokens, blocks, running) in enumerate(rows, start=1):
        believed = draw(st.integers(0, 6)) if number in stale else cached
        for target, held in ((real, cached), (known, believed)):
            if held:
                apply_all(target, stored(number, held))
        prompt = wanted.sequence_hashes if running and load in ("known", "shared") else None
        book(real, number, f"own{number}", tokens, blocks, None)
        if prompt is not None:
            book(real, number, f"same{number}", 0, 0, prompt)
        if number in loaded and load == "more":
            tokens, blocks = draw(st.integers(0, tokens)), draw(st.integers(0, blocks))
        elif number in loaded and load == "fewer":
            tokens = draw(st.integers(tokens, tokens * copies))
            blocks = draw(st.integers(blocks, blocks * copies))
        elif number in loaded and load == "prefill":
            tokens = draw(st.integers(tokens, tokens * 9))
        elif number in loaded and load == "shared":
            blocks, prompt = real.load.decode_blocks[real.registry.slots(number)[0]], None
        book(known, number, f"own{number}", tokens, blocks, None)
        if prompt is not None:
            book(known, number, f"same{number}", 0, 0, prompt)
    for stage in ("aggregated", "prefill", "decode"):
        real.rotation[MODEL, stage] = known.rotation.get((MODEL, stage), 0)
        if "router_mode" in values:
            real.rotation[MODEL, stage] = draw(st.integers(0, 3))
    unknowns = [Unknown(settings={name: RANGES[name] for name in names})]
    if load != "known":
        unknowns.append(Unknown(load=load, copies=copies, workers=frozenset(loaded)))
    unknowns.append(Unknown(overlap=True, workers=frozenset(stale)))
    plan = known.plan(wanted)
    return real, PlanQuestion(known, wanted, plan, known.view()), unknowns


def winners(plan: RoutingPlan) -> tuple[Any, ...]:
    return tuple(None if hop is None else hop.ref for hop in (plan.prefill, plan.decode))


@given(worlds(), st.floats(0, 0.999), st.floats(0, 0.999))
@settings(max_examples=600)
def test_a_certain_answer_holds_for_every_value_of_what_is_unknown(
    world: tuple[Router, PlanQuestion, list[Unknown]], first: float, second: float
) -> None:
    real, question, unknowns = world
    claimed = certain(question, unknowns)
    same = winners(real.plan(question.request, samples=(first, second))) == winners(question.plan)
    event(f"certain: {claimed}, the same winner: {same}")
    assert same or not claimed


@given(ROWS, st.integers(1, 120), st.booleans())
def test_without_anything_unknown_only_a_draw_is_uncertain(
    rows: list[tuple[int, int, int, bool]], tokens: int, split: bool
) -> None:
    made, wanted = fleet(len(rows), split, {}), request(tokens)
    for number, (cached, prefill, blocks, _) in enumerate(rows, start=1):
        if cached:
            apply_all(made, stored(number, cached))
        book(made, number, f"own{number}", prefill, blocks, None)
    plan = made.plan(wanted)
    drawn = any(hop.tied for hop in (plan.prefill, plan.decode) if hop is not None)
    assert certain(PlanQuestion(made, wanted, plan, made.view()), [Unknown()]) is not drawn


def asked(*rows: tuple[int, int, int], tokens: int = 64, **values: Any) -> PlanQuestion:
    """The plan of a prompt on workers with (cached blocks, prefill tokens, blocks)."""
    made, wanted = fleet(len(rows), False, values), request(tokens)
    for number, (cached, prefill, blocks) in enumerate(rows, start=1):
        if cached:
            apply_all(made, stored(number, cached))
        book(made, number, f"own{number}", prefill, blocks, None)
    return PlanQuestion(made, wanted, made.plan(wanted), made.view())


def test_a_setting_is_named_with_the_value_that_changes_the_winner() -> None:
    """w1 has the prompt and is loaded; without credit for cached blocks w2 wins."""
    question = asked((4, 32, 0), (0, 0, 0))
    found = list(consequences(question, Unknown({"overlap_score_credit": [0.9, 0.0]})))
    assert [(one.setting, one.value, one.worker) for one in found] == [
        ("overlap_score_credit", 0.0, "w2")
    ]
    assert not list(consequences(question, Unknown({"prefill_load_scale": [2.0, 4.0]})))


def test_an_unknown_temperature_gives_the_share_of_the_winner() -> None:
    question = asked((4, 0, 0), (0, 0, 0))
    [found] = consequences(question, Unknown({"router_temperature": [0.5]}))
    assert found.worker == "w2"
    assert found.share is not None
    assert round(found.share, 3) == 0.881  # 1 / (1 + exp(-1 / 0.5))
    assert not list(consequences(asked((4, 0, 0)), Unknown({"router_temperature": [0.5]})))


def test_the_turn_of_another_router_is_unknown() -> None:
    question = asked((4, 0, 0), (0, 0, 0), (0, 0, 0))
    [found] = consequences(question, Unknown({"router_mode": ["round-robin"]}))
    assert (found.worker, found.share) == ("w2", 1 / 3)
    assert not list(consequences(asked((4, 0, 0)), Unknown({"router_mode": ["round-robin"]})))


def test_two_settings_that_change_nothing_alone_can_change_the_winner_together() -> None:
    """w1 has the prompt, 4 blocks, and 3 other blocks. Each setting alone leaves it ahead."""
    question = asked((4, 0, 3), (0, 0, 0), (0, 0, 100))
    scale = Unknown({"prefill_load_scale": [1.0, 0.9]})
    credit = Unknown({"overlap_score_credit": [1.0, 0.8]})
    assert not list(consequences(question, scale))
    assert not list(consequences(question, credit))
    assert certain(question, [scale])
    assert certain(question, [credit])
    assert not certain(question, [scale, credit])


def test_sums_hide_blocks_that_the_prompt_shares() -> None:
    """w2 decodes a prompt of 4 blocks; if it is this one, it costs 4 blocks less."""
    shared = Unknown(load="shared")
    near, far = asked((0, 0, 1), (0, 0, 4)), asked((0, 0, 1), (0, 0, 6))
    assert [one.worker for one in consequences(near, shared)] == ["w2"]
    assert not list(consequences(far, shared))
    assert certain(far, [shared])


def test_load_that_is_not_counted_can_make_any_winner_lose_but_the_only_one() -> None:
    more = Unknown(load="more")
    assert [one.worker for one in consequences(asked((4, 0, 0), (0, 0, 9)), more)] == ["w2"]
    assert certain(asked((0, 0, 0)), [more])
    busy = asked((0, 0, 0), active_prefill_tokens_threshold=100)
    assert [one.worker for one in consequences(busy, more)] == [None]
    assert not certain(busy, [more])


def test_load_that_is_counted_twice_can_make_a_busy_worker_eligible() -> None:
    question = asked((4, 150, 0), (0, 0, 0), active_prefill_tokens_threshold=100)
    assert winners(question.plan)[1].worker_id == 2
    assert [one.worker for one in consequences(question, Unknown(load="fewer", copies=2))] == [None]


def test_prefill_that_falls_unseen_can_make_a_worker_cheaper_or_eligible() -> None:
    prefill = Unknown(load="prefill")
    near, far = asked((0, 0, 3), (0, 160, 0)), asked((0, 0, 3), (0, 160, 4))
    assert [one.worker for one in consequences(near, prefill)] == ["w2"]
    assert not list(consequences(far, prefill))  # its blocks alone are dearer
    assert certain(far, [prefill])
    assert certain(near, [replace(prefill, workers=frozenset({1}))])
    busy = asked((4, 150, 0), (0, 0, 0), active_prefill_tokens_threshold=100)
    assert [one.worker for one in consequences(busy, prefill)] == [None]


def test_an_index_that_is_out_of_date_counts_for_its_workers_only() -> None:
    question = asked((2, 0, 0), (0, 0, 0), (0, 0, 9))
    assert [one.worker for one in consequences(question, Unknown(overlap=True))] == ["w2"]
    third = Unknown(overlap=True, workers=frozenset({3}))
    assert not list(consequences(question, third))
    assert certain(question, [third])


def test_a_request_waits_where_every_candidate_is_over_the_queue_threshold() -> None:
    question = asked((0, 200, 0), (0, 300, 0))
    hop = question.plan.final
    assert hop.workers[0].runtime_config.max_num_batched_tokens is None
    assert waits(hop, 0.00001)
    assert not waits(hop, 1.0)
    assert not waits(hop, None)
    [found] = consequences(question, Unknown({"router_queue_threshold": [0.00001]}))
    assert (found.setting, found.worker) == ("router_queue_threshold", None)


def test_too_many_combinations_are_not_certain() -> None:
    question = asked((4, 0, 0), (0, 0, 900))
    many = Unknown(
        {
            "overlap_score_credit": [0.5 + i / 1000 for i in range(700)],
            "prefill_load_scale": [1 + i / 1000 for i in range(700)],
        }
    )
    assert not list(consequences(question, many))
    assert not certain(question, [many])


def test_a_worker_outside_of_a_draw_can_win_where_running_requests_are_unknown() -> None:
    made = router(worker(1), worker(2), worker(3), router_mode="least-loaded")
    apply_all(made, active(3, "x"))
    plan = made.plan(request(32))
    asked = PlanQuestion(made, request(32), plan, made.view())
    (found,) = consequences(asked, Unknown(load="more"))
    assert found.worker == "w3"
    assert not list(consequences(asked, Unknown(overlap=True)))


def test_a_tie_does_not_hide_that_a_third_worker_can_win() -> None:
    """w1 and w2 cost the same; w3 wins only where both of them have load that is not counted."""
    question = asked((0, 0, 0), (0, 0, 0), (0, 0, 4))
    assert question.plan.final.tied
    more = Unknown(load="more")
    assert [one.worker for one in consequences(question, more)] == ["w3"]
    one_of_both = replace(more, workers=frozenset({1}))
    assert not list(consequences(question, one_of_both))
    cached = Unknown(overlap=True, workers=frozenset({3}))
    assert [one.worker for one in consequences(question, cached)] == ["w3"]


def test_the_thresholds_of_a_model_matter_for_its_aliases_too() -> None:
    """More load than is counted may make the winner busy, under whichever name it is asked for."""
    made = router(*(replace(worker(number), aliases=("other",)) for number in (1, 2)))
    apply_all(
        made,
        ThresholdsSet(MODEL, {"active_prefill_tokens_threshold": 1_000_000}),
        active(2, "x", prefill_tokens=1 << 41),
    )
    for model in (MODEL, "other"):
        asked = replace(request(33), model=model)
        question = PlanQuestion(made, asked, made.plan(asked), made.view())
        unknown = Unknown(load="more", workers=frozenset())
        assert [one.worker for one in consequences(question, unknown)] == [None], model
