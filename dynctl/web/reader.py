"""The documents of this process for its own page: what ``top`` reads over HTTP, read inside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec

from dynctl.base.decode_errors import WireError
from dynctl.base.tasks import in_turns
from dynctl.documents.codec import decode
from dynctl.documents.config import ConfigDocument
from dynctl.documents.decisions import DecisionList, PastDecision
from dynctl.documents.fleet_load import FleetLoad
from dynctl.documents.route_result import RouteResult
from dynctl.documents.snapshot import TopFrame
from dynctl.serving.http.process import ServingProcess
from dynctl.serving.http.shared_router import shared_fleet
from dynctl.serving.remote.link import RouterLost
from dynctl.serving.routing.service_health import HEALTH_AGE_S
from dynctl.sources.alerts import AlertBoard
from dynctl.sources.domains import DomainBoard
from dynctl.sources.frontend.snapshot import FrontendReadings, frontend_snapshot
from dynctl.top.history import History

Document = TypeVar("Document", bound=msgspec.Struct)

#: Seconds for which all viewers get the same reading.
FRESH_S: Final = 1.0
#: Seconds to wait for the router of a frontend that has it elsewhere.
_READ_S: Final = 5.0


class OwnReader:
    """A :class:`FrontendReader` of the process that it runs in."""

    def __init__(self, process: ServingProcess) -> None:
        self.name = "this frontend"
        self._service = process.service
        self._operators = process.administration
        self._link = process.core.routing.link

    async def fleet(self, cards: str | None) -> FleetLoad:
        await self._service.refresh_health(HEALTH_AGE_S)
        if self._link is None:
            return await in_turns(self._operators.feed.steps(cards))
        return await shared_fleet(self._link, self._operators.feed, cards)

    async def decisions(
        self, since: int, limit: int, wait: int, process: str = "", ends: int | None = None
    ) -> DecisionList:
        query = {"since": str(since), "limit": str(limit), "preferences": "1"}
        if process:
            query["process"] = process
        query |= {} if ends is None else {"ends": str(ends)}
        path = "/v1/decisions?" + "&".join(f"{name}={value}" for name, value in query.items())
        found = await self._of_the_router(path, DecisionList)
        return found or await self._operators.admin.decision_list(query)

    async def decision(self, wanted: str) -> RouteResult:
        """A past decision; raises HttpError (400, 404)."""
        path = f"/v1/decisions/{quote(wanted, safe='')}"
        return await self._of_the_router(path, PastDecision) or self._operators.admin.past(wanted)

    async def config(self) -> ConfigDocument:
        found = await self._of_the_router("/v1/config", ConfigDocument)
        return found or self._operators.admin.settings()

    async def _of_the_router(self, path: str, kind: type[Document]) -> Document | None:
        """A document of the router in another process; None without one, or while it is lost."""
        if self._link is not None:
            with suppress(RouterLost, WireError):
                status, body = await self._link.read(path, _READ_S)
                if status == 200:
                    return decode(body, kind)
        return None


class Readings:
    """The frame that all viewers share: as ``top --once`` reads it, at most once in FRESH_S.

    ``clock``: monotonic seconds. Nothing is read while there is no viewer.
    """

    def __init__(
        self,
        reader: OwnReader,
        title: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.reader = reader
        self._title = title
        self._clock, self._wall = clock, wall
        self._readings = FrontendReadings(reader, wall)
        self._domains, self._alerts = DomainBoard(), AlertBoard()
        #: The last minutes, as far as the page was seen then.
        self.history = History()
        self._reading = asyncio.Lock()
        self._read_at: float | None = None
        self._frame: TopFrame | None = None

    async def frame(self) -> TopFrame:
        async with self._reading:
            late = self._read_at is None or self._clock() - self._read_at >= FRESH_S
            if self._frame is None or late:
                await self._readings.read()
                await self._readings.read_decisions()
                snapshot = frontend_snapshot([self._readings], self._title, self._wall())
                self.history.add(snapshot, self._clock())
                alerts = self._alerts.alerts(snapshot, self._domains.capacity(snapshot))
                self._frame = TopFrame(snapshot, self._domains.view(snapshot), list(alerts))
                self._read_at = self._clock()
            return self._frame
