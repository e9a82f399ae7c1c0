"""The paged prefix cache of one data-parallel rank: blocks, their hashes and their holders.

A block is *held* while a request (or a hand-off that was not pulled yet) uses it, *cached* once it
is full, computed and findable by its hash, and *free* while it is not held. Free blocks keep their
content until they are needed; the least recently used one is reused first.

Leaf-first eviction needs no tree: a request that holds a block holds its whole prefix, and a
released chain joins the free list tail first, so a child is always older there than its parent.
Hence every cached block has a cached parent, so that `match` can stop at the first miss.

What is evicted goes to the tiers below, where there are any.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct

from xxhash import xxh3_64_intdigest

from dynctl.simulation.engine.cache_events import (
    CacheCleared,
    CacheEvent,
    CacheRemoved,
    CacheStored,
)
from dynctl.simulation.engine.lower_tiers import Content, EngineTiers

# Block ids as in vLLM: private to the engine, unrelated to the router's hashes, and equal on every
# engine (as in vLLM with the same PYTHONHASHSEED).
_HASH_SEED = 0x6B76_5F73_696D
_U64 = Struct("<Q")


def root_hash(lora: str | None, cache_salt: str | None) -> int:
    """The parent hash of the first block; it differs by adapter and salt."""
    if not lora and not cache_salt:
        return 0
    text = f"{lora or ''}\0{cache_salt or ''}"
    return xxh3_64_intdigest(text.encode(), _HASH_SEED)


def extend_hashes(
    hashes: list[int], tokens: Sequence[int], block_size: int, root: int = 0
) -> list[int]:
    """Append the hashes (chained u64) of further full blocks of `tokens`; returns `hashes`."""
    for index in range(len(hashes), len(tokens) // block_size):
        parent = hashes[index - 1] if index else root
        block = tokens[index * block_size : (index + 1) * block_size]
        packed = _U64.pack(parent) + Struct(f"<{block_size}I").pack(*block)
        hashes.append(xxh3_64_intdigest(packed, _HASH_SEED))
    return hashes


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request in `owner`, in order; the first `cached` are findable.

    `lower`: how many of those behind them were found in host memory, and behind these on disk.
    """

    owner: "PrefixCache"
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    lower: tuple[int, int] = (0, 0)


class PrefixCache:
    """Block pool of `total_blocks` blocks of `block_size` tokens.

    Changes of the cached set are queued as events; `take_events` returns them in order. Without
    ``events`` they are not: ``blocks`` has what is cached. ``host_blocks`` and ``disk_blocks``:
    sizes of the tiers below, ``lower``, which is None where both are 0.
    """

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        *,
        events: bool = True,
        host_blocks: int = 0,
        disk_blocks: int = 0,
    ) -> None:
        self.total_blocks = total_blocks
        self.block_size = block_size
        self._hash_of: list[int | None] = [None] * total_blocks
        self._holders = [0] * total_blocks
        self._queues = events
        #: Blocks that were reused although they were cached.
        self.evictions = 0
        #: Each cached hash -> the oldest block with it; further ones with the same, oldest first.
        self.blocks: dict[int, int] = {}
        self._copies: dict[int, dict[int, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total_blocks))
        self._events: list[CacheEvent] = []
        self.lower: EngineTiers | None = None
        if host_blocks or disk_blocks:
            note = self._note if events else None
            self.lower = EngineTiers(host_blocks, disk_blocks, self.blocks, note)

    @property
    def held_blocks(self) -> int:
        """The number of blocks that requests or hand-offs hold."""
        return self.total_blocks - len(self._free)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def cached_hashes(self) -> frozenset[int]:
        return frozenset(self.blocks)

    @property
    def cached_blocks(self) -> int:
        return len(self.blocks)

    def holders(self, block: int) -> int:
        """The number of tables that hold `block`."""
        return self._holders[block]

    def match(self, hashes: Sequence[int]) -> int:
        """Number of leading `hashes` that are cached; changes nothing."""
        for index, digest in enumerate(hashes):
            if digest not in self.blocks:
                return index
        return len(hashes)

    def acquire(self, hashes: Sequence[int], size: int, *, lower: bool = True) -> BlockTable | None:
        """Hold `size` blocks, the cached prefix of `hashes` first; None if too few are free.

        `hashes` may be shorter than `size`. The result's `cached` counts the reused blocks, and
        its `lower` those that can be loaded from the tiers below, unless ``lower`` is False.
        """
        block_of, holders, free = self.blocks, self._holders, self._free
        hits: list[int] = []
        idle = 0
        for digest in hashes[:size]:
            block = block_of.get(digest)
            if block is None:
                break
            hits.append(block)
            idle += not holders[block]
        count = len(hits)
        if size - count > len(free) - idle:
            return None
        for block in hits:
            if not holders[block]:
                del free[block]
            holders[block] += 1
        table = BlockTable(self, hits, count)
        if self.lower is not None and lower:
            # Before these blocks evict others, which may push what is found out of its tier.
            table.lower = self.lower.find(hashes, count)
        self._append_new(table, size - count)
        return table

    def grow(self, table: BlockTable, blocks: int = 1) -> bool:
        """Hold `blocks` more blocks at the end of `table`; False if too few are free."""
        if blocks > len(self._free):
            return False
        self._append_new(table, blocks)
        return True

    def commit(
        self,
        table: BlockTable,
        hashes: Sequence[int],
        tokens: Sequence[int],
        full_blocks: int,
        lora: str | None = None,
        salt: str | None = None,
    ) -> None:
        """Make the first `full_blocks` of `table`, which are computed, findable.

        `hashes` and `tokens` are those of the whole request. As in vLLM, a block that is cached
        already is cached twice then: a request that computed it too keeps its own.
        """
        start = table.cached
        block_of, hash_of = self.blocks, self._hash_of
        for digest, block in zip(
            hashes[start:full_blocks], table.blocks[start:full_blocks], strict=True
        ):
            if block_of.setdefault(digest, block) != block:
                self._copies.setdefault(digest, {})[block] = None
            hash_of[block] = digest
        if self.lower is not None and self._queues:
            size = self.block_size
            for index in range(start, full_blocks):
                parent = hashes[index - 1] if index else None
                own = tuple(tokens[index * size : (index + 1) * size])
                self.lower.learn(hashes[index], Content(parent, own, lora, None if index else salt))
        table.cached = max(start, full_blocks)
        if start < full_blocks and self._queues:
            size = self.block_size
            self._events.append(
                CacheStored(
                    parent=hashes[start - 1] if start else None,
                    hashes=tuple(hashes[start:full_blocks]),
                    tokens=tuple(tokens[start * size : full_blocks * size]),
                    lora=lora,
                    salt=None if start else salt,
                )
            )

    def release(self, table: BlockTable) -> None:
        """Release all blocks of `table`; cached blocks stay findable until they are evicted.

        A table of an earlier cache (before a restart) has no effect.
        """
        if table.owner is not self:
            return
        holders, free, hash_of = self._holders, self._free, self._hash_of
        for block in reversed(table.blocks):
            left = holders[block] - 1
            holders[block] = left
            if not left:
                free[block] = None
                if hash_of[block] is None:
                    free.move_to_end(block, last=False)  # it has no content: reuse it first
        table.blocks.clear()
        table.cached = 0

    def clear(self) -> bool:
        """Remove all cached blocks; False, without a change, if a block is held."""
        if self.held_blocks:
            return False
        self.blocks.clear()
        self._copies.clear()
        self._hash_of = [None] * self.total_blocks
        if self.lower is not None:
            self.lower.clear()
        self._events.append(CacheCleared())
        return True

    @property
    def has_events(self) -> bool:
        """Whether there are events to take."""
        return bool(self._events)

    def take_events(self) -> list[CacheEvent]:
        """The changes since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def _append_new(self, table: BlockTable, count: int) -> None:
        if not count:
            return
        hash_of, holders, next_free = self._hash_of, self._holders, self._free.popitem
        block_of, copies = self.blocks, self._copies
        add, evicted = table.blocks.append, []
        for _ in range(count):
            block, _ = next_free(last=False)
            add(block)
            holders[block] = 1
            digest = hash_of[block]
            if digest is not None:
                hash_of[block] = None
                evicted.append(digest)
                if digest in copies:
                    self._drop_copy(digest, block)
                else:
                    del block_of[digest]
        self.evictions += len(evicted)
        if evicted and self._queues:
            self._events.append(CacheRemoved(tuple(evicted)))
        if self.lower is not None:
            self.lower.take([block for block in evicted if block not in self.blocks])

    def _note(self, event: CacheStored | CacheRemoved) -> None:
        self._events.append(event)

    def _drop_copy(self, digest: int, block: int) -> None:
        """One of several blocks with a hash is reused: the hash stays findable."""
        copies = self._copies[digest]
        if self.blocks[digest] == block:
            self.blocks[digest] = block = next(iter(copies))
        del copies[block]
        if not copies:
            del self._copies[digest]
