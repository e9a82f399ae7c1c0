"""The nodes and pods that `topology sync` follows, and which pods have to be looked at again."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final

from dynctl.adapters.kubernetes.following import Resource
from dynctl.adapters.ports import ClusterEvent
from dynctl.base.json_fields import mapping
from dynctl.serving.topology_sync.copies import takes_part
from dynctl.wire.kubernetes.names import CLUSTER_TOPOLOGY_ANNOTATION, LABEL_KEY_ANNOTATION
from dynctl.wire.kubernetes.objects import Node, Pod, node, pod

PodKey = tuple[str, str]
"""Namespace and name."""


def _names_a_source(body: Mapping[str, Any]) -> bool:
    annotations = mapping(mapping(body.get("metadata")).get("annotations"))
    return any(annotations.get(key) for key in (LABEL_KEY_ANNOTATION, CLUSTER_TOPOLOGY_ANNOTATION))


NODES: Final = Resource("", "v1", "nodes")
PODS: Final = Resource("", "v1", "pods", keeps=_names_a_source)


class FollowedPods:
    """Thread-safe. Pods that take part and all nodes, as listed and watched."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._nodes: dict[str, Node] = {}
        self._pods: dict[PodKey, Pod] = {}
        self._due: set[PodKey] = set()

    def replace(self, resource: Resource, bodies: list[Mapping[str, Any]]) -> None:
        """All objects of a kind, as listed: every pod is due."""
        if resource is NODES:
            nodes = {item.name: item for item in map(node, bodies)}
            with self._changed:
                self._nodes = nodes
                self._add(self._pods)
            return
        pods = {(item.namespace, item.name): item for item in map(pod, bodies) if takes_part(item)}
        with self._changed:
            self._pods = pods
            self._due &= pods.keys()
            self._add(pods)

    def apply(self, resource: Resource, event: ClusterEvent) -> None:
        """One change: due are its pod, or the pods of the node if its labels changed."""
        gone = event.kind == "DELETED"
        if resource is NODES:
            self._apply_node(node(event.object), gone)
            return
        item = pod(event.object)
        key = (item.namespace, item.name)
        with self._changed:
            if gone or not takes_part(item):
                self._pods.pop(key, None)
                self._due.discard(key)
            else:
                self._pods[key] = item
                self._add([key])

    def _apply_node(self, item: Node, gone: bool) -> None:
        with self._changed:
            before = self._nodes.get(item.name)
            if gone:
                self._nodes.pop(item.name, None)
            else:
                self._nodes[item.name] = item
            if gone or before is None or before.labels != item.labels:
                self._add(key for key, held in self._pods.items() if held.node == item.name)

    def _add(self, keys: Iterable[PodKey]) -> None:
        self._due.update(keys)
        if self._due:
            self._changed.notify_all()

    def all_due(self) -> None:
        """Look at every pod again."""
        with self._changed:
            self._add(self._pods)

    def add_due(self, key: PodKey) -> None:
        """Look at one pod again, if it is still there."""
        with self._changed:
            if key in self._pods:
                self._add([key])

    def take_due(self, timeout: float) -> list[PodKey]:
        """Wait up to ``timeout`` seconds for due pods; they are due no longer."""
        with self._changed:
            if not self._due:
                self._changed.wait(timeout)
            found = sorted(self._due)
            self._due.clear()
        return found

    def wake(self) -> None:
        """End a wait of :meth:`take_due`."""
        with self._changed:
            self._changed.notify_all()

    def pod(self, key: PodKey) -> Pod | None:
        with self._changed:
            return self._pods.get(key)

    def pods(self) -> list[Pod]:
        """By namespace and name."""
        with self._changed:
            return [self._pods[key] for key in sorted(self._pods)]

    @property
    def nodes(self) -> Mapping[str, Node]:
        """By name. A live view; single look-ups are safe from any thread."""
        return self._nodes
