"""The panel of domains: capacity, load, and stranded workers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import ClassVar

from rich.style import Style

from dynctl.documents.snapshot import DomainRow
from dynctl.documents.topology import NO_DOMAIN, RoleCapacity
from dynctl.screens.canvas import Canvas
from dynctl.screens.numbers import age, plural
from dynctl.screens.topology import topology_notes
from dynctl.top.columns import domain_table, generating, hands_over, kv_share
from dynctl.top.details import domain_text
from dynctl.top.filter import RowFilter, worker_words
from dynctl.top.marks import ASCII, BAD, BLOCKS, GOOD, PLAIN, WARN, role_style, zone_style
from dynctl.top.panels.content import PanelContent, Picture, Scene, table_lines

_TIGHT = 0.7
_FULL = 0.9


class DomainContent(PanelContent[DomainRow]):
    """One row per value of the domain that the fleet is grouped by."""

    NAME: ClassVar[str] = "domains"
    ENOUGH: ClassVar[int] = 8
    ORDER: ClassVar[int] = 0

    def picture_of(self, scene: Scene) -> Picture[DomainRow]:
        view, snapshot = scene.view, scene.snapshot
        return Picture(
            rows=view.rows,
            columns=domain_table(view, snapshot, BLOCKS, scene.history, scene.width or 80),
            title=self.title(scene),
            count=f"{len(view.rows):,}",
            summary="  ".join(_summary(scene)),
            instead=(f"no workers are registered ({snapshot.source})",),
        )

    def title(self, scene: Scene) -> str:
        domain = scene.view.domain
        return "domains" if domain is None else f"domains by {domain}"

    def lines(self, scene: Scene, canvas: Canvas) -> Iterator[str]:
        view, snapshot = scene.view, scene.snapshot
        if not view.rows:
            yield f"no workers are registered ({snapshot.source})"
            return
        yield from table_lines(domain_table(view, snapshot, ASCII), view.rows, canvas)
        for note in topology_notes(view.shown):
            yield from canvas.paragraph(note, first="", rest="  ")

    def row_name(self, row: DomainRow) -> str:
        return row.value or NO_DOMAIN

    def workers_of(self, row: DomainRow) -> set[str]:
        return set(row.capacity.workers)

    def describe(self, row: DomainRow, scene: Scene, canvas: Canvas) -> str:
        return domain_text(row, scene.view, scene.snapshot, canvas)

    def key(self, row: DomainRow) -> Hashable:
        return (row.capacity.model, row.value)

    def keeps(self, row: DomainRow, wanted: RowFilter) -> bool:
        """A domain stays while one of its workers does."""
        members = (self.members.get(name) for name in row.capacity.workers)
        words = (worker_words(worker).lower() for worker in members if worker is not None)
        return any(map(wanted.keeps, words))

    def cell_style(self, row: DomainRow, key: str) -> Style:
        if key == "domain":
            return zone_style(row.value, self.zones)
        if key == "state":
            return {"ok": PLAIN, "degraded": WARN}.get(row.capacity.state, BAD)
        if key == "kv_share":
            return _share_style(kv_share(row))
        if key in ("prefill", "decode", "aggregated"):
            return _workers_style(row, key)
        return WARN if key == "waiting" and row.waiting else PLAIN

    def hint(self, row: DomainRow) -> str:
        capacity = row.capacity
        for group in capacity.stranded:
            return f"STRANDED {', '.join(group.workers[:3])}: {group.reason}; {group.outcome}"
        role = generating(row)
        parts = [f"{row.value or NO_DOMAIN}: {plural(len(capacity.workers), 'worker')}"]
        if role.kv_reporting < role.ranks:
            parts.append(f"{role.kv_reporting} of {role.ranks} ranks report their KV blocks")
        if row.local is not None and capacity.prefill.workers:
            parts.append(f"{row.local:,} hand-offs stayed, {row.crossing or 0:,} crossed")
        return ", ".join(parts)


def _share_style(share: float | None) -> Style:
    """The colour of the used share of KV blocks."""
    if share is None:
        return PLAIN
    if share >= _FULL:
        return BAD
    return WARN if share >= _TIGHT else GOOD


def _workers_style(row: DomainRow, key: str) -> Style:
    """The colour of the workers of a role."""
    role: RoleCapacity = getattr(row.capacity, key)
    if role.unavailable:
        return BAD
    return WARN if role.busy or row.stale.get(key) else role_style(key)


def _summary(scene: Scene) -> Iterator[str]:
    view = scene.view
    down = sum(row.capacity.state == "down" for row in view.rows)
    if down:
        yield f"{down} down"
    stranded = sum(bool(row.capacity.stranded) for row in view.rows)
    if stranded:
        yield f"{stranded} stranded"
    others = [name for name in view.domains if name != view.domain]
    if others:
        yield f"g: {', '.join(others)}"
    counts_transfers = scene.snapshot.unknown("transfers") is None
    if counts_transfers and view.domain is not None and hands_over(view):
        yield f"cross: {f'last {age(scene.watched_s)}' if scene.watched_s else 'since start'}"
