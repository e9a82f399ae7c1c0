"""The permissions that verify, the operator and the workers need, and reviews of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dynctl.adapters.ports import AccessReview, Cluster, ClusterRefusal
from dynctl.health.facts import Unread
from dynctl.manifests.graphs import GRAPH_GROUP, GRAPHS, WORKER_TYPES
from dynctl.verify.cluster_facts import Account, ClusterFacts
from dynctl.wire.kubernetes.forbidden import lacking
from dynctl.wire.kubernetes.names import COMPONENT_TYPE_LABEL
from dynctl.wire.kubernetes.worker_metadata import PLURAL

SETS: Final = "podcliquesets"
#: The most service accounts of each kind; a deployment has one or two.
_MOST_ACCOUNTS: Final = 50


def verify_reviews(namespace: str | None, grove: Iterable[str]) -> tuple[AccessReview, ...]:
    """The permissions of verify. ``grove``: the resources of Grove that are read."""
    inside = namespace
    return (
        AccessReview("list", "nodes"),
        AccessReview("list", GRAPHS, GRAPH_GROUP, inside),
        AccessReview("list", PLURAL, GRAPH_GROUP, inside),
        AccessReview("list", "pods", "", inside),
        AccessReview("list", "events", "", inside),
        AccessReview("list", "endpointslices", "discovery.k8s.io", inside),
        # Over WebSocket these start with a GET; newer API servers require create as well.
        AccessReview("get", "pods/exec", "", inside),
        AccessReview("create", "pods/exec", "", inside),
        AccessReview("get", "pods/portforward", "", inside),
        AccessReview("create", "pods/portforward", "", inside),
        AccessReview("get", "pods/log", "", inside),
        AccessReview("list", "deployments", "apps"),
        AccessReview("get", "customresourcedefinitions", "apiextensions.k8s.io"),
        *(
            AccessReview("list", name, "grove.io", inside if name == SETS else None)
            for name in grove
        ),
    )


def operator_reviews(
    topologies: Iterable[str], namespaces: Iterable[str] = ()
) -> tuple[AccessReview, ...]:
    """The permissions of the operator for topology; ``namespaces``: of its graphs."""
    return (
        AccessReview("get", "nodes"),
        AccessReview("patch", "pods"),
        *(AccessReview("patch", "pods", "", space) for space in namespaces),
        *(AccessReview("get", name, "grove.io") for name in topologies),
    )


def worker_reviews(namespace: str) -> tuple[AccessReview, ...]:
    """The permissions of a worker to register and to find other workers."""
    return (
        AccessReview("create", PLURAL, GRAPH_GROUP, namespace),
        AccessReview("patch", PLURAL, GRAPH_GROUP, namespace),
        AccessReview("list", PLURAL, GRAPH_GROUP, namespace),
        AccessReview("list", "endpointslices", "discovery.k8s.io", namespace),
    )


def operator_users(facts: ClusterFacts) -> list[str]:
    """The service accounts of the operators."""
    operators = () if isinstance(facts.operators, Unread) else facts.operators
    users = {_user(operator.namespace, operator.service_account) for operator in operators}
    return sorted(users)[:_MOST_ACCOUNTS]


def graph_namespaces(facts: ClusterFacts) -> list[str]:
    """The namespaces of the graphs."""
    graphs = () if isinstance(facts.graphs, Unread) else facts.graphs
    return sorted({graph.namespace for graph in graphs})[:_MOST_ACCOUNTS]


def worker_users(facts: ClusterFacts) -> list[tuple[str, str]]:
    """The service accounts of worker pods, each with its namespace."""
    pods = () if isinstance(facts.pods, Unread) else facts.pods
    users = {
        (_user(pod.namespace, pod.service_account or "default"), pod.namespace)
        for pod in pods
        if pod.labels.get(COMPONENT_TYPE_LABEL, "").lower() in WORKER_TYPES
    }
    return sorted(users)[:_MOST_ACCOUNTS]


def _user(namespace: str, account: str) -> str:
    return f"system:serviceaccount:{namespace}:{account}"


def account(cluster: Cluster, user: str, wanted: tuple[AccessReview, ...]) -> Account:
    """The permissions of a service account; unread if access reviews are not permitted."""
    space = user.split(":")[2]
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{space}", "system:authenticated")
    allowed: dict[AccessReview, bool] = {}
    for review in wanted:
        try:
            allowed[review] = cluster.allowed(review, user=user, groups=groups)
        except ClusterRefusal as refusal:
            return Account(user, unread(refusal))
    return Account(user, allowed)


# -- refused requests ------------------------------------------------------------------------------


#: The only permission of verify that DYT0004 does not list: reviews of other accounts.
_UNLISTED: Final = "subjectaccessreviews"


def unread(refusal: ClusterRefusal) -> Unread:
    """A refusal as ``no permission to list nodes (DYT0004)``, else as the server's message."""
    if not refusal.forbidden:
        return Unread(f"{refusal.message} (HTTP {refusal.status})")
    permission = lacking(refusal.message)
    if not permission:
        return Unread(refusal.message, "request this permission")
    listed = "" if _UNLISTED in permission else " (DYT0004)"
    return Unread(permission + listed, "request this permission")
