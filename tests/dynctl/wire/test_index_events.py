"""Events of an engine that reach the index, and the drops."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynctl.base.decode_errors import WireError
from dynctl.wire.index_events import Drop, DropCode, read_batch, to_index_events
from dynctl.wire.vllm_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    decode_message,
    encode_batch,
)
from router_core import (
    DEVICE,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    KvEvent,
    WindowStored,
    local_block_hashes,
)

TOKENS = tuple(range(100, 108))


def stored(**changes):
    fields: dict[str, Any] = {
        "block_hashes": (11, 12),
        "parent_block_hash": 10,
        "token_ids": TOKENS,
        "block_size": 4,
    }
    return BlockStored(**fields | changes)


def device(parent, names, local, **changes):
    """A chain in the device's memory, whose copies the engine reports one by one."""
    return BlocksStored(parent, names, local, **{"counted": True, **changes})


def convert(*events, **options):
    return to_index_events(EventBatch(0.0, events), 4, **options)


def test_order_and_hashes():
    converted = convert(stored(), BlockRemoved((12,)), AllBlocksCleared(), stored())
    blocks = device(10, (11, 12), local_block_hashes(TOKENS, 4))
    assert converted.events == (blocks, BlocksRemoved((12,)), Cleared(), blocks)
    assert converted.drops == ()


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, "device"),
        ("GPU", "device"),
        ("gpu", "device"),
        ("CPU", "host_pinned"),
        ("DISK", "disk"),
        ("EXTERNAL", "external"),
    ],
)
def test_medium_becomes_tier(medium, tier):
    events = convert(stored(medium=medium), BlockRemoved((11,), medium=medium)).events
    assert [event.tier for event in events if not isinstance(event, Cleared)] == [tier, tier]


def test_unknown_medium():
    converted = convert(stored(medium="TAPE"), BlockRemoved((11,), medium="TAPE"))
    assert converted.events == ()
    assert [(drop.code, drop.blocks) for drop in converted.drops] == [
        (DropCode.UNKNOWN_MEDIUM, 2),
        (DropCode.UNKNOWN_MEDIUM, 1),
    ]
    assert "'TAPE' is unknown, expected one of GPU, CPU" in converted.drops[0].message


def test_block_size_mismatch_names_both_sizes():
    converted = convert(stored(block_size=8), stored())
    assert converted.drops == (Drop(DropCode.BLOCK_SIZE_MISMATCH, 2, 8, 4),)
    assert "blocks of 8 tokens" in converted.drops[0].message
    assert "blocks of 4" in converted.drops[0].message
    assert len(converted.events) == 1


@pytest.mark.parametrize(
    ("tokens", "kept", "dropped"), [(7, 1, 1), (4, 1, 1), (3, 0, 2), (0, 0, 2)]
)
def test_too_few_tokens_keep_the_whole_blocks(tokens, kept, dropped):
    converted = convert(stored(token_ids=TOKENS[:tokens]))
    assert converted.drops == (Drop(DropCode.TOKEN_IDS_TOO_SHORT, dropped, tokens, 8),)
    assert converted.drops[0].message == f"token_ids too short: need 8, got {tokens}"
    if kept:
        assert converted.events == (device(10, (11,), local_block_hashes(TOKENS[:4], 4)),)
    else:
        assert converted.events == ()


def test_surplus_tokens_are_ignored():
    assert convert(stored(token_ids=(*TOKENS, 1, 2, 3, 4, 5))) == convert(stored())


def windowed(**changes):
    """Two blocks of a group with a sliding window of 6 tokens, of which a prompt needs 2 blocks."""
    kind = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 6}
    return stored(**{"group_idx": 0, **kind, **changes})


def full(**changes):
    return stored(**{"group_idx": 1, "kv_cache_spec_kind": "full_attention", **changes})


def test_cache_groups_of_a_hybrid_model():
    converted = convert(windowed(), full(), BlockRemoved((11,), group_idx=1))
    assert converted.drops == ()
    assert converted.events == (
        WindowStored(0, (11, 12), needed=2),
        device(10, (11, 12), local_block_hashes(TOKENS, 4), group=1),
        BlocksRemoved((11,), group=1),
    )


def test_a_window_lists_only_blocks_that_can_be_reused():
    """The event has all tokens: without the names of the main group, places are unknown."""
    assert convert(windowed(block_hashes=()), full()).events == convert(full()).events
    (window, _) = convert(windowed(block_hashes=(12,)), full()).events
    assert window == WindowStored(0, (12,), needed=2)
    larger = windowed(block_hashes=(12,), block_size=8)
    assert convert(larger, full()).events[0] == WindowStored(0, (12,), needed=1, span=2)


def test_a_model_with_windows_only_is_indexed_as_prefixes():
    first, second = windowed(), windowed(group_idx=3)
    converted = convert(first, second)
    assert converted.events == (*convert(stored()).events, WindowStored(3, (11, 12), needed=2))
    partial = convert(windowed(block_hashes=(12,)))
    assert partial.events == ()
    assert partial.drops == (Drop(DropCode.BLOCKS_NOT_LISTED, 1, 2, 1),)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"kv_cache_spec_kind": "mamba"}, "mamba"),
        ({"kv_cache_spec_kind": "x" * 500}, "x" * 64),
        ({"kv_cache_spec_kind": None}, "unknown"),
        ({"kv_cache_spec_kind": "full_attention", "group_idx": 64}, "full_attention"),
        ({"kv_cache_spec_sliding_window": None}, "sliding_window"),
        ({"block_size": 2}, "sliding_window"),
        ({"block_size": 0, "medium": "GPU"}, "sliding_window"),
    ],
)
def test_groups_that_are_not_modelled_are_dropped(changes, kind):
    converted = convert(windowed(**{"group_idx": 2, **changes}), full())
    assert converted.events == convert(full()).events
    [drop] = converted.drops
    assert (drop.code, drop.blocks, drop.value) == (DropCode.GROUP_IGNORED, 2, kind)


def test_adapters_keep_blocks_apart():
    named = convert(stored(lora_name="a", lora_id=1)).events
    numbered = convert(stored(lora_id=1), adapter_names={1: "a"}).events
    assert named == numbered
    assert named == (device(10, (11, 12), local_block_hashes(TOKENS, 4, lora_name="a")),)
    unknown = convert(stored(lora_id=2), adapter_names={1: "a"})
    assert unknown.events == ()
    assert unknown.drops[0].code == "UNKNOWN_ADAPTER"


def test_cache_namespace_and_eagle_are_those_of_the_worker():
    (event,) = convert(stored(), cache_namespace="tenant").events
    assert isinstance(event, BlocksStored)
    assert event.local_hashes == local_block_hashes(TOKENS, 4, cache_namespace="tenant")
    nine = (*TOKENS, 200)
    (event,) = convert(stored(token_ids=nine), is_eagle=True).events
    assert isinstance(event, BlocksStored)
    assert event.local_hashes == local_block_hashes(nine, 4, is_eagle=True)
    short = convert(stored(), is_eagle=True)
    assert short.drops == (Drop(DropCode.TOKEN_IDS_TOO_SHORT, 1, 8, 9),)


def pairs_of(tokens):
    return [*map(list, pairwise(tokens))]


def published(**fields):
    return decode_batch(published_bytes(**fields))


def published_bytes(**fields):
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
    }
    event |= {"block_size": 4, "medium": "GPU"} | fields
    return msgspec.msgpack.encode([1.0, [event], 0])


def test_pairs_of_tokens_are_blocks_that_need_the_token_behind_them():
    nine = (*TOKENS, 200)
    batch = published(token_ids=pairs_of(nine))
    assert batch.events[0].token_ids == nine
    converted = to_index_events(batch, 4)
    local = local_block_hashes(nine, 4, is_eagle=True)
    assert converted.events == (device(None, (11, 12), local),)
    assert (converted.drops, converted.pairs) == ((), True)
    assert to_index_events(batch, 4, is_eagle=True).events == converted.events
    assert to_index_events(published(token_ids=list(TOKENS)), 4).pairs is False
    assert to_index_events(published(token_ids=[]), 4).pairs is None
    short = to_index_events(published(token_ids=pairs_of(nine)[:6]), 4)
    assert short.drops == (Drop(DropCode.TOKEN_IDS_TOO_SHORT, 1, 7, 9),)


@pytest.mark.parametrize(
    ("tokens", "path"),
    [
        ([[1, 2], 3], "token_ids[1]: expected two tokens, got an integer"),
        ([[1, 2, 3]], "token_ids[0]: expected two tokens, got an array of length 3"),
        ([[1, 2], [3, 4]], "token_ids[1]: expected a pair that begins with the last token"),
        ([[1, "x"]], "token_ids[1]: Expected `int`"),
        ([1, [2, 3]], "token_ids[1]: Expected `int`"),
        ([[1, [2]]], "token_ids[1]: Expected `int`"),
    ],
)
def test_pairs_that_are_none(tokens, path):
    with pytest.raises(WireError, match=re.escape(path)):
        published(token_ids=tokens)


def test_a_salt_and_an_adapter_are_part_of_the_identity():
    first = stored(parent_block_hash=None, extra_keys=[["salt"], None])
    (event,) = convert(first).events
    assert isinstance(event, BlocksStored)
    assert event.local_hashes == local_block_hashes(TOKENS, 4, cache_salt="salt")
    # Blocks after the first have no salt of their own: their prefix has it.
    (later,) = convert(stored(extra_keys=None)).events
    assert isinstance(later, BlocksStored)
    assert later.local_hashes == local_block_hashes(TOKENS, 4)
    keys = [["a", "a"], ["a"]]  # adapter and salt of the same name
    (both,) = convert(stored(parent_block_hash=None, lora_name="a", extra_keys=keys)).events
    assert isinstance(both, BlocksStored)
    assert both.local_hashes == local_block_hashes(TOKENS, 4, lora_name="a", cache_salt="a")
    numbered = stored(parent_block_hash=None, lora_name="a", lora_id=3, extra_keys=[[3], [3]])
    assert convert(numbered).drops == ()
    image = stored(parent_block_hash=None, extra_keys=[["salt", ["image", 0]], None])
    assert convert(image).drops == (Drop(DropCode.EXTRA_KEYS_NOT_MODELLED, 2, 0, "none"),)


def test_an_index_as_dynamos_has_the_salt_in_every_block():
    salted: dict[int, str] = {}

    def read(*events):
        batch = EventBatch(0.0, tuple(events))
        return to_index_events(batch, 4, salted=salted).events

    first = stored(parent_block_hash=None, extra_keys=[["a"], None])
    more = stored(block_hashes=(13, 14), parent_block_hash=12)
    plain = stored(block_hashes=(21, 22), parent_block_hash=None)
    under_a, unsalted = (
        local_block_hashes(TOKENS, 4, cache_namespace=salt) for salt in ("a", None)
    )
    assert [event.local_hashes for event in read(first, more, plain)] == [
        under_a,
        under_a,
        unsalted,
    ]
    assert salted == dict.fromkeys((11, 12, 13, 14), "a")
    # The host keeps a copy of 13; a name that is stored again without a salt has none.
    read(BlockRemoved((13,), "CPU"), BlockRemoved((14,)), stored(parent_block_hash=None))
    assert salted == {13: "a"}
    assert [event.local_hashes for event in read(stored(parent_block_hash=14))] == [unsalted]
    read(AllBlocksCleared())
    assert salted == {}


def test_blocks_with_other_extra_keys_end_the_run():
    converted = convert(stored(extra_keys=[None, ["salt"]]))
    assert converted.events == (device(10, (11,), local_block_hashes(TOKENS[:4], 4)),)
    assert converted.drops == (Drop(DropCode.EXTRA_KEYS_NOT_MODELLED, 1, 1, "none"),)
    assert convert(stored(extra_keys=[["salt"], None])).events == ()
    unkeyed = convert(stored(extra_keys=[None, []]))
    assert unkeyed == convert(stored())
    adapter = convert(stored(lora_name="a", extra_keys=[["a"], ["a"]]))
    assert adapter.drops == ()


def test_empty_events_vanish():
    converted = convert(stored(block_hashes=(), token_ids=()), BlockRemoved(()))
    assert converted.events == ()
    assert converted.drops == ()


def test_blocks_removed_one_after_the_other_are_one_event():
    """Engines evict block by block; each event costs more than a block of it."""
    converted = convert(
        BlockRemoved((11,)),
        BlockRemoved((12, 13)),
        stored(),
        BlockRemoved((14,)),
        BlockRemoved((15,), medium="CPU"),
        BlockRemoved((16,), medium="CPU", group_idx=1),
        BlockRemoved((17,)),
        AllBlocksCleared(),
        BlockRemoved((18,)),
    )
    assert [
        (list(event.block_hashes), event.tier, event.group) if isinstance(event, BlocksRemoved)
        else type(event).__name__
        for event in converted.events
    ] == [
        ([11, 12, 13], "device", 0),
        "BlocksStored",
        ([14], "device", 0),
        ([15], "host_pinned", 0),
        ([16], "host_pinned", 1),
        ([17], "device", 0),
        "Cleared",
        ([18], "device", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "tier"),
    [
        ({"medium": "STORAGE"}, "disk"),
        ({"medium": "STORAGE", "locality": "REMOTE", "ownership": "shared-store"}, "external"),
        ({"medium": "GPU", "locality": "REMOTE"}, "external"),
        ({"locality": "remote"}, "external"),
        ({"medium": "CPU", "locality": "LOCAL"}, "host_pinned"),
        ({"locality": "LOCAL"}, "device"),
    ],
)
def test_only_local_blocks_of_the_device_are_device_blocks(changes, tier):
    removed = {name: value for name, value in changes.items() if name != "block_size"}
    converted = convert(stored(**changes), BlockRemoved((11,), **removed))
    assert [event.tier for event in converted.events] == [tier, tier]
    assert converted.drops == ()


def test_an_unknown_locality_is_named():
    for event in (stored(locality="RACK"), BlockRemoved((11,), locality="RACK")):
        converted = convert(event)
        assert converted.events == ()
        assert converted.drops[0].code == DropCode.UNKNOWN_MEDIUM
        assert "GPU at RACK" in converted.drops[0].message


def test_offloaded_blocks_without_tokens_are_a_condition_and_lose_nothing_else():
    """vLLM's offloading announces blocks by name only, with a block size of 0."""
    named = stored(
        block_hashes=(13,), parent_block_hash=None, token_ids=(), block_size=0, medium="CPU",
        group_idx=0,
    )  # fmt: skip
    batch = decode_batch(encode_batch(EventBatch(0.0, (named, stored()))))
    converted = to_index_events(batch, 4)
    assert converted.events == convert(stored()).events
    assert converted.drops == (Drop(DropCode.TIER_NOT_DESCRIBED, 1, "CPU", "tokens"),)


def test_what_sglang_publishes_reaches_the_index():
    """Bytes of its own classes: salts and adapters keep blocks apart, tiers have its names."""
    lines = (Path(__file__).parents[2] / "captures" / "sglang-kv-events.jsonl").read_text()
    rows = [row for row in map(json.loads, lines.splitlines()) if "batch" in row]
    events = {}
    for row in rows:
        _, _, payload = decode_message([bytes.fromhex(frame) for frame in row["frames_hex"]])
        batch = decode_batch(payload)
        assert (batch.data_parallel_rank, batch.unknown_fields, batch.unknown_types) == (1, 0, ())
        converted = to_index_events(batch, 4)
        assert not converted.drops
        events[row["batch"]] = converted.events
    prompt = range(1, 9)

    def first(names: tuple[int, ...], **identity: Any) -> BlocksStored:
        local = local_block_hashes(prompt, 4, **identity)
        return BlocksStored(None, names, local, DEVICE, 0, True)

    first_name = 2**64 - 7  # signed in the event
    last = BlocksStored(8, (9,), local_block_hashes(range(9, 13), 4), DEVICE, 0, True)
    assert events["plain"] == (first((first_name, 8)), last, BlocksRemoved((9,)))
    assert events["salted"] == (first((21, 22), cache_salt="tenant-1"),)
    assert events["adapter"] == (first((31, 32), lora_name="adapter-a"),)
    assert [getattr(event, "tier", None) for event in events["host"]] == [
        *("host_pinned", "disk", "external", "host_pinned")
    ]
    assert events["cleared"] == (Cleared(),)


def encoded(*events, rank=None):
    return encode_batch(EventBatch(1.0, events, rank))


def test_a_batch_of_bytes_is_changes_of_a_router():
    read = read_batch(encoded(stored(), BlockRemoved((12,)), rank=3), 7, 4)
    assert read.changes == (
        KvEvent(7, 3, device(10, (11, 12), local_block_hashes(TOKENS, 4))),
        KvEvent(7, 3, BlocksRemoved((12,))),
    )
    assert (read.drops, read.pairs) == ((), False)
    alone = read_batch(encoded(AllBlocksCleared()), 7, 4, dp_rank=2)
    assert (alone.changes, alone.pairs) == ((KvEvent(7, 2, Cleared()),), None)
    other = read_batch(encoded(stored()), 7, 8)
    assert (other.changes, other.drops[0].code) == ((), DropCode.BLOCK_SIZE_MISMATCH)
    named = read_batch(encoded(stored(lora_id=1)), 7, 4, adapter_names={1: "a"})
    local = local_block_hashes(TOKENS, 4, lora_name="a")
    assert named.changes == (KvEvent(7, 0, device(10, (11, 12), local)),)
    with pytest.raises(WireError, match="not msgpack"):
        read_batch(b"\xc1", 7, 4)


def test_hashes_of_bytes_are_their_last_eight():
    """As vLLM publishes them with sha256; the number is that of its integers."""
    names = [bytes(24) + n.to_bytes(8, "big") for n in (11, 12)]
    tokens = list(TOKENS)
    payload = published_bytes(block_hashes=names, parent_block_hash=None, token_ids=tokens)
    read = read_batch(payload, 7, 4)
    assert read.changes == (KvEvent(7, 0, device(None, (11, 12), local_block_hashes(TOKENS, 4))),)
