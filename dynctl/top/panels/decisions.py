"""The panel of decisions: the last ones, refusals in between, and how near a preference is to
spilling."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar, Final

from rich.style import Style

from dynctl.documents.snapshot import DecisionLine, Snapshot
from dynctl.screens.columns import GAP, Fitted
from dynctl.top.header import meter_line
from dynctl.top.marks import BAD, BLOCKS, PLAIN, WARN, Line, plain
from dynctl.top.panels.columns import decision_table, refusal
from dynctl.top.panels.panel import Panel, Picture

_METERS: Final = 3
_NEAR: Final = 0.9


class DecisionPanel(Panel[DecisionLine]):
    """A row for each decision, the newest on top."""

    ENOUGH: ClassVar[int] = 12
    ORDER: ClassVar[int] = 2
    FOLLOWS: ClassVar[bool] = True

    def key(self, row: DecisionLine) -> Hashable:
        return (row.source, row.id, row.at)

    def says(self, row: DecisionLine) -> str:
        told = [super().says(row), row.model or "", row.id]
        told += [refusal(row)] if row.refused else ["selected"]
        told += [f"{name}={value}" for name, value in (row.prefill_domains | row.domains).items()]
        return " ".join(told)

    def style(self, row: DecisionLine) -> Style:
        return BAD if row.refused else WARN if row.relaxed else PLAIN

    def pieces(self, row: DecisionLine, fitted: Fitted[DecisionLine]) -> Line:
        if not row.refused:
            return super().pieces(row, fitted)
        cells: list[str] = []
        for column, width in zip(fitted.columns, fitted.widths, strict=True):
            if column.key == "prefill":
                break
            cells.append(column.text(row)[:width].ljust(width))
        text = (" " * GAP).join([*cells, refusal(row)])
        room = self.size.width - 2
        return plain(text if len(text) <= room else text[: room - 2] + "..")

    def hint(self, row: DecisionLine) -> str:
        if row.refused:
            return f"{row.id} {row.message or row.outcome}"
        if not row.complete:
            return f"{row.id}: only the winner is known, from {row.source}"
        return f"{row.id}: crossed the domain (fallback policy)" if row.relaxed else ""


def decision_picture(
    snapshot: Snapshot, domain: str | None, now: float, width: int
) -> Picture[DecisionLine]:
    """The decisions of a snapshot, or why there are none and how to get some."""
    unknown = snapshot.unknown("decisions")
    if unknown is not None:
        ways = tuple(f"  {way}" for way in unknown.provide.splitlines())
        return Picture(
            title="decisions",
            summary="not known",
            instead=(f"not known: {unknown.unknown}", *ways),
        )
    shown = snapshot.decisions
    refused = sum(line.refused for line in shown)
    told = [f"{len(shown):,}"]
    told += [f"{refused:,} refused"] if refused else []
    told += [f"{snapshot.missed:,} not shown"] if snapshot.missed else []
    told += ["winners only"] if any(not line.complete for line in shown) else []
    # The nearest to spilling first.
    meters = sorted(snapshot.meters, key=lambda meter: -(meter.fullness or 0.0))[:_METERS]
    return Picture(
        rows=shown,
        columns=decision_table(domain),
        title="decisions",
        summary=", ".join(told),
        above=[
            plain(
                f" {meter_line(meter, BLOCKS, now, width - 2)}",
                BAD
                if (meter.fullness or 0.0) >= 1
                else WARN
                if (meter.fullness or 0.0) >= _NEAR
                else PLAIN,
            )
            for meter in meters
        ],
        instead=("none yet: nothing was routed since this source began to tell",),
    )
