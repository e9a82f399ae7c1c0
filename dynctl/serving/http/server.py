"""``serve frontend``: the HTTP server of the service, its start and its shutdown."""

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import uvloop
from aiohttp import web

from dynctl.adapters.dynamo.planes import open_planes, open_registrar, topic_opener
from dynctl.adapters.dynamo.registration import Registration
from dynctl.adapters.dynamo.request_plane import TcpRequestPlane
from dynctl.adapters.dynamo.request_server import RequestServer
from dynctl.adapters.nats.durable_events import RouterConsumer, snapshot_threshold
from dynctl.adapters.nats.replicas import NatsReplicas
from dynctl.adapters.otlp import SpanExport
from dynctl.adapters.ports import ReplicaPlane
from dynctl.adapters.zmq.replicas import ZmqReplicas
from dynctl.base.errors import UsageProblem, file_problem, network_reason
from dynctl.health import conditions as codes
from dynctl.planning.prefill_load import prefill_model
from dynctl.serving.dynamo.fleet import DynamoFleet
from dynctl.serving.dynamo.fleet_sync import FleetSync
from dynctl.serving.dynamo.request_plane import PlaneDispatch
from dynctl.serving.dynamo.served_index import PlaneProcess, RemoteIndex, served_index
from dynctl.serving.engines.dispatch import Dispatch, HttpDispatch
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.fleet import Fleet
from dynctl.serving.engines.flow import RequestFlow
from dynctl.serving.engines.tokenizer_check import TokenizerCheck
from dynctl.serving.engines.upstream import Upstream
from dynctl.serving.engines.worker_spec import WorkerSpec, parse_worker_spec
from dynctl.serving.engines.workers_file import WorkersFile
from dynctl.serving.http.admin import Admin, serving_values
from dynctl.serving.http.auth import Handler, checked_token, guarded, keyed
from dynctl.serving.http.bodies import BODIES, PEER_SHARE, Bodies
from dynctl.serving.http.connections import (
    FEW,
    Certificate,
    CertificateError,
    Connections,
    descriptors,
    unix_listener,
)
from dynctl.serving.http.engine_calls import EngineCalls
from dynctl.serving.http.errors import error_middleware
from dynctl.serving.http.fleet_endpoints import FLEET_PATH, ControlApi, FleetFeed
from dynctl.serving.http.index_exchange import IndexExchange
from dynctl.serving.http.inference import Inference
from dynctl.serving.http.keys import SHORTEST_KEY, ApiKeys, ClientRights, KeyLimits, KeysError
from dynctl.serving.http.openapi import document_route
from dynctl.serving.http.recording import RecordingApi
from dynctl.serving.http.shared_router import with_shared_router
from dynctl.serving.http.start import (
    LOOPBACK,
    StartError,
    announce,
    listen,
    settle_garbage_collector,
)
from dynctl.serving.http.start_log import Started, log_start
from dynctl.serving.records.audit import ReuseAudit
from dynctl.serving.records.decision_log import DecisionLog
from dynctl.serving.records.decision_memory import DecisionMemory
from dynctl.serving.records.metrics import Metrics
from dynctl.serving.records.recorder import FileSink, Recordings
from dynctl.serving.remote.fleet import MirroredFleet
from dynctl.serving.remote.routing import RemoteRouting, RouterLink
from dynctl.serving.routing.config import (
    DEFAULT_BLOCK_SIZE,
    INDEX_BYTES_PER_BLOCK,
    DynamoConfig,
    FrontendConfig,
    ReplicaConfig,
)
from dynctl.serving.routing.prompts import PromptTokenizers
from dynctl.serving.routing.replicas import ALIVE_S, TOPICS, ReplicaSync
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.routing.transfer_file import configured_table
from dynctl.serving.telemetry.exposition import CONTENT_TYPE
from dynctl.serving.telemetry.log_format import configure_logging
from dynctl.serving.telemetry.traces import Traces
from dynctl.settings.policy_file import policy_classes
from dynctl.tokenization import load_tokenizer
from dynctl.wire.dynamo.discovery import ACTIVE_SEQUENCES, EndpointId
from dynctl.wire.dynamo.events import RouterEvent
from router_core import IndexBound, Router, TransferTableSet, WorkerWithDpRank

_log = logging.getLogger(__name__)

#: Seconds for which the start waits for engines' caches to be read; an endpoint that does not
#: answer must not keep a frontend from serving.
FIRST_READ_S: Final = 5.0
#: Short keys that the warning about them names.
_NAMED_KEYS: Final = 5
_EXPIRY_S = 15.0
_CHECK_S = 10.0
_METRICS_S = 8.0
#: Seconds between two looks at what the collector of traces takes.
_TRACES_S = 1.0
Routes = Callable[["Frontend"], Iterable[web.RouteDef]]


class Frontend:
    """A frontend that can be started and stopped on a running event loop.

    ``inference`` False leaves the OpenAI endpoints out: a router for other frontends.
    ``extra_routes`` add endpoints; they are called when an application is built, one for each
    listener. ``router`` and ``fleet``: where the workers are not engines of the command line.
    Raises WorkerSpecError, TokenizationError or StartError if the configuration is invalid.
    """

    def __init__(
        self,
        config: FrontendConfig,
        *,
        inference: bool = True,
        extra_routes: Iterable[Routes] = (),
        router: Router | None = None,
        fleet: type[Fleet] = Fleet,
    ) -> None:
        self.config = config
        self._specs = _specs(config.workers)
        try:
            checked_token(config.api_token)
        except ValueError as error:
            raise StartError(str(error)) from None
        tokenizer = (
            None
            if config.model_path is None
            else load_tokenizer(config.model_path, trust_template=config.trust_template)
        )
        self._tokenizer = tokenizer
        tokenizers = PromptTokenizers(tokenizer)
        self.link: RouterLink | None = None
        self.service: RoutingService
        if config.router_url is None:
            self.service = RoutingService(
                config.router,
                tokenizers,
                default_block_size=config.block_size or DEFAULT_BLOCK_SIZE,
                prefill_model=prefill_model(config.router, config.origins),
                policy_classes=policy_classes(config.router),
                router=router,
            )
        else:
            self.link = RouterLink(
                config.router_url, config.router_token, f"{random.getrandbits(40):010x}"
            )
            self.service = RemoteRouting(
                self.link, config.router, tokenizers, default_block_size=config.block_size
            )
        service = self.service
        table, self._size_unknown = configured_table(config.router, config.model_path)
        if table is not None:
            service.apply(TransferTableSet(table))
        service.router.bound = IndexBound(config.index_memory_bytes // INDEX_BYTES_PER_BLOCK)
        self.upstream = Upstream(config.limits)
        self.fleet, dispatch = self._fleet_and_dispatch(fleet)
        self.flow = RequestFlow(service, self.fleet, dispatch, config.limits)
        self.keys = _keys(config, service)
        self.inference = Inference(service, self.flow, config, self.keys)
        self.engine_calls = EngineCalls(service, self.inference, self.upstream, config)
        self.control = ControlApi(service, self.fleet, self.inference, config)
        self.memory = DecisionMemory(config.decision_memory_bytes)
        self.audit = ReuseAudit(service.router)
        self.router_id = random.getrandbits(64)
        self.replicas: ReplicaSync | None = None
        self.metrics = Metrics(
            service,
            router_id=self.router_id,
            memory=self.memory,
            audit=self.audit.rows,
            tokenizer_cache=lambda: {} if tokenizer is None else tokenizer.encoder.cache(),
        )
        self.admin = Admin(
            service,
            self.memory,
            token=config.api_token,
            preset=config.preset,
            sources=config.origins,
            serving=serving_values(config),
            enabled=config.admin_api,
        )
        self.exchange = IndexExchange(service, self.fleet, config.api_token)
        self.recordings = Recordings(service, router=lambda: self.url)
        self.feed = FleetFeed(
            service,
            self.memory,
            transfers=self.metrics.transfers,
            traffic=self.metrics.traffic if inference else lambda: None,
            others=self.fleet.unregistered,
            waiting=self.fleet.waiting,
            in_flight=lambda: self.inference.in_flight,
            probe_s=lambda: self.fleet.load_interval,
            audit=self.audit.rows,
            skipped=lambda: self.audit.skipped,
        )
        if config.otlp_endpoint is not None:
            instance = config.process or f"{self.router_id:016x}"
            export = SpanExport(config.otlp_endpoint, config.otlp_sample_ratio, instance)
            service.traces = Traces(
                export, service.clock, lambda model: [one.code for one in service.doubts(model)]
            )
            service.observers.append(service.traces)
        service.observers += [
            self.metrics,
            self.memory,
            self.audit,
            DecisionLog(config.log_decisions, config.preset, tree_size=self._cached_blocks),
        ]
        if isinstance(service, RemoteRouting):
            service.not_for = (self.memory,)
        self._serves_inference = inference
        # A router alone gets hashes from its frontends; it tokenizes for dry runs, if it can.
        self.tokenizes = inference or config.model_path is not None
        self._extra_routes = tuple(extra_routes)
        #: What this process has on Dynamo's request plane; None: nothing.
        self.registered: PlaneProcess | None = None
        if isinstance(self.fleet, DynamoFleet) and config.router.use_remote_indexer:
            remote = RemoteIndex(service, self.fleet.observer, self._own_instance)
            service.ask_index = remote.ask
        self._runners: list[web.AppRunner] = []
        #: One for each listener.
        self.connections: list[Connections] = []
        self.certificate = _certificate(config)
        self._own_socket: Path | None = None
        self.port = config.port
        self.system_port = config.system_port

    def _fleet_and_dispatch(self, kind: type[Fleet]) -> tuple[Fleet, Dispatch]:
        """The fleet, and how its workers are reached; ``kind``: of engines that were specified."""
        config, service = self.config, self.service
        if config.dynamo is not None:
            planes = open_planes(
                config.dynamo.planes,
                response_port=config.dynamo.response_port,
                serving=True,
                durable=self._consumer() if config.router.router_durable_kv_events else None,
            )
            fleet = DynamoFleet(service, self.upstream, config, planes, config.dynamo)
            requests = cast(TcpRequestPlane, planes.requests)
            requests.on_lost = fleet.request_plane_lost
            traced = config.otlp_endpoint is not None
            return fleet, PlaneDispatch(
                requests, fleet, config.limits, config.dynamo, traced=traced
            )
        if isinstance(service, RemoteRouting):
            kind = MirroredFleet
        engines = kind(service, self.upstream, config)
        return engines, HttpDispatch(self.upstream, engines)

    def _consumer(self) -> RouterConsumer:
        """The durable consumers of this router; it has its name when it is registered."""

        def name() -> str | None:
            return self.fleet.router_name() if isinstance(self.fleet, DynamoFleet) else None

        async def dump(scope: EndpointId) -> list[RouterEvent]:
            return await self.fleet.dump(scope) if isinstance(self.fleet, DynamoFleet) else []

        return RouterConsumer(
            name, dump, self.config.router.router_reset_states, snapshot_threshold(os.environ)
        )

    @property
    def title(self) -> str:
        """What the process is, for its OpenAPI document."""
        return "dynctl serve frontend" if self._serves_inference else "dynctl serve router"

    @property
    def url(self) -> str:
        host = self.config.host
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def addresses(self) -> dict[str, Any]:
        """The record of ``--announce``."""
        record = {"frontend": self.url, "url": self.url, "port": self.port}
        if self.system_port is not None:
            record["system_port"] = self.system_port
        return record

    # -- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the fleet, then listen; returns when every engine was probed once.

        Clients wait for the first reading of the engines' caches too, at most FIRST_READ_S.
        """
        config = self.config
        listener = listen(config.host, config.port, share=config.share_port)
        self.port = listener.getsockname()[1]
        try:
            self._share_load()
            self.upstream.start()
            self.fleet.index.start()
            if self.link is None:
                await self.exchange.take(config.index_peers, config.api_token)
            await asyncio.gather(self._join(), self._speed_up())
            await self.fleet.first_read(FIRST_READ_S)
            await self._serve_index()
            self._start_recording()
            # Health first: a load balancer may ask as soon as clients are accepted.
            if config.system_port is not None:
                system = listen(config.system_host, config.system_port, "--system-port")
                self.system_port = system.getsockname()[1]
                await self._serve(self._system_app(), system, self._few(PEER_SHARE))
            if config.unix_socket is not None:
                operators = _unix_listener(config.unix_socket)
                self._own_socket = config.unix_socket
                await self._serve(self.build_app(), operators, self._few())
            await self._serve(self.build_app(), listener, self._clients(), self.certificate)
        except BaseException:
            listener.close()
            await self.close()
            raise
        start = self.service.tasks.start
        start("booking expiry", self._expire_often)
        if self.tokenizes and self.config.dynamo is None:
            start("tokenizer check", self._check_tokenizers)
        if self.certificate is not None:
            start("certificate reload", self.certificate.watch)
        if self.service.traces is not None:
            start("trace export", self._watch_traces)
        if self.config.api_key_file is not None:
            start("keys reload", self.keys.watch)
        start("event loop canary", self.metrics.watch_event_loop)

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones, at most for the drain timeout."""
        self.inference.draining = self.service.draining = True
        if self.registered is not None:
            await self.registered.drain(self.config.limits.drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.limits.drain_s):
                # A router process has no inference of its own, and requests that wait.
                while self.inference.in_flight or self.service.admission.waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Stop everything; running requests are aborted."""
        await self.recordings.close()
        if self.registered is not None:
            await self.registered.close()
        if isinstance(self.fleet, DynamoFleet):
            await self.fleet.leave()
        await self.service.tasks.close()
        for connections in self.connections:
            await connections.close()
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()
        if self._own_socket is not None:
            self._own_socket.unlink(missing_ok=True)
            self._own_socket = None
        if self.replicas is not None:
            self.replicas.leave()
            await self.replicas.plane.close()
        await self.fleet.close()
        if self.link is not None:
            await self.link.close()
        await self.upstream.close()
        if self.service.traces is not None:
            await asyncio.to_thread(self.service.traces.export.close)

    def build_app(self) -> web.Application:
        """The application: inference, control endpoints, and the extra routes."""
        app = web.Application(middlewares=[error_middleware])
        app[BODIES] = Bodies(
            self.config.limits,
            compressed=self.config.compressed_requests,
            overload=self.config.router.overload_status_code,
        )
        if self._serves_inference:
            app.add_routes(
                [
                    web.post("/v1/chat/completions", self._keyed(self.inference.chat_completions)),
                    web.post("/v1/completions", self._keyed(self.inference.completions)),
                    web.post("/v1/embeddings", self._keyed(self.inference.embeddings)),
                    web.post("/v1/responses", self._keyed(self.inference.responses)),
                    web.post("/v1/messages", self._keyed(self.inference.messages)),
                    *self.engine_calls.routes(self._keyed),
                    web.get("/ping", self.control.ready),
                    web.post("/ping", self.control.ready),
                ]
            )
        app.router.add_get("/metrics", self._metrics)
        token = self.config.api_token
        routes = [
            *self.control.routes(self._keyed),
            web.get(FLEET_PATH, guarded(self.feed.handle, token)),
            *self.admin.routes(),
            *self.exchange.routes(),
            *RecordingApi(self.recordings, token).routes(),
        ]
        if self.link is not None:
            routes = with_shared_router(routes, self.link, self.feed, token)
        app.add_routes(routes)
        for more in self._extra_routes:
            app.add_routes(more(self))
        app.add_routes([document_route(self.title)])
        return app

    # -- inside ----------------------------------------------------------------------------

    def _own_instance(self) -> int | None:
        return None if self.registered is None else self.registered.instance_id

    async def _register(self, process: PlaneProcess) -> None:
        """Listen on Dynamo's request plane and register what is served there."""
        self.registered = process
        try:
            await process.start()
        except OSError as error:
            host = "" if self.config.dynamo is None else self.config.dynamo.rpc_host
            raise StartError(
                f"cannot listen on {host}: {network_reason(error)}; set DYN_TCP_RPC_HOST to an "
                "address of this host"
            ) from None

    async def _serve_index(self) -> None:
        """Answer other routers' questions to the index, with ``--serve-indexer``."""
        dynamo, fleet = self.config.dynamo, self.fleet
        if dynamo is None or dynamo.endpoint is not None or not isinstance(fleet, DynamoFleet):
            return
        if self.config.router.serve_indexer:
            registrar = open_registrar(dynamo.planes, fleet.discovery)
            process = served_index(self.service, fleet.observer, registrar, dynamo.rpc_host)
            await self._register(process)

    def _start_recording(self) -> None:
        """Record this process in a file, with ``--record``."""
        path, most = self.config.record, self.config.record_bytes
        if path is None:
            return
        if self.link is not None:
            raise StartError(
                "--record and --router: set only one of them; record the router process: "
                f"dynctl record --frontend {self.link.url}"
            )
        try:
            sink = FileSink(path, replace_old=True)
        except UsageProblem as error:
            raise StartError(f"--record {error.message}", error.hint) from None
        _log.info("recording to %s, at most %d bytes, then a new file begins", path, most)
        self.service.tasks.start(
            "recording", partial(self.recordings.keep_file, sink, max_bytes=most)
        )

    def _share_load(self) -> None:
        """Begin to share load with other routers, before the first booking."""
        dynamo, router = self.config.dynamo, self.config.router
        if dynamo is not None and (router.router_replica_sync or router.router_durable_kv_events):
            self._register_as_router(dynamo)
        if self.config.replicas is None:
            return
        plane = _replica_plane(self.config.replicas)
        sync = self.replicas = ReplicaSync(
            self.service,
            plane,
            router_id=self.router_id,
            name=self.url,
            later=asyncio.get_running_loop().call_later,
        )

        async def beat() -> None:
            while True:
                sync.beat()
                await asyncio.sleep(ALIVE_S)

        self.service.tasks.start("replica sync", lambda: plane.run(sync.take))
        self.service.tasks.start("replica heartbeat", beat)

    def _register_as_router(self, dynamo: DynamoConfig) -> None:
        """Replica sync with Dynamo's frontends, and consumers of its streams; starts when the fleet
        joins."""
        if not isinstance(self.fleet, DynamoFleet):
            return
        registrar = open_registrar(dynamo.planes, self.fleet.discovery)
        subject = f"registration in {registrar.title}"

        def report(problem: str | None) -> None:
            if problem is None:
                self.service.clear_condition(codes.DISCOVERY_INTERRUPTED, subject)
            else:
                message = f"{problem}; other routers may not see the load of this one"
                self.service.set_condition(codes.DISCOVERY_INTERRUPTED, subject, message)

        registration = Registration(registrar, self.fleet.entries, report)
        sync = durable = None
        if self.config.router.router_replica_sync:
            sync = FleetSync(
                self.service,
                partial(topic_opener(dynamo.planes, dynamo.event_plane), topic=ACTIVE_SEQUENCES),
                router_id=self.router_id,
                later=asyncio.get_running_loop().call_later,
                changed=registration.update,
            )
        if self.config.router.router_durable_kv_events:
            durable = RequestServer(LOOPBACK[0])
        self.fleet.register(registration, sync=sync, durable=durable)

    async def _join(self) -> None:
        config = self.config
        if self.link is not None:
            await self.link.start(self.service.tasks)
        if isinstance(self.fleet, DynamoFleet):
            await self.fleet.join()
        await asyncio.gather(*(self.fleet.add(spec, "command line") for spec in self._specs))
        if config.workers_file is not None:
            file = WorkersFile(
                config.workers_file, self.fleet, self.service, config.workers_file_poll_s
            )
            await file.load()
            self.service.tasks.start("workers file reload", file.run)

    async def _speed_up(self) -> None:
        """Choose the encoder of the tokenizer, while the engines are probed."""
        if self._tokenizer is None or self.config.tokenizer == "exact":
            return
        reasons = await asyncio.to_thread(self._tokenizer.speed_up, self.config.tokenizer)
        for reason in reasons:
            _log.info("tokenizer: %s", reason)

    async def _serve(
        self,
        app: web.Application,
        listener: socket.socket,
        connections: Connections,
        certificate: Certificate | None = None,
    ) -> None:
        limits = self.config.limits
        # A client that disconnects must stop its engine at once.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        self._runners.append(runner)
        self.connections.append(connections)
        await connections.listen(
            runner,
            listener,
            certificate=certificate,
            access_log=None,
            auto_decompress=False,  # without a bound; Bodies has one
            keepalive_timeout=limits.keep_alive_s,
            max_field_size=limits.header_bytes,
            max_line_size=limits.header_bytes,
        )

    def _clients(self) -> Connections:
        """Half of the descriptors are for clients: each request may need one to its engine."""
        limits = self.config.limits
        most = max(FEW, descriptors() // 2)
        return Connections(
            most,
            limits.peer_connections or int(most * PEER_SHARE),
            header_s=limits.header_s,
            unread_s=limits.unread_s,
        )

    def _few(self, share: float = 1.0) -> Connections:
        """Those of a listener for few programs; ``share``: the part that one address may have."""
        return Connections(FEW, int(FEW * share), unread_s=self.config.limits.unread_s)

    def _system_app(self) -> web.Application:
        """Health and metrics on a separate port that need not be open to clients."""
        app = web.Application(middlewares=[error_middleware])
        app.router.add_get("/health", self.control.health)
        app.router.add_get("/live", self.control.live)
        app.router.add_get("/ready", self.control.ready)
        app.router.add_get("/metrics", self.metrics.handle)
        return app

    async def _metrics(self, http: web.Request) -> web.Response:
        """The metrics of all processes of this command; without them those of this process."""
        if self.config.metrics_url is not None:
            with contextlib.suppress(UpstreamFailure):
                status, body = await self.upstream.get(self.config.metrics_url, _METRICS_S)
                if status == 200:
                    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
        return await self.metrics.handle(http)

    def _keyed(self, handler: Handler) -> Handler:
        return keyed(handler, self.keys, self.config.api_token)

    def _cached_blocks(self, ref: WorkerWithDpRank) -> int:
        slot = self.service.router.registry.slot(*ref)
        return 0 if slot is None else self.service.router.cached_blocks(slot)

    async def _expire_often(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_S)
            self.service.expire()
            await self.service.refresh_health()

    async def _watch_traces(self) -> None:
        """Show a collector that takes no spans as a condition."""
        traces, subject = self.service.traces, self.config.otlp_endpoint or ""
        while traces is not None:
            problem, counts = traces.export.problem, traces.export.counts()
            if problem:
                lost = counts["failed"] + counts["dropped"]
                message = f"{lost:,} spans are lost: {problem}"
                self.service.set_condition(codes.TRACES_NOT_EXPORTED, subject, message)
            else:
                self.service.clear_condition(codes.TRACES_NOT_EXPORTED, subject)
            await asyncio.sleep(_TRACES_S)

    async def _check_tokenizers(self) -> None:
        check = TokenizerCheck(self.service, self.fleet)
        while True:
            await check.run()
            await asyncio.sleep(_CHECK_S)

    def log_start(self) -> None:
        """Log the configuration of this start."""
        log_start(
            Started(
                url=self.url,
                config=self.config,
                service=self.service,
                fleet=self.fleet,
                keys=self.keys,
                replicas=self.replicas,
                link=self.link,
                tokenizes=self.tokenizes,
                tokenizer=self._tokenizer,
                size_unknown=self._size_unknown,
            )
        )


def run_frontend(config: FrontendConfig, extra_routes: Iterable[Routes] = ()) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Blocks. Errors as :class:`Frontend`."""
    return run(lambda: Frontend(config, extra_routes=extra_routes), config)


def run(build: Callable[[], Frontend], config: FrontendConfig) -> int:
    """Run the frontend of ``build`` until a signal stops it; the exit code. Blocks."""
    try:
        configure_logging(config.log_format, config.log_level, process=config.process)
    except ValueError as error:
        raise StartError(str(error)) from None
    return uvloop.run(serve(build))


async def serve(build: Callable[[], Frontend]) -> int:
    """As :func:`run`, on a running event loop."""
    frontend = build()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await frontend.start()
    settle_garbage_collector()
    try:
        frontend.log_start()
        if frontend.config.announce:
            announce(frontend.addresses())
        await stop.wait()
        _log.info("stopping: %d requests are running", frontend.inference.in_flight)
        await frontend.drain()
    finally:
        await frontend.close()
    return 0


def _specs(texts: Iterable[str]) -> list[WorkerSpec]:
    specs: dict[str, WorkerSpec] = {}
    for text in texts:
        spec = parse_worker_spec(text)
        if spec.name in specs:
            raise StartError(
                f"--worker {text}: the name {spec.name!r} occurs twice; set name= for each"
            )
        specs[spec.name] = spec
    return list(specs.values())


def _keys(config: FrontendConfig, service: RoutingService) -> ApiKeys:
    limits = KeyLimits(config.key_requests_per_minute, config.key_concurrency)
    rights = ClientRights(config.client_fields, config.isolate_keys, config.key_details)
    try:
        keys = ApiKeys(config.api_keys, config.api_key_file, limits, rights, clock=service.clock)
        keys.load()
    except KeysError as error:
        raise StartError(f"API keys: {error}") from None
    short = keys.short_names
    if short:
        _log.warning(
            "API keys with fewer than %d characters can be guessed: %s%s; make one with: "
            "openssl rand -hex 32",
            SHORTEST_KEY,
            ", ".join(short[:_NAMED_KEYS]),
            f" and {len(short) - _NAMED_KEYS:,} more" if short[_NAMED_KEYS:] else "",
        )
    return keys


def _replica_plane(config: ReplicaConfig) -> ReplicaPlane:
    if config.nats is not None:
        return NatsReplicas(config.nats, f"dynctl.replicas.{config.group}", TOPICS)
    bind = config.bind or "tcp://127.0.0.1:0"
    plane = ZmqReplicas(bind, config.peers, TOPICS)
    host = urlsplit(plane.endpoint).hostname
    if plane.endpoint.startswith("tcp:") and host not in LOOPBACK:
        _log.warning(
            "--router-replica-bind %s is reachable from other hosts: each host that connects "
            "reads request ids and block hashes, no prompts; allow only routers of this fleet",
            bind,
        )
    return plane


def _certificate(config: FrontendConfig) -> Certificate | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    certificate = Certificate(config.tls_cert, config.tls_key)
    try:
        certificate.load()
    except CertificateError as error:
        raise StartError(f"--tls-cert, --tls-key: {error}") from None
    return certificate


def _unix_listener(path: Path) -> socket.socket:
    try:
        return unix_listener(path)
    except OSError as error:
        raise StartError(f"--unix-socket {path}: {file_problem(error, writing=True)}") from None
