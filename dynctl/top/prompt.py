"""One line that a person types: behind ``/``, and in the form of thresholds."""

from __future__ import annotations

from rich.style import Style
from textual import events
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from dynctl.top.lines import BOLD, CURSOR, DIM, PLAIN, strip

_LONGEST = 200


class Prompt(Widget, can_focus=True):
    """``label`` stands before what is typed; ``hint`` behind it, ``lasting`` or only while nothing
    is typed yet."""

    DEFAULT_CSS = "Prompt { height: 1; }"

    class Changed(Message):
        """Another text is typed."""

        def __init__(self, prompt: Prompt) -> None:
            super().__init__()
            self.prompt = prompt

    class Submitted(Changed):
        """Enter was pressed."""

    def __init__(
        self, label: str, hint: str = "", *, lasting: bool = False, id: str | None = None
    ) -> None:
        super().__init__(id=id)
        self._lasting = lasting
        self.label = label
        self.hint = hint
        self.value = ""

    def put(self, text: str) -> None:
        """Begin with ``text``."""
        self.value = text
        self.refresh()

    def render_line(self, y: int) -> Strip:
        cursor = CURSOR if self.has_focus else PLAIN
        told: list[tuple[str, Style]] = [(f" {self.label}", BOLD if self.has_focus else PLAIN)]
        told += [(self.value, PLAIN), (" ", cursor)]
        if self.hint and (self._lasting or not self.value):
            told.append((f" {self.hint}", DIM))
        return strip(told, self.size.width)

    def on_key(self, event: events.Key) -> None:
        before = self.value
        if event.key == "enter":
            event.stop()
            self.post_message(self.Submitted(self))
            return
        if event.key == "backspace":
            self.value = before[:-1]
        elif event.key in ("ctrl+u", "ctrl+w"):
            self.value = ""
        elif event.is_printable and event.character is not None:
            self.value = (before + event.character)[:_LONGEST]
        else:
            return
        event.stop()
        event.prevent_default()
        self._changed(before)

    def on_paste(self, event: events.Paste) -> None:
        event.stop()
        before = self.value
        self.value = (before + " ".join(event.text.split()))[:_LONGEST]
        self._changed(before)

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()

    def _changed(self, before: str) -> None:
        if self.value != before:
            self.refresh()
            self.post_message(self.Changed(self))
