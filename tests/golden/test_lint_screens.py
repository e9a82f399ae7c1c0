"""What `topology lint` shows, character for character, at 80 and at 200 columns."""

from __future__ import annotations

import pytest

from tests.golden.lint_screens import HERE, WIDTHS, screens

SCREENS = screens()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SCREENS)
def test_screen_is_as_committed(name: str, width: int):
    assert SCREENS[name](width) == (HERE / f"{name}-{width}.txt").read_text()


def test_no_golden_file_is_left_over():
    expected = {f"{name}-{width}.txt" for name in SCREENS for width in WIDTHS}
    assert {path.name for path in HERE.glob("*.txt")} == expected
