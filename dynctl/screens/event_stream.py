"""Lines of `events tail` onto stdout, as they come and as fast as they are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.base.tasks import end_tasks
from dynctl.planning.domain_capacity import primary_domain
from dynctl.screens.canvas import Canvas
from dynctl.screens.event_lines import EventLines
from dynctl.screens.streaming import LiveOutput
from dynctl.sources.dynamo.event_lines import TailLine
from dynctl.sources.dynamo.event_stream import TailQueue
from router_core.workers import Worker

_AT_ONCE = 256
_FORMATS = (OutputFormat.TABLE, OutputFormat.WIDE, OutputFormat.JSONL)


class EventStream:
    """``limit``: lines to show at most. ``shown`` counts them. Raises UsageProblem."""

    def __init__(
        self, options: GlobalOptions, *, limit: int | None = None, headings: bool = True
    ) -> None:
        if options.output not in _FORMATS:
            raise UsageProblem(
                f"-o {options.output}: events come without an end; expected table, wide or jsonl",
                "dynctl events tail -o jsonl",
            )
        self.shown = 0
        self._options = options
        self._limit = limit
        self._headings = headings

    async def show(
        self, queue: TailQueue, workers: Sequence[Worker], duration: float | None = None
    ) -> None:
        """Until the limit or ``duration`` seconds; raises ReaderLeft when nobody reads any more."""
        with LiveOutput() as output:
            showing = asyncio.create_task(self._show(output, queue, workers, duration))
            leaving = asyncio.create_task(output.reader_left())
            try:
                tasks = {showing, leaving}
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                await end_tasks((showing, leaving))

    async def _show(
        self,
        output: LiveOutput,
        queue: TailQueue,
        workers: Sequence[Worker],
        duration: float | None,
    ) -> None:
        draw = self._drawing(workers)
        end = None if duration is None else asyncio.get_running_loop().time() + duration
        if isinstance(draw, EventLines) and self._headings:
            await output.write(draw.heading())
        text = draw.line if isinstance(draw, EventLines) else draw
        while self._limit is None or self.shown < self._limit:
            most = _AT_ONCE if self._limit is None else min(_AT_ONCE, self._limit - self.shown)
            try:
                async with asyncio.timeout_at(end):
                    lines = await queue.take(most)
            except TimeoutError:
                return
            # Outside of the timeout: a line is written whole or not at all.
            await output.write("".join(text(line) for line in lines))
            self.shown += len(lines)

    def _drawing(self, workers: Sequence[Worker]) -> EventLines | Callable[[TailLine], str]:
        if self._options.output is OutputFormat.JSONL:
            return _json_line
        known = sorted({name for worker in workers for name in worker.domains})
        transfer = [worker.runtime_config.kv_transfer_domain for worker in workers]
        return EventLines(workers, primary_domain(known, transfer), Canvas.of(self._options))


def _json_line(line: TailLine) -> str:
    return msgspec.json.encode(line).decode() + "\n"
