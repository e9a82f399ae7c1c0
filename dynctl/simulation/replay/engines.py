"""The engines of a replay: their ranks, and the steps that these run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.replay.agenda import STEP, Agenda
from dynctl.simulation.replay.fleet import SimulatedWorker
from dynctl.simulation.replay.rank import VirtualRank, VirtualRequest
from dynctl.simulation.replay.state import ReplayRank


class EngineUsers(Protocol):
    """What follows from the steps of engines."""

    def note_progress(self, rank: ReplayRank, generation: VirtualRequest) -> None:
        """A request has its first or its last token."""

    def pulls(self, rank: ReplayRank, generation: VirtualRequest, missing: int) -> None:
        """A request has to load so many KV blocks of another engine."""

    def step_ended(self) -> None:
        """Requests of a rank progressed, and all were reported."""


class Engines:
    """The ranks of all workers, in their order, on the clock of ``agenda``.

    ``publish`` is called for a rank whose cache has new events; with ``events`` False the caches
    queue none. ``users`` is notified of the progress of requests; set it before the first one is
    submitted.
    """

    users: EngineUsers

    def __init__(
        self,
        config: EngineConfig,
        workers: tuple[SimulatedWorker, ...],
        agenda: Agenda,
        *,
        leaps: bool,
        events: bool,
    ) -> None:
        self.config = config
        self.ranks: dict[tuple[int, int], ReplayRank] = {}
        self.publish: Callable[[ReplayRank], None] = _nothing
        self._agenda = agenda
        self._leaps = leaps
        self._events = events
        for worker in workers:
            for dp_rank in range(worker.ranks):
                number = len(self.ranks)
                new_rank = ReplayRank(worker, dp_rank, self._engine(), [], number)
                self.ranks[new_rank.key] = new_rank
        self.in_order = list(self.ranks.values())
        #: The number of the rank whose step ends now; -1: none.
        self._ending = -1

    def submit(self, rank: ReplayRank, generation: VirtualRequest) -> None:
        """Queue a request on a rank; raises RankBusy."""
        rank.engine.submit(generation)
        self.wake(rank)

    def end(self, rank: ReplayRank, generation: VirtualRequest) -> None:
        """Stop a request and free its blocks; no effect on one that has ended or was lost."""
        if not generation.ended:
            rank.engine.end(generation)
            if rank.alive:
                self.wake(rank)

    def wake(self, rank: ReplayRank) -> None:
        """Something changed for a rank: its next step has to see it.

        Steps that begin now begin in the order of the ranks: those after the one whose step ends
        now have not begun.
        """
        engine = rank.engine
        if engine.due < 0:
            self._start_step(rank)
        else:
            engine.touch(self._agenda.now, begun=not 0 <= self._ending < rank.number)
            self._watch(rank)

    def lose(self, rank: ReplayRank) -> list[VirtualRequest]:
        """A rank fails: its cache is empty from now on. Returns the requests that it had."""
        rank.alive = False
        engine = rank.engine
        stranded = [*engine.running, *engine.waiting]
        rank.lost_requests += len(stranded)
        engine.stop(self._agenda.now)
        rank.busy_ns += engine.busy_ns
        rank.evicted += engine.cache.evictions
        rank.preemptions += engine.preemptions
        rank.news.clear()
        rank.engine = self._engine()
        rank.watched = -1
        rank.gap = 0
        return stranded

    def _engine(self) -> VirtualRank:
        return VirtualRank(self.config, leaps=self._leaps, events=self._events)

    def _start_step(self, rank: ReplayRank) -> None:
        engine = rank.engine
        for load in engine.start_step(self._agenda.now):
            if load.request.restoring:
                ends = engine.restore_ends(self._agenda.now, load)
                self._agenda.schedule(ends, self._end_restore, (rank, engine, load.request))
            else:
                self.users.pulls(rank, load.request, load.missing)
        cache = engine.cache
        if cache.has_events:
            self.publish(rank)
        held = cache.held_blocks
        if held > rank.peak:
            rank.peak = held
        if engine.due >= 0:
            self._watch(rank)

    def _end_restore(self, what: tuple[ReplayRank, VirtualRank, VirtualRequest]) -> None:
        rank, engine, generation = what
        if rank.engine is engine:
            engine.take_restored(generation)
            if engine.cache.has_events:
                self.publish(rank)
            self.wake(rank)

    def _watch(self, rank: ReplayRank) -> None:
        due = rank.engine.due
        if due >= 0 and due != rank.watched:
            rank.watched = due
            # Of steps that end together, the order of the ranks decides.
            what = (rank, rank.engine, due)
            self._agenda.schedule(due, self._step_ended, what, STEP, rank.number)

    def _step_ended(self, what: tuple[ReplayRank, VirtualRank, int]) -> None:
        rank, engine, due = what
        if engine.due != due or rank.engine is not engine:
            return  # the leap ended before, or the worker was lost
        rank.watched = -1
        self._ending = rank.number
        engine.finish_step()
        if engine.cache.has_events:
            self.publish(rank)
        if rank.news:
            news = rank.news[:]
            rank.news.clear()
            for generation in news:
                self.users.note_progress(rank, generation)
            self.users.step_ended()
        if rank.engine is engine and engine.due < 0:
            self._start_step(rank)
        self._ending = -1


def _nothing(rank: ReplayRank) -> None:
    """No events are published."""
