"""The endpoints about the fleet and routing: models, health, workers, and dry runs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from dynctl import version
from dynctl.base.tasks import SLICE, drained, in_turns
from dynctl.documents.audit import AuditRow
from dynctl.documents.fleet_load import FleetLoad, LastTest, Traffic, Transfer, WorkerLoad
from dynctl.documents.models import (
    Health,
    ModelList,
    ModelReadiness,
    ModelRow,
    NamespaceReadiness,
    Readiness,
    WorkerTypeReadiness,
)
from dynctl.documents.workers import NONE_WAITING, WorkerRow, rank_rows, worker_row
from dynctl.health.evaluation import ModelHealth
from dynctl.serving.engines.fleet import Fleet, FleetFull, Member
from dynctl.serving.engines.worker_spec import WorkerSpecError, worker_spec
from dynctl.serving.http.auth import Handler, guarded, is_operator, over_unix_socket
from dynctl.serving.http.inference import DECISION_HEADER, Inference
from dynctl.serving.http.json_responses import (
    bad_request,
    json_response,
    not_found,
    read_json_object,
)
from dynctl.serving.records.decision_memory import DecisionMemory
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.refusal import HttpError, unknown_model
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.routing.service_health import HEALTH_AGE_S
from router_core import Role, Worker


class ControlApi:
    """Handlers of models, health, workers and dry runs."""

    def __init__(
        self,
        service: RoutingService,
        fleet: Fleet,
        inference: Inference,
        config: FrontendConfig,
    ) -> None:
        self._service = service
        self._fleet = fleet
        self._inference = inference
        self._config = config

    def routes(self, keyed: Callable[[Handler], Handler]) -> list[web.RouteDef]:
        """The endpoints; ``keyed`` puts those of the OpenAI API behind the clients' keys."""
        token = self._config.api_token
        return [
            web.get("/v1/models", keyed(self.models)),
            web.get("/v1/models/{model:.+}/ready", self.model_ready),
            web.get("/v1/models/{model:.+}", keyed(self.model)),
            web.get("/health", self.health),
            web.get("/live", self.live),
            web.get("/ready", self.ready),
            web.get("/v1/workers", guarded(self.workers, token)),
            web.post("/v1/workers", guarded(self.add_worker, token)),
            web.get("/v1/workers/{worker:.+}", guarded(self.worker, token)),
            web.delete("/v1/workers/{worker:.+}", guarded(self.remove_worker, token)),
            web.post("/v1/workers/{worker:.+}/cordon", guarded(self.cordon_worker, token)),
            web.post("/v1/workers/{worker:.+}/uncordon", guarded(self.uncordon_worker, token)),
            web.post("/v1/route", guarded(self.route, token)),
        ]

    # -- models ----------------------------------------------------------------------------

    async def models(self, _http: web.Request) -> web.Response:
        service = self._service
        rows = [
            self._model_row(name) for name in sorted((*service.models(), *service.served.aliases))
        ]
        rows += [self._model_row(name) for name in sorted(service.served.adapters)]
        return json_response(ModelList(data=rows))

    async def model(self, http: web.Request) -> web.Response:
        return json_response(self._model_row(self._known_model(http)))

    async def model_ready(self, http: web.Request) -> web.Response:
        name = self._known_model(http)
        await self._service.refresh_health(HEALTH_AGE_S)
        return json_response(self.readiness(name))

    def readiness(self, name: str) -> ModelReadiness:
        """Readiness in Dynamo's format: the present roles, and those missing to serve a request."""
        model = self._service.served.base_model(name) or name
        known = {health.model: health for health in self._service.health(HEALTH_AGE_S).models}
        # A model of a large fleet that just joined is not evaluated yet.
        model_health = known.get(model) or ModelHealth(model, {}, {}, (Role.AGGREGATED.value,))
        counts, missing = model_health.ready, list(model_health.missing)
        ready = not missing
        able = ready and not (counts.get("prefill") and counts.get("decode"))
        needs = {"prefill": [["decode"]], "decode": [] if able else [["prefill"]]}
        namespace = NamespaceReadiness(
            ready=ready,
            worker_types={
                role: WorkerTypeReadiness(count, needs.get(role, []))
                for role, count in sorted(counts.items())
            },
            present=sorted(counts),
            missing_worker_types=missing,
        )
        return ModelReadiness(
            name,
            ready,
            {"default": namespace},
            UNSET if ready else f"missing worker types: {', '.join(missing)}",
        )

    def _known_model(self, http: web.Request) -> str:
        name = http.match_info["model"]
        if self._service.served.base_model(name) is None:
            service = self._service
            raise unknown_model(name, service.models(), service.may_serve(name)).for_client()
        return name

    def _model_row(self, name: str) -> ModelRow:
        base = self._service.served.base_model(name) or name
        length = self._service.served.context_length(base)
        return ModelRow(
            name,
            created=int(time.time()),
            context_window=length or 0,
            parent=base if name in self._service.served.adapters else UNSET,
            max_model_len=UNSET if length is None else length,
        )

    # -- health ----------------------------------------------------------------------------

    async def live(self, _http: web.Request) -> web.Response:
        return json_response({"status": "live", "message": "Service is live"})

    async def health(self, http: web.Request) -> web.Response:
        """200 while at least one model can be served; the conditions are in the body.

        Operators also see the engines, and what the conditions are about.
        """
        health = await self._service.refresh_health(HEALTH_AGE_S)
        conditions = list(self._service.conditions)
        if is_operator(http, self._config.api_token):
            instances = self._fleet.engines()
        else:
            instances = []
            conditions = [replace(condition, subject="", message="") for condition in conditions]
        body = Health(health.status, instances, conditions)
        return json_response(body, 200 if health.status in ("healthy", "degraded") else 503)

    async def ready(self, _http: web.Request) -> web.Response:
        """200 when at least one model can be served now."""
        await self._service.refresh_health(HEALTH_AGE_S)
        rows = [self.readiness(name) for name in sorted(self._service.models())]
        ready = any(row.ready for row in rows) and not self._service.draining
        reason = "no worker is registered; set --worker URL on dynctl serve"
        if len(self._fleet):
            reason = f"0/{len(self._fleet):,} workers are registered; GET /health has the reasons"
        body = Readiness(ready, rows, UNSET if rows else reason)
        return json_response(body, 200 if ready else 503)

    # -- workers ---------------------------------------------------------------------------

    async def workers(self, _http: web.Request) -> web.Response:
        sharing = self._service.sharing
        replicas = {} if sharing is None else {"replicas": sharing.rows()}
        rows = await in_turns(self._fleet.row_steps())
        return json_response({"workers": rows, **replicas})

    async def worker(self, http: web.Request) -> web.Response:
        text = http.match_info["worker"]
        row = self._fleet.find(text)
        if row is None:
            raise self._unknown(text)
        return json_response(row)

    async def add_worker(self, http: web.Request) -> web.Response:
        """``POST /v1/workers``: register a worker, or replace the one with its name."""
        self._writable()
        body = await read_json_object(http)
        try:
            spec = worker_spec(body, where="worker")
            if spec.forward_authorization and not self._proven(http):
                # Else any program of this machine could read the keys of clients.
                raise WorkerSpecError(
                    f"worker {spec.name}: forward-authorization over HTTP needs the admin token: "
                    "set --admin-token on dynctl serve and send it"
                )
            member = await self._fleet.add(spec, "api")
        except WorkerSpecError as error:
            raise bad_request(str(error)) from None
        except FleetFull as error:
            raise HttpError(507, str(error), "insufficient_storage", "fleet_full") from None
        return json_response(self._fleet.row(member), 201)

    async def remove_worker(self, http: web.Request) -> web.Response:
        """``DELETE /v1/workers/W``: no new requests for it, and no row; those that it has go on."""
        self._writable()
        name = self._member(http).spec.name
        try:
            await self._fleet.remove(name)
        except WorkerSpecError as error:
            raise bad_request(str(error)) from None
        return json_response({"removed": name})

    async def cordon_worker(self, http: web.Request) -> web.Response:
        """``POST /v1/workers/W/cordon``: no new requests for it; those that it has go on."""
        return self._cordon(http, cordoned=True)

    async def uncordon_worker(self, http: web.Request) -> web.Response:
        """``POST /v1/workers/W/uncordon``: the router may choose it again.

        The cordon of a worker that left is lifted for its return.
        """
        membership, name = self._service.membership, http.match_info["worker"]
        if name in membership.cordoned and self._fleet.get(name) is None:
            self._writable()
            membership.cordon(name, cordoned=False)
            return json_response({"uncordoned": name})
        return self._cordon(http, cordoned=False)

    def _proven(self, http: web.Request) -> bool:
        """Whether the caller has the admin token or uses the Unix socket."""
        return self._config.api_token is not None or over_unix_socket(http)

    def _cordon(self, http: web.Request, *, cordoned: bool) -> web.Response:
        self._writable()
        member = self._member(http)
        try:
            self._service.membership.cordon(member.spec.name, cordoned=cordoned)
        except ValueError as error:
            raise HttpError(507, str(error), "insufficient_storage", "too_many_cordons") from None
        return json_response(self._fleet.row(member))

    def _member(self, http: web.Request) -> Member:
        """The engine of the path, by name or id; raises HttpError 404."""
        text = http.match_info["worker"]
        worker = self._service.membership.find(text)
        member = self._fleet.get(text)
        if member is None and worker is not None:
            member = self._fleet.get(worker.name)
        if member is None:
            raise self._unknown(text)
        return member

    def _unknown(self, text: str) -> HttpError:
        known = ", ".join(engine.name for engine in self._fleet.engines()[:16]) or "none"
        return not_found(f"no worker {text[:200]!r}; workers: {known}")

    def _writable(self) -> None:
        if not self._config.admin_api:
            raise HttpError(
                403,
                "the admin API of this frontend is disabled (DYN_DISABLE_FRONTEND_ADMIN_API)",
                "permission_error",
                "admin_api_disabled",
            )

    # -- dry runs --------------------------------------------------------------------------

    async def route(self, http: web.Request) -> web.Response:
        """A dry run: the worker that the request in the body would get, and why. Books nothing."""
        body = await read_json_object(http, self._config.limits.body_bytes)
        result = await self._inference.explain(body, preset=self._config.preset, http=http)
        answer = json_response(result)
        answer.headers[DECISION_HEADER] = result.id
        return answer


FLEET_PATH = "/v1/fleet"
TEST_PATH = "/v1/test"

#: (domain, value) -> hand-offs within it, and out of it.
Transfers = Mapping[tuple[str, str], tuple[int, int]]


class FleetFeed:
    """``GET /v1/fleet``: the load of all workers. ``others``: rows of engines not registered (yet).

    ``waiting``: worker id -> rank -> requests that wait in the engine; ``in_flight`` counts
    the process's own requests; ``probe_s``: seconds between two readings of an engine's load.
    ``audit``, ``compares`` and ``skipped``: as in :class:`AuditReport`.
    """

    def __init__(
        self,
        service: RoutingService,
        memory: DecisionMemory,
        *,
        transfers: Callable[[], Transfers] = dict,
        others: Callable[[], Sequence[WorkerRow]] = tuple,
        waiting: Callable[[], Mapping[int, Mapping[int, int]]] = dict,
        in_flight: Callable[[], int] = lambda: 0,
        probe_s: Callable[[], float | None] = lambda: 1.0,
        audit: Callable[[], list[AuditRow]] = list,
        compares: str = "reuse",
        skipped: Callable[[], Mapping[str, int]] = dict,
        traffic: Callable[[], Traffic | None] = lambda: None,
    ) -> None:
        self._service = service
        self._memory = memory
        self._compares = compares
        self._skipped = skipped
        #: None: this process has no clients, or what they got is unknown.
        self._traffic = traffic
        self._transfers = transfers
        self._others = others
        self._waiting = waiting
        self._in_flight = in_flight
        self._probe_s = probe_s
        self._audit = audit
        # Different from the sets of an earlier process at this address.
        self._process = secrets.token_hex(4)
        self._sets = 0
        self._workers: list[Worker] = []
        self._unregistered: tuple[tuple[int, str], ...] = ()
        self._tested: LastTest | UnsetType = UNSET

    def read(self, known: str | None = None) -> FleetLoad:
        """The fleet now. ``known``: the set of cards that the client has."""
        return drained(self.steps(known))

    def steps(self, known: str | None = None) -> Generator[None, None, FleetLoad]:
        """As :meth:`read`, in steps of a few milliseconds at most. What changes is read in the
        first one."""
        service = self._service
        service.health(HEALTH_AGE_S)
        router, now = service.router, service.clock()
        registry, waiting = router.registry, self._waiting()
        others = self._others()
        workers = list(registry)
        cards = self._cards(workers, others)
        loads = []
        for worker in workers:
            waits = waiting.get(worker.worker_id, NONE_WAITING)
            ranks = rank_rows(router, worker, now, waits)
            reason = registry.unavailable_reason(worker.worker_id)
            status = "ready" if reason is None else "unavailable"
            busy = bool(ranks) and all(rank.busy for rank in ranks)
            loads.append(WorkerLoad(worker.worker_id, ranks, status, reason, busy))
        loads += [WorkerLoad(row.worker_id, [], row.status, row.reason, row.busy) for row in others]
        load = FleetLoad(
            at=service.wall(),
            version=version(),
            cards=cards,
            loads=loads,
            conditions=list(service.conditions),
            transfers=[
                Transfer(*key, *counts) for key, counts in sorted(self._transfers().items())
            ],
            thresholds={
                model: router.busy.thresholds(model).to_dict() for model in service.models()
            },
            probe_s=self._probe_s(),
            in_flight=self._in_flight(),
            recorded=self._memory.recorded,
            queue=len(router.queue) if router.view().queue is not None else UNSET,
            audit=self._audit(),
            compares=self._compares,
            skipped=dict(self._skipped()),
            replicas=UNSET if service.sharing is None else service.sharing.rows(),
            traffic=_known_traffic(self._traffic()),
            process=self._memory.process,
            tested=self._tested,
        )
        yield
        if known == cards:
            return load
        rows = []
        for worker in workers:
            rows.append(worker_row(worker, []))
            if not len(rows) % SLICE:
                yield
        return replace(load, workers=[*rows, *others])

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/fleet[?cards=SET]``."""
        await self._service.refresh_health(HEALTH_AGE_S)
        return json_response(await in_turns(self.steps(request.query.get("cards"))))

    async def report_test(self, request: web.Request) -> web.Response:
        """``POST /v1/test``: keep the result of a test of this server, for ``GET /v1/fleet``."""
        body = await read_json_object(request)
        try:
            result = msgspec.convert(body, LastTest)
        except msgspec.ValidationError as error:
            raise bad_request(str(error)) from None
        self._tested = replace(result, at=self._service.wall())
        return json_response(self._tested)

    def _cards(self, workers: list[Worker], others: Sequence[WorkerRow]) -> str:
        """The name of this set of cards; a changed card is another object."""
        unregistered = tuple((row.worker_id, row.name) for row in others)
        same = (
            len(workers) == len(self._workers)
            and all(map(_same, workers, self._workers))
            and unregistered == self._unregistered
        )
        if not same:
            self._workers, self._unregistered = workers, unregistered
            self._sets += 1
        return f"{self._process}-{self._sets}"


def _same(one: Worker, other: Worker) -> bool:
    return one is other


def _known_traffic(traffic: Traffic | None) -> Traffic | UnsetType:
    return UNSET if traffic is None else traffic
