"""From what the person named to a source for the dashboard: :func:`connect` chooses, as always."""

from __future__ import annotations

from dynctl.connect import connect, frontends, token
from dynctl.connect.frontend_source import FrontendSource
from dynctl.connect.replicas import Replicas
from dynctl.connect.view_source import ViewSource
from dynctl.contexts.settling import in_context
from dynctl.dashboard.sources import DashboardSource
from dynctl.errors import UsageProblem
from dynctl.options import GlobalOptions


def open_source(options: GlobalOptions, frontend_log: str | None = None) -> DashboardSource:
    """The source that the options name; it is read once it is entered. Raises as connect().

    ``frontend_log``: the log of a live Dynamo's frontend, a path or ``-`` for standard input.
    """
    chosen = connect(options)
    options = in_context(options)
    if frontend_log is not None and isinstance(chosen, FrontendSource | Replicas | ViewSource):
        raise UsageProblem(
            f"--frontend-log {frontend_log}: {chosen.title} tells its decisions itself, or has "
            "none; the log is for a live Dynamo",
            "name its discovery backend: --discovery etcd --etcd-endpoints HOST:2379",
        )
    if isinstance(chosen, ViewSource):
        if options.demo:
            from dynctl.dashboard.sources.demo import DemoSource

            return DemoSource()
        from dynctl.dashboard.sources.view import ViewDashboard

        return ViewDashboard(chosen)
    if isinstance(chosen, FrontendSource | Replicas):
        from dynctl.dashboard.sources.frontend import FrontendsSource

        asked = chosen.sources if isinstance(chosen, Replicas) else [chosen]
        return FrontendsSource([one.url for one in asked], token(options), options.timeout)
    from dynctl.dashboard.sources.planes import PlanesDashboard

    return PlanesDashboard(options, frontends(options), frontend_log)
