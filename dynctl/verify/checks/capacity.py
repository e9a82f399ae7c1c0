"""Checks of capacity by domain, of routers and of live requests: DYT09.

The capacity rules are those of lint. Here they count the ready workers by pool and domain value. A
pool is the workers of one model in one graph, or without Kubernetes in one Dynamo namespace. The
generations of a rolling update have a Dynamo namespace each, and prefill workers hand over only to
decode workers of their own: DYT0901 and DYT0906 count by generation. The value of a prefill worker
is that of its card, of a decode worker those of its taints: routers compare these. A worker is
ready if its pod is, if it is a ready endpoint of the discovery EndpointSlices (in Kubernetes), and
if it has a registration of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

from dynctl.base.json_fields import mapping, sequence
from dynctl.findings.runner import Check, Found, Outcome, Passed, Skipped, Wrong, found, outcome
from dynctl.health.deployment import RegisteredWorker
from dynctl.health.facts import Unread
from dynctl.manifests.lint.capacity import (
    DomainSplit,
    single_decode,
    uneven,
    without_decode,
    without_prefill,
)
from dynctl.verify.chain import WorkerChain
from dynctl.verify.cluster_facts import ProbeAnswer, RouterView
from dynctl.verify.graph_policy import GraphPolicy
from dynctl.verify.join import JoinedFacts, VerifiedGraph
from dynctl.verify.needs import has_policy, in_cluster
from dynctl.verify.registration import (
    Cards,
    all_workers,
    cards_of,
    in_kubernetes,
    not_listed,
    own_metadata,
    pod_uids,
    registrations_read,
    wrong_ids,
)
from dynctl.verify.wording import excerpt, restart_fix, some
from router_core import TOPOLOGY_PREFIX, Role, topology_of

NO_ROUTER: Final = (
    "no router was queried: use --frontend URL, or request the permission to create "
    "pods/portforward"
)


# -- ready pools -----------------------------------------------------------------------------------


_READY: Final = " ready"
_BOTH: Final = {"prefill", "decode"}


@dataclass(frozen=True, slots=True)
class ReadyPool:
    """One pool. ``untainted``: its decode workers without a taint of the domain."""

    split: DomainSplit
    policy: GraphPolicy
    untainted: tuple[tuple[WorkerChain, RegisteredWorker], ...]


@dataclass(slots=True)
class Ready:
    """All pools. ``gaps``: policies without a pool, with the reason; ``unread``: failed reads.

    ``generations``: the pools, divided by Dynamo namespace.
    """

    pools: list[ReadyPool] = field(default_factory=list)
    generations: list[ReadyPool] = field(default_factory=list)
    gaps: list[tuple[GraphPolicy, str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def ready_pools(joined: JoinedFacts) -> Ready:
    """All pools with a policy."""
    ready = Ready()
    if joined.cluster is None:
        _add_pools_of_registry(joined, ready)
    else:
        for graph in joined.governed:
            _add_pools_of_graph(joined, graph, ready)
    return ready


def published_value(item: RegisteredWorker, domain: str) -> str | None:
    """The value of a domain in a worker's card."""
    value = mapping(item.card.runtime_config.get("topology_domains")).get(domain)
    return value if isinstance(value, str) and value else None


def tainted_values(item: RegisteredWorker, domain: str) -> list[str]:
    """All values of a domain in a worker's taints: it may be required under each of them."""
    taints = sequence(item.card.runtime_config.get("taints"))
    pairs = [pair for taint in taints if isinstance(taint, str) and (pair := topology_of(taint))]
    return list(dict.fromkeys(value for name, value in pairs if name == domain))


def tainted_value(item: RegisteredWorker, domain: str) -> str | None:
    """The value of a domain in a worker's taints; of several the one that is in its card."""
    values = tainted_values(item, domain)
    published = published_value(item, domain)
    return published if published in values else next(iter(values), None)


def _add_pools_of_graph(joined: JoinedFacts, graph: VerifiedGraph, ready: Ready) -> None:
    policy, members = graph.policy, graph.workers
    assert policy is not None
    cards = cards_of(joined, members)
    ready.unread += cards.tally.unread
    gap = _gap_of_graph(graph, members)
    if gap:
        ready.gaps.append((policy, f"{graph.short_name}: {gap}"))
        return
    by_model = _by_model(worker for worker in cards.workers if _serves(worker))
    if not by_model and not cards.tally.unread:
        why = some(sorted(set(cards.tally.explained))) or "DYT0702"
        gap = f"{graph.short_name}: no worker is ready and registered ({why})"
        ready.gaps.append((policy, gap))
    for model, pairs in sorted(by_model.items()):
        which = f" for {model}" if len(by_model) > 1 else ""
        ready.pools.append(_pool(graph.subject, policy, pairs, which))
        ready.generations += _generations(graph.subject, policy, pairs, which)


def _gap_of_graph(graph: VerifiedGraph, members: Sequence[WorkerChain]) -> str:
    """Why the pools of a graph cannot be counted; empty if they can."""
    roles = {worker.role for worker in members}
    if graph.graph is not None:
        roles |= {component.role for component in graph.graph.workers if component.replicas}
    if not roles >= _BOTH:
        return "not disaggregated (DYT0109, DYT0115)"
    return next((worker.unclaimed for worker in members if worker.unclaimed), "")


def _generations(
    subject: str,
    policy: GraphPolicy,
    pairs: Sequence[tuple[WorkerChain, RegisteredWorker]],
    which: str,
) -> Iterator[ReadyPool]:
    """The pools by Dynamo namespace. Without those of one role alone, if another has both: a
    frontend sends no request there."""
    spaces: dict[str, list[tuple[WorkerChain, RegisteredWorker]]] = defaultdict(list)
    for worker, item in pairs:
        spaces[item.card.endpoint.namespace].append((worker, item))
    whole = {
        space: members
        for space, members in spaces.items()
        if {item.worker.role for _, item in members} >= _BOTH
    }
    for space, members in sorted((whole or spaces).items()):
        where = f"{which} in Dynamo namespace {space}" if len(spaces) > 1 else which
        yield _pool(subject, policy, members, where)


def _serves(worker: WorkerChain) -> bool:
    if worker.pod is None or not worker.pod.ready:
        return False
    return not (in_kubernetes(worker) and not_listed(worker))


def _add_pools_of_registry(joined: JoinedFacts, ready: Ready) -> None:
    spaces: dict[str, list[WorkerChain]] = defaultdict(list)
    for worker in joined.loose:
        spaces[worker.cards[0].card.endpoint.namespace].append(worker)
    for space, members in sorted(spaces.items()):
        for model, pairs in sorted(_by_model(members).items()):
            policy = _policy_of(pairs)
            if policy is None or not {worker.role for worker, _ in pairs} & _BOTH:
                continue
            which = f" in namespace {space}" if len(spaces) > 1 else ""
            ready.pools.append(_pool(f"Model {model}", policy, pairs, which))
            ready.generations.append(ready.pools[-1])


def _policy_of(pairs: Sequence[tuple[WorkerChain, RegisteredWorker]]) -> GraphPolicy | None:
    """The policy of most prefill workers, else of most workers; mixtures are DYT0805."""
    having = [(worker.policy, item) for worker, item in pairs if worker.policy]
    prefill = [policy for policy, item in having if item.worker.role is Role.PREFILL]
    policies = prefill or [policy for policy, _ in having]
    if not policies:
        return None
    kinds = Counter((policy.domain, policy.enforcement) for policy in policies)
    [(kind, _)] = kinds.most_common(1)
    return next(policy for policy in policies if (policy.domain, policy.enforcement) == kind)


def _by_model(
    workers: Iterable[WorkerChain],
) -> dict[str, list[tuple[WorkerChain, RegisteredWorker]]]:
    pairs: dict[str, list[tuple[WorkerChain, RegisteredWorker]]] = defaultdict(list)
    for worker in workers:
        for item in worker.cards:
            pairs[item.card.name].append((worker, item))
    return pairs


def _pool(
    subject: str,
    policy: GraphPolicy,
    pairs: Sequence[tuple[WorkerChain, RegisteredWorker]],
    which: str,
) -> ReadyPool:
    """A pool. ``which``: distinguishes it from other pools of the same subject."""
    prefill: Counter[str] = Counter()
    decode: Counter[str] = Counter()
    untainted = []
    for worker, item in pairs:
        if item.worker.role is Role.PREFILL:
            value = published_value(item, policy.domain)
            prefill.update([value] if value is not None else [])
        elif item.worker.role is Role.DECODE:
            values = tainted_values(item, policy.domain)
            decode.update(values)
            if not values:
                untainted.append((worker, item))
    split = DomainSplit(subject, policy.domain, prefill, decode, _READY + which)
    return ReadyPool(split, policy, tuple(untainted))


# -- capacity by domain ----------------------------------------------------------------------------


def _check_pools(
    rule: Callable[[DomainSplit], Iterator[Found]],
    joined: JoinedFacts,
    *,
    required: bool = True,
    served: bool = False,
) -> Outcome:
    """Check the pools of one enforcement that have ready prefill workers.

    ``served``: whether their requests can be served; then by generation, and with the counts.
    """
    ready = ready_pools(joined)
    gaps = [text for policy, text in ready.gaps if policy.required is required]
    splits: list[DomainSplit] = []
    for pool in ready.generations if served else ready.pools:
        if pool.policy.required is not required:
            continue
        if pool.split.prefill:
            splits.append(pool.split)
        else:
            gaps.append(f"{pool.split.name}: no ready prefill worker with a {pool.split.domain}")
    wrong = [finding for split in splits for finding in rule(split)]
    summary = _counts_text(splits if served else [])
    return _outcome(wrong, gaps, ready.unread, summary, judged=len(splits))


def _counts_text(pools: Sequence[DomainSplit]) -> str:
    """The counts by domain, with the names of several pools."""
    if len(pools) == 1:
        return pools[0].counted
    return "; ".join(f"{pool.name}: {pool.counted}" for pool in pools[:2])


def _outcome(
    wrong: Sequence[Found], gaps: Sequence[str], unread: Sequence[str], summary: str, *, judged: int
) -> Outcome:
    if unread:
        return outcome(wrong, unread)
    if wrong:
        return Wrong(tuple(wrong), f"not checked: {some(gaps, 2)}" if gaps else "")
    if gaps:
        return Skipped(some(gaps, 2))
    if not judged:
        return Skipped("no disaggregated pool has a policy with this enforcement")
    return Passed(summary)


def _decode_has_taints(joined: JoinedFacts, *, required: bool) -> Outcome:
    """Decode workers without a taint. Earlier codes have the reason, this check the effect."""
    ready = ready_pools(joined)
    pools = [pool for pool in ready.pools if pool.policy.required is required]
    wrong = []
    for pool in pools:
        for worker, item in pool.untainted:
            domain = pool.policy.domain
            value = published_value(item, domain)
            why = f"its card has {value} (DYT0804)" if value else f"its card has no {domain}"
            wrong.append(
                found(
                    worker.subject,
                    taint=f"{TOPOLOGY_PREFIX}{domain}",
                    why=why,
                    fix=_restart(worker),
                )
            )
    gaps = [text for policy, text in ready.gaps if policy.required is required]
    return _outcome(wrong, gaps, ready.unread, "", judged=len(pools))


def _restart(worker: WorkerChain) -> str:
    pod = worker.pod
    if pod is None:
        return "restart it with its topology: dynctl topology render shows the settings"
    return f"correct its DYT08 findings, then {restart_fix(pod)}"


# -- routers ---------------------------------------------------------------------------------------


def _routers_queried(joined: JoinedFacts) -> Skipped | None:
    if joined.facts.routers:
        return None
    access = {} if joined.cluster is None else joined.cluster.access
    refused = any(
        review.resource == "pods/portforward" and allowed is False
        for review, allowed in access.items()
    )
    return Skipped(NO_ROUTER, unread=refused)


def _routers_have_workers(joined: JoinedFacts) -> Outcome:
    cards = cards_of(joined, all_workers(joined))
    groups = _discoverable_by_pool(joined, cards)
    wrong: list[Found] = []
    judged = 0
    for pool, members in sorted(groups.items()):
        graph = members[0].graph
        ids = {item.worker.worker_id for worker in members for item in worker.cards}
        mine = list(_routers_of(joined.routers, graph, ids, alone=len(groups) == 1))
        known: list[tuple[str, frozenset[int]]] = []
        for router in mine:
            if isinstance(router.workers, Unread):
                cards.tally.unread.append(router.workers.why)
            else:
                known.append((router.name, router.workers))
        if known:
            judged += len(members)
            wrong += _workers_not_known(members, known)
        else:
            cards.tally.explained.append("" if mine else f"no router of {pool} was queried")
    cards.tally.wrong += wrong
    return cards.tally.outcome(judged)


def _discoverable_by_pool(joined: JoinedFacts, cards: Cards) -> dict[str, list[WorkerChain]]:
    """Without workers that no router can find: in no slice (DYT0702), wrong id (DYT0706)."""
    uids = {} if joined.cluster is None else pod_uids(joined.cluster)
    groups: dict[str, list[WorkerChain]] = defaultdict(list)
    for worker in cards.workers:
        explained = _why_undiscoverable(worker, uids) if joined.facts.registry is None else ""
        if not explained and worker.pod is not None and not worker.pod.ready:
            explained = "DYT0702"
        if explained:
            cards.tally.explained.append(explained)
        else:
            groups[_pool_of(worker)].append(worker)
    return groups


def _workers_not_known(
    members: Sequence[WorkerChain], known: Sequence[tuple[str, frozenset[int]]]
) -> Iterator[Found]:
    """``known``: the names of routers, with the ids of their workers."""
    for worker in members:
        own = {item.worker.worker_id for item in worker.cards}
        missing = [name for name, ids in known if not own <= ids]
        if missing:
            number = ", ".join(f"{worker_id:x}" for worker_id in sorted(own))
            yield found(worker.subject, routers=some(missing), id=number)


def _pool_of(worker: WorkerChain) -> str:
    return worker.graph or worker.cards[0].card.endpoint.namespace


def _why_undiscoverable(worker: WorkerChain, uids: Mapping[tuple[str, str], str]) -> str:
    if worker.pod is None:
        return ""
    if not_listed(worker):
        return "DYT0702"
    return "DYT0706" if any(map(wrong_ids, own_metadata(worker, uids))) else ""


def _routers_of(
    routers: Sequence[RouterView], graph: str, ids: set[int], *, alone: bool
) -> Iterator[RouterView]:
    """The routers of a graph. A frontend from --frontend counts if it has one of the workers.

    ``alone``: there is only one pool, so every frontend routes for it.
    """
    for router in routers:
        if (router.graph and router.graph == graph) or (
            not router.graph
            and (alone or isinstance(router.workers, Unread) or ids & router.workers)
        ):
            yield router


# -- live requests ---------------------------------------------------------------------------------


def _live_requests(joined: JoinedFacts) -> Outcome:
    """Requests that failed, and requests that left the domain of a required policy."""
    answers = joined.facts.probe
    if answers is None:
        return Skipped("no live requests sent (use --probe)")
    if not answers:
        return Skipped("no request was sent: no frontend serves a model", unread=True)
    graphs = {router.name: router.graph for router in joined.routers}
    sent = Counter(answer.router for answer in answers)
    items = {name: _items_of_graph(joined, graphs.get(name, "")) for name in sent}
    wrong: Counter[tuple[str, str]] = Counter()
    unread = []
    for answer in answers:
        problem, unknown = _problem_of_answer(answer, items[answer.router])
        if problem:
            wrong[answer.router, problem] += 1
        if unknown:
            unread.append(unknown)
    findings = [
        found(_router_subject(router), problem=problem, many=f"{many:,} of {sent[router]:,}")
        for (router, problem), many in sorted(wrong.items())
    ]
    return outcome(findings, unread, f"{len(answers):,} requests")


_Items: TypeAlias = Mapping[int, tuple[WorkerChain, RegisteredWorker]]
"""Worker id -> the worker and its card."""


def _items_of_graph(joined: JoinedFacts, graph: str) -> _Items:
    """The workers to which a router of ``graph`` may send requests; empty: of an unknown one."""
    return {
        item.worker.worker_id: (worker, item)
        for worker in joined.workers
        for item in worker.cards
        # Pods of other graphs can have the same names, so their workers the same ids.
        if worker.graph == graph or not (worker.graph and graph)
    }


def _problem_of_answer(answer: ProbeAnswer, items: _Items) -> tuple[str, str]:
    """What was wrong with an answer, or empty; and why that is unknown, or empty."""
    if answer.status >= 500:
        return f"HTTP {answer.status} {excerpt(answer.message)}".rstrip(), ""
    if not 200 <= answer.status < 300:
        status = f"HTTP {answer.status} " if answer.status else ""
        router = "" if answer.router in answer.message else f"{answer.router}: "
        return "", f"{router}{status}{answer.message}".strip()
    problem, unknown = _crossing(answer, items)
    return problem, f"{answer.router}: {unknown}" if unknown else ""


def _router_subject(router: str) -> str:
    return router if router.startswith("Pod ") else f"Frontend {router}"


def _crossing(answer: ProbeAnswer, items: _Items) -> tuple[str, str]:
    """How a request crossed domains, or empty; and why that is unknown, or empty."""
    if not any(worker.policy and worker.policy.required for worker, _ in items.values()):
        return "", ""
    if answer.prefill is None or answer.decode is None:
        return "", "the response does not name the workers that served it"
    prefill, decode = items.get(answer.prefill), items.get(answer.decode)
    if prefill is None or decode is None:
        return "", "an unregistered worker served a request"
    return _crossing_text(prefill, decode), ""


def _crossing_text(
    prefill: tuple[WorkerChain, RegisteredWorker], decode: tuple[WorkerChain, RegisteredWorker]
) -> str:
    """The workers of a request that left the domain of a required policy; else empty."""
    policy = prefill[0].policy
    if policy is None or not policy.required or prefill[0] is decode[0]:
        return ""
    start, end = published_value(prefill[1], policy.domain), tainted_value(decode[1], policy.domain)
    if start is None or start == end:
        return ""
    where = end or f"no {policy.domain}"
    return f"prefill by {prefill[0].name} in {start}, decode by {decode[0].name} in {where}"


# -- needs -----------------------------------------------------------------------------------------


def _policies(joined: JoinedFacts) -> Skipped | None:
    if joined.cluster is not None:
        return in_cluster(joined) or has_policy(joined)
    skipped = registrations_read(joined)
    if skipped is None and not any(worker.policy for worker in joined.loose):
        return Skipped("no worker publishes a transfer policy")
    return skipped


_NEEDS: Final = (_policies,)

CAPACITY_CHECKS: Final[Sequence[Check[JoinedFacts]]] = (
    Check("DYT0901", partial(_check_pools, without_decode, served=True), _NEEDS),
    Check("DYT0902", partial(_check_pools, single_decode), _NEEDS),
    Check("DYT0903", partial(_decode_has_taints, required=True), _NEEDS),
    Check("DYT0904", _routers_have_workers, (registrations_read, _routers_queried)),
    Check("DYT0905", _live_requests),
    Check("DYT0906", partial(_check_pools, without_decode, required=False, served=True), _NEEDS),
    Check("DYT0907", partial(_check_pools, without_prefill), _NEEDS),
    Check("DYT0908", partial(_check_pools, uneven), _NEEDS),
    Check("DYT0909", partial(_decode_has_taints, required=False), _NEEDS),
)
