"""How the dashboard looks: the terminal's own colours, and the layout."""

from __future__ import annotations

from typing import Final

from textual.theme import Theme

#: The terminal's own colours, so that it looks right on dark and on light ones, and on 16 colours.
THEME: Final = Theme(
    name="terminal",
    primary="ansi_blue",
    secondary="ansi_cyan",
    warning="ansi_yellow",
    error="ansi_red",
    success="ansi_green",
    accent="ansi_cyan",
    foreground="ansi_default",
    background="ansi_default",
    surface="ansi_default",
    panel="ansi_default",
    boost="ansi_default",
)

CSS: Final = """
Screen { layout: vertical; background: ansi_default; overflow: hidden; }
#head { height: 2; }
#prompt { display: none; }
"""
