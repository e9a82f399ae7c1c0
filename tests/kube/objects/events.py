"""Events of core/v1, as the operator's recorder writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from dynctl.wire.kubernetes.names import LABEL_MISSING_REASON
from tests.kube.objects.meta import Json, metadata, stamp

Generation = Literal["1.2", "newer"]
"""Of the operator: the text of its event changed once."""


def event(
    pod: Mapping[str, Any],
    reason: str,
    message: str,
    *,
    at: float,
    count: int = 1,
    kind: str = "Warning",
    component: str = "topology-label-controller",
) -> Json:
    """An event about a pod that has a uid; ``at`` is when it was last seen."""
    about = pod["metadata"]
    name = f"{about['name']}.{int(at):x}{len(message):04x}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": metadata("Event", about["namespace"], name),
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": about["namespace"],
            "name": about["name"],
            "uid": about.get("uid", ""),
        },
        "reason": reason,
        "message": message,
        "type": kind,
        "count": count,
        "firstTimestamp": stamp(at),
        "lastTimestamp": stamp(at),
        "source": {"component": component},
        "reportingComponent": component,
    }


def label_missing(
    pod: Mapping[str, Any],
    node_key: str,
    *,
    at: float,
    target: str | None = None,
    generation: Generation = "newer",
) -> Json:
    """TopologyLabelMissing; ``target`` is the pod's label where it is not called as the node's."""
    node = pod["spec"].get("nodeName", "")
    result = (
        "topology metadata"
        if generation == "1.2"
        else f'topology metadata for "{target or node_key}"'
    )
    message = (
        f'Node "{node}" does not have required topology label "{node_key}"; '
        f"{result} will remain unavailable"
    )
    return event(pod, LABEL_MISSING_REASON, message, at=at)
