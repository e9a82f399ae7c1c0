"""Health and metrics of `topology sync` over HTTP: /healthz, /readyz, /metrics.

One request at a time, each within a few seconds: probes and scrapes, nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Final

from dynctl.base.errors import UsageProblem, network_reason
from dynctl.serving.telemetry.exposition import CONTENT_TYPE
from dynctl.serving.topology_sync.controller import Controller

_REQUEST_S: Final = 5.0
_TEXT: Final = "text/plain; charset=utf-8"


@contextmanager
def status_server(controller: Controller, host: str, port: int) -> Iterator[int]:
    """Serve until the block ends; gives the port. Raises UsageProblem for a used address."""
    try:
        server = HTTPServer((host, port), _handler(controller))
    except (OSError, OverflowError) as error:
        raise UsageProblem(
            f"--system-host {host} --system-port {port}: {network_reason(error)}",
            "give a free port; 0 takes one",
        ) from error
    thread = threading.Thread(
        target=server.serve_forever, args=(0.2,), name="dynctl-status", daemon=True
    )
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(controller: Controller) -> type[BaseHTTPRequestHandler]:
    class StatusHandler(BaseHTTPRequestHandler):
        timeout = _REQUEST_S
        server_version = "dynctl"
        sys_version = ""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, controller.metrics(), CONTENT_TYPE)
            elif path in ("/healthz", "/livez"):
                alive = controller.alive
                self._answer(200 if alive else 503, "ok\n" if alive else "does not turn\n")
            elif path == "/readyz":
                ready = controller.ready
                self._answer(200 if ready else 503, "ok\n" if ready else "not listed yet\n")
            else:
                self._answer(404, "expected /healthz, /readyz or /metrics\n")

        def _answer(self, status: int, body: str, kind: str = _TEXT) -> None:
            data = body.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            return

    return StatusHandler
