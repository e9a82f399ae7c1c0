"""The CEL rules of ``kvTransferPolicy`` as Python predicates, known by the rule's message.

The rule texts themselves are not interpreted. A rule whose message is not known here is refused
when its definition is created, so that no test believes in a check that does not happen.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.kube.api_server.status import Cause

Json = dict[str, Any]
Schema = Mapping[str, Any]


def _one_source(policy: Json) -> bool:
    return bool(policy.get("labelKey")) != bool(policy.get("clusterTopologyName"))


def _short_prefix(label_key: Any) -> bool:
    prefix, slash, _ = str(label_key).partition("/")
    return not slash or len(prefix) <= 253


def _weight_given(policy: Json) -> bool:
    return policy.get("enforcement") != "preferred" or "preferredWeight" in policy


def _weight_allowed(policy: Json) -> bool:
    return "preferredWeight" not in policy or policy.get("enforcement") == "preferred"


def _label_key_given(policy: Json) -> bool:
    return bool(policy.get("labelKey"))


PREDICATES: Mapping[str, Callable[[Any], bool]] = {
    "labelKey prefix must be 253 characters or less": _short_prefix,
    "exactly one of labelKey or clusterTopologyName is required": _one_source,
    "preferredWeight is required when enforcement is preferred": _weight_given,
    "preferredWeight may only be set when enforcement is preferred": _weight_allowed,
    "labelKey is required": _label_key_given,
}


def broken_rules(value: Any, schema: Schema, path: str = "") -> list[Cause]:
    """The rules of the whole tree that do not hold for ``value``."""
    causes: list[Cause] = []
    for rule in schema.get("x-kubernetes-validations", ()):
        predicate = PREDICATES[rule["message"]]
        if not predicate(value):
            shown = schema.get("type", "object")
            message = f'Invalid value: "{shown}": {rule["message"]}'
            causes.append(Cause(path, "FieldValueInvalid", message))
    if isinstance(value, dict):
        more = schema.get("additionalProperties")
        for name, part in value.items():
            below = schema.get("properties", {}).get(name, more)
            if isinstance(below, Mapping):
                causes += broken_rules(part, below, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for n, item in enumerate(value):
            causes += broken_rules(item, schema.get("items", {}), f"{path}[{n}]")
    return causes


def unknown_rules(schema: Any) -> Iterator[str]:
    """Messages of rules that have no predicate, anywhere in the schema."""
    if isinstance(schema, Mapping):
        for rule in schema.get("x-kubernetes-validations", ()):
            if rule.get("message") not in PREDICATES:
                yield str(rule.get("message"))
        for below in schema.values():
            yield from unknown_rules(below)
    elif isinstance(schema, list):
        for below in schema:
            yield from unknown_rules(below)
