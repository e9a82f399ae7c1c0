"""A panel: a title, a table of rows that can be walked, filtered and sorted, and a cursor.

It is given a picture (rows and columns) and draws it; it asks nobody. Only the lines in sight are
made, so a thousand rows scroll as fast as ten.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, TypeVar

from rich.style import Style
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from dynctl.screens.columns import GAP, Column, Fitted, fit, visible
from dynctl.screens.numbers import middle
from dynctl.top.filter import RowFilter
from dynctl.top.layout import Wish
from dynctl.top.marks import ACCENT, BOLD, CURSOR, DIM, PLAIN, Line, plain
from dynctl.top.widgets import redraw, strip

Row = TypeVar("Row")
_UNSORTED: Final = -1
#: Columns that nobody sorts by.
_ORDERLESS: Final = ("trend", "trend_prefill", "message", "why")
#: More rows than this are not all measured for their widths each time, but every so often.
_MANY: Final = 100
_SELDOM: Final = 10
_SENTENCES: Final = ("message", "why")


@dataclass(frozen=True, slots=True)
class Picture(Generic[Row]):
    """What a panel shows. ``above``: lines over the table. ``instead``: in its place, where there
    are no rows. ``summary``: beside the title."""

    rows: Sequence[Row] = ()
    columns: Sequence[Column[Row]] = ()
    title: str = ""
    summary: str = ""
    above: Sequence[Line] = ()
    instead: Sequence[str] = field(default_factory=tuple)


class Panel(Widget, Generic[Row], can_focus=True):
    """``number``: the key that brings it into focus. What rows are is said by subclasses."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("home", "edge(0)", show=False),
        Binding("end,G", "edge(1)", show=False),
    ]
    DEFAULT_CSS = "Panel { height: 1; }"

    #: How many lines are enough while another panel is in focus, and who is served first.
    ENOUGH: ClassVar[int] = 8
    ORDER: ClassVar[int] = 0
    #: Whether the cursor stays on top while new rows come in there.
    FOLLOWS: ClassVar[bool] = False

    class Moved(Message):
        """The cursor is on another row, or another panel came into focus."""

    def __init__(self, number: int, *, id: str) -> None:
        super().__init__(id=id)
        self.number = number
        self.picture: Picture[Row] = Picture()
        self.filter = RowFilter()
        #: What is shown is not the present.
        self.faded = False
        self.cursor = 0
        self._sort_key: str | None = None
        self._descending = False
        self._rows: list[Row] = []
        self._key: Hashable = None
        self._top = 0
        self._fitted: Fitted[Row] | None = None
        self._fitted_for = 0
        self._measured = 0
        self._least: dict[str, int] = {}
        self._least_for: object = None
        self._strips: list[Strip] = []

    # -- what subclasses say ---------------------------------------------------------------

    def key(self, row: Row) -> Hashable:
        """What a row is recognised by when the next picture comes."""
        raise NotImplementedError

    def says(self, row: Row) -> str:
        """The words that a filter looks in."""
        return " ".join(column.text(row) for column in self.picture.columns)

    def style(self, row: Row) -> Style:
        """How a whole row is drawn."""
        return PLAIN

    def cell_style(self, row: Row, key: str) -> Style:
        """How one cell is drawn, over the row's style."""
        return PLAIN

    def pieces(self, row: Row, fitted: Fitted[Row]) -> Line:
        """The cells of a row."""
        told: list[tuple[str, Style]] = []
        for column, width in zip(fitted.columns, fitted.widths, strict=True):
            text = column.text(row)
            # Both ends tell names apart; of a sentence the beginning does.
            text = _cut(text, width) if column.key in _SENTENCES else middle(text, width)
            padded = text.rjust(width) if column.right else text.ljust(width)
            told += [(padded, self.cell_style(row, column.key)), (" " * GAP, PLAIN)]
        return told[:-1]

    def hint(self, row: Row) -> str:
        """What a cell has no room for; stands below the panels while the cursor is here."""
        return ""

    # -- content ---------------------------------------------------------------------------

    def show(self, picture: Picture[Row]) -> None:
        """Show a picture; the cursor stays on the row that it was on."""
        self.picture = picture
        self._arrange()

    def set_filter(self, wanted: RowFilter) -> None:
        self.filter = wanted
        self._arrange()

    @property
    def rows(self) -> Sequence[Row]:
        """The rows that are shown, in their order."""
        return self._rows

    @property
    def current(self) -> Row | None:
        """The row that the cursor is on."""
        return self._rows[self.cursor] if self._rows else None

    @property
    def wish(self) -> Wish:
        """How much room it would like."""
        content = len(self._rows) + 1 if self._rows else max(1, len(self.picture.instead))
        return Wish(1 + len(self.picture.above) + content, self.ENOUGH, self.ORDER)

    def sort_next(self) -> None:
        """Sort by the next column that is in sight; after the last one not at all."""
        columns = self._sortable()
        keys = [column.key for column in columns]
        place = keys.index(self._sort_key) if self._sort_key in keys else _UNSORTED
        place += 1
        self._sort_key = keys[place] if place < len(keys) else None
        if self._sort_key is not None:
            # Of numbers the large ones are looked for, of names the first ones.
            self._descending = columns[place].right
        self._from_the_top()

    def reverse(self) -> None:
        """Turn the order around."""
        self._descending = not self._descending
        self._from_the_top()

    def _from_the_top(self) -> None:
        """In another order one looks at what comes first."""
        self.cursor, self._key = 0, None
        self._arrange()

    def _sortable(self) -> list[Column[Row]]:
        shown = self._fitted.columns if self._fitted is not None else self.picture.columns
        return [column for column in shown if column.key not in _ORDERLESS]

    def _arrange(self) -> None:
        """Filter, sort, and find the row again that the cursor was on."""
        rows = self.filter.rows(self.picture.rows, self.says)
        rows = self._sorted(rows)
        follows = self.FOLLOWS and self.cursor == 0 and self._sort_key is None
        self._rows = rows
        # The columns of the last picture say which can be sorted by, until they are drawn anew.
        self._fitted_for = 0
        if not follows and self._key is not None:
            place = next((i for i, row in enumerate(rows) if self.key(row) == self._key), None)
            self.cursor = self.cursor if place is None else place
        self.cursor = max(0, min(self.cursor, len(rows) - 1))
        self._key = self.key(rows[self.cursor]) if rows else None
        self.draw()

    def _sorted(self, rows: list[Row]) -> list[Row]:
        column = next((c for c in self.picture.columns if c.key == self._sort_key), None)
        if column is None:
            return rows[::-1] if self._descending and self._sort_key is None else rows
        value = column.value
        known = [row for row in rows if value(row) is not None]
        unknown = [row for row in rows if value(row) is None]
        return sorted(known, key=value, reverse=self._descending) + unknown

    # -- keys ------------------------------------------------------------------------------

    def action_move(self, by: int) -> None:
        self._go(self.cursor + by)

    def action_page(self, by: int) -> None:
        self._go(self.cursor + by * max(1, self._room() - 1))

    def action_edge(self, last: int) -> None:
        self._go(len(self._rows) - 1 if last else 0)

    def on_focus(self) -> None:
        self.draw()
        self.post_message(self.Moved())

    def on_blur(self) -> None:
        self.draw()

    def on_resize(self) -> None:
        self.draw()

    def _go(self, place: int) -> None:
        place = max(0, min(place, len(self._rows) - 1))
        if place == self.cursor:
            return
        self.cursor = place
        self._key = self.key(self._rows[place])
        self.draw()
        self.post_message(self.Moved())

    # -- drawing ---------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width)

    def draw(self) -> None:
        """Make the lines in sight."""
        width, height = self.size
        if not width or not height:
            return
        lines = [strip(self._title(width), width)]
        if height > 1:
            lines += self._body(width, height - 1)
        redraw(self, self._strips, lines)

    def _body(self, width: int, height: int) -> list[Strip]:
        above = [strip(line, width) for line in self.picture.above[: max(0, height - 3)]]
        if not self._rows:
            instead = self.picture.instead or ("no row matches the filter",)
            texts = instead if not self.picture.rows else ("no row matches the filter",)
            return [*above, *(strip(plain(f" {text}", DIM), width) for text in texts)]
        fitted = self._fit(width - 2)
        lines = [*above, strip(plain(f" {fitted.heading()}", DIM), width)]
        room = height - len(lines)
        self._scroll(room)
        for place in range(self._top, min(self._top + room, len(self._rows))):
            row = self._rows[place]
            base = DIM if self.faded else self.style(row)
            if self.has_focus and place == self.cursor:
                base += CURSOR
            lines.append(strip([(" ", PLAIN), *self.pieces(row, fitted)], width, base))
        return lines

    def _room(self) -> int:
        return max(1, self.size.height - 2 - len(self.picture.above))

    def _scroll(self, room: int) -> None:
        if self.cursor < self._top:
            self._top = self.cursor
        elif self.cursor >= self._top + room:
            self._top = self.cursor - room + 1
        self._top = max(0, min(self._top, len(self._rows) - room))

    def _fit(self, width: int) -> Fitted[Row]:
        """Columns and widths. Widths only grow, so that columns stay where they are.

        Of many rows those in sight are measured each time and the others now and then: a cell
        that gets wider out of sight can wait.
        """
        if self._fitted is not None and self._fitted_for == width:
            return self._fitted
        columns, rows = self.picture.columns, self._rows
        shape = (width, len(rows), tuple(column.key for column in columns))
        self._measured += 1
        if shape != self._least_for:
            self._least_for, self._least, self._measured = shape, {}, 0
        if len(rows) > _MANY and self._measured % _SELDOM:
            rows = rows[self._top : self._top + self.size.height]
        offered = visible(columns, wide=False, width=width)
        fitted = self._fitted = fit(offered, rows, width, self._least)
        self._fitted_for = width
        for column, wide in zip(fitted.columns, fitted.widths, strict=True):
            self._least[column.key] = wide
        return fitted

    def _title(self, width: int) -> Line:
        picture, rows = self.picture, self._rows
        bar = "━" if self.has_focus else "─"
        name = BOLD + ACCENT if self.has_focus else PLAIN
        told = [part for part in (picture.summary, self._arranged()) if part]
        room = self._room()
        if len(rows) > room and self.size.height > 2:
            told.append(f"{self._top + 1}-{min(self._top + room, len(rows))} of {len(rows):,}")
        beside = "  ".join(told)
        title = f" {self.number} {picture.title} "
        beside = middle(beside, max(0, width - len(title) - 6))
        left = width - len(title) - len(beside) - 3 - (1 if beside else 0)
        line: list[tuple[str, Style]] = [(bar, DIM), (title, name)]
        if beside:
            line.append((f"{beside} ", PLAIN))
        return [*line, (bar * max(0, left + 1), DIM)]

    def _arranged(self) -> str:
        parts = []
        if self.filter:
            parts.append(f"/{self.filter.text} ({len(self._rows):,} of {len(self.picture.rows):,})")
        column = next((c for c in self.picture.columns if c.key == self._sort_key), None)
        if column is not None:
            parts.append(f"by {column.heading}{'↓' if self._descending else '↑'}")
        return "  ".join(parts)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 2]}.."


AnyPanel = Panel[Any]
