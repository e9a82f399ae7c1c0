"""Predictions and what became of them, by worker: part of ``GET /v1/fleet``, and `audit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

SCHEMA = 1

#: Cause of a difference -> what it means, and what to look at.
CAUSES: Final = {
    "tokens": "the engine counts other prompt tokens: its tokenizer or chat template is different "
    "from --model-path",
    "index": "the index of the worker was not current: dynctl check",
    "running": "requests with the same prompt were running: their blocks came after the decision",
    "not_indexed": "the engine reuses blocks that the index did not have at the decision: their KV "
    "events came later, are lost or off, are from another publisher, or have another block size; "
    "dynctl hits shows which",
    "not_reused": "the index has blocks that the engine does not reuse: they were evicted, prefix "
    "caching is off, or its hashes have another salt or adapter",
    "load": "the load of the workers was not what the events show: name all frontends, and follow "
    "longer than the longest request",
    "settings": "another candidate is cheaper with the settings that are assumed: dynctl explain "
    "DYR0711",
    "candidates": "the chosen worker is not a candidate here: a pin, a constraint, or another "
    "worker set",
}


class AuditRow(msgspec.Struct, frozen=True):
    """One worker since the source started.

    Engines: ``requests`` whose engine reported its reused tokens; ``hits`` with the predicted
    number of blocks; the tokens are sums over all of them. A live Dynamo: requests that a frontend
    gave to this worker, and hits where it was predicted; the tokens are those cached there, by
    this index and by the frontend's. ``costs``: log lines whose cost was compared, ``same_costs``
    of them equal. ``causes``: of each miss, by likely cause.
    """

    worker: str
    worker_id: int
    role: str = ""
    requests: int = 0
    hits: int = 0
    predicted_tokens: int = 0
    reported_tokens: int = 0
    costs: int = 0
    same_costs: int = 0
    causes: dict[str, int] = {}


class AuditReport(msgspec.Struct, frozen=True):
    """`audit`: ``compares`` is ``reuse`` (tokens that engines reused) or ``choice`` (the worker
    that a Dynamo frontend chose). ``rate``: hits of requests, None without any.
    ``skipped``: requests that could not be compared, by reason. ``seconds``: how long, None since
    the frontend started.
    """

    source: str
    compares: str
    requests: int
    hits: int
    rate: float | None
    workers: list[AuditRow]
    skipped: dict[str, int] = {}
    seconds: float | None = None
    kind: str = "AuditReport"
    schema: int = SCHEMA

    def passes(self, min_rate: float | None) -> bool:
        """Whether the rate is at least ``min_rate``; an unknown rate is not."""
        return min_rate is None or (self.rate is not None and self.rate >= min_rate)


def audit_report(
    source: str,
    compares: str,
    rows: Sequence[AuditRow],
    *,
    skipped: dict[str, int] | None = None,
    seconds: float | None = None,
) -> AuditReport:
    """The report over all rows, the worst worker first."""
    requests, hits = sum(row.requests for row in rows), sum(row.hits for row in rows)
    return AuditReport(
        source=source,
        compares=compares,
        requests=requests,
        hits=hits,
        rate=hits / requests if requests else None,
        workers=sorted(rows, key=lambda row: (row.hits - row.requests, row.worker)),
        skipped=skipped or {},
        seconds=seconds,
    )


def since(now: Sequence[AuditRow], before: Sequence[AuditRow]) -> list[AuditRow]:
    """The rows counted between two readings; a source that restarted counts from 0."""
    known = {row.worker_id: row for row in before}
    return [_less(row, known.get(row.worker_id)) for row in now]


def add_by_worker(rows: Sequence[AuditRow]) -> list[AuditRow]:
    """The rows of several replicas, added by worker."""
    by_worker: dict[str, AuditRow] = {}
    for row in rows:
        known = by_worker.get(row.worker)
        by_worker[row.worker] = row if known is None else _sum(known, row, 1)
    return list(by_worker.values())


def _less(row: AuditRow, before: AuditRow | None) -> AuditRow:
    if before is None or before.requests > row.requests:
        return row
    return _sum(row, before, -1)


def _sum(row: AuditRow, other: AuditRow, sign: int) -> AuditRow:
    causes = {
        name: count
        for name in {**row.causes, **other.causes}
        if (count := row.causes.get(name, 0) + sign * other.causes.get(name, 0))
    }
    return msgspec.structs.replace(
        row,
        requests=row.requests + sign * other.requests,
        hits=row.hits + sign * other.hits,
        predicted_tokens=row.predicted_tokens + sign * other.predicted_tokens,
        reported_tokens=row.reported_tokens + sign * other.reported_tokens,
        costs=row.costs + sign * other.costs,
        same_costs=row.same_costs + sign * other.same_costs,
        causes=causes,
    )
