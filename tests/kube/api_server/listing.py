"""Lists: selectors, pages that all show one revision, and the revisions that may be requested."""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from tests.kube.api_server.parameters import Query, number
from tests.kube.api_server.resources import Resource
from tests.kube.api_server.selectors import Predicate, field_predicate, label_predicate
from tests.kube.api_server.status import StatusError, bad_request, expired
from tests.kube.api_server.storage import Compacted, Storage, place_of

Json = dict[str, Any]

_TOO_OLD = (
    "The provided continue parameter is too old to display a consistent list result. You can start "
    "a new list without the continue parameter, or use the continue token in this response to "
    "retrieve the remainder of the results. Continuing with the provided token results in an "
    "inconsistent list - objects that were created, modified, or deleted between the time the "
    "first chunk was returned and now may show up in the list."
)
_NOW = -1


def chosen(resource: Resource, namespace: str, query: Query) -> Predicate:
    """Holds for the objects that the request's namespace and selectors let through."""
    holds = label_predicate(query.get("labelSelector", ""))
    fits = field_predicate(query.get("fieldSelector", ""), resource)

    def lets_through(body: Mapping[str, Any]) -> bool:
        inside = not namespace or body["metadata"].get("namespace") == namespace
        return inside and fits(body) and holds(body)

    return lets_through


def page(
    storage: Storage, resource: Resource, namespace: str, query: Query, *, expire: bool
) -> tuple[Json, list[Json]]:
    """(the list's metadata, its objects as they are stored). ``expire``: a test wants its
    continue token to be too old."""
    holds = chosen(resource, namespace, query)
    after, wanted = ("", ""), _requested_revision(storage, query)
    token = query.get("continue", "")
    if token:
        wanted, after = _decoded(token)
    try:
        if expire and token:
            raise Compacted(storage.revision)
        revision, bodies = storage.snapshot(resource.key, wanted)
    except Compacted as gone:
        if token:
            raise expired(_TOO_OLD, _encoded(_NOW, after)) from None
        message = f"The provided resource version is too old: {wanted} ({gone.oldest})"
        raise expired(message) from None
    matching = [body for body in bodies if place_of(body) > after and holds(body)]
    limit = number(query, "limit")
    metadata: Json = {"resourceVersion": str(revision)}
    if limit and len(matching) > limit:
        metadata["continue"] = _encoded(revision, place_of(matching[limit - 1]))
        if not query.get("labelSelector") and not query.get("fieldSelector"):
            metadata["remainingItemCount"] = len(matching) - limit
        matching = matching[:limit]
    return metadata, matching


def _requested_revision(storage: Storage, query: Query) -> int | None:
    """None for the newest. ``Exact`` shows the past; everything else only must not be older."""
    revision = number(query, "resourceVersion")
    match = query.get("resourceVersionMatch", "")
    if match and not query.get("resourceVersion"):
        raise bad_request("resourceVersionMatch is forbidden unless resourceVersion is provided")
    check_not_future(storage, revision)
    return revision if match == "Exact" else None


def check_not_future(storage: Storage, revision: int) -> None:
    """Raises the 504 with which the real server ends its wait for a revision to come."""
    if revision > storage.revision:
        raise StatusError(
            504,
            "Timeout",
            f"Too large resource version: {revision}, current: {storage.revision}",
            {
                "causes": [
                    {
                        "reason": "ResourceVersionTooLarge",
                        "message": "Too large resource version",
                    }
                ],
                "retryAfterSeconds": 1,
            },
        )


def _encoded(revision: int, after: tuple[str, str]) -> str:
    value = {"v": "meta.k8s.io/v1", "rv": revision, "start": "/".join(after) + "\0"}
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def _decoded(token: str) -> tuple[int | None, tuple[str, str]]:
    try:
        value = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        revision = int(value["rv"])
        namespace, _, name = value["start"].removesuffix("\0").partition("/")
    except (binascii.Error, ValueError, KeyError, TypeError, AttributeError):
        raise bad_request("continue key is not valid: unrecognized encoding") from None
    return (None if revision == _NOW else revision), (namespace, name)
