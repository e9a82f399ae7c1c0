"""Dynamo's workers in a cluster: two kinds of objects listed, followed and joined. Blocking.

A worker is discoverable if a labelled EndpointSlice has its pod as ready and its metadata exists;
if both have the pod's uid, it must be the same, so that a recreated pod does not inherit metadata.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dynctl.adapters.ports import (
    Cluster,
    ClusterEvent,
    ClusterRefusal,
    Deleted,
    DiscoveryEntry,
    Put,
)
from dynctl.base.errors import Unreachable
from dynctl.base.json_fields import mapping, text
from dynctl.wire.kubernetes import worker_metadata as metadata
from dynctl.wire.kubernetes.forbidden import lacking
from dynctl.wire.kubernetes.names import DISCOVERY_ENABLED_LABEL
from dynctl.wire.kubernetes.objects import endpoints

MAX_OBJECTS: Final = 100_000
PAGE: Final = 100
"""Objects per request: with its model cards one may have 1.5 MB."""

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
_SOUND_S: Final = 5.0
"""A watch that lasted as long was healthy: a failure after it is a new one."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of objects: its path in the API, and the parameters of its requests."""

    group: str
    version: str
    plural: str
    selector: str = ""

    def path(self, namespace: str | None) -> str:
        inside = "" if namespace is None else f"/namespaces/{namespace}"
        return f"/apis/{self.group}/{self.version}{inside}/{self.plural}"

    @property
    def query(self) -> dict[str, str]:
        return {"labelSelector": self.selector} if self.selector else {}


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
        uids: dict[_Name, set[str]] = {}
        for pods in slices:
            for pod, uid in pods:
                uids.setdefault(pod, set()).add(uid)
        return {
            entry.key: entry
            for (namespace, _), worker in workers
            if _same_pod(worker.uid, uids.get((namespace, worker.pod), set()))
            for entry in worker.entries
        }


def read_all(
    cluster: Cluster, resource: Resource, namespace: str | None
) -> tuple[list[Mapping[str, Any]], str]:
    """All objects, and the version from which to watch. Raises Unreachable, also if the API server
    refuses."""
    bodies: list[Mapping[str, Any]] = []
    version = ""
    try:
        for page in cluster.pages(resource.path(namespace), resource.query, page=PAGE):
            about = mapping(page.get("metadata"))
            if about.get("dynctlRestarted") is True:
                bodies, version = [], ""
            version = version or text(about.get("resourceVersion"))
            bodies += [one for one in page.get("items") or [] if isinstance(one, Mapping)]
            if len(bodies) > MAX_OBJECTS:
                raise Unreachable(
                    f"more than {MAX_OBJECTS:,} {resource.plural}",
                    "read one namespace: -n NAME",
                )
    except ClusterRefusal as refusal:
        raise refused(resource, namespace, "list", refusal) from refusal
    return bodies, version


def refused(
    resource: Resource, namespace: str | None, verb: str, refusal: ClusterRefusal
) -> Unreachable:
    """The reason why discovery is not readable, and the permission that it needs."""
    where = "in all namespaces" if namespace is None else f"in namespace {namespace}"
    if refusal.forbidden:
        kind = "ClusterRole" if namespace is None else "ClusterRole or Role"
        return Unreachable(
            f"not allowed to {verb} {resource.plural} {where}"
            + ("" if lacking(refusal.message) else f": {refusal.message}"),
            f"a {kind} needs the rule: apiGroups: [{resource.group}], "
            f"resources: [{resource.plural}], verbs: [get, list, watch]",
        )
    if refusal.missing:
        return Unreachable(
            f"the cluster does not serve {resource.plural} ({resource.group}/{resource.version}): "
            f"{refusal.message}",
            "are the CRDs of the Dynamo operator installed? or do workers register in etcd: "
            "--discovery etcd",
        )
    return Unreachable(
        f"cannot {verb} {resource.plural} {where}: {refusal.message} (HTTP {refusal.status})"
    )


class Follower:
    """Keeps one kind of objects up to date in the register, until ``stopped``; calls
    ``changed`` from its own thread.

    ``reason`` is why it cannot be followed now, empty if it can; ``listed``: whether the register
    has it.
    """

    def __init__(
        self,
        cluster: Cluster,
        resource: Resource,
        namespace: str | None,
        register: WorkerRegister,
        stopped: threading.Event,
        changed: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._resource = resource
        self._namespace = namespace
        self._register = register
        self._stopped = stopped
        self._changed = changed
        self.reason = ""
        self.listed = False

    def run(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._stopped.is_set():
            began = time.monotonic()
            reason = self._until_it_fails()
            if self._stopped.is_set():
                return
            if reason:
                self.listed, self.reason = False, reason
                self._changed()
            if time.monotonic() - began > _SOUND_S:
                pause = _FIRST_PAUSE_S
            self._rest(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _until_it_fails(self) -> str:
        """List and follow; returns why it ended, empty if only the list must be read again."""
        try:
            bodies, version = read_all(self._cluster, self._resource, self._namespace)
            self._register.replace(self._resource, bodies)
            self.listed, self.reason = True, ""
            self._changed()
            while not self._stopped.is_set():
                began = time.monotonic()
                version = self._watch(version)
                if time.monotonic() - began < 1:
                    # A server that ends every watch at once must not cause a busy loop.
                    self._rest(_FIRST_PAUSE_S)
        except Unreachable as error:
            return error.message
        except ClusterRefusal as refusal:
            if refusal.status == 410:
                return ""
            return refused(self._resource, self._namespace, "watch", refusal).message
        except Exception as error:
            # An unexpected error: the thread must not end and leave outdated entries.
            return f"{self._resource.plural} not readable: internal error: {error!r}"
        return ""

    def _watch(self, version: str) -> str:
        """Apply changes until the server ends the watch; returns the version of the last one."""
        path, query = self._resource.path(self._namespace), self._resource.query
        for event in self._cluster.watch(path, version, query):
            if self._stopped.is_set():
                break
            about = mapping(event.object.get("metadata"))
            version = text(about.get("resourceVersion")) or version
            if event.kind != "BOOKMARK":
                self._register.apply(self._resource, event)
                self._changed()
        return version

    def _rest(self, seconds: float) -> None:
        """A random pause, so that many readers do not reconnect to a restarted server at once."""
        self._stopped.wait(seconds * random.uniform(0.75, 1.25))


def _name(body: Mapping[str, Any]) -> _Name:
    about = mapping(body.get("metadata"))
    return text(about.get("namespace")), text(about.get("name"))


def _pod_entries(body: Mapping[str, Any]) -> _PodEntries:
    read = metadata.worker_metadata(body)
    entries = tuple(DiscoveryEntry(key, value, read.name) for key, value in read.entries())
    # In container mode the object's name is the pod's, then the container's.
    return _PodEntries(read.owner or read.name, read.owner_uid, entries)


def _ready_pods(body: Mapping[str, Any]) -> tuple[tuple[_Name, str], ...]:
    return tuple(((one.namespace, one.pod), one.uid) for one in endpoints(body) if one.ready)


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
