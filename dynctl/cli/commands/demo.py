"""`dynctl demo`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.shared_options import Needs


def _troubles(context: typer.Context, incomplete: str) -> list[str]:
    from dynctl.simulation.demo.troubles import trouble_names

    return trouble_names()


def demo(
    options: GlobalOptions,
    trouble: Annotated[
        str | None,
        typer.Argument(
            metavar="[TROUBLE]",
            autocompletion=_troubles,
            help="With --cluster: explain this trouble, and how to look at it.",
        ),
    ] = None,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Start nothing; list the troubles of a simulated Kubernetes cluster.",
        ),
    ] = False,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Keep the fleet running until Ctrl-C."),
        Needs(without=("cluster",)),
    ] = False,
    load: Annotated[
        bool,
        typer.Option(
            "--load",
            help="With --keep: send traffic until Ctrl-C, with shared prefixes, a zone under "
            "pressure and refusals; without the four requests.",
        ),
        Needs(without=("cluster",)),
    ] = False,
    story: Annotated[
        bool | None,
        typer.Option(
            "--story/--no-story",
            help="Send four requests and explain them. [default: with --load no]",
        ),
        Needs(without=("cluster",)),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            help="Port of the frontend; 0: a free one. [default: with --keep 8000 if it is free, "
            "else 0]",
        ),
        Needs(without=("cluster",)),
    ] = None,
) -> int:
    """Start six simulated engines in two zones and a frontend; route, explain, stop.

    The processes stop with this command. With --cluster: learn `topology verify` on a simulated
    cluster with a trouble in it.
    """
    import time
    from contextlib import nullcontext

    from dynctl.base.errors import DynctlError, ExitCode, UsageProblem
    from dynctl.documents.demo import DemoEnd
    from dynctl.screens.render import emit, talk
    from dynctl.simulation.demo.fleet import DemoError, DemoFleet
    from dynctl.simulation.demo.load import ENGINE_ARGS, FRONTEND_ARGS, DemoLoad
    from dynctl.simulation.demo.story import run_steps

    if trouble is not None and not cluster:
        raise UsageProblem(f"demo {trouble}: unexpected argument", f"demo --cluster {trouble}")
    if cluster:
        from dynctl.simulation.demo.troubles import cluster_trouble, cluster_troubles

        emit(cluster_troubles() if trouble is None else cluster_trouble(trouble), options)
        return ExitCode.YES
    if load and not keep:
        raise UsageProblem("--load: the fleet ends at once", "keep it: dynctl demo --keep --load")
    if port is None:
        port = _port(keep)
    elif problem := _port_problem(port):
        raise UsageProblem(f"--port {port}: {problem}", "use another one, or 0 for any free one")
    started = time.monotonic()
    steps = 0
    try:
        talk("starting six engines in two zones and a frontend ...")
        with DemoFleet(
            port=port,
            engine_args=ENGINE_ARGS if load else (),
            frontend_args=FRONTEND_ARGS if load else (),
        ) as fleet:
            talk(f"ready after {fleet.started_in:.1f} s: {fleet.url}")
            if story or (story is None and not load):
                for step in run_steps(fleet):
                    steps += 1
                    emit(step, options)
            seconds = time.monotonic() - started
            is_default = _is_default_source(fleet.url, options)
            end = DemoEnd(fleet.url, sorted(fleet.engines), steps, seconds, keep, is_default, load)
            if keep:
                # The load's thread starts where the signals are blocked, so that they end the wait.
                sending = DemoLoad(fleet.url) if load else nullcontext()
                _until_interrupted(lambda: emit(end, options), sending)
            else:
                emit(end, options)
    except DemoError as error:
        reason, _, log = str(error).partition("\n")
        raise DynctlError(f"the demo fleet: {reason}", log) from None
    return ExitCode.YES


def _port(keep: bool) -> int:
    """The port of the default source for a fleet that stays, if it is free; 0: any free one."""
    from urllib.parse import urlsplit

    from dynctl.sources.named import DEFAULT_FRONTEND

    if not keep:
        return 0
    port = urlsplit(DEFAULT_FRONTEND).port or 0
    return 0 if _port_problem(port) else port


def _port_problem(port: int) -> str:
    """Why a frontend cannot listen on a port of this host; empty if it can now."""
    import socket

    from dynctl.base.errors import network_reason

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return network_reason(error)
    return ""


def _is_default_source(url: str, options: GlobalOptions) -> bool:
    """Whether commands without options for a source read from ``url``."""
    from dynctl.adapters.dynamo.planes import backend
    from dynctl.base.errors import DynctlError
    from dynctl.sources.named import DEFAULT_FRONTEND, frontends

    try:
        return url == DEFAULT_FRONTEND and not frontends(options) and backend(options) is None
    except DynctlError:
        return False


def _until_interrupted(
    announce: Callable[[], None], meanwhile: AbstractContextManager[object]
) -> None:
    """Wait for Ctrl-C, which is the normal end after the announcement."""
    import signal

    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        with meanwhile:
            announce()
            signal.sigwait(ends)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
