"""Hostile names, tiny terminals and any keys: the dashboard goes on."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from dynctl.top.keys import BINDINGS
from tests.dynctl.top.conftest import Shown, settled
from tests.dynctl.top.fleet import StillSource, snapshot

LEAVING = ("q", "ctrl+c")
KEYS = [
    *(key for one in BINDINGS for key in one.key.split(",") if key not in LEAVING),  # type: ignore[union-attr]
    *("up", "down", "left", "right", "pageup", "pagedown", "home", "end", "backspace", "space"),
    *("a", "0", "9", "left_square_bracket", "right_square_bracket", "ctrl+v", "ctrl+p", "f1"),
]
NAMES = (
    "[bold red]x[/]",
    "[@click=app.leave(0)]x[/]",
    "\x1b[2J\x1b]0;x\x07",
    "a\nFAIL  b",
    "\u202eabc",
    "n" * 20_000,
    "[",
    "",
)


def hostile() -> StillSource:
    plain = snapshot()
    rows = tuple(
        msgspec.structs.replace(row, name=name or row.name)
        for row, name in zip(plain.workers, NAMES, strict=False)
    )
    lines = tuple(
        msgspec.structs.replace(line, **{field: name})
        for line, name in zip(plain.decisions * 3, NAMES, strict=False)
        for field in ("model",)
    )
    source = StillSource()
    source.shown = msgspec.structs.replace(plain, workers=rows, decisions=lines, source=NAMES[0])
    return source


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (20, 5), (80, 24)], ids=str)
@pytest.mark.parametrize("source", ["plain", "hostile"])
async def test_any_keys_on_any_terminal(shown: Shown, size: tuple[int, int], source: str) -> None:
    random = Random(f"{size} {source}")
    made: Any = hostile() if source == "hostile" else None
    async with shown(made, size=size, rate=3600.0) as pilot:
        for number in range(120):
            await pilot.press(random.choice(KEYS))
            if number % 40 == 39:
                await pilot.resize_terminal(random.randint(1, 120), random.randint(1, 40))
        await settled(pilot)
        app: Any = pilot.app
        assert app.return_code in (None, 0)
        assert app.is_running
