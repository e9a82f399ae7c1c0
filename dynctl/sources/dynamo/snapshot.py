"""Which parts of a live Dynamo are known, and what to do about the others. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from dynctl.documents.route_result import UNKNOWN_LOAD
from dynctl.documents.snapshot import Alert, Part
from dynctl.documents.workers import NOBODY_WAITS, WorkerRow, rank_rows, worker_row
from dynctl.findings.catalogue import catalogue
from dynctl.findings.runner import run
from dynctl.health.checks.frontends import FRONTEND_CHECKS
from dynctl.health.checks.planes import PLANE_CHECKS, WORKER_CHECKS
from dynctl.health.deployment import Deployment
from dynctl.health.facts import CheckFacts, FrontendFacts, PlaneFacts
from dynctl.sources.dynamo.decisions import EVENTS, LOG
from dynctl.sources.kubernetes import OUT_OF_REACH
from router_core import Router, Worker

_NAME_FRONTENDS: Final = "name the frontends, every replica: --frontend http://HOST:8000"
_DECISIONS: Final = """\
--frontend-log FILE, or - for standard input: the frontend's `Selected worker` lines
or start the frontends with --router-replica-sync: they tell each other the winners"""
_UNASKED: Final = "reading caches costs the workers, so nobody was asked"
_READ: Final = "i reads the cache of a worker, I all of them"


@dataclass(frozen=True, slots=True)
class Known:
    """What a source has. ``at``: when discovery was heard last. ``load``: as take_load() says.

    ``metrics``: frontends whose metrics were read. ``refused``: why there are none.
    ``heard``: hops by who told of them. ``log``: the log that is read. ``reached``: whether
    workers can be spoken to from here.
    """

    title: str
    at: float
    now: float
    load: str
    urls: tuple[str, ...] = ()
    metrics: int = 0
    thresholds: bool = False
    refused: str = ""
    replica_sync: bool = False
    heard: Mapping[str, int] | None = None
    log: str | None = None
    read_all: bool = False
    reached: bool = True


def part_origins(known: Known, workers: Sequence[WorkerRow]) -> dict[str, Part]:
    """Every part of a snapshot of a live Dynamo."""
    planes, now = known.title, known.now
    frontends = ", ".join(known.urls)
    asked = Part(frontends, now)
    ranks = [rank for row in workers for rank in row.ranks]
    parts = {
        "workers": Part(planes, known.at),
        "load": _load(known, frontends),
        "requests": _requests(known, frontends),
        "index": _index(known, workers),
        "waiting": Part("the engines' forward-pass-metrics", now),
        "decisions": _decisions(known),
        "transfers": _transfers(known),
        "thresholds": asked
        if known.thresholds
        else Part(frontends, unknown=known.refused or _no("thresholds"), provide=_NAME_FRONTENDS),
        "settings": Part("the workers' cards, else defaults", known.at),
        "queue": asked
        if known.metrics
        else Part(frontends, unknown=known.refused or _no("queue"), provide=_NAME_FRONTENDS),
    }
    if ranks and all(rank.reported.waiting_requests is None for rank in ranks):
        why = "no engine tells its queue (forward-pass-metrics)" if known.reached else OUT_OF_REACH
        parts["waiting"] = Part(planes, unknown=why)
    return parts


def _no(what: str) -> str:
    lives = {"thresholds": "thresholds live in the frontends", "queue": "queues live in them"}
    return f"{lives[what]}, and none was named"


def _load(known: Known, frontends: str) -> Part:
    if known.metrics:
        return Part(f"{known.load}: {frontends}", known.now)
    if known.load in (UNKNOWN_LOAD, "kv_metrics"):
        why = known.refused or "no frontend was named, and none tells others its load"
        return Part("", unknown=why, provide=_NAME_FRONTENDS)
    return Part(known.load, known.now)


def _requests(known: Known, frontends: str) -> Part:
    """Gauges tell tokens and blocks, and not how many requests they are of."""
    if known.metrics or known.load in (UNKNOWN_LOAD, "kv_metrics"):
        return Part(frontends, unknown="a frontend's metrics do not count requests by worker")
    return Part(known.load, known.now)


def _index(known: Known, workers: Sequence[WorkerRow]) -> Part:
    if not known.reached:
        return Part(known.title, unknown=f"what workers cache is {OUT_OF_REACH}")
    read = any(rank.index != "absent" for row in workers for rank in row.ranks)
    if known.read_all or read:
        return Part("the workers' KV events", known.now)
    return Part(known.title, unknown=_UNASKED, provide=_READ)


def _decisions(known: Known) -> Part:
    heard = known.heard or {}
    sources = [name for name in (LOG, EVENTS) if heard.get(name)]
    if known.log is not None and LOG not in sources:
        sources.append(f"{known.log} (no `Selected worker` line yet: DYN_LOG=info)")
    if known.replica_sync and EVENTS not in sources and known.reached:
        sources.append(EVENTS)
    if sources:
        return Part(" and ".join(sources), known.now)
    return Part(
        known.title,
        unknown="a live Dynamo keeps no decisions, and nobody tells the winners",
        provide=_DECISIONS,
    )


def _transfers(known: Known) -> Part:
    told = _decisions(known)
    if told.unknown:
        return Part(known.title, unknown="hand-offs are counted from decisions, which nobody tells")
    return told


#: Who is stranded is told by DYT0901, for every source alike.
_TOLD_OTHERWISE: Final = ("DYR0210",)
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
        if check.code in _TOLD_OTHERWISE:
            continue
        for one in check.findings[:left]:
            left -= 1
            yield Alert(check.code, str(check.state), one.subject, one.value, one.fix)


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
        found = []
        for worker in router.registry:
            known = self._cards.get(worker.worker_id)
            if known is None or known[0] is not worker:
                known = (worker, worker_row(worker, []))
            cards[worker.worker_id] = known
            ranks = rank_rows(router, worker, now, waiting.get(worker.worker_id, NOBODY_WAITS))
            reason = router.registry.unavailable_reason(worker.worker_id)
            found.append(
                msgspec.structs.replace(
                    known[1],
                    ranks=ranks,
                    status="ready" if reason is None else "unavailable",
                    reason=reason,
                    busy=bool(ranks) and all(rank.busy for rank in ranks),
                )
            )
        self._cards = cards
        return tuple(found)
