"""Dynamo's workers in a cluster: two kinds of objects listed, followed and joined. Blocking.

A worker is discoverable if a labelled EndpointSlice has its pod as ready and its metadata exists;
if both have the pod's uid, it must be the same, so that a recreated pod does not inherit metadata.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dynctl.adapters.kubernetes.following import Resource
from dynctl.adapters.ports import (
    ClusterEvent,
    Deleted,
    DiscoveryEntry,
    Put,
)
from dynctl.base.json_fields import mapping, text
from dynctl.wire.kubernetes import worker_metadata as metadata
from dynctl.wire.kubernetes.names import DISCOVERY_ENABLED_LABEL
from dynctl.wire.kubernetes.objects import endpoints

METADATA: Final = Resource(metadata.GROUP, metadata.VERSION, metadata.PLURAL)
SLICES: Final = Resource(
    "discovery.k8s.io", "v1", "endpointslices", f"{DISCOVERY_ENABLED_LABEL}=true"
)
RESOURCES: Final = (METADATA, SLICES)


@dataclass(frozen=True, slots=True)
class _PodEntries:
    """The discovery entries of one worker pod."""

    pod: str
    uid: str
    entries: tuple[DiscoveryEntry, ...]


_Name = tuple[str, str]
"""Namespace and name."""


class WorkerRegister:
    """The current objects of both kinds. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[_Name, _PodEntries] = {}
        self._ready: dict[_Name, tuple[tuple[_Name, str], ...]] = {}
        """The ready pods of each slice, with their uids."""

    def replace(self, resource: Resource, bodies: list[Mapping[str, Any]]) -> None:
        """All objects of a kind, as listed."""
        if resource is METADATA:
            workers = {_name(body): _pod_entries(body) for body in bodies}
            with self._lock:
                self._workers = workers
        else:
            ready = {_name(body): _ready_pods(body) for body in bodies}
            with self._lock:
                self._ready = ready

    def apply(self, resource: Resource, event: ClusterEvent) -> None:
        """One change of an object."""
        name, body = _name(event.object), event.object
        gone = event.kind == "DELETED"
        if resource is METADATA:
            worker = None if gone else _pod_entries(body)
            with self._lock:
                _set(self._workers, name, worker)
        else:
            pods = None if gone else _ready_pods(body)
            with self._lock:
                _set(self._ready, name, pods)

    def entries(self) -> dict[str, DiscoveryEntry]:
        """The entries of the discoverable workers, by key."""
        with self._lock:
            workers = sorted(self._workers.items())
            slices = list(self._ready.values())
        return {entry.key: entry for _, entry in _discoverable(workers, slices)}

    def ambiguous(self) -> str:
        """Why the entries are ambiguous: two namespaces register the same key; else empty.

        The key has Dynamo's namespace and the hash of the pod's name. Both can be the same in two
        namespaces of Kubernetes.
        """
        with self._lock:
            workers = sorted(self._workers.items())
            slices = list(self._ready.values())
        spaces: dict[str, str] = {}
        for namespace, entry in _discoverable(workers, slices):
            first = spaces.setdefault(entry.key, namespace)
            if first != namespace:
                return (
                    f"the namespaces {first} and {namespace} register the same key, {entry.key}: "
                    "read one of them, -n NAMESPACE"
                )
        return ""


def _discoverable(
    workers: Sequence[tuple[_Name, _PodEntries]],
    slices: Sequence[tuple[tuple[_Name, str], ...]],
) -> Iterator[tuple[str, DiscoveryEntry]]:
    """The entries of workers with a ready endpoint, with their Kubernetes namespace."""
    uids: dict[_Name, set[str]] = {}
    for pods in slices:
        for pod, uid in pods:
            uids.setdefault(pod, set()).add(uid)
    for (namespace, _), worker in workers:
        if _same_pod(worker.uid, uids.get((namespace, worker.pod), set())):
            for entry in worker.entries:
                yield namespace, entry


def _name(body: Mapping[str, Any]) -> _Name:
    about = mapping(body.get("metadata"))
    return text(about.get("namespace")), text(about.get("name"))


def _pod_entries(body: Mapping[str, Any]) -> _PodEntries:
    read = metadata.worker_metadata(body)
    entries = tuple(DiscoveryEntry(key, value, read.name) for key, value in read.entries())
    # In container mode the object's name is the pod's, then the container's.
    return _PodEntries(read.owner or read.name, read.owner_uid, entries)


def _ready_pods(body: Mapping[str, Any]) -> tuple[tuple[_Name, str], ...]:
    return tuple(
        ((endpoint.namespace, endpoint.pod), endpoint.uid)
        for endpoint in endpoints(body)
        if endpoint.ready
    )


def _same_pod(uid: str, ready: set[str]) -> bool:
    """Whether one of the ready pods of this name is the worker's; an unknown uid matches all."""
    return bool(ready) and (not uid or uid in ready or "" in ready)


def _set(into: dict[_Name, Any], name: _Name, value: Any) -> None:
    if value is None:
        into.pop(name, None)
    else:
        into[name] = value


def changes(
    before: Mapping[str, DiscoveryEntry], now: Mapping[str, DiscoveryEntry]
) -> Iterator[Put | Deleted]:
    """The chain of causes of an exception."""
    for key in before.keys() - now.keys():
        yield Deleted(key)
    for key, entry in now.items():
        if before.get(key) != entry:
            yield Put(entry)
