"""What the frontends know of the workers, the last link of the chain; and live requests if asked.

A frontend that routes by KV cache names every worker that it may choose in its metrics. It is
reached at its URL, at its pod's address, or through the API server's port-forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeVar

from dynctl.connect.dynamo_frontend import DynamoFrontend
from dynctl.custody.facts import ProbeAnswer, RouterView
from dynctl.custody.joining import Custody
from dynctl.errors import DynctlError
from dynctl.observing.facts import Unread
from dynctl.ports import Cluster, ClusterRefusal
from dynctl.wire.kubernetes.objects import Pod

Reach = Literal["auto", "direct", "port-forward"]
REACHES: Final[tuple[Reach, ...]] = ("auto", "direct", "port-forward")
_DEFAULT_PORT: Final = 8000
_MOST_FRONTENDS: Final = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Routers:
    """How to look at the frontends. ``urls`` are those that were named; none: those in pods.

    ``probe``: so many live requests to each model of each frontend; 0 sends none.
    """

    urls: tuple[str, ...] = ()
    reach: Reach = "auto"
    timeout: float = 5.0
    probe: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """A frontend to look at. ``pod`` None: it was named by its URL."""

    name: str
    graph: str
    pod: Pod | None = None


def look(
    routers: Routers, joined: Custody, cluster: Cluster | None
) -> tuple[tuple[RouterView, ...], tuple[ProbeAnswer, ...] | None]:
    """Every frontend's workers, and the answers to live requests (None where none were sent)."""
    views: list[RouterView] = []
    answers: list[ProbeAnswer] = []
    for place in _places(routers, joined)[:_MOST_FRONTENDS]:
        told = _ask(routers, place, cluster, _known)
        views.append(RouterView(place.name, place.graph, told))
        if routers.probe:
            send = partial(_probe, name=place.name, count=routers.probe)
            sent = _ask(routers, place, cluster, send)
            answers += [ProbeAnswer(place.name, 0, sent.why)] if isinstance(sent, Unread) else sent
    return tuple(views), tuple(answers) if routers.probe else None


def _places(routers: Routers, joined: Custody) -> list[_Place]:
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
    try:
        with _reached(routers, place, cluster) as url:
            return ask(DynamoFrontend(url, routers.timeout))
    except DynctlError as error:
        return Unread(f"{place.name}: {error.message}", error.hint)
    except ClusterRefusal as refusal:
        return Unread(f"{place.name}: {refusal.message}", "or name it: --frontend URL")


@contextmanager
def _reached(routers: Routers, place: _Place, cluster: Cluster | None) -> Iterator[str]:
    pod = place.pod
    if pod is None or cluster is None:
        yield place.name
    elif routers.reach == "direct":
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        yield f"http://{host}:{frontend_port(pod)}"
    else:
        # A pod's address means something else, or nothing, outside of its cluster: so the way
        # through the API server is taken unless the other one was asked for.
        with cluster.forward(pod.namespace, pod.name, frontend_port(pod)) as address:
            yield f"http://{address}"


def frontend_port(pod: Pod) -> int:
    """Where a frontend pod serves HTTP: its variable, else its port called http, else 8000."""
    main = pod.main
    if main is None:
        return _DEFAULT_PORT
    told = main.env.get("DYN_HTTP_PORT") or ""
    if told.isdecimal() and 0 < int(told) < 65536:
        return int(told)
    return main.ports.get("http") or next(iter(main.ports.values()), 0) or _DEFAULT_PORT


def _known(frontend: DynamoFrontend) -> frozenset[int] | Unread:
    metrics = frontend.metrics()
    if metrics.registered:
        return frozenset(worker for worker, _ in metrics.registered)
    if metrics.kv_routing is False:
        return Unread(f"{frontend.url} does not route by KV cache, so it names no workers")
    return Unread(f"{frontend.url} names no workers: it serves no model")


def _probe(frontend: DynamoFrontend, name: str, count: int) -> list[ProbeAnswer]:
    found = []
    for model in sorted(frontend.models()):
        for number in range(count):
            status, body = frontend.chat(model, f"dynctl topology probe {number}")
            told = body.get("nvext", {}).get("worker_id", {}) if status == 200 else {}
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
    return value if isinstance(value, int) else None
