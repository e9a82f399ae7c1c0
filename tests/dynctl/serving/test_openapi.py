"""``GET /openapi.json``: it has every route, each of its paths answers, answers fit its schemas."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from dynctl.documents.errors import AnthropicErrorBody, ErrorBody
from dynctl.serving.http.inference import DECISION_HEADER
from dynctl.serving.http.openapi import (
    ANSWERS,
    BODIES,
    ENGINE,
    SUMMARIES,
    EngineList,
    TokenizeAnswer,
    openapi_document,
    routes_of,
)
from dynctl.serving.http.process import ServingProcess
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.services.router_server import build_router
from dynctl.tokenization import DEMO_MODEL_DIR
from tests.dynctl.serving.fleets import SLOW_HEALTH, site


async def document_of(url: str) -> dict[str, Any]:
    async with aiohttp.request("GET", f"{url}/openapi.json") as answer:
        assert answer.status == 200
        found: dict[str, Any] = await answer.json()
        return found


def operations(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, row in document["paths"].items() for method in row}


@pytest.mark.parametrize("build", [build_frontend, build_router])
@pytest.mark.seed("dynamo-1.6: operation: interface document")
async def test_every_route_is_in_the_document_and_every_path_of_it_answers(
    build: Callable[[FrontendConfig], ServingProcess],
) -> None:
    process = build(FrontendConfig(port=0, model_path=DEMO_MODEL_DIR, health=SLOW_HEALTH))
    await process.start()
    try:
        document = await document_of(process.url)
        live = {(method, path) for method, path, _ in routes_of(process.build_app())}
        assert operations(document) == live
        async with aiohttp.ClientSession() as client:
            for method, path in sorted(live):
                filled = path.replace("{", "").replace("}", "")
                body: dict[str, Any] | None = {} if method == "POST" else None
                async with client.request(method, process.url + filled, json=body) as answer:
                    text = await answer.text() if answer.status == 404 else ""
                    # A name that does not exist is a 404; a path that does not exist lists others.
                    assert '"served":["' not in text, (method, path)
    finally:
        await process.close()


async def test_answers_fit_the_schemas() -> None:
    async with site([{"name": "a0"}], health=SLOW_HEALTH, api_token="t" * 32) as fleet:
        operator = {"Authorization": f"Bearer {'t' * 32}"}
        document = await document_of(fleet.frontend.url)
        chat = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
        async with fleet.client.post(fleet.url("/v1/chat/completions"), json=chat) as answer:
            assert answer.status == 200
            decided = answer.headers[DECISION_HEADER]
        sent: dict[str, dict[str, Any]] = {
            "/v1/route": chat,
            "/v1/workers": {"url": "http://127.0.0.1:9", "name": "b0"},
            "/v1/test": {"passed": 1, "warnings": 0, "failed": 0, "skipped": 0, "model": "demo"},
        }
        names = {"model": "demo", "worker": "a0", "id": decided}
        for (method, path), kind in ANSWERS.items():
            row = document["paths"][path][method.lower()]
            assert "schema" in row["responses"]["2XX"]["content"]["application/json"]
            url = fleet.url(path.format(**names))
            body = sent.get(path) if method == "POST" else None
            async with fleet.client.request(method, url, json=body, headers=operator) as answer:
                text = await answer.text()
                assert answer.status in (200, 201), (path, text)
                # Nothing is answered that the schema does not name.
                assert unnamed(json.loads(text), known(text, kind)) == [], path
                if kind is EngineList:
                    for row in json.loads(text)["workers"]:
                        assert unnamed(row, known(json.dumps(row), ENGINE)) == [], path
        for path, kind in (("/v1/messages", AnthropicErrorBody), ("/v1/responses", ErrorBody)):
            async with fleet.client.post(fleet.url(path), json={"model": "none"}) as answer:
                assert answer.status == 400
                msgspec.json.decode(await answer.read(), type=kind)


def known(text: str, kind: type | tuple[type, ...]) -> Any:
    """What the first fitting type knows of an answer; raises where none fits."""
    *others, last = kind if isinstance(kind, tuple) else (kind,)
    for one in others:
        with contextlib.suppress(msgspec.ValidationError):
            return json.loads(msgspec.json.encode(msgspec.json.decode(text, type=one)))
    return json.loads(msgspec.json.encode(msgspec.json.decode(text, type=last)))


def unnamed(answer: Any, known: Any, where: str = "") -> list[str]:
    """The fields of an answer that are not in what its type knows of it."""
    if isinstance(answer, dict) and isinstance(known, dict):
        return [
            lost
            for name, value in answer.items()
            for lost in (
                [f"{where}.{name}"]
                if name not in known and value not in (None, [], {}, "")
                else unnamed(value, known.get(name), f"{where}.{name}")
            )
        ]
    if isinstance(answer, list) and isinstance(known, list):
        pairs = zip(answer, known, strict=False)
        return [lost for one, two in pairs for lost in unnamed(one, two, f"{where}[]")]
    return []


#: A body of each endpoint that a frontend accepts, and one that it refuses.
_ACCEPTED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "nvext": {}},
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": ["hi"], "encoding_format": "float"},
    "/v1/responses": {"input": "hi", "instructions": "short"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "hi"},
}
_REFUSED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": []},
    "/v1/completions": {"prompt": 5},
    "/v1/embeddings": {"input": 5},
    "/v1/responses": {"input": "hi", "stream": "yes"},
    "/v1/messages": {"messages": [{"role": "user", "content": 7}]},
    "/v1/messages/count_tokens": {"messages": [{"content": "hi"}]},
    "/tokenize": {"model": 7},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_is_accepted_as_its_schema_accepts_it(path: str) -> None:
    good = {"model": "demo", "field_of_an_engine": 1, **_ACCEPTED[path]}
    bad = {"model": "demo", **_REFUSED[path]}
    msgspec.convert(good, BODIES[path])
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(bad, BODIES[path])
    async with site([{"name": "a0"}], health=SLOW_HEALTH) as fleet:
        operation = (await document_of(fleet.frontend.url))["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
        async with fleet.client.post(fleet.url(path), json=good) as answer:
            assert answer.status == 200, await answer.text()
            found = await answer.json()
        shape = operation["responses"]["2XX"].get("content", {}).get("application/json")
        if path == "/tokenize":
            msgspec.convert(found, TokenizeAnswer)
        elif shape is not None:
            (field,) = shape["schema"]["required"]
            assert isinstance(found[field], list)
        async with fleet.client.post(fleet.url(path), json=bad) as answer:
            assert answer.status == 400, await answer.text()


def test_routing_controls_are_described_and_bounded() -> None:
    process = build_frontend(FrontendConfig())
    components = openapi_document(process.build_app(), "x")["components"]["schemas"]
    for name in ("ChatFields", "CompletionFields", "ResponsesFields", "MessagesFields"):
        assert components[name]["properties"]["nvext"]["$ref"].endswith("/NvExt")
        assert components[name]["additionalProperties"] is True
    # Unknown routing controls are refused.
    assert components["NvExt"]["additionalProperties"] is False


def test_pages_for_browsers_are_not_in_the_document() -> None:
    async def page(http: web.Request) -> web.Response:
        """A page."""
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/ui", page), web.post("/ui/leave", page), web.get("/uid", page)])
    assert operations(openapi_document(app, "x")) == {("GET", "/uid")}


def test_summaries_and_answers_are_of_routes_that_exist() -> None:
    config = FrontendConfig(port=0, model_path=DEMO_MODEL_DIR)
    live = {
        (method, path)
        for build in (build_frontend, build_router)
        for method, path, _ in routes_of(build(config).build_app())
    }
    assert set(ANSWERS) <= live
    assert set(SUMMARIES) <= live


def test_each_operation_has_a_summary_and_an_id_of_its_own() -> None:
    for name in ("frontend", "router"):
        build = build_frontend if name == "frontend" else build_router
        app = build(FrontendConfig(port=0, model_path=DEMO_MODEL_DIR)).build_app()
        rows = [
            row for path in openapi_document(app, name)["paths"].values() for row in path.values()
        ]
        ids = [row["operationId"] for row in rows]
        assert len(ids) == len(set(ids))
        assert all(len(row["summary"]) > 5 and "``" not in row["summary"] for row in rows)
