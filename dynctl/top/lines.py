"""Widgets that show lines of text and nothing else; only lines that changed are drawn again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

PLAIN: Final = Style()
BOLD: Final = Style(bold=True)
DIM: Final = Style(dim=True)
CURSOR: Final = Style(reverse=True)
GOOD: Final = Style(color="green")
WARN: Final = Style(color="yellow")
BAD: Final = Style(color="red", bold=True)
ACCENT: Final = Style(color="cyan")

Piece: TypeAlias = tuple[str, Style]
Line: TypeAlias = Sequence[Piece]


def plain(text: str, style: Style = PLAIN) -> Line:
    """A line of one style."""
    return ((text, style),)


def strip(line: Line, width: int, base: Style = PLAIN) -> Strip:
    """A line on ``width`` cells; ``base`` lies under all of it."""
    segments = [Segment(text, base + style if base else style) for text, style in line if text]
    return Strip(segments).adjust_cell_length(width, base).simplify()


class Lines(Widget):
    """Lines from the top; what does not fit is not shown."""

    DEFAULT_CSS = "Lines { height: 1; }"

    def __init__(self, *, id: str | None = None, base: Style = PLAIN) -> None:
        super().__init__(id=id)
        self._base = base
        self._lines: list[Line] = []
        self._strips: list[Strip] = []

    def show(self, lines: Sequence[Line]) -> None:
        """Show these from now on."""
        self._lines = list(lines)
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def render_line(self, y: int) -> Strip:
        if y < len(self._strips):
            return self._strips[y]
        return Strip.blank(self.size.width, self._base)

    def _draw(self) -> None:
        width = self.size.width
        redraw(self, self._strips, [strip(line, width, self._base) for line in self._lines])


def redraw(widget: Widget, shown: list[Strip], fresh: list[Strip]) -> None:
    """Put ``fresh`` into ``shown`` and draw the lines that differ."""
    width, height = widget.size
    changed = [
        y
        for y in range(min(height, max(len(shown), len(fresh))))
        if y >= len(shown) or y >= len(fresh) or shown[y] != fresh[y]
    ]
    shown[:] = fresh
    if not changed:
        return
    if len(changed) * 2 > height:
        widget.refresh()
    else:
        widget.refresh(*(Region(0, y, width, 1) for y in changed))
