"""The cluster and the namespace that the options name."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from dynctl.adapters.ports import Cluster, ClusterWriter, Registrar
from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.settings.contexts.precedence import in_context

if TYPE_CHECKING:
    from dynctl.adapters.kubernetes.cluster import KubernetesCluster

_NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def open_cluster(options: GlobalOptions) -> Cluster:
    """The cluster, not connected yet, or a simulated one. Raises UsageProblem, or Unreachable where
    a credential plugin fails."""
    from dynctl.adapters.kubernetes.demo_cluster import PREFIX, demo_cluster

    context = in_context(options).kube_context
    if context is not None and context.startswith(PREFIX):
        return demo_cluster(context)
    return _open(options)


def open_writing_cluster(options: GlobalOptions) -> tuple[Cluster, ClusterWriter]:
    """As :func:`open_cluster`, and what writes to it."""
    from dynctl.adapters.kubernetes.cluster import KubernetesWriter

    cluster = _open(options)
    return cluster, KubernetesWriter(cluster)


def open_pod_registrar(cluster: Cluster) -> Registrar:
    """What registers the pod of this process in a cluster of :func:`open_cluster`.

    Raises UsageProblem outside a pod.
    """
    from dynctl.adapters.kubernetes.cluster import KubernetesCluster, KubernetesWriter
    from dynctl.adapters.kubernetes.registration import KubernetesRegistrar, own_pod

    assert isinstance(cluster, KubernetesCluster)
    pod = own_pod(os.environ, cluster.namespace)
    return KubernetesRegistrar(cluster, KubernetesWriter(cluster), pod)


def _open(options: GlobalOptions) -> KubernetesCluster:
    from dynctl.adapters.kubernetes import cluster as kubernetes_cluster
    from dynctl.adapters.kubernetes.demo_cluster import PREFIX

    options = in_context(options)
    if options.kube_context is not None and options.kube_context.startswith(PREFIX):
        raise UsageProblem(
            f"--kube-context {options.kube_context}: a simulated cluster, which is only read",
            "name a cluster of your kubeconfig",
        )
    return kubernetes_cluster.open_cluster(
        kubeconfig=options.kubeconfig, context=options.kube_context, timeout=options.timeout
    )


def namespaces_of(options: GlobalOptions, cluster: Cluster) -> str | None:
    """The namespace to read: the one that was named, else the context's; None: all of them.

    Raises UsageProblem.
    """
    options = in_context(options)
    if options.namespace is None:
        return None if options.all_namespaces else cluster.namespace
    if options.all_namespaces:
        raise UsageProblem(
            f"-n {options.namespace} and -A: one namespace, and all of them",
            "give one of the two",
        )
    if not _NAMESPACE.fullmatch(options.namespace):
        raise UsageProblem(
            f"-n {options.namespace}: not a namespace name, expected 1 to 63 of a-z, 0-9 and -"
        )
    return options.namespace
