"""Look at one pod: copy its labels and report what is in the way, by label patches and events."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

from dynctl.adapters.ports import Cluster, ClusterRefusal, ClusterWriter
from dynctl.base.errors import DynctlError
from dynctl.base.json_fields import mapping, sequence
from dynctl.manifests.files import Manifest
from dynctl.manifests.graphs import TOPOLOGY_KINDS, ClusterTopology, topologies_of
from dynctl.manifests.render import StalePolicy
from dynctl.serving.telemetry.exposition import Counter, Family
from dynctl.serving.topology_sync.copies import (
    WRITES,
    CopyState,
    LabelCopy,
    copies_of,
)
from dynctl.wire.kubernetes.forbidden import lacking
from dynctl.wire.kubernetes.names import CLUSTER_TOPOLOGY_ANNOTATION, LABEL_MISSING_REASON
from dynctl.wire.kubernetes.objects import Node, Pod

COMPONENT: Final = "dynctl-topology-sync"
#: Reasons of events. That of a missing label is the operator's, which people look for.
REASONS: Final[Mapping[CopyState, tuple[str, str]]] = {
    CopyState.NODE_LACKS: ("Warning", LABEL_MISSING_REASON),
    CopyState.STALE: ("Warning", "TopologyLabelStale"),
    CopyState.REPAIRED: ("Normal", "TopologyLabelReplaced"),
    CopyState.NO_TOPOLOGY: ("Warning", "TopologyNotFound"),
    CopyState.INVALID: ("Warning", "TopologyLabelKeyInvalid"),
}
#: Seconds until an event that still holds is reported again.
REPEAT_S: Final = 3600.0
TOPOLOGIES_S: Final = 30.0
"""Seconds for which Grove topologies are remembered."""

_MOST_REPORTED: Final = 20_000
_MOST_MESSAGE: Final = 1024
_TOPOLOGIES: Final = {kind: f"{kind.lower()}s" for kind in TOPOLOGY_KINDS}

WRITTEN = Family(
    "dynctl_topology_sync_labels_written_total",
    "counter",
    "Labels that were copied to pods, and that the API server refused",
    ("result",),
)
EVENTS = Family(
    "dynctl_topology_sync_events_total", "counter", "Events about pods, by reason", ("reason",)
)


@dataclass(frozen=True, slots=True)
class Looked:
    """One label after a look: ``written`` True: it has the node's value now. ``problem``: why a
    write failed, empty where none did."""

    copy: LabelCopy
    written: bool = False
    problem: str = ""


@dataclass(slots=True)
class Topologies:
    """The Grove topologies of a cluster, read again after TOPOLOGIES_S seconds."""

    cluster: Cluster
    monotonic: Callable[[], float] = time.monotonic
    problem: str = ""
    """Why they could not be read, empty if they could."""
    _found: Mapping[str, ClusterTopology] = field(default_factory=dict)
    _at: float | None = None

    def of(self, pod: Pod) -> Mapping[str, ClusterTopology]:
        """Those that the pod may name; empty for a pod that names none."""
        if not pod.annotations.get(CLUSTER_TOPOLOGY_ANNOTATION):
            return {}
        if self._at is None or self.monotonic() - self._at > TOPOLOGIES_S:
            self._found, self.problem = self._read()
            self._at = self.monotonic()
        return self._found

    def _read(self) -> tuple[Mapping[str, ClusterTopology], str]:
        manifests: list[Manifest] = []
        problem = ""
        for kind, plural in _TOPOLOGIES.items():
            api = "grove.io/v1alpha1"
            try:
                for page in self.cluster.pages(f"/apis/{api}/{plural}"):
                    manifests += (
                        Manifest("cluster", {**mapping(item), "kind": kind, "apiVersion": api})
                        for item in sequence(page.get("items"))
                    )
            except ClusterRefusal as refusal:
                if not refusal.missing:
                    problem = lacking(refusal.message) or refusal.message
            except DynctlError as error:
                problem = error.message
        if problem and not manifests:
            return self._found, problem
        return {topology.name: topology for topology in topologies_of(manifests)}, problem


class PodSync:
    """Looks at pods. ``writer`` None: a dry run, nothing is written.

    ``now``: seconds since the epoch.
    """

    def __init__(
        self,
        cluster: Cluster,
        writer: ClusterWriter | None,
        policy: StalePolicy,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._writer, self._policy = writer, policy
        self._now = now
        self._may_write: Callable[[], bool] = lambda: True
        self.topologies = Topologies(cluster)
        self.written = Counter(WRITTEN)
        self.events = Counter(EVENTS)
        #: Name of an event -> when it was written last.
        self._reported: dict[str, float] = {}

    def write_while(self, may_write: Callable[[], bool]) -> None:
        """Write only while this holds; it is read before every pod."""
        self._may_write = may_write

    def look(self, pod: Pod, nodes: Mapping[str, Node]) -> list[Looked]:
        """Judge a pod, write its labels, report problems. Raises Unreachable.

        An API server that refuses is not an exception but a ``problem``.
        """
        copies = copies_of(pod, nodes, self.topologies.of(pod), self._policy)
        if self.topologies.problem:
            # Without the list, a topology is not known to be missing.
            copies = tuple(
                replace(copy, state=CopyState.UNREAD)
                if copy.state is CopyState.NO_TOPOLOGY
                else copy
                for copy in copies
            )
        if self._writer is None or not self._may_write():
            return [Looked(copy) for copy in copies]
        return self._write(self._writer, pod, copies)

    def _write(self, writer: ClusterWriter, pod: Pod, copies: Sequence[LabelCopy]) -> list[Looked]:
        """Write the labels that are due, and report the copies that have a reason."""
        due = [copy for copy in copies if copy.state in WRITES]
        problem = self._patch(writer, pod, due) if due else ""
        self.written.inc(("refused" if problem else "written",), len(due))
        looked = []
        for copy in copies:
            if copy.state in WRITES:
                written, failed = not problem, problem
            else:
                written, failed = False, ""
            if copy.state in REASONS and not failed:
                failed = self._report(writer, copy)
            looked.append(Looked(copy, written, failed))
        return looked

    def _patch(self, writer: ClusterWriter, pod: Pod, wanted: list[LabelCopy]) -> str:
        labels = {copy.target: copy.wants for copy in wanted}
        # With the uid, a pod that was created again under the same name is not changed.
        patch = {"metadata": {"uid": pod.uid, "labels": labels}}
        try:
            writer.merge(_path(pod.namespace, "pods", pod.name), patch)
        except ClusterRefusal as refusal:
            return lacking(refusal.message) or refusal.message
        return ""

    def _report(self, writer: ClusterWriter, copy: LabelCopy) -> str:
        kind, reason = REASONS[copy.state]
        message = copy.message[:_MOST_MESSAGE]
        digest = hashlib.sha256("\n".join((copy.uid, reason, message)).encode()).hexdigest()
        name = f"{copy.pod[:200]}.{digest[:16]}"
        at = self._now()
        if at - self._reported.get(name, -REPEAT_S) < REPEAT_S:
            return ""
        stamp = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            try:
                writer.create(
                    _path(copy.namespace, "events"),
                    _event(copy, name, kind, reason, message, stamp),
                )
            except ClusterRefusal as refusal:
                if refusal.status != 409:
                    raise
                writer.merge(_path(copy.namespace, "events", name), {"lastTimestamp": stamp})
        except ClusterRefusal as refusal:
            return lacking(refusal.message) or refusal.message
        self.events.inc((reason,))
        while len(self._reported) >= _MOST_REPORTED:
            del self._reported[next(iter(self._reported))]
        self._reported[name] = at
        return ""


def _path(namespace: str, plural: str, name: str = "") -> str:
    end = f"/{quote(name, safe='')}" if name else ""
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/{plural}{end}"


def _event(
    copy: LabelCopy, name: str, kind: str, reason: str, message: str, stamp: str
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": copy.namespace},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": copy.namespace,
            "name": copy.pod,
            "uid": copy.uid,
        },
        "type": kind,
        "reason": reason,
        "message": message,
        "count": 1,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
    }
