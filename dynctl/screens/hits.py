"""`hits`: the ladder from what was reachable to what was reused, and the losses to act on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice

from dynctl.base.quantities import percent
from dynctl.documents.hits import (
    CAUSES,
    RUNGS,
    HitsBreak,
    HitsCause,
    HitsGroup,
    HitsReport,
    HitsRung,
    best_trial,
)
from dynctl.documents.recording import RECORD_MORE
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, number_column, table
from dynctl.screens.numbers import plural, sent_to

#: Losses that are described, on narrow and on wide screens.
_MOST_LOSSES = 3
_MOST_LOSSES_WIDE = 6
#: Parts of prompts that are named.
_PARTS = 4
#: Smaller parts are named only with ``-o wide`` and in JSON.
_SMALL = 0.0005
_WIDE = 120
#: Earlier times are those of a trace, which begins at 0.
_REAL_TIME = 31_536_000.0
#: The model of requests whose trace names none.
_UNNAMED = "model"
#: A space at which no line ends.
_KEPT = "\x1f"


def hits_screen(report: HitsReport, canvas: Canvas) -> str:
    """The ladder, the largest losses with what changes them, groups, and what is not certain."""
    lines = canvas.paragraph(_head(report), first="", rest="  ")
    if not report.requests:
        lines += ["", "no request to judge" + _skipped_text(report)]
        lines.append(RECORD_MORE)
        lines += _doubts(report, canvas)
        return "\n".join(lines) + "\n"
    lines += ["", *_ladder(report, canvas)]
    lines += ["", *_losses(report, canvas)]
    text = "\n".join(lines) + "\n"
    if report.groups:
        text += "\n" + table(_columns(report), report.groups, canvas)
    rest = _notes(report, canvas)
    return text + ("\n" + "\n".join(rest) + "\n" if rest else "")


def _head(report: HitsReport) -> str:
    parts = ["prefix hit rate"]
    if report.start is not None and report.end is not None:
        parts.append(_span(report.start, report.end))
    parts.append(sent_to(report.requests, report.workers))
    if len(report.models) > 1:
        parts.append(plural(len(report.models), "model"))
    elif report.models and report.models != [_UNNAMED]:
        parts.append(f"model {report.models[0]}")
    if report.source:
        parts.append(report.source)
    return ", ".join(parts)


def _span(start: float, end: float) -> str:
    """From when to when, UTC; the day only where it is a real date."""
    if end < _REAL_TIME:
        return f"{end - start:,.0f} s"
    first, last = datetime.fromtimestamp(start, UTC), datetime.fromtimestamp(end, UTC)
    form = "%H:%M:%S" if end - start < 600 else "%H:%M"
    until = last.strftime(form if first.date() == last.date() else f"%Y-%m-%d {form}")
    return f"{first.strftime(f'%Y-%m-%d {form}')} to {until} UTC"


def _ladder(report: HitsReport, canvas: Canvas) -> list[str]:
    width = max(len(_title(rung, report)) for rung in report.rungs)
    lines = []
    for rung in report.rungs:
        start = f"{_title(rung, report):<{width}}"
        if rung.rate is None:
            text = f"unknown  {rung.unknown}"
            lines += canvas.paragraph(text, first=f"{start} ", rest=" " * (width + 10))
            continue
        start += percent(rung.rate, 1).rjust(8)
        if rung.lost is None:
            lines.append(start)
            continue
        share = rung.lost / report.prompt_tokens if report.prompt_tokens else 0.0
        lines += _beside(f"{start}{_points(-share):>7}", _cause_texts(rung, canvas), canvas)
    return lines


def _cause_texts(rung: HitsRung, canvas: Canvas) -> list[str]:
    """The causes of a rung's loss, with their points where it has several."""
    wide = _is_wide(canvas)
    shown = [cause for cause in rung.causes if canvas.wide or abs(cause.share) >= _SMALL]
    if len(rung.causes) == 1:
        return [_cause_name(cause, wide) for cause in shown]
    return [_part(cause, wide) for cause in shown]


def _beside(start: str, texts: Sequence[str], canvas: Canvas) -> list[str]:
    """``start`` and the texts; a line ends between two of them if they are short enough."""
    first, rest = f"{start}  ", " " * (len(start) + 2)
    tied = ", ".join(text.replace(" ", _KEPT) for text in texts)
    lines = canvas.paragraph(tied, first=first, rest=rest)
    if any(len(line) > canvas.screen_width for line in lines):
        lines = canvas.paragraph(", ".join(texts), first=first, rest=rest)
    return [line.replace(_KEPT, " ") for line in lines] or [start]


def _is_wide(canvas: Canvas) -> bool:
    return canvas.wide or canvas.screen_width >= _WIDE


def _title(rung: HitsRung, report: HitsReport) -> str:
    if rung.rung == "capacity" and report.capacity_blocks is not None:
        return f"fleet's capacity, {report.capacity_blocks:,} blocks"
    return RUNGS[rung.rung]


def _points(share: float) -> str:
    text = f"{100 * share:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def _cause_name(cause: HitsCause, wide: bool) -> str:
    return f"{cause.label}{_where(cause, wide)}"


def _where(cause: HitsCause, wide: bool) -> str:
    shown = cause.workers if wide or len(cause.workers) == 1 else ()
    return f" ({', '.join(shown)})" if shown else ""


def _part(cause: HitsCause, wide: bool) -> str:
    """A cause and its points; a gain has a plus."""
    amount = f"{100 * cause.share:.1f}" if cause.tokens > 0 else f"{-100 * cause.share:+.1f}"
    return f"{cause.label} {amount}{_where(cause, wide)}"


def _losses(report: HitsReport, canvas: Canvas) -> list[str]:
    most = _MOST_LOSSES_WIDE if _is_wide(canvas) else _MOST_LOSSES
    shown = [cause for cause in report.largest if cause.share >= _SMALL][:most]
    if not shown:
        if sum(rung.rate is not None for rung in report.rungs) < 2:
            return ["no loss is known: only one line of the ladder is"]
        return ["nothing to act on: no cause lost 0.1 % or more"]
    lines = ["largest losses you can act on" if len(shown) > 1 else "largest loss you can act on"]
    for cause in shown:
        lines += canvas.paragraph(
            f"{_points(-cause.share)}  {cause.title}{_extent(cause)}", first="  ", rest=" " * 9
        )
        codes = f" (dynctl explain {cause.codes[0]})" if cause.codes else ""
        lines += canvas.paragraph(f"{cause.act}{codes}", first=" " * 9)
        lines += _more(cause, canvas)
    return lines


def _extent(cause: HitsCause) -> str:
    parts = [plural(cause.requests, "request")]
    if cause.workers:
        parts.append("most on " + ", ".join(cause.workers))
    if cause.examples:
        parts.append("such as " + ", ".join(cause.examples))
    return "; " + ", ".join(parts)


def _more(cause: HitsCause, canvas: Canvas) -> list[str]:
    """What is known about a cause beyond its size."""
    lines = []
    if cause.cause == "stale" and cause.after is not None:
        lines += canvas.paragraph(
            f"half of the events came {cause.after:.1f} s late", first=" " * 9
        )
    if CAUSES[cause.cause].setting:
        lines += canvas.paragraph(_trial_text(cause), first=" " * 9)
    if cause.gain is not None:
        text = f"at most {_points(cause.gain)} points for these requests {cause.gain_if}"
        lines += canvas.paragraph(text, first=" " * 9)
    if cause.segments and cause.breaks:
        parts = (f"{name} {tokens:,}" for name, tokens in islice(cause.segments.items(), _PARTS))
        text = "tokens by the part of the prompt that changed: " + ", ".join(parts)
        lines += canvas.paragraph(text, first=" " * 9)
    if cause.breaks:
        lines += canvas.paragraph(_break_text(cause.breaks[0]), first=" " * 9)
    for command in cause.replay:
        lines += canvas.paragraph(command, first=" " * 9 + "$ ", rest=" " * 11)
    return lines


def _break_text(seen: HitsBreak) -> str:
    """Where the first example leaves earlier prompts."""
    earlier = f"in {seen.earlier}" if seen.earlier else "before"
    return (
        f"{seen.request} differs from block {seen.block:,} (token {seen.token:,}) on; its blocks "
        f"{seen.equal_from:,} to {seen.equal_to - 1:,} were at block {seen.was_at:,} {earlier}"
    )


def _trial_text(cause: HitsCause) -> str:
    """What the advised settings do to the recorded choices, or why none is advised."""
    if not cause.tried:
        return "no setting was tried: the recorded choices cannot be repeated"
    choices = plural(cause.tried, "recorded choice")
    best = best_trial(cause.trials)
    if best is not None:
        return (
            f"tried on {choices}: {best.flags} changes {best.changed:,}, and finds "
            f"{plural(best.tokens, 'token')} more in the caches"
        )
    settings = "; ".join(trial.flags for trial in cause.trials)
    if not settings:
        return f"no setting is left to try on {choices}"
    return f"tried on {choices}, none finds more in the caches: {settings}"


def _columns(report: HitsReport) -> list[Column[HitsGroup]]:
    columns: list[Column[HitsGroup]] = [
        Column(report.by, report.by.upper(), lambda r: r.name, name=True),
        number_column("requests", "REQUESTS", lambda r: r.requests, rank=2),
    ]
    for rank, name in ((3, "reachable"), (4, "best"), (5, "expected"), (1, "reused")):
        columns.append(_rate_column(name, rank))
    columns.append(
        Column("largest", "LARGEST LOSS", lambda r: r.largest_share, text=_largest, rank=6)
    )
    return columns


def _largest(row: HitsGroup) -> str:
    return f"{CAUSES[row.largest].label} {100 * row.largest_share:.1f}" if row.largest else "-"


def _rate_column(name: str, rank: int) -> Column[HitsGroup]:
    def text(row: HitsGroup) -> str:
        rate = row.rates.get(name)
        return "unknown" if rate is None else percent(rate, 1)

    return Column(
        name, name.upper(), lambda r: r.rates.get(name) or 0.0, text=text, right=True, rank=rank
    )


def _skipped_text(report: HitsReport) -> str:
    named = ", ".join(f"{n:,} {reason}" for reason, n in report.skipped.items())
    return f"; not counted: {named}" if named else ""


def _notes(report: HitsReport, canvas: Canvas) -> list[str]:
    skipped = _skipped_text(report).removeprefix("; ")
    lines = canvas.paragraph(skipped, first="", rest="  ") if skipped else []
    return lines + _doubts(report, canvas)


def _doubts(report: HitsReport, canvas: Canvas) -> list[str]:
    lines: list[str] = []
    for doubt in report.doubts:
        text = f"{doubt.code}  {doubt.what}: {doubt.effect}"
        lines += canvas.paragraph(text, first="doubt ", rest=" " * 15)
        lines += canvas.paragraph(doubt.resolve, first=" " * 15)
    return lines
