"""What has to be copied from a node to a pod, and what is in the way. Pure.

The contract is the one of Dynamo's operator: a pod names its source by annotation, either the label
itself (``nvidia.com/topology-label-key``) or a Grove topology
(``nvidia.com/topology-cluster-topology-name``), each of whose levels goes to a label of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dynctl.manifests.graphs import ClusterTopology
from dynctl.manifests.render import StalePolicy
from dynctl.manifests.transfer_policy import is_label_key
from dynctl.wire.kubernetes.names import (
    CLUSTER_TOPOLOGY_ANNOTATION,
    DOMAIN_LABEL_PREFIX,
    LABEL_KEY_ANNOTATION,
)
from dynctl.wire.kubernetes.objects import Node, Pod

_MOST_LEVELS: Final = 16


class CopyState(StrEnum):
    """The state of one label of one pod."""

    CURRENT = "current"
    """the pod has the node's value"""
    MISSING = "missing"
    """the pod has no value, the node has one: to be copied"""
    STALE = "stale"
    """the values differ"""
    REPAIRED = "repair"
    """the values differ, and the policy says that the pod's is replaced"""
    NODE_LACKS = "node-lacks-label"
    """the node has no such label"""
    UNSCHEDULED = "unscheduled"
    """the pod has no node yet"""
    NODE_UNKNOWN = "node-unknown"
    """the pod's node is not among the known nodes"""
    NO_TOPOLOGY = "no-topology"
    """no such Grove topology, or it has no level"""
    UNREAD = "unread"
    """the Grove topologies cannot be read"""
    INVALID = "invalid"
    """the annotation is not the key of a label"""


WRITES: Final = frozenset({CopyState.MISSING, CopyState.REPAIRED})
FAILS: Final = frozenset(
    {
        *(CopyState.STALE, CopyState.NODE_LACKS, CopyState.NODE_UNKNOWN),
        *(CopyState.NO_TOPOLOGY, CopyState.UNREAD, CopyState.INVALID),
    }
)


@dataclass(frozen=True, slots=True)
class LabelCopy:
    """One label of one pod. ``source``: label of the node; ``target``: label of the pod.

    ``has``: the pod's value, ``wants``: the node's; empty where there is none. ``started``: its
    engine has run already, so that a new value needs a new pod.
    """

    namespace: str
    pod: str
    uid: str
    node: str
    source: str
    target: str
    state: CopyState
    has: str = ""
    wants: str = ""
    started: bool = False

    @property
    def message(self) -> str:
        """What is wrong, for an event and for the screen; empty where nothing is."""
        return _sentence(self)


def takes_part(pod: Pod) -> bool:
    """Whether the pod names a source, and is not at its end."""
    if pod.deleting or pod.phase in ("Succeeded", "Failed"):
        return False
    return bool(
        pod.annotations.get(LABEL_KEY_ANNOTATION)
        or pod.annotations.get(CLUSTER_TOPOLOGY_ANNOTATION)
    )


def copies_of(
    pod: Pod,
    nodes: Mapping[str, Node],
    topologies: Mapping[str, ClusterTopology],
    policy: StalePolicy,
) -> tuple[LabelCopy, ...]:
    """The labels of a pod that takes part, and the state of each."""
    return tuple(_copies(pod, nodes, topologies, policy))


def _copies(
    pod: Pod,
    nodes: Mapping[str, Node],
    topologies: Mapping[str, ClusterTopology],
    policy: StalePolicy,
) -> Iterator[LabelCopy]:
    started = any(
        container.running_since is not None or container.restarts for container in pod.containers
    )

    def copy(
        source: str, target: str, state: CopyState, has: str = "", wants: str = ""
    ) -> LabelCopy:
        return LabelCopy(
            pod.namespace, pod.name, pod.uid, pod.node, source, target, state, has, wants, started
        )

    key = pod.annotations.get(LABEL_KEY_ANNOTATION, "")
    name = pod.annotations.get(CLUSTER_TOPOLOGY_ANNOTATION, "")
    pairs: Sequence[tuple[str, str]]
    if key:
        if not is_label_key(key):
            yield copy(key, key, CopyState.INVALID)
            return
        pairs = [(key, key)]
    else:
        topology = topologies.get(name)
        pairs = [
            (level.key, DOMAIN_LABEL_PREFIX + level.domain)
            for level in (topology.levels if topology is not None else ())[:_MOST_LEVELS]
            if is_label_key(level.key) and is_label_key(DOMAIN_LABEL_PREFIX + level.domain)
        ]
        if not pairs:
            yield copy(name, "", CopyState.NO_TOPOLOGY)
            return
    node = nodes.get(pod.node)
    for source, target in pairs:
        has = pod.labels.get(target, "")
        if not pod.node:
            yield copy(source, target, CopyState.UNSCHEDULED, has)
        elif node is None:
            yield copy(source, target, CopyState.NODE_UNKNOWN, has)
        else:
            wants = node.labels.get(source, "")
            yield copy(source, target, _state(has, wants, started, policy), has, wants)


def _state(has: str, wants: str, started: bool, policy: StalePolicy) -> CopyState:
    if not wants:
        return CopyState.NODE_LACKS
    if not has:
        return CopyState.MISSING
    if has == wants:
        return CopyState.CURRENT
    replaced = policy is StalePolicy.ALWAYS or (policy is StalePolicy.STARTING and not started)
    return CopyState.REPAIRED if replaced else CopyState.STALE


def _sentence(copy: LabelCopy) -> str:
    node, source, target = f'Node "{copy.node}"', f'"{copy.source}"', f'"{copy.target}"'
    if copy.state is CopyState.NODE_LACKS:
        if copy.has:
            return (
                f"{node} does not have topology label {source}; the pod's {target} is "
                f'"{copy.has}" and stays'
            )
        # The operator's own words, which `topology verify` and people look for.
        return (
            f"{node} does not have required topology label {source}; "
            f"topology metadata for {target} will remain unavailable"
        )
    if copy.state in (CopyState.STALE, CopyState.REPAIRED):
        differs = f'{target} is "{copy.has}", {node} has "{copy.wants}"'
        if copy.state is CopyState.STALE:
            return f"{differs}; delete the pod, so that its worker reads the new value"
        if copy.started:
            return (
                f"{differs}: replaced; the worker has read the old value, delete the pod so that "
                "it reads the new one"
            )
        return f"{differs}: replaced"
    if copy.state is CopyState.NODE_UNKNOWN:
        return f"{node} is not in the cluster; {target} cannot be copied"
    if copy.state is CopyState.NO_TOPOLOGY:
        return f"no ClusterTopologyBinding or ClusterTopology {source} with a level"
    if copy.state is CopyState.UNREAD:
        return f"whether there is a topology {source} is unknown: topologies cannot be read"
    if copy.state is CopyState.INVALID:
        return f"annotation {LABEL_KEY_ANNOTATION} is {source}, which is not the key of a label"
    return ""
