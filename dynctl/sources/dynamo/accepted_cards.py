"""Which version of a card the frontends accepted into a worker set, where its workers have several.

A frontend accepts the version that it saw first, and never chooses the workers of the others. It
does not report which one that is, but what it exports shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynctl.documents.doubts import Doubt, doubt, some_names
from dynctl.documents.models import ModelReadiness
from dynctl.health.deployment import WorkerSet
from dynctl.serving.dynamo.observer import Observer
from dynctl.wire.dynamo.discovery import ModelCard
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics, ModelFacts


def contested_models(observer: Observer) -> list[str]:
    """The models with workers of one set that have different versions of their card."""
    sets = observer.deployment.worker_sets
    return sorted({worker_set.model for worker_set in sets if len(worker_set.versions) > 1})


def take_versions(
    observer: Observer,
    frontends: Sequence[FrontendMetrics],
    ready: Sequence[Mapping[str, ModelReadiness]],
) -> list[Doubt]:
    """Exclude the workers that the frontends rejected for their card; returns what stays unknown.

    A frontend accepts the version of a card that it saw first into a worker set. Which one that is
    follows from what it exports: counts of workers, loads, and facts about the model.
    """
    cards = {item.worker.worker_id: item.card for item in observer.deployment.workers}
    names = {item.worker.worker_id: item.worker.name for item in observer.deployment.workers}
    rejected: dict[int, str] = {}
    doubts = []
    sets = observer.deployment.worker_sets
    for contested in sets:
        if len(contested.versions) < 2:
            continue
        accepted: set[str] = set()
        for metrics, models in zip(frontends, ready, strict=True):
            accepted |= _accepted_versions(
                contested, sets, cards, metrics, models.get(contested.model)
            )
        if len(accepted) != 1:
            versions = contested.versions
            listed = [some_names(names[member] for member in ids) for ids in versions.values()]
            doubts.append(
                doubt(
                    "DYR0723",
                    worker_set=contested.name,
                    versions=len(versions),
                    names=" | ".join(listed),
                )
            )
            continue
        [version] = accepted
        example = cards[contested.versions[version][0]]
        for other, members in contested.versions.items():
            if other != version:
                why = _difference(cards[members[0]], example)
                rejected |= dict.fromkeys(members, f"the frontend rejected its card: {why}")
    observer.reject(rejected)
    return doubts


def _accepted_versions(
    contested: WorkerSet,
    sets: Sequence[WorkerSet],
    cards: Mapping[int, ModelCard],
    metrics: FrontendMetrics,
    ready: ModelReadiness | None,
) -> set[str]:
    """The versions of the cards of a set that a frontend may have accepted."""
    versions = contested.versions
    left = set(versions) if ready is None else _as_many(contested, sets, ready)
    # A frontend has load rows of workers that it sent requests to; none of rejected ones.
    loaded = {worker_id for worker_id, _ in metrics.rank_loads}
    used = {version for version in left if loaded & set(versions[version])}
    if len(used) == 1:
        return used
    facts = metrics.models.get(contested.model)
    if facts is None or sum(other.model == contested.model for other in sets) > 1:
        return left
    examples = {version: cards[versions[version][0]] for version in left}
    return {version for version, card in examples.items() if _fits(card, facts)} or left


def _as_many(contested: WorkerSet, sets: Sequence[WorkerSet], ready: ModelReadiness) -> set[str]:
    """The versions that as many workers have as the frontend uses of the set; all where that shows
    nothing."""
    pool = (contested.model, contested.namespace, contested.role)
    others = [
        other
        for other in sets
        if other is not contested and (other.model, other.namespace, other.role) == pool
    ]
    versions = contested.versions
    if any(len(other.versions) != 1 for other in others):
        return set(versions)
    uses = ready.workers(contested.namespace, contested.role.value)
    uses -= sum(len(other.worker_ids) for other in others)
    return {version for version, ids in versions.items() if len(ids) == uses} or set(versions)


def _fits(card: ModelCard, facts: ModelFacts) -> bool:
    """Whether a card has the numbers that a frontend exports of its model, where both have them."""
    pairs = (
        (card.block_size, facts.kv_cache_block_size),
        (card.context_length, facts.context_length),
    )
    return all(own is None or exported is None or own == exported for own, exported in pairs)


def _difference(card: ModelCard, accepted: ModelCard) -> str:
    """Which fields of a card keep it out of the worker set of the accepted one."""
    reasons = [
        f"{title} {_tokens(getattr(card, name))} instead of {_tokens(getattr(accepted, name))}"
        for name, title in (("context_length", "context length"), ("block_size", "block size"))
        if getattr(card, name) != getattr(accepted, name)
    ]
    reasons += [
        f"other {title}"
        for name, title in (
            ("aliases", "aliases"),
            ("needs", "needs"),
            ("router_config", "router settings"),
            ("source_path", "model path"),
        )
        if getattr(card, name) != getattr(accepted, name)
    ]
    return ", ".join(reasons) or "other model files"


def _tokens(number: int | None) -> str:
    return "unset" if number is None else f"{number:,}"
