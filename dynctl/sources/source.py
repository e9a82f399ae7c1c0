"""Where snapshots come from: one source at a time, and the only thing here that asks anybody."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

from dynctl.documents.route_result import RouteResult
from dynctl.documents.snapshot import DecisionLine, Snapshot
from dynctl.documents.workers import WorkerRow

Values = Mapping[str, float | int | None]
"""Threshold -> value; None switches it off."""


class LiveSource(Protocol):
    """A fleet that is followed from ``__aenter__`` to ``__aexit__``, on one event loop.

    Entering raises Unreachable or UsageProblem. Afterwards :meth:`snapshot` never raises: what
    cannot be reached is the snapshot's ``problem``. The others raise DynctlError, whose message
    is shown.
    """

    title: str

    async def __aenter__(self) -> LiveSource: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    async def snapshot(self) -> Snapshot:
        """The present state, read now."""
        ...

    async def settle(self) -> None:
        """Wait a moment for what comes by itself: a single frame must not be too early for it."""
        ...

    async def decision(self, line: DecisionLine) -> RouteResult:
        """A complete decision, explained."""
        ...

    async def judged(self, model: str, values: Values) -> list[WorkerRow]:
        """The workers as they would be under other thresholds; sets nothing."""
        ...

    async def set_thresholds(self, model: str, values: Values) -> dict[str, float | int | None]:
        """Set some thresholds of a model; returns all that are in force then."""
        ...

    async def save(self) -> bytes:
        """The router's view, as ``--view`` reads it."""
        ...

    async def read_index(self, worker: WorkerRow | None) -> str:
        """Begin to follow what ``worker`` caches (all workers, where None), which costs too much
        to do unasked. Returns what happens now, for the person."""
        ...
