"""The OpenAPI document of an application, made from its routes: ``GET /openapi.json``.

Summaries are the first lines of the handlers' docstrings, or those of ``SUMMARIES``; schemas are
those of the documents that are encoded. Bodies of inference are those of OpenAI, Anthropic and
vLLM, and have no schema here. The pages of ``/ui`` are HTML and forms for browsers: no program
calls them, so they are not in the document.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from aiohttp import web

from dynctl import version
from dynctl.documents.config import ConfigDocument
from dynctl.documents.errors import AnthropicErrorBody, ErrorBody
from dynctl.documents.models import ModelList, ModelReadiness, ModelRow, Readiness
from dynctl.serving.http.json_responses import json_response
from dynctl.serving.refusal import ANTHROPIC_PATH

PATH: Final = "/openapi.json"
_PAGES: Final = "/ui"
_REF: Final = "#/components/schemas/{name}"
#: The document that an endpoint answers with; others have no schema.
ANSWERS: Final[Mapping[tuple[str, str], type]] = {
    ("GET", "/v1/models"): ModelList,
    ("GET", "/v1/models/{model}"): ModelRow,
    ("GET", "/v1/models/{model}/ready"): ModelReadiness,
    ("GET", "/ready"): Readiness,
    ("GET", "/ping"): Readiness,
    ("POST", "/ping"): Readiness,
    ("GET", "/v1/config"): ConfigDocument,
}
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
    ("POST", "/v1/workers"): "Add a worker.",
    ("GET", "/v1/workers/{worker}"): "One worker.",
    ("DELETE", "/v1/workers/{worker}"): "Remove a worker.",
    ("GET", "/v1/fleet"): "The load of all workers, conditions, thresholds and hand-offs.",
    ("GET", "/v1/recording"): "A recording of the next seconds.",
    ("GET", PATH): "This document.",
}
_PARAMETER = re.compile(r"\{(\w+)\}")
_MARKS = re.compile(r"^``(?:GET|POST|DELETE) [^`]*``:?\s*|``")


def openapi_document(app: web.Application, title: str) -> dict[str, Any]:
    """The document of the routes that ``app`` has."""
    kinds = (ErrorBody, AnthropicErrorBody, *dict.fromkeys(ANSWERS.values()))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    known = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler in routes_of(app):
        if path == _PAGES or path.startswith(f"{_PAGES}/"):
            continue
        error = AnthropicErrorBody if path.startswith(ANTHROPIC_PATH) else ErrorBody
        operation: dict[str, Any] = {
            "operationId": _operation_id(method, path),
            "summary": _summary(method, path, handler),
            "responses": {
                "2XX": _content("the answer", known.get(ANSWERS.get((method, path), object))),
                "default": _content("an error", known[error]),
            },
        }
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
