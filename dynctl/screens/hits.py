"""`hits`: the ladder from what was reachable to what was reused, and the losses to act on."""

from __future__ import annotations

from datetime import UTC, datetime

from dynctl.base.quantities import percent
from dynctl.documents.hits import (
    CAUSES,
    RUNGS,
    HitsCause,
    HitsGroup,
    HitsReport,
    HitsRung,
    best_trial,
)
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, number_column, table
from dynctl.screens.numbers import plural

#: Losses that are described, on narrow and on wide screens.
_MOST_LOSSES = 3
_MOST_LOSSES_WIDE = 6
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
        lines += ["", "no request to judge" + _skipped(report)]
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
    parts.append(plural(report.requests, "request"))
    if report.workers:
        parts.append(plural(report.workers, "worker"))
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
    wide = canvas.wide or canvas.screen_width >= _WIDE
    width = max(len(_title(one, report)) for one in report.rungs)
    lines = []
    for rung in report.rungs:
        start = f"{_title(rung, report):<{width}}"
        if rung.rate is None:
            lines += canvas.paragraph(
                f"unknown  {rung.unknown}", first=f"{start} ", rest=" " * (width + 10)
            )
            continue
        start += percent(rung.rate, 1).rjust(8)
        if rung.lost is None:
            lines.append(start)
            continue
        share = rung.lost / report.prompt_tokens if report.prompt_tokens else 0.0
        start += f"{_points(-share):>7}"
        shown = [_part(one, wide) for one in rung.causes if abs(one.share) >= _SMALL or canvas.wide]
        if len(rung.causes) == 1 and shown:
            shown = [_named(rung.causes[0], wide)]
        first, rest = f"{start}  ", " " * (len(start) + 2)
        # A line ends between two causes if they are short enough.
        kept = canvas.paragraph(
            ", ".join(one.replace(" ", _KEPT) for one in shown), first=first, rest=rest
        )
        if any(len(one) > canvas.screen_width for one in kept):
            kept = canvas.paragraph(", ".join(shown), first=first, rest=rest)
        lines += [one.replace(_KEPT, " ") for one in kept] or [start]
    return lines


def _title(rung: HitsRung, report: HitsReport) -> str:
    if rung.rung == "capacity" and report.capacity_blocks is not None:
        return f"fleet's capacity, {report.capacity_blocks:,} blocks"
    return RUNGS[rung.rung]


def _points(share: float) -> str:
    text = f"{100 * share:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def _named(one: HitsCause, wide: bool) -> str:
    return f"{one.label}{_where(one, wide)}"


def _where(one: HitsCause, wide: bool) -> str:
    shown = one.workers if wide or len(one.workers) == 1 else ()
    return f" ({', '.join(shown)})" if shown else ""


def _part(one: HitsCause, wide: bool) -> str:
    """A cause and its points; a gain has a plus."""
    amount = f"{100 * one.share:.1f}" if one.tokens > 0 else f"{-100 * one.share:+.1f}"
    return f"{one.label} {amount}{_where(one, wide)}"


def _losses(report: HitsReport, canvas: Canvas) -> list[str]:
    wide = canvas.wide or canvas.screen_width >= _WIDE
    most = _MOST_LOSSES_WIDE if wide else _MOST_LOSSES
    shown = [one for one in report.largest if one.share >= _SMALL][:most]
    if not shown and sum(one.rate is not None for one in report.rungs) < 2:
        return ["no loss is known: only one line of the ladder is"]
    if not shown:
        return ["nothing to act on: no cause lost 0.1 % or more"]
    lines = ["largest losses you can act on" if len(shown) > 1 else "largest loss you can act on"]
    for one in shown:
        lines += canvas.paragraph(
            f"{_points(-one.share)}  {one.title}{_extent(one)}", first="  ", rest=" " * 9
        )
        codes = f" (dynctl explain {one.codes[0]})" if one.codes else ""
        lines += canvas.paragraph(f"{one.act}{codes}", first=" " * 9)
        lines += _more(one, canvas)
    return lines


def _extent(one: HitsCause) -> str:
    parts = [plural(one.requests, "request")]
    if one.workers:
        parts.append("most on " + ", ".join(one.workers))
    if one.examples:
        parts.append("such as " + ", ".join(one.examples))
    return "; " + ", ".join(parts)


def _more(one: HitsCause, canvas: Canvas) -> list[str]:
    """What is known about a cause beyond its size."""
    lines = []
    if one.cause == "stale" and one.after is not None:
        lines += canvas.paragraph(f"half of the events came {one.after:.1f} s late", first=" " * 9)
    if CAUSES[one.cause].setting:
        lines += canvas.paragraph(_tried(one), first=" " * 9)
    if one.gain is not None:
        text = f"at most {_points(one.gain)} points for these requests {one.gain_if}"
        lines += canvas.paragraph(text, first=" " * 9)
    for command in one.replay:
        lines += canvas.paragraph(command, first=" " * 9 + "$ ", rest=" " * 11)
    return lines


def _tried(one: HitsCause) -> str:
    """What the advised settings do to the recorded choices, or why none is advised."""
    if not one.tried:
        return "no setting was tried: the recorded choices cannot be repeated"
    choices = plural(one.tried, "recorded choice")
    best = best_trial(one.trials)
    if best is not None:
        return (
            f"tried on {choices}: {best.flags} changes {best.changed:,}, and finds "
            f"{plural(best.tokens, 'token')} more in the caches"
        )
    settings = "; ".join(trial.flags for trial in one.trials)
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


def _skipped(report: HitsReport) -> str:
    named = ", ".join(f"{n:,} {reason}" for reason, n in report.skipped.items())
    return f"; not counted: {named}" if named else ""


def _notes(report: HitsReport, canvas: Canvas) -> list[str]:
    skipped = _skipped(report).removeprefix("; ")
    lines = canvas.paragraph(skipped, first="", rest="  ") if skipped else []
    return lines + _doubts(report, canvas)


def _doubts(report: HitsReport, canvas: Canvas) -> list[str]:
    lines: list[str] = []
    for one in report.doubts:
        lines += canvas.paragraph(
            f"{one.code}  {one.what}: {one.effect}", first="doubt ", rest=" " * 15
        )
        lines += canvas.paragraph(one.resolve, first=" " * 15)
    return lines
