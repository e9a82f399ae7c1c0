"""What the operator writes into a worker pod of a graph with a policy, and what differs from that.

It writes the annotation that names the source of topology, five variables into the container
``main``, the Downward API volume ``topology-labels`` and its mount (modelled from source).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from dynctl.verify.policy import Policy
from dynctl.wire.kubernetes.names import (
    CLUSTER_TOPOLOGY_ANNOTATION,
    DISCOVERY_BACKEND_LABEL,
    LABEL_KEY_ANNOTATION,
    MAIN_CONTAINER,
    MOUNT_PATH,
    TOPOLOGY_VOLUME,
)
from dynctl.wire.kubernetes.objects import Container, Pod, Volume

DOMAIN_ENV: Final = "DYN_KV_TRANSFER_DOMAIN"
ENFORCEMENT_ENV: Final = "DYN_KV_TRANSFER_ENFORCEMENT"
WEIGHT_ENV: Final = "DYN_KV_TRANSFER_PREFERRED_WEIGHT"
ENABLED_ENV: Final = "DYN_TOPOLOGY_ENABLED"
PATH_ENV: Final = "DYN_TOPOLOGY_MOUNT_PATH"
POLICY_ENV: Final = (DOMAIN_ENV, ENFORCEMENT_ENV, WEIGHT_ENV, ENABLED_ENV, PATH_ENV)
_VOLUME_KIND: Final = "downwardAPI"
_FLOAT32: Final = 1e-6


def engine(pod: Pod) -> Container | None:
    """The container that the operator writes into; None where none is called main (DYT0119)."""
    return next((one for one in pod.containers if one.name == MAIN_CONTAINER), None)


def is_weight(told: object, wanted: float | None) -> bool:
    """Whether ``told`` (a number, its text, or None) is the float32 ``wanted``, or both not set."""
    if told is None or wanted is None:
        return told is None and wanted is None
    if isinstance(told, bool) or not isinstance(told, int | float | str):
        return False
    try:
        return abs(float(told) - wanted) <= _FLOAT32
    except (ValueError, OverflowError):
        return False


def annotation_differences(pod: Pod, policy: Policy) -> Iterator[str]:
    """What is wrong with the annotation that names the source, as text."""
    expected = {
        LABEL_KEY_ANNOTATION: policy.label_key,
        CLUSTER_TOPOLOGY_ANNOTATION: policy.cluster_topology,
    }
    for key, wanted in expected.items():
        told = pod.annotations.get(key, "")
        if told == wanted:
            continue
        if wanted:
            yield f"{key} is {told or 'not set'}, the policy says {wanted}"
        else:
            yield f"{key} is {told}, and the policy has no such source"


def env_differences(container: Container, policy: Policy) -> dict[str, str]:
    """Variable -> what is wrong with it, as text."""
    found = {}
    for name in POLICY_ENV:
        wanted = _wanted(name, policy)
        if name not in container.env:
            if wanted:
                found[name] = f"{name} is not set, expected {wanted}"
            continue
        told = container.env[name]
        if told is None:
            found[name] = f"{name} comes from elsewhere, expected {wanted or 'nothing'}"
        elif not _same(name, told, wanted, policy):
            found[name] = f"{name} is {told or 'empty'}, expected {wanted or 'nothing'}"
    return found


def mount_differences(pod: Pod, container: Container, policy: Policy) -> Iterator[str]:
    """What is wrong with the volume and its mount, as text."""
    yield from content_differences(pod, container, policy)
    if any(one.path == MOUNT_PATH and not one.read_only for one in container.mounts):
        yield f"{MOUNT_PATH} is mounted read-write"


def content_differences(pod: Pod, container: Container, policy: Policy) -> Iterator[str]:
    """Of :func:`mount_differences` those because of which other files are there than should be."""
    volume = _volume(pod)
    if volume is None:
        yield f"no volume {TOPOLOGY_VOLUME}"
    elif volume.kind != _VOLUME_KIND:
        yield f"volume {TOPOLOGY_VOLUME} is a {volume.kind or 'volume of no kind'}"
    else:
        items = {item.path: item.field for item in volume.items}
        for domain, source in policy.sources.items():
            field = f"metadata.labels['{source.pod_key}']"
            if domain not in items:
                yield f"volume {TOPOLOGY_VOLUME} has no file {domain}"
            elif items[domain] != field:
                yield f"file {domain} shows {items[domain] or 'no field'}, expected {field}"
    mounts = {one.path: one for one in container.mounts}
    mount = mounts.get(MOUNT_PATH)
    if mount is None or mount.volume != TOPOLOGY_VOLUME:
        there = f"the volume {mount.volume}" if mount is not None else "nothing"
        yield f"{there} is mounted at {MOUNT_PATH}"


def shows_domain(pod: Pod, container: Container, policy: Policy) -> bool:
    """Whether the engine can find the file of the transfer domain where it looks for it."""
    volume = _volume(pod)
    domain = container.env.get(DOMAIN_ENV)
    if volume is None or domain is None:
        return False
    listed = any(item.path == domain for item in volume.items)
    path = (container.env.get(PATH_ENV) or MOUNT_PATH).rstrip("/")
    mounted = any(one.path == path and one.volume == volume.name for one in container.mounts)
    return listed and mounted and domain == policy.domain


def is_untouched(pod: Pod) -> bool:
    """Whether the pod has nothing of all that: it is older than the policy, or not the operator's.

    A pod without a container main is not: nothing could be written there.
    """
    main = engine(pod)
    if main is None or {LABEL_KEY_ANNOTATION, CLUSTER_TOPOLOGY_ANNOTATION} & pod.annotations.keys():
        return False
    return _volume(pod) is None and not set(POLICY_ENV) & main.env.keys()


def _volume(pod: Pod) -> Volume | None:
    return next((one for one in pod.volumes if one.name == TOPOLOGY_VOLUME), None)


def _wanted(name: str, policy: Policy) -> str:
    weight = policy.weight
    values: Mapping[str, str] = {
        DOMAIN_ENV: policy.domain,
        ENFORCEMENT_ENV: policy.enforcement,
        WEIGHT_ENV: "" if weight is None else f"{weight:.9g}",
        ENABLED_ENV: "true",
        PATH_ENV: MOUNT_PATH,
    }
    return values[name]


def _same(name: str, told: str, wanted: str, policy: Policy) -> bool:
    if name == WEIGHT_ENV:
        return is_weight(told, policy.weight)
    if name == PATH_ENV:
        return told.rstrip("/") == wanted
    return told == wanted


# -- discovery backend -----------------------------------------------------------------------------


BACKEND_ENV: Final = "DYN_DISCOVERY_BACKEND"
KUBERNETES: Final = "kubernetes"


def backend_of(pod: Pod) -> str:
    """Its discovery backend, as its variable says, else its label; empty where neither tells."""
    main = engine(pod) or pod.main
    told = None if main is None else main.env.get(BACKEND_ENV)
    return (told or pod.labels.get(DISCOVERY_BACKEND_LABEL, "")).strip().lower()


def registered_elsewhere(pod: Pod) -> str:
    """Where to look for what it registers, if not in Kubernetes; else empty."""
    backend = backend_of(pod)
    return "" if backend in (KUBERNETES, "") else f"registered in {backend}: --discovery {backend}"


# -- ranks of a replica ----------------------------------------------------------------------------


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
