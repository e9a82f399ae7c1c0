"""Changes of a dynctl frontend that a test makes, and puts back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final

from dynctl.base.errors import DynctlError, UsageProblem
from dynctl.documents.thresholds import ThresholdValues
from dynctl.documents.workers import WorkerRow
from dynctl.experiments.journal import ChangeJournal, FleetChange, Values
from dynctl.experiments.operator import Operator
from router_core import THRESHOLD_SETTINGS

_NOTE: Final = "dynctl test sets it for some seconds"
_READINGS: Final = 8
"""Each has a connection of its own; of two frontends, one answers all of them in 1 of 128 cases."""
_NOT_ALLOWED: Final = "--allow-changes is not set"


@asynccontextmanager
async def opened_changes(
    operator: Operator, *, allowed: bool, state: Path | None
) -> AsyncIterator[FleetChanges]:
    """The changes of a server by tests. ``allowed``: what an earlier test left is put back at
    once, and no other test changes the server meanwhile. Raises UsageProblem."""
    journal = ChangeJournal(operator.client.url, state)
    changes = FleetChanges(operator, journal, allowed=allowed)
    try:
        if allowed:
            journal.open()
            await changes.mend()
        else:
            left = () if journal.in_use() else journal.left()
            changes.left = [(change, _NOT_ALLOWED) for change in left]
        yield changes
    finally:
        journal.close()


class FleetChanges:
    """Makes changes, if ``allowed``; each is in the journal before it is made.

    ``mended``: what an earlier test left and is put back; ``left``: what is not, with the reason.
    """

    def __init__(self, operator: Operator, journal: ChangeJournal, *, allowed: bool) -> None:
        self.allowed = allowed
        self.mended: list[FleetChange] = []
        self.left: list[tuple[FleetChange, str]] = []
        self._operator = operator
        self._journal = journal
        operator.client.note = _NOTE

    @asynccontextmanager
    async def cordoned(self, worker: WorkerRow) -> AsyncIterator[None]:
        """A worker without new requests. Raises DynctlError."""
        process = await self._operator.call(self._process)
        before: Values = {"cordoned": False}
        after: Values = {"cordoned": True}
        async with self._made(
            FleetChange("cordon", worker.name, before, after, time.time(), process)
        ):
            yield

    @asynccontextmanager
    async def thresholds(self, model: str, values: ThresholdValues) -> AsyncIterator[None]:
        """Busy thresholds of a model with other values. Raises DynctlError."""
        held = await self._operator.call(self._operator.client.thresholds)
        if model not in held:
            raise UsageProblem(f"the frontend has no thresholds of model {model}")
        process = await self._operator.call(self._process)
        before: Values = {name: held[model].get(name) for name in values}
        async with self._made(
            FleetChange("thresholds", model, before, dict(values), time.time(), process)
        ):
            yield

    def only_threshold(
        self, model: str, name: str, value: float
    ) -> AbstractAsyncContextManager[None]:
        """One busy threshold with a value, and none of the others. Raises DynctlError."""
        return self.thresholds(model, {**dict.fromkeys(THRESHOLD_SETTINGS), name: value})

    @asynccontextmanager
    async def _made(self, change: FleetChange) -> AsyncIterator[None]:
        self._journal.add(change)
        try:
            await self._operator.call(lambda: self._set(change, change.after))
            yield
        finally:
            try:
                await self.put_back(change)
            except DynctlError as error:
                self.left.append((change, error.message))
                raise

    async def put_back(self, change: FleetChange) -> None:
        """Set the former values, and forget the change. A value that differs from what the test
        set was changed by others since, and stays. Raises DynctlError; then it is not forgotten."""
        await self._operator.call(lambda: self._restore(change))
        self._journal.remove(change)

    def lines(self) -> list[str]:
        """What an earlier test left, one line each."""
        lines = [f"put back after an earlier test: {change}" for change in self.mended]
        return lines + [f"left by an earlier test: {change} ({why})" for change, why in self.left]

    async def mend(self) -> None:
        """Put back what an earlier test left."""
        for change in self._journal.left():
            try:
                await self.put_back(change)
                self.mended.append(change)
            except DynctlError as error:
                self.left.append((change, error.message))

    def _restore(self, change: FleetChange) -> None:
        if self._process() != change.process:
            return  # it restarted, which forgets all changes
        present = self._present(change)
        changed = {
            name: value
            for name, value in change.before.items()
            if present.get(name) == change.after[name] and value != change.after[name]
        }
        if changed:
            self._set(change, changed)

    def _process(self) -> str:
        """The process of the frontend. Raises UsageProblem where several answer at the address:
        one of them would be changed, and another one put back."""
        first = self._operator.client.fleet()
        for _ in range(_READINGS - 1):
            if self._operator.client.fleet(first.cards).process != first.process:
                raise UsageProblem(
                    f"several frontends answer at {self._operator.client.url}; test one of them "
                    "by an address of its own"
                )
        return first.process

    def _present(self, change: FleetChange) -> Values:
        """The values now. Raises UsageProblem where the worker or model is gone."""
        client = self._operator.client
        if change.kind == "cordon":
            rows: Sequence[WorkerRow] = client.workers()
            row = next((row for row in rows if row.name == change.name), None)
            present: Values | None = None if row is None else {"cordoned": row.cordoned}
        else:
            present = client.thresholds().get(change.name)
        if present is None:
            raise UsageProblem(f"{change.name} left; the frontend keeps the change for its return")
        return present

    def _set(self, change: FleetChange, values: Values) -> None:
        client = self._operator.client
        if change.kind == "cordon":
            client.cordon(change.name, cordoned=bool(values["cordoned"]))
        else:
            client.set_thresholds(change.name, values)
