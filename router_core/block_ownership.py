"""The slots that hold each block: the tree of prefixes, built from the engines' cache events.

A block is identified by its sequence hash, which stands for the whole prefix up to it, so the tree
needs no nodes: a dict maps each sequence hash to the mask of the slots that hold the block. Two
more tables have the links to a block's children, to remove a prefix from a worker, and the engines'
names of blocks (:mod:`router_core.block_names`).

**A worker's blocks are prefix-closed**: a worker that holds a block holds its parent. Removing a
block in the middle of a chain therefore removes the worker's later blocks too, until they are
stored again; an engine cannot use them without the middle either. So a mask can only shrink with
depth, and a worker's blocks are a subtree that can be walked without a list of them per worker.

All tables are int -> int dicts on purpose. The garbage collector does not traverse those; a million
node objects would cost it pauses of tens of milliseconds. Tables with an entry per block are split
(:mod:`router_core.sharded`), so that no single event waits for the growth of a large one.
"""

from collections.abc import Sequence
from itertools import repeat

from router_core.block_names import BlockNames
from router_core.cache_groups import CacheGroups, remove_copy
from router_core.child_links import ChildLinks
from router_core.events import Fault, RemoveResult, StoreResult, refused_store
from router_core.hashing import chain, sequence_hashes
from router_core.sharded import SHARDS, ShardedDict, shards_of

_U64_MAX = 2**64 - 1


class BlockOwnership:
    """Blocks held by slots (see `worker_sets`), changed by the events of the slots' engines.

    A slot is in use from its first stored block. ``exact``: matches end at what an engine reuses
    (see `PrefixIndex.find_matches`).
    """

    __slots__ = (
        "_children",
        "_counts",
        "_dropping",
        "_extra",
        "_extra_total",
        "_grouped",
        "_groups",
        "_live",
        "_names",
        "_owners",
        "_roots",
        "_starts",
        "exact",
    )

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self._owners = ShardedDict()
        """block -> mask of the slots that hold it, never 0"""
        self._children = ChildLinks()
        self._names = BlockNames()
        self._roots: dict[int, set[int]] = {}
        """slot -> first blocks of the prompts it holds"""
        self._starts: set[int] = set()
        """blocks that were ever stored as the first of a prompt and are still there"""
        self._counts: dict[int, int] = {}
        """slot -> blocks it holds"""
        self._dropping: dict[int, list[int]] = {}
        """slot -> blocks still to visit"""
        self._live = 0
        """slots that take part in matching"""
        self._extra: dict[int, dict[int, int]] = {}
        """slot -> name -> copies of a block beyond the first, where the engine counts them"""
        self._extra_total: dict[int, int] = {}
        """slot -> sum of its extra copies"""
        self._groups: dict[int, CacheGroups] = {}
        """slot -> its cache groups, where events of several arrived"""
        self._grouped = 0
        """the slots in ``_groups``"""

    def block_count(self, slot: int) -> int:
        """Blocks that ``slot`` holds, including those of a dropped slot that are not swept yet.

        Blocks of different cache groups count each.
        """
        count = self._counts.get(slot, 0)
        return count + self._groups[slot].block_count if slot in self._groups else count

    @property
    def entry_count(self) -> int:
        """(slot, block) pairs."""
        return sum(self._counts.values()) + sum(one.block_count for one in self._groups.values())

    @property
    def node_count(self) -> int:
        """Distinct blocks."""
        return len(self._owners)

    @property
    def table_size(self) -> int:
        """Entries that take memory: distinct blocks, and what is kept for single slots."""
        groups = sum(one.block_count for one in self._groups.values())
        names = sum(len(own.names) for own in self._names.own.values())
        return len(self._owners) + groups + names + sum(map(len, self._extra.values()))

    def own_names(self, slot: int) -> int:
        """Blocks whose name on ``slot`` differs from their shared name."""
        own = self._names.own.get(slot)
        return 0 if own is None else len(own.names)

    def any_shared(self) -> bool:
        """Whether any block is held by two slots: only then can their names be compared.

        Scans the blocks until it finds one.
        """
        return any(mask & (mask - 1) for shard in self._owners.shards for mask in shard.values())

    def store(
        self,
        slot: int,
        parent_hash: int | None,
        block_hashes: Sequence[int],
        local_hashes: Sequence[int],
        group: int = 0,
        counted: bool = False,
    ) -> StoreResult:
        """Add a chain of blocks to ``slot``, after the block that it names ``parent_hash``.

        Arguments as in `BlocksStored`. Storing held blocks again changes nothing. An invalid event
        is refused with its reason and raises nothing; blocks before the invalid one are kept. The
        first group of which a chain is stored is the slot's main group; of others only the names
        are kept.
        """
        total = len(block_hashes)
        if slot in self._dropping:
            return refused_store(Fault.SLOT_DROPPED, parent_hash, total)
        if group or slot in self._groups:
            groups = self._groups_of(slot)
            if groups.main is None:
                groups.main = group
            if groups.main != group:
                fresh = groups.store(group, block_hashes)
                return StoreResult(fresh, total - fresh)
        if len(local_hashes) != total:
            return refused_store(Fault.COLUMNS_DIFFER, len(local_hashes), total)
        if not total:
            return StoreResult(0, 0)
        bit = 1 << slot
        parent: int | None = None
        if parent_hash is not None:
            parent = self._names.block(slot, parent_hash)
            if parent is None or not self._owners.get(parent, 0) & bit:
                return refused_store(Fault.UNKNOWN_PARENT, parent_hash, total)
        if min(local_hashes) < 0 or max(local_hashes) > _U64_MAX:
            good = next(n for n, h in enumerate(local_hashes) if not 0 <= h <= _U64_MAX)
        else:
            good = total
        local = list(local_hashes[:good])
        blocks = sequence_hashes(local, parent)
        # The first part of a chain is in the tree, the rest is new. Each part is mostly uniform
        # (held by the same slots; no name in use), and is then stored in bulk.
        shards = shards_of(blocks)
        held = self._owners.find_many(blocks, shards)
        known = held.index(None) if None in held else good
        end = good
        if held.count(None) != good - known:
            # A known block after a new one: only when a worker reports that a prompt starts with
            # a block whose hash is that of a longer prefix. The rest is stored as its own event.
            end = next(n for n in range(known, good) if held[n] is not None)
            del blocks[end:]
        fresh = done = 0
        if known:
            done, fresh = self._store_known(
                slot, parent, block_hashes, local, blocks[:known], shards, held[:known]
            )
        if done == known < end:
            above = blocks[known - 1] if known else parent
            added = self._store_new(
                slot, above, block_hashes[known:end], local[known:], blocks[known:], shards[known:]
            )
            done += added
            fresh += added
        if counted and done > fresh:
            extra = self._extra.setdefault(slot, {})
            self._extra_total[slot] = self._extra_total.get(slot, 0) + done - fresh
            for name, mask in zip(block_hashes[:done], held, strict=False):
                if mask is not None and mask & bit:
                    extra[name] = extra.get(name, 0) + 1
        if fresh:
            self._counts[slot] = self._counts.get(slot, 0) + fresh
            self._live |= bit
            if parent is None:
                self._roots.setdefault(slot, set()).add(blocks[0])
                self._starts.add(blocks[0])
        if done == total:
            return StoreResult(fresh, done - fresh)
        if done == end < good:
            rest = self.store(
                slot, block_hashes[end - 1], block_hashes[end:], local_hashes[end:], group, counted
            )
            return StoreResult(fresh + rest.stored, done - fresh + rest.known, rest.refused)
        return refused_store(
            Fault.NOT_A_HASH if done == good else Fault.HASH_CONFLICT,
            block_hashes[done],
            total - done,
            stored=fresh,
            known=done - fresh,
        )

    def store_window(
        self, slot: int, group: int, block_hashes: Sequence[int], needed: int, span: int = 1
    ) -> StoreResult:
        """Add blocks of a group with a sliding window; arguments as in `WindowStored`."""
        if slot in self._dropping:
            return refused_store(Fault.SLOT_DROPPED, None, len(block_hashes))
        groups = self._groups_of(slot)
        if group == groups.main:  # a model with windows only: its main group has one
            return StoreResult(0, 0)
        fresh = groups.store(group, block_hashes, span, needed)
        return StoreResult(fresh, len(block_hashes) - fresh)

    def copy_count(self, slot: int) -> int:
        """Copies of blocks beyond the first (see `BlocksStored`)."""
        return self._extra_total.get(slot, 0)

    def forget_copies(self, slot: int) -> None:
        """Count each block of ``slot`` once: its next removal removes it."""
        self._extra.pop(slot, None)
        self._extra_total.pop(slot, None)

    def copies(self, slot: int) -> list[tuple[int, int]]:
        """The engine's name and the further copies of each block with several of them."""
        return list(self._extra.get(slot, {}).items())

    def has_groups(self, slot: int) -> bool:
        """Whether events of several cache groups arrived."""
        return slot in self._groups

    def is_main(self, slot: int, group: int) -> bool:
        """Whether ``group`` is the slot's main group; 0 is, where no events had a group."""
        groups = self._groups.get(slot)
        return group == (0 if groups is None else groups.main)

    def remove(self, slot: int, block_hashes: Sequence[int], group: int = 0) -> RemoveResult:
        """Remove the blocks that ``slot`` names ``block_hashes``, and all blocks after them.

        In a group other than the main one, only these blocks. Of a block with several copies
        (see `BlocksStored`) one is removed.
        """
        if slot in self._dropping:
            return RemoveResult(0, 0, len(block_hashes))
        groups = self._groups.get(slot)
        if not self.is_main(slot, group):
            # The same names as in the main group, which may hold its blocks longer.
            gone = groups.remove(group, block_hashes) if groups is not None else 0
            return RemoveResult(gone, 0, len(block_hashes) - gone)
        extra = self._extra.get(slot)
        if extra:
            last = [name for name in block_hashes if remove_copy(extra, name) is None]
            self._extra_total[slot] -= len(block_hashes) - len(last)
            block_hashes = last
        bit = 1 << slot
        owners = self._owners
        # All names first: removing an earlier block drops the names of the later ones.
        named = [self._names.block(slot, name) for name in block_hashes]
        held = [block for block in named if block is not None and owners.get(block, 0) & bit]
        before = self._counts.get(slot, 0)
        removed = len(set(held))
        unknown = len(block_hashes) - len(held)
        self._remove_chains(slot, held)
        gone = before - self._counts.get(slot, 0)
        return RemoveResult(removed, gone - removed, unknown)

    def clear(self, slot: int) -> int:
        """Remove all blocks of ``slot`` and return their number. The slot stays usable.

        Takes about a millisecond per 2,000 blocks. Where that is too long for one turn of an event
        loop, drop the slot and give the worker another one.
        """
        if slot in self._dropping:
            return 0
        before = self.block_count(slot)
        self._forget_groups(slot)
        self._remove_chains(slot, list(self._roots.get(slot, ())))
        return before

    def _groups_of(self, slot: int) -> CacheGroups:
        groups = self._groups.get(slot)
        if groups is None:
            # Events without a group before these were those of group 0.
            groups = self._groups[slot] = CacheGroups(0 if self._counts.get(slot) else None)
            self._grouped |= 1 << slot
        return groups

    def _forget_groups(self, slot: int) -> None:
        self.forget_copies(slot)
        if self._groups.pop(slot, None) is not None:
            self._grouped &= ~(1 << slot)

    def _store_known(
        self,
        slot: int,
        parent: int | None,
        block_hashes: Sequence[int],
        local: Sequence[int],
        blocks: list[int],
        shards: list[int],
        held: list[int | None],
    ) -> tuple[int, int]:
        """Add ``slot`` to ``blocks``, whose current holders are ``held``.

        Returns the number of blocks done before a conflict, and how many the slot did not hold.
        """
        bit = 1 << slot
        owners, names = self._owners, self._names
        count = len(held)
        above = owners[parent] if parent is not None else 0
        mask = (held[0] or 0) | bit
        if (
            slot not in names.own
            and held.count(held[0]) == count
            and names.names.find_many(blocks, shards) == [*block_hashes[:count]]
        ):
            if mask == held[0]:
                return count, 0
            # Equal sets along a chain share one object, so that distinct ones do not pile up.
            mask = above if mask == above else mask
            owners.set_many(blocks, repeat(mask), shards)
            fresh = done = count
        else:
            fresh = done = 0
            for block, name in zip(blocks, block_hashes, strict=False):
                if not self._announce(slot, bit, name, block):
                    break
                done += 1
                mask = owners[block]
                if not mask & bit:
                    fresh += 1
                    mask |= bit
                    owners[block] = mask = above if mask == above else mask
                above = mask
        if parent is not None and done and self._children.only.find(parent) != local[0]:
            self._children.link(parent, local[0], owners)
        # Already linked, unless the child existed without its parent: first stored as the start
        # of a prompt (see `store`), or not swept yet when its parent was.
        if self._dropping or not self._starts.isdisjoint(blocks[1:done]):
            for at in range(1, done):
                self._children.link(blocks[at - 1], local[at], owners)
        return done, fresh

    def _store_new(
        self,
        slot: int,
        parent: int | None,
        block_hashes: Sequence[int],
        local: Sequence[int],
        blocks: list[int],
        shards: list[int],
    ) -> int:
        """Add ``blocks``, which no slot holds, below ``parent``; returns the number done."""
        bit = 1 << slot
        owners, names = self._owners, self._names
        if slot not in names.own and names.announce_new(block_hashes, blocks, shards):
            done = len(blocks)
        else:
            done = 0
            for block, name in zip(blocks, block_hashes, strict=True):
                if not self._announce(slot, bit, name, block):
                    break
                # Owned at once: the name must be valid for the blocks after it.
                owners[block] = bit
                done += 1
        if done:
            owners.set_many(blocks[:done], repeat(bit), shards)
            if parent is not None:
                self._children.link(parent, local[0], owners)
            # New blocks have no other children.
            self._children.only.set_many(blocks, local[1:done], shards)
        return done

    def _announce(self, slot: int, bit: int, name: int, block: int) -> bool:
        """Name ``block`` as ``name`` on ``slot``; False if another of its blocks has the name."""
        meant = self._names.block(slot, name)
        if meant is not None and meant != block and self._owners.get(meant, 0) & bit:
            return False
        self._names.announce(slot, name, block)
        return True

    def _remove_chains(self, slot: int, pending: list[int], limit: int | None = None) -> int:
        """Remove the blocks in ``pending`` and all blocks after them from ``slot``.

        Stops after ``limit`` visits and leaves the rest in ``pending``; returns the visits.
        """
        bit = 1 << slot
        owners, only_child = self._owners.shards, self._children.only.shards
        branches, starts = self._children.branches, self._starts
        names, disagrees = self._names, slot in self._names.own
        roots = self._roots.get(slot, set())
        visits = taken = 0
        left = 0
        while pending and visits != limit:
            visits += 1
            block = pending.pop()
            shard = block % SHARDS
            held = owners[shard].get(block, 0)
            if not held & bit:
                continue
            taken += 1
            local = only_child[shard].get(block)
            if local is not None:
                pending.append(chain(block, local))
            elif block in branches:
                pending += [chain(block, kid) for kid in branches[block].locals]
            roots.discard(block)
            if disagrees:
                names.disown(slot, block)
            if held == bit:
                del owners[shard][block]
                names.forget(block)
                only_child[shard].pop(block, None)
                branches.pop(block, None)
                starts.discard(block)
            else:
                # As in store: one object for equal sets along a chain.
                left = left if left == held ^ bit else held ^ bit
                owners[shard][block] = left
        count = self._counts.get(slot, 0) - taken
        if count:
            self._counts[slot] = count
        else:
            self._counts.pop(slot, None)
            self._roots.pop(slot, None)
            self._live &= ~bit
        return visits
