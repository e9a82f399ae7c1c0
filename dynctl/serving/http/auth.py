"""Who may do what: operators, clients with a key, and all others.

An operator has the admin token, uses the Unix socket, or, if there is no token, is a program on
this machine. A web page is not one: its requests have an Origin, a Host of its own (DNS rebinding),
a content type that needs no permission (a form), or the browser's note that another site sent it
(an image, a frame, a window). Clients of inference need a key if keys are set.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from functools import lru_cache, wraps
from typing import Final, TypeVar

from aiohttp import web

from dynctl.serving.http.keys import ApiKey, ApiKeys
from dynctl.serving.http.plain_requests import ClientRequest, PlainRequest
from dynctl.serving.routing.refusal import HttpError

#: Headers of proxies: their own address is local, their clients are not.
_OF_A_PROXY = ("forwarded", "via", "x-forwarded-for", "x-real-ip")

#: Values of Sec-Fetch-Site for a request that a page of another origin causes.
_OTHER_SITES = ("cross-site", "same-site")

#: The key of a request that came with one, where clients need keys.
_API_KEY: Final = web.RequestKey("api_key", ApiKey)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
#: A request on any server, and its answer.
R = TypeVar("R", bound=ClientRequest)
A = TypeVar("A")


def checked_token(token: str | None) -> str | None:
    """``token`` if it is valid in a header; raises ValueError."""
    if token is not None and (not token or not token.isascii() or not token.isprintable()):
        raise ValueError(
            "admin token: expected printable ASCII characters, at least one; "
            "make one with: openssl rand -hex 32"
        )
    return token


def require_token(http: ClientRequest, token: str | None) -> None:
    """Raises HttpError 401 unless the request has ``token``; None allows every request.

    The time of the comparison does not depend on the given token.
    """
    if token is None:
        return
    if has_token(http, token):
        return
    if _credentials(http)[0]:
        problem, code = "wrong token", "invalid_token"
    else:
        problem, code = "token required", "token_needed"
    raise HttpError(
        401,
        f"{http.method} {http.path[:200]}: {problem}; send the header 'Authorization: Bearer "
        "TOKEN' with the --admin-token of dynctl serve",
        "authentication_error",
        code,
        headers={"www-authenticate": 'Bearer realm="dynctl"'},
    )


def has_token(http: ClientRequest, token: str) -> bool:
    """Whether the request has this token. Compares in constant time."""
    scheme, offered = _credentials(http)
    return hmac.compare_digest(offered, token.encode()) and scheme == "bearer"


def client_of(http: ClientRequest, token: str | None) -> bytes:
    """The credentials, which separate the caller from other clients; empty without any, and for
    operators."""
    return b"" if token is not None and has_token(http, token) else _client_key(http)[1]


def api_key_of(http: ClientRequest) -> ApiKey | None:
    """The key with which :func:`keyed` let the request in; None for operators, and without keys."""
    try:
        return http[_API_KEY]
    except KeyError:
        return None


def _credentials(http: ClientRequest) -> tuple[str, bytes]:
    """Scheme and credentials of the Authorization header."""
    scheme, _, given = http.headers.get("authorization", "").partition(" ")
    # Header bytes that are not UTF-8 arrive as surrogates; they are a wrong token.
    return scheme.lower(), given.strip().encode("utf-8", "surrogateescape")


def _client_key(http: ClientRequest) -> tuple[str, bytes]:
    """As :func:`_credentials`, or the ``x-api-key`` that clients of the Messages API send."""
    given = http.headers.get("x-api-key")
    if given is None or "authorization" in http.headers:
        return _credentials(http)
    return "bearer", given.strip().encode("utf-8", "surrogateescape")


def require_local(http: ClientRequest) -> None:
    """Raises HttpError 403 unless the request comes from a program on this machine."""
    problem = _not_local(http)
    if problem:
        raise _forbidden(http, f"{problem}; set --admin-token on dynctl serve and send the token")


def is_operator(http: ClientRequest, token: str | None, *, links: bool = False) -> bool:
    """Whether the caller may see routing details. ``links``: also by a link on another site."""
    if over_unix_socket(http):
        return True
    return has_token(http, token) if token is not None else not _not_local(http, links=links)


def over_unix_socket(http: ClientRequest) -> bool:
    """Whether the request came over the Unix socket, which only its owner can open."""
    used = http.get_extra_info("socket")
    return used is not None and used.family == socket.AF_UNIX


def _not_local(http: ClientRequest, *, links: bool = False) -> str:
    """Why the request is not from a program on this machine; empty if it is."""
    if http.remote and not _is_loopback(http.remote):
        return f"the client {http.remote} is not on this machine"
    host = http.hostname if isinstance(http, PlainRequest) else http.url.host
    if not _is_loopback(host or ""):
        return f"the Host {http.host[:200]!r} is not a loopback address"
    if any(name in http.headers for name in _OF_A_PROXY):
        return "the request comes through a proxy"
    if "origin" in http.headers:
        return "the request comes from a web page (it has an Origin)"
    if http.headers.get("sec-fetch-site") in _OTHER_SITES:
        opened = (http.headers.get("sec-fetch-mode"), http.headers.get("sec-fetch-dest"))
        if not (links and http.method == "GET" and opened == ("navigate", "document")):
            return "the request comes from a web page of another site"
    return ""


@lru_cache(maxsize=1024)
def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _forbidden(http: ClientRequest, problem: str) -> HttpError:
    return HttpError(
        403, f"{http.method} {http.path[:200]}: {problem}", "permission_error", "not_the_operator"
    )


def require_json(http: ClientRequest) -> None:
    """Raises HttpError 415 for a body that is not JSON, as Dynamo, vLLM and SGLang refuse it.

    Without this check a web page could send one: forms and text need no permission of the server.
    """
    if http.headers.get("content-type") == "application/json":
        return
    if http.can_read_body and http.content_type != "application/json":
        raise HttpError(
            415,
            f"{http.method} {http.path[:200]}: the content type is {http.content_type[:100]!r}; "
            "expected application/json",
            "invalid_request_error",
            "wrong_content_type",
        )


def guarded(
    handler: Callable[[R], Awaitable[A]],
    token: str | None,
    *,
    local: bool = True,
    json: bool = True,
) -> Callable[[R], Awaitable[A]]:
    """``handler`` for operators only.

    ``local`` False: without a token only the Unix socket is allowed. ``json`` False: the handler
    checks the content type itself.
    """

    @wraps(handler)
    async def behind(http: R) -> A:
        if over_unix_socket(http):
            pass
        elif token is not None:
            require_token(http, token)
        elif local:
            require_local(http)
        else:
            raise _forbidden(http, "needs a token: set --admin-token on dynctl serve")
        if json:
            require_json(http)
        return await handler(http)

    return behind


def keyed(
    handler: Callable[[R], Awaitable[A]], keys: ApiKeys, token: str | None, *, json: bool = True
) -> Callable[[R], Awaitable[A]]:
    """``handler`` for clients with a valid key, within its limits, and for operators with the
    token; without keys for every client. Bodies have to be JSON; ``json`` False: they are."""

    @wraps(handler)
    async def open_to_all(http: R) -> A:
        require_json(http)
        return await handler(http)

    if not keys.required:
        return open_to_all if json else handler

    @wraps(handler)
    async def behind(http: R) -> A:
        if over_unix_socket(http) or (token is not None and has_token(http, token)):
            if json:
                require_json(http)
            return await handler(http)
        scheme, offered = _client_key(http)
        key = keys.find(offered) if scheme == "bearer" else None
        if key is None:
            raise _no_key(offered)
        if json:
            require_json(http)
        http[_API_KEY] = key
        with keys.use(key):
            return await handler(http)

    return behind


def _no_key(offered: bytes) -> HttpError:
    """OpenAI's error for a missing or a wrong key."""
    problem = "wrong API key" if offered else "API key required"
    return HttpError(
        401,
        f"{problem}; send the header 'Authorization: Bearer KEY'",
        "invalid_request_error",
        "invalid_api_key",
        headers={"www-authenticate": 'Bearer realm="dynctl"'},
    )
