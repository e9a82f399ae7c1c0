"""Screens as text and as SVG, and the files that they are compared with.

``DYNCTL_UPDATE_GOLDEN=1`` writes the files; look at the difference before you commit it.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from textual.app import App

HERE = Path(__file__).parents[2] / "golden" / "top"
UPDATE = bool(os.environ.get("DYNCTL_UPDATE_GOLDEN"))


def screen_text(app: App[Any]) -> str:
    """What is on the screen, without colours, trailing blanks cut."""
    width, height = app.size
    console = Console(
        width=width, height=height, file=io.StringIO(), record=True, force_terminal=True,
        color_system=None, legacy_windows=False,
    )  # fmt: skip
    console.print(app.screen._compositor.render_update(full=True))
    text = console.export_text(styles=False)
    return "\n".join(line.rstrip() for line in text.splitlines()[:height]) + "\n"


def screen_svg(app: App[Any]) -> str:
    """The screen with its colours."""
    return app.export_screenshot(title="dynctl top")


def as_committed(name: str, drawn: str) -> None:
    """``drawn`` equals the file of that name."""
    path = HERE / name
    if UPDATE:
        path.write_text(drawn)
    assert path.is_file(), f"{path.name} does not exist; DYNCTL_UPDATE_GOLDEN=1 writes it"
    assert drawn == path.read_text()
