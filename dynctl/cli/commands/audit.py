"""`dynctl audit`."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.shared_options import Duration


def audit(
    options: GlobalOptions,
    min_rate: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            min=0,
            max=1,
            help="Exit code 1 below this rate of hits, or where nothing was compared.",
        ),
    ] = None,
    duration: Duration = None,
    log: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Log of a Dynamo frontend, - for standard input: its costs are compared too.",
        ),
    ] = None,
) -> int:
    """Compare predictions with what happened, beside live traffic.

    Of dynctl frontends: the prompt tokens that the router expected an engine to reuse, and those
    that the engine reported. Of a live Dynamo: the worker that is predicted before each choice, and
    the one that the frontend chose (needs --router-replica-sync). Sends no requests.

    With --duration only requests of that time count. Without it: all since a dynctl frontend
    started, and 30 s of a live Dynamo.
    """
    from dynctl.base.errors import ExitCode
    from dynctl.screens.render import emit
    from dynctl.sources.audit import audit as audited

    report = audited(options, duration=duration, log=log)
    emit(report, options)
    return ExitCode.YES if report.passes(min_rate) else ExitCode.NO
