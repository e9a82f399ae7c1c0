"""Block hashes with a memory of the beginnings of earlier prompts.

System prompts, documents and conversations repeat, longer each time; prefix caches depend on that,
and hashing can use it too. `PromptHasher` keeps the hashes of pieces of `PIECE` blocks, found by a
128-bit hash over the piece and all before it. A repeated prompt takes little more time than its
conversion to bytes, about a third of hashing it; a new prompt takes a tenth more.
"""

from collections.abc import Iterator, Sequence

from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from router_core.errors import HashingError
from router_core.hashing import (
    TOKEN_BYTES,
    BlockHashes,
    BlockMultimodalInfo,
    hash_blocks,
    hash_prompt,
    mixed_seed,
    salted_seed,
    sequence_hashes,
    token_bytes,
)

PIECE = 32
"""Blocks of one remembered piece."""

_LOW = 2**64 - 1
_Piece = tuple[list[int], list[int]]


class PromptHasher:
    """`hash_prompt` for one block size, with a bounded memory of what it hashed.

    ``max_blocks``: limit of remembered blocks, about 120 bytes each. A piece that was not used
    while as many were added is dropped. The results do not depend on the memory.
    """

    __slots__ = ("_leaving", "_max_pieces", "_older", "_recent", "block_size")

    def __init__(self, block_size: int, max_blocks: int = 131_072) -> None:
        if block_size < 1:
            raise HashingError(f"block size is {block_size}; expected at least 1 token per block")
        self.block_size = block_size
        self._max_pieces = max_blocks // PIECE
        # Two generations: a hit in the older one moves to the recent one, and a full recent one
        # becomes the older one. Strict LRU order would make every hit slower. The older one is left
        # piece by piece: 100,000 numbers freed at once would stop an event loop for milliseconds.
        self._recent: dict[int, _Piece] = {}
        self._older: dict[int, _Piece] = {}
        self._leaving: Iterator[int] = iter(())

    def hash_prompt(
        self,
        tokens: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
        cache_salt: str | None = None,
        is_eagle: bool = False,
        block_mm_infos: Sequence[BlockMultimodalInfo | None] | None = None,
    ) -> BlockHashes:
        """As :func:`router_core.hashing.hash_prompt`."""
        block_size = self.block_size
        if is_eagle or block_mm_infos or not self._max_pieces:
            return hash_prompt(
                tokens,
                block_size,
                lora_name=lora_name,
                cache_namespace=cache_namespace,
                cache_salt=cache_salt,
                is_eagle=is_eagle,
                block_mm_infos=block_mm_infos,
            )
        data = token_bytes(tokens)
        count = len(tokens) // block_size
        stride = block_size * TOKEN_BYTES
        seed = mixed_seed(lora_name, cache_namespace)
        first = salted_seed(seed, cache_salt)
        local: list[int] = []
        sequence: list[int] = []

        def hashes_from(start: int, blocks: int) -> list[int]:
            hashes = hash_blocks(data, stride, blocks, seed, start)
            if not start and first != seed:
                hashes[0] = xxh3_64_intdigest(data[:stride], first)
            return hashes

        # A salted prompt's first seed may be that of a namespace, whose later blocks differ.
        key = first if first == seed else first ^ _LOW
        parent: int | None = None
        whole = count - count % PIECE
        for start in range(0, whole * stride, PIECE * stride):
            key = xxh3_128_intdigest(data[start : start + PIECE * stride], key & _LOW)
            piece = self._recent.get(key) or self._older.get(key)
            if piece is None:
                hashes = hashes_from(start, PIECE)
                piece = hashes, sequence_hashes(hashes, parent)
            local += piece[0]
            sequence += piece[1]
            parent = sequence[-1]
            if key not in self._recent:
                self._remember(key, piece)
        if whole < count:
            hashes = hashes_from(whole * stride, count - whole)
            local += hashes
            sequence += sequence_hashes(hashes, parent)
        return BlockHashes(block_size, local, sequence)

    @property
    def remembered_blocks(self) -> int:
        """Blocks whose hashes are remembered, at most ``max_blocks``."""
        return PIECE * (len(self._recent) + len(self._older))

    def _remember(self, key: int, piece: _Piece) -> None:
        older = self._older
        if len(self._recent) >= self._max_pieces:
            older = self._older = self._recent
            self._recent, self._leaving = {}, iter(tuple(older))
        if older.pop(key, None) is None:
            for oldest in self._leaving:
                if older.pop(oldest, None) is not None:
                    break
        self._recent[key] = piece
