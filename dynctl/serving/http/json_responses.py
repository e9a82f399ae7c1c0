"""JSON responses of the control endpoints, and bounded reading of their JSON bodies."""

from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from dynctl.base.decode_errors import RequestError, WireError
from dynctl.base.json_reader import check_depth, read_json, too_deep
from dynctl.serving.http.bodies import bodies_of
from dynctl.serving.routing.refusal import HttpError
from dynctl.wire.large_body import LARGE, decode_large

CONTROL_BODY_BYTES = 4 * 1024 * 1024


def json_response(value: Any, status: int = 200) -> web.Response:
    """``value`` as JSON; msgspec structs and frozen dataclasses included."""
    return web.Response(
        status=status,
        body=msgspec.json.encode(value),
        headers={"content-type": "application/json"},
    )


def error_response(error: HttpError, path: str = "") -> web.Response:
    """``error`` as a response, in the shape of the API that ``path`` belongs to."""
    return web.Response(
        status=error.status,
        body=error.body(path),
        headers={"content-type": "application/json", **error.headers},
    )


def bad_request(message: str, *, param: str | None = None, code: str = "invalid") -> HttpError:
    return HttpError(400, message, "invalid_request_error", code, param=param)


def nested_too_deeply() -> HttpError:
    """The error for a body that decoding or encoding cannot follow to its end."""
    return bad_request("the body is nested too deeply", code="nested_too_deeply")


def not_found(message: str, *, code: str = "not_found") -> HttpError:
    return HttpError(404, message, "not_found_error", code)


def decode_json(raw: bytes) -> Any:
    """Any JSON; raises HttpError 400."""
    try:
        return read_json(raw, "body")
    except WireError as error:
        raise bad_request(f"the body is not valid: {error.problem}", code="invalid_json") from None


async def decoded(http: web.Request, raw: bytes) -> Any:
    """As :func:`decode_json`, for the body of a request: a large one takes its turn in a thread."""
    if len(raw) < LARGE:
        return decode_json(raw)
    return await bodies_of(http).turns.run(http.remote or "", partial(_decode_large, raw))


def _decode_large(raw: bytes) -> Any:
    try:
        value = decode_large(raw)
        check_depth(value, "body")
    except RequestError as error:
        raise bad_request(str(error), code=error.code) from None
    except WireError as error:
        raise bad_request(f"the body is not valid: {error.problem}", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise bad_request(
            f"the body is not valid: not JSON: {error}", code="invalid_json"
        ) from None
    except RecursionError:
        problem = too_deep("body").problem
        raise bad_request(f"the body is not valid: {problem}", code="invalid_json") from None
    return value


async def read_json_object(http: web.Request, limit: int = CONTROL_BODY_BYTES) -> dict[str, Any]:
    """The body as an object; raises HttpError (400, 408, 413, 415)."""
    with bodies_of(http).of(http) as body:
        value = await decoded(http, await body.read(http, limit))
    if not isinstance(value, dict):
        raise bad_request("the body is not a JSON object", code="wrong_type")
    return value
