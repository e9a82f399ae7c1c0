"""What Enter, ``d``, ``l`` and ``y`` open for the row under the cursor."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence, Set
from typing import Final

from dynctl.base.errors import DynctlError
from dynctl.documents.snapshot import DecisionLine, DecisionReport
from dynctl.documents.workers import WorkerRow
from dynctl.screens.canvas import Canvas
from dynctl.screens.decisions import clock, decision_report
from dynctl.screens.render import yaml_text
from dynctl.screens.route import ExplainScreen
from dynctl.sources.source import LiveSource
from dynctl.top.custody import ReadChain
from dynctl.top.details import Draw, card_text
from dynctl.top.panels.content import AnyContent, Scene
from dynctl.top.process_log import ReadLog, unread_log

_LOGS: Final = (
    "The log of a worker's process: l on the worker. All decisions as they are made: dynctl "
    "decisions tail."
)


class Details:
    """Texts about rows. ``source`` explains decisions, ``chain`` reads chains of custody, ``logs``
    the logs of processes."""

    def __init__(self, source: LiveSource, chain: ReadChain, logs: ReadLog = unread_log) -> None:
        self._source = source
        self._chain = chain
        self._logs = logs

    async def open(self, content: AnyContent, row: object, scene: Scene) -> Draw:
        """Enter: a worker's load, card and chain; a decision explained; else the description.

        Raises DynctlError.
        """
        match row:
            case WorkerRow():
                chain = await asyncio.to_thread(self._chain, row)
                return lambda canvas: card_text(row, chain, canvas)
            case DecisionLine() if row.complete:
                result = await self._source.decision(row)
                return lambda canvas: ExplainScreen()(result, canvas)
            case _:
                return await self.describe(content, row, scene)

    async def describe(self, content: AnyContent, row: object, scene: Scene) -> Draw:
        """``d``: all that is known about a row."""
        return lambda canvas: content.describe(row, scene, canvas)

    async def log(self, content: AnyContent, row: object, scene: Scene) -> Draw:
        """``l``: the decisions and findings about a row, newest first, and a worker's own log."""
        own = await asyncio.to_thread(self._process_log, row) if isinstance(row, WorkerRow) else []
        names = content.workers_of(row)
        return lambda canvas: "\n".join(
            [log_text(row, names, scene, canvas), "", *_own_log(own, canvas)]
        )

    def _process_log(self, worker: WorkerRow) -> Sequence[str]:
        """The name of the log and its lines, or why it is not read and what to do."""
        try:
            return self._logs(worker)
        except DynctlError as error:
            return [error.message, *error.hint.splitlines()]

    async def yaml(self, row: object) -> Draw:
        """``y``: the row as YAML."""
        text = yaml_text(row)
        return lambda _: text


def log_text(row: object, names: Set[str], scene: Scene, canvas: Canvas) -> str:
    """What the source reported about a row: findings, then decisions with their reasons.
    ``names``: the workers that it is about.

    A worker's row has the decisions for it, a domain's those of its workers, a decision's those
    that chose one of the same workers, and a finding's those for its subject.
    """
    about = [alert for alert in scene.alerts if not names or alert.subject in names or alert is row]
    decisions = [
        line
        for line in scene.snapshot.decisions
        if line is row or names & {r.worker for r in (line.prefill, line.decode) if r is not None}
    ]
    lines = [canvas.bold(f"findings ({len(about)})")]
    for alert in about:
        since = "" if alert.since is None else f"since {clock(alert.since, tenths=False)} "
        lines += canvas.paragraph(f"{since}{alert.code} {alert.subject}: {alert.message}")
    of = f"{len(decisions)} of the last {len(scene.snapshot.decisions)}"
    lines += ["", canvas.bold(f"decisions ({of})")]
    if decisions:
        report = DecisionReport(scene.snapshot.source, decisions)
        lines += decision_report(report, canvas).split("\n")
    else:
        lines.append("  none")
    return "\n".join(lines)


def _own_log(lines: Sequence[str], canvas: Canvas) -> Iterator[str]:
    """The log of a worker's process; a row that is no worker has none."""
    if not lines:
        yield from canvas.paragraph(_LOGS, first="")
        return
    place, *rest = lines
    yield canvas.bold("log of the process")
    yield from canvas.paragraph(place)
    yield from (f"  {line}" for line in rest)
