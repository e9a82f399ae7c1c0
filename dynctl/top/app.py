"""The Textual app of `dynctl top`: one source, one snapshot per refresh, four panels.

Panels only draw what they are given. The app reads the source in one background task; keys that
need more (explain a decision, try thresholds) read it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import wrap
from time import localtime, strftime
from typing import Any, ClassVar, Final

from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.theme import Theme
from textual.widgets import Input

from dynctl.base.errors import DynctlError, ExitCode, UsageProblem, file_problem
from dynctl.base.files import write_private_file
from dynctl.base.naming import resolve_worker
from dynctl.base.terminal import printable_value
from dynctl.documents.snapshot import Alert, DomainRow, DomainView, Snapshot
from dynctl.documents.workers import WorkerRow
from dynctl.findings.catalogue import catalogue
from dynctl.sources.alerts import AlertBoard
from dynctl.sources.domains import DomainBoard
from dynctl.sources.source import LiveSource
from dynctl.top.custody import ReadChain, registered_chain
from dynctl.top.details import read_page
from dynctl.top.filter import RowFilter
from dynctl.top.header import State, header
from dynctl.top.history import History
from dynctl.top.keys import BINDINGS, FOOTER, OWN, help_text
from dynctl.top.layout import heights
from dynctl.top.marks import BAD, BLOCKS, BOLD, CURSOR, DIM, Line, plain
from dynctl.top.panels.all import PANELS
from dynctl.top.panels.content import AnyContent, Scene
from dynctl.top.panels.panel import AnyPanel, Panel
from dynctl.top.panels.row_details import Details
from dynctl.top.process_log import ReadLog, unread_log
from dynctl.top.side import FROM_WIDTH, side_lines
from dynctl.top.thresholds import ThresholdScreen
from dynctl.top.widgets import Lines, Prompt, TextScreen

#: The terminal's own colours, so that it looks right on dark and on light ones, and on 16 colours.
THEME: Final = Theme(
    name="terminal",
    primary="ansi_blue",
    secondary="ansi_cyan",
    warning="ansi_yellow",
    error="ansi_red",
    success="ansi_green",
    accent="ansi_cyan",
    foreground="ansi_default",
    background="ansi_default",
    surface="ansi_default",
    panel="ansi_default",
    boost="ansi_default",
)

CSS: Final = """
Screen { layout: vertical; background: ansi_default; overflow: hidden; }
#head { height: 2; }
#prompt { display: none; }
#jump { display: none; }
#body { height: 1fr; }
#panels { width: 1fr; }
#side { display: none; height: 1fr; }
"""

RATES: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
#: From this height on the hint below the panels has two lines.
_ROOMY: Final = 30
#: Seconds that a message replaces the hint, and the most lines that it takes.
NOTICE_S: Final = 6.0
_NOTICE_LINES: Final = 4
#: Shares of crossing hand-offs cover the recent past only, once it is this many seconds long.
_WATCHED_S: Final = 60.0
_NO_ROW: Final = "there is no row to open"


class TopApp(App[int]):
    """The dashboard of ``source``, which is entered already.

    ``rate``: seconds between two readings. ``domain``: the first domain to group by. ``wall``:
    seconds since the epoch; ``clock``: monotonic seconds, None: ``wall``. ``chain`` reads a
    worker's chain of custody, ``logs`` the log of its process; exports are written to
    ``directory``.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "dynctl top"
    CSS = CSS
    BINDINGS: ClassVar[list[BindingType]] = BINDINGS

    class SourceRead(Message):
        """A new snapshot was read."""

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
        logs: ReadLog = unread_log,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] | None = None,
        directory: Path = Path(),
    ) -> None:
        super().__init__(ansi_color=True)
        self.source = source
        self.rate = rate
        self.readonly = readonly
        self.directory = directory
        self.paused = False
        self.snapshot: Snapshot | None = None
        self.view: DomainView | None = None
        self._scene: Scene | None = None
        self.alerts: tuple[Alert, ...] = ()
        self.wall = wall
        self._monotonic = clock
        self._details = Details(source, chain, logs)
        self._domain = domain
        self._zoomed = False
        self._notice = ""
        self._notice_until = 0.0
        self._wake = asyncio.Event()
        self._board = DomainBoard()
        self._alert_board = AlertBoard()
        self._history = History()
        self.panels: tuple[AnyPanel, ...] = tuple(
            Panel(number, content()) for number, content in enumerate(PANELS, start=1)
        )
        by_name = {panel.id: panel for panel in self.panels}
        self.domains, self.workers_panel = by_name["domains"], by_name["workers"]
        self.decisions, self.alerts_panel = by_name["decisions"], by_name["alerts"]
        self._last_panel: AnyPanel = self.decisions
        self._head = Lines(id="head")
        self._head_lines = 2
        self._prompt = Prompt("/", "words that rows must contain; !word excludes", id="prompt")
        self._jump = Prompt(":", "panel, worker, decision or code", id="jump")
        self._side = Lines(id="side")
        self._hint = Lines(id="hint")
        self._foot = Lines(id="foot", base=CURSOR)

    def compose(self) -> ComposeResult:
        yield self._head
        with Horizontal(id="body"):
            with Vertical(id="panels"):
                yield from self.panels
            yield self._side
        yield self._prompt
        yield self._jump
        yield self._hint
        yield self._foot

    def on_mount(self) -> None:
        self.register_theme(THEME)
        self.theme = THEME.name
        self.screen.set_focus(self.decisions)
        self.run_worker(self._read_source(), name="look", exit_on_error=True)
        # The clock, and ages that grow while the source does not answer.
        self.set_interval(1.0, self._show_frame)
        self._show_frame()

    # -- failures --------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """The defect that ended the app, None if the user ended it."""
        error = self._exception
        return getattr(error, "error", None) or error

    def _print_error_renderables(self) -> None:
        """Print nothing: Textual would print a traceback, and the caller reports ``failure``."""
        self._exit_renderables.clear()

    # -- the source ------------------------------------------------------------------------

    async def _read_source(self) -> None:
        """Read the source every ``rate`` seconds, or at once after :meth:`refresh_now`."""
        while True:
            began = time.monotonic()
            self._wake.clear()
            if not self.paused:
                snapshot = printable_value(await self.source.snapshot())
                self.post_message(self.SourceRead(snapshot))
            left = self.rate - (time.monotonic() - began)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, left)):
                    await self._wake.wait()

    def refresh_now(self) -> None:
        """Read the source without waiting for the next interval."""
        self._wake.set()

    def on_top_app_source_read(self, message: SourceRead) -> None:
        # A snapshot that comes while the app ends has no screen any more.
        if self.screen_stack:
            self.take(message.snapshot)

    def take(self, snapshot: Snapshot) -> None:
        """Show a snapshot."""
        self.snapshot = snapshot
        self._history.add(snapshot, None if self._monotonic is None else self._monotonic())
        self._show_all()

    def _show_all(self) -> None:
        """Give every panel its part of the current snapshot."""
        snapshot = self.snapshot
        if snapshot is None:
            return
        watched = self._history.watched(snapshot.at)
        recent = watched >= _WATCHED_S
        transfers = self._history.recent_transfers(snapshot) if recent else None
        view = self.view = self._board.view(snapshot, self._domain, transfers)
        self.alerts = self._alert_board.alerts(snapshot, self._board.capacity(snapshot))
        values = {row.domains.get(view.domain or "") for row in snapshot.workers}
        self._scene = Scene(
            snapshot,
            view,
            self.alerts,
            self.wall(),
            self._history,
            watched if recent else 0.0,
            self.size.width - self._side_width,
            tuple(sorted(value for value in values if value)),
        )
        for panel in self.panels:
            panel.show(self._scene)
        self._show_side()
        self._arrange()
        self._show_frame()

    @property
    def _side_width(self) -> int:
        """Cells of the right part; 0 on narrower screens, and while one panel is alone."""
        width = self.size.width
        return 0 if width < FROM_WIDTH or self._zoomed else width // 3

    def _show_side(self) -> None:
        """Draw the right part, with what the filter keeps."""
        width = self._side_width
        if bool(self._side.display) != bool(width):
            self._side.display = bool(width)
        if not width or self.snapshot is None or self.view is None:
            return
        self._side.styles.width = width
        size = (width, max(0, self.size.height - self._head_lines - 2))
        decisions, workers = self.decisions.rows, self.workers_panel.rows
        zones = self.workers_panel.content.zones
        lines = side_lines(self.snapshot, self.view, decisions, workers, zones, BLOCKS, size)
        self._side.show(lines)

    # -- the frame -------------------------------------------------------------------------

    def on_resize(self) -> None:
        self._arrange()
        self._show_frame()
        # Wider screens get other columns, once the panels have their new widths.
        self.call_after_refresh(self._show_all)

    def on_panel_moved(self) -> None:
        self._arrange()
        self._show_frame()

    @property
    def focused_panel(self) -> AnyPanel:
        """The panel in focus; while the prompt has the focus, the last one before it."""
        return self.focused if isinstance(self.focused, Panel) else self._last_panel

    def _arrange(self) -> None:
        """Give each panel its height."""
        if not self.domains.is_mounted:
            return
        panel = self.focused_panel
        self._last_panel = panel
        typing = bool(self._prompt.display or self._jump.display)
        hint = max(self._hint_room, len(self._notice_lines()))
        if self._hint.styles.height is None or self._hint.styles.height.value != hint:
            self._hint.styles.height = hint
        total = self.size.height - self._head_lines - 1 - hint - typing
        wishes = [each.wish for each in self.panels]
        given = heights(total, wishes, self.panels.index(panel), zoomed=self._zoomed)
        for each, height in zip(self.panels, given, strict=True):
            if each.styles.height is None or each.styles.height.value != height:
                each.styles.height = height

    def _show_frame(self) -> None:
        if not self.screen_stack:  # the clock of an app that ends
            return
        width = self.size.width
        snapshot, now = self.snapshot, self.wall()
        state = State(self.rate, paused=self.paused, readonly=self.readonly, past=self.source.past)
        head = header(snapshot, self.view, self.source.title, state, width, now, self._history)
        if len(head) != self._head_lines:
            self._head_lines = len(head)
            self._head.styles.height = len(head)
            self._arrange()
        self._head.show(head)
        if self._notice and self._seconds() >= self._notice_until:
            self._notice = ""
            self._arrange()
        self._hint.show(self._notice_lines() or self._hint_lines(width))
        keys = next((keys for keys in FOOTER if len(keys) + 2 <= width), FOOTER[-1])
        self._foot.show([plain(f" {keys}", DIM)])

    @property
    def _hint_room(self) -> int:
        """Lines between the panels and the keys while there is no message."""
        return 2 if self.size.height >= _ROOMY else 1

    def _notice_lines(self) -> list[Line]:
        """The current message; empty if there is none."""
        room = max(1, self.size.width - 2)
        return [plain(f" {line}", BOLD) for line in wrap(self._notice, room)[:_NOTICE_LINES]]

    def _hint_lines(self, width: int) -> list[Line]:
        """Below the panels: why the snapshot is not current, else more about the row under the
        cursor."""
        snapshot, panel = self.snapshot, self.focused_panel
        row = panel.current
        text, style = (panel.content.hint(row) if row is not None else ""), DIM
        if snapshot is not None and snapshot.problem:
            text, style = snapshot.problem, BAD
        room = max(1, width - 2)
        lines = wrap(text, room)[: self._hint_room]
        if lines and len(" ".join(lines)) < len(text):
            lines[-1] = f"{lines[-1][: room - 2]}.."
        return [plain(f" {line}", style) for line in lines]

    def _seconds(self) -> float:
        """Monotonic seconds; those of ``wall`` where a test sets that."""
        return self.wall() if self._monotonic is None else self._monotonic()

    def show_message(self, text: str) -> None:
        """Show a message between the panels and the keys for a few seconds."""
        self._notice, self._notice_until = text, self._seconds() + NOTICE_S
        self._arrange()
        self._show_frame()

    # -- keys ------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key acts: the panels' keys do nothing over another screen and while the
        prompt has the focus; Ctrl-C always acts, Esc also leaves the prompt."""
        if action == "leave" and parameters == (int(ExitCode.INTERRUPTED),):
            return True
        if action not in OWN or len(self.screen_stack) > 1:
            return action not in OWN
        return action == "back" or not isinstance(self.focused, Input)

    def action_panel(self, number: int) -> None:
        panel = self.panels[number - 1]
        if panel.has_focus:
            self._zoomed = not self._zoomed
            self._show_side()
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
        if self._prompt.display and event.input is self._prompt.input:
            self.set_filter(RowFilter.parse(event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        jump = self._jump.value.strip() if event.input is self._jump.input else ""
        self._end_prompt()
        if jump:
            self._jump_to(jump)

    def set_filter(self, wanted: RowFilter) -> None:
        """Filter every panel."""
        for panel in self.panels:
            panel.set_filter(wanted)
        self._show_side()
        self._arrange()

    def _end_prompt(self) -> None:
        self._prompt.display = self._jump.display = False
        self.screen.set_focus(self._last_panel)
        self._arrange()

    def action_jump(self) -> None:
        """``:``: go to a panel, a worker, a decision, or the page of a code."""
        self._jump.put("")
        self._jump.display = True
        self.screen.set_focus(self._jump.input)
        self._arrange()

    def _jump_to(self, text: str) -> None:
        wanted = text.lower()
        panel = self._named_panel(wanted)
        if panel is not None:
            self.screen.set_focus(panel)
            return
        entry = catalogue().get(text.upper())
        if entry is not None:
            self.push_screen(TextScreen(entry.code, partial(read_page, entry.code)))
            return
        workers = [(row.worker_id, row.name) for row in self.workers_panel.picture.rows]
        with contextlib.suppress(UsageProblem):
            worker_id = resolve_worker(text, workers)
            # A name is of one row, an id may be of two.
            named = text.strip() in {name for _, name in workers}
            self._go_to(
                self.workers_panel,
                lambda row: row.name == text.strip() if named else row.worker_id == worker_id,
            )
            return
        if any(line.id.endswith(wanted) for line in self.decisions.picture.rows):
            self._go_to(self.decisions, lambda line: line.id.endswith(wanted))
            return
        matching = [name for _, name in workers if wanted in name.lower()]
        if matching:
            self._go_to(self.workers_panel, lambda row: row.name == matching[0])
            return
        self.show_message(f"no panel, worker, decision or code matches {text[:40]!r}")

    def _named_panel(self, wanted: str) -> AnyPanel | None:
        """The panel with this number, or whose name begins so."""
        for panel in self.panels:
            begins = len(wanted) > 1 and panel.content.NAME.startswith(wanted)
            if wanted == str(panel.number) or begins:
                return panel
        return None

    def _go_to(self, panel: AnyPanel, wanted: Callable[[Any], bool]) -> None:
        """Focus a row; a filter that hides it is dropped."""
        if not panel.go_to(wanted):
            self.set_filter(RowFilter())
            panel.go_to(wanted)
        self.screen.set_focus(panel)

    def action_sort(self) -> None:
        self.focused_panel.sort_next()

    def action_reverse(self) -> None:
        self.focused_panel.reverse()

    def action_group(self) -> None:
        view = self.view
        if view is None or len(view.domains) < 2:
            self.show_message("there is no other domain to group by")
            return
        names = list(view.domains)
        place = names.index(view.domain) if view.domain in names else -1
        self._domain = names[(place + 1) % len(names)]
        self._show_all()

    def action_pause(self) -> None:
        self.paused = not self.paused
        if not self.paused:
            self.refresh_now()
        self._show_frame()

    def action_rate(self) -> None:
        self.rate = next((rate for rate in RATES if rate > self.rate), RATES[0])
        self.refresh_now()
        self._show_frame()

    async def action_back(self) -> None:
        """One step back: close the prompt, else drop the filter, else show all panels."""
        if self._jump.display:
            self._end_prompt()
        elif self._prompt.display:
            self.set_filter(RowFilter())
            self._end_prompt()
        elif self.focused_panel.filter:
            self.set_filter(RowFilter())
        else:
            self._zoomed = False
            self._show_side()
        self._arrange()
        self._show_frame()

    def action_leave(self, code: int) -> None:
        self.exit(code, return_code=code)

    # -- keys that open something ----------------------------------------------------------

    def action_open(self) -> None:
        """Enter: zoom on a domain in every panel, or the details of another row."""
        row, view = self.focused_panel.current, self.view
        if isinstance(row, DomainRow) and view and view.domain is not None and row.value:
            self.set_filter(RowFilter.parse(f"{view.domain}={row.value}"))
            self.screen.set_focus(self.workers_panel)
        else:
            title = ": load, card and chain of custody" if isinstance(row, WorkerRow) else ""
            self._push_details(title, self._details.open)

    def action_describe(self) -> None:
        self._push_details("", self._details.describe)

    def action_yaml(self) -> None:
        self._push_details(" as YAML", lambda content, row, _: self._details.yaml(row))

    def action_log(self) -> None:
        """``l``: what happened to the row under the cursor, newest first."""
        self._push_details(": log", self._details.log)

    def action_help(self) -> None:
        self.push_screen(TextScreen("help", _read_help))

    def action_thresholds(self) -> None:
        """``t``: the form of busy thresholds."""
        snapshot = self.snapshot
        if snapshot is None or not snapshot.thresholds:
            unknown = snapshot.unknown("thresholds") if snapshot is not None else None
            why = unknown.unknown if unknown is not None else "no model is served"
            self.show_message(f"thresholds are unknown: {why}")
            return

        def done(changed: bool | None) -> None:
            if changed:
                self.refresh_now()

        self.push_screen(ThresholdScreen(self.source, snapshot, readonly=self.readonly), done)

    def action_export(self) -> None:
        self.run_worker(self._export(), group="export", exclusive=True)

    def action_index(self, every: int) -> None:
        self.run_worker(self._read_index(every=bool(every)), group="index", exclusive=True)

    def _push_details(self, title: str, read: Callable[[AnyContent, Any, Scene], Any]) -> None:
        panel, scene = self.focused_panel, self._scene
        row = panel.current
        if row is None or scene is None:
            self.show_message(_NO_ROW)
            return
        scene = replace(scene, now=self.wall())
        title = panel.content.row_name(row) + title
        self.push_screen(TextScreen(title, partial(read, panel.content, row, scene)))

    async def _export(self) -> None:
        """``e``: save the source's view to a new file."""
        self.show_message("saving the view ..")
        try:
            data = await self.source.save()
            name = strftime("dynctl-view-%Y%m%d-%H%M%S.json", localtime(self.wall()))
            path = await asyncio.to_thread(write_view, self.directory / name, data)
        except DynctlError as error:
            self.show_message(f"not saved: {error.message}")
        except OSError as error:
            self.show_message(f"not saved: {error.filename}: {file_problem(error, writing=True)}")
        else:
            self.show_message(f"saved {path} ({len(data):,} bytes); dynctl --view FILE reads it")

    async def _read_index(self, *, every: bool) -> None:
        """``i``: read the cache of the worker under the cursor; ``I``: of all workers."""
        worker = None if every else self.workers_panel.current
        if worker is None and not every:
            self.show_message(_NO_ROW)
            return
        try:
            self.show_message(await self.source.read_index(worker))
        except DynctlError as error:
            self.show_message(error.message)
        self.refresh_now()


async def _read_help() -> Any:
    return help_text


def write_view(path: Path, data: bytes) -> Path:
    """Write a new private file; return its path. Existing files get a number added to the name."""
    target = path
    for number in range(1, 100):
        try:
            write_private_file(target, data, new=True)
            return target
        except FileExistsError:
            target = path.with_name(f"{path.stem}-{number}{path.suffix}")
    raise FileExistsError(17, "too many views saved within this second", str(target))
