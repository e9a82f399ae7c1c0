"""What a panel of ``top`` shows: rows, columns and texts, without a terminal.

The widget in ``panel.py`` draws a content on the dashboard, and ``top --once`` prints it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from rich.style import Style

from dynctl.documents.snapshot import Alert, DomainView, Snapshot
from dynctl.documents.workers import WorkerRow
from dynctl.screens.canvas import Canvas
from dynctl.screens.cells import pad_cells
from dynctl.screens.columns import GAP, Column, Fitted, table
from dynctl.top.filter import RowFilter
from dynctl.top.history import History
from dynctl.top.layout import Wish
from dynctl.top.marks import PLAIN, Line

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Scene:
    """What all panels draw from. ``now``: wall-clock seconds. ``history`` and ``width`` (of the
    screen): None for one frame as text. ``watched_s``: the seconds that shares of crossing
    hand-offs cover; 0: since the start. ``zones``: the values of the domain that the fleet is
    grouped by, in the order of their colours."""

    snapshot: Snapshot
    view: DomainView
    alerts: Sequence[Alert]
    now: float
    history: History | None = None
    watched_s: float = 0.0
    width: int | None = None
    zones: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Picture(Generic[Row]):
    """The rows of a panel. ``above``: lines over the table. ``instead``: shown if there are no
    rows. ``count``: how many rows there are, in the title. ``summary``: beside the title."""

    rows: Sequence[Row] = ()
    columns: Sequence[Column[Row]] = ()
    title: str = ""
    count: str = ""
    summary: str = ""
    above: Sequence[Line] = ()
    instead: Sequence[str] = field(default_factory=tuple)


class PanelContent(ABC, Generic[Row]):
    """The content of one panel; a subclass for each kind of row."""

    #: The name that ``:`` takes, and the id of the widget.
    NAME: ClassVar[str]
    #: Lines that suffice while another panel is in focus; panels with a lower order come first.
    ENOUGH: ClassVar[int] = 8
    ORDER: ClassVar[int] = 0
    #: Column -> cells that it always has, so that a longer word there moves no other column.
    RESERVED: ClassVar[Mapping[str, int]] = {}
    #: Whether a cursor on the first row stays there when new rows arrive on top.
    FOLLOWS: ClassVar[bool] = False

    def __init__(self) -> None:
        self.zones: Sequence[str] = ()
        #: The workers of the snapshot by name: a filter's words are about them.
        self.members: Mapping[str, WorkerRow] = {}
        #: Seconds between two load reports; None if unknown.
        self.every_s: float | None = None
        self.picture: Picture[Row] = Picture()

    def take(self, scene: Scene) -> Picture[Row]:
        """The picture of a scene; rows are judged by this scene from now on."""
        self.zones = scene.zones
        self.members = {row.name: row for row in scene.snapshot.workers}
        self.every_s = scene.snapshot.load_every_s
        return self.picture_of(scene)

    # -- each panel has these --------------------------------------------------------------

    @abstractmethod
    def picture_of(self, scene: Scene) -> Picture[Row]:
        """The rows and columns of a scene."""

    @abstractmethod
    def title(self, scene: Scene) -> str:
        """The title above the rows in ``top --once``."""

    @abstractmethod
    def lines(self, scene: Scene, canvas: Canvas) -> Iterator[str]:
        """The rows in ``top --once``."""

    @abstractmethod
    def key(self, row: Row) -> Hashable:
        """The identity of a row in successive pictures."""

    @abstractmethod
    def row_name(self, row: Row) -> str:
        """A row's name in titles."""

    @abstractmethod
    def workers_of(self, row: Row) -> set[str]:
        """The workers that a row is about; its log has their decisions and findings."""

    @abstractmethod
    def describe(self, row: Row, scene: Scene, canvas: Canvas) -> str:
        """``d``: all that is known about a row."""

    def words(self, row: Row) -> str:
        """The words that a filter can match."""
        return " ".join(column.cell(row) for column in self.picture.columns)

    def keeps(self, row: Row, wanted: RowFilter) -> bool:
        """Whether the filter keeps a row."""
        return wanted.keeps(self.words(row).lower())

    def style(self, row: Row) -> Style:
        """The style of a row."""
        return PLAIN

    def cell_style(self, row: Row, key: str) -> Style:
        """The style of one cell, over the row's style."""
        return PLAIN

    def pieces(self, row: Row, fitted: Fitted[Row], room: int) -> Line:
        """The cells of a row, in ``room`` cells of the terminal."""
        pieces: list[tuple[str, Style]] = []
        for column, width in zip(fitted.columns, fitted.widths, strict=True):
            # Names differ at both ends, sentences at the beginning.
            text = column.shorten(column.cell(row), width)
            shown = pad_cells(text, width, right=column.right)
            pieces += [(shown, self.cell_style(row, column.key)), (" " * GAP, PLAIN)]
        return pieces[:-1]

    def hint(self, row: Row) -> str:
        """More about a row, shown below the panels while the cursor is on it."""
        return ""

    def wish(self, rows: Sequence[Row]) -> Wish:
        """The lines that the panel can fill with ``rows``."""
        content = len(rows) + 1 if rows else max(1, len(self.picture.instead))
        return Wish(1 + len(self.picture.above) + content, self.ENOUGH, self.ORDER)


AnyContent = PanelContent[Any]


def table_lines(
    columns: Sequence[Column[Any]], rows: Sequence[Any], canvas: Canvas
) -> Iterator[str]:
    """A table in ``top --once``."""
    yield from table(columns, rows, canvas).splitlines()
