"""`dynctl top --once`: one frame as text or JSON."""

from __future__ import annotations

import asyncio

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.documents.snapshot import Snapshot, TopFrame
from dynctl.screens.canvas import Canvas
from dynctl.screens.render import emit
from dynctl.sources.alerts import AlertBoard
from dynctl.sources.domains import DomainBoard
from dynctl.sources.source import LiveSource
from dynctl.top.header import currency, facts, fitting, numbers
from dynctl.top.panels.all import PANELS
from dynctl.top.panels.content import Scene
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


def top_frame(frame: TopFrame, canvas: Canvas) -> str:
    """Header and a table for each panel."""
    snapshot, view = frame.snapshot, frame.domains
    width = canvas.screen_width if canvas.width is not None else 10_000
    lines = [canvas.bold(fitting(facts(snapshot, view), width)), fitting(numbers(snapshot), width)]
    old = currency(snapshot, snapshot.at)
    if old:
        lines += canvas.paragraph(f"NOT CURRENT  {old}", first="")
    scene = Scene(snapshot, view, frame.alerts, snapshot.at)
    for panel in PANELS:
        content = panel()
        title = content.title(scene)
        lines += ["", canvas.bold(title), "-" * len(title), *content.lines(scene, canvas)]
    return "".join(line.rstrip() + "\n" for line in lines)
