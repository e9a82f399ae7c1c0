"""Render the topology settings of worker pods without an operator, and Grove topologies.

The pod settings are a strategic merge patch for a workload with a pod template (Deployment,
StatefulSet, ..): containers, volumes and variables are merged by name, so it can be applied again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

from dynctl.base.errors import UsageProblem
from dynctl.base.worker_environment import DEFAULT_MOUNT_PATH
from dynctl.manifests.lint.levels import level_problems
from dynctl.manifests.transfer_policy import KNOWN_LABELS, is_domain, is_label_key

VOLUME: Final = "topology-labels"
#: Labels that Kubernetes 1.35 copies from the node to the pod (1.33: with a feature gate).
COPIED_BY_KUBERNETES: Final = (KNOWN_LABELS["zone"], KNOWN_LABELS["region"])
_LONGEST: Final = 63


class StalePolicy(StrEnum):
    """Which labels that differ from the node's `topology sync` replaces.

    A worker reads its topology once, when it starts, so a label that is replaced later does not
    reach the router before the pod is created again.
    """

    REPORT = "report"
    """none"""
    STARTING = "starting"
    """those of pods whose engine has not run yet"""
    ALWAYS = "always"
    """all"""


@dataclass(frozen=True, slots=True)
class InitWait:
    """An init container that waits for the topology. ``image`` must contain dynctl."""

    image: str
    timeout: str


@dataclass(frozen=True, slots=True)
class PodTopology:
    """The topology settings of a pod.

    ``labels``: domain -> pod label, with the transfer domain. ``weight``: 0..1, with preferred.
    """

    domain: str
    labels: Mapping[str, str]
    enforcement: Literal["required", "preferred"] = "required"
    weight: float | None = None
    mount_path: str = DEFAULT_MOUNT_PATH
    container: str = "main"
    init_wait: InitWait | None = None


def pod_topology(
    domain: str,
    label_keys: Sequence[str],
    enforcement: str,
    weight: float | None,
    *,
    mount_path: str = DEFAULT_MOUNT_PATH,
    container: str = "main",
    init_wait: InitWait | None = None,
) -> PodTopology:
    """Validate the options. ``label_keys``: ``DOMAIN=KEY``, or ``KEY`` for the transfer domain.

    Raises UsageProblem for settings that a worker or Kubernetes would refuse.
    """
    labels = _labels(domain, label_keys)
    _check_enforcement(enforcement, weight)
    if not mount_path.startswith("/") or ":" in mount_path or len(mount_path) < 2:
        raise UsageProblem(f"--mount-path {mount_path}: expected an absolute path without :")
    if not is_domain(container) or len(container) > _LONGEST:
        raise UsageProblem(f"--container {container}: invalid name of a container")
    return PodTopology(
        domain,
        labels,
        "required" if enforcement == "required" else "preferred",
        weight,
        mount_path.rstrip("/"),
        container,
        init_wait,
    )


def _check_enforcement(enforcement: str, weight: float | None) -> None:
    if enforcement not in ("required", "preferred"):
        raise UsageProblem(f"--enforcement {enforcement}: expected required or preferred")
    if enforcement == "preferred" and weight is None:
        raise UsageProblem(
            "--enforcement preferred needs --weight, a number 0..1",
            "for example: --enforcement preferred --weight 0.85",
        )
    if enforcement == "required" and weight is not None:
        raise UsageProblem(
            f"--weight {weight:g}: required never leaves the domain, so it has no weight",
            "remove it, or use --enforcement preferred",
        )
    if weight is not None and not 0 <= weight <= 1:
        raise UsageProblem(f"--weight {weight:g}: expected a number 0..1")


def pod_patch(pod: PodTopology) -> dict[str, Any]:
    """The strategic merge patch of a workload with a pod template."""
    mount = {"name": VOLUME, "mountPath": pod.mount_path, "readOnly": True}
    env = [{"name": name, "value": value} for name, value in environment(pod).items()]
    spec: dict[str, Any] = {}
    if pod.init_wait is not None:
        command = ["dynctl", "topology", "wait", "--path", pod.mount_path]
        command += ["--domain", pod.domain, "--timeout", pod.init_wait.timeout]
        spec["initContainers"] = [
            {
                "name": "topology-wait",
                "image": pod.init_wait.image,
                "command": command,
                "volumeMounts": [mount],
            }
        ]
    spec["containers"] = [{"name": pod.container, "env": env, "volumeMounts": [dict(mount)]}]
    items = [
        {"path": domain, "fieldRef": {"fieldPath": f"metadata.labels['{key}']"}}
        for domain, key in pod.labels.items()
    ]
    spec["volumes"] = [{"name": VOLUME, "downwardAPI": {"items": items}}]
    return {"spec": {"template": {"spec": spec}}}


def environment(pod: PodTopology) -> dict[str, str]:
    """The topology variables of a worker."""
    values = {
        "DYN_TOPOLOGY_ENABLED": "true",
        "DYN_TOPOLOGY_MOUNT_PATH": pod.mount_path,
        "DYN_KV_TRANSFER_DOMAIN": pod.domain,
        "DYN_KV_TRANSFER_ENFORCEMENT": pod.enforcement,
    }
    if pod.weight is not None:
        values["DYN_KV_TRANSFER_PREFERRED_WEIGHT"] = f"{pod.weight:.6f}".rstrip("0").rstrip(".")
    return values


def needs_copying(pod: PodTopology) -> list[str]:
    """The labels that Kubernetes never copies from the node to the pod."""
    return [key for key in pod.labels.values() if key not in COPIED_BY_KUBERNETES]


def cluster_topology(kind: str, name: str, levels: Sequence[str]) -> dict[str, Any]:
    """A Grove topology; ``levels`` are ``DOMAIN=LABEL-KEY``, from broad to narrow."""
    kinds = ("ClusterTopologyBinding", "ClusterTopology")
    if kind not in kinds:
        raise UsageProblem(f"--kind {kind}: expected {' or '.join(kinds)}")
    _check_name("--name", name)
    if not levels:
        raise UsageProblem(
            "no level; expected --level DOMAIN=LABEL-KEY, from broad to narrow",
            "for example: --level zone=topology.kubernetes.io/zone --level rack=nvidia.com/rack",
        )
    pairs = [_pair("--level", level) for level in levels]
    listed = [{"domain": domain, "key": key} for domain, key in pairs]
    for problem, fix in level_problems(listed):
        raise UsageProblem(f"--level: Grove would refuse it: {problem}", fix)
    return {
        "apiVersion": "grove.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"levels": listed},
    }


#: API group, resources, verbs of `topology sync`. Nodes and topologies have no namespace.
_CLUSTER_RULES: Final = (
    ("", ["nodes"], ["list", "watch"]),
    ("grove.io", ["clustertopologies", "clustertopologybindings"], ["list"]),
)
_POD_RULES: Final = (
    ("", ["pods"], ["list", "watch", "patch"]),
    ("", ["events"], ["create", "patch"]),
)
_LEASE_RULES: Final = (("coordination.k8s.io", ["leases"], ["create", "get", "update"]),)
_RBAC: Final = "rbac.authorization.k8s.io"
_STATUS_PORT: Final = 8081
#: Two minutes: on a node under load Python's imports alone can take 30 s.
_TIME_TO_START: Final = {"periodSeconds": 2, "failureThreshold": 60}
#: The kubelet probes the address of the pod.
_ANY_ADDRESS: Final = "0.0.0.0"  # noqa: S104


def sync_controller(
    namespace: str, image: str, *, watched: str | None, stale: str, replicas: int = 2
) -> dict[str, Any]:
    """A List of what runs `topology sync` in ``namespace`` with the least permissions.

    ``watched``: the namespace of the workers; None: all. ``image`` contains dynctl. Raises
    UsageProblem.
    """
    _check_name("--controller-namespace", namespace)
    if watched is not None:
        _check_name("--watch-namespace", watched)
    if stale not in list(StalePolicy):
        raise UsageProblem(f"--stale {stale}: expected {' or '.join(StalePolicy)}")
    if not image.strip() or image != image.strip():
        raise UsageProblem(f"--image {image!r}: expected the name of an image")
    name = "dynctl-topology-sync"
    where = ["-A"] if watched is None else ["-n", watched]
    lease = watched if watched is not None else namespace
    account = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    labels = {"app.kubernetes.io/name": name}

    def rbac(
        kind: str, rules: Sequence[tuple[str, list[str], list[str]]], inside: str, end: str
    ) -> list[dict[str, Any]]:
        about: dict[str, Any] = {"name": f"{name}{end}", "labels": labels}
        if inside:
            about["namespace"] = inside
        api = f"{_RBAC}/v1"
        return [
            {
                "apiVersion": api,
                "kind": kind,
                "metadata": about,
                "rules": [
                    {"apiGroups": [group], "resources": resources, "verbs": verbs}
                    for group, resources, verbs in rules
                ],
            },
            {
                "apiVersion": api,
                "kind": f"{kind}Binding",
                "metadata": about,
                "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": f"{name}{end}"},
                "subjects": [account],
            },
        ]

    if watched is None:
        rights = rbac("ClusterRole", (*_CLUSTER_RULES, *_POD_RULES), "", "")
    else:
        rights = rbac("ClusterRole", _CLUSTER_RULES, "", f"-{watched}-nodes")
        rights += rbac("Role", _POD_RULES, watched, "")
    rights += rbac("Role", _LEASE_RULES, lease, "-lease")
    live = {"httpGet": {"path": "/healthz", "port": "status"}, "timeoutSeconds": 5}
    ready = {"httpGet": {"path": "/readyz", "port": "status"}, "timeoutSeconds": 5}
    container = {
        "name": "sync",
        "image": image,
        "args": [
            *("topology", "sync", *where, "--stale", stale, "--lease-namespace", lease),
            *("--system-host", _ANY_ADDRESS, "--system-port", str(_STATUS_PORT)),
        ],
        "ports": [{"name": "status", "containerPort": _STATUS_PORT}],
        "startupProbe": {**live, **_TIME_TO_START},
        "livenessProbe": live,
        "readinessProbe": ready,
        "resources": {"requests": {"cpu": "20m", "memory": "96Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "serviceAccountName": name,
                    "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
                    "containers": [container],
                },
            },
        },
    }
    about = {"name": name, "namespace": namespace, "labels": labels}
    service_account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about}
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [service_account, *rights, deployment],
    }


def _check_name(option: str, name: str) -> None:
    if not is_domain(name) or len(name) > _LONGEST:
        raise UsageProblem(f"{option} {name}: expected lower-case letters, digits and -")


def _labels(domain: str, label_keys: Sequence[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for given in label_keys:
        named, key = _pair("--label-key", given) if "=" in given else (domain, given)
        if named in labels:
            raise UsageProblem(f"--label-key {given}: {named} has {labels[named]} already")
        labels[named] = key
    if domain not in labels:
        if domain not in KNOWN_LABELS:
            raise UsageProblem(
                f"--domain {domain}: its label is unknown; expected --label-key",
                f"for example: --domain {domain} --label-key {domain}=nvidia.com/{domain}",
            )
        labels = {domain: KNOWN_LABELS[domain], **labels}
    for named, key in labels.items():
        if not is_domain(named) or len(named) > _LONGEST:
            raise UsageProblem(
                f"--domain {named!r}: expected up to {_LONGEST} lower-case letters, digits and -"
            )
        if not is_label_key(key):
            raise UsageProblem(
                f"--label-key {key!r}: invalid name of a label",
                "for example: --label-key topology.kubernetes.io/zone",
            )
    return labels


def _pair(option: str, text: str) -> tuple[str, str]:
    domain, separator, key = text.partition("=")
    if not separator or not domain or not key:
        raise UsageProblem(
            f"{option} {text}: expected DOMAIN=LABEL-KEY",
            f"for example: {option} zone=topology.kubernetes.io/zone",
        )
    return domain, key
