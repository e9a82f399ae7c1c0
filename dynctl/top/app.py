"""The app of `dynctl top`: one source, one snapshot after the other, four panels.

Widgets are given pictures and ask nobody. The app asks the source, in one task of its own; keys
that need more (a decision explained, thresholds tried) ask it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import wrap
from typing import ClassVar, Final

from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.message import Message
from textual.widgets import Input

from dynctl.base.errors import ExitCode
from dynctl.documents.snapshot import Alert, DomainView, Snapshot
from dynctl.sources.alerts import AlertBoard
from dynctl.sources.domains import DomainBoard
from dynctl.sources.source import LiveSource
from dynctl.top.actions import Opening
from dynctl.top.custody import ReadChain, registered_chain
from dynctl.top.filter import RowFilter
from dynctl.top.header import State, header
from dynctl.top.history import History
from dynctl.top.keys import BINDINGS, FOOTER, OWN
from dynctl.top.layout import CSS, THEME, heights
from dynctl.top.marks import BAD, BOLD, CURSOR, DIM, Line, plain
from dynctl.top.panels.alerts import AlertPanel, alert_picture
from dynctl.top.panels.decisions import DecisionPanel, decision_picture
from dynctl.top.panels.domains import DomainPanel, domain_picture
from dynctl.top.panels.panel import AnyPanel, Panel
from dynctl.top.panels.workers import WorkerPanel, worker_picture
from dynctl.top.widgets import Lines, Prompt

RATES: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
#: Screens of this height have a second line for what a row has no room for.
_ROOMY: Final = 30
#: How long a message stands in the place of the keys.
NOTICE_S: Final = 6.0
#: Shares of crossing hand-offs are of the last minutes once there was a minute to look at.
_WATCHED_S: Final = 60.0


class TopApp(App[int]):
    """Shows ``source``, which is entered already.

    ``rate``: seconds between two looks. ``domain``: what to group by at first. ``wall``: seconds
    since the epoch, for ages. ``chain`` reads where a worker's topology came from; ``directory``
    is where exports go.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "dynctl top"
    CSS = CSS
    BINDINGS: ClassVar[list[BindingType]] = BINDINGS

    class Looked(Message):
        """The source was read."""

        def __init__(self, snapshot: Snapshot) -> None:
            super().__init__()
            self.snapshot = snapshot

    def __init__(
        self,
        source: LiveSource,
        *,
        rate: float = 1.0,
        domain: str | None = None,
        readonly: bool = False,
        chain: ReadChain = registered_chain,
        wall: Callable[[], float] = time.time,
        directory: Path = Path(),
    ) -> None:
        super().__init__(ansi_color=True)
        self.opening = Opening(self, chain, directory)
        self.source = source
        self.rate = rate
        self.readonly = readonly
        self.paused = False
        self.snapshot: Snapshot | None = None
        self.view: DomainView | None = None
        self.alerts: tuple[Alert, ...] = ()
        self.wall = wall
        self._domain = domain
        self._zoomed = False
        self._notice = ""
        self._notice_until = 0.0
        self._wake = asyncio.Event()
        self._board = DomainBoard()
        self._alert_board = AlertBoard()
        self._history = History()
        self.domains = DomainPanel(1, id="domains")
        self.workers_panel = WorkerPanel(2, id="workers")
        self.decisions = DecisionPanel(3, id="decisions")
        self.alerts_panel = AlertPanel(4, id="alerts")
        self.panels: tuple[AnyPanel, ...] = (
            self.domains,
            self.workers_panel,
            self.decisions,
            self.alerts_panel,
        )
        self._last_panel: AnyPanel = self.decisions
        self._head = Lines(id="head")
        self._prompt = Prompt("/", "words that must be in the row; !word must not", id="prompt")
        self._hint = Lines(id="hint")
        self._foot = Lines(id="foot", base=CURSOR)

    def compose(self) -> ComposeResult:
        yield self._head
        yield from self.panels
        yield self._prompt
        yield self._hint
        yield self._foot

    def on_mount(self) -> None:
        self.register_theme(THEME)
        self.theme = THEME.name
        self.screen.set_focus(self.decisions)
        self.run_worker(self._look(), name="look", exit_on_error=True)
        self.set_interval(1.0, self._tick)
        self._show_frame()

    # -- failing ---------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """What ended the app before the person did; a defect of ours."""
        error = self._exception
        return getattr(error, "error", None) or error

    def _print_error_renderables(self) -> None:
        """Textual would print a page of traceback; who ran the app says what there is to say."""
        self._exit_renderables.clear()

    # -- looking ---------------------------------------------------------------------------

    async def _look(self) -> None:
        """Ask the source again and again; a key may ask at once."""
        while True:
            began = time.monotonic()
            self._wake.clear()
            if not self.paused:
                self.post_message(self.Looked(await self.source.snapshot()))
            left = self.rate - (time.monotonic() - began)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, left)):
                    await self._wake.wait()

    def look_now(self) -> None:
        """Ask the source without waiting for the next turn."""
        self._wake.set()

    def on_top_app_looked(self, message: Looked) -> None:
        self.take(message.snapshot)

    def take(self, snapshot: Snapshot) -> None:
        """Show a snapshot."""
        self.snapshot = snapshot
        self._history.add(snapshot)
        self._show_all()

    def _show_all(self) -> None:
        """Give every panel its picture of the present snapshot."""
        snapshot = self.snapshot
        if snapshot is None:
            return
        watched = self._history.watched(snapshot.at)
        recent = watched >= _WATCHED_S
        transfers = self._history.recent_transfers(snapshot) if recent else None
        view = self.view = self._board.view(snapshot, self._domain, transfers)
        self.alerts = self._alert_board.alerts(snapshot, self._board.capacity(snapshot))
        now = self.wall()
        self.workers_panel.every_s = snapshot.load_every_s
        for panel in self.panels:
            panel.faded = bool(snapshot.problem)
        since = watched if recent else 0.0
        self.domains.show(domain_picture(view, snapshot, self._history, since, self.size.width))
        self.workers_panel.show(worker_picture(snapshot))
        self.decisions.show(decision_picture(snapshot, view.domain, now, self.size.width))
        self.alerts_panel.show(alert_picture(self.alerts, now))
        self._arrange()
        self._show_frame()

    def _tick(self) -> None:
        """The clock, and what gets old while nobody answers."""
        self._show_frame()

    # -- the frame -------------------------------------------------------------------------

    def on_resize(self) -> None:
        self._arrange()
        self._show_frame()
        # Wider screens get other columns, once the panels know how wide they are.
        self.call_after_refresh(self._show_all)

    def on_panel_moved(self) -> None:
        self._arrange()
        self._show_frame()

    @property
    def focused_panel(self) -> AnyPanel:
        """The panel in focus, or the one that was before the prompt came."""
        return self.focused if isinstance(self.focused, Panel) else self._last_panel

    def _arrange(self) -> None:
        """Give each panel its height."""
        if not self.domains.is_mounted:
            return
        panel = self.focused_panel
        self._last_panel = panel
        typing = bool(self._prompt.display)
        hint = 2 if self.size.height >= _ROOMY else 1
        if self._hint.styles.height is None or self._hint.styles.height.value != hint:
            self._hint.styles.height = hint
        total = self.size.height - 3 - hint - typing
        wishes = [one.wish for one in self.panels]
        given = heights(total, wishes, self.panels.index(panel), zoomed=self._zoomed)
        for one, height in zip(self.panels, given, strict=True):
            if one.styles.height is None or one.styles.height.value != height:
                one.styles.height = height

    def _show_frame(self) -> None:
        width = self.size.width
        snapshot, now = self.snapshot, self.wall()
        state = State(self.rate, paused=self.paused, readonly=self.readonly)
        self._head.show(header(snapshot, self.view, self.source.title, state, width, now))
        if self._notice and now >= self._notice_until:
            self._notice = ""
        hint = self._hint_lines(width)
        if self._notice:
            # One that is too long for the line of keys begins above it.
            *above, last = wrap(self._notice, max(1, width - 2))
            self._hint.show([plain(f" {line}", BOLD) for line in above] or hint)
            self._foot.show([plain(f" {last}", BOLD)])
        else:
            self._hint.show(hint)
            keys = next((keys for keys in FOOTER if len(keys) + 2 <= width), FOOTER[-1])
            self._foot.show([plain(f" {keys}", DIM)])

    def _hint_lines(self, width: int) -> list[Line]:
        """What stands below the panels: why this is not the present, else what the row under the
        cursor has no room for."""
        snapshot, panel = self.snapshot, self.focused_panel
        row = panel.current
        text, style = (panel.hint(row) if row is not None else ""), DIM
        if snapshot is not None and snapshot.problem:
            text, style = snapshot.problem, BAD
        room = max(1, width - 2)
        lines = wrap(text, room)[: 2 if self.size.height >= _ROOMY else 1]
        if lines and len(" ".join(lines)) < len(text):
            lines[-1] = f"{lines[-1][: room - 2]}.."
        return [plain(f" {line}", style) for line in lines]

    def say(self, text: str) -> None:
        """A message for the person, in the place of the keys for a few seconds."""
        self._notice, self._notice_until = text, self.wall() + NOTICE_S
        self._show_frame()

    # -- keys ------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys are the panels' own: over another screen, and while somebody types, only Ctrl-C
        (and Esc out of the line that is typed) mean something here."""
        if action == "leave" and parameters == (int(ExitCode.INTERRUPTED),):
            return True
        if action not in OWN or len(self.screen_stack) > 1:
            return action not in OWN
        return action == "back" or not isinstance(self.focused, Input)

    def action_panel(self, number: int) -> None:
        panel = self.panels[number - 1]
        if panel.has_focus:
            self._zoomed = not self._zoomed
        self.screen.set_focus(panel)
        self._arrange()

    def action_next_panel(self, by: int) -> None:
        place = self.panels.index(self.focused_panel)
        self.screen.set_focus(self.panels[(place + by) % len(self.panels)])

    def action_filter(self, begin: str) -> None:
        self._prompt.put(begin or self.focused_panel.filter.text)
        self._prompt.display = True
        self.screen.set_focus(self._prompt.input)
        self._arrange()

    def on_input_changed(self, event: Input.Changed) -> None:
        if self._prompt.display:
            self._last_panel.set_filter(RowFilter.parse(event.value))
            self._arrange()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._end_prompt()

    def _end_prompt(self) -> None:
        self._prompt.display = False
        self.screen.set_focus(self._last_panel)
        self._arrange()

    def action_open(self) -> None:
        self.opening.open()

    def action_describe(self) -> None:
        self.opening.describe()

    def action_yaml(self) -> None:
        self.opening.yaml()

    def action_thresholds(self) -> None:
        self.opening.thresholds()

    def action_export(self) -> None:
        self.run_worker(self.opening.export(), group="export", exclusive=True)

    def action_index(self, everybody: int) -> None:
        reading = self.opening.read_index(everybody=bool(everybody))
        self.run_worker(reading, group="index", exclusive=True)

    def filter_workers(self, text: str) -> None:
        """Show the workers that a filter keeps."""
        self.workers_panel.set_filter(RowFilter.parse(text))
        self.screen.set_focus(self.workers_panel)
        self._arrange()

    def action_sort(self) -> None:
        self.focused_panel.sort_next()

    def action_reverse(self) -> None:
        self.focused_panel.reverse()

    def action_group(self) -> None:
        view = self.view
        if view is None or len(view.domains) < 2:
            self.say("there is no other domain to group by")
            return
        names = list(view.domains)
        place = names.index(view.domain) if view.domain in names else -1
        self._domain = names[(place + 1) % len(names)]
        self._show_all()

    def action_pause(self) -> None:
        self.paused = not self.paused
        if not self.paused:
            self.look_now()
        self._show_frame()

    def action_rate(self) -> None:
        self.rate = next((rate for rate in RATES if rate > self.rate), RATES[0])
        self.look_now()
        self._show_frame()

    def action_help(self) -> None:
        self.opening.help()

    async def action_back(self) -> None:
        """One step: the prompt, then the filter, then all panels again."""
        if self._prompt.display:
            self._last_panel.set_filter(RowFilter())
            self._end_prompt()
        elif self.focused_panel.filter:
            self.focused_panel.set_filter(RowFilter())
        else:
            self._zoomed = False
        self._arrange()
        self._show_frame()

    def action_leave(self, code: int) -> None:
        self.exit(code, return_code=code)
