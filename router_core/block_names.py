"""Map the engines' own block hashes to blocks.

Removals and parents in a worker's events are engine hashes, here called *names*. Workers that run
the same engine with the same hash function use the same names, so a name is kept once for all
workers, in the block's run: the first name under which any worker announced a block is its *shared*
name. A worker that announces the block under another name (an engine whose hashes depend on
Python's per-process hash seed) gets an *own* name for it, and from then on only that name is valid
for this worker. So its later removals remove the right block, and fleets with equal names need no
memory per worker.
"""

from collections.abc import Callable, Sequence

from router_core.packed_table import PackedTable
from router_core.runs import POSITION, POSITION_BITS, Runs, packer, u64

U64_MAX = 2**64 - 1


class OwnNames:
    """The names of one worker that differ from the shared ones; both directions."""

    __slots__ = ("blocks", "names")

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        """name -> block"""
        self.names: dict[int, int] = {}
        """block -> name"""

    def drop(self, block: int) -> None:
        name = self.names.pop(block, None)
        if name is not None:
            del self.blocks[name]


class BlockNames:
    """Names of the blocks of ``runs``; a block is its address there."""

    __slots__ = ("own", "runs", "shared", "unnamed")

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.shared = PackedTable()
        """shared name -> block"""
        self.unnamed: set[int] = set()
        """blocks without a shared name: first announced under a name in use"""
        self.own: dict[int, OwnNames] = {}
        """slot -> its own names; only for workers whose names differ from the shared ones"""

    def copy(self, runs: Runs) -> "BlockNames":
        """An independent copy, for a copy of the runs."""
        made = BlockNames.__new__(BlockNames)
        made.runs = runs
        made.shared = self.shared.copy()
        made.unnamed = self.unnamed.copy()
        made.own = {}
        for slot, own in self.own.items():
            copied = made.own[slot] = OwnNames()
            copied.blocks, copied.names = own.blocks.copy(), own.names.copy()
        return made

    def is_named(self, block: int, name: int) -> bool:
        """Whether ``name`` is what the run of an existing block has as its name."""
        body = self.runs.bodies[block >> POSITION_BITS]
        at = len(body) // 3 * 2 + (block & POSITION) * 8
        return bool(u64(body, at)[0] == name)

    def find(self, name: int) -> int | None:
        """The block with this shared name."""
        block = self.shared.first(name)
        if not block:
            return None
        body = self.runs.bodies[block >> POSITION_BITS]
        if u64(body, len(body) // 3 * 2 + (block & POSITION) * 8)[0] == name:
            return block
        # Another name with the same remainder.
        return self.shared.find(name, self.is_named) or None

    def shared_name(self, block: int) -> int | None:
        """The shared name of a block; None if it has none."""
        if block in self.unnamed:
            return None
        body = self.runs.bodies[block >> POSITION_BITS]
        name: int = u64(body, len(body) // 3 * 2 + (block & POSITION) * 8)[0]
        return name

    def block(self, slot: int, name: int) -> int | None:
        """The block that ``name`` stands for on ``slot``, whether the slot holds it or not."""
        own = self.own.get(slot)
        if own is None:
            return self.find(name)
        block = own.blocks.get(name)
        if block is not None:
            return block
        block = self.find(name)
        return None if block in own.names else block

    def name(self, slot: int, block: int) -> int:
        """The name by which ``slot`` announced ``block``, which it holds."""
        own = self.own.get(slot)
        if own is not None and block in own.names:
            return own.names[block]
        name = self.shared_name(block)
        assert name is not None
        return name

    def announce(self, slot: int, name: int, block: int) -> None:
        """Name ``block`` as ``name`` on ``slot``; the slot's earlier name of it is dropped."""
        own = self.own.get(slot)
        if own is not None:
            own.drop(block)
        meant = self.find(name)
        if meant is None and block in self.unnamed and 0 <= name <= U64_MAX:
            self.unnamed.discard(block)
            run, at = block >> POSITION_BITS, block & POSITION
            body = self.runs.writable(run)
            packer(1).pack_into(body, len(body) // 3 * 2 + at * 8, name)
            self.shared.add(name, block)
        elif meant != block:
            if own is None:
                own = self.own[slot] = OwnNames()
            own.blocks[name] = block
            own.names[block] = name
        self._release(slot)

    def add(
        self,
        slot: int,
        names: Sequence[int],
        first: int,
        holds: Callable[[int], bool],
    ) -> tuple[int, bytes]:
        """Name new blocks from ``first`` on, up to a name of another block of the slot.

        Returns their number and their shared names, packed. ``holds``: whether the slot holds an
        existing block.
        """
        count, seen = 0, set()
        for name in names:
            meant = self.block(slot, name)
            if name in seen or (meant is not None and holds(meant)):
                break
            seen.add(name)
            count += 1
        free = [0 <= name <= U64_MAX and self.find(name) is None for name in names[:count]]
        shared = [name if new else 0 for name, new in zip(names, free, strict=False)]
        for block, (name, new) in enumerate(zip(names, free, strict=False), first):
            if new:
                self.shared.add(name, block)
                continue
            self.unnamed.add(block)
            own = self.own.get(slot)
            if own is None:
                own = self.own[slot] = OwnNames()
            own.blocks[name] = block
            own.names[block] = name
        return count, packer(count).pack(*shared)

    def any_unnamed(self, run: int, first: int, count: int) -> bool:
        """Whether one of ``count`` blocks of a run has no shared name."""
        start = run << POSITION_BITS | first
        return not self.unnamed.isdisjoint(range(start, start + count))

    def disown(self, slot: int, run: int, first: int, end: int) -> None:
        """Drop the own names on ``slot`` of blocks that it no longer holds."""
        own = self.own.get(slot)
        if own is not None:
            start = run << POSITION_BITS
            for block in range(start + first, start + end):
                own.drop(block)
            self._release(slot)

    def forget(self, run: int, end: int) -> None:
        """Drop the shared names of the blocks of ``run`` from ``end`` on."""
        body = self.runs.bodies[run]
        count = self.runs.lengths[run]
        names: Sequence[int] = packer(count - end).unpack_from(body, len(body) // 3 * 2 + end * 8)
        remove, unnamed = self.shared.remove, self.unnamed
        for block, name in enumerate(names, run << POSITION_BITS | end):
            if unnamed and block in unnamed:
                unnamed.discard(block)
            else:
                remove(name, block)

    def _release(self, slot: int) -> None:
        own = self.own.get(slot)
        if own is not None and not own.names:
            del self.own[slot]
