"""Run a trace through simulated routers and engines, in virtual time.

One agenda has what happens next: steps of engines end, hand-offs arrive, events reach the routers,
workers fail. Routers decide with :class:`router_core.Router`, as ``serve frontend`` does; engines
are :class:`VirtualRank`. The same input and seed give the same result and the same records.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from dynctl.documents.recording import Record
from dynctl.documents.replay import ReplayResult
from dynctl.simulation.engine.config import EngineConfig, EngineConfigError
from dynctl.simulation.replay.agenda import Agenda
from dynctl.simulation.replay.engines import Engines
from dynctl.simulation.replay.faults import FleetFaults
from dynctl.simulation.replay.fleet import (
    Objective,
    ReplayError,
    ReplayPolicy,
    SimulatedFleet,
    SimulatedSync,
)
from dynctl.simulation.replay.handoffs import Handoffs
from dynctl.simulation.replay.journal import Journal
from dynctl.simulation.replay.metrics import MOST_BLOCKS, Ceiling
from dynctl.simulation.replay.rank import NS
from dynctl.simulation.replay.reports import EventReports, LoadReports
from dynctl.simulation.replay.requests import ReplayRequests
from dynctl.simulation.replay.result import Measures
from dynctl.simulation.replay.routers import ReplayRouters, may_be_lean
from dynctl.simulation.replay.state import ReplayRank
from dynctl.wire.traces import TraceRequest
from router_core import LeanIndex, TransferTableSet

__all__ = ["ReplayError", "simulate"]

#: The longest context of an engine, in tokens.
_LONGEST = 10_000_000


def simulate(
    requests: Iterable[TraceRequest],
    fleet: SimulatedFleet,
    policy: ReplayPolicy,
    seed: int = 0,
    *,
    routers: int = 1,
    sync: SimulatedSync | None = None,
    records: Callable[[Record], None] | None = None,
    objective: Objective | None = None,
    most_blocks: int = MOST_BLOCKS,
    leaps: bool = True,
    lean: bool = True,
) -> ReplayResult:
    """Replay ``requests`` (in order of time) and measure; raises ReplayError.

    Each request goes to one of ``routers`` at random; each router sees the events of all workers
    and books its own requests, with ``sync`` also those of the others. ``records`` gets what
    happened as a recording: the changes are those of the first router, and the bookings of all.
    ``most_blocks``: distinct prompt blocks that the ceiling remembers. ``leaps`` False takes each
    step alone, ``lean`` False decides with a whole Router in every case; the result is the same.
    """
    if routers < 1:
        raise ReplayError(f"routers: expected at least 1, got {routers}")
    measures = Measures(objective or Objective(), Ceiling(most_blocks))
    sync = sync or SimulatedSync()
    run = _Replay(fleet, policy, seed, routers, sync, measures, records, leaps, lean)
    return run.run(requests)


class _Replay:
    """The parts of one replay, put together."""

    def __init__(
        self,
        fleet: SimulatedFleet,
        policy: ReplayPolicy,
        seed: int,
        count: int,
        sync: SimulatedSync,
        measures: Measures,
        records: Callable[[Record], None] | None,
        leaps: bool,
        lean: bool,
    ) -> None:
        if len({worker.worker_id for worker in fleet.workers}) != len(fleet.workers):
            raise ReplayError("workers: expected different ids, got one twice")
        if not fleet.workers:
            raise ReplayError("workers: expected at least one, got none")
        self._fleet, self._policy, self._sync, self._seed = fleet, policy, sync, seed
        self._measures = measures
        self._config = config = _engine_config(fleet)
        self._agenda = agenda = Agenda()
        self._journal = journal = Journal(agenda, fleet.model, records)
        draw = random.Random(seed).random
        lean = lean and records is None and may_be_lean(fleet, policy, sync, count)
        # Where events take no time, lean routers look into the engines' own caches.
        direct = lean and not round(fleet.events_delay_s * NS)
        self._engines = engines = Engines(
            config, fleet.workers, agenda, leaps=leaps, events=not direct
        )
        self._routers = routers = ReplayRouters(
            fleet,
            policy,
            config,
            sync,
            count,
            agenda=agenda,
            journal=journal,
            measures=measures,
            draw=draw,
        )
        ranks = engines.in_order
        index = _lean_index(ranks, direct) if lean else None
        if index is not None:
            routers.decide_lean(ranks, index)
        engines.publish = EventReports(fleet, seed, agenda, routers, index).publish
        self._requests = ReplayRequests(
            fleet,
            routers=routers,
            engines=engines,
            handoffs=Handoffs(fleet, engines, agenda, measures),
            agenda=agenda,
            journal=journal,
            measures=measures,
            draw=draw,
        )
        self._loads = LoadReports(agenda, routers, ranks, self._goes_on)
        self._faults = FleetFaults(fleet, engines, routers, agenda, self._requests)
        self._more = True

    def run(self, requests: Iterable[TraceRequest]) -> ReplayResult:
        agenda, arrive = self._agenda, self._requests.arrive
        start: int | None = None
        last = 0
        for trace in requests:
            now = round(trace.at * NS)
            if start is None:
                start = now
                self._begin(now)
            elif now < last:
                raise ReplayError(
                    f"request {trace.id}: arrives at {trace.at} s, before the one in front of it; "
                    "expected requests in order of time"
                )
            last = now
            agenda.run_until(now)
            arrive(trace)
        self._more = False
        agenda.run_out()
        if start is None:
            raise ReplayError("the trace has no requests; expected at least one")
        return self._measures.result(
            policy=self._policy,
            fleet=self._fleet,
            engine=self._config,
            seed=self._seed,
            routers=len(self._routers.frontends),
            sync=self._sync.mode,
            seconds=(self._requests.last_end - start) / NS,
            ranks=self._engines.in_order,
            peers=None if self._routers.peers is None else self._routers.peers.result(),
        )

    def _begin(self, now: int) -> None:
        self._agenda.now = now
        self._journal.note_start(self._policy, self._config.block_size)
        self._faults.begin()
        if self._policy.transfer is not None:
            self._routers.everywhere(TransferTableSet(self._policy.transfer))
        if self._routers.frontends[0].router.busy.limits:
            self._loads.start()

    def _goes_on(self) -> bool:
        return self._more or bool(self._requests.under_way)


def _lean_index(ranks: Sequence[ReplayRank], direct: bool) -> LeanIndex:
    """The index of lean routers; ``direct``: it looks into the engines' caches."""
    caches = [rank.engine.cache for rank in ranks]
    return LeanIndex(
        len(ranks),
        [cache.blocks for cache in caches] if direct else None,
        [cache.lower.match for cache in caches if cache.lower is not None],
    )


def _engine_config(fleet: SimulatedFleet) -> EngineConfig:
    """The engines' configuration; without a context length, what the KV blocks hold."""
    config = fleet.engine
    try:
        return replace(
            config,
            max_model_len=config.max_model_len
            or min(_LONGEST, config.total_blocks * config.block_size),
        )
    except EngineConfigError as error:
        raise ReplayError(str(error)) from None
