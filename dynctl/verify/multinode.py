"""Which pods are ranks of one replica, and which of them leads (modelled from source).

A replica over several nodes is made of several pods: LeaderWorkerSet numbers them, Grove puts the
leader and the others into cliques of their own. Only the leader registers itself.
"""

from __future__ import annotations

from typing import Final

from dynctl.wire.kubernetes.objects import Pod

_LWS_NAME: Final = "leaderworkerset.sigs.k8s.io/name"
_LWS_GROUP: Final = "leaderworkerset.sigs.k8s.io/group-index"
_LWS_WORKER: Final = "leaderworkerset.sigs.k8s.io/worker-index"
_GROVE_CLIQUE: Final = "grove.io/podclique"
_GROVE_GROUP: Final = "grove.io/podcliquescalinggroup"
_GROVE_INDEX: Final = "grove.io/podcliquescalinggroup-replica-index"
_FOLLOWERS: Final = "-wkr"


def is_follower(pod: Pod) -> bool:
    """Whether it is a rank of a multinode replica other than its leader."""
    if pod.labels.get(_LWS_WORKER, "0") != "0":
        return True
    return pod.labels.get(_GROVE_CLIQUE, "").endswith(_FOLLOWERS) and _GROVE_GROUP in pod.labels


def replica_of(pod: Pod) -> str:
    """What all ranks of one replica have in common; empty where the pod is no rank of any."""
    labels = pod.labels
    if _LWS_NAME in labels and _LWS_GROUP in labels:
        return f"{labels[_LWS_NAME]}-{labels[_LWS_GROUP]}"
    if _GROVE_GROUP in labels and _GROVE_INDEX in labels:
        return f"{labels[_GROVE_GROUP]}-{labels[_GROVE_INDEX]}"
    return ""
