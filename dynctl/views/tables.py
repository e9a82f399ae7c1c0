"""The tables of lists and single objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dynctl.views import explain_words as words
from dynctl.views.canvas import Canvas
from dynctl.views.columns import Column, fit, visible
from dynctl.views.numbers import age, amount, blocks, count, plural
from dynctl.views.results import (
    ConfigReport,
    ModelThresholds,
    RankEffect,
    SettingRow,
    ThresholdChange,
    ThresholdList,
    Versions,
    WorkerDetail,
    WorkerList,
)
from dynctl.wire.route_result import DecisionResult, RouteResult
from dynctl.wire.worker_rows import RankRow, WorkerRow

THRESHOLDS = (
    ("active_decode_blocks_threshold", "decode blocks", "of the KV blocks"),
    ("active_prefill_tokens_threshold", "prefill tokens", "tokens"),
    ("active_prefill_tokens_threshold_frac", "prefill fraction", "of max_num_batched_tokens"),
)


def table(columns: Sequence[Column[Any]], rows: Sequence[Any], canvas: Canvas) -> str:
    """Heading and rows."""
    fitted = fit(visible(columns, wide=canvas.wide, width=canvas.width), rows, canvas.width)
    lines = [canvas.faint(fitted.heading()), *(fitted.line(row) for row in rows)]
    return "\n".join(lines) + "\n"


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


# -- workers -------------------------------------------------------------------------------


def worker_columns(workers: Sequence[WorkerRow]) -> list[Column[WorkerRow]]:
    """The columns of `workers list`; the dashboard reads the same."""
    domains = sorted(
        {name for worker in workers for name in worker.domains},
        key=lambda name: (name != "zone", name),
    )
    columns: list[Column[WorkerRow]] = [
        Column("name", "NAME", lambda w: w.name, lambda w: w.name, name=True),
        Column("role", "ROLE", lambda w: w.role, lambda w: w.role),
    ]
    for index, domain in enumerate(domains):
        columns.append(_domain_column(domain, 1 if index == 0 else 9))
    columns += [
        Column("status", "STATUS", _status, lambda w: w.status),
        Column(
            "requests",
            "REQS",
            lambda w: count(_total(w, "active_requests")),
            lambda w: _total(w, "active_requests"),
            right=True,
            rank=5,
        ),
        Column(
            "prefill_tokens",
            "PREFILL",
            lambda w: count(_total(w, "active_prefill_tokens")),
            lambda w: _total(w, "active_prefill_tokens"),
            right=True,
            rank=3,
        ),
        Column(
            "decode_blocks",
            "DECODE",
            lambda w: count(_total(w, "active_decode_blocks")),
            lambda w: _total(w, "active_decode_blocks"),
            right=True,
            rank=3,
        ),
        Column(
            "cached_blocks",
            "CACHED",
            lambda w: count(_total(w, "cached_blocks")) if w.kv_events else "-",
            lambda w: _total(w, "cached_blocks"),
            right=True,
            rank=2,
        ),
        Column("index", "INDEX", _index, _index_state),
        Column("model", "MODEL", lambda w: w.model, lambda w: w.model, rank=7, wide=True),
        Column(
            "taints",
            "OTHER TAINTS",
            lambda w: ",".join(_own_taints(w)) or "-",
            lambda w: w.taints,
            rank=10,
            wide=True,
        ),
        Column(
            "load_age",
            "LOAD AGE",
            lambda w: age(_oldest(w, "load_age_s")),
            lambda w: _oldest(w, "load_age_s"),
            right=True,
            rank=11,
            wide=True,
        ),
        Column(
            "id", "ID", lambda w: f"{w.worker_id:016x}", lambda w: w.worker_id, rank=12, wide=True
        ),
        Column(
            "endpoint",
            "ENDPOINT",
            lambda w: w.endpoint or "-",
            lambda w: w.endpoint,
            rank=13,
            wide=True,
        ),
    ]
    return columns


def worker_list(result: WorkerList, canvas: Canvas) -> str:
    if not result.workers:
        return f"no workers are registered ({result.source})\n"
    text = table(worker_columns(result.workers), result.workers, canvas)
    return text + "".join(line + "\n" for line in _worker_notes(result.workers, canvas))


def worker_detail(result: WorkerDetail, canvas: Canvas) -> str:
    """Everything that the router knows of one worker."""
    worker = result.worker
    config = worker.runtime_config
    policy = "none of its own"
    if config.get("kv_transfer_domain"):
        weight = config.get("kv_transfer_preferred_weight")
        policy = f"{config.get('kv_transfer_enforcement')} {config['kv_transfer_domain']}"
        policy += "" if weight is None else f", weight {amount(weight)}"
    pairs = [
        ("name", worker.name),
        ("id", f"{worker.worker_id}  (hex {worker.worker_id:016x})"),
        ("model", worker.model),
        ("role", worker.role + ("" if worker.can_prefill else ", cannot prefill")),
        ("endpoint", worker.endpoint or "-"),
        ("status", _status(worker) + (f": {worker.reason}" if worker.reason else "")),
        ("domains", ", ".join(f"{k}={v}" for k, v in worker.domains.items()) or "none"),
        ("kv transfer", policy),
        ("other taints", ", ".join(_own_taints(worker)) or "none"),
        ("block size", plural(worker.block_size, "token")),
        ("KV blocks", count(config.get("total_kv_blocks")) + " a rank"),
        ("batch budget", count(config.get("max_num_batched_tokens")) + " tokens"),
        ("routed by", _routed_by(worker)),
    ]
    lines = [f"{label:<13} {text}" for label, text in pairs]
    lines.append("")
    text = table(_rank_columns(), worker.ranks, canvas)
    notes = [f"rank {r.dp_rank} busy: {why}" for r in worker.ranks for why in r.busy_reasons]
    return "\n".join(lines) + "\n" + text + "".join(note + "\n" for note in notes)


def _rank_columns() -> list[Column[RankRow]]:
    def both(own: float, reported: float | None) -> str:
        return count(own) + ("" if reported is None else f" ({count(reported)})")

    return [
        Column("dp_rank", "RANK", lambda r: str(r.dp_rank), lambda r: r.dp_rank, right=True),
        Column(
            "requests", "REQS", lambda r: count(r.active_requests), lambda r: r.active_requests,
            right=True,
        ),
        Column(
            "prefill", "PREFILL TOKENS",
            lambda r: both(r.active_prefill_tokens, r.reported.active_prefill_tokens),
            lambda r: r.active_prefill_tokens, right=True,
        ),
        Column(
            "decode", "DECODE BLOCKS",
            lambda r: both(r.active_decode_blocks, r.reported.active_decode_blocks),
            lambda r: r.active_decode_blocks, right=True,
        ),
        Column(
            "cached", "CACHED", lambda r: count(r.cached_blocks), lambda r: r.cached_blocks,
            right=True,
        ),
        Column("busy", "BUSY", lambda r: "yes" if r.busy else "no", lambda r: r.busy),
        Column("index", "INDEX", _rank_index, lambda r: r.index),
        Column(
            "load_age", "LOAD AGE", lambda r: age(r.load_age_s), lambda r: r.load_age_s,
            right=True, rank=2,
        ),
    ]  # fmt: skip


def _domain_column(domain: str, rank: int) -> Column[WorkerRow]:
    return Column(
        f"domain:{domain}",
        domain.upper(),
        lambda worker: worker.domains.get(domain, "-"),
        lambda worker: worker.domains.get(domain),
        rank=rank,
    )


def _worker_notes(workers: Sequence[WorkerRow], canvas: Canvas) -> Iterator[str]:
    """What a cell has no room for: why workers are busy, gone, or routed by load only."""
    for worker in workers:
        if worker.reason:
            yield from canvas.paragraph(f"{worker.name} is unavailable: {worker.reason}", first="")
        for rank in worker.ranks if worker.busy else ():
            where = f" rank {rank.dp_rank}" if len(worker.ranks) > 1 else ""
            for why in rank.busy_reasons[:1]:
                yield from canvas.paragraph(f"{worker.name}{where} is busy: {why}", first="")
    silent = [worker.name for worker in workers if not worker.kv_events]
    if silent:
        names = ", ".join(silent[:5]) + (f" and {len(silent) - 5:,} more" if silent[5:] else "")
        yield from canvas.paragraph(f"no KV events: routed by load only: {names}", first="")


def _status(worker: WorkerRow) -> str:
    if worker.status != "ready":
        return worker.status
    busy = sum(rank.busy for rank in worker.ranks)
    if worker.busy:
        return "busy"
    return f"ready, {busy} of {len(worker.ranks)} ranks busy" if busy else "ready"


def _index_state(worker: WorkerRow) -> str:
    states = {rank.index for rank in worker.ranks}
    return next((state for state in ("gapped", "absent", "current") if state in states), "absent")


def _index(worker: WorkerRow) -> str:
    if not worker.kv_events:
        return "load only"
    state = _index_state(worker)
    oldest = _oldest(worker, "index_age_s")
    if state == "gapped":
        return f"{plural(sum(rank.gaps for rank in worker.ranks), 'gap')}"
    return state if oldest is None else f"{state}, {age(oldest)}"


def _rank_index(rank: RankRow) -> str:
    tail = "" if rank.index_age_s is None else f", {age(rank.index_age_s)}"
    return (f"{plural(rank.gaps, 'gap')}" if rank.index == "gapped" else rank.index) + tail


def _routed_by(worker: WorkerRow) -> str:
    return worker.routed_by if worker.kv_events else "no KV events: routed by load only"


def _own_taints(worker: WorkerRow) -> list[str]:
    topology = {f"dynamo.topology/{k}={v}" for k, v in worker.domains.items()}
    return [taint for taint in worker.taints if taint not in topology]


def _total(worker: WorkerRow, name: str) -> float:
    return float(sum(getattr(rank, name) for rank in worker.ranks))


def _oldest(worker: WorkerRow, name: str) -> float | None:
    known = [getattr(rank, name) for rank in worker.ranks]
    return max((one for one in known if one is not None), default=None)


# -- thresholds ----------------------------------------------------------------------------


def threshold_list(result: ThresholdList, canvas: Canvas) -> str:
    columns: list[Column[ModelThresholds]] = [
        Column("model", "MODEL", lambda one: one.model, lambda one: one.model, name=True)
    ]
    for name, heading, _ in THRESHOLDS:
        columns.append(_threshold_column(name, heading.upper()))
    return table(columns, result.thresholds, canvas)


def _threshold_column(name: str, heading: str) -> Column[ModelThresholds]:
    return Column(
        name,
        heading,
        lambda one: _limit(getattr(one, name)),
        lambda one: getattr(one, name),
        right=True,
    )


def threshold_change(result: ThresholdChange, canvas: Canvas) -> str:
    """Before -> after, then the ranks whose state changes."""
    verb = "set" if result.applied else "dry run, nothing is set"
    lines = [f"{result.after.model}: {verb}"]
    for name, heading, unit in THRESHOLDS:
        before, after = getattr(result.before, name), getattr(result.after, name)
        mark = "->" if before != after else "  "
        shown = f"{_limit(before)} {mark} {_limit(after)}" if before != after else _limit(after)
        lines.append(f"  {heading:<17} {shown}  {unit}" if after is not None or before != after
                     else f"  {heading:<17} {shown}")  # fmt: skip
    if result.ranks:
        lines.append("")
        lines += _effects(result.ranks, canvas)
    return "\n".join(lines) + "\n"


def _effects(ranks: Sequence[RankEffect], canvas: Canvas) -> Iterator[str]:
    becomes = [rank for rank in ranks if rank.after and not rank.before]
    calms = [rank for rank in ranks if rank.before and not rank.after]
    stays = [rank for rank in ranks if rank.before and rank.after]
    for title, rows in (("become busy", becomes), ("become calm", calms), ("stay busy", stays)):
        if rows:
            yield f"{plural(len(rows), 'rank')} {title}:"
            for rank in rows:
                why = rank.reasons[0] if rank.reasons else "under every threshold"
                partly = rank.after and not rank.worker_busy
                tail = " (another rank of the worker is calm: still routed to)" if partly else ""
                text = f"{rank.worker} rank {rank.dp_rank}: {why}{tail}"
                yield from canvas.paragraph(text, first="  ", rest="    ")
    if not becomes and not calms:
        yield f"no rank changes its state; {len(stays)} of {plural(len(ranks), 'rank')} busy"


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


def versions(result: Versions, canvas: Canvas) -> str:
    lines = [f"dynctl {result.client}  (Python {result.python})"]
    for peer in result.peers:
        told = f"dynctl {peer.version}" if peer.version else peer.error or "no version told"
        lines.append(f"{peer.url}  {told}")
    return "\n".join(lines) + "\n"
