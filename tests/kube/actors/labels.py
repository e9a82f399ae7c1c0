"""The operator's topology label controller: copies labels from the node to the pod, once.

Modelled on the operator's source, with what it does not do: it watches no nodes, looks at no
values and never comes back to a pod whose node lacked the label.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dynctl.wire.kubernetes import names
from tests.kube import objects
from tests.kube.actors.acting import Clock, Hands, message_of
from tests.kube.actors.operator import MANAGER
from tests.kube.client import ApiError
from tests.kube.objects import Json, key_of
from tests.kube.objects.events import Generation
from tests.kube.objects.pods import Source, label_sources


@dataclass(frozen=True, slots=True)
class _Seen:
    """What of a pod triggers a look at it."""

    node: str
    source: tuple[str, str]
    missing: frozenset[str]


class LabelController:
    """``on`` False: the operator is not running. ``generation``: of the event's text."""

    def __init__(self, hands: Hands, clock: Clock) -> None:
        self.on = True
        self.generation: Generation = "newer"
        self.log: list[str] = []
        self._hands, self._clock = hands, clock
        self._seen: dict[str, _Seen] = {}
        self._again: dict[str, tuple[int, float]] = {}

    def restart(self) -> None:
        """Start as a new process: every pod is a new pod for it."""
        self._seen.clear()
        self._again.clear()

    def due(self) -> float | None:
        return min((at for _, at in self._again.values()), default=None) if self.on else None

    def step(self) -> bool:
        if not self.on:
            return False
        pods = [pod for pod in self._hands.list("Pod") if _of_a_graph(pod)]
        topologies = self._topologies() if any(_source(pod)[1] for pod in pods) else {}
        did = False
        for pod in pods:
            uid = pod["metadata"]["uid"]
            sources = _sources(pod, topologies)
            labels = pod["metadata"].get("labels", {})
            now = _Seen(
                pod["spec"].get("nodeName", ""),
                _source(pod),
                frozenset(one.pod_key for one in sources) - labels.keys(),
            )
            before = self._seen.get(uid)
            self._seen[uid] = now
            tries, at = self._again.get(uid, (0, 0.0))
            retry = tries > 0 and self._clock.now >= at
            if retry or _triggers(before, now):
                did = self._reconcile(pod, sources, tries) or did
        return did

    def _reconcile(self, pod: Json, sources: list[Source], tries: int) -> bool:
        about = pod["metadata"]
        self._again.pop(about["uid"], None)
        labels = about.get("labels", {})
        missing = [one for one in sources if one.pod_key not in labels]
        name = pod["spec"].get("nodeName", "")
        if not missing or not name:
            return False
        try:
            self._copy(pod, name, missing)
        except ApiError as refused:
            self.log.append(f"Reconciler error: {about['name']} on {name}: {message_of(refused)}")
            self._again[about["uid"]] = (tries + 1, self._clock.now + _backoff(tries))
        return True

    def _copy(self, pod: Json, name: str, missing: list[Source]) -> None:
        node = self._hands.get("Node", "", name)
        has = {} if node is None else node["metadata"].get("labels", {})
        for one in missing:
            if not has.get(one.node_key):
                self._tell(pod, one)
        values = {one.pod_key: has[one.node_key] for one in missing if has.get(one.node_key)}
        if values:
            patch = {"metadata": {"labels": values}}
            self._hands.merge("Pod", *key_of(pod), patch, manager=MANAGER)

    def _tell(self, pod: Json, source: Source) -> None:
        body = objects.label_missing(
            pod,
            source.node_key,
            at=self._clock.now,
            target=source.pod_key,
            generation=self.generation,
        )
        try:
            self._hands.create(body, manager=MANAGER)
        except ApiError as refused:
            if refused.status != 409:  # the same second: the recorder would count it up
                raise

    def _topologies(self) -> dict[str, list[tuple[str, str]]]:
        return {
            body["metadata"]["name"]: [
                (one["domain"], one["key"]) for one in body["spec"]["levels"]
            ]
            for kind in ("ClusterTopology", "ClusterTopologyBinding")
            for body in self._hands.list(kind)
        }


def _backoff(tries: int) -> float:
    """Doubled with each try, up to about a quarter of an hour."""
    return float(min(2**tries, 1000))


def _of_a_graph(pod: Json) -> bool:
    labels = pod["metadata"].get("labels", {})
    return bool(labels.get(names.GRAPH_LABEL) and labels.get(names.COMPONENT_LABEL))


def _source(pod: Json) -> tuple[str, str]:
    annotations = pod["metadata"].get("annotations", {})
    return (
        annotations.get(names.LABEL_KEY_ANNOTATION, ""),
        annotations.get(names.CLUSTER_TOPOLOGY_ANNOTATION, ""),
    )


def _sources(pod: Json, topologies: dict[str, list[tuple[str, str]]]) -> list[Source]:
    key, topology = _source(pod)
    if key:
        return [Source("", key, key)]
    return label_sources({"clusterTopologyName": topology}, topologies.get(topology, ()))


def _triggers(before: _Seen | None, now: _Seen) -> bool:
    """Created (or first seen after a restart), scheduled, source changed, label removed."""
    if before is None:
        return True
    return any(_changes(before, now))


def _changes(before: _Seen, now: _Seen) -> Iterator[bool]:
    yield not before.node and bool(now.node)
    yield before.source != now.source
    yield bool(now.missing - before.missing)
