"""`hot`: the prefixes that requests share most, one row each."""

from __future__ import annotations

from dynctl.base.quantities import percent
from dynctl.documents.hot import HotPrefix, HotReport
from dynctl.documents.recording import RECORD_MORE
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, number_column, or_dash, table
from dynctl.screens.numbers import data_size, sent_to

_COLUMNS: tuple[Column[HotPrefix], ...] = (
    Column("prefix", "PREFIX", lambda row: row.prefix),
    number_column("tokens", "TOKENS", lambda row: row.tokens, rank=1),
    number_column("requests", "REQUESTS", lambda row: row.requests),
    Column("share", "SHARE", lambda row: row.share, lambda share: percent(share, 1), right=True),
    number_column("reused", "REUSED", lambda row: row.reused_tokens, rank=3),
    Column(
        "bytes",
        "A COPY",
        lambda row: row.bytes,
        data_size,
        right=True,
        rank=4,
        needed=lambda row: row.bytes is not None,
    ),
    number_column("copies", "COPIES", lambda row: row.copies),
    number_column("missed", "MISSED", lambda row: row.missed, rank=2),
    Column("verdict", "VERDICT", lambda row: row.verdict, or_dash, rank=1),
    Column("tenant", "TENANT", lambda row: row.tenant, or_dash, rank=4),
    Column("model", "MODEL", lambda row: row.model, rank=6, wide=True),
    Column("workers", "WORKERS", lambda row: ", ".join(row.workers), or_dash, rank=5, wide=True),
)


def hot_screen(report: HotReport, canvas: Canvas) -> str:
    """The head, the table, and what is not certain."""
    head = [
        f"shared prefixes, {len(report.prefixes):,} of {report.shared:,}",
        sent_to(report.requests, report.workers),
        report.source,
    ]
    lines = canvas.paragraph(", ".join(part for part in head if part), first="", rest="  ")
    text = "\n".join(lines) + "\n"
    if report.prefixes:
        text += "\n" + table(_COLUMNS, report.prefixes, canvas)
    else:
        text += f"\n{_nothing_shared(report)}\n"
    for doubt in report.doubts:
        shown = f"{doubt.code}  {doubt.what}: {doubt.effect}"
        text += "\n" + "\n".join(canvas.paragraph(shown, first="doubt ", rest=" " * 15)) + "\n"
    return text


def _nothing_shared(report: HotReport) -> str:
    if report.requests:
        return "no shared prefix is known"
    return f"no request to compare\n{RECORD_MORE}"
