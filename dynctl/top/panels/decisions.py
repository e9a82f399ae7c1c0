"""The panel of decisions and refusals, and how close preferences are to spilling."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar, Final

from rich.style import Style

from dynctl.documents.snapshot import DecisionLine, Snapshot
from dynctl.screens.cells import beginning, cells, padded
from dynctl.screens.columns import GAP, Fitted
from dynctl.screens.decisions import outcome_text, refusal
from dynctl.top.columns import decision_table, hands_over_roles
from dynctl.top.header import decisions_listed, meter_line
from dynctl.top.marks import BAD, BLOCKS, PLAIN, WARN, Line, plain, zone_style
from dynctl.top.panels.panel import Panel, Picture

_METERS: Final = 3
_NEAR: Final = 0.9


class DecisionPanel(Panel[DecisionLine]):
    """One row per decision, the newest on top."""

    ENOUGH: ClassVar[int] = 12
    ORDER: ClassVar[int] = 2
    FOLLOWS: ClassVar[bool] = True

    def key(self, row: DecisionLine) -> Hashable:
        return (row.source, row.id, row.at)

    def words(self, row: DecisionLine) -> str:
        words = [super().words(row), row.model or "", row.id]
        words += [refusal(row)] if row.refused else ["selected"]
        words += [row.why, row.moved, f"model={row.model}"]
        words += [outcome_text(row), row.response.state, row.response.error]
        for domains in (row.prefill_domains, row.domains):
            words += [f"{name}={value}" for name, value in domains.items()]
        words += ["role=prefill"] if row.prefill is not None else []
        words += ["role=decode"] if row.decode is not None else []
        return " ".join(words)

    def style(self, row: DecisionLine) -> Style:
        if row.refused or row.response.state in ("failed", "cut"):
            return BAD
        return WARN if row.relaxed or row.response.state == "retried" else PLAIN

    def cell_style(self, row: DecisionLine, key: str) -> Style:
        domains = {"prefill": row.prefill_domains, "domain": row.domains, "decode": row.domains}
        values = domains.get(key, {}).values()
        return next((zone_style(one, self.zones) for one in values if one in self.zones), PLAIN)

    def pieces(self, row: DecisionLine, fitted: Fitted[DecisionLine]) -> Line:
        if not row.refused:
            return super().pieces(row, fitted)
        texts: list[str] = []
        for column, width in zip(fitted.columns, fitted.widths, strict=True):
            if column.key in ("prefill", "decode"):
                break
            texts.append(padded(beginning(column.cell(row), width), width))
        text = (" " * GAP).join([*texts, refusal(row)])
        room = self.size.width - 2
        return plain(text if cells(text) <= room else beginning(text, room - 2) + "..")

    def hint(self, row: DecisionLine) -> str:
        if row.refused:
            return f"{row.id} {row.message or row.outcome}"
        if row.response.error:
            return f"{row.id} {outcome_text(row)}: {row.response.error}"
        if not row.complete:
            return f"{row.id}: only the winner is known, from {row.source}"
        if row.relaxed:
            return f"{row.id}: crossed the domain (fallback policy)"
        return f"{row.id}: {row.hop_verdict}" if row.hop_verdict else ""


def decision_picture(
    snapshot: Snapshot, domain: str | None, now: float, width: int
) -> Picture[DecisionLine]:
    """The decisions of a snapshot, or why they are unknown and how to provide them."""
    unknown = snapshot.unknown("decisions")
    if unknown is not None:
        ways = tuple(f"  {way}" for way in unknown.provide.splitlines())
        return Picture(
            title="decisions",
            summary="unknown",
            instead=(f"unknown: {unknown.unknown}", *ways),
        )
    shown = snapshot.decisions
    refused = sum(line.refused for line in shown)
    counts = [f"{refused:,} refused"] if refused else []
    failed = sum(line.response.state in ("failed", "cut") for line in shown)
    counts += [f"{failed:,} failed"] if failed else []
    counts += ["winners only"] if any(not line.complete for line in shown) else []
    # The closest to spilling first.
    meters = sorted(snapshot.meters, key=lambda meter: -(meter.fullness or 0.0))[:_METERS]
    return Picture(
        rows=shown,
        columns=decision_table(domain, shown, split=hands_over_roles(snapshot)),
        title="decisions",
        count=decisions_listed(snapshot),
        summary=", ".join(counts),
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
        instead=("no decisions yet",),
    )
