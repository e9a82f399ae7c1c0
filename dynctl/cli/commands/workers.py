"""`dynctl workers list`, `show`, `cordon`, `uncordon` and `drain`."""

from typing import Annotated, Any, TypeAlias

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.shared_options import Model, NoHeaders, Selector, Watch, seconds

Named: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="Name, decimal or hex id, or the unique end of a name or hex id."
    ),
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Show what would change; set nothing.")
]


def list_workers(
    options: GlobalOptions,
    model: Model = None,
    role: Annotated[
        str | None, typer.Option(metavar="ROLE", help="Only prefill, decode or aggregated.")
    ] = None,
    selector: Selector = None,
    sort_by: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Sort by a column, for example cached_blocks."),
    ] = None,
    no_headers: NoHeaders = False,
    watch: Watch = False,
) -> int:
    """List the workers: role, topology, state, load, cached blocks, age of the data."""
    from msgspec import UNSET

    from dynctl.base.errors import UsageProblem
    from dynctl.documents.workers import WorkerList
    from dynctl.screens.columns import sort_rows
    from dynctl.screens.render import Listed, doubted, show_list
    from dynctl.screens.workers import no_match, ordered, worker_columns, worker_rows_only
    from dynctl.sources import connect
    from dynctl.sources.query import Selector
    from router_core import Role

    roles = [one.value for one in Role]
    if role is not None and role not in roles:
        raise UsageProblem(f"--role {role}: expected one of {', '.join(roles)}")
    wanted = Selector.parse(selector or "")
    source = connect(options)

    def read() -> Listed:
        every = source.workers()
        rows = [
            row
            for row in every
            if model in (None, row.model) and role in (None, row.role) and wanted.matches(row)
        ]
        rows = ordered(rows)
        if sort_by is not None:
            rows = sort_rows(worker_columns(rows), rows, sort_by)
        screen: Any = worker_rows_only if no_headers else None
        if every and not rows and not no_headers:
            screen = no_match(every, model=model, role=role, selector=selector)
        others = UNSET if source.other_routers is None else source.other_routers
        return WorkerList(source.title, rows, others), screen

    show_list(options, read, watch=watch)
    doubted(source.doubts)
    return 0


def show_worker(
    options: GlobalOptions,
    worker: Named,
) -> int:
    """Show one worker: card, KV-transfer policy, taints, load and data age of each rank."""
    from dynctl.base.naming import resolve_worker
    from dynctl.documents.workers import WorkerDetail
    from dynctl.screens.render import doubted, emit
    from dynctl.sources import connect

    source = connect(options)
    rows = source.workers()
    found = resolve_worker(worker, [(row.worker_id, row.name) for row in rows])
    row = next(row for row in rows if row.worker_id == found)
    emit(WorkerDetail(source.title, row), options)
    doubted(source.doubts)
    return 0


def cordon_worker(options: GlobalOptions, worker: Named, dry_run: DryRun = False) -> int:
    """Give a worker no new requests, on every --frontend; its running requests go on.

    Needs the frontend's admin token where it has one. The cordon holds until `workers uncordon`,
    or until the frontend restarts.
    """
    return _set_cordon(options, worker, cordoned=True, dry_run=dry_run)


def uncordon_worker(options: GlobalOptions, worker: Named, dry_run: DryRun = False) -> int:
    """Give a cordoned worker requests again."""
    return _set_cordon(options, worker, cordoned=False, dry_run=dry_run)


def drain_worker(
    options: GlobalOptions,
    worker: Named,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", parser=seconds(), metavar="DURATION", help="Wait at most this long: 10m."
        ),
    ] = 300.0,
    dry_run: DryRun = False,
) -> int:
    """Cordon a worker, and wait until the requests that it runs have ended.

    The worker stays cordoned. Exit code 4: requests are still running after --wait.
    """
    import time

    from msgspec.structs import replace

    from dynctl.base.errors import ExitCode, TimedOut
    from dynctl.base.terminal import printable
    from dynctl.screens.numbers import plural
    from dynctl.screens.render import emit, talk
    from dynctl.sources import connect_frontends

    source = connect_frontends(options, "workers drain")
    change = source.cordon(worker, cordoned=True, dry_run=dry_run)
    if dry_run:
        emit(change, options)
        return ExitCode.YES
    began = time.monotonic()
    running = change.running
    if running:
        talk(f"{change.worker} is cordoned; waiting for {plural(running, 'request')}")
    back = f"it stays cordoned; dynctl workers uncordon {change.worker} gives it requests again"
    try:
        while running and time.monotonic() - began < wait:
            time.sleep(min(0.5, wait))
            running = source.running(change.worker)
    except KeyboardInterrupt:
        talk(f"{change.worker} still runs {plural(running, 'request')}; {back}")
        raise
    waited = round(time.monotonic() - began, 3)
    emit(replace(change, running=running, drained=not running, waited_s=waited), options)
    if running:
        raise TimedOut(
            f"{change.worker} still runs {plural(running, 'request')} after {waited:.0f} s",
            f"{printable(back)}\n"
            f"wait longer: dynctl workers drain {printable(change.worker)} --wait 30m",
        )
    return ExitCode.YES


def _set_cordon(options: GlobalOptions, worker: str, *, cordoned: bool, dry_run: bool) -> int:
    from dynctl.screens.render import emit
    from dynctl.sources import connect_frontends

    verb = "cordon" if cordoned else "uncordon"
    source = connect_frontends(options, f"workers {verb}")
    emit(source.cordon(worker, cordoned=cordoned, dry_run=dry_run), options)
    return 0
