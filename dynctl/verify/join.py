"""Join the facts into graphs and workers, each worker with its chain of custody. Pure.

Join keys: node by the pod's nodeName; endpoint by its targetRef; metadata by its name and owner;
registrations as :mod:`dynctl.verify.claims` has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dynctl.adapters.ports import DiscoveryEntry, Listed
from dynctl.health.deployment import Deployment, RegisteredWorker, Registrations
from dynctl.health.facts import Unread
from dynctl.manifests.graphs import (
    DISAGGREGATED,
    WORKER_TYPES,
    ClusterTopology,
    Component,
    Graph,
    graphs_of,
    role_of,
    topologies_of,
)
from dynctl.verify.chain import ChainLink, DomainChain, LinkName, WorkerChain
from dynctl.verify.claims import AddressClaims, CardKey, MetadataClaims, card_key
from dynctl.verify.cluster_facts import ClusterFacts, Listing, PodKey, RouterView, T, VerifyFacts
from dynctl.verify.graph_policy import GraphPolicy, policy_of, policy_of_pods
from dynctl.verify.pod_spec import is_encoder, is_follower, replica_of, why_not_in_kubernetes
from dynctl.wire.kubernetes.names import (
    COMPONENT_LABEL,
    COMPONENT_TYPE_LABEL,
    GRAPH_LABEL,
    SUB_COMPONENT_TYPE_LABEL,
)
from dynctl.wire.kubernetes.objects import Endpoint, Node, Pod
from dynctl.wire.kubernetes.worker_metadata import WorkerMetadata
from router_core import Role

_TAINT: Final = "dynamo.topology/"
_FOLLOWS: Final = "only the leader of a replica registers"
_NO_MODEL: Final = "an encoder registers no model"
_EARLIER: Final = "registered by an earlier pod of this name"
_REGISTRY: Final = ""
"""The key of the registrations in another backend than Kubernetes."""
_ENDED: Final = ("Succeeded", "Failed")
NOT_SAMPLED: Final = "not read; --exec all reads all files"


@dataclass(frozen=True, slots=True)
class VerifiedGraph:
    """One graph and its pods. ``graph`` None: only its pods could be read.

    ``name`` is ``namespace/name``. ``pods``: all its pods that are not being deleted and have not
    ended; ``workers``: those into which the operator writes the policy.
    """

    name: str
    graph: Graph | None
    policy: GraphPolicy | None
    pods: tuple[Pod, ...] = ()
    workers: tuple[WorkerChain, ...] = ()
    frontends: tuple[Pod, ...] = ()

    @property
    def subject(self) -> str:
        namespace, _, name = self.name.rpartition("/")
        return f"DynamoGraphDeployment {name}.{namespace}"

    @property
    def short_name(self) -> str:
        """The subject without the kind: ``my-llm.prod``."""
        return self.subject.partition(" ")[2]

    @property
    def worker_pods(self) -> list[Pod]:
        """The pods of its workers."""
        return [worker.pod for worker in self.workers if worker.pod is not None]

    @property
    def lacks_workers(self) -> bool:
        """Whether it has fewer worker pods than its spec."""
        return self.graph is not None and len(self.workers) < self.graph.worker_pods


@dataclass(frozen=True, slots=True)
class JoinedFacts:
    """The facts, joined: the input of all checks. ``facts``: for what belongs to no worker.

    ``loose``: registered workers without a known pod (all of them, if Kubernetes was not read).
    ``deployments``: all registrations, by Kubernetes namespace; those of another backend under the
    empty name. ``routers``: with the graphs to which they belong.
    """

    facts: VerifyFacts
    graphs: tuple[VerifiedGraph, ...] = ()
    loose: tuple[WorkerChain, ...] = ()
    topologies: tuple[ClusterTopology, ...] = ()
    nodes: Mapping[str, Node] = field(default_factory=dict)
    deployments: Mapping[str, Deployment] = field(default_factory=dict)
    routers: tuple[RouterView, ...] = ()

    @property
    def cluster(self) -> ClusterFacts | None:
        return self.facts.cluster

    @property
    def workers(self) -> tuple[WorkerChain, ...]:
        """The workers of all graphs, then the loose ones."""
        return (*(worker for graph in self.graphs for worker in graph.workers), *self.loose)

    @property
    def governed(self) -> tuple[VerifiedGraph, ...]:
        """The graphs with a valid policy."""
        return tuple(graph for graph in self.graphs if graph.policy is not None)


def join(facts: VerifyFacts) -> JoinedFacts:
    """Join the gathered facts."""
    if facts.cluster is not None:
        return _Join(facts, facts.cluster).join_all()
    deployments = _other_registrations(facts)
    podless = ChainLink(unknown="no cluster was read")
    loose = _loose_workers(_cards(deployments), facts.routers, podless)
    return JoinedFacts(facts, loose=loose, deployments=deployments, routers=facts.routers)


def _podless(cluster: ClusterFacts) -> ChainLink:
    """The pod of a worker that no pod has registered."""
    if isinstance(cluster.pods, Unread):
        return ChainLink.of_unread(cluster.pods)
    return ChainLink(unknown="registered by no known pod")


def _pods_by_graph(cluster: ClusterFacts) -> defaultdict[str, list[Pod]]:
    """The pods of each graph."""
    pods: defaultdict[str, list[Pod]] = defaultdict(list)
    for pod in _known_items(cluster.pods):
        name = pod.labels.get(GRAPH_LABEL)
        # Pods that were evicted stay for a while, with their last state.
        if name and not pod.deleting and pod.phase not in _ENDED:
            pods[f"{pod.namespace}/{name}"].append(pod)
    return pods


class _Join:
    """Indexes of a cluster's facts, and the joins that use them."""

    def __init__(self, facts: VerifyFacts, cluster: ClusterFacts) -> None:
        self._facts, self._cluster = facts, cluster
        self._topologies = topologies_of(_known_items(cluster.topologies))
        self._nodes = {node.name: node for node in _known_items(cluster.nodes)}
        metadata = _known_items(cluster.metadata)
        self._deployments = _other_registrations(facts) or _by_metadata(metadata)
        self._pods = _pods_by_graph(cluster)
        self._graphs = {graph.name: graph for graph in graphs_of(_known_items(cluster.graphs))}
        self._names = sorted({*self._graphs, *self._pods})
        self._metadata: dict[PodKey, list[WorkerMetadata]] = defaultdict(list)
        for item in metadata:
            # An object of a container is named POD-CONTAINER: its owner is the pod.
            for pod in {item.name, item.owner} - {""}:
                self._metadata[item.namespace, pod].append(item)
        self._endpoints: dict[PodKey, list[Endpoint]] = defaultdict(list)
        for endpoint in _known_items(cluster.endpoints):
            self._endpoints[endpoint.namespace, endpoint.pod].append(endpoint)
        self._claims = self._find_claims()
        self._routers = self._place_routers()

    def _find_claims(self) -> MetadataClaims | AddressClaims:
        """The registrations of all pods."""
        if self._facts.registry is None:
            return MetadataClaims(self._metadata, self._deployments)
        workers = [
            (pod, _role(pod, component, kind, ())[0])
            for name in self._names
            for pod, component, kind in _worker_pods(self._graphs.get(name), self._pods[name])
        ]
        return AddressClaims(workers, self._deployments.get(_REGISTRY, Deployment()))

    def _place_routers(self) -> tuple[RouterView, ...]:
        """The routers with their graphs."""
        ids = {
            name: {card_id for _, card_id in self.cards_of(self._pods[name])}
            for name in self._names
        }
        return tuple(_with_graph(router, ids) for router in self._facts.routers)

    def join_all(self) -> JoinedFacts:
        """The wanted graphs with their workers, and the workers of no pod."""
        wanted = self._cluster.wanted
        graphs = tuple(
            self.graph(name)
            for name in self._names
            if not wanted or name.rpartition("/")[2] in wanted
        )
        claimed = self.cards_of(_known_items(self._cluster.pods))
        # With named graphs the pods of other graphs were not read: their workers are not loose.
        rest = [] if wanted else _cards(self._deployments, claimed)
        loose = _loose_workers(rest, self._routers, _podless(self._cluster))
        return JoinedFacts(
            self._facts,
            graphs,
            loose,
            self._topologies,
            self._nodes,
            self._deployments,
            self._routers,
        )

    def cards_of(self, pods: Iterable[Pod]) -> set[CardKey]:
        """The registrations of ``pods``, and those that belong to one of several."""
        has_registry = self._facts.registry is not None
        return {
            card_key(_REGISTRY if has_registry else pod.namespace, card)
            for pod in pods
            for claim in [self._claims.claim_of(pod)]
            for card in (*claim.cards, *claim.among)
        }

    def graph(self, name: str) -> VerifiedGraph:
        """Join a graph with its pods."""
        graph, pods = self._graphs.get(name), self._pods[name]
        if graph is not None:
            policy = policy_of(graph, self._topologies)
        elif isinstance(self._cluster.graphs, Unread):
            policy = policy_of_pods(pods, self._topologies)
        else:
            policy = None
        workers = [
            self._worker(name, policy, pod, component, kind)
            for pod, component, kind in _worker_pods(graph, pods)
        ]
        frontends = [pod for pod, _, kind in _pods_with_kind(graph, pods) if kind == "frontend"]
        return VerifiedGraph(name, graph, policy, tuple(pods), tuple(workers), tuple(frontends))

    def _worker(
        self,
        graph: str,
        policy: GraphPolicy | None,
        pod: Pod,
        component: Component | None,
        kind: str,
    ) -> WorkerChain:
        key = (pod.namespace, pod.name)
        claim = self._claims.claim_of(pod)
        cards = claim.cards
        role, role_source = _role(pod, component, kind, cards)
        unread = isinstance(self._cluster.endpoints, Unread)
        worker = WorkerChain(
            graph=graph,
            component=pod.labels.get(COMPONENT_LABEL, ""),
            role=role,
            role_source=role_source,
            policy=policy,
            pod=pod,
            node=self._nodes.get(pod.node),
            metadata=tuple(self._metadata.get(key, ())),
            cards=cards,
            endpoints=None if unread else tuple(self._endpoints.get(key, ())),
            unclaimed=claim.unknown,
            # Where each rank has an engine of its own, each registers.
            follower=is_follower(pod) and not cards,
            replica=replica_of(pod),
            encoder=is_encoder(pod) and not cards,
        )
        if policy is None:
            return worker
        chains = {
            domain: DomainChain(
                domain,
                {
                    LinkName.NODE: self._node(pod, source.node_key),
                    LinkName.LABEL: ChainLink(pod.labels.get(source.pod_key)),
                    LinkName.FILE: self._file(key, domain),
                    **self._registered_links(worker, domain),
                },
            )
            for domain, source in policy.sources.items()
        }
        return replace(worker, chains=chains)

    def _node(self, pod: Pod, key: str) -> ChainLink:
        if isinstance(self._cluster.nodes, Unread):
            return ChainLink.of_unread(self._cluster.nodes)
        if not pod.node:
            return ChainLink(unknown="not scheduled yet")
        node = self._nodes.get(pod.node)
        return (
            ChainLink(unknown=f"the cluster has no node {pod.node}")
            if node is None
            else ChainLink(node.labels.get(key))
        )

    def _file(self, key: PodKey, domain: str) -> ChainLink:
        read = self._cluster.files.get(key)
        if read is None:
            return ChainLink(unknown=NOT_SAMPLED)
        if isinstance(read, Unread):
            return ChainLink.of_unread(read)
        file = read.get(domain)
        if file is None:
            return ChainLink(unknown=NOT_SAMPLED)
        return ChainLink((file.content or "").strip() or None)

    def _registered_links(self, worker: WorkerChain, domain: str) -> dict[LinkName, ChainLink]:
        unknown = self._why_unregistered(worker)
        if not unknown and worker.cards:
            return _card_links(worker.cards, domain, worker.graph, self._routers)
        rest = ChainLink(unknown=unknown)
        if not unknown:
            registry = self._facts.registry
            source = self._cluster.metadata if registry is None else registry.deployment
            rest = ChainLink.of_unread(source) if isinstance(source, Unread) else ChainLink()
        return {LinkName.CARD: rest, LinkName.TAINT: rest, LinkName.ROUTER: rest}

    def _why_unregistered(self, worker: WorkerChain) -> str:
        """Why the card of a worker is not among the registrations; empty if it could be."""
        if worker.encoder:
            return _NO_MODEL
        if worker.follower:
            return _FOLLOWS
        if worker.unclaimed or self._facts.registry is not None:
            return worker.unclaimed
        if _is_stale(worker):
            return _EARLIER
        if worker.cards or worker.pod is None:
            return ""
        return why_not_in_kubernetes(worker.pod)


def _with_graph(router: RouterView, ids: Mapping[str, Collection[int]]) -> RouterView:
    """The router of a URL with the only graph of which it has workers. ``ids``: by graph."""
    if router.graph or isinstance(router.workers, Unread) or len(ids) < 2:
        return router
    fitting = [name for name, own in ids.items() if not router.workers.isdisjoint(own)]
    if len(fitting) == 1:
        return replace(router, graph=fitting[0])
    why = f"{router.name} has workers of no graph here"
    if fitting:
        why = f"{router.name}: workers of {' and '.join(fitting)} have the same ids; use -n"
    return replace(router, workers=Unread(why))


def _is_stale(worker: WorkerChain) -> bool:
    """Whether a deleted pod of this name wrote all metadata of a worker."""
    pod = worker.pod
    if pod is None:
        return False
    own = [item for item in worker.metadata if item.owner in ("", pod.name)]
    return bool(own) and all(metadata.owner_uid != pod.uid for metadata in own)


def _pods_with_kind(
    graph: Graph | None, pods: Iterable[Pod]
) -> Iterator[tuple[Pod, Component | None, str]]:
    """Each pod by name, with its component and the type of that."""
    own = graph.components if graph else ()
    components = {component.name.lower(): component for component in own}
    for pod in sorted(pods, key=lambda pod: pod.name):
        component = components.get(pod.labels.get(COMPONENT_LABEL, "").lower())
        kind = pod.labels.get(COMPONENT_TYPE_LABEL, "").lower()
        yield pod, component, kind or (component.type if component else "")


def _worker_pods(
    graph: Graph | None, pods: Iterable[Pod]
) -> Iterator[tuple[Pod, Component | None, str]]:
    return (row for row in _pods_with_kind(graph, pods) if row[2] in WORKER_TYPES)


def _card_links(
    cards: Sequence[RegisteredWorker], domain: str, graph: str, routers: Sequence[RouterView]
) -> dict[LinkName, ChainLink]:
    """The links of a pod's cards; of several engines the first that differs from the others."""
    values = [_card_value(item, domain) for item in cards]
    value = values[0]
    taints = [_taint_value(item, domain) for item in cards]
    pairs = list(zip(values, taints, strict=True))
    taint = next((behind for card, behind in pairs if card != behind), taints[0])
    return {
        LinkName.CARD: ChainLink(next((other for other in values if other != value), value)),
        LinkName.TAINT: ChainLink(taint),
        LinkName.ROUTER: _router(cards, value, graph, routers),
    }


def _card_value(item: RegisteredWorker, domain: str) -> str | None:
    return item.worker.domains.get(domain)


def _taint_value(item: RegisteredWorker, domain: str) -> str | None:
    """The value in the published taint of a domain, not a derived one."""
    taints = item.card.runtime_config.get("taints")
    start = f"{_TAINT}{domain}="
    values = [t[len(start) :] for t in taints or () if isinstance(t, str) and t.startswith(start)]
    expected = _card_value(item, domain)
    return expected if expected in values else next(iter(values), None)


def _router(
    cards: Sequence[RegisteredWorker],
    value: str | None,
    graph: str,
    routers: Sequence[RouterView],
) -> ChainLink:
    mine = [router for router in routers if router.graph in ("", graph)]
    read = [router.workers for router in mine if not isinstance(router.workers, Unread)]
    if not mine:
        return ChainLink(unknown="no router was queried")
    first = mine[0].workers
    if not read and isinstance(first, Unread):
        return ChainLink.of_unread(first)
    ids = {item.worker.worker_id for item in cards}
    return ChainLink(value if all(ids <= known for known in read) else None)


def _role(
    pod: Pod, component: Component | None, kind: str, cards: Sequence[RegisteredWorker]
) -> tuple[Role | None, str]:
    if cards:
        return cards[0].worker.role, "card"
    if kind in DISAGGREGATED:
        return DISAGGREGATED[kind], "label"
    sub = pod.labels.get(SUB_COMPONENT_TYPE_LABEL, "").lower()
    if sub in DISAGGREGATED:
        return DISAGGREGATED[sub], "sub-label"
    words = () if pod.main is None else pod.main.words
    role, source = role_of(pod.labels.get(COMPONENT_LABEL, ""), kind, "", words)
    if source in ("name", "nothing") and component is not None and component.role is not None:
        return component.role, component.role_source
    return role, source


def _loose_workers(
    cards: Sequence[RegisteredWorker], routers: Sequence[RouterView], podless: ChainLink
) -> tuple[WorkerChain, ...]:
    """Registered workers without a pod, with the policy of their card. ``podless``: the reason."""
    loose = []
    for item in cards:
        config = item.worker.runtime_config
        policy = None
        if config.kv_transfer_domain:
            policy = GraphPolicy(
                config.kv_transfer_domain,
                "preferred" if config.kv_transfer_enforcement == "preferred" else "required",
                config.kv_transfer_preferred_weight,
                label_key="",
                cluster_topology="",
                sources={},
                origin="pods",
            )
        worker = WorkerChain(
            graph="",
            component=item.card.endpoint.component,
            role=item.worker.role,
            role_source="card",
            policy=policy,
            cards=(item,),
        )
        before = dict.fromkeys((LinkName.NODE, LinkName.LABEL, LinkName.FILE), podless)
        chains = {
            domain: DomainChain(domain, {**before, **_card_links([item], domain, "", routers)})
            for domain in {*item.worker.domains, *filter(None, [config.kv_transfer_domain])}
        }
        loose.append(replace(worker, chains=chains))
    return tuple(loose)


def _other_registrations(facts: VerifyFacts) -> dict[str, Deployment]:
    registry = facts.registry
    if registry is None or isinstance(registry.deployment, Unread):
        return {}
    return {_REGISTRY: registry.deployment}


def _by_metadata(metadata: Iterable[WorkerMetadata]) -> dict[str, Deployment]:
    """Each Kubernetes namespace by itself: keys and ids of two namespaces may be the same."""
    entries: dict[str, list[DiscoveryEntry]] = defaultdict(list)
    for item in metadata:
        entries[item.namespace] += [DiscoveryEntry(key, value) for key, value in item.entries()]
    deployments = {}
    for namespace, each in entries.items():
        registrations = Registrations()
        registrations.apply(Listed(tuple(each)))
        deployments[namespace] = registrations.deployment()
    return deployments


def _cards(
    deployments: Mapping[str, Deployment], but: Container[CardKey] = ()
) -> list[RegisteredWorker]:
    """All registrations, ``but`` those."""
    return [
        card
        for namespace, deployment in deployments.items()
        for card in deployment.workers
        if card_key(namespace, card) not in but
    ]


def _known_items(listing: Listing[T]) -> tuple[T, ...]:
    return () if isinstance(listing, Unread) else listing
