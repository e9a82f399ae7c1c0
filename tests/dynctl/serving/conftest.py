"""Fixtures of the serving room."""

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer


@pytest.fixture
async def engine_log():
    """A plain OpenAI server that notes what it gets: ([(body, headers)], its url)."""
    seen: list[tuple[Any, dict[str, str]]] = []

    async def chat(request: web.Request) -> web.Response:
        seen.append((await request.json(), {k.lower(): v for k, v in request.headers.items()}))
        return web.json_response({"choices": [{"message": {"content": "ok"}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    server = TestServer(app)
    await server.start_server()
    yield seen, str(server.make_url("")).rstrip("/")
    await server.close()
