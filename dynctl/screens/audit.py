"""`audit`: how often the predictions were right, by worker, and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

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
    text = canvas.paragraphs([_head(report)], rest="")
    if report.workers:
        text += "\n" + table(_columns(), report.workers, canvas)
    text += "\n" + canvas.paragraphs(_rates(report), rest="")
    text += canvas.paragraphs(_cause_texts(report), first="cause    ", rest=" " * 9)
    skipped = (f"{number:,}: {reason}" for reason, number in sorted(report.skipped.items()))
    return text + canvas.paragraphs(skipped, first="skipped  ", rest=" " * 9)


def _head(report: AuditReport) -> str:
    if report.compares == "reuse":
        about, start = "reuse predicted by the router, and reported by the engines", "frontend"
    else:
        about, start = "workers predicted, and chosen by the frontends", "observer"
    if report.seconds is not None:
        return f"{about}, in {report.seconds:g} s"
    return f"{about}, since the {start} started"


def _rates(report: AuditReport) -> Iterator[str]:
    if report.rate is not None:
        requests = plural(report.requests, "request")
        yield f"rate     {percent(report.rate, 1)}  {report.hits:,} of {requests} as predicted"
    elif report.skipped:
        yield "no request was compared, for these reasons:"
    else:
        yield _NOTHING[report.compares]
    costs = sum(row.costs for row in report.workers)
    if costs:
        same = sum(row.same_costs for row in report.workers)
        yield f"costs    {same:,} of {costs:,} as in the frontend's log"


def _cause_texts(report: AuditReport) -> Iterator[str]:
    total: Counter[str] = Counter()
    for row in report.workers:
        total.update(row.causes)
    for cause, number in total.most_common():
        workers = [row.worker for row in report.workers if row.causes.get(cause)]
        where = workers[0] if len(workers) == 1 else plural(len(workers), "worker")
        yield f"{cause}, {number:,} on {where}: {CAUSES.get(cause, 'unknown cause')}"


def _has_tokens(row: AuditRow) -> bool:
    return bool(row.predicted_tokens or row.reported_tokens)


def _columns() -> list[Column[AuditRow]]:
    predicted: Column[AuditRow] = number_column(
        "predicted", "PREDICTED", lambda row: row.predicted_tokens, rank=1
    )
    reported: Column[AuditRow] = number_column(
        "reported", "REPORTED", lambda row: row.reported_tokens, rank=1
    )
    return [
        Column("worker", "WORKER", lambda row: row.worker, name=True),
        Column("role", "ROLE", lambda row: row.role, form=or_dash, rank=2),
        number_column("requests", "REQUESTS", lambda row: row.requests),
        Column("hits", "HITS", lambda row: row.hits, text=_rate, right=True),
        replace(predicted, needed=_has_tokens),
        replace(reported, needed=_has_tokens),
    ]


def _rate(row: AuditRow) -> str:
    return percent(row.hits / row.requests) if row.requests else "-"
