"""What people see of `topology verify`, character for character, at 80 and 200 columns."""

from __future__ import annotations

import pytest

from tests.golden.verify_screens import HERE, WIDTHS, screens

SCREENS = screens()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SCREENS)
def test_screen_is_as_committed(name: str, width: int):
    assert SCREENS[name](width) == (HERE / f"{name}-{width}.txt").read_text()


@pytest.mark.parametrize("width", [64, 72, 80, 100, 120, 200])
@pytest.mark.parametrize("name", SCREENS)
def test_no_line_is_wider_than_the_terminal(name: str, width: int):
    for line in SCREENS[name](width).splitlines():
        assert len(line) <= width, line


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_needs_no_more_than_ascii_and_no_colour(name: str):
    assert SCREENS[name](80).isascii()
    assert "\x1b" not in SCREENS[name](80)


def test_no_golden_file_is_left_over():
    expected = {f"{name}-{width}.txt" for name in SCREENS for width in WIDTHS}
    assert {path.name for path in HERE.glob("*.txt")} == expected
