"""`dynctl workers list`, `show`, `cordon`, `uncordon`, `drain`, `add` and `remove`."""

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.completion import names_of
from dynctl.cli.shared_options import Model, NoHeaders, Selector, Watch, Yes, seconds

if TYPE_CHECKING:
    from dynctl.sources.frontend.source import FrontendSource

Named: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        autocompletion=names_of("worker"),
        help="Name, decimal or hex id, or the unique end of a name or hex id.",
    ),
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Show what would change; set nothing.")
]


def list_workers(
    options: GlobalOptions,
    model: Model = None,
    role: Annotated[
        str | None, typer.Option(metavar="prefill|decode|aggregated", help="Only this role.")
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
    from dynctl.screens.render import Listed, show_list, write_doubts
    from dynctl.screens.workers import no_match, sort_workers, worker_columns, worker_rows_only
    from dynctl.sources.connect import connect
    from dynctl.sources.query import Selector
    from router_core import Role

    roles = [role.value for role in Role]
    if role is not None and role not in roles:
        raise UsageProblem(f"--role {role}: expected one of {', '.join(roles)}")
    wanted = Selector.parse(selector or "")
    source = connect(options)

    def read() -> Listed:
        every = source.workers()
        rows = [
            row
            for row in every
            if model in (None, *row.served_names)
            and role in (None, row.role)
            and wanted.matches(row)
        ]
        rows = sort_workers(rows)
        if sort_by is not None:
            rows = sort_rows(worker_columns(rows), rows, sort_by)
        screen: Any = worker_rows_only if no_headers else None
        if every and not rows and not no_headers:
            screen = no_match(every, model=model, role=role, selector=selector)
        others = UNSET if source.other_routers is None else source.other_routers
        return WorkerList(source.title, rows, others), screen

    show_list(options, read, watch=watch)
    write_doubts(source.doubts)
    return 0


def show_worker(
    options: GlobalOptions,
    worker: Named,
) -> int:
    """Show one worker: card, KV-transfer policy, taints, load and data age of each rank."""
    from dynctl.base.naming import resolve_worker
    from dynctl.documents.workers import WorkerDetail
    from dynctl.screens.render import emit, write_doubts
    from dynctl.sources.connect import connect

    source = connect(options)
    rows = source.workers()
    worker_id = resolve_worker(worker, [(row.worker_id, row.name) for row in rows])
    row = next(row for row in rows if row.worker_id == worker_id)
    emit(WorkerDetail(source.title, row), options)
    write_doubts(source.doubts)
    return 0


def cordon_worker(
    options: GlobalOptions, worker: Named, dry_run: DryRun = False, yes: Yes = False
) -> int:
    """Give a worker no new requests, on every --frontend; its running requests go on.

    Needs the frontend's admin token where it has one. The cordon holds until `workers uncordon`,
    or until the frontend restarts.
    """
    return _set_cordon(options, worker, cordoned=True, dry_run=dry_run, yes=yes)


def uncordon_worker(
    options: GlobalOptions, worker: Named, dry_run: DryRun = False, yes: Yes = False
) -> int:
    """Give a cordoned worker requests again."""
    return _set_cordon(options, worker, cordoned=False, dry_run=dry_run, yes=yes)


def drain_worker(
    options: GlobalOptions,
    worker: Named,
    wait: Annotated[
        float,
        typer.Option(parser=seconds(), metavar="DURATION", help="Wait at most this long: 10m."),
    ] = 300.0,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> int:
    """Cordon a worker, and wait until the requests that it runs have ended.

    The worker stays cordoned. Exit code 4: requests are still running after --wait.
    """
    import time

    from msgspec.structs import replace

    from dynctl.base.errors import ExitCode, TimedOut
    from dynctl.base.terminal import printable
    from dynctl.screens.numbers import plural
    from dynctl.screens.progress import progress
    from dynctl.screens.render import emit, talk

    source = _frontends(options, "workers drain", dry_run=dry_run, yes=yes)
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
        with progress(options) as bar:
            bar.begin("waiting", wait)
            while running and time.monotonic() - began < wait:
                time.sleep(min(0.5, wait))
                running = source.running(change.worker, cordoned=True)
                bar.step(time.monotonic() - began)
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


def add_worker(
    options: GlobalOptions,
    worker: Annotated[
        str,
        typer.Argument(
            metavar="URL[,KEY=VALUE..]",
            help="As --worker of serve frontend: http://HOST:8001,name=decode-a2,role=decode,"
            "zone=zone-a",
        ),
    ],
    dry_run: DryRun = False,
    yes: Yes = False,
) -> int:
    """Register a worker on every --frontend, or replace the worker with that name.

    The frontend reads what is not given from the engine. The worker stays until `workers remove`,
    or until the frontend restarts. Engines that need a key are specified at the start.
    """
    from dynctl.base.errors import UsageProblem
    from dynctl.screens.render import emit
    from dynctl.serving.engines.worker_spec import WorkerSpecError, parse_worker_spec, spec_fields

    try:
        spec = parse_worker_spec(worker, "workers add")
        fields = spec_fields(worker, "workers add")
    except WorkerSpecError as error:
        raise UsageProblem(str(error)) from None
    source = _frontends(options, "workers add", dry_run=dry_run, yes=yes)
    emit(source.add({**fields, "name": spec.name}, dry_run=dry_run), options)
    return 0


def remove_worker(
    options: GlobalOptions, worker: Named, dry_run: DryRun = False, yes: Yes = False
) -> int:
    """Take a worker out of every --frontend that has it; its running requests go on.

    `workers drain` first waits until they have ended. A worker of --worker or of a workers file
    returns when the frontend restarts.
    """
    from dynctl.screens.render import emit

    source = _frontends(options, "workers remove", dry_run=dry_run, yes=yes)
    emit(source.remove(worker, dry_run=dry_run), options)
    return 0


def _set_cordon(
    options: GlobalOptions, worker: str, *, cordoned: bool, dry_run: bool, yes: bool
) -> int:
    from dynctl.screens.render import emit

    verb = "cordon" if cordoned else "uncordon"
    source = _frontends(options, f"workers {verb}", dry_run=dry_run, yes=yes)
    emit(source.cordon(worker, cordoned=cordoned, dry_run=dry_run), options)
    return 0


def _frontends(
    options: GlobalOptions, command: str, *, dry_run: bool, yes: bool
) -> "FrontendSource":
    """The frontends that a command changes; raises UsageProblem where the user does not agree."""
    from dynctl.cli.confirmation import confirm_change
    from dynctl.sources.connect import connect_frontends

    if not dry_run:
        confirm_change(options, command, yes=yes)
    return connect_frontends(options, command)
