"""The form of busy thresholds: edit values, see which ranks turn busy or calm, then set them.

Values are set only after their effect was shown and confirmed with ``y``.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any, ClassVar, Final

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Input

from dynctl.base.errors import DynctlError, UsageProblem
from dynctl.documents.snapshot import Snapshot
from dynctl.documents.thresholds import ModelThresholds, ThresholdChange, rank_effects
from dynctl.screens.canvas import Canvas
from dynctl.screens.numbers import amount, plural
from dynctl.screens.thresholds import THRESHOLDS, threshold_change
from dynctl.sources.source import LiveSource
from dynctl.top.marks import ACCENT, BAD, BOLD, CURSOR, DIM, Line, plain
from dynctl.top.widgets import Lines, Prompt, TextView
from router_core import SETTINGS, ConfigError

Values = dict[str, float | int | None]

_OFF: Final = "off"
_BOUNDS: Final = {
    "active_decode_blocks_threshold": "0..1 of a rank's KV blocks",
    "active_prefill_tokens_threshold": "active prefill tokens",
    "active_prefill_tokens_threshold_frac": "of max_num_batched_tokens",
}
_KEYS: Final = " ↑↓ field  {model}Enter shows the effect  Esc back"
_MODEL: Final = "PgUp PgDn model  "
_SET: Final = " y sets these values on {title}  Esc edits them  ↑↓ scroll"
_READ: Final = " readonly: values can be tried, not set  Esc edits them"


class ThresholdScreen(Screen[bool]):
    """``snapshot`` has the current values. The result is whether values were set."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", show=False),
        Binding("down,tab", "field(1)", show=False, priority=True),
        Binding("up,shift+tab", "field(-1)", show=False, priority=True),
        Binding("pageup", "model(-1)", show=False),
        Binding("pagedown", "model(1)", show=False),
    ]
    DEFAULT_CSS = """
    ThresholdScreen { layout: vertical; background: ansi_default; }
    ThresholdScreen > Lines { height: 1; }
    ThresholdScreen > #explained { height: 2; }
    """

    def __init__(self, source: LiveSource, snapshot: Snapshot, *, readonly: bool) -> None:
        super().__init__()
        self._source = source
        self._snapshot = snapshot
        self._readonly = readonly
        self._models = sorted(snapshot.thresholds)
        self._model = 0
        self._tried: Values | None = None
        self._head = Lines()
        self._explained = Lines(id="explained")
        self._fields = [
            Prompt(f"{label:<17} ", _BOUNDS[name], field=True, id=name)
            for name, label, _ in THRESHOLDS
        ]
        self.effect = TextView()
        self._foot = Lines(base=CURSOR)

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._explained
        yield from self._fields
        yield self.effect
        yield self._foot

    def on_mount(self) -> None:
        self.set_focus(self._fields[0].input)
        self._begin()

    def on_resize(self) -> None:
        self._draw()

    @property
    def model(self) -> str:
        return self._models[self._model]

    def values(self) -> Values:
        """The edited values that differ from the current ones. Raises UsageProblem."""
        present = self._snapshot.thresholds[self.model]
        found: Values = {}
        for field in self._fields:
            name, text = str(field.id), field.value.strip()
            try:
                value = None if text in ("", _OFF, "none") else SETTINGS[name].parse(text)
            except ConfigError as error:
                raise UsageProblem(f"{field.label}: {error}") from None
            if value != present.get(name):
                found[name] = value
        return found

    # -- keys ------------------------------------------------------------------------------

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.run_worker(self._try(), exclusive=True)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._tried = None
        # What is shown is about the values before.
        self.effect.show("")
        self._draw()

    def on_key(self, event: events.Key) -> None:
        if event.key == "y" and self.effect.has_focus and self._tried:
            event.stop()
            self.run_worker(self._set(self._tried), exclusive=True)

    def action_field(self, by: int) -> None:
        if self.effect.has_focus:
            self.effect.action_scroll(by)
            return
        place = next((i for i, field in enumerate(self._fields) if field.input.has_focus), 0)
        self.set_focus(self._fields[(place + by) % len(self._fields)].input)

    def action_model(self, by: int) -> None:
        self._model = (self._model + by) % len(self._models)
        self._begin()

    def action_back(self) -> None:
        if self.effect.has_focus:
            self.set_focus(self._fields[0].input)
            self._tried = None
            self._draw()
        else:
            self.dismiss(False)

    # -- trying and setting ----------------------------------------------------------------

    async def _try(self) -> None:
        try:
            values = self.values()
            if not values:
                self.effect.show("no change: these are the current values")
                return
            judged = await self._source.judged(self.model, values)
        except DynctlError as error:
            self._failed(error)
            return
        self.effect.show(self._change(values, judged, applied=False))
        self._tried = values
        self.set_focus(self.effect)
        self._draw()

    async def _set(self, values: Values) -> None:
        if self._readonly:
            return
        self._tried = None
        try:
            after = await self._source.set_thresholds(self.model, values)
        except DynctlError as error:
            self._failed(error)
            return
        changes = ", ".join(
            f"{label} {_text(after.get(name))}" for name, label, _ in THRESHOLDS if name in values
        )
        self.app.show_message(f"{self.model}: set {changes}")  # type: ignore[attr-defined]
        self.dismiss(True)

    def _change(self, values: Values, judged: Sequence[Any], *, applied: bool) -> str:
        rows = [row for row in self._snapshot.workers if row.model == self.model]
        before = self._snapshot.thresholds[self.model]
        change = ThresholdChange(
            self._source.title,
            ModelThresholds(self.model, **_named(before)),
            ModelThresholds(self.model, **_named({**before, **values})),
            applied,
            rank_effects(rows, [row for row in judged if row.model == self.model]),
        )
        return threshold_change(change, Canvas(max(40, self.size.width - 1)))

    def _failed(self, error: DynctlError) -> None:
        lines = [error.message, *error.hint.splitlines()]
        room = max(40, self.size.width - 1)
        self.effect.show("\n".join(part for line in lines for part in wrap(line, room)))

    # -- drawing ---------------------------------------------------------------------------

    def _begin(self) -> None:
        for field in self._fields:
            field.put(_text(self._snapshot.thresholds[self.model].get(str(field.id))))
        self._tried = None
        self.effect.show("")
        self._draw()

    def _draw(self) -> None:
        which = f"  {self._model + 1} of {len(self._models)}" if len(self._models) > 1 else ""
        workers = plural(sum(row.model == self.model for row in self._snapshot.workers), "worker")
        head = f" busy thresholds of {self.model}, {workers}{which}"
        self._head.show([[(head, BOLD + ACCENT)]])
        self._explained.show(
            [
                plain(
                    " A rank over any threshold is busy. A worker gets no new requests while", DIM
                ),
                plain(" all its ranks are busy. off disables a threshold.", DIM),
            ]
        )
        keys: Line = plain(_KEYS.format(model=_MODEL if len(self._models) > 1 else ""))
        if self._tried is not None:
            keys = plain(_READ, BAD) if self._readonly else plain(self._question(), BOLD)
        self._foot.show([keys])

    def _question(self) -> str:
        return _SET.format(title=self._source.title)


def _text(value: float | int | None) -> str:
    return _OFF if value is None else amount(value).replace(",", "")


def _named(values: dict[str, float | int | None]) -> dict[str, Any]:
    return {name: values.get(name) for name, _, _ in THRESHOLDS}
