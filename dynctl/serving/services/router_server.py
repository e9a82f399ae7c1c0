"""``serve router``: the routing service for other frontends, over HTTP and without inference.

Workers, dry runs, decisions, thresholds and metrics are those of the OpenAI frontend; selections
and bookings (:mod:`dynctl.serving.http.selection`) replace inference.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

import msgspec
from aiohttp import web

from dynctl.adapters.dynamo.planes import open_registrar
from dynctl.health import conditions as codes
from dynctl.serving.dynamo.component import RouterComponent
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.http_client import Upstream
from dynctl.serving.http.connections import Listeners
from dynctl.serving.http.core import ProcessCore, build_routing
from dynctl.serving.http.dynamo_part import DynamoPart
from dynctl.serving.http.frontends import FrontendsApi
from dynctl.serving.http.parts import ProcessPart
from dynctl.serving.http.plain_requests import ClientHandler
from dynctl.serving.http.process import Routes, ServingProcess, run
from dynctl.serving.http.selection import SelectionApi
from dynctl.serving.http.server import administrate, build_core, common_parts
from dynctl.serving.http.start import listen
from dynctl.serving.http.start_log import log_start
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.services.select_api import SelectApi, SlotTrackerApi
from dynctl.serving.services.select_service import SelectService
from dynctl.serving.services.slot_tracker import SlotTracker
from dynctl.wire.dynamo.discovery import EndpointId

#: Seconds between two looks at the processes of this command, and for one.
_PROCESSES_S: Final = 1.0
_READ_S: Final = 5.0


def build_router(config: FrontendConfig, extra_routes: Iterable[Routes] = ()) -> ServingProcess:
    """A router: selections and bookings instead of inference. Errors as
    :func:`dynctl.serving.http.server.build_frontend`."""
    core, fleet_part = build_core(build_routing(config, serves_pools=True))
    administration = administrate(core, clients=False)
    listeners = Listeners(config.limits)
    # It gets hashes from its frontends; it tokenizes for dry runs, if it can.
    tokenizes = config.model_path is not None
    bookings = BookingsPart(core)
    parts: list[ProcessPart] = [
        *common_parts(core, administration, fleet_part, tokenizes=tokenizes),
        bookings,
        DynamoServices(core, listeners),
    ]
    if config.processes_url is not None:
        parts.append(SupervisedProcesses(config.processes_url, core.upstream, core.service))
    if isinstance(fleet_part, DynamoPart) and fleet_part.options.endpoint is not None:
        endpoint = fleet_part.options.endpoint
        parts.append(ComponentPart(core, fleet_part, endpoint, bookings.selection))
    return ServingProcess(
        core,
        administration,
        parts,
        listeners,
        title="dynctl serve router",
        describe=partial(log_start, core, tokenizes=tokenizes),
        extra_routes=extra_routes,
    )


def run_router(config: FrontendConfig, extra_routes: Iterable[Routes] = ()) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Blocks. Errors as :func:`build_router`."""
    return run(lambda: build_router(config, extra_routes), config)


class BookingsPart(ProcessPart):
    """Selections and bookings, and the leases of the frontends that route here."""

    def __init__(self, core: ProcessCore) -> None:
        config, service = core.config, core.service
        self._tasks = service.tasks
        self.selection = SelectionApi(
            service, token=config.api_token, body_bytes=config.limits.body_bytes
        )
        self.frontends = FrontendsApi(
            service,
            core.fleet,
            self.selection,
            preset=config.preset,
            token=config.api_token,
            body_bytes=config.limits.body_bytes,
            one_environment=config.processes_url is not None,
        )

    def routes(self) -> list[web.RouteDef]:
        return self.selection.routes() + self.frontends.routes()

    def data_paths(self) -> Mapping[str, ClientHandler]:
        return self.frontends.data_paths()

    async def serve(self) -> None:
        self._tasks.start("frontend leases", self._end_leases)

    async def _end_leases(self) -> None:
        while True:
            await asyncio.sleep(min(0.5, self.frontends.lease_s / 8))
            self.frontends.sweep()

    def expire(self) -> None:
        self.selection.sweep()


class DynamoServices(ProcessPart):
    """Answers as Dynamo's selection service and slot tracker, where these have a port."""

    def __init__(self, core: ProcessCore, listeners: Listeners) -> None:
        self._config = core.config
        self._service = core.service
        self._listeners = listeners
        self.select_service: SelectService | None = None
        self.slot_tracker: SlotTracker | None = None
        self.select_service_port = core.config.select_service_port
        self.slot_tracker_port = core.config.slot_tracker_port

    async def serve(self) -> None:
        config, service = self._config, self._service
        if config.select_service_port is not None:
            listener = listen(config.host, config.select_service_port, "--select-service-port")
            self.select_service_port = listener.getsockname()[1]
            select = SelectService(config.router, service.clock, service.tasks)
            self.select_service = select
            select.runtime.start()
            app = SelectApi(select, config.api_token).application(config.limits)
            await self._listeners.serve_clients(app, listener)
        if config.slot_tracker_port is not None:
            listener = listen(config.host, config.slot_tracker_port, "--slot-tracker-port")
            self.slot_tracker_port = listener.getsockname()[1]
            idle_s = config.router.active_request_expiry_secs
            tracker = self.slot_tracker = SlotTracker(service.clock, idle_s)
            app = SlotTrackerApi(tracker, config.api_token).application(config.limits)
            await self._listeners.serve_clients(app, listener)

    def expire(self) -> None:
        if self.select_service is not None:
            self.select_service.expire()
        if self.slot_tracker is not None:
            self.slot_tracker.expire()

    async def close(self) -> None:
        if self.select_service is not None:
            await self.select_service.runtime.close()


class ComponentPart(ProcessPart):
    """Registers the router as a component of Dynamo, with ``--endpoint``."""

    def __init__(
        self,
        core: ProcessCore,
        dynamo: DynamoPart,
        endpoint: EndpointId,
        selection: SelectionApi,
    ) -> None:
        self._core = core
        self._dynamo = dynamo
        self._endpoint = endpoint
        self._selection = selection

    async def serve(self) -> None:
        dynamo, config = self._dynamo, self._core.config
        component = RouterComponent(
            self._core.service,
            dynamo.fleet,
            self._selection,
            dynamo.fleet.requests,
            open_registrar(dynamo.options.planes, dynamo.fleet.discovery),
            self._endpoint,
            dynamo.options.rpc_host,
            config.limits,
            indexer=config.router.serve_indexer,
        )
        await dynamo.register(component.process)


class ProcessState(msgspec.Struct, frozen=True):
    """One process of ``serve frontend --processes``. ``ends``: how often it ended although it was
    not stopped; ``ended``: how the last time, ``ended_ago_s`` seconds ago."""

    name: str
    up: bool
    ends: int = 0
    ended: str = ""
    ended_ago_s: float | None = None


class SupervisedProcesses(ProcessPart):
    """Shows processes of this command that ended as conditions; this router may be one of them.

    ``url``: where the parent reports the states of its processes.
    """

    def __init__(self, url: str, upstream: Upstream, service: RoutingService) -> None:
        self._url = url
        self._upstream = upstream
        self._service = service
        #: Process -> its ends that are shown.
        self._shown: dict[str, int] = {}

    async def serve(self) -> None:
        self._service.tasks.start("process supervision", self._follow)

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(UpstreamFailure, msgspec.MsgspecError):
                status, body = await self._upstream.get(self._url, _READ_S)
                if status == 200:
                    for state in msgspec.json.decode(body, type=list[ProcessState]):
                        self._show(state)
            await asyncio.sleep(_PROCESSES_S)

    def _show(self, state: ProcessState) -> None:
        recent = state.ended_ago_s is not None and state.ended_ago_s < codes.INCIDENT_S
        if recent and state.ends != self._shown.get(state.name):
            times = f" ({state.ends} times in all)" if state.ends > 1 else ""
            message = f"{state.ended}{times}"
            self._service.set_condition(codes.PROCESS_RESTARTED, state.name, message)
        self._shown[state.name] = state.ends
