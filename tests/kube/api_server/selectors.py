"""Label and field selectors, as the list and watch parameters spell them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.kube.api_server.resources import Resource
from tests.kube.api_server.status import bad_request

Predicate = Callable[[Mapping[str, Any]], bool]

_REQUIREMENT = re.compile(
    r"""\s*(?:
        (?P<absent>!)\s*(?P<absent_key>[^\s=!,()]+)
      | (?P<key>[^\s=!,()]+)\s*
        (?: (?P<sign>==|=|!=)\s*(?P<value>[^\s,()=!]*)
          | (?P<set>in|notin)\s*\((?P<values>[^()]*)\)
        )?
    )\s*(?:,|$)""",
    re.VERBOSE,
)


def label_predicate(selector: str) -> Predicate:
    """``a=b,c!=d,e in (f,g),h notin (i),j,!k``; the empty selector holds for everything."""
    requirements: list[Callable[[Mapping[str, str]], bool]] = []
    at = 0
    while at < len(selector):
        found = _REQUIREMENT.match(selector, at)
        if found is None or found.end() == at:
            raise bad_request(f'unable to parse requirement: found "{selector[at:]}"')
        requirements.append(_requirement(found))
        at = found.end()

    def holds(body: Mapping[str, Any]) -> bool:
        labels = body.get("metadata", {}).get("labels") or {}
        return all(requirement(labels) for requirement in requirements)

    return holds


def _requirement(found: re.Match[str]) -> Callable[[Mapping[str, str]], bool]:
    if found["absent"]:
        absent = found["absent_key"]
        return lambda labels: absent not in labels
    key = found["key"]
    if found["sign"]:
        value = found["value"]
        if found["sign"] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found["set"]:
        values = {value.strip() for value in found["values"].split(",")}
        if found["set"] == "notin":
            return lambda labels: labels.get(key) not in values
        return lambda labels: labels.get(key) in values
    return lambda labels: key in labels


_EVERYWHERE = ("metadata.name", "metadata.namespace")
_MORE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "pods": (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "status.phase",
        "status.podIP",
        "status.nominatedNodeName",
    ),
    "events": (
        "involvedObject.kind",
        "involvedObject.namespace",
        "involvedObject.name",
        "involvedObject.uid",
        "involvedObject.apiVersion",
        "involvedObject.resourceVersion",
        "involvedObject.fieldPath",
        "reason",
        "reportingComponent",
        "source",
        "type",
    ),
    "nodes": ("spec.unschedulable",),
    "namespaces": ("status.phase",),
}
_FIELD = re.compile(r"\s*([^\s=!,]+)\s*(==|=|!=)\s*([^,]*?)\s*(?:,|$)")


def field_predicate(selector: str, resource: Resource) -> Predicate:
    """``a.b=c,d!=e`` over the fields that the real server supports for this resource; else 400."""
    known = (
        *_EVERYWHERE,
        *(() if resource.custom else _MORE_FIELDS.get(resource.plural, ())),
    )
    wanted: list[tuple[str, bool, str]] = []
    at = 0
    while at < len(selector):
        found = _FIELD.match(selector, at)
        if found is None:
            raise bad_request(f"invalid selector: '{selector}'; can't understand '{selector[at:]}'")
        name, sign, value = found.groups()
        if name not in known:
            raise bad_request(_unsupported(name, resource))
        wanted.append((name, sign != "!=", value))
        at = found.end()

    def holds(body: Mapping[str, Any]) -> bool:
        return all((_field(body, name) == value) is equal for name, equal, value in wanted)

    return holds


def _unsupported(name: str, resource: Resource) -> str:
    if not resource.custom and resource.plural in _MORE_FIELDS:
        return f"field label not supported: {name}"
    return f'"{name}" is not a known field selector: only "metadata.name", "metadata.namespace"'


def _field(body: Mapping[str, Any], name: str) -> str:
    value: Any = body
    if name == "source":
        value = body.get("source", {}).get("component") or body.get("reportingComponent")
    else:
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or name == "spec.unschedulable":
        return "true" if value else "false"
    return "" if value is None else str(value)
