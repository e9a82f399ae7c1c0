"""Topology policies in formats of the design drafts, which no released operator reads.

The API server removes unknown fields (kubectl refuses them before, unless validation is off), so
such a graph runs without a topology policy and without a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dynctl.base.json_fields import mapping, sequence, text
from dynctl.manifests.graphs import ClusterTopology, Graph
from dynctl.manifests.transfer_policy import DRAFT_FIELDS, PATH

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
_DRAFT_MOUNT: Final = "/etc/podinfo/topology"
_DRAFT_LABEL: Final = "grove.io/topology."


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft format: ``where`` in the graph, ``what`` it is, and how to write it now."""

    where: str
    what: str
    shipped: str


def drafts_of(graph: Graph) -> Iterator[Draft]:
    """All draft formats of a graph."""
    spec = mapping(graph.manifest.body.get("spec"))
    named = text(mapping(spec.get("topologyConstraint")).get("clusterTopologyName"))
    there = text((graph.policy or {}).get("domain"))
    for component in graph.components:
        if "kvCacheTransferTopology" in component.body:
            draft = mapping(component.body["kvCacheTransferTopology"])
            shipped = f"remove it; the graph has {PATH}" if there else _translated(draft, named)
            yield Draft(component.path, "kvCacheTransferTopology" + _inner(draft), shipped)
        if "kvTransferPolicy" in component.body:
            yield Draft(
                component.path, "kvTransferPolicy on a component", f"move it to {PATH} of the graph"
            )
        for name in sorted(set(component.env) & set(_DRAFT_ENV)):
            yield Draft(
                component.path,
                f"the variable {name}",
                f"remove it; the released name is {_DRAFT_ENV[name]}, which the operator sets",
            )
        yield from _projected(component.path, component.pod)
    for outer, body in (("spec", spec), ("spec.experimental", mapping(spec.get("experimental")))):
        if "kvCacheTransferTopology" in body:
            draft = mapping(body["kvCacheTransferTopology"])
            yield Draft(outer, "kvCacheTransferTopology" + _inner(draft), _translated(draft, named))
    if "kvTransferPolicy" in spec:
        yield Draft("spec", "kvTransferPolicy", f"move it to {PATH}")
    policy = graph.policy or {}
    used = [name for name in DRAFT_FIELDS if name in policy]
    if used:
        yield Draft(PATH, ", ".join(used), _translated(policy, named))


def draft_levels(topology: ClusterTopology) -> Iterator[Draft]:
    """Draft fields in the levels of a Grove topology."""
    levels = sequence(mapping(topology.manifest.body.get("spec")).get("levels"))
    for place, entry in enumerate(levels):
        level, where = mapping(entry), f"spec.levels[{place}]"
        if "networkQoS" in level:
            yield Draft(
                where, "networkQoS", "remove it; routing has no distances, only one transfer domain"
            )
        if "labelKey" in level and "key" not in level:
            yield Draft(where, "labelKey", f"write key: {text(level['labelKey'])}")


def _inner(draft: Mapping[str, Any]) -> str:
    odd = [name for name in ("kvTransferWeight", "networkQoS") if name in draft]
    return f" with {' and '.join(odd)}" if odd else ""


def _translated(draft: Mapping[str, Any], cluster_topology: str) -> str:
    """The most similar released policy, as one line of YAML."""
    domain = text(draft.get("domain")) or text(draft.get("level")) or "zone"
    key = text(draft.get("labelKey")) or text(draft.get("label"))
    name = text(draft.get("clusterTopologyName")) or cluster_topology
    if not key and not name:
        key = "topology.kubernetes.io/zone" if domain == "zone" else "LABEL-OF-YOUR-NODES"
    source = f"labelKey: {key}" if key else f"clusterTopologyName: {name}"
    mode = text(draft.get("mismatchPolicy")) or text(draft.get("noMatchPolicy"))
    fallback = mode == "fallback" or draft.get("enforcement") == "preferred"
    how = "enforcement: preferred, preferredWeight: 0.85" if fallback else "enforcement: required"
    changed = "" if mode != "fallback" else f"; {_FALLBACK}"
    return f"write {PATH}: {{{source}, domain: {domain}, {how}}}{changed}"


def _projected(path: str, pod: Mapping[str, Any]) -> Iterator[Draft]:
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
