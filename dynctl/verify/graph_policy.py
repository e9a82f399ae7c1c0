"""The KV transfer policy of a graph, and the labels that hold the values of its domains.

Read from the graph; if the graph cannot be read, from the variables and annotations of its pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dynctl.base.json_fields import text
from dynctl.manifests.graphs import ClusterTopology, Graph
from dynctl.manifests.transfer_policy import is_domain
from dynctl.wire.kubernetes.names import (
    CLUSTER_TOPOLOGY_ANNOTATION,
    DOMAIN_LABEL_PREFIX,
    LABEL_KEY_ANNOTATION,
)
from dynctl.wire.kubernetes.objects import Pod


@dataclass(frozen=True, slots=True)
class LabelSource:
    """Where a domain's value comes from: a label of the node, copied to a label of the pod."""

    node_key: str
    pod_key: str


@dataclass(frozen=True, slots=True)
class GraphPolicy:
    """``label_key`` or ``cluster_topology`` is set, the other one empty. ``weight`` is 0..1.

    ``sources``: domain -> labels; without the transfer domain if its Grove topology is unknown.
    ``origin``: whether the policy was read from the graph or from its pods.
    """

    domain: str
    enforcement: Literal["required", "preferred"]
    weight: float | None
    label_key: str
    cluster_topology: str
    sources: Mapping[str, LabelSource]
    origin: Literal["graph", "pods"] = "graph"

    @property
    def required(self) -> bool:
        return self.enforcement == "required"

    @property
    def source(self) -> LabelSource | None:
        """The labels of the transfer domain."""
        return self.sources.get(self.domain)


def policy_of(graph: Graph, topologies: Iterable[ClusterTopology]) -> GraphPolicy | None:
    """The policy of a graph; None if it has no valid one (see the checks DYT01)."""
    policy = graph.policy or {}
    weight = policy.get("preferredWeight")
    return _policy(
        text(policy.get("domain")),
        text(policy.get("enforcement")) or "required",
        None if isinstance(weight, bool) or not isinstance(weight, int | float) else float(weight),
        text(policy.get("labelKey")),
        text(policy.get("clusterTopologyName")),
        topologies,
        "graph",
    )


def policy_of_pods(
    pods: Iterable[Pod], topologies: Iterable[ClusterTopology]
) -> GraphPolicy | None:
    """The policy in the first of ``pods`` that has the operator's variables."""
    for pod in pods:
        env = {} if pod.main is None else pod.main.env
        domain = env.get("DYN_KV_TRANSFER_DOMAIN")
        if domain:
            return _policy(
                domain,
                env.get("DYN_KV_TRANSFER_ENFORCEMENT") or "required",
                _number(env.get("DYN_KV_TRANSFER_PREFERRED_WEIGHT")),
                pod.annotations.get(LABEL_KEY_ANNOTATION, ""),
                pod.annotations.get(CLUSTER_TOPOLOGY_ANNOTATION, ""),
                topologies,
                "pods",
            )
    return None


def _policy(
    domain: str,
    enforcement: str,
    weight: float | None,
    label_key: str,
    cluster_topology: str,
    topologies: Iterable[ClusterTopology],
    origin: Literal["graph", "pods"],
) -> GraphPolicy | None:
    if not is_domain(domain) or bool(label_key) == bool(cluster_topology):
        return None
    if label_key:
        sources = {domain: LabelSource(label_key, label_key)}
    else:
        levels = next(
            (topology.levels for topology in topologies if topology.name == cluster_topology), ()
        )
        sources = {
            level.domain: LabelSource(level.key, DOMAIN_LABEL_PREFIX + level.domain)
            for level in levels
            if level.domain and level.key
        }
    how: Literal["required", "preferred"] = (
        "preferred" if enforcement == "preferred" else "required"
    )
    return GraphPolicy(domain, how, weight, label_key, cluster_topology, sources, origin)


def _number(value: str | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None
