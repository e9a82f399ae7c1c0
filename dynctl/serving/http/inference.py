"""The inference endpoints: from the client's bytes to its response."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web

from dynctl.base.decode_errors import RequestError
from dynctl.documents.route_result import RouteResult
from dynctl.serving.engines.apis import APIS, BY_PATH, Endpoint
from dynctl.serving.engines.dispatch import Call
from dynctl.serving.engines.flow import Answer, GaveUp, HandoffRefused, Refused, RequestFlow
from dynctl.serving.http.auth import api_key_of, is_operator
from dynctl.serving.http.bodies import Body, bodies_of
from dynctl.serving.http.inference_requests import RequestReader, check_one_engine
from dynctl.serving.http.inference_responses import (
    OutputBlocks,
    PrefillReuse,
    client_error,
    dry_run_body,
    engine_failure_error,
    outcome_of,
    pass_events,
    pass_stream,
    queue_headers,
    unary_body,
)
from dynctl.serving.http.json_responses import nested_too_deeply
from dynctl.serving.http.keys import ApiKeys
from dynctl.serving.http.plain_requests import ClientAnswer, ClientHandler, ClientRequest
from dynctl.serving.records.recorder import tenant_of
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.preparation import Prepared
from dynctl.serving.routing.refusal import (
    HttpError,
    internal_error,
    overloaded,
    refusal,
)
from dynctl.serving.routing.service import Placement, RoutingService
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.wire.anthropic import MessagesRequest
from dynctl.wire.directions import DIRECTING
from dynctl.wire.nvext import (
    NO_NVEXT,
    REQUEST_ID_HEADER,
    strip_for_engine,
)
from dynctl.wire.openai import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    parse_any_request,
)
from dynctl.wire.responses import ResponsesRequest

DECISION_HEADER: Final = "x-dynctl-decision"
#: Why the prefill hop was left out, where it was.
BYPASS_HEADER: Final = "x-dynctl-prefill-skipped"
#: Client headers that are passed to engines.
_FORWARDED: Final = ("traceparent", "tracestate")

#: Fields that `nvext.extra_fields` may request, which show workers, or what was cached.
_DETAILS: Final = frozenset({"worker_id", "timing"})
#: A body with one of these is encoded again: with what was read of it, and each field once.
_REWRITTEN: Final = DIRECTING | {"nvext", "cache_salt"}

_INTERNAL: Final = "internal error; the log has the details"
#: Messages or prompts from which a request is large, whatever its bytes.
_MANY: Final = 128
#: Longer chats are tokenized in a thread.
_INLINE_CHARS: Final = 16 * 1024

_log = logging.getLogger(__name__)


class Inference:
    """The inference endpoints over one service."""

    def __init__(
        self,
        service: RoutingService,
        placement: Placement,
        flow: RequestFlow,
        reader: RequestReader,
        config: FrontendConfig,
        keys: ApiKeys,
    ) -> None:
        self._service = service
        self._placement = placement
        self._flow = flow
        self._reader = reader
        self._config = config
        self._keys = keys
        self._keyed = keys.required
        self.in_flight = 0
        #: Requests whose body is complete: a client that sends slowly holds no place.
        self._working = 0

    def handlers(self) -> dict[str, ClientHandler]:
        """The handler of each API by the path of its requests, which are POST."""
        return {api.path: partial(self._serve, endpoint=api.endpoint) for api in APIS.values()}

    # -- the common way --------------------------------------------------------------------

    async def _serve(self, http: ClientRequest, endpoint: Endpoint) -> ClientAnswer:
        service = self._service
        decision_id = service.new_id()
        record = RequestRecord(
            decision_id=decision_id,
            request_id=decision_id,
            endpoint=endpoint,
            received_at=service.clock(),
            received_wall=service.wall(),
        )
        self.in_flight += 1
        if service.traces is not None:
            service.traces.begin(record, http.headers, http.path)
        body = Body(bodies_of(http), http.remote or "")
        try:
            return await self._answer(http, body, record, endpoint)
        except HttpError as error:
            record.outcome = record.outcome or outcome_of(error)
            record.error_type = error.type
            record.status = error.status
            if record.plan is not None and not record.error:
                record.error = error.message
            return self._error(http, error, record)
        except RecursionError:
            record.outcome, record.error_type, record.status = "client_error", "invalid", 400
            return self._error(http, nested_too_deeply(), record)
        except asyncio.CancelledError:
            record.outcome, record.status = "cancelled", record.status or 499
            raise
        except (ConnectionError, TimeoutError):
            # The client disconnected during a write.
            record.outcome, record.status = "cancelled", record.status or 499
            raise
        except Exception:
            record.outcome, record.error_type, record.status = "internal", "internal", 500
            record.error = _INTERNAL
            _log.exception("request %s failed", decision_id)
            return self._error(http, internal_error(decision_id), record)
        finally:
            body.release()
            self.in_flight -= 1
            service.held.discard(decision_id)
            service.free(decision_id, computed=record.answered)
            record.finished_at = service.clock()
            service.observers.finished(record)

    async def _answer(
        self, http: ClientRequest, body: Body, record: RequestRecord, endpoint: Endpoint
    ) -> ClientAnswer:
        if self._service.refusing:
            self.refuse_while_draining()
        raw = await body.read(http, self._config.limits.body_bytes)
        key = api_key_of(http) if self._keyed else None
        reader = self._reader
        if self._working >= self._config.limits.in_flight:
            raise self._full()
        self._working += 1  # as place() does, in less time
        try:
            received = await reader.receive(raw, http.headers, record, endpoint, http, key)
            parsed = received.parsed
            try:
                options = self._flow.read(parsed)
            except RequestError as error:
                raise client_error(error) from None
            prepared = await reader.prepare(received)
            if parsed.nvext is not NO_NVEXT and parsed.nvext.dry_run:
                return await self._dry_run(http, parsed, prepared, record)
            call = self._call(http, parsed, raw, prepared, record, endpoint, options)
            prompts = prepared.prompts
            del prepared  # while a request waits, its token ids would be most of what it holds
            answer = await self._start(call, parsed, prompts)
            try:
                return await self._send(http, parsed, answer, call)
            finally:
                answer.close()
        finally:
            self._working -= 1

    async def _start(
        self, call: Call, parsed: ChatRequest | CompletionRequest, prompts: int
    ) -> Answer:
        """Place the request and wait for the first output. Raises HttpError."""
        record = call.record
        self._service.held.add(record.decision_id)
        try:
            return await self._flow.start(call)
        except Refused as error:
            raise self._refusal(error, record) from None
        except HandoffRefused as error:
            check_one_engine(prompts, parsed, handed_off=error.plan.prefill is not None)
            raise
        except GaveUp as error:
            raise engine_failure_error(error, record) from None

    async def _send(
        self,
        http: ClientRequest,
        parsed: ChatRequest | CompletionRequest,
        answer: Answer,
        call: Call,
    ) -> ClientAnswer:
        service, record = self._service, call.record
        record.status = 200
        if call.stream:
            record.first_token_at = service.clock()
            service.prefill_done(call.request.id)
        if record.first_token_at is not None:
            service.observers.first_token(record)
        headers = self._headers(record)
        reuse = PrefillReuse(answer, record) if answer.decoded and record.details else None
        if not call.stream:
            record.take_usage(answer.head)
            head = answer.head if reuse is None else await reuse.body(answer.head)
            body = unary_body(head, answer.plan, service, record, parsed.nvext)
            record.output_bytes = len(body)
            record.outcome = "success"
            return web.Response(
                body=body,
                headers={
                    "content-type": answer.response.headers.get("content-type", "application/json"),
                    **headers,
                },
            )
        blocks = None
        if service.router.config.router_track_output_blocks:
            blocks = OutputBlocks(service, call.request, parsed.nvext.agent_hints.osl)
        api, limit = BY_PATH[call.path], self._config.limits.stream_answer_bytes

        def detailed() -> bool:
            return is_operator(http, self._config.api_token)

        if api.named_events:
            response, failure = await pass_events(
                http, answer, record, headers, api=api, blocks=blocks, limit=limit,
                detailed=detailed, reuse=reuse,
            )  # fmt: skip
        else:
            response, failure = await pass_stream(
                http,
                answer,
                service,
                record,
                headers,
                nvext=parsed.nvext,
                blocks=blocks,
                limit=limit,
                detailed=detailed,
                reuse=reuse if parsed.include_usage else None,
            )
        record.outcome = "success" if failure is None else "upstream_error"
        if failure is not None:
            record.error_type, record.error = failure.kind, str(failure)
            self._flow.report(answer.plan, failure)
        return response

    async def explain(
        self, body: Mapping[str, Any], *, preset: str | None, http: ClientRequest | None = None
    ) -> RouteResult:
        """A dry run as the RouteResult contract; ``body`` is a chat or a completion request, and
        ``http`` has the session and the policy class.

        A refusal is a normal result. Raises HttpError for a request that cannot be routed.
        """
        service = self._service
        now = service.clock()
        record = RequestRecord(service.new_id(), "", "route", now, service.wall())
        parse = partial(parse_any_request, body)
        received = await self._reader.receive_dry_run(parse, record, http)
        prepared = await self._reader.prepare(received)
        result = await self._placement.explain(prepared.request, preset=preset)
        check_one_engine(prepared.prompts, received.parsed, handed_off=result.prefill is not None)
        return result

    # -- places in flight --------------------------------------------------------------------

    def refuse_while_draining(self) -> None:
        if self._service.refusing:
            raise HttpError(
                503, "the frontend is shutting down", "service_unavailable", 503,
                headers={"retry-after": "1", "connection": "close"},
            )  # fmt: skip

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of the places for requests in flight; raises HttpError if all are taken."""
        if self._working >= self._config.limits.in_flight:
            raise self._full()
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    def _full(self) -> HttpError:
        """The refusal where all places are taken."""
        most = self._config.limits.in_flight
        return overloaded(
            self._service.router.config.overload_status_code,
            f"{most} requests are in flight, the maximum of this frontend",
        )

    def _call(
        self,
        http: ClientRequest,
        parsed: ChatRequest | CompletionRequest,
        raw: bytes,
        prepared: Prepared,
        record: RequestRecord,
        endpoint: Endpoint,
        options: Any,
    ) -> Call:
        nvext, body = parsed.nvext, parsed.body
        if not _REWRITTEN.isdisjoint(body):
            plain: dict[str, Any] = strip_for_engine(body)
            if parsed.cache_salt is not None:
                # The engine must separate the tenants too, or they would share its cache.
                plain["cache_salt"] = parsed.cache_salt
            if nvext.token_data is not None and isinstance(parsed, CompletionRequest):
                plain[parsed.prompt_field] = list(nvext.token_data)
            body, raw = plain, msgspec.json.encode(plain)
        headers = {REQUEST_ID_HEADER: record.request_id}
        for name in _FORWARDED:
            value = http.headers.get(name)
            if value is not None:
                headers[name] = value
        authorization = http.headers.get("authorization")
        if authorization is not None and not self._is_ours(authorization):
            headers["authorization"] = authorization
        call = Call(
            prepared.request,
            APIS[endpoint].path,
            body,
            raw,
            parsed.stream,
            headers,
            record,
            one_engine=prepared.prompts > 1 or isinstance(parsed, EmbeddingRequest),
            parsed=parsed,
            token_ids=prepared.tokens.ids if self._flow.reads_tokens else None,
            options=options,
        )
        try:
            call = self._flow.prepare(call)
        except RequestError as error:
            raise client_error(error) from None
        service = self._service
        if parsed.cache_salt:
            record.tenant = tenant_of(service.preparation.session_secret, parsed.cache_salt)
        record.output_limit = parsed.max_tokens
        if service.observers.listening["on_prepared"]:
            service.observers.prepared(prepared.request, record, prepared.tokens.ids or ())
        return call

    def _is_ours(self, authorization: str) -> bool:
        """Whether the header is for this frontend: it never goes to an engine."""
        token = self._config.api_token
        return self._keys.required or (token is not None and token in authorization)

    # -- answering -------------------------------------------------------------------------

    async def _dry_run(
        self,
        http: ClientRequest,
        parsed: ChatRequest | CompletionRequest,
        prepared: Prepared,
        record: RequestRecord,
    ) -> ClientAnswer:
        request = prepared.request
        plan = await self._placement.place(request, dry=True)
        if not plan.ok:
            raise self._refusal(Refused(plan), record)
        check_one_engine(prepared.prompts, parsed, handed_off=plan.prefill is not None)
        ids = None if prepared.tokens.ids is None else list(prepared.tokens.ids)
        body = msgspec.json.encode(dry_run_body(plan, ids, parsed))
        record.status, record.outcome = 200, "success"
        headers = self._headers(record)
        if not parsed.stream or isinstance(parsed, MessagesRequest | ResponsesRequest):
            return web.Response(body=body, headers={"content-type": "application/json", **headers})
        return web.Response(
            body=b"data: " + body + b"\n\ndata: [DONE]\n\n",
            headers={"content-type": "text/event-stream", "cache-control": "no-cache", **headers},
        )

    def _refusal(self, error: Refused, record: RequestRecord) -> HttpError:
        record.outcome = "refused"
        router = self._service.router
        refused = refusal(
            error.plan,
            router.config,
            attempts=record.attempts,
            probe_interval_s=self._config.health.interval_s,
        )
        record.error = refused.message
        return refused

    def _headers(self, record: RequestRecord) -> dict[str, str]:
        headers = {REQUEST_ID_HEADER: record.request_id, DECISION_HEADER: record.decision_id}
        if not record.details:
            return headers
        bypass = None if record.plan is None else record.plan.bypass
        if bypass is not None and bypass.bypassed:
            headers[BYPASS_HEADER] = bypass.reason
        headers.update(queue_headers(record))
        return headers

    def _error(self, http: ClientRequest, error: HttpError, record: RequestRecord) -> web.Response:
        if record.began:
            # A second head inside the stream would be read as output, or as another answer.
            if http.transport is not None:
                http.transport.abort()
            raise ConnectionResetError("the stream cannot go on")
        if not is_operator(http, self._config.api_token):
            error = error.for_client()
        return web.Response(
            status=error.status,
            body=error.body(http.path),
            headers={
                "content-type": "application/json",
                **self._headers(record),
                **error.headers,
            },
        )
