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

#: Colours that have no meaning of their own; green, yellow and red are for states.
_ZONES: Final = tuple(
    Style(color=name)
    for name in ("cyan", "magenta", "blue", "bright_cyan", "bright_magenta", "bright_blue")
)
_ROLES: Final = {
    "prefill": Style(color="bright_blue"),
    "decode": Style(color="bright_cyan"),
    "aggregated": Style(color="bright_magenta"),
}


def zone_style(value: str | None, values: Sequence[str]) -> Style:
    """The colour of a domain value, the same in every panel; ``values``: all of them, in order."""
    return _ZONES[values.index(value) % len(_ZONES)] if value in values else PLAIN


def role_style(role: str) -> Style:
    """The colour of a role, the same in every panel."""
    return _ROLES.get(role, PLAIN)


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

    def bar(self, share: float | None, width: int, limit: float | None = None) -> str:
        """``share`` (0..1; more is full) as a bar; blank if unknown. ``limit`` (0..1) has a |."""
        if share is None:
            return " " * width
        cells = min(width, max(0, round(share * width)))
        # More than 0 shows at least one mark, less than 1 leaves at least one empty.
        cells = max(cells, 1) if share > 0 else cells
        cells = min(cells, width - 1) if share < 1 else cells
        bar = self.full * cells + self.empty * (width - cells)
        if limit is None or not 0 < limit <= 1:
            return bar
        place = min(width - 1, int(limit * width))
        return f"{bar[:place]}|{bar[place + 1 :]}"

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
