"""`dynctl hits`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.completion import policies
from dynctl.cli.option_groups import only_given, with_options
from dynctl.cli.shared_options import (
    MinRate,
    RecordedFiles,
    RecordFor,
    SkipBad,
    in_panel,
    seconds_of,
)

_TRACE_OPTIONS = only_given(
    in_panel(
        "Simulated fleet of a trace",
        {
            "generate": Annotated[
                str | None,
                typer.Option(
                    metavar="agentic|chat|rag|batch", help="Generate requests instead of a trace."
                ),
            ],
            "policy": Annotated[
                str | None,
                typer.Option(
                    metavar="NAME|FILE",
                    autocompletion=policies,
                    help="As replay --policy. [default: kv]",
                ),
            ],
            "workers": Annotated[
                int | None, typer.Option(metavar="N", min=1, max=2000, help="Workers. [default: 8]")
            ],
            "total_blocks": Annotated[
                int | None,
                typer.Option(
                    metavar="N",
                    min=1,
                    max=100_000_000,
                    help="KV blocks of a worker. [default: as serve engine]",
                ),
            ],
            "routers": Annotated[
                int | None, typer.Option(metavar="N", min=1, max=64, help="Routers. [default: 1]")
            ],
            "limit": Annotated[
                int | None, typer.Option(metavar="N", min=1, help="Only the first N requests.")
            ],
            "seed": Annotated[
                int | None, typer.Option(metavar="N", min=0, max=2**63, help="Seed. [default: 1]")
            ],
        },
    )
)


@with_options(simulated=_TRACE_OPTIONS)
def hits(
    options: GlobalOptions,
    *,
    files: RecordedFiles = None,
    length: RecordFor = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep the recording of a live router, so that replays can show gains.",
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(metavar="model|domain|tenant|hour|worker", help="Group by this."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TIME",
            help="Judge requests from this time on: 12:04:31, +90s, an ISO time.",
        ),
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="Judge requests before this time.")
    ] = None,
    predicted: Annotated[
        bool,
        typer.Option(
            "--predicted",
            help="Compare the tokens that the router expected engines to reuse with those that "
            "they reported: since the router started, or --for.",
        ),
    ] = False,
    min_rate: MinRate = None,
    skip_bad: SkipBad = False,
    simulated: dict[str, Any],
) -> int:
    """Show why the prefix hit rate is what it is, and the largest losses that you can avoid.

    The rates go from what one cache without limit could reuse to what the engines reused; each step
    names its causes. FILE is a recording (dynctl record), or a trace that runs through a simulated
    fleet. Without FILE and --generate, the command reads the next minutes of a live router (--for
    with --frontend or --discovery). Exit code 1: a live router had no request in that time.

    For example: dynctl hits --frontend http://127.0.0.1:8000 --for 5m

    With --predicted: whether the router's predictions were right, by worker, and why not. Choices
    of a live Dynamo: dynctl decisions compare.
    """
    from dynctl.base.errors import ExitCode, UsageProblem
    from dynctl.documents.hits import BY
    from dynctl.screens.progress import progress
    from dynctl.screens.render import emit
    from dynctl.sources.hits import HitsQuery, SimulatedTrace, of_files, of_live, of_trace

    generate = simulated.get("generate")
    if predicted:
        return _show_predictions(
            options, min_rate, length, given=bool(files or generate or by or record)
        )
    if min_rate is not None:
        raise UsageProblem("--min-rate needs --predicted")
    if by is not None and by not in BY:
        raise UsageProblem(f"--by {by}: expected one of {', '.join(BY)}")
    _expect_one_source(files, generate, length, record)
    query = HitsQuery(by or "", start, end, skip_bad)
    trace = SimulatedTrace(**simulated) if simulated else None
    with progress(options) as bar:
        if files:
            bar.pulse("reading requests")
            report = of_files(files, query, trace)
        elif trace is not None and generate is not None:
            bar.pulse("simulating")
            report = of_trace(None, query, trace)
        elif simulated:
            raise UsageProblem(f"--{next(iter(simulated)).replace('_', '-')} is for a trace")
        else:
            lasts = max(1, round(seconds_of("--for", length or "1m")))
            bar.pulse(f"recording for {lasts:,} s")
            report = of_live(options, lasts, query, record)
    emit(report, options)
    return ExitCode.YES if report.requests else ExitCode.NO


def _expect_one_source(
    files: list[Path] | None, generate: str | None, length: str | None, record: Path | None
) -> None:
    """Raise UsageProblem where options are for different sources of requests."""
    from dynctl.base.errors import UsageProblem

    for flag, value in (("--for", length), ("--record", record)):
        if value is not None and (files or generate):
            raise UsageProblem(f"{flag} is for a live router; expected it, or files, or --generate")
    if files and generate:
        raise UsageProblem(f"--generate {generate}: expected it or files, not both")


def _show_predictions(
    options: GlobalOptions, min_rate: float | None, length: str | None, *, given: bool
) -> int:
    """The predictions of a live router beside what its engines reported."""
    from dynctl.base.errors import ExitCode, UsageProblem
    from dynctl.screens.render import emit
    from dynctl.sources.audit import audit

    if given:
        raise UsageProblem("--predicted: expected no FILE, --generate, --by or --record beside it")
    report = audit(
        options, "reuse", duration=None if length is None else seconds_of("--for", length)
    )
    emit(report, options)
    return ExitCode.YES if report.passes(min_rate) else ExitCode.NO
