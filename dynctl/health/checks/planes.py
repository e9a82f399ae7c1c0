"""Checks of the planes and of what workers register: pure, on :class:`CheckFacts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from dynctl.findings.runner import Check, Found, Outcome, Passed, Skipped, found, outcome
from dynctl.health.deployment import Deployment, ProblemCode, RegisteredWorker
from dynctl.health.facts import NATS, CheckFacts, PlaneFacts, RankFacts
from dynctl.wire.dynamo.discovery import CARDS, EVENT_CHANNELS, EVENT_SOURCES, INSTANCES
from router_core import PolicyUnderivable, Role, implied_constraints

NO_PLANES: Final = (
    "no discovery backend was specified: --discovery etcd --etcd-endpoints HOST:2379, or "
    "--discovery file --file-kv DIR"
)
_KNOWN_KEYS: Final = (INSTANCES, CARDS, EVENT_CHANNELS, EVENT_SOURCES)
_KEYS_HINT: Final = "check that this is the right backend and that the deployment runs"


# -- conditions of checks -------------------------------------------------------------------------


def has_backend(facts: CheckFacts) -> Skipped | None:
    """A discovery backend was specified."""
    return Skipped(NO_PLANES) if facts.planes is None else None


def entries_known(facts: CheckFacts) -> Skipped | None:
    """The registered entries are known."""
    if facts.planes is None:
        return Skipped(NO_PLANES)
    if facts.planes.unreachable is not None:
        return Skipped("discovery does not respond (DYR0101)", unread=True)
    return None


def has_workers(facts: CheckFacts) -> Skipped | None:
    """At least one worker is registered."""
    if facts.deployment is not None and not facts.deployment.workers:
        return Skipped("no worker is registered (DYR0102)")
    return None


def reachable(facts: CheckFacts) -> Skipped | None:
    """The workers' addresses are reachable from here."""
    planes = facts.planes
    if planes is not None and planes.out_of_reach:
        return Skipped(f"worker reports: {planes.out_of_reach}", unread=True)
    return None


def planes_of(facts: CheckFacts) -> PlaneFacts:
    """The planes, for checks that require them."""
    assert facts.planes is not None
    return facts.planes


def count(number: int, noun: str) -> str:
    """``1 worker``, ``2,048 workers``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


# -- planes ----------------------------------------------------------------------------------------


def _discovery_answers(facts: CheckFacts) -> Outcome:
    planes = planes_of(facts)
    if planes.unreachable is not None:
        hint = planes.unreachable.fix
        hint = hint or "specify another one: --etcd-endpoints HOST:2379, or --file-kv DIR"
        return outcome([found(planes.title, why=planes.unreachable.why, hint=hint)])
    return Passed(planes.title)


def _workers_are_registered(facts: CheckFacts) -> Outcome:
    planes = planes_of(facts)
    where = planes.namespace or "any namespace"
    if planes.deployment.workers:
        return Passed(f"{count(len(planes.deployment.workers), 'worker')} in {where}")
    others = [name for name in planes.deployment.namespaces if name != planes.namespace]
    if others:
        registered = f"registered: {', '.join(others)}"
        hint = f"try --dyn-namespace {others[0]}, or '*'"
    elif planes.deployment.namespaces:
        registered = "entries are registered, but no complete worker"
        hint = "see the workers section"
    else:
        registered, hint = "no entries are registered", _KEYS_HINT
    return outcome([found(where, others=registered, hint=hint)])


def _event_plane(facts: CheckFacts) -> Outcome:
    channels = [rank for rank in planes_of(facts).ranks if rank.channel is not None]
    if not channels:
        return Skipped("no worker registers a channel of KV events (DYR0301)")
    by_plane: dict[str, list[RankFacts]] = {}
    for rank in channels:
        by_plane.setdefault(NATS if rank.channel == NATS else "ZMQ", []).append(rank)
    findings = [
        found(plane, channels=f"{len(ranks):,}", why=_first_reason(ranks))
        for plane, ranks in sorted(by_plane.items())
        if not any(rank.state.connected for rank in ranks)
    ]
    connected = sum(rank.state.connected for rank in channels)
    summary = f"{connected} of {count(len(channels), 'channel')}"
    return outcome(findings, summary=f"{'/'.join(sorted(by_plane))}, {summary}")


def _first_reason(ranks: Sequence[RankFacts]) -> str:
    return next((f": {rank.disconnected}" for rank in ranks if rank.disconnected), "")


def nats_is_lost(facts: CheckFacts) -> bool:
    """Whether no channel over NATS connects: all of them have one server, and DYR0103 shows it."""
    ranks = [rank for rank in planes_of(facts).ranks if rank.channel == NATS]
    return bool(ranks) and not any(rank.state.connected for rank in ranks)


def _call_home(facts: CheckFacts) -> Outcome:
    queried = [rank for rank in planes_of(facts).ranks if rank.indexer is not None]
    if not queried:
        return Skipped("no worker has a local indexer (DYR0304)")
    back = sum(rank.called_back is True for rank in queried)
    if back:
        return Passed(f"{back} of {count(len(queried), 'rank')}")
    silent = [rank for rank in queried if rank.called_back is False]
    if not silent:
        return Skipped("no worker accepted a connection (DYR0303)", unread=True)
    return outcome(found(rank.name, why=rank.refusal or "") for rank in silent)


PLANE_CHECKS: Final[Sequence[Check[CheckFacts]]] = (
    Check("DYR0101", _discovery_answers, (has_backend,)),
    Check("DYR0102", _workers_are_registered, (entries_known,)),
    Check("DYR0103", _event_plane, (entries_known, has_workers, reachable)),
    Check("DYR0104", _call_home, (entries_known, has_workers, reachable)),
)


# -- workers ---------------------------------------------------------------------------------------


def deployment_of(facts: CheckFacts) -> Deployment:
    """The deployment, for checks that require it."""
    assert facts.deployment is not None
    return facts.deployment


def problems(
    code: ProblemCode,
    summary: Callable[[Deployment], str] = lambda _: "",
    nothing: Callable[[Deployment], str] = lambda _: "",
) -> Callable[[CheckFacts], Outcome]:
    """A check whose findings are the problems of one kind in the registered entries.

    ``nothing``: why no entry was checked, empty where one was.
    """

    def judge(facts: CheckFacts) -> Outcome:
        deployment = deployment_of(facts)
        problems = [problem for problem in deployment.problems if problem.code is code]
        return outcome(
            [found(p.subject, why=p.message) for p in problems],
            summary=summary(deployment),
            nothing=nothing(deployment),
        )

    return judge


def _malformed_entries(facts: CheckFacts, *, known: bool) -> Outcome:
    problems = [p for p in deployment_of(facts).problems if p.code is ProblemCode.MALFORMED_ENTRY]
    chosen = [p for p in problems if p.subject.startswith(_KNOWN_KEYS) is known]
    return outcome(
        (found(p.subject, why=p.message) for p in chosen), nothing=_no_entries(deployment_of(facts))
    )


def _entries_are_readable(facts: CheckFacts) -> Outcome:
    return _malformed_entries(facts, known=True)


def _known_kinds(facts: CheckFacts) -> Outcome:
    return _malformed_entries(facts, known=False)


def _block_sizes(deployment: Deployment) -> str:
    sizes = {item.worker.block_size for item in deployment.workers}
    return ", ".join(f"{size} tokens" for size in sorted(sizes))


def _no_router_config(deployment: Deployment) -> str:
    advertised = any(item.card.router_config is not None for item in deployment.workers)
    return "" if advertised else "no worker's card has router settings"


def _topology(deployment: Deployment) -> str:
    return ", ".join(sorted({name for item in deployment.workers for name in item.worker.domains}))


def _no_topology(deployment: Deployment) -> str:
    return "" if _topology(deployment) else "no worker publishes a domain"


def _no_entries(deployment: Deployment) -> str:
    """That nothing is registered that could be wrong."""
    there = deployment.workers or deployment.problems or deployment.namespaces
    return "" if there else "no entries are registered (DYR0102)"


def _roles(deployment: Deployment) -> str:
    roles = [item.worker.role for item in deployment.workers]
    return ", ".join(f"{roles.count(role)} {role.value}" for role in Role if role in roles)


def _required_domains_have_decode(facts: CheckFacts) -> Outcome:
    """Within a Dynamo namespace: there prefill workers hand over."""
    required: dict[tuple[str, str, str], list[RegisteredWorker]] = {}
    workers = deployment_of(facts).workers
    decode: set[tuple[str, str, str]] = set()
    for item in workers:
        if item.worker.role is Role.PREFILL:
            for taint in _required_taints(item):
                required.setdefault((*_pool_of(item), taint), []).append(item)
        elif item.worker.role is Role.DECODE:
            decode |= {(*_pool_of(item), taint) for taint in item.worker.runtime_config.taints}
    if not required:
        return Skipped("no prefill worker requires a domain")
    several = len({_pool_of(item)[0] for item in workers}) > 1
    findings = []
    for (namespace, model, taint), members in sorted(required.items()):
        if (namespace, model, taint) not in decode:
            domain = taint.partition("=")[2]
            many = count(len(members), "prefill worker")
            subject = f"{model} in namespace {namespace}" if several else model
            findings.append(found(subject, workers=many, domain=domain, taint=taint))
    return outcome(findings, summary=f"{len({taint for *_, taint in required})} required")


def _required_taints(item: RegisteredWorker) -> Iterator[str]:
    try:
        derived = implied_constraints(item.worker, (), None)
    except PolicyUnderivable:
        return  # DYR0205 reports it
    for constraint in derived.constraints:
        if constraint.kind == "required":
            yield constraint.taint


def _needs_are_met(facts: CheckFacts) -> Outcome:
    there: dict[tuple[str, str], set[str]] = {}
    workers = deployment_of(facts).workers
    for item in workers:
        there.setdefault(_pool_of(item), set()).add(item.worker.role.value)
    findings: list[Found] = []
    for item in workers:
        # Alternatives: every type of at least one group must be present.
        needs, (namespace, model) = item.card.needs, _pool_of(item)
        present = there[namespace, model]
        if needs and not any(present.issuperset(group) for group in needs):
            wanted = " or ".join(" and ".join(group) for group in needs)
            have = " and ".join(sorted(present))
            finding = found(namespace, model=model, have=have, needs=wanted)
            if finding not in findings:
                findings.append(finding)
    needing = any(item.card.needs for item in workers)
    nothing = "" if needing else "no worker's card names other roles that it needs"
    return outcome(findings, summary=_roles(deployment_of(facts)), nothing=nothing)


def _pool_of(item: RegisteredWorker) -> tuple[str, str]:
    return item.card.endpoint.namespace, item.worker.model


def _one_model(facts: CheckFacts) -> Outcome:
    by_namespace: dict[str, set[str]] = {}
    for item in deployment_of(facts).workers:
        namespace, model = _pool_of(item)
        by_namespace.setdefault(namespace, set()).add(model)
    several = {name: models for name, models in by_namespace.items() if len(models) > 1}
    summary = ", ".join(sorted({model for models in by_namespace.values() for model in models}))
    findings = [found(name, models=", ".join(sorted(models))) for name, models in several.items()]
    return outcome(findings, summary=summary)


_ENTRIES: Final = (entries_known,)
_WORKERS: Final = (entries_known, has_workers)

WORKER_CHECKS: Final[Sequence[Check[CheckFacts]]] = (
    Check("DYR0201", _entries_are_readable, _ENTRIES),
    Check("DYR0202", _known_kinds, _ENTRIES),
    Check("DYR0203", problems(ProblemCode.INSTANCE_WITHOUT_CARD, nothing=_no_entries), _ENTRIES),
    Check("DYR0204", problems(ProblemCode.CARD_WITHOUT_INSTANCE, nothing=_no_entries), _ENTRIES),
    Check("DYR0205", problems(ProblemCode.CARD_REJECTED, nothing=_no_entries), _ENTRIES),
    Check("DYR0206", problems(ProblemCode.UNKNOWN_ROLE, _roles, _no_entries), _ENTRIES),
    Check("DYR0207", problems(ProblemCode.BLOCK_SIZES_DIFFER, _block_sizes), _WORKERS),
    Check(
        "DYR0208",
        problems(ProblemCode.ROUTER_CONFIGS_DIFFER, lambda _: "all the same", _no_router_config),
        _WORKERS,
    ),
    Check("DYR0209", problems(ProblemCode.TOPOLOGY_MISSING, _topology, _no_topology), _WORKERS),
    Check("DYR0210", _required_domains_have_decode, _WORKERS),
    Check("DYR0211", _needs_are_met, _WORKERS),
    Check("DYR0212", _one_model, _WORKERS),
)
