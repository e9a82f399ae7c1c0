"""`dynctl demo`."""

from collections.abc import Callable
from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions


def demo(
    options: GlobalOptions,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the fleet running until Ctrl-C.")
    ] = False,
    story: Annotated[
        bool, typer.Option("--story/--no-story", help="Send four requests and explain them.")
    ] = True,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="PORT",
            min=0,
            max=65535,
            help="Port of the frontend; 0: a free one. [default: with --keep 8000 if it is free, "
            "else 0]",
        ),
    ] = None,
) -> int:
    """Start six simulated engines in two zones and a frontend; route, explain, stop.

    The processes stop with this command.
    """
    import time

    from dynctl.base.errors import DynctlError, ExitCode
    from dynctl.documents.demo import DemoEnd
    from dynctl.screens.render import emit, talk
    from dynctl.simulation.demo.fleet import DemoError, DemoFleet
    from dynctl.simulation.demo.story import run_steps

    started = time.monotonic()
    steps = 0
    try:
        talk("starting six engines in two zones and a frontend ...")
        with DemoFleet(port=_port(keep) if port is None else port) as fleet:
            talk(f"ready after {fleet.started_in:.1f} s: {fleet.url}")
            if story:
                for step in run_steps(fleet):
                    steps += 1
                    emit(step, options)
            seconds = time.monotonic() - started
            found = _is_default_source(fleet.url, options)
            end = DemoEnd(fleet.url, sorted(fleet.engines), steps, seconds, keep, found)
            if keep:
                _until_interrupted(lambda: emit(end, options))
            else:
                emit(end, options)
    except DemoError as error:
        raise DynctlError(f"the demo fleet: {error}") from None
    return ExitCode.YES


def _port(keep: bool) -> int:
    """The port of the default source for a fleet that stays, if it is free; 0: any free one."""
    import socket
    from urllib.parse import urlsplit

    from dynctl.sources import DEFAULT_FRONTEND

    if not keep:
        return 0
    address = urlsplit(DEFAULT_FRONTEND)
    port = address.port or 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.hostname, port))
        except OSError:
            return 0
    return port


def _is_default_source(url: str, options: GlobalOptions) -> bool:
    """Whether commands without options for a source read from ``url``."""
    from dynctl.adapters.dynamo.planes import backend
    from dynctl.base.errors import DynctlError
    from dynctl.sources import DEFAULT_FRONTEND, frontends

    try:
        return url == DEFAULT_FRONTEND and not frontends(options) and backend(options) is None
    except DynctlError:
        return False


def _until_interrupted(announce: Callable[[], None]) -> None:
    """Wait for Ctrl-C, which is the normal end after the announcement."""
    import signal

    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        announce()
        signal.sigwait(ends)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
