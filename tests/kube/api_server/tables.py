"""``as=Table`` answers: the columns that ``kubectl get`` prints."""

import re
import time
from calendar import timegm
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.kube.api_server.resources import Resource

Json = dict[str, Any]
Cell = Callable[[Json, float], Any]
Column = tuple[str, str, int, Cell]
"""Heading, type, priority (0 is always shown, 1 with ``-o wide``) and what gives the cell."""


def table(
    resource: Resource,
    version: str,
    bodies: Sequence[Json],
    now: float,
    metadata: Json,
    include: str,
) -> Json:
    """``include``: the ``includeObject`` parameter: None, Metadata (default) or Object."""
    columns = _columns(resource, version)
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": [
            {
                "name": name,
                "type": kind,
                "format": "name" if name == "Name" else "",
                "description": name,
                "priority": priority,
            }
            for name, kind, priority, _ in columns
        ],
        "rows": [_row(body, columns, now, include) for body in bodies],
    }


def _row(body: Json, columns: Sequence[Column], now: float, include: str) -> Json:
    row: Json = {"cells": [cell(body, now) for _, _, _, cell in columns]}
    if include == "Object":
        row["object"] = body
    elif include != "None":
        row["object"] = partial(body)
    return row


def partial(body: Json) -> Json:
    return {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": body["metadata"],
    }


def duration(seconds: float) -> str:
    """As kubectl's AGE column: two units while young, one when old."""
    seconds = max(0, int(seconds))
    if seconds < 120:
        return f"{seconds}s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return f"{days}d{hours % 24}h" if hours % 24 else f"{days}d"
    return f"{days}d" if days < 730 else f"{days // 365}y"


def seconds_of(timestamp: str) -> float:
    """Of ``2026-11-21T17:00:00Z``, fractions ignored; since the epoch."""
    return float(timegm(time.strptime(timestamp[:19], "%Y-%m-%dT%H:%M:%S")))


def _age(timestamp: str | None, now: float) -> str:
    return duration(now - seconds_of(timestamp)) if timestamp else "<unknown>"


def _name(body: Json, now: float) -> str:
    name: str = body["metadata"]["name"]
    return name


def _created(body: Json, now: float) -> str:
    return _age(body["metadata"].get("creationTimestamp"), now)


def _at(path: str, absent: Any = "<none>") -> Cell:
    def cell(body: Json, now: float) -> Any:
        value: Any = body
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return absent if value in (None, "") else value

    return cell


def _pod_ready(body: Json, now: float) -> str:
    statuses = body.get("status", {}).get("containerStatuses") or []
    ready = sum(bool(status.get("ready")) for status in statuses)
    return f"{ready}/{len(body['spec']['containers'])}"


def _pod_status(body: Json, now: float) -> str:
    status = body.get("status", {})
    if "deletionTimestamp" in body["metadata"]:
        return "Terminating"
    result: str = status.get("reason") or status.get("phase") or "Unknown"
    for container in status.get("containerStatuses") or []:
        state = container.get("state", {})
        for phase in ("waiting", "terminated"):
            reason = state.get(phase, {}).get("reason")
            if reason:
                result = reason
    return result


def _pod_restarts(body: Json, now: float) -> str:
    statuses = body.get("status", {}).get("containerStatuses") or []
    count = sum(status.get("restartCount", 0) for status in statuses)
    ended = [
        status["lastState"]["terminated"]["finishedAt"]
        for status in statuses
        if status.get("lastState", {}).get("terminated", {}).get("finishedAt")
    ]
    return f"{count} ({_age(max(ended), now)} ago)" if count and ended else str(count)


def _node_status(body: Json, now: float) -> str:
    conditions = body.get("status", {}).get("conditions") or []
    ready = next((c["status"] for c in conditions if c.get("type") == "Ready"), None)
    result = {"True": "Ready", None: "Unknown"}.get(ready, "NotReady")
    return f"{result},SchedulingDisabled" if body.get("spec", {}).get("unschedulable") else result


def _node_roles(body: Json, now: float) -> str:
    prefix = "node-role.kubernetes.io/"
    labels = body["metadata"].get("labels") or {}
    roles = sorted(key.removeprefix(prefix) for key in labels if key.startswith(prefix))
    return ",".join(roles) or "<none>"


def _node_address(body: Json, now: float) -> str:
    addresses = body.get("status", {}).get("addresses") or []
    return next((a["address"] for a in addresses if a.get("type") == "InternalIP"), "<none>")


def _event_object(body: Json, now: float) -> str:
    involved = body.get("involvedObject", {})
    return f"{involved.get('kind', '').lower()}/{involved.get('name', '')}"


def _event_seen(body: Json, now: float) -> str:
    return _age(body.get("lastTimestamp") or body.get("eventTime"), now)


def _deployment_ready(body: Json, now: float) -> str:
    wanted = body.get("spec", {}).get("replicas", 1)
    return f"{body.get('status', {}).get('readyReplicas', 0)}/{wanted}"


_NAME: Column = ("Name", "string", 0, _name)
_CREATED: Column = ("Age", "string", 0, _created)

_BUILT_IN: Mapping[str, tuple[Column, ...]] = {
    "pods": (
        _NAME,
        ("Ready", "string", 0, _pod_ready),
        ("Status", "string", 0, _pod_status),
        ("Restarts", "string", 0, _pod_restarts),
        _CREATED,
        ("IP", "string", 1, _at("status.podIP")),
        ("Node", "string", 1, _at("spec.nodeName")),
        ("Nominated Node", "string", 1, _at("status.nominatedNodeName")),
        ("Readiness Gates", "string", 1, _at("spec.readinessGates")),
    ),
    "nodes": (
        _NAME,
        ("Status", "string", 0, _node_status),
        ("Roles", "string", 0, _node_roles),
        _CREATED,
        ("Version", "string", 0, _at("status.nodeInfo.kubeletVersion", "")),
        ("Internal-IP", "string", 1, _node_address),
        ("OS-Image", "string", 1, _at("status.nodeInfo.osImage", "<unknown>")),
        ("Kernel-Version", "string", 1, _at("status.nodeInfo.kernelVersion", "<unknown>")),
    ),
    "events": (
        ("Last Seen", "string", 0, _event_seen),
        ("Type", "string", 0, _at("type", "")),
        ("Reason", "string", 0, _at("reason", "")),
        ("Object", "string", 0, _event_object),
        ("Message", "string", 0, _at("message", "")),
    ),
    "namespaces": (_NAME, ("Status", "string", 0, _at("status.phase")), _CREATED),
    "deployments": (
        _NAME,
        ("Ready", "string", 0, _deployment_ready),
        ("Up-to-date", "integer", 0, _at("status.updatedReplicas", 0)),
        ("Available", "integer", 0, _at("status.availableReplicas", 0)),
        _CREATED,
    ),
    "customresourcedefinitions": (
        _NAME,
        ("Created At", "date", 0, _at("metadata.creationTimestamp")),
    ),
}


def _columns(resource: Resource, version: str) -> tuple[Column, ...]:
    if not resource.custom:
        return _BUILT_IN.get(resource.plural, (_NAME, _CREATED))
    declared = resource.columns.get(version)
    if not declared:
        return (_NAME, _CREATED)
    return (_NAME, *(_declared(column) for column in declared))


_STEP = re.compile(r"""\[\?\(@\.(\w+)==["']([^"']*)["']\)\]|\.([^.\[]+)|\[(\d+)\]""")


def _declared(column: Mapping[str, Any]) -> Column:
    """One of ``additionalPrinterColumns``; of JSONPath: members, and one filter by equality."""
    path = column["jsonPath"].replace("\\.", "\0")
    dated = column["type"] == "date"

    def cell(body: Json, now: float) -> Any:
        value: Any = body
        for step in _STEP.finditer(path):
            key, wanted, name, at = step.groups()
            if key is not None:
                items = value if isinstance(value, list) else []
                value = next((item for item in items if item.get(key) == wanted), None)
            elif at is not None:
                value = value[int(at)] if isinstance(value, list) and int(at) < len(value) else None
            else:
                name = name.replace("\0", ".")
                value = value.get(name) if isinstance(value, Mapping) else None
        if dated:
            return _age(value, now)
        return value if value is None or isinstance(value, (int, float, bool)) else str(value)

    kind = "string" if dated else column["type"]
    return (column["name"], kind, column.get("priority", 0), cell)
