"""Styles of text, bars and sparklines. Only rich, so that `top --once` needs no textual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from rich.style import Style

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


@dataclass(frozen=True, slots=True)
class Marks:
    """Characters of bars and sparklines. ``steps``: from empty to full."""

    full: str
    empty: str
    steps: str

    def bar(self, share: float | None, width: int) -> str:
        """``share`` (0..1; more is full) as a bar; blank if unknown."""
        if share is None:
            return " " * width
        cells = min(width, max(0, round(share * width)))
        # More than 0 shows at least one mark, less than 1 leaves at least one empty.
        cells = max(cells, 1) if share > 0 else cells
        cells = min(cells, width - 1) if share < 1 else cells
        return self.full * cells + self.empty * (width - cells)

    def sparkline(self, values: Sequence[float | None], top: float | None = None) -> str:
        """One character per value, blank if unknown. ``top``: the value of a full mark, None for
        the largest value."""
        known = [value for value in values if value is not None]
        high = top if top is not None else max(known, default=0.0)
        last = len(self.steps) - 1
        return "".join(
            " "
            if value is None
            else self.steps[min(last, round(value / high * last)) if high > 0 else 0]
            for value in values
        )


BLOCKS: Final = Marks("█", "░", "▁▂▃▄▅▆▇█")
ASCII: Final = Marks("#", "-", "_.-=+*#")
