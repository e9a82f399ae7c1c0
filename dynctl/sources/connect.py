"""Chooses and opens the source that the options name (:mod:`dynctl.sources.named`).

Dynamo's frontends beside planes add load and settings. Dynamo's variables name planes too, unless
the named frontend is a dynctl frontend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynctl.base.errors import DynctlError, TimedOut, Unreachable, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.settings.contexts.precedence import apply_context, in_context, places_without_source
from dynctl.sources import named
from dynctl.sources.named import (
    RUNNING_WAYS,
    WAYS,
    expect_no_place,
    expect_recording,
    flags_of_sources,
    frontends,
    token,
)

if TYPE_CHECKING:
    from dynctl.sources.client import FrontendClient
    from dynctl.sources.frontend.source import FrontendSource
    from dynctl.sources.source import LiveSource, Source

#: Names that the description of a fleet lists, and the characters of each.
_MOST_LISTED = 4
_LONGEST_NAME = 64


def connect(options: GlobalOptions) -> Source:
    """The source that the options name, for commands; raises UsageProblem or Unreachable."""
    origin = _origin(options)
    if origin == "--demo":
        from dynctl.sources.demo.fleet import DemoSource

        return DemoSource()
    if options.view is not None:
        from dynctl.sources.view import open_view

        return open_view(options.view)
    if options.recording is not None:
        from dynctl.sources.recording import RecordedMoment

        return RecordedMoment(options.recording, options.at)
    options = in_context(options)
    if origin == "--discovery":
        from dynctl.sources.dynamo.source import DynamoSource

        return DynamoSource(options, frontends(options))
    from dynctl.sources.frontend.source import FrontendSource

    return FrontendSource(_dynctl_frontends(options), token(options), options.timeout)


def connect_frontends(options: GlobalOptions, command: str) -> FrontendSource:
    """The dynctl frontends that the options name, for a command that writes there.

    Raises UsageProblem for any other source, which is only read.
    """
    from dynctl.sources.frontend.source import FrontendSource

    origin = _origin(options)
    if origin == "--discovery":
        raise UsageProblem(
            f"{command}: dynctl only reads a live Dynamo, whose routers have no cordon and whose "
            "workers register by themselves",
            "start or end the worker there, or route with dynctl: serve frontend --discovery ..",
        )
    if origin != "--frontend":
        raise UsageProblem(f"{command} {origin}: nothing is running there", "name --frontend URL")
    options = in_context(options)
    return FrontendSource(_dynctl_frontends(options), token(options), options.timeout)


def connect_live(
    options: GlobalOptions, frontend_log: str | None = None, speed: float | None = None
) -> LiveSource:
    """The source that the options name, to be followed; raises as :func:`connect`.

    ``speed``: how many times as fast a recording is played; None, 0: one picture of it.

    ``frontend_log``: the log of a live Dynamo's frontend, a path or ``-`` for standard input.
    """
    origin = _origin(options)
    if speed is not None and origin != "--recording":
        raise UsageProblem(f"--speed {speed:g}: {origin} is not a recording", "--recording FILE")
    if frontend_log is not None and origin != "--discovery":
        raise UsageProblem(
            f"--frontend-log {frontend_log}: {origin} does not need a log",
            "the log is for a live Dynamo: --discovery etcd --etcd-endpoints HOST:2379",
        )
    if origin == "--demo":
        from dynctl.sources.demo.live import LiveDemo

        return LiveDemo()
    if options.view is not None:
        from dynctl.sources.view import StillView, open_view

        return StillView(open_view(options.view))
    if options.recording is not None:
        from dynctl.sources.recording import RecordedFleet, RecordedMoment

        return RecordedFleet(RecordedMoment(options.recording, options.at), speed or 0.0)
    options = in_context(options)
    if origin == "--discovery":
        from dynctl.sources.dynamo.live import LiveDynamo

        return LiveDynamo(options, frontends(options), frontend_log)
    from dynctl.sources.frontend.live import LiveFrontends

    return LiveFrontends(_dynctl_frontends(options), token(options), options.timeout)


def recorded(
    options: GlobalOptions, ways: str = RUNNING_WAYS
) -> tuple[str, tuple[str, ...], str | None]:
    """What `record` records: ``--frontend`` or ``--discovery``, the frontends (of a Dynamo those
    beside it), and the token. ``ways``: the hint where no source is set. Raises as
    :func:`connect`."""
    origin = _origin(options)
    if origin not in ("--frontend", "--discovery"):
        raise UsageProblem(f"{origin}: no router runs there, so nothing can be recorded", ways)
    options = in_context(options)
    if origin == "--discovery":
        return origin, frontends(options), None
    return origin, _dynctl_frontends(options, ways), token(options)


def names_source(options: GlobalOptions) -> bool:
    """Whether an option (not the environment, not the current context) names a source."""
    return options.context is not None or bool(flags_of_sources(options))


@dataclass(frozen=True, slots=True)
class ChosenSource:
    """The source that a command uses. ``kind``: as in ``base.options.READ_BY``; ``described``: for
    messages; ``named``: False for the default address, which no option, variable or context named.
    """

    kind: str
    described: str
    named: bool = True


def chosen_sources(options: GlobalOptions) -> list[ChosenSource]:
    """The source that the options name; two where only a request shows which one is used; none
    where the options name two. Raises UsageProblem."""
    from dynctl.adapters.dynamo.planes import backend

    given = flags_of_sources(options)
    if len(given) > 1:
        return []
    if options.offline:
        return [ChosenSource(given[0], given[0])]
    applied = apply_context(options)
    options = applied.options
    planes = backend(options)
    origin = applied.origins["frontend"]
    by_name = bool(frontends(options))
    described = f"the default address {named.DEFAULT_FRONTEND}"
    if by_name:
        described = origin if origin.startswith("context ") else origin.partition(" ")[2]
    routers = ChosenSource("--frontend", described, by_name)
    if planes is None:
        return [routers]
    fleet = ChosenSource(planes[0], f"discovery backend {planes[0]}")
    if not by_name or "--discovery" in flags_of_sources(options):
        return [fleet]
    return [routers, fleet]


def is_dynctl_fleet(options: GlobalOptions) -> bool:
    """Whether dynctl frontends are the source, not a Dynamo's planes; may need a request."""
    return _origin(options) == "--frontend"


def peer_versions(options: GlobalOptions) -> list[tuple[str, str | None, str | None]]:
    """``(url, version, problem)`` of the named frontends, or of the default one if it answers, or
    accepts a connection and does not answer in time."""
    from dynctl.adapters.dynamo.planes import backend
    from dynctl.sources.client import FrontendClient

    options = in_context(options)
    urls = frontends(options)
    if not urls and (backend(options) is not None or places_without_source(options)):
        return []  # another place is named: the default address is another fleet
    versions: list[tuple[str, str | None, str | None]] = []
    for url in urls or (named.DEFAULT_FRONTEND,):
        client = FrontendClient(url, token(options), options.timeout)
        try:
            versions.append((client.url, client.version(), None))
        except DynctlError as error:
            if urls or isinstance(error, TimedOut):
                versions.append((client.url, None, error.message))
    return versions


def described_default(options: GlobalOptions) -> str:
    """Address, models and workers of the fleet at the default address. Raises Unreachable,
    TimedOut or UsageProblem as :func:`connect`."""
    from dynctl.sources.client import FrontendClient

    options = in_context(options)
    (url,) = _dynctl_frontends(options)
    client = FrontendClient(url, token(options), options.timeout)
    return f"{client.url}: {_models_text(client)}, {_workers_text(client)}"


def _models_text(client: FrontendClient) -> str:
    try:
        names = client.models()
    except UsageProblem:
        return "models unknown (the frontend needs a token)"
    return _list_names("model", names)


def _workers_text(client: FrontendClient) -> str:
    try:
        names = [row.name for row in client.workers()]
    except UsageProblem:
        return "workers unknown (the frontend needs a token)"
    return _list_names("worker", names)


def _list_names(noun: str, names: list[str]) -> str:
    """``2 workers (a0, a1)``, with the first names."""
    from dynctl.base.terminal import printable

    if not names:
        return f"no {noun}s"
    shown = ", ".join(printable(name[:_LONGEST_NAME]) for name in names[:_MOST_LISTED])
    more = ", .." if len(names) > _MOST_LISTED else ""
    return f"{len(names):,} {noun}{'s' if len(names) > 1 else ''} ({shown}{more})"


def _origin(options: GlobalOptions) -> str:
    """``--demo``, ``--view``, ``--recording``, ``--discovery`` or ``--frontend``; raises
    UsageProblem for two."""
    flags = flags_of_sources(options)
    expect_recording(options)
    if len(flags) > 1:
        raise UsageProblem(f"{' and '.join(flags)}: two sources are set, expected one", WAYS)
    if options.offline:
        return flags[0]
    options = in_context(options)
    live = "--discovery" in flags_of_sources(options) or _planes_by_environment(options)
    return "--discovery" if live else "--frontend"


def _planes_by_environment(options: GlobalOptions) -> bool:
    """Whether Dynamo's variables name planes, and the named frontend is not a dynctl frontend."""
    from dynctl.adapters.dynamo.planes import backend

    if backend(options) is None:
        return False
    urls = frontends(options)
    if not urls:
        return True
    from dynctl.sources.dynamo.frontend import DynamoFrontend

    return DynamoFrontend(urls[0], options.timeout).identify() != "dynctl"


def _dynctl_frontends(options: GlobalOptions, ways: str = WAYS) -> tuple[str, ...]:
    """The named frontends, or the default one. Raises Unreachable where no dynctl frontend is
    there, TimedOut where a server accepts the connection and does not answer in time."""
    from dynctl.sources.client import FrontendClient

    urls = frontends(options)
    if urls:
        return urls
    expect_no_place(options)
    client = FrontendClient(named.DEFAULT_FRONTEND, token(options), options.timeout)
    try:
        ours = client.answers_as_ours(options.timeout)
    except TimedOut as slow:  # a busy frontend is not a missing one
        hint = f"--timeout {options.timeout * 3:g} waits longer; or {ways}"
        raise TimedOut(f"no source is set, and {slow.message}", hint) from None
    if not ours:
        raise Unreachable(
            f"no source is set, and no dynctl frontend answers at {named.DEFAULT_FRONTEND}", ways
        )
    return (named.DEFAULT_FRONTEND,)
