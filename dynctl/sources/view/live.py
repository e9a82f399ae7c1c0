"""A saved view as a source: one moment of the past, which stays as it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from dynctl.base.errors import UsageProblem
from dynctl.documents.route_result import RouteResult
from dynctl.documents.workers import WorkerRow
from dynctl.sources.following import Values
from dynctl.sources.snapshot import DecisionLine, Header, Snapshot, Told
from dynctl.sources.view.source import ViewSource

_NOT_KEPT: Final = "a saved view keeps no decisions"
_NOT_LIVE: Final = "a saved view is one moment"
_LIVE: Final = "dynctl top --frontend URL shows a running service"
_ASK: Final = 'ask it where a request would go: dynctl --view FILE route --explain "PROMPT"'


class ViewDashboard:
    """Shows the view that ``source`` holds."""

    def __init__(self, source: ViewSource, wall: Callable[[], float] = time.time) -> None:
        self.title = source.title
        self._source = source
        self._at = wall()
        self._rows = tuple(source.workers())

    async def __aenter__(self) -> ViewDashboard:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is open."""

    async def snapshot(self) -> Snapshot:
        source, title = self._source, self.title
        settings = {name: row["value"] for name, row in source.config()["settings"].items()}
        here = Told(title, self._at)
        told = dict.fromkeys(("workers", "load", "index", "thresholds", "settings"), here)
        told["decisions"] = Told(title, unknown=_NOT_KEPT, provide=_ASK)
        for part in ("waiting", "transfers", "queue"):
            told[part] = Told(title, unknown=_NOT_LIVE, provide=_LIVE)
        return Snapshot(
            at=self._at,
            source=title,
            header=Header(
                models=tuple(sorted({row.model for row in self._rows})),
                mode=settings["router_mode"],
                preset=source.view.preset,
            ),
            workers=self._rows,
            thresholds=source.thresholds(),
            settings=settings,
            told=told,
        )

    async def settle(self) -> None:
        """Nothing comes any more."""

    async def decision(self, line: DecisionLine) -> RouteResult:
        raise UsageProblem(_NOT_KEPT, _ASK)

    async def judged(self, model: str, values: Values) -> list[WorkerRow]:
        return self._source.judged(model, values)

    async def set_thresholds(self, model: str, values: Values) -> dict[str, float | int | None]:
        return self._source.set_thresholds(model, values)

    async def save(self) -> bytes:
        return self._source.save()

    async def read_index(self, worker: WorkerRow | None) -> str:
        raise UsageProblem(f"{_NOT_LIVE}: what is not in it cannot be read any more", _LIVE)
