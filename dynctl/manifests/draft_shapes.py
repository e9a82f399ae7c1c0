"""Topology policies in formats of the design drafts, which no released operator reads.

The API server removes unknown fields (kubectl refuses them before, unless validation is off), so
such a graph runs without a topology policy and without a message. A draft is translated into the
released policy, and both are validated: the draft's own fields here, the translation as every other
policy.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from dynctl.base.json_fields import mapping, sequence, text
from dynctl.manifests.graphs import ClusterTopology, Component, Graph
from dynctl.manifests.transfer_policy import (
    DRAFT_FIELDS,
    FIELDS,
    KNOWN_LABELS,
    PATH,
    nearest_name,
    shown_value,
    type_name,
)

DRAFT: Final = "kvCacheTransferTopology"
_RELEASED: Final = "kvTransferPolicy"
_DRAFT_ENV: Final = {
    "DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL": "DYN_KV_TRANSFER_DOMAIN on the workers",
    "DYN_ROUTER_KV_TRANSFER_MISMATCH_POLICY": "DYN_KV_TRANSFER_ENFORCEMENT on the workers",
    "DYN_TOPOLOGY_DOMAIN": "DYN_KV_TRANSFER_DOMAIN",
    "DYN_KV_TRANSFER_NO_MATCH_POLICY": "DYN_KV_TRANSFER_ENFORCEMENT",
}
_FALLBACK: Final = (
    "this changes the meaning: fallback crosses the domain only while no decode worker in it is "
    "eligible, preferred also crosses whenever a worker elsewhere costs less (weight 0.85 halves "
    "the costs inside the domain); of the routers only dynctl's own has fallback"
)
_QOS: Final = "networkQoS"
_FALLBACK_WEIGHT: Final = 0.85
_MISMATCH_POLICIES: Final = ("fail", "fallback")
#: Names of drafts for one setting, the released name first.
_SAME_SETTING: Final = (
    ("domain", "level"),
    ("labelKey", "label"),
    ("enforcement", "mismatchPolicy", "noMatchPolicy"),
)
_DRAFT_MOUNT: Final = "/etc/podinfo/topology"
_DRAFT_LABEL: Final = "grove.io/topology."


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft format: ``where`` in the graph, ``what`` it is, and how to write it now.

    ``problem``: what is wrong with the draft itself; empty for a draft that only is one.
    """

    where: str
    what: str
    shipped: str
    problem: str = ""

    @property
    def message(self) -> str:
        """What a finding says about ``where``."""
        return self.problem or f"{self.what} is a draft format that no released operator reads"


@dataclass(frozen=True, slots=True)
class PlacedPolicy:
    """A policy that is not where a released operator reads it.

    ``place``: the path of the object that has it. ``component``: None if that is no component.
    """

    place: str
    name: str
    value: Any
    component: Component | None

    @property
    def path(self) -> str:
        """Its own path."""
        return f"{self.place}.{self.name}"


def drafts_of(graph: Graph) -> Iterator[Draft]:
    """All draft formats of a graph, with what is wrong with them."""
    spec = mapping(graph.manifest.body.get("spec"))
    inherited = _inherited_topology(graph)
    experimental = mapping(spec.get("experimental"))
    policy = mapping(experimental.get(_RELEASED))
    released = bool(text(policy.get("domain")))
    placed = placed_policies(graph)
    for placed_policy in placed:
        yield _as_draft(placed_policy, inherited, released=released)
        yield from _component_problems(placed_policy)
        if not released:
            yield from _policy_problems(placed_policy, inherited)
    yield from _duplicate_policies(placed)
    for component in graph.components:
        for name in sorted(set(component.env) & set(_DRAFT_ENV)):
            yield Draft(
                component.path,
                f"the variable {name}",
                f"remove it; the released name is {_DRAFT_ENV[name]}, which the operator sets",
            )
        yield from _draft_mounts(component.path, component.pod)
        yield from _misspelled_fields(component.path, component.body, (DRAFT,))
    yield from _misspelled_fields("spec", spec, (_RELEASED, DRAFT))
    yield from _misspelled_fields("spec.experimental", experimental, (_RELEASED, DRAFT))
    used = [name for name in DRAFT_FIELDS if name in policy]
    if used:
        here = PlacedPolicy("spec.experimental", _RELEASED, policy, None)
        yield Draft(PATH, ", ".join(used), _translated_text(policy, inherited))
        yield from _value_problems(here)
        if "domain" not in policy:
            yield from _source_problems(here, inherited)


def placed_policies(graph: Graph) -> tuple[PlacedPolicy, ...]:
    """The policies of a graph that are not where an operator reads them, frontends' first."""
    spec = mapping(graph.manifest.body.get("spec"))
    experimental = mapping(spec.get("experimental"))
    placed = [
        PlacedPolicy(component.path, name, component.body[name], component)
        for component in graph.components
        for name in (DRAFT, _RELEASED)
        if component.body.get(name) is not None
    ]
    placed.sort(
        key=lambda policy: policy.component is not None and policy.component.type != "frontend"
    )
    if spec.get(DRAFT) is not None:
        placed.append(PlacedPolicy("spec", DRAFT, spec[DRAFT], None))
    if experimental.get(DRAFT) is not None:
        placed.append(PlacedPolicy("spec.experimental", DRAFT, experimental[DRAFT], None))
    if spec.get(_RELEASED) is not None:
        placed.append(PlacedPolicy("spec", _RELEASED, spec[_RELEASED], None))
    return tuple(placed)


def translated_graphs(graphs: Iterable[Graph]) -> tuple[Graph, ...]:
    """The graphs of files, each with the policy that its draft becomes once it is rewritten.

    Not for graphs of a cluster: their drafts have no effect.
    """
    return tuple(_translated_graph(graph) for graph in graphs)


def is_translated(graph: Graph) -> bool:
    """Whether the policy of a graph is the translation of a draft elsewhere in it."""
    spec = mapping(graph.manifest.body.get("spec"))
    return graph.policy is not None and _RELEASED not in mapping(spec.get("experimental"))


def translation(draft: Mapping[str, Any], inherited: str) -> dict[str, Any]:
    """The most similar released policy; values as they are, also invalid ones.

    ``inherited``: the Grove topology of the graph, which a draft without a label uses; or empty.
    """
    domain = draft.get("domain", draft.get("level"))
    key, name = draft.get("labelKey", draft.get("label")), draft.get("clusterTopologyName")
    if key is None and name is None:
        name = inherited or None
        key = None if name else KNOWN_LABELS.get(text(domain))
    enforcement, weight = _translated_enforcement(draft)
    policy = {
        "labelKey": key,
        "clusterTopologyName": name,
        "domain": domain,
        "enforcement": enforcement,
        "preferredWeight": weight,
    }
    for field in draft:
        if field not in FIELDS and field not in DRAFT_FIELDS:
            policy[field] = draft[field]
    return {field: value for field, value in policy.items() if value is not None}


def _translated_enforcement(draft: Mapping[str, Any]) -> tuple[Any, Any]:
    """Enforcement and preferred weight; a draft may have a fallback instead."""
    enforcement, weight = draft.get("enforcement"), draft.get("preferredWeight")
    if enforcement is not None:
        return enforcement, weight
    if _mismatch_policy(draft) != "fallback":
        return "required", weight
    return "preferred", _FALLBACK_WEIGHT if weight is None else weight


def draft_levels(topology: ClusterTopology) -> Iterator[Draft]:
    """Draft fields in the levels of a Grove topology."""
    levels = sequence(mapping(topology.manifest.body.get("spec")).get("levels"))
    for place, entry in enumerate(levels):
        level, where = mapping(entry), f"spec.levels[{place}]"
        if _QOS in level:
            yield Draft(where, _QOS, f"remove it; {_qos_now()}")
        if "labelKey" in level and "key" not in level:
            yield Draft(where, "labelKey", f"write key: {text(level['labelKey'])}")


def _translated_graph(graph: Graph) -> Graph:
    inherited = _inherited_topology(graph)
    if graph.policy is not None:
        if any(name in graph.policy for name in DRAFT_FIELDS):
            return replace(graph, policy=translation(graph.policy, inherited))
        return graph
    spec = mapping(graph.manifest.body.get("spec"))
    if _RELEASED in mapping(spec.get("experimental")):
        return graph
    draft = next((policy.value for policy in placed_policies(graph)), None)
    if not isinstance(draft, Mapping):
        return graph
    return replace(graph, policy=translation(draft, inherited))


def _inherited_topology(graph: Graph) -> str:
    spec = mapping(graph.manifest.body.get("spec"))
    return text(mapping(spec.get("topologyConstraint")).get("clusterTopologyName"))


# -- what is wrong with a draft --------------------------------------------------------------------


def _as_draft(placed: PlacedPolicy, inherited: str, *, released: bool) -> Draft:
    draft = mapping(placed.value)
    if placed.name == _RELEASED:
        if placed.component is None:
            return Draft(placed.place, _RELEASED, f"move it to {PATH}")
        what = f"{_RELEASED} on a component"
        return Draft(placed.place, what, f"move it to {PATH} of the graph")
    odd = [name for name in ("kvTransferWeight", _QOS) if name in draft]
    what = DRAFT + (f" with {' and '.join(odd)}" if odd else "")
    if released:
        return Draft(placed.place, what, f"remove it; the graph has {PATH}{_dropped_fields(draft)}")
    return Draft(placed.place, what, _translated_text(draft, inherited))


def _component_problems(placed: PlacedPolicy) -> Iterator[Draft]:
    component = placed.component
    if placed.name != DRAFT or component is None or component.type == "frontend":
        return
    has = f"has the type {component.type}" if component.type else "has no type"
    yield Draft(
        placed.place,
        placed.name,
        f"remove it from {component.name}; the policy stands once, at {PATH} of the graph",
        f"{placed.name} is valid only on a component of type frontend, and {component.name} {has}",
    )


def _policy_problems(placed: PlacedPolicy, inherited: str) -> Iterator[Draft]:
    if not isinstance(placed.value, Mapping):
        got = type_name(placed.value)
        problem = f'Invalid value: "{got}": {placed.path} in body must be of type object: "{got}"'
        yield Draft(placed.path, placed.name, "write level and mismatchPolicy as keys", problem)
        return
    for name in placed.value:
        if name not in FIELDS and name not in DRAFT_FIELDS and name != _QOS:
            known = DRAFT_FIELDS if placed.name == DRAFT else FIELDS
            near = nearest_name(str(name), (*known, *FIELDS))
            fix = f"write {near}" if near else f"remove it; {placed.name} has {', '.join(known)}"
            yield Draft(placed.path, str(name), fix, f'unknown field "{name}"')
    if placed.value.get("level", placed.value.get("domain")) is None:
        field = "level" if placed.name == DRAFT else "domain"
        fix = f"name the level that a transfer must not leave, for example {field}: zone"
        yield Draft(f"{placed.path}.{field}", field, fix, "Required value")
    yield from _value_problems(placed)
    yield from _source_problems(placed, inherited)


def _value_problems(placed: PlacedPolicy) -> Iterator[Draft]:
    draft = mapping(placed.value)
    for name in ("mismatchPolicy", "noMatchPolicy"):
        value = draft.get(name)
        if value is not None and value not in _MISMATCH_POLICIES:
            near = nearest_name(str(value), _MISMATCH_POLICIES)
            known = ", ".join(f'"{policy}"' for policy in _MISMATCH_POLICIES)
            problem = f"Unsupported value: {shown_value(value)}: supported values: {known}"
            fix = f"write {name}: {near or 'fail or fallback'}"
            yield Draft(f"{placed.path}.{name}", name, fix, problem)
    weight = draft.get("kvTransferWeight")
    if weight is not None and not _is_weight(weight):
        yield Draft(
            f"{placed.path}.kvTransferWeight",
            "kvTransferWeight",
            "write a number of at least 0, or remove it",
            f"Invalid value: {shown_value(weight)}: expected a number of at least 0",
        )
    for names in _SAME_SETTING:
        given = [name for name in names if draft.get(name) is not None]
        if len({_released_value(draft[name]) for name in given}) > 1:
            problem = f"{' and '.join(given)} are names of one setting, and their values differ"
            yield Draft(placed.path, given[1], f"keep {given[0]}, remove {given[1]}", problem)


def _source_problems(placed: PlacedPolicy, inherited: str) -> Iterator[Draft]:
    policy = translation(mapping(placed.value), inherited)
    if "labelKey" in policy or "clusterTopologyName" in policy:
        return
    domain = text(policy.get("domain")) or "the level"
    yield Draft(
        placed.path,
        placed.name,
        "name the Grove topology in spec.topologyConstraint.clusterTopologyName, or the label of "
        "the nodes in labelKey of the policy",
        f"no node label is known for {domain}: the graph has no "
        "spec.topologyConstraint.clusterTopologyName, and the draft no label",
    )


def _duplicate_policies(placed: Sequence[PlacedPolicy]) -> Iterator[Draft]:
    if len(placed) < 2:
        return
    same = all(policy.value == placed[0].value for policy in placed)
    places = ", ".join(policy.path for policy in placed)
    yield Draft(
        placed[1].place,
        placed[1].name,
        f"keep one of them; a graph has one policy, at {PATH}",
        f"the graph has {len(placed)} policies{'' if same else ', which differ'}: {places}",
    )


def _misspelled_fields(
    place: str, body: Mapping[str, Any], names: Sequence[str]
) -> Iterator[Draft]:
    for name in body:
        near = nearest_name(str(name), names)
        if near is not None and name not in (DRAFT, _RELEASED):
            yield Draft(place, str(name), f"write {PATH}", f'unknown field "{name}", near {near}')


def _released_value(value: Any) -> str:
    """A value in released words, to compare it with another."""
    return {"fail": "required", "fallback": "preferred"}.get(str(value), str(value))


def _is_weight(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0


# -- the released policy ---------------------------------------------------------------------------


def _mismatch_policy(draft: Mapping[str, Any]) -> str:
    return text(draft.get("mismatchPolicy")) or text(draft.get("noMatchPolicy"))


def _translated_text(draft: Mapping[str, Any], inherited: str) -> str:
    """The most similar released policy, as one line of YAML, and what changes with it."""
    policy = translation(draft, inherited)
    if "labelKey" not in policy and "clusterTopologyName" not in policy:
        policy["labelKey"] = "LABEL-OF-YOUR-NODES"
    policy.setdefault("domain", "NAME-OF-THE-LEVEL")
    fields = ", ".join(f"{name}: {_scalar(policy[name])}" for name in FIELDS if name in policy)
    changed = ""
    if draft.get("enforcement") is None and _mismatch_policy(draft) == "fallback":
        changed = f"; {_FALLBACK}"
    return f"write {PATH}: {{{fields}}}{changed}{_dropped_fields(draft)}"


def _dropped_fields(draft: Mapping[str, Any]) -> str:
    """What replaces fields that have no place in a released policy."""
    parts = []
    if "kvTransferWeight" in draft:
        weight = draft["kvTransferWeight"]
        number = f"{weight:g}" if _is_weight(weight) else "WEIGHT"
        parts.append(
            "kvTransferWeight has no field in it: Dynamo's routers have no such term, dynctl's "
            f"have --router-kv-transfer-weight {number} with --router-kv-transfer-qos FILE"
        )
    if _QOS in draft:
        parts.append(f"{_QOS} has no field in it: {_qos_now()}")
    return "".join(f"; {part}" for part in parts)


def _qos_now() -> str:
    return (
        "Dynamo's routers have no distances; dynctl's read latency and bandwidth of each level "
        "from --router-kv-transfer-qos FILE"
    )


def _scalar(value: Any) -> str:
    """A value in a flow mapping of YAML."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", value):
        return value
    return json.dumps(value, default=str)


def _draft_mounts(path: str, pod: Mapping[str, Any]) -> Iterator[Draft]:
    containers = [*sequence(pod.get("containers")), pod.get("mainContainer")]
    for container in containers:
        for mount in sequence(mapping(container).get("volumeMounts")):
            if text(mapping(mount).get("mountPath")).startswith(_DRAFT_MOUNT):
                shipped = "remove it; the operator mounts /etc/dynamo/topology"
                yield Draft(path, f"the mount {_DRAFT_MOUNT}", shipped)
    for volume in sequence(pod.get("volumes")):
        for item in sequence(mapping(mapping(volume).get("downwardAPI")).get("items")):
            field = text(mapping(mapping(item).get("fieldRef")).get("fieldPath"))
            if _DRAFT_LABEL in field:
                shipped = "remove it; no component writes that label, the operator projects its own"
                yield Draft(path, f"the label {_DRAFT_LABEL}* in a volume", shipped)
