"""Run an engine: `start_engine` inside an event loop, `run_engine` as a process."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TextIO

import msgspec
from aiohttp import web

from dynctl.base.errors import ExitCode, network_reason
from dynctl.base.tasks import end_tasks
from dynctl.simulation.engine.api import build_app
from dynctl.simulation.engine.config import EngineConfig, EngineConfigError
from dynctl.simulation.engine.engine import Engine
from dynctl.tokenization import DEMO_MODEL_DIR, ModelTokenizer, TokenizerError, load_tokenizer

_DRAIN_POLL_S = 0.02
_BACKLOG = 1024


class RunningEngine:
    """An engine that serves at `url`; close it when done."""

    def __init__(self, engine: Engine, runner: web.AppRunner) -> None:
        self.engine = engine
        self._runner = runner

    @property
    def url(self) -> str:
        host = self.engine.reachable_host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.engine.port}"

    def ready_record(self) -> dict[str, Any]:
        """The addresses for a parent process. The ports of rank N are those of rank 0 plus N."""
        events = self.engine.info().kv_events
        first = events[0] if events else None
        return {
            "engine": self.engine.config.name,
            "url": self.url,
            "kv_events": None if first is None else first.endpoint,
            "replay": None if first is None else first.replay,
        }

    async def drain(self) -> None:
        """Refuse new requests and wait until the running ones end, or the drain timeout."""
        self.engine.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.engine.config.drain_timeout_s):
                while self.engine.active_requests:  # noqa: ASYNC110  many places change it
                    await asyncio.sleep(_DRAIN_POLL_S)

    async def close(self) -> None:
        """Stop at once: sockets and the connections of unfinished requests close."""
        await self.engine.close()
        await self._runner.cleanup()


async def start_engine(
    config: EngineConfig, tokenizer: ModelTokenizer | None = None
) -> RunningEngine:
    """Start an engine on the running event loop. Raises EngineConfigError.

    `tokenizer`: by default that of `config.model_path`, or of the demo model.
    """
    if tokenizer is None:
        tokenizer = _load_tokenizer(config)
    engine = Engine(config, tokenizer)
    # handler_cancellation: if a client disconnects, its KV blocks are freed at once.
    runner = web.AppRunner(
        build_app(engine), access_log=None, handler_cancellation=True, shutdown_timeout=1.0
    )
    await runner.setup()
    try:
        listener = _listen(config)
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
    except BaseException:
        await engine.close()
        await runner.cleanup()
        raise
    engine.port = int(listener.getsockname()[1])
    engine.start()
    return RunningEngine(engine, runner)


def run_engine(
    config: EngineConfig,
    *,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    tokenizer: ModelTokenizer | None = None,
) -> int:
    """Serve until SIGTERM (drains), SIGINT or an internal error; the exit code.

    When ready, it writes one JSON line (`ready_record`) to stdout and one readable line to stderr.
    Raises EngineConfigError before it listens.
    """
    import uvloop

    out, err = stdout or sys.stdout, stderr or sys.stderr
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, out, err, tokenizer))


async def _serve(
    config: EngineConfig, out: TextIO, err: TextIO, tokenizer: ModelTokenizer | None
) -> int:
    loop = asyncio.get_running_loop()
    drain, leave = asyncio.Event(), asyncio.Event()
    exit_code = 0

    def on_terminate() -> None:
        (leave if drain.is_set() else drain).set()  # the second signal ends the drain

    def on_interrupt() -> None:
        nonlocal exit_code
        exit_code = 130
        drain.set()
        leave.set()

    loop.add_signal_handler(signal.SIGTERM, on_terminate)
    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    running = await start_engine(config, tokenizer)
    try:
        record = running.ready_record()
        out.write(msgspec.json.encode(record).decode() + "\n")
        out.flush()
        err.write(_ready_line(config, record))
        err.flush()
        failed = running.engine.failed
        await _first(drain.wait(), failed.wait())
        await _first(running.drain(), leave.wait(), failed.wait())
        if failed.is_set():
            exit_code = int(ExitCode.DEFECT)
    finally:
        await running.close()
    return exit_code


async def _first(*works: Coroutine[Any, Any, Any]) -> None:
    """Run ``works`` until the first one ends; cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await end_tasks(tasks)


def _ready_line(config: EngineConfig, record: dict[str, Any]) -> str:
    events = f", KV events {record['kv_events']}" if record["kv_events"] else ""
    return (
        f"engine {config.name} ({config.role}, simulated) serves {config.model} "
        f"on {record['url']}{events}\n"
    )


def _load_tokenizer(config: EngineConfig) -> ModelTokenizer:
    try:
        return load_tokenizer(Path(config.model_path) if config.model_path else DEMO_MODEL_DIR)
    except TokenizerError as error:
        raise EngineConfigError(f"--model-path: {error}") from None


def _listen(config: EngineConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise EngineConfigError(
            f"--host {config.host} --port {config.port}: {network_reason(error)}; "
            "choose a free address, or port 0 for any free port"
        ) from None
    return listener
