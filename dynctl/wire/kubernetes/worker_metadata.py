"""DynamoWorkerMetadata: what a worker on Kubernetes registers, as entries of the discovery plane.

One object holds everything of one worker, in buckets whose keys are the ends of Dynamo's logical
keys; here each becomes an entry like those of etcd and files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dynctl.wire.dynamo.discovery import CARDS, EVENT_CHANNELS, EVENT_SOURCES, INSTANCES
from dynctl.wire.kubernetes.fields import mapping, moment, sequence, text

PLURAL: Final = "dynamoworkermetadatas"
GROUP: Final = "nvidia.com"
VERSION: Final = "v1alpha1"
_BUCKETS: Final = {
    "endpoints": INSTANCES,
    "model_cards": CARDS,
    "event_channels": EVENT_CHANNELS,
    "event_sources": EVENT_SOURCES,
}


@dataclass(frozen=True, slots=True)
class WorkerMetadata:
    """``owner_uid``: of the pod that it says it belongs to; empty where it says none."""

    namespace: str
    name: str
    owner: str
    owner_uid: str
    created: float | None
    data: Mapping[str, Any]

    def entries(self) -> Iterator[tuple[str, bytes]]:
        """Everything that it registers: Dynamo's logical key and the value, JSON."""
        for bucket, prefix in _BUCKETS.items():
            for key, value in mapping(self.data.get(bucket)).items():
                yield prefix + key, msgspec.json.encode(value)


def worker_metadata(body: Mapping[str, Any]) -> WorkerMetadata:
    """Read a DynamoWorkerMetadata."""
    metadata = mapping(body.get("metadata"))
    owners = (mapping(one) for one in sequence(metadata.get("ownerReferences")))
    owner = next((one for one in owners if one.get("kind") == "Pod"), {})
    return WorkerMetadata(
        text(metadata.get("namespace")),
        text(metadata.get("name")),
        text(owner.get("name")),
        text(owner.get("uid")),
        moment(metadata.get("creationTimestamp")),
        mapping(mapping(body.get("spec")).get("data")),
    )
