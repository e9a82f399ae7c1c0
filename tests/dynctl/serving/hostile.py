"""A small engine that answers as a test wants: wrong types, cut streams, nothing at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer

EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
GOOD = EVENT * 3 + DONE

Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HostileEngine:
    """``behave`` answers the next requests; ``seen`` counts them, ``stopped`` hangs everything."""

    def __init__(self, behave: Behaviour) -> None:
        self.behave = behave
        self.seen = 0
        self.healthy: Behaviour = _ok
        self.url = ""

    def app(self) -> web.Application:
        async def health(request: web.Request) -> web.StreamResponse:
            return await self.healthy(request)

        async def chat(request: web.Request) -> web.StreamResponse:
            self.seen += 1
            await request.read()
            return await self.behave(request)

        app = web.Application()
        app.router.add_get("/health", health)
        paths = ("chat/completions", "completions", "embeddings", "responses", "messages")
        for path in (*paths, "messages/count_tokens"):
            app.router.add_post(f"/v1/{path}", chat)
        return app


async def _ok(_: web.Request) -> web.StreamResponse:
    return web.Response()


def answers(body: bytes, content_type: str = "text/event-stream", status: int = 200) -> Behaviour:
    """Answer with this, whole."""

    async def behave(_: web.Request) -> web.StreamResponse:
        headers = {"content-type": content_type, "location": "http://127.0.0.1:1/elsewhere"}
        return web.Response(status=status, body=body, headers=headers)

    return behave


def streams(*pieces: bytes, dies: bool = False, pause: float = 0.0) -> Behaviour:
    """Stream the pieces in chunks; ``dies``: cut the connection instead of ending. ``pause``:
    seconds between two pieces, so that they arrive one by one."""

    async def behave(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(pause)
        if dies and request.transport is not None:
            request.transport.abort()
        return response

    return behave


async def dies(request: web.Request) -> web.StreamResponse:
    """Cut the connection before any answer, as a process that ends."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def hangs(_: web.Request) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    return web.Response()


@asynccontextmanager
async def hostile(*behaviours: Behaviour) -> AsyncIterator[list[HostileEngine]]:
    """Engines with these behaviours; all of them serve any model."""
    engines = [HostileEngine(behave) for behave in behaviours]
    servers = [TestServer(engine.app()) for engine in engines]
    try:
        for engine, server in zip(engines, servers, strict=True):
            await server.start_server(shutdown_timeout=0.1)
            engine.url = str(server.make_url("")).rstrip("/")
        yield engines
    finally:
        for server in servers:
            await server.close()


def specs(engines: list[HostileEngine]) -> tuple[str, ...]:
    """Worker specs of the engines: e0, e1, ..., all of the model ``demo``."""
    return tuple(f"{one.url},name=e{i},model=demo" for i, one in enumerate(engines))
