"""The caches of a recorded fleet: each router is replayed from its changes.

They are as the routers knew them at each moment. Beside them stands one shared cache of each model
with as many blocks as its whole fleet.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from dynctl.documents.recording import Changed
from dynctl.health.hits.breaks import TextPlace, Texts
from dynctl.health.hits.past import Fate, RankHistory, RankKey, RecordedRouter
from dynctl.health.hits.tiers import LowerBlocks
from router_core import (
    DEVICE,
    TIERS,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    Freed,
    IndexConnected,
    IndexMarked,
    KvEvent,
    PrefillDone,
    Role,
    Router,
    WindowStored,
    Worker,
    WorkerLost,
    sequence_hashes,
    slots_of,
)

#: The content of a prompt's first block, which is not known where it has a salt.
_FIRST: Final = 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is kept: distinct blocks ever seen, blocks of the shared cache, blocks whose fate is
    known, requests that wait for their end. A block takes about 100 bytes in each, and its fate up
    to 900 where it is removed from many ranks."""

    seen: int = 4_000_000
    shared: int = 2_000_000
    fates: int = 1_000_000
    requests: int = 100_000


class SharedCache:
    """One LRU cache of ``most`` blocks, and the blocks that one of twice the size would have."""

    __slots__ = ("_hot", "_warm", "most")

    def __init__(self) -> None:
        self.most = 0
        self._hot: OrderedDict[int, None] = OrderedDict()
        self._warm: OrderedDict[int, None] = OrderedDict()

    def resize(self, most: int) -> None:
        """Let it have ``most`` blocks."""
        self.most = most
        while self._warm and len(self._hot) < most:
            block, _ = self._warm.popitem()
            self._hot[block] = None
            self._hot.move_to_end(block, last=False)
        self._shrink()

    def leading(self, hashes: Sequence[int]) -> tuple[int, int]:
        """Leading blocks that it has, and that one of twice the size has."""
        hot, warm = self._hot, self._warm
        first = both = 0
        for block in hashes:
            if block in hot:
                first += first == both
            elif block not in warm:
                break
            both += 1
        return first, both

    def use(self, hashes: Sequence[int]) -> None:
        """A request uses these blocks: a block is less recent than the one before it."""
        hot, warm = self._hot, self._warm
        for block in reversed(hashes):
            if block in hot:
                hot.move_to_end(block)
            else:
                warm.pop(block, None)
                hot[block] = None
        self._shrink()

    def add(self, block: int) -> None:
        """An engine has a block that no request asked for yet, such as output."""
        if block not in self._hot:
            self._warm.pop(block, None)
            self._hot[block] = None
            self._shrink()

    def _shrink(self) -> None:
        while len(self._hot) > self.most:
            block, _ = self._hot.popitem(last=False)
            self._warm[block] = None
        while len(self._warm) > self.most:
            self._warm.popitem(last=False)


@dataclass(slots=True, eq=False)
class ModelCaches:
    """What requests and engines of one model had so far."""

    texts: Texts
    seen: set[int] = field(default_factory=set)
    cache: SharedCache = field(default_factory=SharedCache)
    #: KV blocks of all its workers that compute prompts, with ``lower``; None: a worker does not
    #: declare them.
    blocks: int | None = 0
    #: The most blocks that its ranks had below the device.
    lower: int = 0
    version: tuple[int, ...] = ()


class Caches:
    """What each rank and each model had so far, and what happened to each block."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.models: dict[str, ModelCaches] = {}
        self.ranks: dict[RankKey, RankHistory] = {}
        self.fates: dict[int, Fate] = {}
        self._contents: dict[int, tuple[int, str, bool, float]] = {}
        #: What a bound or a broken record left out, with how often.
        self.left_out: Counter[str] = Counter()
        #: Blocks that engines stored, and those of them that no known request had asked for.
        self.stored = self.foreign = 0

    def restore(self, router: Router, at: float) -> None:
        """Take the blocks of a router that was read from a snapshot."""
        lower: dict[int, list[tuple[str, list[list[Any]]]]] = {}
        for row in router.tiers.dump():
            lower.setdefault(row["slot"], []).append((row["tier"], row["blocks"]))
        for slot in router.freshness:
            if not _computes_prompts(router, slot):
                continue
            worker, ref = router.registry.worker(slot), router.registry.ref(slot)
            rank = self.rank((ref.worker_id, ref.dp_rank))
            names: dict[int, int] = {}
            for event in router.index.stored_events(slot):
                parent = None if event.parent_hash is None else names.get(event.parent_hash)
                chained = sequence_hashes(event.local_hashes, parent)
                columns = zip(event.block_hashes, event.local_hashes, chained, strict=True)
                for name, local, block in columns:
                    names[name] = block
                    self._was_stored(worker.model, rank, block, parent, local, at)
                    parent = block
            for tier, rows in lower.get(slot, ()):
                self._restore_lower(worker.model, rank, tier, rows, names)
        # Whose blocks they are is not known.
        self.foreign = self.stored = 0
        for fate in self.fates.values():
            fate.foreign = False

    def change(self, source: RecordedRouter, record: Changed) -> None:
        """Apply a change to the router of ``source``, and note what happens to blocks."""
        router = source.router
        if router is None:
            router = source.router = _new_router(source)
        change, at = record.change, record.at
        match change:
            case KvEvent():
                self._kv_event(source, router, change, at)
                return
            case WorkerLost():
                self._lose_worker(router, change.worker_id, at)
            case IndexMarked() if change.state in ("gapped", "over_limit"):
                self.rank((change.worker_id, change.dp_rank)).troubles.append(at)
            case IndexConnected() if not change.connected:
                self.rank((change.worker_id, change.dp_rank)).troubles.append(at)
            case PrefillDone() | Freed(stage="prefill"):
                # With a prefill hop the first token comes after the hand-over.
                request = source.pending.get(change.request_id)
                if request is not None and request.prefilled_at is None:
                    request.prefilled_at = at
        router.apply(change, at)
        source.config = router.config
        if isinstance(change, WorkerLost):
            while router.sweep(1_000_000):
                pass

    def _lose_worker(self, router: Router, worker_id: int, at: float) -> None:
        """A worker is lost with what its ranks had in each tier."""
        for slot in router.registry.slots(worker_id):
            rank = self.rank((worker_id, router.registry.ref(slot).dp_rank))
            self._clear_rank(rank, at)
            if rank.lower is not None:
                self.model(router.registry.worker(slot).model).lower -= rank.lower.most
                rank.lower = None

    def _kv_event(self, source: RecordedRouter, router: Router, change: KvEvent, at: float) -> None:
        key = (change.worker_id, change.dp_rank)
        slot = router.registry.slot(*key)
        event = change.event
        if slot is None:
            router.apply(change, at)
            return
        rank = self.rank(key)
        if isinstance(event, Cleared):
            router.apply(change, at)
            self._clear_rank(rank, at)
        elif not _computes_prompts(router, slot):
            # A prompt cannot reuse its blocks, so they take no place in the shared cache.
            router.apply(change, at)
        elif source.misses_blocks_of(router.registry.worker(slot)):
            # They are those of recorded prompts under other hashes.
            router.apply(change, at)
            rank.stored = True
        elif isinstance(event, WindowStored) or event.tier not in (DEVICE, *TIERS):
            router.apply(change, at)
        elif event.tier != DEVICE:
            if rank.lower is not None and not router.tiers.mask >> slot & 1:
                rank.lower.clear()  # the router dropped what it knew of the rank
            applied = router.apply(change, at)
            if applied.ok and router.index.is_main(slot, event.group):
                self._lower_changed(router, slot, rank, event)
        elif isinstance(event, BlocksRemoved):
            before = [router.index.sequence_of(slot, name) for name in event.block_hashes]
            router.apply(change, at)
            after = [router.index.sequence_of(slot, name) for name in event.block_hashes]
            self._device_removed(rank, zip(before, after, strict=True), at)
        else:
            router.apply(change, at)
            self._device_stored(router, slot, rank, event, at)

    def _device_removed(
        self, rank: RankHistory, blocks: Iterable[tuple[int | None, int | None]], at: float
    ) -> None:
        """A rank removed blocks from its device: pairs of what it had and what it has still, where
        a copy is left."""
        for block, left in blocks:
            fate = None if block is None else self.fates.get(block)
            if fate is not None and left is None:
                fate.note_removal(at, rank)

    def _device_stored(
        self, router: Router, slot: int, rank: RankHistory, event: BlocksStored, at: float
    ) -> None:
        """A rank has blocks on its device now, as its index shows them."""
        model = router.registry.worker(slot).model
        parent = None
        if event.parent_hash is not None:
            parent = router.index.sequence_of(slot, event.parent_hash)
        for name, local in zip(event.block_hashes, event.local_hashes, strict=False):
            block = router.index.sequence_of(slot, name)
            if block is not None:
                self._was_stored(model, rank, block, parent, local, at)
            parent = block

    def _lower_changed(
        self, router: Router, slot: int, rank: RankHistory, event: BlocksStored | BlocksRemoved
    ) -> None:
        """A rank has blocks in a lower tier now, or has them there no more."""
        if isinstance(event, BlocksRemoved):
            if rank.lower is not None:
                rank.lower.remove(event.tier, event.block_hashes)
            return
        parent = None
        if event.parent_hash is not None:
            if rank.lower is not None:
                parent = rank.lower.sequence_of(event.parent_hash)
            if parent is None:
                parent = router.index.sequence_of(slot, event.parent_hash)
            if parent is None:
                self.left_out["events of lower tiers whose blocks before are unknown"] += 1
                return
        blocks = sequence_hashes(event.local_hashes, parent)
        model = router.registry.worker(slot).model
        self._lower_stored(model, rank, event.tier, event.block_hashes, blocks)

    def _lower_stored(
        self, model: str, rank: RankHistory, tier: str, names: Sequence[int], blocks: Sequence[int]
    ) -> None:
        caches = self.model(model)
        for block in blocks:
            if block not in caches.seen:
                self.see(caches, block)
                caches.cache.add(block)
        if rank.lower is None:
            rank.lower = LowerBlocks()
        caches.lower += rank.lower.store(tier, names, blocks)

    def _restore_lower(
        self,
        model: str,
        rank: RankHistory,
        tier: str,
        rows: Sequence[Sequence[Any]],
        known: dict[int, int],
    ) -> None:
        """Take the blocks of a tier, ``[parent, local hash, name]`` each, in any order.

        ``known``: the engine's names of the rank's other blocks; it gets those of the tier.
        """
        places = {name: (parent, local) for parent, local, name in rows}
        for name in _parents_first({name: parent for name, (parent, _) in places.items()}):
            parent, local = places[name]
            if name not in known and (parent is None or parent in known):
                above = None if parent is None else known[parent]
                known[name] = sequence_hashes((local,), above)[0]
        names = [name for name in places if name in known]
        if len(names) < len(places):
            self.left_out["events of lower tiers whose blocks before are unknown"] += 1
        if names:
            self._lower_stored(model, rank, tier, names, [known[name] for name in names])

    def depth(self, router: Router, slot: int, hashes: Sequence[int], device: int) -> int:
        """Leading blocks that a rank has, ``device`` of them on its device."""
        if not router.tiers.mask >> slot & 1:
            return device
        worker_id, dp_rank = router.registry.ref(slot)
        rank = self.ranks.get((worker_id, dp_rank))
        return device if rank is None or rank.lower is None else rank.lower.end_of(hashes, device)

    def _was_stored(
        self, model: str, rank: RankHistory, block: int, parent: int | None, local: int, at: float
    ) -> None:
        """A rank has a block now, after ``parent``."""
        rank.stored = True
        self.stored += 1
        caches = self.model(model)
        new = block not in caches.seen
        self.see(caches, block)
        caches.cache.add(block)
        fate = self.fate(block, at)
        above = None if parent is None else self.fates.get(parent)
        if new and (parent is None or (above is not None and above.foreign)):
            fate.foreign = True
            self.foreign += 1
        fate.rank, fate.epoch, fate.stored_at = rank, rank.epoch, at
        for gap in fate.waiting or ():
            if gap.rank is rank and gap.stored_at is None:
                gap.stored_at = at
        fate.waiting = None
        self._note_text(caches, fate, block, local, 0 if parent is None else _below(above))
        if not fate.content and parent is None:
            fate.content = _FIRST
        elif not fate.content and above is not None and above.content:
            fate.content = sequence_hashes((local,), above.content)[0]
            self._note_twin(fate, block, at)

    def _note_text(
        self, caches: ModelCaches, fate: Fate, block: int, local: int, depth: int
    ) -> None:
        """The tokens of a block are known now; ``depth``: blocks before it, -1: unknown."""
        if fate.local:
            return
        fate.local = local
        if fate.depth < 0:
            fate.depth = depth
        if fate.depth >= 0:
            tenant = "" if fate.by is None else fate.by.arrived.tenant
            if caches.texts.note(tenant, local, TextPlace(fate.depth, fate.first_at, block)):
                self.left_out["blocks whose contents were forgotten"] += 1

    def _note_twin(self, fate: Fate, block: int, at: float) -> None:
        """Note the first block with the same content, which another salt may have had."""
        sender = fate.by
        tenant = "" if sender is None else sender.arrived.tenant
        salted = sender is not None and sender.arrived.salted
        first = self._contents.setdefault(fate.content, (block, tenant, salted, at))
        if first[0] != block:
            fate.twin = first[1:]
        _drop_oldest(self._contents, self.bounds.fates)

    def _clear_rank(self, rank: RankHistory, at: float) -> None:
        rank.epoch += 1
        rank.clears.append(at)
        if rank.lower is not None:
            rank.lower.clear()

    def rank(self, key: RankKey) -> RankHistory:
        rank = self.ranks.get(key)
        if rank is None:
            rank = self.ranks[key] = RankHistory(key)
        return rank

    def model(self, name: str) -> ModelCaches:
        caches = self.models.get(name)
        if caches is None:
            caches = self.models[name] = ModelCaches(Texts(self.bounds.fates))
            caches.cache.resize(self.bounds.shared)
        return caches

    def resize(self, caches: ModelCaches, source: RecordedRouter, mask: int, size: int) -> None:
        """Give the shared cache the blocks of the fleet as it is now, of ``size`` tokens."""
        router = source.router
        number = -1 if router is None else router.registry.version
        version = (source.number, number, caches.lower, size, len(source.codes))
        if caches.version == version:
            return
        caches.version = version
        total = _blocks_of_fleet(source, mask, size)
        if total is not None:
            total += caches.lower
        caches.blocks = total
        caches.cache.resize(min(self.bounds.shared, total or self.bounds.shared))

    def see(self, caches: ModelCaches, block: int) -> None:
        if block in caches.seen:
            return
        if len(caches.seen) >= self.bounds.seen:
            self.left_out["blocks that were seen before"] += 1
            return
        caches.seen.add(block)

    def fate(self, block: int, at: float) -> Fate:
        """What happened to a block; one that is new is first seen ``at`` that time."""
        fate = self.fates.get(block)
        if fate is None:
            fate = self.fates[block] = Fate(first_at=at)
            if _drop_oldest(self.fates, self.bounds.fates):
                self.left_out["blocks whose past was forgotten"] += 1
        return fate


def _below(above: Fate | None) -> int:
    """The depth of a block after ``above``; -1 where that is unknown."""
    return -1 if above is None or above.depth < 0 else above.depth + 1


def _new_router(source: RecordedRouter) -> Router:
    start = source.start
    if start is None:
        return Router(source.config)
    return Router(source.config, exact_reuse=start.exact_reuse, learns=start.learns)


def _blocks_of_rank(source: RecordedRouter, worker: Worker, size: int) -> int | None:
    """The KV blocks of one rank, in blocks of ``size`` tokens; None where it declares none."""
    blocks = worker.runtime_config.total_kv_blocks
    if not blocks or not source.misses_blocks_of(worker):
        return blocks
    return blocks * worker.block_size // size


def _blocks_of_fleet(source: RecordedRouter, mask: int, size: int) -> int | None:
    """The KV blocks of the ranks in ``mask`` together; None where one does not declare them."""
    if source.router is None or not mask or not source.gives("workers"):
        return None
    workers = [source.router.registry.worker(slot) for slot in slots_of(mask)]
    counts = [_blocks_of_rank(source, worker, size) or 0 for worker in workers]
    return sum(counts) if all(counts) else None


def _parents_first(parents: Mapping[int, int | None]) -> Iterator[int]:
    """The names of blocks, each after its parent where that is one of them."""
    visited: set[int] = set()
    for name in parents:
        chain: list[int] = []
        at: int | None = name
        while at is not None and at in parents and at not in visited:
            visited.add(at)
            chain.append(at)
            at = parents[at]
        yield from reversed(chain)


def _computes_prompts(router: Router, slot: int) -> bool:
    """Whether prompts may go to a worker: all that do not only decode, or else those that can."""
    registry = router.registry
    mask = registry.model(registry.worker(slot).model)
    mask = mask & ~registry.roles[Role.DECODE] or mask & registry.can_prefill
    return bool(mask >> slot & 1)


def _drop_oldest(table: dict[int, Any], most: int) -> bool:
    """Drop the oldest tenth of a table that is larger than ``most``; whether it did."""
    if len(table) <= most:
        return False
    for key in list(islice(table, max(1, most // 10))):
        del table[key]
    return True
