"""Facts of a whole cluster, read from Kubernetes objects as JSON, and checks judged on them.

Tests change one object of a healthy deployment and see which checks notice.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from dynctl.adapters.ports import AccessReview
from dynctl.findings.catalogue import catalogue
from dynctl.findings.report import CheckResult, State
from dynctl.findings.runner import Check, run
from dynctl.health.facts import Unread
from dynctl.manifests.files import Manifest
from dynctl.verify.cluster_facts import Account, ClusterFacts, GraphSchema, VerifyFacts
from dynctl.verify.join import JoinedFacts, join
from dynctl.wire.kubernetes import objects as read
from dynctl.wire.kubernetes.worker_metadata import worker_metadata
from tests.kube import deployment
from tests.kube.objects import Json, accounts

REFUSED: Final = Unread("forbidden")
OPERATOR: Final = f"system:serviceaccount:{accounts.OPERATOR_NAMESPACE}:{accounts.OPERATOR_NAME}"
FIELDS: Final = ("labelKey", "clusterTopologyName", "domain", "enforcement", "preferredWeight")
SERVED: Final = {
    "dynamographdeployments.nvidia.com": ("v1beta1", "v1alpha1"),
    "dynamoworkermetadatas.nvidia.com": ("v1alpha1",),
    "clustertopologybindings.grove.io": ("v1alpha1",),
    "podcliquesets.grove.io": ("v1alpha1",),
}
ACCESS: Final = (
    AccessReview("list", "nodes"),
    AccessReview("list", "pods", "", "prod"),
    AccessReview("create", "pods/exec", "", "prod"),
    AccessReview("list", "dynamoworkermetadatas", "nvidia.com", "prod"),
)
OPERATOR_ACCESS: Final = (
    AccessReview("get", "nodes"),
    AccessReview("patch", "pods"),
    AccessReview("get", "clustertopologybindings", "grove.io"),
)


class Cluster:
    """A healthy deployment whose objects tests change before they are read."""

    def __init__(self, **wanted: Any) -> None:
        """``wanted``: what :func:`tests.kube.deployment.healthy` takes."""
        self.bodies: list[Json] = copy.deepcopy(deployment.healthy(**wanted))

    def all(self, kind: str) -> list[Json]:
        return [one for one in self.bodies if one["kind"] == kind]

    def one(self, kind: str, name: str = "") -> Json:
        """The object of this kind and name; the first of its kind without a name."""
        return next(o for o in self.all(kind) if name in ("", o["metadata"]["name"]))

    @property
    def graph(self) -> Json:
        return self.one("DynamoGraphDeployment")

    @property
    def policy(self) -> Json:
        found: Json = self.graph["spec"]["experimental"]["kvTransferPolicy"]
        return found

    def labels(self, node: str) -> dict[str, str]:
        found: dict[str, str] = self.one("Node", node)["metadata"]["labels"]
        return found

    def component(self, name: str) -> Json:
        found: Json = next(o for o in self.graph["spec"]["components"] if o["name"] == name)
        return found

    def facts(self, **changes: Any) -> ClusterFacts:
        """The gathered facts, with some fields changed."""
        topologies = [*self.all("ClusterTopologyBinding"), *self.all("ClusterTopology")]
        result = ClusterFacts(
            "prod-east (https://10.0.0.1:6443)",
            deployment.NOW,
            "v1.33.1",
            namespaces=("prod",),
            served=SERVED,
            schemas=tuple(GraphSchema(v, frozenset(FIELDS)) for v in ("v1alpha1", "v1beta1")),
            access=dict.fromkeys(ACCESS, True),
            graphs=_manifests(self.all("DynamoGraphDeployment")),
            topologies=_manifests(topologies),
            nodes=tuple(map(read.node, self.all("Node"))),
            pods=tuple(map(read.pod, self.all("Pod"))),
            endpoints=tuple(
                one for body in self.all("EndpointSlice") for one in read.endpoints(body)
            ),
            metadata=tuple(map(worker_metadata, self.all("DynamoWorkerMetadata"))),
            operators=tuple(map(read.kube_deployment, self.all("Deployment"))),
            operator_accounts=(Account(OPERATOR, dict.fromkeys(OPERATOR_ACCESS, True)),),
            grove_sets=tuple(
                f"{one['metadata']['namespace']}/{one['metadata']['name']}"
                for one in self.all("PodCliqueSet")
            ),
        )
        return replace(result, **changes)

    def joined(self, **changes: Any) -> JoinedFacts:
        return join(VerifyFacts(cluster=self.facts(**changes)))


def judged(checks: Sequence[Check[JoinedFacts]], joined: JoinedFacts) -> dict[str, CheckResult]:
    """Code -> how the check stands; texts are filled in, so arguments must fit their code."""
    report = run([("checks", checks)], joined, catalogue())
    for check in report.checks:
        for one in check.findings:
            assert not re.search(r"\{[a-z_]+\}", one.value + one.expected + one.fix), check.code
            assert re.fullmatch(r"[A-Z]\w+ \S+", one.subject), one.subject
    return {check.code: check for check in report.checks}


def wrong(results: dict[str, CheckResult]) -> dict[str, list[str]]:
    """Code -> subjects, of what was found."""
    return {c: [one.subject for one in r.findings] for c, r in results.items() if r.findings}


def skipped(result: CheckResult) -> tuple[bool, bool]:
    """Whether it was skipped, and because something could not be read."""
    return result.state is State.SKIP, result.unread


def _manifests(bodies: Iterable[Json]) -> tuple[Manifest, ...]:
    return tuple(Manifest("cluster", body) for body in bodies)
