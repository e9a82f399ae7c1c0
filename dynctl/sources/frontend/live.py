"""Frontends of ours over HTTP: load polled, decisions as they are made, one client for all.

What is asked seldom (explaining a decision, thresholds, the whole view) goes through the same
:class:`FrontendClient` that the commands use, beside the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Final

import httpx

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import DynctlError, Unreachable, UsageProblem
from dynctl.base.tasks import Supervisor
from dynctl.documents.codec import decode
from dynctl.documents.config import ConfigDocument
from dynctl.documents.decisions import DecisionList
from dynctl.documents.fleet_load import FleetLoad
from dynctl.documents.route_result import RouteResult
from dynctl.documents.snapshot import DecisionLine, Snapshot
from dynctl.documents.workers import WorkerRow
from dynctl.sources.frontend.client import MAX_ANSWER_BYTES, FrontendClient
from dynctl.sources.frontend.snapshot import FrontendReadings, frontend_snapshot
from dynctl.sources.frontend.source import FrontendSource
from dynctl.sources.source import Values

#: A reading takes at most this long, whatever --timeout says: the screen must go on.
READ_S: Final = 5.0
#: Seconds that a question for decisions waits at the frontend for the next one.
WAIT_S: Final = 20
#: Decisions are asked for this often at most, and again this long after a failure.
PAUSE_S: Final = 0.5
RETRY_S: Final = 2.0


class AsyncFrontendClient:
    """One frontend. ``timeout``: seconds of each answer, the time that it waits not counted."""

    def __init__(self, client: httpx.AsyncClient, url: str, timeout: float) -> None:
        self.url = self.name = url
        self._client = client
        self._timeout = timeout

    async def fleet(self, cards: str | None) -> FleetLoad:
        query = {} if cards is None else {"cards": cards}
        return decode(await self._get("/v1/fleet", query), FleetLoad)

    async def decisions(self, since: int, limit: int, wait: int) -> DecisionList:
        query = {"since": since, "limit": limit, "wait": wait, "preferences": 1}
        return decode(await self._get("/v1/decisions", query, wait), DecisionList)

    async def config(self) -> ConfigDocument:
        return decode(await self._get("/v1/config", {}), ConfigDocument)

    async def _get(self, path: str, query: Mapping[str, str | int], wait: int = 0) -> bytes:
        try:
            async with asyncio.timeout(self._timeout + wait):
                async with self._client.stream("GET", self.url + path, params=query) as answer:
                    parts, size = [], 0
                    async for part in answer.aiter_bytes():
                        size += len(part)
                        if size > MAX_ANSWER_BYTES:
                            raise Unreachable(f"answer over {MAX_ANSWER_BYTES:,} bytes")
                        parts.append(part)
        except TimeoutError:
            raise Unreachable(f"no answer within {self._timeout:g} s") from None
        except httpx.HTTPError as error:
            raise Unreachable(str(error) or type(error).__name__) from None
        status = answer.status_code
        if status in (401, 403):
            raise UsageProblem("it wants a token", "set DYNCTL_TOKEN, or give --token TOKEN")
        if status == 404:
            raise UsageProblem(
                f"{path} is not known there: an older dynctl, or no dynctl",
                "dynctl version --frontend URL asks who is there",
            )
        if status != 200:
            raise Unreachable(f"{path} answered {status}")
        return b"".join(parts)


class LiveFrontends:
    """Frontends of one service. Every one that answers counts; one that answers is enough."""

    def __init__(
        self,
        urls: Sequence[str],
        token: str | None = None,
        timeout: float = 10.0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._asked = [FrontendClient(url, token, timeout) for url in urls]
        self.title = ", ".join(one.url for one in self._asked)
        self._seldom = self._asked[0] if len(self._asked) == 1 else FrontendSource(self._asked)
        self._wall = wall
        headers = {"authorization": f"Bearer {token}"} if token else {}
        # trust_env: a proxy of the machine must not see control calls to a local frontend.
        self._client = httpx.AsyncClient(headers=headers, trust_env=False, timeout=None)  # noqa: S113
        limit = min(timeout, READ_S)
        self._followed = [
            FrontendReadings(AsyncFrontendClient(self._client, one.url, limit), wall)
            for one in self._asked
        ]
        self._tasks = Supervisor()

    async def __aenter__(self) -> LiveFrontends:
        try:
            await self._read()
            self._refuse_silence()
            await asyncio.gather(*(self._first_decisions(one) for one in self._followed))
        except BaseException:
            await self._client.aclose()
            raise
        for one in self._followed:
            work = partial(self._follow_decisions, one)
            self._tasks.start("decision feed", work, one.reader.name)
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
        await self._read()
        silent = [one for one in self._followed if one.problem]
        problem = ""
        if len(silent) == len(self._followed):
            problem = "; ".join(f"{one.reader.name}: {one.problem}" for one in silent)
        return frontend_snapshot(self._followed, self.title, self._wall(), problem)

    async def settle(self) -> None:
        """A frontend tells everything when it is asked."""

    async def decision(self, line: DecisionLine) -> RouteResult:
        return await asyncio.to_thread(self._seldom.decision, line.id)

    async def judged(self, model: str, values: Values) -> list[WorkerRow]:
        return await asyncio.to_thread(self._seldom.judged, model, values)

    async def set_thresholds(self, model: str, values: Values) -> dict[str, float | int | None]:
        after = await asyncio.to_thread(self._seldom.set_thresholds, model, values)
        for one in self._followed:
            one.settings_changed()
        return after

    async def save(self) -> bytes:
        return await asyncio.to_thread(self._seldom.save)

    async def read_index(self, worker: WorkerRow | None) -> str:
        return "the frontend always tells what it knows of the caches"

    # -- inside ----------------------------------------------------------------------------

    async def _read(self) -> None:
        await asyncio.gather(*(self._read_one(one) for one in self._followed))

    async def _read_one(self, one: FrontendReadings) -> None:
        try:
            await one.read()
        except DynctlError as error:
            one.problem = error.message
        except WireError as error:
            one.problem = f"it answers, but not as a dynctl frontend of this version: {error}"

    def _refuse_silence(self) -> None:
        """At the start, nobody who answers is an error and no picture."""
        if any(not one.problem for one in self._followed):
            return
        told = "; ".join(f"{one.reader.name}: {one.problem}" for one in self._followed)
        raise Unreachable(
            f"no frontend tells its fleet: {told}",
            "dynctl version --frontend URL asks who is there\n"
            "for a live Dynamo name its discovery backend: --discovery etcd --etcd-endpoints ..",
        )

    async def _first_decisions(self, one: FrontendReadings) -> None:
        try:
            await one.read_decisions()
        except UsageProblem as error:
            one.decisions_refused = error.message
        except (DynctlError, WireError):
            pass  # told by the reading of the fleet

    async def _follow_decisions(self, one: FrontendReadings) -> None:
        while True:
            try:
                await one.read_decisions(WAIT_S)
                one.decisions_refused = ""
                await asyncio.sleep(PAUSE_S)
            except UsageProblem as error:
                one.decisions_refused = error.message
                await asyncio.sleep(WAIT_S)
            except (DynctlError, WireError):
                await asyncio.sleep(RETRY_S)
            except Exception as error:
                one.decisions_refused = f"internal error: {error!r}"
                raise
