"""Selections and bookings for other frontends: the endpoints of ``serve router``.

A frontend requests a selection with its tokens or hashes, books it, and reports the progress of
the request: first token, output blocks, end. A booking without reports (its frontend ended) expires
after ``active_request_expiry_secs``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from aiohttp import web

from dynctl.base.json_fields import read_number, refuse_unknown
from dynctl.documents.decisions import UNKNOWN_RESPONSE, ClientResponse
from dynctl.documents.selection import (
    ActiveHop,
    BookingState,
    Hops,
    OverlapRow,
    OverlapScores,
    potential_loads,
    selection_result,
)
from dynctl.serving.http.auth import guarded
from dynctl.serving.http.json_responses import (
    bad_request,
    json_response,
    not_found,
    read_json_object,
)
from dynctl.serving.http.selection_request import SelectionReader, naming_fields
from dynctl.serving.routing.refusal import HttpError, refusal
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.telemetry.observers import RequestRecord
from router_core import (
    STAGES,
    Bypass,
    Decision,
    Role,
    RoutingPlan,
    RoutingRequest,
    Stage,
    decay_fraction,
)

#: Maximum of booked requests; further ones are refused.
MAX_BOOKINGS = 65_536

_ARTICLES: Final = {Role.DECODE: "a decode", Role.AGGREGATED: "an aggregated"}

#: What is known of a client whose frontend reports nothing any more.
_EXPIRED: Final = ClientResponse("unknown", error="no report from its frontend")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Booking:
    """A request that another frontend has in flight. ``seen_at``: time of its last report.

    ``bypass``: the verdict with which its prefill hop was kept or left out.
    ``owner``: the frontend process with a lease that placed it, at its ``attempt``-th time; such a
    process gets ``answer`` again where it repeats a message.
    ``first``: the hop that computes the prompt; ``expected``: output tokens that its client
    expects; None where not known.
    """

    request: RoutingRequest
    record: RequestRecord
    prefill: Decision | None
    seen_at: float
    bypass: Bypass | None = None
    owner: str = ""
    attempt: int = 0
    answer: bytes = b""
    first: Decision | None = None
    expected: int | None = None


class SelectionApi:
    """Selections and bookings over one service. ``token`` is the operators'."""

    def __init__(
        self, service: RoutingService, *, token: str | None = None, body_bytes: int = 16 << 20
    ) -> None:
        self._service = service
        self._token = token
        self._reader = SelectionReader(service, body_bytes)
        self.bookings: dict[str, Booking] = {}

    def __len__(self) -> int:
        return len(self.bookings)

    def routes(self) -> list[web.RouteDef]:
        token = self._token
        return [
            web.post("/v1/select", guarded(self.select, token)),
            web.post("/v1/select_and_book", guarded(self.select_and_book, token)),
            web.post("/v1/bookings/{id}/decode", guarded(self.decode, token)),
            web.post("/v1/bookings/{id}/first_token", guarded(self.first_token, token)),
            web.post("/v1/bookings/{id}/output_block", guarded(self.output_block, token)),
            web.delete("/v1/bookings/{id}", guarded(self.end, token)),
            web.post("/v1/overlap_scores", guarded(self.overlap_scores, token)),
            web.get("/v1/loads", guarded(self.loads, token)),
        ]

    # -- selecting -------------------------------------------------------------------------

    async def select(self, http: web.Request) -> web.StreamResponse:
        """The workers that would serve the request; books nothing and is not recorded."""
        selection, request = await self._reader.read(http)
        await self._service.read_index(request)
        plan = self._decide(request, selection.hops)
        if not plan.ok:
            raise self._refusal(plan, selection.hops)
        return json_response(selection_result(plan, ()))

    async def select_and_book(self, http: web.Request) -> web.StreamResponse:
        """Select, and count the request as load of its winners in the same step."""
        self.admit()
        selection, request = await self._reader.read(http)
        self.admit()
        router = self._service.router
        if request.id in self.bookings or router.load.bookings(request.id):
            raise _duplicate(request.id)
        plan, booked = await self.place(
            request,
            lambda _: selection.hops == "prefill",
            hops=selection.hops,
            expected=selection.expected_output_tokens,
            headers=http.headers,
        )
        if not plan.ok:
            raise self._refusal(plan, selection.hops)
        return json_response(selection_result(plan, booked), 201)

    async def place(
        self,
        request: RoutingRequest,
        prefill_only: Callable[[RoutingPlan], bool],
        *,
        hops: Hops = "all",
        owner: str = "",
        attempt: int = 0,
        expected: int | None = None,
        may_wait: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[RoutingPlan, list[Stage]]:
        """Decide and book without an await in between: other requests would see the same load. A
        request that waits in the router queue is booked by its turn.

        Returns the booked hops too; none where the plan is a refusal, or waits and not
        ``may_wait``: then nothing has changed, and it does not suspend. ``prefill_only``: whether
        decode is decided when prefill is done; ``hops`` as in a selection. An earlier booking of
        the request is replaced. ``headers``: those of a client, whose trace continues here.
        """
        service = self._service
        await service.read_index(request)
        if request.id in service.router.queue:
            raise _duplicate(request.id)
        earlier = self.bookings.pop(request.id, None)
        began = service.clock()
        if earlier is not None:
            # The engine of that attempt failed.
            service.free(request.id, computed=earlier.record.first_token_at is not None)
        plan = self._decide(request, hops)
        if plan.waits and earlier is None and not may_wait:
            return plan, []
        if earlier is not None:
            record = earlier.record
        else:
            record = self._open_record(request, began, headers)
        record.route_s += service.clock() - began
        if plan.waits and earlier is None:
            plan = await self._wait_for_turn(plan, request, record, hops)
        elif plan.waits:
            plan = plan.after_wait(plan, record.queued_s or 0.0)
        service.decided(plan, request, record)
        if not plan.ok:
            # Of a retry its frontend reports what the client got: the error of the engine.
            self._note_refusal(plan, record, reported=bool(owner and attempt))
            return plan, []
        booked = self._book(plan, request, record, prefill_only)
        self.bookings[request.id] = Booking(
            request, record, plan.prefill, service.clock(), plan.bypass, owner, attempt,
            first=plan.prefill or plan.decode, expected=expected,
        )  # fmt: skip
        return plan, [hop.stage for hop in booked]

    def _book(
        self,
        plan: RoutingPlan,
        request: RoutingRequest,
        record: RequestRecord,
        prefill_only: Callable[[RoutingPlan], bool],
    ) -> list[Decision]:
        """Book the hops that are decided for good."""
        hops = [hop for hop in (plan.prefill, plan.decode) if hop is not None]
        if len(hops) > 1 and prefill_only(plan):
            hops = hops[:1]
        for hop in hops:
            self._service.book(hop, request, record)
        if plan.prefill is None:
            self._service.unseen_prefills.begin(plan.final, request)
        return hops

    def _open_record(
        self, request: RoutingRequest, began: float, headers: Mapping[str, str] | None
    ) -> RequestRecord:
        """The record of a request that arrives with its first placement."""
        service = self._service
        record = RequestRecord(
            request.id, request.id, "select", began, service.wall(), request.model,
            isl_tokens=request.isl_tokens,
        )  # fmt: skip
        if headers is not None and service.traces is not None:
            service.traces.begin(record, headers, "/v1/select_and_book")
        service.observers.received(record)
        service.observers.prepared(request, record, ())
        return record

    def _note_refusal(self, plan: RoutingPlan, record: RequestRecord, *, reported: bool) -> None:
        """The request ends with a refusal. ``reported``: another process reports the response."""
        record.outcome, record.finished_at = "refused", self._service.clock()
        record.status = refusal(plan, self._service.router.config).status
        if reported:
            record.response = UNKNOWN_RESPONSE
        self._note_end(record)

    def _refusal(self, plan: RoutingPlan, hops: Hops) -> HttpError:
        """The error of a refused selection; in a pool of one role with the hop that it can have."""
        registry = self._service.router.registry
        error, members = refusal(plan, self._service.router.config), registry.model(plan.model)
        for hop, role in (("prefill", Role.PREFILL), ("decode", Role.DECODE)):
            if hops != hop and members and members == members & registry.roles[role]:
                error.message += f'; this router has {hop} workers only: send "hops": "{hop}"'
        return error

    def _decide(self, request: RoutingRequest, hops: Hops) -> RoutingPlan:
        """The plan of a selection. A prefill hop is decided alone where the model has only prefill
        workers; a decode hop follows the policy of the prefill worker that the request pins."""
        service = self._service
        registry = service.router.registry
        if hops == "decode":
            pin = request.pin_prefill
            after = None if pin is None else registry.get(pin.worker_id)
            if after is not None and after.role is not Role.PREFILL:
                raise bad_request(
                    f"pins.prefill: {after.name} is {_ARTICLES[after.role]} worker; expected the "
                    "prefill worker whose transfer policy the decode hop follows",
                    param="pins.prefill",
                    code="unknown_worker",
                )
            return service.plan_hop(request, "decode", after=after)
        if hops == "prefill":
            members = registry.model(request.model)
            if members and members == members & registry.roles[Role.PREFILL]:
                return service.plan_hop(request, "prefill")
        return service.plan(request)

    async def overlap_scores(self, http: web.Request) -> web.StreamResponse:
        """The number of leading blocks of the prompt that each rank of the model has cached."""
        _, request = await self._reader.read(http)
        router = self._service.router
        mask = router.registry.model(request.model)
        held = router.overlap_scores(request)
        candidates = router.registry.candidates(mask)
        rows = [
            OverlapRow(
                worker.name,
                ref.worker_id,
                ref.dp_rank,
                held.get(ref, 0),
                router.freshness[slot].state,
            )
            for slot, worker, ref in zip(
                candidates.slots, candidates.workers, candidates.refs, strict=True
            )
        ]
        return json_response(
            OverlapScores(request.model, request.block_size, request.prompt_blocks, rows)
        )

    # -- bookings --------------------------------------------------------------------------

    async def decode(self, http: web.Request) -> web.StreamResponse:
        """Prefill is done: free it, decide decode with the current fleet, and book it."""
        booking = self._booking(http)
        request_id = booking.request.id
        active = self._service.router.load.bookings(request_id)
        if any(booked.stage == "decode" for booked in active):
            raise _duplicate(request_id)
        plan = self.place_decode(booking)
        if plan.decode is None or plan.decode.winner is None:
            raise refusal(plan, self._service.router.config)
        return json_response(selection_result(plan, ["decode"]), 201)

    def place_decode(
        self,
        booking: Booking,
        allowed: frozenset[int] | None = None,
        excluded: tuple[tuple[int, str], ...] = (),
    ) -> RoutingPlan:
        """Free the prefill hop, decide decode again, and book it if it has a winner.

        ``allowed`` replaces the request's allowed workers, without those that are ``excluded``, by
        id with the reason. Raises HttpError for a booking without a prefill hop.
        """
        service = self._service
        if booking.prefill is None:
            raise bad_request(
                f"booking {booking.request.id} has no prefill hop", code="no_prefill_hop"
            )
        request = booking.request
        if allowed is not None:
            request = booking.request = replace(
                request, allowed_worker_ids=allowed, excluded=excluded
            )
        booking.record.prefill_done_at = service.clock()
        self._prefill_ended(booking)
        service.free(request.id, "prefill")
        service.free(request.id, computed=False)  # a decode hop that failed
        plan = replace(service.continue_plan(request, booking.prefill), bypass=booking.bypass)
        service.decided(plan, request, booking.record)
        if plan.decode is not None and plan.decode.winner is not None:
            service.book(plan.decode, request, booking.record)
        return plan

    async def first_token(self, http: web.Request) -> web.StreamResponse:
        """The first output token arrived: the request's prefill load ends."""
        booking = self._booking(http)
        self.first_output(booking)
        return json_response(self._state(booking))

    def first_output(self, booking: Booking) -> None:
        """The prefill load of the request ends."""
        service, record = self._service, booking.record
        self._prefill_ended(booking)
        service.prefill_done(booking.request.id)
        if record.first_token_at is None:
            record.first_token_at = service.clock()
            service.observers.first_token(record)

    async def output_block(self, http: web.Request) -> web.StreamResponse:
        """Generation filled one more block. ``decay_fraction`` 0..1 as in Dynamo; without one it
        follows from the expected output tokens of the selection, if it has any."""
        booking = self._booking(http)
        fraction = self._decay(booking)
        if http.can_read_body:
            body = await read_json_object(http)
            with naming_fields():
                refuse_unknown(body, "body", ("decay_fraction",))
                if body.get("decay_fraction") is not None:
                    fraction = read_number(body["decay_fraction"], "decay_fraction")
        applied = self._service.output_block(booking.request.id, fraction)
        if applied.code == "invalid":
            raise bad_request(applied.message, param="decay_fraction", code="out_of_range")
        if not applied.ok:
            raise HttpError(
                409,
                f"booking {booking.request.id} has no active hop: its worker was removed",
                "conflict",
                "not_active",
            )
        return json_response(self._state(booking))

    async def end(self, http: web.Request) -> web.StreamResponse:
        """The request ended, or with ``?stage=`` one of its hops. ``?output_tokens=`` and
        ``?outcome=success|error|cancelled`` go into the metrics."""
        booking = self._booking(http)
        stage, tokens, outcome = _ending(http)
        accepted = outcome == "success" or booking.record.first_token_at is not None
        self.ended(booking, stage, tokens, outcome, computed=accepted)
        return json_response(self._state(booking))

    def ended(
        self,
        booking: Booking,
        stage: Stage | None,
        tokens: int,
        outcome: str,
        *,
        computed: bool = True,
        response: ClientResponse | None = None,
    ) -> None:
        """End a hop, or (``stage`` None) the booking; ``outcome`` is that of the record. Not
        ``computed``: the engine did not accept it. ``response``: what the client got, where its
        frontend reports it."""
        alone = booking.first is not None and booking.first.stage == "prefill"
        if alone and computed and outcome == "success" and stage in (None, "prefill"):
            self._prefill_ended(booking)
        self._service.free(booking.request.id, stage, computed=computed)
        if stage is None:
            del self.bookings[booking.request.id]
            record = booking.record
            record.output_events = tokens
            record.outcome = outcome
            record.status = 200 if outcome == "success" else 500
            record.finished_at = self._service.clock()
            record.response = response
            self._note_end(record)

    def sweep(self) -> int:
        """Remove expired bookings; returns their number."""
        # A booking without active hops may be between two, or its worker was removed; it expires
        # only if its frontend sent no report either.
        load, config = self._service.router.load, self._service.router.config
        silent_since = self._service.clock() - config.active_request_expiry_secs
        gone = [
            booking
            for request_id, booking in self.bookings.items()
            if booking.seen_at < silent_since and not load.bookings(request_id)
        ]
        for booking in gone:
            del self.bookings[booking.request.id]
            booking.record.outcome, booking.record.status = "cancelled", 499
            booking.record.response = _EXPIRED
            booking.record.finished_at = self._service.clock()
            self._note_end(booking.record)
        if gone:
            _log.warning(
                "%d bookings expired: no report from their frontends for %g s",
                len(gone),
                config.active_request_expiry_secs,
            )
        return len(gone)

    # -- loads -----------------------------------------------------------------------------

    async def loads(self, http: web.Request) -> web.StreamResponse:
        """The load booked on each rank by this router, and the load that the rank reported."""
        model = http.query.get("model")
        rows = [row for row in self._service.workers() if model in (None, row.model)]
        return json_response(potential_loads(rows, bookings=len(self.bookings)))

    # -- inside ----------------------------------------------------------------------------

    async def _wait_for_turn(
        self, plan: RoutingPlan, request: RoutingRequest, record: RequestRecord, hops: Hops
    ) -> RoutingPlan:
        """The plan of a request that waits in the router queue; its first hop is booked."""
        service = self._service
        try:
            decide = partial(self._decide, hops=hops)
            return await service.admission.wait(plan, request, record, decide=decide)
        except BaseException:
            service.free(request.id)
            record.outcome, record.status = "cancelled", 499
            record.finished_at = service.clock()
            self._note_end(record)
            raise

    def admit(self) -> None:
        """Raise HttpError where a further booking is refused."""
        if self._service.refusing:
            raise HttpError(
                503, "the router is shutting down", "service_unavailable", "draining",
                headers={"retry-after": "1"},
            )  # fmt: skip
        if len(self.bookings) + len(self._service.admission.waiting) >= MAX_BOOKINGS:
            raise HttpError(
                503,
                f"{MAX_BOOKINGS:,} requests are booked, the maximum of this router; "
                "end finished ones: DELETE /v1/bookings/ID",
                "overloaded",
                "too_many_bookings",
                headers={"retry-after": "1"},
            )

    def _booking(self, http: web.Request) -> Booking:
        request_id = http.match_info["id"]
        booking = self.bookings.get(request_id)
        if booking is None:
            raise not_found(
                f"no booking {request_id[:200]!r}: it ended, expired or never existed",
                code="unknown_booking",
            )
        booking.seen_at = self._service.clock()
        return booking

    def _state(self, booking: Booking) -> BookingState:
        active = self._service.router.load.bookings(booking.request.id)
        return BookingState(
            booking.request.id,
            [
                ActiveHop(booked.stage, booked.prefill_tokens, booked.output_blocks)
                for booked in active
            ],
        )

    def _decay(self, booking: Booking) -> float | None:
        """The part of the expected output that is left after one more block."""
        active = self._service.router.load.bookings(booking.request.id)
        if booking.expected is None or not active:
            return None
        generated = (active[-1].output_blocks + 1) * booking.request.block_size
        return decay_fraction(generated, booking.expected)

    def _prefill_ended(self, booking: Booking) -> None:
        """The prefill of the booking ends now, if it has not ended before."""
        service, first = self._service, booking.first
        for booked in service.router.load.bookings(booking.request.id):
            if first is not None and booked.stage == first.stage and booked.prefill_tokens:
                service.measure_prefill(first, booked.booked_at)

    def _note_end(self, record: RequestRecord) -> None:
        self._service.observers.finished(record)


def _ending(http: web.Request) -> tuple[Stage | None, int, str]:
    """``(stage, output tokens, outcome of the record)`` from the query."""
    query = http.query
    for name in query:
        if name not in ("stage", "output_tokens", "outcome"):
            raise bad_request(
                f"{name[:64]}: unknown parameter, expected stage, output_tokens or outcome",
                param=name[:64],
                code="unknown_parameter",
            )
    text = query.get("stage")
    stage = next((stage for stage in STAGES if stage == text), None)
    if text is not None and stage is None:
        raise bad_request(
            f"stage: expected one of {', '.join(STAGES)}, got {text[:40]!r}",
            param="stage",
            code="out_of_range",
        )
    tokens = query.get("output_tokens", "0")
    if not (tokens.isascii() and tokens.isdigit() and len(tokens) <= 9):
        raise bad_request(
            f"output_tokens: expected a whole number, got {tokens[:40]!r}",
            param="output_tokens",
            code="out_of_range",
        )
    outcomes = {"success": "success", "error": "upstream_error", "cancelled": "cancelled"}
    outcome = query.get("outcome", "success")
    if outcome not in outcomes:
        raise bad_request(
            f"outcome: expected one of {', '.join(outcomes)}, got {outcome[:40]!r}",
            param="outcome",
            code="out_of_range",
        )
    return stage, int(tokens), outcomes[outcome]


def _duplicate(request_id: str) -> HttpError:
    return HttpError(
        409,
        f"request_id: {request_id[:200]!r} is booked already; end it first, or use another",
        "conflict",
        "duplicate_request",
        param="request_id",
    )
