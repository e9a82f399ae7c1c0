"""`dynctl workers list` and `workers show ID`."""

from typing import Annotated, Any

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.shared_options import Model, NoHeaders, Selector, Watch


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
            screen = no_match(len(every), model=model, role=role, selector=selector)
        others = UNSET if source.other_routers is None else source.other_routers
        return WorkerList(source.title, rows, others), screen

    show_list(options, read, watch=watch)
    doubted(source.doubts)
    return 0


def show_worker(
    options: GlobalOptions,
    worker: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="Name, decimal or hex id, or the unique end of a name or hex id."
        ),
    ],
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
