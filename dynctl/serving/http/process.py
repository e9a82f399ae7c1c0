"""A serving process: its parts, its listeners, and its life from the start to the end."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import uvloop
from aiohttp import web
from aiohttp.typedefs import Middleware

from dynctl.base.errors import AccessDenied, Unreachable, file_problem
from dynctl.base.tasks import in_turns
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.http.admin import Admin
from dynctl.serving.http.auth import guarded
from dynctl.serving.http.bodies import BODIES, PEER_SHARE, Bodies
from dynctl.serving.http.connections import Listeners, unix_listener
from dynctl.serving.http.core import ProcessCore
from dynctl.serving.http.errors import error_middleware, on_aiohttp
from dynctl.serving.http.fleet_endpoints import FLEET_PATH, TEST_PATH, ControlApi, FleetFeed
from dynctl.serving.http.index_exchange import IndexExchange
from dynctl.serving.http.openapi import document_route
from dynctl.serving.http.parts import ProcessPart
from dynctl.serving.http.plain_requests import ClientHandler
from dynctl.serving.http.recording import RecordingApi
from dynctl.serving.http.shared_router import with_shared_router
from dynctl.serving.http.start import (
    StartError,
    announce,
    listen,
    settle_garbage_collector,
    settle_malloc,
    tidy_memory_when_idle,
)
from dynctl.serving.records.metrics import Metrics
from dynctl.serving.records.recorder import Recordings
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.telemetry.exposition import CONTENT_TYPE
from dynctl.serving.telemetry.log_format import configure_logging

_log = logging.getLogger(__name__)

#: The first and the longest pause between two attempts to start.
_START_PAUSE_S: Final = 0.5
_START_PAUSES_S: Final = 5.0
#: Seconds for which the start waits for engines' caches to be read; an endpoint that does not
#: answer must not keep a frontend from serving.
FIRST_READ_S: Final = 5.0
#: Seconds between two removals of what is too old, at most.
_EXPIRY_S: Final = 15.0
_METRICS_S: Final = 8.0

Part = TypeVar("Part", bound=ProcessPart)


@dataclass(frozen=True, slots=True, kw_only=True)
class Administration:
    """What operators read and change of a process."""

    metrics: Metrics
    admin: Admin
    control: ControlApi
    feed: FleetFeed
    recordings: Recordings


class ServingProcess:
    """A process that can be started and stopped on a running event loop.

    ``title`` is that of its OpenAPI document. ``inference``: its handlers by path, of POST, for
    clients with a key; ``client_routes``: the other endpoints of clients.
    ``extra_routes`` add endpoints; they are called when an application is built, one for each
    listener. ``describe`` logs the configuration when the process serves.
    """

    def __init__(
        self,
        core: ProcessCore,
        administration: Administration,
        parts: Sequence[ProcessPart],
        listeners: Listeners,
        *,
        title: str,
        describe: Callable[[], None],
        inference: Mapping[str, ClientHandler] | None = None,
        client_routes: Iterable[web.RouteDef] = (),
        extra_routes: Iterable["Routes"] = (),
        middlewares: Sequence[Middleware] = (),
    ) -> None:
        self.core = core
        self.config = core.config
        self.service = core.service
        self.fleet = core.fleet
        self.address = core.address
        self.administration = administration
        self.listeners = listeners
        self.title = title
        self.system_port = core.config.system_port
        self._parts = parts
        self._exchange = IndexExchange(core.service, core.fleet, core.config.api_token)
        self._describe = describe
        self._inference = dict(inference or {})
        self._client_routes = tuple(client_routes)
        self._extra_routes = tuple(extra_routes)
        self._middlewares = middlewares
        self._own_socket: Path | None = None

    @property
    def url(self) -> str:
        return self.address.url

    @property
    def port(self) -> int:
        return self.address.port

    def part(self, kind: type[Part]) -> Part:
        """The part of a kind. Raises LookupError where the process has none."""
        for part in self._parts:
            if isinstance(part, kind):
                return part
        raise LookupError(f"{self.title} has no {kind.__name__}")

    def addresses(self) -> dict[str, Any]:
        """The record of ``--announce``."""
        record: dict[str, Any] = {"frontend": self.url, "url": self.url, "port": self.port}
        if self.system_port is not None:
            record["system_port"] = self.system_port
        for part in self._parts:
            record.update(part.addresses())
        return record

    # -- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the fleet, then listen; returns when every engine was probed once.

        Clients wait for the first reading of the engines' caches too, at most FIRST_READ_S.
        """
        core = self.core
        listener = self.address.listen()
        try:
            for part in self._parts:
                await part.open()
            core.open()
            if core.routing.link is None:
                await self._exchange.take(self.config.index_peers, self.config.api_token)
            await asyncio.gather(self.join(), core.speed_up())
            await self.fleet.first_read(FIRST_READ_S)
            for part in self._parts:
                await part.prepare()
            # Health first: a load balancer may ask as soon as clients are accepted.
            await self._listen_for_operators()
            plain = {path: core.keyed(each, json=False) for path, each in self._inference.items()}
            for part in self._parts:
                plain |= part.data_paths()
            app = self.build_app()
            await self.listeners.serve_clients(app, listener, core.certificate, plain)
            self._start_tasks()
            for part in self._parts:
                await part.serve()
        except BaseException:
            listener.close()
            await self.close()
            raise

    async def join(self) -> None:
        """Learn the workers."""
        for part in self._parts:
            await part.join()

    async def _listen_for_operators(self) -> None:
        config = self.config
        if config.system_port is not None:
            system = listen(config.system_host, config.system_port, "--system-port")
            self.system_port = system.getsockname()[1]
            await self.listeners.serve_few(self._system_app(), system, PEER_SHARE)
        if config.unix_socket is not None:
            operators = _unix_listener(config.unix_socket)
            self._own_socket = config.unix_socket
            await self.listeners.serve_few(self.build_app(), operators)

    def _start_tasks(self) -> None:
        start, core = self.service.tasks.start, self.core
        start("booking expiry", self._expire_often)
        if core.certificate is not None:
            start("certificate reload", core.certificate.watch)
        if self.config.api_key_file is not None:
            start("keys reload", core.keys.watch)
        start("event loop canary", self.administration.metrics.watch_event_loop)

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones, at most for the drain timeout.

        For the shutdown delay before, the process is only not ready: load balancers and the network
        of a cluster need a moment until they send nothing more.
        """
        service, inference, limits = self.service, self.core.inference, self.config.limits
        if limits.shutdown_delay_s:
            service.announce_end()
            await asyncio.sleep(limits.shutdown_delay_s)
        service.drain()
        for part in self._parts:
            await part.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.drain_s):
                # A router process has no inference of its own, and requests that wait.
                while inference.in_flight or service.admission.waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    def is_idle(self) -> bool:
        """Whether no request runs here, or is known to run at a worker."""
        return not self.core.inference.in_flight and not any(True for _ in self.service.router.load)

    async def close(self) -> None:
        """Stop everything; running requests are aborted."""
        await self.administration.recordings.close()
        for part in self._parts:
            await part.leave()
        await self.service.tasks.close()
        await self.listeners.close()
        if self._own_socket is not None:
            self._own_socket.unlink(missing_ok=True)
            self._own_socket = None
        for part in self._parts:
            await part.close()
        await self.fleet.close()
        await self.core.upstream.close()

    async def _expire_often(self) -> None:
        limit = self.service.router.config.active_request_expiry_secs
        while True:
            await asyncio.sleep(min(_EXPIRY_S, limit / 4))
            await in_turns(self.service.expiring())
            await self.service.refresh_health()
            for part in self._parts:
                part.expire()

    def log_start(self) -> None:
        """Log the configuration of this start."""
        self._describe()
        for part in self._parts:
            part.log_start()

    # -- endpoints -------------------------------------------------------------------------

    def build_app(self) -> web.Application:
        """The endpoints for one listener."""
        config, token = self.config, self.config.api_token
        app = web.Application(middlewares=[error_middleware, *self._middlewares])
        app[BODIES] = Bodies(
            config.limits,
            compressed=config.compressed_requests,
            overload=config.router.overload_status_code,
            turns=self.core.reader.turns,
        )
        for path, handler in self._inference.items():
            app.router.add_post(path, on_aiohttp(self.core.keyed(handler)))
        app.add_routes(self._client_routes)
        app.router.add_get("/metrics", self._metrics)
        administration = self.administration
        routes = [
            *administration.control.routes(self.core.keyed),
            web.get(FLEET_PATH, guarded(administration.feed.handle, token)),
            web.post(TEST_PATH, guarded(administration.feed.report_test, token)),
            *administration.admin.routes(),
            *self._exchange.routes(),
            *RecordingApi(administration.recordings, token).routes(),
        ]
        link = self.core.routing.link
        if link is not None:
            routes = with_shared_router(routes, link, administration.feed, token)
        app.add_routes(routes)
        for part in self._parts:
            app.add_routes(part.routes())
        for more in self._extra_routes:
            app.add_routes(more(self))
        app.add_routes([document_route(self.title)])
        return app

    def _system_app(self) -> web.Application:
        """Health and metrics on a separate port that need not be open to clients."""
        control = self.administration.control
        app = web.Application(middlewares=[error_middleware])
        app.router.add_get("/health", control.health)
        app.router.add_get("/live", control.live)
        app.router.add_get("/ready", control.ready)
        app.router.add_get("/metrics", self.administration.metrics.handle)
        return app

    async def _metrics(self, http: web.Request) -> web.Response:
        """The metrics of all processes of this command; without them those of this process."""
        if self.config.metrics_url is not None:
            with contextlib.suppress(UpstreamFailure):
                status, body = await self.core.upstream.get(self.config.metrics_url, _METRICS_S)
                if status == 200:
                    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
        return await self.administration.metrics.handle(http)


Routes = Callable[[ServingProcess], Iterable[web.RouteDef]]


def _unix_listener(path: Path) -> socket.socket:
    try:
        return unix_listener(path)
    except OSError as error:
        raise StartError(f"--unix-socket {path}: {file_problem(error, writing=True)}") from None


def run(build: Callable[[], ServingProcess], config: FrontendConfig) -> int:
    """Run the process of ``build`` until a signal stops it; the exit code. Blocks."""
    try:
        configure_logging(config.log_format, config.log_level, process=config.process)
    except ValueError as error:
        raise StartError(str(error)) from None
    return uvloop.run(serve(build))


async def serve(build: Callable[[], ServingProcess]) -> int:
    """As :func:`run`, on a running event loop."""
    settle_malloc()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    process = await _start_process(build, stop)
    if process is None:
        return 0
    settle_garbage_collector()
    process.service.tasks.start("tidying memory", partial(tidy_memory_when_idle, process.is_idle))
    try:
        process.log_start()
        if process.config.announce:
            announce(process.addresses())
        await stop.wait()
        _log.info("stopping: %d requests are running", process.core.inference.in_flight)
        await process.drain()
    finally:
        await process.close()
    return 0


async def _start_process(
    build: Callable[[], ServingProcess], stop: asyncio.Event
) -> ServingProcess | None:
    """The process once what it needs is reachable; None if it is stopped before.

    Raises Unreachable after ``start_s`` of its configuration, AccessDenied at once.
    """
    loop = asyncio.get_running_loop()
    began, pause, logged = loop.time(), _START_PAUSE_S, ""
    while True:
        process = build()
        try:
            await process.start()
        except AccessDenied:
            raise
        except Unreachable as error:
            limit = process.config.start_s
            left = float("inf") if limit is None else limit - (loop.time() - began)
            if left <= 0:
                raise
            if error.message != logged:
                logged = error.message
                until = "" if limit is None else f", for at most {limit:g} s"
                _log.warning("the start waits%s: %s", until, error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause, left)):
                    await stop.wait()
            if stop.is_set():
                return None
            pause = min(2 * pause, _START_PAUSES_S)
        else:
            return process
