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
        int,
        typer.Option(
            "--port", metavar="PORT", min=0, max=65535, help="Port of the frontend; 0: a free one."
        ),
    ] = 0,
) -> int:
    """Start six simulated engines in two zones and a frontend; route, explain, stop.

    The processes choose free ports and stop with this command.
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
        with DemoFleet(port=port) as fleet:
            talk(f"ready after {fleet.started_in:.1f} s: {fleet.url}")
            if story:
                for step in run_steps(fleet):
                    steps += 1
                    emit(step, options)
            seconds = time.monotonic() - started
            end = DemoEnd(fleet.url, sorted(fleet.engines), steps, seconds, keep)
            if keep:
                _until_interrupted(lambda: emit(end, options))
            else:
                emit(end, options)
    except DemoError as error:
        raise DynctlError(f"the demo fleet: {error}") from None
    return ExitCode.YES


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
