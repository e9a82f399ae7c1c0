"""`dynctl top`."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions, OutputFormat


def top(
    options: GlobalOptions,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and end (also -o json or yaml).")
    ] = False,
    rate: Annotated[
        float,
        typer.Option(
            "--rate", metavar="SECONDS", min=0.2, max=3600, help="How often to look; r changes it."
        ),
    ] = 1.0,
    domain: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Group domains by this (zone, rack, ..); g changes it. [default: the KV-transfer "
            "domain]",
        ),
    ] = None,
    readonly: Annotated[
        bool, typer.Option("--readonly", help="Nothing on the service can be changed from here.")
    ] = False,
    frontend_log: Annotated[
        str | None,
        typer.Option(
            "--frontend-log",
            metavar="FILE|-",
            help="Read a live Dynamo's decisions from its frontend's log (`Selected worker` "
            "lines); - is standard input.",
        ),
    ] = None,
) -> int:
    """Watch a fleet: domains, workers, decisions, alerts. ? in it lists the keys."""
    from dynctl.base.errors import ExitCode
    from dynctl.sources import connect_live

    source = connect_live(options, frontend_log)
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
