"""What a source is: the questions of the commands, and the snapshots of `top`.

Each origin (a frontend of ours, a live Dynamo, a saved view, the demo fleet) has one
:class:`Source`, which reads the origin once for each question, and one :class:`LiveSource`, which
follows it.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

from dynctl.base.errors import UsageProblem
from dynctl.documents.snapshot import DecisionReport
from dynctl.documents.thresholds import Thresholds, ThresholdValues

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractContextManager

    from dynctl.documents.config import ConfigDocument
    from dynctl.documents.replicas import ReplicaRow
    from dynctl.documents.route_result import RouteResult
    from dynctl.documents.snapshot import DecisionLine, Snapshot
    from dynctl.documents.workers import WorkerRow
    from dynctl.sources.query import DecisionQuery, RouteQuery
    from dynctl.sources.thresholds.replicas import Replica
    from dynctl.wire.dynamo.frontend_metrics import Lengths

#: Seconds between two readings of a source that does not report decisions as they are made.
FOLLOW_S: Final = 0.5


class Source(Protocol):
    """Answers to the commands' questions. Methods raise DynctlError."""

    @property
    def title(self) -> str: ...

    @property
    def doubts(self) -> tuple[str, ...]:
        """Whole sentences: what is unknown about the last list of workers or replicas."""
        ...

    @property
    def other_routers(self) -> list[ReplicaRow] | None:
        """Those whose requests count in the load of the last list of workers; None: not shared."""
        ...

    def route(self, query: RouteQuery) -> RouteResult: ...

    def workers(self, *, index: bool = True) -> list[WorkerRow]:
        """``index`` False: the caches of the workers are not needed and may stay unread."""
        ...

    def thresholds(self) -> dict[str, Thresholds]:
        """Model -> its thresholds."""
        ...

    def set_thresholds(self, model: str, values: ThresholdValues) -> Thresholds:
        """Set some thresholds of a model; returns all that are in force then."""
        ...

    def replicas(self) -> AbstractContextManager[list[Replica]]:
        """The processes that hold busy thresholds, reachable while the context is open."""
        ...

    def judged(self, model: str, values: ThresholdValues) -> list[WorkerRow]:
        """The workers as they would be under other thresholds; nothing is set."""
        ...

    def config(self) -> ConfigDocument:
        """The router's preset and settings."""
        ...

    def lengths(self) -> dict[str, Lengths] | None:
        """The lengths of the requests so far, by model; None without a running frontend."""
        ...

    def recent_decisions(self, limit: int) -> list[RouteResult] | None:
        """The last decisions with their candidates; None where the source keeps none."""
        ...

    def decision(self, decision_id: str | None) -> RouteResult:
        """A past decision, explained: by its id or the id's end; None: the last one."""
        ...

    def save(self) -> bytes:
        """The router's state as a view file."""
        ...


class LiveSource:
    """An origin that is followed while the context is open, on one event loop.

    Entering raises Unreachable or UsageProblem. Afterwards :meth:`snapshot` never raises: what is
    not reachable becomes the snapshot's ``problem``. The other methods raise DynctlError.
    """

    def __init__(self, source: Source, title: str) -> None:
        self.source = source
        self.title = title

    @property
    def past(self) -> str:
        """What snapshots show in place of the present, ``saved view``; empty if they are live."""
        return ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    async def snapshot(self) -> Snapshot:
        """The present state, read now."""
        raise NotImplementedError

    async def settle(self) -> None:
        """Wait a moment for values that arrive on their own, so that a single frame has them."""

    async def read_index(self, worker: WorkerRow | None) -> str:
        """Start to read what ``worker`` caches (None: all workers), which costs the workers time.

        Returns what happens now, as a sentence for the user.
        """
        raise NotImplementedError

    async def decision(self, line: DecisionLine) -> RouteResult:
        """A complete decision, explained."""
        return await asyncio.to_thread(self.source.decision, line.id)

    async def follow_decisions(self, query: DecisionQuery) -> AsyncGenerator[DecisionReport]:
        """First the kept decisions that match, newest first, then those that are made: a report
        for each reading, without end. Raises DynctlError where the source has no decisions."""
        seen: set[tuple[str, float]] = set()
        while True:
            shown = await self.snapshot()
            unknown = shown.unknown("decisions")
            if unknown is not None and not shown.decisions:
                raise UsageProblem(f"decisions are unknown: {unknown.unknown}", unknown.provide)
            fresh = [
                decision for decision in shown.decisions if (decision.id, decision.at) not in seen
            ]
            new = [line for line in fresh if query.keeps(line)]
            if shown.decisions:
                yield DecisionReport(self.title, new if seen else new[: query.limit])
            else:
                part = shown.parts.get("decisions")
                yield DecisionReport(self.title if part is None else part.source, [], kept=0)
            seen = {(decision.id, decision.at) for decision in shown.decisions} | {("", 0.0)}
            await asyncio.sleep(FOLLOW_S)

    async def judged(self, model: str, values: ThresholdValues) -> list[WorkerRow]:
        """The workers as they would be under other thresholds; nothing is set."""
        return await asyncio.to_thread(self.present().judged, model, values)

    async def set_thresholds(self, model: str, values: ThresholdValues) -> Thresholds:
        """Set some thresholds of a model; returns all that are in force then."""
        return await asyncio.to_thread(self.source.set_thresholds, model, values)

    async def save(self) -> bytes:
        """The router's state as a view file."""
        return await asyncio.to_thread(self.present().save)

    def present(self) -> Source:
        """The source of the state that is shown now."""
        return self.source
