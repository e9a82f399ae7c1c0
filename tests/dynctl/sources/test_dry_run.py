"""Dry runs: the request that a body makes, and worker sets that are drawn before the worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import UNSET

from dynctl.base.errors import UsageProblem
from dynctl.documents.doubts import Varies, doubt
from dynctl.documents.route_result import RouteResult
from dynctl.documents.view import SavedView
from dynctl.screens.canvas import Canvas
from dynctl.screens.route import ExplainScreen, route_short
from dynctl.sources.demo.fleet import MODEL, DemoSource
from dynctl.sources.dry_run import DryRun
from dynctl.sources.query import RouteQuery
from dynctl.sources.view import ViewSource, open_view_bytes
from dynctl.tokenization import DEMO_MODEL_DIR, encode_as_dynamo, load_tokenizer
from router_core import (
    BlocksStored,
    Booked,
    ConfigSet,
    KvEvent,
    ModelRuntimeConfig,
    PrefillDone,
    Role,
    Router,
    RouterConfig,
    Worker,
    WorkerAvailability,
    WorkerUpserted,
    hash_prompt,
)
from router_core.cost import draw_two

CHAT = [{"role": "user", "content": "What is the weather in Rome?"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TOKENS = list(range(100, 164))


def dynamo(*workers: Worker, **view: Any) -> SavedView:
    """The view of a live Dynamo with these workers."""
    router = Router()
    for worker in workers:
        assert router.apply(WorkerUpserted(worker), 0.0).ok
    return SavedView(router, 1.0, "dynamo-1.6", chats="dynamo", **view)


def member(worker_id: int, *sets: str, role: str = "aggregated", **more: Any) -> Worker:
    return Worker(worker_id, f"w{worker_id}", "tiny", Role(role), worker_sets=sets, **more)


def answer(view: SavedView, **query: Any) -> RouteResult:
    if not query.keys() & {"body", "messages", "prompt", "token_ids"}:
        query["token_ids"] = TOKENS
    return ViewSource(view, "test").route(RouteQuery(**query))


def codes(result: RouteResult) -> list[str]:
    return [one.code for one in result.doubts]


# -- bodies ----------------------------------------------------------------------------------------


def demo_as_dynamo() -> SavedView:
    view = DemoSource().view
    return SavedView(view.router, view.now, view.preset, view.model_paths, chats="dynamo")


def test_a_body_is_rendered_with_its_tools_and_arguments() -> None:
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    plain = DryRun(demo_as_dynamo(), RouteQuery(body={"messages": CHAT})).tokens
    assert plain == encode_as_dynamo(tokenizer, CHAT)
    for fields in ({"tools": [TOOL]}, {"add_generation_prompt": False}):
        found = DryRun(demo_as_dynamo(), RouteQuery(body={"messages": CHAT, **fields})).tokens
        assert found == encode_as_dynamo(tokenizer, CHAT, **fields)
    ended = [*CHAT, {"role": "assistant", "content": "It is"}]
    body = {"messages": ended, "continue_final_message": True, "add_generation_prompt": False}
    found = DryRun(demo_as_dynamo(), RouteQuery(body=body)).tokens
    assert tokenizer.decode(found).endswith("It is")


def test_a_body_and_its_parts_are_one_request() -> None:
    view = dynamo(member(1), member(2))
    # Dynamo uses token_data in place of a text, not in place of token ids.
    given = {"token_data": TOKENS[:40]}
    assert answer(view, body={"model": "tiny", "prompt": "text", "nvext": given}).tokens == 40
    assert answer(view, body={"prompt": TOKENS, "nvext": given}).tokens == len(TOKENS)
    assert answer(view, body={"prompt": TOKENS}).tokens == len(TOKENS)
    with pytest.raises(UsageProblem, match="no such model; served: tiny"):
        answer(view, body={"prompt": TOKENS, "model": "other"})
    with pytest.raises(UsageProblem, match="invalid request: max_tokens"):
        answer(view, body={"prompt": TOKENS, "max_tokens": "many"})
    body = {"messages": CHAT, "model": MODEL, "documents": [{"text": "a"}]}
    with pytest.raises(UsageProblem, match="Dynamo frontend refuses this field"):
        DryRun(demo_as_dynamo(), RouteQuery(body=body))


def test_pins_and_constraints_of_the_body_reach_the_decision() -> None:
    tainted = ModelRuntimeConfig(taints=frozenset({"gpu=a"}))
    view = dynamo(member(1), member(2, runtime_config=tainted), member(3))
    pinned = answer(view, body={"prompt": TOKENS, "nvext": {"backend_instance_id": 3}})
    assert pinned.winner.decode is not None
    assert pinned.winner.decode.worker == "w3"
    taints = {"routing_constraints": {"required_taints": ["gpu=a"]}}
    required = answer(view, body={"prompt": TOKENS, "nvext": taints})
    assert required.winner.decode is not None
    assert required.winner.decode.worker == "w2"
    over = answer(
        view, body={"prompt": TOKENS, "nvext": {"backend_instance_id": 3}}, pin_decode="w1"
    )
    assert over.winner.decode is not None
    assert over.winner.decode.worker == "w1"
    # Dynamo has no prefill hop here, and ignores its pin.
    ignored = answer(view, body={"prompt": TOKENS, "nvext": {"prefill_worker_id": 3}})
    assert ignored.decode is not None
    assert len(ignored.decode.candidates) == 3
    with pytest.raises(UsageProblem, match="not registered: Dynamo answers 400"):
        answer(view, body={"prompt": TOKENS, "nvext": {"backend_instance_id": 9}})


def test_a_refusal_has_the_status_of_dynamo() -> None:
    view = dynamo(member(1), member(2))

    def status(**query: Any) -> int | None:
        result = answer(view, **query)
        assert not result.ok
        assert f"answers {result.status})" in route_short(result, Canvas(width=200))
        return result.status

    assert answer(view).status is None
    assert status(required=("gpu=x",)) == 500
    assert status(pin_decode="w1", required=("gpu=x",)) == 500
    for worker_id in (1, 2):
        view.router.apply(WorkerAvailability(worker_id, "namespace ns is not ready"), 1.0)
    assert status() == 503
    split = dynamo(member(1, "s", role="prefill"), member(2, "s", role="decode"))
    assert answer(split, pin_prefill="w2").status == 400


def test_dynamo_refuses_the_old_pin_where_prefill_is_separate() -> None:
    view = dynamo(member(1, "s", role="prefill"), member(2, "s", role="decode"))
    with pytest.raises(UsageProblem, match="refuses it with 400"):
        answer(view, body={"prompt": TOKENS, "nvext": {"backend_instance_id": 2}})
    assert answer(view, body={"prompt": TOKENS, "nvext": {"decode_worker_id": 2}}).ok


def test_the_salt_of_nvext_wins_in_dynamo() -> None:
    view = dynamo(member(1))
    for body, salt in (
        ({"cache_salt": "a"}, "a"),
        ({"nvext": {"cache_salt": "b"}}, "b"),
        ({"cache_salt": "a", "nvext": {"cache_salt": "b"}}, "b"),
        ({}, None),
    ):
        found = DryRun(view, RouteQuery(body={"prompt": TOKENS, **body})).hashes()
        assert found == hash_prompt(TOKENS, 16, cache_namespace=salt)
    typed = RouteQuery(body={"prompt": TOKENS, "nvext": {"cache_salt": "b"}}, cache_salt="c")
    assert DryRun(view, typed).hashes() == hash_prompt(TOKENS, 16, cache_namespace="c")


def test_several_prompts_are_a_doubt_and_the_first_is_shown() -> None:
    result = answer(dynamo(member(1)), body={"prompt": [TOKENS, TOKENS[:20]]})
    assert (codes(result), result.tokens, result.certain) == (["DYR0720"], len(TOKENS), False)


@pytest.mark.parametrize(
    ("card", "doubted"),
    [
        ({}, False),
        ({"context_length": 65}, False),
        ({"context_length": 64}, True),
        ({"total_kv_blocks": 4}, True),
        ({"total_kv_blocks": 5, "context_length": 100}, False),
    ],
)
def test_a_prompt_over_the_length_is_doubted(card: Any, doubted: bool) -> None:
    result = answer(dynamo(member(1, runtime_config=ModelRuntimeConfig(**card))))
    assert ("DYR0721" in codes(result)) is doubted
    assert result.certain is not doubted


# -- names -----------------------------------------------------------------------------------------


def test_an_adapter_has_its_own_hashes_and_workers() -> None:
    view = dynamo(member(1, adapters=("law",)), member(2, adapters=("law",)), member(3))
    hashes = hash_prompt(TOKENS, 16, lora_name="law")
    stored = KvEvent(2, 0, BlocksStored(None, hashes.sequence, hashes.local))
    assert view.router.apply(stored, 1.0).ok
    result = answer(view, model="law")
    assert result.decode is not None
    held = {row.worker: row.overlap_blocks for row in result.decode.candidates}
    assert held == {"w1": 0, "w2": 4}
    base = answer(view).decode
    assert base is not None
    assert {row.overlap_blocks for row in base.candidates} == {0}


def test_an_alias_is_another_name_of_the_model() -> None:
    view = dynamo(member(1, aliases=("other",)), member(2))
    found = answer(view, model="other").decode
    assert found is not None
    assert [row.worker for row in found.candidates] == ["w1"]


def test_speculative_workers_count_blocks_with_the_token_behind_them() -> None:
    card = ModelRuntimeConfig(enable_eagle=True)
    view = dynamo(member(1, runtime_config=card))
    hashes = hash_prompt(TOKENS, 16, is_eagle=True)
    view.router.apply(KvEvent(1, 0, BlocksStored(None, hashes.sequence, hashes.local)), 1.0)
    result = answer(view)
    assert result.blocks == 3
    assert result.decode is not None
    [row] = result.decode.candidates
    # As Dynamo 1.6.1: 64 / 16 - 3 cached + 3 blocks of decode.
    assert (row.overlap_blocks, row.cost) == (3, 64 / 16 - 3 + 3)


# -- worker sets -----------------------------------------------------------------------------------


def two_sets() -> SavedView:
    return dynamo(member(1, "ns/a"), member(2, "ns/a"), member(3, "ns/b"))


def test_one_set_is_no_step_of_the_answer() -> None:
    result = answer(dynamo(member(1, "ns/a"), member(2, "ns/a")))
    assert (result.worker_set, result.worker_sets) == (None, [])
    lonely = dynamo(member(1, "ns/a"), member(2, role="prefill"))
    result = answer(lonely)
    assert result.prefill is None, "a prefill worker of another namespace takes no part"
    assert result.winner.decode is not None
    assert result.winner.decode.worker == "w1"


def test_first_the_set_then_the_worker() -> None:
    result = answer(two_sets())
    assert result.worker_set == "ns/a"
    shares = {row.name: (row.workers, row.share) for row in result.worker_sets}
    assert shares == {"ns/a": (2, 2 / 3), "ns/b": (1, 1 / 3)}
    winners = {row.name: row.winner.decode for row in result.worker_sets}
    assert winners["ns/b"] is not None
    assert winners["ns/b"].worker == "w3"
    assert codes(result)[0] == "DYR0722"
    assert "ns/a 67 %, ns/b 33 %" in result.doubts[0].effect
    assert result.certain is False
    for draw in (ExplainScreen(), route_short):
        text = draw(result, Canvas(width=200))
        assert "33 %  ns/b, 1 worker: w3" in text


def test_caches_of_another_set_do_not_attract_a_request() -> None:
    view = two_sets()
    hashes = hash_prompt(TOKENS, 16)
    view.router.apply(KvEvent(3, 0, BlocksStored(None, hashes.sequence, hashes.local)), 1.0)
    result = answer(view)
    assert result.decode is not None
    assert {row.worker for row in result.decode.candidates} == {"w1", "w2"}


def test_sets_have_their_own_block_size() -> None:
    view = dynamo(member(1, "ns/a"), member(2, "ns/b", block_size=32))
    rows = {row.name: row for row in answer(view).worker_sets}
    assert rows["ns/b"].decode is not None
    assert rows["ns/b"].decode.candidates[0].cost == len(TOKENS) / 32 + 2
    assert "DYR0719" not in codes(answer(view))


def test_a_set_without_available_workers_is_not_drawn() -> None:
    view = two_sets()
    view.router.apply(WorkerAvailability(3, "namespace ns is not ready"), 1.0)
    result = answer(view)
    assert {row.name: row.share for row in result.worker_sets} == {"ns/a": 1.0, "ns/b": 0.0}
    assert "DYR0722" not in codes(result)
    assert result.worker_sets[1].decode is not None
    assert result.worker_sets[1].decode.winner is None


def test_a_view_repeats_the_sets_offline() -> None:
    source = ViewSource(two_sets(), "live")
    again = open_view_bytes(source.save(), "FILE", "saved")
    query = RouteQuery(token_ids=TOKENS)
    assert again.route(query) == source.route(query)


def test_a_view_keeps_the_devices() -> None:
    view = dynamo(member(1, device="cpu"), member(2, device="cuda"), member(3))
    again = open_view_bytes(ViewSource(view, "live").save(), "FILE", "saved")
    result = again.route(RouteQuery(token_ids=TOKENS, assignments=("mode=device-aware-weighted",)))
    assert result.decode is not None
    assert [row.device for row in result.decode.candidates] == ["cpu", "cuda", UNSET]
    assert result.decode.devices is not UNSET
    assert (result.decode.devices.cpu_workers, result.decode.devices.accelerators) == (1, 2)


def test_a_pin_that_contradicts_the_transfer_policy_of_a_drawn_worker_is_doubted() -> None:
    def zoned(worker_id: int, role: str, zone: str) -> Worker:
        card = ModelRuntimeConfig(
            topology_domains={"zone": zone},
            kv_transfer_domain="zone",
            kv_transfer_enforcement="required",
        )
        return member(worker_id, "ns/d", role=role, runtime_config=card)

    view = dynamo(
        zoned(1, "prefill", "a"),
        zoned(2, "prefill", "b"),
        zoned(3, "decode", "a"),
        zoned(4, "decode", "b"),
    )
    view = replace(view, router=Router.restore(view.router.snapshot()))
    settings = {"assignments": ("decode_capacity_guard=false",)}
    crossing = answer(view, pin_decode="w4", **settings)
    assert "DYR0725" in codes(crossing)
    [found] = [one for one in crossing.doubts if one.code == "DYR0725"]
    assert found.what.endswith("lead to a refusal: w1")
    assert "DYR0725" not in codes(answer(view, pin_decode="w4", pin_prefill="w2", **settings))
    assert not answer(view, pin_decode="w4", pin_prefill="w1", **settings).ok


# -- router modes ----------------------------------------------------------------------------------


def fleet_of(mode: str, *workers: Worker) -> SavedView:
    view = dynamo(*(workers or (member(1), member(2), member(3))))
    values = {"router_mode": mode, "router_taints_in_all_modes": False}
    assert view.router.apply(ConfigSet(values), 0.0).ok
    return view


@pytest.mark.parametrize("mode", ["power-of-two", "least-loaded", "device-aware-weighted"])
def test_what_a_frontend_counts_inside_is_a_doubt(mode: str) -> None:
    result = answer(dynamo(member(1), member(2), member(3)), assignments=[f"router_mode={mode}"])
    assert result.mode == mode
    assert not result.certain
    assert "DYR0744" in codes(result)
    alone = answer(dynamo(member(1)), assignments=[f"router_mode={mode}"])
    assert alone.certain


def test_the_drawn_pair_is_in_the_answer() -> None:
    result = answer(dynamo(member(1), member(2), member(3)), assignments=["mode=power-of-two"])
    hop = result.decode
    assert hop is not None
    assert hop.drawn is not UNSET
    assert hop.sample is not UNSET
    names = [row.worker for row in hop.candidates]
    assert [names.index(ref.worker) for ref in hop.drawn] == list(draw_two(3, hop.sample))
    assert hop.winner == hop.drawn[0]
    assert hop.tied == []
    (draw,) = [one for one in result.doubts if one.code == "DYR0728"]
    assert (draw.matters, result.certain) == (True, False)
    assert f"here {hop.drawn[0].worker} and {hop.drawn[1].worker}" in draw.what


def test_a_pair_without_choice_is_certain() -> None:
    """Two candidates are always drawn both, and the loads differ."""
    made = Router(RouterConfig(router_mode="power-of-two"))
    for worker in (member(1), member(2)):
        assert made.apply(WorkerUpserted(worker), 0.0).ok
    assert made.apply(Booked("x", "aggregated", 2, 0), 0.0).ok
    result = answer(SavedView(made, 1.0, "dynamo-1.6"))
    assert result.winner.decode is not None
    assert (result.winner.decode.worker, result.certain) == ("w1", True)
    assert result.decode is not None
    assert [row.probability for row in result.decode.candidates] == [1.0, 0.0]


def test_a_mode_that_is_set_replaces_the_doubt_about_the_mode_of_the_cards() -> None:
    cards = [doubt("DYR0716", varies=Varies(turn=True), why="the workers' cards set round-robin")]
    view = dynamo(member(1), member(2), doubts=tuple(cards))
    assert "DYR0716" in codes(answer(view))
    assert "DYR0716" not in codes(answer(view, assignments=["router_mode=random"]))
    assert "DYR0716" in codes(answer(view, assignments=["router_mode=round-robin"]))


@pytest.mark.parametrize("mode", ["round-robin", "random", "least-loaded", "direct"])
def test_dynamo_applies_no_taints_in_other_modes_than_kv(mode: str) -> None:
    """As observed: a required taint that no worker has is answered with 200."""
    result = answer(fleet_of(mode, member(1)), required=["nope"], pin_decode="w1")
    assert result.ok
    assert result.decode is not None
    assert result.decode.notes == [
        f"mode {mode} does not apply taints and KV-transfer policies here"
    ]
    refused = answer(fleet_of("kv", member(1)), required=["nope"])
    assert (refused.ok, refused.status) == (False, 500)


def test_direct_refuses_as_dynamo_does() -> None:
    result = answer(fleet_of("direct"))
    assert (result.ok, result.status) == (False, 400)
    shown = route_short(result, Canvas(width=100))
    assert "mode direct: the request names no worker" in shown
    chosen = answer(fleet_of("direct"), pin_decode="w2")
    assert chosen.winner.decode is not None
    assert (chosen.winner.decode.worker, chosen.certain) == ("w2", True)


# -- the prefill load model of a frontend ------------------------------------------------------


def loaded(predicted_s: float | None, **view: Any) -> SavedView:
    """w1 has a running prefill of 100 tokens, w2 none; both are empty otherwise."""
    found = dynamo(member(1), member(2), **view)
    booked = Booked("r", "aggregated", 1, 0, 100, predicted_s=predicted_s)
    assert found.router.apply(booked, 0.0).ok
    for name in ("a", "b"):
        # Blocks of running requests: w2 is dearer by 4 blocks than w1 without its prefill.
        held = Booked(name, "aggregated", 2, 0, anonymous_blocks=2)
        assert found.router.apply(held, 0.0).ok
    return found


AIC = ("router_prefill_load_model=aic",)


def test_durations_that_only_a_dynamo_frontend_knows_are_a_doubt() -> None:
    assert "DYR0748" not in codes(answer(loaded(None)))
    result = answer(loaded(None), assignments=AIC)
    assert result.winner.decode is not None
    assert result.winner.decode.worker == "w2"
    [one] = [one for one in result.doubts if one.code == "DYR0748"]
    assert one.matters  # without its prefill w1 would win
    assert "of w1 fall with time" in one.what
    # It is no setting without an effect, and listed as assumed.
    assert "DYR0727" not in codes(result)
    assert any("router_prefill_load_model=aic" in text for text in result.assumptions)


def test_a_card_that_advertises_the_model_gives_the_same_doubt() -> None:
    view = loaded(None)
    view.router.apply(ConfigSet({"router_prefill_load_model": "ais"}), 0.0)
    [one] = [one for one in answer(view).doubts if one.code == "DYR0748"]
    assert one.matters


def test_durations_in_the_events_of_frontends_are_followed() -> None:
    result = answer(loaded(1.0), assignments=AIC)
    assert result.winner.decode is not None
    assert result.winner.decode.worker == "w1"  # a second after it began nothing is left
    assert "DYR0748" not in codes(result)
    assert result.decode is not None
    assert [row.active_prefill_tokens for row in result.decode.candidates] == [0, 0]
    assert [row.booked_prefill_tokens for row in result.decode.candidates] == [100, 0]


def test_without_active_prefill_no_duration_is_missing() -> None:
    view = loaded(None)
    view.router.apply(PrefillDone("r"), 0.5)
    assert "DYR0748" not in codes(answer(view, assignments=AIC))


def opened(data: bytes) -> SavedView:
    return open_view_bytes(data, "view.json", "test").view


def test_a_saved_view_repeats_what_was_left() -> None:
    view = loaded(2.0)
    answered = answer(view)
    data = ViewSource(view, "test").save()
    again = ViewSource(opened(data), "test").route(RouteQuery(token_ids=TOKENS))
    assert answered.decode is not None
    assert again.decode is not None
    assert again.decode.candidates == answered.decode.candidates
    assert [row.active_prefill_tokens for row in again.decode.candidates] == [50, 0]
    listed = ViewSource(opened(data), "test").workers()
    assert [row.ranks[0].active_prefill_tokens for row in listed] == [50, 0]
    assert [row.ranks[0].booked_prefill_tokens for row in listed] == [100, 0]


def test_embeddings_are_routed_whole() -> None:
    body = {"model": "tiny", "input": [TOKENS, TOKENS[:20]]}
    view = dynamo(member(1), member(2))
    own = SavedView(view.router, 1.0, "dynamo-1.6")
    result = answer(own, body=body)
    assert (result.ok, result.tokens, result.prefill) == (True, 84, None)
    split = dynamo(member(1, role="prefill"), member(2, role="decode"))
    with pytest.raises(UsageProblem, match="make no embeddings"):
        answer(SavedView(split.router, 1.0, "dynamo-1.6"), body=body)


def test_a_setting_that_dynamo_does_not_have_is_a_doubt_for_a_dynamo() -> None:
    query = RouteQuery(token_ids=[1, 2, 3], assignments=("pair_selection=best",))
    view = dynamo(member(1, "s", role="prefill"), member(2, "s", role="decode"))
    [found] = [one for one in DryRun(view, query).route().doubts if one.code == "DYR0780"]
    assert found.what.startswith("router_pair_selection: ")
    assert found.matters
    plain = replace(view, chats="plain")
    assert "DYR0780" not in codes(DryRun(plain, query).route())


def test_running_requests_can_be_pretended() -> None:
    view = fleet_of("least-loaded", member(1), member(2))
    ties = answer(view)
    assert ties.decode is not None
    assert len(ties.decode.tied) == 2
    more = answer(view, assignments=["load.w1.active_requests=+2", "load.w2.active_requests=1"])
    assert more.decode is not None
    assert [row.active_requests for row in more.decode.candidates] == [2, 1]
    assert more.winner.decode is not None
    assert more.winner.decode.worker == "w2"


@pytest.mark.parametrize(
    ("mode", "load", "why"),
    [
        ("kv", "active_requests", "with decode_active_request_weight 0"),
        ("least-loaded", "prefill_tokens", "with router_mode least-loaded"),
        ("random", "active_requests", "with router_mode random"),
    ],
)
def test_a_load_that_a_mode_does_not_read_is_named(mode: str, load: str, why: str) -> None:
    text = f"load.w1.{load}=+2"
    result = answer(fleet_of(mode, member(1), member(2)), assignments=[text])
    (found,) = [one for one in result.doubts if one.code == "DYR0727"]
    assert found.what == f"--set {text} has no effect {why}"
    assert not any(load in one for one in result.assumptions)


def test_a_dry_run_without_the_model_counts_what_was_booked() -> None:
    view = replace(loaded(2.0), chats="plain")
    view.router.apply(ConfigSet({"router_prefill_load_model": "measured"}), 0.0)

    def tokens(*assignments: str) -> tuple[RouteResult, list[int]]:
        result = answer(view, assignments=assignments)
        assert result.decode is not None
        return result, [row.active_prefill_tokens for row in result.decode.candidates]

    assert tokens()[1] == [50, 0]
    result, counted = tokens("router_prefill_load_model=none")
    assert counted == [100, 0]
    assert "DYR0727" not in codes(result)
    result, counted = tokens("router_prefill_load_model=aic")
    assert counted == [50, 0]
    (one,) = [one for one in result.doubts if one.code == "DYR0727"]
    assert "running requests keep the durations that were predicted when they began" in one.what
