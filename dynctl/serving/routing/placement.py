"""Where requests go: the decision, by the router of this process or by that of another one."""

from typing import Protocol

from dynctl.documents.route_result import RouteResult
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.routing.service_health import HEALTH_AGE_S
from router_core import Decision, RoutingPlan, RoutingRequest


class Placement(Protocol):
    """Decides hops. ``remote``: a router in another process decides now, and books its plans in the
    same step unless they are ``dry``."""

    @property
    def remote(self) -> bool: ...

    async def place(self, request: RoutingRequest, *, dry: bool = False) -> RoutingPlan:
        """Decide every hop. ``dry``: for a dry run, with every rejection."""

    async def place_decode(self, request: RoutingRequest, prefill: Decision) -> RoutingPlan:
        """Decide the decode hop again, now that prefill is done."""

    async def explain(self, request: RoutingRequest, *, preset: str | None) -> RouteResult:
        """A dry run as a document."""


class LocalPlacement:
    """Placement by the router of this process."""

    remote = False

    def __init__(self, service: RoutingService) -> None:
        self._service = service

    async def place(self, request: RoutingRequest, *, dry: bool = False) -> RoutingPlan:
        if self._service.ask_index is not None:
            await self._service.ask_index(request)
        return self._service.plan(request, detail=dry)

    async def place_decode(self, request: RoutingRequest, prefill: Decision) -> RoutingPlan:
        return self._service.continue_plan(request, prefill)

    async def explain(self, request: RoutingRequest, *, preset: str | None) -> RouteResult:
        await self._service.read_index(request)
        await self._service.refresh_health(HEALTH_AGE_S)
        return self._service.explain(request, preset=preset)
