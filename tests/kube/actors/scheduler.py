"""The scheduler: binds pods to nodes that fit, the least loaded first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tests.kube.actors.acting import Clock, Hands
from tests.kube.objects import Json, key_of
from tests.kube.objects.pods import condition


class Scheduler:
    """``on`` False: nothing is bound. ``room``: pods that a node takes."""

    def __init__(self, hands: Hands, clock: Clock) -> None:
        self.on = True
        self.room = 110
        self._hands, self._clock = hands, clock
        self._nodes: list[Json] = []

    def due(self) -> float | None:
        return None

    def step(self) -> bool:
        if not self.on:
            return False
        pods = self._hands.list("Pod")
        waiting = [one for one in pods if not one["spec"].get("nodeName")]
        if not waiting:
            return False
        nodes = self._hands.list("Node")
        load = Counter(one["spec"].get("nodeName", "") for one in pods)
        did = [self._place(pod, nodes, load) for pod in waiting]
        return any(did)

    def _place(self, pod: Json, nodes: Iterable[Json], load: Counter[str]) -> bool:
        fitting = [
            name
            for node in nodes
            if fits(pod, node) and load[name := node["metadata"]["name"]] < self.room
        ]
        if fitting:
            chosen = min(fitting, key=lambda name: (load[name], name))
            load[chosen] += 1
            self._hands.bind(*key_of(pod), chosen)
            return True
        said = {one["type"]: one["status"] for one in pod.get("status", {}).get("conditions", ())}
        if said.get("PodScheduled") == "False":
            return False
        missing = condition(
            "PodScheduled",
            "False",
            self._clock.now,
            "Unschedulable",
            "0 nodes are available: none matched Pod's node affinity/selector",
        )
        status = {"phase": "Pending", "conditions": [missing]}
        self._hands.merge("Pod", *key_of(pod), {"status": status}, subresource="status")
        return True


def fits(pod: Mapping[str, Any], node: Mapping[str, Any]) -> bool:
    """Selector, required affinity (In, NotIn, Exists, DoesNotExist), cordons, NoSchedule taints.

    Tolerations are not known here.
    """
    labels, spec = node["metadata"].get("labels", {}), node.get("spec", {})
    if spec.get("unschedulable") or spec.get("taints"):
        return False
    selector = pod["spec"].get("nodeSelector", {})
    if any(labels.get(key) != value for key, value in selector.items()):
        return False
    required = (
        pod["spec"]
        .get("affinity", {})
        .get("nodeAffinity", {})
        .get("requiredDuringSchedulingIgnoredDuringExecution", {})
    )
    terms = required.get("nodeSelectorTerms", [])
    return not terms or any(
        all(_holds(one, labels) for one in term.get("matchExpressions", ())) for term in terms
    )


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, operator = expression["key"], expression["operator"]
    inside = labels.get(key) in expression.get("values", ())
    return {
        "In": inside,
        "NotIn": not inside,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }[operator]
