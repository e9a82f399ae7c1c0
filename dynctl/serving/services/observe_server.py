"""``serve observe``: the operators' API of a frontend over a live Dynamo that is only observed.

Reads answer as those of a frontend. Everything that would change the deployment, and inference, is
refused with the place where it belongs.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvloop
from aiohttp import web
from aiohttp.typedefs import Middleware

from dynctl import version
from dynctl.adapters.dynamo.planes import Planes
from dynctl.base.errors import DynctlError, TimedOut, Unreachable
from dynctl.documents.config import ConfigDocument, config_document
from dynctl.documents.doubts import distinct
from dynctl.documents.recording import RecordingSource
from dynctl.serving.dynamo.observer import PRESET, live_router
from dynctl.serving.dynamo.shadow import Beside, ObservedFleet, Shadow
from dynctl.serving.http.admin import Admin
from dynctl.serving.http.auth import Handler
from dynctl.serving.http.connections import Listeners
from dynctl.serving.http.core import ProcessCore, build_routing
from dynctl.serving.http.fleet_endpoints import ControlApi, FleetFeed
from dynctl.serving.http.inference import DECISION_HEADER
from dynctl.serving.http.json_responses import bad_request, json_response, read_json_object
from dynctl.serving.http.parts import ProcessPart
from dynctl.serving.http.process import Administration, Routes, ServingProcess, run
from dynctl.serving.http.server import common_parts
from dynctl.serving.records.metrics import Metrics
from dynctl.serving.records.recorder import (
    FileSink,
    Recorder,
    Recordings,
    reports_caches,
)
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.refusal import HttpError
from router_core import SETTINGS, Role, WorkerRegistry

_log = logging.getLogger(__name__)

_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
#: Requests that change nothing although they are not GET: a dry run, and signing in to the page.
_NO_CHANGES: Final = frozenset({"/v1/route", "/ui/session"})


@dataclass(frozen=True, slots=True)
class Observed:
    """A live Dynamo that is observed; the fields are those of :class:`Shadow`."""

    open_planes: Callable[[], Planes]
    namespace: str | None
    beside: Beside


def build_observer(
    config: FrontendConfig,
    observed: Observed,
    extra_routes: Iterable[Routes] = (),
    *,
    source: RecordingSource = "observe",
) -> ServingProcess:
    """A process that follows a live Dynamo and takes no request. ``source`` is that of its
    recordings. Errors as :func:`dynctl.serving.http.server.build_frontend`."""
    # A pool of one role is a part of a deployment whose other hops are elsewhere.
    routing = build_routing(config, router=live_router(), serves_pools=True)
    service = routing.service
    fleet = ObservedFleet(service, routing.upstream, config)
    core = ProcessCore(routing, fleet)
    recordings = Recordings(
        service,
        source=source,
        router=lambda: shadow.title,
        complete=lambda: _recorded_kinds(shadow, service.router.registry),
    )
    shadow = Shadow(
        service,
        core.memory,
        fleet,
        observed.beside,
        open_planes=observed.open_planes,
        namespace=observed.namespace,
        on_choice=lambda choice, verdict: metrics.on_choice(choice, verdict),
        recordings=recordings,
    )
    # No observers: they count requests of this process, which has none.
    metrics = Metrics(
        service, router_id=routing.router_id, memory=core.memory, audit=shadow.audit.rows
    )
    administration = Administration(
        metrics=metrics,
        admin=_ObservedAdmin(core, shadow),
        control=_ObservedControl(core, shadow),
        feed=FleetFeed(
            service,
            core.memory,
            transfers=metrics.transfers,
            traffic=lambda: shadow.reading.traffic,
            waiting=fleet.waiting,
            probe_s=lambda: None,
            audit=shadow.audit.rows,
            compares="choice",
            skipped=lambda: shadow.audit.skipped,
        ),
        recordings=recordings,
    )
    tokenizes = config.model_path is not None
    return ServingProcess(
        core,
        administration,
        [ShadowPart(shadow), *common_parts(core, administration, None, tokenizes=tokenizes)],
        Listeners(config.limits),
        title="dynctl serve router",
        describe=partial(_log_start, core, shadow),
        extra_routes=extra_routes,
        middlewares=[_read_only(shadow)],
    )


class ShadowPart(ProcessPart):
    """Follows the deployment."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow

    async def join(self) -> None:
        await self.shadow.start()

    async def leave(self) -> None:
        await self.shadow.close()


def _recorded_kinds(shadow: Shadow, registry: WorkerRegistry) -> frozenset[str]:
    """What a live Dynamo gives: choices only where frontends publish them, and prompts only
    where one worker computes prompt and answer."""
    kinds = {"workers", "topology", "loads"}
    if reports_caches(registry):
        kinds.add("kv_events")
    if shadow.observer.deployment.sequences:
        kinds.add("decisions")
        if all(worker.role is Role.AGGREGATED for worker in registry):
            kinds.add("arrivals")
    return frozenset(kinds)


def _read_only(shadow: Shadow) -> Middleware:
    @web.middleware
    async def refuse_changes(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what is not a read, with the place where it belongs."""
        if request.method in _READS or request.path in _NO_CHANGES:
            return await handler(request)
        frontends = ", ".join(shadow.frontends) or "the frontends of that Dynamo"
        raise HttpError(
            501,
            f"{request.method} {request.path[:200]}: this process only observes "
            f"{shadow.title}; send it to {frontends}",
            "not_implemented_error",
            "observer",
        )

    return refuse_changes


def _log_start(core: ProcessCore, shadow: Shadow) -> None:
    service = core.service
    _log.info(
        "observing %s on %s: %s, workers: %d; it writes nothing there and takes no requests",
        shadow.title,
        core.address.url,
        ", ".join(service.models()) or "no model",
        len(service.router.registry),
    )
    _log.info(
        "choices are read from frontends with --router-mode kv --router-replica-sync, or from "
        "--frontend-log FILE"
    )


class _ObservedControl(ControlApi):
    """Dry runs as the observed frontends decide, with their way to read chats."""

    def __init__(self, core: ProcessCore, shadow: Shadow) -> None:
        super().__init__(core.service, core.fleet, core.inference, core.config)
        self._shadow = shadow

    async def route(self, http: web.Request) -> web.Response:
        body = await read_json_object(http, self._config.limits.body_bytes)
        try:
            result = await self._shadow.route(body)
        except (Unreachable, TimedOut) as error:
            raise HttpError(503, _sentence(error), "service_unavailable", 503) from None
        except DynctlError as error:
            raise bad_request(_sentence(error)) from None
        answer = json_response(result)
        if result.id:
            answer.headers[DECISION_HEADER] = result.id
        return answer


class _ObservedAdmin(Admin):
    """Settings and views of the observed router."""

    def __init__(self, core: ProcessCore, shadow: Shadow) -> None:
        super().__init__(core.service, core.memory, token=core.config.api_token, preset=PRESET)
        self._shadow = shadow

    def settings(self) -> ConfigDocument:
        router, origins = self._service.router, self._shadow.reading.origins or {}
        return config_document(
            router.config,
            version=version(),
            preset=None,
            sources=origins,
            unknown=SETTINGS.keys() - origins.keys(),
            thresholds={m: t.to_dict() for m, t in router.busy.overrides().items()},
        )

    def view_facts(self) -> dict[str, Any]:
        shadow = self._shadow
        return {
            **super().view_facts(),
            "chats": "dynamo",
            "source": shadow.title,
            "origins": dict(shadow.reading.origins or {}),
            "doubts": tuple(distinct(shadow.reading.doubts)),
        }


def _sentence(error: DynctlError) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message


def run_observer(
    config: FrontendConfig, observed: Observed, extra_routes: Iterable[Routes] = ()
) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Blocks. Errors as :func:`build_observer`, and
    Unreachable where the deployment's discovery is not reachable."""
    return run(lambda: build_observer(config, observed, extra_routes), config)


async def record(
    process: ServingProcess, path: Path, *, max_bytes: int, seconds: float | None
) -> Recorder:
    """Follow the deployment and record it in a file, without a listener. Stop it with
    `recordings.close`. Raises UsageProblem, Unreachable or OSError."""
    sink = FileSink(path)
    try:
        process.core.open()
        await process.join()
        recordings = process.administration.recordings
        return await recordings.record(sink, max_bytes=max_bytes, seconds=seconds)
    finally:
        sink.close()


def record_deployment(
    config: FrontendConfig,
    path: Path,
    observed: Observed,
    *,
    max_bytes: int,
    seconds: float | None,
) -> None:
    """Follow a deployment and record it until the end, SIGTERM or SIGINT. Blocks. Raises as
    :func:`record`."""

    async def work() -> None:
        process = build_observer(config, observed, source="dynamo")
        loop = asyncio.get_running_loop()
        task = loop.create_task(record(process, path, max_bytes=max_bytes, seconds=seconds))

        def stop() -> None:
            active = process.administration.recordings.active
            if active:
                active[0].stop("it was stopped")
            else:
                task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        try:
            await task
        finally:
            await process.close()

    uvloop.run(work())
