"""The embedded fleet, alive: what ``dynctl top --demo`` follows. Nothing needs to run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from dynctl import version
from dynctl.base.errors import UsageProblem
from dynctl.documents.config import ConfigDocument, config_document
from dynctl.documents.decisions import DecisionList, decision_row, past_decision, with_preferences
from dynctl.documents.fleet_load import FleetLoad
from dynctl.documents.route_result import RouteResult
from dynctl.documents.snapshot import DecisionLine, Snapshot
from dynctl.documents.view import SavedView
from dynctl.documents.workers import WorkerRow
from dynctl.serving.http.fleet_endpoints import FleetFeed
from dynctl.serving.service import RoutingService
from dynctl.serving.telemetry.decision_memory import DecisionMemory
from dynctl.serving.telemetry.metrics import Metrics
from dynctl.sources.demo.traffic import MODEL, DemoTraffic, demo_workers
from dynctl.sources.frontend.snapshot import FrontendReadings, frontend_snapshot
from dynctl.sources.source import Values
from dynctl.sources.view import ViewSource
from dynctl.tokenization import DEMO_MODEL_DIR
from router_core import ThresholdsSet, preset

PRESET: Final = "dynamo-1.6"
#: The fleet has lived this long when somebody first looks.
LIVED_S: Final = 135.0
#: A pause longer than this is slept through.
_LONGEST_S: Final = 60.0
_MEMORY: Final = 8 * 1024 * 1024
_THRESHOLDS: Final = {
    "active_prefill_tokens_threshold": 12_000,
    "active_decode_blocks_threshold": 0.85,
}


class LiveDemo:
    """The embedded fleet. ``clock``: monotonic seconds; ``wall``: seconds since the epoch.

    Also a :class:`FrontendReader` of the router inside it.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        lived_s: float = LIVED_S,
    ) -> None:
        self.title = self.name = "demo fleet"
        self._clock = clock
        self._looked_at = clock()
        # The fleet's own time: it began to live before anybody looked.
        self._now = 0.0
        self._lived_s = lived_s
        self._began_wall = wall() - lived_s
        self._slept = 0.0
        self._wall = wall
        service = self._service = RoutingService(
            preset(PRESET).with_values(_THRESHOLDS),
            clock=lambda: self._now,
            wall=lambda: self._began_wall + self._slept + self._now,
            id_prefix="demo",
        )
        self._memory = DecisionMemory(_MEMORY)
        metrics = Metrics(service, router_id=1, memory=self._memory)
        service.observers += [metrics, self._memory]
        self._traffic = DemoTraffic(service, demo_workers(), self._set_time)
        service.sample = self._traffic.sample
        self._feed = FleetFeed(
            service,
            self._memory,
            transfers=metrics.transfers,
            waiting=self._traffic.waiting,
            in_flight=lambda: self._traffic.in_flight,
        )
        self._followed = FrontendReadings(self, wall)

    async def __aenter__(self) -> LiveDemo:
        self._traffic.start(0.0)
        await asyncio.to_thread(self._traffic.advance, self._lived_s)
        self._looked_at = self._clock()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing runs beside the one who looks."""

    # -- what the dashboard asks -----------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        self._live()
        await self._followed.read()
        await self._followed.read_decisions()
        return frontend_snapshot([self._followed], self.title, self._wall())

    async def settle(self) -> None:
        """It lives already."""

    async def decision(self, line: DecisionLine) -> RouteResult:
        kept = self._memory.get(line.id)
        if kept is None:
            raise UsageProblem(f"decision {line.id} had to leave the memory of the demo fleet")
        return past_decision(kept.plan, at=kept.at, whole=kept.whole, preset=PRESET)

    async def judged(self, model: str, values: Values) -> list[WorkerRow]:
        return self._view().judged(model, values)

    async def set_thresholds(self, model: str, values: Values) -> dict[str, float | int | None]:
        applied = self._service.apply(ThresholdsSet(model, values))
        if not applied.ok:
            raise UsageProblem(applied.message)
        return self._service.router.busy.thresholds(model).to_dict()

    async def save(self) -> bytes:
        return self._view().save()

    async def read_index(self, worker: WorkerRow | None) -> str:
        return "the demo fleet always tells what it caches"

    # -- what the router inside tells ------------------------------------------------------

    async def fleet(self, cards: str | None) -> FleetLoad:
        return self._feed.read(cards)

    async def decisions(self, since: int, limit: int, wait: int) -> DecisionList:
        memory = self._memory
        found = memory.recent(limit, since=since)
        plans = [kept.plan for kept in found]
        rows = [
            decision_row(plan, at=kept.at, whole=kept.whole)
            for plan, kept in zip(plans, found, strict=True)
        ]
        return DecisionList(
            with_preferences(rows, plans),
            len(memory),
            memory.evicted,
            memory.size,
            memory.max_bytes,
            memory.recorded,
            memory.recorded - since - len(rows),
        )

    async def config(self) -> ConfigDocument:
        sources = dict.fromkeys(_THRESHOLDS, "the demo")
        return config_document(
            self._service.router.config, version=version(), preset=PRESET, sources=sources
        )

    # -- inside ----------------------------------------------------------------------------

    def _live(self) -> None:
        """Let the time pass that has passed since somebody looked."""
        looked_at = self._clock()
        passed = looked_at - self._looked_at
        self._looked_at = looked_at
        self._slept += max(0.0, passed - _LONGEST_S)
        self._traffic.advance(self._now + min(passed, _LONGEST_S))

    def _set_time(self, now: float) -> None:
        self._now = now

    def _view(self) -> ViewSource:
        view = SavedView(
            self._service.router,
            now=self._now,
            preset=PRESET,
            model_paths={MODEL: str(DEMO_MODEL_DIR)},
            assumptions=("the embedded demo fleet: nothing is running",),
            source=self.title,
        )
        return ViewSource(view, self.title)
