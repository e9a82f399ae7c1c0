"""`thresholds`: values by replica, the signals of each rank, changes, and lines of `watch`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Final

from dynctl.base.quantities import percent
from dynctl.documents.thresholds import (
    CanaryVerdict,
    RankEffect,
    ReplicaChange,
    ReplicaThresholds,
    SignalRow,
    ThresholdChange,
    ThresholdEvent,
    ThresholdList,
    Waited,
)
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, or_dash, table
from dynctl.screens.numbers import age, amount, plural

THRESHOLDS = (
    ("active_decode_blocks_threshold", "decode blocks", "of the KV blocks"),
    ("active_prefill_tokens_threshold", "prefill tokens", "tokens"),
    ("active_prefill_tokens_threshold_frac", "prefill fraction", "of max_num_batched_tokens"),
)

#: Marks a value that differs from most replicas.
_DIFFERS = "!="


def threshold_list(result: ThresholdList, canvas: Canvas) -> str:
    """A row per replica and model; then, with ``--ranks``, a row per signal."""
    columns: list[Column[ReplicaThresholds]] = [
        Column("replica", "REPLICA", lambda one: one.replica, name=True),
        Column("model", "MODEL", lambda one: one.model, form=or_dash, name=True),
    ]
    columns += [_threshold(name, heading.upper()) for name, heading, _ in THRESHOLDS]
    if any(row.problem for row in result.thresholds):
        columns.append(Column("problem", "PROBLEM", lambda r: r.problem))
    text = table(columns, result.thresholds, canvas)
    if not result.agree:
        text += "\nthe replicas have different thresholds: != differs from most replicas\n"
    if result.signals is not None:
        text += "\n" + _signals(result, result.signals, canvas)
    for note in result.notes:
        text += "\n".join(canvas.paragraph(note, first="note: ")) + "\n"
    return text


def _threshold(name: str, heading: str) -> Column[ReplicaThresholds]:
    def text(row: ReplicaThresholds) -> str:
        if row.problem:
            return "-"
        value = getattr(row, name)
        value_text = "off" if value is None else amount(value)
        return f"{_DIFFERS} {value_text}" if name in row.differs else value_text

    return Column(name, heading, lambda row: getattr(row, name), text=text, right=True)


def _signals(result: ThresholdList, signals: Sequence[SignalRow], canvas: Canvas) -> str:
    if not signals:
        known = [row for row in result.thresholds if row.model is not None and not row.problem]
        values = [getattr(row, name) for row in known for name, _, _ in THRESHOLDS]
        if all(value is None for value in values):
            return "no threshold is set, so no rank is busy\n"
        return "no workers\n"
    acting = {(row.replica, row.worker_id, row.dp_rank) for row in signals if row.acts}
    ranks = {(row.replica, row.worker_id, row.dp_rank) for row in signals}
    many = len({row.replica for row in signals}) > 1
    columns = [column for column in _SIGNALS if many or column.key != "replica"]
    text = table(columns, signals, canvas) + "\n"
    reasons: dict[tuple[str, str], list[SignalRow]] = {}
    for row in signals:
        if row.why:
            reasons.setdefault((row.signal, row.why), []).append(row)
    for (signal, why), rows in reasons.items():
        one = rows[0]
        who = f"{one.worker} rank {one.dp_rank}" if len(rows) == 1 else plural(len(rows), "rank")
        text += "\n".join(canvas.paragraph(f"{signal}, {who}: {why}", first="", rest="  ")) + "\n"
    total = f"{len(acting)} of {plural(len(ranks), 'rank')} busy"
    if any(row.busy is None for row in signals):
        total += " (as far as their load is known)"
    return text + total + "\n"


def _effect(row: SignalRow) -> str:
    if row.acts:
        return "busy"
    if row.over:
        return "none"
    return "none" if row.limit is None or row.value is None else "calm"


_SIGNALS: list[Column[SignalRow]] = [
    Column("replica", "REPLICA", lambda r: r.replica, name=True),
    Column("worker", "WORKER", lambda r: r.worker, name=True),
    Column("dp_rank", "RANK", lambda r: r.dp_rank, right=True),
    Column("signal", "SIGNAL", lambda r: r.signal),
    Column("value", "VALUE", lambda r: r.value, form=amount, right=True),
    Column("limit", "LIMIT", lambda r: r.limit, form=amount, right=True),
    Column("latch", "LATCH", lambda r: r.latch, rank=1),
    Column(
        "age_s",
        "AGE",
        lambda r: r.age_s,
        text=lambda r: "-" if r.latch == "live" else age(r.age_s),
        right=True,
        rank=2,
    ),
    Column("effect", "EFFECT", lambda r: r.acts, text=_effect),
    Column("why", "WHY", lambda r: r.why, rank=3, wide=True),
    Column("threshold", "THRESHOLD", lambda r: r.threshold, rank=4, wide=True),
    Column("role", "ROLE", lambda r: r.role, rank=5, wide=True),
]


def threshold_change(result: ThresholdChange, canvas: Canvas) -> str:
    """Before -> after, then the ranks whose state changes."""
    tried = all(one.state == "tried" for one in result.replicas)
    reverted = result.canary is not None and not result.canary.kept
    verb = (
        "set"
        if result.applied
        else "set back"
        if reverted
        else "dry run, nothing was set"
        if tried
        else "not set"
    )
    lines = [f"{result.after.model}: {verb}"]
    for name, heading, unit in THRESHOLDS:
        before, after = getattr(result.before, name), getattr(result.after, name)
        mark = "->" if before != after else "  "
        shown = f"{_limit(before)} {mark} {_limit(after)}" if before != after else _limit(after)
        lines.append(
            f"  {heading:<17} {shown}  {unit}"
            if after is not None or before != after
            else f"  {heading:<17} {shown}"
        )
    if len(result.replicas) > 1 or any(one.problem for one in result.replicas):
        lines.append("")
        lines += _replica_lines(result.replicas, canvas)
    if result.ranks:
        lines.append("")
        lines += _effects(result.ranks, canvas)
    if result.waited is not None:
        lines.append("")
        lines += _waited(result.waited, canvas)
    if result.canary is not None:
        lines.append("")
        lines += _canary(result.canary, canvas)
    for note in result.notes:
        lines += canvas.paragraph(note, first="note: ")
    return "\n".join(lines) + "\n"


def _replica_lines(replicas: Sequence[ReplicaChange], canvas: Canvas) -> Iterator[str]:
    states = [one.state for one in replicas]
    if len(set(states)) == 1 and not any(one.problem for one in replicas):
        yield from canvas.paragraph(
            f"{states[0]} on {plural(len(replicas), 'replica')}: "
            + ", ".join(one.replica for one in replicas),
            first="",
            rest="  ",
        )
        return
    for one in replicas:
        text = f"{one.state:<9} {one.replica}" + (f": {one.problem}" if one.problem else "")
        yield from canvas.paragraph(text, first="  ", rest="    ")


def _effects(ranks: Sequence[RankEffect], canvas: Canvas) -> Iterator[str]:
    becomes = [rank for rank in ranks if rank.after and not rank.before]
    calms = [rank for rank in ranks if rank.before and not rank.after]
    stays = [rank for rank in ranks if rank.before and rank.after]
    many = len({rank.replica for rank in ranks})
    groups = (("become", " busy", becomes), ("become", " calm", calms), ("stay", " busy", stays))
    for verb, state, rows in groups:
        if rows:
            ranked = _by_rank(rows)
            yield f"{plural(len(ranked), 'rank')} {verb}{'s' if len(ranked) == 1 else ''}{state}:"
            for rank, where in ranked:
                why = rank.reasons[0] if rank.reasons else "under every threshold"
                partly = rank.after and not rank.worker_busy
                tail = " (the worker still gets requests for another rank)" if partly else ""
                on = f" [{', '.join(where)}]" if many > 1 and len(where) < many else ""
                text = f"{rank.worker} rank {rank.dp_rank}: {why}{tail}{on}"
                yield from canvas.paragraph(text, first="  ", rest="    ")
    if not becomes and not calms:
        busy, every = len(_by_rank(stays)), len(_by_rank(ranks))
        yield f"no rank changes state; {busy} of {plural(every, 'rank')} busy"


def _by_rank(ranks: Sequence[RankEffect]) -> list[tuple[RankEffect, list[str]]]:
    """Each rank once, with the replicas that count it."""
    found: dict[tuple[int, int], tuple[RankEffect, list[str]]] = {}
    for rank in ranks:
        key = (rank.worker_id, rank.dp_rank)
        found.setdefault(key, (rank, []))[1].append(rank.replica)
    return list(found.values())


def _waited(waited: Waited, canvas: Canvas) -> Iterator[str]:
    if waited.acts:
        yield f"in effect on every replica after {waited.seconds:.1f} s"
    else:
        yield f"stored, but after {waited.seconds:.1f} s not in effect on every replica:"
        for text in waited.pending:
            yield from canvas.paragraph(text, first="  ", rest="    ")
    for text in waited.untold:
        yield from canvas.paragraph(text, first="unknown: ")


_CANARY_ENDS: Final = {
    "held": "kept: every condition held",
    "breached": "set back: a condition was breached",
    "unproven": "set back: a condition could not be measured",
    "lost": "set back: a replica was lost",
    "changed": "set back: the thresholds of a replica changed",
    "interrupted": "set back: the canary was interrupted",
}


def _canary(verdict: CanaryVerdict, canvas: Canvas) -> Iterator[str]:
    headings = {name: heading for name, heading, _ in THRESHOLDS}
    tried = ", ".join(f"{headings[name]} {_limit(one)}" for name, one in verdict.values.items())
    text = f"canary with {tried} for {age(verdict.seconds)}; {_CANARY_ENDS[verdict.state]}"
    yield from canvas.paragraph(text, first="", rest="  ")
    if verdict.why:
        yield from canvas.paragraph(verdict.why, first="  ", rest="    ")
    for one in verdict.conditions:
        value = "unknown" if one.value is None else _measured(one.condition, one.value)
        text = f"{one.state:<9} {one.condition}: {value} on {plural(one.requests, 'request')}"
        if one.state == "unknown" and one.value is not None:
            text += ", too few to decide"
        yield from canvas.paragraph(text, first="  ", rest="    ")


def _measured(condition: str, value: float) -> str:
    if condition.startswith(("ttft", "itl")):
        return f"{value * 1e3:,.0f} ms" if value < 1 else f"{value:,.2f} s"
    return percent(value, 2)


def _limit(value: float | None) -> str:
    return "off" if value is None else amount(value)


def event_line(event: ThresholdEvent) -> str:
    """One line, without its line end."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.at))
    text = ": ".join(filter(None, (event.replica, _what(event))))
    # Names of workers and texts of servers come from outside.
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", f"{clock}  {event.event:<9}  {text}")


def _what(event: ThresholdEvent) -> str:
    match event.event:
        case "threshold":
            change = " -> ".join(
                "off" if value is None else amount(value) for value in (event.before, event.after)
            )
            return f"{event.model} {event.threshold} {change}"
        case "busy" | "calm":
            return f"{event.worker} rank {event.dp_rank}: {event.why}"
        case "differ":
            return f"{event.model}: the replicas have different thresholds: {event.why}"
        case "agree":
            return f"{event.model}: the replicas have the same thresholds again"
        case "came" | "gone":
            return f"model {event.model}"
        case _:
            return event.why
