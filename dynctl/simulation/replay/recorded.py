"""The simulated fleet of a recording: the workers that its router had, what they published, and
when they joined, left or were unavailable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from dynctl.base.decode_errors import WireError
from dynctl.documents.recording import Arrived, Changed, Finished, Start, State
from dynctl.documents.recording_file import RecordingFile
from dynctl.documents.workers import RankRow, WorkerRow
from dynctl.simulation.replay.fleet import FleetChange
from dynctl.simulation.replay.fleets import CARD, POLICY, FleetSource, fleet_of_live
from router_core import (
    DEVICE,
    Booked,
    Change,
    Cleared,
    Freed,
    KvEvent,
    Role,
    Worker,
    WorkerAvailability,
    WorkerError,
    WorkerLost,
    WorkerUpserted,
)

_What = Literal["joins", "leaves", "unavailable", "available"]
#: A worker whose health changes all the time must not fill the memory.
_MOST_CHANGES: Final = 100_000
#: Prefills under way of which the decode worker is not known yet.
_MOST_PREFILLS: Final = 50_000


class _Workers:
    """The workers of a recording, followed record by record.

    ``slots``: those at the first request that any worker serves, and those that joined later. One
    that returns under its id or its name, with the same shape, is the same. ``changes``: (seconds
    from the first request, slot, what, reason) up to the end of the last request. ``tiers``: where
    blocks were below the device. ``together`` and ``in_turn``: names of prefill workers whose
    requests got their decode worker during the prefill, and after it.
    """

    def __init__(self, path: Path, model: str | None) -> None:
        self._path = path
        self._model = model
        #: The workers that are there, why requests avoid some of them, and which change began that.
        self._known: dict[int, Worker] = {}
        self._unavailable: dict[int, str] = {}
        self._since: dict[int, int] = {}
        self._slot_of: dict[int, int] = {}
        #: Ranks whose cache has something.
        self._stored: set[tuple[int, int]] = set()
        self._start: float | None = None
        self._begun = False
        self.slots: list[Worker] = []
        self.changes: list[tuple[float, int, _What, str]] = []
        self.altered: set[int] = set()
        self.cleared = self.left_out = 0
        self.tiers: set[str] = set()
        #: Request -> the worker of its prefill, which runs.
        self._prefills: dict[str, str] = {}
        self.together: set[str] = set()
        self.in_turn: set[str] = set()
        self.settings: Mapping[str, Any] = {}

    def read(self, limit: int | None, skip_bad: bool) -> None:
        """Read up to the ``limit``-th request; one chunk is in memory at a time."""
        requests = kept = 0
        for record in RecordingFile(self._path, skip_bad=skip_bad):
            kind = type(record)
            if isinstance(record, Arrived):
                if self._model not in (None, record.model):
                    continue
                requests += 1
                self._arrive(record)
                kept = len(self.changes)
                if requests == limit:
                    break
            elif kind is Finished:
                kept = len(self.changes)
            elif isinstance(record, Changed):
                self._follow(record.change, record.at)
            elif isinstance(record, State):
                self._restore(record)
            elif isinstance(record, Start) and not self.settings:
                self.settings = record.settings
        if not self._begun:
            self._begin()
        del self.changes[kept:]

    def _arrive(self, request: Arrived) -> None:
        if self._start is None:
            self._start = request.at
        if self._known and not self._begun:
            self._begin()

    def gets_pairs(self, name: str) -> bool:
        """Whether a prefill worker gets requests together with a decode worker; one without
        requests is as the others."""
        return name in self.together or bool(self.together and name not in self.in_turn)

    def _begin(self) -> None:
        self._begun = True
        for number, (worker_id, worker) in enumerate(self._known.items()):
            self.slots.append(worker)
            self._slot_of[worker_id] = number
            if worker_id in self._unavailable:
                self._since[worker_id] = len(self.changes)
                self._note(0.0, worker_id, "unavailable", self._unavailable[worker_id])

    def _follow(self, change: Change, at: float) -> None:
        if isinstance(change, KvEvent):
            self._kv_event(change, at)
        elif isinstance(change, WorkerUpserted):
            self._upsert(change.worker, at)
        elif isinstance(change, WorkerLost):
            self._lose(change.worker_id, at)
        elif isinstance(change, WorkerAvailability):
            self._available(change.worker_id, change.reason, at)
        elif isinstance(change, Booked):
            self._note_booking(change)
        elif isinstance(change, Freed) and change.stage != "decode":
            name = self._prefills.pop(change.request_id, None)
            if name is not None and change.stage == "prefill" and change.computed:
                self.in_turn.add(name)

    def _note_booking(self, change: Booked) -> None:
        if change.stage == "decode":
            name = self._prefills.pop(change.request_id, None)
            if name is not None:
                self.together.add(name)
        elif change.stage == "prefill" and len(self._prefills) < _MOST_PREFILLS:
            worker = self._known.get(change.worker_id)
            if worker is not None:
                self._prefills[change.request_id] = worker.name

    def _kv_event(self, change: KvEvent, at: float) -> None:
        rank = (change.worker_id, change.dp_rank)
        if not isinstance(change.event, Cleared):
            self.tiers.add(change.event.tier)
            self._stored.add(rank)
            return
        if change.worker_id in self._since:
            self._restart(change.worker_id, at)
        elif self._begun and rank in self._stored:
            self.cleared += 1
        self._stored.discard(rank)

    def _restore(self, state: State) -> None:
        try:
            registry = state.snapshot["registry"]
            workers = {
                worker.worker_id: worker for worker in map(Worker.from_dict, registry["workers"])
            }
            reasons = {
                int(worker_id): str(why) for worker_id, why in registry["unavailable"].items()
            }
            tiers = {row["tier"] for row in state.snapshot.get("tiers", ())}
            if not all(isinstance(tier, str) for tier in tiers):
                raise TypeError("a tier that is not a string")
            self.tiers |= tiers
        except (KeyError, TypeError, ValueError, AttributeError, WorkerError) as error:
            raise WireError(str(self._path), f"a state with invalid workers: {error}") from None
        for worker_id in self._known.keys() - workers.keys():
            self._lose(worker_id, state.at)
        for worker in workers.values():
            self._upsert(worker, state.at)
            self._available(worker.worker_id, reasons.get(worker.worker_id), state.at)

    def _upsert(self, worker: Worker, at: float) -> None:
        worker_id = worker.worker_id
        if self._model is not None and self._model not in worker.served_names:
            self._lose(worker_id, at)
            return
        before = self._known.get(worker_id)
        self._known[worker_id] = worker
        if not self._begun:
            return
        if before is None:
            self._slot_of[worker_id] = self._free_slot(worker)
            self._note(at, worker_id, "joins")
        elif _shape(before) != _shape(worker):
            self.altered.add(worker_id)

    def _free_slot(self, worker: Worker) -> int:
        """The slot of a worker that joins: that of the same worker before, or a new one."""
        taken = {self._slot_of[other] for other in self._known if other != worker.worker_id}
        own = self._slot_of.get(worker.worker_id)
        for number, present in enumerate(self.slots):
            same = number == own or present.name == worker.name
            if same and number not in taken and _shape(present) == _shape(worker):
                return number
        self.slots.append(worker)
        return len(self.slots) - 1

    def _lose(self, worker_id: int, at: float) -> None:
        if self._known.pop(worker_id, None) is None:
            return
        self._unavailable.pop(worker_id, None)
        self._since.pop(worker_id, None)
        self._stored = {rank for rank in self._stored if rank[0] != worker_id}
        if self._begun:
            self._note(at, worker_id, "leaves")

    def _available(self, worker_id: int, reason: str | None, at: float) -> None:
        if worker_id not in self._known or reason == self._unavailable.get(worker_id):
            return
        if reason is None:
            del self._unavailable[worker_id]
            self._since.pop(worker_id, None)
        else:
            self._unavailable[worker_id] = reason
        if self._begun:
            if reason is not None:
                self._since[worker_id] = len(self.changes)
            what: _What = "available" if reason is None else "unavailable"
            self._note(at, worker_id, what, reason or "")

    def _restart(self, worker_id: int, at: float) -> None:
        """Its cache is cleared while it is unavailable: a new process is in its place.

        The old one was lost when the worker became unavailable.
        """
        number = self._since.pop(worker_id)
        if number < len(self.changes):
            since, slot, _, _ = self.changes[number]
            self.changes[number] = (since, slot, "leaves", "")
            self._note(at, worker_id, "joins")
            self._note(at, worker_id, "unavailable", self._unavailable[worker_id])

    def _note(self, at: float, worker_id: int, what: _What, reason: str = "") -> None:
        if len(self.changes) == _MOST_CHANGES:
            self.left_out += 1
            return
        since = 0.0 if self._start is None else max(0.0, at - self._start)
        self.changes.append((since, self._slot_of[worker_id], what, reason))


def fleet_of_recording(
    path: Path, model: str | None, *, limit: int | None = None, skip_bad: bool = False
) -> FleetSource | None:
    """The workers of ``model`` at its first request, or the first ones that the recording shows,
    and what happened to them until the last one; None where it shows no workers.

    Raises UsageProblem for workers of several models, WireError and OSError as the file does.
    """
    recorded = _Workers(path, model)
    recorded.read(limit, skip_bad)
    if not recorded.slots:
        return None
    source = fleet_of_live(
        f"recording {path.name}", [_row(worker) for worker in recorded.slots], None
    )
    # The simulated workers are numbered in order of their names.
    order = sorted(range(len(recorded.slots)), key=lambda slot: recorded.slots[slot].name)
    numbers = {slot: number for number, slot in enumerate(order, 1)}
    changes = tuple(
        FleetChange(at, numbers[slot], what, reason) for at, slot, what, reason in recorded.changes
    )
    notes = [*source.notes, *_not_simulated(recorded)]
    if source.enforcement is None:
        # The router's settings are the policy of workers that publish none.
        domain, enforcement, weight = (recorded.settings.get(name) for name in POLICY)
        if isinstance(domain, str) and isinstance(enforcement, str):
            source = replace(
                source, domain=domain, enforcement=enforcement, preferred_weight=weight
            )
    source = replace(
        source,
        workers=tuple(
            replace(
                worker,
                bootstrap=worker.role is Role.PREFILL
                and recorded.gets_pairs(recorded.slots[order[worker.worker_id - 1]].name),
            )
            for worker in source.workers
        ),
        shows_pairs=bool(recorded.together or recorded.in_turn),
        notes=tuple(notes),
        changes=changes,
    )
    if source.enforcement is not None and not source.places:
        # No worker has a value of the domain: the policy has no effect there, nor here.
        source = replace(source, enforcement=None)
    return source


def _not_simulated(recorded: _Workers) -> Iterator[str]:
    """What of a recorded fleet a replay leaves out."""
    if recorded.altered:
        yield (
            f"{len(recorded.altered):,} workers changed their role, ranks, topology or sizes while "
            "they ran: not simulated, each stays as it was first"
        )
    if recorded.cleared:
        yield (
            f"a cache was cleared {recorded.cleared:,} times: not simulated, because the events do "
            "not show whether the engine lost its blocks or the router read them again"
        )
    if recorded.left_out:
        yield (
            f"the workers changed more than {_MOST_CHANGES:,} times: the last "
            f"{recorded.left_out:,} changes are not simulated"
        )
    lower = sorted(recorded.tiers - {DEVICE})
    if lower:
        yield (
            f"the workers have cached blocks in lower tiers too ({', '.join(lower)}), whose sizes "
            "no worker publishes: --host-blocks and --disk-blocks simulate them"
        )


def _shape(worker: Worker) -> tuple[Any, ...]:
    """What of a worker is simulated."""
    row = _row(worker)
    card = row.runtime_config
    return (
        *(row.role, row.block_size, row.domains, row.ranks),
        *(card.get(name) for name in (*CARD, *POLICY)),
    )


def _row(worker: Worker) -> WorkerRow:
    return WorkerRow(
        worker.name,
        worker.worker_id,
        worker.model,
        worker.role.value,
        worker.block_size,
        runtime_config=worker.runtime_config.to_dict(),
        domains=dict(worker.domains),
        ranks=[RankRow(dp_rank) for dp_rank in worker.ranks],
    )
