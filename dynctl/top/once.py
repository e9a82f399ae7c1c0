"""`dynctl top --once`: one frame as text or JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.documents.snapshot import Alert, DecisionLine, DomainView, Part, Snapshot, TopFrame
from dynctl.documents.topology import TopologyShow
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, Fitted, fit, visible
from dynctl.screens.decisions import refusal
from dynctl.screens.render import emit
from dynctl.screens.topology import topology_notes
from dynctl.screens.workers import ordered
from dynctl.sources.alerts import AlertBoard
from dynctl.sources.domains import DomainBoard
from dynctl.sources.source import LiveSource
from dynctl.top.columns import (
    alert_table,
    decision_table,
    domain_table,
    hands_over_roles,
    worker_table,
)
from dynctl.top.header import currency, decisions_listed, facts, fitting, meter_line, numbers
from dynctl.top.marks import ASCII
from dynctl.top.run import silent_logs


def print_frame(source: LiveSource, options: GlobalOptions, domain: str | None) -> None:
    """Print one frame of ``source``. Raises as the source, and UsageProblem for a domain that no
    worker publishes."""
    frame = frame_of(asyncio.run(_snapshot(source)), domain)
    emit(frame, options, screen=top_frame)


def frame_of(snapshot: Snapshot, domain: str | None = None) -> TopFrame:
    """A snapshot with its domains and alerts."""
    known = sorted({name for row in snapshot.workers for name in row.domains})
    if domain is not None and domain not in known:
        raise UsageProblem(
            f"--domain {domain}: no worker publishes this domain; "
            f"published: {', '.join(known) or 'none'}"
        )
    board = DomainBoard()
    view = board.view(snapshot, domain)
    return TopFrame(snapshot, view, list(AlertBoard().alerts(snapshot, board.capacity(snapshot))))


async def _snapshot(source: LiveSource) -> Snapshot:
    with silent_logs():
        async with source:
            await source.settle()
            return await source.snapshot()


#: Decisions in the text; -o json has all that were read.
DECISIONS: Final = 10


def top_frame(frame: TopFrame, canvas: Canvas) -> str:
    """Header and four tables."""
    snapshot, view = frame.snapshot, frame.domains
    width = canvas.screen_width if canvas.width is not None else 10_000
    lines = [canvas.bold(fitting(facts(snapshot, view), width)), fitting(numbers(snapshot), width)]
    old = currency(snapshot, snapshot.at)
    if old:
        lines += canvas.paragraph(f"NOT CURRENT  {old}", first="")
    title = "domains" if view.domain is None else f"domains by {view.domain}"
    lines += _titled(canvas, title)
    lines += _domains(snapshot, view, canvas)
    lines += _titled(canvas, f"workers ({len(snapshot.workers):,})")
    lines += _table(worker_table(snapshot), ordered(snapshot.workers, view.domain), canvas)
    shown = snapshot.decisions[:DECISIONS]
    title = f"decisions ({decisions_listed(snapshot, len(shown))})" if shown else "decisions"
    lines += _titled(canvas, title)
    lines += _decisions(snapshot, shown, view.domain, canvas)
    lines += _titled(canvas, f"alerts ({len(frame.alerts)})")
    lines += _alerts(frame.alerts, snapshot.at, canvas)
    return "".join(line.rstrip() + "\n" for line in lines)


def unknown_lines(origin: Part, canvas: Canvas) -> list[str]:
    """Why a part is unknown, and how to provide it."""
    lines = canvas.paragraph(f"unknown: {origin.unknown}", first="", rest="  ")
    for way in origin.provide.splitlines():
        lines += canvas.paragraph(way, first="  ", rest="    ")
    return lines


def _titled(canvas: Canvas, title: str) -> tuple[str, str, str]:
    return "", canvas.bold(title), "-" * len(title)


def _domains(snapshot: Snapshot, view: DomainView, canvas: Canvas) -> Iterator[str]:
    if not view.rows:
        yield f"no workers are registered ({snapshot.source})"
        return
    yield from _table(domain_table(view, snapshot, ASCII), view.rows, canvas)
    for note in topology_notes(_judged(view)):
        yield from canvas.paragraph(note, first="", rest="  ")


def _judged(view: DomainView) -> TopologyShow:
    return view.shown


def _decisions(
    snapshot: Snapshot, shown: Sequence[DecisionLine], domain: str | None, canvas: Canvas
) -> Iterator[str]:
    unknown = snapshot.unknown("decisions")
    if unknown is not None:
        yield from unknown_lines(unknown, canvas)
        return
    for meter in snapshot.meters:
        yield from canvas.paragraph(meter_line(meter, ASCII, snapshot.at), first="", rest="  ")
    if not shown:
        part = snapshot.parts.get("decisions")
        named = part is not None and not snapshot.decisions and part.source != snapshot.source
        origin = f" ({part.source})" if part is not None and named else ""
        yield from canvas.paragraph(f"no decisions yet{origin}", first="", rest="  ")
        return
    columns = decision_table(domain, shown, split=hands_over_roles(snapshot))
    fitted = fit(visible(columns, wide=canvas.wide, width=canvas.width), shown, canvas.width)
    yield canvas.faint(fitted.heading())
    for line in shown:
        yield decision_text(fitted, line, canvas.width)
    if any(not line.complete for line in shown):
        yield "? = unknown, the source reports the winner only"


def decision_text(fitted: Fitted[DecisionLine], line: DecisionLine, width: int | None) -> str:
    """A decision in its columns; a refusal takes the place of workers and numbers."""
    if not line.refused:
        return fitted.line(line)
    keys = [column.key for column in fitted.columns]
    place = keys.index("prefill" if "prefill" in keys else "decode")
    cells = [column.cell(line) for column in fitted.columns[:place]]
    text = f"{fitted.texts(cells).ljust(_until(fitted, place))}{refusal(line)}"
    return text if width is None or len(text) <= width else text[: width - 2] + ".."


def _until(fitted: Fitted[Any], place: int) -> int:
    """Where the column at ``place`` begins."""
    return sum(width + 2 for width in fitted.widths[:place])


def _alerts(alerts: Sequence[Alert], now: float, canvas: Canvas) -> Iterator[str]:
    if not alerts:
        yield "none"
        return
    columns = alert_table(now)
    yield from _table(columns, alerts, canvas)
    codes = [one.code for one in alerts if one.code.startswith("DY")]
    if codes:
        yield f"dynctl explain {codes[0]}"


def _table(columns: Sequence[Column[Any]], rows: Sequence[Any], canvas: Canvas) -> Iterator[str]:
    fitted = fit(visible(columns, wide=canvas.wide, width=canvas.width), rows, canvas.width)
    yield canvas.faint(fitted.heading())
    for row in rows:
        yield fitted.line(row)
