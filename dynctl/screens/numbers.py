"""Numbers and shortened texts for screens; JSON has the raw values."""

from collections.abc import Sequence
from typing import Final

from dynctl.base.quantities import plural as plural
from dynctl.screens.cells import beginning, cells, ending

_MORE: Final = " .."
_BOUNDARIES: Final = (", ", "; ", " (")


def blocks(value: float | None) -> str:
    """Three decimals, as in the router's logs."""
    return "-" if value is None else f"{value:,.3f}"


def count(value: float | None) -> str:
    """A whole number with thousands separators."""
    return "-" if value is None else f"{value:,.0f}"


def amount(value: float | None) -> str:
    """As short as exact: 17, 0.85, 10,240."""
    if value is None:
        return "-"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.6g}"


def age(seconds: float | None) -> str:
    """An age; the older, the coarser."""
    if seconds is None:
        return "never"
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def seconds(value: float | None) -> str:
    """A duration: 8 ms, 340 ms, 2.41 s, 75 s."""
    if value is None:
        return "-"
    if value < 1:
        return f"{1000 * max(0.0, value):.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:,.0f} s"


def data_size(bytes: int | None) -> str:
    """An amount of data: 512 B, 8.4 kB, 131 MB, 2.1 GB."""
    if bytes is None:
        return "-"
    value, units = float(bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}" if value < 999.5 else f"{value:,.0f} {units[0]}"


def first_names(names: Sequence[str], most: int) -> str:
    """``a, b and 3 more``: at most so many names, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def estimate(number: int) -> str:
    """``~450``: a number that is a guess."""
    return f"~{number:,}"


def opening(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters, cut at the end of a phrase.

    A single word, as a name, is shortened in the middle.
    """
    if len(text) <= width:
        return text
    kept = text[: max(0, width - len(_MORE)) + 1]
    ends = [kept.rfind(boundary) for boundary in _BOUNDARIES]
    end = max(ends) if max(ends) > 0 else kept.rfind(" ")
    return text[:end].rstrip() + _MORE if end > 0 else middle(text, width)


def middle(text: str, width: int) -> str:
    """``text`` in at most ``width`` cells, cut in the middle: names of pods differ at both ends."""
    if cells(text) <= width:
        return text
    if width <= 4:
        return beginning(text, width)
    head = (width - 2) // 2
    return f"{beginning(text, head)}..{ending(text, width - 2 - head)}"


def sent_to(requests: int, workers: int) -> str:
    """The requests of a recording, and to how many workers they went; 0: not known."""
    to = f" to {plural(workers, 'worker')}" if workers else ""
    return plural(requests, "request") + to
