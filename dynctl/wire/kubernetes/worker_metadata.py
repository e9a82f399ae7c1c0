"""Read and write DynamoWorkerMetadata: what a worker on Kubernetes registers, as discovery entries.

One object has all entries of one worker, in buckets whose keys are the ends of Dynamo's logical
keys; here each becomes an entry like those of etcd and files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dynctl.base.json_fields import mapping, mappings, moment, text
from dynctl.wire.dynamo.discovery import CARDS, EVENT_CHANNELS, EVENT_SOURCES, INSTANCES

PLURAL: Final = "dynamoworkermetadatas"
GROUP: Final = "nvidia.com"
VERSION: Final = "v1alpha1"
_BUCKETS: Final = {
    "endpoints": INSTANCES,
    "model_cards": CARDS,
    "event_channels": EVENT_CHANNELS,
    "event_sources": EVENT_SOURCES,
}

#: The container whose object has the pod's name alone.
_MAIN: Final = "main"
_MASK: Final = (1 << 64) - 1
_BITS: Final = (1 << 53) - 1


@dataclass(frozen=True, slots=True)
class WorkerMetadata:
    """One object. ``owner``, ``owner_uid``: the pod of its owner reference; empty without one."""

    namespace: str
    name: str
    owner: str
    owner_uid: str
    created: float | None
    data: Mapping[str, Any]

    def entries(self) -> Iterator[tuple[str, bytes]]:
        """The entries of the worker: Dynamo's logical key and the value in JSON."""
        for bucket, prefix in _BUCKETS.items():
            for key, value in mapping(self.data.get(bucket)).items():
                yield prefix + key, msgspec.json.encode(value)


def worker_metadata(body: Mapping[str, Any]) -> WorkerMetadata:
    """Read a DynamoWorkerMetadata."""
    metadata = mapping(body.get("metadata"))
    owners = mappings(metadata.get("ownerReferences"))
    owner = next((reference for reference in owners if reference.get("kind") == "Pod"), {})
    return WorkerMetadata(
        text(metadata.get("namespace")),
        text(metadata.get("name")),
        text(owner.get("name")),
        text(owner.get("uid")),
        moment(metadata.get("creationTimestamp")),
        mapping(mapping(body.get("spec")).get("data")),
    )


@dataclass(frozen=True, slots=True)
class OwnPod:
    """The pod that registers; ``container`` is empty unless each container registers."""

    namespace: str
    name: str
    uid: str
    container: str = ""

    @property
    def object_name(self) -> str:
        """The name of its DynamoWorkerMetadata, which decides the instance id."""
        own = self.container in ("", _MAIN)
        return self.name if own else f"{self.name}-{self.container}"


def metadata_path(namespace: str) -> str:
    """The API path of a namespace's DynamoWorkerMetadata."""
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"


def bucket_of(key: str) -> tuple[str, str]:
    """The bucket of an entry, and its key there. Raises ValueError for an unknown kind."""
    for bucket, prefix in _BUCKETS.items():
        if key.startswith(prefix):
            return bucket, key.removeprefix(prefix)
    raise ValueError(f"{key}: expected one of {', '.join(_BUCKETS.values())}")


def metadata_object(pod: OwnPod, data: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The object of a pod, to be applied; ``data``: bucket -> key -> value. The pod owns it, so
    that it goes with the pod."""
    owner = {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": pod.name,
        "uid": pod.uid,
        "controller": False,
        "blockOwnerDeletion": False,
    }
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "DynamoWorkerMetadata",
        "metadata": {"name": pod.object_name, "ownerReferences": [owner]},
        "spec": {"data": {bucket: dict(data.get(bucket, {})) for bucket in _BUCKETS}},
    }


def instance_id(name: str) -> int:
    """The id, 0..2^53-1, of the worker whose DynamoWorkerMetadata has this name.

    SipHash-1-3 with a zero key over the UTF-8 name and a byte 0xFF (Rust's DefaultHasher over a
    str), cut to 53 bits so that it survives JSON numbers. Checked against Dynamo 1.6.1.
    """
    return _siphash13(name.encode() + b"\xff") & _BITS


def _siphash13(data: bytes) -> int:
    v0, v1 = 0x736F6D6570736575, 0x646F72616E646F6D
    v2, v3 = 0x6C7967656E657261, 0x7465646279746573
    whole = len(data) - len(data) % 8
    tail = data[whole:].ljust(7, b"\0") + bytes([len(data) & 0xFF])
    for start in range(0, whole + 8, 8):
        block = data[start : start + 8] if start < whole else tail
        word = int.from_bytes(block, "little")
        v3 ^= word
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        v0 ^= word
    v2 ^= 0xFF
    for _ in range(3):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


def _round(v0: int, v1: int, v2: int, v3: int) -> tuple[int, int, int, int]:
    v0 = (v0 + v1) & _MASK
    v1 = _rotate_left(v1, 13) ^ v0
    v0 = _rotate_left(v0, 32)
    v2 = (v2 + v3) & _MASK
    v3 = _rotate_left(v3, 16) ^ v2
    v0 = (v0 + v3) & _MASK
    v3 = _rotate_left(v3, 21) ^ v0
    v2 = (v2 + v1) & _MASK
    v1 = _rotate_left(v1, 17) ^ v2
    return v0, v1, _rotate_left(v2, 32), v3


def _rotate_left(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & _MASK
