"""Bookings whose hashes are known to be chains count as those that are counted hash by hash."""

from __future__ import annotations

import random

from hypothesis import event, given
from hypothesis import strategies as st

from router_core import RoutingRequest, sequence_hashes
from router_core.held_blocks import HeldBlocks, HeldChains
from router_core.load import ActiveSequences
from tests.router_core.fleet import router, worker

SLOTS = 3
EVERY = (1 << SLOTS) - 1


def prompt(draw: random.Random, of: list[list[int]]) -> list[int]:
    """A prompt that begins as an earlier one mostly."""
    before = draw.choice(of)[: draw.randrange(12)] if of and draw.random() < 0.8 else []
    local = before + [draw.randrange(1 << 40) for _ in range(draw.randrange(1, 8))]
    of.append(local)
    return local


def asked(draw: random.Random, of: list[list[int]], number: int) -> RoutingRequest:
    """A request of one prompt, or a batch of several."""
    count = 1 if draw.random() < 0.7 else draw.randrange(2, 5)
    local = [
        draw.choice(of) if of and draw.random() < 0.2 else prompt(draw, of) for _ in range(count)
    ]
    hashes = [sequence_hashes(one) for one in local]
    return RoutingRequest(
        f"r{number}", "m", 16 * sum(map(len, local)), 16, hashes[0],
        more_hashes=tuple(hashes[1:]), chained=True,
    )  # fmt: skip


def equal(found: ActiveSequences, plain: ActiveSequences, of: list[list[int]]) -> None:
    assert found.decode_blocks == plain.decode_blocks
    assert found._blocks == plain._blocks
    assert found._adjusted == plain._adjusted
    assert (found.requests, found.hashes) == (plain.requests, plain.hashes)
    for local in of:
        hashes = sequence_hashes(local)
        for candidates in (EVERY, 0b101, 0):
            levels = found.shared_blocks(hashes, candidates).levels
            assert levels == plain.shared_blocks(hashes, candidates).levels


@given(st.integers(0, 2**32), st.booleans())
def test_chains_count_as_their_hashes(seed: int, mixed: bool) -> None:
    """``mixed``: some bookings come from elsewhere, so that their hashes may be anything."""
    draw = random.Random(seed)
    found, plain = ActiveSequences(), ActiveSequences()
    for one in (found, plain):
        one.grow(SLOTS)
    of: list[list[int]] = []
    active: list[str] = []
    for number in range(30):
        kind = draw.random()
        if kind < 0.55 or not active:
            made, slot = asked(draw, of, number), draw.randrange(SLOTS)
            hashes: list[int] = list(made.all_hashes)
            chains = made.chains
            if mixed and draw.random() < 0.1:
                draw.shuffle(hashes)
                hashes += hashes[:2]
                chains = ()
            for one, known in ((found, chains), (plain, ())):
                assert one.book(
                    made.id, "aggregated", slot, prefill_tokens=0, sequence_hashes=hashes,
                    anonymous_blocks=draw.randrange(1), now=0.0, chains=known,
                )  # fmt: skip
            active.append(made.id)
        elif kind < 0.85:
            ended = active.pop(draw.randrange(len(active)))
            assert found.free(ended, None, 0.0) == plain.free(ended, None, 0.0)
        elif kind < 0.95:
            going, fraction = draw.choice(active), draw.choice((None, 0.5, 0.0))
            for one in (found, plain):
                assert one.output_block(going, fraction, 0.0) is not None
        else:
            found = ActiveSequences.restore(found.dump(), SLOTS)
            plain = ActiveSequences.restore(plain.dump(), SLOTS)
        if not mixed and active:
            assert isinstance(found._held, HeldChains)
            assert isinstance(plain._held, HeldBlocks)
        event(type(found._held).__name__)
        # What is not a chain is shared by no prompt's beginning alone.
        equal(found, plain, [] if mixed else of[-8:])
    for ended in active:
        found.free(ended, None, 0.0)
    assert found.decode_blocks == [0] * SLOTS
    assert isinstance(found._held, HeldChains)
    assert not found._held._starts


def test_hashes_that_prove_to_be_no_chains_are_counted_one_by_one() -> None:
    """An equal hash after different blocks: the two runs are found to be one block."""
    found, plain = ActiveSequences(), ActiveSequences()
    steps = [
        ("a", (1, 2, 3)), ("b", (7, 2, 9)), ("c", (1, 8)), ("d", (2, 3)),
    ]  # fmt: skip
    for one in (found, plain):
        one.grow(1)
    for name, hashes in steps:
        for one, chains in ((found, (len(hashes),)), (plain, ())):
            one.book(
                name, "aggregated", 0, prefill_tokens=0, sequence_hashes=hashes,
                anonymous_blocks=0, now=0.0, chains=chains,
            )  # fmt: skip
    assert isinstance(found._held, HeldChains)  # nothing shows it yet
    for one in (found, plain):
        one.book(
            "e", "aggregated", 0, prefill_tokens=0, sequence_hashes=(1, 2, 5),
            anonymous_blocks=0, now=0.0, chains=(3,) if one is found else (),
        )  # fmt: skip
    for name, _ in [*steps, ("e", ())]:
        for one in (found, plain):
            one.free(name, None, 0.0)
    assert found.decode_blocks == plain.decode_blocks == [0]


def test_a_prompt_hashed_here_is_booked_as_a_chain_and_restored_as_one() -> None:
    made = router(worker(1))
    wanted = RoutingRequest.from_tokens("r", "tiny", range(64), 16)
    booked = made.booking(made.plan(wanted).final, wanted)
    assert wanted.chained
    assert booked.chains == (len(wanted.sequence_hashes),)
    assert made.apply(booked, 0.0).ok
    copy = type(made).restore(made.snapshot())
    for one in (made, copy):
        assert isinstance(one.load._held, HeldChains)
        assert one.load.shared_blocks(wanted.sequence_hashes, 1).get(0) == 4
    # Lengths that are not those of the hashes are not believed.
    made.load.book(
        "x", "aggregated", 0, prefill_tokens=0, sequence_hashes=(5, 6), anonymous_blocks=0,
        now=0.0, chains=(3,),
    )  # fmt: skip
    assert isinstance(made.load._held, HeldBlocks)
    assert made.load.shared_blocks(wanted.sequence_hashes, 1).get(0) == 4
