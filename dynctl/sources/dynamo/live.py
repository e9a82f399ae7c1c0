"""A live Dynamo, followed: one observer for as long as the dashboard runs.

Workers come from discovery; their own load from ``kv_metrics`` and the engines' forward-pass
metrics; the routers' load from the frontends' ``/metrics``, or from replica-sync events. Caches
are read only on request. Unknown parts contain what makes them known.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from msgspec import UNSET

from dynctl.adapters.dynamo.planes import namespace, open_planes
from dynctl.adapters.ports import ChannelMessage, ChannelValue
from dynctl.base.decode_errors import WireError
from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.base.tasks import Supervisor
from dynctl.documents.doubts import distinct
from dynctl.documents.snapshot import Alert, Header, Snapshot
from dynctl.documents.thresholds import Thresholds, ThresholdValues
from dynctl.documents.view import SavedView
from dynctl.documents.workers import WorkerRow
from dynctl.health.deployment import Deployment
from dynctl.serving.dynamo.decision_join import DecisionJoin
from dynctl.serving.dynamo.observer import PRESET, Observer
from dynctl.sources.alerts import condition_alert
from dynctl.sources.dynamo.accepted_cards import take_versions
from dynctl.sources.dynamo.frontend_pods import OUT_OF_REACH
from dynctl.sources.dynamo.frontends import PolledFrontends, ReachedFrontends, reached_frontends
from dynctl.sources.dynamo.log_tail import LogTail
from dynctl.sources.dynamo.router_state import (
    index_doubts,
    registration_doubts,
    replicas_mirror,
    take_load,
    take_settings,
)
from dynctl.sources.dynamo.snapshot import (
    DynamoReadings,
    RowCache,
    dynamo_alerts,
    hidden_rows,
    snapshot_parts,
)
from dynctl.sources.dynamo.source import DynamoSource
from dynctl.sources.source import LiveSource, Source
from dynctl.sources.view import ViewSource
from dynctl.wire.dynamo.events import decode_forward_pass
from dynctl.wire.dynamo.frontend_log import read_line
from router_core import SETTINGS

if TYPE_CHECKING:
    from router_core import Worker

#: Findings are computed again this often, and when the registered workers change.
_ALERTS_S: Final = 5.0
#: A single frame waits this long for the engines' metrics, which come about once a second.
_SETTLE_S: Final = 1.5


class LiveDynamo(LiveSource):
    """``urls``: Dynamo frontends that add load, the queue and thresholds; in Kubernetes those of
    the cluster, unless some were named. ``frontend_log``: a path or ``-``."""

    def __init__(
        self,
        options: GlobalOptions,
        urls: Sequence[str] = (),
        frontend_log: str | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        source = DynamoSource(options, tuple(urls))
        super().__init__(source, source.title)
        self._options = options
        self._named = tuple(urls)
        self._wall = wall
        self._decisions = DecisionJoin(self._worker, wall)
        self._log = None if frontend_log is None else LogTail(frontend_log, self._take_line)
        self._rows = RowCache()
        self._waiting: dict[int, dict[int, int]] = defaultdict(dict)
        self._pass_arrived = asyncio.Event()
        self._ways = ExitStack()
        self._reached = ReachedFrontends([])
        self._observer: Observer | None = None
        self._frontends: PolledFrontends | None = None
        self._tasks = Supervisor()
        self._read_all = False
        self._alerts: tuple[Alert, ...] = ()
        self._alerts_at = 0.0
        self._alerts_of: Deployment | None = None
        self._discovery_at = wall()
        self._settings_of: object = None

    # -- life ------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    async def _open(self) -> None:
        options = self._options
        reached = self._reached = await asyncio.to_thread(
            self._ways.enter_context, reached_frontends(options, self._named)
        )
        planes = open_planes(options)
        self.title = planes.title
        self._frontends = PolledFrontends(
            [frontend.url for frontend in reached.frontends],
            options.timeout,
            self._wall,
            reached.names,
        )
        self._observer = Observer(
            planes,
            namespace=namespace(options),
            follow_index=False,
            follow_load=reached.workers_reachable,
            on_sequence=self._decisions.take_sequence,
            on_pass=self._take_pass,
        )
        await self._observer.start()
        self._discovery_at = self._wall()
        await self._frontends.read()
        if self._log is not None:
            self._log.read()
            self._tasks.start("frontend log", self._log.run)

    async def _close(self) -> None:
        await self._tasks.close()
        if self._log is not None:
            self._log.close()
        if self._observer is not None:
            await self._observer.close()
        if self._frontends is not None:
            await self._frontends.close()
        await asyncio.to_thread(self._ways.close)

    # -- snapshots and questions -----------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        observer, frontends = self._open_planes_once()
        await frontends.read()
        metrics = frontends.metrics()
        load, _ = take_load(observer, metrics)
        take_versions(observer, metrics, [{}] * len(metrics))
        self._take_settings(observer, frontends)
        now = self._wall()
        if observer.interrupted is None:
            self._discovery_at = now
        rows = self._rows.rows(observer.router, time.monotonic(), self._waiting)
        workers = (*rows, *hidden_rows(observer.deployment))
        names = self._reached.names
        unread = self._reached.cluster.unread if self._reached.cluster is not None else ""
        readings = DynamoReadings(
            title=self.title,
            at=self._discovery_at,
            now=now,
            load=load,
            urls=names,
            metrics=len(metrics),
            thresholds=bool(frontends.thresholds),
            problem=unread or frontends.problem,
            replica_sync=replicas_mirror(observer),
            hops=dict(self._decisions.hops),
            log=self._log.name if self._log is not None else None,
            read_all=self._read_all,
            workers_reachable=self._reached.workers_reachable,
            traffic=frontends.traffic.total is not None,
        )
        router = observer.router
        return Snapshot(
            at=now,
            source=self.title,
            header=Header(
                models=observer.deployment.models,
                mode=_mode(metrics),
                preset=PRESET,
                frontends=(len(metrics), len(names)) if names else None,
                queue=sum(metric.pending_requests for metric in metrics) if metrics else None,
                traffic=UNSET if frontends.traffic.total is None else frontends.traffic.total,
            ),
            workers=workers,
            decisions=self._decisions.lines(),
            alerts=self._present_alerts(observer, frontends),
            transfers=self._decisions.transfers(),
            thresholds=dict(frontends.thresholds),
            settings={name: getattr(router.config, name) for name in SETTINGS},
            parts=snapshot_parts(readings, workers),
            problem="" if observer.interrupted is None else f"discovery: {observer.interrupted}",
        )

    async def settle(self) -> None:
        """Wait until every engine has reported its queue, at most for a moment."""
        observer, _ = self._open_planes_once()
        if not (self._reached.workers_reachable and observer.deployment.passes):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while sum(map(len, self._waiting.values())) < len(observer.deployment.passes):
                    self._pass_arrived.clear()
                    await self._pass_arrived.wait()

    async def set_thresholds(self, model: str, values: ThresholdValues) -> Thresholds:
        after = await asyncio.to_thread(self._reached.set_thresholds, model, values)
        if self._frontends is not None:
            self._frontends.thresholds_changed()
        return after

    def present(self) -> Source:
        """The observed router as a view."""
        observer, frontends = self._open_planes_once()
        metrics = frontends.metrics()
        _, load = take_load(observer, metrics)
        _, settings = take_settings(observer, frontends.thresholds, metrics)
        doubts = [*registration_doubts(observer), *self._reached.doubts(), *frontends.doubts()]
        doubts += take_versions(observer, metrics, [{}] * len(metrics))
        doubts += [*index_doubts(observer, unread=True), *load, *settings]
        view = SavedView(
            observer.router,
            time.monotonic(),
            PRESET,
            assumptions=("saved from the dashboard: give --model-path DIR, or --tokens FILE",),
            source=self.title,
            chats="dynamo",
            doubts=tuple(distinct(doubts)),
        )
        return ViewSource(view, self.title)

    async def read_index(self, worker: WorkerRow | None) -> str:
        observer, _ = self._open_planes_once()
        if not self._reached.workers_reachable:
            raise UsageProblem(f"what workers cache is {OUT_OF_REACH}")
        if worker is None:
            self._read_all = True
            observer.follow_indexes()
            return f"reading the caches of {len(observer.deployment.workers):,} workers"
        if not observer.follow_index_of(worker.worker_id):
            raise UsageProblem(f"{worker.name} is not registered any more")
        return f"reading what {worker.name} caches"

    # -- received values -------------------------------------------------------------------

    def _take_line(self, line: str) -> None:
        read = read_line(line)
        if read is not None:
            self._decisions.take_line(read)

    def _take_pass(self, value: ChannelValue) -> None:
        if isinstance(value, ChannelMessage):
            try:
                report = decode_forward_pass(value.payload)
            except WireError:
                return
            if self._worker(report.worker_id) is not None:
                self._waiting[report.worker_id][report.dp_rank] = report.waiting
                self._pass_arrived.set()

    def _worker(self, worker_id: int) -> Worker | None:
        return None if self._observer is None else self._observer.router.registry.get(worker_id)

    # -- inside ----------------------------------------------------------------------------

    def _open_planes_once(self) -> tuple[Observer, PolledFrontends]:
        if self._observer is None or self._frontends is None:
            raise RuntimeError("the source was not entered")
        return self._observer, self._frontends

    def _take_settings(self, observer: Observer, frontends: PolledFrontends) -> None:
        """Only when a card or a threshold changed: it is work for every worker."""
        present = (observer.deployment.workers, frontends.thresholds)
        if present != self._settings_of:
            take_settings(observer, frontends.thresholds, frontends.metrics())
            self._settings_of = present
            gone = self._waiting.keys() - {i.worker.worker_id for i in observer.deployment.workers}
            for worker_id in gone:
                del self._waiting[worker_id]

    def _present_alerts(self, observer: Observer, frontends: PolledFrontends) -> tuple[Alert, ...]:
        now, deployment = time.monotonic(), observer.deployment
        if deployment is not self._alerts_of or now - self._alerts_at >= _ALERTS_S:
            self._alerts_of, self._alerts_at = deployment, now
            self._alerts = tuple(
                dynamo_alerts(self.title, namespace(self._options), deployment, frontends.facts())
            )
        failing = self._tasks.failing | observer.tasks.failing
        code = "BACKGROUND_TASK_FAILED"
        failed = tuple(condition_alert(code, name, text) for name, text in failing.items())
        return failed + self._alerts


def _mode(metrics: Sequence[Any]) -> str | None:
    """``kv`` where every frontend uses it; None where no frontend exports its mode."""
    modes = [metric.kv_routing for metric in metrics if metric.kv_routing is not None]
    if not modes:
        return None
    return "kv" if all(modes) else "other than kv"
