"""Placement by a router in another process, which decides and books.

This process keeps a copy of the fleet and its own bookings, so that it can route by their load
alone while the router does not respond.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field, replace

from dynctl.documents.doubts import Varies, doubt
from dynctl.documents.frontends import (
    Block,
    Ended,
    FirstOutput,
    FleetCards,
    PlacementReply,
    Running,
    hop_of,
    plan_of,
    sent_request,
)
from dynctl.documents.route_result import RouteResult
from dynctl.health import conditions as codes
from dynctl.serving.remote.fleet import MirroredFleet
from dynctl.serving.remote.link import RouterLink, RouterLost, RouterRefused
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.telemetry.observers import RequestRecord, ServiceObserver
from router_core import Decision, RoutingPlan, RoutingRequest, Stage, ThresholdsSet

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RemoteRequest:
    """One running request. ``theirs``: the router decided it last; ``placed``: and it is booked
    there under the current lease. ``asked``: the router may have booked it."""

    request: RoutingRequest
    attempt: int = 0
    theirs: bool = False
    placed: bool = False
    hops: dict[Stage, Decision] = field(default_factory=dict)
    first_output: bool = False
    asked: bool = False


class RemoteRequests(ServiceObserver):
    """The running requests of this process, and what the router gets to know of them."""

    def __init__(self, link: RouterLink) -> None:
        self.link = link
        #: The frontends of one router know each other's sessions.
        self.session_secret = link.session_secret
        self._requests: dict[str, RemoteRequest] = {}

    def begin(self, request: RoutingRequest) -> RemoteRequest:
        """A request, or its next attempt."""
        running = self._requests.get(request.id)
        if running is None:
            running = self._requests[request.id] = RemoteRequest(request)
        else:
            running.request, running.attempt = request, running.attempt + 1
            running.theirs = running.placed = False
        return running

    def get(self, request_id: str) -> RemoteRequest | None:
        return self._requests.get(request_id)

    def decided_elsewhere(self, request_id: str) -> bool:
        """Whether the router decided the request; it keeps that decision."""
        running = self._requests.get(request_id)
        return running is not None and running.theirs

    # -- what happens to bookings (`BookingReports`) -----------------------------------------

    def booked(self, decision: Decision, request: RoutingRequest) -> None:
        running = self._requests.get(request.id)
        if running is not None:
            running.hops[decision.stage] = decision

    def first_output(self, request_id: str, *, seen: bool) -> None:
        running = self._requests.get(request_id)
        if running is not None:
            running.first_output = True
            if running.placed and seen:  # the router finds out by itself what was not seen
                self.link.report(FirstOutput(request_id, running.attempt))

    def output_block(self, request_id: str, decay_fraction: float | None) -> None:
        running = self._requests.get(request_id)
        if running is not None and running.placed:
            self.link.report(Block(request_id, running.attempt, decay_fraction))

    def freed(self, request_id: str, stage: Stage | None, *, computed: bool) -> None:
        running = self._requests.get(request_id)
        if running is None:
            return
        if stage is None:
            running.hops.clear()
        else:
            running.hops.pop(stage, None)
        # Others are freed with the next placement of the request, or at its end.
        if stage == "prefill" and running.placed:
            self.link.report(Ended(request_id, running.attempt, stage, computed=computed))

    def on_finished(self, record: RequestRecord) -> None:
        running = self._requests.pop(record.decision_id, None)
        if running is not None and (running.placed or running.asked):
            self.link.report(
                Ended(
                    record.decision_id,
                    running.attempt,
                    None,
                    record.outcome or "internal",
                    record.output_tokens,
                    computed=record.answered,
                    response=record.client_response(),
                )
            )

    # -- the router comes and goes -----------------------------------------------------------

    def running(self) -> Iterator[Running]:
        """The requests to book again under a new lease."""
        for running in tuple(self._requests.values()):
            hops = [hop for hop in map(hop_of, running.hops.values()) if hop is not None]
            if hops and not running.placed:
                running.placed = True
                request = replace(running.request, local_hashes=())
                yield Running(sent_request(request), running.attempt, hops, running.first_output)

    def alive(self) -> list[str]:
        """The ids of the running requests that the router has."""
        return [request_id for request_id, known in self._requests.items() if known.placed]

    def lost(self) -> None:
        """The lease has ended, and with it what was booked at the router."""
        for running in self._requests.values():
            running.placed = False


class RemotePlacement:
    """Placement by the router, and by the load of this process alone while it does not respond."""

    def __init__(self, service: RoutingService, requests: RemoteRequests) -> None:
        self._service = service
        self._link = requests.link
        self._requests = requests

    @property
    def remote(self) -> bool:
        return self._link.up

    async def place(self, request: RoutingRequest, *, dry: bool = False) -> RoutingPlan:
        if dry:
            return await self._dry_plan(request)
        running = self._requests.begin(request)
        if self._link.up:
            # A client that leaves closes the connection; the report of its end then undoes a
            # booking whose answer did not arrive.
            running.asked = True
            asking = self._link.place(request, running.attempt, dry=False)
            plan = await self._plan_of(asking, request)
            if plan is not None:
                running.theirs, running.placed = True, plan.ok
                return plan
        return self._service.plan(request)

    async def place_decode(self, request: RoutingRequest, prefill: Decision) -> RoutingPlan:
        running = self._requests.get(request.id)
        if running is not None and running.placed and self._link.up:
            running.request = request
            asking = self._link.place_decode(request, running.attempt)
            plan = await self._plan_of(asking, request)
            if plan is not None:
                return replace(plan, prefill=prefill)  # the answer repeats that hop
            running.theirs = running.placed = False
        return self._service.continue_plan(request, prefill)

    async def explain(self, request: RoutingRequest, *, preset: str | None) -> RouteResult:
        with contextlib.suppress(RouterLost, RouterRefused):
            return await self._link.explain(request)
        lost = doubt("DYR0730", varies=Varies(overlap=True), router=self._link.url)
        return self._service.explain(request, preset=preset, more=[lost])

    async def _dry_plan(self, request: RoutingRequest) -> RoutingPlan:
        if self._link.up:
            plan = await self._plan_of(self._link.place(request, 0, dry=True), request)
            if plan is not None:
                return plan
        return self._service.plan(request, detail=True)

    async def _plan_of(
        self, asking: Awaitable[PlacementReply], request: RoutingRequest
    ) -> RoutingPlan | None:
        """The router's plan; None where it has none for this process."""
        router = self._service.router
        try:
            placement = await asking
        except RouterLost:
            return None
        except RouterRefused as error:
            _log.warning("request %s: the router refused it: %s", request.id, error)
            return None
        try:
            return plan_of(placement, request, router.registry.get, router.config)
        except KeyError:
            # The worker joined just now.
            try:
                await self._link.refresh()
                return plan_of(placement, request, router.registry.get, router.config)
            except (KeyError, RouterLost, RouterRefused):
                return None


class RouterFollower:
    """Keeps settings, thresholds and workers of this process those of the router."""

    def __init__(
        self, service: RoutingService, requests: RemoteRequests, fleet: MirroredFleet
    ) -> None:
        self.link = requests.link
        self._service = service
        self._requests = requests
        self._fleet = fleet
        service.observers.append(requests)

    async def start(self) -> None:
        """As :meth:`RouterLink.start`."""
        await self.link.start(self._service.tasks, self)

    async def take_fleet(self, fleet: FleetCards, *, joined: bool) -> None:
        """Take over the router's settings, thresholds and workers."""
        service = self._service
        config = service.router.config
        names = set(config.__dataclass_fields__)
        values = {
            name: value
            for name, value in fleet.settings.items()
            if name in names and value != getattr(config, name)
        }
        if values:
            applied = service.configure(values)
            if not applied.ok:
                _log.warning("settings of the router: %s", applied.message)
        await self._fleet.take(fleet, joined)
        for model, thresholds in fleet.thresholds.items():
            if service.router.busy.thresholds(model).to_dict() != thresholds:
                service.apply(ThresholdsSet(model, thresholds))

    def running(self) -> Iterator[Running]:
        return self._requests.running()

    def alive(self) -> list[str]:
        return self._requests.alive()

    def router_changed(self, reason: str | None) -> None:
        """The router responds again (None), or is lost for a reason."""
        if reason is None:
            self._service.clear_condition(codes.ROUTER_LOST, self.link.url)
            return
        self._requests.lost()
        self._service.set_condition(
            codes.ROUTER_LOST,
            self.link.url,
            f"{reason}; requests are routed by the load of this frontend's own requests",
        )
