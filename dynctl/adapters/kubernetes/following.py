"""Follow one kind of objects of a cluster: list, watch, list again where needed. Blocking."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dynctl.adapters.ports import Cluster, ClusterEvent, ClusterRefusal
from dynctl.base.errors import Unreachable
from dynctl.base.json_fields import mapping, text
from dynctl.wire.kubernetes.forbidden import lacking
from dynctl.wire.kubernetes.worker_metadata import GROUP

MAX_OBJECTS: Final = 100_000
PAGE: Final = 100
"""Objects per request: with its model cards one may have 1.5 MB."""

#: The core group in YAML.
_CORE: Final = '""'
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
    keeps: Callable[[Mapping[str, Any]], bool] | None = None
    """Which objects are kept, where the server cannot select them; None: all."""

    def path(self, namespace: str | None) -> str:
        inside = "" if namespace is None else f"/namespaces/{namespace}"
        root = f"/apis/{self.group}" if self.group else "/api"
        return f"{root}/{self.version}{inside}/{self.plural}"

    @property
    def query(self) -> dict[str, str]:
        return {"labelSelector": self.selector} if self.selector else {}


def place_of(path: str) -> tuple[str, str, str]:
    """Plural, namespace and name of a path in the API: empty where the path has none."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    plural, name = [*parts, "", ""][:2]
    return plural, namespace, name


class Register(Protocol):
    """Keeps the objects of the followed kinds; called from the threads of their followers."""

    def replace(self, resource: Resource, bodies: list[Mapping[str, Any]]) -> None:
        """All objects of a kind, as listed."""
        ...

    def apply(self, resource: Resource, event: ClusterEvent) -> None:
        """One change of an object."""
        ...


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
            bodies += [
                one
                for one in page.get("items") or []
                if isinstance(one, Mapping) and (resource.keeps is None or resource.keeps(one))
            ]
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
            f"a {kind} needs the rule: apiGroups: [{resource.group or _CORE}], "
            f"resources: [{resource.plural}], verbs: [get, list, watch]",
        )
    if refusal.missing and resource.group == GROUP:
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
        register: Register,
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
