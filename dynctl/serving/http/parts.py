"""Parts of a serving process: what one has beyond its core, with a life of its own.

A process calls the same hook of all its parts, in the order in which it was given them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web

from dynctl.adapters.nats.replicas import NatsReplicas
from dynctl.adapters.otlp import SpanExport
from dynctl.adapters.ports import ReplicaPlane
from dynctl.adapters.zmq.replicas import ZmqReplicas
from dynctl.base.errors import UsageProblem
from dynctl.health import conditions as codes
from dynctl.serving.engines.fleet import Fleet
from dynctl.serving.engines.tokenizer_check import TokenizerCheck
from dynctl.serving.engines.worker_spec import WorkerSpec, parse_worker_spec
from dynctl.serving.engines.workers_file import WorkersFile
from dynctl.serving.http.plain_requests import ClientHandler
from dynctl.serving.http.start import LOOPBACK, Address, StartError
from dynctl.serving.records.recorder import FileSink, Recordings
from dynctl.serving.remote.placement import RouterFollower
from dynctl.serving.routing.config import FrontendConfig, ReplicaConfig
from dynctl.serving.routing.replicas import ALIVE_S, TOPICS, ReplicaSync
from dynctl.serving.routing.service import RoutingService

_CHECK_S: Final = 10.0
#: Seconds between two looks at what the collector of traces takes.
_TRACES_S: Final = 1.0

_log = logging.getLogger(__name__)


class ProcessPart:
    """The hooks of a part; each does nothing unless a part has something to do then."""

    def routes(self) -> Iterable[web.RouteDef]:
        """The endpoints of the part, for one listener."""
        return ()

    def data_paths(self) -> Mapping[str, ClientHandler]:
        """Handlers of POST by path, which are also in :meth:`routes`: so many requests have these
        paths that they are read without aiohttp."""
        return {}

    def addresses(self) -> Mapping[str, Any]:
        """What the part adds to the record of ``--announce``."""
        return {}

    async def open(self) -> None:
        """The process begins to start: nothing is booked, and no worker is known yet."""

    async def join(self) -> None:
        """Learn the workers, and be found by them."""

    async def prepare(self) -> None:
        """The workers are known; clients are not accepted yet."""

    async def serve(self) -> None:
        """Clients are accepted from now on."""

    def log_start(self) -> None:
        """Log what the part contributes to the configuration of this start."""

    def expire(self) -> None:
        """Remove what is too old; called every few seconds."""

    async def drain(self) -> None:
        """New requests are refused from now on; running ones go on."""

    async def leave(self) -> None:
        """The process ends: background tasks and listeners still run."""

    async def close(self) -> None:
        """The last call: background tasks and listeners have ended."""


class ConfiguredWorkers(ProcessPart):
    """The engines of the command line and of ``--workers-file``."""

    def __init__(self, config: FrontendConfig, fleet: Fleet, service: RoutingService) -> None:
        self._specs = _worker_specs(config.workers)
        self._fleet = fleet
        self._service = service
        self._file = None
        if config.workers_file is not None:
            poll_s = config.workers_file_poll_s
            self._file = WorkersFile(config.workers_file, fleet, service, poll_s)

    async def join(self) -> None:
        await asyncio.gather(*(self._fleet.add(spec, "command line") for spec in self._specs))
        if self._file is not None:
            await self._file.load()
            self._service.tasks.start("workers file reload", self._file.run)


def _worker_specs(texts: Iterable[str]) -> list[WorkerSpec]:
    specs: dict[str, WorkerSpec] = {}
    for text in texts:
        spec = parse_worker_spec(text)
        if spec.name in specs:
            raise StartError(
                f"--worker {text}: the name {spec.name!r} occurs twice; set name= for each"
            )
        specs[spec.name] = spec
    return list(specs.values())


class LoadSharingPart(ProcessPart):
    """Shares the load of this router with others of dynctl, with ``--router-replica-sync``."""

    def __init__(
        self, config: ReplicaConfig, service: RoutingService, router_id: int, address: Address
    ) -> None:
        self._config = config
        self._service = service
        self._router_id = router_id
        self._address = address
        #: None before the start.
        self.sync: ReplicaSync | None = None

    async def open(self) -> None:
        plane = _replica_plane(self._config)
        sync = self.sync = ReplicaSync(
            self._service,
            plane,
            router_id=self._router_id,
            name=self._address.url,
            later=asyncio.get_running_loop().call_later,
        )

        async def beat() -> None:
            while True:
                sync.beat()
                await asyncio.sleep(ALIVE_S)

        self._service.tasks.start("replica sync", lambda: plane.run(sync.take))
        self._service.tasks.start("replica heartbeat", beat)

    async def close(self) -> None:
        if self.sync is not None:
            self.sync.leave()
            await self.sync.plane.close()

    def log_start(self) -> None:
        if self.sync is not None:
            others = ", ".join(self.sync.plane.addresses)
            suffix = f", with {others}" if others else ""
            _log.info("replica sync: %s%s", self.sync.plane.title, suffix)


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


class RouterLinkPart(ProcessPart):
    """The link to the router process, with ``--router``."""

    def __init__(self, follower: RouterFollower, token: str | None) -> None:
        self.link = follower.link
        self._follower = follower
        self._token = token

    async def join(self) -> None:
        await self._follower.start()

    async def close(self) -> None:
        await self.link.close()

    def log_start(self) -> None:
        _log.info("router: %s", self.link.url)
        if self._token is not None and self.link.exposed:
            _log.warning(
                "--router-token and the hashes of requests go to %s without TLS: use https",
                self.link.url,
            )


class RecordingPart(ProcessPart):
    """Records this process in a file, with ``--record``."""

    def __init__(
        self, config: FrontendConfig, service: RoutingService, recordings: Recordings
    ) -> None:
        self._config = config
        self._service = service
        self._recordings = recordings

    async def prepare(self) -> None:
        path, most = self._config.record, self._config.record_bytes
        if path is None:
            return
        if self._config.router_url is not None:
            raise StartError(
                "--record and --router: set only one of them; record the router process: "
                f"dynctl record --frontend {self._config.router_url.rstrip('/')}"
            )
        try:
            sink = FileSink(path, replace_old=True)
        except UsageProblem as error:
            raise StartError(f"--record {error.message}", error.hint) from None
        _log.info("recording to %s, at most %d bytes, then a new file begins", path, most)
        self._service.tasks.start(
            "recording", partial(self._recordings.keep_file, sink, max_bytes=most)
        )


class TokenizerPart(ProcessPart):
    """Compares the tokens of this process with those of the engines, again and again."""

    def __init__(self, service: RoutingService, fleet: Fleet) -> None:
        self._tasks = service.tasks
        self._check = TokenizerCheck(service, fleet)

    async def serve(self) -> None:
        self._tasks.start("tokenizer check", self._compare_often)

    async def _compare_often(self) -> None:
        while True:
            await self._check.run()
            await asyncio.sleep(_CHECK_S)


class TracesPart(ProcessPart):
    """Shows a collector that takes no spans as a condition."""

    def __init__(self, export: SpanExport, endpoint: str, service: RoutingService) -> None:
        self._export = export
        self._endpoint = endpoint
        self._service = service

    async def serve(self) -> None:
        self._service.tasks.start("trace export", self._watch)

    async def _watch(self) -> None:
        while True:
            problem, counts = self._export.problem, self._export.counts()
            if problem:
                lost = counts["failed"] + counts["dropped"]
                message = f"{lost:,} spans are lost: {problem}"
                self._service.set_condition(codes.TRACES_NOT_EXPORTED, self._endpoint, message)
            else:
                self._service.clear_condition(codes.TRACES_NOT_EXPORTED, self._endpoint)
            await asyncio.sleep(_TRACES_S)

    async def close(self) -> None:
        await asyncio.to_thread(self._export.close)
