"""JSON answers of the control endpoints, and bodies read with a bound and a name for each error."""

import hmac
from typing import Any

import msgspec
from aiohttp import web

from dynctl.serving.refusal import HttpError

CONTROL_BODY_BYTES = 4 * 1024 * 1024


def json_answer(value: Any, status: int = 200) -> web.Response:
    """``value`` as JSON; msgspec structs and frozen dataclasses included."""
    return web.Response(
        status=status,
        body=msgspec.json.encode(value),
        headers={"content-type": "application/json"},
    )


def error_answer(error: HttpError) -> web.Response:
    return web.Response(
        status=error.status,
        body=error.body(),
        headers={"content-type": "application/json", **error.headers},
    )


def bad_request(message: str, *, param: str | None = None, code: str = "invalid") -> HttpError:
    return HttpError(400, message, "invalid_request_error", code, param=param)


def not_found(message: str, *, code: str = "not_found") -> HttpError:
    return HttpError(404, message, "not_found_error", code)


async def read_json_object(http: web.Request, limit: int = CONTROL_BODY_BYTES) -> dict[str, Any]:
    """The body as an object; raises HttpError (400, 413)."""
    size = http.content_length
    raw = await http.read() if size is None or size <= limit else b""
    if len(raw) > limit or (size or 0) > limit:
        raise HttpError(
            413, f"the body is over the limit of {limit} bytes", "invalid_request_error",
            "body_too_large",
        )  # fmt: skip
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise bad_request("the body is not a JSON object", code="wrong_type")
    return body


def require_token(http: web.Request, token: str | None) -> None:
    """Raises HttpError 401 unless the request bears the token; no token configured, no check."""
    if token is None:
        return
    kind, _, given = http.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode(), token.encode())
    if kind.lower() != "bearer" or not same:
        raise HttpError(
            401,
            "this endpoint needs the API token: send Authorization: Bearer TOKEN",
            "authentication_error",
            "unauthorized",
            headers={"www-authenticate": "Bearer"},
        )
