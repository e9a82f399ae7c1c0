"""The columns of the dashboard's panels.

Domains, workers and decisions have the columns of `topology show`, `workers list` and `decisions
list`, so that a number reads the same everywhere, and a few more that need continuous readings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from dynctl.base.quantities import percent
from dynctl.documents.snapshot import (
    Alert,
    DecisionLine,
    DomainRow,
    DomainView,
    Snapshot,
    stale_reason,
)
from dynctl.documents.topology import DomainCapacity, RoleCapacity
from dynctl.documents.workers import WorkerRow
from dynctl.screens.columns import Column, number_column
from dynctl.screens.decisions import (
    NOTHING,
    UNKNOWN,
    decision_columns,
    margin_text,
    places,
    worker_text,
)
from dynctl.screens.numbers import age, count
from dynctl.screens.topology import domain_columns
from dynctl.screens.workers import worker_columns
from dynctl.top.history import BUCKET_S, History
from dynctl.top.marks import Marks
from router_core import Role

Row = TypeVar("Row")
Inner = TypeVar("Inner")

BAR: Final = 10
#: Columns that leave on narrow screens, the highest first; state and workers always stay.
_DOMAIN_RANKS: Final = {"ratio": 3, "prefill_tokens": 5, "kv_used": 8, "policy": 6}
_ROOMY: Final = 120
#: Columns that a router counts or that workers report.
_LOADS: Final = ("prefill_tokens", "decode_blocks")


def lifted(column: Column[Inner], inner: Callable[[Row], Inner], **changes: Any) -> Column[Row]:
    """A column of a value inside a row."""
    text, value = column.cell, column.value
    return replace(  # type: ignore[return-value]
        column,
        text=lambda row: text(inner(row)),  # type: ignore[arg-type]
        value=lambda row: value(inner(row)),  # type: ignore[arg-type]
        **changes,
    )


# -- domains ---------------------------------------------------------------------------------------


def domain_table(
    view: DomainView,
    snapshot: Snapshot,
    marks: Marks,
    history: History | None = None,
    width: int = 80,
) -> list[Column[DomainRow]]:
    """``history``: for sparklines, None for none. ``width`` limits their length."""
    shared = domain_columns([row.capacity for row in view.rows], view.domain)
    columns: list[Column[DomainRow]] = []
    before = "ratio" if any(column.key == "ratio" for column in shared) else "kv_used"
    load_unknown = snapshot.unknown("load") is not None
    for column in shared:
        if column.key == before:
            columns += [_kv_bar(marks, snapshot), _waiting()]
        if column.key == "policy" and hands_over(view):
            columns.append(_crossing())
        mine = _dashboard_column(column)
        columns.append(_unknown(mine) if load_unknown and column.key in _LOADS else mine)
        if column.key == "state" and history is not None and view.domain is not None:
            columns += _trends(view.domain, snapshot.at, history, marks, width)
    return columns


def _dashboard_column(column: Column[DomainCapacity]) -> Column[DomainRow]:
    """A column of `topology show` with the dashboard's rank and heading."""
    rank = _DOMAIN_RANKS.get(column.key, column.rank)
    mine: Column[DomainRow] = lifted(column, lambda row: row.capacity, rank=rank)
    if column.key in ("prefill", "decode", "aggregated"):
        return _with_stale(mine)
    if column.key == "prefill_tokens":
        return replace(mine, heading="PREFILL TOK")
    if column.key == "kv_used":
        return replace(mine, heading=mine.heading.replace("USED", "BLOCKS"))
    return mine


def hands_over(view: DomainView) -> bool:
    """Whether there are prefill workers, which hand KV caches over to decode workers."""
    return any(row.capacity.prefill.workers for row in view.rows)


def _unknown(column: Column[Row]) -> Column[Row]:
    """A column whose values are not reported; the router's own count of 0 is meaningless."""
    return replace(column, text=lambda row: UNKNOWN, value=lambda row: None)


def _with_stale(column: Column[DomainRow]) -> Column[DomainRow]:
    text, role = column.cell, column.key

    def with_stale(row: DomainRow) -> str:
        stale = row.stale.get(role)
        return text(row) + (f", {stale:,} stale" if stale else "")

    return replace(column, text=with_stale)


def generating(row: DomainRow) -> RoleCapacity:
    """The role that holds the KV blocks of answers: decode, else aggregated."""
    capacity = row.capacity
    decode, alone = capacity.decode, capacity.aggregated
    return decode if decode.workers or not alone.workers else alone


def kv_share(row: DomainRow) -> float | None:
    """Used share of the KV blocks of available workers, 0..1; None if not reported."""
    role = generating(row)
    if role.kv_used_blocks is None or not role.kv_total_blocks:
        return None
    return role.kv_used_blocks / role.kv_total_blocks


def _kv_bar(marks: Marks, snapshot: Snapshot) -> Column[DomainRow]:
    """The bar of available workers; | is the busy threshold of decode blocks."""

    def text(row: DomainRow) -> str:
        limits = snapshot.thresholds.get(row.capacity.model, {})
        share = kv_share(row)
        if share is None:
            return (UNKNOWN if generating(row).ranks else NOTHING).ljust(BAR + 6)
        limit = limits.get("active_decode_blocks_threshold")
        return f"{marks.bar(share, BAR, limit)} {percent(share):>5}"

    return Column("kv_share", "KV USED", kv_share, text=text, rank=1)


def _waiting() -> Column[DomainRow]:
    def text(row: DomainRow) -> str:
        capacity = row.capacity
        ranks = capacity.prefill.ranks + capacity.decode.ranks + capacity.aggregated.ranks
        if row.waiting is None:
            return UNKNOWN if ranks else NOTHING
        partly = row.waiting_ranks < ranks
        return count(row.waiting) + ("+" if partly else "")

    return Column("waiting", "WAIT", lambda row: row.waiting, text=text, right=True, rank=2)


def _crossing() -> Column[DomainRow]:
    def text(row: DomainRow) -> str:
        share = row.crossing_share
        if share is None:
            return UNKNOWN if row.local is None and row.value is not None else NOTHING
        return percent(share)

    return Column("crossing", "CROSS", lambda r: r.crossing_share, text=text, right=True, rank=3)


def _trends(
    domain: str, at: float, history: History, marks: Marks, width: int
) -> list[Column[DomainRow]]:
    count, step = (24, 2) if width >= _ROOMY else (8, 3)
    minutes = f"{count * step * BUCKET_S / 60:.0f} MIN"

    def key(row: DomainRow) -> tuple[str, str, str]:
        return (row.capacity.model, domain, row.value or "")

    def used(row: DomainRow) -> str:
        return marks.sparkline(history.kv_share(key(row), count, step, at), 1.0)

    def prefill(row: DomainRow) -> str:
        return marks.sparkline(history.prefill_tokens(key(row), count, step, at))

    trends: list[Column[DomainRow]] = [
        Column("trend", f"KV {minutes}", lambda row: None, text=used, rank=4)
    ]
    if width >= _ROOMY:
        heading = f"PREFILL {minutes}"
        trends.append(Column("trend_prefill", heading, lambda row: None, text=prefill, rank=7))
    return trends


# -- workers ---------------------------------------------------------------------------------------


def worker_table(snapshot: Snapshot, width: int | None = None) -> list[Column[WorkerRow]]:
    """The columns of `workers list`, and the reason why a worker is unavailable, busy or stale.

    ``width``: of the screen; a narrow one has the state of the index without its age.
    """
    every = snapshot.load_every_s
    unknown = {"requests"} if snapshot.unknown("requests") is not None else set()
    unknown |= set(_LOADS) if snapshot.unknown("load") is not None else set()
    columns = []
    for column in worker_columns(snapshot.workers):
        if column.key in unknown:
            column = _unknown(column)
        if column.key == "index" and width is not None and width < _ROOMY:
            column = _without_age(column)
        if column.key == "load_age":
            column = replace(column, wide=False, rank=6)
        columns.append(column)
        if column.key == "requests":
            columns.append(_waits())

    def reason(worker: WorkerRow) -> str:
        return why(worker, every) or NOTHING

    def value(worker: WorkerRow) -> str:
        return why(worker, every)

    reasons: Column[WorkerRow] = Column("why", "WHY", value, text=reason, rank=4, name=True)
    return [*columns, replace(reasons, shortest=20, sentence=True)]


def _without_age(column: Column[WorkerRow]) -> Column[WorkerRow]:
    """The column of the index with its state alone, which has one width while workers fail."""

    def state(row: WorkerRow) -> str:
        text = column.cell(row)
        return "unknown" if text.startswith("as of ") else text.partition(",")[0]

    return replace(column, text=state)


def why(worker: WorkerRow, every_s: float | None) -> str:
    """Why a worker is unavailable, busy or stale; empty if it is none of these."""
    if worker.reason:
        return worker.reason
    for rank in worker.ranks:
        if rank.busy and rank.busy_reasons:
            where = f"rank {rank.dp_rank}: " if len(worker.ranks) > 1 else ""
            return where + rank.busy_reasons[0]
    return stale_reason(worker, every_s) or ""


def _waits() -> Column[WorkerRow]:
    def waiting(row: WorkerRow) -> int | None:
        reported = [rank.reported.waiting_requests for rank in row.ranks]
        known = [number for number in reported if number is not None]
        return sum(known) if known else None

    return number_column("waiting", "WAIT", waiting, rank=5)


# -- decisions -------------------------------------------------------------------------------------


def hands_over_roles(snapshot: Snapshot) -> bool:
    """Whether workers or decisions have a prefill hop; engines that do both have one column."""
    workers = any(row.role != Role.AGGREGATED for row in snapshot.workers)
    return workers or any(line.prefill is not None for line in snapshot.decisions)


def decision_table(
    domain: str | None, lines: Sequence[DecisionLine], *, split: bool = True
) -> list[Column[DecisionLine]]:
    """``domain``: the domain to show, None for none. Ids are shown by an end that is unique among
    ``lines``, which `dynctl why` accepts. ``split``: prefill and decode workers have columns of
    their own; else one column has the worker."""
    listed = {column.key: column for column in decision_columns(lines, None)}

    def ranked(key: str, rank: int, **changes: Any) -> Column[DecisionLine]:
        return replace(listed[key], rank=rank, **changes)

    columns = [listed["at"], ranked("id", 1)]
    if domain is not None:
        columns.append(
            Column("domain", domain.upper(), lambda d: places(d, domain), rank=1, name=True)
        )
    if split:
        columns.append(Column("prefill", "PREFILL", _prefill, name=True))
    return [
        *columns,
        Column("decode", "DECODE" if split else "WORKER", _decode, name=True),
        ranked("cached", 2),
        ranked("margin", 5, text=margin_text, wide=False),
        ranked("cost", 6),
        ranked("model", 7, wide=True),
        ranked("outcome", 1),
        ranked("why", 4, wide=True, shortest=10),
    ]


def _prefill(line: DecisionLine) -> str:
    return worker_text(line.prefill)


def _decode(line: DecisionLine) -> str:
    return worker_text(line.decode)


# -- alerts ----------------------------------------------------------------------------------------


def _what(alert: Alert) -> str:
    """The message without the subject at its beginning, which has a column of its own."""
    rest = alert.message.removeprefix(alert.subject)
    return rest.lstrip(": ") or alert.message


def alert_table(now: float) -> list[Column[Alert]]:
    """``now``: wall-clock seconds, for the age of alerts."""
    return [
        Column("level", "LEVEL", lambda a: a.level, text=lambda a: a.level.upper()),
        Column("code", "CODE", lambda a: a.code),
        Column("subject", "SUBJECT", lambda a: a.subject, name=True),
        Column(
            "since",
            "SINCE",
            lambda a: a.since,
            text=lambda a: UNKNOWN if a.since is None else age(now - a.since),
            right=True,
            rank=2,
        ),
        Column(
            "message",
            "WHAT",
            lambda a: a.message,
            text=_what,
            name=True,
            shortest=16,
            sentence=True,
        ),
    ]
