"""``serve frontend --router``: the connection to the router in another process.

Only hashes, counts and constraints of a request are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec

from dynctl import version
from dynctl.base.tasks import Supervisor
from dynctl.documents.codec import decode
from dynctl.documents.frontends import (
    MAX_PLACES,
    MAX_REPORTS,
    PROTOCOL,
    Alive,
    Exchange,
    Exchanged,
    FleetCards,
    Join,
    Joined,
    Lease,
    Place,
    Placed,
    PlaceDecode,
    PlacementReply,
    Report,
    Resume,
    Resumed,
    Running,
    ToPlace,
    sent_request,
)
from dynctl.documents.route_result import RouteResult
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.http_client import Upstream
from dynctl.serving.engines.response_stream import EngineStream
from dynctl.serving.routing.config import Limits
from router_core import RoutingRequest

#: Seconds between two messages to the router when nothing happens; each renews the lease.
HEARTBEAT_S: Final = 0.5
#: Seconds without an answer after which the router counts as lost.
SILENT_S = 3.0
#: Seconds that reports wait for others, so that one message has many of them.
_GATHER_S: Final = 0.002
#: Seconds that the start waits for the router.
START_S = 5.0
#: Seconds that a request may wait in the router queue; its client and the queue end it earlier.
_LONGEST_WAIT_S: Final = 86_400.0
#: Seconds that the end waits for the router.
_LEAVE_S: Final = 1.0
#: Seconds before another attempt to join: the first, and the longest.
_AGAIN_S: Final = (0.1, 2.0)
#: Seconds between two lists of the running requests: less than a booking's shortest expiry.
_ALIVE_S: Final = 10.0
_MAX_PENDING: Final = 65_536
#: Answers for operators that are read from the router at the same time.
_MAX_READING: Final = 64
_ANSWER_BYTES: Final = 16 * 1024 * 1024
#: Bytes of packed hashes in one message of running requests at most; as JSON a third more.
_RESUME_BYTES: Final = 3 * 1024 * 1024
#: Bytes of packed hashes above which a message gets no more requests to place.
_PLACES_BYTES: Final = 1024 * 1024
_MAX_MESSAGE: Final = 300

_log = logging.getLogger(__name__)
Message = TypeVar("Message", bound=msgspec.Struct)


class RouterLost(Exception):
    """The router does not respond, or does not know this frontend; the message has the reason."""


class RouterRefused(Exception):
    """The router responds, and refused this one message."""


class LinkOwner(Protocol):
    """What follows the router that a link connects to."""

    async def take_fleet(self, fleet: FleetCards, *, joined: bool) -> None:
        """The fleet as the router has it. ``joined``: under a new lease."""

    def running(self) -> Iterator[Running]:
        """The requests that are booked nowhere under the new lease."""

    def alive(self) -> list[str]:
        """The ids of the running requests."""

    def router_changed(self, reason: str | None) -> None:
        """The router responds (None), or is lost for a reason."""


class RouterLink:
    """The connection to the router process: lease, placements, reports.

    ``up``: the router responds and this process has a lease.
    """

    def __init__(self, url: str, token: str | None, name: str) -> None:
        self.url = url.rstrip("/")
        self.up = False
        self._owner: LinkOwner | None = None
        self._name = name
        self._upstream = Upstream(Limits(connect_s=1.0, first_byte_s=_LONGEST_WAIT_S))
        #: With connections of its own: the router reads a connection that had other requests by a
        #: server that costs more.
        self._exchanges = Upstream(Limits(connect_s=1.0))
        for upstream in (self._upstream, self._exchanges):
            upstream.authorize(self.url, token)
        #: The same in all processes that have the router's token.
        self.session_secret = blake2b((token or "").encode(), person=b"dynctl session").digest()[
            :32
        ]
        self._lease = ""
        self._number = 0
        self._fleet = ""
        self._pending: list[Report] = []
        #: A message is due, although no request is to be placed: reports waited, or it is time.
        self._due = False
        self._wake = asyncio.Event()
        self._gathering: asyncio.TimerHandle | None = None
        self._waiting: set[EngineStream] = set()
        #: Requests that the next messages place, each with its answer.
        self._placing: deque[tuple[ToPlace, asyncio.Future[Placed]]] = deque()
        #: The router has another fleet than this process.
        self._fleet_changed = asyncio.Event()
        self._alive_at = 0.0
        self._reading = 0
        self._reason = ""
        self._answered = asyncio.Event()

    @property
    def exposed(self) -> bool:
        """Whether what it sends crosses a network without TLS."""
        parts = urlsplit(self.url)
        return parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "::1", "localhost")

    # -- life ------------------------------------------------------------------------------

    async def start(self, tasks: Supervisor, owner: LinkOwner) -> None:
        """Join; returns when the router answered, or after `START_S` seconds without it."""
        self._owner = owner
        self._upstream.start()
        self._exchanges.start()
        tasks.start("router link", self._run)
        tasks.start("router heartbeat", self._beat)
        tasks.start("fleet of the router", self._follow_fleet)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._answered.wait()

    async def close(self) -> None:
        """Leave: the router ends what is still booked."""
        if self.up:
            self.up = False
            with contextlib.suppress(UpstreamFailure, RouterLost, RouterRefused, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._post("leave", Lease(self._lease), dict)
        self._lease = ""
        if self._gathering is not None:
            self._gathering.cancel()
        await self._upstream.close()
        await self._exchanges.close()

    # -- requests --------------------------------------------------------------------------

    async def place(self, request: RoutingRequest, attempt: int, *, dry: bool) -> PlacementReply:
        """Raises RouterLost or RouterRefused, as the others do.

        While one message has no answer, the next one gathers requests and reports: the more the
        router has to do, the fewer messages it gets.
        """
        if not dry:
            placed = await self._place_with_others(ToPlace(sent_request(request), attempt))
            if placed.placement is not None:
                return placed.placement
            if placed.status:
                error = _error(placed.status, placed.code, placed.message)
                if isinstance(error, RouterLost) and self.up:
                    self._lost(str(error))
                raise error
        message = Place(self._lease, sent_request(request), attempt, dry)
        placement: PlacementReply = await self._ask("place", message, PlacementReply)
        return placement

    async def place_decode(self, request: RoutingRequest, attempt: int) -> PlacementReply:
        message = PlaceDecode(
            self._lease, request.id, attempt, request.allowed_worker_ids, request.excluded
        )
        placement: PlacementReply = await self._ask("decode", message, PlacementReply)
        return placement

    async def explain(self, request: RoutingRequest) -> RouteResult:
        raw = await self._ask("explain", Place(self._lease, sent_request(request), dry=True), None)
        return decode(raw, RouteResult)

    async def refresh(self) -> None:
        """Read the fleet again."""
        fleet = await self._ask("fleet", Lease(self._lease), FleetCards)
        self._fleet = fleet.version
        if self._owner is not None:
            await self._owner.take_fleet(fleet, joined=False)

    async def read(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """``GET path`` of the router: status and body; raises RouterLost, also where too many
        are read at the same time."""
        if not self.up:
            raise RouterLost(self._reason)
        if self._reading >= _MAX_READING:
            raise RouterLost(f"{_MAX_READING} answers of the router are read already")
        self._reading += 1
        try:
            return await self._upstream.get(self.url + path, timeout_s)
        except UpstreamFailure as failure:
            raise RouterLost(str(failure)) from None
        finally:
            self._reading -= 1

    def report(self, report: Report) -> None:
        """Send this with the next message; without a lease it is not needed."""
        if not self._lease:
            return
        if len(self._pending) >= _MAX_PENDING:
            self._lost(f"{_MAX_PENDING:,} reports wait for it")
            return
        self._pending.append(report)
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(
                _GATHER_S, self._reports_are_due
            )

    # -- inside ----------------------------------------------------------------------------

    async def _place_with_others(self, wanted: ToPlace) -> Placed:
        """The answer; without a placement and an error the request has to be sent alone."""
        if not self.up:
            raise RouterLost(self._reason)
        if len(self._placing) >= _MAX_PENDING:
            raise RouterLost(f"{_MAX_PENDING:,} requests wait for it")
        answer: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()
        self._placing.append((wanted, answer))
        self._wake.set()
        return await answer

    def _reports_are_due(self) -> None:
        self._gathering = None
        if self._pending:  # else a message with requests took them along
            self._message_is_due()

    def _message_is_due(self) -> None:
        self._due = True
        self._wake.set()

    async def _run(self) -> None:
        pause = _AGAIN_S[0]
        while True:
            if not self.up:
                try:
                    await self._join()
                except (UpstreamFailure, RouterLost, RouterRefused) as error:
                    self._lost(str(error))
                    if not isinstance(error, UpstreamFailure):
                        self._answered.set()
                    await asyncio.sleep(pause)
                    pause = min(_AGAIN_S[1], 2 * pause)
                    continue
                self._answered.set()
                pause = _AGAIN_S[0]
            await self._wake.wait()
            self._wake.clear()
            if self.up:
                with contextlib.suppress(RouterLost):
                    await self._send()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._message_is_due()

    async def _follow_fleet(self) -> None:
        while True:
            await self._fleet_changed.wait()
            self._fleet_changed.clear()
            with contextlib.suppress(RouterLost, RouterRefused):
                await self.refresh()

    async def _join(self) -> None:
        joined = await self._post("join", Join(PROTOCOL, version()), Joined)
        self._lease, self._number, self._fleet = joined.lease, 0, joined.fleet.version
        self._pending.clear()
        if self._owner is not None:
            await self._owner.take_fleet(joined.fleet, joined=True)
            await self._resume(self._owner)
        self.up = True
        if self._owner is not None:
            # Those that began meanwhile, without the router.
            await self._resume(self._owner)
        self._alive_at = asyncio.get_running_loop().time() + _ALIVE_S
        if self._owner is not None:
            self._owner.router_changed(None)

    async def _resume(self, owner: LinkOwner) -> None:
        batch: list[Running] = []
        size = booked = total = 0
        for request in owner.running():
            batch.append(request)
            total += 1
            size += 750 + request.request.size
            if size > _RESUME_BYTES:
                booked += (await self._post("resume", Resume(self._lease, batch), Resumed)).booked
                batch, size = [], 0
        if batch:
            booked += (await self._post("resume", Resume(self._lease, batch), Resumed)).booked
        if total:
            _log.info("%d of %d running requests are booked at the router again", booked, total)

    async def _send(self) -> None:
        """Send the pending reports and the requests to place, and pass the answers on."""
        now = asyncio.get_running_loop().time()
        if now >= self._alive_at and self._owner is not None:
            self._alive_at = now + _ALIVE_S
            ids = self._owner.alive()
            if ids:
                self._pending.append(Alive(ids))
        while self._placing or self._due:
            reports, self._pending = self._pending[:MAX_REPORTS], self._pending[MAX_REPORTS:]
            self._due = bool(self._pending)
            await self._exchange_once(reports, self._next_places())

    def _next_places(self) -> list[tuple[ToPlace, asyncio.Future[Placed]]]:
        """The requests of the next message, without those whose clients left."""
        batch: list[tuple[ToPlace, asyncio.Future[Placed]]] = []
        size = 0
        while self._placing and len(batch) < MAX_PLACES and size < _PLACES_BYTES:
            wanted, answer = self._placing.popleft()
            if not answer.done():
                batch.append((wanted, answer))
                size += wanted.request.size
        return batch

    async def _exchange_once(
        self, reports: list[Report], batch: list[tuple[ToPlace, asyncio.Future[Placed]]]
    ) -> None:
        """Send one message. Raises RouterLost."""
        self._number += 1
        places = [wanted for wanted, _ in batch]
        message = Exchange(self._lease, self._number, reports, places)
        lost = f"{self.url} left a request out"
        answers: list[Placed] = []
        try:
            exchanged = await self._ask("exchange", message, Exchanged, bounded=True)
            answers = exchanged.answers
            if exchanged.fleet != self._fleet:
                self._fleet_changed.set()
        except RouterLost as error:
            lost = str(error)
            raise
        except RouterRefused as error:
            # It took nothing of the message. Requests get their own answers, each alone.
            answers = [Placed()] * len(batch)
            if batch:
                self._pending[:0] = reports
                self._due = True
            else:
                _log.warning("the router refused %d reports: %s", len(reports), error)
        finally:  # whatever happens, no request waits for an answer that nothing brings
            for number, (_, answer) in enumerate(batch):
                if answer.done():
                    continue
                if number < len(answers):
                    answer.set_result(answers[number])
                else:
                    answer.set_exception(RouterLost(lost))

    async def _ask(
        self,
        action: str,
        message: msgspec.Struct,
        form: type[Message] | None,
        *,
        bounded: bool = False,
    ) -> Any:
        """Send a message under the lease; a failure of the router ends it. One that is not
        ``bounded`` waits as long as the router answers others: a request may wait there."""
        if not self.up:
            raise RouterLost(self._reason)
        lease = self._lease
        try:
            return await self._post(action, message, form, bounded=bounded)
        except (UpstreamFailure, RouterLost) as error:
            reason = str(error)
        if self._lease == lease:
            self._lost(reason)
        raise RouterLost(reason)

    async def _post(
        self,
        action: str,
        message: msgspec.Struct,
        form: Any,
        *,
        bounded: bool = True,
    ) -> Any:
        """Send a message; once more where a kept-alive connection closed meanwhile: the router
        recognizes a message that it received before."""
        body, raw = msgspec.json.encode(message), b""
        timeout_s = SILENT_S if bounded else None
        for last in (False, True):
            try:
                raw = await self._exchange(action, body, timeout_s)
                break
            except UpstreamFailure as failure:
                if failure.kind == "status":
                    raise _answered(failure) from None
                if last or failure.kind != "reset":
                    raise
        try:
            return raw if form is None else msgspec.json.decode(raw, type=form)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
            raise RouterLost(f"{self.url} sent an answer that is not one of a router") from None

    async def _exchange(self, action: str, body: bytes, timeout_s: float | None) -> bytes:
        upstream, path = self._upstream, f"{self._name}/{action}"
        if action == "exchange":  # the lease names this process
            upstream, path = self._exchanges, action
        stream = await upstream.open(
            f"{self.url}/v1/frontends/{path}",
            body,
            {},
            first_byte_s=timeout_s,
            waiting=self._waiting,
        )
        try:
            return await stream.read(_ANSWER_BYTES)
        finally:
            self._waiting.discard(stream)
            stream.close()

    def _lost(self, reason: str) -> None:
        """The lease has ended: requests that wait for the router stop waiting."""
        self.up, self._reason, self._lease = False, reason, ""
        self._pending.clear()
        self._wake.set()
        failure = UpstreamFailure("timeout", reason)
        waiting, self._waiting = self._waiting, set()
        for stream in waiting:
            stream.abandon(failure)
        while self._placing:
            answer = self._placing.popleft()[1]
            if not answer.done():
                answer.set_exception(RouterLost(reason))
        if self._owner is not None:
            self._owner.router_changed(reason)


def _answered(failure: UpstreamFailure) -> RouterLost | RouterRefused:
    """What an error status of the router means."""
    try:
        error = msgspec.json.decode(failure.body)["error"]
        return _error(failure.status, error["code"], str(error["message"]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return _error(failure.status, None, None, str(failure))


def _error(
    status: int, code: str | None, message: str | None, text: str = ""
) -> RouterLost | RouterRefused:
    if message is not None:
        text = f"status {status}: {message[:_MAX_MESSAGE]}"
    if status in (400, 404, 409, 413, 422) or code == "too_many_bookings":
        return RouterRefused(text)
    if status in (401, 403):
        return RouterLost(f"{text} (--router-token)")
    return RouterLost(text)
