"""Settings and load of a live router, from cards and frontends, applied to the observing router.

Each function returns what stays unknown, as doubts about an answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from dynctl.documents.route_result import UNKNOWN_LOAD, Doubt, doubt, some_names
from dynctl.sources.dynamo.load_mirror import gauge_changes
from dynctl.sources.dynamo.observer import PRESET, Observer
from dynctl.sources.thresholds import Thresholds
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics, add_loads
from dynctl.wire.dynamo.router_settings import read_router_config
from router_core import ConfigSet, ThresholdsSet

ADVERTISED: Final = "router settings are those that the workers' cards advertise"


def take_settings(
    observer: Observer, thresholds: Mapping[str, Thresholds]
) -> tuple[list[str], list[Doubt]]:
    """Apply the router settings of cards and frontends; returns assumptions and doubts."""
    assumptions, doubts = [], []
    cards = [item.card.router_config for item in observer.deployment.workers]
    advertised = next((card for card in cards if card is not None), None)
    if advertised is None:
        doubts.append(doubt("DYR0711", preset=PRESET))
    else:
        settings = read_router_config(advertised)
        observer.apply(ConfigSet({**settings.values, "decode_capacity_guard": False}))
        assumptions.append(ADVERTISED)
        doubts += [
            doubt("DYR0717", setting=f"{item.setting} {item.value}", effect=item.reason)
            for item in settings.not_followed
        ]
    for model, values in thresholds.items():
        observer.apply(ThresholdsSet(model, values))
    return assumptions, doubts


def take_load(observer: Observer, frontends: Sequence[FrontendMetrics]) -> tuple[str, list[Doubt]]:
    """Apply the load that frontends export, if any; returns (origin of the load, doubts)."""
    if frontends:
        mirrored = replicas_mirror(observer)
        loads = add_loads(frontends, mirrored=mirrored)
        for change in gauge_changes(observer.router.registry, loads):
            observer.apply(change)
        doubts = []
        if any(metrics.kv_routing is False for metrics in frontends):
            doubts.append(doubt("DYR0716"))
        if len(frontends) > 1 and not mirrored:
            doubts.append(doubt("DYR0709", frontends=len(frontends)))
        many = "the /metrics of " + (
            "a frontend" if len(frontends) == 1 else f"{len(frontends)} frontends"
        )
        return many, doubts
    since = time.monotonic() - observer.load.since
    if observer.load.added:
        return f"replica-sync events of {since:.0f} s", [doubt("DYR0708", seconds=f"{since:.0f}")]
    return "kv_metrics" if observer.load.reports else UNKNOWN_LOAD, [doubt("DYR0707")]


def replicas_mirror(observer: Observer) -> bool:
    """Whether a card has replica sync on: frontends send each other their load."""
    cards = [item.card.router_config or {} for item in observer.deployment.workers]
    routers = [card.get("kv_router_config") for card in cards]
    return any(isinstance(r, dict) and r.get("router_replica_sync") is True for r in routers)


def index_doubts(observer: Observer) -> list[Doubt]:
    """One doubt for each reason why caches may be out of date."""
    names = {item.worker.worker_id: item.worker.name for item in observer.deployment.workers}
    reasons: dict[str, list[str]] = {}
    for (worker_id, _), why in observer.not_current().items():
        reasons.setdefault(why, []).append(names.get(worker_id, f"{worker_id:x}"))
    return [
        doubt("DYR0705", workers=some_names(workers), why=why) for why, workers in reasons.items()
    ]
