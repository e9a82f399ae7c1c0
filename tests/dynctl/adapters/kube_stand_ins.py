"""Servers in place of an API server, with scripted responses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from dynctl.adapters.kubernetes.cluster import KubernetesCluster, open_cluster


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
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server that answers every GET like this; its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def whole(body: bytes, status: int = 200, **headers: str) -> Callable[[Any], None]:
    """An answer with all of its body."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Connection": "close", **headers}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


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
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        place.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        await stop.wait()
        await runner.cleanup()

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
