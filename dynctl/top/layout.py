"""Heights of the panels: the panel in focus gets the room first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: Lines of a panel that only shows its title.
TITLE: Final = 1
#: The panel in focus gets at least this share of the screen, if its content fills it.
_FOCUS: Final = 0.45
#: This much before any other panel; then each of the others gets a heading and two rows.
_FOCUS_FIRST: Final = 0.4
#: With fewer lines only the title is shown.
_LEAST: Final = 4


@dataclass(frozen=True, slots=True)
class Wish:
    """Lines that a panel can fill, and how many suffice while another one is in focus.

    ``order``: panels with a lower number are served first.
    """

    natural: int
    enough: int
    order: int = 0


def heights(total: int, wishes: Sequence[Wish], focused: int, *, zoomed: bool = False) -> list[int]:
    """Lines of each panel; their sum is ``total`` unless the titles alone exceed it."""
    count = len(wishes)
    given = [TITLE] * count
    left = total - count * TITLE
    if left <= 0:
        return given
    if zoomed:
        given[focused] += left
        return given

    def give(place: int, up_to: int) -> None:
        nonlocal left
        more = max(0, min(left, up_to - given[place]))
        if given[place] + more >= min(_LEAST, wishes[place].natural):
            given[place] += more
            left -= more

    def give_focused(share: float) -> None:
        give(focused, min(wishes[focused].natural, max(6, round(total * share))))

    others = sorted((i for i in range(count) if i != focused), key=lambda i: wishes[i].order)
    give_focused(_FOCUS_FIRST)
    for place in others:
        give(place, min(wishes[place].natural, _LEAST))
    give_focused(_FOCUS)
    for place in others:
        give(place, min(wishes[place].natural, wishes[place].enough))
    give(focused, wishes[focused].natural)
    for place in others:
        give(place, wishes[place].natural)
    given[focused] += left
    return given
