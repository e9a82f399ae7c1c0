"""The system port of an attached worker: health, metrics, its model files, its taints.

Paths are those of Dynamo's workers (DYN_SYSTEM_PORT). It has no authentication, as there.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
from aiohttp import web

from dynctl.documents.fleet_load import Condition
from dynctl.serving.attach.card import ModelFiles
from dynctl.serving.http.bodies import PEER_SHARE
from dynctl.serving.http.connections import Connections
from dynctl.serving.http.start import listen
from dynctl.serving.telemetry.exposition import CONTENT_TYPE, escape, number
from router_core import TOPOLOGY_PREFIX

_MAX_TAINTS: Final = 256
_MAX_TAINT: Final = 256
_MAX_BODY: Final = 64 * 1024
#: Connections, seconds until a header is complete, until a body is, and until a file was read.
_CONNECTIONS: Final = 128
_HEADER_S: Final = 10.0
_BODY_S: Final = 10.0
_FILE_S: Final = 300.0
#: How long the rest of a refused body is read.
_LINGER_S: Final = 1.0


NO_LABELS: Final[Mapping[str, str]] = {}


class SystemServer:
    """Serves until it is closed. ``ready``: whether the worker is registered. ``files``: of its
    card; ``labels``: of each metric."""

    def __init__(
        self,
        *,
        ready: Callable[[], bool],
        conditions: Callable[[], Iterable[Condition]],
        metrics: Callable[[], Mapping[str, tuple[str, float]]],
        set_taints: Callable[[tuple[str, ...]], None],
        files: ModelFiles | None = None,
        labels: Mapping[str, str] = NO_LABELS,
    ) -> None:
        self._files = files
        self._labels = labels
        self.port = 0
        self._ready = ready
        self._conditions = conditions
        self._metrics = metrics
        self._set_taints = set_taints
        self._runner: web.AppRunner | None = None
        share = int(_CONNECTIONS * PEER_SHARE)
        self._connections = Connections(_CONNECTIONS, share, header_s=_HEADER_S)

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises StartError."""
        listener = listen(host, port, "--system-port")
        self.port = listener.getsockname()[1]
        app = web.Application(client_max_size=_MAX_BODY)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/live", self._live),
                web.get("/metrics", self._metrics_page),
                web.get("/v1/metadata/{ns}/{component}/{endpoint}/{slug}/_base/{file}", self._file),
                web.post("/engine/update/model_taints", self._taints),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._connections.listen(
            self._runner,
            listener,
            access_log=None,
            keepalive_timeout=75.0,
            lingering_time=_LINGER_S,
        )

    async def close(self) -> None:
        await self._connections.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        ready = self._ready()
        conditions = [
            {"code": condition.code, "subject": condition.subject, "message": condition.message}
            for condition in self._conditions()
        ]
        state = "ready" if ready else "notready"
        body = {"status": state, "endpoints": {"generate": state}, "conditions": conditions}
        return _json(body, 200 if ready else 503)

    async def _live(self, _request: web.Request) -> web.Response:
        return _json({"status": "live"})

    async def _metrics_page(self, _request: web.Request) -> web.Response:
        labels = ",".join(f'{name}="{escape(value)}"' for name, value in self._labels.items())
        lines = []
        for name, (kind, value) in self._metrics().items():
            lines += [f"# TYPE {name} {kind}", f"{name}{{{labels}}} {number(value)}"]
        for condition in self._conditions():
            held = f'{labels},code="{escape(condition.code)}",subject="{escape(condition.subject)}"'
            lines.append(f"dynctl_condition{{{held}}} 1")
        text = "\n".join(lines) + "\n"
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = None if self._files is None else self._files.served(request.match_info["file"])
        if path is None:
            return _json({"error": "Metadata file not found"}, 404)
        response = web.FileResponse(path, headers={"content-type": "application/octet-stream"})
        # A client that reads nothing keeps its connection no longer.
        response.force_close()
        if request.transport is not None:
            asyncio.get_running_loop().call_later(_FILE_S, request.transport.abort)
        return response

    async def _taints(self, request: web.Request) -> web.Response:
        """Replace the worker's own taints; those of its topology stay."""
        try:
            async with asyncio.timeout(_BODY_S):
                body = await request.read()
            taints = msgspec.json.decode(body, type=_TaintsBody).taints
        except TimeoutError:
            answer = _json({"error": f"the body did not arrive within {_BODY_S:g} s"}, 408)
            answer.force_close()
            return answer
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return _refusal("'taints' must be a JSON array of strings")
        if len(taints) > _MAX_TAINTS or any(not 0 < len(taint) <= _MAX_TAINT for taint in taints):
            return _refusal(
                f"expected at most {_MAX_TAINTS} taints of 1 to {_MAX_TAINT} characters"
            )
        for taint in taints:
            if taint.startswith(TOPOLOGY_PREFIX):
                return _refusal(f"taint {taint!r} uses reserved prefix {TOPOLOGY_PREFIX!r}")
        self._set_taints(tuple(taints))
        return _json({"status": "ok", "taints": taints})


class _TaintsBody(msgspec.Struct):
    taints: list[str]


def _json(value: Any, status: int = 200) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json")


def _refusal(problem: str) -> web.Response:
    """As Dynamo's workers answer."""
    message = f"Python callback failed: ValueError: {problem}"
    return _json({"error": "Handler error", "message": message}, 500)
