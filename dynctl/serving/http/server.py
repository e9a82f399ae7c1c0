"""``serve frontend``: the parts of a frontend, put together."""

from collections.abc import Callable, Iterable
from functools import partial

from aiohttp import web

from dynctl.documents.fleet_load import Traffic
from dynctl.serving.dynamo.fleet import Obstacle, no_obstacle
from dynctl.serving.engines.fleet import Fleet
from dynctl.serving.http.admin import Admin, serving_values
from dynctl.serving.http.connections import Listeners
from dynctl.serving.http.core import ProcessCore, Routing, build_routing
from dynctl.serving.http.dynamo_part import DynamoPart
from dynctl.serving.http.engine_calls import EngineCalls
from dynctl.serving.http.fleet_endpoints import ControlApi, FleetFeed
from dynctl.serving.http.parts import (
    ConfiguredWorkers,
    LoadSharingPart,
    ProcessPart,
    RecordingPart,
    RouterLinkPart,
    TokenizerPart,
    TracesPart,
)
from dynctl.serving.http.process import (
    Administration,
    Routes,
    ServingProcess,
    run,
)
from dynctl.serving.http.start_log import log_start
from dynctl.serving.records.decision_log import DecisionLog
from dynctl.serving.records.metrics import Metrics
from dynctl.serving.records.recorder import Recordings
from dynctl.serving.remote.fleet import MirroredFleet
from dynctl.serving.remote.placement import RemotePlacement, RouterFollower
from dynctl.serving.routing.config import FrontendConfig
from router_core import WorkerWithDpRank


def build_frontend(config: FrontendConfig, extra_routes: Iterable[Routes] = ()) -> ServingProcess:
    """A frontend: inference for clients, by a router in this process or in another one.

    Raises WorkerSpecError, TokenizationError or StartError if the configuration is invalid.
    """
    core, fleet_part = build_core(build_routing(config))
    administration = administrate(core, clients=True)
    return ServingProcess(
        core,
        administration,
        common_parts(core, administration, fleet_part, tokenizes=True),
        Listeners(config.limits),
        title="dynctl serve frontend",
        describe=partial(log_start, core, tokenizes=True),
        inference=core.inference.handlers(),
        client_routes=_client_routes(core, administration.control),
        extra_routes=extra_routes,
    )


def run_frontend(config: FrontendConfig, extra_routes: Iterable[Routes] = ()) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Blocks. Errors as :func:`build_frontend`."""
    return run(lambda: build_frontend(config, extra_routes), config)


def _client_routes(core: ProcessCore, control: ControlApi) -> list[web.RouteDef]:
    keyed, inference = core.keyed, core.inference
    engine_calls = EngineCalls(core.service, inference, core.reader, core.upstream, core.config)
    return [
        *engine_calls.routes(keyed),
        web.get("/ping", control.ready),
        web.post("/ping", control.ready),
    ]


# -- what the builders of several processes put together ---------------------------------------


def build_core(
    routing: Routing, obstacle: Obstacle = no_obstacle
) -> tuple[ProcessCore, DynamoPart | RouterLinkPart | None]:
    """The core of a process, and the part that follows the workers where these are not engines of
    the configuration. ``obstacle``: why a worker of a Dynamo deployment cannot get requests."""
    config, service, upstream = routing.config, routing.service, routing.upstream
    if config.dynamo is not None:
        dynamo = DynamoPart(routing, config.dynamo, obstacle)
        return ProcessCore(routing, dynamo.fleet, dynamo.dispatch), dynamo
    requests = routing.requests
    if requests is not None:
        fleet = MirroredFleet(service, upstream, config, requests.link)
        follower = RouterFollower(service, requests, fleet)
        placement = RemotePlacement(service, requests)
        link = RouterLinkPart(follower, config.router_token)
        return ProcessCore(routing, fleet, placement=placement), link
    return ProcessCore(routing, Fleet(service, upstream, config)), None


def common_parts(
    core: ProcessCore,
    administration: Administration,
    fleet_part: ProcessPart | None,
    *,
    tokenizes: bool,
) -> list[ProcessPart]:
    """What the configuration asks for. ``tokenizes``: prompts become token ids here."""
    config, service = core.config, core.service
    parts: list[ProcessPart] = []
    if config.replicas is not None:
        router_id = core.routing.router_id
        parts.append(LoadSharingPart(config.replicas, service, router_id, core.address))
    if fleet_part is not None:
        parts.append(fleet_part)
    parts.append(ConfiguredWorkers(config, core.fleet, service))
    parts.append(RecordingPart(config, service, administration.recordings))
    if tokenizes and config.dynamo is None:
        parts.append(TokenizerPart(service, core.fleet))
    if service.traces is not None and config.otlp_endpoint is not None:
        parts.append(TracesPart(service.traces.export, config.otlp_endpoint, service))
    return parts


def administrate(core: ProcessCore, *, clients: bool) -> Administration:
    """What operators read and change. ``clients``: the process has clients of its own."""
    config, service, fleet = core.config, core.service, core.fleet
    metrics = Metrics(
        service,
        router_id=core.routing.router_id,
        memory=core.memory,
        audit=core.audit.rows,
        tokenizer_cache=core.routing.tokenizer_cache,
    )
    service.observers += [
        metrics,
        core.memory,
        core.audit,
        DecisionLog(
            config.log_decisions,
            config.preset,
            tree_size=partial(_cached_blocks, core),
            outage=core.service.outage,
        ),
    ]
    traffic: Callable[[], Traffic | None] = metrics.traffic if clients else _no_traffic
    return Administration(
        metrics=metrics,
        admin=Admin(
            service,
            core.memory,
            token=config.api_token,
            preset=config.preset,
            sources=config.origins,
            serving=serving_values(config),
            enabled=config.admin_api,
        ),
        control=ControlApi(service, fleet, core.inference, config),
        feed=FleetFeed(
            service,
            core.memory,
            transfers=metrics.transfers,
            traffic=traffic,
            others=fleet.unregistered,
            waiting=fleet.waiting,
            in_flight=lambda: core.inference.in_flight,
            probe_s=lambda: fleet.load_interval,
            audit=core.audit.rows,
            skipped=lambda: core.audit.skipped,
        ),
        recordings=Recordings(service, router=lambda: core.address.url),
    )


def _no_traffic() -> None:
    """What clients get is not known here."""


def _cached_blocks(core: ProcessCore, ref: WorkerWithDpRank) -> int:
    slot = core.service.router.registry.slot(*ref)
    return 0 if slot is None else core.service.router.cached_blocks(slot)
