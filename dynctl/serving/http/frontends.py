"""The router's side of ``serve frontend --router``: leases, placements and reports of frontends.

The router owns the fleet, the index and all bookings. A frontend process has a lease, which each of
its messages renews; when it ends, the frontend's bookings end with it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from dynctl import version
from dynctl.base.decode_errors import RequestError
from dynctl.documents.frontends import (
    MAX_FRONTENDS,
    MAX_PLACES,
    MAX_REPORTS,
    PROTOCOL,
    Alive,
    Answered,
    Block,
    Ended,
    Exchange,
    Failed,
    FirstOutput,
    FleetCard,
    FleetCards,
    FrontendList,
    FrontendRow,
    Join,
    Joined,
    Lease,
    Place,
    PlaceDecode,
    Report,
    Resume,
    Resumed,
    Running,
    SentRequest,
    decision_of,
    placement,
    request_of,
)
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.fleet import Fleet
from dynctl.serving.engines.flow import pair_address
from dynctl.serving.http.auth import guarded
from dynctl.serving.http.bodies import bodies_of
from dynctl.serving.http.errors import on_aiohttp
from dynctl.serving.http.json_responses import bad_request, json_response, not_found
from dynctl.serving.http.plain_requests import ClientAnswer, ClientHandler, ClientRequest
from dynctl.serving.http.selection import MAX_BOOKINGS, Booking, SelectionApi
from dynctl.serving.http.selection_request import field_error
from dynctl.serving.routing.refusal import HttpError
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.telemetry.observers import RequestRecord
from router_core import Decision, Progressed, RoutingPlan, RoutingRequest, Stage

#: Seconds without a message after which a frontend is taken for dead.
LEASE_S: Final = 10.0
#: Requests of one message that are placed in a turn of the event loop: each takes half a
#: millisecond in a fleet of 1,000 workers, and KV events and other frontends wait meanwhile.
_PLACES_A_TURN: Final = 4
#: Least seconds between two readings of the fleet for its version.
_CARDS_S: Final = 0.2
_MAX_NAME: Final = 64
#: Requests of one frontend that ended without a booking and are remembered.
_MAX_ENDED: Final = 1024
_OUTCOMES: Final = ("success", "refused", "upstream_error", "client_error", "cancelled", "internal")
_FAILURES: Final = (
    *("refused", "connect", "vanished", "reset", "timeout", "status", "protocol", "ejected"),
    "plane",
)  # fmt: skip

_log = logging.getLogger(__name__)
Message = TypeVar("Message", bound=msgspec.Struct)


@dataclass(slots=True)
class Frontend:
    """One frontend process. ``number``: of its last message of reports. ``ended``: the last
    requests that ended without a booking; their placement may still arrive."""

    name: str
    lease: str
    version: str
    joined_at: float
    seen_at: float
    number: int = 0
    bookings: set[str] = field(default_factory=set)
    ended: dict[str, None] = field(default_factory=dict)


class FrontendsApi:
    """Leases and placements over the bookings of a `SelectionApi`.

    ``one_environment``: the frontends have the environment of this process, so they get the names
    of the variables with engines' keys.
    """

    def __init__(
        self,
        service: RoutingService,
        fleet: Fleet,
        selection: SelectionApi,
        *,
        token: str | None = None,
        body_bytes: int = 16 << 20,
        lease_s: float = LEASE_S,
        preset: str | None = None,
        one_environment: bool = False,
    ) -> None:
        self._service = service
        self._fleet = fleet
        self._one_environment = one_environment
        self._selection = selection
        self._token = token
        self._body_bytes = body_bytes
        self.lease_s = lease_s
        self._preset = preset
        #: By their names, and by their leases.
        self._frontends: dict[str, Frontend] = {}
        self._leases: dict[str, Frontend] = {}
        self._process = secrets.token_hex(4)
        self._versions = 0
        self._cards = b""
        self._shown: FleetCards | None = None
        self._read: tuple[int, float] | None = None

    def __len__(self) -> int:
        return len(self._frontends)

    def routes(self) -> list[web.RouteDef]:
        token, base = self._token, "/v1/frontends"
        return [
            *(web.post(path, on_aiohttp(each)) for path, each in self.data_paths().items()),
            web.get(base, guarded(self.listed, token)),
            web.post(base + "/{name}/join", guarded(self.join, token)),
            web.post(base + "/{name}/fleet", guarded(self.fleet, token)),
            web.post(base + "/{name}/resume", guarded(self.resume, token)),
            web.post(base + "/{name}/place", guarded(self.place, token)),
            web.post(base + "/{name}/decode", guarded(self.decode, token)),
            web.post(base + "/{name}/explain", guarded(self.explain, token)),
            web.post(base + "/{name}/leave", guarded(self.leave, token)),
        ]

    def data_paths(self) -> dict[str, ClientHandler]:
        """The handlers by path of the messages that every request needs."""
        return {"/v1/frontends/exchange": guarded(self.exchange, self._token)}

    # -- leases ----------------------------------------------------------------------------

    async def listed(self, _http: web.Request) -> web.StreamResponse:
        """The frontend processes and their bookings."""
        now = self._service.clock()
        rows = [
            FrontendRow(
                frontend.name,
                len(frontend.bookings),
                now - frontend.joined_at,
                now - frontend.seen_at,
                frontend.version,
            )
            for frontend in self._frontends.values()
        ]
        return json_response(FrontendList(rows, self.lease_s))

    async def join(self, http: web.Request) -> web.StreamResponse:
        """A frontend starts or returns; the bookings of its earlier lease end."""
        name, message = _name(http), await self._message(http, Join)
        if message.protocol != PROTOCOL:
            raise HttpError(
                409,
                f"the frontend has dynctl {message.version[:32] or 'of an unknown version'} and "
                f"protocol {message.protocol}, this router {version()} and protocol {PROTOCOL}: "
                "run the same version of both",
                "conflict",
                "other_protocol",
            )
        if self._service.refusing:
            self._selection.admit()
        old = self._frontends.get(name)
        if old is not None:
            self._end_lease(old)
        if len(self._frontends) >= MAX_FRONTENDS:
            raise HttpError(
                503,
                f"{MAX_FRONTENDS} frontends have joined, the maximum of this router",
                "overloaded",
                "too_many_frontends",
                headers={"retry-after": "10"},
            )
        now = self._service.clock()
        lease = secrets.token_hex(8)
        frontend = Frontend(name, lease, message.version[:32], now, now)
        self._frontends[name] = self._leases[lease] = frontend
        _log.info("frontend %s joined (%d in all)", name, len(self))
        return json_response(Joined(lease, self.lease_s, self._fleet_cards(), version()))

    async def fleet(self, http: web.Request) -> web.StreamResponse:
        """The fleet as it is now."""
        self._frontend(http, await self._message(http, Lease))
        return json_response(self._fleet_cards())

    async def leave(self, http: web.Request) -> web.StreamResponse:
        """The frontend stops; its bookings end."""
        frontend = self._frontend(http, await self._message(http, Lease))
        ended = self._end_lease(frontend)
        _log.info("frontend %s left", frontend.name)
        return json_response({"ended": ended})

    def sweep(self) -> int:
        """End the leases without messages for ``lease_s`` seconds, with their bookings; returns
        their number."""
        silent_since = self._service.clock() - self.lease_s
        gone = [
            frontend for frontend in self._frontends.values() if frontend.seen_at < silent_since
        ]
        for frontend in gone:
            ended = self._end_lease(frontend)
            _log.warning(
                "frontend %s sent nothing for %g s: its %d bookings end",
                frontend.name, self.lease_s, ended,
            )  # fmt: skip
        return len(gone)

    # -- requests --------------------------------------------------------------------------

    async def place(self, http: web.Request) -> web.StreamResponse:
        """Choose the workers of a request and book it as their load, in one step."""
        message = await self._message(http, Place)
        frontend = self._frontend(http, message)
        if message.dry:
            request = self._check_request(message.request)
            return json_response(placement(self._service.plan(request, detail=True), []))
        answer = await self._place(frontend, message.request, message.attempt)
        assert answer is not None
        return _json(answer)

    async def exchange(self, http: ClientRequest) -> ClientAnswer:
        """Take what happened to requests and engines, and place further requests, each in one step;
        those that would wait are not placed. Renews the lease."""
        message = await self._message(http, Exchange)
        frontend = self._renew_lease(self._leases.get(message.lease))
        if message.number > frontend.number:
            frontend.number = message.number
            for report in message.reports[:MAX_REPORTS]:
                self._take(frontend, report)
        answers: list[dict[str, Any]] = []
        for number, wanted in enumerate(message.places[:MAX_PLACES]):
            if number and number % _PLACES_A_TURN == 0:
                await asyncio.sleep(0)
            try:
                answer = await self._place(frontend, wanted.request, wanted.attempt, may_wait=False)
            except HttpError as error:
                answers.append(
                    {"status": error.status, "code": str(error.code), "message": error.message}
                )
            else:
                answers.append(
                    {"waits": True} if answer is None else {"placement": msgspec.Raw(answer)}
                )
        return json_response({"fleet": self._fleet_cards().version, "answers": answers})

    async def decode(self, http: web.Request) -> web.StreamResponse:
        """Prefill is done: choose the decode worker with the current fleet."""
        message = await self._message(http, PlaceDecode)
        booking = self._booking(self._frontend(http, message), message.id, message.attempt)
        if booking is None:
            raise not_found(f"no booking {message.id[:200]!r}", code="unknown_booking")
        plan = self._selection.place_decode(booking, message.allowed, message.excluded)
        booked: list[Stage] = ["decode"] if plan.ok else []
        self._note_dispatch(plan, booked)
        return json_response(placement(plan, booked))

    async def explain(self, http: web.Request) -> web.StreamResponse:
        """A dry run as a RouteResult."""
        message = await self._message(http, Place)
        self._frontend(http, message)
        request = self._check_request(message.request)
        return json_response(self._service.explain(request, preset=self._preset))

    async def resume(self, http: web.Request) -> web.StreamResponse:
        """Book requests again that run since before the lease, as far as their workers are here.

        One that cannot be booked is left out: a refusal would keep the frontend from joining for as
        long as that request runs.
        """
        message = await self._message(http, Resume)
        frontend = self._frontend(http, message)
        booked = 0
        for running in message.running[:MAX_REPORTS]:
            if len(self._selection) < MAX_BOOKINGS:
                try:
                    booked += self._resume(frontend, running)
                except HttpError as error:
                    _log.info("frontend %s: a running request: %s", frontend.name, error.message)
        return json_response(Resumed(booked))

    # -- inside ----------------------------------------------------------------------------

    async def _place(
        self, frontend: Frontend, sent: SentRequest, attempt: int, *, may_wait: bool = True
    ) -> bytes | None:
        """The placement as JSON; None where the request would wait and may not. Raises HttpError.
        Without ``may_wait`` it does not suspend."""
        request = self._check_request(sent)
        if request.id in frontend.ended:
            raise HttpError(409, f"request {request.id} has ended", "conflict", "ended")
        known = self._selection.bookings.get(request.id)
        if known is not None:
            if known.owner != frontend.name or known.attempt > attempt:
                raise HttpError(
                    409, f"request {request.id} is booked already", "conflict", "duplicate"
                )
            if known.attempt == attempt and known.answer:
                return known.answer
        else:
            self._selection.admit()
        plan, booked = await self._selection.place(
            request,
            self._hands_off,
            owner=frontend.name,
            attempt=attempt,
            may_wait=may_wait,
        )
        if plan.waits:
            return None
        booking = self._selection.bookings.get(request.id)
        if self._frontends.get(frontend.name) is not frontend or request.id in frontend.ended:
            # While it waited in the router queue.
            if booking is not None and booked:
                self._selection.ended(booking, None, 0, "cancelled", computed=False)
            raise HttpError(409, f"request {request.id} has ended", "conflict", "ended")
        self._note_dispatch(plan, booked)
        answer = msgspec.json.encode(placement(plan, booked))
        if booking is None:
            frontend.bookings.discard(request.id)
        else:
            booking.answer = answer
            frontend.bookings.add(request.id)
        return answer

    def _take(self, frontend: Frontend, report: Report) -> None:
        service = self._service
        match report:
            case FirstOutput(id, attempt):
                booking = self._booking(frontend, id, attempt)
                if booking is not None:
                    self._selection.first_output(booking)
            case Block(id, attempt, fraction):
                if self._booking(frontend, id, attempt) is not None:
                    service.output_block(id, fraction)
            case Ended():
                self._end(frontend, report)
            case Alive(ids):
                self._renew(frontend, ids)
            case Answered(worker_id):
                self._fleet.answered(worker_id)
            case Failed():
                kind = report.kind if report.kind in _FAILURES else "protocol"
                failure = UpstreamFailure(kind, report.message[:500], status=report.status)
                ago_s = report.ago_s
                sent_at = None if ago_s is None else service.clock() - max(0.0, ago_s)
                self._fleet.report_failure(report.worker_id, failure, sent_at)

    def _end(self, frontend: Frontend, report: Ended) -> None:
        """A request ended, on one hop or all."""
        outcome = report.outcome if report.outcome in _OUTCOMES else "internal"
        tokens, attempt = max(0, report.output_tokens), report.attempt
        if report.stage is not None:
            booking = self._booking(frontend, report.id, attempt)
            if booking is not None:
                self._selection.ended(
                    booking, report.stage, tokens, outcome, computed=report.computed
                )
            return
        booking = self._booking(frontend, report.id)
        if booking is None or booking.attempt < attempt:
            # The placement of this attempt may still arrive.
            _remember(frontend.ended, report.id)
        if booking is not None and booking.attempt <= attempt:
            self._selection.ended(
                booking,
                None,
                tokens,
                outcome,
                computed=report.computed,
                response=report.response,
            )
            frontend.bookings.discard(report.id)
        elif report.response is not None:  # the last placement was a refusal
            self._service.observers.response(report.id, report.response)

    def _renew(self, frontend: Frontend, request_ids: Iterable[str]) -> None:
        """Requests run on: their bookings do not expire."""
        now = self._service.clock()
        for request_id in request_ids:
            booking = self._booking(frontend, request_id)
            if booking is not None:
                booking.seen_at = now
                self._service.apply(Progressed(request_id))

    def _resume(self, frontend: Frontend, running: Running) -> int:
        """Book a request again; 0 where its workers are gone."""
        service, request = self._service, self._check_request(running.request)
        if request.id in self._selection.bookings:
            return 0
        find, config = service.router.registry.get, service.router.config
        prefill, booked = None, 0
        final: Decision | None = None
        record = RequestRecord(
            request.id, request.id, "select", service.clock(), service.wall(), request.model,
            isl_tokens=request.isl_tokens,
        )  # fmt: skip
        for hop in running.hops[:2]:
            try:
                decision = decision_of(hop, request, find, config)
            except KeyError:
                continue
            if decision.winner is None:
                continue
            final = decision
            if hop.stage == "prefill":
                prefill = decision
            booked |= service.apply(service.router.booking(decision, request)).ok
        if not booked:
            return 0
        if running.first_output:
            service.prefill_done(request.id)
            record.first_token_at = service.clock()
        elif prefill is None and final is not None:
            service.unseen_prefills.begin(final, request)
        self._selection.bookings[request.id] = Booking(
            request,
            record,
            prefill,
            service.clock(),
            owner=frontend.name,
            attempt=running.attempt,
        )
        frontend.bookings.add(request.id)
        return 1

    def _note_dispatch(self, plan: RoutingPlan, booked: list[Stage]) -> None:
        """The frontend sends the request to these hops now."""
        for hop in (plan.prefill, plan.decode):
            if hop is not None and hop.ref is not None and hop.stage in booked:
                member = self._fleet.by_id(hop.ref.worker_id)
                if member is not None:
                    self._fleet.dispatched(member)

    def _hands_off(self, plan: RoutingPlan) -> bool:
        """Whether decode is decided after prefill: no bootstrap pair, which get it together."""
        return plan.prefill is None or pair_address(self._fleet, plan.prefill) is None

    def _check_request(self, sent: SentRequest) -> RoutingRequest:
        service = self._service
        if sent.model not in service.models():
            raise HttpError(
                404,
                f"request.model: {sent.model[:200]!r} is not served by this router",
                "not_found_error",
                "unknown_model",
                param="request.model",
            )
        try:
            return request_of(sent, service.served.block_size(sent.model), service.clock())
        except RequestError as error:
            raise field_error(error) from None

    def _booking(
        self, frontend: Frontend, request_id: str, attempt: int | None = None
    ) -> Booking | None:
        """The frontend's booking, of this attempt; None for one that ended or was replaced."""
        booking = self._selection.bookings.get(request_id)
        if booking is None or booking.owner != frontend.name:
            return None
        if attempt is not None and booking.attempt != attempt:
            return None
        booking.seen_at = self._service.clock()
        return booking

    def _end_lease(self, frontend: Frontend) -> int:
        """Forget a frontend; returns the number of its bookings, which end."""
        ended = 0
        del self._frontends[frontend.name], self._leases[frontend.lease]
        for request_id in frontend.bookings:
            booking = self._selection.bookings.get(request_id)
            if booking is not None and booking.owner == frontend.name:
                self._selection.ended(booking, None, 0, "cancelled")
                ended += 1
        frontend.bookings.clear()
        return ended

    def _frontend(self, http: web.Request, message: Any) -> Frontend:
        """The process that sent the message, and renews its lease; raises HttpError 410."""
        frontend = self._frontends.get(_name(http))
        known = frontend is not None and frontend.lease == message.lease
        return self._renew_lease(frontend if known else None)

    def _renew_lease(self, frontend: Frontend | None) -> Frontend:
        if frontend is None:
            raise HttpError(
                410, "the lease of this frontend ended: join again", "gone", "lease_ended"
            )
        frontend.seen_at = self._service.clock()
        return frontend

    async def _message(self, http: ClientRequest, form: type[Message]) -> Message:
        """The body as a message; raises HttpError (400, 408, 413)."""
        with bodies_of(http).of(http) as body:
            raw = await body.read(http, self._body_bytes)
        try:
            return msgspec.json.decode(raw, type=form)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            text = str(error) if isinstance(error, msgspec.ValidationError) else "not valid JSON"
            raise bad_request(f"{form.__name__}: {text}", code="invalid_message") from None
        except (TypeError, ValueError, OverflowError, RequestError) as error:
            raise bad_request(f"{form.__name__}: {error}", code="invalid_message") from None

    def _fleet_cards(self) -> FleetCards:
        """The fleet; read again at most every 0.2 s, and only after a change."""
        service, now = self._service, self._service.clock()
        if self._shown is not None and self._read is not None:
            changes, at = self._read
            if changes == service.changes or now - at < _CARDS_S:
                return self._shown
        self._read = service.changes, now
        router = service.router
        cards = []
        for worker in router.registry:
            member = self._fleet.by_id(worker.worker_id)
            reason = router.registry.unavailable_reason(worker.worker_id)
            if member is None:
                cards.append(FleetCard(worker.to_dict(), reason))
                continue
            spec = member.spec
            cards.append(
                FleetCard(
                    worker.to_dict(),
                    reason,
                    member.bootstrap,
                    spec.forward_authorization,
                    member.source != "api" and spec.api_key_env is None,
                    spec.api_key_env if self._one_environment else None,
                    member.kind.name,
                )
            )
        settings = {name: getattr(router.config, name) for name in router.config.__slots__}
        thresholds = {
            model: dict(router.busy.thresholds(model).to_dict()) for model in service.models()
        }
        encoded = msgspec.json.encode((cards, settings, thresholds))
        if self._shown is None or encoded != self._cards:
            self._versions += 1
            self._cards = encoded
            self._shown = FleetCards(
                f"{self._process}-{self._versions}", cards, settings, thresholds
            )
        return self._shown


def _remember(ended: dict[str, None], request_id: str) -> None:
    """Add an id; above the bound the oldest goes."""
    ended[request_id] = None
    if len(ended) > _MAX_ENDED:
        del ended[next(iter(ended))]


def _name(http: web.Request) -> str:
    name = http.match_info["name"]
    if not name.isprintable() or len(name) > _MAX_NAME:
        raise bad_request(f"name: expected 1 to {_MAX_NAME} printable characters", code="name")
    return name


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, headers={"content-type": "application/json"})
