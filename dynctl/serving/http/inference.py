"""The inference endpoints: from the client's bytes to its response."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web

from dynctl.base.decode_errors import RequestError
from dynctl.base.turns import Apart, Turns
from dynctl.documents.route_result import RouteResult
from dynctl.serving.engines.apis import APIS, BY_PATH, Endpoint
from dynctl.serving.engines.dispatch import Call
from dynctl.serving.engines.flow import Answer, GaveUp, HandoffRefused, Refused, RequestFlow
from dynctl.serving.http.auth import api_key_of, client_of, is_operator
from dynctl.serving.http.bodies import Body, bodies_of
from dynctl.serving.http.inference_requests import parse_request
from dynctl.serving.http.inference_responses import (
    OutputBlocks,
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
from dynctl.serving.http.keys import ApiKey, ApiKeys, ClientRights
from dynctl.serving.records.recorder import tenant_of
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.placement import Placement
from dynctl.serving.routing.prompts import Prompt, cache_key_problem, dynamo_chat, prompts_of
from dynctl.serving.routing.refusal import (
    HttpError,
    internal_error,
    overloaded,
    refusal,
    unknown_model,
    unknown_pin,
)
from dynctl.serving.routing.service import Prepared, RoutingService
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.tokenization import PromptError, TemplateError
from dynctl.wire.anthropic import MessagesRequest
from dynctl.wire.directions import DIRECTING, check_directions
from dynctl.wire.large_body import LARGE
from dynctl.wire.nvext import (
    REQUEST_ID_HEADER,
    policy_class_of,
    session_of,
    strip_for_engine,
    with_cache_salt,
)
from dynctl.wire.openai import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    parse_any_request,
)
from dynctl.wire.responses import ResponsesRequest
from router_core import HashingError, Session

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
        config: FrontendConfig,
        keys: ApiKeys,
    ) -> None:
        self._service = service
        self._placement = placement
        self._flow = flow
        self._config = config
        self._keys = keys
        self._keyed = keys.required
        #: Of clients without a key.
        self._rights = ClientRights(config.client_fields)
        #: Chat templates that failed; there are as many as models.
        self._broken: set[str] = set()
        #: In which large bodies are read.
        self.turns = Turns("large bodies")
        self.in_flight = 0
        #: Requests whose body is complete: a client that sends slowly holds no place.
        self._working = 0

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, "chat_completions")

    async def completions(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, "completions")

    async def embeddings(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, "embeddings")

    async def responses(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, "responses")

    async def messages(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, "anthropic_messages")

    # -- the common way --------------------------------------------------------------------

    async def _serve(self, http: web.Request, endpoint: Endpoint) -> web.StreamResponse:
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
        try:
            with bodies_of(http).of(http) as body:
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
            self.in_flight -= 1
            service.held.discard(decision_id)
            service.free(decision_id, computed=record.answered)
            record.finished_at = service.clock()
            service.observers.finished(record)

    async def _answer(
        self, http: web.Request, body: Body, record: RequestRecord, endpoint: Endpoint
    ) -> web.StreamResponse:
        self.refuse_while_draining()
        raw = await body.read(http, self._config.limits.body_bytes)
        self._take_place()  # as place() does, in less time
        try:
            return await self._work(http, raw, record, endpoint)
        finally:
            self._working -= 1

    async def _work(
        self, http: web.Request, raw: bytes, record: RequestRecord, endpoint: Endpoint
    ) -> web.StreamResponse:
        key = api_key_of(http) if self._keyed else None
        rights = self._rights if key is None else key.rights
        apart = None if len(raw) < LARGE else self.turns.of(http.remote or "")
        parsed = await self._received(http.headers, raw, record, endpoint, rights, apart)
        if key is not None and rights.isolated:
            parsed = self._isolated(parsed, key)
        if not rights.details:
            record.details = False
            parsed = _without_details(parsed)
        parts = parsed.messages if isinstance(parsed, ChatRequest) else parsed.prompts
        if apart is None and len(parts) > _MANY:
            apart = self.turns.of(http.remote or "")
        nvext = parsed.nvext
        if parsed.stream and APIS[endpoint].named_events and nvext.extra_fields:
            raise HttpError(
                400,
                f"nvext.extra_fields: not supported in streams of {APIS[endpoint].path}",
                "invalid_request_error",
                "not_supported",
                param="nvext.extra_fields",
            )
        try:
            options = self._flow.read(parsed)
        except RequestError as error:
            raise client_error(error) from None
        prepared = await self._prepare(
            parsed, record, self._session(http.headers, http), policy_class_of(http.headers), apart
        )
        if nvext.dry_run:
            return await self._dry_run(http, parsed, prepared, record)
        call = self._call(http, parsed, raw, prepared, record, endpoint, options)
        record.tenant = tenant_of(self._service.session_secret, parsed.cache_salt)
        record.output_limit = parsed.max_tokens
        self._service.observers.prepared(prepared.request, record)
        self._service.held.add(record.decision_id)
        try:
            answer = await self._flow.start(call)
        except Refused as error:
            raise self._refusal(error, prepared, record) from None
        except HandoffRefused as error:
            check_one_engine(prepared, parsed, handed_off=error.plan.prefill is not None)
            raise
        except GaveUp as error:
            raise engine_failure_error(error, record) from None
        try:
            return await self._send(http, parsed, answer, call)
        finally:
            answer.close()

    async def _send(
        self,
        http: web.Request,
        parsed: ChatRequest | CompletionRequest,
        answer: Answer,
        call: Call,
    ) -> web.StreamResponse:
        service, record = self._service, call.record
        record.status = 200
        if call.stream:
            record.first_token_at = service.clock()
            service.prefill_done(call.request.id)
        if record.first_token_at is not None:
            service.observers.first_token(record)
        headers = self._headers(record)
        if not call.stream:
            record.take_usage(answer.head)
            body = unary_body(answer.head, answer.plan, service, record, parsed.nvext)
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
                detailed=detailed,
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
            )
        record.outcome = "success" if failure is None else "upstream_error"
        if failure is not None:
            record.error_type, record.error = failure.kind, str(failure)
            self._flow.report(answer.plan, failure)
        return response

    async def explain(
        self, body: Mapping[str, Any], *, preset: str | None, http: web.Request | None = None
    ) -> RouteResult:
        """A dry run as the RouteResult contract; ``body`` is a chat or a completion request, and
        ``http`` has the session and the policy class.

        A refusal is a normal result. Raises HttpError for a request that cannot be routed.
        """
        service = self._service
        now = service.clock()
        record = RequestRecord(service.new_id(), "", "route", now, service.wall())
        owner = "" if http is None else http.remote or ""
        large = http is not None and (http.content_length or LARGE) >= LARGE
        apart = self.turns.of(owner) if large else None
        try:
            parse = partial(parse_any_request, body)
            parsed = parse() if apart is None else await apart(parse)
        except RequestError as error:
            raise client_error(error) from None
        session = None if http is None else self._session(http.headers, http)
        policy_class = None if http is None else policy_class_of(http.headers)
        named = self._named(parsed)
        prepared = await self._prepare(named, record, session, policy_class, apart)
        found = await self._placement.explain(prepared.request, preset=preset)
        check_one_engine(prepared, parsed, handed_off=found.prefill is not None)
        return found

    # -- reading ---------------------------------------------------------------------------

    async def read(
        self, headers: Mapping[str, str], raw: bytes, record: RequestRecord, endpoint: Endpoint
    ) -> tuple[ChatRequest | CompletionRequest, Prepared]:
        """A request that a gateway received: parsed, and ready to be routed. Raises HttpError."""
        apart = None if len(raw) < LARGE else self.turns.of("")
        parsed = await self._received(headers, raw, record, endpoint, self._rights, apart)
        prepared = await self._prepare(
            parsed, record, self._session(headers), policy_class_of(headers), apart
        )
        return parsed, prepared

    def routed_model(self, name: str) -> str:
        """The model that a request for ``name`` is routed by; without a name the only one that is
        served. Raises HttpError."""
        base = self._service.served.base_model(name or self.only_model())
        if base is None:
            raise self.unknown_model(name)
        return base

    def refuse_while_draining(self) -> None:
        if self._service.draining:
            raise HttpError(
                503, "the frontend is shutting down", "service_unavailable", 503,
                headers={"retry-after": "1", "connection": "close"},
            )  # fmt: skip

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of the places for requests in flight; raises HttpError if all are taken."""
        self._take_place()
        try:
            yield
        finally:
            self._working -= 1

    def _take_place(self) -> None:
        most = self._config.limits.in_flight
        if self._working >= most:
            raise overloaded(
                self._service.router.config.overload_status_code,
                f"{most} requests are in flight, the maximum of this frontend",
            )
        self._working += 1

    async def _received(
        self,
        headers: Mapping[str, str],
        raw: bytes,
        record: RequestRecord,
        endpoint: Endpoint,
        rights: ClientRights,
        apart: Apart | None,
    ) -> ChatRequest | CompletionRequest:
        """The request with its model, which the observers learn. Raises HttpError. ``apart``: runs
        the work that a large body makes."""
        limit = self._config.limits.body_bytes
        try:
            if apart is None:
                parsed = parse_request(raw, headers, limit, endpoint)
            else:
                parsed = await apart(partial(parse_request, raw, headers, limit, endpoint))
            if not DIRECTING.isdisjoint(parsed.body):
                check_directions(parsed.body, rights.fields)
        except RequestError as error:
            raise client_error(error) from None
        record.model, record.stream = parsed.model, parsed.stream
        if parsed.request_id is not None:
            record.request_id = parsed.request_id
        parsed = self._named(parsed)
        record.model = parsed.model
        self._service.observers.received(record)
        return parsed

    def _isolated(
        self, parsed: ChatRequest | CompletionRequest, key: ApiKey
    ) -> ChatRequest | CompletionRequest:
        """The request with the cache salt of an isolated key, in which its own salt is mixed."""
        salt = key.cache_salt(self._service.salt_of(parsed))
        nvext = msgspec.structs.replace(parsed.nvext, cache_salt=None)
        return replace(
            parsed, body=with_cache_salt(parsed.body, salt), cache_salt=salt, nvext=nvext
        )

    def _session(
        self, headers: Mapping[str, str], http: web.Request | None = None
    ) -> Session | None:
        """The session of a request; None while affinity is off, whatever its headers are.

        Clients of ``http`` have sessions of their own; those of a gateway are not known.
        """
        if self._service.router.config.router_session_affinity_ttl_secs is None:
            return None
        try:
            name = session_of(headers)
        except RequestError as error:
            raise client_error(error) from None
        client = b"" if http is None else client_of(http, self._config.api_token)
        return self._service.session(name, client)

    async def _prepare(
        self,
        parsed: ChatRequest | CompletionRequest,
        record: RequestRecord,
        session: Session | None = None,
        policy_class: str | None = None,
        apart: Apart | None = None,
    ) -> Prepared:
        nvext = parsed.nvext
        base = self._service.served.base_model(parsed.model)
        if base is None:
            raise self.unknown_model(parsed.model)
        lora = parsed.model if parsed.model in self._service.served.adapters else None
        served_name = self._service.served.served_name(parsed.model)
        pins = nvext.pin_prefill, nvext.pin_decode
        worker_set = self._service.served.draw_worker_set(
            base, served_name=served_name, pins=pins, likely=record.endpoint == "route"
        )
        length = self._service.served.context_length(base, worker_set)
        if apart is None:
            prompts, not_modelled = prompts_of(parsed, length)
        else:
            prompts, not_modelled = await apart(partial(prompts_of, parsed, length))
        kinds = self._service.tokenizers.kinds(base)
        if kinds and not_modelled is None:
            not_modelled = cache_key_problem(parsed, kinds)
        if apart is not None:
            self._check_given(parsed, prompts, length)
        try:
            if self._config.dynamo is not None and isinstance(parsed, ChatRequest):
                prompts = await self._as_dynamo(base, worker_set, parsed, prompts, apart)
                not_modelled = None
            prepared = await self._service.prepare(
                base,
                prompts,
                decision_id=record.decision_id,
                constraints=nvext.constraints,
                pin_prefill=nvext.pin_prefill,
                pin_decode=nvext.pin_decode,
                cache_salt=self._service.salt_of(parsed),
                lora_name=lora,
                not_modelled=not_modelled,
                worker_set=worker_set,
                session=session,
                policy_class=policy_class,
                priority=nvext.agent_hints.priority or 0,
                strict_priority=nvext.agent_hints.strict_priority or 0,
                served_name=served_name,
                streams=self._streams(parsed),
                apart=apart,
            )
        except PromptError as error:
            raise HttpError(
                400, str(error), "invalid_request_error", "invalid_prompt", param=error.field
            ) from None
        except TemplateError as error:
            self._broken_template(error)
            raise HttpError(
                400, f"messages: the chat template of {base} failed: {error.reason}",
                "invalid_request_error", "invalid_prompt", param="messages",
            ) from None  # fmt: skip
        except HashingError as error:
            raise HttpError(
                400,
                str(error),
                "invalid_request_error",
                "invalid_prompt",
                param=parsed.prompt_field,
            ) from None
        record.isl_tokens = prepared.request.isl_tokens
        record.prompts = prepared.prompts
        record.tokenize_s = prepared.tokenize_s
        self._check_length(parsed, prepared)
        bad_pin = unknown_pin(prepared.request, self._service.router.registry)
        if bad_pin is not None:
            raise bad_pin
        return prepared

    def _broken_template(self, error: TemplateError) -> None:
        """Log where the template is, once: clients get the reason without the path."""
        if error.origin not in self._broken:
            self._broken.add(error.origin)
            _log.warning("%s: this chat template fails for some requests (400)", error.origin)

    def _streams(self, parsed: ChatRequest | CompletionRequest) -> bool:
        """Whether the first output of the request is seen. Workers of a Dynamo deployment stream
        whatever the client gets, and embeddings come when the prompt is computed."""
        of_dynamo = self._config.dynamo is not None
        return parsed.stream or of_dynamo or isinstance(parsed, EmbeddingRequest)

    async def _as_dynamo(
        self,
        model: str,
        worker_set: str | None,
        chat: ChatRequest,
        prompts: list[Prompt],
        apart: Apart | None,
    ) -> list[Prompt]:
        """The prompt of a chat as Dynamo's frontend makes it, where the tokenizer is here."""
        tokenizer = self._service.tokenizers.of(model, worker_set)
        if tokenizer is None or prompts[0].token_ids is not None:
            return prompts
        if apart is not None:
            ids = await apart(partial(dynamo_chat, tokenizer, chat))
        elif sum(map(_length, chat.messages)) < _INLINE_CHARS:
            ids = dynamo_chat(tokenizer, chat)
        else:
            ids = await asyncio.to_thread(dynamo_chat, tokenizer, chat)
        return [replace(prompts[0], messages=None, token_ids=ids)]

    def _check_length(self, parsed: ChatRequest | CompletionRequest, prepared: Prepared) -> None:
        """Refuse a prompt that is too long for every engine of the model."""
        if prepared.tokens.ids is None:
            return
        request = prepared.request
        limit = self._service.served.context_length(request.model, request.worker_set)
        self._check_tokens(parsed, prepared.longest, limit)

    def _check_given(
        self,
        parsed: ChatRequest | CompletionRequest,
        prompts: list[Prompt],
        limit: int | None,
    ) -> None:
        """As :meth:`_check_length`, before anything is made of the tokens that a client sent."""
        given = [prompt.token_ids for prompt in prompts if prompt.token_ids is not None]
        if given and prompts[0].keep is None:
            self._check_tokens(parsed, max(map(len, given)), limit)

    def _check_tokens(
        self, parsed: ChatRequest | CompletionRequest, longest: int, limit: int | None
    ) -> None:
        if limit is None:
            return
        field, output = parsed.prompt_field, " with its output"
        if isinstance(parsed, EmbeddingRequest):
            # Without output tokens the prompt can have the whole length.
            limit, output = limit + 1, ""
        if longest >= limit:
            raise HttpError(
                400,
                f"{field} has {longest} tokens; {parsed.model} takes at most "
                f"{limit - (not output)}{output}",
                "invalid_request_error",
                "context_length_exceeded",
                param=field,
            )

    def _call(
        self,
        http: web.Request,
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
            token_ids=prepared.tokens.ids,
            options=options,
        )
        try:
            self._flow.prepare(call)
        except RequestError as error:
            raise client_error(error) from None
        return call

    def _is_ours(self, authorization: str) -> bool:
        """Whether the header is for this frontend: it never goes to an engine."""
        token = self._config.api_token
        return self._keys.required or (token is not None and token in authorization)

    # -- answering -------------------------------------------------------------------------

    async def _dry_run(
        self,
        http: web.Request,
        parsed: ChatRequest | CompletionRequest,
        prepared: Prepared,
        record: RequestRecord,
    ) -> web.StreamResponse:
        request = prepared.request
        plan = await self._placement.place(request, dry=True)
        if not plan.ok:
            raise self._refusal(Refused(plan), prepared, record)
        check_one_engine(prepared, parsed, handed_off=plan.prefill is not None)
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

    def _refusal(self, error: Refused, prepared: Prepared, record: RequestRecord) -> HttpError:
        record.outcome = "refused"
        router = self._service.router
        found = refusal(
            error.plan,
            router.config,
            attempts=record.attempts,
            probe_interval_s=self._config.health.interval_s,
        )
        record.error = found.message
        return found

    def _named(self, parsed: ChatRequest | CompletionRequest) -> ChatRequest | CompletionRequest:
        """The request with its model: the only one that is served, where the client named none."""
        return parsed if parsed.model else replace(parsed, model=self.only_model())

    def only_model(self) -> str:
        """The model of a request that names none; raises HttpError unless exactly one is served."""
        served = self._service.models()
        if len(served) == 1:
            return served[0]
        if not served and (unread := self._service.may_serve("")):
            raise unknown_model("", served, unread)
        known = ", ".join(sorted(served)) or "none yet"
        raise HttpError(
            400,
            f"model is required, since this frontend does not serve exactly one; models: {known}",
            "invalid_request_error",
            "missing_field",
            param="model",
        )

    def unknown_model(self, model: str) -> HttpError:
        """As :func:`dynctl.serving.routing.refusal.unknown_model`."""
        return unknown_model(model, self._service.models(), self._service.may_serve(model))

    def _headers(self, record: RequestRecord) -> dict[str, str]:
        headers = {REQUEST_ID_HEADER: record.request_id, DECISION_HEADER: record.decision_id}
        if not record.details:
            return headers
        bypass = None if record.plan is None else record.plan.bypass
        if bypass is not None and bypass.bypassed:
            headers[BYPASS_HEADER] = bypass.reason
        return {**headers, **queue_headers(record)}

    def _error(self, http: web.Request, error: HttpError, record: RequestRecord) -> web.Response:
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


def _without_details(parsed: ChatRequest | CompletionRequest) -> ChatRequest | CompletionRequest:
    """The request of a client that may not see where it is routed and what was cached there. Raises
    HttpError for a dry run, which shows nothing else."""
    nvext = parsed.nvext
    if nvext.dry_run:
        raise HttpError(
            403,
            "nvext.annotations: this key may not see where requests are routed; the operator lets "
            "it with details=yes",
            "permission_error",
            "details_not_allowed",
            param="nvext.annotations",
        )
    fields = tuple(name for name in nvext.extra_fields if name not in _DETAILS)
    return replace(parsed, nvext=msgspec.structs.replace(nvext, extra_fields=fields))


def _length(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) else _INLINE_CHARS if content else 0


def check_one_engine(
    prepared: Prepared, parsed: ChatRequest | CompletionRequest, *, handed_off: bool
) -> None:
    """Refuse what cannot be handed off: a prefill engine returns the location of the KV cache of
    the first prompt only, and embeddings have nothing to decode."""
    if not handed_off:
        return
    served = "and prefill and decode workers serve this model"
    if isinstance(parsed, EmbeddingRequest):
        raise HttpError(
            400,
            f"/v1/embeddings needs a worker that does the whole request, {served}: start an "
            "aggregated one for embeddings under a model name of its own",
            "invalid_request_error",
            "embeddings_not_supported",
            param="model",
        )
    if prepared.prompts > 1:
        raise HttpError(
            400,
            f"prompt has {prepared.prompts} prompts, {served}: a hand-off takes one prompt; send "
            "one request for each prompt",
            "invalid_request_error",
            "batch_not_supported",
            param="prompt",
        )
