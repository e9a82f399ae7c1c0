"""`dynctl thresholds watch`."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions


def watch_thresholds(
    options: GlobalOptions,
    rate: Annotated[
        float,
        typer.Option("--rate", metavar="SECONDS", min=0.1, max=3600, help="How often to look."),
    ] = 1.0,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="End after N lines.")
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option("--duration", metavar="SECONDS", min=0, help="End after this long."),
    ] = None,
) -> int:
    """Show what changes: a threshold, a rank that turns busy or calm, replicas that disagree.

    Looks at every replica and sets nothing. A Dynamo frontend does not say who is busy: that is
    judged from the load that it counts and the reports that are heard.
    """
    import asyncio
    from contextlib import ExitStack

    from dynctl.base.errors import ExitCode, UsageProblem
    from dynctl.screens.numbers import plural
    from dynctl.screens.render import doubted, talk
    from dynctl.screens.streaming import ThresholdStream
    from dynctl.sources import connect
    from dynctl.sources.thresholds.watch import Watch

    if options.demo or options.view is not None:
        flag = "--demo" if options.demo else "--view"
        raise UsageProblem(f"{flag}: a saved moment never changes; name frontends to watch")

    async def watch() -> None:
        stream = ThresholdStream(options, limit=limit)
        source = connect(options)
        with ExitStack() as stack:
            replicas = stack.enter_context(source.replicas())
            watching = stack.enter_context(Watch(replicas, rate, stream.put))
            ranks = {key for one in watching.first for key in one.ranks}
            busy = {key for one in watching.first for key, it in one.ranks.items() if it.busy}
            doubted(source.doubts)
            talk(
                f"watching {plural(len(replicas), 'replica')}: "
                f"{plural(len(ranks), 'rank')}, {len(busy):,} busy"
            )
            await stream.show(duration)

    asyncio.run(watch())
    return ExitCode.YES
