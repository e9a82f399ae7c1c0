"""One moment of a fleet, as the dashboard and ``top --once`` show it.

Frozen and complete: drawing it reads nothing else. Each part has its origin and time; a part that
is unknown has the reason, and what makes it known.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from dynctl.base.terminal import printable_lines
from dynctl.documents.decisions import UNKNOWN_RESPONSE, ClientResponse
from dynctl.documents.fleet_load import LastTest, Traffic, Transfer
from dynctl.documents.replicas import ReplicaRow
from dynctl.documents.route_result import PreferenceRow, Ref
from dynctl.documents.topology import DomainCapacity, TopologyShow
from dynctl.documents.workers import WorkerRow
from router_core import topology_of

SCHEMA: Final = 1


class Part(msgspec.Struct, frozen=True):
    """Where one part comes from. ``at``: wall-clock seconds of the reading.

    ``unknown``: why the part is unknown, empty where it is known; ``provide``: what to do then.
    """

    source: str
    at: float | None = None
    unknown: str = ""
    provide: str = ""


class DecisionLine(msgspec.Struct, frozen=True):
    """One past plan. ``at`` is wall-clock seconds.

    ``complete``: the source can explain it. Otherwise only the winners are known and every number
    is None. ``domains`` are the answering worker's, ``prefill_domains`` the prefill worker's.
    ``source``: where the decision was read. ``tokens_estimated``: the prompt was not tokenized, so
    ``blocks`` is an estimate from its characters, and ``cached_blocks`` unknown.
    """

    id: str
    at: float
    source: str
    model: str | None = None
    outcome: str = "selected"
    stage: str | None = None
    complete: bool = True
    prefill: Ref | None = None
    decode: Ref | None = None
    prefill_domains: dict[str, str] = {}
    domains: dict[str, str] = {}
    blocks: int | None = None
    cached_blocks: int | None = None
    margin: float | None = None
    cost: float | None = None
    relaxed: bool = False
    message: str | None = None
    #: Conditional disaggregation: why the prefill hop was left out or kept.
    bypass: str | UnsetType = UNSET
    #: What decided and how topology moved the request, in a few words; empty where unknown.
    why: str = ""
    moved: str = ""
    tokens_estimated: bool = False
    #: What became of the request; ``outcome`` is that of the decision.
    response: ClientResponse = UNKNOWN_RESPONSE

    @property
    def hop_verdict(self) -> str:
        """Whether the prefill hop was left out or kept, and why; empty where nothing decided it."""
        if isinstance(self.bypass, UnsetType):
            return ""
        return f"prefill hop {'left out' if self.prefill is None else 'kept'}: {self.bypass}"

    @property
    def refused(self) -> bool:
        """Whether the router refused the request: without a winner after engines that failed, the
        client got the engine's error."""
        return self.outcome != "selected" and self.response.state != "failed"


class DecisionReport(msgspec.Struct, frozen=True):
    """What `decisions list` prints: past plans, newest first.

    ``kept``: those that the source has in memory, ``evicted``: those that it removed from there;
    None where the source does not report them.
    """

    source: str
    decisions: list[DecisionLine] = []
    kept: int | None = None
    evicted: int | None = None
    kind: str = "DecisionReport"
    schema: int = SCHEMA


class Meter(msgspec.Struct, frozen=True):
    """How near a preferred domain is to spilling, at the last decision that preferred it."""

    domain: str
    value: str
    at: float
    decision: str
    preference: PreferenceRow

    @property
    def fullness(self) -> float | None:
        """``now`` as a share of the crossover: 1 and more spills. None where it has no ratio."""
        now = self.preference.now
        return None if now is None else now / self.preference.crossover


class Alert(msgspec.Struct, frozen=True):
    """A finding. ``level``: fail or warn. ``since``: wall-clock seconds, None where not known."""

    code: str
    level: str
    subject: str
    message: str
    fix: str = ""
    since: float | None = None


class Header(msgspec.Struct, frozen=True):
    """Facts about the service. ``frontends``: (answering, named), None without frontends.

    ``queue``: requests that wait in the router's own queue; ``recorded``: decisions since the
    frontend started. ``routers``: the others whose requests count in the load; absent without
    replica sync.
    """

    models: tuple[str, ...] = ()
    mode: str | None = None
    preset: str | None = None
    version: str | None = None
    frontends: tuple[int, int] | None = None
    in_flight: int | None = None
    queue: int | None = None
    recorded: int | None = None
    routers: list[ReplicaRow] | UnsetType = UNSET
    #: The requests of clients since the frontends started, or since this source reads the counters
    #: of a Dynamo's frontends; absent where no source counts them.
    traffic: Traffic | UnsetType = UNSET
    #: The last `dynctl test` of a frontend; absent where none was reported.
    tested: LastTest | UnsetType = UNSET


class Snapshot(msgspec.Struct, frozen=True):
    """``at``: wall-clock seconds. ``problem``: why it is not the present state, empty if it is.

    ``decisions`` are newest first; ``missed``: decisions that were made and not read. ``restarts``:
    how often a frontend was followed by another process at its address since the first snapshot.
    ``load_every_s``: seconds between two load reports of a worker, None where workers report
    changes only. ``settings``: the router's, by name, as far as they are known. ``parts``: where
    each part that the source has comes from (``told`` in JSON): workers, load, requests, index,
    waiting, decisions, transfers, thresholds, settings, queue, rates.
    """

    at: float
    source: str
    header: Header = Header()
    workers: tuple[WorkerRow, ...] = ()
    decisions: tuple[DecisionLine, ...] = ()
    missed: int = 0
    meters: tuple[Meter, ...] = ()
    alerts: tuple[Alert, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    thresholds: dict[str, dict[str, float | int | None]] = {}
    settings: dict[str, Any] = {}
    parts: dict[str, Part] = msgspec.field(name="told", default_factory=dict)
    load_every_s: float | None = None
    problem: str = ""
    restarts: int = 0

    def unknown(self, part: str) -> Part | None:
        """An unknown part; None where the part is known."""
        row = self.parts.get(part)
        return row if row is not None and row.unknown else None

    def with_own_lines(self, original: Snapshot) -> Snapshot:
        """With the line breaks of ``provide`` as ``original`` has them."""
        named = zip(self.parts.items(), original.parts.values(), strict=True)
        parts = {
            name: msgspec.structs.replace(part, provide=printable_lines(first.provide))
            for (name, part), first in named
        }
        return msgspec.structs.replace(self, parts=parts)


class DomainRow(msgspec.Struct, frozen=True):
    """One model in one value of a domain.

    ``stale``: role -> workers whose numbers may be out of date, without unavailable ones.
    ``waiting``: requests that wait in the engines of the ``waiting_ranks`` ranks that report it
    (``waiting_told`` in JSON); None where no engine does. ``local`` and ``crossing``: hand-offs of
    KV cache that began here, None where they are not counted.
    """

    capacity: DomainCapacity
    stale: dict[str, int] = {}
    waiting: int | None = None
    waiting_ranks: int = msgspec.field(name="waiting_told", default=0)
    local: int | None = None
    crossing: int | None = None

    @property
    def value(self) -> str | None:
        return self.capacity.value

    @property
    def crossing_share(self) -> float | None:
        """Of the hand-offs that began here, the share that left (0..1)."""
        total = (self.local or 0) + (self.crossing or 0)
        return None if not total else (self.crossing or 0) / total


class DomainView(msgspec.Struct, frozen=True):
    """The panel. ``domain``: what the rows are grouped by, None where no worker publishes any.

    ``domains``: all that workers publish. ``shown``: the capacity alone, as in `topology show`.
    """

    domain: str | None
    domains: tuple[str, ...]
    rows: tuple[DomainRow, ...]
    shown: TopologyShow


class TopFrame(msgspec.Struct, frozen=True):
    """What `top --once -o json` prints: the snapshot, its domains and all alerts."""

    snapshot: Snapshot
    domains: DomainView
    alerts: list[Alert]
    kind: str = "TopFrame"
    schema: int = 1

    def with_own_lines(self, original: TopFrame) -> TopFrame:
        """With the line breaks of `Part.provide` as ``original`` has them."""
        snapshot = self.snapshot.with_own_lines(original.snapshot)
        return msgspec.structs.replace(self, snapshot=snapshot)


#: A load report that is this many times as old as it should be is stale, ...
_LATE: Final = 5
#: ... but never before this many seconds.
_PATIENCE_S: Final = 5.0


def stale_reason(worker: WorkerRow, every_s: float | None) -> str | None:
    """Why the numbers of a worker may be out of date; None if they are current.

    ``every_s``: seconds between two load reports, None where that is unknown. A worker that never
    reported its load is not stale.
    """
    if worker.status == "unavailable":
        return "no response"
    ages = [rank.load_age_s for rank in worker.ranks if rank.load_age_s is not None]
    if every_s is not None and ages:
        limit = max(_PATIENCE_S, _LATE * every_s)
        oldest = max(ages)
        if oldest > limit:
            return f"last load report is {oldest:.0f} s old, expected every {every_s:g} s"
    gaps = sum(rank.gaps for rank in worker.ranks if rank.index == "gapped")
    if gaps:
        return f"{gaps:,} batches of its KV events were lost"
    return None


def meter_of(line: DecisionLine, preference: PreferenceRow) -> Meter | None:
    """The meter of a decision's preference; None where the taint is not a topology domain."""
    topology = topology_of(preference.taint)
    if topology is None:
        return None
    return Meter(*topology, line.at, line.id, preference)
