"""``serve router``: the routing service for other frontends, over HTTP and without inference.

Workers, dry runs, decisions, thresholds and metrics are those of the OpenAI frontend; selections
and bookings (:mod:`dynctl.serving.http.selection`) replace inference.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import msgspec
from aiohttp import web

from dynctl.adapters.dynamo.planes import open_registrar
from dynctl.health import conditions as codes
from dynctl.serving.dynamo.component import RouterComponent
from dynctl.serving.dynamo.fleet import DynamoFleet
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.http.frontends import FrontendsApi
from dynctl.serving.http.selection import SelectionApi
from dynctl.serving.http.server import Frontend, Routes, run
from dynctl.serving.http.start import listen
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.services.select_api import SelectApi, SlotTrackerApi
from dynctl.serving.services.select_service import SelectService
from dynctl.serving.services.slot_tracker import SlotTracker

_LONGEST_SWEEP_S = 15.0
#: Seconds between two looks at the processes of this command, and for one.
_PROCESSES_S = 1.0
_READ_S = 5.0


class ProcessState(msgspec.Struct, frozen=True):
    """One process of ``serve frontend --processes``. ``ends``: how often it ended although it was
    not stopped; ``ended``: how the last time, ``ended_ago_s`` seconds ago."""

    name: str
    up: bool
    ends: int = 0
    ended: str = ""
    ended_ago_s: float | None = None


class RouterProcess(Frontend):
    """A frontend process with selections and bookings instead of inference."""

    def __init__(self, config: FrontendConfig, extra_routes: Iterable[Routes] = ()) -> None:
        super().__init__(
            config, inference=False, extra_routes=[lambda _: self._routes(), *extra_routes]
        )
        self.service.serves_pools = True
        self.select_service: SelectService | None = None
        self.slot_tracker: SlotTracker | None = None
        self.select_service_port = config.select_service_port
        self.slot_tracker_port = config.slot_tracker_port
        self.selection = SelectionApi(
            self.service, token=config.api_token, body_bytes=config.limits.body_bytes
        )
        self.frontends = FrontendsApi(
            self.service,
            self.fleet,
            self.selection,
            preset=config.preset,
            token=config.api_token,
            body_bytes=config.limits.body_bytes,
            one_environment=config.processes_url is not None,
        )

    async def start(self) -> None:
        await super().start()
        self.service.tasks.start("frontend leases", self._end_leases)
        if self.config.processes_url is not None:
            self.service.tasks.start("process supervision", self._follow_processes)
        try:
            await self._start_services()
            await self._start_component()
        except BaseException:
            await self.close()
            raise

    async def _start_services(self) -> None:
        """Answer as Dynamo's selection service and slot tracker, where these have a port."""
        config, clock = self.config, self.service.clock
        if config.select_service_port is not None:
            listener = listen(config.host, config.select_service_port, "--select-service-port")
            self.select_service_port = listener.getsockname()[1]
            select = self.select_service = SelectService(config.router, clock, self.service.tasks)
            select.runtime.start()
            app = SelectApi(select, config.api_token).application(config.limits)
            await self._serve(app, listener, self._clients())
        if config.slot_tracker_port is not None:
            listener = listen(config.host, config.slot_tracker_port, "--slot-tracker-port")
            self.slot_tracker_port = listener.getsockname()[1]
            idle_s = config.router.active_request_expiry_secs
            tracker = self.slot_tracker = SlotTracker(clock, idle_s)
            app = SlotTrackerApi(tracker, config.api_token).application(config.limits)
            await self._serve(app, listener, self._clients())

    async def _start_component(self) -> None:
        """Register as a component of Dynamo, with ``--endpoint``."""
        dynamo, fleet = self.config.dynamo, self.fleet
        if dynamo is None or dynamo.endpoint is None or not isinstance(fleet, DynamoFleet):
            return
        component = RouterComponent(
            self.service,
            fleet,
            self.selection,
            fleet.requests,
            open_registrar(dynamo.planes, fleet.discovery),
            dynamo.endpoint,
            dynamo.rpc_host,
            self.config.limits,
            indexer=self.config.router.serve_indexer,
        )
        await self._register(component.process)

    async def close(self) -> None:
        await super().close()
        if self.select_service is not None:
            await self.select_service.runtime.close()

    def _routes(self) -> list[web.RouteDef]:
        return self.selection.routes() + self.frontends.routes()

    async def _end_leases(self) -> None:
        while True:
            await asyncio.sleep(min(0.5, self.frontends.lease_s / 8))
            self.frontends.sweep()

    async def _follow_processes(self) -> None:
        """Show processes that ended as conditions; this router may be one of them."""
        seen: dict[str, int] = {}
        while True:
            with contextlib.suppress(UpstreamFailure, msgspec.MsgspecError):
                status, body = await self.upstream.get(self.config.processes_url or "", _READ_S)
                found = msgspec.json.decode(body, type=list[ProcessState]) if status == 200 else []
                for one in found:
                    recent = one.ended_ago_s is not None and one.ended_ago_s < codes.INCIDENT_S
                    if recent and one.ends != seen.get(one.name):
                        times = f" ({one.ends} times in all)" if one.ends > 1 else ""
                        self.service.set_condition(
                            codes.PROCESS_RESTARTED, one.name, f"{one.ended}{times}"
                        )
                    seen[one.name] = one.ends
            await asyncio.sleep(_PROCESSES_S)

    async def drain(self) -> None:
        """Refuse new bookings. The requests of existing ones run in their frontends."""
        self.selection.draining = self.service.draining = True
        await super().drain()

    async def _expire_often(self) -> None:
        limit = self.service.router.config.active_request_expiry_secs
        while True:
            await asyncio.sleep(min(_LONGEST_SWEEP_S, limit / 4))
            self.service.expire()
            await self.service.refresh_health()
            self.selection.sweep()
            if self.select_service is not None:
                self.select_service.expire()
            if self.slot_tracker is not None:
                self.slot_tracker.expire()


def run_router(config: FrontendConfig, extra_routes: Iterable[Routes] = ()) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Blocks. Errors as :class:`Frontend`."""
    return run(lambda: RouterProcess(config, extra_routes), config)
