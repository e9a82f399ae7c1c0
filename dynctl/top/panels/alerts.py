"""The panel of alerts: current findings with their codes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar

from rich.style import Style

from dynctl.documents.snapshot import Alert
from dynctl.top.columns import alert_table
from dynctl.top.filter import worker_words
from dynctl.top.layout import TITLE, Wish
from dynctl.top.marks import BAD, PLAIN, WARN
from dynctl.top.panels.panel import Panel, Picture


class AlertPanel(Panel[Alert]):
    """One row per finding, failures first."""

    ENOUGH: ClassVar[int] = 6
    ORDER: ClassVar[int] = 1

    @property
    def wish(self) -> Wish:
        """Without a finding the title suffices: the other panels use the lines."""
        return super().wish if self.picture.rows else Wish(TITLE, self.ENOUGH, self.ORDER)

    def key(self, row: Alert) -> Hashable:
        return (row.code, row.subject)

    def words(self, row: Alert) -> str:
        """A finding about a worker has the words of the worker too."""
        worker = self.members.get(row.subject)
        about = "" if worker is None else worker_words(worker)
        return f"{super().words(row)} {about}"

    def cell_style(self, row: Alert, key: str) -> Style:
        if key in ("level", "code"):
            return BAD if row.level == "fail" else WARN
        return PLAIN

    def hint(self, row: Alert) -> str:
        return f"{row.message}. Fix: {row.fix}" if row.fix else row.message


def alert_picture(alerts: Sequence[Alert], now: float) -> Picture[Alert]:
    """The alerts of a snapshot."""
    fails = sum(one.level == "fail" for one in alerts)
    warns = len(alerts) - fails
    counts = [f"{fails} failing"] if fails else []
    counts += [f"{warns} warning{'s' if warns > 1 else ''}"] if warns else []
    return Picture(
        rows=alerts,
        columns=alert_table(now),
        title="alerts",
        count=f"{len(alerts):,}",
        summary=", ".join(counts),
        instead=("no findings",),
    )
