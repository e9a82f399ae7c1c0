"""``serve observe``: the operators' API of a frontend over a live Dynamo that is only observed.

Reads answer as those of a frontend. Everything that would change the deployment, and inference, is
refused with the place where it belongs.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import uvloop
from aiohttp import web

from dynctl import version
from dynctl.adapters.dynamo.planes import Planes
from dynctl.base.errors import DynctlError, TimedOut, Unreachable
from dynctl.documents.config import ConfigDocument, config_document
from dynctl.documents.doubts import distinct
from dynctl.serving.dynamo.observer import PRESET, live_router
from dynctl.serving.dynamo.shadow import Beside, ObservedFleet, Shadow
from dynctl.serving.http.admin import Admin
from dynctl.serving.http.auth import Handler
from dynctl.serving.http.fleet_endpoints import ControlApi, FleetFeed
from dynctl.serving.http.inference import DECISION_HEADER
from dynctl.serving.http.json_responses import bad_request, json_response, read_json_object
from dynctl.serving.http.server import Frontend, Routes, run
from dynctl.serving.records.metrics import Metrics
from dynctl.serving.records.recorder import FileSink, Recorder, Recordings, reports_caches
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.refusal import HttpError
from router_core import SETTINGS, Role

_log = logging.getLogger(__name__)

_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
#: Requests that change nothing although they are not GET: a dry run, and signing in to the page.
_NO_CHANGES: Final = frozenset({"/v1/route", "/ui/session"})


class ObserverProcess(Frontend):
    """A frontend process that follows a live Dynamo and takes no request.

    ``open_planes``, ``namespace`` and ``beside``: as for :class:`Shadow`.
    """

    def __init__(
        self,
        config: FrontendConfig,
        *,
        open_planes: Callable[[], Planes],
        namespace: str | None,
        beside: Beside,
        extra_routes: Iterable[Routes] = (),
    ) -> None:
        super().__init__(
            config,
            inference=False,
            router=live_router(),
            fleet=ObservedFleet,
            extra_routes=extra_routes,
        )
        assert isinstance(self.fleet, ObservedFleet)
        service = self.service
        # A pool of one role is a part of a deployment whose other hops are elsewhere.
        service.serves_pools = True
        self.recordings = Recordings(
            service, source="observe", router=lambda: self.shadow.title, complete=self._complete
        )
        self.shadow = shadow = Shadow(
            service,
            self.memory,
            self.fleet,
            beside,
            open_planes=open_planes,
            namespace=namespace,
            on_choice=lambda choice, verdict: self.metrics.on_choice(choice, verdict),
            recordings=self.recordings,
        )
        self.metrics = Metrics(
            service, router_id=self.router_id, memory=self.memory, audit=shadow.audit.rows
        )
        self.admin = _ObservedAdmin(self, token=config.api_token, preset=PRESET, enabled=True)
        self.control = _ObservedControl(service, self.fleet, self.inference, config)
        self.control.shadow = shadow
        self.feed = FleetFeed(
            service,
            self.memory,
            transfers=self.metrics.transfers,
            traffic=lambda: shadow.reading.traffic,
            waiting=self.fleet.waiting,
            probe_s=lambda: None,
            audit=shadow.audit.rows,
            compares="choice",
            skipped=lambda: shadow.audit.skipped,
        )
        # They count requests of this process, which has none.
        service.observers.clear()

    def build_app(self) -> web.Application:
        app = super().build_app()
        app.middlewares.append(self._read_only)
        return app

    async def close(self) -> None:
        await self.shadow.close()
        await super().close()

    async def record(self, path: Path, *, max_bytes: int, seconds: float | None) -> Recorder:
        """Follow the deployment and record it in a file, without a listener. Stop it with
        `recordings.close`. Raises UsageProblem, Unreachable or OSError."""
        sink = FileSink(path)
        try:
            self.upstream.start()
            self.fleet.index.start()
            await self._join()
            self.recordings.source = "dynamo"
            return await self.recordings.record(sink, max_bytes=max_bytes, seconds=seconds)
        finally:
            sink.close()

    def _complete(self) -> frozenset[str]:
        """What a live Dynamo gives: choices only where frontends publish them, and prompts only
        where one worker computes prompt and answer."""
        found = {"workers", "topology", "loads"}
        registry, deployment = self.service.router.registry, self.shadow.observer.deployment
        if reports_caches(registry):
            found.add("kv_events")
        if deployment.sequences:
            found.add("decisions")
            if all(worker.role is Role.AGGREGATED for worker in registry):
                found.add("arrivals")
        return frozenset(found)

    async def _join(self) -> None:
        await self.shadow.start()

    @web.middleware
    async def _read_only(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what is not a read, with the place where it belongs."""
        if request.method in _READS or request.path in _NO_CHANGES:
            return await handler(request)
        frontends = ", ".join(self.shadow.frontends) or "the frontends of that Dynamo"
        raise HttpError(
            501,
            f"{request.method} {request.path[:200]}: this process only observes "
            f"{self.shadow.title}; send it to {frontends}",
            "not_implemented_error",
            "observer",
        )

    def log_start(self) -> None:
        router = self.service.router
        _log.info(
            "observing %s on %s: %s, workers: %d; it writes nothing there and takes no requests",
            self.shadow.title,
            self.url,
            ", ".join(self.service.models()) or "no model",
            len(router.registry),
        )
        _log.info(
            "choices are read from frontends with --router-mode kv --router-replica-sync, or from "
            "--frontend-log FILE"
        )


class _ObservedControl(ControlApi):
    """Dry runs as the observed frontends decide, with their way to read chats."""

    shadow: Shadow

    async def route(self, http: web.Request) -> web.Response:
        body = await read_json_object(http, self._config.limits.body_bytes)
        try:
            result = await self.shadow.route(body)
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

    def __init__(self, process: ObserverProcess, **more: Any) -> None:
        super().__init__(process.service, process.memory, **more)
        self._process = process

    def settings(self) -> ConfigDocument:
        router, origins = self._service.router, self._process.shadow.reading.origins or {}
        return config_document(
            router.config,
            version=version(),
            preset=None,
            sources=origins,
            unknown=SETTINGS.keys() - origins.keys(),
            thresholds={m: t.to_dict() for m, t in router.busy.overrides().items()},
        )

    def view_facts(self) -> dict[str, Any]:
        shadow = self._process.shadow
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
    config: FrontendConfig,
    *,
    open_planes: Callable[[], Planes],
    namespace: str | None,
    beside: Beside,
    extra_routes: Iterable[Routes] = (),
) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Blocks. Errors as :class:`Frontend`, and
    Unreachable where the deployment's discovery is not reachable."""
    return run(
        lambda: ObserverProcess(
            config,
            open_planes=open_planes,
            namespace=namespace,
            beside=beside,
            extra_routes=extra_routes,
        ),
        config,
    )


def record_deployment(
    config: FrontendConfig,
    path: Path,
    *,
    open_planes: Callable[[], Planes],
    namespace: str | None,
    beside: Beside,
    max_bytes: int,
    seconds: float | None,
) -> None:
    """Follow a deployment and record it until the end, SIGTERM or SIGINT. Blocks. Raises as
    :meth:`ObserverProcess.record`."""

    async def work() -> None:
        process = ObserverProcess(
            config, open_planes=open_planes, namespace=namespace, beside=beside
        )
        loop = asyncio.get_running_loop()
        task = loop.create_task(process.record(path, max_bytes=max_bytes, seconds=seconds))

        def stop() -> None:
            if process.recordings.active:
                process.recordings.active[0].stop("it was stopped")
            else:
                task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        try:
            await task
        finally:
            await process.close()

    uvloop.run(work())
