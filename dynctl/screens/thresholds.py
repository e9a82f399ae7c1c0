"""`thresholds`: values by replica, the signals of each rank, changes, and lines of `watch`."""

from __future__ import annotations

import re
import time
from collections import defaultdict
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
        Column("replica", "REPLICA", lambda row: row.replica, name=True),
        Column("model", "MODEL", lambda row: row.model, form=or_dash, name=True),
    ]
    columns += [_threshold(name, heading.upper()) for name, heading, _ in THRESHOLDS]
    columns.append(
        Column("problem", "PROBLEM", lambda r: r.problem, needed=lambda r: bool(r.problem))
    )
    text = table(columns, result.thresholds, canvas)
    if not result.agree:
        text += "\nthe replicas have different thresholds: != differs from most replicas\n"
    if result.signals is not None:
        text += "\n" + _signals(result, result.signals, canvas)
    return text + canvas.paragraphs(result.notes, first="note: ", rest=None)


def _problem(row: ReplicaThresholds) -> str:
    return row.problem or ""


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
        return (
            "no workers\n" if _has_limits(result) else "no threshold is set, so no rank is busy\n"
        )
    many = len({row.replica for row in signals}) > 1
    columns = [column for column in _SIGNALS if many or column.key != "replica"]
    text = table(columns, signals, canvas) + "\n" + canvas.paragraphs(_signal_reasons(signals))
    acting = {(row.replica, row.worker_id, row.dp_rank) for row in signals if row.acts}
    ranks = {(row.replica, row.worker_id, row.dp_rank) for row in signals}
    text += f"{len(acting)} of {plural(len(ranks), 'rank')} busy"
    if any(row.busy is None for row in signals):
        text += " (as far as their load is known)"
    return text + "\n"


def _has_limits(result: ThresholdList) -> bool:
    """Whether a replica has any threshold."""
    known = [row for row in result.thresholds if row.model is not None and not row.problem]
    return any(getattr(row, name) is not None for row in known for name, _, _ in THRESHOLDS)


def _signal_reasons(signals: Sequence[SignalRow]) -> Iterator[str]:
    """Why signals have no value or no effect, each reason once."""
    reasons: dict[tuple[str, str], list[SignalRow]] = defaultdict(list)
    for row in signals:
        if row.why:
            reasons[row.signal, row.why].append(row)
    for (signal, why), rows in reasons.items():
        rank = f"{rows[0].worker} rank {rows[0].dp_rank}"
        yield f"{signal}, {rank if len(rows) == 1 else plural(len(rows), 'rank')}: {why}"


def _effect(row: SignalRow) -> str:
    if row.acts:
        return "busy"
    known = row.limit is not None and row.value is not None
    return "calm" if known and not row.over else "none"


def _signal_age(row: SignalRow) -> str:
    return "-" if row.latch == "live" else age(row.age_s)


_SIGNALS: list[Column[SignalRow]] = [
    Column("replica", "REPLICA", lambda r: r.replica, name=True),
    Column("worker", "WORKER", lambda r: r.worker, name=True),
    Column("dp_rank", "RANK", lambda r: r.dp_rank, right=True),
    Column("signal", "SIGNAL", lambda r: r.signal),
    Column("value", "VALUE", lambda r: r.value, form=amount, right=True),
    Column("limit", "LIMIT", lambda r: r.limit, form=amount, right=True),
    Column("latch", "LATCH", lambda r: r.latch, rank=1),
    Column("age_s", "AGE", lambda r: r.age_s, text=_signal_age, right=True, rank=2),
    Column("effect", "EFFECT", lambda r: r.acts, text=_effect),
    Column("why", "WHY", lambda r: r.why, rank=3, wide=True),
    Column("threshold", "THRESHOLD", lambda r: r.threshold, rank=4, wide=True),
    Column("role", "ROLE", lambda r: r.role, rank=5, wide=True),
]


def threshold_change(result: ThresholdChange, canvas: Canvas) -> str:
    """Before -> after, then the ranks whose state changes."""
    lines = [f"{result.after.model}: {_change_text(result)}"]
    for name, heading, unit in THRESHOLDS:
        before, after = getattr(result.before, name), getattr(result.after, name)
        shown = _limit(after) if before == after else f"{_limit(before)} -> {_limit(after)}"
        always_off = before is None and after is None
        lines.append(f"  {heading:<17} {shown}" + ("" if always_off else f"  {unit}"))
    if len(result.replicas) > 1 or any(change.problem for change in result.replicas):
        lines += ["", *_replica_lines(result.replicas, canvas)]
    if result.ranks:
        lines += ["", *_effects(result.ranks, canvas)]
    if result.waited is not None:
        lines += ["", *_waited_lines(result.waited, canvas)]
    if result.canary is not None:
        lines += ["", *_canary(result.canary, canvas)]
    for note in result.notes:
        lines += canvas.paragraph(note, first="note: ")
    return "\n".join(lines) + "\n"


def _change_text(result: ThresholdChange) -> str:
    if result.applied:
        return "set"
    if result.canary is not None and not result.canary.kept:
        return "set back"
    if all(change.state == "tried" for change in result.replicas):
        return "dry run, nothing was set"
    return "not set"


def _replica_lines(replicas: Sequence[ReplicaChange], canvas: Canvas) -> Iterator[str]:
    states = {change.state for change in replicas}
    if len(states) == 1 and not any(change.problem for change in replicas):
        names = ", ".join(change.replica for change in replicas)
        text = f"{replicas[0].state} on {plural(len(replicas), 'replica')}: {names}"
        yield from canvas.paragraph(text, first="", rest="  ")
        return
    for change in replicas:
        problem = f": {change.problem}" if change.problem else ""
        text = f"{change.state:<9} {change.replica}{problem}"
        yield from canvas.paragraph(text, first="  ", rest="    ")


def _effects(ranks: Sequence[RankEffect], canvas: Canvas) -> Iterator[str]:
    groups: dict[tuple[bool, bool], list[RankEffect]] = defaultdict(list)
    for rank in ranks:
        groups[rank.before, rank.after].append(rank)
    becomes, calms, stays = groups[False, True], groups[True, False], groups[True, True]
    replicas = len({rank.replica for rank in ranks})
    for verb, state, rows in (
        ("become", "busy", becomes),
        ("become", "calm", calms),
        ("stay", "busy", stays),
    ):
        by_rank = _by_rank(rows)
        if by_rank:
            yield f"{plural(len(by_rank), 'rank')} {verb}{'s' * (len(by_rank) == 1)} {state}:"
        for rank, names in by_rank:
            text = _rank_effect(rank, names if len(names) < replicas else [])
            yield from canvas.paragraph(text, first="  ", rest="    ")
    if not becomes and not calms:
        busy, every = len(_by_rank(stays)), len(_by_rank(ranks))
        yield f"no rank changes state; {busy} of {plural(every, 'rank')} busy"


def _rank_effect(rank: RankEffect, replicas: Sequence[str]) -> str:
    """Why a rank is busy or calm. ``replicas``: those that count it, empty for all."""
    why = rank.reasons[0] if rank.reasons else "under every threshold"
    text = f"{rank.worker} rank {rank.dp_rank}: {why}"
    if rank.after and not rank.worker_busy:
        text += " (the worker still gets requests for another rank)"
    return f"{text} [{', '.join(replicas)}]" if replicas else text


def _by_rank(ranks: Sequence[RankEffect]) -> list[tuple[RankEffect, list[str]]]:
    """Each rank once, with the replicas that count it."""
    by_rank: dict[tuple[int, int], tuple[RankEffect, list[str]]] = {}
    for rank in ranks:
        key = (rank.worker_id, rank.dp_rank)
        by_rank.setdefault(key, (rank, []))[1].append(rank.replica)
    return list(by_rank.values())


def _waited_lines(waited: Waited, canvas: Canvas) -> Iterator[str]:
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
    tried = ", ".join(f"{headings[name]} {_limit(value)}" for name, value in verdict.values.items())
    text = f"canary with {tried} for {age(verdict.seconds)}; {_CANARY_ENDS[verdict.state]}"
    yield from canvas.paragraph(text, first="", rest="  ")
    if verdict.why:
        yield from canvas.paragraph(verdict.why, first="  ", rest="    ")
    for condition in verdict.conditions:
        value = _measured_text(condition.condition, condition.value)
        requests = plural(condition.requests, "request")
        text = f"{condition.state:<9} {condition.condition}: {value} on {requests}"
        if condition.state == "unknown" and condition.value is not None:
            text += ", too few to decide"
        yield from canvas.paragraph(text, first="  ", rest="    ")


def _measured_text(condition: str, value: float | None) -> str:
    if value is None:
        return "unknown"
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
