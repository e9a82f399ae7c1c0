"""Cached blocks in host memory and on disk: how they continue a prefix, and what they cost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core import (
    BlocksRemoved,
    BlocksStored,
    Cleared,
    KvEvent,
    Router,
    WorkerLost,
    WorkerUpserted,
)
from router_core.errors import SnapshotError
from router_core.hashing import hash_prompt
from router_core.lower_tiers import DISK, HOST, LowerTiers
from tests.router_core.fleet import prompt, request, router, worker

LOCAL = hash_prompt(prompt(16 * 8), 16).local
NAMES = list(range(101, 109))


def store(first: int, last: int, tier: str, parent: int | None = None) -> BlocksStored:
    """Blocks ``first`` up to ``last`` of the prompt; their parent is the block before them."""
    if parent is None and first:
        parent = NAMES[first - 1]
    return BlocksStored(parent, NAMES[first:last], LOCAL[first:last], tier)


def remove(*blocks: int, tier: str) -> BlocksRemoved:
    return BlocksRemoved([NAMES[block] for block in blocks], tier)


def found(*events: BlocksStored | BlocksRemoved | Cleared) -> tuple[int, int, int]:
    """Blocks of the prompt (device, host, disk) after the events."""
    made = router(worker(1))
    for event in events:
        assert made.apply(KvEvent(1, 0, event), 0.0).ok
    return counts(made)


def counts(made: Router) -> tuple[int, int, int]:
    (row,) = made.plan(request(16 * 8, local_hashes=LOCAL)).final.rows()
    return row.overlap_blocks, row.host_blocks, row.disk_blocks


@pytest.mark.seed("dynamo-1.6: tiers: a tier continues the one above it")
@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # As Dynamo 1.6.1 counted them, event by event.
        ([store(0, 3, HOST)], (0, 3, 0)),
        ([store(0, 3, HOST), store(0, 1, "device")], (1, 2, 0)),
        ([store(0, 1, "device"), store(1, 3, HOST)], (1, 2, 0)),
        ([store(1, 3, HOST)], (0, 0, 0)),
        ([store(1, 3, HOST), store(0, 1, "device")], (1, 2, 0)),
        ([store(0, 3, "device"), store(0, 3, HOST), remove(2, tier="device")], (2, 1, 0)),
        ([store(0, 1, "device"), store(1, 2, HOST), store(2, 4, DISK)], (1, 1, 2)),
        ([store(0, 2, DISK)], (0, 0, 2)),
        ([store(0, 2, "external")], (0, 0, 2)),
        ([store(0, 2, "device"), store(2, 4, DISK)], (2, 0, 2)),
        ([store(0, 3, HOST), remove(1, tier=HOST)], (0, 1, 0)),
        ([store(0, 3, HOST), remove(1, tier=HOST), store(1, 2, HOST)], (0, 3, 0)),
        ([store(0, 3, HOST), remove(2, tier=HOST)], (0, 2, 0)),
        ([store(0, 1, "device"), store(1, 3, HOST), Cleared()], (0, 0, 0)),
        # What is already on the device is not counted again.
        ([store(0, 4, "device"), store(0, 4, HOST)], (4, 0, 0)),
        # A disk block cannot be followed by a host block.
        ([store(0, 1, DISK), store(1, 2, HOST)], (0, 0, 1)),
    ],
)
def test_tiers_continue_a_prefix(events: list[BlocksStored], expected: tuple[int, ...]) -> None:
    assert found(*events) == expected


@pytest.mark.seed("dynamo-1.6: tiers: host and disk weights")
@pytest.mark.seed("dynamo-1.6: tiers: no overlap credit, no credit of a tier")
def test_the_cost_credits_lower_tiers_by_their_weights() -> None:
    made = router(worker(1))
    for event in (store(0, 1, "device"), store(1, 2, HOST), store(2, 4, DISK)):
        made.apply(KvEvent(1, 0, event), 0.0)
    asked = request(16 * 8, local_hashes=LOCAL)
    decision = made.plan(asked).final
    # 8 blocks of prefill less 1 + 0.75 + 2 x 0.25, and 8 of decode: Dynamo's logit was 13.75.
    assert decision.costs == [13.75]
    # 36 of 128 tokens count as cached; Dynamo's effective_prefill_tokens was 92.
    assert (decision.cached_tokens, made.booking(decision, asked).prefill_tokens) == (36, 92)
    for settings, cost in (
        ({"host_cache_hit_weight": 0.0}, 14.5),
        ({"disk_cache_hit_weight": 1.0}, 12.25),
        ({"overlap_score_credit": 0.0}, 16.0),
        ({"overlap_score_credit": 2.0}, 12.75),
    ):
        view = made.view(made.config.with_values(settings))
        assert made.plan(asked, view=view).final.costs == [cost]
    assert made.plan(request(16 * 8)).final.costs == [15.0], "without local hashes: device only"
    assert decision.replay().costs == decision.costs


def test_other_tiers_and_uneven_columns_are_refused() -> None:
    made = router(worker(1))
    uneven = BlocksStored(None, NAMES[:2], LOCAL[:1], HOST)
    assert made.apply(KvEvent(1, 0, uneven), 0.0).code == "columns_differ"
    assert made.apply(KvEvent(1, 0, store(0, 1, "tape")), 0.0).code == "ignored_tier"
    assert made.apply(KvEvent(1, 0, remove(0, tier="tape")), 0.0).code == "ignored_tier"
    with pytest.raises(SnapshotError, match="tape"):
        LowerTiers.restore([{"slot": 0, "tier": "tape", "blocks": []}])


def test_a_lost_worker_leaves_nothing_behind() -> None:
    made = router(worker(1), worker(2))
    for number in (1, 2):
        made.apply(KvEvent(number, 0, store(0, 8, HOST)), 0.0)
    slot = made.registry.slots(1)[0]
    assert made.tiers.block_count(slot) == (8, 0)
    made.apply(WorkerLost(1), 0.0)
    assert made.tiers.block_count(slot) == (0, 0)
    steps = 0
    while made.sweep(4):
        steps += 1
    assert steps >= 3, "the memory is freed in steps"
    assert counts(made) == (0, 8, 0)


_EVENTS = st.lists(
    st.one_of(
        st.builds(
            lambda first, count, tier: store(first, min(first + count, 8), tier),
            st.integers(0, 7),
            st.integers(1, 8),
            st.sampled_from([HOST, DISK]),
        ),
        st.builds(
            lambda block, tier: remove(block, tier=tier),
            st.integers(0, 7),
            st.sampled_from([HOST, DISK]),
        ),
    ),
    max_size=20,
)


@given(_EVENTS)
def test_a_prefix_goes_on_through_exactly_the_stored_blocks(
    events: list[BlocksStored | BlocksRemoved],
) -> None:
    made, held = router(worker(1)), {HOST: set[int](), DISK: set[int]()}
    for event in events:
        made.apply(KvEvent(1, 0, event), 0.0)
        blocks = {NAMES.index(name) for name in event.block_hashes}
        held[event.tier] = (
            held[event.tier] | blocks
            if isinstance(event, BlocksStored)
            else held[event.tier] - blocks
        )
    host = next(n for n in range(9) if n not in held[HOST])
    disk = next(n for n in range(host, 9) if n not in held[DISK]) - host
    assert counts(made) == (0, host, disk)
    slot = made.registry.slots(1)[0]
    assert made.tiers.block_count(slot) == (len(held[HOST]), len(held[DISK]))
    assert bool(made.tiers.mask) == bool(held[HOST] or held[DISK])
    restored = Router.restore(json.loads(json.dumps(made.snapshot())))
    assert counts(restored) == counts(made)
    copied = made.capture().tiers
    made.apply(KvEvent(1, 0, Cleared()), 0.0)
    assert copied.block_count(slot) == (len(held[HOST]), len(held[DISK]))
    assert made.tiers.mask == 0


def test_where_the_last_token_is_always_computed_no_tier_has_its_block() -> None:
    made = Router(exact_reuse=True)
    made.apply(WorkerUpserted(worker(1)), 0.0)
    for tier in ("device", HOST, DISK):
        made.apply(KvEvent(1, 0, store(0, 8, tier)), 0.0)
    assert counts(made) == (7, 0, 0), "128 tokens: the last one of the eighth block is computed"
