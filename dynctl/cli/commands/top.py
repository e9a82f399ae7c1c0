"""`dynctl top`."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.cli.completion import names_of
from dynctl.cli.shared_options import seconds


def top(
    options: GlobalOptions,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and exit (also with -o json or yaml).")
    ] = False,
    rate: Annotated[
        float,
        typer.Option(
            metavar="DURATION", parser=seconds(0.2, 3600.0), help="Refresh interval; key r."
        ),
    ] = 1.0,
    domain: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=names_of("domain"),
            help="Group by this domain (zone, rack, ..); key g. [default: the KV-transfer domain]",
        ),
    ] = None,
    readonly: Annotated[
        bool, typer.Option("--readonly", help="Do not allow changes of thresholds.")
    ] = False,
    speed: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=0,
            max=1000,
            help="Play a --recording from --at on, N times as fast; without it the picture stands.",
        ),
    ] = None,
    frontend_log: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help="Read a live Dynamo's decisions from its frontend's log; - is standard input.",
        ),
    ] = None,
) -> int:
    """Watch a fleet: domains, workers, decisions, alerts. Key ? lists the keys."""
    from dynctl.base.errors import ExitCode
    from dynctl.sources.connect import connect_live

    source = connect_live(options, frontend_log, speed)
    if once or options.output is not OutputFormat.TABLE:
        from dynctl.top.once import print_frame

        print_frame(source, options, domain)
        return ExitCode.YES
    from dynctl.top.run import run_dashboard

    return run_dashboard(
        source,
        options,
        rate=rate,
        domain=domain,
        readonly=readonly,
        reads_stdin=frontend_log == "-",
    )
