"""``serve attach`` as a process: its planes, its signals, its end."""

import asyncio
import logging
import signal
from typing import Any

import uvloop

from dynctl.adapters.dynamo.planes import expect_registrar, open_planes, open_registrar
from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.base.tasks import end_tasks
from dynctl.serving.attach.sidecar import AttachConfig, Sidecar
from dynctl.serving.http.start import announce, settle_garbage_collector, settle_malloc
from dynctl.serving.telemetry.log_format import configure_logging
from dynctl.tokenization import load_tokenizer

_log = logging.getLogger(__name__)


def run_attach(
    config: AttachConfig,
    options: GlobalOptions,
    *,
    announced: bool,
    log_format: str,
    log_level: str,
) -> int:
    """Attach the engine until a signal ends it; the exit code. Blocks.

    SIGTERM and SIGINT deregister, let running requests finish and end; a second one ends at once.
    """
    try:
        configure_logging(log_format, log_level)
    except ValueError as error:
        raise UsageProblem(str(error)) from None
    return uvloop.run(_serve(config, options, announced))


async def _serve(config: AttachConfig, options: GlobalOptions, announced: bool) -> int:
    settle_malloc()
    ending = asyncio.Event()
    at_once = asyncio.Event()

    def on_signal() -> None:
        (at_once if ending.is_set() else ending).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    expect_registrar(options)
    planes = open_planes(options)
    try:
        registrar = open_registrar(options, planes.discovery, pod=True)
        tokenizer = load_tokenizer(config.files.directory)
        sidecar = Sidecar(config, planes.discovery, registrar, tokenizer)
        running: asyncio.Task[Any] | None = None
        try:
            await sidecar.start()
            _log.info(
                "attaching %s to %s in %s; requests %s, %s",
                config.engine.url, config.endpoint, planes.title,
                f"at {config.host}:{sidecar.server.port}" if sidecar.nats is None
                else f"over NATS at {sidecar.nats.title}",
                "no system port" if config.system_port is None
                else f"health and metrics at http://{config.host}:{sidecar.system.port}",
            )  # fmt: skip
            if announced:
                announce(
                    {
                        "request_port": sidecar.server.port or None,
                        "system_port": sidecar.system.port,
                    }
                )
            settle_garbage_collector()
            running = asyncio.create_task(sidecar.run())
            signalled = asyncio.create_task(ending.wait())
            await asyncio.wait([running, signalled], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            _log.info("stopping: %d requests are running", sidecar.server.running)
            stopping = asyncio.create_task(sidecar.stop(running))
            hurried = asyncio.create_task(at_once.wait())
            await asyncio.wait([stopping, hurried], return_when=asyncio.FIRST_COMPLETED)
            await end_tasks([stopping, hurried, signalled])
        finally:
            if running is not None:
                await end_tasks([running])
            await sidecar.close()
    finally:
        await planes.close()
    return 0
