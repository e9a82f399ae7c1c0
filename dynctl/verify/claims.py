"""Which registrations belong to which pod. Pure.

In Kubernetes a worker's metadata names its pod. In other backends only the address connects them:
pods on the network of their host share it, and over NATS a registration has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from dynctl.health.deployment import Deployment, RegisteredWorker
from dynctl.verify.cluster_facts import PodKey
from dynctl.wire.kubernetes.names import DYNAMO_NAMESPACE_LABEL, WORKER_HASH_LABEL
from dynctl.wire.kubernetes.objects import Pod
from dynctl.wire.kubernetes.worker_metadata import WorkerMetadata
from router_core import Role

_NAMESPACE_ENV: Final = "DYN_NAMESPACE"
_NOWHERE: Final = "workers are registered over NATS, without an address that names their pod"

CardKey: TypeAlias = tuple[str, int]
"""Kubernetes namespace (empty for another backend) and id: ids are hashes of the names of pods, so
pods of one name in two namespaces have the same id."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The registrations of a pod. ``unknown``: why it is unknown which of ``among`` are its own."""

    cards: tuple[RegisteredWorker, ...] = ()
    unknown: str = ""
    among: tuple[RegisteredWorker, ...] = ()


def card_key(namespace: str, card: RegisteredWorker) -> CardKey:
    """The key of a registration."""
    return namespace, card.worker.worker_id


class MetadataClaims:
    """Registrations in Kubernetes. ``deployments``: by Kubernetes namespace."""

    def __init__(
        self,
        metadata: Mapping[PodKey, Sequence[WorkerMetadata]],
        deployments: Mapping[str, Deployment],
    ) -> None:
        self._metadata = metadata
        self._by_id = {
            card_key(namespace, card): card
            for namespace, deployment in deployments.items()
            for card in deployment.workers
        }

    def claim_of(self, pod: Pod) -> Claim:
        """The registrations of a pod: those of the metadata that names it."""
        cards: dict[CardKey, RegisteredWorker] = {}
        for item in self._metadata.get((pod.namespace, pod.name), ()):
            for own_id in _ids(item):
                key = (item.namespace, own_id)
                if key in self._by_id:
                    cards[key] = self._by_id[key]
        return Claim(tuple(cards.values()))


class AddressClaims:
    """Registrations in another backend. ``pods``: of all workers that run, with their roles as far
    as labels and arguments have them."""

    def __init__(self, pods: Iterable[tuple[Pod, Role | None]], deployment: Deployment) -> None:
        self._claims: dict[PodKey, Claim] = {}
        #: Host of the address -> registrations; those over NATS have none.
        hosts: dict[str, list[RegisteredWorker]] = defaultdict(list)
        for card in deployment.workers:
            hosts[_host(card)].append(card)
        nowhere = hosts.pop("", [])
        groups: dict[str, list[tuple[Pod, Role | None]]] = defaultdict(list)
        for pod, role in pods:
            groups[pod.ip].append((pod, role))
        for address, members in groups.items():
            self._claims |= _of_address(address, members, hosts.get(address, []))
            for pod, _ in members:
                claim = self._claims[_key(pod)]
                if claim.cards or claim.unknown:
                    continue
                if any(_may_be_of(pod, card) for card in nowhere):
                    self._claims[_key(pod)] = Claim(unknown=_NOWHERE)

    def claim_of(self, pod: Pod) -> Claim:
        """The registrations of a pod."""
        return self._claims.get(_key(pod), Claim())


def _of_address(
    address: str, members: Sequence[tuple[Pod, Role | None]], cards: Sequence[RegisteredWorker]
) -> dict[PodKey, Claim]:
    """The claims of the pods at one address."""
    if len(members) == 1:
        [(pod, _)] = members
        own = [card for card in cards if not pod.host_network or _may_be_of(pod, card)]
        return {_key(pod): Claim(tuple(own))}
    groups: dict[tuple[frozenset[str] | None, Role | None], list[Pod]] = defaultdict(list)
    known = all(role is not None for _, role in members)
    for pod, role in members:
        groups[_spaces(pod), role if known else None].append(pod)
    claims: dict[PodKey, Claim] = {}
    for (_, role), pods in groups.items():
        mine = [
            card
            for card in cards
            if _may_be_of(pods[0], card) and (role is None or card.worker.role is role)
        ]
        claims |= _shared_claims(address, sorted(pods, key=_key), mine)
    return claims


def _shared_claims(
    address: str, pods: Sequence[Pod], cards: Sequence[RegisteredWorker]
) -> dict[PodKey, Claim]:
    """The claims of pods that only their names distinguish.

    Registrations that are equal in all that checks compare may be exchanged among them.
    """
    if len(pods) == 1 or not cards:
        return {_key(pod): Claim(tuple(cards)) for pod in pods}
    if len(pods) == len(cards) and len({*map(_compared_fields, cards)}) == 1:
        ordered = sorted(cards, key=lambda card: card.worker.worker_id)
        return {_key(pod): Claim((card,)) for pod, card in zip(pods, ordered, strict=True)}
    registered = "1 worker is" if len(cards) == 1 else f"{len(cards):,} workers are"
    why = f"{len(pods):,} pods share the address {address}, and {registered} registered there"
    return {_key(pod): Claim(unknown=why, among=tuple(cards)) for pod in pods}


def _compared_fields(card: RegisteredWorker) -> Hashable:
    """What checks compare in a registration."""
    config = card.card.runtime_config
    names = ("topology_domains", "taints", "kv_transfer_domain", "kv_transfer_enforcement")
    values = (repr(config.get(name)) for name in (*names, "kv_transfer_preferred_weight"))
    return card.worker.role, card.card.name, card.card.endpoint, *values


def _host(card: RegisteredWorker) -> str:
    """The host of a registration's address, IPv6 without brackets; empty if it has none."""
    host, colon, _ = card.instance.address.partition("/")[0].rpartition(":")
    if not colon or card.instance.transport != "tcp":
        return ""
    return host.removeprefix("[").removesuffix("]")


def _spaces(pod: Pod) -> frozenset[str] | None:
    """The Dynamo namespaces in which a pod may register; None if the pod does not specify one."""
    main = pod.main
    name = (None if main is None else main.env.get(_NAMESPACE_ENV)) or ""
    name = name or pod.labels.get(DYNAMO_NAMESPACE_LABEL, "")
    if not name:
        return None
    generation = pod.labels.get(WORKER_HASH_LABEL)
    return frozenset({name, f"{name}-{generation}"} if generation else {name})


def _may_be_of(pod: Pod, card: RegisteredWorker) -> bool:
    spaces = _spaces(pod)
    return spaces is None or card.card.endpoint.namespace in spaces


def _ids(metadata: WorkerMetadata) -> set[int]:
    """The ids under which an object registers workers, whatever its name is."""
    cards = metadata.data.get("model_cards")
    ids = set()
    for card in cards.values() if isinstance(cards, Mapping) else ():
        number = card.get("instance_id") if isinstance(card, Mapping) else None
        if isinstance(number, int):
            ids.add(number)
    return ids


def _key(pod: Pod) -> PodKey:
    return pod.namespace, pod.name
