"""The OpenAPI document of an application, made from its routes: ``GET /openapi.json``.

Summaries are the first lines of the handlers' docstrings, or those of ``SUMMARIES``; schemas are
those of the documents that are encoded. Bodies of inference are those of OpenAI, Anthropic and
vLLM: their schemas have what is read and checked here, and all other fields are passed on to the
engines. The pages of ``/ui`` are HTML and forms for browsers: no program calls them, so they are
not in the document.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from dynctl import version
from dynctl.documents.config import ConfigDocument
from dynctl.documents.decisions import DecisionList, PastDecision
from dynctl.documents.errors import AnthropicErrorBody, ErrorBody
from dynctl.documents.fleet_load import FleetLoad, LastTest
from dynctl.documents.models import Health, ModelList, ModelReadiness, ModelRow, Readiness
from dynctl.documents.replicas import ReplicaRow
from dynctl.documents.route_result import RouteResult
from dynctl.documents.thresholds import BusyThresholdList
from dynctl.documents.workers import EngineRow, UnregisteredEngine
from dynctl.serving.engines.apis import BY_PATH
from dynctl.serving.http.json_responses import json_response
from dynctl.serving.routing.refusal import ANTHROPIC_PATH
from dynctl.wire.anthropic import MessagesFields
from dynctl.wire.nvext import NvExt
from dynctl.wire.openai import ChatFields, ChatMessage, CompletionFields, EmbeddingFields
from dynctl.wire.responses import ResponsesFields

PATH: Final = "/openapi.json"
_PAGES: Final = "/ui"
_REF: Final = "#/components/schemas/{name}"


class EngineList(msgspec.Struct, frozen=True):
    """The answer of ``GET /v1/workers``: a row for each engine, one of ``ENGINE``."""

    workers: list[Any]
    replicas: list[ReplicaRow] | UnsetType = UNSET


class Removed(msgspec.Struct, frozen=True):
    """The name of the worker that was taken out."""

    removed: str


#: The row of an engine: registered, or not yet.
ENGINE: Final = (EngineRow, UnregisteredEngine)
#: The document that an endpoint answers with, or one of several; others have no schema.
ANSWERS: Final[Mapping[tuple[str, str], type | tuple[type, ...]]] = {
    ("GET", "/v1/models"): ModelList,
    ("GET", "/v1/models/{model}"): ModelRow,
    ("GET", "/v1/models/{model}/ready"): ModelReadiness,
    ("GET", "/ready"): Readiness,
    ("GET", "/ping"): Readiness,
    ("POST", "/ping"): Readiness,
    ("GET", "/v1/config"): ConfigDocument,
    ("GET", "/health"): Health,
    ("GET", "/busy_threshold"): BusyThresholdList,
    ("GET", "/v1/workers"): EngineList,
    ("POST", "/v1/workers"): ENGINE,
    ("GET", "/v1/workers/{worker}"): ENGINE,
    ("POST", "/v1/workers/{worker}/cordon"): ENGINE,
    ("POST", "/v1/workers/{worker}/uncordon"): ENGINE,
    ("GET", "/v1/fleet"): FleetLoad,
    ("POST", "/v1/test"): LastTest,
    ("POST", "/v1/route"): RouteResult,
    ("GET", "/v1/decisions"): DecisionList,
    ("GET", "/v1/decisions/{id}"): PastDecision,
    ("DELETE", "/v1/workers/{worker}"): Removed,
}


class TokenizeFields(msgspec.Struct):
    """vLLM's ``/tokenize``: a prompt or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None


class TokenizeAnswer(msgspec.Struct):
    """The token ids of a prompt; engines add other fields."""

    tokens: list[int]
    count: int | None = None
    max_model_len: int | None = None


class WorkerFields(msgspec.Struct, rename="kebab", omit_defaults=True):
    """A worker as in `--worker`; what is not given is read from the engine. Other keys are
    topology domains, as the members of ``domains`` are."""

    url: str
    name: str | None = None
    role: str | None = None
    domains: dict[str, str] | None = None
    model: str | None = None
    kv_events: str | None = None
    replay: str | None = None
    block_size: int | None = None
    dp: int | None = None
    total_blocks: int | None = None
    max_num_batched_tokens: int | None = None
    bootstrap: str | None = None
    device: str | None = None
    can_prefill: bool | None = None
    forward_authorization: bool | None = None
    taint: list[str] | None = None


#: The bodies of operators' changes.
CHANGES: Final[Mapping[tuple[str, str], type]] = {("POST", "/v1/workers"): WorkerFields}
#: The fields of a request's body that are read and checked; others are passed on to the engine.
BODIES: Final[Mapping[str, type]] = {
    "/v1/chat/completions": ChatFields,
    "/v1/completions": CompletionFields,
    "/v1/embeddings": EmbeddingFields,
    "/v1/responses": ResponsesFields,
    "/v1/messages": MessagesFields,
    "/v1/messages/count_tokens": MessagesFields,
    "/tokenize": TokenizeFields,
}
#: The bodies with routing controls, Dynamo's ``nvext``.
_CONTROLLED: Final = frozenset(kind for path, kind in BODIES.items() if path in BY_PATH)
#: Handlers that serve several endpoints, or are explained by their path.
SUMMARIES: Final[Mapping[tuple[str, str], str]] = {
    ("POST", "/v1/chat/completions"): "OpenAI's chat completions.",
    ("POST", "/v1/completions"): "OpenAI's completions.",
    ("POST", "/v1/embeddings"): "OpenAI's embeddings.",
    ("POST", "/v1/responses"): "OpenAI's responses; they are not kept.",
    ("POST", "/v1/messages"): "Anthropic's messages.",
    ("POST", "/v1/messages/count_tokens"): "The tokens of a request of /v1/messages.",
    ("POST", "/tokenize"): "Token ids of a prompt or a chat, from an engine of the model.",
    ("POST", "/detokenize"): "The text of token ids, from an engine of the model.",
    ("GET", "/v1/models"): "The models, aliases and adapters that are served.",
    ("GET", "/v1/models/{model}"): "One model.",
    ("GET", "/v1/models/{model}/ready"): "Whether a model can be served now, and what is missing.",
    ("GET", "/live"): "200 while the process responds.",
    ("GET", "/v1/workers"): "The workers with their addresses, domains and ranks.",
    ("POST", "/v1/workers"): "Register a worker, or replace the one with its name.",
    ("GET", "/v1/workers/{worker}"): "One worker.",
    ("DELETE", "/v1/workers/{worker}"): "Take a worker out; its running requests go on.",
    ("GET", "/v1/fleet"): "The load of all workers, conditions, thresholds and hand-offs.",
    ("POST", "/v1/test"): "Keep the result of a test of this server, which GET /v1/fleet has.",
    ("GET", "/v1/recording"): "A recording of the next seconds.",
    ("GET", PATH): "This document.",
}
_PARAMETER = re.compile(r"\{(\w+)\}")
_MARKS = re.compile(r"^``(?:GET|POST|DELETE) [^`]*``:?\s*|``")


def openapi_document(app: web.Application, title: str) -> dict[str, Any]:
    """The document of the routes that ``app`` has."""
    answers = dict.fromkeys(kind for found in ANSWERS.values() for kind in _kinds(found))
    kinds = (ErrorBody, AnthropicErrorBody, *answers, *CHANGES.values())
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    known = dict(zip(kinds, schemas, strict=True))
    components[EngineList.__name__]["properties"]["workers"]["items"] = _one_of(ENGINE, known)
    bodies, more = _bodies([path for method, path, _ in routes_of(app) if method == "POST"])
    components |= more
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler in routes_of(app):
        if path == _PAGES or path.startswith(f"{_PAGES}/"):
            continue
        error = AnthropicErrorBody if path.startswith(ANTHROPIC_PATH) else ErrorBody
        operation: dict[str, Any] = {
            "operationId": _operation_id(method, path),
            "summary": _summary(method, path, handler),
            "responses": {
                "2XX": _content("the answer", _one_of(ANSWERS.get((method, path), ()), known)),
                "default": _content("an error", known[error]),
            },
        }
        if method == "POST" and path in BODIES:
            schema = bodies[BODIES[path]]
            operation["requestBody"] = _content("the request", schema) | {"required": True}
            operation["responses"]["2XX"] = _answer(path, bodies)
        if (method, path) in CHANGES:
            schema = known[CHANGES[method, path]]
            operation["requestBody"] = _content("the request", schema) | {"required": True}
        names = _PARAMETER.findall(path)
        if names:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names
            ]
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version()},
        "paths": {path: paths[path] for path in sorted(paths)},
        "components": {"schemas": {name: components[name] for name in sorted(components)}},
    }


def _kinds(kinds: type | tuple[type, ...]) -> tuple[type, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _one_of(kinds: type | tuple[type, ...], known: Mapping[type, Any]) -> Any:
    """The schema of a document that has one of these types; None if there is no type."""
    schemas = [known[kind] for kind in _kinds(kinds)]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas} if schemas else None


def _bodies(paths: Iterable[str]) -> tuple[dict[type, Any], dict[str, Any]]:
    """The schemas of bodies of inference, which have more fields than those, and components."""
    sent = dict.fromkeys(BODIES[path] for path in paths if path in BODIES)
    if not sent:
        return {}, {}
    kinds = (*sent, TokenizeAnswer, NvExt)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    for schema in components.values():
        schema.setdefault("additionalProperties", True)
    known = dict(zip(kinds, schemas, strict=True))
    for kind in sent.keys() & _CONTROLLED:
        components[kind.__name__]["properties"]["nvext"] = known[NvExt]
    return known, components


def _answer(path: str, bodies: Mapping[type, Any]) -> dict[str, Any]:
    """The answer of an engine: its one field that is always there, or a stream of events."""
    if path not in BY_PATH:
        return _content("the answer", bodies[TokenizeAnswer] if path == "/tokenize" else None)
    field = BY_PATH[path].answers
    whole = {"type": "object", "properties": {field: {"type": "array"}}, "required": [field]}
    found = _content("the answer of the engine", whole | {"additionalProperties": True})
    if path != "/v1/embeddings":
        found["description"] += "; with `stream: true` its events"
        found["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return found


def routes_of(app: web.Application) -> list[tuple[str, str, Any]]:
    """Method, path and handler of each endpoint of an application, by path."""
    found = [
        (route.method, route.resource.canonical.replace(":.+", ""), route.handler)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    ]
    return sorted(found, key=lambda row: (row[1], row[0]))


def document_route(title: str) -> web.RouteDef:
    """``GET /openapi.json`` of the application that it is added to."""

    async def handle(http: web.Request) -> web.Response:
        return json_response(openapi_document(http.app, title))

    return web.get(PATH, handle)


def _summary(method: str, path: str, handler: Any) -> str:
    given = SUMMARIES.get((method, path))
    if given is not None:
        return given
    lines = (handler.__doc__ or "").strip().splitlines() or [f"{method} {path}"]
    text = _MARKS.sub("", lines[0]) or f"{method} {path}"
    return text[0].upper() + text[1:]


def _operation_id(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", path)])


def _content(text: str, schema: Any) -> dict[str, Any]:
    if schema is None:
        return {"description": text}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
