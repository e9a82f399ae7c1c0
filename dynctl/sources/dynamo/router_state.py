"""What cards and frontends tell of a live router, taken over by one that observes it.

Each says what could not be known: whole sentences for the person.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from dynctl.documents.route_result import UNKNOWN_LOAD
from dynctl.sources.dynamo.load_mirror import gauge_changes
from dynctl.sources.dynamo.observer import PRESET, Observer
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics, add_loads
from dynctl.wire.dynamo.router_settings import read_router_config
from router_core import ConfigSet, ThresholdsSet

Thresholds = dict[str, float | int | None]
MOST_NAMED: Final = 3


def take_settings(observer: Observer, thresholds: Mapping[str, Thresholds]) -> list[str]:
    """Take over what cards and frontends say of the router's settings; what is assumed."""
    said = []
    cards = [item.card.router_config for item in observer.deployment.workers]
    advertised = next((card for card in cards if card is not None), None)
    if advertised is None:
        said.append(
            f"router settings are those of {PRESET}: no card advertises any "
            "(--set router_temperature=0.5 tells others)"
        )
    else:
        settings = read_router_config(advertised)
        observer.apply(ConfigSet({**settings.values, "decode_capacity_guard": False}))
        said.append("router settings are those that the workers' cards advertise")
        said += [f"not followed: {item}" for item in settings.not_followed]
    for model, values in thresholds.items():
        observer.apply(ThresholdsSet(model, values))
    return said


def take_load(observer: Observer, told: Sequence[FrontendMetrics]) -> tuple[str, list[str]]:
    """Take over the load; (where it comes from, what is doubtful about it)."""
    if told:
        mirrored = replicas_mirror(observer)
        loads = add_loads(told, mirrored=mirrored)
        for change in gauge_changes(observer.router.registry, loads):
            observer.apply(change)
        doubts = []
        if any(metrics.kv_routing is False for metrics in told):
            doubts.append("a frontend does not route by kv: this is what kv mode would do")
        if len(told) > 1 and not mirrored:
            doubts.append(
                "the load of the frontends is added up; with --router-replica-sync each counts "
                "the others' too, and it is too high"
            )
        many = "the /metrics of " + ("a frontend" if len(told) == 1 else f"{len(told)} frontends")
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
    """Whether a card says that frontends tell each other their load."""
    cards = [item.card.router_config or {} for item in observer.deployment.workers]
    routers = [card.get("kv_router_config") for card in cards]
    return any(isinstance(r, dict) and r.get("router_replica_sync") is True for r in routers)


def index_doubts(observer: Observer) -> list[str]:
    """One line for each reason why caches may not be known up to now."""
    names = {item.worker.worker_id: item.worker.name for item in observer.deployment.workers}
    reasons: dict[str, list[str]] = {}
    for (worker_id, _), why in observer.not_current().items():
        reasons.setdefault(why, []).append(names.get(worker_id, f"{worker_id:x}"))
    lines = []
    for why, who in reasons.items():
        named = ", ".join(dict.fromkeys(who[:MOST_NAMED]))
        more = f" and {len(who) - MOST_NAMED} more" if len(who) > MOST_NAMED else ""
        lines.append(f"what {named}{more} cached may not be up to date: {why}")
    return lines
