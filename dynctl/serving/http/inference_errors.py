"""Failures of inference as answers: the client's mistakes, and the engines' own words."""

from collections.abc import Mapping
from typing import Any

import msgspec

from dynctl.base.decode_errors import RequestError
from dynctl.serving.flow import GaveUp
from dynctl.serving.refusal import HttpError, attempts_of
from dynctl.serving.telemetry.observers import RequestRecord


def client_error(error: RequestError) -> HttpError:
    return HttpError(
        error.status, str(error), "invalid_request_error", error.code, param=error.field
    )


def outcome_of(error: HttpError) -> str:
    return "client_error" if error.status < 500 else "refused"


def gave_up(error: GaveUp, record: RequestRecord) -> HttpError:
    """The engines' failure as an answer: their own words where they had some."""
    failure = error.failure
    record.outcome = "client_error" if 400 <= failure.status < 500 else "upstream_error"
    headers = {} if failure.retry_after is None else {"retry-after": failure.retry_after}
    details: dict[str, Any] = {
        "decision": error.plan.id,
        "attempts": attempts_of(record.attempts),
    }
    told = _engine_error(failure.body)
    if told is not None:
        code = told.get("code")
        status = failure.status or 502
        return HttpError(
            status,
            str(told.get("message") or failure),
            str(told.get("type") or "upstream_error"),
            code if isinstance(code, (int, str)) else status,
            param=told.get("param") if isinstance(told.get("param"), str) else None,
            details=details,
            headers=headers,
        )
    status = failure.status or (504 if failure.kind == "timeout" else 502)
    return HttpError(
        status, str(failure), "upstream_error", status, details=details, headers=headers
    )


def _engine_error(body: bytes) -> Mapping[str, Any] | None:
    try:
        plain = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(plain, dict):
        return None
    error = plain.get("error", plain)
    return error if isinstance(error, dict) else None
