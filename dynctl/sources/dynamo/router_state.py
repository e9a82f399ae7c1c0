"""Settings and load of a live router, from cards and frontends, applied to the observing router.

Each function returns what stays unknown, as whole sentences for the user.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from dynctl.documents.route_result import UNKNOWN_LOAD
from dynctl.sources.dynamo.load_mirror import gauge_changes
from dynctl.sources.dynamo.observer import PRESET, Observer
from dynctl.sources.thresholds import Thresholds
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics, add_loads
from dynctl.wire.dynamo.router_settings import read_router_config
from router_core import ConfigSet, ThresholdsSet

MOST_NAMED: Final = 3


def take_settings(observer: Observer, thresholds: Mapping[str, Thresholds]) -> list[str]:
    """Apply the router settings of cards and frontends; returns the assumptions."""
    assumptions = []
    cards = [item.card.router_config for item in observer.deployment.workers]
    advertised = next((card for card in cards if card is not None), None)
    if advertised is None:
        assumptions.append(
            f"router settings are those of {PRESET}: no card advertises any "
            "(--set router_temperature=0.5 sets others)"
        )
    else:
        settings = read_router_config(advertised)
        observer.apply(ConfigSet({**settings.values, "decode_capacity_guard": False}))
        assumptions.append("router settings are those that the workers' cards advertise")
        assumptions += [f"not supported: {item}" for item in settings.not_followed]
    for model, values in thresholds.items():
        observer.apply(ThresholdsSet(model, values))
    return assumptions


def take_load(observer: Observer, frontends: Sequence[FrontendMetrics]) -> tuple[str, list[str]]:
    """Apply the load that frontends export, if any; returns (origin of the load, doubts)."""
    if frontends:
        mirrored = replicas_mirror(observer)
        loads = add_loads(frontends, mirrored=mirrored)
        for change in gauge_changes(observer.router.registry, loads):
            observer.apply(change)
        doubts = []
        if any(metrics.kv_routing is False for metrics in frontends):
            doubts.append("a frontend does not use router mode kv: this is the decision of mode kv")
        if len(frontends) > 1 and not mirrored:
            doubts.append(
                "the load of the frontends is added up; it is too high if they use "
                "--router-replica-sync, where each counts the others' load too"
            )
        many = "the /metrics of " + (
            "a frontend" if len(frontends) == 1 else f"{len(frontends)} frontends"
        )
        return many, doubts
    since = time.monotonic() - observer.load.since
    if observer.load.added:
        return f"replica-sync events of {since:.0f} s", [
            f"requests that began before these {since:.0f} s are not counted"
        ]
    return "kv_metrics" if observer.load.reports else UNKNOWN_LOAD, [
        "load is unknown, counted as none: name the frontends (--frontend http://HOST:8000)"
    ]


def replicas_mirror(observer: Observer) -> bool:
    """Whether a card has replica sync on: frontends send each other their load."""
    cards = [item.card.router_config or {} for item in observer.deployment.workers]
    routers = [card.get("kv_router_config") for card in cards]
    return any(isinstance(r, dict) and r.get("router_replica_sync") is True for r in routers)


def index_doubts(observer: Observer) -> list[str]:
    """One line for each reason why caches may be out of date."""
    names = {item.worker.worker_id: item.worker.name for item in observer.deployment.workers}
    reasons: dict[str, list[str]] = {}
    for (worker_id, _), why in observer.not_current().items():
        reasons.setdefault(why, []).append(names.get(worker_id, f"{worker_id:x}"))
    lines = []
    for why, workers in reasons.items():
        named = ", ".join(dict.fromkeys(workers[:MOST_NAMED]))
        more = f" and {len(workers) - MOST_NAMED} more" if len(workers) > MOST_NAMED else ""
        lines.append(f"cache contents of {named}{more} may be out of date: {why}")
    return lines
