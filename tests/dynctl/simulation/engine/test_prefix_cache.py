"""The prefix cache against a naive model that only knows the events."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dynctl.simulation.engine.cache_events import CacheCleared, CacheRemoved, CacheStored
from dynctl.simulation.engine.prefix_cache import BlockTable, PrefixCache, extend_hashes, root_hash

BLOCK = 4


class Mirror:
    """What a router would believe from events alone: the cached blocks with their parents.

    A block that two requests computed at the same time is stored twice; it goes with its last copy.
    """

    def __init__(self) -> None:
        self.parent: dict[int, int | None] = {}
        self._copies: Counter[int] = Counter()

    def apply(self, cache: PrefixCache) -> None:
        for event in cache.take_events():
            if isinstance(event, CacheStored):
                assert len(event.tokens) == len(event.hashes) * BLOCK
                parent = event.parent
                for digest in event.hashes:
                    assert self.parent.get(digest, parent) == parent, "stored below another block"
                    self._copies[digest] += 1
                    assert parent is None or parent in self.parent, "stored below nothing"
                    self.parent[digest] = parent
                    parent = digest
            elif isinstance(event, CacheRemoved):
                for digest in event.hashes:
                    self._copies[digest] -= 1
                    assert self._copies[digest] >= 0, "removed more often than stored"
                    if not self._copies[digest]:
                        del self.parent[digest]
                        assert digest not in self.parent.values(), "a parent left before its child"
            else:
                self._copies.clear()
                self.parent.clear()


# Prompts from a tiny alphabet of blocks, so that they share prefixes all the time.
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(
    lambda blocks: [token for block in blocks for token in [block] * BLOCK]
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("start"), prompts, st.integers(0, BLOCK - 1)),
        st.tuples(st.just("compute"), st.integers(0, 50), st.integers(1, 6)),
        st.tuples(st.just("grow"), st.integers(0, 50), st.integers(1, 2)),
        st.tuples(st.just("release"), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(operations, st.integers(2, 12))
def test_events_describe_the_cache_and_held_blocks_stay(ops, capacity: int) -> None:
    cache, mirror = PrefixCache(capacity, BLOCK), Mirror()
    live: list[tuple[BlockTable, list[int], list[int]]] = []
    for name, first, second in ops:
        if name == "start":
            tokens = first + [9] * second
            hashes = extend_hashes([], tokens, BLOCK)
            table = cache.acquire(hashes, -(-len(tokens) // BLOCK))
            if table is not None:
                live.append((table, hashes, tokens))
        elif name == "clear":
            held = cache.held_blocks
            assert cache.clear() is (held == 0)
        elif live:
            table, hashes, tokens = live[first % len(live)]
            if name == "compute":
                full = min(second, len(hashes), len(table.blocks))
                cache.commit(table, hashes, tokens, full)
            elif name == "grow":
                before = len(table.blocks)
                fits = second <= cache.free_blocks
                assert cache.grow(table, second) is fits
                assert len(table.blocks) == before + (second if fits else 0)
            else:
                cache.release(table)
                live = [entry for entry in live if entry[0] is not table]
        mirror.apply(cache)

        assert mirror.parent.keys() == cache.cached_hashes
        held_ids = {block for table, _, _ in live for block in table.blocks}
        assert cache.held_blocks == len(held_ids)
        assert cache.held_blocks + cache.free_blocks == capacity
        assert cache.cached_blocks <= capacity
        for table, hashes, _ in live:
            assert all(cache.holders(block) > 0 for block in table.blocks)
            assert set(hashes[: table.cached]) <= cache.cached_hashes
            assert cache.match(hashes) >= table.cached


@given(prompts, prompts)
def test_match_is_the_longest_common_prefix(one: list[int], other: list[int]) -> None:
    cache = PrefixCache(16, BLOCK)
    hashes = extend_hashes([], one, BLOCK)
    table = cache.acquire(hashes, len(hashes))
    assert table is not None
    cache.commit(table, hashes, one, len(hashes))
    cache.release(table)
    common = 0
    while one[common : common + BLOCK] == other[common : common + BLOCK] != []:
        common += BLOCK
    assert cache.match(extend_hashes([], other, BLOCK)) == common // BLOCK


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    cache = PrefixCache(4, 1)
    for tokens in ([1, 2], [5, 6]):
        hashes = extend_hashes([], tokens, 1)
        table = cache.acquire(hashes, 2)
        assert table is not None
        cache.commit(table, hashes, tokens, 2)
        cache.release(table)
    old, recent = extend_hashes([], [1, 2], 1), extend_hashes([], [5, 6], 1)
    touched = cache.acquire(old, 2)
    assert touched is not None
    cache.release(touched)
    cache.take_events()
    assert cache.acquire([], 1) is not None
    assert cache.take_events() == [CacheRemoved((recent[1],))]


def test_a_block_computed_twice_is_cached_until_both_are_evicted() -> None:
    cache = PrefixCache(4, BLOCK)
    tokens = [1] * 8
    hashes = extend_hashes([], tokens, BLOCK)
    one, two = cache.acquire(hashes, 2), cache.acquire(hashes, 2)
    assert one is not None
    assert two is not None
    assert cache.held_blocks == 4
    cache.commit(one, hashes, tokens, 2)
    cache.commit(two, hashes, tokens, 2)
    assert not {*one.blocks} & {*two.blocks}
    stored = CacheStored(None, (*hashes,), (*tokens,), None)
    assert cache.take_events() == [stored, stored]
    assert (cache.match(hashes), cache.cached_blocks) == (2, 2)
    cache.release(one)
    again = cache.acquire([], 2)
    assert cache.take_events() == [CacheRemoved((hashes[1], hashes[0]))]
    assert cache.match(hashes) == 2
    cache.release(two)
    assert again is not None
    assert cache.acquire([], 2) is not None
    assert cache.take_events() == [CacheRemoved((hashes[1], hashes[0]))]
    assert cache.match(hashes) == 0


def test_adapters_and_salts_do_not_share_blocks() -> None:
    roots = {root_hash(None, None), root_hash("a", None), root_hash(None, "a"), root_hash("a", "b")}
    assert len({extend_hashes([], [1] * BLOCK, BLOCK, root)[0] for root in roots}) == 4


def test_a_table_of_an_earlier_cache_frees_nothing() -> None:
    old, new = PrefixCache(4, BLOCK), PrefixCache(4, BLOCK)
    before, now = old.acquire([], 2), new.acquire([], 2)
    assert before is not None
    assert now is not None
    new.release(before)
    assert new.held_blocks == 2


def test_clear_is_an_event() -> None:
    cache = PrefixCache(2, BLOCK)
    assert cache.clear()
    assert cache.take_events() == [CacheCleared()]
