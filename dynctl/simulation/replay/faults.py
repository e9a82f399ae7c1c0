"""Workers that fail in a replay and return with empty caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynctl.simulation.replay.agenda import LATER, Agenda
from dynctl.simulation.replay.engines import Engines
from dynctl.simulation.replay.fleet import Loss, SimulatedFleet, SimulatedWorker
from dynctl.simulation.replay.rank import NS
from dynctl.simulation.replay.routers import Routers
from dynctl.simulation.replay.state import LiveRequest, ReplayRank
from router_core import WorkerLost


class Faults:
    """The losses of a fleet. ``stranded`` is called for each request of a worker that is lost."""

    def __init__(
        self,
        fleet: SimulatedFleet,
        engines: Engines,
        routers: Routers,
        agenda: Agenda,
        stranded: Callable[[LiveRequest, ReplayRank, str], None],
    ) -> None:
        self._fleet = fleet
        self._engines = engines
        self._routers = routers
        self._agenda = agenda
        self._stranded = stranded
        self._start = 0

    def plan(self) -> None:
        """Put the losses on the agenda; the replay starts now."""
        self._start = self._agenda.now
        for loss in self._fleet.losses:
            self._agenda.at(self._start + round(loss.at * NS), self._lose, loss, LATER)

    def _lose(self, loss: Loss) -> None:
        gone = [
            worker
            for worker in self._fleet.workers
            if worker.worker_id == loss.worker_id
            or (loss.domain and worker.domains.get(loss.domain) == loss.value)
        ]
        stranded: list[tuple[LiveRequest, ReplayRank]] = []
        for worker in gone:
            self._routers.everywhere(WorkerLost(worker.worker_id))
            for rank in self._ranks(worker):
                if rank.alive:
                    stranded += ((one.owner, rank) for one in self._engines.lose(rank))
        self._routers.sweep()
        lost = {worker.worker_id for worker in gone}
        for live, rank in stranded:
            if live.held is not None and live.held.rank.worker.worker_id in lost:
                live.held.gone = True
            self._stranded(live, rank, "lost")
        if loss.until is not None:
            back = self._start + round(loss.until * NS)
            self._agenda.at(max(self._agenda.now, back), self._return, gone, LATER)

    def _return(self, workers: Sequence[SimulatedWorker]) -> None:
        for worker in workers:
            for rank in self._ranks(worker):
                rank.alive = True
            self._routers.register(worker)
        self._routers.admit_waiting()

    def _ranks(self, worker: SimulatedWorker) -> list[ReplayRank]:
        ranks = self._engines.ranks
        return [ranks[worker.worker_id, dp_rank] for dp_rank in range(worker.ranks)]
