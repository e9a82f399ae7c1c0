"""The prefix index: how many leading blocks of a prompt each worker holds.

`BlockOwnership` keeps the holders of each block; this adds the matching of a prompt, the removal of
a lost worker in bounded steps, and dump and restore.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from router_core.block_ownership import BlockOwnership
from router_core.cache_groups import CACHE_GROUPS, CacheGroups
from router_core.detached import DETACHED, DetachedBlocks
from router_core.errors import SnapshotError, is_a
from router_core.events import BlocksStored
from router_core.forms import (
    BLOCK_NAME,
    COUNT_MAX,
    FLAG,
    SLOT,
    U64,
    Each,
    Fields,
    Maybe,
    Row,
    Whole,
    brief,
    check_once,
)
from router_core.hashing import sequence_hashes
from router_core.runs import POSITION, POSITION_BITS, ROOT
from router_core.sharded import shards_of
from router_core.worker_sets import NO_OVERLAPS, Overlaps, slots_of

DUMP_SCHEMA = 1

_FORM: Final = Fields(
    {
        "schema": Whole(DUMP_SCHEMA, DUMP_SCHEMA),
        "slots": Each(
            Fields(
                {
                    "slot": SLOT,
                    "events": Each(
                        Fields(
                            {
                                "parent_hash": Maybe(BLOCK_NAME),
                                "block_hashes": Each(BLOCK_NAME),
                                "local_hashes": Each(U64),
                            }
                        )
                    ),
                },
                {
                    "groups": CACHE_GROUPS,
                    "extra": Each(Row(BLOCK_NAME, Whole(1, COUNT_MAX))),
                    "detached": DETACHED,
                },
            )
        ),
    },
    {"exact": FLAG},
)
"""What `PrefixIndex.dump` writes."""


@dataclass(frozen=True, slots=True)
class IndexBound:
    """How many blocks an index may have.

    A rank, on its device: ``slack`` times the blocks that its worker declares, and ``spare``
    blocks; without a declared number there is no bound of its own. All ranks, in all tiers:
    ``total_blocks`` distinct ones, 45 to 200 bytes each; None is no bound.
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
        the slots to consider; None means all. Cost: a look-up for each run along the prompt
        (:mod:`router_core.runs`), and a bisection where the prompt leaves one.

        For slots with several cache groups it is what these can reuse together, at most ``limit``
        blocks: a window that ends at the limit need not hold the blocks of a later one. If
        ``exact``, the limit is that of all slots.
        """
        if self.exact and limit is not None:
            sequence_hashes = sequence_hashes[:limit]
        live = self._live if candidates is None else self._live & candidates
        if not sequence_hashes or not live:
            return NO_OVERLAPS
        levels = self._runs.levels(sequence_hashes, live)
        if self._grouped & live and levels:
            return self._together(levels, sequence_hashes, limit)
        return Overlaps(levels) if levels else NO_OVERLAPS

    def find_matches_local(
        self,
        local_hashes: Sequence[int],
        candidates: int | None = None,
        limit: int | None = None,
    ) -> Overlaps:
        """`find_matches` of a prompt whose local hashes (u64) are known and not yet chained.

        What is held is compared as it is; only a block that may start another run is chained. An
        ``array("Q")`` needs no conversion of the part that is held, which is most of the cost.
        """
        live = self._live if candidates is None else self._live & candidates
        if self._grouped & live:
            return self.find_matches(sequence_hashes(local_hashes), candidates, limit)
        if self.exact and limit is not None:
            local_hashes = local_hashes[:limit]
        if not local_hashes or not live:
            return NO_OVERLAPS
        levels = self._runs.levels_of_locals(local_hashes, live)
        return Overlaps(levels) if levels else NO_OVERLAPS

    def _together(
        self, levels: Sequence[tuple[int, int]], hashes: Sequence[int], limit: int | None
    ) -> Overlaps:
        """``levels``, as far as all cache groups of each slot allow."""
        deepest = levels[0][0]
        deepest = deepest if limit is None else min(deepest, limit)
        blocks = self._blocks(hashes[:deepest])
        shared = [-1 if n is None else n for n in map(self._names.shared_name, blocks)]
        places = shards_of(shared)
        depths: dict[int, int] = {}
        for depth, mask in levels:
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

    def _blocks(self, hashes: Sequence[int]) -> list[int]:
        """The blocks of a prompt that any slot holds, by their addresses."""
        return [
            run << POSITION_BITS | at
            for run, count in self._runs.path(hashes)
            for at in range(count)
        ]

    def name_of(self, slot: int, sequence_hashes: Sequence[int]) -> int:
        """The engine's name of the last of leading blocks of a prompt, which ``slot`` holds."""
        return self._names.name(slot, self._blocks(sequence_hashes)[-1])

    def sequence_of(self, slot: int, name: int) -> int | None:
        """The sequence hash of the block that ``slot`` holds under the engine's ``name``."""
        block = self._names.block(slot, name)
        if block is None or not self._holds(block, 1 << slot):
            return None
        return self._runs.sequence(block)

    # ---- losing a worker

    def begin_drop(self, slot: int) -> None:
        """Exclude ``slot`` from matching; `sweep` removes its blocks."""
        self._forget_groups(slot)
        if slot in self._dropping or not self._counts.get(slot):
            return
        self._live &= ~(1 << slot)
        self._dropping[slot] = [run << 1 for run in self._held_roots(slot)]

    def sweep(self, max_blocks: int) -> int:
        """Visit at most ``max_blocks`` blocks of dropped slots; returns the blocks still to remove.

        0 means that every dropped slot is free. A visit takes about 1.5 us, less where
        others hold the block.
        """
        runs = self._runs
        for slot in list(self._dropping):
            pending, bit = self._dropping[slot], 1 << slot
            while pending and max_blocks > 0:
                visit = pending[-1]
                run = visit >> 1
                if not visit & 1:
                    # Those that continue it first: a run stays as long as another continues it.
                    pending[-1] |= 1
                    pending += [kid << 1 for kid in runs.kids_from(run, 0) if runs.end(kid, bit)]
                    continue
                end = runs.end(run, bit)
                max_blocks -= self._leave(slot, run, max(0, end - max_blocks))
                if not runs.end(run, bit):
                    pending.pop()
            if not pending:
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
        runs, names = self._runs, self._names
        pending = sorted(
            self._held_roots(slot), key=lambda run: runs.sequence(run << POSITION_BITS)
        )
        while pending:
            run = pending.pop()
            start, end = run << POSITION_BITS, runs.end(run, bit)
            kids = [kid for kid in runs.kids_from(run, 0) if runs.end(kid, bit)]
            cuts = {(runs.above[kid] & POSITION) + 1 for kid in kids} | {0, end}
            cuts |= {*range(0, end, max_blocks)}
            above = runs.above[run]
            parent = None if above == ROOT else names.name(slot, above)
            for first, after in pairwise(sorted(cuts)):
                blocks = range(start + first, start + after)
                named = [names.name(slot, block) for block in blocks]
                yield BlocksStored(parent, named, [runs.local(block) for block in blocks])
                parent = named[-1]
            pending += kids

    def detached_events(self, slot: int) -> Iterator[BlocksStored]:
        """Events of the blocks of ``slot`` that wait for a parent, in the slot's names.

        A removal of the `holes` after them makes these known as holes.
        """
        detached = self.detached.get(slot)
        if detached is not None:
            for parent, names, local_hashes in detached.chains():
                yield BlocksStored(parent, names, local_hashes)

    def holes(self, slot: int) -> list[int]:
        """The removed blocks of ``slot`` for which others wait, by the engine's names."""
        detached = self.detached.get(slot)
        return [] if detached is None else detached.removed_parents()

    def copy(self) -> "PrefixIndex":
        """An independent copy: 0.1 s for a million blocks, where a dump takes seconds."""
        made = PrefixIndex(exact=self.exact)
        made._runs = self._runs.copy()
        made._names = self._names.copy(made._runs)
        made._roots = {slot: roots[:] for slot, roots in self._roots.items()}
        made._root_counts = self._root_counts.copy()
        made._counts = self._counts.copy()
        made._dropping = {slot: list(left) for slot, left in self._dropping.items()}
        made._live = self._live
        made._extra = {slot: extra.copy() for slot, extra in self._extra.items()}
        made._extra_total = self._extra_total.copy()
        made.detached = {slot: blocks.copy() for slot, blocks in self.detached.items()}
        made._grouped = self._grouped
        made._groups = {slot: groups.copy() for slot, groups in self._groups.items()}
        return made

    def dump(self) -> dict[str, Any]:
        """The whole index as plain data (JSON, pickle); the index of `restore` matches the same.

        ``{"schema": 1, "slots": [{"slot": n, "events": [{"parent_hash", "block_hashes",
        "local_hashes"}, ...]}, ...]}``, with ``groups``, ``extra`` (copies) and ``detached``
        (blocks without a parent) where a slot has such; each slot's events are parents first.
        Slots being dropped are left out. ``exact`` is there if it is true.
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
                    **({"detached": self.detached[slot].dump()} if slot in self.detached else {}),
                }
                for slot in sorted({*self._counts, *self._groups, *self.detached})
                if slot not in self._dropping
            ],
        }

    @classmethod
    def restore(cls, dump: Mapping[str, Any]) -> "PrefixIndex":
        """The index of a `dump`; raises `SnapshotError` for another schema or broken chains."""
        if is_a(dump, Mapping) and dump.get("schema") != DUMP_SCHEMA:
            schema = brief(dump.get("schema"))
            raise SnapshotError(f"index.schema: schema {schema}, {DUMP_SCHEMA} expected")
        _FORM.check(dump, "index")
        check_once((entry["slot"] for entry in dump["slots"]), "index.slots", "this slot")
        index = cls(exact=dump.get("exact", False))
        for place, entry in enumerate(dump["slots"]):
            for number, event in enumerate(entry["events"]):
                result = index.store(
                    entry["slot"],
                    event["parent_hash"],
                    event["block_hashes"],
                    event["local_hashes"],
                )
                if result.refused is not None:
                    at = f"index.slots[{place}].events[{number}]"
                    raise SnapshotError(f"{at}: {result.refused.message}")
            if "extra" in entry:
                extra = index._extra[entry["slot"]] = dict(entry["extra"])
                index._extra_total[entry["slot"]] = sum(extra.values())
            if "detached" in entry:
                index.detached[entry["slot"]] = DetachedBlocks.restore(entry["detached"])
            if "groups" in entry:
                index._groups[entry["slot"]] = CacheGroups.restore(entry["groups"])
                index._grouped |= 1 << entry["slot"]
        return index
