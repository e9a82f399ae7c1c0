"""The workers that are ready now, counted by pool and domain value.

A pool is the workers of one model in one graph, or without Kubernetes in one Dynamo namespace. A
prefill worker stands where its card says, a decode worker where its taint does: routers compare
just these. A worker that is not ready, or in Kubernetes not a ready endpoint of discovery's
slices, or has registered nothing that is its own, serves nobody.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dynctl.health.deployment import ObservedWorker
from dynctl.manifests.domain_split import DomainSplit
from dynctl.verify.chain import WorkerChain
from dynctl.verify.join import Custody, VerifiedGraph
from dynctl.verify.policy import Policy
from dynctl.verify.registration import cards_of, in_kubernetes, not_listed
from dynctl.verify.root_causes import live, short, some
from dynctl.wire.kubernetes.fields import mapping, sequence
from router_core import Role, topology_of

_READY: Final = " ready"
_BOTH: Final = {"prefill", "decode"}


@dataclass(frozen=True, slots=True)
class ReadyPool:
    """``untainted``: its decode workers that carry no taint of the domain, and so stand nowhere."""

    split: DomainSplit
    policy: Policy
    untainted: tuple[tuple[WorkerChain, ObservedWorker], ...]


@dataclass(slots=True)
class Ready:
    """``gaps``: why pools are not here, with their policies; ``unread``: what was not told."""

    pools: list[ReadyPool] = field(default_factory=list)
    gaps: list[tuple[Policy, str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def ready_pools(custody: Custody) -> Ready:
    """Every pool with a policy, of what was looked at."""
    ready = Ready()
    if custody.cluster is None:
        _of_registry(custody, ready)
    else:
        for graph in custody.governed:
            _of_graph(custody, graph, ready)
    return ready


def published_value(item: ObservedWorker, domain: str) -> str | None:
    """Where a worker's card says that it stands."""
    value = mapping(item.card.runtime_config.get("topology_domains")).get(domain)
    return value if isinstance(value, str) and value else None


def tainted_value(item: ObservedWorker, domain: str) -> str | None:
    """Where a worker's taints say that it stands; of several the one that its card says, too."""
    told = sequence(item.card.runtime_config.get("taints"))
    pairs = [pair for one in told if isinstance(one, str) and (pair := topology_of(one))]
    values = [value for name, value in pairs if name == domain]
    published = published_value(item, domain)
    return published if published in values else next(iter(values), None)


def _of_graph(custody: Custody, graph: VerifiedGraph, ready: Ready) -> None:
    policy, members = graph.policy, live(graph)
    assert policy is not None
    cards = cards_of(custody, members)
    ready.unread += cards.unread
    roles = {one.role for one in members}
    if graph.graph is not None:
        roles |= {one.role for one in graph.graph.workers if one.replicas}
    if not roles >= _BOTH:
        ready.gaps.append((policy, f"{short(graph)}: not disaggregated (DYT0109, DYT0115)"))
        return
    serving = [one for one in cards.workers if _serves(one)]
    by_model = _by_model(serving)
    if not by_model and not cards.unread:
        why = some(sorted(set(cards.elsewhere))) or "DYT0702"
        ready.gaps.append((policy, f"{short(graph)}: no worker is ready and registered ({why})"))
    for model, pairs in sorted(by_model.items()):
        which = f" for {model}" if len(by_model) > 1 else ""
        ready.pools.append(_pool(graph.subject, policy, pairs, which))


def _serves(worker: WorkerChain) -> bool:
    if worker.pod is None or not worker.pod.ready:
        return False
    return not (in_kubernetes(worker) and not_listed(worker))


def _of_registry(custody: Custody, ready: Ready) -> None:
    spaces: dict[str, list[WorkerChain]] = defaultdict(list)
    for worker in custody.loose:
        spaces[worker.cards[0].card.endpoint.namespace].append(worker)
    for space, members in sorted(spaces.items()):
        for model, pairs in sorted(_by_model(members).items()):
            policy = _policy_of(pairs)
            if policy is None or not {worker.role for worker, _ in pairs} & _BOTH:
                continue
            which = f" in namespace {space}" if len(spaces) > 1 else ""
            ready.pools.append(_pool(f"Model {model}", policy, pairs, which))


def _policy_of(pairs: Sequence[tuple[WorkerChain, ObservedWorker]]) -> Policy | None:
    """The one that most prefill workers publish, else most of all; mixtures are DYT0805."""
    prefill = [one.policy for one, item in pairs if item.worker.role is Role.PREFILL and one.policy]
    policies = prefill or [one.policy for one, _ in pairs if one.policy]
    if not policies:
        return None
    kinds = Counter((one.domain, one.enforcement) for one in policies)
    [(kind, _)] = kinds.most_common(1)
    return next(one for one in policies if (one.domain, one.enforcement) == kind)


def _by_model(
    workers: Iterable[WorkerChain],
) -> dict[str, list[tuple[WorkerChain, ObservedWorker]]]:
    found: dict[str, list[tuple[WorkerChain, ObservedWorker]]] = defaultdict(list)
    for worker in workers:
        for item in worker.cards:
            found[item.card.name].append((worker, item))
    return found


def _pool(
    subject: str,
    policy: Policy,
    pairs: Sequence[tuple[WorkerChain, ObservedWorker]],
    which: str,
) -> ReadyPool:
    """``which``: what tells the pool from others of the same subject."""
    prefill: Counter[str] = Counter()
    decode: Counter[str] = Counter()
    untainted = []
    for worker, item in pairs:
        if item.worker.role is Role.PREFILL:
            value = published_value(item, policy.domain)
            prefill.update([value] if value is not None else [])
        elif item.worker.role is Role.DECODE:
            value = tainted_value(item, policy.domain)
            decode.update([value] if value is not None else [])
            if value is None:
                untainted.append((worker, item))
    split = DomainSplit(subject, policy.domain, prefill, decode, _READY + which)
    return ReadyPool(split, policy, tuple(untainted))
