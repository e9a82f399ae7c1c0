"""The panel of workers: the columns of `workers list`, refreshed."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import ClassVar

from rich.style import Style

from dynctl.documents.snapshot import stale_reason
from dynctl.documents.workers import WorkerRow
from dynctl.screens.canvas import Canvas
from dynctl.screens.workers import sort_workers
from dynctl.top.columns import why, worker_table
from dynctl.top.details import worker_text
from dynctl.top.filter import worker_words
from dynctl.top.header import available
from dynctl.top.marks import BAD, DIM, PLAIN, WARN, role_style, zone_style
from dynctl.top.panels.content import PanelContent, Picture, Scene, table_lines


class WorkerContent(PanelContent[WorkerRow]):
    """One row per worker; rows with stale data are dim."""

    NAME: ClassVar[str] = "workers"
    ENOUGH: ClassVar[int] = 12
    ORDER: ClassVar[int] = 3
    RESERVED: ClassVar[Mapping[str, int]] = {"status": len("unavailable")}

    def picture_of(self, scene: Scene) -> Picture[WorkerRow]:
        """Sick workers first, then by domain, role and name."""
        snapshot = scene.snapshot
        every_s = snapshot.load_every_s
        workers = sick_first(sort_workers(snapshot.workers, scene.view.domain), every_s)
        ready = [row for row in workers if row.status == "ready"]
        busy = sum(row.busy for row in ready)
        stale = sum(stale_reason(row, every_s) is not None for row in ready)
        counts = [f"{busy:,} busy"] if busy else []
        counts += [f"{stale:,} stale"] if stale else []
        notes = [", ".join(counts)] if counts else []
        notes += ["caches not read: i, I"] if snapshot.unknown("index") else []
        return Picture(
            rows=workers,
            columns=worker_table(snapshot, scene.width),
            title="workers",
            count=available(snapshot),
            summary="  ".join(notes),
            instead=(f"no workers are registered ({snapshot.source})",),
        )

    def title(self, scene: Scene) -> str:
        return f"workers ({len(scene.snapshot.workers):,})"

    def lines(self, scene: Scene, canvas: Canvas) -> Iterator[str]:
        snapshot = scene.snapshot
        workers = sort_workers(snapshot.workers, scene.view.domain)
        yield from table_lines(worker_table(snapshot), workers, canvas)

    def row_name(self, row: WorkerRow) -> str:
        return row.name

    def workers_of(self, row: WorkerRow) -> set[str]:
        return {row.name}

    def describe(self, row: WorkerRow, scene: Scene, canvas: Canvas) -> str:
        return worker_text(row, scene.snapshot, scene.now, canvas)

    def key(self, row: WorkerRow) -> Hashable:
        # Two namespaces may have workers with one id.
        return row.worker_id, row.name

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
        if row.reason:
            return f"{row.name}: {row.reason}"
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
