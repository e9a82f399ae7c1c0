"""The registry of workers, and the slot of each of their ranks.

A *slot* is a small integer for one (worker, data-parallel rank). Sets of slots are ints used as
bit masks, so "decode workers of this model in zone-a that are alive" is three ``&`` of numbers
that the registry keeps up to date, and not a loop over the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, Final

from router_core.errors import SnapshotError, WorkerError
from router_core.forms import (
    MAX_SLOTS,
    SLOT,
    TEXT,
    U64_MAX,
    Each,
    Fields,
    Table,
    Whole,
    check_once,
)
from router_core.worker_sets import slots_of
from router_core.workers import WORKER, Role, Worker, WorkerWithDpRank

_FORM: Final = Fields(
    {
        "capacity": Whole(0, MAX_SLOTS),
        "workers": Each(Fields({**WORKER.forms, "slots": Each(SLOT)}, WORKER.more)),
        "unavailable": Table(TEXT, U64_MAX),
    }
)
"""What `WorkerRegistry.dump` writes."""


@dataclass(frozen=True)
class CandidateSet:
    """The ranks of one mask in slot order, as columns."""

    slots: tuple[int, ...]
    workers: tuple[Worker, ...]
    refs: tuple[WorkerWithDpRank, ...]

    @cached_property
    def cycle(self) -> list[int]:
        """Positions by ascending id. Made when round-robin reads it: sorting takes the longest."""
        return sorted(range(len(self.slots)), key=self.refs.__getitem__)

    @cached_property
    def _of_slots(self) -> itemgetter[Any]:
        """Reads a column at two slots or more."""
        slots = self.slots
        if slots[-1] - slots[0] == len(slots) - 1:
            return itemgetter(slice(slots[0], slots[-1] + 1))
        return itemgetter(*slots)

    def gather(self, column: Sequence[Any]) -> list[Any]:
        """``[column[slot] for slot in slots]``, in C."""
        if len(self.slots) < 2:
            return [column[slot] for slot in self.slots]
        values = self._of_slots(column)
        return values if type(values) is list else list(values)


class WorkerRegistry:
    """Workers, their slots, and the masks that routing filters by.

    A rank keeps its slot while it is registered. The slot of a lost rank is assigned again only
    after :meth:`release`, because the prefix index removes its blocks in steps.
    """

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}
        self._names: dict[str, int] = {}
        self._slots: dict[WorkerWithDpRank, int] = {}
        #: Worker id -> its slots in rank order.
        self._ranked: dict[int, tuple[int, ...]] = {}
        self._refs: list[WorkerWithDpRank | None] = []
        self._by_slot: list[Worker | None] = []
        self._free: list[int] = []
        self._unavailable: dict[int, str] = {}
        self.alive = 0
        self.unavailable = 0
        #: Slots by the role of their worker.
        self.roles: dict[Role, int] = dict.fromkeys(Role, 0)
        self._own_models: dict[str, int] = {}
        self._models: dict[str, int] = {}
        self._taints: dict[str, int] = {}
        self._domains: dict[str, int] = {}
        self._sets: dict[str, int] = {}
        self._cannot_prefill = 0
        #: Slots whose worker publishes a KV-transfer policy of its own.
        self.own_policy = 0
        #: Grows with every change of the workers.
        self.version = 0
        self._candidates: dict[int, CandidateSet] = {}
        self._sizes: dict[str, frozenset[int]] = {}
        self._for_stage: dict[str, int] = {}

    # -- content ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, worker_id: int) -> Worker | None:
        return self._workers.get(worker_id)

    def by_name(self, name: str) -> Worker | None:
        worker_id = self._names.get(name)
        return None if worker_id is None else self._workers[worker_id]

    @property
    def capacity(self) -> int:
        """Number of slots ever assigned; the length of every per-slot column."""
        return len(self._refs)

    def slot(self, worker_id: int, dp_rank: int) -> int | None:
        # An equal tuple finds the same entry, in half of the time.
        return self._slots.get((worker_id, dp_rank))  # type: ignore[call-overload, no-any-return]

    def slots(self, worker_id: int) -> tuple[int, ...]:
        """The slots of all ranks of a worker, in rank order; empty for an unknown worker."""
        return self._ranked.get(worker_id, ())

    def ref(self, slot: int) -> WorkerWithDpRank:
        ref = self._refs[slot]
        if ref is None:
            raise LookupError(f"slot {slot} is not in use")
        return ref

    def worker(self, slot: int) -> Worker:
        worker = self._by_slot[slot]
        if worker is None:
            raise LookupError(f"slot {slot} is not in use")
        return worker

    def unavailable_reason(self, worker_id: int) -> str | None:
        return self._unavailable.get(worker_id)

    # -- masks -----------------------------------------------------------------------------

    def model(self, name: str) -> int:
        """Slots whose worker serves ``name``: a model, an alias of one, or a LoRA adapter."""
        return self._models.get(name, 0)

    def serving(
        self, model: str, served_name: str | None = None, worker_set: str | None = None
    ) -> int:
        """Slots whose worker serves ``model``, its other name ``served_name`` too, and belongs to
        ``worker_set``; None: of any."""
        mask = self.model(model)
        if served_name is not None:
            mask &= self.model(served_name)
        return mask if worker_set is None else mask & self.worker_set(worker_set)

    def model_of(self, name: str) -> str:
        """The model of the first rank that serves ``name``; ``name`` itself where none does."""
        mask = self.model(name)
        return self.worker((mask & -mask).bit_length() - 1).model if mask else name

    def models(self) -> tuple[str, ...]:
        """The models of the workers, without aliases and adapters, in order of registration."""
        return tuple(self._own_models)

    def served_names(self) -> tuple[str, ...]:
        """All names that requests may use: models, aliases, adapters."""
        return tuple(self._models)

    def worker_set(self, name: str) -> int:
        """Slots whose worker belongs to a set of workers."""
        return self._sets.get(name, 0)

    def taint(self, taint: str) -> int:
        return self._taints.get(taint, 0)

    def with_domain(self, domain: str) -> int:
        """Slots whose worker publishes any value for ``domain``."""
        return self._domains.get(domain, 0)

    @property
    def can_prefill(self) -> int:
        return self.alive & ~self._cannot_prefill

    def roles_for(self, stage: str) -> int:
        """The slots whose role can serve a hop."""
        mask = self._for_stage.get(stage)
        if mask is None:
            roles = self.roles
            mask = roles[Role.PREFILL] if stage == "prefill" else roles[Role.DECODE]
            if stage == "aggregated":
                mask = roles[Role.AGGREGATED] | mask & self.can_prefill
            self._for_stage[stage] = mask
        return mask

    def block_sizes(self, model: str) -> frozenset[int]:
        """The block sizes of the workers of a model, by any of its names; empty without any."""
        sizes = self._sizes.get(model)
        if sizes is None:
            if len(self._sizes) >= 64:
                self._sizes.clear()
            workers = self.candidates(self.model(model)).workers
            sizes = self._sizes[model] = frozenset([worker.block_size for worker in workers])
        return sizes

    def mask_of(self, worker_ids: Iterable[int]) -> int:
        mask = 0
        for worker_id in worker_ids:
            for slot in self.slots(worker_id):
                mask |= 1 << slot
        return mask

    def candidates(self, mask: int) -> CandidateSet:
        """The ranks of a mask of slots in use; cached, because the same few masks repeat."""
        known = self._candidates.get(mask)
        if known is None:
            if len(self._candidates) >= 64:
                self._candidates.clear()
            slots = slots_of(mask)
            workers = filter(None, map(self._by_slot.__getitem__, slots))
            refs = filter(None, map(self._refs.__getitem__, slots))
            known = self._candidates[mask] = CandidateSet(slots, tuple(workers), tuple(refs))
        return known

    # -- changes ---------------------------------------------------------------------------

    def upsert(self, worker: Worker) -> tuple[int, ...]:
        """Register or replace a worker; returns the slots of ranks that it no longer has.

        Raises WorkerError when another worker has the name, leaving the registry as it was.
        """
        holder = self._names.get(worker.name)
        if holder is not None and holder != worker.worker_id:
            raise WorkerError(
                f"worker name {worker.name!r} belongs to worker {holder}; give worker "
                f"{worker.worker_id} another name"
            )
        old = self._workers.get(worker.worker_id)
        dropped: list[int] = []
        if old is not None:
            self._names.pop(old.name, None)
            keep = set(worker.ranks)
            for rank in old.ranks:
                slot = self._slots[WorkerWithDpRank(worker.worker_id, rank)]
                self._unmask(slot, old)
                if rank not in keep:
                    dropped.append(slot)
                    del self._slots[WorkerWithDpRank(worker.worker_id, rank)]
                    self._refs[slot] = self._by_slot[slot] = None
        self._note_change()
        self._workers[worker.worker_id] = worker
        self._names[worker.name] = worker.worker_id
        for rank in worker.ranks:
            ref = WorkerWithDpRank(worker.worker_id, rank)
            slot = self._slots.get(ref, -1)
            if slot < 0:
                slot = self._new_slot()
                self._slots[ref] = slot
                self._refs[slot] = ref
            self._by_slot[slot] = worker
            self._mask(slot, worker)
        self._ranked[worker.worker_id] = tuple(
            self._slots[WorkerWithDpRank(worker.worker_id, rank)] for rank in worker.ranks
        )
        return tuple(dropped)

    def remove(self, worker_id: int) -> tuple[int, ...]:
        """Remove a worker; returns its slots, which stay reserved until :meth:`release`."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return ()
        self._note_change()
        self._names.pop(worker.name, None)
        self._ranked.pop(worker_id, None)
        self._unavailable.pop(worker_id, None)
        dropped = []
        for rank in worker.ranks:
            slot = self._slots.pop(WorkerWithDpRank(worker_id, rank))
            self._unmask(slot, worker)
            self._refs[slot] = self._by_slot[slot] = None
            dropped.append(slot)
        return tuple(dropped)

    def release(self, slot: int) -> None:
        """Make a swept slot available to the next worker."""
        self._free.append(slot)
        self._free.sort(reverse=True)

    def set_available(self, worker_id: int, reason: str | None) -> None:
        """Exclude a worker from routing for ``reason``; None includes it again."""
        if worker_id not in self._workers:
            return
        bits = self.mask_of((worker_id,))
        if reason is None:
            self._unavailable.pop(worker_id, None)
            self.unavailable &= ~bits
        else:
            self._unavailable[worker_id] = reason
            self.unavailable |= bits

    # -- snapshot --------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Plain data: the workers with their slots, so that masks stay valid after restore."""
        return {
            "capacity": self.capacity,
            "workers": [
                {**worker.to_dict(), "slots": list(self.slots(worker.worker_id))} for worker in self
            ],
            "unavailable": {str(k): v for k, v in self._unavailable.items()},
        }

    @classmethod
    def restore(cls, plain: dict[str, Any]) -> WorkerRegistry:
        """The inverse of :meth:`dump`; slots without a worker are free. Raises SnapshotError."""
        _FORM.check(plain, "registry")
        workers, capacity = plain["workers"], plain["capacity"]
        check_once((row["worker_id"] for row in workers), "registry.workers", "this id")
        registry = cls()
        registry._refs = [None] * capacity
        registry._by_slot = [None] * capacity
        for place, row in enumerate(workers):
            at, slots = f"registry.workers[{place}]", row["slots"]
            try:
                worker = Worker.from_dict(row)
            except WorkerError as error:
                raise SnapshotError(f"{at}: {str(error)[:400]}") from None
            registry._restore_slots(worker, slots, f"{at}.slots")
            try:
                registry.upsert(worker)
            except WorkerError as error:
                raise SnapshotError(f"{at}.name: {str(error)[:400]}") from None
        refs = registry._refs
        registry._free = [slot for slot in range(capacity - 1, -1, -1) if refs[slot] is None]
        for worker_id, reason in plain["unavailable"].items():
            registry.set_available(int(worker_id), reason)
        return registry

    # -- inside ----------------------------------------------------------------------------

    def _restore_slots(self, worker: Worker, slots: Sequence[int], at: str) -> None:
        """Give the ranks of a worker the slots that they had; raises SnapshotError."""
        if len(slots) != len(worker.ranks):
            raise SnapshotError(
                f"{at}: {len(slots)}, one for each of {len(worker.ranks)} ranks expected"
            )
        for number, (rank, slot) in enumerate(zip(worker.ranks, slots, strict=True)):
            if slot >= len(self._refs):
                raise SnapshotError(f"{at}[{number}]: slot {slot} is not below the capacity")
            if self._refs[slot] is not None:
                raise SnapshotError(f"{at}[{number}]: slot {slot} is in use")
            ref = WorkerWithDpRank(worker.worker_id, rank)
            self._slots[ref] = slot
            self._refs[slot] = ref

    def _note_change(self) -> None:
        self.version += 1
        self._candidates.clear()
        self._sizes.clear()
        self._for_stage.clear()

    def _new_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._refs.append(None)
        self._by_slot.append(None)
        return len(self._refs) - 1

    def _mask(self, slot: int, worker: Worker) -> None:
        bit = 1 << slot
        self.alive |= bit
        self.roles[worker.role] |= bit
        self._own_models[worker.model] = self._own_models.get(worker.model, 0) | bit
        for name in worker.served_names:
            self._models[name] = self._models.get(name, 0) | bit
        for name in worker.worker_sets:
            self._sets[name] = self._sets.get(name, 0) | bit
        for taint in worker.runtime_config.taints:
            self._taints[taint] = self._taints.get(taint, 0) | bit
        for domain in worker.domains:
            self._domains[domain] = self._domains.get(domain, 0) | bit
        if not worker.can_prefill:
            self._cannot_prefill |= bit
        if worker.runtime_config.kv_transfer_domain is not None:
            self.own_policy |= bit
        if worker.worker_id in self._unavailable:
            self.unavailable |= bit

    def _unmask(self, slot: int, worker: Worker) -> None:
        keep = ~(1 << slot)
        self.alive &= keep
        self.unavailable &= keep
        self._cannot_prefill &= keep
        self.own_policy &= keep
        self.roles[worker.role] &= keep
        _drop_bit(self._own_models, worker.model, keep)
        for name in worker.served_names:
            _drop_bit(self._models, name, keep)
        for name in worker.worker_sets:
            _drop_bit(self._sets, name, keep)
        for taint in worker.runtime_config.taints:
            _drop_bit(self._taints, taint, keep)
        for domain in worker.domains:
            _drop_bit(self._domains, domain, keep)


def _drop_bit(masks: dict[str, int], key: str, keep: int) -> None:
    left = masks[key] & keep
    if left:
        masks[key] = left
    else:
        del masks[key]
