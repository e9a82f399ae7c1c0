"""`audit`: how often the predictions were right, by worker, and why not."""

from __future__ import annotations

from collections import Counter

from dynctl.base.quantities import percent
from dynctl.documents.audit import CAUSES, AuditReport, AuditRow
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, number_column, or_dash, table
from dynctl.screens.numbers import plural

_NOTHING = {
    "reuse": "no engine reported reused prompt tokens: vLLM needs --enable-prompt-tokens-details, "
    "SGLang --enable-cache-report, and streams stream_options.include_usage. Without traffic there "
    "are no reports",
    "choice": "no request was compared; follow longer, while there is traffic: --duration SECONDS",
}


def audit_screen(report: AuditReport, canvas: Canvas) -> str:
    """The rate, a table by worker, and each cause with what it means."""
    reuse = report.compares == "reuse"
    about = "reuse predicted by the router, and reported by the engines"
    about = about if reuse else "workers predicted, and chosen by the frontends"
    span = f"since the {'frontend' if reuse else 'observer'} started"
    if report.seconds is not None:
        span = f"in {report.seconds:g} s"
    lines = canvas.paragraph(f"{about}, {span}", first="")
    if report.workers:
        lines += ["", table(_columns(report), report.workers, canvas).rstrip("\n")]
    lines.append("")
    if report.rate is None:
        none = "no request was compared, for these reasons:" if report.skipped else None
        lines += canvas.paragraph(none or _NOTHING[report.compares], first="")
    else:
        rate = percent(report.rate, 1)
        of = plural(report.requests, "request")
        lines.append(f"rate     {rate}  {report.hits:,} of {of} as predicted")
    costs = sum(row.costs for row in report.workers)
    if costs:
        same = sum(row.same_costs for row in report.workers)
        lines.append(f"costs    {same:,} of {costs:,} as in the frontend's log")
    total: Counter[str] = Counter()
    for row in report.workers:
        total.update(row.causes)
    for cause, number in total.most_common():
        named = [row.worker for row in report.workers if row.causes.get(cause)]
        where = named[0] if len(named) == 1 else plural(len(named), "worker")
        text = f"{cause}, {number:,} on {where}: {CAUSES.get(cause, 'unknown cause')}"
        lines += canvas.paragraph(text, first="cause    ", rest=" " * 9)
    for reason, number in sorted(report.skipped.items()):
        lines += canvas.paragraph(f"{number:,}: {reason}", first="skipped  ", rest=" " * 9)
    return "\n".join(lines) + "\n"


def _columns(report: AuditReport) -> list[Column[AuditRow]]:
    columns: list[Column[AuditRow]] = [
        Column("worker", "WORKER", lambda row: row.worker, name=True),
        Column("role", "ROLE", lambda row: row.role, form=or_dash, rank=2),
        number_column("requests", "REQUESTS", lambda row: row.requests),
        Column("hits", "HITS", lambda row: row.hits, text=_rate, right=True),
    ]
    if any(row.predicted_tokens or row.reported_tokens for row in report.workers):
        columns += [
            number_column("predicted", "PREDICTED", lambda row: row.predicted_tokens, rank=1),
            number_column("reported", "REPORTED", lambda row: row.reported_tokens, rank=1),
        ]
    return columns


def _rate(row: AuditRow) -> str:
    return percent(row.hits / row.requests) if row.requests else "-"
