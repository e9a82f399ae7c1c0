"""A list as a table: heading, one line a row, as wide as its canvas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, fit, visible


def table(columns: Sequence[Column[Any]], rows: Sequence[Any], canvas: Canvas) -> str:
    """Heading and rows."""
    fitted = fit(visible(columns, wide=canvas.wide, width=canvas.width), rows, canvas.width)
    lines = [fitted.line(row) for row in rows]
    if canvas.headings:
        lines.insert(0, canvas.faint(fitted.heading()))
    return "".join(line + "\n" for line in lines)
