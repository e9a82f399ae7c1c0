"""A hasher with memory returns the same hashes as hashing without memory."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core import prompt_hasher
from router_core.errors import HashingError
from router_core.hashing import hash_blocks, hash_prompt
from router_core.prompt_hasher import PIECE, PromptHasher


@given(seed=st.integers(0, 2**32), block_size=st.integers(1, 3), pieces=st.integers(0, 8))
def test_equal_to_hashing_without_memory(seed: int, block_size: int, pieces: int) -> None:
    source = random.Random(seed)
    hasher = PromptHasher(block_size, max_blocks=pieces * PIECE)
    stock = [[source.randrange(3) for _ in range(200)] for _ in range(2)]
    for _ in range(12):
        prompt = source.choice(stock)[: source.randint(0, 200)] + [
            source.randrange(3) for _ in range(source.choice([0, 0, 5, 150]))
        ]
        options: dict[str, Any] = {
            "lora_name": source.choice([None, "a"]),
            "cache_namespace": source.choice([None, "a"]),
            "cache_salt": source.choice([None, "a", "b"]),
        }
        plain = hash_prompt(prompt, block_size, **options)
        assert hasher.hash_prompt(prompt, **options) == plain
        assert hasher.remembered_blocks <= pieces * PIECE


def test_a_prefix_seen_before_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hasher = PromptHasher(4)
    prompt = list(range(4 * PIECE * 3))
    first = hasher.hash_prompt(prompt)
    hashed = 0

    def counting(data: bytes, stride: int, count: int, seed: int, start: int = 0) -> list[int]:
        nonlocal hashed
        hashed += count
        return [0] * count

    monkeypatch.setattr(prompt_hasher, "hash_blocks", counting)
    longer = hasher.hash_prompt([*prompt, 1, 2, 3, 4])
    assert hashed == 1
    assert longer.sequence[:-1] == first.sequence
    hasher.hash_prompt([7, *prompt[1:]])
    assert hashed == 1 + 3 * PIECE, "another first token makes every later block another one"


def test_a_full_memory_drops_the_oldest_unused_piece_for_each_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hasher = PromptHasher(1, max_blocks=4 * PIECE)
    hashed = 0

    def counting(*arguments: Any) -> list[int]:
        nonlocal hashed
        hashed += 1
        return hash_blocks(*arguments)

    monkeypatch.setattr(prompt_hasher, "hash_blocks", counting)

    def is_remembered(prompt: int) -> bool:
        before = hashed
        hasher.hash_prompt([prompt] * PIECE)
        return hashed == before

    assert not any(map(is_remembered, range(5)))
    assert is_remembered(1)  # that of the fifth prompt took the place of the first one
    assert not is_remembered(5)
    assert not is_remembered(2)
    assert hasher.remembered_blocks == 4 * PIECE
    assert all(map(is_remembered, (1, 4, 5, 2)))


def test_options_without_memory_are_passed_on() -> None:
    prompt = list(range(4 * PIECE * 2))
    hasher = PromptHasher(4)
    hasher.hash_prompt(prompt)
    info = [{"mm_objects": [{"mm_hash": 5, "offsets": []}]}]
    assert hasher.hash_prompt(prompt, is_eagle=True) == hash_prompt(prompt, 4, is_eagle=True)
    with_image = hasher.hash_prompt(prompt, block_mm_infos=info)  # type: ignore[arg-type]
    assert with_image == hash_prompt(prompt, 4, block_mm_infos=info)  # type: ignore[arg-type]
    assert with_image != hash_prompt(prompt, 4)


def test_the_result_is_the_callers_own() -> None:
    hasher = PromptHasher(1)
    prompt = list(range(PIECE))
    hasher.hash_prompt(prompt).local.clear()
    assert hasher.hash_prompt(prompt) == hash_prompt(prompt, 1)


def test_block_size_zero_is_refused() -> None:
    with pytest.raises(HashingError, match="block size is 0"):
        PromptHasher(0)
