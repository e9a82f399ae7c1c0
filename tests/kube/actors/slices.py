"""The EndpointSlice controller: the pods of each component of each graph, by their readiness."""

from __future__ import annotations

from collections import defaultdict

from dynctl.wire.kubernetes.names import COMPONENT_LABEL, DISCOVERY_ENABLED_LABEL, GRAPH_LABEL
from tests.kube import objects
from tests.kube.actors.acting import Clock, Hands
from tests.kube.objects import Json, key_of

PER_SLICE = 100


class SliceWriter:
    """``ignores``: names of pods that it leaves out. ``on`` False: slices stay as they are."""

    def __init__(self, hands: Hands, clock: Clock) -> None:
        self.on = True
        self.ignores: set[str] = set()
        self._hands, self._clock = hands, clock

    def due(self) -> float | None:
        return None

    def step(self) -> bool:
        if not self.on:
            return False
        wanted = {key_of(one): one for one in self._wanted()}
        there = {
            key_of(one): one
            for one in self._hands.list("EndpointSlice")
            if one["metadata"].get("labels", {}).get(DISCOVERY_ENABLED_LABEL) == "true"
        }
        did = False
        for key, body in wanted.items():
            if key not in there:
                self._hands.create(body)
            elif there[key].get("endpoints") != body["endpoints"]:
                self._hands.merge("EndpointSlice", *key, {"endpoints": body["endpoints"]})
            else:
                continue
            did = True
        for key in there.keys() - wanted.keys():
            self._hands.delete("EndpointSlice", *key)
            did = True
        return did

    def _wanted(self) -> list[Json]:
        groups: dict[tuple[str, str, str], list[Json]] = defaultdict(list)
        for pod in self._hands.list("Pod"):
            labels = pod["metadata"].get("labels", {})
            if labels.get(DISCOVERY_ENABLED_LABEL) == "true" and pod["status"].get("podIP"):
                namespace, name = key_of(pod)
                if name not in self.ignores:
                    groups[namespace, labels[GRAPH_LABEL], labels[COMPONENT_LABEL]].append(pod)
        return [
            objects.endpoint_slice(
                *group, pods[begin : begin + PER_SLICE], number=begin // PER_SLICE
            )
            for group, pods in groups.items()
            for begin in range(0, len(pods), PER_SLICE)
        ]
