"""Lines of `thresholds watch` onto stdout, as things change."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.base.tasks import end_tasks
from dynctl.documents.thresholds import ThresholdEvent
from dynctl.screens.streaming import LiveOutput
from dynctl.screens.thresholds import event_line

_FORMATS: Final = (OutputFormat.TABLE, OutputFormat.WIDE, OutputFormat.JSONL)


class ThresholdStream:
    """Events in, lines out. ``limit``: lines to show at most. Raises UsageProblem.

    :meth:`put` may be called from any thread once :meth:`show` has begun.
    """

    def __init__(self, options: GlobalOptions, *, limit: int | None = None) -> None:
        if options.output not in _FORMATS:
            raise UsageProblem(
                f"-o {options.output}: changes come without an end; expected table, wide or jsonl",
                "dynctl thresholds watch -o jsonl",
            )
        self.shown = 0
        self._json = options.output is OutputFormat.JSONL
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[list[ThresholdEvent]] = asyncio.Queue()

    def put(self, events: list[ThresholdEvent]) -> None:
        """Show these; after the end nothing happens."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, events)

    async def show(self, duration: float | None = None) -> None:
        """Until the limit or ``duration`` seconds; raises ReaderLeft when nobody reads any more."""
        with LiveOutput() as output:
            showing = asyncio.create_task(self._show(output, duration))
            leaving = asyncio.create_task(output.reader_left())
            try:
                tasks = {showing, leaving}
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                await end_tasks((showing, leaving))

    async def _show(self, output: LiveOutput, duration: float | None) -> None:
        end = None if duration is None else self._loop.time() + duration
        while self._limit is None or self.shown < self._limit:
            try:
                async with asyncio.timeout_at(end):
                    events = await self._queue.get()
            except TimeoutError:
                return
            if self._limit is not None:
                events = events[: self._limit - self.shown]
            # Outside of the timeout: a line is written whole or not at all.
            await output.write("".join(self._line(event) + "\n" for event in events))
            self.shown += len(events)

    def _line(self, event: ThresholdEvent) -> str:
        return msgspec.json.encode(event).decode() if self._json else event_line(event)
