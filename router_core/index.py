"""The prefix index: which worker holds how many leading blocks of a prompt.

A block is known by its sequence hash, which stands for the whole prefix up to it, so the tree of
prefixes needs no nodes: one dict from sequence hash to the mask of workers that hold the block is
enough to match. Beside it stand the links to a block's children, needed to take a prefix away from
a worker, and the engines' names of blocks (:mod:`router_core.block_names`).

**A worker's blocks are prefix-closed**: whoever holds a block holds its parent. Removing a block
in the middle of a chain therefore takes the worker's later blocks with it, until they are stored
again; an engine cannot use them without the middle either. Two things follow: a mask can only
shrink with depth, which makes bisection over the prompt exact, and a worker's blocks are a subtree
that can be walked without a list of them per worker.

Everything is int -> int dicts on purpose. The garbage collector does not traverse those; a million
node objects would cost it pauses of tens of milliseconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from struct import Struct
from struct import error as StructError
from typing import Any

from xxhash import xxh3_64_intdigest

from router_core.block_names import BlockNames
from router_core.child_links import ChildLinks
from router_core.errors import SnapshotError
from router_core.events import BlocksStored, Fault, RemoveResult, StoreResult, refused_store
from router_core.hashing import SEED, chain
from router_core.worker_sets import NO_OVERLAPS, Overlaps

DUMP_SCHEMA = 1
_PAIR = Struct("<QQ").pack
_U64_MAX = 2**64 - 1


class PrefixIndex:
    """Blocks held by workers, the workers being slots (small integers, see `worker_sets`).

    A slot needs no announcement: it is in use from its first stored block. A lost worker's slot
    goes through `begin_drop`, then `sweep` until `is_free`.
    """

    __slots__ = (
        "_children",
        "_counts",
        "_dropping",
        "_live",
        "_names",
        "_owners",
        "_roots",
    )

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}
        """block -> mask of the slots that hold it, never 0"""
        self._children = ChildLinks()
        self._names = BlockNames()
        self._roots: dict[int, set[int]] = {}
        """slot -> first blocks of the prompts it holds"""
        self._counts: dict[int, int] = {}
        """slot -> blocks it holds"""
        self._dropping: dict[int, list[int]] = {}
        """slot -> blocks still to visit"""
        self._live = 0
        """slots that take part in matching"""

    # ---- reading

    def find_matches(
        self, sequence_hashes: Sequence[int], candidates: int | None = None
    ) -> Overlaps:
        """How many leading blocks of a prompt each slot holds.

        ``sequence_hashes``: of the prompt's complete blocks, in order. ``candidates``: a mask of
        the slots to consider; None means all. Cost: two look-ups if all who hold the first block
        hold the last, otherwise about log2(blocks) more per distinct depth.
        """
        live = self._live if candidates is None else self._live & candidates
        total = len(sequence_hashes)
        if not total or not live:
            return NO_OVERLAPS
        owners = self._owners.get
        first = owners(sequence_hashes[0], 0) & live
        if not first:
            return NO_OVERLAPS
        last = owners(sequence_hashes[-1], 0) & live
        if last == first:
            return Overlaps(((total, first),))
        levels = [(total, last)] if last else []
        # Intervals of blocks within which the set of holders shrinks; the deepest on top. Sets only
        # shrink, so an interval with equal ends holds no change and is not looked into.
        intervals = [(0, first, total - 1, last)]
        while intervals:
            low, at_low, high, at_high = intervals.pop()
            while high - low > 1:
                middle = (low + high) >> 1
                held = owners(sequence_hashes[middle], 0) & live
                if held == at_low:
                    low = middle
                elif held == at_high:
                    high = middle
                else:
                    intervals.append((low, at_low, middle, held))
                    low, at_low = middle, held
            levels.append((high, at_low & ~at_high))
        return Overlaps(tuple(levels))

    def block_count(self, slot: int) -> int:
        """Blocks that ``slot`` holds, those of a dropped slot that are not swept yet included."""
        return self._counts.get(slot, 0)

    @property
    def entry_count(self) -> int:
        """(slot, block) pairs."""
        return sum(self._counts.values())

    @property
    def node_count(self) -> int:
        """Distinct blocks."""
        return len(self._owners)

    # ---- events

    def store(
        self,
        slot: int,
        parent_hash: int | None,
        block_hashes: Sequence[int],
        local_hashes: Sequence[int],
    ) -> StoreResult:
        """``slot`` now holds a chain of blocks that continues the block it calls ``parent_hash``.

        Arguments as in `BlocksStored`. Storing again what is held changes nothing. A bad event is
        refused with its reason, never raised; blocks before the bad one are kept.
        """
        total = len(block_hashes)
        if slot in self._dropping:
            return refused_store(Fault.SLOT_DROPPED, parent_hash, total)
        if len(local_hashes) != total:
            return refused_store(Fault.COLUMNS_DIFFER, len(local_hashes), total)
        if not total:
            return StoreResult(0, 0)
        bit = 1 << slot
        owners = self._owners
        parent: int | None = None
        above = 0  # the parent's mask
        if parent_hash is not None:
            parent = self._names.block(slot, parent_hash)
            above = owners.get(parent, 0) if parent is not None else 0
            if not above & bit:
                return refused_store(Fault.UNKNOWN_PARENT, parent_hash, total)
        elif not 0 <= local_hashes[0] <= _U64_MAX:
            return refused_store(Fault.NOT_A_HASH, block_hashes[0], total)
        names = self._names
        shared, agrees = names.shared, slot not in names.own
        digest, pair, only_child = xxh3_64_intdigest, _PAIR, self._children.only
        done = fresh = 0
        fault: Fault | None = None
        try:
            for name, local in zip(block_hashes, local_hashes, strict=True):
                block = local if parent is None else digest(pair(parent, local), SEED)
                held = owners.get(block)
                if not agrees or shared.get(name) != block:
                    if agrees and held is None and name not in shared:
                        shared[name] = block
                        names.names[block] = name
                    else:
                        if not self._rename(slot, bit, name, block):
                            fault = Fault.HASH_CONFLICT
                            break
                        agrees = slot not in names.own
                if held is None:
                    mask = bit
                elif held & bit:
                    parent, above = block, held
                    done += 1
                    continue
                else:
                    mask = held | bit
                # Equal sets along a chain share one object, so that distinct ones do not pile up.
                if mask == above:
                    mask = above
                owners[block] = mask
                if parent is None:
                    self._roots.setdefault(slot, set()).add(block)
                elif only_child.get(parent) != local:
                    self._children.link(parent, local, owners)
                fresh += 1
                done += 1
                parent, above = block, mask
        except StructError:
            fault = Fault.NOT_A_HASH
        if fresh:
            self._counts[slot] = self._counts.get(slot, 0) + fresh
            self._live |= bit
        if fault is None:
            return StoreResult(fresh, done - fresh)
        return refused_store(
            fault, block_hashes[done], total - done, stored=fresh, known=done - fresh
        )

    def remove(self, slot: int, block_hashes: Sequence[int]) -> RemoveResult:
        """``slot`` no longer holds the blocks it calls ``block_hashes``, nor what follows them."""
        if slot in self._dropping:
            return RemoveResult(0, 0, len(block_hashes))
        bit = 1 << slot
        owners = self._owners
        # All names first: a removal listed from the front takes the names of the later ones away.
        named = [self._names.block(slot, name) for name in block_hashes]
        held = [block for block in named if block is not None and owners.get(block, 0) & bit]
        before = self._counts.get(slot, 0)
        removed = len(set(held))
        unknown = len(block_hashes) - len(held)
        self._take(slot, held)
        gone = before - self._counts.get(slot, 0)
        return RemoveResult(removed, gone - removed, unknown)

    def clear(self, slot: int) -> int:
        """``slot`` holds nothing any more; returns the blocks it held. The slot stays usable.

        All at once: about a millisecond per 2,000 blocks. Where that is too long for one turn of
        an event loop, drop the slot and give the worker another one.
        """
        if slot in self._dropping:
            return 0
        before = self._counts.get(slot, 0)
        self._take(slot, list(self._roots.get(slot, ())))
        return before

    # ---- losing a worker

    def begin_drop(self, slot: int) -> None:
        """``slot`` matches nothing from now on; its blocks are taken away by `sweep`."""
        if slot in self._dropping or not self._counts.get(slot):
            return
        self._live &= ~(1 << slot)
        self._dropping[slot] = []

    def sweep(self, max_blocks: int) -> int:
        """Visit at most ``max_blocks`` blocks of dropped slots; returns the blocks still to take.

        0 means that every dropped slot is free. A visit costs about half a microsecond.
        """
        for slot in list(self._dropping):
            if max_blocks <= 0:
                break
            pending, roots = self._dropping[slot], self._roots.get(slot)
            while max_blocks > 0:
                if not pending:
                    if not roots:
                        break
                    pending.append(roots.pop())
                max_blocks -= self._take(slot, pending, max_blocks)
            if not self._counts.get(slot):
                del self._dropping[slot]
        return sum(self._counts.get(slot, 0) for slot in self._dropping)

    def is_free(self, slot: int) -> bool:
        """Whether nothing of ``slot`` is left, so that another worker may have it."""
        return slot not in self._dropping and not self._counts.get(slot)

    # ---- dump and restore

    def stored_events(self, slot: int, max_blocks: int = 512) -> Iterator[BlocksStored]:
        """Events that store what ``slot`` holds, parents before children, in the slot's names.

        At most ``max_blocks`` blocks an event. The index must not change meanwhile.
        """
        bit = 1 << slot
        if not self._live & bit:
            return
        starts: list[tuple[int | None, int]] = [
            (None, root) for root in sorted(self._roots.get(slot, ()))
        ]
        while starts:
            parent, local = starts.pop()
            block = local if parent is None else chain(parent, local)
            names, locals_ = [self._names.name(slot, block)], [local]
            while True:
                held = [
                    (child, kid)
                    for kid in self._children.of(block)
                    if self._owners.get(child := chain(block, kid), 0) & bit
                ]
                if len(held) != 1 or len(names) == max_blocks:
                    break
                block, local = held[0]
                names.append(self._names.name(slot, block))
                locals_.append(local)
            parent_hash = None if parent is None else self._names.name(slot, parent)
            yield BlocksStored(parent_hash, names, locals_)
            starts += [(block, kid) for _, kid in held]

    def dump(self) -> dict[str, Any]:
        """The whole index as plain values (JSON, pickle); `restore` matches the same.

        ``{"schema": 1, "slots": [{"slot": n, "events": [{"parent_hash", "block_hashes",
        "local_hashes"}, ...]}, ...]}``; each slot's events are parents first. Slots being dropped
        are left out.
        """
        return {
            "schema": DUMP_SCHEMA,
            "slots": [
                {
                    "slot": slot,
                    "events": [
                        {
                            "parent_hash": event.parent_hash,
                            "block_hashes": list(event.block_hashes),
                            "local_hashes": list(event.local_hashes),
                        }
                        for event in self.stored_events(slot)
                    ],
                }
                for slot in sorted(self._counts)
                if slot not in self._dropping
            ],
        }

    @classmethod
    def restore(cls, dump: Mapping[str, Any]) -> "PrefixIndex":
        """The index that `dump` described; `SnapshotError` for another schema or broken chains."""
        if dump.get("schema") != DUMP_SCHEMA:
            raise SnapshotError(
                f"prefix index dump has schema {dump.get('schema')!r}; expected {DUMP_SCHEMA}"
            )
        index = cls()
        for entry in dump["slots"]:
            for event in entry["events"]:
                result = index.store(
                    entry["slot"],
                    event["parent_hash"],
                    event["block_hashes"],
                    event["local_hashes"],
                )
                if result.refused is not None:
                    raise SnapshotError(f"prefix index dump: {result.refused.message}")
        return index

    # ---- inside

    def _rename(self, slot: int, bit: int, name: int, block: int) -> bool:
        """``slot`` calls ``block`` by ``name``; False if another of its blocks has the name."""
        meant = self._names.block(slot, name)
        if meant is not None and meant != block and self._owners.get(meant, 0) & bit:
            return False
        self._names.announce(slot, name, block)
        return True

    def _take(self, slot: int, pending: list[int], limit: int | None = None) -> int:
        """Take the blocks in ``pending`` and all that follow them from ``slot``.

        Stops after ``limit`` visits and leaves the rest in ``pending``; returns the visits.
        """
        bit = 1 << slot
        owners, children = self._owners, self._children
        only_child, branches = children.only, children.branches
        names, disagrees = self._names, slot in self._names.own
        roots = self._roots.get(slot, set())
        visits = taken = 0
        left = 0
        while pending and visits != limit:
            visits += 1
            block = pending.pop()
            held = owners.get(block, 0)
            if not held & bit:
                continue
            taken += 1
            local = only_child.get(block)
            if local is not None:
                pending.append(chain(block, local))
            elif block in branches:
                pending += [chain(block, kid) for kid in branches[block].locals]
            roots.discard(block)
            if disagrees:
                names.disown(slot, block)
            if held == bit:
                del owners[block]
                names.forget(block)
                only_child.pop(block, None)
                branches.pop(block, None)
            else:
                # As in store: one object for equal sets along a chain.
                left = left if left == held ^ bit else held ^ bit
                owners[block] = left
        count = self._counts.get(slot, 0) - taken
        if count:
            self._counts[slot] = count
        else:
            self._counts.pop(slot, None)
            self._roots.pop(slot, None)
            self._live &= ~bit
        return visits
