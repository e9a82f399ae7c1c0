"""Hashes equal the vectors recorded from Dynamo 1.6.1, option by option and error by error."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from router_core.errors import HashingError, RouterCoreError
from router_core.hashing import (
    chain,
    hash_prompt,
    local_block_hashes,
    sequence_hashes,
    to_signed,
    to_unsigned,
)
from router_core.routing_view import RoutingRequest

VECTORS = json.loads(
    (Path(__file__).parents[1] / "captures" / "hash_vectors.json").read_text(encoding="utf-8")
)
U64 = st.integers(0, 2**64 - 1)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80)


@pytest.mark.parametrize("row", VECTORS, ids=range(len(VECTORS)))
def test_recorded_vector(row: dict[str, Any]) -> None:
    if "error" in row:
        with pytest.raises(HashingError):
            local_block_hashes(row["tokens"], row["block_size"], **row["opts"])
    else:
        assert local_block_hashes(row["tokens"], row["block_size"], **row["opts"]) == row["hashes"]


def test_the_recorded_vectors_cover_hashes_and_errors() -> None:
    assert sum("error" in row for row in VECTORS) == 6
    assert sum("hashes" in row for row in VECTORS) == 23


def mm(*hashes: int) -> dict[str, Any]:
    return {"mm_objects": [{"mm_hash": value, "offsets": []} for value in hashes]}


# Recorded from ai-dynamo-runtime 1.6.1 beside the file's vectors: tokens 0..7, blocks of 4.
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"block_mm_infos": []}, [9143094415614847814, 12124091508212882195]),
        ({"block_mm_infos": [mm(5)]}, [13800920473837347042, 12124091508212882195]),
        ({"block_mm_infos": [None, None, mm(5)]}, [9143094415614847814, 12124091508212882195]),
        ({"block_mm_infos": [mm()]}, [9143094415614847814, 12124091508212882195]),
        ({"block_mm_infos": [mm(9, 2), mm(2, 9)]}, [14734654804384677186, 16151215992837012259]),
        ({"block_mm_infos": [mm(9, 9)]}, [14821789941484202744, 12124091508212882195]),
        ({"block_mm_infos": [mm(5)], "is_eagle": True}, [5689511868008260325]),
        (
            {"is_eagle": True, "lora_name": "adapter-a", "cache_namespace": "tenant-1"},
            [2276699164901194827],
        ),
        (
            {"lora_name": "é", "cache_namespace": "日本"},
            [4117672210815966898, 8121285995680556381],
        ),
    ],
)
def test_options_combined(options: dict[str, Any], expected: list[int]) -> None:
    assert local_block_hashes(range(8), 4, **options) == expected


def test_sequence_hashes_recorded_from_dynamo() -> None:
    hashes = hash_prompt(list(range(1, 9)), 4)
    assert hashes.local == [14643705804678351452, 16777012769546811212]
    assert hashes.sequence == [14643705804678351452, 4945711292740353085]
    assert len(hashes) == 2
    signed = [to_signed(value) for value in hash_prompt(list(range(100, 134)), 16).sequence]
    assert signed == [-7623552809318391097, 4102179227871607950]


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 0), (16, 0), (17, 1), (100, 6)])
def test_an_eagle_block_waits_for_the_token_after_it(length: int, blocks: int) -> None:
    assert len(local_block_hashes(list(range(length)), 16, is_eagle=True)) == blocks


@pytest.mark.parametrize(
    ("tokens", "block_size", "options", "names"),
    [
        ([1, 2], 0, {}, "block size is 0"),
        ([1, 2], -4, {}, "block size is -4"),
        ([1, -1], 16, {}, "token 1 is -1"),
        ([2**32], 1, {}, "token 0 is 4294967296"),
        ([1, "a"], 1, {}, "token 1 is of type str"),
        ([1, 2.0], 1, {}, "token 1 is of type float"),
        ([1], 1, {"block_mm_infos": [{}]}, r"block_mm_infos\[0\] lacks `mm_objects`"),
        ([1], 1, {"block_mm_infos": [{"mm_objects": [{"offsets": []}]}]}, "lacks `mm_hash`"),
        ([1], 1, {"block_mm_infos": [mm(-1)]}, "mm_hash is -1"),
        ([1], 1, {"block_mm_infos": [mm(2**64)]}, "mm_hash is 18446744073709551616"),
    ],
)
def test_bad_input_is_named(
    tokens: list[Any], block_size: int, options: dict[str, Any], names: str
) -> None:
    with pytest.raises(HashingError, match=names) as caught:
        local_block_hashes(tokens, block_size, **options)
    assert isinstance(caught.value, RouterCoreError)
    assert isinstance(caught.value, ValueError)


@given(TOKENS, st.integers(1, 20))
def test_each_block_is_hashed_by_itself(tokens: list[int], block_size: int) -> None:
    expected = [
        xxh3_64_intdigest(
            b"".join(t.to_bytes(4, "little") for t in tokens[at : at + block_size]), 1337
        )
        for at in range(0, len(tokens) - block_size + 1, block_size)
    ]
    assert local_block_hashes(tokens, block_size) == expected
    assert local_block_hashes(tuple(tokens), block_size) == expected
    assert local_block_hashes(array("I", tokens), block_size) == expected


@pytest.mark.parametrize("blocks", [127, 128, 129, 255, 256, 257, 400])
def test_long_prompts_have_the_same_hashes_as_their_blocks(blocks: int) -> None:
    tokens = [n * 7919 % 50_000 for n in range(blocks * 3 + 2)]
    one_by_one = [local_block_hashes(tokens[at : at + 3], 3)[0] for at in range(0, blocks * 3, 3)]
    assert local_block_hashes(tokens, 3) == one_by_one


@given(st.lists(U64, max_size=30))
def test_the_chain_is_the_same_step_by_step(local: list[int]) -> None:
    expected: list[int] = []
    for value in local:
        expected.append(chain(expected[-1], value) if expected else value)
    assert sequence_hashes(local) == expected


@given(U64)
def test_signed_and_unsigned_are_inverse(value: int) -> None:
    assert -(2**63) <= to_signed(value) < 2**63
    assert to_unsigned(to_signed(value)) == value
    assert to_unsigned(value) == value


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(1, 4))
def test_a_salt_is_mixed_into_the_first_block_only(tokens: list[int], size: int) -> None:
    plain = hash_prompt(tokens, size)
    salted = hash_prompt(tokens, size, cache_salt="tenant")
    named = hash_prompt(tokens, size, cache_namespace="tenant")
    assert salted.local[1:] == plain.local[1:]
    assert salted.local[:1] == named.local[:1]
    assert not set(salted.sequence) & set(plain.sequence)
    assert hash_prompt(tokens, size, cache_salt="") == plain
    eagle = hash_prompt(tokens, size, cache_salt="tenant", is_eagle=True)
    assert eagle.local[1:] == hash_prompt(tokens, size, is_eagle=True).local[1:]
    one = RoutingRequest.from_tokens("r", "m", tokens, size, cache_salt="tenant", lora_name="a")
    assert (one.salted, one.lora_name) == (True, "a")
    assert "tenant" not in repr(one)
