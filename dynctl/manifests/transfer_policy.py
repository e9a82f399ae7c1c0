"""Validate a kvTransferPolicy as Kubernetes does: schema, then CEL, then the operator's webhook.

Messages are those of the API server and of the operator's resource definitions (modelled on 1.2
and later), so that users can search for them. As there, CEL is not evaluated after a schema error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, Literal

PATH: Final = "spec.experimental.kvTransferPolicy"
DOMAIN_PATTERN: Final = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"
_PART: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
LABEL_KEY_PATTERN: Final = (
    rf"^(({_PART})(\.{_PART})*/)?([A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?)$"
)
_RESOURCE_NAME: Final = rf"{_PART}(\.{_PART})*"
_MAX_KEY: Final = 317
_MAX_PREFIX: Final = 253

FIELDS: Final = ("labelKey", "clusterTopologyName", "domain", "enforcement", "preferredWeight")
#: Fields of design drafts that no released operator reads; they have a check of their own.
DRAFT_FIELDS: Final = ("noMatchPolicy", "mismatchPolicy", "level", "label", "kvTransferWeight")

#: Domains with a label that Kubernetes defines.
KNOWN_LABELS: Final = {
    "zone": "topology.kubernetes.io/zone",
    "region": "topology.kubernetes.io/region",
    "host": "kubernetes.io/hostname",
}

Validator = Literal["the API server", "the API server (CEL)", "the operator's webhook"]


@dataclass(frozen=True, slots=True)
class Objection:
    """One validation error. ``aspect``: its subject, which determines the finding code."""

    aspect: Literal["source", "label key", "domain", "weight", "field"]
    validator: Validator
    message: str
    fix: str


def objections(policy: Any, annotations: Mapping[str, Any] | None = None) -> Iterator[Objection]:
    """All validation errors of a policy (any value), the most severe first."""
    if not isinstance(policy, Mapping):
        yield _type_objection(
            "field", PATH, "object", policy, "write the policy as keys and values"
        )
        return
    given = {key: value for key, value in policy.items() if value is not None}
    yield from _unknown(given)
    problems = [*_schema(given)]
    yield from problems
    if not problems:
        problems = [*_cel(given)]
        yield from problems
    if not problems:
        yield from _webhook(given, annotations or {})


def is_label_key(key: str) -> bool:
    """Whether Kubernetes accepts it as the name of a label."""
    return (
        re.fullmatch(LABEL_KEY_PATTERN[1:-1], key) is not None
        and len(key) <= _MAX_KEY
        and len(key.rpartition("/")[0]) <= _MAX_PREFIX
    )


def is_domain(domain: str) -> bool:
    """Whether it is a valid domain of a policy."""
    return re.fullmatch(DOMAIN_PATTERN[1:-1], domain) is not None


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    """The known name that a misspelled one most likely means; None if none is near."""
    by_lower = {known.lower(): known for known in names}
    close = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.75)
    return by_lower[close[0]] if close else None


def _unknown(given: Mapping[str, Any]) -> Iterator[Objection]:
    for name in given:
        if name not in FIELDS and name not in DRAFT_FIELDS:
            near = nearest_name(str(name), FIELDS)
            yield Objection(
                "field",
                "the API server",
                f'strict decoding error: unknown field "{PATH}.{name}"',
                f"write {near}" if near else f"remove it; a policy has {', '.join(FIELDS)}",
            )


def _schema(given: Mapping[str, Any]) -> Iterator[Objection]:
    key = f"{PATH}.labelKey"
    fix = "name the node label, for example labelKey: topology.kubernetes.io/zone"
    if "labelKey" in given:
        yield from _string("label key", key, given["labelKey"], LABEL_KEY_PATTERN, fix, _MAX_KEY)
    if "clusterTopologyName" in given:
        name = f"{PATH}.clusterTopologyName"
        value = given["clusterTopologyName"]
        yield from _string("source", name, value, None, "name the Grove resource")
    fix = "name the domain in lower case, for example domain: zone"
    if "domain" not in given:
        yield Objection("domain", "the API server", f"{PATH}.domain: Required value", fix)
    else:
        yield from _string("domain", f"{PATH}.domain", given["domain"], DOMAIN_PATTERN, fix)
    if "enforcement" in given and given["enforcement"] not in ("required", "preferred"):
        shown = shown_value(given["enforcement"])
        yield Objection(
            "weight",
            "the API server",
            f"{PATH}.enforcement: Unsupported value: {shown}: "
            'supported values: "required", "preferred"',
            "write enforcement: required or preferred",
        )
    if "preferredWeight" in given:
        yield from _weight(given["preferredWeight"])


def _string(
    aspect: Literal["source", "label key", "domain"],
    path: str,
    value: Any,
    pattern: str | None,
    fix: str,
    longest: int | None = None,
) -> Iterator[Objection]:
    if not isinstance(value, str):
        yield _type_objection(aspect, path, "string", value, fix)
        return
    message = ""
    if not value and aspect != "domain":
        message = f'{path}: Invalid value: "": {path} in body should be at least 1 chars long'
    elif longest is not None and len(value) > longest:
        message = f"{path}: Too long: may not be more than {longest} bytes"
    elif pattern is not None and re.fullmatch(pattern[1:-1], value) is None:
        message = (
            f"{path}: Invalid value: {shown_value(value)}: {path} in body should match '{pattern}'"
        )
    if message:
        yield Objection(aspect, "the API server", message, fix)


def _weight(value: Any) -> Iterator[Objection]:
    path = f"{PATH}.preferredWeight"
    fix = "write a number 0..1, for example preferredWeight: 0.85"
    if isinstance(value, bool) or not isinstance(value, int | float):
        yield _type_objection("weight", path, "number", value, fix)
    elif math.isnan(value) or not 0 <= value <= 1:
        bound = "greater than or equal to 0" if value < 0 else "less than or equal to 1"
        message = f"{path}: Invalid value: {value}: {path} in body should be {bound}"
        yield Objection("weight", "the API server", message, fix)


def _cel(given: Mapping[str, Any]) -> Iterator[Objection]:
    cel: Final = "the API server (CEL)"
    key, name = given.get("labelKey"), given.get("clusterTopologyName")
    if (key is None) == (name is None):
        yield Objection(
            "source",
            cel,
            f"{PATH}: Invalid value: exactly one of labelKey or clusterTopologyName is required",
            "name the node label in labelKey, or a Grove topology in clusterTopologyName; not both"
            if name is not None
            else "name the node label, for example labelKey: topology.kubernetes.io/zone",
        )
    if key is not None and len(key.rpartition("/")[0]) > _MAX_PREFIX:
        yield Objection(
            "label key",
            cel,
            f"{PATH}: Invalid value: labelKey prefix must be 253 characters or less",
            "use a label with a shorter prefix",
        )
    preferred, weight = given.get("enforcement") == "preferred", given.get("preferredWeight")
    if preferred and weight is None:
        yield Objection(
            "weight",
            cel,
            f"{PATH}: Invalid value: preferredWeight is required when enforcement is preferred",
            "add a number 0..1, for example preferredWeight: 0.85",
        )
    if not preferred and weight is not None:
        yield Objection(
            "weight",
            cel,
            f"{PATH}: Invalid value: preferredWeight may only be set when enforcement is preferred",
            "remove preferredWeight, or write enforcement: preferred (required when left out)",
        )


def _webhook(given: Mapping[str, Any], annotations: Mapping[str, Any]) -> Iterator[Objection]:
    webhook: Final = "the operator's webhook"
    name = given.get("clusterTopologyName")
    if name is None:
        return
    if len(name) > _MAX_PREFIX or re.fullmatch(_RESOURCE_NAME, name) is None:
        yield Objection(
            "source",
            webhook,
            f"{PATH}.clusterTopologyName {shown_value(name)} is not a valid Kubernetes resource "
            "name",
            "name the Grove resource as kubectl get lists it",
        )
    if str(annotations.get("nvidia.com/enable-grove", "")).lower() == "false":
        yield Objection(
            "source",
            webhook,
            f"{PATH}.clusterTopologyName requires the Grove pathway; remove or unset the "
            '"nvidia.com/enable-grove" annotation (currently "false")',
            "remove the annotation, or name the node label in labelKey instead",
        )


def _type_objection(
    aspect: Literal["source", "label key", "domain", "weight", "field"],
    path: str,
    wanted: str,
    value: Any,
    fix: str,
) -> Objection:
    return Objection(aspect, "the API server", wrong_type(path, wanted, value), fix)


def wrong_type(path: str, wanted: str, value: Any) -> str:
    """Why the API server refuses the type of a value, in its words."""
    got = type_name(value)
    return f'{path}: Invalid value: "{got}": {path} in body must be of type {wanted}: "{got}"'


def type_name(value: Any) -> str:
    """The type of a value in the words of the API server."""
    if isinstance(value, Mapping):
        return "object"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "null" if value is None else "string")


def shown_value(value: Any) -> str:
    """A value as the API server quotes it."""
    if isinstance(value, bool | list | Mapping):
        return json.dumps(value, default=str)
    return f'"{value}"' if isinstance(value, str) else str(value)
