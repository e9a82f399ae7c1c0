"""The panel of domains: capacity, load, and stranded workers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from rich.style import Style

from dynctl.documents.snapshot import DomainRow, DomainView, Snapshot
from dynctl.documents.topology import NO_DOMAIN
from dynctl.screens.numbers import age, plural
from dynctl.top.columns import domain_table, generating, hands_over, kv_share
from dynctl.top.filter import worker_words
from dynctl.top.history import History
from dynctl.top.marks import BAD, BLOCKS, GOOD, PLAIN, WARN, role_style, zone_style
from dynctl.top.panels.panel import Panel, Picture

_TIGHT = 0.7
_FULL = 0.9


class DomainPanel(Panel[DomainRow]):
    """One row per value of the domain that the fleet is grouped by."""

    ENOUGH: ClassVar[int] = 8
    ORDER: ClassVar[int] = 0

    def key(self, row: DomainRow) -> Hashable:
        return (row.capacity.model, row.value)

    def keeps(self, row: DomainRow) -> bool:
        """A domain stays while one of its workers does."""
        members = (self.members.get(name) for name in row.capacity.workers)
        words = (worker_words(one).lower() for one in members if one is not None)
        return any(map(self.filter.keeps, words))

    def cell_style(self, row: DomainRow, key: str) -> Style:
        if key.startswith("domain") or key == "value":
            return zone_style(row.value, self.zones)
        if key == "state":
            return PLAIN if row.capacity.state == "ok" else BAD
        if key == "kv_share":
            share = kv_share(row)
            if share is None:
                return PLAIN
            return BAD if share >= _FULL else WARN if share >= _TIGHT else GOOD
        if key in ("prefill", "decode", "aggregated"):
            role = getattr(row.capacity, key)
            if role.unavailable or role.busy or row.stale.get(key):
                return BAD if role.unavailable else WARN
            return role_style(key)
        if key == "waiting":
            return WARN if row.waiting else PLAIN
        return PLAIN

    def hint(self, row: DomainRow) -> str:
        capacity = row.capacity
        for one in capacity.stranded:
            return f"STRANDED {', '.join(one.workers[:3])}: {one.reason}; {one.outcome}"
        role = generating(row)
        parts = [f"{row.value or NO_DOMAIN}: {plural(len(capacity.workers), 'worker')}"]
        if role.kv_reporting < role.ranks:
            parts.append(f"{role.kv_reporting} of {role.ranks} ranks report their KV blocks")
        if row.local is not None and capacity.prefill.workers:
            parts.append(f"{row.local:,} hand-offs stayed, {row.crossing or 0:,} crossed")
        return ", ".join(parts)


def domain_picture(
    view: DomainView, snapshot: Snapshot, history: History, watched_s: float, width: int
) -> Picture[DomainRow]:
    """``watched_s``: the seconds that the share of crossing hand-offs covers; 0: since start."""
    title = "domains" if view.domain is None else f"domains by {view.domain}"
    others = [name for name in view.domains if name != view.domain]
    parts = [f"g: {', '.join(others)}"] if others else []
    if snapshot.unknown("transfers") is None and view.domain is not None and hands_over(view):
        parts.append(f"cross: {f'last {age(watched_s)}' if watched_s else 'since start'}")
    stranded = sum(bool(row.capacity.stranded) for row in view.rows)
    if stranded:
        parts.insert(0, f"{stranded} stranded")
    down = sum(row.capacity.state == "down" for row in view.rows)
    if down:
        parts.insert(0, f"{down} down")
    return Picture(
        rows=view.rows,
        columns=domain_table(view, snapshot, BLOCKS, history, width),
        title=title,
        count=f"{len(view.rows):,}",
        summary="  ".join(parts),
        instead=(f"no workers are registered ({snapshot.source})",),
    )
