"""The engines' KV-event bytes: golden captures, the shapes that engines send, and hostile input."""

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.decode_errors import WireError
from dynctl.wire.vllm_events import (
    END_OF_REPLAY,
    END_OF_REPLAY_FRAMES,
    AllBlocksCleared,
    BatchLimits,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    decode_message,
    decode_seq,
    encode_batch,
    encode_message,
    encode_seq,
)

CAPTURE = Path(__file__).parents[2] / "captures" / "vllm-zmq-kv-events.jsonl"
ROWS = [json.loads(line) for line in CAPTURE.read_text().splitlines()]


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def stored(**changes: Any) -> dict[str, Any]:
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
    }
    return event | changes


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['publisher']}-{row['frames_hex'][1]}")
def test_captured_message_decodes_and_encodes_to_its_bytes(row):
    frames = [bytes.fromhex(frame) for frame in row["frames_hex"]]
    topic, seq, payload = decode_message(frames)
    batch = decode_batch(payload)
    ts, events, rank = row["decoded"]
    assert (batch.ts, batch.data_parallel_rank) == (ts, rank)
    assert len(batch.events) == len(events)
    for ours, theirs in zip(batch.events, events, strict=True):
        assert json.loads(msgspec.json.encode(ours)) == theirs
    assert encode_message(topic, seq, batch) == tuple(frames)


def test_capture_holds_both_kinds_of_event_and_gapless_sequences():
    kinds = {event["type"] for row in ROWS for event in row["decoded"][1]}
    assert kinds == {"BlockStored", "BlockRemoved"}
    for publisher in {row["publisher"] for row in ROWS}:
        seqs = [int(r["frames_hex"][1], 16) for r in ROWS if r["publisher"] == publisher]
        assert seqs == list(range(len(seqs)))


def test_positional_events_of_every_length():
    full = ["BlockStored", [11, 12], 7, [1, 2, 3, 4], 2, 5, "CPU", "adapter", None, 1]
    for length in range(5, len(full) + 1):
        (event,) = decode_batch(pack([1.0, [full[:length]], 0])).events
        assert isinstance(event, BlockStored)
        assert event.parent_block_hash == 7
        assert event.lora_id == (5 if length > 5 else None)
        assert event.medium == ("CPU" if length > 6 else None)
        assert event.lora_name == ("adapter" if length > 7 else None)
        assert event.group_idx == (1 if length > 9 else None)


def test_positional_events_of_the_other_types():
    batch = decode_batch(
        pack([1.0, [["BlockRemoved", [1], "DISK"], ["AllBlocksCleared"], ["BlockRemoved", [2]]]])
    )
    assert batch.events == (
        BlockRemoved((1,), medium="DISK"),
        AllBlocksCleared(),
        BlockRemoved((2,)),
    )
    assert batch.data_parallel_rank is None
    assert batch.unknown_fields == 0


def test_maps_and_arrays_in_one_batch():
    batch = decode_batch(pack([1, [stored(), ["BlockRemoved", [3]]], 2]))
    assert batch.events == (BlockStored((11, 12), None, (1, 2, 3, 4), 2), BlockRemoved((3,)))
    assert (batch.ts, batch.data_parallel_rank) == (1.0, 2)


def test_a_longer_array_and_unknown_keys_are_counted_and_skipped():
    long = ["BlockStored", [1], None, [1, 2], 2, *[None] * 10, "new", "newer"]
    batch = decode_batch(
        pack([1.0, [long, stored(novel=1), ["BlockRemoved", [1], None, 0, None, None, 9]], 0])
    )
    assert len(batch.events) == 3
    assert batch.unknown_fields == 4
    assert decode_batch(pack([1.0, [], 0, "later"])).unknown_fields == 1


def test_unknown_event_types_are_named_and_the_others_survive():
    batch = decode_batch(pack([1.0, [{"type": "BlockMoved", "x": 1}, stored(), ["X" * 500, 1]], 0]))
    assert [type(event) for event in batch.events] == [BlockStored]
    assert batch.unknown_types == ("BlockMoved", "X" * 64)


@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        (0, 0),
        (2**64 - 1, 2**64 - 1),
        (-1, 2**64 - 1),
        (-(2**63), 2**63),
        (bytes(range(32)), int.from_bytes(bytes(range(24, 32)), "big")),
        (b"\x01\x00", 256),
    ],
)
def test_hashes_become_u64(wire, expected, positional):
    fields = ["BlockStored", [5, wire], wire, [1, 2], 1]
    names = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size"]
    event = fields if positional else dict(zip(names, fields, strict=True))
    removed = (
        ["BlockRemoved", [wire]]
        if positional
        else {"type": "BlockRemoved"} | {"block_hashes": [wire]}
    )
    decoded = decode_batch(pack([1.0, [event, removed], 0])).events
    assert isinstance(decoded[0], BlockStored)
    assert decoded[0].block_hashes == (5, expected)
    assert decoded[0].parent_block_hash == expected
    assert decoded[1] == BlockRemoved((expected,))


@pytest.mark.parametrize(
    ("payload", "where", "says"),
    [
        (b"", "payload", "not msgpack"),
        (b"\xc1", "payload", "not msgpack"),
        (b"\x93\xcb", "payload", "truncated"),
        (b"\xdd\xff\xff\xff\xff", "payload", "truncated"),
        (b"\x91" * 100_000, "payload", "nested too deeply"),
        (b"\x92\x01\x91\x81\xa1\xff\x01", "payload", "not msgpack"),
        (pack([1.0, []]) + b"\x00", "payload", "not msgpack"),
        (pack({"ts": 1.0, "events": []}), "batch", "got a map of length 2"),
        (pack([1.0]), "batch", "got an array of length 1"),
        (pack(None), "batch", "got nothing"),
        (pack(["1", []]), "ts", "finite number of seconds, got a string"),
        (pack([float("nan"), []]), "ts", "finite"),
        (pack([float("inf"), [["BlockRemoved", [1]]]]), "ts", "finite"),
        (pack([True, []]), "ts", "got a boolean"),
        (pack([1.0, {}]), "events", "expected an array, got a map"),
        (pack([1.0, [], -1]), "data_parallel_rank", "expected a rank"),
        (pack([1.0, [], True]), "data_parallel_rank", "got a boolean"),
        (pack([1.0, [7]]), "events[0]", "expected a map or a tagged array, got an integer"),
        (pack([1.0, [[]]]), "events[0]", "got an array of length 0"),
        (pack([1.0, [stored(), {}]]), "events[1].type", "expected a string, got nothing"),
        (pack([1.0, [[3]]]), "events[0].type", "expected a string, got an integer"),
        (pack([1.0, [stored(block_size=-1)]]), "events[0].block_size", ">= 0"),
        (pack([1.0, [stored(block_size="16")]]), "events[0].block_size", "got `str`"),
        (pack([1.0, [stored(token_ids=[1, -1])]]), "events[0].token_ids[1]", ">= 0"),
        (pack([1.0, [stored(token_ids=[2**32])]]), "events[0].token_ids[0]", "<= 4294967295"),
        (pack([1.0, [stored(token_ids=None)]]), "events[0].token_ids", "got `null`"),
        (pack([1.0, [stored(block_hashes=["a"])]]), "events[0].block_hashes[0]", "a string"),
        (pack([1.0, [stored(block_hashes=[b""])]]), "events[0].block_hashes[0]", "length 0"),
        (pack([1.0, [stored(block_hashes=[1, True])]]), "events[0].block_hashes[1]", "a boolean"),
        (pack([1.0, [stored(parent_block_hash=[])]]), "events[0].parent_block_hash", "an array"),
        (pack([1.0, [["BlockStored", [1], None, [1]]]]), "events[0]", "`block_size`"),
        (pack([1.0, [["BlockRemoved"]]]), "events[0]", "`block_hashes`"),
        (pack([1.0, [stored(medium=5)]]), "events[0].medium", "got `int`"),
    ],
)
def test_malformed_payload_names_what_was_wrong(payload, where, says):
    with pytest.raises(WireError) as caught:
        decode_batch(payload)
    assert caught.value.where == where
    assert says in caught.value.problem


@pytest.mark.parametrize(
    ("limits", "where", "says"),
    [
        (BatchLimits(payload_bytes=10), "payload", "bytes, expected at most 10 bytes"),
        (BatchLimits(events=1), "events", "2 events, expected at most 1"),
        (BatchLimits(tokens=7), "token_ids", "8 tokens, expected at most 7"),
        (BatchLimits(block_hashes=3), "block_hashes", "4 hashes, expected at most 3"),
    ],
)
def test_bounds(limits, where, says):
    payload = pack([1.0, [stored(), stored()], 0])
    assert len(decode_batch(payload).events) == 2
    with pytest.raises(WireError) as caught:
        decode_batch(payload, limits)
    assert caught.value.where == where
    assert says in caught.value.problem


def test_unknown_events_count_toward_the_bound():
    with pytest.raises(WireError):
        decode_batch(pack([1.0, [["Novel"]] * 3, 0]), BatchLimits(events=2))


def test_errors_never_contain_token_ids():
    with pytest.raises(WireError) as caught:
        decode_batch(pack([1.0, [stored(token_ids=[987_654_321_987])]]))
    assert "987654321987" not in str(caught.value)


@pytest.mark.parametrize("seq", [0, 1, 2**63 - 1, END_OF_REPLAY])
def test_sequence_round_trip(seq):
    assert decode_seq(encode_seq(seq)) == seq


def test_sequence_bytes():
    assert encode_seq(258) == b"\0\0\0\0\0\0\1\2"
    assert END_OF_REPLAY_FRAMES == (b"\xff" * 8, b"")
    for bad in (b"", b"\0" * 7, b"\0" * 9, b"\xff" * 7 + b"\xfe"):
        with pytest.raises(WireError):
            decode_seq(bad)
    for out_of_range in (-2, 2**63):
        with pytest.raises(WireError):
            encode_seq(out_of_range)


def test_message_needs_three_frames_and_no_end_marker():
    with pytest.raises(WireError, match="got 2 frames"):
        decode_message([b"", encode_seq(0)])
    with pytest.raises(WireError, match="end-of-replay"):
        decode_message([b"", b"\xff" * 8, b""])


hashes = st.lists(st.integers(0, 2**64 - 1), max_size=4).map(tuple)
maybe_text = st.none() | st.text(max_size=5)
events = st.one_of(
    st.builds(
        BlockStored,
        hashes,
        st.none() | st.integers(0, 2**64 - 1),
        st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple),
        st.integers(1, 2**32 - 1),
        medium=maybe_text,
        lora_name=maybe_text,
        group_idx=st.none() | st.integers(0, 3),
    ),
    st.builds(BlockRemoved, hashes, medium=maybe_text),
    st.just(AllBlocksCleared()),
)
batches = st.builds(
    EventBatch,
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(events, max_size=4).map(tuple),
    st.none() | st.integers(0, 2**32 - 1),
)


@given(batches)
def test_round_trip(batch):
    assert decode_batch(encode_batch(batch)) == batch


def test_an_unknown_rank_is_written():
    """Dynamo's indexer drops batches of two elements."""
    assert encode_batch(EventBatch(1.5, ())) == pack([1.5, [], None])


@given(batches)
def test_positional_form_means_the_same(batch):
    rows = [[type(e).__name__, *msgspec.structs.astuple(e)] for e in batch.events]
    assert decode_batch(pack([batch.ts, rows, batch.data_parallel_rank])) == batch


@given(batches, st.data())
def test_damaged_bytes_raise_only_wire_errors(batch, data):
    payload = bytearray(encode_batch(batch))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for damaged in (bytes(payload), bytes(payload[:cut])):
        with contextlib.suppress(WireError):
            decode_batch(damaged)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary() | st.sampled_from(["BlockStored", "BlockRemoved", "type", "block_hashes"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("type"), inner),
    max_leaves=12,
)  # fmt: skip


@given(st.one_of(st.binary(), anything.map(pack), st.lists(anything).map(
    lambda found: pack([1.0, found, 0]))))  # fmt: skip
def test_arbitrary_bytes_raise_only_wire_errors(payload):
    with contextlib.suppress(WireError):
        decode_batch(payload)
