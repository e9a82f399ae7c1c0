"""The API server's refusals: one exception with its ``metav1.Status`` body.

The wording follows k8s.io/apimachinery's error constructors, since people and programs match on
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.kube.api_server.resources import Resource

Json = dict[str, Any]


class StatusError(Exception):
    """An answer other than success. ``code`` is HTTP's, ``reason`` Kubernetes' own word."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: Json | None = None,
        metadata: Json | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details
        self.metadata = metadata
        self.headers = headers or {}

    @property
    def body(self) -> Json:
        status: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": self.metadata or {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
        }
        if self.details is not None:
            status["details"] = self.details
        return status | {"code": self.code}


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing wrong with one field. ``reason`` is FieldValueInvalid and its sisters."""

    field: str
    reason: str
    message: str

    @property
    def sentence(self) -> str:
        return f"{self.field}: {self.message}"


def _named(resource: Resource, name: str) -> Json:
    details: Json = {"name": name, "group": resource.group, "kind": resource.plural}
    return {key: value for key, value in details.items() if value}


def not_found(resource: Resource, name: str) -> StatusError:
    return StatusError(
        404,
        "NotFound",
        f'{resource.qualified} "{name}" not found',
        _named(resource, name),
    )


def already_exists(resource: Resource, name: str) -> StatusError:
    return StatusError(
        409,
        "AlreadyExists",
        f'{resource.qualified} "{name}" already exists',
        _named(resource, name),
    )


def conflict(resource: Resource, name: str, message: str) -> StatusError:
    return StatusError(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {resource.qualified} "{name}": {message}',
        _named(resource, name),
    )


MODIFIED_MEANWHILE = (
    "the object has been modified; please apply your changes to the latest version and try again"
)


def apply_conflict(others: Sequence[tuple[str, str, str]]) -> StatusError:
    """``others``: (manager, apiVersion, dotted field) of every field that another manager owns."""
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{manager}" using {version}',
            "field": field,
        }
        for manager, version, field in others
    ]
    noun = "conflict" if len(causes) == 1 else "conflicts"
    result = "\n".join(f"- {cause['message']}: {cause['field']}" for cause in causes)
    if len(causes) == 1:
        result = f"{causes[0]['message']}: {causes[0]['field']}"
    separator = ": " if len(causes) == 1 else ":\n"
    return StatusError(
        409,
        "Conflict",
        f"Apply failed with {len(causes)} {noun}{separator}{result}",
        {"causes": causes},
    )


def invalid(kind: str, name: str, causes: Sequence[Cause], group: str = "") -> StatusError:
    """422. ``causes`` must not be empty."""
    sentences = [cause.sentence for cause in causes]
    result = sentences[0] if len(sentences) == 1 else f"[{', '.join(sentences)}]"
    qualified = f"{kind}.{group}" if group else kind
    details: Json = {"name": name, "group": group, "kind": kind}
    details = {key: value for key, value in details.items() if value}
    details["causes"] = [
        {"reason": cause.reason, "message": cause.message, "field": cause.field} for cause in causes
    ]
    return StatusError(422, "Invalid", f'{qualified} "{name}" is invalid: {result}', details)


def bad_request(message: str) -> StatusError:
    return StatusError(400, "BadRequest", message)


def unauthorized() -> StatusError:
    return StatusError(401, "Unauthorized", "Unauthorized")


def expired(message: str, continue_token: str | None = None) -> StatusError:
    """410: a resource version or a continue token of the past."""
    metadata = {"continue": continue_token} if continue_token else None
    return StatusError(410, "Expired", message, metadata=metadata)


def method_not_allowed() -> StatusError:
    return StatusError(
        405,
        "MethodNotAllowed",
        "the server does not allow this method on the requested resource",
        {},
    )


def no_such_resource() -> StatusError:
    return StatusError(404, "NotFound", "the server could not find the requested resource", {})


def unsupported_media_type(accepted: Sequence[str]) -> StatusError:
    return StatusError(
        415,
        "UnsupportedMediaType",
        "the body of the request was in an unknown format - accepted media types include: "
        + ", ".join(accepted),
        {},
    )


REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}
