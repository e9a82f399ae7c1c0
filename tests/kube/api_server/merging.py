"""The ways to change part of an object: JSON patch, JSON merge patch, strategic merge patch.

Lists of built-in objects that are merged by a key are named here once, for strategic patches, for
server-side apply and for the field names of ``managedFields``.
"""

import copy
from collections.abc import Mapping
from typing import Any

from tests.kube.api_server.status import StatusError, bad_request

Json = dict[str, Any]

MERGE_KEYS: Mapping[str, str] = {
    "addresses": "type",
    "conditions": "type",
    "containers": "name",
    "env": "name",
    "ephemeralContainers": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ownerReferences": "uid",
    "podIPs": "ip",
    "secrets": "name",
    "topologySpreadConstraints": "topologyKey",
    "volumeDevices": "devicePath",
    "volumeMounts": "mountPath",
    "volumes": "name",
}


def merge_key(field: str, items: list[Any]) -> str | None:
    """The key of the items of the list ``field`` of a built-in object."""
    if not all(isinstance(item, dict) for item in items):
        return None
    if field == "ports":  # of a container; of a Service
        return "containerPort" if any("containerPort" in item for item in items) else "port"
    key = MERGE_KEYS.get(field)
    return key if key is not None and all(key in item for item in items) else None


def merge_patch(live: Any, patch: Any) -> Any:
    """RFC 7396: null removes, objects merge, everything else replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(live) if isinstance(live, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), value)
    return result


def strategic_patch(live: Any, patch: Any) -> Any:
    """As the patch of a built-in type: lists with a merge key merge item by item.

    Knows ``$patch: delete|replace`` and ``$deleteFromPrimitiveList``; the order that
    ``$setElementOrder`` asks for is not kept.
    """
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    if patch.get("$patch") == "replace":
        return {name: value for name, value in patch.items() if name != "$patch"}
    result = dict(live) if isinstance(live, dict) else {}
    for name, value in patch.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            field = name.partition("/")[2]
            result[field] = [item for item in result.get(field) or [] if item not in value]
        elif name.startswith("$"):
            continue
        elif value is None:
            result.pop(name, None)
        elif isinstance(value, list):
            result[name] = _merged_list(name, result.get(name) or [], value)
        else:
            result[name] = strategic_patch(result.get(name), value)
    return result


def _merged_list(field: str, live: list[Any], patch: list[Any]) -> list[Any]:
    if field == "finalizers":
        return [*live, *(item for item in patch if item not in live)]
    if {"$patch": "replace"} in patch:
        return [item for item in patch if item != {"$patch": "replace"}]
    key = merge_key(field, patch)
    if key is None:
        return copy.deepcopy(patch)
    result = list(live)
    for item in patch:
        at = next((n for n, old in enumerate(result) if old.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            if at is not None:
                del result[at]
        elif at is None:
            result.append(strategic_patch({}, item))
        else:
            result[at] = strategic_patch(result[at], item)
    return result


def json_patch(live: Any, operations: Any) -> Any:
    """RFC 6902, all six operations. A failed test or a path that is not there is refused (422)."""
    if not isinstance(operations, list):
        raise bad_request("error decoding patch: json: cannot unmarshal object into a JSON patch")
    document = copy.deepcopy(live)
    for operation in operations:
        try:
            document = _apply(document, operation)
        except (KeyError, IndexError, ValueError, TypeError):
            raise _refused(operation) from None
    return document


def _refused(operation: Any) -> StatusError:
    return StatusError(
        422,
        "Invalid",
        "the server rejected our request due to an error in our request: "
        f"the operation {operation!r} cannot be applied",
        {},
    )


def _apply(document: Any, operation: Json) -> Any:
    kind = operation["op"]
    path = _pointer(operation["path"])
    if kind == "test":
        if _at(document, path) != operation["value"]:
            raise ValueError("test failed")
        return document
    if kind in ("move", "copy"):
        source = _pointer(operation["from"])
        value = copy.deepcopy(_at(document, source))
        if kind == "move":
            document = _removed(document, source)
        return _added(document, path, value)
    if kind == "remove":
        return _removed(document, path)
    if kind == "replace":
        _at(document, path)
        if path and isinstance(_at(document, path[:-1]), list):
            document = _removed(document, path)
    elif kind != "add":
        raise ValueError(kind)
    return _added(document, path, operation["value"])


def _pointer(text: str) -> list[str]:
    if text and not text.startswith("/"):
        raise ValueError(text)
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _at(document: Any, path: list[str]) -> Any:
    for part in path:
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


def _added(document: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    parent, last = _at(document, path[:-1]), path[-1]
    if isinstance(parent, list):
        at = len(parent) if last == "-" else int(last)
        if not 0 <= at <= len(parent):
            raise IndexError(last)
        parent.insert(at, value)
    else:
        parent[last] = value
    return document


def _removed(document: Any, path: list[str]) -> Any:
    parent, last = _at(document, path[:-1]), path[-1]
    del parent[int(last) if isinstance(parent, list) else last]
    return document
