"""`dynctl hot`."""

from pathlib import Path
from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.shared_options import RecordedFiles, RecordFor, SkipBad, seconds_of
from dynctl.documents.hot import DEFAULT_TOP, MOST_TOP


def hot(
    options: GlobalOptions,
    *,
    files: RecordedFiles = None,
    length: RecordFor = None,
    top: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST_TOP, help="Prefixes to show.")
    ] = DEFAULT_TOP,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TIME",
            help="Count requests from this time on: 12:04:31, +90s, an ISO time.",
        ),
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="Count requests before this time.")
    ] = None,
    model_path: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory with the config.json of the model."),
    ] = None,
    skip_bad: SkipBad = False,
) -> int:
    """Show the prefixes that requests share most, and on how many workers each of them is.

    COPIES counts the workers that have all of a prefix at the end. MISSED counts the requests that
    went to a worker without it while another one had it: too few copies, or a weight of the cost
    that is too small. A COPY is the size of the KV cache of one copy, shown where --model-path or
    the router's transfer costs have the size of a token. Without FILE, the command reads the next
    minutes of a live router (--for with --frontend or --discovery). Exit code 1: there was no
    request in that time.

    For example: dynctl hot --frontend http://127.0.0.1:8000 --for 5m
    """
    from dynctl.base.errors import ExitCode, UsageProblem
    from dynctl.health.hits.hot import HotPrefixes
    from dynctl.screens.progress import progress
    from dynctl.screens.render import emit
    from dynctl.sources.hits import HitsQuery, bytes_per_token, hot_report, of_files, of_live

    if files and length is not None:
        raise UsageProblem("--for is for a live router; expected it or files")
    prefixes = HotPrefixes(top, None if model_path is None else bytes_per_token(model_path))
    query = HitsQuery("", start, end, skip_bad, prefixes)
    with progress(options) as bar:
        if files:
            bar.pulse("reading requests")
            report = of_files(files, query, None)
        else:
            lasts = max(1, round(seconds_of("--for", length or "1m")))
            bar.pulse(f"recording for {lasts:,} s")
            report = of_live(options, lasts, query)
    emit(hot_report(report, prefixes), options)
    return ExitCode.YES if prefixes.requests else ExitCode.NO
