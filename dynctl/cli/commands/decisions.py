"""`dynctl decisions list`, `tail` and `compare`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.completion import names_of
from dynctl.cli.option_groups import fields_of, with_options
from dynctl.cli.shared_options import Duration, Limit, MinRate, NoHeaders

if TYPE_CHECKING:
    from dynctl.sources.query import DecisionQuery
    from dynctl.sources.source import LiveSource


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterOptions:
    """Which decisions are shown."""

    refused: Annotated[bool, typer.Option("--refused", help="Only refusals.")] = False
    outcome: Annotated[
        str | None,
        typer.Option(
            metavar="STATE",
            help="Only requests that ended so: complete, failed, cut (in mid-stream), cancelled, "
            "refused; or running, retried, unknown.",
        ),
    ] = None
    moved: Annotated[
        bool, typer.Option("--moved", help="Only decisions that missing decode workers moved.")
    ] = False
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this model.", autocompletion=names_of("model")),
    ] = None
    zone: Annotated[
        str | None,
        typer.Option(
            metavar="VALUE",
            help="Only decisions for workers of this zone (or rack, ..): zone-a, or rack=r1.",
        ),
    ] = None
    worker: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            autocompletion=names_of("worker"),
            help="Only this worker: name or id, or its unique end.",
        ),
    ] = None

    def query(self, limit: int) -> "DecisionQuery":
        """At most ``limit`` of the decisions, of any worker. Raises UsageProblem."""
        from dynctl.base.errors import UsageProblem
        from dynctl.documents.decisions import RESPONSE_STATES
        from dynctl.sources.query import DecisionQuery

        outcome = self.outcome
        if outcome is not None and outcome not in RESPONSE_STATES:
            known = ", ".join(RESPONSE_STATES)
            raise UsageProblem(f"--outcome {outcome}: expected one of {known}")
        if self.refused and outcome not in (None, "refused"):
            raise UsageProblem(f"--refused and --outcome {outcome}: expected one of them")
        return DecisionQuery(
            limit, self.refused, self.moved, self.model, self.zone, response=outcome
        )


FrontendLog = Annotated[
    str | None,
    typer.Option(
        "--frontend-log",
        metavar="FILE|-",
        help="Read a live Dynamo's decisions from its frontend's log; - is standard input.",
    ),
]


@with_options(filters=fields_of(FilterOptions))
def list_decisions(
    options: GlobalOptions,
    *,
    filters: FilterOptions,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="The last N decisions.")
    ] = 20,
    no_headers: NoHeaders = False,
    frontend_log: FrontendLog = None,
) -> int:
    """List the last decisions, newest first: workers, cached blocks, cost, outcome, reason.

    `dynctl why ID` explains one; the end of an id is enough.
    """
    import asyncio
    from contextlib import aclosing
    from dataclasses import replace

    from dynctl.documents.snapshot import DecisionReport
    from dynctl.screens.decisions import decision_report
    from dynctl.screens.render import emit
    from dynctl.sources.connect import connect_live
    from dynctl.top.run import silent_logs

    query = filters.query(limit)
    source = connect_live(options, frontend_log)

    async def read() -> DecisionReport:
        async with source:
            await source.settle()
            chosen = await _with_worker(source, query, filters.worker)
            async with aclosing(source.follow_decisions(chosen)) as pages:
                return await anext(pages)

    with silent_logs():
        report = asyncio.run(read())
    emit(
        report,
        options,
        screen=lambda report, canvas: decision_report(
            report, replace(canvas, headings=not no_headers), _place(options)
        ),
    )
    return 0


def _place(options: GlobalOptions) -> str | None:
    """What `dynctl why` needs beside an id of these decisions; None: nothing would do, since each
    run of the demo has decisions of its own."""
    import os
    import shlex

    if options.demo:
        return None
    if options.recording is not None:
        return f" --recording {shlex.quote(str(options.recording))}"
    if options.frontend == tuple(os.environ.get("DYNCTL_FRONTEND", "").split()):
        return ""
    return "".join(f" --frontend {shlex.quote(url)}" for url in options.frontend)


@with_options(filters=fields_of(FilterOptions))
def tail_decisions(
    options: GlobalOptions,
    *,
    filters: FilterOptions,
    last: Annotated[
        int, typer.Option("--tail", metavar="N", min=0, max=1000, help="Begin with the last N.")
    ] = 10,
    limit: Limit = None,
    duration: Duration = None,
    no_headers: NoHeaders = False,
    frontend_log: FrontendLog = None,
) -> int:
    """Show decisions as they are made, until Ctrl-C; with -o jsonl for programs.

    A request that fails, is cut, or whose client leaves is shown once more, with its outcome.
    """
    import asyncio
    from contextlib import aclosing

    from dynctl.screens.decisions import DecisionStream
    from dynctl.sources.connect import connect_live
    from dynctl.top.run import silent_logs

    query = filters.query(max(1, last))
    stream = DecisionStream(options, limit=limit, headings=not no_headers)
    source = connect_live(options, frontend_log)

    async def tail() -> None:
        async with source:
            await source.settle()
            workers = (await source.snapshot()).workers
            chosen = await _with_worker(source, query, filters.worker)
            async with aclosing(source.follow_decisions(chosen)) as pages:
                await stream.show(pages, workers, last, duration)

    with silent_logs():
        asyncio.run(tail())
    return 0


def compare_decisions(
    options: GlobalOptions,
    min_rate: MinRate = None,
    duration: Duration = None,
    frontend_log: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help="Log of a Dynamo frontend, - for standard input: its costs are compared too.",
        ),
    ] = None,
) -> int:
    """Compare the choices of a live Dynamo's frontends with predictions of them.

    Predicts the worker before each choice (needs --router-replica-sync at the frontends), for 30 s
    or --duration. With --frontend of a `serve observe`: all that it saw since it started. Sends no
    requests. What engines reuse of the predicted tokens: dynctl hits --predicted.
    """
    from dynctl.base.errors import ExitCode
    from dynctl.screens.render import emit
    from dynctl.sources.audit import audit

    report = audit(options, "choice", duration=duration, log=frontend_log)
    emit(report, options)
    return ExitCode.YES if report.passes(min_rate) else ExitCode.NO


async def _with_worker(
    source: "LiveSource", query: "DecisionQuery", worker: str | None
) -> "DecisionQuery":
    """The query for the worker that ``worker`` names. Raises UsageProblem."""
    from dataclasses import replace

    from dynctl.base.naming import resolve_worker

    if worker is None:
        return query
    rows = (await source.snapshot()).workers
    worker_id = resolve_worker(worker, [(row.worker_id, row.name) for row in rows])
    return replace(query, worker=next(row.name for row in rows if row.worker_id == worker_id))
