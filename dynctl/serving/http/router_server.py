"""``serve router``: the routing service for other frontends, over HTTP and without inference.

Workers, dry runs, decisions, thresholds and metrics are those of the OpenAI frontend; selections
and bookings (:mod:`dynctl.serving.http.selection`) replace inference.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from dynctl.serving.config import FrontendConfig
from dynctl.serving.http.frontends import FrontendsApi
from dynctl.serving.http.selection import SelectionApi
from dynctl.serving.http.server import Frontend, run

_LONGEST_SWEEP_S = 15.0


class RouterProcess(Frontend):
    """A frontend process with selections and bookings instead of inference."""

    def __init__(self, config: FrontendConfig) -> None:
        super().__init__(config, inference=False, extra_routes=[lambda _: self._routes()])
        self.service.serves_pools = True
        self.selection = SelectionApi(
            self.service, token=config.api_token, body_bytes=config.limits.body_bytes
        )
        self.frontends = FrontendsApi(
            self.service,
            self.fleet,
            self.selection,
            preset=config.preset,
            token=config.api_token,
            body_bytes=config.limits.body_bytes,
        )

    async def start(self) -> None:
        await super().start()
        self.service.tasks.start("frontend leases", self._end_leases)

    def _routes(self) -> list[web.RouteDef]:
        return self.selection.routes() + self.frontends.routes()

    async def _end_leases(self) -> None:
        while True:
            await asyncio.sleep(min(0.5, self.frontends.lease_s / 8))
            self.frontends.sweep()

    async def drain(self) -> None:
        """Refuse new bookings. The requests of existing ones run in their frontends."""
        self.selection.draining = self.service.draining = True
        await super().drain()

    async def _expire_often(self) -> None:
        limit = self.service.router.config.active_request_expiry_secs
        while True:
            await asyncio.sleep(min(_LONGEST_SWEEP_S, limit / 4))
            self.service.expire()
            self.service.health()
            self.selection.sweep()


def run_router(config: FrontendConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Blocks. Errors as :class:`Frontend`."""
    return run(lambda: RouterProcess(config), config)
