"""From what the person named to something that answers: the one place that chooses a source.

Exactly one of ``--demo``, ``--view``, ``--frontend`` (repeatable: replicas of one service) and a
live Dynamo's planes (``--discovery`` and what belongs to it); Dynamo's frontends beside planes add
load and settings. Dynamo's variables name planes too, unless the frontend that was named is ours.
None given: ``$DYNCTL_FRONTEND``, then the context's (dynctl.settings.contexts.precedence), then
``http://127.0.0.1:8000`` if it answers as ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from dynctl.base.errors import DynctlError, Unreachable, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.settings.contexts.precedence import in_context

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from dynctl.documents.config import ConfigDocument
    from dynctl.documents.route_result import RouteResult
    from dynctl.documents.workers import WorkerRow
    from dynctl.sources.query import RouteQuery
    from dynctl.sources.thresholds.replicas import Replica

DEFAULT_FRONTEND = "http://127.0.0.1:8000"
FRONTEND_VARIABLE = "DYNCTL_FRONTEND"
TOKEN_VARIABLE = "DYNCTL_TOKEN"  # noqa: S105  the name of a variable
#: How long the default address gets to answer when nobody asked for it.
GUESS_TIMEOUT = 1.0

WAYS = """give one source:
--demo                             the embedded demo fleet, nothing needs to run
--view FILE                        a view saved with `dynctl route PROMPT --save-view FILE`
--frontend http://HOST:PORT        a running frontend; start one with
                                   `dynctl serve frontend --worker http://HOST:PORT`
--discovery file --file-kv DIR     a live Dynamo that registers in files
--discovery etcd --etcd-endpoints HOST:2379   ... or in etcd
--discovery kubernetes -n NAMESPACE           ... or in a Kubernetes cluster
--context NAME                     any of these, once kept with `dynctl context add NAME ..`"""


class Source(Protocol):
    """Where answers come from: a frontend, or a view of one."""

    @property
    def title(self) -> str: ...

    @property
    def doubts(self) -> tuple[str, ...]:
        """What the last answer about workers could not know; whole sentences for the person."""
        ...

    def route(self, query: RouteQuery) -> RouteResult: ...

    def workers(self, *, index: bool = True) -> list[WorkerRow]:
        """``index`` False: what the workers cache does not matter and need not be asked."""
        ...

    def thresholds(self) -> dict[str, dict[str, float | int | None]]: ...

    def set_thresholds(
        self, model: str, values: Mapping[str, float | int | None]
    ) -> dict[str, float | int | None]: ...

    def replicas(self) -> AbstractContextManager[list[Replica]]:
        """The processes that hold busy thresholds, reachable while the context is open."""
        ...

    def judged(self, model: str, values: Mapping[str, float | int | None]) -> list[WorkerRow]: ...

    def config(self) -> ConfigDocument: ...

    def decision(self, decision_id: str) -> RouteResult: ...

    def save(self) -> bytes: ...


def connect(options: GlobalOptions) -> Source:
    """The source that the options name; raises UsageProblem or Unreachable."""
    given = _given(options)
    if len(given) > 1:
        raise UsageProblem(f"{' and '.join(given)}: two sources were given, expected one", WAYS)
    if options.demo:
        from dynctl.sources.demo.fleet import demo_source

        return demo_source()
    if options.view is not None:
        from dynctl.sources.view import open_view

        return open_view(options.view)
    options = in_context(options)
    if "--discovery" in _given(options) or _planes_by_environment(options):
        return _planes(options)
    return _frontend(options)


def names_source(options: GlobalOptions) -> bool:
    """Whether an option (not the environment, not the current context) names where to look."""
    return options.context is not None or bool(_given(options))


def peer_versions(options: GlobalOptions) -> list[tuple[str, str | None, str | None]]:
    """``(url, version, why not)`` of the named frontends, or of the default one if it is there."""
    from dynctl.sources.frontend.client import FrontendClient

    options = in_context(options)
    named = frontends(options)
    timeout = options.timeout if named else min(options.timeout, GUESS_TIMEOUT)
    answers: list[tuple[str, str | None, str | None]] = []
    for url in named or (DEFAULT_FRONTEND,):
        source = FrontendClient(url, token(options), timeout)
        try:
            answers.append((source.url, source.version(), None))
        except DynctlError as error:
            if named:
                answers.append((source.url, None, error.message))
    return answers


def frontends(options: GlobalOptions) -> tuple[str, ...]:
    """The frontends that were named: by option, else by environment, else by the context."""
    options = in_context(options)
    if options.frontend or not options.environment_sources:
        return options.frontend
    return tuple(
        filter(None, (u.strip() for u in os.environ.get(FRONTEND_VARIABLE, "").split(",")))
    )


def token(options: GlobalOptions) -> str | None:
    """The bearer token for frontends; raises UsageProblem where it is not where it should be."""
    from dynctl.settings.contexts.tokens import read_token

    options = in_context(options)
    return read_token(options) or os.environ.get(TOKEN_VARIABLE) or None


def _given(options: GlobalOptions) -> list[str]:
    planes = (options.discovery, options.file_kv, options.etcd_endpoints)
    live = any(item is not None for item in planes)
    named = {
        "--demo": options.demo,
        "--view": options.view is not None,
        "--discovery": live,
        "--frontend": bool(options.frontend) and not live,
    }
    return [flag for flag, given in named.items() if given]


def _planes_by_environment(options: GlobalOptions) -> bool:
    """Whether Dynamo's variables name planes, and the frontend that was named is not ours."""
    from dynctl.sources.dynamo.planes import backend

    if backend(options) is None:
        return False
    named = frontends(options)
    if not named:
        return True
    from dynctl.sources.dynamo.frontend import DynamoFrontend

    return DynamoFrontend(named[0], options.timeout).identify() != "dynctl"


def _planes(options: GlobalOptions) -> Source:
    from dynctl.sources.dynamo.source import DynamoSource

    return DynamoSource(options, frontends(options))


def _frontend(options: GlobalOptions) -> Source:
    from dynctl.sources.frontend.client import FrontendClient
    from dynctl.sources.frontend.source import FrontendSource

    urls = frontends(options)
    if not urls:
        source = FrontendClient(DEFAULT_FRONTEND, token(options), options.timeout)
        if not source.answers_as_ours(min(options.timeout, GUESS_TIMEOUT)):
            raise Unreachable(
                f"no source was named, and no dynctl frontend answers at {DEFAULT_FRONTEND}", WAYS
            )
        return source
    sources = [FrontendClient(url, token(options), options.timeout) for url in urls]
    return sources[0] if len(sources) == 1 else FrontendSource(sources)
