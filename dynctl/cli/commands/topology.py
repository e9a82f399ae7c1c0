"""`dynctl topology show`."""

from typing import Annotated, Any

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.completion import names_of
from dynctl.cli.shared_options import Model, NoHeaders, Selector, Watch


def show_topology(
    options: GlobalOptions,
    domain: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=names_of("domain"),
            help="Domain to group by (zone, rack, ..). [default: the KV-transfer domain, then "
            "zone, then the first]",
        ),
    ] = None,
    model: Model = None,
    selector: Selector = None,
    sort_by: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Sort by a column, for example ratio.")
    ] = None,
    no_headers: NoHeaders = False,
    watch: Watch = False,
) -> int:
    """Show the domains: workers, load, KV-transfer policy, stranded prefill workers."""
    from msgspec.structs import replace

    from dynctl.planning.domain_capacity import topology_show
    from dynctl.screens.columns import sort_rows
    from dynctl.screens.render import Listed, show_list, write_doubts
    from dynctl.screens.topology import domain_columns, topology_rows_only
    from dynctl.screens.workers import no_match
    from dynctl.sources.connect import connect
    from dynctl.sources.query import Selector

    wanted = Selector.parse(selector or "")
    source = connect(options)
    doubts: tuple[str, ...] = ()

    def read() -> Listed:
        nonlocal doubts
        rows = source.workers(index=False)
        doubts = source.doubts
        workers = [row for row in rows if model in (None, row.model)]
        settings, title = source.config().values, source.title
        result = topology_show(title, workers, settings, domain=domain, counted=wanted.matches)
        if sort_by is not None:
            columns = domain_columns(result.rows, result.domain)
            result = replace(result, rows=sort_rows(columns, result.rows, sort_by))
        screen: Any = topology_rows_only if no_headers else None
        if rows and not result.rows and not no_headers:
            screen = no_match(rows, model=model, selector=selector)
        return result, screen

    show_list(options, read, watch=watch)
    write_doubts(doubts)
    return 0
