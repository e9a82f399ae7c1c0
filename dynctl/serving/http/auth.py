"""Authorization by token for writes and for reading routing details.

Without a token every client that can connect may do both; by default only this machine can.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from functools import wraps

from aiohttp import web

from dynctl.serving.refusal import HttpError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def checked_token(token: str | None) -> str | None:
    """``token`` if it is valid in a header; raises ValueError."""
    if token is not None and (not token or not token.isascii() or not token.isprintable()):
        raise ValueError(
            "api token: expected printable ASCII characters, at least one; "
            "make one with: openssl rand -hex 32"
        )
    return token


def require_token(http: web.Request, token: str | None) -> None:
    """Raises HttpError 401 unless the request has ``token``; None allows every request.

    The time of the comparison does not depend on the given token.
    """
    if token is None:
        return
    scheme, _, given = http.headers.get("Authorization", "").partition(" ")
    # Header bytes that are not UTF-8 arrive as surrogates; they are a wrong token.
    offered = given.strip().encode("utf-8", "surrogateescape")
    if hmac.compare_digest(offered, token.encode()) and scheme.lower() == "bearer":
        return
    if scheme:
        problem, code = "wrong token", "invalid_token"
    else:
        problem, code = "token required", "token_needed"
    raise HttpError(
        401,
        f"{http.method} {http.path[:200]}: {problem}; send the header 'Authorization: Bearer "
        "TOKEN' with the --api-token of dynctl serve",
        "authentication_error",
        code,
        headers={"www-authenticate": 'Bearer realm="dynctl"'},
    )


def guarded(handler: Handler, token: str | None) -> Handler:
    """``handler`` behind the token."""
    if token is None:
        return handler

    @wraps(handler)
    async def behind(http: web.Request) -> web.StreamResponse:
        require_token(http, token)
        return await handler(http)

    return behind
