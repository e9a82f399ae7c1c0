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
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics


def contested_models(observer: Observer) -> list[str]:
    """The models with workers of one set that have different versions of their card."""
    sets = observer.deployment.worker_sets
    return sorted({one.model for one in sets if len(one.versions) > 1})


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
    for one in observer.deployment.worker_sets:
        if len(one.versions) < 2:
            continue
        left = [
            _accepted(one, observer.deployment.worker_sets, cards, metrics, models.get(one.model))
            for metrics, models in zip(frontends, ready, strict=True)
        ]
        accepted = {version for versions in left for version in versions}
        if len(accepted) != 1:
            listed = [some_names(names[member] for member in ids) for ids in one.versions.values()]
            doubts.append(
                doubt(
                    "DYR0723",
                    worker_set=one.name,
                    versions=len(one.versions),
                    names=" | ".join(listed),
                )
            )
            continue
        [version] = accepted
        example = cards[one.versions[version][0]]
        for other, members in one.versions.items():
            if other != version:
                why = _difference(cards[members[0]], example)
                rejected |= dict.fromkeys(members, f"the frontend rejected its card: {why}")
    observer.reject(rejected)
    return doubts


def _accepted(
    one: WorkerSet,
    sets: Sequence[WorkerSet],
    cards: Mapping[int, ModelCard],
    metrics: FrontendMetrics,
    ready: ModelReadiness | None,
) -> set[str]:
    """The versions of the cards of a set that a frontend may have accepted."""
    left = set(one.versions)
    others = [
        other
        for other in sets
        if other is not one
        and (other.model, other.namespace, other.role) == (one.model, one.namespace, one.role)
    ]
    if ready is not None and all(len(other.versions) == 1 for other in others):
        uses = ready.workers(one.namespace, one.role.value)
        uses -= sum(len(other.worker_ids) for other in others)
        left = {version for version in left if len(one.versions[version]) == uses} or left
    # A frontend has load rows of workers that it sent requests to; none of rejected ones.
    loaded = {worker_id for worker_id, _ in metrics.rank_loads}
    used = {version for version in left if loaded & set(one.versions[version])}
    if len(used) == 1:
        return used
    facts = metrics.models.get(one.model)
    if facts is None or sum(other.model == one.model for other in sets) > 1:
        return left
    exported = (facts.kv_cache_block_size, facts.context_length)
    fitting = set()
    for version in left:
        card = cards[one.versions[version][0]]
        own = (card.block_size, card.context_length)
        if all(a is None or b is None or a == b for a, b in zip(exported, own, strict=True)):
            fitting.add(version)
    return fitting or left


def _difference(card: ModelCard, accepted: ModelCard) -> str:
    """Which fields of a card keep it out of the worker set of the accepted one."""
    found = [
        f"{title} {_tokens(getattr(card, name))} instead of {_tokens(getattr(accepted, name))}"
        for name, title in (("context_length", "context length"), ("block_size", "block size"))
        if getattr(card, name) != getattr(accepted, name)
    ]
    found += [
        f"other {title}"
        for name, title in (
            ("aliases", "aliases"),
            ("needs", "needs"),
            ("router_config", "router settings"),
            ("source_path", "model path"),
        )
        if getattr(card, name) != getattr(accepted, name)
    ]
    return ", ".join(found) or "other model files"


def _tokens(number: int | None) -> str:
    return "unset" if number is None else f"{number:,}"
