"""Changes of a fleet that a test makes: those of a dynctl frontend, which it puts back, and the
restart of a worker by a command of the user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import string
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final
from urllib.parse import urlsplit

from dynctl.base.errors import DynctlError, UsageProblem, file_problem, single_line
from dynctl.base.terminal import advise
from dynctl.documents.thresholds import ThresholdValues
from dynctl.documents.workers import WorkerRow
from dynctl.experiments.journal import ChangeJournal, FleetChange, Values
from dynctl.experiments.operator import Operator
from router_core import THRESHOLD_SETTINGS

_NOTE: Final = "dynctl test sets it for some seconds"
_READINGS: Final = 8
"""Each has a connection of its own; of two frontends, one answers all of them in 1 of 128 cases."""
_NOT_ALLOWED: Final = "--allow-changes is not set"
_READ_OUTPUT: Final = 4096
_NAMES: Final = ("worker", "host", "port")


@dataclass(frozen=True, slots=True)
class RestartCommand:
    """The command that restarts a worker, as words with ``{worker}``, ``{host}`` and ``{port}``."""

    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> RestartCommand:
        """Read ``--restart``. Raises UsageProblem."""
        hint = "for example: --restart 'docker restart {worker}'"
        try:
            words = tuple(shlex.split(text))
            fields = _fields(words)
        except ValueError as error:
            raise UsageProblem(f"--restart {text}: {error}", hint) from None
        unknown = sorted(fields.difference(_NAMES))
        if unknown:
            raise UsageProblem(
                f"--restart {text}: unknown {{{unknown[0]}}}",
                "known: {worker}, {host}, {port}; write {{ for a brace",
            )
        if not fields:
            raise UsageProblem(f"--restart {text}: it does not say which worker", hint)
        return cls(words)

    def __str__(self) -> str:
        return shlex.join(self.words)

    def of(self, worker: WorkerRow) -> list[str]:
        """The words for one worker. Raises UsageProblem where its address is needed and unknown."""
        try:
            url = urlsplit(worker.endpoint or "")
            host, port = url.hostname, url.port
        except ValueError:
            host, port = None, None
        values = {"worker": worker.name, "host": host, "port": port}
        for name in sorted(_fields(self.words)):
            if values[name] is None:
                raise UsageProblem(
                    f"--restart {self}: the {name} of worker {worker.name} is unknown, its address "
                    f"is {worker.endpoint or 'not shown'}",
                    "use {worker}",
                )
        return [word.format(**values) for word in self.words]

    async def run(self, worker: WorkerRow, seconds: float) -> str:
        """Run it for a worker, and end it after ``seconds``; why it failed, empty if it did not."""
        words = self.of(worker)
        # Not a pipe: a server that the command starts may hold it as long as it lives.
        with tempfile.TemporaryFile() as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *words,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C does not end what it started
                )
            except PermissionError:
                return f"{words[0]}: no permission to run it"
            except OSError as error:
                return f"{words[0]}: {file_problem(error, 'program')}"
            try:
                async with asyncio.timeout(seconds):
                    code = await process.wait()
            except TimeoutError:
                return f"it did not end within {seconds:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            return f"exit code {code}: {_last_line(output)}" if code else ""


def _fields(words: Sequence[str]) -> set[str]:
    """The names in braces. Raises ValueError."""
    parsed = (part for word in words for part in string.Formatter().parse(word))
    return {name for _, name, _, _ in parsed if name is not None}


def _last_line(output: IO[bytes]) -> str:
    """The last line of a file that has text."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - _READ_OUTPUT))
    lines = output.read(_READ_OUTPUT).decode(errors="replace").split("\n")
    return next((single_line(line, 200) for line in reversed(lines) if line.strip()), "no output")


@asynccontextmanager
async def opened_changes(
    operator: Operator, *, allowed: bool, state: Path | None, restart: RestartCommand | None = None
) -> AsyncIterator[FleetChanges]:
    """The changes of a server by tests. ``allowed``: what an earlier test left is put back at
    once, and no other test changes the server meanwhile. Raises UsageProblem."""
    journal = ChangeJournal(operator.client.url, state)
    changes = FleetChanges(operator, journal, allowed=allowed, restart=restart)
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
    ``restart``: restarts a worker, None without a command for it.
    """

    def __init__(
        self,
        operator: Operator,
        journal: ChangeJournal,
        *,
        allowed: bool,
        restart: RestartCommand | None = None,
    ) -> None:
        self.allowed = allowed
        self.restart = restart if allowed else None
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
        interrupted = False
        self._journal.add(change)
        try:
            await self._operator.call(lambda: self._set(change, change.after))
            yield
        except asyncio.CancelledError:
            interrupted = True
            raise
        finally:
            try:
                await self.put_back(change)
            except DynctlError as error:
                self.left.append((change, error.message))
                raise
            if interrupted:  # no report follows, which would show it
                advise(f"interrupted; put back: {change}")

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
        """The values now. Raises UsageProblem where the model is gone."""
        client = self._operator.client
        if change.kind == "cordon":
            rows: Sequence[WorkerRow] = client.workers()
            row = next((row for row in rows if row.name == change.name), None)
            # The frontend keeps the cordon of a worker that left for its return.
            return {"cordoned": row is None or row.cordoned}
        present = client.thresholds().get(change.name)
        if present is None:
            raise UsageProblem(f"{change.name} left; the frontend keeps the change for its return")
        return present

    def _set(self, change: FleetChange, values: Values) -> None:
        client = self._operator.client
        if change.kind != "cordon":
            client.set_thresholds(change.name, values)
        elif values["cordoned"]:
            client.cordon(change.name, cordoned=True)
        else:
            client.lift_cordon(change.name)
