"""`dynctl events tail`."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.completion import names_of
from dynctl.cli.shared_options import Duration, Limit, NoHeaders


def tail_events(
    options: GlobalOptions,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            autocompletion=names_of("worker"),
            help="Only this worker (repeatable): name or id, or the unique end of it.",
        ),
    ] = None,
    selector: Annotated[
        str | None,
        typer.Option(
            "--selector",
            "-l",
            metavar="KEY=VALUE,..",
            help="Only workers that match: domain, name, role or model; != excludes.",
        ),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="stored|removed|cleared|gap|restart|..", help="Only this kind (repeatable)."
        ),
    ] = None,
    load: Annotated[
        bool, typer.Option("--load", help="Also show load reports and routers' bookings.")
    ] = False,
    limit: Limit = None,
    duration: Duration = None,
    no_headers: NoHeaders = False,
) -> int:
    """Show KV events of a live Dynamo: stored, removed and cleared blocks, and gaps.

    Only listens and sends nothing to workers. Needs a discovery backend: --discovery file or etcd,
    or Dynamo's environment variables.
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
