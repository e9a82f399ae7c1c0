"""``serve frontend --router``: routing by a router in another process.

The router process decides and books. This process keeps a copy of the fleet and its own bookings,
so that it can route by their load alone while the router does not respond. Only hashes, counts and
constraints of a request are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import zip_longest
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec

from dynctl import version
from dynctl.base.tasks import Supervisor
from dynctl.documents.codec import decode
from dynctl.documents.doubts import Varies, doubt
from dynctl.documents.frontends import (
    MAX_PLACES,
    MAX_REPORTS,
    PROTOCOL,
    Alive,
    AllPlaced,
    Block,
    Ended,
    FirstOutput,
    FleetCards,
    Join,
    Joined,
    Lease,
    Place,
    Placed,
    PlaceDecode,
    Placement,
    Places,
    Received,
    Report,
    Reports,
    Resume,
    Resumed,
    Running,
    ToPlace,
    hop_of,
    plan_of,
    sent_request,
)
from dynctl.documents.route_result import RouteResult
from dynctl.health import conditions as codes
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.response_stream import EngineStream
from dynctl.serving.engines.upstream import Upstream
from dynctl.serving.routing.config import Limits
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.telemetry.observers import RequestRecord, ServiceObserver
from router_core import Applied, Decision, RoutingPlan, RoutingRequest, Stage, ThresholdsSet

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
#: Bytes of packed hashes above which a message of placements gets no more requests.
_PLACES_BYTES: Final = 1024 * 1024
_MAX_MESSAGE: Final = 300

_log = logging.getLogger(__name__)
Message = TypeVar("Message", bound=msgspec.Struct)


class RouterLost(Exception):
    """The router does not respond, or does not know this frontend; the message has the reason."""


class RouterRefused(Exception):
    """The router responds, and refused this one message."""


class Owner(Protocol):
    """Who uses the link."""

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
        self.owner: Owner | None = None
        self._base = f"{self.url}/v1/frontends/{name}"
        self._upstream = Upstream(Limits(connect_s=1.0, first_byte_s=_LONGEST_WAIT_S))
        self._upstream.authorize(self.url, token)
        #: The same in all processes that have the router's token.
        self.session_secret = blake2b((token or "").encode(), person=b"dynctl session").digest()[
            :32
        ]
        self._lease = ""
        self._number = 0
        self._fleet = ""
        self._pending: list[Report] = []
        self._wake = asyncio.Event()
        self._gathering: asyncio.TimerHandle | None = None
        self._waiting: set[EngineStream] = set()
        #: Requests for the next message of placements, each with its answer.
        self._placing: deque[tuple[ToPlace, asyncio.Future[Placed]]] = deque()
        self._to_place = asyncio.Event()
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

    async def start(self, tasks: Supervisor) -> None:
        """Join; returns when the router answered, or after `START_S` seconds without it."""
        self._upstream.start()
        tasks.start("router link", self._run)
        tasks.start("placements", self._place_all)
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

    # -- requests --------------------------------------------------------------------------

    async def place(self, request: RoutingRequest, attempt: int, *, dry: bool) -> Placement:
        """Raises RouterLost or RouterRefused, as the others do.

        While one message of placements has no answer, the next one gathers requests: the more the
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
        found: Placement = await self._ask("place", message, Placement)
        return found

    async def place_decode(self, request: RoutingRequest, attempt: int) -> Placement:
        message = PlaceDecode(
            self._lease, request.id, attempt, request.allowed_worker_ids, request.excluded
        )
        found: Placement = await self._ask("decode", message, Placement)
        return found

    async def explain(self, request: RoutingRequest) -> RouteResult:
        raw = await self._ask("explain", Place(self._lease, sent_request(request), dry=True), None)
        return decode(raw, RouteResult)

    async def refresh(self) -> None:
        """Read the fleet again."""
        fleet = await self._ask("fleet", Lease(self._lease), FleetCards)
        self._fleet = fleet.version
        if self.owner is not None:
            await self.owner.take_fleet(fleet, joined=False)

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
            self._gathering = asyncio.get_running_loop().call_later(_GATHER_S, self._send_now)

    # -- inside ----------------------------------------------------------------------------

    async def _place_with_others(self, one: ToPlace) -> Placed:
        """The answer; without a placement and an error the request has to be sent alone."""
        if not self.up:
            raise RouterLost(self._reason)
        if len(self._placing) >= _MAX_PENDING:
            raise RouterLost(f"{_MAX_PENDING:,} requests wait for it")
        answer: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()
        self._placing.append((one, answer))
        self._to_place.set()
        return await answer

    async def _place_all(self) -> None:
        while True:
            await self._to_place.wait()
            self._to_place.clear()
            while self._placing:
                await self._place_some()

    async def _place_some(self) -> None:
        """Send one message of placements, and pass its answers on."""
        batch: list[tuple[ToPlace, asyncio.Future[Placed]]] = []
        size = 0
        while self._placing and len(batch) < MAX_PLACES and size < _PLACES_BYTES:
            one, answer = self._placing.popleft()
            if not answer.done():
                batch.append((one, answer))
                size += one.request.size
        if not batch:
            return
        message = Places(self._lease, [one for one, _ in batch])
        lost = ""
        found: list[Placed] = []
        try:
            found = (await self._ask("places", message, AllPlaced)).answers
        except RouterLost as error:
            lost = str(error)
        except RouterRefused:
            # One of them; alone each gets its own answer.
            found = [Placed()] * len(batch)
        finally:  # whatever happens, no request waits for an answer that nothing brings
            for (_, answer), placed in zip_longest(batch, found[: len(batch)]):
                if answer.done():
                    continue
                if placed is not None:
                    answer.set_result(placed)
                else:
                    answer.set_exception(RouterLost(lost or f"{self.url} left a request out"))

    def _send_now(self) -> None:
        self._gathering = None
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
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._wake.wait()
            self._wake.clear()
            if self.up:
                with contextlib.suppress(RouterLost, RouterRefused):
                    await self._send()

    async def _join(self) -> None:
        joined = await self._post("join", Join(PROTOCOL, version()), Joined)
        self._lease, self._number, self._fleet = joined.lease, 0, joined.fleet.version
        self._pending.clear()
        if self.owner is not None:
            await self.owner.take_fleet(joined.fleet, joined=True)
            await self._resume(self.owner)
        self.up = True
        if self.owner is not None:
            # Those that began meanwhile, without the router.
            await self._resume(self.owner)
        self._alive_at = asyncio.get_running_loop().time() + _ALIVE_S
        if self.owner is not None:
            self.owner.router_changed(None)

    async def _resume(self, owner: Owner) -> None:
        batch: list[Running] = []
        size = booked = total = 0
        for one in owner.running():
            batch.append(one)
            total += 1
            size += 750 + one.request.size
            if size > _RESUME_BYTES:
                booked += (await self._post("resume", Resume(self._lease, batch), Resumed)).booked
                batch, size = [], 0
        if batch:
            booked += (await self._post("resume", Resume(self._lease, batch), Resumed)).booked
        if total:
            _log.info("%d of %d running requests are booked at the router again", booked, total)

    async def _send(self) -> None:
        """Send the pending reports, and follow the fleet."""
        now = asyncio.get_running_loop().time()
        if now >= self._alive_at and self.owner is not None:
            self._alive_at = now + _ALIVE_S
            ids = self.owner.alive()
            if ids:
                self._pending.append(Alive(ids))
        while True:
            batch, self._pending = self._pending[:MAX_REPORTS], self._pending[MAX_REPORTS:]
            self._number += 1
            message = Reports(self._lease, self._number, batch)
            received = await self._ask("reports", message, Received, bounded=True)
            if not self._pending:
                break
        if received.fleet != self._fleet:
            await self.refresh()

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
        stream = await self._upstream.open(
            f"{self._base}/{action}", body, {}, first_byte_s=timeout_s, waiting=self._waiting
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
        if self.owner is not None:
            self.owner.router_changed(reason)


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


@dataclass(slots=True)
class _Request:
    """One running request. ``theirs``: the router decided it last; ``placed``: and it is booked
    there under the current lease. ``asked``: the router may have booked it."""

    request: RoutingRequest
    attempt: int = 0
    theirs: bool = False
    placed: bool = False
    hops: dict[Stage, Decision] = field(default_factory=dict)
    first_output: bool = False
    asked: bool = False


class RemoteRouting(RoutingService):
    """The service of a frontend whose router is another process.

    Its own router has the same workers and no index, and counts the requests of this process.
    ``mirror`` takes over the router's workers. ``not_for``: observers that get no decisions of the
    other process, which keeps them itself.
    """

    def __init__(self, link: RouterLink, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.link = link
        # The frontends of one router know each other's sessions.
        self.session_secret = link.session_secret
        link.owner = self
        self.mirror: Callable[[FleetCards, bool], Awaitable[None]] | None = None
        self.not_for: tuple[ServiceObserver, ...] = ()
        self.observers.append(_Ends(self))
        self._requests: dict[str, _Request] = {}

    # -- deciding --------------------------------------------------------------------------

    async def place(self, request: RoutingRequest, *, dry: bool = False) -> RoutingPlan:
        if dry:
            return await self._dry_plan(request)
        known = self._requests.get(request.id)
        if known is None:
            known = self._requests[request.id] = _Request(request)
        else:
            known.request, known.attempt = request, known.attempt + 1
            known.theirs = known.placed = False
        if self.link.up:
            # A client that leaves closes the connection; the report of its end then undoes a
            # booking whose answer did not arrive.
            known.asked = True
            found = await self._found(self.link.place(request, known.attempt, dry=False), request)
            if found is not None:
                known.theirs, known.placed = True, found.ok
                return found
        return self.plan(request)

    async def place_decode(self, request: RoutingRequest, prefill: Decision) -> RoutingPlan:
        known = self._requests.get(request.id)
        if known is not None and known.placed and self.link.up:
            known.request = request
            found = await self._found(
                self.link.place_decode(request, known.attempt), request, prefill
            )
            if found is not None:
                return found
            known.theirs = known.placed = False
        return self.continue_plan(request, prefill)

    async def dry_route(self, request: RoutingRequest, *, preset: str | None) -> RouteResult:
        with contextlib.suppress(RouterLost, RouterRefused):
            return await self.link.explain(request)
        lost = doubt("DYR0730", varies=Varies(overlap=True), router=self.link.url)
        return self.explain(request, preset=preset, more=[lost])

    async def _dry_plan(self, request: RoutingRequest) -> RoutingPlan:
        if self.link.up:
            found = await self._found(self.link.place(request, 0, dry=True), request)
            if found is not None:
                return found
        return self.plan(request, detail=True)

    async def _found(
        self,
        asking: Awaitable[Placement],
        request: RoutingRequest,
        prefill: Decision | None = None,
    ) -> RoutingPlan | None:
        """The router's plan; None where it has none for this process. ``prefill``: the decision of
        the hop that is done, which the answer repeats."""
        try:
            found = await asking
        except RouterLost:
            return None
        except RouterRefused as error:
            _log.warning("request %s: the router refused it: %s", request.id, error)
            return None
        router = self.router
        try:
            plan = plan_of(found, request, router.registry.get, router.config)
        except KeyError:
            # The worker joined just now.
            try:
                await self.link.refresh()
                plan = plan_of(found, request, router.registry.get, router.config)
            except (KeyError, RouterLost, RouterRefused):
                return None
        return plan if prefill is None else replace(plan, prefill=prefill)

    # -- bookings --------------------------------------------------------------------------

    def book(self, decision: Decision, request: RoutingRequest, record: RequestRecord) -> Applied:
        known = self._requests.get(request.id)
        if known is not None:
            known.hops[decision.stage] = decision
        return super().book(decision, request, record)

    def decided(self, plan: RoutingPlan, request: RoutingRequest, record: RequestRecord) -> None:
        known = self._requests.get(request.id)
        if known is None or not known.theirs:
            super().decided(plan, request, record)
            return
        every = self.observers
        self.observers = every.without(self.not_for)
        try:
            super().decided(plan, request, record)
        finally:
            self.observers = every

    def prefill_done(self, request_id: str) -> Applied:
        known = self._requests.get(request_id)
        if known is not None:
            known.first_output = True
            if known.placed:
                self.link.report(FirstOutput(request_id, known.attempt))
        return super().prefill_done(request_id)

    def prefill_over(self, request_id: str) -> Applied:
        known = self._requests.get(request_id)
        if known is not None:
            known.first_output = True  # the router finds it out by itself
        return super().prefill_over(request_id)

    def output_block(self, request_id: str, decay_fraction: float | None = None) -> Applied:
        known = self._requests.get(request_id)
        if known is not None and known.placed:
            self.link.report(Block(request_id, known.attempt, decay_fraction))
        return super().output_block(request_id, decay_fraction)

    def free(
        self, request_id: str, stage: Stage | None = None, *, computed: bool = True
    ) -> Applied:
        known = self._requests.get(request_id)
        if known is not None:
            if stage is None:
                known.hops.clear()
            else:
                known.hops.pop(stage, None)
            # Others are freed with the next placement of the request, or at its end.
            if stage == "prefill" and known.placed:
                self.link.report(Ended(request_id, known.attempt, stage, computed=computed))
        return super().free(request_id, stage, computed=computed)

    def ended(self, record: RequestRecord) -> None:
        """The request ended in any way."""
        known = self._requests.pop(record.decision_id, None)
        if known is not None and (known.placed or known.asked):
            self.link.report(
                Ended(
                    record.decision_id,
                    known.attempt,
                    None,
                    record.outcome or "internal",
                    record.output_tokens,
                    computed=record.answered,
                    response=record.client_response(),
                )
            )

    # -- the router comes and goes -----------------------------------------------------------

    async def take_fleet(self, fleet: FleetCards, *, joined: bool) -> None:
        """Take over the router's settings, thresholds and workers."""
        config = self.router.config
        names = set(config.__dataclass_fields__)
        values = {
            name: value
            for name, value in fleet.settings.items()
            if name in names and value != getattr(config, name)
        }
        if values:
            applied = self.configure(values)
            if not applied.ok:
                _log.warning("settings of the router: %s", applied.message)
        if self.mirror is not None:
            await self.mirror(fleet, joined)
        for model, thresholds in fleet.thresholds.items():
            if self.router.busy.thresholds(model).to_dict() != thresholds:
                self.apply(ThresholdsSet(model, thresholds))

    def running(self) -> Iterator[Running]:
        """The requests to book again under a new lease."""
        for known in tuple(self._requests.values()):
            hops = [hop for hop in map(hop_of, known.hops.values()) if hop is not None]
            if hops and not known.placed:
                known.placed = True
                request = replace(known.request, local_hashes=())
                yield Running(sent_request(request), known.attempt, hops, known.first_output)

    def alive(self) -> list[str]:
        """The ids of the running requests that the router has."""
        return [request_id for request_id, known in self._requests.items() if known.placed]

    def router_changed(self, reason: str | None) -> None:
        """The router responds again (None), or is lost for a reason."""
        self.remote = reason is None
        if reason is None:
            self.clear_condition(codes.ROUTER_LOST, self.link.url)
            return
        for known in self._requests.values():
            known.placed = False
        self.set_condition(
            codes.ROUTER_LOST,
            self.link.url,
            f"{reason}; requests are routed by the load of this frontend's own requests",
        )


class _Ends(ServiceObserver):
    """Passes the end of each request on."""

    def __init__(self, service: RemoteRouting) -> None:
        self._service = service

    def on_finished(self, record: RequestRecord) -> None:
        self._service.ended(record)
