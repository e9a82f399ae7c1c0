"""Settings and load of a live router, from cards and frontends, applied to the observing router.

Each function returns what stays unknown, as doubts about an answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dynctl.documents.doubts import Doubt, Varies, doubt, some_names
from dynctl.documents.route_result import UNKNOWN_LOAD
from dynctl.health.deployment import ProblemCode
from dynctl.sources.dynamo.load_mirror import gauge_changes
from dynctl.sources.dynamo.observer import PRESET, Observer
from dynctl.sources.thresholds import Thresholds
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics, add_loads
from dynctl.wire.dynamo.router_settings import CardSettings, read_router_config
from router_core import ConfigSet, ThresholdsSet

ADVERTISED: Final = "router settings are those that the workers' cards advertise"
#: Settings that decide, and values that a frontend may have; tried where its own are unknown.
_POSSIBLE: Final[Mapping[str, list[Any]]] = {
    "router_mode": ["round-robin", "random", "least-loaded"],
    "use_kv_events": [False],
    "overlap_score_credit": [0.0, 0.5, 2.0],
    "overlap_score_credit_decay": [1.0],
    "prefill_load_scale": [0.0, 0.5, 2.0, 4.0],
    "decode_active_request_weight": [1.0, 4.0],
    "router_track_active_blocks": [False],
    "router_track_prefill_tokens": [False],
    "router_assume_kv_reuse": [False],
    "router_queue_threshold": [1.0],
}
#: Contradictions that make an answer doubtful, so they are shown with it.
_DOUBTFUL: Final = (
    ProblemCode.BLOCK_SIZES_DIFFER,
    ProblemCode.ROUTER_CONFIGS_DIFFER,
    ProblemCode.UNKNOWN_ROLE,
    ProblemCode.CARD_REJECTED,
)
_TEMPERATURES: Final = [0.5, 1.0]
#: The lowest thresholds that make a rank with load busy, and one in the middle.
_THRESHOLDS: Final[Mapping[str, list[Any]]] = {
    "active_decode_blocks_threshold": [0.0, 0.5],
    "active_prefill_tokens_threshold": [0],
}


def take_settings(
    observer: Observer,
    thresholds: Mapping[str, Thresholds],
    frontends: Sequence[FrontendMetrics],
) -> tuple[list[str], list[Doubt]]:
    """Apply the router settings of cards and frontends; returns assumptions and doubts."""
    assumptions: list[str] = []
    cards = [item.card.router_config for item in observer.deployment.workers]
    advertised = next((card for card in cards if card is not None), None)
    if advertised is None:
        doubts = _assumed_settings(frontends)
    else:
        settings = read_router_config(advertised)
        observer.apply(ConfigSet({**settings.values, "decode_capacity_guard": False}))
        assumptions.append(ADVERTISED)
        doubts = _advertised_settings(settings)
    for model, values in thresholds.items():
        observer.apply(ThresholdsSet(model, values))
    return assumptions, doubts


def _assumed_settings(frontends: Sequence[FrontendMetrics]) -> list[Doubt]:
    """The doubts where no card advertises settings; metrics show the mode and its events."""
    unknown = dict(_POSSIBLE)
    if frontends and all(metrics.kv_routing for metrics in frontends):
        del unknown["router_mode"]
    if frontends and all(metrics.kv_events for metrics in frontends):
        del unknown["use_kv_events"]
    doubts = [
        doubt("DYR0711", varies=Varies(settings=unknown), preset=PRESET),
        doubt("DYR0712", varies=Varies(settings={"router_temperature": _TEMPERATURES})),
    ]
    if any(metrics.kv_routing and metrics.kv_events is False for metrics in frontends):
        why = "a frontend does not receive KV events"
        doubts.append(doubt("DYR0718", varies=Varies(overlap=True), why=why))
    return doubts if frontends else [*doubts, unknown_thresholds("no frontend is read")]


def _advertised_settings(settings: CardSettings) -> list[Doubt]:
    """The doubts about settings of the cards that are not followed, or not predictable."""
    doubts = [
        doubt("DYR0717", setting=f"{item.setting} {item.value}", effect=item.reason)
        for item in settings.not_followed
        if item.setting.rpartition(".")[2] not in ("use_kv_events", "router_queue_threshold")
    ]
    values = settings.values
    if not values["use_kv_events"]:
        why = "the workers' cards set use_kv_events off"
        doubts.append(doubt("DYR0718", varies=Varies(overlap=True), why=why))
    threshold = values["router_queue_threshold"]
    if threshold is not None:
        why = f"the workers' cards set router_queue_threshold {threshold:g}"
        varies = Varies(settings={"router_queue_threshold": [threshold]})
        doubts.append(doubt("DYR0713", varies=varies, why=why))
    if values.get("router_mode") == "round-robin":
        why = "the workers' cards set router mode round-robin"
        doubts.append(doubt("DYR0716", varies=Varies(turn=True), why=why))
    return doubts


def unknown_thresholds(why: str) -> Doubt:
    """The doubt where busy thresholds could not be read."""
    return doubt("DYR0714", varies=Varies(settings=dict(_THRESHOLDS)), why=why)


def take_load(observer: Observer, frontends: Sequence[FrontendMetrics]) -> tuple[str, list[Doubt]]:
    """Apply the load that frontends export, if any; returns (origin of the load, doubts)."""
    if frontends:
        mirrored = replicas_mirror(observer)
        loads = add_loads(frontends, mirrored=mirrored)
        for change in gauge_changes(observer.router.registry, loads):
            observer.apply(change)
        doubts = [doubt("DYR0715", varies=Varies(load="shared"))]
        if any(metrics.kv_routing is False for metrics in frontends):
            why = "a frontend does not use router mode kv; this is the decision of mode kv"
            modes = Varies(settings={"router_mode": _POSSIBLE["router_mode"]})
            doubts.append(doubt("DYR0716", varies=modes, why=why))
        if len(frontends) > 1 and not mirrored:
            count = len(frontends)
            added = Varies(load="fewer", copies=count)
            doubts.append(doubt("DYR0709", varies=added, frontends=count))
        many = "the /metrics of " + (
            "a frontend" if len(frontends) == 1 else f"{len(frontends)} frontends"
        )
        return many, doubts
    since = time.monotonic() - observer.load.since
    more = Varies(load="more")
    if observer.load.added:
        seconds = f"{since:.0f}"
        origin = f"replica-sync events of {seconds} s"
        return origin, [doubt("DYR0708", varies=more, seconds=seconds)]
    origin = "kv_metrics" if observer.load.reports else UNKNOWN_LOAD
    return origin, [doubt("DYR0707", varies=more)]


def replicas_mirror(observer: Observer) -> bool:
    """Whether a card has replica sync on: frontends send each other their load."""
    cards = [item.card.router_config or {} for item in observer.deployment.workers]
    routers = [card.get("kv_router_config") for card in cards]
    return any(isinstance(r, dict) and r.get("router_replica_sync") is True for r in routers)


def registration_doubts(observer: Observer) -> list[Doubt]:
    """The contradictions between registrations, which frontends may resolve in another way."""
    problems = observer.deployment.problems
    return [doubt("DYR0719", why=one.message) for one in problems if one.code in _DOUBTFUL]


def index_doubts(observer: Observer) -> list[Doubt]:
    """One doubt for each reason why caches may be out of date."""
    names = {item.worker.worker_id: item.worker.name for item in observer.deployment.workers}
    reasons: dict[str, list[str]] = {}
    for (worker_id, _), why in observer.not_current().items():
        reasons.setdefault(why, []).append(names.get(worker_id, f"{worker_id:x}"))
    return [
        doubt(
            "DYR0705",
            varies=Varies(overlap=True, workers=list(dict.fromkeys(workers))),
            workers=some_names(workers),
            why=why,
        )
        for why, workers in reasons.items()
    ]
