"""The panel of workers: the columns of `workers list`, refreshed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar

from rich.style import Style

from dynctl.documents.snapshot import Snapshot, stale_reason
from dynctl.documents.workers import WorkerRow
from dynctl.screens.workers import ordered
from dynctl.top.columns import why, worker_table
from dynctl.top.filter import worker_words
from dynctl.top.header import available
from dynctl.top.marks import BAD, DIM, PLAIN, WARN, role_style, zone_style
from dynctl.top.panels.panel import Panel, Picture


class WorkerPanel(Panel[WorkerRow]):
    """One row per worker; rows with stale data are dim."""

    ENOUGH: ClassVar[int] = 12
    ORDER: ClassVar[int] = 3
    RESERVED: ClassVar[Mapping[str, int]] = {"status": len("unavailable")}

    def __init__(self, number: int, *, id: str) -> None:
        super().__init__(number, id=id)
        self.every_s: float | None = None

    def key(self, row: WorkerRow) -> Hashable:
        return row.worker_id

    def words(self, row: WorkerRow) -> str:
        return worker_words(row, self.every_s)

    def style(self, row: WorkerRow) -> Style:
        return DIM if stale_reason(row, self.every_s) is not None else PLAIN

    def cell_style(self, row: WorkerRow, key: str) -> Style:
        if key == "status":
            return BAD if row.status != "ready" else WARN if row.busy else PLAIN
        if key == "role":
            return role_style(row.role)
        if key.startswith("domain:"):
            return zone_style(row.domains.get(key.removeprefix("domain:")), self.zones)
        if key == "index":
            lost = any(rank.index in ("gapped", "over_limit") for rank in row.ranks)
            return WARN if lost else PLAIN
        return PLAIN

    def hint(self, row: WorkerRow) -> str:
        reason = why(row, self.every_s)
        if row.cordoned:
            return f"{row.name} is {row.reason}: dynctl workers uncordon {row.name}"
        if row.status != "ready":
            return f"{row.name} is {row.status}: {reason or 'no reason reported'}"
        if row.busy:
            return f"{row.name} is busy: {reason}"
        return f"{row.name} is stale: {reason}" if reason else ""


def sick_first(workers: Sequence[WorkerRow], every_s: float | None) -> list[WorkerRow]:
    """Workers that get no requests, then those whose numbers may be out of date, each in their
    order; then all others. A short panel shows what is wrong. Busy workers stay where they are:
    under load they would move all the time."""

    def place(row: WorkerRow) -> int:
        if row.status != "ready":
            return 0
        return 1 if stale_reason(row, every_s) is not None else 2

    return sorted(workers, key=place)


def worker_picture(
    snapshot: Snapshot, domain: str | None, width: int | None = None
) -> Picture[WorkerRow]:
    """The workers of a snapshot: sick ones first, then by ``domain``, role and name. ``width``: of
    the screen, None for no limit."""
    workers = sick_first(ordered(snapshot.workers, domain), snapshot.load_every_s)
    busy = sum(row.busy and row.status == "ready" for row in workers)
    stale = sum(
        row.status == "ready" and stale_reason(row, snapshot.load_every_s) is not None
        for row in workers
    )
    counts = [f"{busy:,} busy"] if busy else []
    counts += [f"{stale:,} stale"] if stale else []
    unread = ["caches not read: i, I"] if snapshot.unknown("index") else []
    return Picture(
        rows=workers,
        columns=worker_table(snapshot, width),
        title="workers",
        count=available(snapshot),
        summary="  ".join([*([", ".join(counts)] if counts else []), *unread]),
        instead=(f"no workers are registered ({snapshot.source})",),
    )
