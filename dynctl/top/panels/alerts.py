"""The panel of alerts: current findings with their codes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import ClassVar

from rich.style import Style

from dynctl.documents.snapshot import Alert
from dynctl.screens.canvas import Canvas
from dynctl.screens.numbers import plural
from dynctl.top.columns import alert_table
from dynctl.top.details import alert_text
from dynctl.top.filter import worker_words
from dynctl.top.layout import TITLE, Wish
from dynctl.top.marks import BAD, PLAIN, WARN
from dynctl.top.panels.content import PanelContent, Picture, Scene, table_lines


class AlertContent(PanelContent[Alert]):
    """One row per finding, failures first."""

    NAME: ClassVar[str] = "alerts"
    ENOUGH: ClassVar[int] = 6
    ORDER: ClassVar[int] = 1

    def picture_of(self, scene: Scene) -> Picture[Alert]:
        alerts = scene.alerts
        fails = sum(alert.level == "fail" for alert in alerts)
        warns = len(alerts) - fails
        counts = [f"{fails} failing"] if fails else []
        counts += [plural(warns, "warning")] if warns else []
        return Picture(
            rows=alerts,
            columns=alert_table(scene.now),
            title="alerts",
            count=f"{len(alerts):,}",
            summary=", ".join(counts),
            instead=("no findings",),
        )

    def title(self, scene: Scene) -> str:
        return f"alerts ({len(scene.alerts)})"

    def lines(self, scene: Scene, canvas: Canvas) -> Iterator[str]:
        if not scene.alerts:
            yield "none"
            return
        yield from table_lines(alert_table(scene.now), scene.alerts, canvas)
        codes = [alert.code for alert in scene.alerts if alert.code.startswith("DY")]
        if codes:
            yield f"dynctl explain {codes[0]}"

    def wish(self, rows: Sequence[Alert]) -> Wish:
        """Without a finding the title suffices: the other panels use the lines."""
        return super().wish(rows) if self.picture.rows else Wish(TITLE, self.ENOUGH, self.ORDER)

    def row_name(self, row: Alert) -> str:
        return f"{row.code} {row.subject}"

    def workers_of(self, row: Alert) -> set[str]:
        return {row.subject}

    def describe(self, row: Alert, scene: Scene, canvas: Canvas) -> str:
        return alert_text(row, scene.now, canvas)

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
