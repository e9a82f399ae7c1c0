"""The operators' endpoints of a frontend whose router is another process.

Reading is reading there: decisions, workers, settings and the load of the fleet are the router's.
Changes and the state of the index belong there. While the router is lost, this process answers with
what it knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import partial
from typing import Final
from urllib.parse import quote

from aiohttp import web
from msgspec.structs import replace

from dynctl.base.decode_errors import WireError
from dynctl.base.tasks import in_turns
from dynctl.documents.codec import decode
from dynctl.documents.fleet_load import FleetLoad
from dynctl.serving.http.auth import Handler, guarded
from dynctl.serving.http.fleet_endpoints import FLEET_PATH, FleetFeed
from dynctl.serving.http.json_responses import json_response
from dynctl.serving.remote.link import RouterLink, RouterLost
from dynctl.serving.routing.refusal import HttpError

#: Seconds to read at the router; past decisions wait for the next one for up to 30.
_READ_S: Final = 35.0
#: Read at the router: endpoints of operators, and (False) those of every client.
_READ: Final = {
    "/v1/decisions": True,
    "/v1/decisions/{id}": True,
    "/v1/workers": True,
    "/v1/workers/{worker:.+}": True,
    "/v1/config": False,
}
_THERE: Final = frozenset(
    {
        ("POST", "/busy_threshold"),
        ("POST", "/v1/workers"),
        ("DELETE", "/v1/workers/{worker:.+}"),
        ("POST", "/v1/workers/{worker:.+}/cordon"),
        ("POST", "/v1/workers/{worker:.+}/uncordon"),
        ("GET", "/v1/view"),
        ("GET", "/v1/index"),
        ("GET", "/v1/recording"),
    }
)


def with_shared_router(
    routes: Iterable[web.RouteDef], link: RouterLink, feed: FleetFeed, token: str | None
) -> list[web.RouteDef]:
    """The routes of a frontend, where those above are the router's."""
    kept = []
    for route in routes:
        handler: Handler = route.handler
        if (route.method, route.path) in _THERE:
            handler = guarded(partial(_elsewhere, link.url), token, json=False)
        elif route.path == FLEET_PATH:
            handler = guarded(partial(_fleet, link, feed), token)
        elif route.method == "GET" and route.path in _READ:
            # The local handler is guarded already, and answers where the router does not.
            read = partial(_read, link, handler)
            handler = guarded(read, token) if _READ[route.path] else read
        kept.append(web.RouteDef(route.method, route.path, handler, route.kwargs))
    return kept


async def _elsewhere(router: str, http: web.Request) -> web.StreamResponse:
    raise HttpError(
        409,
        f"{http.method} {http.path[:200]}: the router process at {router} owns this; send the "
        "request there",
        "conflict",
        "owned_by_router",
    )


async def _read(link: RouterLink, local: Handler, http: web.Request) -> web.StreamResponse:
    """Decisions that this process made while the router was lost are here."""
    with contextlib.suppress(RouterLost):
        status, body = await link.read(http.path_qs, _READ_S)
        if status not in (401, 403, 404):
            return web.Response(
                status=status, body=body, headers={"content-type": "application/json"}
            )
    return await local(http)


async def _fleet(link: RouterLink, feed: FleetFeed, http: web.Request) -> web.StreamResponse:
    return json_response(await shared_fleet(link, feed, http.query.get("cards")))


async def shared_fleet(link: RouterLink, feed: FleetFeed, cards: str | None) -> FleetLoad:
    """The router's fleet, with the conditions, the requests and the audit of this process too.

    ``cards`` as in :meth:`FleetFeed.read`.
    """
    own = await in_turns(feed.steps(cards))
    path = FLEET_PATH if cards is None else f"{FLEET_PATH}?cards={quote(cards)}"
    with contextlib.suppress(RouterLost, WireError):
        status, body = await link.read(path, _READ_S)
        if status == 200:
            load = decode(body, FleetLoad)
            named = {(condition.code, condition.subject) for condition in load.conditions}
            more = [
                condition
                for condition in own.conditions
                if (condition.code, condition.subject) not in named
            ]
            return replace(
                load,
                conditions=[*load.conditions, *more],
                in_flight=own.in_flight,
                audit=own.audit,
                traffic=own.traffic,
                tested=own.tested,
            )
    # Until the router answers again it is unknown whether its process is another one, whose counts
    # begin at 0.
    return replace(own, process="")
