"""Active sequences: sharing, release, decay, expiry, and a comparison with a naive model."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core.changes import Booked, Expired, Freed, OutputBlock, PrefillDone, Progressed
from router_core.load import ActiveSequences, decay_fraction
from router_core.router import Router
from tests.router_core.fleet import active, apply_all, request, router, worker


def blocks(made: object, worker_id: int = 1) -> int:
    slot = made.registry.slot(worker_id, 0)  # type: ignore[attr-defined]
    return made.load.decode_blocks[slot]  # type: ignore[attr-defined, no-any-return]


def held(name: str, hashes: tuple[int, ...], tokens: int = 0) -> Booked:
    return Booked(name, "aggregated", 1, 0, tokens, hashes)


def test_shared_prompt_blocks_count_once_until_the_last_holder_leaves() -> None:
    made = router(worker(1))
    apply_all(made, held("a", (1, 2, 3)), held("b", (1, 2, 4, 5)))
    assert blocks(made) == 5
    apply_all(made, Freed("a"))
    assert blocks(made) == 4
    apply_all(made, Freed("b"))
    assert blocks(made) == 0
    assert made.load.shared_blocks([1, 2], 0b1).levels == ()


def test_duplicate_bookings_and_unknown_requests_change_nothing() -> None:
    made = router(worker(1))
    apply_all(made, held("a", (1, 2), 32))
    before = made.snapshot()
    assert made.apply(held("a", (1, 2), 32), 1.0).code == "duplicate_request"
    assert made.apply(OutputBlock("unknown"), 1.0).code == "unknown_request"
    assert made.apply(OutputBlock("a", 1.5), 1.0).code == "invalid"
    assert made.apply(active(9, "x"), 1.0).code == "unknown_worker"
    for change in (Freed("unknown"), PrefillDone("unknown"), Freed("a", "prefill")):
        assert made.apply(change, 1.0).code == "unknown_request"
    assert made.snapshot() == before


@pytest.mark.seed("dynamo-1.6: load tracking: output blocks")
@pytest.mark.parametrize(
    ("prompt", "shared", "outputs", "fraction", "expected"),
    [
        # Observed: 4 prompt blocks (2 of them shared with b, which holds 2 more), 2 output blocks.
        (4, 2, 2, 0.5, 2 + 2 + (2 + 2) * 0.5),
        (4, 2, 2, 0.0, 2 + 2),
        (1, 0, 1, 0.25, 0.5),
    ],
)
def test_output_blocks_decay_with_the_requests_exclusive_blocks(
    prompt: int, shared: int, outputs: int, fraction: float, expected: float
) -> None:
    made = router(worker(1))
    apply_all(made, held("a", tuple(range(prompt))))
    if shared:
        apply_all(made, held("b", (*range(shared), 100, 101)))
    apply_all(made, *[OutputBlock("a", fraction)] * outputs)
    assert blocks(made) == int(expected + 0.5)
    apply_all(made, Freed("a"), *([Freed("b")] if shared else []))
    assert blocks(made) == 0


def test_unshared_blocks_of_a_booking_decay_too() -> None:
    made = router(worker(1))
    apply_all(made, active(1, "a", blocks=3), OutputBlock("a", 0.5))
    assert blocks(made) == 2
    apply_all(made, OutputBlock("a", 0.0))
    assert blocks(made) == 0
    apply_all(made, Freed("a"))
    assert blocks(made) == 0


def test_output_blocks_are_load_of_the_last_hop() -> None:
    made = router(worker(1, role="prefill"), worker(2, role="decode"))
    apply_all(made, active(1, "a", stage="prefill"), active(2, "a", stage="decode", blocks=2))
    apply_all(made, OutputBlock("a"))
    assert made.load.decode_blocks == [0, 3]


def test_a_restored_booking_ends_like_the_original() -> None:
    made = router(worker(1))
    apply_all(made, held("a", (1, 2, 3), 40), held("b", (1,)), OutputBlock("a", 0.5))
    copy = Router.restore(made.snapshot())
    assert copy.load.dump() == made.load.dump()
    for one in (made, copy):
        assert (blocks(one), one.load.prefill_tokens) == (1 + 2, [40])  # (2 + 1) * 0.5 is 1.5
        apply_all(one, OutputBlock("a"), PrefillDone("a"))
        assert (blocks(one), one.load.prefill_tokens) == (1 + 3, [0])
        apply_all(one, Freed("a"))
        assert (blocks(one), one.load.requests) == (1, [1])


def test_prefill_ends_on_every_hop_once_and_counts_as_progress() -> None:
    made = router(worker(1, role="prefill"), worker(2, role="decode"))
    other = active(1, "b", stage="prefill", prefill_tokens=7)
    prefill = active(1, "a", stage="prefill", prefill_tokens=40)
    apply_all(made, prefill, active(2, "a", stage="decode", prefill_tokens=5), other, now=0.0)
    assert made.load.prefill_tokens == [47, 5]
    apply_all(made, PrefillDone("a"), now=200.0)
    assert made.load.prefill_tokens == [7, 0]
    assert made.load.requests == [2, 1]
    apply_all(made, PrefillDone("a"), now=200.0)
    assert made.load.prefill_tokens == [7, 0]
    apply_all(made, Expired(), now=400.0)
    assert [(one.request_id, one.stage) for one in made.load] == [("a", "prefill"), ("a", "decode")]


@pytest.mark.seed("router-guide: arguments: --router-track-prefill-tokens")
@pytest.mark.parametrize(("tracked", "tokens", "cost"), [(True, 40, 5.0), (False, 0, 2.0)])
def test_prompt_tokens_are_load_of_their_worker_only_where_they_are_tracked(
    tracked: bool, tokens: int, cost: float
) -> None:
    made = router(worker(1), router_track_prefill_tokens=tracked)
    wanted = request(40)
    apply_all(made, made.booking(made.plan(wanted).final, wanted))
    assert made.load.prefill_tokens == [tokens]
    # Another prompt of 40 tokens, 2 blocks: (40 + 40) / 16 blocks of prefill with tracking, and 2
    # blocks beside the 2 that are active.
    assert made.plan(request(40, "r2", seed=1)).final.costs == [cost + 4.0 if tracked else 4.0]


@pytest.mark.seed("dynamo-1.6: load tracking: output blocks")
def test_the_weight_follows_the_expected_output() -> None:
    assert [decay_fraction(done, 64) for done in (0, 16, 48, 64, 80)] == [1.0, 0.75, 0.25, 0.0, 0.0]
    assert decay_fraction(16, 0) == 0.0


def test_stale_bookings_expire_and_progress_keeps_them() -> None:
    made = router(worker(1), active_request_expiry_secs=300.0)
    made.apply(held("old", (1, 2), 32), 0.0)
    made.apply(held("alive", (3,), 16), 0.0)
    assert made.apply(Progressed("alive"), 200.0).ok
    assert made.load.prefill_tokens == [48]
    assert made.apply(Progressed("unknown"), 200.0).code == "unknown_request"
    made.apply(Expired(), 300.0)
    assert len(made.load) == 2
    made.apply(Expired(), 300.1)
    assert [b.request_id for b in made.load] == ["alive"]
    made.apply(Expired(), 1000.0)
    assert (len(made.load), blocks(made), made.load.prefill_tokens) == (0, 0, [0])


def test_both_hops_of_a_request_are_booked_and_freed_apart() -> None:
    made = router(worker(1, role="prefill"), worker(2, role="decode"))
    wanted = request(40)
    plan = made.plan(wanted)
    assert plan.prefill is not None
    assert plan.decode is not None
    apply_all(made, made.booking(plan.prefill, wanted), made.booking(plan.decode, wanted))
    assert made.load.prefill_tokens == [40, 0]
    assert made.load.decode_blocks == [0, 2]
    apply_all(made, Freed(wanted.id, "prefill"))
    assert (made.load.prefill_tokens, made.load.decode_blocks) == ([0, 0], [0, 2])
    apply_all(made, Freed(wanted.id))
    assert (made.load.requests, len(made.load)) == ([0, 0], 0)


@dataclass
class Naive:
    """All bookings in a list; every count is a loop over them."""

    bookings: dict[str, tuple[int, tuple[int, ...], int]] = field(default_factory=dict)

    def blocks(self, slot: int) -> int:
        return len({h for s, hashes, _ in self.bookings.values() if s == slot for h in hashes})

    def tokens(self, slot: int) -> int:
        return sum(t for s, _, t in self.bookings.values() if s == slot)

    def shared(self, slot: int, hashes: tuple[int, ...]) -> int:
        mine = {h for s, held, _ in self.bookings.values() if s == slot for h in held}
        depth = 0
        while depth < len(hashes) and hashes[depth] in mine:
            depth += 1
        return depth


PATHS = [tuple(range(n)) for n in range(6)] + [(0, 1, *range(50, 50 + n)) for n in range(4)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["book", "free", "done"]),
            st.integers(0, 5),
            st.integers(0, 2),
            st.sampled_from(PATHS),
            st.integers(0, 99),
        ),
        max_size=40,
    )
)
def test_load_equals_the_naive_count(
    steps: list[tuple[str, int, int, tuple[int, ...], int]],
) -> None:
    made, naive = router(*(worker(i) for i in (1, 2, 3))), Naive()
    for what, who, slot, path, tokens in steps:
        name = f"r{who}"
        if what == "book":
            if made.apply(Booked(name, "aggregated", slot + 1, 0, tokens, path), 0.0).ok:
                naive.bookings[name] = (slot, path, tokens)
        elif what == "free":
            made.apply(Freed(name), 0.0)
            naive.bookings.pop(name, None)
        else:
            made.apply(PrefillDone(name), 0.0)
            if name in naive.bookings:
                naive.bookings[name] = (*naive.bookings[name][:2], 0)
        assert made.load.decode_blocks == [naive.blocks(s) for s in range(3)]
        assert made.load.prefill_tokens == [naive.tokens(s) for s in range(3)]
        for path in PATHS:
            found = made.load.shared_blocks(path, 0b111)
            assert [found.get(s) for s in range(3)] == [naive.shared(s, path) for s in range(3)]


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.integers(0, 4),
            st.integers(0, 1),
            st.lists(st.integers(0, 6), max_size=8).map(tuple),
        ),
        max_size=30,
    )
)
def test_blocks_are_counted_where_the_hashes_of_a_booking_are_no_chain(
    steps: list[tuple[bool, int, int, tuple[int, ...]]],
) -> None:
    """Prompts of a batch are no chain, and another process may repeat a hash."""
    made, naive = router(worker(1), worker(2)), Naive()
    for books, who, slot, hashes in steps:
        name = f"r{who}"
        if not books:
            made.apply(Freed(name), 0.0)
            naive.bookings.pop(name, None)
        elif made.apply(Booked(name, "aggregated", slot + 1, 0, 0, hashes), 0.0).ok:
            naive.bookings[name] = (slot, hashes, 0)
        assert made.load.decode_blocks == [naive.blocks(s) for s in range(2)]


def test_hashes_that_turn_out_not_to_be_chains_are_counted_once_from_then_on() -> None:
    """One booking claims a chain with blocks of another one in its middle. The next one is counted
    by hash, and with it all others: the sum of the slot follows."""
    load = ActiveSequences()
    load.grow(1)

    def book(name: str, *hashes: int, chains: tuple[int, ...] = ()) -> None:
        assert load.book(
            name, "aggregated", 0, prefill_tokens=0, sequence_hashes=hashes, anonymous_blocks=1,
            now=0.0, chains=chains,
        )  # fmt: skip

    book("a", 1, 2, 3, chains=(3,))
    book("b", 9, 2, 3, chains=(3,))
    book("c", 7)
    assert load.decode_blocks == [8], "the blocks 1, 2, 3, 7 and 9, and three without a name"
    for name in "abc":
        load.free(name, None, 1.0)
    assert load.decode_blocks == [0]
