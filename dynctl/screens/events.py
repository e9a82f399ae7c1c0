"""`events tail`: a table whose columns keep their widths; ``!`` marks gaps and other remarks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.base.terminal import printable
from dynctl.documents.events import TailKind, TailLine
from dynctl.planning.domain_capacity import primary_domain
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import GAP, Column, Fitted, fit, number_column, or_dash, visible
from dynctl.screens.streaming import LineStream
from dynctl.sources.dynamo.event_stream import TailQueue
from router_core import Worker

_WIDEST_EVENT = f"! {TailKind.DISCONNECT}"
#: Characters of a hash that a line shows; all of it is in -o jsonl.
_HASH = 8
#: The kinds that fill the columns; the others are sentences.
_IN_COLUMNS = (TailKind.STORED, TailKind.REMOVED, TailKind.CLEARED)
#: Columns that sentences have as well; the sentence follows them.
_SHARED = ("time", "event", "worker", "domain")


class EventLines:
    """Draws lines. Column widths come from the workers at the start.

    ``domain``: the domain to show, None for none.
    """

    def __init__(self, workers: Sequence[Worker], domain: str | None, canvas: Canvas) -> None:
        columns = _columns(domain)
        samples = [_widest(worker) for worker in workers] or [_widest(None)]
        offered = visible(columns, wide=canvas.wide, width=canvas.width)
        self._fitted = fit(offered, samples, canvas.width)
        pairs = list(zip(self._fitted.columns, self._fitted.widths, strict=True))
        shared = [pair for pair in pairs if pair[0].key in _SHARED]
        self._head = Fitted(tuple(c for c, _ in shared), tuple(w for _, w in shared))
        self._canvas = canvas

    def heading(self) -> str:
        return self._canvas.faint(self._fitted.heading()) + "\n"

    def line(self, line: TailLine) -> str:
        """One line with its line end; a sentence that does not fit continues below."""
        if line.event in _IN_COLUMNS:
            text = self._fitted.line(line)
            return self._with_words(text, f"! {line.message}" if line.message else "")
        cells = [column.cell(line) for column in self._head.columns]
        used = sum(self._head.widths) + GAP * (len(self._head.widths) - 1)
        text = self._with_words(self._head.texts(cells).ljust(used), line.message or "")
        return self._canvas.bold(text[:-1]) + "\n" if line.is_remark else text

    def _with_words(self, text: str, words: str) -> str:
        width = self._canvas.width
        whole = f"{text}{' ' * GAP}{words}".rstrip()
        if width is None or len(whole) <= width:
            return whole + "\n"
        indent = " " * (self._head.widths[0] + GAP)
        below = self._canvas.paragraph(words, first=indent)
        return "".join(line + "\n" for line in (text.rstrip(), *below))


def _columns(domain: str | None) -> list[Column[TailLine]]:
    columns: list[Column[TailLine]] = [
        Column("time", "TIME", lambda e: e.time, text=_clock),
        Column("event", "EVENT", lambda e: e.event, text=_event),
        Column("worker", "WORKER", lambda e: e.worker, form=or_dash, name=True),
    ]
    if domain is not None:
        columns.append(
            Column(
                "domain",
                domain.upper(),
                lambda e: e.domains.get(domain),
                rank=1,
            )
        )
    columns += [
        number_column("rank", "RANK", lambda e: e.dp_rank, rank=5),
        number_column("blocks", "BLOCKS", lambda e: e.blocks),
        Column("first", "FIRST", lambda e: e.first_hash, form=_hash, rank=3),
        Column("after", "AFTER", lambda e: e.parent_hash, form=_hash, rank=6, wide=True),
        Column("tier", "TIER", lambda e: e.tier, form=or_dash, rank=4),
        number_column("event_id", "ID", lambda e: e.event_id, rank=2),
    ]
    return columns


def _widest(worker: Worker | None) -> TailLine:
    """The widest line of a worker, so that columns do not move later."""
    return TailLine(
        _WIDEST_EVENT.removeprefix("! "),
        "1970-01-01T00:00:00.000Z",
        worker=worker.name if worker is not None else " " * 16,
        dp_rank=1000,
        domains=dict(worker.domains) if worker is not None else {},
        event_id=10_000_000,
        blocks=10_000,
        first_hash="0" * 16,
        parent_hash="0" * 16,
        tier="host_pinned",
    )


def _clock(line: TailLine) -> str:
    """The local time of day; -o jsonl has the date."""
    return datetime.fromisoformat(line.time).astimezone().strftime("%H:%M:%S.%f")[:-3]


def _event(line: TailLine) -> str:
    return f"! {line.event}" if line.is_remark else line.event


def _hash(text: str | None) -> str:
    return "-" if text is None else text[:_HASH]


_AT_ONCE = 256


class EventStream(LineStream):
    """`events tail` on stdout. ``limit``: lines to show at most. Raises UsageProblem."""

    def __init__(
        self, options: GlobalOptions, *, limit: int | None = None, headings: bool = True
    ) -> None:
        super().__init__(options, what="events", command="dynctl events tail", limit=limit)
        self._options = options
        self._headings = headings

    async def show(
        self, queue: TailQueue, workers: Sequence[Worker], duration: float | None = None
    ) -> None:
        """Show events until the limit or for ``duration`` seconds; raises ReaderLeft."""
        if self._options.output is OutputFormat.JSONL:
            await self.write(queue.take, _json_line, duration)
            return
        names = sorted({name for worker in workers for name in worker.domains})
        transfer = [worker.runtime_config.kv_transfer_domain for worker in workers]
        domain = primary_domain(names, transfer)
        domain = None if domain is None else printable(domain)
        lines = EventLines(workers, domain, Canvas.from_options(self._options))
        heading = lines.heading() if self._headings else ""
        await self.write(queue.take, lines.line, duration, heading)


def _json_line(line: TailLine) -> str:
    return msgspec.json.encode(line).decode() + "\n"
