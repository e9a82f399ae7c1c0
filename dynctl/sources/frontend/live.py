"""Dynctl frontends, followed: load read for each snapshot, decisions as they are made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Final, NamedTuple, Self

from msgspec import UNSET

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import DynctlError, TimedOut, Unreachable, UsageProblem
from dynctl.base.tasks import Supervisor, end_tasks
from dynctl.documents.decisions import DecisionList
from dynctl.documents.snapshot import DecisionLine, DecisionReport, Snapshot
from dynctl.documents.thresholds import Thresholds, ThresholdValues
from dynctl.documents.workers import WorkerRow
from dynctl.sources.client import AsyncFrontendClient, CallerRefused
from dynctl.sources.frontend.snapshot import (
    KEEP_DECISIONS,
    FrontendReadings,
    decision_line,
    frontend_snapshot,
    newest,
)
from dynctl.sources.frontend.source import FrontendSource
from dynctl.sources.http import async_client
from dynctl.sources.query import DecisionQuery
from dynctl.sources.source import LiveSource

#: A reading takes at most this long, whatever --timeout is: the screen must go on.
READ_S: Final = 5.0
#: Decisions that a frontend returns at a time at most.
MOST_AT_ONCE: Final = 1_000
#: Seconds that a request for decisions waits at the frontend for the next one.
WAIT_S: Final = 20
#: Pause between two requests for decisions, and after a failure.
PAUSE_S: Final = 0.5
RETRY_S: Final = 2.0
#: Pause after a page without a line.
GATHER_S: Final = 0.1


class _Cursors(NamedTuple):
    """Up to which decision and which end of a request the ``process`` of a frontend was read;
    None: of none yet."""

    since: int = 0
    process: str = ""
    ends: int | None = None


class LiveFrontends(LiveSource):
    """Frontends of one service. All that answer are added up; one that answers is enough."""

    def __init__(
        self,
        urls: Sequence[str],
        token: str | None = None,
        timeout: float = 10.0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        source = FrontendSource(urls, token, timeout)
        super().__init__(source, ", ".join(client.url for client in source.clients))
        self._wall = wall
        self._client = async_client(token)
        limit = min(timeout, READ_S)
        self._feeds = [
            AsyncFrontendClient(self._client, client.url, limit) for client in source.clients
        ]
        self._readings = [FrontendReadings(feed, wall) for feed in self._feeds]
        self._tasks = Supervisor()

    async def __aenter__(self) -> Self:
        try:
            await self._read_all()
            if all(reading.problem for reading in self._readings):
                refused = next(filter(None, (one.refused for one in self._readings)), None)
                if refused is not None:
                    raise UsageProblem(
                        "no frontend reports its fleet: " + self._problems(), refused.hint
                    )
                late = all(reading.timed_out for reading in self._readings)
                raise (TimedOut if late else Unreachable)(
                    "no frontend reports its fleet: " + self._problems(),
                    "dynctl version --frontend URL shows what answers there\n"
                    "for a live Dynamo name its discovery backend: "
                    "--discovery etcd --etcd-endpoints ..",
                )
            await asyncio.gather(
                *(self._read_first_decisions(reading) for reading in self._readings)
            )
        except BaseException:
            await self._client.aclose()
            raise
        for reading in self._readings:
            work = partial(self._follow_decisions, reading)
            self._tasks.start("decision feed", work, reading.reader.name)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._tasks.close()
        await self._client.aclose()

    async def snapshot(self) -> Snapshot:
        await self._read_all()
        failed = all(reading.problem for reading in self._readings)
        problem = self._problems() if failed else ""
        return frontend_snapshot(self._readings, self.title, self._wall(), problem)

    async def follow_decisions(self, query: DecisionQuery) -> AsyncGenerator[DecisionReport]:
        """Those of all frontends; each one filters its own."""
        cursors: dict[str, _Cursors] = {}
        first = await asyncio.gather(*(self._page(feed, query, cursors) for feed in self._feeds))
        pages = [page for page in first if page is not None]
        known = [decisions for _, decisions in pages]
        if not known:
            raise UsageProblem("no frontend reports its decisions: " + self._problems())
        if all(decisions.limit_bytes == 0 for decisions in known):
            raise UsageProblem(f"{self.title} keeps no decisions", KEEP_DECISIONS)
        lines = list(newest(*(found for found, _ in pages)))
        yield DecisionReport(
            self.title,
            lines[: query.limit],
            sum(decisions.kept for decisions in known),
            sum(decisions.evicted for decisions in known),
        )
        queue: asyncio.Queue[list[DecisionLine] | Exception] = asyncio.Queue(len(self._feeds))

        async def follow(feed: AsyncFrontendClient) -> None:
            try:
                while True:
                    page = await self._page(feed, query, cursors, WAIT_S)
                    if page is None:
                        await asyncio.sleep(RETRY_S)
                    elif page[0]:
                        await queue.put(page[0])
                    else:  # requests ended as they should: do not ask after each of them
                        await asyncio.sleep(GATHER_S)
            except Exception as error:
                await queue.put(error)

        # The reader may close this generator from another task than the one that reads.
        tasks = [asyncio.create_task(follow(feed)) for feed in self._feeds]
        try:
            while True:
                found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                yield DecisionReport(self.title, found)
        finally:
            await end_tasks(tasks)

    async def _page(
        self,
        feed: AsyncFrontendClient,
        query: DecisionQuery,
        cursors: dict[str, _Cursors],
        wait: int = 0,
    ) -> tuple[list[DecisionLine], DecisionList] | None:
        """The next decisions of one frontend, and earlier ones whose requests ended in a way that
        the query wants to see; None where it does not answer. Moves its cursors."""
        limit = MOST_AT_ONCE if wait else min(query.limit, MOST_AT_ONCE)
        since, process, ends = cursors.get(feed.name, _Cursors())
        try:
            page = await feed.decisions(since, limit, wait, process, ends, query.parameters)
        except UsageProblem:
            raise
        except (DynctlError, WireError):
            return None
        ends = None if page.ends is UNSET else page.ends
        cursors[feed.name] = _Cursors(page.cursor, page.process, ends)
        rows = [*page.decisions, *filter(query.shows_end, page.ended or ())]
        return [decision_line(row, feed.name) for row in rows], page

    async def set_thresholds(self, model: str, values: ThresholdValues) -> Thresholds:
        after = await super().set_thresholds(model, values)
        for reading in self._readings:
            reading.settings_changed()
        return after

    async def read_index(self, worker: WorkerRow | None) -> str:
        return "the frontend always reports its index of the caches"

    # -- inside ----------------------------------------------------------------------------

    def _problems(self) -> str:
        return "; ".join(f"{reading.reader.name}: {reading.problem}" for reading in self._readings)

    async def _read_all(self) -> None:
        await asyncio.gather(*(self._read(reading) for reading in self._readings))

    async def _read(self, readings: FrontendReadings) -> None:
        try:
            await readings.read()
        except DynctlError as error:
            readings.problem, readings.timed_out = error.message, isinstance(error, TimedOut)
            readings.refused = error if isinstance(error, CallerRefused) else None
        except WireError as error:
            readings.problem = f"it answers, but not as a dynctl frontend of this version: {error}"

    async def _read_first_decisions(self, readings: FrontendReadings) -> None:
        try:
            await readings.read_decisions()
        except UsageProblem as error:
            readings.decisions_refused = error.message
        except (DynctlError, WireError):
            pass  # the reading of the fleet reports the same problem

    async def _follow_decisions(self, readings: FrontendReadings) -> None:
        while True:
            try:
                await readings.read_decisions(WAIT_S)
                readings.decisions_refused = ""
                await asyncio.sleep(PAUSE_S)
            except UsageProblem as error:
                readings.decisions_refused = error.message
                await asyncio.sleep(WAIT_S)
            except (DynctlError, WireError):
                await asyncio.sleep(RETRY_S)
            except Exception as error:
                readings.decisions_refused = f"internal error: {error!r}"
                raise
