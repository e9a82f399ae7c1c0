"""What a worker's KV cache says about itself, as values.

The router's changes wrap these with the worker, its data-parallel rank and the event's id. Hashes
stand in columns, not one object a block: a stored event of 32 blocks is one value, and the index
reads the columns as they are.

``block_hashes`` are the **engine's** names of blocks. They are opaque: two workers may use
different names for the same content (Python's hash seed), and nothing is matched by them. They
serve to name a parent, and to say later which block is gone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

DEVICE = "device"
"""The tier whose blocks the prefix index holds: the accelerator's own memory."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A chain of blocks was written to the cache.

    ``parent_hash``: the engine's name of the block before the first, None at a prompt's start.
    ``block_hashes[i]``: the engine's name (u64) of block i; ``local_hashes[i]`` its local hash
    (u64, :func:`router_core.hashing.local_block_hashes`). The two have equal length.
    ``tier``: where the blocks lie.
    """

    parent_hash: int | None
    block_hashes: Sequence[int]
    local_hashes: Sequence[int]
    tier: str = DEVICE


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks left the cache; ``block_hashes`` are the engine's names of them."""

    block_hashes: Sequence[int]
    tier: str = DEVICE


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache of the rank was emptied."""


KvEvent = BlocksStored | BlocksRemoved | Cleared
