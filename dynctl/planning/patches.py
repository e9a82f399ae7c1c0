"""The kubectl command that changes the replicas of a graph's components, and nothing else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynctl.manifests.graphs import GRAPH_GROUP, Component, Graph


class Patch(msgspec.Struct, frozen=True):
    """``type``: json (RFC 6902) or merge (RFC 7386); ``command`` applies ``body``."""

    graph: str
    type: str
    body: Any
    command: str


def replicas_patch(graph: Graph, wanted: Mapping[str, int]) -> Patch:
    """Set the replicas of components by name.

    Components of v1beta1 are a list, which a merge patch would replace as a whole: a JSON patch
    says which entry, and tests its name first, so it fails rather than scale another component.
    """
    if graph.version == "v1alpha1":
        kind = "merge"
        body: Any = {"spec": {"services": {n: {"replicas": r} for n, r in wanted.items()}}}
    else:
        kind = "json"
        names = [one.name for one in graph.components]
        body = []
        for name, replicas in wanted.items():
            path = f"/spec/components/{names.index(name)}"
            body.append({"op": "test", "path": f"{path}/name", "value": name})
            # To add a member that is there replaces it.
            body.append({"op": "add", "path": f"{path}/replicas", "value": replicas})
    manifest = graph.manifest
    words = [
        "kubectl", "patch", f"dynamographdeployments.{graph.version}.{GRAPH_GROUP}", manifest.name,
        *(["-n", manifest.namespace] if manifest.namespace else []),
        "--type", kind, "-p", json.dumps(body, separators=(",", ":")),
    ]  # fmt: skip
    return Patch(graph.name, kind, body, " ".join(map(shlex.quote, words)))


def scaled_elsewhere(component: Component) -> bool:
    """Whether a scaling adapter owns the replicas: it would undo a patch of the graph."""
    adapter = component.body.get("scalingAdapter")
    return isinstance(adapter, Mapping) and adapter.get("enabled", True) is not False


def widest(components: Sequence[Component]) -> Component:
    """Of several that would do, the one with the most replicas; the first of equals."""
    return max(components, key=lambda one: one.replicas)
