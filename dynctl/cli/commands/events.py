"""`dynctl events tail`."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions


def tail_events(
    options: GlobalOptions,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            "--worker",
            metavar="ID",
            help="Only this worker (repeatable): name, decimal or hex id, or the unique end of "
            "name or hex id.",
        ),
    ] = None,
    selector: Annotated[
        str | None,
        typer.Option(
            "--selector",
            "-l",
            metavar="KEY=VALUE,..",
            help="Only workers that match all: a topology domain, name, role or model; "
            "!= excludes.",
        ),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="Only lines of this kind (repeatable): stored, removed, cleared, gap, restart, ..",
        ),
    ] = None,
    load: Annotated[
        bool, typer.Option("--load", help="Show load reports and routers' bookings too.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="End after N lines.")
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option("--duration", metavar="SECONDS", min=0, help="End after this long."),
    ] = None,
    no_headers: Annotated[bool, typer.Option("--no-headers", help="No heading.")] = False,
) -> int:
    """Show KV events of a live Dynamo as they come: stored, removed, cleared blocks, and gaps.

    Only listens: no worker is asked for anything. Needs a discovery backend (--discovery file or
    etcd), or the variables of Dynamo that name one.
    """
    import asyncio

    from dynctl.base.errors import ExitCode
    from dynctl.screens.events import EventStream
    from dynctl.screens.render import talk
    from dynctl.sources.dynamo.event_filter import TailQuery, now_ms, open_tail
    from dynctl.sources.dynamo.event_stream import TailQueue

    query = TailQuery.parse(worker or (), selector or "", kind or (), load=load)
    stream = EventStream(options, limit=limit, headings=not no_headers)

    async def tail() -> None:
        queue = TailQueue(now_ms)
        async with open_tail(options, query, queue.put, talk) as following:
            known = [item.worker for item in following.deployment.workers]
            await stream.show(queue, known, duration)

    asyncio.run(tail())
    return ExitCode.YES
