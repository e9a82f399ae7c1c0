"""The operator's reconciler: pods, accounts and status of every DynamoGraphDeployment.

Modelled on the operator 1.2 and later, far simpler: no Deployments, ReplicaSets or PodCliques stand
between a graph and its pods, and a rolling update replaces pods in the order of their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dynctl.wire.kubernetes import names
from tests.kube import objects
from tests.kube.actors.acting import Clock, Hands
from tests.kube.client import ApiError
from tests.kube.objects import Json, key_of
from tests.kube.objects.graphs import graph_status
from tests.kube.objects.pods import CREATOR

MANAGER = "manager"
"""The operator's binary, as managedFields names it."""


class Operator:
    """``on`` False: its Deployment has no replicas, or the pod hangs.

    ``mutate`` changes each pod before it is created: an injection that went wrong, a template that
    says more. ``may_replace``: so many outdated pods may still be replaced, None is any number: a
    rolling update that stands still. ``makes`` False for pods that are never created.
    """

    def __init__(self, hands: Hands, clock: Clock, *, discovery: str = "kubernetes") -> None:
        self.on = True
        self.discovery = discovery
        self.grove = False
        self.may_replace: int | None = None
        self.mutate: Callable[[Json], Json] = lambda pod: pod
        self.makes: Callable[[str], bool] = lambda name: True
        self.log: list[str] = []
        self._hands, self._clock = hands, clock
        self._have_accounts: set[tuple[str, str]] = set()

    def due(self) -> float | None:
        return None

    def step(self) -> bool:
        if not self.on:
            return False
        graphs = self._hands.list("DynamoGraphDeployment")
        if not graphs:
            return False
        pods = {key_of(one): one for one in self._hands.list("Pod")}
        did = [self._reconcile(graph, pods) for graph in graphs]
        return any(did)

    def _reconcile(self, graph: Json, pods: dict[tuple[str, str], Json]) -> bool:
        namespace, name = key_of(graph)
        did = self._accounts(graph)
        mine = {
            key: pod
            for key, pod in pods.items()
            if key[0] == namespace
            and pod["metadata"].get("labels", {}).get(names.GRAPH_LABEL) == name
        }
        wanted = {key_of(one): one for one in self._pods(graph)}
        for key, pod in wanted.items():
            if key in mine and self._outdated(mine[key], pod) and self._may_replace():
                self._hands.delete("Pod", *key)
                del mine[key]
                did = True
            if key not in mine and self.makes(key[1]):
                mine[key] = self._hands.create(self.mutate(pod), manager=CREATOR)
                did = True
        for key in mine.keys() - wanted.keys():
            self._hands.delete("Pod", *key)
            did = True
        return self._report(graph, [mine[key] for key in wanted if key in mine], len(wanted)) or did

    def _pods(self, graph: Json) -> Iterator[Json]:
        levels = self._levels(graph)
        for component in objects.components_of(graph):
            for number in range(component.replicas):
                for rank in range(component.nodes):
                    yield objects.pod(
                        graph,
                        component,
                        number,
                        rank=rank,
                        levels=levels,
                        discovery=self.discovery,
                        grove=self._on_grove(graph),
                    )

    def _on_grove(self, graph: Json) -> bool:
        annotations = graph["metadata"].get("annotations", {})
        return self.grove and annotations.get(names.ENABLE_GROVE_ANNOTATION) != "false"

    def _levels(self, graph: Json) -> Sequence[tuple[str, str]]:
        wanted = (objects.policy_of(graph) or {}).get("clusterTopologyName")
        if not wanted:
            return ()
        topology = next(
            (
                found
                for kind in ("ClusterTopologyBinding", "ClusterTopology")
                if (found := self._hands.get(kind, "", wanted)) is not None
            ),
            None,
        )
        levels = [] if topology is None else topology["spec"]["levels"]
        return [(one["domain"], one["key"]) for one in levels]

    def _outdated(self, there: Json, wanted: Json) -> bool:
        has, wants = (
            one["metadata"].get("labels", {}).get(names.WORKER_HASH_LABEL)
            for one in (there, wanted)
        )
        return wants is not None and has != wants

    def _may_replace(self) -> bool:
        if self.may_replace is None:
            return True
        self.may_replace -= 1
        return self.may_replace >= 0

    def _accounts(self, graph: Json) -> bool:
        """Once for each graph: what a person takes away later stays away until a restart."""
        key = key_of(graph)
        if key in self._have_accounts:
            return False
        for body in objects.worker_accounts(*key):
            self._ensure(body)
        if self._on_grove(graph):
            self._ensure(objects.pod_clique_set(*key))
        self._have_accounts.add(key)
        return True

    def _ensure(self, body: Json) -> None:
        try:
            self._hands.create(body, manager=MANAGER)
        except ApiError as refused:
            if refused.status != 409:
                raise

    def _report(self, graph: Json, pods: Sequence[Json], wanted: int) -> bool:
        ready = len(pods) == wanted and all(map(_ready, pods))
        state = "successful" if ready else "pending"
        status = graph_status(graph, state)
        there = graph.get("status", {})
        if (there.get("state"), there.get("observedGeneration")) == (
            state,
            status["observedGeneration"],
        ):
            return False
        status["conditions"][0]["lastTransitionTime"] = objects.stamp(self._clock.now)
        self._hands.merge(
            "DynamoGraphDeployment",
            *key_of(graph),
            {"status": status},
            subresource="status",
            manager=MANAGER,
        )
        return True


def _ready(pod: Json) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
