"""``serve indexer``: which engines hold the start of a prompt, over HTTP in the shape of Dynamo's
indexer.

Engines are registered by the address of their KV events, at the start or over HTTP. A snapshot in a
directory makes a restart short: streams continue after the last batch in it, and what came since is
read from the engines' replay sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from dynctl import version
from dynctl.base.decode_errors import WireError
from dynctl.base.tasks import Supervisor
from dynctl.documents.index_dump import RegisteredRank, encode_dump
from dynctl.health import conditions as codes
from dynctl.serving.engines.failures import control_failure
from dynctl.serving.http.auth import checked_token, guarded
from dynctl.serving.http.bodies import PEER_SHARE
from dynctl.serving.http.connections import Listeners, descriptors
from dynctl.serving.http.index_exchange import KEPT_S, PATH, PEER_S, ranks_at
from dynctl.serving.http.start import (
    StartError,
    announce,
    listen,
    settle_garbage_collector,
    settle_malloc,
)
from dynctl.serving.routing.config import INDEX_BYTES_PER_BLOCK, Limits
from dynctl.serving.routing.index_snapshot import (
    SnapshotDirectory,
    SnapshotProblem,
    UnusableDirectory,
)
from dynctl.serving.routing.refusal import HttpError
from dynctl.serving.routing.standalone_index import (
    DEFAULT_GROUP,
    DESCRIPTORS_PER_RANK,
    MOST_RANKS,
    Key,
    Listener,
    Match,
    Partition,
    RegistrationRefused,
    StandaloneIndex,
    checked_listener,
)
from dynctl.serving.services.dynamo_service import DynamoService, ServiceError
from dynctl.serving.telemetry.exposition import CONTENT_TYPE, Counter, Family, Histogram, samples
from dynctl.serving.telemetry.log_format import configure_logging
from dynctl.wire.dynamo.events import RouterEvent, router_event_from, router_event_map
from dynctl.wire.dynamo.service_bodies import (
    I64,
    REQUIRED,
    TEXT,
    U32,
    U64,
    Field,
    Shape,
    many,
    optional,
)
from router_core import local_block_hashes, to_unsigned

_log = logging.getLogger(__name__)

_GROUP: Final = Field(TEXT, DEFAULT_GROUP)
_TEXT: Final = Field(TEXT, REQUIRED)
_MAYBE: Final = Field(optional(TEXT))
REGISTER: Final = Shape(
    "RegisterRequest",
    {
        "instance_id": Field(U64, REQUIRED),
        "endpoint": _TEXT,
        "model_name": _TEXT,
        "routing_group": _GROUP,
        "tenant_id": _GROUP,
        "block_size": Field(U32, REQUIRED),
        "dp_rank": Field(optional(U32)),
        "replay_endpoint": _MAYBE,
        "additional_salt": _MAYBE,
    },
)
UNREGISTER: Final = Shape(
    "UnregisterRequest",
    {
        "instance_id": Field(U64, REQUIRED),
        "model_name": _TEXT,
        "routing_group": _MAYBE,
        "tenant_id": _MAYBE,
        "dp_rank": Field(optional(U32)),
    },
)
QUERY: Final = Shape(
    "QueryRequest",
    {
        "token_ids": Field(many(U32), REQUIRED),
        "model_name": _TEXT,
        "routing_group": _GROUP,
        "tenant_id": _GROUP,
        "lora_name": _MAYBE,
        "cache_salt": _MAYBE,
    },
)
QUERY_BY_HASH: Final = Shape(
    "QueryByHashRequest",
    {
        "block_hashes": Field(many(I64), REQUIRED),
        "model_name": _TEXT,
        "routing_group": _GROUP,
        "tenant_id": _GROUP,
        "cache_salt": _MAYBE,
    },
)
PEER: Final = Shape("PeerRequest", {"url": _TEXT})

MOST_PEERS: Final = 256
#: Descriptors that are left to connections of clients, files and sockets of the process itself.
_OWN_DESCRIPTORS: Final = 256
#: Dumps that are made or sent at the same time: each has all blocks as text. One address has three
#: quarters of them.
MOST_DUMPS: Final = 4
_PIECE_BYTES: Final = 1 << 20
#: Bytes of another indexer's dump.
_DUMP_BYTES: Final = 1 << 30
_SETTLE_S: Final = 5.0
#: Seconds to wait at the start for what the engines repeat.
_FIRST_READ_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Settings of an indexer.

    ``engines``: the ranks to follow from the start. ``peers``: indexers whose index this one begins
    with. ``snapshot``: the directory of the snapshot, None: none; it is written every
    ``snapshot_interval_s`` seconds in which events arrived, and at the end. A client has ``dump_s``
    seconds to read a dump.
    """

    host: str = "127.0.0.1"
    port: int = 8090
    engines: tuple[RegisteredRank, ...] = ()
    peers: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    snapshot: Path | None = None
    snapshot_interval_s: float = 30.0
    dump_s: float = 120.0
    index_memory_bytes: int = 4 * 1024**3
    log_format: str = "text"
    log_level: str = "info"
    announce: bool = False
    limits: Limits = field(default_factory=Limits)


class IndexerProcess:
    """An indexer that can be started and stopped on a running event loop."""

    def __init__(self, config: IndexerConfig) -> None:
        try:
            checked_token(config.token)
        except ValueError as error:
            raise StartError(str(error)) from None
        self.config = config
        self.tasks = Supervisor()
        most = config.index_memory_bytes // INDEX_BYTES_PER_BLOCK
        most_ranks = min(MOST_RANKS, (descriptors() - _OWN_DESCRIPTORS) // DESCRIPTORS_PER_RANK)
        self.index = StandaloneIndex(
            time.monotonic, time.time, self.tasks, most, max(1, most_ranks)
        )
        self.peers: dict[str, None] = dict.fromkeys(config.peers)
        self.snapshots = None if config.snapshot is None else SnapshotDirectory(config.snapshot)
        self.metrics = IndexerMetrics(self.index)
        #: Key -> block size and events of another indexer, for engines that are not here yet.
        self._offered: dict[Key, tuple[int, list[RouterEvent]]] = {}
        self._listeners = Listeners(config.limits)
        self._saved: tuple[int, int] | None = None
        self._sending = asyncio.Lock()
        #: The clients whose dumps are made or sent.
        self.dumps: list[str] = []
        self.port = config.port

    @property
    def url(self) -> str:
        host = self.config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    # -- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the snapshot and the peers, follow the engines, then listen."""
        config = self.config
        listener = listen(config.host, config.port, "--port")
        self.port = listener.getsockname()[1]
        try:
            self.index.runtime.start()
            restored = await self._restore()
            await self._recover()
            for engine in config.engines:
                self._follow(engine)
            for rank in restored:
                if (rank.worker_id, rank.dp_rank) not in {
                    (given.worker_id, given.dp_rank) for given in config.engines
                }:
                    self._follow(rank)
            await self.index.runtime.first_read(_FIRST_READ_S)
            asyncio.get_running_loop().call_later(KEPT_S, self._forget_offers)
            await self._listeners.serve_clients(self.build_app(), listener)
        except BaseException:
            listener.close()
            await self.close()
            raise
        if self.snapshots is not None:
            self.tasks.start("snapshot", self._save_often)
        _log.info(
            "indexer on %s: ranks: %d, models: %d",
            self.url,
            len(self.index.registered()),
            len(self.index.partitions),
        )

    async def close(self) -> None:
        """Write the last snapshot and stop everything."""
        if self.snapshots is not None and self.index.instances:
            await self.save()
        await self.tasks.close()
        await self._listeners.close()
        await self.index.runtime.close()

    def build_app(self) -> web.Application:
        service = DynamoService(self.config.token, plain=True)
        routes = [
            web.get("/health", _health),
            web.get("/metrics", self._metrics),
            web.get(PATH, guarded(self._send_index, self.config.token), allow_head=False),
            service.get("/workers", self._workers),
            web.get("/dump", self._dump, allow_head=False),
            service.get("/peers", lambda _: list(self.peers)),
            service.post("/register", REGISTER, self._register, writes=True),
            service.post("/unregister", UNREGISTER, self._unregister, writes=True),
            service.post("/register_peer", PEER, self._register_peer, writes=True),
            service.post("/deregister_peer", PEER, self._deregister_peer, writes=True),
            service.post("/query", QUERY, self._query),
            service.post("/query_by_hash", QUERY_BY_HASH, self._query_by_hash),
        ]
        return service.application(routes, self.config.limits, self.metrics.observe)

    # -- endpoints -------------------------------------------------------------------------

    def _register(self, _: web.Request, body: dict[str, Any]) -> tuple[int, Any]:
        endpoint, replay = body["endpoint"], body["replay_endpoint"]
        problem = checked_listener(endpoint, replay)
        if problem is not None:
            raise ServiceError(400, problem)
        key = (body["model_name"], body["routing_group"])
        rank = body["dp_rank"] or 0
        try:
            self._add(
                body["instance_id"], rank, key, body["block_size"], Listener(endpoint, replay)
            )
        except RegistrationRefused as error:
            raise ServiceError(409, str(error)) from None
        return 201, {"status": "ok"}

    def _unregister(self, _: web.Request, body: dict[str, Any]) -> tuple[int, Any]:
        group = body["routing_group"]
        instance_id, model = body["instance_id"], body["model_name"]
        known = self.index.instances.get(instance_id)
        if group is None:
            # Without a group Dynamo looks in all of the model's, and takes all ranks.
            other = known is not None and known.key[0] != model
            key = None if known is None or not other else (model, DEFAULT_GROUP)
            rank = None
        else:
            key, rank = (model, group), body["dp_rank"]
        try:
            self.index.unregister(instance_id, key, rank)
        except RegistrationRefused as error:
            raise ServiceError(404 if error.missing else 409, str(error)) from None
        return 200, {"status": "ok"}

    def _register_peer(self, _: web.Request, body: dict[str, Any]) -> tuple[int, Any]:
        if len(self.peers) >= MOST_PEERS and body["url"] not in self.peers:
            raise ServiceError(409, f"{MOST_PEERS} peers are registered, the maximum")
        self.peers[body["url"]] = None
        return 201, {"status": "ok"}

    def _deregister_peer(self, _: web.Request, body: dict[str, Any]) -> tuple[int, Any]:
        if body["url"] not in self.peers:
            raise ServiceError(404, "peer not found")
        del self.peers[body["url"]]
        return 200, {"status": "ok"}

    def _query(self, _: web.Request, body: dict[str, Any]) -> tuple[int, Any]:
        key = (body["model_name"], body["routing_group"])
        size = self._block_size(key)
        hashes = (
            local_block_hashes(
                body["token_ids"],
                size,
                lora_name=body["lora_name"] or None,
                cache_namespace=body["cache_salt"] or None,
                is_eagle=self.index.partitions[key].pairs,
            )
            if size
            else []
        )
        return 200, scores(self.index.matches(key, hashes), size)

    def _query_by_hash(self, _: web.Request, body: dict[str, Any]) -> tuple[int, Any]:
        if body["cache_salt"] is not None:
            raise ServiceError(
                400,
                "cache_salt is not accepted by /query_by_hash; block_hashes must already include "
                "the intended cache salt",
            )
        key = (body["model_name"], body["routing_group"])
        size = self._block_size(key)
        hashes = [to_unsigned(block_hash) for block_hash in body["block_hashes"]]
        return 200, scores(self.index.matches(key, hashes), size)

    def _block_size(self, key: Key) -> int:
        partition = self.index.partitions.get(key)
        if partition is None:
            raise ServiceError(404, f"no indexer for model={key[0]} routing_group={key[1]}")
        return partition.block_size

    def _workers(self, http: web.Request) -> list[dict[str, Any]]:
        model, group = http.query.get("model_name"), http.query.get("routing_group")
        return [
            {
                "instance_id": instance.instance_id,
                "source": "zmq",
                "status": "active",
                "model_name": instance.key[0],
                "routing_group": instance.key[1],
                "block_size": instance.block_size,
                "endpoints": {str(rank): at.endpoint for rank, at in instance.listeners.items()},
                "listeners": {
                    str(rank): {"endpoint": at.endpoint, "status": "active"}
                    for rank, at in instance.listeners.items()
                },
            }
            for instance in self.index.instances.values()
            if model in (None, instance.key[0]) and group in (None, instance.key[1])
        ]

    async def _dump(self, http: web.Request) -> web.StreamResponse:
        peer = http.remote or ""
        share = int(MOST_DUMPS * PEER_SHARE)
        if len(self.dumps) >= MOST_DUMPS or self.dumps.count(peer) >= share:
            raise _busy(503, f"{MOST_DUMPS} dumps at a time, {share} of one client; try again")
        self.dumps.append(peer)
        response = web.StreamResponse(headers={"content-type": "application/json"})
        try:
            async with asyncio.timeout(self.config.dump_s):
                async with self._sending:
                    body = await asyncio.to_thread(_written_dump, self.index.copies())
                response.content_length = len(body)
                await response.prepare(http)
                for at in range(0, len(body), _PIECE_BYTES):
                    await response.write(body[at : at + _PIECE_BYTES])
                await response.write_eof()
        except TimeoutError:
            if not response.prepared:
                raise _busy(503, "the dumps of other clients take long; try again") from None
            raise ConnectionResetError("the dump was not read in time") from None
        finally:
            self.dumps.remove(peer)
        return response

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self.metrics.text().encode(), headers={"content-type": CONTENT_TYPE}
        )

    async def _send_index(self, http: web.Request) -> web.StreamResponse:
        if self._sending.locked():
            raise _busy(409, "another index is being sent; try again")
        async with self._sending:
            try:
                frames = await self._frames()
            except TimeoutError:
                raise _busy(503, "events arrive faster than they are applied") from None
            response = web.StreamResponse(headers={"content-type": "application/octet-stream"})
            await response.prepare(http)
            while frame := await asyncio.to_thread(next, frames, b""):
                await response.write(frame)
            await response.write_eof()
            return response

    # -- snapshots and peers ---------------------------------------------------------------

    async def save(self) -> None:
        """Write the snapshot, if anything changed since the last one."""
        assert self.snapshots is not None
        version_now = (sum(self.index.applied.values()), len(self.index.registered()))
        if version_now == self._saved:
            return
        try:
            size = await self.snapshots.save(await self._frames())
        except (SnapshotProblem, TimeoutError) as error:
            text = str(error) or "events arrive faster than they are applied"
            self._not_written(text)
            return
        self._saved = version_now
        self.index.conditions.clear(codes.SNAPSHOT_NOT_WRITTEN, str(self.snapshots.path))
        _log.debug("snapshot written: %d bytes", size)

    def _not_written(self, problem: str) -> None:
        assert self.snapshots is not None
        self.index.conditions.set(codes.SNAPSHOT_NOT_WRITTEN, str(self.snapshots.path), problem)
        _log.warning("snapshot not written: %s", problem)

    async def _frames(self) -> Iterator[bytes]:
        registered = self.index.registered()
        ranks = await self.index.capture(_SETTLE_S)
        return encode_dump(version(), ranks, registered)

    async def _save_often(self) -> None:
        while True:
            await asyncio.sleep(self.config.snapshot_interval_s)
            await self.save()

    async def _restore(self) -> list[RegisteredRank]:
        """Seed the streams with the snapshot; the ranks that were registered."""
        if self.snapshots is None:
            return []
        began = time.monotonic()
        try:
            found = await self.snapshots.load()
        except UnusableDirectory as error:
            self._not_written(str(error))
            return []
        except SnapshotProblem as error:
            subject = str(self.snapshots.path)
            self.index.conditions.set(codes.SNAPSHOT_REFUSED, subject, str(error))
            _log.warning("snapshot refused: %s; the index starts empty", error)
            return []
        if found is None:
            return []
        head, ranks = found
        blocks = self.index.seed(ranks)
        took = time.monotonic() - began
        _log.info("snapshot read in %.2f s: ranks: %d, blocks: %d", took, len(ranks), blocks)
        return list(head.registered)

    async def _recover(self) -> None:
        """Begin with the index of the first peer that answers."""
        for url in list(self.peers):
            try:
                async with asyncio.timeout(PEER_S):
                    await self._take(url.rstrip("/"))
            except TimeoutError:
                problem = f"not complete after {PEER_S:g} s"
            except (ValueError, WireError) as error:
                problem = str(error)
            except (aiohttp.ClientError, OSError) as error:
                problem = str(control_failure("its indexer", error))
            else:
                return
            _log.warning("index of %s: %s", url, problem)

    async def _take(self, url: str) -> None:
        """The index of one of our indexers with positions, else the events of Dynamo's dump."""
        seeds, count = self.index.runtime.seeds, 0
        with contextlib.suppress(ValueError):
            ranks = ranks_at(url + PATH, self.config.token)
            async with contextlib.aclosing(ranks):
                async for rank in ranks:
                    if (rank.worker_id, rank.dp_rank) not in seeds:
                        count += self.index.seed([rank])
            _log.info("index of %s: blocks: %d", url, count)
            return
        async with (
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
            session.get(url + "/dump", allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise ValueError(f"it answered {response.status} to GET /dump")
            data = bytearray()
            async for piece in response.content.iter_chunked(1 << 20):
                data += piece
                if len(data) > _DUMP_BYTES:
                    raise ValueError(f"its dump has more than {_DUMP_BYTES:,} bytes")
        self._offered = await asyncio.to_thread(_read_dump, bytes(data))
        count = sum(len(events) for _, events in self._offered.values())
        _log.info("index of %s: events: %d", url, count)

    def _follow(self, one: RegisteredRank) -> None:
        try:
            self._add(
                one.worker_id,
                one.dp_rank,
                (one.model, one.routing_group),
                one.block_size,
                Listener(one.endpoint, one.replay),
            )
        except RegistrationRefused as error:
            _log.warning("not followed: %s", error)

    def _add(
        self, instance_id: int, rank: int, key: Key, block_size: int, listener: Listener
    ) -> None:
        seeded = (instance_id, rank) in self.index.runtime.seeds
        self.index.register(instance_id, rank, key, block_size, listener)
        size, events = self._offered.get(key, (0, []))
        if not seeded and size == block_size:
            own = [
                event for event in events if (event.worker_id, event.dp_rank) == (instance_id, rank)
            ]
            self.index.take(key, size, own)

    def _forget_offers(self) -> None:
        self._offered.clear()
        self.index.runtime.seeds.clear()


def scores(matches: Iterable[Match], block_size: int) -> dict[str, Any]:
    """The answer to a query, in tokens. What lower tiers continue is added to what is above."""
    by_rank: dict[str, dict[str, int]] = {}
    instances: dict[str, dict[str, Any]] = {}
    for holder in matches:
        name, rank = str(holder.instance_id), str(holder.dp_rank)
        gpu = holder.device * block_size
        cpu = gpu + holder.host * block_size
        disk = cpu + holder.disk * block_size
        if gpu:
            by_rank.setdefault(name, {})[rank] = gpu
        row = instances.setdefault(
            name, {"longest_matched": 0, "gpu": 0, "dp": {}, "cpu": 0, "disk": 0}
        )
        row["dp"][rank] = gpu
        for tier, tokens in (("gpu", gpu), ("cpu", cpu), ("disk", disk)):
            row[tier] = max(row[tier], tokens)
        row["longest_matched"] = max(row["longest_matched"], disk)
    return {"scores": by_rank, "frequencies": [], "instances": instances}


def _read_dump(data: bytes) -> dict[Key, tuple[int, list[RouterEvent]]]:
    """The events of ``GET /dump``; raises ValueError for another document."""
    try:
        document = msgspec.json.decode(data, type=dict[str, dict[str, Any]])
        found = {}
        for name, entry in document.items():
            model, _, group = name.partition(":")
            size = entry["block_size"]
            if not isinstance(size, int):
                raise TypeError
            found[model, group] = (size, [router_event_from(event) for event in entry["events"]])
    except (msgspec.MsgspecError, KeyError, TypeError, WireError):
        raise ValueError("its dump is not that of an indexer") from None
    return found


def _written_dump(partitions: Mapping[Key, Partition]) -> bytes:
    return msgspec.json.encode(
        {
            f"{model}:{group}": {
                "block_size": partition.block_size,
                "events": [router_event_map(event) for event in partition.events()],
            }
            for (model, group), partition in partitions.items()
        }
    )


def _busy(status: int, text: str) -> HttpError:
    return HttpError(status, text, "overloaded", "index_busy")


async def _health(_: web.Request) -> web.Response:
    return web.Response(status=200)


_BOUNDS: Final = tuple(0.0001 * 2**n for n in range(20))
_REQUESTS: Final = Family(
    "dynamo_kvindexer_requests_total", "counter", "Total HTTP requests", ("endpoint", "method")
)
_ERRORS: Final = Family(
    "dynamo_kvindexer_errors_total",
    "counter",
    "HTTP error responses (4xx/5xx)",
    ("endpoint", "status_class"),
)
_SECONDS: Final = Family(
    "dynamo_kvindexer_request_duration_seconds",
    "histogram",
    "HTTP request latency",
    ("endpoint",),
    bounds=_BOUNDS,
)
_GAUGES: Final[Mapping[str, Family]] = {
    "models": Family("dynamo_kvindexer_models", "gauge", "Number of active model indexers"),
    "workers": Family("dynamo_kvindexer_workers", "gauge", "Number of registered worker instances"),
    "listeners": Family(
        "dynamo_kvindexer_listeners", "gauge", "Number of ZMQ listeners by status", ("status",)
    ),
    "applied": Family(
        "dynamo_kvrouter_kv_cache_events_applied",
        "counter",
        "Total number of KV cache events applied to index",
        ("event_type", "status"),
    ),
    "blocks": Family("dynctl_index_blocks", "gauge", "Distinct blocks in the index", ("model",)),
    "condition": Family(
        "dynctl_condition", "gauge", "1 = the condition holds for the subject", ("code", "subject")
    ),
}


class IndexerMetrics:
    """``GET /metrics`` with the names of Dynamo's indexer, and the conditions."""

    def __init__(self, index: StandaloneIndex) -> None:
        self._index = index
        self._requests, self._errors = Counter(_REQUESTS), Counter(_ERRORS)
        self._seconds = Histogram(_SECONDS)

    def observe(self, path: str, method: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.inc((path, method))
        self._seconds.observe(seconds, (path,))
        if status >= 400:
            self._errors.inc((path, f"{status // 100}xx"))

    def text(self) -> str:
        index = self._index
        states = {"active": len(index.registered()), "failed": 0, "paused": 0, "pending": 0}
        blocks: dict[str, int] = {}
        for (model, _), partition in index.partitions.items():
            blocks[model] = blocks.get(model, 0) + partition.index.node_count
        return "".join(
            (
                self._errors.text(),
                samples(_GAUGES["listeners"], [((k,), v) for k, v in states.items()]),
                samples(_GAUGES["models"], [((), len(index.partitions))]),
                self._seconds.text(),
                self._requests.text(),
                samples(_GAUGES["workers"], [((), len(index.instances))]),
                samples(_GAUGES["applied"], [((k, "ok"), v) for k, v in index.applied.items()]),
                samples(_GAUGES["blocks"], [((k,), v) for k, v in blocks.items()]),
                samples(_GAUGES["condition"], [((c.code, c.subject), 1) for c in index.conditions]),
            )
        )


def run_indexer(config: IndexerConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Blocks. Raises StartError."""
    try:
        configure_logging(config.log_format, config.log_level)
    except ValueError as error:
        raise StartError(str(error)) from None
    return uvloop.run(_run(config))


async def _run(config: IndexerConfig) -> int:
    settle_malloc()
    process = IndexerProcess(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await process.start()
    settle_garbage_collector()
    try:
        if config.announce:
            announce({"indexer": process.url, "url": process.url, "port": process.port})
        await stop.wait()
    finally:
        await process.close()
    return 0
