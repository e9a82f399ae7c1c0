"""HTTP servers of tests: in threads, for blocking clients, and on the event loop."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from aiohttp import web


class Exchange(BaseHTTPRequestHandler):
    """One request (``command``, ``path``, ``headers``, ``body``) and what is sent for it."""

    protocol_version = "HTTP/1.1"
    server: HttpServer

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.respond(self)

    do_POST = do_DELETE = do_GET

    def reply(self, body: bytes, status: int = 200, **headers: str) -> None:
        """Send a whole answer; the connection ends with it, if no header says otherwise."""
        self.send_response(status)
        for name, value in {"Connection": "close", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests read no access log."""


class HttpServer(ThreadingHTTPServer):
    """A server on a free port that runs in a ``with`` block, or from start to close. Each request
    has a thread.

    ``respond`` is an argument, or a method of a subclass.
    """

    daemon_threads = True

    def __init__(self, respond: Callable[[Exchange], None] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self._respond = respond
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    def respond(self, exchange: Exchange) -> None:
        assert self._respond is not None, "no argument, and no method of a subclass"
        self._respond(exchange)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def start(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Clients of tests give up, as they should.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


@asynccontextmanager
async def served(app: web.Application, *, port: int = 0, **options: Any) -> AsyncIterator[str]:
    """The URL of an application on the event loop. ``options``: those of aiohttp's AppRunner."""
    runner = web.AppRunner(app, **options)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
