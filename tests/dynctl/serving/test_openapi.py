"""``GET /openapi.json``: it has every route, each of its paths answers, answers fit its schemas."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from dynctl.documents.errors import AnthropicErrorBody, ErrorBody
from dynctl.serving.config import FrontendConfig
from dynctl.serving.http.openapi import ANSWERS, SUMMARIES, openapi_document, routes_of
from dynctl.serving.http.router_server import RouterProcess
from dynctl.serving.http.server import Frontend
from dynctl.tokenization import DEMO_MODEL_DIR
from tests.dynctl.serving.fleets import SLOW_HEALTH, site


async def document_of(url: str) -> dict[str, Any]:
    async with aiohttp.request("GET", f"{url}/openapi.json") as answer:
        assert answer.status == 200
        found: dict[str, Any] = await answer.json()
        return found


def operations(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, row in document["paths"].items() for method in row}


@pytest.mark.parametrize("kind", [Frontend, RouterProcess])
@pytest.mark.seed("dynamo-1.6: operation: interface document")
async def test_every_route_is_in_the_document_and_every_path_of_it_answers(
    kind: type[Frontend],
) -> None:
    process = kind(FrontendConfig(port=0, model_path=DEMO_MODEL_DIR, health=SLOW_HEALTH))
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
    async with site([{"name": "a0"}], health=SLOW_HEALTH) as fleet:
        document = await document_of(fleet.frontend.url)
        for (method, path), kind in ANSWERS.items():
            row = document["paths"][path][method.lower()]
            assert "schema" in row["responses"]["2XX"]["content"]["application/json"]
            url = fleet.url(path.replace("{model}", "demo"))
            async with fleet.client.request(method, url) as answer:
                assert answer.status == 200, path
                msgspec.json.decode(await answer.read(), type=kind)
        for path, kind in (("/v1/messages", AnthropicErrorBody), ("/v1/responses", ErrorBody)):
            async with fleet.client.post(fleet.url(path), json={"model": "none"}) as answer:
                assert answer.status == 400
                msgspec.json.decode(await answer.read(), type=kind)


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
        for kind in (Frontend, RouterProcess)
        for method, path, _ in routes_of(kind(config).build_app())
    }
    assert set(ANSWERS) <= live
    assert set(SUMMARIES) <= live


def test_each_operation_has_a_summary_and_an_id_of_its_own() -> None:
    for name in ("frontend", "router"):
        kind = Frontend if name == "frontend" else RouterProcess
        app = kind(FrontendConfig(port=0, model_path=DEMO_MODEL_DIR)).build_app()
        rows = [
            row for path in openapi_document(app, name)["paths"].values() for row in path.values()
        ]
        ids = [row["operationId"] for row in rows]
        assert len(ids) == len(set(ids))
        assert all(len(row["summary"]) > 5 and "``" not in row["summary"] for row in rows)
