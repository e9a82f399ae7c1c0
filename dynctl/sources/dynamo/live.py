"""A live Dynamo through its planes: one observer for as long as somebody looks.

Discovery says who is there, ``kv_metrics`` and the engines' own reports how full they are, the
frontends' ``/metrics`` (or what they tell each other) what they carry. Caches are read only when
somebody asks. What nobody tells is said to be unknown, with the way to tell it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final

from dynctl.adapters.ports import ChannelMessage, ChannelValue
from dynctl.base.decode_errors import WireError
from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.base.tasks import Supervisor
from dynctl.documents.route_result import RouteResult
from dynctl.documents.snapshot import DecisionLine, Header, Snapshot
from dynctl.documents.view import SavedView
from dynctl.documents.workers import WorkerRow
from dynctl.health.deployment import Deployment
from dynctl.sources.alerts import condition_alert
from dynctl.sources.dynamo.decisions import DecisionJoin
from dynctl.sources.dynamo.frontend import DynamoFrontend
from dynctl.sources.dynamo.frontends import PolledFrontends
from dynctl.sources.dynamo.log_tail import LogTail
from dynctl.sources.dynamo.observer import PRESET, Observer, live_router
from dynctl.sources.dynamo.planes import Planes, backend, namespace, open_planes
from dynctl.sources.dynamo.router_state import replicas_mirror, take_load, take_settings
from dynctl.sources.dynamo.snapshot import Known, RowCache, dynamo_alerts, part_origins
from dynctl.sources.frontend.source import set_on_all
from dynctl.sources.kubernetes import OUT_OF_REACH, cluster_ways
from dynctl.sources.source import Values
from dynctl.sources.view import ViewSource
from dynctl.wire.dynamo.forward_pass import decode_forward_pass
from dynctl.wire.dynamo.frontend_log import read_line
from router_core import SETTINGS

#: Findings are worked out anew this often, and when somebody comes or goes.
_ALERTS_S: Final = 5.0
#: A single frame waits this long for what engines tell about once a second.
_SETTLE_S: Final = 1.5
_WHY_NOT: Final = "a live Dynamo keeps no decisions and tells only the winner"
_ASK: Final = 'ask before the request: dynctl route --explain "PROMPT" with the same options'


class LiveDynamo:
    """``urls``: Dynamo frontends that add load, the queue and thresholds; in Kubernetes those of
    the cluster, unless some were named. ``frontend_log``: a path or ``-``."""

    def __init__(
        self,
        options: GlobalOptions,
        urls: Sequence[str] = (),
        frontend_log: str | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._urls = list(urls)
        self._wall = wall
        self.title = "live Dynamo"
        self._winners = DecisionJoin(self._worker, wall)
        self._log = None if frontend_log is None else LogTail(frontend_log, self._take_line)
        self._rows = RowCache()
        self._waiting: dict[int, dict[int, int]] = defaultdict(dict)
        self._told = asyncio.Event()
        self._ways = ExitStack()
        self._workers_reached = True
        self._frontends_refused = ""
        self._planes: Planes | None = None
        self._observer: Observer | None = None
        self._frontends: PolledFrontends | None = None
        self._tasks = Supervisor()
        self._read_all = False
        self._read: set[int] = set()
        self._alerts: tuple[Any, ...] = ()
        self._alerts_at = 0.0
        self._alerts_of: Deployment | None = None
        self._heard_at = wall()
        self._settings_of: object = None

    # -- life ------------------------------------------------------------------------------

    async def __aenter__(self) -> LiveDynamo:
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
        if not self._urls and (backend(options) or ("",))[0] == "kubernetes":
            ways = await asyncio.to_thread(self._ways.enter_context, cluster_ways(options))
            self._urls, self._workers_reached = ways.urls, ways.direct
            self._frontends_refused = ways.refused
        planes = self._planes = open_planes(options)
        self.title = planes.title
        self._frontends = PolledFrontends(self._urls, options.timeout, self._wall)
        observer = self._observer = Observer(
            live_router(),
            planes.discovery,
            planes.plane_of,
            planes.requests,
            time.monotonic,
            namespace=namespace(options),
            follow_index=False,
            follow_load=self._workers_reached,
            books=not self._urls,
            on_sequence=self._winners.take_sequence,
            on_pass=self._take_pass,
        )
        await observer.start()
        self._heard_at = self._wall()
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
        if self._planes is not None:
            await self._planes.close()
        await asyncio.to_thread(self._ways.close)

    # -- what the dashboard asks -----------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        observer, frontends = self._opened()
        await frontends.read()
        metrics = frontends.metrics()
        load, _ = take_load(observer, metrics)
        self._take_settings(observer, frontends)
        now = self._wall()
        if observer.interrupted is None:
            self._heard_at = now
        workers = self._rows.rows(observer.router, time.monotonic(), self._waiting)
        known = Known(
            title=self.title,
            at=self._heard_at,
            now=now,
            load=load,
            urls=tuple(self._urls),
            metrics=len(metrics),
            thresholds=bool(frontends.thresholds),
            refused=self._frontends_refused or frontends.refused,
            replica_sync=replicas_mirror(observer),
            heard=dict(self._winners.heard),
            log=self._log.name if self._log is not None else None,
            read_all=self._read_all,
            reached=self._workers_reached,
        )
        router = observer.router
        return Snapshot(
            at=now,
            source=self.title,
            header=Header(
                models=observer.deployment.models,
                mode=_mode(metrics),
                preset=PRESET,
                frontends=(len(metrics), len(self._urls)) if self._urls else None,
                queue=sum(one.pending_requests for one in metrics) if metrics else None,
            ),
            workers=workers,
            decisions=self._winners.lines(),
            alerts=self._judged(observer, frontends),
            transfers=self._winners.transfers(),
            thresholds=dict(frontends.thresholds),
            settings={name: getattr(router.config, name) for name in SETTINGS},
            told=part_origins(known, workers),
            problem="" if observer.interrupted is None else f"discovery: {observer.interrupted}",
        )

    async def settle(self) -> None:
        """Engines tell their queues about once a second."""
        observer, _ = self._opened()
        if not (self._workers_reached and observer.deployment.passes):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while sum(map(len, self._waiting.values())) < len(observer.deployment.passes):
                    self._told.clear()
                    await self._told.wait()

    async def decision(self, line: DecisionLine) -> RouteResult:
        raise UsageProblem(_WHY_NOT, _ASK)

    async def judged(self, model: str, values: Values) -> list[WorkerRow]:
        return self._view().judged(model, values)

    async def set_thresholds(self, model: str, values: Values) -> dict[str, float | int | None]:
        """Set on every frontend that was named; thresholds live in those processes."""
        if not self._urls:
            raise UsageProblem(
                "busy thresholds live in the frontends, and none was named",
                "name every replica: --frontend http://HOST:8000",
            )
        asked = [DynamoFrontend(url, self._options.timeout) for url in self._urls]
        after = await asyncio.to_thread(set_on_all, asked, model, values)
        if self._frontends is not None:
            self._frontends.thresholds_changed()
        return after

    async def save(self) -> bytes:
        return await asyncio.to_thread(self._view().save)

    async def read_index(self, worker: WorkerRow | None) -> str:
        observer, _ = self._opened()
        if not self._workers_reached:
            raise UsageProblem(f"what workers cache is {OUT_OF_REACH}")
        if worker is None:
            self._read_all = True
            observer.follow_indexes()
            return f"reading the caches of {len(observer.deployment.workers):,} workers"
        if not observer.follow_index_of(worker.worker_id):
            raise UsageProblem(f"{worker.name} is not registered any more")
        self._read.add(worker.worker_id)
        return f"reading what {worker.name} caches"

    # -- what is heard ---------------------------------------------------------------------

    def _take_line(self, line: str) -> None:
        read = read_line(line)
        if read is not None:
            self._winners.take_line(read)

    def _take_pass(self, value: ChannelValue) -> None:
        if isinstance(value, ChannelMessage):
            try:
                told = decode_forward_pass(value.payload)
            except WireError:
                return
            if self._worker(told.worker_id) is not None:
                self._waiting[told.worker_id][told.dp_rank] = told.waiting
                self._told.set()

    def _worker(self, worker_id: int) -> Any:
        return None if self._observer is None else self._observer.router.registry.get(worker_id)

    # -- inside ----------------------------------------------------------------------------

    def _opened(self) -> tuple[Observer, PolledFrontends]:
        if self._observer is None or self._frontends is None:
            raise RuntimeError("the source was not entered")
        return self._observer, self._frontends

    def _take_settings(self, observer: Observer, frontends: PolledFrontends) -> None:
        """Only when a card or a threshold changed: it is work for every worker."""
        present = (observer.deployment.workers, frontends.thresholds)
        if present != self._settings_of:
            take_settings(observer, frontends.thresholds)
            self._settings_of = present
            gone = self._waiting.keys() - {i.worker.worker_id for i in observer.deployment.workers}
            for worker_id in gone:
                del self._waiting[worker_id]

    def _judged(self, observer: Observer, frontends: PolledFrontends) -> tuple[Any, ...]:
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

    def _view(self) -> ViewSource:
        observer, _ = self._opened()
        view = SavedView(
            observer.router,
            time.monotonic(),
            PRESET,
            assumptions=("saved from the dashboard: give --model-path DIR, or --tokens FILE",),
            source=self.title,
            chats="dynamo",
        )
        return ViewSource(view, self.title)


def _mode(metrics: Sequence[Any]) -> str | None:
    """``kv`` where every frontend routes by it; None where nobody tells."""
    told = [one.kv_routing for one in metrics if one.kv_routing is not None]
    if not told:
        return None
    return "kv" if all(told) else "other than kv"
