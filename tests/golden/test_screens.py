"""What people see, character for character, at 80 and at 200 columns."""

import pytest

from tests.golden import check_screens, lint_screens, plan_screens, screens, verify_screens

GALLERIES = {
    "decisions": screens,
    "checks": check_screens,
    "lint": lint_screens,
    "plans": plan_screens,
    "verify": verify_screens,
}
SCREENS = {
    (gallery, name): draw
    for gallery, one in GALLERIES.items()
    for name, draw in one.screens().items()
}
#: Reports of `topology lint` quote manifests as they are.
OWN_TEXT = [key for key in SCREENS if key[0] != "lint"]


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(("gallery", "name"), SCREENS)
def test_screen_is_as_committed(gallery: str, name: str, width: int):
    committed = GALLERIES[gallery].HERE / f"{name}-{width}.txt"
    assert SCREENS[gallery, name](width) == committed.read_text()


@pytest.mark.parametrize(
    ("gallery", "name", "width"),
    [
        (*key, width)
        for key in OWN_TEXT
        for width in (64, 72, 80, 100, 120, 200)
        if width >= (72 if key[0] == "plans" else 64)
    ],
)
def test_no_line_is_wider_than_the_terminal(gallery: str, name: str, width: int):
    """But a command to paste may be."""
    for line in SCREENS[gallery, name](width).splitlines():
        paste = (gallery == "plans" and line.startswith("  kubectl patch ")) or (
            name == "trouble" and line.startswith("dynctl ")
        )
        assert len(line) <= width or paste, line


@pytest.mark.parametrize(("gallery", "name"), OWN_TEXT)
def test_a_screen_needs_no_more_than_ascii_and_no_colour(gallery: str, name: str):
    drawn = SCREENS[gallery, name](80)
    assert drawn.isascii()
    assert "\x1b" not in drawn


@pytest.mark.parametrize("gallery", GALLERIES)
def test_no_golden_file_is_left_over(gallery: str):
    one = GALLERIES[gallery]
    expected = {f"{name}-{width}.txt" for name in one.screens() for width in one.WIDTHS}
    assert {path.name for path in one.HERE.glob("*.txt")} == expected
