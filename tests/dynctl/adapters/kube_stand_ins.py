"""Servers in place of an API server, with scripted responses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from dynctl.adapters.kubernetes.cluster import KubernetesCluster, open_cluster
from tests.http_servers import Exchange, HttpServer, served


def elsewhere(folder: Path, cluster: dict[str, Any], timeout: float = 10) -> KubernetesCluster:
    """The cluster of a kubeconfig in ``folder``; ``cluster`` is its entry there."""
    content = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "contexts": [{"name": "lab", "context": {"cluster": "c"}}],
        "current-context": "lab",
    }
    path = folder / "elsewhere"
    path.write_text(yaml.safe_dump(content))
    return open_cluster(kubeconfig=path, context=None, timeout=timeout)


@contextmanager
def answering(answer: Callable[[Exchange], None]) -> Iterator[str]:
    """A server that answers every request like this; its URL."""
    with HttpServer(answer) as server:
        yield server.url


def whole(body: bytes, status: int = 200, **headers: str) -> Callable[[Exchange], None]:
    """An answer with all of its body."""
    return lambda exchange: exchange.reply(body, status, **headers)


Script = Callable[[web.WebSocketResponse], Awaitable[None]]


@contextmanager
def scripted(script: Script, folder: Path, *, timeout: float = 10) -> Iterator[KubernetesCluster]:
    """A cluster whose every stream goes like this."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    place: list[str] = []
    stop = asyncio.Event()

    async def stream(request: web.Request) -> web.WebSocketResponse:
        upgraded = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await upgraded.prepare(request)
        await script(upgraded)
        return upgraded

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", stream)
        async with served(app, shutdown_timeout=0.1, handler_cancellation=True) as url:
            place.append(url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    cluster = elsewhere(folder, {"server": place[0]}, timeout)
    try:
        yield cluster
    finally:
        cluster.close()
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
