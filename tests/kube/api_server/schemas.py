"""Structural schemas of CustomResourceDefinitions: pruning, defaulting, validation.

The subset that Dynamo's and Grove's definitions use, with the wording of k8s.io/kube-openapi's
validator and of apiextensions (modelled from source, not seen on a live server). CEL is not
interpreted: the rules of ``kvTransferPolicy`` are known by their messages (see rules.py).
"""

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from tests.kube.api_server.rules import broken_rules
from tests.kube.api_server.status import Cause

Json = dict[str, Any]
Schema = Mapping[str, Any]

_OBJECT_META = frozenset({"apiVersion", "kind", "metadata"})


def prune(body: Json, schema: Schema) -> tuple[Json, list[str]]:
    """(the object without unknown fields, their paths). A schema that is empty prunes nothing."""
    if not schema:
        return body, []
    unknown: list[str] = []
    known = {name: value for name, value in body.items() if name in _OBJECT_META}
    rest = {name: value for name, value in body.items() if name not in _OBJECT_META}
    return known | _pruned(rest, schema, "", unknown), unknown


def _pruned(value: Any, schema: Schema, path: str, unknown: list[str]) -> Any:
    if isinstance(value, list) and "items" in schema:
        return [
            _pruned(item, schema["items"], f"{path}[{n}]", unknown) for n, item in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    properties: Mapping[str, Schema] = schema.get("properties", {})
    more = schema.get("additionalProperties")
    keep_all = schema.get("x-kubernetes-preserve-unknown-fields", False) or more is True
    if schema.get("x-kubernetes-embedded-resource"):
        properties = {name: {} for name in _OBJECT_META} | dict(properties)
    kept: Json = {}
    for name, part in value.items():
        below = f"{path}.{name}" if path else name
        if name in properties:
            kept[name] = _pruned(part, properties[name], below, unknown)
        elif isinstance(more, Mapping):
            kept[name] = _pruned(part, more, below, unknown)
        elif keep_all or schema.get("x-kubernetes-int-or-string") or not schema:
            kept[name] = part
        else:
            unknown.append(below)
    return kept


def set_defaults(value: Any, schema: Schema) -> None:
    """Fill in the defaults in place; null where null is not allowed counts as absent then."""
    if isinstance(value, list):
        for item in value:
            set_defaults(item, schema.get("items", {}))
    if not isinstance(value, dict):
        return
    properties: Mapping[str, Schema] = schema.get("properties", {})
    for name, below in properties.items():
        absent = name not in value or (value[name] is None and not below.get("nullable"))
        if absent and "default" in below:
            value[name] = copy.deepcopy(below["default"])
        if name in value:
            set_defaults(value[name], below)
    more = schema.get("additionalProperties")
    if isinstance(more, Mapping):
        for name, part in value.items():
            if name not in properties:
                set_defaults(part, more)


def validate(body: Json, schema: Schema) -> list[Cause]:
    """Everything that the schema objects to; then what its CEL rules do."""
    causes: list[Cause] = []
    rest = {name: value for name, value in body.items() if name not in _OBJECT_META}
    top = dict(schema)
    if "required" in top:
        top["required"] = [name for name in top["required"] if name not in _OBJECT_META]
    _check(rest, top, "", causes)
    return causes or broken_rules(rest, schema)


_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "number"
    return next(name for name, types in _TYPES.items() if isinstance(value, types))


def _is_type(value: Any, wanted: str) -> bool:
    if isinstance(value, bool):
        return wanted == "boolean"
    if wanted == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[wanted])


def _check(value: Any, schema: Schema, path: str, causes: list[Cause]) -> None:
    if value is None and schema.get("nullable"):
        return
    wanted = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            causes.append(_type_cause(path, value, "integer,string"))
        return
    if wanted and not _is_type(value, wanted):
        causes.append(_type_cause(path, value, wanted))
        return
    if "enum" in schema and value not in schema["enum"]:
        supported = ", ".join(json.dumps(choice) for choice in schema["enum"])
        causes.append(
            Cause(
                path,
                "FieldValueNotSupported",
                f"Unsupported value: {json.dumps(value)}: supported values: {supported}",
            )
        )
    if isinstance(value, str):
        _check_string(value, schema, path, causes)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_number(value, schema, path, causes)
    elif isinstance(value, list):
        _check_list(value, schema, path, causes)
    elif isinstance(value, dict):
        _check_object(value, schema, path, causes)


def _invalid(path: str, shown: Any, complaint: str) -> Cause:
    return Cause(
        path or "<nil>",
        "FieldValueInvalid",
        f"Invalid value: {json.dumps(shown)}: {path} in body {complaint}",
    )


def _type_cause(path: str, value: Any, wanted: str) -> Cause:
    name = _type_name(value)
    return Cause(
        path or "<nil>",
        "FieldValueTypeInvalid",
        f'Invalid value: "{name}": {path} in body must be of type {wanted}: "{name}"',
    )


def _check_string(value: str, schema: Schema, path: str, causes: list[Cause]) -> None:
    if len(value) < schema.get("minLength", 0):
        causes.append(_invalid(path, value, f"should be at least {schema['minLength']} chars long"))
    if "maxLength" in schema and len(value) > schema["maxLength"]:
        causes.append(
            Cause(
                path,
                "FieldValueTooLong",
                f"Too long: may not be more than {schema['maxLength']} bytes",
            )
        )
    if "pattern" in schema and not re.search(schema["pattern"], value):
        causes.append(_invalid(path, value, f"should match '{schema['pattern']}'"))


def _check_number(value: float, schema: Schema, path: str, causes: list[Cause]) -> None:
    if "minimum" in schema and value < schema["minimum"]:
        causes.append(
            _invalid(path, value, f"should be greater than or equal to {schema['minimum']}")
        )
    if "maximum" in schema and value > schema["maximum"]:
        causes.append(_invalid(path, value, f"should be less than or equal to {schema['maximum']}"))


def _check_list(value: list[Any], schema: Schema, path: str, causes: list[Cause]) -> None:
    if len(value) < schema.get("minItems", 0):
        causes.append(
            _invalid(path, len(value), f"should have at least {schema['minItems']} items")
        )
    if "maxItems" in schema and len(value) > schema["maxItems"]:
        causes.append(
            Cause(
                path,
                "FieldValueTooMany",
                f"Too many: {len(value)}: must have at most {schema['maxItems']} items",
            )
        )
    for n, item in enumerate(value):
        _check(item, schema.get("items", {}), f"{path}[{n}]", causes)


def _check_object(value: Json, schema: Schema, path: str, causes: list[Cause]) -> None:
    properties: Mapping[str, Schema] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            below = f"{path}.{name}" if path else name
            causes.append(Cause(below, "FieldValueRequired", "Required value"))
    if "maxProperties" in schema and len(value) > schema["maxProperties"]:
        causes.append(
            Cause(
                path,
                "FieldValueTooMany",
                f"Too many: {len(value)}: must have at most {schema['maxProperties']} items",
            )
        )
    more = schema.get("additionalProperties")
    for name, part in value.items():
        below = f"{path}.{name}" if path else name
        if name in properties:
            _check(part, properties[name], below, causes)
        elif isinstance(more, Mapping):
            _check(part, more, below, causes)
