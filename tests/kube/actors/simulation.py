"""A living cluster: an API server, and actors around it that a fake clock drives.

Nothing sleeps: where all actors wait, the clock jumps to when the first of them goes on.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.kube import crds, deployment, objects
from tests.kube.actors.acting import Actor, Clock, Hands
from tests.kube.actors.deployments import Deployments
from tests.kube.actors.frontends import Frontends
from tests.kube.actors.kubelet import Kubelet, Sandbox
from tests.kube.actors.labels import LabelController
from tests.kube.actors.moment import Moment
from tests.kube.actors.operator import Operator
from tests.kube.actors.scheduler import Scheduler
from tests.kube.actors.slices import SliceWriter
from tests.kube.actors.worker import Workers
from tests.kube.api_server import ADMIN_TOKEN, ApiServer
from tests.kube.client import ApiError, LocalApi
from tests.kube.deployment import is_worker
from tests.kube.objects import Component, Json, key_of
from tests.kube.objects.accounts import OPERATOR_NAME, OPERATOR_NAMESPACE, VIEWER_RULES, role

VIEWER_TOKEN = "viewer"
VIEWER_ROLE = "dynctl-verify"
OPERATOR_ROLE = f"{OPERATOR_NAME}-role"
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_MOST_ROUNDS = 500
_KINDS = (
    *("Node", "Deployment", "DynamoGraphDeployment", "ClusterTopologyBinding", "ClusterTopology"),
    *("PodCliqueSet", "Pod", "Event", "EndpointSlice", "DynamoWorkerMetadata"),
)


class Simulation:
    """Actors at ``server``, which must run with ``clock`` and have Dynamo's definitions.

    Where the server has RBAC each actor acts as its own service account. ``discovery``: what the
    operator writes into pods, kubernetes or etcd. Use with ``with``: it keeps files and threads.
    """

    def __init__(self, server: ApiServer, clock: Clock, *, discovery: str = "kubernetes") -> None:
        self.server, self.clock, self.store = server, clock, server.store
        self.root = Path(tempfile.mkdtemp(prefix="kubelet-"))
        self._hands: dict[str, Hands] = {}
        server.add_user(VIEWER_TOKEN, "verifier")
        admin = self.hands()
        manager = self.account(OPERATOR_NAMESPACE, OPERATOR_NAME)
        self.deployments = Deployments(admin)
        self.operator = Operator(manager, clock, discovery=discovery)
        self.scheduler = Scheduler(admin, clock)
        self.labels = LabelController(manager, clock)
        self.kubelet = Kubelet(admin, clock, server, self.root)
        self.workers = Workers(self.kubelet, self.account, clock)
        self.slices = SliceWriter(admin, clock)
        self.frontends = Frontends(admin, server)
        self.remembering = (
            *(self.operator, self.scheduler, self.labels, self.kubelet, self.workers, self.slices),
            self.deployments,
        )
        self._actors: Sequence[Actor] = (
            *(self.deployments, self.operator, self.scheduler, self.labels),
            *(self.kubelet, self.workers, self.slices, self.frontends),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.frontends.close()
        shutil.rmtree(self.root, ignore_errors=True)

    # -- people ------------------------------------------------------------------------------------

    def hands(self, token: str = ADMIN_TOKEN) -> Hands:
        """A user's, by token."""
        if token not in self._hands:
            self._hands[token] = Hands(LocalApi(self.server, token), self.store.changed)
        return self._hands[token]

    def account(self, namespace: str, name: str) -> Hands:
        """Those of a service account."""
        token = f"{namespace}.{name}"
        if token not in self._hands:
            self.server.add_service_account(token, namespace, name)
        return self.hands(token)

    def viewer_kubeconfig(self, path: Path, namespace: str = "prod") -> Path:
        """Of a user who may do what verify asks for and nothing else."""
        return self.server.kubeconfig(path, token=VIEWER_TOKEN, namespace=namespace)

    def forbid(self, verb: str, resource: str, role_name: str = VIEWER_ROLE) -> None:
        """Take a verb on a resource (``pods/exec``) out of a ClusterRole (the viewer's)."""
        body = self.store.get("ClusterRole", role_name)
        rules = []
        for rule in body["rules"]:
            rest = [one for one in rule["resources"] if one != resource]
            if rest:
                rules.append({**rule, "resources": rest})
            verbs = [one for one in rule["verbs"] if one != verb]
            if resource in rule["resources"] and verbs:
                rules.append({**rule, "resources": [resource], "verbs": verbs})
        self.store.update({**body, "rules": rules})

    # -- time --------------------------------------------------------------------------------------

    def settle(self, within: float = 120.0) -> None:
        """Run until nothing happens any more, or ``within`` seconds have passed for the cluster.

        A worker that restarts for ever never settles; then those seconds pass.
        """
        self._until(self.clock.now + within, idle=False)

    def advance(self, seconds: float) -> None:
        """Let so much time pass, with everything that happens meanwhile."""
        self._until(self.clock.now + seconds, idle=True)

    def _until(self, end: float, *, idle: bool) -> None:
        for _ in range(_MOST_ROUNDS):
            did = [actor.step() for actor in self._actors]
            if any(did):
                continue
            due = min((at for one in self._actors if (at := one.due()) is not None), default=None)
            if due is None or due > end:
                if idle or due is not None:
                    self.clock.to(end)
                return
            self.clock.to(due)
        raise AssertionError(f"the cluster does not come to rest in {_MOST_ROUNDS} rounds")

    # -- objects -----------------------------------------------------------------------------------

    def apply(self, *bodies: Mapping[str, Any]) -> None:
        """Create, or change what is there (RFC 7396), as an administrator; the API checks it."""
        hands = self.hands()
        for body in bodies:
            try:
                hands.create(body, manager="kubectl-create")
            except ApiError as refused:
                if refused.status != 409:
                    raise
                hands.merge(body["kind"], *key_of(body), body, manager="kubectl-edit")

    def kubectl_apply(self, body: Mapping[str, Any]) -> None:
        """As :meth:`apply`, and it is written down what was applied, as kubectl does it."""
        result = json.dumps(body, separators=(",", ":")) + "\n"
        metadata = dict(body["metadata"])
        metadata["annotations"] = {**metadata.get("annotations", {}), LAST_APPLIED: result}
        self.apply({**body, "metadata": metadata})

    def regraph(
        self,
        change: Callable[[list[Component]], list[Component]],
        name: str = "my-llm",
        namespace: str = "prod",
    ) -> None:
        """Give a graph other components."""
        graph = self.store.get("DynamoGraphDeployment", name, namespace, version="v1beta1")
        wanted = objects.graph(namespace, name, change(objects.components_of(graph)))
        self.apply(wanted)

    def sandbox(self, pod: str) -> Sandbox:
        """The kubelet's state of a pod; KeyError for an unknown pod."""
        found = {one.pod["metadata"]["name"]: one for one in self.kubelet.sandboxes.values()}
        return found[pod]

    def pods(self, component: str = "") -> list[str]:
        """Names of pods, of components whose name begins so."""
        return [
            body["metadata"]["name"]
            for body in self.store.list("Pod")
            if body["metadata"]
            .get("labels", {})
            .get("nvidia.com/dynamo-component", "")
            .startswith(component)
        ]

    def pod(self, name: str, namespace: str = "prod") -> Json:
        return self.store.get("Pod", name, namespace)

    def edit(self, kind: str, name: str, patch: Mapping[str, Any], namespace: str = "prod") -> None:
        """Merge, past all checks: what a cluster's past or another tool has left there."""
        self.store.patch_merge(kind, name, patch, namespace)

    def recreate(self, *names: str, namespace: str = "prod") -> None:
        """Delete pods; the operator creates them again at the next settle."""
        for name in names:
            self.store.delete("Pod", name, namespace)

    def restart_operator(self) -> None:
        """As kubectl rollout restart does."""
        self.labels.restart()

    def objects(self) -> list[Json]:
        """Everything that facts are read from, as JSON."""
        found: list[Json] = []
        for kind in _KINDS:
            with contextlib.suppress(KeyError):  # not served here
                found += self.store.list(kind)
        return found

    def files(self) -> dict[tuple[str, str], dict[str, str]]:
        """Pod -> file -> content below the topology mount now, of running containers."""
        found: dict[tuple[str, str], dict[str, str]] = {}
        for one in self.kubelet.sandboxes.values():
            folder = one.root / "etc/dynamo/topology"
            if one.process is not None and folder.is_dir():
                found[key_of(one.pod)] = {
                    path.name: path.read_text()
                    for path in sorted(folder.iterdir())
                    if not path.name.startswith(".")
                }
        return found

    def logs(self) -> dict[tuple[str, str], str]:
        """Worker pod -> what its main container has logged, of both runs that are kept."""
        workers = {key_of(one.pod) for one in self.kubelet.sandboxes.values() if is_worker(one.pod)}
        found: dict[tuple[str, str], str] = {}
        earlier_first = sorted(self.server.logs.items(), key=lambda item: not item[0][3])
        for (namespace, pod, _, _), text in earlier_first:
            if (namespace, pod) in workers:
                found[namespace, pod] = found.get((namespace, pod), "") + text
        return found


@contextmanager
def simulation(
    *,
    rbac: bool = True,
    tls: bool = False,
    discovery: str = "kubernetes",
    now: float = deployment.NOW,
    definitions: Iterable[Json] | None = None,
) -> Iterator[Simulation]:
    """A cluster with an operator and nothing else. ``definitions`` None: all of Dynamo's and
    Grove's."""
    clock = Clock(now)
    with ApiServer(clock=clock, rbac=rbac, tls=tls) as server:
        for definition in (
            (
                *(crds.graph_crd(), crds.worker_metadata_crd()),
                *(crds.cluster_topology_crd(), crds.pod_clique_set_crd()),
            )
            if definitions is None
            else definitions
        ):
            server.store.create(definition)
        server.convert[crds.GRAPHS] = crds.convert_graph
        for body in objects.operator_objects():
            server.store.create(body)
        server.store.create(role("", VIEWER_ROLE, VIEWER_RULES))
        server.store.create(objects.user_binding(VIEWER_ROLE, "verifier"))
        with Simulation(server, clock, discovery=discovery) as found:
            yield found


def nothing(sim: Simulation) -> object:
    """Change nothing."""
    return None


def _as_it_is(given: Any) -> Any:
    return given


_MOMENTS: dict[str, Moment] = {}
"""What :func:`living` gives, by its arguments."""


@contextmanager
def living(
    *,
    namespace: str = "prod",
    name: str = "my-llm",
    zones: Sequence[str] = ("us-east-1a", "us-east-1b"),
    prefill: int = 2,
    decode: int = 4,
    nodes_per_zone: int = 2,
    frontends: int = 1,
    enforcement: str = "required",
    weight: float | None = None,
    grove: bool = False,
    pinned: bool = True,
    parts: Callable[[list[Component]], list[Component]] = _as_it_is,
    change: Callable[[Json], Json] = _as_it_is,
    prepare: Callable[[Simulation], object] = nothing,
    age: float = 3600.0,
    **cluster: Any,
) -> Iterator[Simulation]:
    """The deployment of ``deployment.healthy``, brought about by the actors, ``age`` seconds ago.

    ``parts`` and ``change`` see its components and the graph before it is applied; ``prepare``
    sees the cluster then, which has nodes and an operator. ``cluster``: what :func:`simulation`
    takes.

    The first of a process with the same arguments is brought about; the others begin at its end.
    """
    common = (parts, change, prepare) == (_as_it_is, _as_it_is, nothing)
    common = common and "definitions" not in cluster
    sizes = (namespace, name, tuple(zones), prefill, decode, nodes_per_zone, frontends)
    key = repr((sizes, enforcement, weight, grove, pinned, age, sorted(cluster.items())))
    if common and key in _MOMENTS:
        with simulation(**cluster) as sim:
            _MOMENTS[key].begin(sim)
            yield sim
        return
    if enforcement == "preferred" and weight is None:
        weight = 0.85
    components = deployment.components(
        zones, prefill=prefill, decode=decode, frontends=frontends, pinned=pinned
    )
    graph = objects.graph(
        namespace,
        name,
        parts(components),
        policy=deployment.policy(enforcement=enforcement, weight=weight, grove=grove),
    )
    with simulation(**cluster) as sim:
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        sim.store.create(space)
        sim.apply(*deployment.nodes(zones, nodes_per_zone))
        if grove:
            sim.operator.grove = True
            sim.apply(objects.cluster_topology(deployment.LEVELS))
        prepare(sim)
        sim.kubectl_apply(change(graph))
        sim.settle()
        sim.advance(age)
        if common:
            _MOMENTS[key] = Moment(sim)
        yield sim
