"""Bars and sparklines: how much of something is used, and how it was in the last minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Marks:
    """The characters that they are drawn with. ``steps``: from nothing to full."""

    full: str
    empty: str
    steps: str

    def bar(self, share: float | None, width: int) -> str:
        """``share`` (0..1; more is full) as a bar; blank where it is not known."""
        if share is None:
            return " " * width
        cells = min(width, max(0, round(share * width)))
        # Something is never nothing, and not quite all is never all.
        cells = max(cells, 1) if share > 0 else cells
        cells = min(cells, width - 1) if share < 1 else cells
        return self.full * cells + self.empty * (width - cells)

    def sparkline(self, values: Sequence[float | None], top: float | None = None) -> str:
        """One character a value, blank where it is not known. ``top`` is full; None: the largest
        one."""
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
PLAIN: Final = Marks("#", "-", "_.-=+*#")
