"""The demo fleet, running in this process: the source of ``dynctl top --demo``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Self

from dynctl import version
from dynctl.base.errors import UsageProblem
from dynctl.documents.config import ConfigDocument, config_document
from dynctl.documents.decisions import (
    DecisionList,
    DecisionRow,
    decision_row,
    past_decision,
    with_preferences,
)
from dynctl.documents.fleet_load import FleetLoad
from dynctl.documents.route_result import RouteResult
from dynctl.documents.snapshot import DecisionLine, Snapshot
from dynctl.documents.thresholds import Thresholds, ThresholdValues
from dynctl.documents.workers import WorkerRow
from dynctl.serving.http.fleet_endpoints import FleetFeed
from dynctl.serving.records.decision_memory import DecisionMemory, Remembered
from dynctl.serving.records.metrics import Metrics
from dynctl.serving.routing.service import RoutingService
from dynctl.sources.demo.fleet import (
    PRESET,
    THRESHOLDS,
    TITLE,
    DemoSource,
    cached_prompt,
    demo_config,
    demo_view,
    demo_workers,
)
from dynctl.sources.demo.traffic import DemoTraffic
from dynctl.sources.frontend.snapshot import FrontendReadings, frontend_snapshot
from dynctl.sources.source import LiveSource, Source
from dynctl.sources.view import ViewSource
from router_core import RoutingPlan, ThresholdsSet

#: Seconds that the fleet has run when it is first shown.
STARTED_S: Final = 135.0
#: Of a longer pause between two snapshots only this much is simulated.
_MAX_STEP_S: Final = 60.0
_MEMORY: Final = 8 * 1024 * 1024


class LiveDemo(LiveSource):
    """The demo fleet with traffic. ``clock``: monotonic seconds; ``wall``: seconds since the epoch.

    Also the :class:`FrontendReader` of its router.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        started_s: float = STARTED_S,
    ) -> None:
        super().__init__(DemoSource(), TITLE)
        self.name = TITLE
        self._clock = clock
        self._last_step = clock()
        # The fleet's own time, which began before the first snapshot.
        self._now = 0.0
        self._started_s = started_s
        self._began_wall = wall() - started_s
        self._skipped = 0.0
        self._wall = wall
        service = self._service = RoutingService(
            demo_config(),
            clock=lambda: self._now,
            wall=lambda: self._began_wall + self._skipped + self._now,
            id_prefix="demo",
        )
        self._memory = DecisionMemory(_MEMORY)
        metrics = Metrics(service, router_id=1, memory=self._memory)
        service.observers += [metrics, self._memory]
        workers = demo_workers()
        self._traffic = DemoTraffic(service, workers, self._set_time)
        service.apply(cached_prompt(workers[0]))
        service.sample = self._traffic.sample
        self._feed = FleetFeed(
            service,
            self._memory,
            transfers=metrics.transfers,
            traffic=metrics.traffic,
            waiting=self._traffic.waiting,
            in_flight=lambda: self._traffic.in_flight,
        )
        self._readings = FrontendReadings(self, wall)

    async def __aenter__(self) -> Self:
        self._traffic.start(0.0)
        await asyncio.to_thread(self._traffic.advance, self._started_s)
        self._last_step = self._clock()
        return self

    # -- the source ------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        self._step()
        await self._readings.read()
        await self._readings.read_decisions()
        return frontend_snapshot([self._readings], self.title, self._wall())

    async def decision(self, line: DecisionLine) -> RouteResult:
        kept = self._memory.get(line.id)
        if kept is None:
            raise UsageProblem(f"the demo fleet keeps decision {line.id} no more: memory is full")
        response = self._memory.response(kept)
        return past_decision(
            kept.plan, at=kept.at, whole=kept.whole, preset=PRESET, response=response
        )

    async def set_thresholds(self, model: str, values: ThresholdValues) -> Thresholds:
        applied = self._service.apply(ThresholdsSet(model, values))
        if not applied.ok:
            raise UsageProblem(applied.message)
        return self._service.router.busy.thresholds(model).to_dict()

    async def read_index(self, worker: WorkerRow | None) -> str:
        return "the demo fleet always reports its caches"

    def present(self) -> Source:
        """The running router as a view."""
        return ViewSource(demo_view(self._service.router, self._now), TITLE)

    # -- its router as a frontend ----------------------------------------------------------

    async def fleet(self, cards: str | None) -> FleetLoad:
        return self._feed.read(cards)

    async def decisions(
        self, since: int, limit: int, wait: int, process: str = "", ends: int | None = None
    ) -> DecisionList:
        memory = self._memory
        recent = memory.recent(limit, since=since)
        plans = [kept.plan for kept in recent]
        rows = [self._row(kept, plan) for kept, plan in zip(recent, plans, strict=True)]
        ended = [] if ends is None else memory.ended_since(ends, since, limit)
        return DecisionList(
            with_preferences(rows, plans),
            len(memory),
            memory.evicted,
            memory.size,
            memory.max_bytes,
            memory.recorded,
            memory.recorded - since - len(rows),
            ended=[self._row(kept, kept.plan) for kept in ended],
            ends=memory.ended,
        )

    def _row(self, kept: Remembered, plan: RoutingPlan) -> DecisionRow:
        response = self._memory.response(kept)
        return decision_row(plan, at=kept.at, whole=kept.whole, response=response)

    async def config(self) -> ConfigDocument:
        return config_document(
            self._service.router.config,
            version=version(),
            preset=PRESET,
            sources=dict.fromkeys(THRESHOLDS, TITLE),
        )

    # -- inside ----------------------------------------------------------------------------

    def _step(self) -> None:
        """Simulate the time since the last snapshot."""
        now = self._clock()
        passed = now - self._last_step
        self._last_step = now
        self._skipped += max(0.0, passed - _MAX_STEP_S)
        self._traffic.advance(self._now + min(passed, _MAX_STEP_S))

    def _set_time(self, now: float) -> None:
        self._now = now
