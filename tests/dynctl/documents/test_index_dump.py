"""An index as bytes: the same index comes out, and nothing else is accepted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.base.decode_errors import WireError
from dynctl.documents.index_dump import (
    Chain,
    DumpReader,
    RankDump,
    chains_of,
    decode_snapshot,
    encode_dump,
)
from router_core import BlocksRemoved, BlocksStored, KvEvent, Router, Worker, WorkerUpserted

#: Prompts over few different blocks, so that they share beginnings.
PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=6)


def decode_dump(data: bytes) -> list[RankDump]:
    return decode_snapshot(data)[1]


def router() -> Router:
    made = Router(exact_reuse=True)
    assert made.apply(WorkerUpserted(Worker(1, "w", "m")), 0.0).ok
    return made


def stored(blocks: list[int], **more: object) -> BlocksStored:
    """A prompt whose blocks are named after their path."""
    names = [int("".join(map(str, blocks[: at + 1]))) for at in range(len(blocks))]
    return BlocksStored(None, names, blocks, **more)  # type: ignore[arg-type]


def dump_of(made: Router) -> RankDump:
    index = made.index
    lower = {
        row["tier"]: [(p, local, name) for p, local, name in row["blocks"]]
        for row in made.tiers.dump()
    }
    place = (1, 0, "m", 16, "tcp://e:1", 7, 99)
    return RankDump(*place, chains_of(index, 0), index.copies(0), lower, index.holes(0))


def whole(rank: RankDump) -> bytes:
    return b"".join(encode_dump("1", [rank]))


@given(st.lists(st.tuples(PROMPTS, st.sampled_from(["store", "copy", "remove", "host", "orphan"]))))
@settings(deadline=None)
def test_the_index_of_a_dump_is_the_same(actions):
    made = router()
    for blocks, act in actions:
        event: BlocksStored | BlocksRemoved = stored(blocks)
        if act == "remove":
            event = BlocksRemoved(stored(blocks).block_hashes[-1:])
        elif act == "orphan":
            event = BlocksStored(9, (95,), (5,))
        elif act == "copy":
            event = stored(blocks, counted=True)
        elif act == "host":
            event = stored(blocks, tier="host_pinned")
        made.apply(KvEvent(1, 0, event), 0.0)
    (rank,) = decode_dump(whole(dump_of(made)))
    again = router()
    for event in rank.events():
        assert again.apply(KvEvent(1, 0, event), 0.0).ok
    assert again.index.dump() == made.index.dump()
    assert sorted(map(str, again.tiers.dump())) == sorted(map(str, made.tiers.dump()))
    assert rank.blocks == made.index.block_count(0) + made.index.detached_count(0)


def test_a_dump_has_its_position():
    (rank,) = decode_dump(whole(RankDump(1, 0, "m", 16, "tcp://e:1", 7, 99)))
    assert (rank.sequence, rank.digest, rank.endpoint) == (7, 99, "tcp://e:1")
    assert decode_dump(b"".join(encode_dump("1", []))) == []


def test_every_cut_and_every_changed_byte_is_refused():
    made = router()
    made.apply(KvEvent(1, 0, stored([1, 2, 3])), 0.0)
    good = whole(dump_of(made))
    for at in range(len(good)):
        with pytest.raises(WireError):
            decode_dump(good[:at])
        with pytest.raises(WireError):
            decode_dump(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])


@given(st.integers(1, 400))
def test_a_dump_in_pieces_gives_its_ranks_as_they_are_whole(size):
    made = router()
    made.apply(KvEvent(1, 0, stored([1, 2, 3])), 0.0)
    one = dump_of(made)
    data = b"".join(encode_dump("1", [one, one]))
    reader = DumpReader()
    found = [rank for at in range(0, len(data), size) for rank in reader.feed(data[at : at + size])]
    assert found == [one, one]
    assert reader.complete


def test_columns_of_different_lengths_are_refused():
    rank = RankDump(1, 0, "m", 16, "e", 7, 9, [Chain(None, b"\0" * 16, b"\0" * 8)])
    with pytest.raises(WireError, match="columns"):
        decode_dump(whole(rank))


@given(st.binary(max_size=200))
def test_any_bytes(data):
    with pytest.raises(WireError):
        decode_dump(data)
