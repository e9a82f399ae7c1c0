"""`ShardedDict` against a dict, and that it spreads its entries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core.sharded import SHARDS, ShardedDict, shards_of

# Close together, so that keys meet; far apart, beyond u64 and negative, so that all shards occur.
KEYS = st.one_of(
    st.integers(0, 20), st.integers(-(2**65), 2**65), st.sampled_from([61, 122, 2**64])
)
PAIRS = st.lists(st.tuples(KEYS, st.integers(0, 2**64 - 1)), max_size=40)


@given(first=PAIRS, second=PAIRS, gone=st.lists(KEYS, max_size=20))
def test_it_behaves_like_a_dict(
    first: list[tuple[int, int]], second: list[tuple[int, int]], gone: list[int]
) -> None:
    model: dict[int, int] = {}
    sharded = ShardedDict()
    for key, value in first:
        model[key] = sharded[key] = value
    earlier = sharded.copy()
    before = model.copy()

    keys, values = [key for key, _ in second], [value for _, value in second]
    shards = shards_of(keys)
    assert sharded.find_many(keys, shards) == [model.get(key) for key in keys]
    added = [model.setdefault(key, value) for key, value in second]
    assert [sharded.setdefault(key, value) for key, value in second] == added
    assert sharded == model
    model.update(second)
    sharded.set_many(keys, values, shards)
    assert sharded == model

    for key in gone:
        assert sharded.find(key) == model.get(key) == sharded.get(key)
        assert (key in sharded) == (key in model)
        if key in model:
            assert sharded[key] == model[key]
            del sharded[key], model[key]
        else:
            with pytest.raises(KeyError):
                sharded[key]
            with pytest.raises(KeyError):
                del sharded[key]
        assert sharded.pop(key, None) is None
    assert sharded == model
    assert len(sharded) == len(model) == len(list(sharded))
    assert earlier == before, "a copy stands apart"


def test_set_many_goes_as_far_as_the_shorter() -> None:
    sharded = ShardedDict()
    sharded.set_many([1, 2, 3], [10, 20], shards_of([1, 2, 3]))
    sharded.set_many([4], [40, 50], shards_of([4]))
    assert sharded == {1: 10, 2: 20, 4: 40}


@pytest.mark.parametrize("step", [1, 64, 2**32, 2**58, 0x9E3779B97F4A7C15])
def test_no_shard_gets_much_more_than_its_share(step: int) -> None:
    """Names counted up, in equal steps, and spread all over 64 bits."""
    keys = [number * step % 2**64 for number in range(100 * SHARDS)]
    distinct = set(keys)
    sharded = ShardedDict()
    sharded.set_many(keys, keys, shards_of(keys))
    assert len(sharded) == len(distinct)
    assert max(map(len, sharded.shards)) <= 2 * len(distinct) / SHARDS + 2
