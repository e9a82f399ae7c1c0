"""Workers that fail, leave, join or are unavailable in a replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from dynctl.simulation.replay.agenda import LATER, Agenda
from dynctl.simulation.replay.engines import Engines
from dynctl.simulation.replay.fleet import FleetChange, FleetLoss, SimulatedFleet, SimulatedWorker
from dynctl.simulation.replay.rank import NS, VirtualRequest
from dynctl.simulation.replay.routers import ReplayRouters
from dynctl.simulation.replay.state import ReplayRank
from router_core import WorkerAvailability, WorkerLost


class StrandedRequests(Protocol):
    """What follows for the requests of a rank that was lost."""

    def lose_request(self, rank: ReplayRank, generation: VirtualRequest) -> None:
        """The rank had a request."""

    def lose_blocks(self, rank: ReplayRank) -> None:
        """The rank held blocks for other engines."""


class FleetFaults:
    """The losses and changes of a fleet. A worker that returns or joins has an empty cache.

    ``requests``: those of a worker that is lost go on elsewhere, or fail.
    """

    def __init__(
        self,
        fleet: SimulatedFleet,
        engines: Engines,
        routers: ReplayRouters,
        agenda: Agenda,
        requests: StrandedRequests,
    ) -> None:
        self._fleet = fleet
        self._engines = engines
        self._routers = routers
        self._agenda = agenda
        self._requests = requests
        self._workers = {worker.worker_id: worker for worker in fleet.workers}
        #: For how many reasons a worker is not there, and why routers send it nothing.
        self._away: Counter[int] = Counter()
        self._unavailable: dict[int, str] = {}
        self._start = 0

    def begin(self) -> None:
        """Register the workers that are there, and put on the agenda what happens to them; the
        replay starts now."""
        self._start = self._agenda.now
        known: set[int] = set()
        for change in self._fleet.changes:
            if change.what in ("joins", "leaves") and change.worker_id not in known:
                known.add(change.worker_id)
                self._away[change.worker_id] = int(change.what == "joins")
        for worker in self._fleet.workers:
            if self._away[worker.worker_id]:
                for rank in self._ranks(worker):
                    rank.alive = False
            else:
                self._routers.register(worker)
        for loss in self._fleet.losses:
            self._agenda.schedule(self._start + round(loss.at * NS), self._lose, loss, LATER)
        for change in self._fleet.changes:
            self._agenda.schedule(self._start + round(change.at * NS), self._change, change, LATER)

    def _lose(self, loss: FleetLoss) -> None:
        gone = [
            worker
            for worker in self._fleet.workers
            if worker.worker_id == loss.worker_id
            or (loss.domain and worker.domains.get(loss.domain) == loss.value)
        ]
        self._remove(gone)
        if loss.until is not None:
            back = self._start + round(loss.until * NS)
            self._agenda.schedule(max(self._agenda.now, back), self._return, gone, LATER)

    def _change(self, change: FleetChange) -> None:
        worker_id = change.worker_id
        if change.what == "joins":
            self._return((self._workers[worker_id],))
            return
        if change.what == "leaves":
            self._unavailable.pop(worker_id, None)
            self._remove((self._workers[worker_id],))
            return
        reason = None if change.what == "available" else change.reason
        if reason is None:
            self._unavailable.pop(worker_id, None)
        else:
            self._unavailable[worker_id] = reason
        if not self._away[worker_id]:
            self._routers.everywhere(WorkerAvailability(worker_id, reason))
            self._routers.admit_waiting()

    def _remove(self, workers: Sequence[SimulatedWorker]) -> None:
        """Lose workers, as far as they are there."""
        stranded: list[tuple[ReplayRank, VirtualRequest]] = []
        lost: list[ReplayRank] = []
        for worker in workers:
            self._away[worker.worker_id] += 1
            if self._away[worker.worker_id] > 1:
                continue
            self._routers.everywhere(WorkerLost(worker.worker_id))
            for rank in self._ranks(worker):
                lost.append(rank)
                stranded += ((rank, generation) for generation in self._engines.lose(rank))
        self._routers.sweep()
        for rank, generation in stranded:
            self._requests.lose_request(rank, generation)
        for rank in lost:
            self._requests.lose_blocks(rank)

    def _return(self, workers: Sequence[SimulatedWorker]) -> None:
        for worker in workers:
            self._away[worker.worker_id] -= 1
            if self._away[worker.worker_id]:
                continue
            for rank in self._ranks(worker):
                rank.alive = True
            self._routers.register(worker)
            reason = self._unavailable.get(worker.worker_id)
            if reason is not None:
                self._routers.everywhere(WorkerAvailability(worker.worker_id, reason))
        self._routers.admit_waiting()

    def _ranks(self, worker: SimulatedWorker) -> list[ReplayRank]:
        ranks = self._engines.ranks
        return [ranks[worker.worker_id, dp_rank] for dp_rank in range(worker.ranks)]
