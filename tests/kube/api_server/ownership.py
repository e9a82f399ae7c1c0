"""``metadata.managedFields`` and server-side apply: who wrote which field.

A field is a path of segments as ``fieldsV1`` spells them: ``f:name`` for a member of an object,
``k:{"name":"main"}`` for an item of a list with a merge key. A list without a key is one field.
"""

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.kube.api_server.merging import merge_key
from tests.kube.api_server.status import apply_conflict

Json = dict[str, Any]
Path = tuple[str, ...]
Fields = dict[Path, Any]
"""Path -> the value there."""

_SERVERS_OWN = frozenset(
    {
        *("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp"),
        *("deletionTimestamp", "deletionGracePeriodSeconds", "managedFields", "selfLink"),
        "generateName",
    }
)
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Manager:
    """Who writes: the name, the API version it writes in and the subresource it writes through."""

    name: str
    api_version: str
    operation: str = "Update"
    subresource: str = ""

    def wrote(self, entry: Json) -> bool:
        return (
            entry["manager"] == self.name
            and entry["operation"] == self.operation
            and entry.get("subresource", "") == self.subresource
            and (self.operation == "Apply" or entry["apiVersion"] == self.api_version)
        )


def fields_of(body: Json, *, keyed: bool) -> Fields:
    """All that a client can own of an object. ``keyed``: lists of built-in types merge by key."""
    found: Fields = {}
    for name, value in body.items():
        if name == "metadata":
            for key, part in value.items():
                if key not in _SERVERS_OWN:
                    _collect(part, ("f:metadata", f"f:{key}"), key, True, found)
        elif name not in ("apiVersion", "kind"):
            _collect(value, (f"f:{name}",), name, keyed, found)
    return found


def _collect(value: Any, path: Path, name: str, keyed: bool, found: Fields) -> None:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            _collect(part, (*path, f"f:{key}"), key, keyed, found)
        return
    key = merge_key(name, value) if keyed and isinstance(value, list) and value else None
    if key is None:
        found[path] = value
        return
    for item in value:
        segment = "k:" + json.dumps({key: item[key]}, separators=(",", ":"))
        for part_name, part in item.items():
            _collect(part, (*path, segment, f"f:{part_name}"), part_name, keyed, found)


def _tree(paths: Iterable[Path]) -> Json:
    root: Json = {}
    for path in sorted(paths):
        node = root
        for segment in path:
            node = node.setdefault(segment, {})
    return root


def paths_of(tree: Json, prefix: Path = ()) -> set[Path]:
    """The leaves of a ``fieldsV1`` value."""
    found: set[Path] = set()
    for segment, below in tree.items():
        path = (*prefix, segment)
        found |= paths_of(below, path) if below else {path}
    return found


def record_update(
    before: Json | None, after: Json, manager: Manager, time: str, keyed: bool
) -> None:
    """Give ``manager`` the fields that differ; take them, and the removed ones, from the others.

    An object that was made without a field that can be owned is never tracked.
    """
    entries = [] if before is None else before["metadata"].get("managedFields", [])
    if before is not None and not entries:
        return
    old = {} if before is None else fields_of(_differing(before, after), keyed=keyed)
    new = fields_of(after if before is None else _differing(after, before), keyed=keyed)
    written = {path for path, value in new.items() if old.get(path, _ABSENT) != value}
    gone = set(old) - set(new)
    _store(after, entries, manager, time, written, lost=written | gone)


def _differing(body: Json, other: Json) -> Json:
    """The parts of ``body`` that ``other`` has not: top-level fields and those of metadata."""
    found = {name: value for name, value in body.items() if other.get(name, _ABSENT) != value}
    if "metadata" in found:
        others = other.get("metadata", {})
        found["metadata"] = {
            name: value
            for name, value in body["metadata"].items()
            if others.get(name, _ABSENT) != value
        }
    return found


def _store(
    body: Json, entries: list[Json], manager: Manager, time: str, won: set[Path], lost: set[Path]
) -> None:
    kept: list[Json] = []
    mine, at = set(won), len(entries)
    for entry in entries:
        paths = paths_of(entry["fieldsV1"])
        if manager.wrote(entry):
            at = len(kept)
            if manager.operation == "Update":
                mine |= paths - lost
        elif left := paths - lost:
            kept.append(entry if left == paths else entry | {"fieldsV1": _tree(left)})
    if mine:
        written = {
            "manager": manager.name,
            "operation": manager.operation,
            "apiVersion": manager.api_version,
            "time": time,
            "fieldsType": "FieldsV1",
            "fieldsV1": _tree(mine),
        }
        if manager.subresource:
            written["subresource"] = manager.subresource
        kept.insert(at, written)
    body["metadata"]["managedFields"] = kept


def apply(
    live: Json | None, config: Json, manager: Manager, time: str, *, force: bool, keyed: bool
) -> Json:
    """Server-side apply: the object after ``config`` was applied, not yet stored.

    Fields that this manager applied before and no longer names are removed, unless another manager
    owns them too. Raises 409 when a value differs that another manager owns, unless ``force``.
    """
    wanted = fields_of(config, keyed=keyed)
    if live is None:
        created = copy.deepcopy(config)
        _store(created, [], manager, time, set(wanted), set())
        return created
    now = fields_of(live, keyed=keyed)
    entries = live["metadata"].get("managedFields", [])
    others: dict[Path, Json] = {}
    before: set[Path] = set()
    for entry in entries:
        paths = paths_of(entry["fieldsV1"])
        if manager.wrote(entry):
            before = paths
        else:
            others |= dict.fromkeys(paths, entry)
    disputed = {
        path for path in set(wanted) & set(others) if now.get(path, _ABSENT) != wanted[path]
    }
    if disputed and not force:
        raise apply_conflict(
            [
                (others[path]["manager"], others[path]["apiVersion"], _dotted(path))
                for path in sorted(disputed)
            ]
        )
    result: Json = _overlay(live, config, keyed)
    # What was an empty object may have members by now: every path on the way to a kept field stays.
    kept = {path[:length] for path in (*wanted, *others) for length in range(1, len(path) + 1)}
    for path in before - kept:
        _remove(result, path, kept)
    _store(result, entries, manager, time, set(wanted), disputed)
    return result


def _overlay(live: Any, config: Any, keyed: bool, name: str = "") -> Any:
    if isinstance(config, dict) and isinstance(live, dict):
        result = dict(live)
        for key, value in config.items():
            below = keyed or key == "ownerReferences"
            result[key] = _overlay(live.get(key), value, below, key)
        return result
    if keyed and isinstance(config, list) and isinstance(live, list):
        key = merge_key(name, [*live, *config])
        if key is not None:
            items = {item[key]: item for item in live}
            for item in config:
                items[item[key]] = _overlay(items.get(item[key]), item, keyed)
            return list(items.values())
    return copy.deepcopy(config)


def _remove(body: Json, path: Path, kept: set[Path]) -> None:
    """Remove the field, and what it leaves empty above it unless that is ``kept`` itself."""
    node: Any = body
    trail: list[tuple[Any, Any]] = []
    for segment in path:
        at = _index(node, segment)
        if at is None:
            return
        child = copy.copy(node[at])
        node[at] = child
        trail.append((node, at))
        node = child
    while trail:
        parent, at = trail.pop()
        del parent[at]
        if parent or path[: len(trail)] in kept or len(trail) <= 1:
            return


def _index(node: Any, segment: str) -> Any:
    """Where ``segment`` is in ``node``: a name, a position, None."""
    if segment.startswith("f:"):
        return segment[2:] if isinstance(node, dict) and segment[2:] in node else None
    wanted = json.loads(segment[2:])
    items = node if isinstance(node, list) else []
    return next((n for n, item in enumerate(items) if wanted.items() <= item.items()), None)


def _dotted(path: Path) -> str:
    text = ""
    for segment in path:
        if segment.startswith("k:"):
            ((key, value),) = json.loads(segment[2:]).items()
            text += f'[{key}="{value}"]'
        else:
            text += f".{segment[2:]}"
    return text
