"""`dynctl top --once`: look, draw, end."""

from __future__ import annotations

import asyncio

from dynctl.dashboard.alerts import AlertBoard
from dynctl.dashboard.domains import DomainBoard
from dynctl.dashboard.snapshot import Snapshot
from dynctl.dashboard.sources import DashboardSource
from dynctl.errors import UsageProblem
from dynctl.options import GlobalOptions
from dynctl.views.dashboard.frame import TopFrame, top_frame
from dynctl.views.dashboard.running import silent_logs
from dynctl.views.render import emit


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
