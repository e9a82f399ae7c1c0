"""`replay`: policies side by side, regressions, loads, the search; table and CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from dynctl.base.quantities import percent
from dynctl.documents.replay import (
    Estimate,
    LoadPoint,
    PolicySummary,
    ReplayPeers,
    ReplayReport,
    ReplayResult,
    SearchPoint,
)
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, number_column, table
from dynctl.screens.numbers import plural

_MOST_NOTES: Final = 10
_MOST_SEARCHED: Final = 12
_SEARCH_METRICS: Final = "front ttft_p90_s output_tokens_per_s hit_rate refused_share".split()
#: What the line about two policies compares: metric, title, whether higher is better.
_COMPARED: Final = (
    ("hit_rate", "hit rate"),
    ("ttft_p50_s", "TTFT p50"),
    ("ttft_p90_s", "TTFT p90"),
    ("ttft_p99_s", "TTFT p99"),
    ("output_tokens_per_s", "throughput"),
)


def replay_report(report: ReplayReport, canvas: Canvas) -> str:
    """What was replayed on what, one line a policy, and what was asked for beside."""
    parts = [_head(report, canvas)]
    if report.summaries:
        parts.append(table(_columns(report), report.summaries, canvas))
        parts.append(canvas.paragraphs(_below(report)))
    for change in report.changes:
        limit = percent(change.limit, None)
        lines = [f"{change.policy} against {change.base}, limit {limit}: {change.verdict}"]
        lines += (f"{metric.verdict:<9}  {metric.text}" for metric in change.changes)
        parts.append(canvas.paragraphs(lines))
    if report.loads:
        parts.append(table(_LOAD_COLUMNS, report.loads, canvas))
    if report.search:
        parts.append(_search(report, canvas))
    parts.append(canvas.paragraphs(f"note: {note}" for note in report.notes[:_MOST_NOTES]))
    return "\n".join(part for part in parts if part)


def _head(report: ReplayReport, canvas: Canvas) -> str:
    lines = [("trace", ", ".join(_trace_parts(report)))]
    if report.trace.parameters:
        lines.append(("workload", _workload(report)))
    lines.append(("fleet", report.fleet))
    if report.results:
        lines.append(("engine", _engine(report.results[0])))
        if report.assumed:
            values = ", ".join(f"{name} {_plain(value)}" for name, value in report.assumed.items())
            lines.append(("assumed", f"{values}: the workers do not publish them"))
        lines.append(("routers", _routers(report)))
    return "".join(
        canvas.paragraphs([value], first=f"{name:<9}", rest=" " * 9) for name, value in lines
    )


def _trace_parts(report: ReplayReport) -> Iterator[str]:
    trace = report.trace
    if trace.format in (trace.name, trace.name.removeprefix("generated ")):
        yield trace.name
    else:
        yield trace.name.rpartition("/")[2]
        yield trace.format
    if trace.hashes:
        yield f"blocks of {plural(trace.block_size, 'token')}"
    if report.results:
        yield plural(report.results[0].counts.requests, "request")
        lasted = report.results[0].seconds
        yield f"{lasted:,.0f} s" if lasted >= 10 else f"{lasted:.1f} s"
    if trace.speed != 1:
        yield f"speed {trace.speed:g}"
    if trace.spread:
        yield "requests of one time spread until the next"
    if trace.skipped:
        yield f"{plural(trace.skipped, 'bad line')} skipped"


def _workload(report: ReplayReport) -> str:
    """The parameters of a generated trace, and how many of its requests were used."""
    parameters = report.trace.parameters
    given = {name: _plain(value) for name, value in parameters.items()}
    made = parameters.get("requests")
    used = report.results[0].counts.requests if report.results else None
    if used is not None and isinstance(made, int) and used < made:
        given["requests"] = f"{used:,} of {made:,}"
    return ", ".join(f"{name} {value}" for name, value in given.items())


def _routers(report: ReplayReport) -> str:
    first, seeds = report.results[0], report.seeds
    text = plural(first.routers, "router")
    if first.routers > 1:
        text += ", no replica sync" if first.sync == "none" else f", sync {first.sync}"
    drawn = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    return f"{text}; {drawn}"


def _engine(result: ReplayResult) -> str:
    """The parameters that decide about times; -o json has all."""
    given = result.engine
    size, blocks = given["block_size"], given["total_blocks"]
    parts = [
        f"{blocks:,} blocks of {plural(size, 'token')} a rank",
        f"prefill {given['prefill_tokens_per_s']:,g} tokens/s",
        f"decode step {given['decode_itl_ms']:g} ms",
        f"batch {given['max_num_batched_tokens']:,} tokens, {given['max_num_seqs']:,} sequences",
        f"queue {given['max_waiting']:,}",
    ]
    token = f", {_bytes(given.get('kv_bytes_per_token', 0))} a token"
    for tier in ("host", "disk"):
        if given.get(f"{tier}_blocks"):
            speed = given[f"{tier}_gb_per_s"]
            parts.append(f"{tier} {given[f'{tier}_blocks']:,} blocks, {speed:g} GB/s{token}")
            token = ""
    if result.transfers.transfers:
        factor = given["kv_transfer_cross_domain_factor"]
        across = "" if factor == 1 else f", across domains x{factor:g}"
        parts.append(f"KV transfer {given['kv_transfer_ms_per_block']:g} ms a block{across}")
    return "; ".join(parts)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_plain(item)}" for name, item in value.items()) or "none"
    if isinstance(value, float | int) and not isinstance(value, bool):
        return f"{value:,g}" if isinstance(value, float) else f"{value:,}"
    return str(value) if value not in (None, "") else "none"


# -- policies --------------------------------------------------------------------------------------

Text = Callable[[float], str]


def _columns(report: ReplayReport) -> list[Column[PolicySummary]]:
    several = len(report.seeds) > 1
    # Without hashes reuse is unknown; else a value is missing because no request finished.
    hashed = () if report.trace.hashes else ("hit_rate", "of_ceiling")

    def column(
        metric: str, heading: str, shown: Text, rank: int = 0, wide: bool = False
    ) -> Column[PolicySummary]:
        def text(row: PolicySummary) -> str:
            estimate = row.metrics.get(metric)
            if estimate is None:
                return "unknown" if metric in hashed else "-"
            return _with_interval(estimate, shown, several)

        def value(row: PolicySummary) -> float | None:
            estimate = row.metrics.get(metric)
            return None if estimate is None else estimate.mean

        return Column(metric, heading, value, text=text, right=True, rank=rank, wide=wide)

    columns = [
        Column("policy", "POLICY", lambda row: row.policy, name=True, shortest=8),
        column("hit_rate", "HITS", _percent),
        column("of_ceiling", "OF MAX", percent, rank=3),
        column("ttft_p50_s", "TTFT P50", _time),
        column("ttft_p90_s", "P90", _time, rank=1),
        column("ttft_p99_s", "P99", _time),
        column("itl_p50_s", "ITL P50", _time, rank=2),
        column("requests_per_s", "REQ/S", lambda value: f"{value:,.2f}", rank=8, wide=True),
        column("output_tokens_per_s", "TOK/S", lambda value: f"{value:,.0f}"),
        column("goodput_share", "GOODPUT", _percent, rank=7, wide=True),
        column("refused_share", "REFUSED", _percent, rank=1),
        column("imbalance", "IMBALANCE", lambda value: f"{value:.2f}", rank=4),
    ]
    # Where hits come from: those of the device are the rest.
    for metric, heading in (("disk_hit_rate", "DISK"), ("host_hit_rate", "HOST")):
        if _any(report, metric):
            columns.insert(2, column(metric, heading, _percent, rank=2))
    if _any(report, "failed_share"):
        columns.append(column("failed_share", "FAILED", _percent, rank=2))
    if _any(report, "moves"):
        columns.append(column("moves", "MOVED", _count, rank=3))
    if _any(report, "queued_share"):
        columns.append(column("queued_share", "QUEUED", _percent, rank=5))
        columns.append(column("queued_p90_s", "QUEUE P90", _time, rank=6))
    if _any(report, "transfers"):
        columns.append(column("transfers", "TRANSFERS", _count, rank=6, wide=True))
        columns.append(column("cross_domain_transfers", "CROSSED", _count, rank=3))
    if _any(report, "cross_domain_bytes"):
        columns.append(column("cross_domain_bytes", "CROSS BYTES", _bytes, rank=6, wide=True))
    return columns


def _any(report: ReplayReport, metric: str) -> bool:
    estimates = [row.metrics.get(metric) for row in report.summaries]
    return any(estimate is not None and estimate.mean > 0 for estimate in estimates)


def _with_interval(estimate: Estimate, shown: Text, several: bool) -> str:
    if not several or estimate.low is None or estimate.high is None:
        return shown(estimate.mean)
    half = (estimate.high - estimate.low) / 2
    number, _, unit = shown(estimate.mean).partition(" ")
    return f"{number} ±{shown(half)}" if half else f"{number}{' ' * bool(unit)}{unit}"


def _below(report: ReplayReport) -> Iterator[str]:
    """The ceiling, and each policy against the first."""
    yield _ceiling(report)
    for result in report.results:
        refusals = Counter(result.counts.refusals).most_common(3)
        for reason, number in refusals:
            yield f"{result.policy}, seed {result.seed}: {number:,} refused: {reason}"
    peers = report.results[0].peers if report.results else None
    if peers is not None:
        for summary in report.summaries:
            yield f"{summary.policy}: {_peers(peers, summary)}"
    base, *others = report.summaries
    for other in () if report.changes else others:
        yield f"{other.policy} against {base.policy}: {', '.join(_differences(base, other))}"


def _ceiling(report: ReplayReport) -> str:
    cache = report.results[0].cache if report.results else None
    if cache is None or cache.ceiling is None:
        if report.trace.format == "recording":
            return (
                "hit rates are unknown: the recording has no hashes of blocks; its router had no "
                "tokenizer, or is a Dynamo with a prefill hop"
            )
        return (
            "hit rates are unknown: the trace has no hashes of blocks; a recording "
            "(dynctl record) or a trace with hash_ids has them"
        )
    share = f"{'' if cache.ceiling_exact else 'at least '}{percent(cache.ceiling, 2)}"
    return f"{share} of the prompt tokens could be reused (MAX): one cache without limit"


def _differences(base: PolicySummary, other: PolicySummary) -> Iterator[str]:
    for metric, title in _COMPARED:
        before, after = base.metrics.get(metric), other.metrics.get(metric)
        if before is None or after is None:
            continue
        if metric == "hit_rate":
            change = round(100 * (after.mean - before.mean), 1)
            yield f"{title} {change or 0.0:+.1f} points"
        elif before.mean:
            yield f"{title} {percent(after.mean / before.mean - 1, signed=True)}"


def _peers(peers: ReplayPeers, summary: PolicySummary) -> str:
    """What several routers knew of each other, as means over seeds."""

    def share(metric: str) -> str | None:
        estimate = summary.metrics.get(metric)
        return None if estimate is None else percent(estimate.mean)

    window = f"{1000 * peers.window_s:,g} ms"
    when = f"at most {window} after" if peers.window_s else "at the time of"
    text = f"{share('near_share')} of the choices came {when} one of another router"
    if same := share("same_share"):
        text += f", {same} of these had the same worker"
    low, high = share("load_low_share"), share("load_high_share")
    if low and high:
        text += f"; routers counted {low} of the prefill load too little and {high} too much"
    return text


def _percent(value: float) -> str:
    return percent(value, 1)


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _time(value: float) -> str:
    if value < 0.0995:
        return f"{1000 * value:.1f} ms"
    if value < 0.9995:
        return f"{1000 * value:.0f} ms"
    return f"{value:,.2f} s" if value < 100 else f"{value:,.0f} s"


def _bytes(value: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


# -- loads and search ------------------------------------------------------------------------------


def _optional(value: float | None) -> str:
    return "-" if value is None else _time(value)


def _optional_percent(value: float | None) -> str:
    return "-" if value is None else _percent(value)


def _per_second(value: float) -> str:
    return f"{value:,.2f}"


_LOAD_COLUMNS: Final[Sequence[Column[LoadPoint]]] = (
    Column("policy", "POLICY", lambda r: r.policy, name=True, shortest=8),
    Column("load", "LOAD", lambda r: r.load, form=lambda load: f"x{load:g}", right=True),
    Column("requests_per_s", "REQ/S", lambda r: r.requests_per_s, form=_per_second, right=True),
    Column("ttft_p50_s", "TTFT P50", lambda r: r.ttft_p50_s, form=_optional, right=True),
    Column("ttft_p90_s", "P90", lambda r: r.ttft_p90_s, form=_optional, right=True),
    Column("goodput_per_s", "GOOD REQ/S", lambda r: r.goodput_per_s, form=_per_second, right=True),
    Column("goodput_share", "GOODPUT", lambda r: r.goodput_share, form=_percent, right=True),
    Column("refused_share", "REFUSED", lambda r: r.refused_share, form=_percent, right=True),
)
_SEARCH_COLUMNS: Final[Sequence[Column[SearchPoint]]] = (
    Column("front", "FRONT", lambda r: r.front, form=lambda front: "yes" if front else "no"),
    Column("ttft_p90_s", "TTFT P90", lambda r: r.ttft_p90_s, form=_optional, right=True),
    number_column("output_tokens_per_s", "TOK/S", lambda r: r.output_tokens_per_s),
    Column("hit_rate", "HITS", lambda r: r.hit_rate, form=_optional_percent, right=True, rank=1),
    Column(
        "refused_share", "REFUSED", lambda r: r.refused_share, form=_percent, right=True, rank=2
    ),
)


def _search(report: ReplayReport, canvas: Canvas) -> str:
    """The front, the point without settings, and the settings of each."""
    front = [point for point in report.search if point.front]
    base = [point for point in report.search if not point.front and not point.settings]
    shown = front[:_MOST_SEARCHED] + base
    lines = table(_SEARCH_COLUMNS, shown, canvas).splitlines(keepends=True)
    text = lines.pop(0) if canvas.headings else ""
    for line, point in zip(lines, shown, strict=True):
        given = ", ".join(f"{name}={_plain(value)}" for name, value in point.settings.items())
        text += line
        text += canvas.paragraphs([given or "the settings of the policy"], first="  ")
    note = (
        f"{plural(len(report.search), 'simulation')}; the front: no other settings are better in "
        "both TTFT and throughput on this trace. Check them on another one"
    )
    return text + canvas.paragraphs([note], rest="")


# -- CSV -------------------------------------------------------------------------------------------


def replay_csv(report: ReplayReport) -> str:
    """One row for each policy and seed, or for each load or point of a search; raw values."""
    rows: list[dict[str, Any]]
    if report.loads:
        rows = [msgspec.structs.asdict(point) for point in report.loads]
    elif report.search:
        names = sorted({name for point in report.search for name in point.settings})
        rows = [
            {metric: getattr(point, metric) for metric in _SEARCH_METRICS}
            | {name: point.settings.get(name) for name in names}
            for point in report.search
        ]
    else:
        rows = [{"policy": row.policy, "seed": row.seed, **row.metrics} for row in report.metrics]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
