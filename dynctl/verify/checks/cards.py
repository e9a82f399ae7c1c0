"""Checks of the topology in model cards: DYT08."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from dynctl.base.json_fields import mapping, sequence
from dynctl.findings.runner import Check, Outcome, Skipped, found
from dynctl.health.deployment import RegisteredWorker, topology_gaps
from dynctl.verify.chain import LinkName, WorkerChain
from dynctl.verify.graph_policy import GraphPolicy
from dynctl.verify.join import JoinedFacts
from dynctl.verify.needs import (
    differing,
    first_skip,
    has_policy,
    has_workers,
    in_cluster,
    live_workers,
    pod_of,
    unlabelled_graphs,
)
from dynctl.verify.pod_spec import (
    DOMAIN_ENV,
    ENABLED_ENV,
    ENFORCEMENT_ENV,
    PATH_ENV,
    WEIGHT_ENV,
    engine,
    env_differences,
    is_weight,
)
from dynctl.verify.registration import Cards, all_workers, cards_of, registrations_read
from dynctl.verify.root_causes import wrong_pod_spec
from dynctl.verify.wording import CheckTally, restart_fix, some
from router_core import canonical_taint

_LONGEST: Final = 80


# -- against the link before -----------------------------------------------------------------------


def _has_topology(joined: JoinedFacts) -> Outcome:
    """Without workers whose volume or variables are wrong: DYT0501 and DYT0502 report those."""
    skipped = first_skip(joined, (registrations_read,) if joined.cluster is None else _GRAPHS)
    if skipped is not None:
        return skipped
    if joined.cluster is None:
        return _same_as_other_workers(joined)
    cards = _policy_cards(joined)
    wrong = []
    for worker in cards.workers:
        missing = list(_missing_domains(worker))
        if missing:
            image = "if the new pod is the same, use an image whose runtime publishes topology"
            fix = f"{restart_fix(pod_of(worker))}; {image}"
            wrong.append(found(worker.subject, what="; ".join(missing), fix=fix))
    return cards.outcome(wrong)


def _policy_cards(joined: JoinedFacts) -> Cards:
    """The cards of graphs with a policy, without workers whose pod spec is wrong."""
    cards = cards_of(joined, live_workers(joined))
    cards.tally.unread += unlabelled_graphs(joined)
    kept = []
    for worker in cards.workers:
        explained = wrong_pod_spec(worker, ENABLED_ENV, PATH_ENV)
        if explained:
            cards.tally.explained.append(explained)
        else:
            kept.append(worker)
    cards.workers = kept
    return cards


def _missing_domains(worker: WorkerChain) -> Iterator[str]:
    """The domains that are missing in its card, compared with the nearest known link."""
    for domain, chain in worker.chains.items():
        for gap in chain.breaks():
            if gap.link is LinkName.CARD and gap.value is None:
                yield f"its model card has no {domain}, the {gap.before} has {gap.expected}"


def _same_as_other_workers(joined: JoinedFacts) -> Outcome:
    """Without a cluster: a worker has topology, and the domains of policies, where the other
    workers of its model have them. DYR0209 compares all domains."""
    groups = _by_model(joined.loose)
    wrong = []
    fix = "restart it with its topology: dynctl topology render shows the settings"
    for (_, model), group in sorted(groups.items()):
        members = sorted(group, key=lambda worker: worker.name)
        published = [
            {name for item in worker.cards for name in _domains(item)} for worker in members
        ]
        gaps = topology_gaps(model, published, _policy_domains(members))
        for worker, gap in zip(members, gaps, strict=True):
            if gap:
                wrong.append(found(worker.subject, what=gap, fix=fix))
    if not any(_domains(item) for worker in joined.loose for item in worker.cards):
        return Skipped("no worker publishes topology")
    return CheckTally("worker", len(joined.loose), wrong).outcome()


def _policy_domains(workers: Sequence[WorkerChain]) -> set[str]:
    """The domains of the KV transfer policies in the cards of these workers."""
    configs = [item.card.runtime_config for worker in workers for item in worker.cards]
    domains = [config.get("kv_transfer_domain") for config in configs]
    return {domain for domain in domains if isinstance(domain, str)}


def _by_model(workers: Sequence[WorkerChain]) -> dict[tuple[str, str], list[WorkerChain]]:
    """``(pool, model)`` -> workers. A pool is a graph, or without graphs a Dynamo namespace."""
    groups: dict[tuple[str, str], list[WorkerChain]] = defaultdict(list)
    for worker in workers:
        for model in dict.fromkeys(item.card.name for item in worker.cards):
            pool = worker.graph or worker.cards[0].card.endpoint.namespace
            groups[pool, model].append(worker)
    return groups


def _domains(item: RegisteredWorker) -> Mapping[str, Any]:
    return mapping(item.card.runtime_config.get("topology_domains"))


def _matches_file(joined: JoinedFacts) -> Outcome:
    cards = _policy_cards(joined)
    wrong = []
    for worker in cards.workers:
        differs = [
            f"{domain} is {gap.value}, the {gap.before} has {gap.expected}"
            for domain, chain in worker.chains.items()
            for gap in chain.breaks()
            if gap.link is LinkName.CARD and gap.value is not None
        ]
        if differs:
            wrong.append(differing(worker, differs))
    return cards.outcome(wrong)


# -- the policy ------------------------------------------------------------------------------------


def _matches_policy(joined: JoinedFacts) -> Outcome:
    """Not a card without topology (DYT0801), nor one that matches wrong variables (DYT0501)."""
    cards = cards_of(joined, live_workers(joined))
    wrong = []
    for worker in cards.workers:
        differs = _policy_differences(worker)
        if differs:
            wrong.append(differing(worker, differs))
    return cards.outcome(wrong)


def _policy_differences(worker: WorkerChain) -> list[str]:
    policy = worker.policy
    if policy is None or worker.pod is None:
        return []
    main = engine(worker.pod)
    wrong_variables = {} if main is None else env_differences(main, policy)
    env = {} if main is None else main.env
    differences: dict[str, None] = {}
    for item in worker.cards:
        config = item.card.runtime_config
        if not _domains(item) and config.get("kv_transfer_domain") is None:
            continue
        for variable, text in _differing_fields(config, policy):
            value = config.get(_FIELDS[variable])
            if not (variable in wrong_variables and _equals(env.get(variable), value)):
                differences[text] = None
    return list(differences)


_FIELDS: Final = {
    DOMAIN_ENV: "kv_transfer_domain",
    ENFORCEMENT_ENV: "kv_transfer_enforcement",
    WEIGHT_ENV: "kv_transfer_preferred_weight",
}


def _differing_fields(config: Mapping[str, Any], policy: GraphPolicy) -> Iterator[tuple[str, str]]:
    """The source variable of each field that differs, and the difference as text."""
    for variable, wanted in ((DOMAIN_ENV, policy.domain), (ENFORCEMENT_ENV, policy.enforcement)):
        value = config.get(_FIELDS[variable])
        if value != wanted:
            yield variable, f"{_FIELDS[variable]} is {_value_text(value)}, the policy has {wanted}"
    weight = config.get(_FIELDS[WEIGHT_ENV])
    if not is_weight(weight, policy.weight):
        wanted = "none" if policy.weight is None else f"{policy.weight:.9g}"
        yield WEIGHT_ENV, f"{_FIELDS[WEIGHT_ENV]} is {_value_text(weight)}, the policy has {wanted}"


def _equals(variable: str | None, value: object) -> bool:
    """Whether a variable has the same value as a card's field."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return is_weight(variable, float(value))
    return variable == value


def _value_text(value: Any) -> str:
    return "not set" if value is None else str(value)[:_LONGEST]


# -- taints ----------------------------------------------------------------------------------------


def _has_taints(joined: JoinedFacts) -> Outcome:
    cards = cards_of(joined, all_workers(joined))
    wrong, carrying = [], 0
    for worker in cards.workers:
        carrying += any(map(_domains, worker.cards))
        missing = list(
            dict.fromkeys(taint for item in worker.cards for taint in _missing_taints(item))
        )
        if missing:
            wrong.append(found(worker.subject, missing=", ".join(missing)))
    if cards.workers and not wrong and not carrying:
        return Skipped("no worker publishes topology")
    return cards.outcome(wrong)


def _missing_taints(item: RegisteredWorker) -> Iterator[str]:
    """The missing taints of its domains."""
    published = sequence(item.card.runtime_config.get("taints"))
    taints = {taint for taint in published if isinstance(taint, str)}
    for domain, value in _domains(item).items():
        taint = canonical_taint(domain, str(value))
        if taint not in taints:
            yield taint


# -- one policy a model ----------------------------------------------------------------------------


def _one_policy(joined: JoinedFacts) -> Outcome:
    """Without workers that differ from their graph: other codes report those."""
    cards = cards_of(joined, all_workers(joined))
    subjects = {graph.name: graph.subject for graph in joined.graphs}
    wrong = []
    for (pool, model), members in sorted(_by_model(cards.workers).items()):
        groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for worker in members:
            for config in _comparable_configs(worker, model):
                groups[_policy_of(config)].append(worker.name)
        if len(groups) > 1:
            ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
            texts = "; ".join(f"{' '.join(key)}: {some(names)}" for key, names in ordered)
            wrong.append(found(subjects.get(pool, f"Model {model}"), model=model, groups=texts))
    return cards.outcome(wrong)


def _comparable_configs(worker: WorkerChain, model: str) -> Iterator[Mapping[str, Any]]:
    """The runtime configs of a worker's cards that have topology, as its graph wants it."""
    policy = worker.policy if worker.pod is not None else None
    for item in worker.cards:
        config = item.card.runtime_config
        if policy is not None and any(True for _ in _differing_fields(config, policy)):
            continue
        if item.card.name == model and (_domains(item) or config.get("kv_transfer_domain")):
            yield config


def _policy_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The KV transfer policy of a card as words; weights with the precision of a float32."""
    domain = config.get("kv_transfer_domain")
    if domain is None:
        return ("no policy",)
    weight = config.get("kv_transfer_preferred_weight")
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    enforcement = config.get("kv_transfer_enforcement") or "required"
    words = [str(domain)[:_LONGEST], str(enforcement)[:_LONGEST]]
    if weight is not None:
        words.append(f"{float(weight):.6g}" if number else str(weight)[:_LONGEST])
    return tuple(words)


_GRAPHS: Final = (in_cluster, has_policy, has_workers)


CARD_CHECKS: Final[Sequence[Check[JoinedFacts]]] = (
    Check("DYT0801", _has_topology),
    Check("DYT0802", _matches_file, _GRAPHS),
    Check("DYT0803", _matches_policy, _GRAPHS),
    Check("DYT0804", _has_taints, (registrations_read,)),
    Check("DYT0805", _one_policy, (registrations_read,)),
)
