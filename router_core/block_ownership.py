"""The slots that hold each block: the tree of prefixes, built from the engines' cache events.

The tree is kept as runs of blocks (:mod:`router_core.runs`) with the slots that hold them, and the
engines' names of the blocks (:mod:`router_core.block_names`).

**A worker's blocks are prefix-closed**: a worker that holds a block holds its parent. Removing a
block in the middle of a chain therefore removes the worker's later blocks too, until they are
stored again; an engine cannot use them without the middle either. So a mask can only shrink with
depth, and a worker's blocks are a subtree that can be walked from the starts of its prompts.
"""

from array import array
from collections.abc import Collection, Container, Iterable, Sequence
from struct import error as StructError
from typing import NamedTuple

from router_core.block_names import U64_MAX, BlockNames
from router_core.cache_groups import CacheGroups, remove_copy
from router_core.detached import DetachedBlocks
from router_core.events import (
    BlocksStored,
    Fault,
    Refusal,
    RemoveResult,
    StoreResult,
    refused_store,
    wrong_hash,
)
from router_core.hashing import chain, sequence_hashes
from router_core.runs import LIMIT, POSITION, POSITION_BITS, ROOT, Runs, packer

# Starts that a slot no longer holds are dropped once they may be as many as those it holds.
_FEW_STARTS = 16
# So few names are looked up one by one.
_FEW_NAMES = 4


class _Chain(NamedTuple):
    """Consecutive blocks: names and local hashes, each also packed.

    ``named`` is empty where a name does not fit into 64 bits.
    """

    names: Sequence[int]
    named: bytes
    local_hashes: Sequence[int]
    data: bytes

    @classmethod
    def pack(cls, names: Sequence[int], local_hashes: Sequence[int]) -> "_Chain | None":
        """The blocks before the first whose local hash does not fit; None if one is not a hash."""
        good = len(names)
        try:
            data = packer(good).pack(*local_hashes)
        except StructError:
            if wrong_hash(BlocksStored(None, names, local_hashes)) is not None:
                return None
            good = next(n for n, h in enumerate(local_hashes) if not 0 <= h <= U64_MAX)
            data = packer(good).pack(*local_hashes[:good])
        try:
            named = packer(good).pack(*names[:good])
        except StructError:
            if wrong_hash(BlocksStored(None, names, ())) is not None:
                return None
            named = b""
        return cls(names, named, local_hashes, data)

    def part(self, first: int, end: int) -> "_Chain":
        """The blocks from ``first`` to before ``end``."""
        return _Chain(
            self.names[first:end],
            self.named[8 * first : 8 * end],
            self.local_hashes[first:end],
            self.data[8 * first : 8 * end],
        )


class BlockOwnership:
    """Blocks held by slots (see `worker_sets`), changed by the events of the slots' engines.

    A slot is in use from its first stored block. ``exact``: the index has what an engine can reuse.
    Matches end there (see `PrefixIndex.find_matches`), and blocks whose parent is not held wait for
    it (:mod:`router_core.detached`). Without it, as in Dynamo, such blocks count only once they are
    stored again; those whose parent was never announced are remembered by name, as a doubt.
    """

    __slots__ = (
        "_counts",
        "_dropping",
        "_extra",
        "_extra_total",
        "_grouped",
        "_groups",
        "_live",
        "_names",
        "_root_counts",
        "_roots",
        "_runs",
        "detached",
        "exact",
    )

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self._runs = Runs()
        self._names = BlockNames(self._runs)
        self._roots: dict[int, array[int]] = {}
        """slot -> the runs that start the prompts it holds; some it may hold no longer"""
        self._root_counts: dict[int, int] = {}
        """slot -> how many of these it holds"""
        self._counts: dict[int, int] = {}
        """slot -> blocks it holds"""
        self._dropping: dict[int, list[int]] = {}
        """slot -> runs still to visit (see `PrefixIndex.sweep`)"""
        self._live = 0
        """slots that take part in matching"""
        self._extra: dict[int, dict[int, int]] = {}
        """slot -> name -> copies of a block beyond the first, where the engine counts them"""
        self._extra_total: dict[int, int] = {}
        """slot -> sum of its extra copies"""
        self.detached: dict[int, DetachedBlocks] = {}
        """slot -> its blocks whose parent it does not hold, where it has such"""
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
        return sum(self._counts.values()) + sum(
            group.block_count for group in self._groups.values()
        )

    @property
    def node_count(self) -> int:
        """Distinct blocks."""
        return self._runs.block_count

    @property
    def table_size(self) -> int:
        """Entries that take memory: distinct blocks, and what is kept for single slots."""
        groups = sum(group.block_count for group in self._groups.values())
        names = sum(len(own.names) for own in self._names.own.values())
        waiting = sum(len(blocks.places) for blocks in self.detached.values())
        extra = sum(map(len, self._extra.values()))
        return self._runs.block_count + groups + names + extra + waiting

    def detached_count(self, slot: int) -> int:
        """Blocks of ``slot`` whose parent it does not hold; they are not part of the other
        counts."""
        detached = self.detached.get(slot)
        return 0 if detached is None else len(detached.places)

    def is_doubtful(self, slot: int) -> bool:
        """Whether ``slot`` announced a block after one that it never announced, so that an event is
        missing or has not arrived yet."""
        detached = self.detached.get(slot)
        return detached is not None and detached.doubtful

    def own_names(self, slot: int) -> int:
        """Blocks whose name on ``slot`` differs from their shared name."""
        own = self._names.own.get(slot)
        return 0 if own is None else len(own.names)

    def any_shared(self) -> bool:
        """Whether any block is held by two slots: only then can their names be compared.

        Scans the runs until it finds one.
        """
        firsts = (held if isinstance(held, int) else held[1] for held in self._runs.holders)
        return any(mask & (mask - 1) for mask in firsts)

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
        is refused with its reason and raises nothing; blocks before the invalid one are kept. If
        the index is exact, blocks of an unknown parent wait for it and are not refused. The first
        group of which a chain is stored is the slot's main group; of others only the names are
        kept.
        """
        total = len(block_hashes)
        if slot in self._dropping:
            return refused_store(Fault.SLOT_DROPPED, parent_hash, total)
        if (group or slot in self._groups) and not self._makes_main(slot, group):
            fresh = self._groups[slot].store(group, block_hashes)
            return StoreResult(fresh, total - fresh)
        if len(local_hashes) != total:
            return refused_store(Fault.COLUMNS_DIFFER, len(local_hashes), total)
        if not total:
            return StoreResult(0, 0)
        above = ROOT
        if parent_hash is not None:
            names = self._names
            try:
                shared = slot not in names.own
                parent = names.find(parent_hash) if shared else names.block(slot, parent_hash)
            except TypeError:
                return _not_a_hash(parent_hash, block_hashes, local_hashes)
            if (
                parent is None
                or self._runs.end(parent >> POSITION_BITS, 1 << slot) <= parent & POSITION
            ):
                return self._detach(slot, parent_hash, block_hashes, local_hashes, counted)
            above = parent
        result = self._store_after(slot, above, block_hashes, local_hashes, counted)
        if slot in self.detached:
            self._attach(slot, block_hashes[: result.stored + result.known], counted)
        return result

    def _store_after(
        self,
        slot: int,
        above: int,
        block_hashes: Sequence[int],
        local_hashes: Sequence[int],
        counted: bool,
    ) -> StoreResult:
        """Add a chain of blocks to ``slot`` after the block at ``above``, which it holds."""
        bit, total = 1 << slot, len(block_hashes)
        blocks = _Chain.pack(block_hashes, local_hashes)
        if blocks is None:
            return _not_a_hash(None, block_hashes, local_hashes)
        good = len(blocks.data) // 8
        done = fresh = 0
        while done < good:
            run, at, same = self._place(above, local_hashes[done], blocks.data, done)
            wanted = same or min(good - done, LIMIT - at)
            part = blocks if wanted == total else blocks.part(done, done + wanted)
            if same:
                taken, added = self._take(slot, bit, run, at, part.names, part.named)
            else:
                taken, run = self._add(slot, bit, run, at, above, part)
                added = taken
            done += taken
            fresh += added
            if taken < wanted:
                break
            above = run << POSITION_BITS | at + taken - 1
        if counted:
            # What the slot held before is a beginning of the chain.
            self._add_copies(slot, block_hashes[: done - fresh])
        if fresh:
            self._counts[slot] = self._counts.get(slot, 0) + fresh
            self._live |= bit
        if done == total:
            return StoreResult(fresh, done - fresh)
        return refused_store(
            Fault.NOT_A_HASH if done == good else Fault.HASH_CONFLICT,
            block_hashes[done],
            total - done,
            stored=fresh,
            known=done - fresh,
        )

    def _place(self, above: int, first: int, data: bytes, done: int) -> tuple[int, int, int]:
        """Where a chain continues after the block at ``above``: along its run, or in one that
        continues it, or in a new one.

        ``data``: the chain's local hashes, of which ``done`` are placed; ``first``: the next one.
        Returns the run (0: a new one), the position in it, and how many blocks are there already.
        """
        runs, run, at = self._runs, 0, 0
        if above != ROOT:
            run, at = above >> POSITION_BITS, (above & POSITION) + 1
            if at < runs.lengths[run]:
                same = runs.equal_locals(run, at, data, done)
                if same:
                    return run, at, same
        if above == ROOT or runs.forks.get(run, 0) >> at - 1 & 1:
            sequence = first if above == ROOT else chain(runs.sequence(above), first)
            kid = runs.start(sequence, above)
            if kid:
                return kid, 0, runs.equal_locals(kid, 0, data, done) or 1
        if runs.lengths[run] == at < LIMIT:
            return run, at, 0
        return 0, 0, 0

    def store_window(
        self, slot: int, group: int, block_hashes: Sequence[int], needed: int, span: int = 1
    ) -> StoreResult:
        """Add blocks of a group with a sliding window; arguments as in `WindowStored`."""
        if slot in self._dropping:
            return refused_store(Fault.SLOT_DROPPED, None, len(block_hashes))
        if not {*map(type, block_hashes)} <= {int}:
            return _not_a_hash(None, block_hashes, ())
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
        if group != (0 if groups is None else groups.main):
            # The same names as in the main group, which may hold its blocks longer.
            gone = groups.remove(group, block_hashes) if groups is not None else 0
            return RemoveResult(gone, 0, len(block_hashes) - gone)
        extra = self._extra.get(slot)
        if extra:
            last = [name for name in block_hashes if remove_copy(extra, name) is None]
            self._extra_total[slot] -= len(block_hashes) - len(last)
            block_hashes = last
        bit, total = 1 << slot, len(block_hashes)
        if total == 1 and self._remove_last(slot, bit, block_hashes[0]):
            return RemoveResult(1, 0, 0)
        first = None if total < _FEW_NAMES else self._names_in_run(slot, bit, block_hashes)
        if first is not None:
            gone = self._release(slot, (first,), range(first, first + total))
            return RemoveResult(total, gone - total, 0)
        # All names first: removing an earlier block drops the names of the later ones.
        held, unknown = self._find_held(slot, bit, block_hashes)
        gone = self._release(slot, held, held)
        waited = self._remove_detached(slot, unknown) if unknown and self.detached else 0
        return RemoveResult(len(held) + waited, gone - len(held), len(unknown) - waited)

    def _find_held(
        self, slot: int, bit: int, block_hashes: Sequence[int]
    ) -> tuple[set[int], list[int]]:
        """The blocks that ``slot`` holds under these names, and the names of no such block."""
        held = set()
        unknown = []
        names, end = self._names, self._runs.end
        shared = slot not in names.own
        for name in block_hashes:
            block = names.find(name) if shared else names.block(slot, name)
            if block is None or end(block >> POSITION_BITS, bit) <= block & POSITION:
                unknown.append(name)
            else:
                held.add(block)
        return held, unknown

    def _remove_last(self, slot: int, bit: int, name: int) -> bool:
        """Remove a block if it is the last one that ``slot`` holds of its run and no run continues
        after it: engines evict the ends of prompts first. False: nothing is removed."""
        names, runs = self._names, self._runs
        block = names.find(name) if slot not in names.own else names.block(slot, name)
        if block is None:
            return False
        run, at = block >> POSITION_BITS, block & POSITION
        if runs.end(run, bit) != at + 1 or runs.forks.get(run, 0) >> at:
            return False
        self._leave(slot, run, at)
        return True

    def clear(self, slot: int) -> int:
        """Remove all blocks of ``slot`` and return their number. The slot stays usable.

        Takes about a millisecond per 700 blocks that no other slot holds. Where that is too long
        for one turn of an event loop, drop the slot and give the worker another one.
        """
        if slot in self._dropping:
            return 0
        before = self.block_count(slot)
        self._forget_groups(slot)
        self._release(slot, [run << POSITION_BITS for run in self._held_roots(slot)])
        return before

    # ---- blocks without a parent

    def _detach(
        self,
        slot: int,
        parent_hash: int,
        block_hashes: Sequence[int],
        local_hashes: Sequence[int],
        counted: bool,
    ) -> StoreResult:
        """Take a chain of blocks whose parent ``slot`` does not hold."""
        total = len(block_hashes)
        if not self.exact:
            detached = self.detached.setdefault(slot, DetachedBlocks())
            detached.add(parent_hash, block_hashes, local_hashes)
            return refused_store(Fault.UNKNOWN_PARENT, parent_hash, total)
        if wrong_hash(BlocksStored(None, block_hashes, local_hashes)) is not None:
            return _not_a_hash(None, block_hashes, local_hashes)
        for name, local in zip(block_hashes, local_hashes, strict=True):
            block = self._names.block(slot, name)
            if not 0 <= local <= U64_MAX:
                return refused_store(Fault.NOT_A_HASH, name, total)
            if block is not None and self._holds(block, 1 << slot):
                return refused_store(Fault.HASH_CONFLICT, name, total)
        detached = self.detached.setdefault(slot, DetachedBlocks())
        before = [name for name in block_hashes if name in detached.places]
        known = detached.add(parent_hash, block_hashes, local_hashes)
        if counted:
            self._add_copies(slot, before)
        waiting = sum(name in detached.places for name in block_hashes) - known
        if known + waiting < total:
            return refused_store(
                Fault.UNKNOWN_PARENT, parent_hash, total - known - waiting, known=known
            )
        return StoreResult(0, known, waiting=waiting)

    def _attach(self, slot: int, block_hashes: Sequence[int], counted: bool) -> None:
        """Store what waited for ``block_hashes``, which ``slot`` holds now."""
        detached = self.detached[slot]
        again = [name for name in block_hashes if detached.pop(name)]
        if counted:
            self._add_copies(slot, again)
        pending = [name for name in block_hashes if detached.has_kids(name)] if self.exact else []
        while pending:
            parent = pending.pop()
            above = self._names.block(slot, parent)
            for names, local_hashes in detached.take_chains(parent):
                assert above is not None
                if self._store_after(slot, above, names, local_hashes, False).refused is not None:
                    detached.incomplete = True
                elif detached.has_kids(names[-1]):
                    pending.append(names[-1])
        self._drop_if_empty(slot, detached)

    def _add_copies(self, slot: int, names: Sequence[int]) -> None:
        """Count one more copy of each block."""
        if names:
            extra = self._extra.setdefault(slot, {})
            self._extra_total[slot] = self._extra_total.get(slot, 0) + len(names)
            for name in names:
                extra[name] = extra.get(name, 0) + 1

    def _remove_detached(self, slot: int, names: Sequence[int]) -> int:
        """Remove blocks that wait; returns how many of ``names`` will not count any more."""
        detached = self.detached.get(slot)
        if detached is None:
            return 0
        count = 0
        for name in names:
            count += detached.pop(name)
            detached.note_removed(name)
        self._drop_if_empty(slot, detached)
        return count if self.exact else 0

    def _detach_hidden(self, slot: int, order: Sequence[int], removed: Container[int]) -> None:
        """Let the blocks wait that are held after ``removed`` ones and are not removed themselves.

        ``order``: first blocks, each standing for those after it in its run; parents first.
        """
        runs, names, bit = self._runs, self._names, 1 << slot
        detached = self.detached.setdefault(slot, DetachedBlocks())
        for first in order:
            run = first >> POSITION_BITS
            start, end = run << POSITION_BITS, runs.end(run, bit)
            for block in range(first, start + end):
                if block in removed:
                    continue
                above = block - 1 if block & POSITION else runs.above[run]
                parent = names.name(slot, above)
                detached.add(parent, (names.name(slot, block),), (runs.local(block),))
                if above in removed:
                    detached.note_removed(parent)
        self._drop_if_empty(slot, detached)

    def _drop_if_empty(self, slot: int, detached: DetachedBlocks) -> None:
        if not detached.places and not detached.incomplete:
            del self.detached[slot]

    def _groups_of(self, slot: int) -> CacheGroups:
        groups = self._groups.get(slot)
        if groups is None:
            # Events without a group before these were those of group 0.
            groups = self._groups[slot] = CacheGroups(0 if self._counts.get(slot) else None)
            self._grouped |= 1 << slot
        return groups

    def _makes_main(self, slot: int, group: int) -> bool:
        """Whether ``group`` is the main group of a slot, which the first one becomes."""
        groups = self._groups_of(slot)
        if groups.main is None:
            groups.main = group
        return groups.main == group

    def _forget_groups(self, slot: int) -> None:
        self.forget_copies(slot)
        self.detached.pop(slot, None)
        if self._groups.pop(slot, None) is not None:
            self._grouped &= ~(1 << slot)

    def _holds(self, block: int, bit: int) -> bool:
        return self._runs.end(block >> POSITION_BITS, bit) > block & POSITION

    def _names_in_run(self, slot: int, bit: int, block_hashes: Sequence[int]) -> int | None:
        """The first of the blocks where these are the shared names of neighbours in one run that
        the slot holds, in either direction: engines drop the end of a prompt, the last block first.
        None elsewhere."""
        runs, names, count = self._runs, self._names, len(block_hashes)
        if slot in names.own:
            return None
        start, end = names.find(block_hashes[0]), names.find(block_hashes[-1])
        if start is None or end is None or abs(end - start) != count - 1:
            return None
        try:
            named = packer(count).pack(*(block_hashes if start < end else block_hashes[::-1]))
        except StructError:
            return None
        first = min(start, end)
        run, at = first >> POSITION_BITS, first & POSITION
        if at + count > runs.end(run, bit) or not runs.equal_names(run, at, named):
            return None
        return None if names.unnamed and names.any_unnamed(run, at, count) else first

    def _held_roots(self, slot: int) -> set[int]:
        """The runs that start prompts of ``slot``."""
        runs, bit = self._runs, 1 << slot
        roots = self._roots.get(slot, ())
        return {run for run in roots if runs.above[run] == ROOT and runs.end(run, bit)}

    def _take(
        self, slot: int, bit: int, run: int, at: int, block_hashes: Sequence[int], named: bytes
    ) -> tuple[int, int]:
        """Let ``slot`` hold blocks of a run from ``at`` on, under these names.

        It holds those before ``at``. Returns the number done before a conflict, and how many it did
        not hold before.
        """
        runs, names = self._runs, self._names
        count = len(block_hashes)
        end = runs.end(run, bit)
        if (
            named
            and slot not in names.own
            and runs.equal_names(run, at, named)
            and not (names.unnamed and names.any_unnamed(run, at, count))
        ):
            if end < at + count:
                runs.hold(run, bit, at + count)
            done = count
        else:
            done = self._take_by_name(slot, run, at, block_hashes)
        if not end and done and runs.above[run] == ROOT:
            self._note_root(slot, run)
        return done, max(0, at + done - max(end, at))

    def _take_by_name(self, slot: int, run: int, at: int, block_hashes: Sequence[int]) -> int:
        """Let ``slot`` hold blocks of a run one by one; returns the number before a conflict."""
        runs, names, bit = self._runs, self._names, 1 << slot
        end = runs.end(run, bit)
        for done, name in enumerate(block_hashes):
            block = run << POSITION_BITS | at + done
            meant = names.block(slot, name)
            if meant is not None and meant != block and self._holds(meant, bit):
                return done
            names.announce(slot, name, block)
            if end <= at + done:
                # At once: the name is valid for the blocks after it.
                runs.hold(run, bit, at + done + 1)
        return len(block_hashes)

    def _add(
        self,
        slot: int,
        bit: int,
        run: int,
        at: int,
        above: int,
        blocks: _Chain,
    ) -> tuple[int, int]:
        """Add blocks that are in no run: at the end of ``run``, or of a new one if that is 0.

        Returns the number done before a conflict, and the run.
        """
        runs, names = self._runs, self._names
        block_hashes, named, local_hashes, data = blocks
        count = len(block_hashes)
        if not run:
            run = runs.next_number()
        first = run << POSITION_BITS | at
        if not (
            named
            and slot not in names.own
            and names.shared.add_new(block_hashes, first, names.is_named)
        ):
            count, named = names.add(slot, block_hashes, first, lambda b: self._holds(b, bit))
            if not count:
                return 0, run
        data = data[: 8 * count]
        if above == ROOT:
            # The first block of a prompt has no parent to mix in.
            sequences = packer(count).pack(*sequence_hashes(local_hashes[:count]))
        else:
            parent = runs.sequence(above)
            if count == 1:
                sequences = packer(1).pack(chain(parent, local_hashes[0]))
            else:
                sequences = packer(count).pack(*sequence_hashes(local_hashes[:count], parent))
        if at:
            runs.extend(run, sequences, data, named, bit)
        else:
            runs.create(run, above, sequences + data + named, bit)
            if above == ROOT:
                self._note_root(slot, run)
        return count, run

    def _note_root(self, slot: int, run: int) -> None:
        """Remember that ``slot`` holds ``run``, which starts prompts."""
        self._root_counts[slot] = self._root_counts.get(slot, 0) + 1
        roots = self._roots.get(slot)
        if roots is None:
            roots = self._roots[slot] = array("I")
        elif len(roots) > 2 * self._root_counts[slot] + _FEW_STARTS:
            roots = self._roots[slot] = array("I", sorted(self._held_roots(slot) - {run}))
        roots.append(run)

    def _release(
        self, slot: int, blocks: Iterable[int], removed: Collection[int] | None = None
    ) -> int:
        """Remove ``blocks`` and all blocks after them from ``slot``; returns how many.

        ``removed``: those that the engine removed. If the index is exact the others wait until they
        have a parent again; None: none does.
        """
        runs, bit = self._runs, 1 << slot
        # The first block of each run: of equal keys the last one stays.
        firsts = {block >> POSITION_BITS: block for block in sorted(blocks, reverse=True)}
        pending = [*firsts.values()]
        if runs.forks:
            order: list[int] = []
            while pending:
                block = pending.pop()
                order.append(block)
                run, at = block >> POSITION_BITS, block & POSITION
                if runs.forks.get(run, 0) >> at:
                    for kid in runs.kids_from(run, at):
                        if runs.end(kid, bit):
                            pending.append(kid << POSITION_BITS)
            # Parents last: a run stays as long as another continues it.
            pending = order[::-1]
        if removed is not None and self.exact and self._hides(bit, pending, len(removed)):
            self._detach_hidden(slot, pending[::-1], removed)
        count = 0
        for block in pending:
            count += self._leave(slot, block >> POSITION_BITS, block & POSITION)
        return count

    def _hides(self, bit: int, order: Sequence[int], removed: int) -> bool:
        """Whether more blocks are held from the first ones in ``order`` on than are ``removed``."""
        runs = self._runs
        if len(order) == 1:
            run, at = order[0] >> POSITION_BITS, order[0] & POSITION
            # The end of a prompt, as engines drop it.
            return at + removed < runs.lengths[run] and at + removed < runs.end(run, bit)
        ends = (runs.end(block >> POSITION_BITS, bit) - (block & POSITION) for block in order)
        return sum(ends) > removed

    def _leave(self, slot: int, run: int, at: int) -> int:
        """Let ``slot`` hold at most ``at`` blocks of a run; returns how many fewer.

        It holds no run that continues after a later block.
        """
        runs, bit = self._runs, 1 << slot
        end = runs.end(run, bit)
        if end <= at:
            return 0
        if slot in self._names.own:
            self._names.disown(slot, run, at, end)
        left = runs.hold(run, bit, at)
        if not at and runs.above[run] == ROOT:
            self._root_counts[slot] -= 1
        if left < runs.lengths[run]:
            self._names.forget(run, left)
            runs.cut(run, left)
        count = self._counts[slot] - (end - at)
        if count:
            self._counts[slot] = count
        else:
            del self._counts[slot]
            self._roots.pop(slot, None)
            self._root_counts.pop(slot, None)
            self._live &= ~bit
        return end - at


def _not_a_hash(
    parent: int | None, block_hashes: Sequence[int], local_hashes: Sequence[int]
) -> StoreResult:
    """The refusal of an event with a hash that is not a number."""
    message = wrong_hash(BlocksStored(parent, block_hashes, local_hashes)) or ""
    return StoreResult(0, 0, Refusal(Fault.NOT_A_HASH, None, len(block_hashes), message))
