"""The tiers below the device against a naive model that only knows the events."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynctl.simulation.engine.cache_events import CacheRemoved, CacheStored
from dynctl.simulation.engine.lower_tiers import DISK, HOST
from dynctl.simulation.engine.prefix_cache import BlockTable, PrefixCache, extend_hashes
from tests.dynctl.simulation.engine.test_prefix_cache import BLOCK, operations


class Tiers:
    """The blocks of each tier by its events, with their parents and tokens."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[int, Any]] = {HOST: {}, DISK: {}}

    def apply(self, cache: PrefixCache) -> None:
        for event in cache.take_events():
            if isinstance(event, CacheStored) and event.tier in self.blocks:
                held, parent = self.blocks[event.tier], event.parent
                for index, block in enumerate(event.hashes):
                    assert block not in held, "stored twice"
                    tokens = event.tokens[index * BLOCK : (index + 1) * BLOCK]
                    held[block] = (parent, tokens)
                    parent = block
            elif isinstance(event, CacheRemoved) and event.tier in self.blocks:
                for block in event.hashes:
                    del self.blocks[event.tier][block]
            elif not isinstance(event, CacheStored | CacheRemoved):
                for held in self.blocks.values():
                    held.clear()


@given(operations, st.integers(2, 8), st.integers(0, 6), st.integers(0, 9))
def test_events_describe_the_tiers_which_keep_their_bounds(ops, device, host, disk) -> None:
    cache, seen = PrefixCache(device, BLOCK, host_blocks=host, disk_blocks=disk), Tiers()
    live: list[tuple[BlockTable, list[int], list[int]]] = []
    contents: dict[int, Any] = {}
    for name, first, second in ops:
        if name == "start":
            tokens = first + [9] * second
            hashes = extend_hashes([], tokens, BLOCK)
            for index, block in enumerate(hashes):
                own = tuple(tokens[index * BLOCK : (index + 1) * BLOCK])
                contents[block] = (hashes[index - 1] if index else None, own)
            before = {tier: set(held) for tier, held in seen.blocks.items()}
            cached = cache.match(hashes)
            table = cache.acquire(hashes, -(-len(tokens) // BLOCK))
            if table is not None:
                live.append((table, hashes, tokens))
                on_host, on_disk = table.lower
                end = cached + on_host
                assert set(hashes[cached:end]) <= before[HOST]
                assert set(hashes[end : end + on_disk]) <= before[DISK]
                rest = hashes[end + on_disk :]
                assert not rest or rest[0] not in before[DISK]
                assert on_disk or not rest or rest[0] not in before[HOST]
                cache.commit(table, hashes, tokens, end + on_disk)
        elif name == "clear":
            cache.clear()
        elif live:
            table, hashes, tokens = live[first % len(live)]
            if name == "compute":
                cache.commit(table, hashes, tokens, min(second, len(hashes), len(table.blocks)))
            elif name == "grow":
                cache.grow(table, second)
            else:
                cache.release(table)
                live = [entry for entry in live if entry[0] is not table]
        seen.apply(cache)
        if cache.lower is None:
            assert (host, disk) == (0, 0)
            continue
        known = set(cache.cached_hashes)
        for tier, size in ((HOST, host), (DISK, disk)):
            assert seen.blocks[tier].keys() == set(cache.lower.blocks(tier))
            assert len(seen.blocks[tier]) <= size
            assert all(contents[block] == one for block, one in seen.blocks[tier].items())
            known |= seen.blocks[tier].keys()
        assert cache.lower.known_blocks == len(known)


def _filled(cache: PrefixCache, tokens: list[int]) -> list[int]:
    hashes = extend_hashes([], tokens, 1)
    table = cache.acquire(hashes, len(tokens))
    assert table is not None
    cache.commit(table, hashes, tokens, len(tokens))
    cache.release(table)
    return hashes


def test_the_end_of_a_prefix_goes_down_first_and_what_is_loaded_stays() -> None:
    cache = PrefixCache(3, 1, host_blocks=2, disk_blocks=2)
    one, two, three = _filled(cache, [1, 2, 3])
    _filled(cache, [7, 8, 9])
    lower = cache.lower
    assert lower is not None
    assert (lower.blocks(HOST), lower.blocks(DISK)) == ([two, one], [three])
    cache.take_events()
    table = cache.acquire([one, two, three], 3)
    assert table is not None
    assert (table.cached, table.lower) == (0, (2, 1))
    # It evicts 9, 8 and 7 from the device: what host memory has no room for goes on to disk.
    seven, eight, nine = extend_hashes([], [7, 8, 9], 1)
    assert (lower.blocks(HOST), lower.blocks(DISK)) == ([eight, seven], [one, nine])
    pulled = PrefixCache(3, 1, host_blocks=2)
    blocks = _filled(pulled, [1, 2, 3])
    _filled(pulled, [7, 8, 9])
    other = pulled.acquire(blocks, 3, lower=False)
    assert other is not None
    assert other.lower == (0, 0)


def test_a_run_that_goes_down_together_is_one_event() -> None:
    cache = PrefixCache(3, 1, host_blocks=9)
    one, two, three = _filled(cache, [1, 2, 3])
    cache.take_events()
    assert cache.acquire([], 3) is not None
    assert cache.take_events() == [
        CacheRemoved((three, two, one)),
        CacheStored(None, (one, two, three), (1, 2, 3), None, None, HOST),
    ]
