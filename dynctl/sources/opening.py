"""From what the person named to a source for the dashboard: :func:`connect` chooses, as always."""

from __future__ import annotations

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.settings.contexts.precedence import in_context
from dynctl.sources import connect, frontends, token
from dynctl.sources.frontend.client import FrontendClient
from dynctl.sources.frontend.source import FrontendSource
from dynctl.sources.source import LiveSource
from dynctl.sources.view import ViewSource


def open_source(options: GlobalOptions, frontend_log: str | None = None) -> LiveSource:
    """The source that the options name; it is read once it is entered. Raises as connect().

    ``frontend_log``: the log of a live Dynamo's frontend, a path or ``-`` for standard input.
    """
    chosen = connect(options)
    options = in_context(options)
    if frontend_log is not None and isinstance(
        chosen, FrontendClient | FrontendSource | ViewSource
    ):
        raise UsageProblem(
            f"--frontend-log {frontend_log}: {chosen.title} tells its decisions itself, or has "
            "none; the log is for a live Dynamo",
            "name its discovery backend: --discovery etcd --etcd-endpoints HOST:2379",
        )
    if isinstance(chosen, ViewSource):
        if options.demo:
            from dynctl.sources.demo.live import LiveDemo

            return LiveDemo()
        from dynctl.sources.view import StillView

        return StillView(chosen)
    if isinstance(chosen, FrontendClient | FrontendSource):
        from dynctl.sources.frontend.live import LiveFrontends

        asked = chosen.sources if isinstance(chosen, FrontendSource) else [chosen]
        return LiveFrontends([one.url for one in asked], token(options), options.timeout)
    from dynctl.sources.dynamo.live import LiveDynamo

    return LiveDynamo(options, frontends(options), frontend_log)
