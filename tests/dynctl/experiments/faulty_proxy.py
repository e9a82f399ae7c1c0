"""A proxy before an OpenAI server that has one fault, as those that `dynctl test` must name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import aiohttp
from aiohttp import web

from tests.ports import free_port

Body = dict[str, Any]


class Fault:
    """What a proxy without a fault does. Subclasses override one step.

    ``request`` changes the body of a chat, or returns the response to send. ``answer`` changes the
    document of a whole answer, ``events`` the lines of a stream; where it raises ConnectionError,
    the connection is cut. ``place`` chooses one of several servers. ``routes``: further ones.
    ``headers``: those of a whole answer that are passed on.
    """

    routes: Sequence[web.RouteDef] = ()
    headers: Sequence[str] = ()

    def __init__(self) -> None:
        self.number = count()

    def place(self, body: Body, servers: int) -> int:
        return 0

    def request(self, body: Body) -> web.Response | None:
        return None

    def authorize(self, authorization: str) -> web.Response | None:
        return None

    def unreadable(self, data: bytes) -> web.Response | None:
        return None

    def answer(self, document: Body) -> None:
        pass

    def models(self, document: Body) -> web.Response | None:
        return None

    async def events(self, lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        async for line in lines:
            yield line

    reads_to_the_end = False
    sends = 1


class RoundRobin(Fault):
    """A router that does not look at prompts."""

    def place(self, body: Body, servers: int) -> int:
        return next(self.number) % servers


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def first_text(body: Body, change: Callable[[str], str]) -> None:
    message = body["messages"][0]
    message["content"] = change(message["content"])


@asynccontextmanager
async def faulty_proxy(upstreams: str | Sequence[str], fault: Fault) -> AsyncIterator[str]:
    """The URL of a proxy before one server or several."""
    if isinstance(upstreams, str):
        upstreams = (upstreams,)
    async with aiohttp.ClientSession() as session:
        application = web.Application(client_max_size=16 * 1024 * 1024)
        proxy = _Proxy(upstreams, fault, session)
        application.router.add_post("/v1/chat/completions", proxy.chat)
        application.router.add_get("/v1/models", proxy.models)
        application.router.add_routes(fault.routes)
        application.router.add_route("*", "/{path:.*}", proxy.other)
        runner = web.AppRunner(application, handler_cancellation=True)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await proxy.close()
            await runner.cleanup()


class _Proxy:
    def __init__(
        self, upstreams: Sequence[str], fault: Fault, session: aiohttp.ClientSession
    ) -> None:
        self._upstreams = upstreams
        self._fault = fault
        self._session = session
        self._reading: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def models(self, request: web.Request) -> web.StreamResponse:
        async with self._session.get(self._upstreams[0] + "/v1/models") as answer:
            document = await answer.json()
        return self._fault.models(document) or web.json_response(document)

    async def other(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        headers = {"content-type": request.headers.get("content-type", "")}
        async with self._session.request(
            request.method, self._upstreams[0] + request.path, data=data, headers=headers
        ) as answer:
            return web.Response(status=answer.status, body=await answer.read())

    async def chat(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        refused = self._fault.authorize(request.headers.get("authorization", ""))
        if refused is not None:
            return refused
        try:
            body = json.loads(data)
        except ValueError:
            response = self._fault.unreadable(data)
            if response is not None:
                return response
            return await self._send_on(request, data, self._upstreams[0], stream=False)
        response = self._fault.request(body)
        if response is not None:
            return response
        stream = bool(body.get("stream"))
        upstream = self._upstreams[self._fault.place(body, len(self._upstreams))]
        data = json.dumps(body).encode()
        for _ in range(1, self._fault.sends):
            await self._send_on(request, data, upstream, stream=False)
        return await self._send_on(request, data, upstream, stream=stream)

    async def _send_on(
        self, request: web.Request, data: bytes, upstream: str, *, stream: bool
    ) -> web.StreamResponse:
        headers = {"content-type": "application/json"}
        if key := request.headers.get("authorization"):
            headers["authorization"] = key
        answer = await self._session.post(
            upstream + "/v1/chat/completions", data=data, headers=headers
        )
        if not stream or answer.status != 200 or answer.content_type == "application/json":
            document = await answer.json()
            if answer.status == 200:
                self._fault.answer(document)
            names = self._fault.headers
            kept = {name: answer.headers[name] for name in names if name in answer.headers}
            return web.json_response(document, status=answer.status, headers=kept)
        return await self._stream(request, answer)

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            await response.prepare(request)
            async for line in self._fault.events(answer.content):
                await response.write(line)
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            if self._fault.reads_to_the_end:
                self._reading.add(asyncio.create_task(_drain(answer)))
                return response
            if request.transport is not None:
                request.transport.abort()
        answer.close()
        return response


async def _drain(answer: aiohttp.ClientResponse) -> None:
    async with answer:
        async for _ in answer.content:
            pass
