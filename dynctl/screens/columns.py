"""Columns and tables: heading, text and raw value of each column, fitted to the terminal.

Lists and the dashboard use the same columns, so that a number reads the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from msgspec import UNSET

from dynctl.base.errors import UsageProblem
from dynctl.screens.canvas import Canvas
from dynctl.screens.cells import beginning, cells, pad_cells
from dynctl.screens.numbers import count, middle

Row = TypeVar("Row")

GAP = 2
#: A shortened name keeps at least this many characters.
SHORTEST = 12
#: Names are shortened to this many characters before columns leave.
_SHORT = 24
#: The width of a cell of a table, also in a pipe: that of the longest name in Kubernetes. Longer
#: names are cut in the middle (-o json has all of them); sentences are not cut.
LONGEST = 253


def plain(value: Any) -> str:
    """A value as it is; ``-`` for none, and for one that the document does not have."""
    return "-" if value is None or value is UNSET else str(value)


def or_dash(value: Any) -> str:
    """A value as it is; ``-`` for none and for an empty one."""
    return str(value) if value else "-"


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """``value``: what sorting compares; ``form``: how tables show it. ``text``: what tables show
    of a row, where that is not one value.

    ``rank``: 0 always stays on narrow terminals, higher ranks leave earlier. ``wide`` columns
    appear with ``-o wide`` or on wide terminals. ``name`` columns are shortened in the middle,
    down to ``shortest`` characters; with ``sentence`` at the end. ``needed``: whether a row has
    something to show there; a column that no row needs is left out.
    """

    key: str
    heading: str
    value: Callable[[Row], Any]
    form: Callable[[Any], str] = plain
    text: Callable[[Row], str] | None = None
    right: bool = False
    rank: int = 0
    wide: bool = False
    name: bool = False
    shortest: int = SHORTEST
    sentence: bool = False
    needed: Callable[[Row], bool] | None = None

    def cell(self, row: Row) -> str:
        """The text of a row."""
        return self.form(self.value(row)) if self.text is None else self.text(row)

    def cells_of(self, row: Row) -> int:
        """The cells of the terminal that its text takes, at most `LONGEST` for a name."""
        wide = cells(self.cell(row))
        return wide if self.sentence else min(wide, LONGEST)

    def shorten(self, cell: str, width: int) -> str:
        """``cell`` in at most ``width`` cells of the terminal."""
        if cells(cell) <= width:
            return cell
        return f"{beginning(cell, width - 2)}.." if self.sentence else middle(cell, width)


def number_column(
    key: str, heading: str, value: Callable[[Row], Any], *, rank: int = 0, wide: bool = False
) -> Column[Row]:
    """A column of whole numbers."""
    return Column(key, heading, value, form=count, right=True, rank=rank, wide=wide)


@dataclass(frozen=True, slots=True)
class Fitted(Generic[Row]):
    """Columns that fit the width, with the width of each."""

    columns: tuple[Column[Row], ...]
    widths: tuple[int, ...]

    def heading(self) -> str:
        return self._line([column.heading for column in self.columns])

    def line(self, row: Row) -> str:
        return self._line([column.cell(row) for column in self.columns])

    def texts(self, values: Sequence[str]) -> str:
        """A line of the first ``len(values)`` columns, each pad_cells."""
        return self._line(list(values))

    def _line(self, texts: list[str]) -> str:
        parts = []
        for column, width, cell in zip(self.columns, self.widths, texts, strict=False):
            text = column.shorten(cell, width)
            parts.append(pad_cells(text, width, right=column.right))
        return (" " * GAP).join(parts).rstrip()


def fit(
    columns: Sequence[Column[Row]],
    rows: Sequence[Row],
    width: int | None,
    least: Mapping[str, int] | None = None,
) -> Fitted[Row]:
    """The columns that fit ``width`` (None: no limit); the highest ranks leave first.

    If the remaining columns are still too wide, names are shortened in the middle.
    ``least``: key -> minimum width of a column.
    """
    wanted = least or {}
    widths = {
        column.key: max(
            cells(column.heading),
            wanted.get(column.key, 0),
            *(column.cells_of(row) for row in rows),
        )
        for column in columns
    }
    chosen = list(columns) if width is None else _narrow_columns(columns, widths, width)
    return Fitted(tuple(chosen), tuple(widths[column.key] for column in chosen))


def _narrow_columns(
    columns: Sequence[Column[Row]], widths: dict[str, int], width: int
) -> list[Column[Row]]:
    """The columns that stay; those that are shortened have less in ``widths`` then.

    First names are shortened to _SHORT cells, then columns leave, then names are shortened again.
    """
    chosen = list(columns)
    short = {column.key: min(widths[column.key], _SHORT) for column in columns if column.name}
    while (over := sum(widths[c.key] for c in chosen) + GAP * (len(chosen) - 1) - width) > 0:
        names = [column for column in chosen if column.name]
        longest = max(names, key=lambda c: widths[c.key], default=None)
        if longest is not None and widths[longest.key] > short[longest.key]:
            widths[longest.key] = max(short[longest.key], widths[longest.key] - over)
            continue
        last = max(chosen, key=lambda column: column.rank)
        if last.rank > 0:
            chosen.remove(last)
            continue
        loosest = max(names, key=lambda c: widths[c.key] - c.shortest, default=None)
        if loosest is None or widths[loosest.key] <= loosest.shortest:
            break
        widths[loosest.key] -= 1
    return chosen


def sort_rows(columns: Sequence[Column[Row]], rows: Sequence[Row], key: str) -> list[Row]:
    """Rows sorted by the raw values of a column, without a value last; raises UsageProblem."""
    wanted = key.strip().lower().replace("-", "_")
    same = [c for c in columns if wanted in (c.key, c.heading.lower(), c.key.partition(":")[2])]
    if not same:
        known = ", ".join(column.key.removeprefix("domain:") for column in columns)
        raise UsageProblem(f"--sort-by {key}: no such column; expected one of {known}")
    value = same[0].value
    return sorted(rows, key=lambda row: (value(row) is None, value(row) or 0))


def visible(columns: Sequence[Column[Row]], *, wide: bool, width: int | None) -> list[Column[Row]]:
    """The columns for a terminal; all of them with ``wide``.

    A terminal of 100 columns or more also gets the wide ones; they leave first.
    """
    if wide:
        return [replace(column, rank=0) if width is None else column for column in columns]
    if width is not None and width >= 100:
        return list(columns)
    return [column for column in columns if not column.wide]


def needed_columns(columns: Iterable[Column[Row]], rows: Sequence[Row]) -> list[Column[Row]]:
    """The columns that any of ``rows`` needs."""
    return [column for column in columns if column.needed is None or any(map(column.needed, rows))]


def table(columns: Iterable[Column[Any]], rows: Sequence[Any], canvas: Canvas) -> str:
    """A list as a table: heading, one line per row, as wide as the canvas. With `-o wide` a last
    line has the columns for which a terminal has no room."""
    shown = visible(needed_columns(columns, rows), wide=canvas.wide, width=canvas.width)
    fitted = fit(shown, rows, canvas.width)
    lines = [fitted.line(row) for row in rows]
    if canvas.headings:
        lines.insert(0, canvas.faint(fitted.heading()))
        hidden = [column.heading for column in shown if column not in fitted.columns]
        if canvas.wide and hidden:
            lines += canvas.paragraph(f"no room for {', '.join(hidden)}: -o json", first="")
    return "".join(line + "\n" for line in lines)
