"""Read the workers of each frontend's router, and send the live requests of --probe.

A frontend that routes by KV cache lists its workers in its metrics. It is reached at its URL, at
its pod's address, or through the API server's port-forward.
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
from dynctl.sources.dynamo.frontend_pods import MOST_FRONTENDS, Reach, Reached, reached
from dynctl.sources.dynamo.frontends import with_name
from dynctl.verify.cluster_facts import ProbeAnswer, RouterView
from dynctl.verify.gather.permissions import unread
from dynctl.verify.join import JoinedFacts
from dynctl.wire.kubernetes.objects import Pod

T = TypeVar("T")
_PROBE: Final = "dynctl topology probe"


@dataclass(frozen=True, slots=True)
class Routers:
    """How to reach the frontends. ``urls``: from --frontend; empty: the frontend pods.

    ``probe``: number of live requests to each model of each frontend; 0 sends none. ``say`` gets a
    message before they are sent.
    """

    urls: tuple[str, ...] = ()
    reach: Reach = "auto"
    timeout: float = 5.0
    probe: int = 0
    say: Callable[[str], object] = str


@dataclass(frozen=True, slots=True)
class _Place:
    """A frontend. ``pod`` None: it was specified by its URL."""

    name: str
    graph: str
    pod: Pod | None = None


def read_routers(
    routers: Routers, joined: JoinedFacts, cluster: Cluster | None
) -> tuple[tuple[RouterView, ...], tuple[ProbeAnswer, ...] | None]:
    """The workers of each frontend, and the responses to live requests (None if not sent)."""
    views: list[RouterView] = []
    answers: list[ProbeAnswer] = []
    silent = {} if joined.cluster is None else dict(joined.cluster.silent_nodes)
    for place in _places(routers, joined)[:MOST_FRONTENDS]:
        workers = _query(routers, place, cluster, partial(_workers, name=place.name), silent)
        views.append(RouterView(place.name, place.graph, workers))
        if routers.probe:
            send = partial(_probe, routers, name=place.name)
            sent = _query(routers, place, cluster, send, silent)
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


def _query(
    routers: Routers,
    place: _Place,
    cluster: Cluster | None,
    query: Callable[[DynamoFrontend], T],
    silent: dict[str, str],
) -> T | Unread:
    """``silent``: nodes whose kubelet does not respond; a new one is added."""
    url = place.name
    node = "" if place.pod is None else place.pod.node
    if node in silent and routers.reach == "port-forward":
        return Unread(f"{place.name}: {silent[node]}")
    try:
        with _way(routers, place, cluster, reaches_kubelet=node not in silent) as way:
            if not way.urls:
                (silent[node],) = way.silent.values()
                return Unread(f"{place.name}: {silent[node]}")
            url = way.urls[0]
            return query(DynamoFrontend(url, routers.timeout))
    except (DynctlError, ClusterRefusal) as problem:
        if node in silent:
            return Unread(f"{place.name}: {silent[node]}")
        return _unread(place, url, problem)


def _unread(place: _Place, url: str, problem: DynctlError | ClusterRefusal) -> Unread:
    """``url``: the one that was used; the message names the pod instead."""
    if isinstance(problem, ClusterRefusal):
        return Unread(f"{place.name}: {unread(problem).why}", "or specify it: --frontend URL")
    message = with_name(problem.message, url, place.name)
    named = message if place.name in message else f"{place.name}: {message}"
    return Unread(named, problem.hint)


def _way(
    routers: Routers, place: _Place, cluster: Cluster | None, *, reaches_kubelet: bool
) -> AbstractContextManager[Reached]:
    """``reaches_kubelet``: whether port-forward can work."""
    if place.pod is None or cluster is None:
        return nullcontext(Reached([place.name], direct=True))
    return reached(cluster, [place.pod], routers.reach if reaches_kubelet else "direct")


def _workers(frontend: DynamoFrontend, name: str) -> frozenset[int] | Unread:
    metrics = frontend.metrics()
    if metrics.registered:
        return frozenset(worker for worker, _ in metrics.registered)
    if metrics.kv_routing is False:
        return Unread(f"{name} does not route by KV cache, so it lists no workers")
    return Unread(f"{name} lists no workers: it serves no model")


def _probe(routers: Routers, frontend: DynamoFrontend, name: str) -> list[ProbeAnswer]:
    answers = []
    for model in sorted(frontend.models()):
        many = f"{routers.probe:,} chat" + ("" if routers.probe == 1 else "s")
        routers.say(f'probe: {many} "{_PROBE} N" of one token each to {model} at {name}')
        for number in range(routers.probe):
            status, body = frontend.chat(model, f"{_PROBE} {number}")
            workers = mapping(mapping(body.get("nvext")).get("worker_id"))
            answers.append(
                ProbeAnswer(
                    name,
                    status,
                    "" if status == 200 else str(body.get("message") or body)[:200],
                    _id(workers.get("prefill_worker_id")),
                    _id(workers.get("decode_worker_id")),
                )
            )
    return answers


def _id(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
