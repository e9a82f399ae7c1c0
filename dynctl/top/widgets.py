"""Widgets: lines, scrolling text, a screen of text, a prompt. Only changed lines are drawn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input, Label

from dynctl.base.errors import DynctlError
from dynctl.base.terminal import printable
from dynctl.screens.canvas import Canvas
from dynctl.top.details import Draw
from dynctl.top.marks import ACCENT, BOLD, CURSOR, DIM, PLAIN, Line, plain


def strip(line: Line, width: int, base: Style = PLAIN) -> Strip:
    """A line on ``width`` cells; ``base``: the style under all of it."""
    segments = [Segment(text, base + style if base else style) for text, style in line if text]
    return Strip(segments).adjust_cell_length(width, base).simplify()


class Lines(Widget):
    """Lines from the top; the rest is cut."""

    DEFAULT_CSS = "Lines { height: 1; }"

    def __init__(self, *, id: str | None = None, base: Style = PLAIN) -> None:
        super().__init__(id=id)
        self._base = base
        self._lines: list[Line] = []
        self._strips: list[Strip] = []

    def show(self, lines: Sequence[Line]) -> None:
        """Replace the lines."""
        self._lines = list(lines)
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def render_line(self, y: int) -> Strip:
        if y < len(self._strips):
            return self._strips[y]
        return Strip.blank(self.size.width, self._base)

    def _draw(self) -> None:
        width = self.size.width
        redraw(self, self._strips, [strip(line, width, self._base) for line in self._lines])


def redraw(widget: Widget, shown: list[Strip], fresh: list[Strip]) -> None:
    """Replace ``shown`` by ``fresh`` and draw the lines that differ."""
    width, height = widget.size
    changed = [
        y
        for y in range(min(height, max(len(shown), len(fresh))))
        if y >= len(shown) or y >= len(fresh) or shown[y] != fresh[y]
    ]
    shown[:] = fresh
    if not changed:
        return
    if len(changed) * 2 > height:
        widget.refresh()
    else:
        widget.refresh(*(Region(0, y, width, 1) for y in changed))


Read = Callable[[], Awaitable[Draw]]
"""Reads what is to be drawn. A DynctlError is shown instead."""


class TextView(Widget, can_focus=True):
    """Text that scrolls."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "scroll(1)", show=False),
        Binding("up,k", "scroll(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("home", "edge(0)", show=False),
        Binding("end,G", "edge(1)", show=False),
    ]
    DEFAULT_CSS = "TextView { height: 1fr; }"

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Line] = []
        self._top = 0
        self._strips: list[Strip] = []

    def show(self, text: str) -> None:
        """Show ``text``, which may contain a canvas's escape codes."""
        self._lines = [_line(one) for one in text.rstrip("\n").split("\n")]
        self._draw()

    @property
    def position(self) -> str:
        """The visible lines, ``1-22 of 24``; empty if all are visible."""
        height, total = self.size.height, len(self._lines)
        return f"{self._top + 1}-{min(self._top + height, total)} of {total}" * (total > height)

    def on_resize(self) -> None:
        self._draw()

    def render_line(self, y: int) -> Strip:
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width)

    def action_scroll(self, by: int) -> None:
        self._go(self._top + by)

    def action_page(self, by: int) -> None:
        self._go(self._top + by * max(1, self.size.height - 1))

    def action_edge(self, last: int) -> None:
        self._go(len(self._lines) if last else 0)

    def _go(self, top: int) -> None:
        self._top = max(0, min(top, len(self._lines) - self.size.height))
        self._draw()

    def _draw(self) -> None:
        width, height = self.size
        self._top = max(0, min(self._top, len(self._lines) - height))
        shown = self._lines[self._top : self._top + height]
        redraw(self, self._strips, [strip(line, width) for line in shown])
        if isinstance(self.screen, TextScreen):
            self.screen.moved()


class TextScreen(Screen[None]):
    """A screen of text below ``title``. ``read`` is called once."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "back", "back"),
    ]
    DEFAULT_CSS = """
    TextScreen { layout: vertical; background: ansi_default; }
    TextScreen > Lines { height: 1; }
    """

    def __init__(self, title: str, read: Read, keys: str = "") -> None:
        super().__init__()
        self._title = title
        self._read = read
        self._keys = keys
        self._draw_text: Draw | None = None
        self.view = TextView()
        self._head = Lines()
        self._foot = Lines(base=CURSOR)

    def compose(self) -> ComposeResult:
        yield self._head
        yield self.view
        yield self._foot

    async def on_mount(self) -> None:
        self.set_focus(self.view)
        self.view.show("reading ..")
        self.run_worker(self._load(), exclusive=True)

    def on_resize(self) -> None:
        self._show()

    def action_back(self) -> None:
        self.dismiss()

    def moved(self) -> None:
        """Show the position in the text."""
        title = [(f" {self._title}  ", BOLD + ACCENT), (self.view.position, DIM)]
        self._head.show([title])
        keys = f"{self._keys}  " if self._keys else ""
        self._foot.show([plain(f" Esc back  ↑↓ PgUp PgDn scroll  {keys}".rstrip())])

    async def _load(self) -> None:
        try:
            self._draw_text = await self._read()
        except DynctlError as error:
            lines = [error.message, *(f"  {line}" for line in error.hint.splitlines())]
            self.view.show("\n".join(lines))
            return
        self._show()

    def _show(self) -> None:
        if self._draw_text is not None:
            width = max(40, self.size.width - 1)
            self.view.show(self._draw_text(Canvas(width, color=True)))
        self.moved()


#: The escape codes of a canvas.
_WEIGHTS: Final = {"1": BOLD, "2": DIM, "0": PLAIN}


def _line(text: str) -> Line:
    """A line with the canvas's escape codes as styles."""
    first, *rest = text.split("\x1b[")
    pieces = [(printable(first), PLAIN)]
    for part in rest:
        code, _, words = part.partition("m")
        pieces.append((printable(words), _WEIGHTS.get(code, PLAIN)))
    return pieces


_LONGEST: Final = 200


class _Line(Input):
    """An Input whose editing keys act in the order of typing, even when keys arrive in a burst.

    Textual lets bound keys travel up to the app first, so letters would overtake a backspace.
    """

    _ACTIONS: ClassVar[dict[str, str]] = {
        key: binding.action
        for binding in Input.BINDINGS
        if isinstance(binding, Binding)
        for key in binding.key.split(",")
    }

    async def _on_key(self, event: events.Key) -> None:
        action = self._ACTIONS.get(event.key)
        if action is None:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()
        await self.run_action(action)


class Prompt(Horizontal):
    """An input line behind a label.

    ``field``: the input is a field of a form. Its text is selected when it gets the focus, so that
    typing replaces it, and ``hint`` stays behind it. Otherwise the hint shows only while the input
    is empty.
    """

    DEFAULT_CSS = """
    Prompt { height: 1; padding-left: 1; }
    Prompt Label { width: auto; }
    Prompt .hint { text-style: dim; }
    Prompt:focus-within .label { text-style: bold; }
    Prompt Input, Prompt Input:focus {
        width: 1fr; height: 1; border: none; padding: 0; background: ansi_default;
        & > .input--cursor { color: ansi_default; background: ansi_default; text-style: reverse; }
        & > .input--placeholder { color: ansi_default; text-style: dim; }
        & > .input--selection {
            color: ansi_default; background: ansi_default; text-style: reverse;
        }
    }
    Prompt.-field Input { width: 16; }
    """

    def __init__(self, label: str, hint: str = "", *, field: bool = False, id: str) -> None:
        super().__init__(id=id, classes="-field" if field else "")
        self.label = label.strip()
        self.input = _Line(
            placeholder="" if field else hint, max_length=_LONGEST, select_on_focus=field
        )
        self.input.cursor_blink = False
        self._label = Label(label, markup=False, classes="label")
        self._hint = Label(hint if field else "", markup=False, classes="hint")

    def compose(self) -> ComposeResult:
        yield self._label
        yield self.input
        yield self._hint

    @property
    def value(self) -> str:
        return self.input.value

    def put(self, text: str) -> None:
        """Replace the text. A field that has the focus selects it, else the cursor goes to its
        end."""
        self.input.value = text
        self.input.cursor_position = len(text)
        if self.input.select_on_focus and self.input.has_focus:
            self.input.action_select_all()
