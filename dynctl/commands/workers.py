"""`dynctl workers list` and `workers show ID`."""

from typing import Annotated

import typer

from dynctl.options import GlobalOptions


def list_workers(
    options: GlobalOptions,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only workers of this model.")
    ] = None,
    role: Annotated[
        str | None, typer.Option(metavar="ROLE", help="Only prefill, decode or aggregated ones.")
    ] = None,
) -> int:
    """List the workers: role, topology, state, load, cached blocks, freshness."""
    from dynctl.connect import connect
    from dynctl.errors import UsageProblem
    from dynctl.views.render import emit
    from dynctl.views.results import WorkerList
    from router_core.workers import Role

    roles = [one.value for one in Role]
    if role is not None and role not in roles:
        raise UsageProblem(f"--role {role}: expected one of {', '.join(roles)}")
    source = connect(options)
    rows = [
        row for row in source.workers() if model in (None, row.model) and role in (None, row.role)
    ]
    rows.sort(
        key=lambda row: (row.model, roles.index(row.role) if row.role in roles else 9, row.name)
    )
    emit(WorkerList(source.title, rows), options)
    return 0


def show_worker(
    options: GlobalOptions,
    worker: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="Name, decimal or hex id, or the unique end of name or hex id."
        ),
    ],
) -> int:
    """Show one worker: card, KV-transfer policy, taints, load and freshness of each rank."""
    from dynctl.connect import connect
    from dynctl.naming import resolve_worker
    from dynctl.views.render import emit
    from dynctl.views.results import WorkerDetail

    source = connect(options)
    rows = source.workers()
    found = resolve_worker(worker, [(row.worker_id, row.name) for row in rows])
    row = next(row for row in rows if row.worker_id == found)
    emit(WorkerDetail(source.title, row), options)
    return 0
