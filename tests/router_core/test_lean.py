"""A lean router chooses, books and frees as a Router does, to the last bit."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core import (
    BlocksRemoved,
    BlocksStored,
    CostInputs,
    Freed,
    KvEvent,
    LeanBooking,
    LeanIndex,
    LeanRouter,
    ModelRuntimeConfig,
    PrefillDone,
    Router,
    RouterConfig,
    RoutingRequest,
    Worker,
    WorkerUpserted,
    WorkerWithDpRank,
    lean,
    sequence_hashes,
)

SIZE = 4

configs = st.fixed_dictionaries(
    {
        "router_mode": st.sampled_from(
            ["kv", "kv", "kv", "round-robin", "random", "least-loaded", "power-of-two"]
        )
    },
    optional={
        "router_temperature": st.sampled_from([0.0, 0.7]),
        "overlap_score_credit": st.sampled_from([0.0, 0.3, 2.0]),
        "overlap_score_credit_decay": st.sampled_from([0.0, 0.4]),
        "prefill_load_scale": st.sampled_from([0.0, 0.7, 1.5]),
        "decode_active_request_weight": st.sampled_from([0.0, 1.3]),
        "router_track_active_blocks": st.booleans(),
        "router_assume_kv_reuse": st.booleans(),
        "router_track_prefill_tokens": st.booleans(),
    },
)
prompts = st.lists(st.integers(0, 2), min_size=0, max_size=6)
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"),
            prompts,
            st.integers(0, SIZE - 1),
            st.floats(0, 0.999),
            st.sets(st.integers(0, 5), max_size=3),
        ),
        st.tuples(st.just("done"), st.integers(0, 30)),
        st.tuples(st.just("free"), st.integers(0, 30)),
        st.tuples(st.just("store"), st.integers(0, 5), prompts),
        st.tuples(st.just("remove"), st.integers(0, 5), st.integers(0, 30)),
    ),
    max_size=40,
)


@given(configs, st.integers(1, 6), steps)
def test_a_lean_router_is_a_router(values, workers, script):
    config = RouterConfig().with_values(values)
    assert LeanRouter.supports(config)
    router = Router(config, exact_reuse=True, learns=True)
    # Ids in another order than the registration: round-robin goes by id.
    ids = [100 - number for number in range(workers)]
    for worker_id in ids:
        card = ModelRuntimeConfig(total_kv_blocks=1000)
        worker = Worker(worker_id, f"w{worker_id}", "m", block_size=SIZE, runtime_config=card)
        router.apply(WorkerUpserted(worker), 0.0)
    index = LeanIndex(workers)
    lean = LeanRouter(config, [WorkerWithDpRank(one) for one in ids], SIZE, index)
    held: list[Counter[tuple[int, ...]]] = [Counter() for _ in ids]  # chains, with their copies
    live: list[tuple[str, LeanBooking]] = []
    for number, (what, *more) in enumerate(script):
        now = float(number)
        if what == "ask":
            local, rest, sample, without = more
            among = [n for n in range(workers) if n not in without] if without else None
            if among == []:
                continue
            hashes = sequence_hashes(local)
            tokens = max(1, len(local) * SIZE + rest)
            name = f"r{number}"
            allowed = None if among is None else frozenset(ids[n] for n in among)
            request = RoutingRequest(name, "m", tokens, SIZE, hashes, allowed_worker_ids=allowed)
            decision = router.plan(request, samples=(sample, 0.5)).final
            rank, cached = lean.choose(hashes, tokens, sample, among)
            assert ids[rank] == decision.require().worker_id
            assert cached * SIZE == decision.cached_tokens
            if config.router_mode == "kv" and among is None:
                overlaps = lean.overlaps(hashes, request.most_reusable)
                assert lean._costs(hashes, tokens, overlaps) == list(decision.costs)
            router.apply(router.booking(decision, request), now)
            live.append((name, lean.book(rank, hashes, tokens, cached)))
        elif what == "done" and live:
            name, booking = live[more[0] % len(live)]
            router.apply(PrefillDone(name), now)
            lean.prefill_done(booking)
        elif what == "free" and live:
            name, booking = live.pop(more[0] % len(live))
            router.apply(Freed(name), now)
            lean.free(booking)
        elif what == "store" and more[1]:
            rank = more[0] % workers
            local = tuple(more[1])
            names = sequence_hashes(local)
            event = BlocksStored(None, names, local, counted=True)
            router.apply(KvEvent(ids[rank], 0, event), now)
            index.store(rank, names)
            held[rank].update(local[:depth] for depth in range(1, len(local) + 1))
        elif what == "remove" and held[more[0] % workers]:
            rank = more[0] % workers
            chains = held[rank]
            free = [
                one
                for one, copies in chains.items()
                if copies > 1 or not any(other[:-1] == one for other in chains)
            ]
            gone = free[more[1] % len(free)]
            chains -= Counter([gone])
            name_of = sequence_hashes(gone)[-1]
            router.apply(KvEvent(ids[rank], 0, BlocksRemoved([name_of])), now)
            index.remove(rank, [name_of])
        capacity = range(workers)
        assert lean.prefill_tokens == [router.load.prefill_tokens[n] for n in capacity]
        assert lean.requests == [router.load.requests[n] for n in capacity]
        assert [len(lean._held[n]) + lean._anonymous[n] for n in capacity] == [
            router.load.decode_blocks[n] for n in capacity
        ]


def test_settings_that_need_more_of_a_router_are_not_supported():
    assert LeanRouter.supports(RouterConfig())
    for values in (
        {"router_queue_threshold": 1.0},
        {"use_kv_events": False},
        {"active_prefill_tokens_threshold": 100},
        {"router_session_affinity_ttl_secs": 60.0},
        {"router_track_output_blocks": True},
        {"router_predicted_ttl_secs": 1.0},
    ):
        assert not LeanRouter.supports(RouterConfig().with_values(values))


@dataclass(frozen=True, slots=True)
class MoreInputs(CostInputs):
    wear: Sequence[float] | None = None


def test_a_router_with_an_input_that_it_does_not_know_is_not_supported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert LeanRouter.supports(RouterConfig())
    monkeypatch.setattr(lean, "CostInputs", MoreInputs)
    assert not LeanRouter.supports(RouterConfig())
