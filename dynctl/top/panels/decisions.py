"""The panel of decisions and refusals, and how close preferences are to spilling."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import ClassVar, Final

from rich.style import Style

from dynctl.documents.snapshot import DecisionLine, Meter, Part, Snapshot
from dynctl.screens.canvas import Canvas
from dynctl.screens.cells import beginning, cells, pad_cells
from dynctl.screens.columns import GAP, Fitted, fit, visible
from dynctl.screens.decisions import outcome_text, refusal
from dynctl.top.columns import decision_table, hands_over_roles
from dynctl.top.details import decision_text
from dynctl.top.header import decisions_listed, meter_line
from dynctl.top.marks import ASCII, BAD, BLOCKS, PLAIN, WARN, Line, plain, zone_style
from dynctl.top.panels.content import PanelContent, Picture, Scene

#: Decisions in `top --once`; -o json has all that were read.
_AT_ONCE: Final = 10
_METERS: Final = 3
_NEAR: Final = 0.9


class DecisionContent(PanelContent[DecisionLine]):
    """One row per decision, the newest on top."""

    NAME: ClassVar[str] = "decisions"
    ENOUGH: ClassVar[int] = 12
    ORDER: ClassVar[int] = 2
    FOLLOWS: ClassVar[bool] = True

    def picture_of(self, scene: Scene) -> Picture[DecisionLine]:
        """The decisions, or why they are unknown and how to provide them."""
        snapshot = scene.snapshot
        unknown = snapshot.unknown("decisions")
        if unknown is not None:
            ways = tuple(f"  {way}" for way in unknown.provide.splitlines())
            return Picture(
                title="decisions",
                summary="unknown",
                instead=(f"unknown: {unknown.unknown}", *ways),
            )
        shown = snapshot.decisions
        return Picture(
            rows=shown,
            columns=decision_table(scene.view.domain, shown, split=hands_over_roles(snapshot)),
            title="decisions",
            count=decisions_listed(snapshot),
            summary=", ".join(_counts(shown)),
            above=_meter_lines(scene),
            instead=("no decisions yet",),
        )

    def title(self, scene: Scene) -> str:
        shown = len(scene.snapshot.decisions[:_AT_ONCE])
        return f"decisions ({decisions_listed(scene.snapshot, shown)})" if shown else "decisions"

    def lines(self, scene: Scene, canvas: Canvas) -> Iterator[str]:
        snapshot = scene.snapshot
        unknown = snapshot.unknown("decisions")
        if unknown is not None:
            yield from unknown_lines(unknown, canvas)
            return
        for meter in snapshot.meters:
            yield from canvas.paragraph(meter_line(meter, ASCII, scene.now), first="", rest="  ")
        shown = snapshot.decisions[:_AT_ONCE]
        if not shown:
            yield from canvas.paragraph(f"no decisions yet{_origin(snapshot)}", first="", rest="  ")
            return
        columns = decision_table(scene.view.domain, shown, split=hands_over_roles(snapshot))
        fitted = fit(visible(columns, wide=canvas.wide, width=canvas.width), shown, canvas.width)
        yield canvas.faint(fitted.heading())
        for line in shown:
            yield _line_text(fitted, line, canvas.width)
        if any(not line.complete for line in shown):
            yield "? = unknown, the source reports the winner only"

    def row_name(self, row: DecisionLine) -> str:
        return f"decision {row.id}"

    def workers_of(self, row: DecisionLine) -> set[str]:
        return {ref.worker for ref in (row.prefill, row.decode) if ref is not None}

    def describe(self, row: DecisionLine, scene: Scene, canvas: Canvas) -> str:
        return decision_text(row, scene.view.domain, canvas)

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
        return next((zone_style(zone, self.zones) for zone in values if zone in self.zones), PLAIN)

    def pieces(self, row: DecisionLine, fitted: Fitted[DecisionLine], room: int) -> Line:
        """A refusal takes the place of workers and numbers."""
        if not row.refused:
            return super().pieces(row, fitted, room)
        texts: list[str] = []
        for column, width in zip(fitted.columns, fitted.widths, strict=True):
            if column.key in ("prefill", "decode"):
                break
            texts.append(pad_cells(beginning(column.cell(row), width), width))
        text = (" " * GAP).join([*texts, refusal(row)])
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


def _counts(lines: Sequence[DecisionLine]) -> Iterator[str]:
    refused = sum(line.refused for line in lines)
    if refused:
        yield f"{refused:,} refused"
    failed = sum(line.response.state in ("failed", "cut") for line in lines)
    if failed:
        yield f"{failed:,} failed"
    if any(not line.complete for line in lines):
        yield "winners only"


def _meter_lines(scene: Scene) -> list[Line]:
    """How close preferences are to spilling, the closest first."""
    room = None if scene.width is None else scene.width - 2
    meters = sorted(scene.snapshot.meters, key=lambda meter: -(meter.fullness or 0.0))[:_METERS]
    return [
        plain(f" {meter_line(meter, BLOCKS, scene.now, room)}", _meter_style(meter))
        for meter in meters
    ]


def _meter_style(meter: Meter) -> Style:
    fullness = meter.fullness or 0.0
    if fullness >= 1:
        return BAD
    return WARN if fullness >= _NEAR else PLAIN


def unknown_lines(part: Part, canvas: Canvas) -> list[str]:
    """Why a part is unknown, and how to provide it."""
    lines = canvas.paragraph(f"unknown: {part.unknown}", first="", rest="  ")
    for way in part.provide.splitlines():
        lines += canvas.paragraph(way, first="  ", rest="    ")
    return lines


def _origin(snapshot: Snapshot) -> str:
    """The source of the decisions where the rest has another one."""
    part = snapshot.parts.get("decisions")
    if part is None or snapshot.decisions or part.source == snapshot.source:
        return ""
    return f" ({part.source})"


def _line_text(fitted: Fitted[DecisionLine], line: DecisionLine, width: int | None) -> str:
    """A decision in its columns; a refusal takes the place of workers and numbers."""
    if not line.refused:
        return fitted.line(line)
    keys = [column.key for column in fitted.columns]
    place = keys.index("prefill" if "prefill" in keys else "decode")
    texts = fitted.texts([column.cell(line) for column in fitted.columns[:place]])
    begins = sum(column_width + GAP for column_width in fitted.widths[:place])
    text = f"{texts.ljust(begins)}{refusal(line)}"
    return text if width is None or len(text) <= width else text[: width - 2] + ".."
