"""Settings and load of a live router, from cards and frontends, applied to the observing router.

Each function returns what stays unknown, as doubts about an answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from dynctl.documents.doubts import Doubt, Varies, doubt, some_names
from dynctl.documents.route_result import UNKNOWN_LOAD
from dynctl.documents.thresholds import Thresholds
from dynctl.health.deployment import ProblemCode, RegisteredWorker
from dynctl.serving.dynamo.load_mirror import gauge_changes, known_as_sums
from dynctl.serving.dynamo.observer import PRESET, Observer
from dynctl.sources.dry_run import mode_doubts
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics, add_loads
from dynctl.wire.dynamo.router_settings import CardSettings, read_router_config
from router_core import THRESHOLD_SETTINGS, ConfigSet, Role, ThresholdsSet, Worker

ADVERTISED: Final = "router settings are those that the workers' cards advertise"
#: Settings that decide, and values that a frontend may have; tried where its own are unknown.
_POSSIBLE: Final[Mapping[str, list[Any]]] = {
    "router_mode": [
        "round-robin",
        "random",
        "power-of-two",
        "least-loaded",
        "direct",
        "device-aware-weighted",
    ],
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
#: Contradictions that make an answer doubtful, so they are shown with it. Cards of one worker set
#: with different block sizes are two versions (DYR0723); other sets may have other block sizes.
_DOUBTFUL: Final = (
    ProblemCode.ROUTER_CONFIGS_DIFFER,
    ProblemCode.UNKNOWN_ROLE,
    ProblemCode.CARD_REJECTED,
)
#: Where settings of a live router are read.
_CARDS: Final = "the workers' cards"
_METRICS: Final = "the frontends' /metrics"
_BUSY_THRESHOLD: Final = "frontend /busy_threshold"
_DYNCTL_ONLY: Final = "Dynamo has no such setting"
#: Settings of dynctl's own router -> their value for a router that does not have them.
_NOT_IN_DYNAMO: Final[Mapping[str, Any]] = {
    "decode_capacity_guard": False,
    "router_taints_in_all_modes": False,
    "conditional_disagg_require_can_prefill": False,
    "kv_transfer_domain": None,
    "kv_transfer_enforcement": None,
    "kv_transfer_preferred_weight": None,
    "router_max_tree_size": None,
}
_TEMPERATURES: Final = [0.5, 1.0]
#: Divides any load to nothing.
_ANY_PART: Final = 1 << 40
#: The lowest thresholds that make a rank with load busy, and one in the middle.
_THRESHOLDS: Final[Mapping[str, list[Any]]] = {
    "active_decode_blocks_threshold": [0.0, 0.5],
    "active_prefill_tokens_threshold": [0],
}


def known_settings(
    observer: Observer,
    thresholds: Mapping[str, Thresholds],
    frontends: Sequence[FrontendMetrics] = (),
) -> dict[str, tuple[Any, str]]:
    """The settings of the live router that are known: name -> (value, where it was read).

    Cards decide every setting. Without them a frontend shows a few: its mode, whether it reads
    caches, and busy thresholds (where all models have the same).
    """
    known = {name: (value, _DYNCTL_ONLY) for name, value in _NOT_IN_DYNAMO.items()}
    known |= {name: (value, _METRICS) for name, value in _shown_settings(frontends).items()}
    advertised = _advertised(observer)
    if advertised is not None:
        values = read_router_config(advertised).values
        known |= {name: (value, _CARDS) for name, value in values.items()}
    for name in THRESHOLD_SETTINGS:
        settled = {values[name] for values in thresholds.values()}
        if len(settled) == 1:
            known[name] = (settled.pop(), _BUSY_THRESHOLD)
    return known


def _shown_settings(frontends: Sequence[FrontendMetrics]) -> dict[str, Any]:
    """The settings that the metrics of all frontends show."""
    settings: dict[str, Any] = {}
    if {frontend.kv_routing for frontend in frontends} != {True}:
        return settings
    settings["router_mode"] = "kv"
    if all(frontend.uses_caches is False for frontend in frontends):
        settings["overlap_score_credit"] = 0.0
    if all(frontend.kv_events for frontend in frontends):
        settings["use_kv_events"] = True
    elif all(frontend.kv_events is False and frontend.uses_caches for frontend in frontends):
        settings["use_kv_events"] = False
    return settings


def take_settings(
    observer: Observer,
    thresholds: Mapping[str, Thresholds],
    frontends: Sequence[FrontendMetrics],
) -> tuple[list[str], list[Doubt]]:
    """Apply the router settings of cards and frontends; returns assumptions and doubts."""
    assumptions: list[str] = []
    advertised = _advertised(observer)
    if advertised is None:
        known = known_settings(observer, thresholds, frontends)
        if "overlap_score_credit" in known:
            observer.apply(ConfigSet({"overlap_score_credit": known["overlap_score_credit"][0]}))
        doubts = [*_assumed_settings(known, frontends), *_bypass_doubts(observer)]
    else:
        settings = read_router_config(advertised)
        observer.apply(ConfigSet({**settings.values, "decode_capacity_guard": False}))
        assumptions.append(ADVERTISED)
        doubts = _advertised_settings(settings)
    for model, values in thresholds.items():
        observer.apply(ThresholdsSet(model, values))
    return assumptions, [*doubts, *_busy_doubts(observer)]


def _advertised(observer: Observer) -> Mapping[str, Any] | None:
    """The router settings of the first card that has some."""
    cards = (item.card.router_config for item in observer.deployment.workers)
    return next((card for card in cards if card is not None), None)


def _busy_doubts(observer: Observer) -> Iterator[Doubt]:
    """A doubt where workers may be latched as busy by reports of a time before this observer."""
    workers = [item.worker for item in observer.deployment.workers]
    latched = [worker.name for worker in workers if _was_busy(observer, worker)]
    unknown = [worker.name for worker in workers if _lacks_report(observer, worker)]
    if unknown:
        yield doubt("DYR0742", workers=some_names(unknown))
    if latched:
        yield doubt("DYR0746", workers=some_names(latched))


def _was_busy(observer: Observer, worker: Worker) -> bool:
    """Whether a report of a rank was over its threshold, and the rank is not busy now."""
    router = observer.router
    for rank in worker.ranks:
        slot = router.registry.slot(worker.worker_id, rank)
        if slot is None or router.busy.busy_ranks >> slot & 1:
            continue
        if (worker.worker_id, rank) in observer.load.over:
            return True
    return False


def _lacks_report(observer: Observer, worker: Worker) -> bool:
    """Whether a report that is not known could have made the worker busy."""
    threshold = observer.router.busy.thresholds(worker.model).active_decode_blocks_threshold
    if threshold is None or worker.runtime_config.total_kv_blocks is None or threshold >= 1:
        return False  # no report is above a threshold of 1
    return any((worker.worker_id, rank) not in observer.load.reported for rank in worker.ranks)


def _bypass_doubts(observer: Observer) -> Iterator[Doubt]:
    """A doubt where conditional disaggregation may leave out the prefill hop.

    It depends on what decode workers cache, which they publish only for this.
    """
    names = [
        item.worker.name
        for item in observer.deployment.workers
        if item.worker.role is Role.DECODE and item.sources
    ]
    if names:
        varies = Varies(settings={"conditional_disagg_enabled": [True]})
        yield doubt("DYR0743", varies=varies, workers=some_names(names))


def _assumed_settings(
    known: Mapping[str, tuple[Any, str]], frontends: Sequence[FrontendMetrics]
) -> list[Doubt]:
    """The doubts where no card advertises settings. ``known``: those that the metrics show."""
    unknown = {name: values for name, values in _POSSIBLE.items() if name not in known}
    if known.get("overlap_score_credit", (1.0, ""))[0] == 0:
        # Then the router reads no caches, whatever the switch for their events says.
        unknown.pop("use_kv_events", None)
    doubts = [
        doubt("DYR0711", varies=Varies(settings=unknown), preset=PRESET),
        doubt("DYR0712", varies=Varies(settings={"router_temperature": _TEMPERATURES})),
    ]
    if any(
        frontend.kv_routing and frontend.kv_events is False and frontend.uses_caches is not False
        for frontend in frontends
    ):
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
    mode = values.get("router_mode", "")
    doubts += mode_doubts(mode, f"the workers' cards set router mode {mode}")
    return doubts


def unknown_thresholds(why: str) -> Doubt:
    """The doubt where busy thresholds could not be read."""
    return doubt("DYR0714", varies=Varies(settings=dict(_THRESHOLDS)), why=why)


def take_load(observer: Observer, frontends: Sequence[FrontendMetrics]) -> tuple[str, list[Doubt]]:
    """Apply the load that frontends export, if any; returns (origin of the load, doubts).

    Requests seen in replica-sync events are known one by one; what is beyond them in the gauges of
    the frontends is known as sums.
    """
    since = time.monotonic() - observer.load.since
    events = f"replica-sync events of {since:.0f} s"
    if not frontends:
        more = Varies(load="more")
        if observer.load.added:
            return events, [doubt("DYR0708", varies=more, seconds=f"{since:.0f}")]
        origin = "kv_metrics" if observer.load.reports else UNKNOWN_LOAD
        return origin, [doubt("DYR0707", varies=more)]
    # Without a publisher of active requests no frontend counts the requests of another.
    alone = not observer.deployment.sequences
    mirrored = replicas_mirror(observer) or len(observer.load.routers) >= len(frontends)
    loads = add_loads(frontends, mirrored=mirrored)
    for change in gauge_changes(observer.router, loads, observer.load.earlier):
        observer.apply(change)
    doubts = list(_metrics_doubts(frontends, alone=alone, mirrored=mirrored))
    many = "a frontend" if len(frontends) == 1 else f"{len(frontends)} frontends"
    seen = f" and {events}" if observer.load.added else ""
    return f"the /metrics of {many}{seen}", [*doubts, *_sum_doubts(observer, alone=alone)]


def _metrics_doubts(
    frontends: Sequence[FrontendMetrics], *, alone: bool, mirrored: bool
) -> Iterator[Doubt]:
    """Doubts about load that several frontends count. ``alone``: each counts only its own
    requests; ``mirrored``: all count the requests of all."""
    if any(metrics.kv_routing is False for metrics in frontends):
        why = "a frontend does not use router mode kv; this is the decision of mode kv"
        modes = Varies(settings={"router_mode": _POSSIBLE["router_mode"]})
        yield doubt("DYR0716", varies=modes, why=why)
    count = len(frontends)
    if count == 1 or mirrored:
        return
    if not alone:
        yield doubt("DYR0709", varies=Varies(load="fewer", copies=count), frontends=count)
    elif any(_loads_of(frontend) != _loads_of(frontends[0]) for frontend in frontends):
        part = Varies(load="fewer", copies=_ANY_PART)
        yield doubt("DYR0740", varies=part, frontends=count)


def _loads_of(metrics: FrontendMetrics) -> dict[tuple[int, int], tuple[int, int]]:
    """The load of the ranks that have any, in blocks and tokens."""
    return {
        rank: (load.active_decode_blocks, load.active_prefill_tokens)
        for rank, load in metrics.rank_loads.items()
        if load.active_decode_blocks or load.active_prefill_tokens
    }


def _sum_doubts(observer: Observer, *, alone: bool) -> Iterator[Doubt]:
    """Doubts about load that is known as sums. ``alone``: no router publishes its requests."""
    sums, registry = known_as_sums(observer.router), observer.router.registry
    if sums:
        names = list(dict.fromkeys(registry.worker(load.slot).name for load in sums))
        yield doubt("DYR0715", varies=Varies(load="shared", workers=names))
    stale = [registry.worker(load.slot).name for load in sums if load.prefill_tokens]
    if stale and not alone:
        part = Varies(load="fewer", copies=_ANY_PART, workers=list(dict.fromkeys(stale)))
        yield doubt("DYR0741", varies=part, workers=some_names(stale))


def replicas_mirror(observer: Observer) -> bool:
    """Whether a card has replica sync on: frontends send each other their load."""
    cards = [item.card.router_config or {} for item in observer.deployment.workers]
    routers = [card.get("kv_router_config") for card in cards]
    return any(isinstance(r, dict) and r.get("router_replica_sync") is True for r in routers)


def registration_doubts(observer: Observer) -> list[Doubt]:
    """The contradictions between registrations, which frontends may resolve in another way, workers
    without KV events, and fields of the cards that are not known."""
    problems = observer.problems
    doubts = [
        doubt("DYR0719", why=problem.message) for problem in problems if problem.code in _DOUBTFUL
    ]
    sets = observer.deployment.worker_sets
    for namespace, roles in dict.fromkeys(
        (worker_set.namespace, worker_set.ambiguous) for worker_set in sets
    ):
        if roles:
            doubts.append(doubt("DYR0726", namespace=namespace, roles=" and ".join(roles)))
    silent = [problem.subject for problem in problems if problem.code is ProblemCode.EVENTS_MISSING]
    if silent:
        # Without a range to try: a tie between such workers is no draw either.
        doubts.append(doubt("DYR0790", workers=some_names(silent)))
    unknown: dict[tuple[str, ...], list[str]] = {}
    for item in observer.deployment.workers:
        if item.card.unknown_fields:
            unknown.setdefault(item.card.unknown_fields, []).append(item.worker.name)
    for fields, names in unknown.items():
        doubts.append(doubt("DYR0724", workers=some_names(names), fields=some_names(fields)))
    return doubts


def _unread(observer: Observer, item: RegisteredWorker) -> bool:
    """Whether the worker publishes what it caches, and a rank of it is not followed."""
    followed = observer.stream_states()
    ranks = item.sources if item.durable_events is None else item.worker.ranks
    return any((item.worker.worker_id, rank) not in followed for rank in ranks)


def index_doubts(observer: Observer, *, unread: bool = False) -> list[Doubt]:
    """One doubt for each reason why caches may be out of date.

    ``unread``: caches that were not read at all count too.
    """
    names = {item.worker.worker_id: item.worker.name for item in observer.deployment.workers}
    reasons: dict[str, list[str]] = {}
    for (worker_id, _), why in observer.not_current().items():
        reasons.setdefault(why, []).append(names.get(worker_id, f"{worker_id:x}"))
    if unread:
        left = [item.worker.name for item in observer.deployment.workers if _unread(observer, item)]
        if left:
            reasons["it was not read"] = left
    doubts = [
        doubt(
            "DYR0705",
            varies=Varies(overlap=True, workers=list(dict.fromkeys(workers))),
            workers=some_names(workers),
            why=why,
        )
        for why, workers in reasons.items()
    ]
    router = observer.router
    others = [
        name
        for worker_id, name in names.items()
        if any(router.index.own_names(slot) for slot in router.registry.slots(worker_id))
    ]
    if others:
        varies = Varies(overlap=True, workers=others)
        doubts.append(doubt("DYR0761", varies=varies, workers=some_names(others)))
    return doubts
