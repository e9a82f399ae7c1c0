"""Kubernetes objects as JSON: built by hand here, once, for all tests and for the actors.

Pure: no clock, no server, no randomness. Times are seconds since the epoch, uids follow from names.
"""

from tests.kube.objects.accounts import (
    operator_deployment,
    operator_objects,
    role_binding,
    service_account,
    user_binding,
    worker_accounts,
)
from tests.kube.objects.discovery import endpoint_slice, worker_metadata
from tests.kube.objects.events import event, label_missing
from tests.kube.objects.graphs import Component, Version, components_of, graph, policy_of
from tests.kube.objects.meta import Json, key_of, stamp, uid_of
from tests.kube.objects.nodes import ZONE, cluster_topology, node, pod_clique_set
from tests.kube.objects.pods import bound, label_sources, labelled, pod, running

__all__ = [
    "ZONE",
    "Component",
    "Json",
    "Version",
    "bound",
    "cluster_topology",
    "components_of",
    "endpoint_slice",
    "event",
    "graph",
    "key_of",
    "label_missing",
    "label_sources",
    "labelled",
    "node",
    "operator_deployment",
    "operator_objects",
    "pod",
    "pod_clique_set",
    "policy_of",
    "role_binding",
    "running",
    "service_account",
    "stamp",
    "uid_of",
    "user_binding",
    "worker_accounts",
    "worker_metadata",
]
