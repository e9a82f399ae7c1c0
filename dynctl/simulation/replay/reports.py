"""What engines report to the routers of a replay: cache events and loads, late or lost."""

from __future__ import annotations

import random
from collections.abc import Callable

from dynctl.simulation.engine.cache_events import CacheEvent as EngineEvent
from dynctl.simulation.engine.cache_events import CacheRemoved, CacheStored
from dynctl.simulation.replay.agenda import LATER, Agenda
from dynctl.simulation.replay.fleet import SimulatedFleet
from dynctl.simulation.replay.rank import NS, VirtualRank
from dynctl.simulation.replay.routers import ReplayRouters
from dynctl.simulation.replay.state import ReplayRank
from router_core import (
    DEVICE,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    Change,
    Cleared,
    IndexMarked,
    KvEvent,
    LeanIndex,
    LoadReported,
)

#: Seconds between two load reports of a worker, where a threshold reads them.
LOAD_INTERVAL_S = 1.0


class EventReports:
    """Carries cache events to whole routers, or to the index that lean routers share.

    Events take ``fleet.events_delay_s``; the share ``fleet.events_loss`` of batches is lost, and
    the routers learn of the gap with the next batch that arrives.
    """

    def __init__(
        self,
        fleet: SimulatedFleet,
        seed: int,
        agenda: Agenda,
        routers: ReplayRouters,
        lean: LeanIndex | None,
    ) -> None:
        self._agenda = agenda
        self._routers = routers
        self._lean = lean
        self._reads_events = routers.policy.config.use_kv_events
        self._delay = round(fleet.events_delay_s * NS)
        self._loss = fleet.events_loss
        # Other decisions must not depend on how many events are lost.
        self._draw = random.Random(f"{seed} events").random

    def publish(self, rank: ReplayRank) -> None:
        """Send the cache events of a step."""
        events = rank.engine.cache.take_events()
        if self._lean is not None:
            self._agenda.schedule(
                self._agenda.now + self._delay, self._deliver_lean, (rank, events)
            )
            return
        if not self._reads_events:
            return
        worker_id, dp_rank = rank.key
        changes: list[Change] = [
            KvEvent(worker_id, dp_rank, _router_event(event)) for event in events
        ]
        if self._loss and self._draw() < self._loss:
            rank.gap += 1
            return
        if rank.gap:
            changes.insert(0, IndexMarked(worker_id, dp_rank, "gapped", rank.gap))
            rank.gap = 0
        if self._delay:
            what = (rank, rank.engine, changes)
            self._agenda.schedule(self._agenda.now + self._delay, self._deliver, what)
        else:
            for change in changes:
                self._routers.everywhere(change)

    def _deliver(self, what: tuple[ReplayRank, VirtualRank, list[Change]]) -> None:
        rank, engine, changes = what
        if rank.engine is engine and rank.alive:
            for change in changes:
                self._routers.everywhere(change)

    def _deliver_lean(self, what: tuple[ReplayRank, list[EngineEvent]]) -> None:
        rank, events = what
        index = self._lean or LeanIndex(0)
        for event in events:
            if isinstance(event, CacheStored):
                index.store(rank.number, event.hashes)
            elif isinstance(event, CacheRemoved):
                index.remove(rank.number, event.hashes)


def _router_event(event: EngineEvent) -> CacheEvent:
    if isinstance(event, CacheStored):
        counted = event.tier == DEVICE
        return BlocksStored(event.parent, event.hashes, event.tokens, event.tier, counted=counted)
    if isinstance(event, CacheRemoved):
        return BlocksRemoved(event.hashes, event.tier)
    return Cleared()


class LoadReports:
    """Every rank reports its load once a second, while ``goes_on``."""

    def __init__(
        self,
        agenda: Agenda,
        routers: ReplayRouters,
        ranks: list[ReplayRank],
        goes_on: Callable[[], bool],
    ) -> None:
        self._agenda = agenda
        self._routers = routers
        self._ranks = ranks
        self._goes_on = goes_on

    def start(self) -> None:
        when = self._agenda.now + round(LOAD_INTERVAL_S * NS)
        self._agenda.schedule(when, self._report, None, LATER)

    def _report(self, _nothing: None) -> None:
        for rank in self._ranks:
            if not rank.alive:
                continue
            engine = rank.engine
            blocks = sum(len(request.table.blocks) for request in engine.running if request.table)
            self._routers.everywhere(
                LoadReported(
                    rank.worker.worker_id,
                    rank.dp_rank,
                    active_decode_blocks=blocks,
                    kv_used_blocks=engine.cache.held_blocks,
                    active_prefill_tokens=engine.active_prefill_tokens,
                )
            )
        self._routers.admit_waiting()
        if self._goes_on():
            self.start()
