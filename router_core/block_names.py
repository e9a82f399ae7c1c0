"""Map the engines' own block hashes to blocks.

Removals and parents in a worker's events are engine hashes, here called *names*. Workers that run
the same engine with the same hash function use the same names, so a name is kept once for all
workers: the first name under which any worker announced a block is its *shared* name. A worker
that announces the block under another name (an engine whose hashes depend on Python's per-process
hash seed) gets an *own* name for it, and from then on only that name is valid for this worker. So
its later removals remove the right block, and fleets with equal names need no memory per worker.
"""

from collections.abc import Sequence

from router_core.sharded import ShardedDict, shards_of


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
    """Names of blocks; a block is its sequence hash. Its holders are in `BlockOwnership`.

    `shared` and `names` are read directly by the index, whose inner loop a call would double.
    """

    __slots__ = ("names", "own", "shared")

    def __init__(self) -> None:
        self.shared = ShardedDict()
        """shared name -> block"""
        self.names = ShardedDict()
        """block -> shared name; a block first announced under a name in use has none"""
        self.own: dict[int, OwnNames] = {}
        """slot -> its own names; only for workers whose names differ from the shared ones"""

    def copy(self) -> "BlockNames":
        """An independent copy."""
        made = BlockNames()
        made.shared = self.shared.copy()
        made.names = self.names.copy()
        for slot, own in self.own.items():
            copied = made.own[slot] = OwnNames()
            copied.blocks, copied.names = own.blocks.copy(), own.names.copy()
        return made

    def block(self, slot: int, name: int) -> int | None:
        """The block that ``name`` stands for on ``slot``, whether the slot holds it or not."""
        own = self.own.get(slot)
        if own is None:
            return self.shared.find(name)
        block = own.blocks.get(name)
        if block is not None:
            return block
        block = self.shared.find(name)
        return None if block in own.names else block

    def name(self, slot: int, block: int) -> int:
        """The name by which ``slot`` announced ``block``, which it holds."""
        own = self.own.get(slot)
        if own is not None and block in own.names:
            return own.names[block]
        return self.names[block]

    def announce(self, slot: int, name: int, block: int) -> None:
        """Name ``block`` as ``name`` on ``slot``; the slot's earlier name of it is dropped."""
        own = self.own.get(slot)
        if own is not None:
            own.drop(block)
        meant = self.shared.find(name)
        if meant is None and block not in self.names:
            self.shared[name] = block
            self.names[block] = name
        elif meant != block:
            if own is None:
                own = self.own[slot] = OwnNames()
            own.blocks[name] = block
            own.names[block] = name
        self._release(slot)

    def announce_new(self, names: Sequence[int], blocks: list[int], shards: list[int]) -> bool:
        """Make ``names`` the shared names of ``blocks``, which have none.

        ``shards``: those of the blocks. False, and nothing changes, if one of the names is in use
        or given to two of the blocks.
        """
        theirs = shards_of(names)
        if self.shared.add_many(names, blocks, theirs) != blocks:
            # The blocks had no name, so each name of them was added by this call.
            for name, block in zip(names, blocks, strict=True):
                if self.shared.find(name) == block:
                    del self.shared[name]
            return False
        self.names.set_many(blocks, names, shards)
        return True

    def disown(self, slot: int, block: int) -> None:
        """Drop the own name of ``block`` on ``slot``, which no longer holds it."""
        own = self.own.get(slot)
        if own is not None:
            own.drop(block)
            self._release(slot)

    def forget(self, block: int) -> None:
        """Drop the shared name of ``block``, which no worker holds any more."""
        name = self.names.pop(block, None)
        if name is not None:
            del self.shared[name]

    def _release(self, slot: int) -> None:
        own = self.own.get(slot)
        if own is not None and not own.names:
            del self.own[slot]
