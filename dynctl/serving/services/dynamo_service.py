"""What Dynamo's small HTTP services have in common: bodies, errors, metrics, one listener.

The indexer, the selection service and the slot tracker answer in Dynamo's shape, so that its
clients can use ours. Dynamo's are open to every client; here changes are for operators.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from dynctl.serving.http.auth import Handler, guarded
from dynctl.serving.http.bodies import BODIES, Bodies, bodies_of
from dynctl.serving.http.json_responses import error_response
from dynctl.serving.routing.config import Limits
from dynctl.serving.routing.refusal import HttpError
from dynctl.wire.dynamo.service_bodies import MAX_BODY_BYTES, BodyRefused, Shape, read_body
from dynctl.wire.large_body import LARGE

_log = logging.getLogger(__name__)

Answer = tuple[int, Any]
"""Status and JSON value."""
Handle = Callable[[web.Request, dict[str, Any]], Awaitable[Answer] | Answer]


class ServiceError(Exception):
    """An error of a service: status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def json_answer(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(value),
        headers={"content-type": "application/json"},
    )


class DynamoService:
    """Routes of one service. ``plain``: refused bodies are text and unknown paths have no body, as
    the indexer's; else they are JSON."""

    def __init__(self, token: str | None, *, plain: bool = False) -> None:
        self._token = token
        self._plain = plain

    def post(
        self, path: str, shape: Shape, handle: Handle, *, writes: bool = False
    ) -> web.RouteDef:
        """A request with a body of ``shape``. ``writes``: for operators only."""
        return self._with_body("POST", path, shape, handle, writes=writes)

    def patch(self, path: str, shape: Shape, handle: Handle) -> web.RouteDef:
        """A change with a body of ``shape``, for operators only."""
        return self._with_body("PATCH", path, shape, handle, writes=True)

    def get(self, path: str, value: Callable[[web.Request], Any]) -> web.RouteDef:
        """A reading without a body; a tuple is a status and a value."""

        async def behind(http: web.Request) -> web.StreamResponse:
            found = value(http)
            return (
                json_answer(found[1], found[0]) if isinstance(found, tuple) else json_answer(found)
            )

        return web.get(path, behind)

    def change(self, method: str, path: str, handle: Callable[[web.Request], Any]) -> web.RouteDef:
        """A change without a body, for operators only."""

        async def behind(http: web.Request) -> web.StreamResponse:
            return json_answer(*self._of(handle(http)))

        return web.route(method, path, guarded(self._guard(behind), self._token, json=False))

    def _with_body(
        self, method: str, path: str, shape: Shape, handle: Handle, *, writes: bool
    ) -> web.RouteDef:
        async def behind(http: web.Request) -> web.StreamResponse:
            bodies = bodies_of(http)
            with bodies.of(http) as body:
                data = await body.read(http, MAX_BODY_BYTES)
                read = partial(read_body, data, http.headers.get("content-type", ""), shape)
                if len(data) < LARGE:
                    fields = read()
                else:
                    fields = await bodies.turns.run(http.remote or "", read)
            found = handle(http, fields)
            if isinstance(found, Awaitable):
                found = await found
            status, value = found
            return json_answer(value, status)

        handler = self._guard(behind)
        if writes:
            handler = guarded(handler, self._token, json=False)
        return web.route(method, path, handler)

    def _guard(self, handler: Handler) -> Handler:
        async def behind(http: web.Request) -> web.StreamResponse:
            try:
                return await handler(http)
            except BodyRefused as error:
                if self._plain:
                    return web.Response(status=error.status, text=str(error))
                return json_answer({"error": str(error)}, error.status)
            except ServiceError as error:
                return json_answer({"error": str(error)}, error.status)

        return behind

    @staticmethod
    def _of(found: Any) -> tuple[Any, int]:
        status, value = found
        return value, status

    def application(
        self,
        routes: Iterable[web.RouteDef],
        limits: Limits,
        observe: Callable[[str, str, int, float], None] | None = None,
    ) -> web.Application:
        """The service. ``observe``: path of the route, method, status and seconds of each request
        to a known path."""

        @web.middleware
        async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
            http = request
            began = time.perf_counter()
            try:
                response = await handler(http)
            except HttpError as error:
                response = error_response(error)
            except web.HTTPException as error:
                if error.status < 400:
                    raise
                response = (
                    web.Response(status=400, text=error.text)
                    if error.status == 400 and error.text
                    else self._unknown(error.status)
                )
                if "allow" in error.headers:
                    response.headers["allow"] = error.headers["allow"]
            except (asyncio.CancelledError, ConnectionError):
                raise
            except Exception:
                _log.exception("%s %s failed", http.method, http.path)
                response = json_answer({"error": "internal error; the log has the details"}, 500)
            route = _path_of(http)
            if observe is not None and route is not None:
                took = time.perf_counter() - began
                observe(route, http.method, response.status, took)
            return response

        app = web.Application(middlewares=[errors])
        app[BODIES] = Bodies(limits)
        app.add_routes(routes)
        return app

    def _unknown(self, status: int) -> web.Response:
        if self._plain:
            return web.Response(status=status)
        text = {404: "route not found", 405: "method not allowed"}.get(status, "bad request")
        return json_answer({"error": text}, status)


def _path_of(http: web.Request) -> str | None:
    """The path of the known route of a request."""
    resource = http.match_info.route.resource
    if resource is not None:
        return resource.canonical
    for one in http.app.router.resources():
        if one.canonical == http.path:
            return one.canonical
    return None
