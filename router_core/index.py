"""The prefix index: how many leading blocks of a prompt each worker holds.

`BlockOwnership` keeps the holders of each block; this adds the matching of a prompt, the removal of
a lost worker in bounded steps, and dump and restore. A mask of holders can only shrink with depth,
which makes bisection over a prompt exact.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router_core.block_ownership import BlockOwnership
from router_core.cache_groups import CacheGroups
from router_core.errors import SnapshotError
from router_core.events import BlocksStored
from router_core.hashing import chain
from router_core.sharded import shards_of
from router_core.worker_sets import Overlaps, match_prefix, slots_of

DUMP_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class IndexBound:
    """How many blocks an index may have.

    A rank, on its device: ``slack`` times the blocks that its worker declares, and ``spare``
    blocks; without a declared number there is no bound of its own. All ranks, in all tiers:
    ``total_blocks`` distinct ones, about 300 bytes each; None is no bound.
    """

    total_blocks: int | None = None
    slack: float = 1.25
    spare: int = 256

    def of_rank(self, declared: int | None) -> int | None:
        """The bound of a rank that declares so many blocks."""
        return None if not declared else int(declared * self.slack) + self.spare


class PrefixIndex(BlockOwnership):
    """Prefix matches over what the slots hold; a slot is a (worker, data-parallel rank).

    A lost worker's slot goes through `begin_drop`, then `sweep` until `is_free`.
    """

    __slots__ = ()

    def find_matches(
        self,
        sequence_hashes: Sequence[int],
        candidates: int | None = None,
        limit: int | None = None,
    ) -> Overlaps:
        """How many leading blocks of a prompt each slot holds.

        ``sequence_hashes``: of the prompt's complete blocks, in order. ``candidates``: a mask of
        the slots to consider; None means all. Cost: two look-ups if all slots that hold the first
        block hold the last, otherwise about log2(blocks) more per distinct depth.

        For slots with several cache groups it is what these can reuse together, at most ``limit``
        blocks: a window that ends at the limit need not hold the blocks of a later one. If
        ``exact``, the limit is that of all slots.
        """
        if self.exact and limit is not None:
            sequence_hashes = sequence_hashes[:limit]
        live = self._live if candidates is None else self._live & candidates
        found = match_prefix(self._owners, sequence_hashes, live)
        if self._grouped & live and found.levels:
            return self._together(found, sequence_hashes, limit)
        return found

    def _together(self, found: Overlaps, hashes: Sequence[int], limit: int | None) -> Overlaps:
        """``found``, as far as all cache groups of each slot allow."""
        deepest = found.levels[0][0]
        deepest = deepest if limit is None else min(deepest, limit)
        blocks = hashes[:deepest]
        shared = [
            -1 if n is None else n for n in self._names.names.find_many(blocks, shards_of(blocks))
        ]
        places = shards_of(shared)
        depths: dict[int, int] = {}
        for depth, mask in found.levels:
            plain = mask & ~self._grouped
            if plain:
                depths[depth] = depths.get(depth, 0) | plain
            for slot in slots_of(mask & self._grouped):
                names, shards = shared, places
                if slot in self._names.own:
                    names = [self._names.name(slot, block) for block in blocks[:depth]]
                    shards = shards_of(names)
                usable = self._groups[slot].usable(names, shards, min(depth, deepest))
                depths[usable] = depths.get(usable, 0) | 1 << slot
        depths.pop(0, None)
        return Overlaps(tuple(sorted(depths.items(), reverse=True)))

    def name_of(self, slot: int, sequence_hash: int) -> int:
        """The engine's name of a block that ``slot`` holds; KeyError for another block."""
        return self._names.name(slot, sequence_hash)

    # ---- losing a worker

    def begin_drop(self, slot: int) -> None:
        """Exclude ``slot`` from matching; `sweep` removes its blocks."""
        self._forget_groups(slot)
        if slot in self._dropping or not self._counts.get(slot):
            return
        self._live &= ~(1 << slot)
        self._dropping[slot] = []

    def sweep(self, max_blocks: int) -> int:
        """Visit at most ``max_blocks`` blocks of dropped slots; returns the blocks still to remove.

        0 means that every dropped slot is free. A visit takes about half a microsecond.
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
                max_blocks -= self._remove_chains(slot, pending, max_blocks)
            if not self._counts.get(slot):
                del self._dropping[slot]
        return sum(self._counts.get(slot, 0) for slot in self._dropping)

    def is_free(self, slot: int) -> bool:
        """Whether ``slot`` has no blocks left, so that another worker may get it."""
        return slot not in self._dropping and not self._counts.get(slot)

    # ---- dump and restore

    def stored_events(self, slot: int, max_blocks: int = 512) -> Iterator[BlocksStored]:
        """Events that store the blocks of ``slot``, parents before children, in the slot's names.

        At most ``max_blocks`` blocks per event. The index must not change during the iteration.
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

    def copy(self) -> "PrefixIndex":
        """An independent copy: 0.3 s for a million unshared blocks, where a dump takes seconds."""
        made = PrefixIndex(exact=self.exact)
        made._owners = self._owners.copy()
        made._children = self._children.copy()
        made._names = self._names.copy()
        made._roots = {slot: set(roots) for slot, roots in self._roots.items()}
        made._starts = self._starts.copy()
        made._counts = self._counts.copy()
        made._dropping = {slot: list(left) for slot, left in self._dropping.items()}
        made._live = self._live
        made._extra = {slot: extra.copy() for slot, extra in self._extra.items()}
        made._extra_total = self._extra_total.copy()
        made._grouped = self._grouped
        made._groups = {slot: groups.copy() for slot, groups in self._groups.items()}
        return made

    def dump(self) -> dict[str, Any]:
        """The whole index as plain data (JSON, pickle); the index of `restore` matches the same.

        ``{"schema": 1, "slots": [{"slot": n, "events": [{"parent_hash", "block_hashes",
        "local_hashes"}, ...]}, ...]}``, with ``groups`` and ``extra``
        (copies) where a slot has such; each slot's
        events are parents first. Slots being dropped are left out. ``exact`` is there if it is
        true.
        """
        return {
            "schema": DUMP_SCHEMA,
            **({"exact": True} if self.exact else {}),
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
                    **({"groups": self._groups[slot].dump()} if slot in self._groups else {}),
                    **({"extra": [*self._extra[slot].items()]} if self._extra.get(slot) else {}),
                }
                for slot in sorted({*self._counts, *self._groups})
                if slot not in self._dropping
            ],
        }

    @classmethod
    def restore(cls, dump: Mapping[str, Any]) -> "PrefixIndex":
        """The index of a `dump`; raises `SnapshotError` for another schema or broken chains."""
        if dump.get("schema") != DUMP_SCHEMA:
            raise SnapshotError(
                f"prefix index dump has schema {dump.get('schema')!r}; expected {DUMP_SCHEMA}"
            )
        index = cls(exact=dump.get("exact") is True)
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
            if "extra" in entry:
                extra = index._extra[entry["slot"]] = dict(entry["extra"])
                index._extra_total[entry["slot"]] = sum(extra.values())
            if "groups" in entry:
                index._groups[entry["slot"]] = CacheGroups.restore(entry["groups"])
                index._grouped |= 1 << entry["slot"]
        return index
