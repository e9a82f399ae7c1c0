"""One frontend of ours, followed: cards once, loads each time, decisions as they are made.

What it reads through is a :class:`FrontendReader`, so that a frontend over HTTP and the embedded
fleet of the demo are followed by the same code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Protocol

from dynctl.documents.decisions import ConfigDocument, DecisionList, DecisionRow
from dynctl.documents.fleet_load import FleetLoad, joined_rows
from dynctl.documents.workers import WorkerRow
from dynctl.sources.snapshot import DecisionLine, Meter, meter_of

#: Decisions that stay on screen, and how many are read at a time.
KEPT: Final = 500
AT_ONCE: Final = 50
#: A setting that somebody else changed is seen after this many seconds.
SETTINGS_S: Final = 10.0


class FrontendReader(Protocol):
    """What a frontend of ours tells. Methods raise DynctlError or WireError."""

    @property
    def name(self) -> str:
        """What people see, without credentials."""
        ...

    async def fleet(self, cards: str | None) -> FleetLoad: ...

    async def decisions(self, since: int, limit: int, wait: int) -> DecisionList: ...

    async def config(self) -> ConfigDocument: ...


@dataclass(slots=True)
class FollowedFrontend:
    """The last that a frontend told. ``read_at``: wall-clock seconds of here, None before.

    ``problem``: why it does not tell more at present.
    """

    reader: FrontendReader
    wall: Callable[[], float] = time.time
    load: FleetLoad | None = None
    rows: list[WorkerRow] = field(default_factory=list)
    config: ConfigDocument | None = None
    lines: deque[DecisionLine] = field(default_factory=lambda: deque(maxlen=KEPT))
    meters: dict[tuple[str, str], Meter] = field(default_factory=dict)
    missed: int = 0
    kept_bytes: int | None = None
    decisions_refused: str = ""
    read_at: float | None = None
    problem: str = ""
    _cards: list[WorkerRow] = field(default_factory=list)
    _cursor: int | None = None
    _settings_at: float = 0.0

    async def read(self) -> None:
        """Read the fleet, and the settings when they may have changed. Raises as the reader."""
        known = self.load.cards if self.load is not None and self._cards else None
        load = await self.reader.fleet(known)
        if load.workers is not None:
            self._cards = load.workers
        self.rows = joined_rows(self._cards, load.loads)
        now = self.wall()
        if self.config is None or now - self._settings_at >= SETTINGS_S:
            self.config = await self.reader.config()
            self._settings_at = now
        self.load, self.read_at, self.problem = load, now, ""

    async def read_decisions(self, wait: int = 0) -> None:
        """Read the decisions since the last time; waits for one where there is none."""
        told = await self.reader.decisions(self._cursor or 0, AT_ONCE, wait)
        if self._cursor is not None and told.cursor >= self._cursor:
            self.missed += told.skipped
        self._cursor = told.cursor
        self.kept_bytes = told.limit_bytes
        fresh = [_line(row, self.reader.name) for row in told.decisions]
        self.lines.extendleft(reversed(fresh))
        for line, row in zip(reversed(fresh), reversed(told.decisions), strict=True):
            meter = None if row.preference is None else meter_of(line, row.preference)
            if meter is not None:
                self.meters[meter.domain, meter.value] = meter

    def settings_changed(self) -> None:
        """Read the settings again at the next reading."""
        self._settings_at = 0.0

    @property
    def settings(self) -> dict[str, Any]:
        """Setting -> value, as far as they are known."""
        rows = self.config.settings if self.config is not None else ()
        return {row.name: row.value for row in rows}


def newest_first(frontends: Iterable[FollowedFrontend], most: int = KEPT) -> list[DecisionLine]:
    """The decisions of all frontends."""
    lines = [line for one in frontends for line in one.lines]
    lines.sort(key=lambda line: line.at, reverse=True)
    return list(islice(lines, most))


def _line(row: DecisionRow, source: str) -> DecisionLine:
    return DecisionLine(
        id=row.id,
        at=row.at,
        source=source,
        model=row.model,
        outcome=row.outcome,
        stage=row.stage,
        prefill=row.prefill,
        decode=row.decode,
        prefill_domains=row.prefill_domains,
        domains=row.domains,
        blocks=row.blocks,
        cached_blocks=row.cached_blocks,
        margin=row.margin,
        cost=row.cost,
        relaxed=row.relaxed,
        message=row.message,
    )
