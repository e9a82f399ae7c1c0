"""One HTTP request of a gateway: its messages in order, the choice, and its end.

The request's body is collected, routed as the frontend's requests are, and passed on; the booking
ends with the response, with the client, or with the gateway's stream, whichever comes first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from dynctl.base.decode_errors import RequestError
from dynctl.documents.decisions import ClientResponse
from dynctl.serving.engines.apis import BY_PATH
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.fleet import Fleet
from dynctl.serving.epp.grpc_server import Call, Code
from dynctl.serving.http.inference import DECISION_HEADER, Inference
from dynctl.serving.http.inference_requests import RequestReader, check_one_engine
from dynctl.serving.http.inference_responses import (
    OutputBlocks,
    client_error,
    dry_run_body,
    outcome_of,
    queue_headers,
)
from dynctl.serving.http.json_responses import bad_request, nested_too_deeply
from dynctl.serving.records.recorder import tenant_of
from dynctl.serving.routing.config import Limits
from dynctl.serving.routing.preparation import Prepared
from dynctl.serving.routing.prompts import CHARS_PER_TOKEN, Prompt
from dynctl.serving.routing.refusal import HttpError, internal_error, overloaded, refusal
from dynctl.serving.routing.service import Placement, RoutingService
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.wire.directions import DIRECTING, ENGINE_HEADERS, check_directions
from dynctl.wire.envoy import ext_proc
from dynctl.wire.envoy.ext_proc import BodyMode, ExtProcError, Modes, Processing
from dynctl.wire.large_body import LARGE, decode_large
from dynctl.wire.nvext import READ_HEADERS
from router_core import Decision, RoutingPlan, RoutingRequest, Worker

_log = logging.getLogger(__name__)

#: The end of a response in which its usage is looked for.
_TAIL_BYTES: Final = 2048
#: Pieces in which a body may arrive: each costs an answer.
_MOST_PIECES: Final = 1 << 16
#: Headers of a request that are read until it is routed.
_READ_HEADERS: Final = READ_HEADERS | {ext_proc.MODEL_NAME, "content-length", "content-type"}
#: Characters that are kept of a header or a path; no longer value has a meaning.
_MOST_KEPT: Final = 1024
#: Bytes that a text in memory has beside its characters, which have up to four each.
_TEXT_BYTES: Final = 56
_BYTES_PER_CHAR: Final = 4
#: Tokens that an estimate of a body that is not seen may have.
_MOST_ESTIMATED: Final = 1 << 20
_NO_BODY: Final = "cache overlap not modelled: the gateway does not send the request's body"
_OTHER_PATH: Final = "cache overlap not modelled: the path has no prompt that dynctl reads"
_STATUS_DIGITS: Final = 3
_WHOLE: Final = (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL)
_ENDED_EARLY: Final = "the response ended early: its client left, or the engine failed"
_NOT_SEEN: Final = "the gateway reported no response"
_SINGLE: Final = "aggregated"
_PAIR: Final = "disaggregated"


#: What is read of a body whose path has no prompt to route by; the rest is skipped.
_OtherBody: Final = msgspec.defstruct(
    "_OtherBody", [(name, Any, None) for name in ("model", *sorted(DIRECTING))]
)


class Picker:
    """What the exchanges of one process share.

    ``dynamo_frontend``: see `PickerConfig`; None: workers have HTTP addresses. ``client_fields``:
    the fields of `DIRECTIONS` that clients may send, also as headers.
    """

    def __init__(
        self,
        service: RoutingService,
        fleet: Fleet,
        inference: Inference,
        placement: Placement,
        reader: RequestReader,
        limits: Limits,
        dynamo_frontend: tuple[str, int] | None = None,
        client_fields: frozenset[str] = frozenset(),
    ) -> None:
        self.service = service
        self.client_fields = client_fields
        refused = (name for name, sets in ENGINE_HEADERS.items() if sets not in client_fields)
        #: Headers of clients that no engine gets, and those that are kept.
        self.strip = frozenset((*ext_proc.OWN_HEADERS, *refused))
        self.kept = _READ_HEADERS - self.strip
        self.dynamo_frontend = dynamo_frontend
        self.fleet = fleet
        self.inference = inference
        self.placement = placement
        self.reader = reader
        self.limits = limits
        #: Bytes of the bodies, headers and subsets that are collected now.
        self.held = 0
        self._open: set[Exchange] = set()
        #: Exchanges whose body arrives, the oldest first: they take no place of those that run.
        self._arriving: dict[Exchange, None] = {}
        self._addresses: dict[str, str] = {}

    def begin(self, call: Call) -> Exchange:
        """A new stream of a gateway."""
        exchange = Exchange(self, call)
        self._open.add(exchange)
        return exchange

    def left(self, exchange: Exchange) -> None:
        self._open.discard(exchange)
        self._arriving.pop(exchange, None)

    def arrives(self, exchange: Exchange) -> None:
        """The body of a request begins; above the limit the oldest one that arrives makes room."""
        self._arriving[exchange] = None
        if len(self._arriving) > self.limits.in_flight:
            next(iter(self._arriving)).gives_up("more requests began than may wait for their body")

    def arrived(self, exchange: Exchange) -> None:
        self._arriving.pop(exchange, None)

    @property
    def full(self) -> bool:
        """Whether more requests run than the limit."""
        return self.inference.in_flight - len(self._arriving) > self.limits.in_flight

    def __len__(self) -> int:
        return len(self._open)

    def bytes_held(self) -> int:
        return self.held

    async def sweep(self) -> None:
        """End exchanges that wait too long for their gateway, until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self.limits.body_s / 4))
            now = self.service.clock()
            for exchange in tuple(self._open):
                exchange.check(now)

    def address(self, worker: Worker) -> str:
        """``IP:PORT`` of a worker's HTTP API, or of the Dynamo frontend that takes its requests."""
        url = worker.endpoint or ""
        found = self._addresses.get(url)
        if found is None:
            direct = self.dynamo_frontend
            parts = urlsplit(url if direct is None else f"tcp://{url}")
            host = parts.hostname or ""
            port = parts.port or (443 if parts.scheme == "https" else 80)
            if direct is not None:
                host, port = direct[0] or host, direct[1]
            if host == "localhost":
                host = "127.0.0.1"
            found = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if len(self._addresses) > 2 * self.limits.workers:
                self._addresses.clear()
            self._addresses[url] = found
        return found

    def workers_at(self, subset: tuple[str, ...]) -> frozenset[int]:
        """The workers at these addresses; one without a port: all ports of the host."""
        wanted = frozenset(subset)
        return frozenset(
            worker.worker_id
            for worker in self.service.router.registry
            if (address := self.address(worker)) in wanted
            or address.rpartition(":")[0].strip("[]") in wanted
        )


class Exchange:
    """The handler of one stream."""

    def __init__(self, picker: Picker, call: Call) -> None:
        self._picker = picker
        self._call = call
        self._service = picker.service
        self._modes = Modes()
        self._headers: dict[str, str] = {}
        self._strip: tuple[str, ...] = ()
        self._subset: tuple[str, ...] | None = None
        self._bodiless = False
        self._path = ""
        self._body = bytearray()
        self._pieces = 0
        #: Its part of the picker's ``held``: the body, and headers and subset beside it.
        self._size = 0
        self._trailers = False
        self._record: RequestRecord | None = None
        self._request: RoutingRequest | None = None
        self._plan: RoutingPlan | None = None
        self._blocks: OutputBlocks | None = None
        self._task: asyncio.Task[None] | None = None
        self._collecting = self._answered = self._over = False
        self._whole = self._begun = False
        self._tail = b""
        self._began = self._seen = picker.service.clock()

    # -- the stream ------------------------------------------------------------------------

    def on_message(self, data: bytes) -> None:
        try:
            message = ext_proc.decode(data)
        except ExtProcError as error:
            self._call.finish(Code.INVALID_ARGUMENT, str(error))
            return
        self._seen = self._service.clock()
        if message.observes:
            self._call.finish(
                Code.INVALID_ARGUMENT, "observability_mode: a picker must be able to answer"
            )
            return
        begun = self._record is not None
        if begun == (message.kind == "request_headers") or (
            self._answered and message.kind == "response_headers"
        ):
            self._call.finish(Code.INVALID_ARGUMENT, f"unexpected {message.kind}")
            return
        match message.kind:
            case "request_headers":
                self._request_headers(message)
            case "request_body":
                self._request_body(message)
            case "request_trailers":
                self._request_trailers()
            case "response_headers":
                self._response_headers(message)
            case "response_body":
                self._response_body(message)
            case "response_trailers":
                self._call.send(ext_proc.trailers_answer("response_trailers"))
                self._complete()

    def on_half_close(self) -> None:
        # Without the response's body its end is that of the stream.
        if self._answered and self._modes.response is BodyMode.NONE:
            self._complete()
        self._call.finish()

    def on_closed(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._answered and self._modes.response is BodyMode.NONE:
            self._complete()
        self._end("cancelled")
        self._picker.left(self)

    def check(self, now: float) -> None:
        """End the exchange if its gateway has been silent for too long."""
        limits, silent = self._picker.limits, now - self._seen
        if self._collecting and now - self._began > limits.body_s:
            self.gives_up(f"the request's body did not arrive within {limits.body_s:g} s")
        elif self._record is None and silent > limits.body_s:
            self._call.finish(Code.CANCELLED, f"no request within {limits.body_s:g} s")
        elif self._over and silent > limits.body_s:
            self._call.finish()
        elif self._waits_for_gateway and silent > limits.stream_silence_s:
            self._call.finish(Code.CANCELLED, f"no message within {limits.stream_silence_s:g} s")

    def gives_up(self, problem: str) -> None:
        """Refuse the request whose body does not arrive."""
        self._refuse(HttpError(408, problem, "invalid_request_error", "request_timeout"))

    @property
    def _waits_for_gateway(self) -> bool:
        """Whether the request was routed and its end is awaited."""
        return self._record is not None and self._task is None and not self._collecting

    # -- the request -----------------------------------------------------------------------

    def _request_headers(self, message: Processing) -> None:
        picker, service = self._picker, self._service
        self._modes = modes = message.modes or Modes()
        decision_id = service.new_id()
        self._record = RequestRecord(
            decision_id, decision_id, "gateway", service.clock(), service.wall()
        )
        picker.inference.in_flight += 1
        if BodyMode.GRPC in (modes.request, modes.response):
            self._call.finish(Code.UNIMPLEMENTED, "body mode GRPC is not supported")
            return
        self._keep(message)
        if service.refusing:
            self._refuse(
                HttpError(
                    503, "the endpoint picker is shutting down", "service_unavailable", 503,
                    headers={"retry-after": "1"},
                )
            )  # fmt: skip
        elif picker.full:
            self._refuse(self._too_many())
        elif picker.held > picker.limits.all_bodies_bytes:
            self._refuse(self._all_held())
        elif message.end:
            self._bodiless = True
            self._begin_choice(None)
        elif modes.request is BodyMode.NONE or (
            modes.request is BodyMode.STREAMED and not modes.eager
        ):
            self._begin_choice(None)
        else:
            self._collecting, self._began = True, self._seen
            picker.arrives(self)
            if modes.request in _WHOLE:
                self._call.send(ext_proc.headers_answer("request_headers", remove=self._strip))

    def _keep(self, message: Processing) -> None:
        """Keep of the headers what is read until the request is routed."""
        given = message.headers
        self._strip = tuple(sorted(self._picker.strip & given.keys()))
        for kept in self._picker.kept & given.keys():
            self._headers[kept] = given[kept][:_MOST_KEPT]
        self._subset = message.subset
        self._path = given.get(":path", "").partition("?")[0][:_MOST_KEPT]
        for text in (*self._headers.values(), *(message.subset or ())):
            self._size += _TEXT_BYTES + _BYTES_PER_CHAR * len(text)
        self._picker.held += self._size

    def _request_body(self, message: Processing) -> None:
        if not self._collecting:
            if self._modes.request is not BodyMode.FULL_DUPLEX_STREAMED:
                self._call.send(ext_proc.body_answer("request_body"))
            return
        size, limits = len(message.body), self._picker.limits
        if self._pieces >= _MOST_PIECES:
            problem = f"the body has more than {_MOST_PIECES:,} pieces"
            self._refuse(HttpError(413, problem, "invalid_request_error", "body_too_large"))
            return
        if len(self._body) + size > limits.body_bytes:
            problem = f"the body has more than {limits.body_bytes} bytes"
            self._refuse(HttpError(413, problem, "invalid_request_error", "body_too_large"))
            return
        if self._picker.held + size > limits.all_bodies_bytes and self._picker.held > self._size:
            self._refuse(self._all_held())
            return
        self._picker.held += size
        self._size += size
        self._body += message.body
        self._pieces += 1
        if message.end or self._modes.request in _WHOLE:
            self._begin_choice(bytes(self._body))

    def _request_trailers(self) -> None:
        self._trailers = True
        if self._collecting:
            self._begin_choice(bytes(self._body))
        elif self._task is None:
            self._call.send(ext_proc.trailers_answer("request_trailers"))

    def _begin_choice(self, body: bytes | None) -> None:
        self._collecting, self._body = False, bytearray()
        self._picker.arrived(self)
        if self._picker.full:
            self._refuse(self._too_many())
            return
        self._task = asyncio.get_running_loop().create_task(self._choose(body))

    async def _choose(self, body: bytes | None) -> None:
        record = self._record
        assert record is not None
        try:
            plan = await self._placed(body, record)
        except HttpError as error:
            self._refuse(error)
        except RecursionError:
            self._refuse(nested_too_deeply())
        except asyncio.CancelledError:
            raise
        except Exception:
            _log.exception("request %s failed", record.decision_id)
            record.outcome = record.error_type = "internal"
            self._refuse(internal_error(record.decision_id))
        else:
            if plan is not None:
                self._pass_on(plan, body)
        finally:
            self._task = None

    async def _placed(self, body: bytes | None, record: RequestRecord) -> RoutingPlan | None:
        """The plan of the request, booked; None: it is answered. Raises HttpError."""
        service = self._service
        if not service.models():
            raise HttpError(503, "no worker is registered", "service_unavailable", 503)
        if self._bodiless:
            return self._any_worker()
        api = BY_PATH.get(self._path)
        if api is not None and body is not None:
            record.endpoint = api.endpoint
            reader = self._picker.reader
            received = await reader.receive(body, self._headers, record, api.endpoint)
            parsed, prepared = received.parsed, await reader.prepare(received)
        else:
            parsed, prepared = None, await self._estimated(body, record)
        request = self._request = self._within(prepared.request)
        if parsed is not None and parsed.nvext.dry_run:
            plan = await self._picker.placement.place(request, dry=True)
            if plan.ok:
                ids = None if prepared.tokens.ids is None else list(prepared.tokens.ids)
                answer = msgspec.json.encode(dry_run_body(plan, ids, parsed))
                record.status, record.outcome = 200, "success"
                self._answer_at_once(200, {}, answer, "dry_run")
                return None
        else:
            if parsed is not None:
                if parsed.cache_salt:
                    record.tenant = tenant_of(service.preparation.session_secret, parsed.cache_salt)
                record.output_limit = parsed.max_tokens
            service.observers.prepared(request, record, prepared.tokens.ids or ())
            service.held.add(request.id)
            plan = await self._picker.placement.place(request)
            if plan.waits:
                plan = await service.admission.wait(plan, request, record)
        if not plan.ok:
            record.outcome = "refused"
            service.decided(plan, request, record)
            raise refusal(
                plan, service.router.config, probe_interval_s=self._picker.fleet.probe_interval
            )
        if parsed is not None:
            check_one_engine(prepared.prompts, parsed, handed_off=plan.prefill is not None)
        for hop in (plan.prefill, plan.decode):
            if hop is not None:
                service.book(hop, request, record)
        service.unseen_prefills.begin(plan.first, request)
        service.decided(plan, request, record)
        record.dispatched_at = service.clock()
        member = self._picker.fleet.by_id(plan.final.require().worker_id)
        if member is not None:
            self._picker.fleet.dispatched(member)
        if service.router.config.router_track_output_blocks:
            osl = None if parsed is None else parsed.nvext.agent_hints.osl
            self._blocks = OutputBlocks(service, request, osl)
        return plan

    def _any_worker(self) -> RoutingPlan:
        """A worker for a request without a body, as ``GET /v1/models``; it is no load."""
        service = self._service
        named = self._headers.get(ext_proc.MODEL_NAME)
        plan: RoutingPlan | None = None
        for model in [named] if named in service.models() else service.models():
            assert model is not None
            request = RoutingRequest(
                service.new_id(), model, 1, service.served.block_size(model), overlap_modelled=False
            )
            plan = service.plan(self._within(request))
            if plan.ok:
                return plan
        assert plan is not None
        raise refusal(plan, service.router.config)

    async def _model_in(self, body: bytes) -> str:
        """The model that a body of any path names; empty without one. Raises HttpError for a field
        that clients may not send, and where an engine may read other fields than this process."""
        try:
            if len(body) < LARGE:
                other = msgspec.json.decode(body or b"{}", type=_OtherBody)
            else:
                turns = self._picker.reader.turns
                other = msgspec.convert(
                    await turns.run("", partial(decode_large, body)), _OtherBody
                )
            fields = msgspec.structs.asdict(other)
            check_directions(fields, self._picker.client_fields)
        except RequestError as error:
            raise client_error(error) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            if self._headers.get("content-type", "").startswith("multipart/"):
                return ""
            raise bad_request(
                f"{self._path[:200]}: the body is not a JSON object in UTF-8", code="invalid_json"
            ) from None
        model = fields["model"]
        return model if isinstance(model, str) else ""

    async def _estimated(self, body: bytes | None, record: RequestRecord) -> Prepared:
        """A request that is routed by load: its prompt is not seen, or not understood."""
        service = self._service
        name = self._headers.get(ext_proc.MODEL_NAME, "")
        length = self._headers.get("content-length", "") if body is None else str(len(body))
        named = "" if body is None else await self._model_in(body)
        name = name or named
        model = self._picker.reader.routed_model(name)
        record.model = name or model
        service.observers.received(record)
        note = _NO_BODY if body is None else _OTHER_PATH
        prepared = await service.preparation.prepare(
            model, Prompt(text=""), decision_id=record.decision_id, not_modelled=note,
            lora_name=name if name in service.served.adapters else None,
            served_name=service.served.served_name(name),
        )  # fmt: skip
        known = length.isascii() and length.isdigit() and len(length) < 12
        tokens = int(length) // CHARS_PER_TOKEN if known else 1
        record.isl_tokens = min(max(1, tokens), _MOST_ESTIMATED)
        request = replace(prepared.request, isl_tokens=record.isl_tokens)
        return replace(prepared, request=request)

    def _within(self, request: RoutingRequest) -> RoutingRequest:
        """The request with the workers of the gateway's subset alone."""
        if self._subset is None:
            return request
        allowed = self._picker.workers_at(self._subset)
        if not allowed:
            problem = "none of the endpoints in the gateway's subset is a worker"
            raise HttpError(503, problem, "service_unavailable", "no_endpoint_in_subset")
        if request.allowed_worker_ids is not None:
            allowed &= request.allowed_worker_ids
        return replace(request, allowed_worker_ids=allowed)

    def _pass_on(self, plan: RoutingPlan, body: bytes | None) -> None:
        """Send the choice, and the body where the gateway has given it away."""
        self._plan, call = plan.settled(), self._call
        headers = self._choice(plan)
        mode = self._modes.request
        buffered = mode in _WHOLE and not self._bodiless
        call.send(
            ext_proc.headers_answer(
                "request_body" if buffered else "request_headers",
                headers,
                remove=[name for name in self._strip if name not in headers],
                reroute=True,
                endpoint=headers[ext_proc.DESTINATION],
            )
        )
        if body is not None and mode is BodyMode.FULL_DUPLEX_STREAMED:
            for piece in ext_proc.streamed_answers("request_body", body, end=not self._trailers):
                call.send(piece)
        elif body is not None and not buffered:
            for _ in range(self._pieces):
                call.send(ext_proc.body_answer("request_body"))
        if self._trailers:
            call.send(ext_proc.trailers_answer("request_trailers"))
        self._release()

    def _choice(self, plan: RoutingPlan) -> dict[str, str]:
        """The headers that carry the choice."""
        final, prefill = plan.final, plan.prefill
        worker, ref = _worker(final), final.require()
        headers = {
            ext_proc.DESTINATION: self._picker.address(worker),
            ext_proc.WORKER_ID: str(ref.worker_id),
            ext_proc.DP_RANK: str(ref.dp_rank),
            ext_proc.ROUTING_MODE: _SINGLE if prefill is None else _PAIR,
        }
        config = worker.runtime_config
        if config.data_parallel_size > 1:
            headers[ext_proc.ENGINE_RANK] = str(ref.dp_rank - config.data_parallel_start_rank)
        if prefill is not None:
            first = prefill.require()
            if self._picker.dynamo_frontend is None:
                headers[ext_proc.PREFILLER] = self._picker.address(_worker(prefill))
            headers[ext_proc.PREFILL_WORKER_ID] = str(first.worker_id)
            headers[ext_proc.PREFILL_DP_RANK] = str(first.dp_rank)
        return headers

    # -- the response ----------------------------------------------------------------------

    def _response_headers(self, message: Processing) -> None:
        record = self._record
        assert record is not None
        status = message.headers.get(":status", "")
        three = len(status) == _STATUS_DIGITS and status.isascii() and status.isdigit()
        record.status = int(status) if three else 0
        self._answered = True
        self._whole = message.headers.get("content-type", "").startswith("application/json")
        self._report(record.status)
        added = {DECISION_HEADER: record.decision_id} if self._request is not None else {}
        self._call.send(
            ext_proc.headers_answer("response_headers", {**added, **queue_headers(record)})
        )
        if self._modes.response is BodyMode.NONE or message.end:
            self._first_output(record)
        if message.end:
            self._complete()

    def _response_body(self, message: Processing) -> None:
        record, body = self._record, message.body
        assert record is not None
        if body:
            self._first_output(record)
            events = body.count(b"data:")
            record.output_events += events
            record.output_bytes += len(body)
            if self._blocks is not None and events:
                self._blocks.add(events)
            short = len(body) < _TAIL_BYTES
            self._tail = (self._tail + body if short else body)[-_TAIL_BYTES:]
        if self._modes.response is BodyMode.FULL_DUPLEX_STREAMED:
            for piece in ext_proc.streamed_answers("response_body", body, end=message.end):
                self._call.send(piece)
        else:
            self._call.send(ext_proc.body_answer("response_body"))
        if message.end:
            self._complete()

    def _first_output(self, record: RequestRecord) -> None:
        """The engine sent its first output: the prompt is computed."""
        service, plan, request = self._service, self._plan, self._request
        if self._begun or plan is None or request is None or record.status >= 400:
            return
        self._begun = True
        service.prefill_done(request.id)
        if plan.prefill is not None:
            service.free(request.id, "prefill")
        if self._whole or not request.streams:
            return  # the response came as a whole: when its first token was made is not known
        record.first_token_at = service.clock()
        if plan.prefill is not None:
            record.prefill_done_at = record.first_token_at
        elif record.dispatched_at is not None and plan.final.parameters.track_prefill_tokens:
            service.measure_prefill(plan.final, record.dispatched_at)
        service.observers.first_token(record)

    def _report(self, status: int) -> None:
        """Report to the fleet what the status shows about the worker."""
        plan, fleet = self._plan, self._picker.fleet
        if plan is None or self._request is None:
            return
        worker = _worker(plan.final)
        problem = f"{worker.endpoint} answered with status {status}"
        if self._record is not None and status >= 400:
            self._record.error = problem
        if status < 500:
            fleet.answered(worker.worker_id)
            return
        failure = UpstreamFailure("status", problem, status=status)
        if self._record is not None:
            self._record.attempts.append((worker.name, plan.final.stage, problem))
        fleet.report_failure(worker.worker_id, failure)

    # -- the end ---------------------------------------------------------------------------

    def _too_many(self) -> HttpError:
        most = self._picker.limits.in_flight
        return self._overloaded(f"{most} requests are in flight, the maximum")

    def _all_held(self) -> HttpError:
        most = self._picker.limits.all_bodies_bytes
        return self._overloaded(f"the requests in flight have {most} bytes, the maximum")

    def _overloaded(self, problem: str) -> HttpError:
        return overloaded(self._service.router.config.overload_status_code, problem)

    def _refuse(self, error: HttpError) -> None:
        """The gateway answers the client with the error."""
        record = self._record
        assert record is not None
        record.outcome = record.outcome or outcome_of(error)
        record.error_type, record.status = error.type, error.status
        shown = error.for_client()
        self._answer_at_once(error.status, error.headers, shown.body(self._path), str(error.code))

    def _answer_at_once(
        self, status: int, headers: Mapping[str, str], body: bytes, code: str
    ) -> None:
        record = self._record
        assert record is not None
        given = {
            "content-type": "application/json",
            DECISION_HEADER: record.decision_id,
            **queue_headers(record),
            **headers,
        }
        self._call.send(ext_proc.immediate_answer(status, given, body, f"dynctl_{code}"))
        self._end(record.outcome)

    def _complete(self) -> None:
        """The response ended."""
        record = self._record
        if record is None or self._over:
            return
        if self._tail:
            record.take_usage(self._tail)
        if record.status >= 500:
            self._end("upstream_error")
        else:
            self._end("client_error" if record.status >= 400 else "success")

    def _end(self, outcome: str) -> None:
        """Free what the request holds; once."""
        record, service = self._record, self._service
        if record is None or self._over:
            return
        self._over = True
        # A response may come while the request's body does: the gateway answered by itself.
        if self._collecting:
            self._collecting = False
            self._picker.arrived(self)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._release()
        self._picker.inference.in_flight -= 1
        service.held.discard(record.decision_id)
        record.outcome = record.outcome or outcome
        service.free(record.decision_id, computed=record.answered)
        if record.outcome == "cancelled":
            record.status = record.status or 499
        record.finished_at = service.clock()
        if self._bodiless:
            return  # as GET /v1/models: no inference
        if self._plan is not None and record.outcome == "cancelled":
            record.response = self._unseen_end(record)
        service.observers.finished(record)

    def _unseen_end(self, record: RequestRecord) -> ClientResponse:
        """What is known where the stream ends before the response does: the gateway does not report
        whether the client left or the engine failed, and may never report a response at all."""
        if self._answered:
            cut = replace(record, outcome="upstream_error", status=200, error=_ENDED_EARLY)
            return msgspec.structs.replace(cut.client_response(), status=record.status or None)
        return replace(record, outcome="unknown", status=0, error=_NOT_SEEN).client_response()

    def _release(self) -> None:
        """What was collected for the choice is not needed any more."""
        self._picker.held -= self._size
        self._size = self._pieces = 0
        self._body = bytearray()
        self._headers, self._subset = {}, None


def _worker(decision: Decision) -> Worker:
    worker = decision.worker
    if worker is None:
        raise ValueError(f"decision {decision.id} has no winner")
    return worker
