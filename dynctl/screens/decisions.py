"""`decisions list` and `decisions tail`, and the texts of a decision that the dashboard shares."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import msgspec

from dynctl.base.options import GlobalOptions
from dynctl.documents.decisions import ClientResponse
from dynctl.documents.snapshot import DecisionLine, DecisionReport
from dynctl.documents.workers import WorkerRow
from dynctl.screens.canvas import Canvas
from dynctl.screens.cells import pad_cells
from dynctl.screens.columns import GAP, Column, Fitted, fit, visible
from dynctl.screens.numbers import amount, count, estimate, opening, seconds
from dynctl.screens.streaming import LineStream

UNKNOWN: Final = "?"
NOTHING: Final = "-"
_SHORT_ID: Final = 6
_LONG_ID: Final = 12
#: The address at the beginning of an engine's failure.
_ORIGIN: Final = re.compile(r"\A\w+://\S+ ")
#: The longest text of an outcome that often comes.
_LONGEST: Final = ClientResponse("refused", 503, ttft_s=1.0, duration_s=1.0)
#: Characters that a reason keeps on a narrow screen.
_WHY: Final = 18
#: From this width on workers are shown with their domain.
_ROOMY: Final = 100


def unique_end(lines: Sequence[DecisionLine]) -> int:
    """The number of characters at the end by which ids are shown; `dynctl why` accepts that end.

    A frontend counts its decisions in the last eight hexadecimal digits, so six are unique among
    all that it keeps. Several frontends have the same ends: then the ids differ before those.
    """
    ids = {line.id for line in lines}
    if len({line.source for line in lines}) > 1:
        return _LONG_ID
    for length in range(_SHORT_ID, _LONG_ID):
        if len({one[-length:] for one in ids}) == len(ids):
            return length
    return _LONG_ID


def reason_text(line: DecisionLine) -> str:
    """Why these workers, or why none; of a request that went wrong, what happened."""
    if line.refused:
        return line.message or line.outcome.replace("_", " ")
    if line.response.error:
        return _problem(line)
    parts = [part for part in (line.why, line.moved) if part]
    if line.hop_verdict:
        parts.append(line.hop_verdict)
    return ", ".join(parts) or (UNKNOWN if not line.complete else NOTHING)


def _problem(line: DecisionLine) -> str:
    """What happened to the request, without the worker that the line names."""
    text = _ORIGIN.sub("", line.response.error)
    for ref in (line.decode, line.prefill):
        if ref is not None:
            text = text.removeprefix(f"{ref.worker} ")
    return text


def outcome_text(line: DecisionLine) -> str:
    """How the request ended: the status that its client got, and what is not as it should be."""
    response = line.response
    match response.state:
        case "complete":
            return response.state if response.status is None else str(response.status)
        case "cut" | "failed" | "refused":
            known = "" if response.status is None else f"{response.status} "
            return known + response.state
        case "unknown":
            return UNKNOWN
    return response.state


def domain_of(lines: Sequence[DecisionLine]) -> str | None:
    """The domain to show beside the workers: zone where it is published, else the first."""
    found = {name for line in lines for name in line.domains | line.prefill_domains}
    return min(found, key=lambda name: (name != "zone", name), default=None)


def decision_columns(
    lines: Sequence[DecisionLine], domain: str | None
) -> list[Column[DecisionLine]]:
    """The columns of `decisions`. ``domain``: shown beside each worker, None for none."""
    end = unique_end(lines)

    def prefill(line: DecisionLine) -> str:
        if line.refused:
            return "refused"
        if line.outcome != "selected":
            return "none"
        return _worker_and_place(line.prefill, line.prefill_domains, domain)

    def decode(line: DecisionLine) -> str:
        return NOTHING if line.refused else _worker_and_place(line.decode, line.domains, domain)

    return [
        Column("at", "TIME", lambda d: d.at, form=clock),
        Column("id", "ID", lambda d: d.id, text=lambda d: d.id[-end:]),
        Column(
            "model",
            "MODEL",
            lambda d: d.model,
            text=lambda d: d.model or UNKNOWN,
            rank=5,
            name=True,
        ),
        Column("prefill", "PREFILL", prefill, name=True),
        Column("decode", "DECODE", decode, name=True),
        Column("cached", "CACHED", lambda d: d.cached_blocks, text=cached_text, right=True, rank=1),
        Column(
            "cost",
            "COST",
            lambda d: d.cost,
            text=lambda d: number_text(d, d.cost),
            right=True,
            rank=3,
        ),
        Column(
            "tokens", "BLOCKS", lambda d: d.blocks, text=_blocks_text, right=True, rank=6, wide=True
        ),
        Column("margin", "MARGIN", lambda d: d.margin, text=_margin, right=True, rank=4, wide=True),
        Column(
            "ttft", "TTFT", lambda d: d.response.ttft_s, form=seconds, right=True, rank=7, wide=True
        ),
        Column(
            "took",
            "TOOK",
            lambda d: d.response.duration_s,
            form=seconds,
            right=True,
            rank=8,
            wide=True,
        ),
        Column("outcome", "OUTCOME", outcome_text),
        Column("why", "WHY", reason_text, name=True, shortest=_WHY, sentence=True),
    ]


def decision_report(result: DecisionReport, canvas: Canvas, place: str | None = "") -> str:
    """The screen of `decisions list`: newest first. ``place``: the option that `dynctl why` needs
    for the same source; None: it has no access to these decisions."""
    rows = result.decisions
    if not rows:
        which = "yet" if result.kept == 0 else "match"
        return f"no decisions {which} ({result.source})\n"
    lines = DecisionLines(rows, canvas)
    text = (lines.heading() if canvas.headings else "") + "".join(map(lines.line, rows))
    if any(not line.complete for line in rows):
        text += "? = unknown, the source reports the winner only\n"
    elif canvas.headings and place is not None:
        text += f"explain one: dynctl why {rows[0].id[-unique_end(rows) :]}{place}\n"
    return text


class DecisionLines:
    """Draws lines whose columns keep the widths of ``samples``."""

    def __init__(self, samples: Sequence[DecisionLine], canvas: Canvas) -> None:
        narrow = canvas.width is not None and canvas.width < _ROOMY
        columns = decision_columns(samples, None if narrow else domain_of(samples))
        if narrow:
            # The reason takes what is left: a long one does not push out the other columns.
            columns[-1] = replace(columns[-1], text=lambda d: opening(reason_text(d), _WHY))
        offered = visible(columns, wide=canvas.wide, width=canvas.width)
        self._fitted: Fitted[DecisionLine] = fit(offered, samples, canvas.width)
        self._canvas = canvas

    def heading(self) -> str:
        return self._canvas.faint(self._fitted.heading()) + "\n"

    def line(self, line: DecisionLine) -> str:
        """One line with its line end. The reason is last and takes what is left."""
        *cells, _ = [column.cell(line) for column in self._fitted.columns]
        used = sum(self._fitted.widths[:-1]) + GAP * (len(self._fitted.widths) - 1)
        text = pad_cells(self._fitted.texts(cells), used)
        room = None if self._canvas.width is None else max(_WHY, self._canvas.width - used)
        why = reason_text(line)
        whole = (text + (why if room is None else opening(why, room))).rstrip()
        return (self._canvas.bold(whole) if line.refused else whole) + "\n"


class DecisionStream(LineStream):
    """`decisions tail`: decisions as they are made, oldest first."""

    def __init__(self, options: GlobalOptions, *, limit: int | None, headings: bool) -> None:
        super().__init__(options, what="decisions", command="dynctl decisions tail", limit=limit)
        self._canvas = Canvas.from_options(options)
        self._headings = headings and not self._as_json

    async def show(
        self,
        pages: AsyncIterator[DecisionReport],
        workers: Sequence[WorkerRow],
        last: int,
        duration: float | None,
    ) -> None:
        """Show the last ``last`` decisions of the first page and all of the others. ``workers``
        give the widths of the columns. Raises ReaderLeft."""
        first = await anext(pages)
        waiting = list(reversed(first.decisions[:last]))
        lines = DecisionLines([*_samples(workers, first.source), *first.decisions], self._canvas)

        async def take(most: int) -> list[DecisionLine]:
            nonlocal waiting
            while not waiting:
                waiting = list(reversed((await anext(pages)).decisions))
            taken, waiting = waiting[:most], waiting[most:]
            return taken

        def text(line: DecisionLine) -> str:
            return msgspec.json.encode(line).decode() + "\n" if self._as_json else lines.line(line)

        heading = lines.heading() if self._headings else ""
        await self.write(take, text, duration, heading)


def _samples(workers: Sequence[WorkerRow], source: str) -> list[DecisionLine]:
    """The widest line of each worker, so that columns do not move later."""
    from dynctl.documents.route_result import Ref

    found = []
    for row in workers:
        ref = Ref(row.name, row.worker_id)
        prefill = ref if row.role == "prefill" else None
        found.append(
            DecisionLine(
                "0" * _LONG_ID,
                0.0,
                source,
                model=row.model,
                prefill=prefill,
                decode=None if prefill else ref,
                prefill_domains=row.domains if prefill else {},
                domains={} if prefill else row.domains,
                blocks=100,
                cached_blocks=100,
                cost=100.25,
                response=_LONGEST,
            )
        )
    return found


# -- texts of one decision -------------------------------------------------------------------------


def places(line: DecisionLine, domain: str) -> str:
    """``zone-a``, or ``zone-a>zone-b`` if the KV cache crossed."""
    last = line.domains.get(domain)
    first = line.prefill_domains.get(domain)
    if first is None or line.prefill is None or first == last:
        return last or NOTHING
    return f"{first}>{last}" if last is not None else first


def refusal(line: DecisionLine) -> str:
    """The text of a refusal, in place of workers and numbers."""
    return f"REFUSED {line.outcome}: {line.message or 'no worker'}"


def clock(at: float, *, tenths: bool = True) -> str:
    """The local time of day."""
    local = datetime.fromtimestamp(at).astimezone()
    return local.strftime("%H:%M:%S") + (f".{local.microsecond // 100_000}" if tenths else "")


def worker_text(ref: Any) -> str:
    """A chosen worker, with its rank where that is not the first."""
    if ref is None:
        return NOTHING
    return str(ref.worker) + (f" r{ref.dp_rank}" if ref.dp_rank else "")


def _worker_and_place(ref: Any, domains: dict[str, str], domain: str | None) -> str:
    place = domains.get(domain or "")
    return worker_text(ref) + (f" ({place})" if ref is not None and place else "")


def number_text(line: DecisionLine, value: float | None) -> str:
    """A number of the first hop: ``-`` where it has none, ``?`` where the source has none."""
    if value is None:
        return NOTHING if line.complete else UNKNOWN
    return amount(round(value, 2))


def cached_text(line: DecisionLine) -> str:
    """Cached blocks of all prompt blocks."""
    if line.refused:
        return NOTHING
    if line.tokens_estimated:
        return f"{UNKNOWN}/{_blocks_text(line)}"
    if line.cached_blocks is None:
        return UNKNOWN if not line.complete else NOTHING
    if line.blocks is None:
        return f"{line.cached_blocks:,}/{UNKNOWN}"
    return f"{line.cached_blocks:,}/{line.blocks:,}"


def _blocks_text(line: DecisionLine) -> str:
    """Prompt blocks: ``~28`` where they are an estimate."""
    if line.blocks is None:
        return count(None)
    return estimate(line.blocks) if line.tokens_estimated else count(line.blocks)


def _margin(line: DecisionLine) -> str:
    """The margin beside the reason: a number, where the words would be those of the reason."""
    text = margin_text(line)
    if text != line.why:
        return text
    return NOTHING if line.margin is None else amount(line.margin)


def margin_text(line: DecisionLine) -> str:
    """By how much the winner was cheaper than the next candidate."""
    if line.margin is None:
        won = line.complete and line.outcome == "selected"
        return "only one" if won else number_text(line, None)
    if line.margin < 0:
        return "drawn"
    return "tie" if line.margin == 0 else f"+{amount(round(line.margin, 2))}"
