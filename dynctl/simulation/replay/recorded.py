"""The simulated fleet of a recording: the workers that its router had, and what they published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dynctl.base.decode_errors import WireError
from dynctl.documents.recording import Arrived, Changed, Start, State
from dynctl.documents.recording_file import RecordingFile
from dynctl.documents.workers import RankRow, WorkerRow
from dynctl.simulation.replay.fleets import FleetSource, fleet_of_live
from router_core import (
    DEVICE,
    Cleared,
    KvEvent,
    Worker,
    WorkerError,
    WorkerLost,
    WorkerUpserted,
)

#: Settings of a router that are the policy of workers that publish none.
_POLICY: Final = (
    "kv_transfer_domain",
    "kv_transfer_enforcement",
    "kv_transfer_preferred_weight",
)


class _Workers:
    """The workers of a recording, followed record by record.

    ``fleet``: those at the first request that any worker serves. ``joined`` and ``left``: ids of
    workers that came and went after it. ``tiers``: where blocks were below the device.
    """

    def __init__(self, path: Path, model: str | None) -> None:
        self._path = path
        self._model = model
        self._known: dict[int, Worker] = {}
        self.fleet: dict[int, Worker] = {}
        self.joined: set[int] = set()
        self.left: set[int] = set()
        self.tiers: set[str] = set()
        self.settings: Mapping[str, Any] = {}

    def read(self, limit: int | None, skip_bad: bool) -> None:
        """Read up to the ``limit``-th request; one chunk is in memory at a time."""
        requests = 0
        for record in RecordingFile(self._path, skip_bad=skip_bad):
            kind = type(record)
            if kind is Arrived:
                requests += 1
                if not self.fleet:
                    self.fleet = dict(self._known)
                if requests == limit:
                    break
            elif isinstance(record, Changed):
                change = record.change
                if isinstance(change, WorkerUpserted):
                    self._upsert(change.worker)
                elif isinstance(change, WorkerLost):
                    self._lose(change.worker_id)
                elif isinstance(change, KvEvent) and not isinstance(change.event, Cleared):
                    self.tiers.add(change.event.tier)
            elif isinstance(record, State):
                self._restore(record)
            elif isinstance(record, Start) and not self.settings:
                self.settings = record.settings
        self.fleet = self.fleet or self._known

    def _restore(self, state: State) -> None:
        try:
            rows = state.snapshot["registry"]["workers"]
            found = {one.worker_id: one for one in map(Worker.from_dict, rows)}
            self.tiers |= {row["tier"] for row in state.snapshot.get("tiers", ())}
        except (KeyError, TypeError, WorkerError) as error:
            raise WireError(str(self._path), f"a state with invalid workers: {error}") from None
        for worker_id in self._known.keys() - found.keys():
            self._lose(worker_id)
        for worker in found.values():
            self._upsert(worker)

    def _upsert(self, worker: Worker) -> None:
        if self._model is not None and self._model not in worker.served_names:
            return
        self._known[worker.worker_id] = worker
        if self.fleet and worker.worker_id not in self.fleet:
            self.joined.add(worker.worker_id)

    def _lose(self, worker_id: int) -> None:
        self._known.pop(worker_id, None)
        if worker_id in self.fleet:
            self.left.add(worker_id)


def fleet_of_recording(
    path: Path, model: str | None, *, limit: int | None = None, skip_bad: bool = False
) -> FleetSource | None:
    """The workers of ``model`` at its first request, or the first ones that the recording shows;
    None where it shows none.

    Raises UsageProblem for workers of several models, WireError and OSError as the file does.
    """
    found = _Workers(path, model)
    found.read(limit, skip_bad)
    if not found.fleet:
        return None
    source = fleet_of_live(
        f"recording {path.name}", [_row(one) for one in found.fleet.values()], None
    )
    notes = list(source.notes)
    if found.joined or found.left:
        notes.append(
            "the fleet is the one at the first request; what changed later is not simulated: "
            f"{len(found.joined):,} joined, {len(found.left):,} left. --lose simulates a loss"
        )
    lower = sorted(found.tiers - {DEVICE})
    if lower:
        notes.append(
            f"the workers have cached blocks in lower tiers too ({', '.join(lower)}), whose sizes "
            "no worker publishes: --host-blocks and --disk-blocks simulate them"
        )
    enforcement, weight, domain = source.enforcement, source.preferred_weight, source.domain
    own = [found.settings.get(name) for name in _POLICY]
    if enforcement is None and isinstance(own[0], str) and isinstance(own[1], str):
        domain, enforcement, weight = own[0], own[1], own[2]
    source = replace(
        source, domain=domain, enforcement=enforcement, preferred_weight=weight, notes=tuple(notes)
    )
    if source.enforcement is not None and not source.places:
        # No worker has a value of the domain: the policy has no effect there, nor here.
        source = replace(source, enforcement=None)
    return source


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
