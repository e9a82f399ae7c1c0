"""What Enter, ``d``, ``y``, ``t``, ``e`` and ``i`` do with the row under the cursor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import localtime, strftime
from typing import TYPE_CHECKING, Any, Final

from dynctl.base.errors import DynctlError
from dynctl.documents.snapshot import Alert, DecisionLine, DomainRow
from dynctl.documents.workers import WorkerRow
from dynctl.screens.canvas import Canvas
from dynctl.screens.render import yaml_text
from dynctl.screens.route import ExplainScreen
from dynctl.top.custody import ReadChain
from dynctl.top.descriptions import (
    alert_text,
    card_text,
    decision_text,
    domain_text,
    worker_text,
)
from dynctl.top.keys import help_text
from dynctl.top.thresholds import ThresholdScreen
from dynctl.top.widgets import Draw, TextScreen

if TYPE_CHECKING:
    from dynctl.top.app import TopApp

_NO_ROW: Final = "there is no row to open"


class Opening:
    """Opens things of ``app``'s present snapshot. ``chain`` and ``directory`` as the app's."""

    def __init__(self, app: TopApp, chain: ReadChain, directory: Path) -> None:
        self._app = app
        self._chain = chain
        self._directory = directory

    def open(self) -> None:
        """Enter: the workers of a domain, a worker's card, a decision explained, a finding."""
        match self._app.focused_panel.current:
            case None:
                self._app.say(_NO_ROW)
            case DomainRow() as row:
                self._drill(row)
            case WorkerRow() as worker:
                self._push(f"{worker.name}: card and chain of custody", partial(self._card, worker))
            case DecisionLine() as line:
                self._push(f"decision {line.id}", partial(self._decision, line))
            case Alert() as alert:
                self._push(f"{alert.code} {alert.subject}", self._drawn(self._alert(alert)))

    def describe(self) -> None:
        """``d``: everything that is known of the row, in words."""
        row = self._app.focused_panel.current
        draw = self._description(row)
        if draw is None:
            self._app.say(_NO_ROW)
        else:
            self._push(f"{_name(row)}", self._drawn(draw))

    def yaml(self) -> None:
        """``y``: the row as programs get it."""
        row = self._app.focused_panel.current
        if row is None:
            self._app.say(_NO_ROW)
            return
        text = yaml_text(row)
        self._push(f"{_name(row)} as yaml", self._drawn(lambda _: text))

    def thresholds(self) -> None:
        """``t``: the form of busy thresholds."""
        app = self._app
        snapshot = app.snapshot
        if snapshot is None or not snapshot.thresholds:
            unknown = snapshot.unknown("thresholds") if snapshot is not None else None
            why = unknown.unknown if unknown is not None else "no model is served"
            app.say(f"thresholds are not known: {why}")
            return

        def done(changed: bool | None) -> None:
            if changed:
                app.look_now()

        app.push_screen(ThresholdScreen(app.source, snapshot, readonly=app.readonly), done)

    def help(self) -> None:
        self._push("help", self._drawn(help_text))

    async def export(self) -> None:
        """``e``: the source's view into a new file of the directory."""
        app = self._app
        app.say("saving the view ..")
        try:
            data = await app.source.save()
            name = strftime("dynctl-view-%Y%m%d-%H%M%S.json", localtime(app.wall()))
            path = await asyncio.to_thread(self._write, name, data)
        except DynctlError as error:
            app.say(f"not saved: {error.message}")
        except OSError as error:
            app.say(f"not saved: {error.filename}: {error.strerror}")
        else:
            app.say(f"saved {path}: dynctl --view FILE reads it ({len(data):,} bytes)")

    async def read_index(self, *, everybody: bool) -> None:
        """``i``: begin to follow what the worker under the cursor caches; ``I``: what all do."""
        app = self._app
        worker = None if everybody else app.workers_panel.current
        if worker is None and not everybody:
            app.say(_NO_ROW)
            return
        try:
            app.say(await app.source.read_index(worker))
        except DynctlError as error:
            app.say(error.message)
        app.look_now()

    # -- inside ----------------------------------------------------------------------------

    def _write(self, name: str, data: bytes) -> Path:
        """Never over another file: a second one of the same second gets a number."""
        path = self._directory / name
        for number in range(1, 100):
            try:
                with path.open("xb") as file:
                    file.write(data)
                return path
            except FileExistsError:
                path = self._directory / name.replace(".json", f"-{number}.json")
        raise FileExistsError(17, "too many views of this second", str(path))

    def _drill(self, row: DomainRow) -> None:
        view = self._app.view
        if view is None or view.domain is None or row.value is None:
            self.describe()
            return
        self._app.filter_workers(f"{view.domain}={row.value}")

    async def _card(self, worker: WorkerRow) -> Draw:
        chain = await asyncio.to_thread(self._chain, worker)
        return lambda canvas: card_text(worker, chain, canvas)

    async def _decision(self, line: DecisionLine) -> Draw:
        if not line.complete:
            return self._description(line) or (lambda _: "")
        result = await self._app.source.decision(line)
        return lambda canvas: ExplainScreen()(result, canvas)

    def _alert(self, alert: Alert) -> Draw:
        now = self._app.wall()
        return lambda canvas: alert_text(alert, now, canvas)

    def _description(self, row: Any) -> Draw | None:
        app = self._app
        snapshot, view, now = app.snapshot, app.view, app.wall()
        if snapshot is None or view is None:
            return None
        match row:
            case DomainRow():
                return lambda canvas: domain_text(row, view, snapshot, canvas)
            case WorkerRow():
                return lambda canvas: worker_text(row, snapshot, now, canvas)
            case DecisionLine():
                return lambda canvas: decision_text(row, view.domain, canvas)
            case Alert():
                return self._alert(row)
            case _:
                return None

    def _drawn(self, draw: Callable[[Canvas], str]) -> Callable[[], Any]:
        async def read() -> Draw:
            return draw

        return read

    def _push(self, title: str, read: Callable[[], Any]) -> None:
        self._app.push_screen(TextScreen(title, read))


def _name(row: Any) -> str:
    match row:
        case DomainRow():
            return row.value or "(none)"
        case WorkerRow():
            return row.name
        case DecisionLine():
            return f"decision {row.id}"
        case Alert():
            return f"{row.code} {row.subject}"
        case _:
            return ""
