"""Blocks whose parent is not held: an exact index has what the engine caches, in whatever order the
events arrive."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core import (
    BlocksRemoved,
    BlocksStored,
    Cleared,
    ConfigSet,
    IndexMarked,
    KvEvent,
    Role,
    Router,
    RoutingRequest,
    Worker,
    WorkerUpserted,
    block_ownership,
    detached,
)
from router_core import runs as runs_module
from router_core.events import Fault
from router_core.hashing import local_block_hashes, sequence_hashes
from router_core.index import PrefixIndex
from router_core.runs import LIMIT

Path = tuple[int, ...]
SLOTS = (0, 1, 65)


def name(path: Path) -> int:
    return hash(path) % 2**64


def depth(cache: dict[Path, int], prompt: Path) -> int:
    return next((n for n in range(len(prompt)) if not cache.get(prompt[: n + 1])), len(prompt))


def store(index: PrefixIndex, slot: int, path: Path, blocks: int = 1, counted: bool = True) -> None:
    """The last ``blocks`` of a path."""
    first = len(path) - blocks
    parts = [path[: n + 1] for n in range(first, len(path))]
    parent = name(path[:first]) if first else None
    result = index.store(slot, parent, [*map(name, parts)], path[first:], counted=counted)
    assert result.refused is None
    assert result.stored + result.known + result.waiting == blocks


def reachable(cache: dict[Path, int]) -> int:
    return sum(depth(cache, path) == len(path) for path, copies in cache.items() if copies)


class History:
    """Engines that cache any blocks, whether they cache the parents or not."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.index = PrefixIndex(exact=True)
        self.caches: dict[int, dict[Path, int]] = {slot: {} for slot in SLOTS}
        self.removed: dict[int, set[Path]] = {slot: set() for slot in SLOTS}

    def path(self) -> Path:
        return tuple(self.random.randrange(2) for _ in range(self.random.randint(1, 7)))

    def step(self) -> None:
        slot = self.random.choice(SLOTS)
        cache, path = self.caches[slot], self.path()
        what = self.random.random()
        if what < 0.5:
            blocks = self.random.randint(1, len(path))
            parts = [path[: n + 1] for n in range(len(path) - blocks, len(path))]
            store(self.index, slot, path, blocks)
            for part in parts:
                cache[part] = cache.get(part, 0) + 1
                self.removed[slot].discard(part)
        elif what < 0.95:
            held = sorted(part for part, copies in cache.items() if copies)
            count = self.random.randint(1, 4)
            parts = self.random.sample(held, min(count, len(held)))
            if parts:
                self.index.remove(slot, [*map(name, parts)])
            for part in parts:
                cache[part] -= 1
                if not cache[part]:
                    self.removed[slot].add(part)
        elif what < 0.97:
            self.index.clear(slot)
            cache.clear()
            self.removed[slot].clear()
        elif what < 0.985:
            self.index = PrefixIndex.restore(json.loads(json.dumps(self.index.dump())))
        else:
            self.index = self.index.copy()
        self.removed[slot] = {
            parent
            for parent in self.removed[slot]
            if any(copies and part[:-1] == parent for part, copies in cache.items())
        }

    def compare(self) -> None:
        for slot, cache in self.caches.items():
            for _ in range(4):
                prompt = self.path()
                found = dict(self.index.find_matches(sequence_hashes(prompt)).items())
                assert found.get(slot, 0) == depth(cache, prompt)
            held = {path for path, copies in cache.items() if copies}
            assert self.index.block_count(slot) == reachable(cache)
            assert self.index.detached_count(slot) == len(held) - reachable(cache)
            assert self.index.copy_count(slot) == sum(cache.values()) - len(held)
            parents = {path[:-1] for path in held if len(path) > 1} - held
            assert self.index.is_doubtful(slot) == bool(parents - self.removed[slot])


@pytest.fixture(params=[3, LIMIT], ids=["short runs", "runs"])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (block_ownership, runs_module):
        monkeypatch.setattr(module, "LIMIT", request.param)
    monkeypatch.setattr(block_ownership, "_FEW_NAMES", 2)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("seed", range(60))
def test_the_index_is_what_the_engines_cache(seed: int) -> None:
    history = History(seed)
    for _ in range(60):
        history.step()
        history.compare()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_order_of_events_does_not_matter(seed: int) -> None:
    """Events of single blocks, each block's own in their order, end in one index."""
    chance = random.Random(seed)
    paths = {tuple(chance.randrange(2) for _ in range(chance.randint(1, 6))) for _ in range(12)}
    blocks = sorted({path[: n + 1] for path in paths for n in range(len(path))})
    events = []
    cache: dict[Path, int] = {}
    for path in blocks:
        stored = chance.randint(1, 3)
        removed = chance.randint(0, stored)
        cache[path] = stored - removed
        steps = [True] * stored + [False] * removed
        # A removal comes after a store, as engines send it.
        events.append((path, steps))
    indexes = []
    for _ in range(2):
        index = PrefixIndex(exact=True)
        left = [(path, [*steps]) for path, steps in events]
        while left:
            at = chance.randrange(len(left))
            path, steps = left[at]
            if steps.pop(0):
                store(index, 0, path)
            else:
                index.remove(0, [name(path)])
            if not steps:
                left.pop(at)
        indexes.append(index)
    for index in indexes:
        for path in paths:
            found = dict(index.find_matches(sequence_hashes(path)).items())
            assert found.get(0, 0) == depth(cache, path)
        assert index.block_count(0) == reachable(cache)
        assert index.copy_count(0) == sum(max(0, copies - 1) for copies in cache.values())


def test_events_of_an_index_make_the_same_index() -> None:
    history = History(7)
    while not (history.index.detached_count(0) > 2 and history.index.block_count(0) > 2):
        history.step()
    copied = PrefixIndex(exact=True)
    for event in (*history.index.stored_events(0), *history.index.detached_events(0)):
        copied.store(0, event.parent_hash, event.block_hashes, event.local_hashes)
    copied.remove(0, history.index.holes(0))
    assert copied.is_doubtful(0) == history.index.is_doubtful(0)
    assert copied.block_count(0) == history.index.block_count(0)
    assert copied.detached_count(0) == history.index.detached_count(0)


def test_blocks_beyond_the_bound_are_forgotten_and_the_index_is_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detached, "MOST_DETACHED", 4)
    index = PrefixIndex(exact=True)
    result = index.store(0, 99, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert (result.waiting, result.refused and result.refused.blocks) == (0, 1)
    assert index.detached_count(0) == 4
    index.store(0, None, [99], [0])
    assert index.block_count(0) == 5
    assert index.is_doubtful(0), "block 5 is forgotten"
    index.clear(0)
    assert not index.is_doubtful(0)


def test_a_hole_is_no_doubt_and_an_unknown_parent_is() -> None:
    index = PrefixIndex(exact=True)
    index.store(0, None, [1, 2, 3, 4], [1, 2, 3, 4])
    assert index.remove(0, [3]).hidden == 1
    assert (index.block_count(0), index.detached_count(0), index.is_doubtful(0)) == (2, 1, False)
    index.store(0, 77, [5], [5])
    assert index.is_doubtful(0)
    assert index.remove(0, [5]).removed == 1
    assert not index.is_doubtful(0)
    index.store(0, 2, [3], [3])
    assert (index.block_count(0), bool(index.detached)) == (4, False)


def test_a_chain_that_waits_and_is_no_chain_is_refused() -> None:
    index = PrefixIndex(exact=True)
    index.store(0, None, [1], [1])
    conflict, odd = index.store(0, 9, [1], [1]), index.store(0, 9, [2], [-1])
    assert conflict.refused is not None
    assert conflict.refused.code == Fault.HASH_CONFLICT
    assert odd.refused is not None
    assert odd.refused.code == Fault.NOT_A_HASH
    assert not bool(index.detached)


def fleet(exact: bool) -> Router:
    router = Router(exact_reuse=exact)
    router.apply(WorkerUpserted(Worker(1, "a", "m", Role.AGGREGATED, kv_events=True)), 0.0)
    return router


@pytest.mark.parametrize("exact", [True, False])
def test_the_freshness_of_a_rank_with_unlinked_blocks(exact: bool) -> None:
    router, tokens = fleet(exact), range(33)
    local = local_block_hashes(tokens, 16)
    request = RoutingRequest.from_tokens("r", "m", tokens, 16)

    def apply(event: BlocksStored | BlocksRemoved | Cleared) -> str:
        return router.apply(KvEvent(1, 0, event), 0.0).code

    child = BlocksStored(1, (2,), local[1:], counted=True)
    assert apply(child) == ("awaits_parent" if exact else "unknown_parent")
    row = router.freshness[0]
    assert (row.state, row.trust) == ("unlinked", "degraded")
    router.apply(IndexMarked(1, 0, "gapped", 1), 0.0)
    assert row.state == "gapped"
    router.apply(IndexMarked(1, 0, "current"), 0.0)
    assert (
        Router.restore(json.loads(json.dumps(router.snapshot()))).freshness[0].state == "unlinked"
    )
    assert apply(BlocksStored(None, (1,), local[:1], counted=True)) == "ok"
    if not exact:  # as Dynamo, which counts the child once it is stored again
        assert row.state == "unlinked"
        assert apply(child) == "ok"
    assert (row.state, row.trust) == ("current", "exact")
    assert [*router.overlap_scores(request).values()] == [2]
    apply(BlocksRemoved((1,)))
    assert row.state == "current", "a hole is known"
    assert [*router.overlap_scores(request).values()] == [0]
    apply(child)
    apply(Cleared())
    assert row.state == "current"


@pytest.mark.parametrize("exact", [True, False])
def test_blocks_that_are_held_count_in_full_beside_those_that_cannot_be_linked(exact: bool) -> None:
    router, tokens = fleet(exact), range(65)
    local = local_block_hashes(tokens, 16)
    request = RoutingRequest.from_tokens("r", "m", tokens, 16)
    router.apply(KvEvent(1, 0, BlocksStored(None, (1, 2), local[:2], counted=True)), 0.0)
    (before,) = router.plan(request).final.rows()
    router.apply(KvEvent(1, 0, BlocksStored(99, (4,), local[3:], counted=True)), 0.0)
    (after,) = router.plan(request).final.rows()
    assert router.freshness[0].state == "unlinked"
    assert (before.overlap_blocks, after.overlap_blocks) == (2, 2)
    router.apply(IndexMarked(1, 0, "gapped", 1), 0.0)
    (lost,) = router.plan(request).final.rows()
    assert lost.overlap_blocks == 1


def test_what_was_sent_counts_behind_a_prefix_that_no_event_names() -> None:
    router, tokens = fleet(exact=True), range(65)
    router.apply(ConfigSet({"router_predicted_ttl_secs": 600.0}), 0.0)
    local = local_block_hashes(tokens, 16)
    router.apply(KvEvent(1, 0, BlocksStored(99, (4,), local[3:], counted=True)), 0.0)
    request = RoutingRequest.from_tokens("r", "m", tokens, 16)
    assert router.freshness[0].state == "unlinked"
    (before,) = router.plan(request).final.rows()
    plan = router.plan(request)
    router.apply(router.booking(plan.final, request), 1.0)
    (after,) = router.plan(request).final.rows()
    assert (before.overlap_blocks, after.overlap_blocks) == (0, 4)
