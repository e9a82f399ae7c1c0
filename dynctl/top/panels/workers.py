"""The panel of workers: `workers list`, alive."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from rich.style import Style

from dynctl.documents.snapshot import Snapshot, stale_reason
from dynctl.documents.workers import WorkerRow
from dynctl.top.filter import worker_says
from dynctl.top.marks import BAD, DIM, PLAIN, WARN
from dynctl.top.panels.columns import why, worker_table
from dynctl.top.panels.panel import Panel, Picture


class WorkerPanel(Panel[WorkerRow]):
    """A row for each worker. What may not hold any more is dim."""

    ENOUGH: ClassVar[int] = 12
    ORDER: ClassVar[int] = 3

    def __init__(self, number: int, *, id: str) -> None:
        super().__init__(number, id=id)
        self.every_s: float | None = None

    def key(self, row: WorkerRow) -> Hashable:
        return row.worker_id

    def says(self, row: WorkerRow) -> str:
        return worker_says(row, self.every_s)

    def style(self, row: WorkerRow) -> Style:
        return DIM if stale_reason(row, self.every_s) is not None else PLAIN

    def cell_style(self, row: WorkerRow, key: str) -> Style:
        if key == "status":
            return BAD if row.status != "ready" else WARN if row.busy else PLAIN
        if key == "index":
            return WARN if any(rank.index == "gapped" for rank in row.ranks) else PLAIN
        return PLAIN

    def hint(self, row: WorkerRow) -> str:
        reason = why(row, self.every_s)
        if row.status != "ready":
            return f"{row.name} is {row.status}: {reason or 'nobody says why'}"
        if row.busy:
            return f"{row.name} is busy: {reason}"
        return f"{row.name} is stale: {reason}" if reason else ""


def worker_picture(snapshot: Snapshot) -> Picture[WorkerRow]:
    """The workers of a snapshot."""
    workers = snapshot.workers
    gone = sum(row.status != "ready" for row in workers)
    busy = sum(row.busy and row.status == "ready" for row in workers)
    stale = sum(
        row.status == "ready" and stale_reason(row, snapshot.load_every_s) is not None
        for row in workers
    )
    told = [f"{len(workers):,}"]
    told += [f"{busy:,} busy"] if busy else []
    told += [f"{stale:,} stale"] if stale else []
    told += [f"{gone:,} gone"] if gone else []
    index = snapshot.unknown("index")
    return Picture(
        rows=workers,
        columns=worker_table(snapshot),
        title="workers",
        summary=", ".join(told) + ("  caches not read: i, I" if index else ""),
        instead=(f"no workers are registered ({snapshot.source})",),
    )
