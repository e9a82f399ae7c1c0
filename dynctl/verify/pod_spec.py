"""What the spec of a worker pod shows: the operator's topology settings, discovery backend, rank.

For a graph with a policy the operator writes: the annotation with the topology source, five
variables into the container ``main``, the Downward API volume ``topology-labels`` and its mount
(modelled from source).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from dynctl.manifests.graphs import is_encoder_command
from dynctl.verify.graph_policy import GraphPolicy
from dynctl.wire.kubernetes.names import (
    CLUSTER_TOPOLOGY_ANNOTATION,
    COMPONENT_LABEL,
    DISCOVERY_BACKEND_LABEL,
    LABEL_KEY_ANNOTATION,
    MAIN_CONTAINER,
    MOUNT_PATH,
    SUB_COMPONENT_TYPE_LABEL,
    TOPOLOGY_VOLUME,
)
from dynctl.wire.kubernetes.objects import Container, Pod, Volume

DOMAIN_ENV: Final = "DYN_KV_TRANSFER_DOMAIN"
ENFORCEMENT_ENV: Final = "DYN_KV_TRANSFER_ENFORCEMENT"
WEIGHT_ENV: Final = "DYN_KV_TRANSFER_PREFERRED_WEIGHT"
ENABLED_ENV: Final = "DYN_TOPOLOGY_ENABLED"
PATH_ENV: Final = "DYN_TOPOLOGY_MOUNT_PATH"
POLICY_ENV: Final = (DOMAIN_ENV, ENFORCEMENT_ENV, WEIGHT_ENV, ENABLED_ENV, PATH_ENV)
_VOLUME_KINDS: Final = ("downwardAPI", "projected")
"""The operator writes the first one; the files of both are the same."""
_FLOAT32: Final = 1e-6


def engine(pod: Pod) -> Container | None:
    """The container that the operator writes into; None if no container is named main (DYT0119)."""
    return next(
        (container for container in pod.containers if container.name == MAIN_CONTAINER), None
    )


def why_not_running(pod: Pod) -> str:
    """Why the engine of a pod does not run; empty if it runs."""
    main = engine(pod) or pod.main
    if pod.phase != "Pending" and (main is None or main.running_since is not None):
        return ""
    if not pod.node:
        return "not scheduled"
    if main is not None and main.waiting:
        return main.waiting
    if main is not None and main.last_end is not None:
        return f"ended with exit code {main.last_end.exit_code}"
    return f"not started on {pod.node}"


def is_weight(value: object, wanted: float | None) -> bool:
    """Whether ``value`` (a number, its text, or None) is the float32 ``wanted``; None is equal."""
    if value is None or wanted is None:
        return value is None and wanted is None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return False
    try:
        return abs(float(value) - wanted) <= _FLOAT32
    except (ValueError, OverflowError):
        return False


def annotation_differences(pod: Pod, policy: GraphPolicy) -> Iterator[str]:
    """The differences of the annotation with the topology source, as text."""
    expected = {
        LABEL_KEY_ANNOTATION: policy.label_key,
        CLUSTER_TOPOLOGY_ANNOTATION: policy.cluster_topology,
    }
    for key, wanted in expected.items():
        value = pod.annotations.get(key, "")
        if value == wanted:
            continue
        if wanted:
            yield f"{key} is {value or 'not set'}, the policy has {wanted}"
        else:
            yield f"{key} is {value}, the policy has another source"


def env_differences(container: Container, policy: GraphPolicy) -> dict[str, str]:
    """Variable -> its difference from the policy, as text."""
    differences = {}
    for name in POLICY_ENV:
        wanted = _wanted_value(name, policy)
        if name not in container.env:
            if wanted:
                differences[name] = f"{name} is not set, expected {wanted}"
            continue
        value = container.env[name]
        if value is None:
            differences[name] = f"{name} has no literal value, expected {wanted or 'no variable'}"
        elif not _same(name, value, wanted, policy):
            differences[name] = f"{name} is {value or 'empty'}, expected {wanted or 'no variable'}"
    return differences


def mount_differences(pod: Pod, container: Container, policy: GraphPolicy) -> Iterator[str]:
    """The differences of the topology volume and its mount, as text."""
    yield from content_differences(pod, container, policy)
    if any(mount.path == MOUNT_PATH and not mount.read_only for mount in container.mounts):
        yield f"{MOUNT_PATH} is mounted read-write"


def content_differences(pod: Pod, container: Container, policy: GraphPolicy) -> Iterator[str]:
    """Those of :func:`mount_differences` that change which files the worker sees."""
    volume = _volume(pod)
    if volume is None:
        yield f"no volume {TOPOLOGY_VOLUME}"
    elif volume.kind not in _VOLUME_KINDS:
        yield f"volume {TOPOLOGY_VOLUME} is of kind {volume.kind or '(none)'}"
    else:
        yield from _item_differences(volume, policy)
    mounts = {mount.path: mount for mount in container.mounts}
    mount = mounts.get(MOUNT_PATH)
    if mount is None or mount.volume != TOPOLOGY_VOLUME:
        there = f"the volume {mount.volume}" if mount is not None else "nothing"
        yield f"{there} is mounted at {MOUNT_PATH}"
    elif mount.sub_path:
        yield f"{mount.sub_path} of the volume is mounted (subPath), which is never updated"


def _item_differences(volume: Volume, policy: GraphPolicy) -> Iterator[str]:
    items = {item.path: item.field for item in volume.items}
    for domain, source in policy.sources.items():
        field = f"metadata.labels['{source.pod_key}']"
        if domain not in items:
            yield f"volume {TOPOLOGY_VOLUME} has no file {domain}"
        elif items[domain] != field:
            yield f"file {domain} has {items[domain] or 'no field'}, expected {field}"


def shows_domain(pod: Pod, container: Container, policy: GraphPolicy) -> bool:
    """Whether the file of the transfer domain is at the path where the engine reads it."""
    volume = _volume(pod)
    domain = container.env.get(DOMAIN_ENV)
    if volume is None or domain is None:
        return False
    listed = any(item.path == domain for item in volume.items)
    path = (container.env.get(PATH_ENV) or MOUNT_PATH).rstrip("/")
    mounted = any(
        mount.path == path and mount.volume == volume.name and not mount.sub_path
        for mount in container.mounts
    )
    return listed and mounted and domain == policy.domain


def is_untouched(pod: Pod) -> bool:
    """Whether the pod has none of the operator's topology settings.

    It is older than the policy, or was not created by the operator. False for a pod without a
    container main: the operator cannot write there.
    """
    main = engine(pod)
    if main is None or {LABEL_KEY_ANNOTATION, CLUSTER_TOPOLOGY_ANNOTATION} & pod.annotations.keys():
        return False
    return _volume(pod) is None and not set(POLICY_ENV) & main.env.keys()


def _volume(pod: Pod) -> Volume | None:
    return next((volume for volume in pod.volumes if volume.name == TOPOLOGY_VOLUME), None)


def _wanted_value(name: str, policy: GraphPolicy) -> str:
    weight = policy.weight
    values: Mapping[str, str] = {
        DOMAIN_ENV: policy.domain,
        ENFORCEMENT_ENV: policy.enforcement,
        WEIGHT_ENV: "" if weight is None else f"{weight:.9g}",
        ENABLED_ENV: "true",
        PATH_ENV: MOUNT_PATH,
    }
    return values[name]


def _same(name: str, value: str, wanted: str, policy: GraphPolicy) -> bool:
    if name == WEIGHT_ENV:
        return is_weight(value, policy.weight)
    if name == PATH_ENV:
        return value.rstrip("/") == wanted
    return value == wanted


# -- discovery backend -----------------------------------------------------------------------------


BACKEND_ENV: Final = "DYN_DISCOVERY_BACKEND"
KUBERNETES: Final = "kubernetes"


def backend_of(pod: Pod) -> str:
    """The discovery backend of a pod: its variable, else its label; empty if neither is set."""
    main = engine(pod) or pod.main
    value = None if main is None else main.env.get(BACKEND_ENV)
    return (value or pod.labels.get(DISCOVERY_BACKEND_LABEL, "")).strip().lower()


def why_not_in_kubernetes(pod: Pod) -> str:
    """The backend other than Kubernetes in which a pod registers, as a reason; else empty."""
    backend = backend_of(pod)
    return (
        ""
        if backend in (KUBERNETES, "")
        else f"registered in {backend} (use --discovery {backend})"
    )


# -- ranks of a replica ----------------------------------------------------------------------------


_LWS_NAME: Final = "leaderworkerset.sigs.k8s.io/name"
_LWS_GROUP: Final = "leaderworkerset.sigs.k8s.io/group-index"
_LWS_WORKER: Final = "leaderworkerset.sigs.k8s.io/worker-index"
_GROVE_CLIQUE: Final = "grove.io/podclique"
_GROVE_GROUP: Final = "grove.io/podcliquescalinggroup"
_GROVE_INDEX: Final = "grove.io/podcliquescalinggroup-replica-index"
_FOLLOWERS: Final = "-wkr"


def is_follower(pod: Pod) -> bool:
    """Whether the pod is a rank of a multinode replica, but not its leader."""
    if pod.labels.get(_LWS_WORKER, "0") != "0":
        return True
    return pod.labels.get(_GROVE_CLIQUE, "").endswith(_FOLLOWERS) and _GROVE_GROUP in pod.labels


def is_encoder(pod: Pod) -> bool:
    """Whether the pod encodes images for other workers: such a worker may have no model card."""
    names = (pod.labels.get(label, "") for label in (COMPONENT_LABEL, SUB_COMPONENT_TYPE_LABEL))
    words = () if pod.main is None else pod.main.words
    return any("encode" in name.lower() for name in names) or is_encoder_command(words)


def replica_of(pod: Pod) -> str:
    """The name of the multinode replica; empty if the pod belongs to none.

    A replica over several nodes has several pods: LeaderWorkerSet numbers them, Grove puts the
    leader and the others into separate cliques. Only the leader registers (modelled from source).
    """
    labels = pod.labels
    if _LWS_NAME in labels and _LWS_GROUP in labels:
        return f"{labels[_LWS_NAME]}-{labels[_LWS_GROUP]}"
    if _GROVE_GROUP in labels and _GROVE_INDEX in labels:
        return f"{labels[_GROVE_GROUP]}-{labels[_GROVE_INDEX]}"
    return ""
