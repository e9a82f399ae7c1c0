"""`dynctl top --once`: look, draw, end."""

from __future__ import annotations

import asyncio

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.screens.render import emit
from dynctl.sources.alerts import AlertBoard
from dynctl.sources.domains import DomainBoard
from dynctl.sources.following import DashboardSource
from dynctl.sources.snapshot import Snapshot
from dynctl.top.frame import TopFrame, top_frame
from dynctl.top.run import silent_logs


def print_frame(source: DashboardSource, options: GlobalOptions, domain: str | None) -> None:
    """One frame of ``source`` on stdout. Raises as the source, and UsageProblem for a domain that
    no worker publishes."""
    frame = framed(asyncio.run(_looked(source)), domain)
    emit(frame, options, screen=top_frame)


def framed(snapshot: Snapshot, domain: str | None = None) -> TopFrame:
    """A snapshot with what follows from it."""
    known = sorted({name for row in snapshot.workers for name in row.domains})
    if domain is not None and domain not in known:
        raise UsageProblem(
            f"--domain {domain}: no worker publishes it; "
            f"published: {', '.join(known) or 'no domain at all'}"
        )
    board = DomainBoard()
    view = board.view(snapshot, domain)
    return TopFrame(snapshot, view, list(AlertBoard().alerts(snapshot, board.capacity(snapshot))))


async def _looked(source: DashboardSource) -> Snapshot:
    with silent_logs():
        async with source:
            await source.settle()
            return await source.snapshot()
