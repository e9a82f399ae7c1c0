"""Whole screens, character for character, and some with their colours."""

from __future__ import annotations

import pytest

from tests.dynctl.dashboard.conftest import Shown
from tests.dynctl.dashboard.golden import HERE, as_committed, screen_svg, screen_text

SIZES = ((80, 24), (200, 60))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "keys"), [("first", ""), ("domains", "1"), ("workers", "2"), ("alerts", "4")]
)
async def test_screen_is_as_committed(shown: Shown, name: str, keys: str, size: tuple[int, int]):
    async with shown(size=size) as pilot:
        await pilot.press(*keys)
        await pilot.pause()
        as_committed(f"{name}-{size[0]}x{size[1]}.txt", screen_text(pilot.app))


async def test_colours_are_as_committed(shown: Shown):
    async with shown(size=(100, 30)) as pilot:
        as_committed("first-100x30.svg", screen_svg(pilot.app))


def test_goldens_are_all_used():
    assert HERE.is_dir()
