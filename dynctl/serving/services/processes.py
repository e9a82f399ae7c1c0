"""``serve frontend --processes N``: N frontends on one port and their router, as child processes.

This process starts them, starts one again that ends or does not respond, and serves health and
metrics of all of them on one port. A child gets its configuration through a pipe: secrets are in
no process list. While the pipe is open the parent lives; a child ends when it closes. Each child
prints the record of ``--announce`` when it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle  # both ends of the pipe are this module
import secrets
import signal
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import replace
from threading import Thread
from typing import Any, Final

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from dynctl.base.tasks import end_tasks
from dynctl.serving.http.bodies import PEER_SHARE
from dynctl.serving.http.connections import FEW, Connections
from dynctl.serving.http.errors import error_middleware
from dynctl.serving.http.json_responses import json_response
from dynctl.serving.http.process import Routes
from dynctl.serving.http.server import run_frontend
from dynctl.serving.http.start import StartError, announce, listen
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.refusal import HttpError
from dynctl.serving.services.router_server import ProcessState, run_router
from dynctl.serving.telemetry.exposition import CONTENT_TYPE, Family, samples
from dynctl.serving.telemetry.log_format import configure_logging

ROUTER: Final = "router"
#: Seconds until a child must be ready.
_START_S: Final = 300.0
#: Seconds before a child that ended starts again: the first time, and at most. A child that was
#: ready for the longer one starts with the short one again.
_AGAIN_S: Final = (0.5, 30.0)
#: Seconds after the drain timeout for a child to end by itself.
_GRACE_S: Final = 5.0
_READ_S: Final = 5.0
#: Seconds without an answer after which a process is killed, and between two heartbeats at most.
SILENT_S: Final = 30.0
_BEAT_S: Final = 2.0
_ANSWER_BYTES: Final = 64 * 1024 * 1024
_LENGTH: Final = struct.Struct("!I")

_PROCESSES_PATH: Final = "/processes"

_UP: Final = Family("dynctl_process_up", "gauge", "1: the process is ready.", ("process",))
_RESTARTS: Final = Family(
    "dynctl_process_restarts_total", "counter", "Processes that ended and started again.",
    ("process",),
)  # fmt: skip

#: In a child this module is `__main__`.
_MODULE: Final = "dynctl.serving.services.processes"
_log = logging.getLogger(_MODULE)


class _Child:
    """One process: started, watched, and started again until it is stopped.

    ``silent_s``: seconds without an answer after which it is killed; 0: it is not.
    """

    def __init__(
        self,
        config: FrontendConfig,
        session: aiohttp.ClientSession,
        silent_s: float,
        module: str,
    ) -> None:
        self.config = config
        self._module = module
        self.name = config.process or ROUTER
        self._session = session
        self._silent_s = silent_s
        self._was_silent = False
        #: What it announced; None while it is not ready.
        self.record: dict[str, Any] | None = None
        self.restarts = 0
        #: How often it ended although it was not stopped, how the last time, and when.
        self.ends = 0
        self.ended = ""
        self.ended_at = 0.0
        #: Set with the first record, or with an error if the first start failed.
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._task = asyncio.create_task(self._run(), name=self.name)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def stop(self, drain_s: float) -> None:
        """Let it drain and end; kill it soon after ``drain_s`` seconds."""
        self._stopping = True
        if self._process is None or self.record is None:
            self._kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            ended, _ = await asyncio.wait({self._task}, timeout=drain_s + _GRACE_S)
            if not ended:
                _log.warning("%s did not end in time: it is killed", self.name)
                self._kill()
        self._task.cancel()
        await asyncio.wait({self._task})
        self.started.cancel()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _run(self) -> None:
        loop, pause = asyncio.get_running_loop(), _AGAIN_S[0]
        while True:
            ready_at = None
            try:
                process = self._process = await self._spawn()
                beating = None
                try:
                    if await self._ready(process):
                        ready_at = loop.time()
                        if self._silent_s:
                            beating = loop.create_task(self._beat(), name=f"{self.name} heartbeat")
                    code = await process.wait()
                finally:
                    if beating is not None:
                        await end_tasks([beating])
                    self.record = None
                    # Also when this task is cancelled: nothing is left behind.
                    self._kill()
                    await process.wait()
                ended = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                if self._was_silent:
                    self._was_silent = False
                    ended = f"did not respond for {self._silent_s:g} s and was killed"
            except OSError as error:
                ended = f"cannot start: {error.strerror or error}"
            self._process = None
            if self._stopping:
                return
            if not self.started.done():
                self.started.set_exception(
                    StartError(
                        f"--processes: {self.name} {ended} before it was ready",
                        "the log lines above have the reason",
                    )
                )
                return
            if ready_at is not None and loop.time() - ready_at > _AGAIN_S[1]:
                pause = _AGAIN_S[0]
            self.ends, self.ended, self.ended_at = self.ends + 1, ended, loop.time()
            _log.error("%s %s: it starts again in %g s", self.name, ended, pause)
            await asyncio.sleep(pause)
            pause = min(_AGAIN_S[1], 2 * pause)
            self.restarts += 1

    async def _beat(self) -> None:
        """Ask whether it lives, again and again; kill it when it does not answer for too long.

        Each heartbeat without an answer takes a beat, so a pause of this process counts as one.
        """
        loop, beat = asyncio.get_running_loop(), min(_BEAT_S, self._silent_s / 4)
        silent = 0.0
        while True:
            asked = loop.time()
            silent = 0.0 if await self._lives(beat) else silent + beat
            if silent >= self._silent_s and not self._stopping:
                _log.error("%s does not respond for %g s: it is killed", self.name, self._silent_s)
                self._was_silent = True
                self._kill()
                return
            await asyncio.sleep(max(0.0, asked + beat - loop.time()))

    async def _lives(self, within_s: float) -> bool:
        if self.record is None:
            return False
        url = f"http://127.0.0.1:{self.record['system_port']}/live"
        try:
            timeout = aiohttp.ClientTimeout(total=within_s)
            async with self._session.get(url, timeout=timeout) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _spawn(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module, self.name,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C reaches this process only, which ends the frontends first.
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        raw = pickle.dumps(self.config)
        process.stdin.write(_LENGTH.pack(len(raw)) + raw)
        return process

    async def _ready(self, process: asyncio.subprocess.Process) -> bool:
        """Wait for the record; a child without one in time is killed."""
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                line = await process.stdout.readline()
        except TimeoutError:
            _log.error("%s is not ready after %g s: it is killed", self.name, _START_S)
            self._kill()
            return False
        if not line:
            return False
        try:
            self.record = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError:
            _log.error("%s printed what is not its record: it is killed", self.name)
            self._kill()
            return False
        if not self.started.done():
            self.started.set_result(None)
        return True


class Processes:
    """The frontends and their router. ``config``: as of one frontend that has them all.

    ``silent_s``: seconds without an answer after which a process is killed and started again; 0:
    it is not. ``module``: what a child runs, which calls :func:`run_child`.
    """

    def __init__(
        self,
        config: FrontendConfig,
        count: int,
        silent_s: float = SILENT_S,
        module: str = _MODULE,
    ) -> None:
        self.config = config
        self._module = module
        self.count = count
        self._silent_s = silent_s
        self.children: list[_Child] = []
        self._held = [
            _held(config.host, config.port),
            _held("127.0.0.1", 0),
        ]
        self.port, self._router_port = (held.getsockname()[1] for held in self._held)
        self._session: aiohttp.ClientSession | None = None
        self._runners: list[tuple[web.AppRunner, Connections]] = []
        self.system_port = config.system_port

    @property
    def url(self) -> str:
        host = self.config.host
        scheme = "http" if self.config.tls_cert is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def start(self) -> None:
        """Start the router, then the frontends; returns when all are ready.

        Raises StartError if one of them ends before.
        """
        config = self.config
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_READ_S))
        internal = f"http://127.0.0.1:{await self._serve()}"
        token = config.api_token or secrets.token_hex(32)
        router, frontend = _router_config(config), _frontend_config(config)
        router = replace(router, port=self._router_port, api_token=token)
        self._add(replace(router, processes_url=f"{internal}{_PROCESSES_PATH}"))
        await self.children[0].started
        frontend = replace(
            frontend,
            port=self.port,
            router_url=f"http://127.0.0.1:{self._router_port}",
            router_token=token,
            metrics_url=f"{internal}/metrics",
        )
        for number in range(self.count):
            self._add(replace(frontend, process=f"frontend-{number + 1}"))
        await asyncio.gather(*(child.started for child in self.children))

    async def close(self) -> None:
        """Drain the frontends, then the router; nothing is left behind."""
        limits, clock = self.config.limits, asyncio.get_running_loop().time
        drain_s = limits.shutdown_delay_s + limits.drain_s
        until = clock() + drain_s
        await asyncio.gather(*(child.stop(drain_s) for child in self.children[1:]))
        for router in self.children[:1]:
            await router.stop(max(0.0, until - clock()))
        for runner, connections in self._runners:
            await connections.close()
            await runner.cleanup()
        if self._session is not None:
            await self._session.close()
        for held in self._held:
            held.close()

    def _add(self, config: FrontendConfig) -> None:
        assert self._session is not None
        self.children.append(_Child(config, self._session, self._silent_s, self._module))

    # -- health and metrics ----------------------------------------------------------------

    async def _serve(self) -> int:
        """Listen on the system port, and for the frontends on the port that is returned."""
        config = self.config
        if config.system_port is not None:
            listener = listen(config.system_host, config.system_port, "--system-port")
            self.system_port = listener.getsockname()[1]
            await self._listen(listener)
        listener = listen("127.0.0.1", 0)
        await self._listen(listener)
        return int(listener.getsockname()[1])

    async def _listen(self, listener: socket.socket) -> None:
        app = web.Application(middlewares=[error_middleware])
        app.router.add_get("/live", _live)
        app.router.add_get("/ready", self._of_a_frontend)
        app.router.add_get("/health", self._of_a_frontend)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get(_PROCESSES_PATH, self._states)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        most = FEW + self.count
        connections = Connections(most, int(most * PEER_SHARE))
        self._runners.append((runner, connections))
        await connections.listen(runner, listener, access_log=None)

    async def _of_a_frontend(self, http: web.Request) -> web.StreamResponse:
        """The answer of the first frontend that is ready; the last one, if none is."""
        found: tuple[int, bytes] | None = None
        for child in self.children[1:]:
            answer = await self._get(child, http.path, http)
            found = answer or found
            if answer is not None and answer[0] == 200:
                break
        if found is None:
            raise HttpError(
                503, "no frontend process is ready; the log has the reason", "unavailable", 503
            )
        return web.Response(
            status=found[0], body=found[1], headers={"content-type": "application/json"}
        )

    async def _metrics(self, http: web.Request) -> web.StreamResponse:
        read = await asyncio.gather(
            *(self._get(child, "/metrics", http) for child in self.children)
        )
        texts = [
            (child.name, answer[1].decode())
            for child, answer in zip(self.children, read, strict=True)
            if answer is not None and answer[0] == 200
        ]
        up = [((child.name,), float(child.record is not None)) for child in self.children]
        restarts = [((child.name,), float(child.restarts)) for child in self.children]
        body = merged(texts) + samples(_UP, up) + samples(_RESTARTS, restarts)
        return web.Response(body=body.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _states(self, _http: web.Request) -> web.StreamResponse:
        """The processes, for the router, which shows their ends as conditions."""
        now = asyncio.get_running_loop().time()
        return json_response(
            [
                ProcessState(
                    child.name,
                    child.record is not None,
                    child.ends,
                    child.ended,
                    now - child.ended_at if child.ends else None,
                )
                for child in self.children
            ]
        )

    async def _get(self, child: _Child, path: str, http: web.Request) -> tuple[int, bytes] | None:
        """``GET path`` at the child's system port, on behalf of a client; None without answer."""
        if child.record is None or self._session is None:
            return None
        url = f"http://127.0.0.1:{child.record['system_port']}{path}"
        # The child takes programs of this machine for operators; this client may be another one.
        headers = {"x-forwarded-for": http.remote or "unknown"}
        if "authorization" in http.headers:
            headers["authorization"] = http.headers["authorization"]
        try:
            async with self._session.get(url, headers=headers) as answer:
                raw = await answer.content.read(_ANSWER_BYTES)
                while not answer.content.at_eof():
                    raw += await answer.content.read(_ANSWER_BYTES)
                    if len(raw) > _ANSWER_BYTES:
                        return None
                return answer.status, raw
        except (aiohttp.ClientError, TimeoutError):
            return None


_HELP: Final = "# HELP "
_TYPE: Final = "# TYPE "


def merged(texts: Iterable[tuple[str, str]]) -> str:
    """The expositions of several processes as one: each sample gets the label ``process``.

    ``texts``: name and exposition of each process, as `dynctl.serving.telemetry.exposition` writes
    them.
    """
    families: dict[str, list[str]] = {}
    for name, text in texts:
        label = f'process="{name}"'
        family = ""
        # Only a line feed ends a line; labels have other line ends and any text in them.
        for line in text.split("\n"):
            if line.startswith(_HELP):
                family = line.removeprefix(_HELP).partition(" ")[0]
                families.setdefault(family, [line])
            elif line.startswith(_TYPE):
                if len(families[family]) == 1:
                    families[family].append(line)
            elif line:
                families[family].append(_labelled(line, label))
    return "".join(f"{line}\n" for rows in families.values() for line in rows)


def _labelled(line: str, label: str) -> str:
    name, brace, rest = line.partition("{")
    if brace:
        return f"{name}{{{label},{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"


def run_processes(
    config: FrontendConfig, count: int, silent_s: float = SILENT_S, module: str = _MODULE
) -> int:
    """Serve with ``count`` frontends until SIGTERM or SIGINT; the exit code. Blocks.

    ``silent_s`` and ``module`` as of :class:`Processes`. Raises StartError if one of the
    processes cannot start.
    """
    try:
        configure_logging(config.log_format, config.log_level)
    except ValueError as error:
        raise StartError(str(error)) from None
    return uvloop.run(_supervise(config, count, silent_s, module))


async def _supervise(config: FrontendConfig, count: int, silent_s: float, module: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    processes = Processes(config, count, silent_s, module)
    stopped = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(processes.start())
    try:
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await starting
            _log.info("serving on %s: %d frontend processes and a router", processes.url, count)
            if config.announce:
                record = {
                    "frontend": processes.url, "url": processes.url, "port": processes.port,
                    "processes": {child.name: child.pid for child in processes.children},
                }  # fmt: skip
                if processes.system_port is not None:
                    record["system_port"] = processes.system_port
                announce(record)
        await stopped
        _log.info("stopping %d frontend processes, then the router", count)
    finally:
        starting.cancel()
        stopped.cancel()
        await asyncio.gather(starting, stopped, return_exceptions=True)
        await processes.close()
    return 0


def _router_config(config: FrontendConfig) -> FrontendConfig:
    """Of the router: workers and their settings; it listens for this machine only."""
    return _child_config(
        replace(
            config,
            host="127.0.0.1",
            # It gets hashes; only the sizes of the model are read.
            tokenizer="exact",
            limits=replace(config.limits, shutdown_delay_s=0.0),  # it ends after the frontends
            api_keys=(),
            api_key_file=None,
            tls_cert=None,
            tls_key=None,
            process=ROUTER,
        )
    )


def _frontend_config(config: FrontendConfig) -> FrontendConfig:
    """Of a frontend: what clients need."""
    return _child_config(
        replace(config, workers=(), workers_file=None, replicas=None, index_peers=())
    )


def _child_config(config: FrontendConfig) -> FrontendConfig:
    return replace(
        config,
        origins=dict(config.origins),
        share_port=True,
        system_host="127.0.0.1",
        system_port=0,
        announce=True,
    )


def _held(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen: the port stays ours while a child starts again.

    Raises StartError if another program listens there.
    """
    if port:
        listen(host, port).close()
    return listen(host, port, share=True)


async def _live(_http: web.Request) -> web.StreamResponse:
    return json_response({"status": "live", "message": "Service is live"})


# -- the child ---------------------------------------------------------------------------------


def run_child(extra_routes: Iterable[Routes] = ()) -> int:
    """A child: read the configuration, then serve until the parent is gone or sends SIGTERM."""
    pipe = sys.stdin.buffer
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return 1
    (length,) = _LENGTH.unpack(head)
    raw = pipe.read(length)
    if len(raw) < length:
        return 1
    config: FrontendConfig = pickle.loads(raw)  # noqa: S301  the parent wrote it
    Thread(target=_end_with_the_parent, args=(pipe.fileno(),), daemon=True).start()
    try:
        serve = run_router if config.process == ROUTER else run_frontend
        return serve(config, extra_routes)
    except Exception as error:
        configure_logging(config.log_format, config.log_level, process=config.process)
        _log.error("cannot start: %s", error)
        return 2


def _end_with_the_parent(pipe: int) -> None:
    """End this process when the parent is gone: only the parent restarts and drains it."""
    with contextlib.suppress(OSError):
        while os.read(pipe, 1):
            pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(run_child())
