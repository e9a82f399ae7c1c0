"""What the frontends know of the workers, the last link of the chain; and live requests if asked.

A frontend that routes by KV cache names every worker that it may choose in its metrics. It is
reached at its URL, at its pod's address, or through the API server's port-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from dynctl.adapters.ports import Cluster, ClusterRefusal
from dynctl.base.errors import DynctlError
from dynctl.base.json_fields import mapping
from dynctl.health.facts import Unread
from dynctl.sources.dynamo.frontend import DynamoFrontend
from dynctl.sources.kubernetes import MOST_FRONTENDS, Reach, Reached, reached
from dynctl.verify.facts import ProbeAnswer, RouterView
from dynctl.verify.gather.permissions import unread
from dynctl.verify.join import JoinedFacts
from dynctl.wire.kubernetes.objects import Pod

T = TypeVar("T")
_PROBE: Final = "dynctl topology probe"


@dataclass(frozen=True, slots=True)
class Routers:
    """How to look at the frontends. ``urls`` are those that were named; none: those in pods.

    ``probe``: so many live requests to each model of each frontend; 0 sends none. ``say`` is told
    before they are sent.
    """

    urls: tuple[str, ...] = ()
    reach: Reach = "auto"
    timeout: float = 5.0
    probe: int = 0
    say: Callable[[str], object] = str


@dataclass(frozen=True, slots=True)
class _Place:
    """A frontend to look at. ``pod`` None: it was named by its URL."""

    name: str
    graph: str
    pod: Pod | None = None


def look(
    routers: Routers, joined: JoinedFacts, cluster: Cluster | None
) -> tuple[tuple[RouterView, ...], tuple[ProbeAnswer, ...] | None]:
    """Every frontend's workers, and the answers to live requests (None where none were sent)."""
    views: list[RouterView] = []
    answers: list[ProbeAnswer] = []
    for place in _places(routers, joined)[:MOST_FRONTENDS]:
        told = _ask(routers, place, cluster, partial(_known, name=place.name))
        views.append(RouterView(place.name, place.graph, told))
        if routers.probe:
            send = partial(_probe, routers, name=place.name)
            sent = _ask(routers, place, cluster, send)
            answers += [ProbeAnswer(place.name, 0, sent.why)] if isinstance(sent, Unread) else sent
    return tuple(views), tuple(answers) if routers.probe else None


def _places(routers: Routers, joined: JoinedFacts) -> list[_Place]:
    if routers.urls:
        only = joined.graphs[0].name if len(joined.graphs) == 1 else ""
        return [_Place(url, only) for url in routers.urls]
    return [
        _Place(f"Pod {pod.name}.{pod.namespace}", graph.name, pod)
        for graph in joined.graphs
        if graph.workers
        for pod in graph.frontends
        if pod.ready
    ]


def _ask(
    routers: Routers, place: _Place, cluster: Cluster | None, ask: Callable[[DynamoFrontend], T]
) -> T | Unread:
    url = place.name
    try:
        with _way(routers, place, cluster) as way:
            url = way.urls[0]
            return ask(DynamoFrontend(url, routers.timeout))
    except DynctlError as error:
        # The address of a forward is gone by the time that somebody reads it.
        told = error.message.replace(url, place.name)
        named = told if place.name in told else f"{place.name}: {told}"
        return Unread(named, error.hint)
    except ClusterRefusal as refusal:
        return Unread(f"{place.name}: {unread(refusal).why}", "or name it: --frontend URL")


def _way(
    routers: Routers, place: _Place, cluster: Cluster | None
) -> AbstractContextManager[Reached]:
    if place.pod is None or cluster is None:
        return nullcontext(Reached([place.name], direct=True))
    return reached(cluster, [place.pod], routers.reach)


def _known(frontend: DynamoFrontend, name: str) -> frozenset[int] | Unread:
    metrics = frontend.metrics()
    if metrics.registered:
        return frozenset(worker for worker, _ in metrics.registered)
    if metrics.kv_routing is False:
        return Unread(f"{name} does not route by KV cache, so it names no workers")
    return Unread(f"{name} names no workers: it serves no model")


def _probe(routers: Routers, frontend: DynamoFrontend, name: str) -> list[ProbeAnswer]:
    found = []
    for model in sorted(frontend.models()):
        many = f"{routers.probe:,} chat" + ("" if routers.probe == 1 else "s")
        routers.say(f'probe: {many} "{_PROBE} N" of one token each to {model} at {name}')
        for number in range(routers.probe):
            status, body = frontend.chat(model, f"{_PROBE} {number}")
            told = mapping(mapping(body.get("nvext")).get("worker_id"))
            found.append(
                ProbeAnswer(
                    name,
                    status,
                    "" if status == 200 else str(body.get("message") or body)[:200],
                    _id(told.get("prefill_worker_id")),
                    _id(told.get("decode_worker_id")),
                )
            )
    return found


def _id(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
