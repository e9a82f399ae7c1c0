"""The fleet of a frontend on Dynamo's planes: the workers that are registered in discovery.

Workers live by their leases. A model is served once its card's model files are here and verified:
they make the token ids of prompts and the text of answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from dynctl.adapters.dynamo.model_files import fetch_model_files, file_hosts, host_of
from dynctl.adapters.dynamo.planes import Planes
from dynctl.adapters.dynamo.registration import Registration
from dynctl.adapters.dynamo.request_server import ErrorItem, PlaneRequest, RequestServer
from dynctl.base.errors import Unreachable, UsageProblem, file_problem
from dynctl.documents.workers import StreamState
from dynctl.health import conditions as codes
from dynctl.health.deployment import Deployment, ProblemCode, RegisteredWorker
from dynctl.serving.dynamo.fleet_sync import FleetSync
from dynctl.serving.dynamo.observer import Observer, ObserverRuntime
from dynctl.serving.engines.ejection import Ejection
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.fleet import Fleet, Member
from dynctl.serving.engines.http_client import Upstream
from dynctl.serving.engines.worker_spec import WorkerSpec, WorkerSpecError
from dynctl.serving.routing.config import DynamoConfig, FrontendConfig
from dynctl.serving.routing.service import RoutingService
from dynctl.tokenization import ModelTokenizer, TokenizationError, load_tokenizer
from dynctl.wire.dynamo.discovery import EndpointId, ModelCard, encode_entry
from dynctl.wire.dynamo.events import RouterEvent
from dynctl.wire.dynamo.request_plane import parse_address
from router_core import Worker

_log = logging.getLogger(__name__)

SOURCE: Final = "discovery"
#: Seconds for one file of a model, and between two attempts to get them.
_FILES_S: Final = 60.0
_AGAIN_S: Final = (1.0, 2.0, 5.0, 15.0, 30.0)
_PROBE_S: Final = 2.0
#: Seconds for which the start waits for the files of the models.
_START_S: Final = 15.0
#: Problems of registered entries that keep a worker from being served as it is meant.
_REPORTED: Final = frozenset(
    {
        ProblemCode.MALFORMED_ENTRY,
        ProblemCode.CARD_REJECTED,
        ProblemCode.ENDPOINT_NOT_ROUTED,
        ProblemCode.ID_NOT_UNIQUE,
        ProblemCode.UNKNOWN_ROLE,
    }
)
_LOAD_S: Final = 3600.0
_MOST_PORT: Final = 65535
#: The endpoint under which a router of Dynamo 1.3 is registered.
_ROUTER_ENDPOINT: Final = "router-discovery"
#: Tokenizers that are kept of models without workers.
_KEPT: Final = 4
_LOADING: Final = "the files of its model are not read yet"


Obstacle = Callable[[RegisteredWorker], str | None]
"""Why a worker cannot get requests in the way that a process sends them; None: it can."""


def no_obstacle(_item: RegisteredWorker) -> str | None:
    return None


@dataclass(slots=True)
class _Model:
    """The files that worker sets of a model have in common. ``subject``: of their condition."""

    subject: str
    task: asyncio.Task[None] | None = None
    tokenizer: ModelTokenizer | None = None
    problem: str | None = _LOADING


class DynamoFleet(Fleet):
    """The registered workers of a deployment, followed by an :class:`Observer`."""

    def __init__(
        self,
        service: RoutingService,
        upstream: Upstream,
        config: FrontendConfig,
        planes: Planes,
        dynamo: DynamoConfig,
        obstacle: Obstacle = no_obstacle,
    ) -> None:
        super().__init__(service, upstream, config)
        self.observer = Observer(
            planes,
            service.router,
            clock=service.clock,
            namespace=dynamo.namespace,
            follow_index=service.router.config.use_kv_events
            and not service.router.config.use_remote_indexer,
            on_deployment=self._take,
            on_available=self._take_reasons,
            on_interrupted=self._on_interruption,
            sequences=False,
            only=dynamo.endpoint,
            apply=service.apply,
            changing_many=service.changing_many_workers,
            runtime=ObserverRuntime(service.tasks, self.index),
        )
        # Workers get tokens, and make none.
        service.preparation.tokenizers.ask_engines(None, self.kinds)
        self._title = planes.title
        self.discovery = planes.discovery
        self.requests = planes.requests
        self._cache = dynamo.cache
        #: A component gets token ids and forwards them.
        self._reads_files = dynamo.endpoint is None
        self._workers: dict[int, RegisteredWorker] = {}
        #: By model and files: worker sets of a model may differ in their files.
        self._models: dict[tuple[str, str], _Model] = {}
        #: Model and worker set ("": none) -> the files of the set's card.
        self._files: dict[tuple[str, str], str] = {}
        self._reasons: Mapping[int, str] = {}
        #: Worker set -> the version of the card that was accepted first.
        self._accepted: dict[str, str] = {}
        self._reported: set[str] = set()
        self._obstacle = obstacle
        #: Shares load with the routers of the deployment; None without replica sync.
        self._sync: FleetSync | None = None
        self._registration: Registration | None = None
        #: Answers for the entries of this router, where it reads streams; refuses every request.
        self._registered: RequestServer | None = None
        self._streams: set[EndpointId] = set()

    # -- what discovery has --------------------------------------------------------------------

    def registered(self, worker_id: int) -> RegisteredWorker | None:
        """A worker with its entries in discovery."""
        return self._workers.get(worker_id)

    def tokenizer_of(self, model: str, worker_set: str | None = None) -> ModelTokenizer | None:
        return self._service.preparation.tokenizers.of(model, worker_set)

    def card_of(self, model: str, worker_set: str | None = None) -> ModelCard | None:
        """A card of the model, or of a worker set, that counts."""
        first = self._first(model, worker_set)
        return None if first is None else first.card

    def _first(self, model: str, worker_set: str | None = None) -> RegisteredWorker | None:
        """The worker with the smallest id whose card is accepted; prefill workers are the last."""
        items = [
            item
            for item in self._workers.values()
            if item.worker.model == model
            and (worker_set is None or worker_set in item.worker.worker_sets)
        ]
        accepted = set(self._accepted.values())
        return min(
            items,
            key=lambda item: (
                item.card.version not in accepted,
                not item.card.model_type,
                item.worker.worker_id,
            ),
            default=None,
        )

    def register(
        self,
        registration: Registration,
        *,
        sync: FleetSync | None = None,
        durable: RequestServer | None = None,
    ) -> None:
        """Take part as a router of the deployment, from :meth:`join` on.

        ``sync`` shares load. ``durable``: the server of this router's entries, where it has durable
        consumers of streams: Dynamo's routers remove the consumers of routers without an entry.
        """
        self._registration, self._sync, self._registered = registration, sync, durable
        if sync is not None:
            self.observer.share_load(sync.take, sync.publishers)

    def entries(self, instance_id: int) -> Iterator[tuple[str, bytes]]:
        """What this router registers in discovery."""
        if self._sync is not None:
            yield from self._sync.entries(instance_id)
        if self._registered is not None:
            for endpoint in self._streams:
                yield encode_entry(self._registered.instance(endpoint, instance_id))

    def router_name(self) -> str | None:
        """The name of this router's durable consumers; None while it is not registered."""
        instance_id = None if self._registration is None else self._registration.instance_id
        return None if instance_id is None else str(instance_id)

    async def dump(self, scope: EndpointId) -> list[RouterEvent]:
        """The events that build the index of a component's workers."""
        await self.index.drained()
        router, events = self._service.router, []
        for item in self._workers.values():
            if item.card.endpoint[:2] != scope[:2]:
                continue
            for rank in item.worker.ranks:
                slot = router.registry.slot(item.worker.worker_id, rank)
                for event in () if slot is None else router.index.stored_events(slot):
                    events.append(RouterEvent(item.worker.worker_id, rank, 0, event))
        return events

    async def join(self) -> None:
        """Read what is registered and follow it. Raises Unreachable."""
        if self._registered is not None:
            await self._registered.start()
        if self._registration is not None:
            await self._registration.start()
        await self.observer.start()
        loading = [model.task for model in self._models.values() if model.task is not None]
        if loading:
            await asyncio.wait(loading, timeout=_START_S)

    async def first_read(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.observer.settled()

    async def leave(self) -> None:
        """Withdraw what this router published; its leases end."""
        if self._sync is not None:
            await self._sync.leave()
        if self._registration is not None:
            await self._registration.close()
        if self._sync is not None:
            await self._sync.close()
        if self._registered is not None:
            await self._registered.close()

    async def close(self) -> None:
        await super().close()
        await self.observer.close()  # closes the planes

    # -- workers come and go ---------------------------------------------------------------------

    def _take(self, deployment: Deployment) -> None:
        """Add, change and remove members so that they are the registered workers."""
        most = self._config.limits.workers
        self._workers = {item.worker.worker_id: item for item in deployment.workers[:most]}
        for member in self:
            if member.spec.worker_id not in self._workers:
                self._remove(member)
        for item in self._workers.values():
            self._keep(item)
        if self._sync is not None:
            self._sync.take_deployment(deployment)
        self._take_streams(deployment)
        self._report(deployment)
        self._accept(deployment)
        self._load_models()

    def _take_streams(self, deployment: Deployment) -> None:
        """Register as a router of each component whose events are in a stream."""
        server, registration = self._registered, self._registration
        if server is None or registration is None:
            return
        wanted = {
            item.card.endpoint._replace(name=_ROUTER_ENDPOINT)
            for item in deployment.workers
            if item.durable_events is not None
        }
        if wanted != self._streams:
            for endpoint in wanted - self._streams:
                server.serve(endpoint, _no_requests)
            self._streams = wanted
            registration.update()

    def _keep(self, item: RegisteredWorker) -> None:
        worker = item.worker
        member = self._by_id.get(worker.worker_id)
        if member is not None and member.spec.name != worker.name:
            # Names are the shortest ends of ids that are unique, so they may become longer.
            del self._members[member.spec.name]
            self._service.conditions.forget(member.spec.name)
            member.spec = replace(member.spec, name=worker.name)
            self._members[worker.name] = member
        if member is None:
            spec = WorkerSpec(
                f"{item.instance.transport}://{worker.endpoint}",
                worker.name,
                instance_id=worker.worker_id,
            )
            member = Member(spec, SOURCE, ejection=Ejection(self._config.health.ejection))
            member.probed = True
            self._members[worker.name] = self._by_id[worker.worker_id] = member
            member.task = self._service.tasks.start(
                "worker trial", partial(self._watch, member), worker.name
            )
            role = worker.role.value
            _log.info("worker %s (%s, %s): registered", worker.name, role, worker.model)
        if member.worker != worker:
            member.worker = worker
            member.bootstrap = _bootstrap(item.card)
        self._regroup(member, worker)

    def _remove(self, member: Member) -> None:
        name = member.spec.name
        self._members.pop(name, None)
        self._by_id.pop(member.spec.worker_id, None)
        if member.task is not None:
            member.task.cancel()
        self._regroup(member, None)
        self._service.conditions.forget(name)
        for key in [key for key in self._service.engine_failures if key[0] == name]:
            del self._service.engine_failures[key]
        _log.info("worker %s: not registered any more", name)

    def _report(self, deployment: Deployment) -> None:
        """A condition for each entry that cannot be read or served."""
        messages = {
            problem.subject: problem.message
            for problem in deployment.problems
            if problem.code in _REPORTED
        }
        for subject in self._reported - messages.keys():
            self._service.clear_condition(codes.WORKER_REJECTED, subject)
        for subject, message in messages.items():
            self._service.set_condition(codes.WORKER_REJECTED, subject, message)
        self._reported = set(messages)

    def _accept(self, deployment: Deployment) -> None:
        """As a Dynamo frontend: of each worker set the version of the card that came first counts,
        and workers with another one get no requests."""
        rejected: dict[int, str] = {}
        accepted: dict[str, str] = {}
        for workers in deployment.worker_sets:
            key = f"{workers.model} {workers.name}"
            version = self._accepted.get(key)
            if version is None or version not in workers.versions:
                version = max(workers.versions, key=lambda each: len(workers.versions[each]))
            accepted[key] = version
            for other, members in workers.versions.items():
                if other != version:
                    why = f"its card differs from that of other workers of {workers.name}"
                    rejected |= dict.fromkeys(members, why)
        self._accepted = accepted
        self.observer.reject(rejected)

    # -- who gets requests -----------------------------------------------------------------------

    def _take_reasons(self, reasons: Mapping[int, str]) -> None:
        """``reasons``: worker id -> why it gets no requests."""
        self._reasons = reasons
        for member in self:
            self._judge_member(member)

    def _judge_member(self, member: Member) -> None:
        worker = member.worker
        if worker is None:
            return
        name = member.spec.name
        model = self._model_of(worker)
        reason = self._reasons.get(worker.worker_id)
        if reason is None and model is not None:
            reason = model.problem
        item = self._workers.get(worker.worker_id)
        obstacle = None if item is None else self._obstacle(item)
        if obstacle is not None:
            reason = obstacle
        if reason is None and member.gone:
            reason = member.problem
        if reason == member.problem:
            return
        member.problem, member.doubt = reason, member.gone
        self._show(member)
        if reason is None:
            self._service.clear_condition(codes.WORKER_UNREACHABLE, name)
            self._service.clear_condition(codes.WORKER_REJECTED, name)
        elif obstacle is not None or (
            worker.worker_id in self._reasons and "its card differs" in reason
        ):
            self._service.set_condition(codes.WORKER_REJECTED, name, reason)

    def _eject(self, member: Member, reason: str, *, gone: bool, doubt: bool = False) -> None:
        """It refuses connections: until its lease ends, or it accepts one again."""
        member.gone, member.problem, member.doubt = True, reason, doubt
        self._show(member)
        self._service.set_condition(codes.WORKER_UNREACHABLE, member.spec.name, reason)

    async def _probe(self, member: Member) -> None:
        """Workers live by their leases; only one that refused a connection is tried again."""
        self._read_again(member)
        item = self._workers.get(member.spec.worker_id)
        if not member.gone or item is None:
            return
        if item.instance.transport == "tcp":
            address = parse_address(item.instance.address)
            try:
                async with asyncio.timeout(_PROBE_S):
                    _, writer = await asyncio.open_connection(address.host, address.port)
            except OSError:
                return
            writer.close()
        member.gone = False
        self._judge_member(member)

    def _reread(self, member: Member, worker: Worker) -> None:
        self.observer.read_again(worker.worker_id)

    def report_failure(
        self, worker_id: int, failure: UpstreamFailure, sent_at: float | None = None
    ) -> None:
        member = self._by_id.get(worker_id)
        if failure.kind == "refused" and member is not None and member.worker is not None:
            self._service.engine_failures[member.spec.name, failure.kind] += 1
            self._eject(member, str(failure), gone=True)
            return
        super().report_failure(worker_id, failure, sent_at)

    def request_plane_lost(self, problem: str | None) -> None:
        """Requests over NATS reach no worker; None: they do again."""
        if problem is None:
            self._service.clear_condition(codes.REQUEST_PLANE_LOST, "NATS")
        else:
            self._service.set_condition(
                codes.REQUEST_PLANE_LOST, "NATS", f"the request plane {problem}"
            )

    # -- the files of models ---------------------------------------------------------------------

    def _model_of(self, worker: Worker) -> _Model | None:
        """The files that a worker's requests need."""
        name = next(iter(worker.worker_sets), "")
        files = self._files.get((worker.model, name))
        return None if files is None else self._models.get((worker.model, files))

    def _load_models(self) -> None:
        """Load the files that are new, and forget those of which no worker is left."""
        if self._config.model_path is not None or not self._reads_files:
            return
        names: dict[str, set[str]] = {}
        for registered in self._workers.values():
            worker = registered.worker
            names.setdefault(worker.model, set()).update(worker.worker_sets or ("",))
        self._files = {
            (model, name): _files_of(item.card)
            for model, set_names in names.items()
            for name in set_names
            if (item := self._first(model, name or None)) is not None
        }
        wanted = {(model, files) for (model, _), files in self._files.items()}
        unused = [key for key in self._models if key not in wanted]
        loaded = [key for key in unused if self._models[key].tokenizer is not None]
        # Workers restart: their model's tokenizer need not be loaded again.
        for key in set(unused).difference(loaded[-_KEPT:]):
            gone = self._models.pop(key)
            if gone.task is not None:
                gone.task.cancel()
            self._service.clear_condition(codes.MODEL_FILES_INVALID, gone.subject)
        for name, files in sorted(wanted - self._models.keys()):
            subject = name
            if sum(other == name for other, _ in wanted) > 1:
                subject = f"{name} of {', '.join(sorted(self._sets_with(name, files)))}"
            model = self._models[name, files] = _Model(subject)
            model.task = self._service.tasks.start(
                "model files", partial(self._load, name, files, model), subject
            )
        self._take_tokenizers()

    def _sets_with(self, name: str, files: str) -> list[str]:
        """The worker sets of a model with these files."""
        return [it for (of, it), its in self._files.items() if (of, its) == (name, files)]

    def _take_tokenizers(self) -> None:
        """Use what is loaded: for each worker set the tokenizer of its files."""
        tokenizers = self._service.preparation.tokenizers
        loaded_sets = {
            key: loaded
            for key, files in self._files.items()
            if (loaded := self._models[key[0], files].tokenizer) is not None
        }
        tokenizers.set_by_set(loaded_sets)
        for name in {model for model, _ in self._files}:
            first = self._first(name)
            model = None if first is None else self._model_of(first.worker)
            if model is not None and model.tokenizer is not None:
                tokenizers.set(name, model.tokenizer)
        for member in self:
            self._judge_member(member)

    async def _load(self, name: str, files: str, model: _Model) -> None:
        """Fetch and verify the files of a model's card, again and again until that succeeds."""
        failures = 0
        while True:
            set_names = self._sets_with(name, files)
            item = self._first(name, set_names[0] or None) if set_names else None
            if item is None:
                return
            try:
                host = host_of(item.instance)
                fetched = await fetch_model_files(
                    item.card,
                    host,
                    self._cache,
                    # A worker on NATS has no address of its own to compare with.
                    allowed_hosts=() if host else file_hosts(item.card),
                    timeout=_FILES_S,
                )
                tokenizer = await asyncio.to_thread(load_tokenizer, fetched.directory)
                if self._config.tokenizer != "exact":
                    for reason in await asyncio.to_thread(
                        tokenizer.speed_up, self._config.tokenizer
                    ):
                        _log.info("tokenizer of %s: %s", model.subject, reason)
            except (UsageProblem, Unreachable) as error:
                problem = error.message
            except TokenizationError as error:
                problem = str(error)
            except OSError as error:
                problem = f"{error.filename or 'the directory of its files'}: {file_problem(error)}"
            else:
                model.tokenizer, model.problem = tokenizer, None
                self._service.clear_condition(codes.MODEL_FILES_INVALID, model.subject)
                self._take_tokenizers()
                _log.info("model %s: its tokenizer is %s", model.subject, tokenizer.encoder.name)
                return
            self._service.set_condition(codes.MODEL_FILES_INVALID, model.subject, problem)
            model.problem = f"model files: {problem}"
            for member in self:
                self._judge_member(member)
            await asyncio.sleep(_AGAIN_S[min(failures, len(_AGAIN_S) - 1)])
            failures += 1

    # -- as Fleet --------------------------------------------------------------------------------

    async def add(self, spec: WorkerSpec, source: str) -> Member:
        raise WorkerSpecError(
            f"worker {spec.name}: the workers of this frontend are those in discovery "
            f"({self._title}); start it there, or serve it with another frontend"
        )

    async def remove(self, name: str) -> bool:
        raise WorkerSpecError(
            f"worker {name}: the workers of this frontend are those in discovery ({self._title}); "
            "end the worker there"
        )

    def streams(self, worker_id: int) -> Mapping[int, StreamState]:
        return {
            rank: state
            for (owner, rank), state in self.observer.stream_states().items()
            if owner == worker_id
        }

    def streams_by_worker(self) -> Mapping[int, Mapping[int, StreamState]]:
        states: dict[int, dict[int, StreamState]] = {}
        for (owner, rank), state in self.observer.stream_states().items():
            states.setdefault(owner, {})[rank] = state
        return states

    @property
    def load_interval(self) -> float:
        """Workers report their load with requests only, so a report is never overdue."""
        return _LOAD_S

    def _on_interruption(self, reason: str | None) -> None:
        if reason is None:
            self._service.clear_condition(codes.DISCOVERY_INTERRUPTED, self._title)
            return
        self._service.set_condition(
            codes.DISCOVERY_INTERRUPTED,
            self._title,
            f"{reason}; the workers are those of the last reading",
        )


async def _no_requests(request: PlaneRequest) -> AsyncIterator[Any]:
    """Answers nothing: the endpoint only shows that this router runs."""
    nothing: tuple[Any, ...] = ()
    for item in nothing:
        yield item
    raise ErrorItem(f"{request.endpoint.name} takes no requests")


def _files_of(card: ModelCard) -> str:
    """The names, kinds and checksums of a card's files."""
    return "\n".join(
        f"{part} {file.kind} {file.checksum}" for part, file in sorted(card.files.items())
    )


def _bootstrap(card: ModelCard) -> tuple[str, int] | None:
    """Where decode workers meet this prefill worker, if it has a bootstrap endpoint."""
    runtime = card.runtime_config
    endpoint = runtime.get("disaggregated_endpoint") or runtime
    if not isinstance(endpoint, Mapping):
        return None
    host, port = endpoint.get("bootstrap_host"), endpoint.get("bootstrap_port")
    if not isinstance(host, str) or not host or type(port) is not int or not 0 < port <= _MOST_PORT:
        return None
    return host, port
