"""Events of one rank's KV cache, and what the index did with them.

The router's change ``KvEvent`` adds the worker and its data-parallel rank. Hashes are in columns,
not one object per block: a stored event of 32 blocks is one value, and the index reads the columns
directly.

``block_hashes`` are the **engine's** names of blocks. They are opaque: two workers may use
different names for the same content (Python's hash seed), and nothing is matched by them. They
name a parent, and later the blocks that are removed.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from router_core.frozen import quick_init

DEVICE = "device"
"""The tier whose blocks the prefix index holds: the accelerator's own memory. Those of the tiers
below it are in :mod:`router_core.lower_tiers`."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A chain of blocks was stored in the cache.

    ``parent_hash``: the engine's name of the block before the first, None at a prompt's start.
    ``block_hashes[i]``: the engine's name (u64) of block i; ``local_hashes[i]`` its local hash
    (u64, :func:`router_core.hashing.local_block_hashes`). The two have equal length.
    ``tier``: the memory that has the blocks. ``group``: the KV cache group, where there are several
    (:mod:`router_core.cache_groups`).
    ``counted``: the engine reports each of several copies of a block, and later the removal of
    each: then the block is held until the last copy is removed. The own events of vLLM and SGLang
    are such, so give True for them. False is for Dynamo's events, where storing a held block
    changes nothing and its first removal removes it.
    """

    parent_hash: int | None
    block_hashes: Sequence[int]
    local_hashes: Sequence[int]
    tier: str = DEVICE
    group: int = 0
    counted: bool = False


@dataclass(frozen=True, slots=True)
class WindowStored:
    """Blocks of a group with a sliding window were stored; copies of a block count each.

    ``block_hashes``: the engine's names. ``span``: how many blocks of the index one of them is.
    ``needed``: how many of them must be held before a point for the cache to be reused up to it.
    """

    group: int
    block_hashes: Sequence[int]
    needed: int
    span: int = 1
    tier: str = DEVICE


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks left the cache of one group; ``block_hashes`` are the engine's names of them."""

    block_hashes: Sequence[int]
    tier: str = DEVICE
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache of the rank was emptied."""


def wrong_hash(event: object) -> str | None:
    """Which field of a cache event is not what it must be, and what is expected; None if all are.

    Types only: a range is checked where the event takes effect.
    """
    if not isinstance(event, BlocksStored | WindowStored | BlocksRemoved | Cleared):
        return f"event: expected a CacheEvent, got {type(event).__name__}"
    if isinstance(event, Cleared):
        return None
    parent = getattr(event, "parent_hash", None)
    if parent is not None and not isinstance(parent, int):
        return f"parent_hash: {_expected_hash(parent)}"
    for name in ("block_hashes", "local_hashes"):
        hashes = getattr(event, name, ())
        if isinstance(hashes, str | bytes) or not isinstance(hashes, Sequence | array):
            kind = type(hashes).__name__
            return f"{name}: expected a sequence of unsigned 64-bit numbers, got {kind}"
        for place, value in enumerate(hashes):
            if not isinstance(value, int):
                return f"{name}[{place}]: {_expected_hash(value)}"
    return None


def _expected_hash(value: object) -> str:
    text = f"expected an unsigned 64-bit number, got {type(value).__name__}"
    if isinstance(value, bytes):
        text += "; of the bytes that vLLM publishes take int.from_bytes(value[-8:], 'big')"
    return text


CacheEvent = BlocksStored | WindowStored | BlocksRemoved | Cleared


class Fault(StrEnum):
    """Why blocks of a stored event were refused; stable codes."""

    UNKNOWN_PARENT = "unknown_parent"
    """The worker does not hold the parent, so the prefix is unknown. Nothing was stored; an exact
    index refuses only what finds no room among the blocks that wait for their parent."""
    HASH_CONFLICT = "hash_conflict"
    """The worker's engine already uses this hash for another block of its cache."""
    COLUMNS_DIFFER = "columns_differ"
    """The numbers of local hashes and engine hashes differ. Nothing was stored."""
    NOT_A_HASH = "not_a_hash"
    """A local hash outside 0 .. 2**64 - 1, or a hash of another type than int."""
    SLOT_DROPPED = "slot_dropped"
    """The worker was lost and its slot is being swept. Nothing was stored."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why blocks of a stored event were refused: the first refused block and all after it."""

    code: Fault
    value: int | None
    """The engine hash concerned (for COLUMNS_DIFFER the number of local hashes)."""
    blocks: int
    """Blocks of the event that were refused."""
    message: str


@quick_init
@dataclass(frozen=True, slots=True)
class StoreResult:
    """The result of a stored event, in blocks: newly held, held before, refused (with a reason).

    ``waiting``: blocks that count as soon as their parent is stored, which the worker does not hold
    (:mod:`router_core.detached`).
    """

    stored: int
    known: int
    refused: Refusal | None = None
    waiting: int = 0


@quick_init
@dataclass(frozen=True, slots=True)
class RemoveResult:
    """The result of a removal, in blocks.

    ``hidden``: blocks that lost their prefix because an earlier block was removed; they count as
    not held until they are stored again, or in an exact index until the earlier block is.
    ``unknown``: names of no block that the worker holds, which is normal for blocks hidden before.
    """

    removed: int
    hidden: int
    unknown: int


_MESSAGES = {
    Fault.UNKNOWN_PARENT: "parent block {value} is not held by the worker; "
    "blocks refused: {blocks}",
    Fault.HASH_CONFLICT: "block hash {value} is in use for another block of the worker; "
    "blocks refused: {blocks}",
    Fault.COLUMNS_DIFFER: "{blocks} block hashes and {value} local hashes; expected equal numbers",
    Fault.NOT_A_HASH: "the local hash of block {value} is not an unsigned 64-bit number; "
    "blocks refused: {blocks}",
    Fault.SLOT_DROPPED: "the worker is lost; blocks refused: {blocks}",
}


def refused_store(
    code: Fault, value: int | None, blocks: int, *, stored: int = 0, known: int = 0
) -> StoreResult:
    """The result of a stored event whose last ``blocks`` were refused."""
    message = _MESSAGES[code].format(value=value, blocks=blocks)
    return StoreResult(stored, known, Refusal(code, value, blocks, message))
