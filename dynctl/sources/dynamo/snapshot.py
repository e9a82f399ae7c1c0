"""Parts, alerts and worker rows of a live Dynamo's snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from dynctl.documents.route_result import UNKNOWN_LOAD
from dynctl.documents.snapshot import Alert, Part
from dynctl.documents.workers import NONE_WAITING, WorkerRow, rank_rows, worker_row
from dynctl.findings.catalogue import catalogue
from dynctl.findings.runner import run
from dynctl.health.checks.frontends import FRONTEND_CHECKS
from dynctl.health.checks.planes import PLANE_CHECKS, WORKER_CHECKS
from dynctl.health.deployment import Deployment
from dynctl.health.facts import CheckFacts, FrontendFacts, PlaneFacts
from dynctl.serving.dynamo.decision_join import EVENTS, LOG
from dynctl.sources.dynamo.frontend_pods import OUT_OF_REACH
from router_core import Router, Worker

_NAME_FRONTENDS: Final = "name the frontends, every replica: --frontend http://HOST:8000"
_DECISIONS: Final = """\
--frontend-log FILE, or - for standard input: the frontend's `Selected worker` lines
or start the frontends with --router-replica-sync: they send each other the winners"""
_NOT_READ: Final = "caches are not read, because that costs the workers time"
_READ: Final = "i reads the cache of a worker, I all of them"


@dataclass(frozen=True, slots=True)
class DynamoReadings:
    """What was read of a live Dynamo. ``at``: when discovery was last current.

    ``load``: its origin, from take_load(). ``metrics``: number of frontends whose metrics were
    read; ``problem``: why there are none. ``hops``: origin of decisions -> number of hops. ``log``:
    the log that is read. ``workers_reachable``: whether events of workers arrive here.
    ``traffic``: whether a frontend counts its requests.
    """

    title: str
    at: float
    now: float
    load: str
    urls: tuple[str, ...] = ()
    metrics: int = 0
    thresholds: bool = False
    problem: str = ""
    replica_sync: bool = False
    hops: Mapping[str, int] = field(default_factory=dict)
    log: str | None = None
    read_all: bool = False
    workers_reachable: bool = True
    traffic: bool = False


def snapshot_parts(readings: DynamoReadings, workers: Sequence[WorkerRow]) -> dict[str, Part]:
    """Every part of a snapshot of a live Dynamo."""
    planes, now = readings.title, readings.now
    urls = ", ".join(readings.urls)
    from_frontends = Part(urls, now)
    ranks = [rank for row in workers for rank in row.ranks]
    parts = {
        "workers": Part(planes, readings.at),
        "load": _load(readings, urls),
        "requests": _requests(readings, urls),
        "index": _index(readings, workers),
        "waiting": Part("the engines' forward-pass-metrics", now),
        "decisions": _decisions(readings),
        "transfers": _transfers(readings),
        "thresholds": from_frontends
        if readings.thresholds
        else _without_frontend(readings, urls, "busy thresholds live in the frontends"),
        "settings": Part("the workers' cards, else defaults", readings.at),
        "queue": from_frontends
        if readings.metrics
        else _without_frontend(readings, urls, "queues live in the frontends"),
        "rates": _rates(readings, urls),
    }
    if ranks and all(rank.reported.waiting_requests is None for rank in ranks):
        why = "no engine reports its queue (forward-pass-metrics)"
        parts["waiting"] = Part(planes, unknown=why if readings.workers_reachable else OUT_OF_REACH)
    return parts


def _without_frontend(readings: DynamoReadings, urls: str, why: str) -> Part:
    unknown = readings.problem or f"{why}, and none is set"
    return Part(urls, unknown=unknown, provide=_NAME_FRONTENDS)


def _rates(readings: DynamoReadings, urls: str) -> Part:
    if readings.traffic:
        return Part(urls, readings.now)
    if readings.metrics:
        return Part(urls, unknown="the frontends export no dynamo_frontend_requests_total")
    return _without_frontend(readings, urls, "the frontends count requests")


def _load(readings: DynamoReadings, urls: str) -> Part:
    if readings.metrics:
        return Part(f"{readings.load}: {urls}", readings.now)
    if readings.load in (UNKNOWN_LOAD, "kv_metrics"):
        why = readings.problem or "no frontend is set, and no frontend sends replica-sync events"
        return Part("", unknown=why, provide=_NAME_FRONTENDS)
    return Part(readings.load, readings.now)


def _requests(readings: DynamoReadings, urls: str) -> Part:
    """Gauges have tokens and blocks, but no number of requests."""
    if readings.metrics or readings.load in (UNKNOWN_LOAD, "kv_metrics"):
        return Part(urls, unknown="a frontend's metrics do not count requests by worker")
    return Part(readings.load, readings.now)


def _index(readings: DynamoReadings, workers: Sequence[WorkerRow]) -> Part:
    if not readings.workers_reachable:
        return Part(readings.title, unknown=f"what workers cache is {OUT_OF_REACH}")
    read = any(rank.index != "absent" for row in workers for rank in row.ranks)
    if readings.read_all or read:
        return Part("the workers' KV events", readings.now)
    return Part(readings.title, unknown=_NOT_READ, provide=_READ)


def _decisions(readings: DynamoReadings) -> Part:
    sources = [name for name in (LOG, EVENTS) if readings.hops.get(name)]
    if readings.log is not None and LOG not in sources:
        sources.append(f"{readings.log} (no `Selected worker` line yet: DYN_LOG=info)")
    if readings.replica_sync and EVENTS not in sources and readings.workers_reachable:
        sources.append(EVENTS)
    if sources:
        return Part(" and ".join(sources), readings.now)
    return Part(
        readings.title,
        unknown="a live Dynamo keeps no decisions, and no frontend reports the winners",
        provide=_DECISIONS,
    )


def _transfers(readings: DynamoReadings) -> Part:
    origin = _decisions(readings)
    if origin.unknown:
        return Part(
            readings.title, unknown="hand-offs are counted from decisions, which are unknown"
        )
    return origin


#: DYT0901 reports stranded domains, for every source alike.
_OTHER_ALERT: Final = ("DYR0210",)
_MOST: Final = 200


def dynamo_alerts(
    title: str,
    namespace: str | None,
    deployment: Deployment,
    frontends: tuple[FrontendFacts, ...],
) -> Iterator[Alert]:
    """The findings, at most a few hundred of them."""
    facts = CheckFacts(PlaneFacts(title, namespace, deployment=deployment), frontends)
    sections = [
        ("planes", PLANE_CHECKS),
        ("workers", WORKER_CHECKS),
        ("frontends", FRONTEND_CHECKS),
    ]
    report = run(sections, facts, catalogue())
    left = _MOST
    for check in report.checks:
        if check.code in _OTHER_ALERT:
            continue
        for finding in check.findings[:left]:
            left -= 1
            yield Alert(check.code, str(check.state), finding.subject, finding.value, finding.fix)


def hidden_rows(deployment: Deployment) -> Iterator[WorkerRow]:
    """The rows of workers whose id another worker has: with their card, without load and index."""
    names = {item.worker.worker_id: item.worker.name for item in deployment.workers}
    for item in deployment.hidden:
        reason = (
            f"it has the id of {names[item.worker.worker_id]}, whose numbers may be of both: read "
            "one namespace"
        )
        yield msgspec.structs.replace(worker_row(item.worker, []), reason=reason)


class RowCache:
    """Remembers the row of every card, so that a card that did not change is the same object."""

    def __init__(self) -> None:
        self._cards: dict[int, tuple[Worker, WorkerRow]] = {}

    def rows(
        self, router: Router, now: float, waiting: Mapping[int, Mapping[int, int]] | None = None
    ) -> tuple[WorkerRow, ...]:
        """One row a worker. ``waiting``: worker id -> rank -> requests that wait in its engine."""
        waiting = waiting or {}
        cards: dict[int, tuple[Worker, WorkerRow]] = {}
        rows = []
        for worker in router.registry:
            known = self._cards.get(worker.worker_id)
            if known is None or known[0] is not worker:
                known = (worker, worker_row(worker, []))
            cards[worker.worker_id] = known
            ranks = rank_rows(router, worker, now, waiting.get(worker.worker_id, NONE_WAITING))
            reason = router.registry.unavailable_reason(worker.worker_id)
            rows.append(
                msgspec.structs.replace(
                    known[1],
                    ranks=ranks,
                    status="ready" if reason is None else "unavailable",
                    reason=reason,
                    busy=bool(ranks) and all(rank.busy for rank in ranks),
                )
            )
        self._cards = cards
        return tuple(rows)
