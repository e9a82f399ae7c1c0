"""`route --parts`: one row for each part of a prompt, and the block at which it breaks."""

from __future__ import annotations

from dynctl.documents.hits import CAUSES
from dynctl.documents.prompt_parts import PartBreak, PromptPart, PromptParts
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, number_column, or_dash, table
from dynctl.screens.numbers import plural

_COLUMNS: tuple[Column[PromptPart], ...] = (
    Column("name", "PART", lambda row: row.name),
    number_column("start", "FROM", lambda row: row.start, rank=2),
    number_column("tokens", "TOKENS", lambda row: row.tokens),
    number_column("cached", "CACHED", lambda row: row.cached),
    number_column("equal", "EQUAL BEHIND", lambda row: row.equal, rank=1),
    Column("workers", "ALL OF IT ON", lambda row: ", ".join(row.workers), or_dash, rank=3),
)


def prompt_parts_screen(report: PromptParts, canvas: Canvas) -> str:
    """The head, the parts, where the prompt breaks, and what is not certain."""
    head = f"{plural(report.tokens, 'token')} for {report.model}"
    if report.holders:
        best = report.holders[0]
        tiers = (("device", best.device), ("host", best.host), ("disk", best.disk))
        named = [f"{blocks:,} {tier}" for tier, blocks in tiers if blocks]
        head += f", most cached on {best.worker}: {plural(best.blocks, 'block')}"
        head += f" ({', '.join(named)}) of {report.block_size} tokens"
    else:
        head += ", not cached on any worker"
    text = "\n".join(canvas.paragraph(head, first="", rest="  ")) + "\n\n"
    text += table(_COLUMNS, report.parts, canvas)
    if report.breaks is not None:
        text += "\n" + "\n".join(canvas.paragraph(_break_text(report.breaks), first="")) + "\n"
    for doubt in report.doubts:
        shown = f"{doubt.code}  {doubt.what}: {doubt.effect}"
        text += "\n".join(canvas.paragraph(shown, first="doubt ", rest=" " * 15)) + "\n"
    return text


def _break_text(seen: PartBreak) -> str:
    text = f"no worker has block {seen.block:,} (token {seen.token:,}, {seen.segment})"
    if seen.equal_from is None or seen.equal_to is None or seen.was_at is None:
        return f"{text}, and no text behind it is cached"
    return (
        f"{text}; blocks {seen.equal_from:,} to {seen.equal_to - 1:,} are on {seen.worker} at "
        f"block {seen.was_at:,}: {CAUSES[seen.cause].label}; {CAUSES[seen.cause].act}"
    )
