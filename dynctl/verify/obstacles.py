"""Why worker pods do not run or do not exist: the event that Kubernetes recorded, and a fix. Pure.

A fix names the object to change: the graph's component, the image, the quota.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from dynctl.base.json_fields import mapping
from dynctl.verify.chain import WorkerChain
from dynctl.verify.cluster_facts import ClusterFacts
from dynctl.verify.join import VerifiedGraph
from dynctl.verify.needs import pod_of
from dynctl.verify.wording import age, excerpt
from dynctl.wire.kubernetes.names import (
    LABEL_MISSING_REASON,
    NOT_CREATED_REASON,
    RECREATE,
    STRATEGY_ANNOTATION,
)
from dynctl.wire.kubernetes.objects import ObjectEvent

#: Events that say nothing about a start.
_OTHERS: Final = (LABEL_MISSING_REASON, "Unhealthy")
#: The kubelet repeats the state of a container, after the event with the reason.
_BARE: Final = re.compile(r"Error: \w+")
_QUOTA: Final = re.compile(r"exceeded quota: ([a-z0-9.-]+)")
_IMAGE: Final = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CONFIG: Final = ("CreateContainerConfigError", "CreateContainerError")


def creation_obstacle(
    cluster: ClusterFacts, graph: VerifiedGraph, component: str, look: str
) -> tuple[str, str]:
    """The event about pods that could not be created, and the fix; without one, ``look``.

    ``component``: of the graph, empty for any.
    """
    namespace, _, name = graph.name.rpartition("/")
    events = [
        event
        for event in cluster.warnings
        if event.reason == NOT_CREATED_REASON
        and event.namespace == namespace
        and event.name.startswith(f"{name}-")
        and component.lower() in event.name
    ]
    event = max(events, key=_last_seen, default=None)
    if event is None:
        return "", look
    quota = _QUOTA.search(event.message)
    target = f"{event.kind.lower()} {event.name}" if quota is None else f"resourcequota {quota[1]}"
    what = "correct what the event names"
    what = what if quota is None else f"raise quota {quota[1]}, or free a part of it"
    return _event_text(event, cluster.now), f"{what}: kubectl describe {target} -n {namespace}"


def start_obstacle(
    cluster: ClusterFacts, graph: VerifiedGraph | None, worker: WorkerChain, why: str
) -> tuple[str, str]:
    """The newest event about a pod whose engine does not run, and the fix.

    ``graph``: the worker's. ``why``: the state of its container.
    """
    pod = pod_of(worker)
    key = (pod.namespace, pod.name, pod.uid)
    events = [
        event
        for event in cluster.warnings
        if (event.namespace, event.name, event.uid) == key and event.reason not in _OTHERS
    ]
    event = max(events, key=_last_seen, default=None)
    noted = "" if event is None else _event_text(event, cluster.now)
    if graph is None or not _is_crash(why) or not _is_recreated(graph, worker):
        return noted, _start_fix(worker, why, known=event is not None)
    pods = [
        other.pod
        for other in graph.workers
        if other.pod is not None and other.component == worker.component
    ]
    ready = sum(pod.ready for pod in pods)
    left = f"{ready:,} of {len(pods):,} pods of {worker.component} are ready"
    return f"{noted}; under Recreate the earlier pods ended first: {left}", _recreate_fix(worker)


def _is_crash(why: str) -> bool:
    return why == "CrashLoopBackOff" or why.startswith("ended")


def _is_recreated(graph: VerifiedGraph, worker: WorkerChain) -> bool:
    """Whether an update of the worker's component ends its earlier pods before it creates new ones:
    as its pod, its component or its graph is annotated."""
    annotated: list[Mapping[str, Any]] = [pod_of(worker).annotations]
    if graph.graph is not None:
        spec = mapping(graph.graph.manifest.body.get("spec"))
        annotated.append(mapping(spec.get("annotations")))
        for component in graph.graph.components:
            if component.name.lower() == worker.component.lower():
                template = mapping(component.body.get("podTemplate"))
                annotated.append(mapping(component.body.get("annotations")))
                annotated.append(mapping(mapping(template.get("metadata")).get("annotations")))
    return any(annotations.get(STRATEGY_ANNOTATION) == RECREATE for annotations in annotated)


def _recreate_fix(worker: WorkerChain) -> str:
    return (
        f"{_logs(worker)}; then apply the graph as it was before, or correct {_component(worker)}"
    )


def _logs(worker: WorkerChain) -> str:
    pod = pod_of(worker)
    return f"kubectl logs {pod.name} -n {pod.namespace} --previous"


def _component(worker: WorkerChain) -> str:
    """The component of a worker, and the command that changes it."""
    namespace, _, graph = worker.graph.rpartition("/")
    edit = f"kubectl edit dynamographdeployment {graph} -n {namespace}"
    return f"component {worker.component}: {edit}"


def _start_fix(worker: WorkerChain, why: str, *, known: bool) -> str:
    """``known``: whether an event has the reason."""
    pod, component = pod_of(worker), _component(worker)
    if why in _IMAGE:
        image = "" if pod.main is None else f" {pod.main.image}"
        return f"correct image{image}, or its pull secret, in {component}"
    if why in _CONFIG and known:
        return f"create the Secret or ConfigMap that the event names, or correct {component}"
    if why == "not scheduled" and known:
        return f"add what the event names, or change resources and selectors of {component}"
    if _is_crash(why):
        return f"{_logs(worker)}; then correct {component}, or apply the graph as it was before"
    return f"find the reason: kubectl describe pod {pod.name} -n {pod.namespace}"


def _last_seen(event: ObjectEvent) -> tuple[bool, float]:
    """Events that only repeat a state come first."""
    return _BARE.fullmatch(event.message) is None, event.at or 0.0


def _event_text(event: ObjectEvent, now: float) -> str:
    """``; event BackOff, 12 s ago: ..``, with the object if it is not a pod."""
    about = "" if event.kind == "Pod" else f" of {event.kind} {event.name}"
    since = "" if event.at is None else f", {age(now - event.at)} ago"
    return f"; event {event.reason}{about}{since}: {excerpt(event.message)}"
