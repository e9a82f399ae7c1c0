"""Errors of handlers as JSON responses."""

import asyncio
import logging
from functools import wraps

from aiohttp import web

from dynctl.serving.http.auth import Handler
from dynctl.serving.http.json_responses import error_response, nested_too_deeply
from dynctl.serving.http.openapi import routes_of
from dynctl.serving.http.plain_requests import ClientHandler, ClientRequest
from dynctl.serving.routing.refusal import HttpError, internal_error

_log = logging.getLogger(__name__)


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as JSON: HttpError as it is, the server's own by status, others as a logged 500."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = f"{request.method} {request.path[:200]}: {error.reason.lower()}"
        kind, served = "invalid_request_error", []
        if error.status == 404:
            kind, served = "not_found_error", served_endpoints(request.app)
            message += "; the endpoints that exist are in error.served"
        http_error = HttpError(error.status, message, kind, error.status, served=served)
        answer = error_response(http_error, request.path)
        if "allow" in error.headers:
            answer.headers["allow"] = error.headers["allow"]
        return answer
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        return error_answer(error, request)


def on_aiohttp(handler: ClientHandler) -> Handler:
    """The handler of a route of aiohttp."""

    @wraps(handler)
    async def behind(request: web.Request) -> web.StreamResponse:
        answer = await handler(request)
        assert isinstance(answer, web.StreamResponse)
        return answer

    return behind


def error_answer(error: Exception, request: ClientRequest) -> web.Response:
    """The answer to a request whose handler failed."""
    if isinstance(error, HttpError):
        return error_response(error, request.path)
    if isinstance(error, RecursionError):
        return error_response(nested_too_deeply(), request.path)
    _log.error("%s %s failed", request.method, request.path, exc_info=error)
    return error_response(internal_error(), request.path)


def served_endpoints(app: web.Application) -> list[str]:
    """The endpoints of an application, as ``POST /v1/responses``."""
    return [f"{method} {path}" for method, path, _ in routes_of(app)]
