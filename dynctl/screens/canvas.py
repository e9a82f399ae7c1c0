"""What a screen is drawn on: how wide it is, and whether it may have weight."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from textwrap import wrap
from typing import TextIO

from dynctl.base.options import GlobalOptions, OutputFormat

#: Width of a screen (not of a list) where nobody says how wide the terminal is.
DEFAULT_WIDTH = 80
#: Narrower terminals get lines that are this long and wrap by themselves.
MIN_WIDTH = 64


@dataclass(frozen=True, slots=True)
class Canvas:
    """``width`` None: as wide as needed, which is what a pipe gets.

    ``color`` only makes what is already said by a mark or a word bold or faint.
    """

    width: int | None = None
    wide: bool = False
    color: bool = False
    headings: bool = True

    @property
    def screen_width(self) -> int:
        return DEFAULT_WIDTH if self.width is None else self.width

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.color else text

    def faint(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self.color else text

    def paragraph(self, text: str, *, first: str = "  ", rest: str | None = None) -> list[str]:
        """``text`` wrapped to the screen, with what the first and the other lines start with."""
        return wrap(
            text,
            min(self.screen_width, 120),
            initial_indent=first,
            subsequent_indent=rest if rest is not None else " " * len(first),
            break_long_words=False,
            break_on_hyphens=False,
        )

    @classmethod
    def of(cls, options: GlobalOptions, stream: TextIO | None = None) -> Canvas:
        """The canvas of a stream (stdout), for these options and this environment."""
        stream = stream or sys.stdout
        terminal = stream.isatty()
        plain = options.no_color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        wide = options.output is OutputFormat.WIDE
        return cls(_width(stream, terminal), wide, terminal and not plain)


def _width(stream: TextIO, terminal: bool) -> int | None:
    said = os.environ.get("COLUMNS", "")
    if said.isdigit() and int(said) > 0:
        return max(MIN_WIDTH, int(said))
    if not terminal:
        return None
    try:
        return max(MIN_WIDTH, os.get_terminal_size(stream.fileno()).columns)
    except (OSError, ValueError):
        return DEFAULT_WIDTH
