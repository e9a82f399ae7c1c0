"""An engine as a worker of a Dynamo fleet: waits for it, registers it, follows it, deregisters it.

The worker is registered only while the engine answers, is attached once, and has the tokenizer of
the other workers of its model. What holds it back is a condition, on the system port and in the
log.
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
from xxhash import xxh3_64_hexdigest

from dynctl.adapters.dynamo.publishing import EventPlaneName, TopicPublisher, open_topic
from dynctl.adapters.dynamo.registration import Registration
from dynctl.adapters.dynamo.request_server import (
    AnswerLost,
    PlaneRequest,
    RequestRefusal,
    RequestServer,
    ServerLimits,
)
from dynctl.adapters.nats.requests import NatsListener
from dynctl.adapters.ports import Discovery, Registrar, StreamCode, StreamCondition, StreamValue
from dynctl.adapters.zmq.kv_event_source import KvEventSource
from dynctl.adapters.zmq.kv_events import ZmqKvEvents
from dynctl.base.errors import DynctlError, Unreachable, UsageProblem, network_reason
from dynctl.base.tasks import Supervisor, end_tasks
from dynctl.base.worker_environment import TopologyConfig
from dynctl.health import conditions as codes
from dynctl.serving.attach.card import CardOptions, ModelFiles, build_card, other_files
from dynctl.serving.attach.events import RankEvents
from dynctl.serving.attach.generation import Generation
from dynctl.serving.attach.system_server import SystemServer
from dynctl.serving.engines.facts import (
    EngineReader,
    bootstrap_address,
    build_worker,
    contradictions,
    event_sources,
)
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.http_client import Upstream
from dynctl.serving.engines.tokenizer_check import TEXT, difference_of
from dynctl.serving.engines.worker_spec import WorkerSpec, WorkerSpecError
from dynctl.serving.http.connections import descriptors
from dynctl.serving.routing.config import Limits
from dynctl.serving.routing.prompts import Prompt, PromptTokenizers
from dynctl.tokenization import ModelTokenizer, TokenizationError
from dynctl.tokenization.model_directory import getting_files
from dynctl.wire.dynamo.discovery import (
    KV_EVENTS,
    KV_METRICS,
    EndpointId,
    EventSource,
    Instance,
    ModelCard,
    encode_entry,
    parse_entry,
)
from dynctl.wire.dynamo.engine_request import ReceivedRequest
from dynctl.wire.dynamo.events import KvMetrics, encode_kv_metrics
from dynctl.wire.dynamo.recovery import RecoveryQuery
from dynctl.wire.engine_kinds.facts import EngineFacts
from dynctl.wire.engine_kinds.kind import EngineKind
from dynctl.wire.engine_kinds.table import kind_named
from dynctl.wire.engine_kinds.tokens import EngineTarget
from router_core import LoadReported, Role, Worker

RequestPlaneName = Literal["tcp", "nats"]

READ_S: Final = 3.0
"""For one control request to the engine."""
_RETRY_S: Final = 1.0
_PROBE_S: Final = 2.0
_LOAD_S: Final = 1.0
_LOAD_AGAIN_S: Final = 5.0
_MISSED: Final = 3
"""Health probes in a row without an answer after which an engine counts as down."""
_FIRST_EVENTS_S: Final = 5.0
_GRACE_S: Final = 0.3
"""How long requests are accepted after deregistration: frontends hear of it a moment later."""
_CLAIM_S: Final = 5.0
_DIAL_S: Final = 1.0
_STREAM_PROBLEMS: Final = frozenset(
    {StreamCode.STREAM_DISCONNECTED, StreamCode.EVENTS_LOST, StreamCode.EVENTS_OVERFLOW}
)

_log = logging.getLogger(__name__)


class AttachedTwice(DynctlError):
    """Another process has attached the engine already."""

    exit_code = DynctlError.exit_code.NO


@dataclass(frozen=True, slots=True)
class AttachConfig:
    """``host`` is the address of the request plane, of the event plane and of the system port.
    Requests over NATS need no address.

    ``system_port`` None: no system port, and the card has paths of files. ``drain_s``: for running
    requests after SIGTERM.
    """

    engine: WorkerSpec
    endpoint: EndpointId
    files: ModelFiles
    host: str = "127.0.0.1"
    port: int = 0
    system_port: int | None = 0
    event_plane: EventPlaneName = "zmq"
    request_plane: RequestPlaneName = "tcp"
    nats_servers: str = ""
    kind: EngineKind | None = None
    api_key: str | None = field(default=None, repr=False)
    block_size: int = 16
    topology: TopologyConfig | None = None
    options: CardOptions = field(default_factory=CardOptions)
    limits: Limits = field(default_factory=Limits)
    drain_s: float = 30.0


@dataclass(slots=True)
class _Attached:
    """The engine as it was found."""

    worker: Worker
    facts: EngineFacts
    target: EngineTarget
    ranks: list[RankEvents]
    streams: list[asyncio.Task[None]]
    metrics: TopicPublisher
    sending: list[asyncio.Task[None]]


class Sidecar:
    """Runs on one event loop; :meth:`run` until it is cancelled, then :meth:`stop`."""

    def __init__(
        self,
        config: AttachConfig,
        discovery: Discovery,
        registrar: Registrar,
        tokenizer: ModelTokenizer,
    ) -> None:
        self.config = config
        self.conditions = codes.Conditions(time.time)
        self.upstream = Upstream(config.limits)
        self.nats: NatsListener | None = None
        if config.request_plane == "nats":
            self.nats = NatsListener(config.nats_servers, report=self._request_plane_problem)
        # Each answer has a connection to its requester and one to the engine.
        self.server = RequestServer(
            config.host,
            config.port,
            nats=self.nats,
            limits=ServerLimits(
                connections=min(1024, descriptors() // 4), requests=min(2048, descriptors() // 8)
            ),
        )
        self.system = SystemServer(
            ready=lambda: self.registration.instance_id is not None,
            conditions=lambda: self.conditions,
            metrics=self._metric_values,
            set_taints=self._set_taints,
            files=config.files,
            labels={
                "dynamo_namespace": config.endpoint.namespace,
                "dynamo_component": config.endpoint.component,
            },
        )
        self.registration = Registration(
            registrar, self._entries, self._registration_problem, self.server.listening
        )
        self.tasks = Supervisor(self._task_failed, self._task_recovered)
        self._discovery = discovery
        self._tokenizer = tokenizer
        self._reader = EngineReader(self.upstream, READ_S)
        self._attached: _Attached | None = None
        self._detaching: asyncio.Task[None] | None = None
        self._taints = config.options.taints
        self._suspect = asyncio.Event()
        self._served_at = ""
        self._claimed = False
        self._lock = EndpointId(
            config.endpoint.namespace,
            config.endpoint.component,
            f"dynctl_attach_{engine_identity(config.engine.url)}",
        )
        self._generation = Generation(self.upstream, self._target, self._engine_failed)

    async def start(self) -> None:
        """Listen. Raises StartError or OSError; nothing is registered yet."""
        config = self.config
        self.upstream.start()
        if config.api_key is not None:
            self.upstream.authorize(config.engine.url, config.api_key)
        endpoint = config.endpoint
        self.server.serve(
            endpoint, self._generation.handle, body=ReceivedRequest, admit=self._admit
        )
        self.server.serve(self._lock, _identify)
        try:
            await self.server.start()
        except OSError as error:
            raise UsageProblem(
                f"cannot listen at {config.host}:{config.port}: {network_reason(error)}",
                "Set a free address of this host: --host, --request-port.",
            ) from error
        if config.system_port is not None:
            await self.system.start(config.host, config.system_port)
            host = f"[{config.host}]" if ":" in config.host else config.host
            self._served_at = f"http://{host}:{self.system.port}"

    async def run(self) -> None:
        """Attach the engine, again and again. Raises AttachedTwice."""
        while True:
            facts = await self._wait_for_engine()
            if facts is not None:
                try:
                    if await self._attach(facts):
                        await self._serve()
                finally:
                    await self._detach()
            await asyncio.sleep(_RETRY_S)

    async def stop(self, running: "asyncio.Task[Any]") -> None:
        """Deregister and finish running requests; ``running`` is the task of :meth:`run`."""
        await self.registration.withdraw()
        if self._attached is not None:
            await asyncio.sleep(_GRACE_S)
        if not await self.server.drain(self.config.drain_s):
            _log.warning("%d requests did not end in time", self.server.running)
        await end_tasks([running])

    async def close(self) -> None:
        """Close everything at once."""
        await self.registration.close()
        await self._detach()
        await self.tasks.close()
        await self.server.close()
        await self.system.close()
        await self.upstream.close()

    # -- the engine

    async def _wait_for_engine(self) -> EngineFacts | None:
        """The facts of an engine that answers, None if it does not yet."""
        spec = self.config.engine
        if (failure := await self._probe()) is not None:
            self._hold(codes.ENGINE_NOT_READY, failure.message)
            return None
        facts = await self._reader.facts(spec)
        if facts.model is None:
            self._hold(codes.ENGINE_NOT_READY, f"{spec.url}/v1/models names no model yet")
            return None
        return facts

    async def _probe(self) -> UpstreamFailure | None:
        """Why the engine is not ready, None if it is."""
        url = f"{self.config.engine.url}/health"
        try:
            status, _ = await self.upstream.get(url, READ_S)
        except UpstreamFailure as failure:
            return failure
        problem = f"{url} returned status {status}; expected 200"
        return None if status == 200 else UpstreamFailure("status", problem, status=status)

    async def _attach(self, facts: EngineFacts) -> bool:
        """Whether the engine is registered now. Raises AttachedTwice."""
        config, spec = self.config, self.config.engine
        try:
            worker = _with_topology(
                build_worker(spec, facts, model=None, block_size=config.block_size),
                config.topology,
            )
            sources = [
                replace(source, salt_each_block=True)
                for source in event_sources(spec, facts, worker)
            ]
        except (WorkerSpecError, ValueError) as error:
            self._hold(codes.ENGINE_NOT_READY, str(error))
            return False
        if worker.role is Role.PREFILL and spec.role is None:
            # The endpoint was chosen by the role of --engine, before the engine answered.
            self._hold(
                codes.ENGINE_NOT_READY,
                f"{spec.url} is a prefill engine; add role=prefill to --engine",
            )
            return False
        kind = config.kind or kind_named(facts.kind)
        if kind.token_api is None:
            reason = f"{kind.label} has no API for token ids; set --engine-type"
            self._hold(codes.ENGINE_NOT_READY, reason)
            return False
        api = kind.token_api()
        if (differs := contradictions(spec, facts)) is not None:
            self._hold(codes.SPEC_DIFFERS_FROM_ENGINE, differs)
        target = EngineTarget(
            spec.url,
            worker.model if worker.model in facts.models else facts.model or worker.model,
            api,
            worker.role,
            len(worker.ranks),
            worker.runtime_config.context_length,
            facts.adapters,
        )
        problem = await self._tokenizer_problem(target)
        if problem is not None:
            self._hold(codes.TOKENIZER_DIFFERS, problem)
            return False
        self.conditions.clear(codes.TOKENIZER_DIFFERS, spec.name)
        try:
            await self._check_others(worker)
            await self._follow(worker, facts, target, sources)
            self._claimed = False
            await self.registration.start()
            await self._check_others(None)
            self._claimed = True
            instance_id = await self.registration.start()
        except Unreachable as error:
            self._hold(codes.REGISTRATION_INTERRUPTED, error.message)
            return False
        except _FilesDiffer as error:
            self._hold(codes.MODEL_FILES_DIFFER, str(error))
            return False
        for code in (
            codes.ENGINE_NOT_READY,
            codes.REGISTRATION_INTERRUPTED,
            codes.MODEL_FILES_DIFFER,
        ):
            self.conditions.clear(code, spec.name)
        _log.info(
            "registered %s as instance %x of %s: %s, %d blocks of %d tokens, %s",
            worker.model,
            instance_id,
            config.endpoint,
            worker.role.value,
            worker.runtime_config.total_kv_blocks or 0,
            worker.block_size,
            f"KV events of {len(sources)} rank{'s' * (len(sources) != 1)}"
            if sources
            else "no KV events",
        )
        return True

    async def _follow(
        self, worker: Worker, facts: EngineFacts, target: EngineTarget, sources: list[KvEventSource]
    ) -> None:
        """Read the engine's events, and open what publishes them."""
        endpoint = self.config.endpoint
        metrics = self._open(KV_METRICS)
        sending = [self.tasks.start("kv metrics", metrics.run)]
        attached = _Attached(worker, facts, target, [], [], metrics, sending)
        self._attached = attached
        for source in sources:
            rank = RankEvents(self._open(KV_EVENTS), source.dp_rank)
            attached.ranks.append(rank)
            self.server.serve(rank.recovery_endpoint(endpoint), rank.answer, body=RecoveryQuery)
            attached.sending.append(self.tasks.start("kv events", rank.publisher.run))
            stream = ZmqKvEvents(source, self._taker(rank), time.monotonic)
            attached.streams.append(self.tasks.start("engine events", stream.run))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_EVENTS_S):
                    await stream.tried()

    async def _serve(self) -> None:
        """Until the engine is down or is another one."""
        load = asyncio.create_task(self._report_load())
        missed, probes = 0, 0
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._suspect.wait(), _PROBE_S)
                suspected = self._suspect.is_set()
                self._suspect.clear()
                failure = await self._probe()
                if failure is None:
                    missed, probes = 0, probes + 1
                    if (suspected or probes % 5 == 0) and await self._engine_changed():
                        return
                    continue
                missed += 1
                # A slow response may be load; without a process nothing is left to wait for.
                if missed >= _MISSED or failure.kind in ("refused", "reset"):
                    self._hold(codes.ENGINE_NOT_READY, failure.message)
                    return
        finally:
            await end_tasks([load])

    async def _engine_changed(self) -> bool:
        """Whether another engine answers now at this address."""
        attached = self._attached
        facts = await self._reader.facts(self.config.engine)
        if attached is None or facts.model is None:
            return False
        known = attached.facts
        same = all(
            getattr(facts, name) == getattr(known, name)
            for name in ("models", "block_size", "total_blocks", "dp", "engine_id")
        )
        if not same:
            _log.warning("%s is another engine now; registering it again", self.config.engine.name)
        return not same

    async def _detach(self) -> None:
        """Deregister at once, and follow nothing any more; completes if it is cancelled."""
        if self._detaching is None or self._detaching.done():
            self._detaching = asyncio.create_task(self._let_go(), name="detach")
        await asyncio.shield(self._detaching)

    async def _let_go(self) -> None:
        await self.registration.withdraw()
        attached, self._attached = self._attached, None
        if attached is None:
            return
        await end_tasks([*attached.streams, *attached.sending])
        for rank in attached.ranks:
            self.server.remove(rank.recovery_endpoint(self.config.endpoint))
            await rank.publisher.close()
        await attached.metrics.close()
        for code in _STREAM_PROBLEMS:
            self.conditions.clear(code, self.config.engine.name)

    async def _tokenizer_problem(self, target: EngineTarget) -> str | None:
        """The difference between --model-path and the engine, if the engine can tokenize."""
        prompt = Prompt(text=TEXT)
        try:
            status, body = await self.upstream.post(
                f"{target.url}/tokenize", prompt.to_tokenize_body(target.model), READ_S
            )
            if status != 200:
                return None
            theirs = msgspec.json.decode(body, type=_Tokenized).tokens
            tokenizers = PromptTokenizers(self._tokenizer)
            ours = list((await tokenizers.tokenize(target.model, prompt)).ids or ())
        except (UpstreamFailure, msgspec.MsgspecError, ValueError):
            return None
        except TokenizationError as error:
            return f"--model-path cannot tokenize: {error}"
        if ours == theirs:
            return None
        return (
            f"--model-path {self.config.files.directory} tokenizes differently from the engine "
            f"({difference_of('prompt', ours, theirs)}); set the model's own directory"
        )

    def _open(self, topic: str) -> TopicPublisher:
        config = self.config
        return open_topic(
            config.endpoint,
            topic,
            plane=config.event_plane,
            host=config.host,
            nats_servers=config.nats_servers,
        )

    def _taker(self, rank: RankEvents) -> Callable[[StreamValue], None]:
        def take(value: StreamValue) -> None:
            rank.take(value)
            if isinstance(value, StreamCondition):
                self._event_condition(value)

        return take

    def _event_condition(self, value: StreamCondition) -> None:
        name = self.config.engine.name
        if value.code == StreamCode.STREAM_CONNECTED:
            self.conditions.clear(codes.STREAM_DISCONNECTED, name)
        elif value.code == StreamCode.INDEX_CURRENT:
            self.conditions.clear(codes.EVENTS_LOST, name)
        elif value.code == StreamCode.EVENTS_KEPT_UP:
            self.conditions.clear(codes.EVENTS_OVERFLOW, name)
        elif value.code in _STREAM_PROBLEMS:
            self._hold(value.code, value.message)
            self._suspect.set()
        else:
            _log.info("KV events of %s: %s: %s", name, value.code, value.message)

    # -- registration

    def _entries(self, instance_id: int) -> Iterable[tuple[str, bytes]]:
        """Everything to register under this id, of the engine as it was found."""
        attached, config = self._attached, self.config
        if attached is None:
            return
        endpoint = config.endpoint
        yield encode_entry(self.server.instance(self._lock, instance_id))
        if not self._claimed:
            return
        for rank in attached.ranks:
            rank.worker_id = instance_id
            target = self.server.instance(rank.recovery_endpoint(endpoint), instance_id)
            channel = rank.publisher.channel
            yield encode_entry(target)
            yield encode_entry(channel)
            yield encode_entry(
                EventSource(
                    endpoint,
                    KV_EVENTS,
                    channel.publisher_id,
                    instance_id,
                    rank.dp_rank,
                    target,
                )
            )
        yield encode_entry(attached.metrics.channel)
        yield encode_entry(self._card(attached.worker, instance_id))
        # Last: a frontend sends requests once it knows the instance.
        yield encode_entry(self.server.instance(endpoint, instance_id))

    def _card(self, worker: Worker, instance_id: int) -> ModelCard:
        config = self.config
        attached = self._attached
        options = replace(
            config.options,
            taints=self._taints,
            served_at=self._served_at,
            bootstrap=None if attached is None else self._bootstrap(attached.facts),
        )
        return build_card(worker, config.endpoint, instance_id, config.files, options)

    def _bootstrap(self, facts: EngineFacts) -> tuple[str, int] | None:
        """Where decode engines meet a prefill engine: at the address that is registered, if the
        engine is named by an address of this host alone."""
        spec = self.config.engine
        address = bootstrap_address(spec, facts)
        if address is None or spec.bootstrap or address[0] not in ("127.0.0.1", "localhost", "::1"):
            return address
        return self.config.host, address[1]

    def _registration_problem(self, problem: str | None) -> None:
        name = self.config.engine.name
        if problem is None:
            self.conditions.clear(codes.LEASE_LOST, name)
            self.conditions.clear(codes.REGISTRATION_INTERRUPTED, name)
        elif "was lost" in problem:
            self._hold(codes.LEASE_LOST, problem)
        else:
            self._hold(codes.REGISTRATION_INTERRUPTED, problem)

    def _request_plane_problem(self, problem: str | None) -> None:
        name = self.config.engine.name
        if problem is None:
            self.conditions.clear(codes.REQUEST_PLANE_LOST, name)
        else:
            self._hold(codes.REQUEST_PLANE_LOST, f"the request plane {problem}")

    async def _check_others(self, worker: Worker | None) -> None:
        """Compare with what others registered; ``worker``: before our own registration.

        Raises AttachedTwice, _FilesDiffer or Unreachable.

        Each registers first that it wants the engine, and then looks at the others. Of two that
        find each other the one with the higher id leaves; it stays only if it looked before the
        other one was there. So the one with the lower id waits until the other has left or serves.
        """
        deadline = time.monotonic() + _CLAIM_S
        while await self._others_undecided(worker):
            if time.monotonic() > deadline:
                raise Unreachable("another dynctl serve attach of this engine does not decide")
            await asyncio.sleep(_CLAIM_S / 50)

    async def _others_undecided(self, worker: Worker | None) -> bool:
        """Whether another process wants the engine and neither has it nor has left."""
        own, undecided = self.registration.instance_id, False
        parsed = [
            parse_entry(listed.key, listed.value)
            for listed in (await self._discovery.list()).entries
        ]
        cards = [entry for entry in parsed if isinstance(entry, ModelCard)]
        instances = [entry for entry in parsed if isinstance(entry, Instance)]
        known = {(entry.endpoint, entry.instance_id) for entry in instances}
        serving = {card.instance_id for card in cards if (card.endpoint, card.instance_id) in known}
        for entry in instances:
            if not await self._is_rival(entry, own):
                continue
            higher = own is not None and entry.instance_id > own
            if higher and entry.instance_id not in serving:
                undecided = True
            else:
                where = entry.address.partition("/")[0]
                raise AttachedTwice(
                    f"{codes.ENGINE_ALREADY_ATTACHED}: {self.config.engine.url} is attached by the "
                    f"process at {where} (instance {entry.instance_id:x} of "
                    f"{entry.endpoint.namespace}.{entry.endpoint.component})",
                    "One dynctl serve attach is enough for an engine; stop the other one first.",
                )
        differs = None if worker is None else other_files(self._card(worker, 0), cards)
        if differs is not None:
            raise _FilesDiffer(differs)
        return undecided

    async def _is_rival(self, instance: Instance, own: int | None) -> bool:
        """Whether another process that runs has registered our engine; ``own``: our instance."""
        # Frontends serve all components of a namespace, so in each of them it is the engine.
        # Another namespace may have another host of the same name.
        if instance.endpoint._replace(component=self._lock.component) != self._lock:
            return False
        # With a fixed port, what a process before this one has left has our address.
        if instance.instance_id == own or self.server.is_own(instance):
            return False
        return await self._alive(instance)

    async def _alive(self, instance: Instance) -> bool:
        """Whether a process listens at the instance's address; entries of a killed one stay."""
        if instance.transport == "nats_tcp" and self.nats is not None:
            return await self.nats.listens(instance.address, _DIAL_S)
        host, _, port = instance.address.partition("/")[0].rpartition(":")
        try:
            async with asyncio.timeout(_DIAL_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return False
        except (OSError, TimeoutError, ValueError):
            return True  # unknown: its lease decides
        writer.close()
        return True

    def _set_taints(self, taints: tuple[str, ...]) -> None:
        self._taints = taints
        self.registration.update()

    # -- requests

    def _admit(self, request: PlaneRequest) -> None:
        if self._attached is None:
            raise RequestRefusal(f"{codes.ENGINE_NOT_READY}: the engine is not ready")

    def _target(self) -> EngineTarget:
        attached = self._attached
        if attached is None:
            raise AnswerLost(f"{codes.ENGINE_NOT_READY}: the engine is not ready")
        return attached.target

    def _engine_failed(self, failure: UpstreamFailure) -> None:
        if failure.of_engine:
            self._suspect.set()

    async def _report_load(self) -> None:
        """Publish the load of each rank: when it changed, and every few seconds."""
        attached = self._attached
        assert attached is not None
        last: dict[int, tuple[LoadReported, float]] = {}
        spec = self.config.engine
        while True:
            kind = kind_named(attached.facts.kind)
            reading = await self._reader.load(spec.url, attached.worker, kind)
            now = time.monotonic()
            for report in reading.reports:
                before = last.get(report.dp_rank)
                due = before is None or before[0] != report or now - before[1] >= _LOAD_AGAIN_S
                instance_id = self.registration.instance_id
                if due and instance_id is not None:
                    last[report.dp_rank] = (report, now)
                    metrics = KvMetrics(
                        instance_id,
                        report.dp_rank,
                        report.active_decode_blocks,
                        report.active_prefill_tokens,
                        report.kv_used_blocks,
                    )
                    attached.metrics.publish(encode_kv_metrics(metrics))
            await asyncio.sleep(_LOAD_S)

    # -- what it reports

    def _hold(self, code: str, message: str) -> None:
        name = self.config.engine.name
        changed = self.conditions.set(code, name, message) is not None
        if changed and self.conditions.may_log(code, name):
            _log.warning("%s: %s", code, message)

    def _task_failed(self, name: str, message: str) -> None:
        self.conditions.set(codes.BACKGROUND_TASK_FAILED, name, message)

    def _task_recovered(self, name: str) -> None:
        self.conditions.clear(codes.BACKGROUND_TASK_FAILED, name)

    def _metric_values(self) -> Mapping[str, tuple[str, float]]:
        counts = self.server.counts
        ranks = [] if self._attached is None else self._attached.ranks
        registered = self.registration.instance_id is not None
        return {
            "dynctl_attach_registered": ("gauge", float(registered)),
            "dynctl_attach_leases_lost_total": ("counter", float(self.registration.losses)),
            "dynctl_attach_requests_total": ("counter", float(counts.accepted)),
            "dynctl_attach_requests_refused_total": ("counter", float(counts.refused)),
            "dynctl_attach_requests_cancelled_total": ("counter", float(counts.cancelled)),
            "dynctl_attach_requests_failed_total": ("counter", float(counts.failed)),
            "dynctl_attach_requests_running": ("gauge", float(self.server.running)),
            "dynctl_attach_kv_events": ("gauge", float(sum(r.last_event_id for r in ranks))),
            "dynctl_attach_cached_blocks": ("gauge", float(sum(len(r.tree) for r in ranks))),
        }


class _FilesDiffer(Exception):
    """Other workers of the model have another tokenizer."""


class _Tokenized(msgspec.Struct):
    tokens: list[int]


async def _identify(request: PlaneRequest) -> Any:
    """Answers that this process has attached the engine."""
    yield {"attached": str(request.endpoint.name)}


def engine_identity(url: str) -> str:
    """16 hex digits, the same for every process that names this engine by an address of its host.

    Loopback and other local addresses count as the host's name.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with contextlib.suppress(OSError, ValueError):
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        host = str(addresses[0][4][0])
        address = ipaddress.ip_address(host)
        if address.is_loopback or _is_local(host, addresses[0][0]):
            host = socket.gethostname()
    return xxh3_64_hexdigest(f"{host}:{port}".encode())


def _is_local(host: str, family: socket.AddressFamily) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _with_topology(worker: Worker, topology: TopologyConfig | None) -> Worker:
    """The worker with the topology of this process's environment; it replaces the engine's."""
    if topology is None:
        return worker
    domains = {**worker.runtime_config.topology_domains, **topology.topology_domains}
    fields = {**topology.fields(), "topology_domains": domains}
    return replace(worker, runtime_config=replace(worker.runtime_config, **fields, validate=True))


def model_directory(path: Path | None) -> Path:
    """The directory of --model-path. Raises UsageProblem."""
    if path is None or not path.is_dir():
        how = "" if path is None else f" {getting_files(path, 'tokenizer.json')}"
        raise UsageProblem(
            f"--model-path {path}: not a directory" if path else "--model-path is missing",
            f"Set the directory of the engine's model: frontends need its tokenizer.{how}",
        )
    return path
