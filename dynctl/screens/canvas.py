"""The canvas of a screen: its width, and whether it may use bold and faint text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from textwrap import wrap
from typing import TextIO

from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.base.terminal import DEFAULT_WIDTH, stream_width

_TIED = "\N{NO-BREAK SPACE}%"

#: Width of a screen (not of a list) in a pipe with ``-o wide``.
WIDE_WIDTH = 160
#: Values of TERM whose fonts often lack block characters.
_NO_BLOCKS = ("dumb", "linux")


class Color(IntEnum):
    """The terminal's own colors, so that they fit its theme."""

    RED = 31
    GREEN = 32
    YELLOW = 33


@dataclass(frozen=True, slots=True)
class Canvas:
    """``width`` None: as wide as needed, for pipes.

    ``color``: colors, bold and faint text, which only repeat what a mark or a word shows.
    ``unicode``: the terminal draws block characters.
    """

    width: int | None = None
    wide: bool = False
    color: bool = False
    headings: bool = True
    unicode: bool = False

    @property
    def screen_width(self) -> int:
        if self.width is not None:
            return self.width
        return WIDE_WIDTH if self.wide else DEFAULT_WIDTH

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.color else text

    def faint(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self.color else text

    def paint(self, text: str, color: Color) -> str:
        """``text`` in a color; it must read the same without.

        render.emit lets colors through for the marks of checks only.
        """
        return f"\x1b[{color}m{text}\x1b[0m" if self.color else text

    def paragraph(self, text: str, *, first: str = "  ", rest: str | None = None) -> list[str]:
        """``text`` wrapped to the screen. ``first``, ``rest``: how the lines begin."""
        lines = wrap(
            # A number stays with its percent sign.
            text.replace(" %", _TIED),
            min(self.screen_width, 120),
            initial_indent=first,
            subsequent_indent=rest if rest is not None else " " * len(first),
            break_long_words=False,
            break_on_hyphens=False,
        )
        return [line.replace(_TIED, " %") for line in lines]

    def paragraphs(self, texts: Iterable[str], *, first: str = "", rest: str | None = "  ") -> str:
        """Each text as a paragraph, with its line end."""
        lines = (line for text in texts for line in self.paragraph(text, first=first, rest=rest))
        return "".join(f"{line}\n" for line in lines)

    @classmethod
    def from_options(cls, options: GlobalOptions, stream: TextIO | None = None) -> Canvas:
        """The canvas of a stream (default stdout) for these options."""
        stream = stream or sys.stdout
        terminal = stream.isatty()
        plain = options.no_color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        wide = options.output is OutputFormat.WIDE
        encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
        blocks = terminal and encoding == "utf8" and os.environ.get("TERM") not in _NO_BLOCKS
        width = stream_width(stream)
        return cls(width, wide, terminal and not plain, unicode=blocks)
