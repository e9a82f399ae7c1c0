"""The packed table against a dict, also with keys that are chosen to be close to each other."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core import packed_table
from router_core.packed_table import PackedTable

PRIME = packed_table._PRIME


def one_of(kind: str, source: random.Random) -> int:
    if kind == "random":
        return source.getrandbits(64)
    if kind == "counted":
        return source.randrange(3000)
    if kind == "one shard":
        return source.randrange(3000) << 10
    return source.randrange(300) * PRIME + source.randrange(3)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["random", "counted", "one shard", "equal remainders"]),
)
def test_a_table_equals_a_dict(seed: int, kind: str) -> None:
    source = random.Random(seed)
    table, model = PackedTable(), dict[int, int]()
    keys: dict[int, int] = {}

    def is_meant(value: int, key: int) -> bool:
        return keys[value] == key

    free = 1
    for _ in range(source.randrange(150)):
        if source.random() < 0.6:
            added = [one_of(kind, source) for _ in range(source.randint(1, 12))]
            fits = len({*added}) == len(added) and model.keys().isdisjoint(added)
            assert table.add_new(added, free, is_meant) == fits
            if fits:
                for key in added:
                    keys[free] = key
                    model[key] = free
                    free += 1
        elif source.random() < 0.3:
            key = one_of(kind, source)
            if key not in model:
                keys[free] = key
                model[key] = free
                table.add(key, free)
                free += 1
        else:
            for key in source.sample(sorted(model), min(len(model), source.randint(1, 9))):
                table.remove(key, model[key])
                del keys[model.pop(key)]
        if source.random() < 0.05:
            table = table.copy()
        for key in [one_of(kind, source), *source.sample(sorted(model), min(len(model), 3))]:
            assert table.find(key, is_meant) == model.get(key, 0)
            assert table.first(key) or key not in model
    assert sorted(table.values()) == sorted(model.values())


def test_crowded_keys_are_found_and_removed() -> None:
    """More keys with one remainder than places: an engine may choose its names."""
    table = PackedTable()
    keys = [5 + PRIME * number for number in range(200)]
    for value, key in enumerate(keys, 1):
        table.add(key, value)
    assert table._crowded
    for value, key in enumerate(keys, 1):
        assert table.find(key, lambda one, key: keys[one - 1] == key) == value
    assert not table.add_new([1, keys[150]], 900, lambda one, key: keys[one - 1] == key)
    for value, key in enumerate(keys, 1):
        table.remove(key, value)
    assert not table._crowded
    assert [*table.values()] == []


def test_a_key_that_occurs_twice_is_found_among_crowded_ones() -> None:
    table = PackedTable()
    keys = [5 + PRIME * number for number in range(60)]
    assert not table.add_new([*keys, keys[55]], 1, lambda value, key: False)
    assert [*table.values()] == []
    assert table.add_new(keys, 1, lambda value, key: keys[value - 1] == key)
    assert table._crowded
    assert sorted(table.values()) == [*range(1, 61)]


def test_a_copy_is_independent() -> None:
    table = PackedTable()
    table.add(7, 1)
    copied = table.copy()
    table.remove(7, 1)
    copied.add(8, 2)
    assert sorted(copied.values()) == [1, 2]
    assert [*table.values()] == []


@pytest.mark.parametrize("step", [1, 2**10, 2**20, 2**38])
def test_counted_names_take_few_places(step: int) -> None:
    """Engines may name blocks 1, 2, 3."""
    table = PackedTable()
    for first in range(1, 20_001, 50):
        keys = [number * step for number in range(first, first + 50)]
        assert table.add_new(keys, first, lambda value, key: value * step == key)
    places = sum(len(shard) for shard in {id(one): one for one in table._shards}.values())
    assert places + len(table._crowded) < 20_000 * 6
