"""Readings of dynctl frontends, and the snapshot that they make together."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from typing import Any, Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from dynctl.documents.config import ConfigDocument
from dynctl.documents.decisions import DecisionList, DecisionRow
from dynctl.documents.fleet_load import FleetLoad, LastTest, Traffic, Transfer, joined_rows
from dynctl.documents.snapshot import (
    DecisionLine,
    Header,
    Meter,
    Part,
    Snapshot,
    meter_of,
)
from dynctl.documents.workers import RankRow, WorkerRow
from dynctl.sources.alerts import condition_alert
from dynctl.sources.client import CallerRefused

_NO_QUEUE: Final = "this router has no queue (--router-queue-threshold is not set)"
_NO_DECISIONS: Final = "the frontend keeps no decisions"
KEEP_DECISIONS: Final = "start it with --decision-memory 64MiB"
_NO_WAITING: Final = "no engine exports its queue (vLLM and SGLang do, in /metrics)"


def frontend_snapshot(
    frontends: Sequence[FrontendReadings], source: str, at: float, problem: str = ""
) -> Snapshot:
    """One snapshot of all frontends. Cards are the first frontend's; loads are added up where each
    router counts its own requests only."""
    read = [frontend for frontend in frontends if frontend.load is not None]
    answering = [readings for readings in read if not readings.problem]
    known = answering or read
    loads = [readings.load for readings in known if readings.load is not None]
    if not loads:
        return Snapshot(at=at, source=source, problem=problem or "nothing was read yet")
    first = known[0]
    workers = tuple(_joined_rows_of(known))
    probes = [load.probe_s for load in loads if load.probe_s is not None]
    return Snapshot(
        at=at,
        source=source,
        header=_header(first, loads, workers, (len(answering), len(frontends))),
        workers=workers,
        decisions=tuple(newest_first(known)),
        missed=sum(readings.missed for readings in known),
        restarts=sum(frontend.restarts for frontend in frontends),
        meters=_meters(known),
        alerts=tuple(
            condition_alert(row.code, row.subject, row.message, row.since)
            for load in loads
            for row in load.conditions
        ),
        transfers=_transfers(known),
        thresholds=dict(loads[0].thresholds),
        settings=first.settings,
        parts=_parts(known, first, workers),
        load_every_s=max(probes, default=None),
        problem=problem,
    )


def _header(
    first: FrontendReadings,
    loads: Sequence[FleetLoad],
    workers: Sequence[WorkerRow],
    frontends: tuple[int, int],
) -> Header:
    """``frontends``: how many answer, and how many there are."""
    queues = [load.queue for load in loads if load.queue is not UNSET]
    return Header(
        models=tuple(sorted({row.model for row in workers if row.model})),
        mode=_text(first.settings, "router_mode"),
        preset=None if first.config is None else first.config.preset,
        version=loads[0].version,
        frontends=frontends,
        in_flight=sum(load.in_flight for load in loads),
        queue=sum(queues) if queues else None,
        recorded=sum(load.recorded for load in loads),
        routers=loads[0].replicas,
        traffic=_traffic(loads),
        tested=_last_test(loads),
    )


def _parts(
    known: Sequence[FrontendReadings], first: FrontendReadings, workers: Sequence[WorkerRow]
) -> dict[str, Part]:
    names = " + ".join(readings.reader.name for readings in known)
    here = Part(names, min(readings.read_at for readings in known if readings.read_at is not None))
    parts = dict.fromkeys(("workers", "load", "index", "waiting", "transfers"), here)
    parts["decisions"] = here
    parts["thresholds"] = parts["settings"] = Part(first.reader.name, first.read_at)
    queues = [readings.load.queue for readings in known if readings.load is not None]
    parts["queue"] = Part(names, unknown=_NO_QUEUE)
    if any(queue is not UNSET for queue in queues):
        parts["queue"] = here
    refused = [readings.decisions_refused for readings in known if readings.decisions_refused]
    if refused:
        provide = "give --token, or DYNCTL_TOKEN"
        parts["decisions"] = Part(names, unknown=refused[0], provide=provide)
    elif all(readings.kept_bytes == 0 for readings in known):
        parts["decisions"] = Part(names, unknown=_NO_DECISIONS, provide=KEEP_DECISIONS)
    ranks = [rank for row in workers for rank in row.ranks]
    if ranks and all(rank.reported.waiting_requests is None for rank in ranks):
        parts["waiting"] = Part(names, unknown=_NO_WAITING)
    return parts


def _joined_rows_of(known: Sequence[FrontendReadings]) -> list[WorkerRow]:
    """The rows of the first, plus the load that the other routers put on the same workers.

    Routers that share their load count it all themselves: then each number is the highest of them.
    """
    rows = known[0].rows
    if len(known) == 1:
        return rows
    shared = all(
        readings.load is not None and readings.load.replicas is not UNSET for readings in known
    )
    joined = max if shared else sum
    others: dict[tuple[int, int], list[RankRow]] = defaultdict(list)
    for readings in known[1:]:
        for row in readings.rows:
            for rank in row.ranks:
                others[row.worker_id, rank.dp_rank].append(rank)
    return [
        msgspec.structs.replace(
            row,
            ranks=[
                _rank(rank, others.get((row.worker_id, rank.dp_rank), ()), joined)
                for rank in row.ranks
            ],
        )
        for row in rows
    ]


def _rank(
    rank: RankRow, others: Sequence[RankRow], joined: Callable[[Iterable[Any]], Any]
) -> RankRow:
    every = (rank, *others)
    return msgspec.structs.replace(
        rank,
        active_requests=joined(row.active_requests for row in every),
        active_prefill_tokens=joined(row.active_prefill_tokens for row in every),
        active_decode_blocks=joined(row.active_decode_blocks for row in every),
    )


def _traffic(loads: Sequence[FleetLoad]) -> Traffic | UnsetType:
    known = [load.traffic for load in loads if not isinstance(load.traffic, UnsetType)]
    return sum(known[1:], known[0]) if known else UNSET


def _last_test(loads: Sequence[FleetLoad]) -> LastTest | UnsetType:
    known = [load.tested for load in loads if not isinstance(load.tested, UnsetType)]
    return max(known, key=lambda tested: tested.at) if known else UNSET


def _meters(known: Sequence[FrontendReadings]) -> tuple[Meter, ...]:
    """The newest of each preferred domain."""
    newest: dict[tuple[str, str], Meter] = {}
    for readings in known:
        for key, meter in readings.meters.items():
            if key not in newest or newest[key].at < meter.at:
                newest[key] = meter
    return tuple(newest[key] for key in sorted(newest))


def _transfers(known: Sequence[FrontendReadings]) -> tuple[Transfer, ...]:
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for readings in known:
        for row in readings.load.transfers if readings.load is not None else ():
            sums[row.domain, row.value][0] += row.local
            sums[row.domain, row.value][1] += row.crossing
    return tuple(Transfer(*key, *sums[key]) for key in sorted(sums))


def _text(settings: Mapping[str, Any], name: str) -> str | None:
    value = settings.get(name)
    return value if isinstance(value, str) else None


#: Decisions that stay on screen, and how many are read at a time.
KEPT: Final = 500
AT_ONCE: Final = 50
#: Settings are read again after this many seconds.
SETTINGS_S: Final = 10.0
#: Decisions are kept in about the order of their times; a larger step is one of the wall clock.
CLOCK_STEP_S: Final = 60.0


class FrontendReader(Protocol):
    """How one frontend is read, over HTTP or inside the demo. Raises DynctlError or WireError."""

    @property
    def name(self) -> str:
        """The name that is shown, without credentials."""
        ...

    async def fleet(self, cards: str | None) -> FleetLoad: ...

    async def decisions(
        self, since: int, limit: int, wait: int, process: str = "", ends: int | None = None
    ) -> DecisionList: ...

    async def config(self) -> ConfigDocument: ...


@dataclass(slots=True)
class FrontendReadings:
    """The last readings of one frontend: cards once, loads each time, decisions as they are made.

    ``read_at``: wall-clock seconds of this host, None before the first reading. ``problem``: why
    the frontend cannot be read now, ``refused`` where it refuses this caller. ``restarts``: how
    often another process came to its address; nothing of an earlier process is kept.
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
    timed_out: bool = False
    refused: CallerRefused | None = None
    restarts: int = 0
    _process: str = ""
    _cards: list[WorkerRow] = field(default_factory=list)
    _cursor: int | None = None
    _ends: int | None = None
    _settings_at: float = 0.0

    async def read(self) -> None:
        """Read the fleet, and now and then the settings. Raises as the reader."""
        known = self.load.cards if self.load is not None and self._cards else None
        load = await self.reader.fleet(known)
        self._met(load.process)
        if load.workers is not None:
            self._cards = load.workers
        self.rows = joined_rows(self._cards, load.loads)
        now = self.wall()
        if self.config is None or abs(now - self._settings_at) >= SETTINGS_S:
            self.config = await self.reader.config()
            self._settings_at = now
        self.load, self.read_at, self.problem = load, now, ""

    async def read_decisions(self, wait: int = 0) -> None:
        """Read the decisions since the last time, and how earlier requests ended; waits up to
        ``wait`` seconds for one of both."""
        process = self._process
        page = await self.reader.decisions(self._cursor or 0, AT_ONCE, wait, process, self._ends)
        if self._process != process and page.process != self._process:
            return  # the last answer of a process whose successor was read already
        self._met(page.process)
        if self._cursor is not None and page.cursor < self._cursor:
            self._forget()  # a frontend that names no process
        if self._cursor is not None:
            self.missed += page.skipped
        self._cursor = page.cursor
        self._ends = None if page.ends is UNSET else page.ends
        self.kept_bytes = page.limit_bytes
        self._take_ends(page)
        fresh = [decision_line(row, self.reader.name) for row in page.decisions]
        self.lines.extendleft(reversed(fresh))
        for line, row in zip(reversed(fresh), reversed(page.decisions), strict=True):
            meter = None if row.preference is None else meter_of(line, row.preference)
            if meter is not None:
                self.meters[meter.domain, meter.value] = meter

    def _met(self, process: str) -> None:
        """Forget an earlier process where ``process`` is another one."""
        if not process or process == self._process:
            return
        if self._process:
            self._forget()
        self._process = process

    def _forget(self) -> None:
        self.restarts += 1
        self.lines.clear()
        self.meters.clear()
        self.missed, self._cursor, self._ends, self.config = 0, None, None, None

    def _take_ends(self, page: DecisionList) -> None:
        """Replace the lines of requests that have ended since they were read."""
        if not page.ended:
            return
        rows = [decision_line(row, self.reader.name) for row in page.ended]
        ended = {(line.id, line.at, line.decode, line.prefill): line for line in rows}
        self.lines = deque(
            (ended.get((line.id, line.at, line.decode, line.prefill), line) for line in self.lines),
            maxlen=KEPT,
        )

    def settings_changed(self) -> None:
        """Read the settings again at the next reading."""
        self._settings_at = 0.0

    @property
    def settings(self) -> dict[str, Any]:
        """Setting -> value; empty before the first reading."""
        rows = self.config.settings if self.config is not None else ()
        return {row.name: row.value for row in rows}


def newest_first(frontends: Iterable[FrontendReadings], most: int = KEPT) -> list[DecisionLine]:
    """The decisions of all frontends."""
    return list(islice(newest(*(frontend.lines for frontend in frontends)), most))


def newest(*sources: Iterable[DecisionLine]) -> Iterator[DecisionLine]:
    """The decisions of several sources together, newest first, as each of them is.

    By their times; but where the wall clock of a source was set back, its later decisions have
    earlier times and stay first.
    """
    return merge(*map(_newest_of_one, sources), key=_time, reverse=True)


def _newest_of_one(lines: Iterable[DecisionLine]) -> Iterator[DecisionLine]:
    runs: list[list[DecisionLine]] = []
    for line in lines:
        if runs and line.at <= runs[-1][-1].at + CLOCK_STEP_S:
            runs[-1].append(line)
        else:
            runs.append([line])
    for run in runs:
        yield from sorted(run, key=_time, reverse=True)


def _time(line: DecisionLine) -> float:
    return line.at


def decision_line(row: DecisionRow, source: str) -> DecisionLine:
    """A row of a frontend's list, beside the decisions of other sources."""
    # What a prefill worker had cached is not predicted: its choice comes without the prompt.
    unknown = row.observed is not UNSET and row.prefill is not None
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
        cached_blocks=None if unknown else row.cached_blocks,
        margin=row.margin,
        cost=row.cost,
        relaxed=row.relaxed,
        message=row.message,
        bypass=row.bypass,
        why=row.why,
        moved=row.moved,
        tokens_estimated=row.tokens_estimated,
        response=row.response,
        complete=row.observed is UNSET or row.observed.as_predicted is not None,
    )
