"""Common metadata of objects: names, uids, times."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

Json = dict[str, Any]

_UIDS: Final = uuid.UUID("6f1f2c0e-6a53-4c55-9a8f-6a3c0d0f9a11")


def stamp(at: float) -> str:
    """Seconds since the epoch as Kubernetes writes them: RFC 3339, whole seconds."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def uid_of(kind: str, namespace: str, name: str, life: int = 0) -> str:
    """A uid that follows from the name; ``life`` counts recreations under the same name."""
    return str(uuid.uuid5(_UIDS, f"{kind}/{namespace}/{name}/{life}"))


def key_of(body: Mapping[str, Any]) -> tuple[str, str]:
    """``(namespace, name)``; the namespace is empty where there is none."""
    metadata = body["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def metadata(
    kind: str,
    namespace: str,
    name: str,
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    created: float | None = None,
    life: int = 0,
) -> Json:
    """``metadata`` of an object. Without ``created`` neither time nor uid: as a client sends it."""
    found: Json = {"name": name}
    if namespace:
        found["namespace"] = namespace
    if labels:
        found["labels"] = dict(labels)
    if annotations:
        found["annotations"] = dict(annotations)
    if created is not None:
        found["uid"] = uid_of(kind, namespace, name, life)
        found["creationTimestamp"] = stamp(created)
    return found


def owner(body: Mapping[str, Any], *, controller: bool = True, blocks: bool = True) -> Json:
    """An owner reference to an object that has a uid."""
    return {
        "apiVersion": body["apiVersion"],
        "kind": body["kind"],
        "name": body["metadata"]["name"],
        "uid": body["metadata"]["uid"],
        "controller": controller,
        "blockOwnerDeletion": blocks,
    }
