"""The short answer of route, thresholds, settings and versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dynctl.documents.route_result import DecisionResult, RouteResult
from dynctl.screens import explain_words as words
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column
from dynctl.screens.numbers import amount, blocks, plural
from dynctl.screens.results import (
    ConfigReport,
    RankEffect,
    ReplicaChange,
    SettingRow,
    ThresholdChange,
    TopologyValue,
    Versions,
    Waited,
)
from dynctl.screens.table import table

THRESHOLDS = (
    ("active_decode_blocks_threshold", "decode blocks", "of the KV blocks"),
    ("active_prefill_tokens_threshold", "prefill tokens", "tokens"),
    ("active_prefill_tokens_threshold_frac", "prefill fraction", "of max_num_batched_tokens"),
)


# -- route without --explain ---------------------------------------------------------------


def route_short(result: RouteResult, canvas: Canvas) -> str:
    """The answer and a line a hop; `--explain` has the rest."""
    hops = [hop for hop in (result.prefill, result.decode) if hop is not None]
    chosen = [hop for hop in hops if hop.winner is not None]
    first, *others = words.answer(result)
    lines = [first]
    if result.ok:
        lines = [table(_hop_columns(result), chosen, canvas).rstrip("\n"), "", f"answer  {first}"]
    else:
        lines = [f"answer  {first}"]
        lines += [
            line
            for label, text in words.remedies(result)
            for line in canvas.paragraph(text, first=label.ljust(8))
        ]
    lines += [f"        {text}" for text in others]
    for assumption in words.assumptions(result):
        lines += canvas.paragraph(assumption, first="assumed ")
    return "\n".join(lines) + "\n"


def _hop_columns(result: RouteResult) -> list[Column[DecisionResult]]:
    domain = words.primary_domain(result)

    def won(hop: DecisionResult) -> Any:
        winner = hop.winner
        return next(
            row
            for row in hop.candidates
            if winner is not None
            and (row.worker_id, row.dp_rank) == (winner.worker_id, winner.dp_rank)
        )

    def cached(hop: DecisionResult) -> str:
        if hop.stage == "decode":
            return "-"
        return f"{won(hop).overlap_blocks:,} of {result.blocks:,}"

    def ahead(hop: DecisionResult) -> str:
        if len(hop.candidates) == 1:
            return "the only one"
        if hop.tied:
            return f"tie of {len(hop.tied)}"
        return f"+{blocks(hop.margin)}" if hop.margin is not None and hop.margin >= 0 else "drawn"

    columns: list[Column[DecisionResult]] = [
        Column("stage", "HOP", lambda hop: hop.stage, lambda hop: hop.stage),
        Column("worker", "WORKER", lambda h: won(h).worker, lambda h: won(h).worker, name=True),
    ]
    if domain is not None:
        columns.append(
            Column(
                "domain",
                domain.upper(),
                lambda hop: won(hop).domains.get(domain, "-"),
                lambda hop: won(hop).domains.get(domain),
            )
        )
    columns += [
        Column("cached", "CACHED", cached, lambda hop: won(hop).overlap_blocks, right=True),
        Column("cost", "COST", lambda h: blocks(won(h).cost), lambda h: won(h).cost, right=True),
        Column("margin", "AHEAD", ahead, lambda hop: hop.margin, right=True),
        Column(
            "scored",
            "OF",
            lambda hop: plural(len(hop.candidates), "candidate"),
            lambda hop: len(hop.candidates),
            right=True,
            rank=1,
        ),
    ]
    return columns


# -- thresholds ----------------------------------------------------------------------------


def threshold_change(result: ThresholdChange, canvas: Canvas) -> str:
    """Before -> after, then the ranks whose state changes."""
    tried = all(one.state == "tried" for one in result.replicas)
    verb = "set" if result.applied else "dry run, nothing is set" if tried else "not set"
    lines = [f"{result.after.model}: {verb}"]
    for name, heading, unit in THRESHOLDS:
        before, after = getattr(result.before, name), getattr(result.after, name)
        mark = "->" if before != after else "  "
        shown = f"{_limit(before)} {mark} {_limit(after)}" if before != after else _limit(after)
        lines.append(f"  {heading:<17} {shown}  {unit}" if after is not None or before != after
                     else f"  {heading:<17} {shown}")  # fmt: skip
    if len(result.replicas) > 1 or any(one.problem for one in result.replicas):
        lines.append("")
        lines += _replica_lines(result.replicas, canvas)
    if result.ranks:
        lines.append("")
        lines += _effects(result.ranks, canvas)
    if result.waited is not None:
        lines.append("")
        lines += _waited(result.waited, canvas)
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
        told = f"{one.state:<9} {one.replica}" + (f": {one.problem}" if one.problem else "")
        yield from canvas.paragraph(told, first="  ", rest="    ")


def _effects(ranks: Sequence[RankEffect], canvas: Canvas) -> Iterator[str]:
    becomes = [rank for rank in ranks if rank.after and not rank.before]
    calms = [rank for rank in ranks if rank.before and not rank.after]
    stays = [rank for rank in ranks if rank.before and rank.after]
    many = len({rank.replica for rank in ranks})
    groups = (("become", " busy", becomes), ("become", " calm", calms), ("stay", " busy", stays))
    for verb, state, rows in groups:
        if rows:
            told = _by_rank(rows)
            yield f"{plural(len(told), 'rank')} {verb}{'s' if len(told) == 1 else ''}{state}:"
            for rank, where in told:
                why = rank.reasons[0] if rank.reasons else "under every threshold"
                partly = rank.after and not rank.worker_busy
                tail = " (another rank of the worker is calm: still routed to)" if partly else ""
                on = f" [{', '.join(where)}]" if many > 1 and len(where) < many else ""
                text = f"{rank.worker} rank {rank.dp_rank}: {why}{tail}{on}"
                yield from canvas.paragraph(text, first="  ", rest="    ")
    if not becomes and not calms:
        busy, every = len(_by_rank(stays)), len(_by_rank(ranks))
        yield f"no rank changes its state; {busy} of {plural(every, 'rank')} busy"


def _by_rank(ranks: Sequence[RankEffect]) -> list[tuple[RankEffect, list[str]]]:
    """Each rank once, with the replicas that count so."""
    found: dict[tuple[int, int], tuple[RankEffect, list[str]]] = {}
    for rank in ranks:
        key = (rank.worker_id, rank.dp_rank)
        found.setdefault(key, (rank, []))[1].append(rank.replica)
    return list(found.values())


def _waited(waited: Waited, canvas: Canvas) -> Iterator[str]:
    if waited.acts:
        yield f"acts on every replica after {waited.seconds:.1f} s"
    else:
        yield f"stored, and after {waited.seconds:.1f} s it does not act everywhere:"
        for text in waited.pending:
            yield from canvas.paragraph(text, first="  ", rest="    ")
    for text in waited.untold:
        yield from canvas.paragraph(text, first="not told: ")


def _limit(value: float | None) -> str:
    return "off" if value is None else amount(value)


# -- config and versions -------------------------------------------------------------------


def config_report(result: ConfigReport, canvas: Canvas) -> str:
    columns: list[Column[SettingRow]] = [
        Column("name", "SETTING", lambda s: s.name, lambda s: s.name, name=True),
        Column("value", "VALUE", lambda s: setting_text(s.value), lambda s: s.value, right=True),
        Column("source", "SOURCE", lambda s: s.source, lambda s: s.source, name=True),
        Column("bounds", "BOUNDS", lambda s: s.bounds, lambda s: s.bounds, rank=3, wide=True),
        Column("flag", "FLAG", lambda s: s.flag, lambda s: s.flag, rank=1, wide=True),
        Column("env", "ENVIRONMENT", lambda s: s.env, lambda s: s.env, rank=2, wide=True),
        Column("help", "MEANING", lambda s: s.help, lambda s: s.help, rank=4, wide=True),
    ]
    head = f"preset {result.preset or 'unknown'}, from {result.source}\n\n"
    unbuilt = [setting.name for setting in result.settings if not setting.built]
    text = head + table(columns, result.settings, canvas)
    if unbuilt:
        note = f"not built yet, read and ignored: {', '.join(unbuilt)}"
        text += "\n" + "\n".join(canvas.paragraph(note, first="")) + "\n"
    return text


def setting_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return amount(value) if isinstance(value, (int, float)) else str(value)


def topology_value(result: TopologyValue, canvas: Canvas) -> str:
    """Only the value, so that a script can take it."""
    return result.value + "\n"


def versions(result: Versions, canvas: Canvas) -> str:
    lines = [f"dynctl {result.client}  (Python {result.python})"]
    for peer in result.peers:
        told = f"dynctl {peer.version}" if peer.version else peer.error or "no version told"
        lines.append(f"{peer.url}  {told}")
    return "\n".join(lines) + "\n"
