"""Tokens to block hashes, bit for bit as NVIDIA Dynamo computes them.

Two hashes name a block of a prompt:

* its **local hash**: XXH3-64 of the block's tokens alone (each a little-endian u32);
* its **sequence hash**: XXH3-64 of the parent's sequence hash and its own local hash, so that it
  stands for the whole prefix up to and including the block. The first block's two hashes are equal.

Only complete blocks are hashed; a prompt's tail shorter than a block has no hash. Source: the
behaviour of ai-dynamo-runtime 1.6.1, recorded in ``tests/captures/hash_vectors.json``.

The *engine's* block hash is a third name, opaque to the router; see :mod:`router_core.events`.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from struct import Struct, pack
from struct import error as StructError
from sys import byteorder, maxsize
from typing import TypedDict

from xxhash import xxh3_64_intdigest

from router_core.errors import HashingError, is_a
from router_core.frozen import quick_init

SEED = 1337
"""Seed of every block hash without an adapter or a cache namespace."""

_U32_MAX = 2**32 - 1
_U64 = 2**64
_I64 = 2**63
TOKEN_BYTES = 4
# Blocks that one Struct cuts out of the token bytes in one call: slicing takes 78 ns per block,
# this 14 ns. A compiled Struct is kept per (block bytes, count), so the count is bounded.
_CUT = 128
#: A u64 in the machine's byte order, for `struct`. The conversion of a size_t takes a third of the
#: time of that of a "Q".
U64_FORMAT = "N" if maxsize >= 2**63 - 1 else "Q"
_PAIR = Struct(f"2{U64_FORMAT}" if byteorder == "little" else "<2Q").pack


class MultimodalObject(TypedDict):
    """One image, audio clip or other object inside a block."""

    mm_hash: int
    """u64 identity of the object's content."""
    offsets: Sequence[Sequence[int]]
    """Token ranges ``[start, end)`` that the object covers; not hashed."""


class BlockMultimodalInfo(TypedDict):
    """The multimodal objects that touch one block."""

    mm_objects: Sequence[MultimodalObject]


@quick_init
@dataclass(frozen=True, slots=True)
class BlockHashes:
    """The hashes of a prompt's complete blocks; ``local`` and ``sequence`` have equal length."""

    block_size: int
    local: list[int]
    sequence: list[int]

    def __len__(self) -> int:
        return len(self.local)


def hash_prompt(
    tokens: Sequence[int],
    block_size: int,
    *,
    lora_name: str | None = None,
    cache_namespace: str | None = None,
    cache_salt: str | None = None,
    is_eagle: bool = False,
    block_mm_infos: Sequence[BlockMultimodalInfo | None] | None = None,
) -> BlockHashes:
    """Both hashes of every complete block of ``tokens``; options as in `local_block_hashes`."""
    local = local_block_hashes(
        tokens,
        block_size,
        lora_name=lora_name,
        cache_namespace=cache_namespace,
        cache_salt=cache_salt,
        is_eagle=is_eagle,
        block_mm_infos=block_mm_infos,
    )
    return BlockHashes(block_size, local, sequence_hashes(local))


def local_block_hashes(
    tokens: Sequence[int],
    block_size: int,
    *,
    lora_name: str | None = None,
    cache_namespace: str | None = None,
    cache_salt: str | None = None,
    is_eagle: bool = False,
    block_mm_infos: Sequence[BlockMultimodalInfo | None] | None = None,
) -> list[int]:
    """Local hashes (u64) of the complete blocks of ``tokens``.

    ``tokens``: ids in 0 .. 2**32 - 1. An ``array('I')`` needs no conversion (about a third of the
    time). ``block_size``: tokens per block, at least 1.

    ``lora_name`` and ``cache_namespace`` keep the blocks of different adapters and tenants apart;
    both are mixed into every block, as Dynamo does with its cache salts. ``cache_salt`` is mixed
    into the first block only, as vLLM does: its events of later blocks do not have the salt, and
    the sequence hashes of later blocks differ through the first. The empty string means none.
    With ``is_eagle`` a block's window is one token longer than its stride, so a block completes
    only when the token after it is known. ``block_mm_infos[i]`` has the multimodal objects of
    block i; missing entries mean none.

    Raises `HashingError` for a block size below 1, a token out of range, or a multimodal object
    without its fields.
    """
    if not is_a(block_size, int) or block_size < 1:
        raise HashingError(f"block size is {block_size!r}; expected at least 1 token per block")
    data = token_bytes(tokens)  # prompts shorter than a block have the same range of ids
    count = (len(tokens) - 1 if is_eagle else len(tokens)) // block_size
    if count <= 0:
        return []
    seed = mixed_seed(lora_name, cache_namespace)
    first = salted_seed(seed, cache_salt)
    stride = block_size * TOKEN_BYTES
    if is_eagle or block_mm_infos:
        window = stride + TOKEN_BYTES if is_eagle else stride
        suffixes = _multimodal_suffixes(block_mm_infos or (), count)
        return [
            xxh3_64_intdigest(data[at : at + window] + suffix, seed if at else first)
            for at, suffix in zip(range(0, count * stride, stride), suffixes, strict=True)
        ]
    hashes = hash_blocks(data, stride, count, seed)
    if first != seed:
        hashes[0] = xxh3_64_intdigest(data[:stride], first)
    return hashes


def hash_blocks(data: bytes, stride: int, count: int, seed: int, start: int = 0) -> list[int]:
    """Local hashes of ``count`` blocks of ``stride`` bytes in ``data`` from ``start``."""
    if count <= _CUT:
        blocks = _cutter(stride, count).unpack_from(data, start)
        return list(map(xxh3_64_intdigest, blocks, repeat(seed)))
    hashes: list[int] = []
    end = start + count * stride
    whole = end - count % _CUT * stride
    cut = _cutter(stride, _CUT).unpack_from
    for at in range(start, whole, _CUT * stride):
        hashes += map(xxh3_64_intdigest, cut(data, at), repeat(seed))
    rest = _cutter(stride, count % _CUT).unpack_from(data, whole)
    hashes += map(xxh3_64_intdigest, rest, repeat(seed))
    return hashes


def sequence_hashes(local: Sequence[int], parent: int | None = None) -> list[int]:
    """Sequence hashes (u64) of a chain of blocks, given their local hashes (u64).

    ``parent``: sequence hash of the block before the first; None where the chain starts a prompt.
    Raises struct.error for what is not an unsigned 64-bit number, after the first block.
    """
    digest, pair, seed = xxh3_64_intdigest, _PAIR, SEED
    if parent is not None:
        return [parent := digest(pair(parent, block), seed) for block in local]
    if not local:
        return []
    rest = iter(local)
    # The first block has no parent to mix in: its sequence hash is its local hash.
    first = chained = next(rest)
    return [first, *[chained := digest(pair(chained, block), seed) for block in rest]]


def chain(parent: int, local: int) -> int:
    """Sequence hash of the block ``local`` (local hash) that follows ``parent`` (sequence hash)."""
    return xxh3_64_intdigest(_PAIR(parent, local), SEED)


def to_signed(value: int) -> int:
    """A u64 as the i64 with the same bits, the form of sequence hashes in Dynamo's JSON."""
    return value - _U64 if value >= _I64 else value


def to_unsigned(value: int) -> int:
    """The u64 with the bits of ``value``, an i64 or already a u64."""
    return value + _U64 if value < 0 else value


def mixed_seed(lora_name: str | None, cache_namespace: str | None) -> int:
    """Seed of the local hashes of one adapter and one cache namespace; empty means none."""
    seed = SEED
    if lora_name is None and cache_namespace is None:
        return seed
    for name, value in (("lora_name", lora_name), ("cache_namespace", cache_namespace)):
        if value is not None and not is_a(value, str):
            kind = type(value).__name__
            raise HashingError(f"{name} is of type {kind}; expected a string or None")
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_namespace:
        # The seed differs from the adapter's, so that equal names give different hashes.
        seed += xxh3_64_intdigest(cache_namespace.encode(), 1)
    return seed % _U64


def salted_seed(seed: int, cache_salt: str | None) -> int:
    """Seed of a prompt's first block with a salt, given that of the other blocks."""
    if not cache_salt:
        return seed
    # As for a cache namespace, so that a prompt of one block has the same hash with either.
    return (seed + xxh3_64_intdigest(cache_salt.encode(), 1)) % _U64


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian u32; `HashingError` for one out of range."""
    if not hasattr(tokens, "__len__"):
        kind = type(tokens).__name__
        raise HashingError(f"tokens are of type {kind}; expected a sequence of integers")
    try:
        if isinstance(tokens, array) and tokens.typecode == "I" and byteorder == "little":
            return tokens.tobytes()
        return _packer(len(tokens))(*tokens)
    except StructError:
        raise _bad_token(tokens) from None


def _bad_token(tokens: Sequence[object]) -> HashingError:
    for position, token in enumerate(tokens):
        if not isinstance(token, int):
            kind = type(token).__name__
            return HashingError(f"token {position} is of type {kind}; expected an integer")
        if not 0 <= token <= _U32_MAX:
            return HashingError(f"token {position} is {token}; expected 0 to {_U32_MAX}")
    return HashingError(f"the {len(tokens)} tokens cannot be packed as unsigned 32-bit integers")


@lru_cache(maxsize=4096)
def _packer(count: int) -> Callable[..., bytes]:
    # Faster than struct.pack, which copies its arguments once more, and than array("I", tokens).
    return Struct(f"<{count}I").pack


@lru_cache(maxsize=8 * _CUT)
def _cutter(block_bytes: int, count: int) -> Struct:
    return Struct(f"{block_bytes}s" * count)


def _multimodal_suffixes(infos: Sequence[BlockMultimodalInfo | None], count: int) -> list[bytes]:
    """The bytes that follow each block's tokens: its objects' hashes, ascending, as u64."""
    suffixes = [_multimodal_suffix(info, block) for block, info in enumerate(infos[:count])]
    return suffixes + [b""] * (count - len(suffixes))


def _multimodal_suffix(info: object, block: int) -> bytes:
    if info is None:
        return b""
    where = f"block_mm_infos[{block}]"
    if not isinstance(info, Mapping) or "mm_objects" not in info:
        raise HashingError(f"{where} lacks `mm_objects`; expected a list of objects or null")
    values: list[int] = []
    for index, item in enumerate(info["mm_objects"]):
        for name in ("mm_hash", "offsets"):
            if not isinstance(item, Mapping) or name not in item:
                raise HashingError(f"{where}.mm_objects[{index}] lacks `{name}`")
        value = item["mm_hash"]
        if not isinstance(value, int) or not 0 <= value < _U64:
            raise HashingError(
                f"{where}.mm_objects[{index}].mm_hash is {value!r}; expected 0 to {_U64 - 1}"
            )
        values.append(value)
    return pack(f"<{len(values)}Q", *sorted(values))
