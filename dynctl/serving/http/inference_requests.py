"""The first stages of an inference request: from bytes of a client to hashes of a prompt."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import msgspec

from dynctl.base.decode_errors import RequestError
from dynctl.base.turns import Apart, Turns
from dynctl.serving.engines.apis import APIS, Endpoint
from dynctl.serving.http.auth import client_of
from dynctl.serving.http.inference_responses import client_error
from dynctl.serving.http.keys import ApiKey, ClientRights
from dynctl.serving.http.plain_requests import ClientRequest
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.preparation import Prepared
from dynctl.serving.routing.prompts import Prompt, cache_key_problem, dynamo_chat, prompts_of
from dynctl.serving.routing.refusal import HttpError, unknown_model, unknown_pin
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.tokenization import PromptError, TemplateError
from dynctl.wire.anthropic import parse_messages_request
from dynctl.wire.directions import DIRECTING, check_directions
from dynctl.wire.json_body import decode_object
from dynctl.wire.large_body import LARGE
from dynctl.wire.nvext import (
    NO_NVEXT,
    PIN_HEADERS,
    REQUEST_ID_HEADER,
    policy_class_of,
    session_of,
    with_cache_salt,
)
from dynctl.wire.openai import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    apply_headers,
    parse_chat_request,
    parse_completion_request,
    parse_embedding_request,
)
from dynctl.wire.responses import parse_responses_request
from router_core import HashingError, Session, quick_init

#: Fields that `nvext.extra_fields` may request, which show workers, or what was cached.
_DETAILS: Final = frozenset({"worker_id", "timing"})
_NO_PINS: Final = (None, None)
#: Messages or prompts from which a request is large, whatever its bytes.
_MANY: Final = 128
#: Longer chats are tokenized in a thread.
_INLINE_CHARS: Final = 16 * 1024

_log = logging.getLogger(__name__)


@quick_init
@dataclass(frozen=True, slots=True)
class Received:
    """A request as its client sent it, with its model.

    ``http`` is None for the request of a gateway. ``apart`` runs what takes long, where the request
    is large; None: it runs here.
    """

    parsed: ChatRequest | CompletionRequest
    headers: Mapping[str, str]
    record: RequestRecord
    http: ClientRequest | None = None
    apart: Apart | None = None


class RequestReader:
    """Reads requests for one service. Every error is an HttpError."""

    def __init__(self, service: RoutingService, config: FrontendConfig) -> None:
        self._service = service
        self._config = config
        #: Of clients without a key.
        self._rights = ClientRights(config.client_fields)
        #: Chat templates that failed; there are as many as models.
        self._broken: set[str] = set()
        #: In which large bodies are read.
        self.turns = Turns("large bodies")

    # -- received --------------------------------------------------------------------------

    async def receive(
        self,
        raw: bytes,
        headers: Mapping[str, str],
        record: RequestRecord,
        endpoint: Endpoint,
        http: ClientRequest | None = None,
        key: ApiKey | None = None,
    ) -> Received:
        """Parse a body; the observers learn its model. ``key``: that of the client."""
        owner = "" if http is None else http.remote or ""
        apart = None if len(raw) < LARGE else self.turns.of(owner)
        rights = self._rights if key is None else key.rights
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
        if not parsed.model:
            parsed = self._with_model(parsed)
            record.model = parsed.model
        self._service.observers.received(record)
        if http is None:
            return Received(parsed, headers, record, apart=apart)
        if key is not None or parsed.nvext.extra_fields:
            parsed = self._of_client(parsed, record, endpoint, rights, key)
        many = parsed.messages if isinstance(parsed, ChatRequest) else parsed.prompts
        if apart is None and len(many) > _MANY:
            apart = self.turns.of(owner)
        return Received(parsed, headers, record, http, apart)

    def _of_client(
        self,
        parsed: ChatRequest | CompletionRequest,
        record: RequestRecord,
        endpoint: Endpoint,
        rights: ClientRights,
        key: ApiKey | None,
    ) -> ChatRequest | CompletionRequest:
        """The request as the rights of its client allow it."""
        if key is not None and rights.isolated:
            parsed = self._with_key_salt(parsed, key)
        if not rights.details:
            record.details = False
            parsed = _without_details(parsed)
        if parsed.stream and APIS[endpoint].named_events and parsed.nvext.extra_fields:
            raise HttpError(
                400,
                f"nvext.extra_fields: not supported in streams of {APIS[endpoint].path}",
                "invalid_request_error",
                "not_supported",
                param="nvext.extra_fields",
            )
        return parsed

    async def receive_dry_run(
        self, parse: Callable[[], Any], record: RequestRecord, http: ClientRequest | None
    ) -> Received:
        """As :meth:`receive`, of a body that is decoded; it is no request of a client."""
        large = http is not None and (http.content_length or LARGE) >= LARGE
        apart = self.turns.of("" if http is None else http.remote or "") if large else None
        try:
            parsed = parse() if apart is None else await apart(parse)
        except RequestError as error:
            raise client_error(error) from None
        headers = {} if http is None else http.headers
        return Received(self._with_model(parsed), headers, record, http, apart)

    def _with_key_salt(
        self, parsed: ChatRequest | CompletionRequest, key: ApiKey
    ) -> ChatRequest | CompletionRequest:
        """The request with the cache salt of an isolated key, in which its own salt is mixed."""
        salt = key.cache_salt(self._service.preparation.salt_of(parsed))
        nvext = msgspec.structs.replace(parsed.nvext, cache_salt=None)
        return replace(
            parsed, body=with_cache_salt(parsed.body, salt), cache_salt=salt, nvext=nvext
        )

    def _with_model(
        self, parsed: ChatRequest | CompletionRequest
    ) -> ChatRequest | CompletionRequest:
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
        service = self._service
        left_s = service.served.left_for(model, service.clock())
        if left_s is not None and left_s >= self._config.limits.model_return_s:
            left_s = None
        return unknown_model(model, service.models(), service.may_serve(model), left_s=left_s)

    def routed_model(self, name: str) -> str:
        """The model that a request for ``name`` is routed by; without a name the only one that is
        served. Raises HttpError."""
        base = self._service.served.base_model(name or self.only_model())
        if base is None:
            raise self.unknown_model(name)
        return base

    # -- prepared --------------------------------------------------------------------------

    async def prepare(self, received: Received) -> Prepared:
        """Make the prompt's hashes and all that a decision needs; the record gets its length."""
        service, parsed, record = self._service, received.parsed, received.record
        served, nvext, apart = service.served, parsed.nvext, received.apart
        session = None
        if service.router.config.router_session_affinity_ttl_secs is not None:
            session = self._session(received)
        name = served.find(parsed.model)
        if name is None:
            raise self.unknown_model(parsed.model)
        base, worker_set, limit = name.model, None, name.context_length
        pins = _NO_PINS if nvext is NO_NVEXT else (nvext.pin_prefill, nvext.pin_decode)
        if name.in_sets:
            worker_set = served.draw_worker_set(
                base, served_name=name.served_name, pins=pins, likely=record.endpoint == "route"
            )
            limit = served.context_length(base, worker_set)
        try:
            prompts, not_modelled = await self._prompts(received, base, worker_set, limit)
            prepared = await service.preparation.prepare(
                base,
                prompts,
                decision_id=record.decision_id,
                constraints=nvext.constraints,
                pin_prefill=pins[0],
                pin_decode=pins[1],
                cache_salt=service.preparation.salt_of(parsed),
                lora_name=parsed.model if name.is_adapter else None,
                not_modelled=not_modelled,
                worker_set=worker_set,
                session=session,
                policy_class=policy_class_of(received.headers),
                priority=nvext.agent_hints.priority or 0,
                strict_priority=nvext.agent_hints.strict_priority or 0,
                served_name=name.served_name,
                streams=self._streams(parsed),
                apart=apart,
            )
        except (PromptError, TemplateError, HashingError) as error:
            raise self._prompt_error(error, parsed, base) from None
        record.isl_tokens = prepared.request.isl_tokens
        record.prompts = prepared.prompts
        record.tokenize_s = prepared.tokenize_s
        if limit is not None and prepared.tokens.ids is not None:
            self._check_tokens(parsed, prepared.longest, limit)
        if pins != _NO_PINS:
            bad_pin = unknown_pin(prepared.request, service.router.registry)
            if bad_pin is not None:
                raise bad_pin
        return prepared

    def _session(self, received: Received) -> Session | None:
        """The session of a request, where affinity is on.

        Clients have sessions of their own; those of a gateway are not known.
        """
        try:
            name = session_of(received.headers)
        except RequestError as error:
            raise client_error(error) from None
        http = received.http
        client = b"" if http is None else client_of(http, self._config.api_token)
        return self._service.preparation.session(name, client)

    async def _prompts(
        self, received: Received, base: str, worker_set: str | None, limit: int | None
    ) -> tuple[list[Prompt], str | None]:
        """The prompts, and why their caches are not modelled; None: they are. ``limit``: the tokens
        of a prompt and its output."""
        parsed, apart = received.parsed, received.apart
        if apart is None:
            prompts, not_modelled = prompts_of(parsed, limit)
        else:
            prompts, not_modelled = await apart(partial(prompts_of, parsed, limit))
            self._check_given(parsed, prompts, limit)
        kinds = self._service.preparation.tokenizers.kinds(base)
        if kinds and not_modelled is None:
            not_modelled = cache_key_problem(parsed, kinds)
        if self._config.dynamo is not None and isinstance(parsed, ChatRequest):
            return await self._as_dynamo(base, worker_set, parsed, prompts, apart), None
        return prompts, not_modelled

    def _prompt_error(
        self,
        error: PromptError | TemplateError | HashingError,
        parsed: ChatRequest | CompletionRequest,
        base: str,
    ) -> HttpError:
        if isinstance(error, TemplateError):
            if error.origin not in self._broken:
                # Once, and with the file's place: clients get the reason without it.
                self._broken.add(error.origin)
                _log.warning("%s: this chat template fails for some requests (400)", error.origin)
            field, text = (
                "messages",
                f"messages: the chat template of {base} failed: {error.reason}",
            )
        else:
            field = error.field if isinstance(error, PromptError) else parsed.prompt_field
            text = str(error)
        return HttpError(400, text, "invalid_request_error", "invalid_prompt", param=field)

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
        tokenizer = self._service.preparation.tokenizers.of(model, worker_set)
        if tokenizer is None or prompts[0].token_ids is not None:
            return prompts
        if apart is not None:
            ids = await apart(partial(dynamo_chat, tokenizer, chat))
        elif sum(map(_length, chat.messages)) < _INLINE_CHARS:
            ids = dynamo_chat(tokenizer, chat)
        else:
            ids = await asyncio.to_thread(dynamo_chat, tokenizer, chat)
        return [replace(prompts[0], messages=None, token_ids=ids)]

    def _check_given(
        self,
        parsed: ChatRequest | CompletionRequest,
        prompts: list[Prompt],
        limit: int | None,
    ) -> None:
        """Refuse a prompt that is too long, before anything is made of the tokens that a client
        sent."""
        given = [prompt.token_ids for prompt in prompts if prompt.token_ids is not None]
        if limit is not None and given and prompts[0].keep is None:
            self._check_tokens(parsed, max(map(len, given)), limit)

    def _check_tokens(
        self, parsed: ChatRequest | CompletionRequest, longest: int, limit: int
    ) -> None:
        """Refuse a prompt of more than ``limit`` tokens with its output."""
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
    prompts: int, parsed: ChatRequest | CompletionRequest, *, handed_off: bool
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
    if prompts > 1:
        raise HttpError(
            400,
            f"prompt has {prompts} prompts, {served}: a hand-off takes one prompt; send "
            "one request for each prompt",
            "invalid_request_error",
            "batch_not_supported",
            param="prompt",
        )


_OWN_HEADERS: Final = frozenset((*PIN_HEADERS, REQUEST_ID_HEADER))
_PARSE: Final[dict[Endpoint, Callable[..., Any]]] = {
    "chat_completions": parse_chat_request,
    "completions": parse_completion_request,
    "embeddings": parse_embedding_request,
    "responses": parse_responses_request,
    "anthropic_messages": parse_messages_request,
}


def parse_request(
    raw: bytes, headers: Mapping[str, str], limit: int, endpoint: Endpoint
) -> ChatRequest | CompletionRequest:
    """The request of an endpoint, by its type. Raises RequestError."""
    # Most requests have none of our headers, and searching them is cheaper than applying them.
    own = (
        not _OWN_HEADERS.isdisjoint(headers)
        if type(headers) is dict
        else any(name in headers for name in _OWN_HEADERS)
    )
    parsed: ChatRequest | CompletionRequest = _PARSE[endpoint](decode_object(raw, limit))
    if not own:
        return parsed
    if isinstance(parsed, ChatRequest):
        return apply_headers(parsed, headers)
    return apply_headers(parsed, headers)
