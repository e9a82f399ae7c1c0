"""Conformance of a written object with its URL and a custom resource's schema."""

from dataclasses import dataclass, field
from typing import Any

from tests.kube.api_server import schemas
from tests.kube.api_server.resources import Resource
from tests.kube.api_server.status import Cause, bad_request, invalid

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Writer:
    """On whose behalf, and how. ``trusted`` is a test itself: it may write a status together with
    the rest, change the spec of a pod, and need not create a namespace first.

    ``strictness`` is the ``fieldValidation`` parameter; unknown fields are added to ``warnings``.
    """

    manager: str = "fixture"
    subresource: str = ""
    strictness: str = "Warn"
    trusted: bool = False
    dry_run: bool = False
    force: bool = False
    patching: bool = False
    warnings: list[str] = field(default_factory=list)


def typed(resource: Resource, version: str, body: Any) -> Json:
    """``body`` with the kind and apiVersion of its URL; raises 400 for others."""
    if not isinstance(body, dict):
        raise bad_request("the body of the request is not a JSON object")
    wanted = resource.api_version(version)
    if body.setdefault("kind", resource.kind) != resource.kind:
        raise bad_request(
            f"{body['kind']} in version {version!r} cannot be handled as a {resource.kind}"
        )
    if body.setdefault("apiVersion", wanted) != wanted:
        raise bad_request(
            f"the API version in the data ({body['apiVersion']}) does not match the expected "
            f"API version ({wanted})"
        )
    return body


def placed(resource: Resource, namespace: str, body: Json) -> Json:
    """The ``metadata`` of ``body``, with its URL's namespace; raises 400 for another."""
    metadata: Json = body.setdefault("metadata", {})
    if not resource.namespaced:
        metadata.pop("namespace", None)
    elif metadata.setdefault("namespace", namespace) != namespace:
        raise bad_request(
            "the namespace of the provided object does not match the namespace sent on the request"
        )
    return metadata


def conforming(resource: Resource, version: str, body: Json, writer: Writer) -> Json:
    """Pruned, with the defaults, valid. Built-in kinds are not checked here: see admission.py."""
    if not resource.custom:
        return body
    schema = resource.schemas[version]
    body, unknown = schemas.prune(body, schema)
    object_to(unknown, resource, version, writer)
    schemas.set_defaults(body, schema)
    causes = schemas.validate(body, schema)
    if causes:
        raise invalid(resource.kind, body["metadata"]["name"], causes, resource.group)
    return body


def object_to(unknown: list[str], resource: Resource, version: str, writer: Writer) -> None:
    """Report fields that are not in the schema, as strictly as the client requests."""
    result = [f'unknown field "{path}"' for path in unknown]
    if not result or writer.strictness == "Ignore":
        return
    if writer.strictness == "Warn":
        writer.warnings.extend(result)
        return
    problem = f"strict decoding error: {', '.join(result)}"
    if writer.patching:
        raise invalid("", "", [Cause("patch", "FieldValueInvalid", problem)])
    raise bad_request(
        f'{resource.kind} in version "{version}" cannot be handled as a {resource.kind}: {problem}'
    )
