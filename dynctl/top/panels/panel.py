"""A panel: a title and a table with a cursor, which users filter and sort.

It draws the picture (rows and columns) that it is given. Only the visible lines are built, so a
thousand rows scroll as fast as ten (docs/decisions/0019).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, Generic, TypeVar

from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from dynctl.screens.columns import Column, Fitted, fit, visible
from dynctl.screens.numbers import middle, plural
from dynctl.top.filter import RowFilter
from dynctl.top.layout import Wish
from dynctl.top.marks import ACCENT, BOLD, CURSOR, DIM, PLAIN, Line, plain
from dynctl.top.panels.content import PanelContent, Picture, Scene
from dynctl.top.widgets import redraw, strip

Row = TypeVar("Row")
_UNSORTED: Final = -1
#: Columns without an order.
_ORDERLESS: Final = ("trend", "trend_prefill", "message", "why")
#: With more rows than this, column widths are measured over all rows only every _SELDOM times.
_MANY: Final = 100
_SELDOM: Final = 10


class Panel(Widget, Generic[Row], can_focus=True):
    """``number``: the key that moves the focus here. ``content``: what it shows."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("home", "edge(0)", show=False),
        Binding("end,G", "edge(1)", show=False),
    ]
    DEFAULT_CSS = "Panel { height: 1; }"

    class Moved(Message):
        """The cursor moved, or another panel got the focus."""

    def __init__(self, number: int, content: PanelContent[Row]) -> None:
        super().__init__(id=content.NAME)
        self.number = number
        self.content = content
        self.filter = RowFilter()
        #: Whether the data is out of date.
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
        #: Columns that did not fit this width once; they do not return.
        self._left: set[str] = set()
        self._resized = False
        self._width = 0
        self._strips: list[Strip] = []

    # -- content ---------------------------------------------------------------------------

    @property
    def picture(self) -> Picture[Row]:
        """The rows and columns before filter and order."""
        return self.content.picture

    def show(self, scene: Scene) -> None:
        """Show a scene; the cursor stays on its row, and columns that were there stay."""
        self.faded = bool(scene.snapshot.problem)
        picture = self.content.take(scene)
        if self._resized:  # what was measured belongs to the columns of another width
            self._resized, self._least_for = False, None
        elif picture.title == self.picture.title:
            picture = replace(picture, columns=steady(self.picture.columns, picture.columns))
        self.content.picture = picture
        self._arrange()

    def set_filter(self, wanted: RowFilter) -> None:
        self.filter = wanted
        self._arrange()

    def go_to(self, wanted: Callable[[Row], bool]) -> bool:
        """Move the cursor to the first row that is wanted; whether there is one."""
        place = next((i for i, row in enumerate(self._rows) if wanted(row)), None)
        if place is None:
            return False
        self._go(place)
        return True

    @property
    def rows(self) -> Sequence[Row]:
        """The rows that are shown, in their order."""
        return self._rows

    @property
    def current(self) -> Row | None:
        """The row under the cursor."""
        return self._rows[self.cursor] if self._rows else None

    @property
    def wish(self) -> Wish:
        """The lines that the panel can fill."""
        return self.content.wish(self._rows)

    def sort_next(self) -> None:
        """Sort by the next visible column; after the last one, use the original order."""
        columns = self._sortable()
        keys = [column.key for column in columns]
        place = keys.index(self._sort_key) if self._sort_key in keys else _UNSORTED
        place += 1
        self._sort_key = keys[place] if place < len(keys) else None
        # Numbers start with the largest, names with the first.
        self._descending = self._sort_key is not None and columns[place].right
        self._from_the_top()

    def reverse(self) -> None:
        """Reverse the order."""
        self._descending = not self._descending
        self._from_the_top()

    def _from_the_top(self) -> None:
        """Move the cursor to the first row of the new order."""
        self.cursor, self._key = 0, None
        self._arrange()

    def _sortable(self) -> list[Column[Row]]:
        shown = self._fitted.columns if self._fitted is not None else self.picture.columns
        return [column for column in shown if column.key not in _ORDERLESS]

    def _arrange(self) -> None:
        """Filter, sort, and keep the cursor on its row."""
        rows = list(self.picture.rows)
        if self.filter:
            rows = [row for row in rows if self.content.keeps(row, self.filter)]
        rows = self._sorted(rows)
        follows = self.content.FOLLOWS and self.cursor == 0 and self._sort_key is None
        self._rows = rows
        # Sorting uses the columns of the last picture until the new ones are fitted.
        self._fitted_for = 0
        if not follows and self._key is not None:
            place = next(
                (i for i, row in enumerate(rows) if self.content.key(row) == self._key), None
            )
            self.cursor = self.cursor if place is None else place
        self.cursor = max(0, min(self.cursor, len(rows) - 1))
        self._key = self.content.key(rows[self.cursor]) if rows else None
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

    def on_resize(self, event: events.Resize) -> None:
        self._resized = self._resized or event.size.width != self._width
        self._width = event.size.width
        self.draw()

    def _go(self, place: int) -> None:
        place = max(0, min(place, len(self._rows) - 1))
        if place == self.cursor:
            return
        self.cursor = place
        self._key = self.content.key(self._rows[place])
        self.draw()
        self.post_message(self.Moved())

    # -- drawing ---------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width)

    def draw(self) -> None:
        """Build the visible lines."""
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
            total = len(self.picture.rows)
            match = f"0 of {plural(total, 'row')} match /{self.filter.text}"
            texts = (match,) if total else self.picture.instead
            return [*above, *(strip(plain(f" {text}", DIM), width) for text in texts)]
        fitted = self._fit(width - 2)
        lines = [*above, strip(plain(f" {fitted.heading()}", DIM), width)]
        room = height - len(lines)
        self._scroll(room)
        for place in range(self._top, min(self._top + room, len(self._rows))):
            row = self._rows[place]
            base = DIM if self.faded else self.content.style(row)
            if self.has_focus and place == self.cursor:
                base += CURSOR
            pieces = self.content.pieces(row, fitted, width - 2)
            lines.append(strip([(" ", PLAIN), *pieces], width, base))
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
        """Columns and widths. Widths only grow, and a column that did not fit does not return, so
        that columns do not move while the width of the screen stays the same.

        With many rows, the visible ones are measured each time and the others from time to time.
        """
        if self._fitted is not None and self._fitted_for == width:
            return self._fitted
        columns, rows = self.picture.columns, self._rows
        shape = (width, self.picture.title)
        self._measured += 1
        if shape != self._least_for:
            self._least_for, self._least, self._measured = shape, dict(self.content.RESERVED), 0
            self._left = set()
        if len(rows) > _MANY and self._measured % _SELDOM:
            rows = rows[self._top : self._top + self.size.height]
        offered = [
            column
            for column in visible(columns, wide=False, width=width)
            if column.key not in self._left
        ]
        fitted = fit(offered, rows, width, self._least)
        left = {column.key for column in offered} - {column.key for column in fitted.columns}
        if left:  # the others get the room of those that leave, now and not with the next picture
            self._left |= left
            fitted = fit(fitted.columns, rows, width, self._least)
        self._fitted, self._fitted_for = fitted, width
        for column, wide in zip(fitted.columns, fitted.widths, strict=True):
            self._least[column.key] = wide
        return fitted

    def _title(self, width: int) -> Line:
        picture, rows = self.picture, self._rows
        bar = "━" if self.has_focus else "─"
        name = BOLD + ACCENT if self.has_focus else PLAIN
        parts = [part for part in (picture.summary, self._arrangement()) if part]
        room = self._room()
        if len(rows) > room and self.size.height > 2:
            parts.append(f"{self._top + 1}-{min(self._top + room, len(rows))} of {len(rows):,}")
        beside = "  ".join(parts)
        title = f" [{self.number}] {picture.title} "
        if picture.count:
            title += f"({picture.count}) "
        beside = middle(beside, max(0, width - len(title) - 6))
        left = width - len(title) - len(beside) - 3 - (1 if beside else 0)
        line: list[tuple[str, Style]] = [(bar, DIM), (title, name)]
        if beside:
            line.append((f"{beside} ", PLAIN))
        return [*line, (bar * max(0, left + 1), DIM)]

    def _arrangement(self) -> str:
        """The filter and the sort order."""
        parts = []
        if self.filter:
            parts.append(f"/{self.filter.text} ({len(self._rows):,} of {len(self.picture.rows):,})")
        column = next((c for c in self.picture.columns if c.key == self._sort_key), None)
        if column is not None:
            parts.append(f"by {column.heading}{'↓' if self._descending else '↑'}")
        return "  ".join(parts)


def steady(before: Sequence[Column[Row]], now: Sequence[Column[Row]]) -> list[Column[Row]]:
    """The columns of ``now``, and between them those of ``before`` that are not among them."""
    columns = list(now)
    keys = [column.key for column in now]
    for place, column in enumerate(before):
        if column.key in keys:
            continue
        earlier = [other.key for other in before[:place] if other.key in keys]
        at = keys.index(earlier[-1]) + 1 if earlier else 0
        columns.insert(at, column)
        keys.insert(at, column.key)
    return columns


AnyPanel = Panel[Any]
