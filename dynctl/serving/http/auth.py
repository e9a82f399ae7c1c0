"""Authorization for writes and for reading routing details: a token, or a client on this machine.

Without a token only local clients are allowed, and of those not a web page: its requests have an
Origin, a Host of its own (DNS rebinding), or a content type that needs no permission (a form).
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from functools import wraps

from aiohttp import web

from dynctl.serving.refusal import HttpError

#: Headers of proxies: their own address is local, their clients are not.
_OF_A_PROXY = ("forwarded", "via", "x-forwarded-for", "x-real-ip")

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


def require_local(http: web.Request) -> None:
    """Raises HttpError 403 unless the request comes from a program on this machine."""
    if http.remote and not _is_loopback(http.remote):
        problem = f"the client {http.remote} is not on this machine"
    elif not _is_loopback(http.url.host or ""):
        problem = f"the Host {http.host[:200]!r} is not a loopback address"
    elif any(name in http.headers for name in _OF_A_PROXY):
        problem = "the request comes through a proxy"
    elif "origin" in http.headers:
        problem = "the request comes from a web page (it has an Origin)"
    else:
        return
    raise _forbidden(http, f"{problem}; set --api-token on dynctl serve and send the token")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _forbidden(http: web.Request, problem: str) -> HttpError:
    return HttpError(
        403, f"{http.method} {http.path[:200]}: {problem}", "permission_error", "not_the_operator"
    )


def require_json(http: web.Request) -> None:
    """Raises HttpError 415 for a body that is not JSON.

    Without this check a web page could send one: forms and text need no permission of the server.
    """
    if http.can_read_body and http.content_type != "application/json":
        raise HttpError(
            415,
            f"{http.method} {http.path[:200]}: the content type is {http.content_type[:100]!r}; "
            "expected application/json",
            "invalid_request_error",
            "wrong_content_type",
        )


def guarded(
    handler: Handler, token: str | None, *, local: bool = True, json: bool = True
) -> Handler:
    """``handler`` behind the token, or without a token for local clients only.

    ``local`` False: without a token no client is allowed. ``json`` False: the handler checks the
    content type itself.
    """

    @wraps(handler)
    async def behind(http: web.Request) -> web.StreamResponse:
        if token is not None:
            require_token(http, token)
        elif local:
            require_local(http)
        else:
            raise _forbidden(http, "needs a token: set --api-token on dynctl serve")
        if json:
            require_json(http)
        return await handler(http)

    return behind
