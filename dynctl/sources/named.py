"""What the options name as the place that answers: one of ``--demo``, ``--view``, ``--recording``,
``--frontend`` (repeatable: replicas of one service) and a live Dynamo's planes.

Without any: ``$DYNCTL_FRONTEND``, then the context's (dynctl.settings.contexts.precedence), then
``http://127.0.0.1:8000`` if a dynctl frontend answers there.
"""

from __future__ import annotations

import os

from dynctl.base.errors import UsageProblem
from dynctl.base.options import PLACES, GlobalOptions
from dynctl.settings.contexts.precedence import in_context, places_without_source

DEFAULT_FRONTEND = "http://127.0.0.1:8000"
FRONTEND_VARIABLE = "DYNCTL_FRONTEND"
_FIRST = "give one source:\n"
_OFFLINE = """--demo                             the embedded demo fleet, no process runs
--view FILE                        a view (dynctl route .. --save-view FILE)
--recording FILE --at TIME         a moment of a recording (dynctl record)
"""
_RUNNING = """--frontend http://HOST:PORT        a running frontend (dynctl serve frontend)
--discovery file --file-kv DIR     a live Dynamo that registers in files
--discovery etcd --etcd-endpoints HOST:2379   ... or in etcd
--discovery kubernetes -n NAMESPACE           ... or in a Kubernetes cluster
--context NAME                     any of these, saved (dynctl context add)"""
WAYS = _FIRST + _OFFLINE + _RUNNING
#: The sources that are running routers.
RUNNING_WAYS = _FIRST + _RUNNING


def frontends(options: GlobalOptions) -> tuple[str, ...]:
    """The frontends named by option, else by environment, else by the context."""
    options = in_context(options)
    if options.frontend or not options.environment_sources:
        return options.frontend
    return tuple(
        filter(None, (u.strip() for u in os.environ.get(FRONTEND_VARIABLE, "").split(",")))
    )


def token(options: GlobalOptions) -> str | None:
    """The bearer token for frontends; raises UsageProblem where its file or variable is missing."""
    from dynctl.settings.contexts.tokens import bearer_token

    return bearer_token(options)


def expect_recording(options: GlobalOptions) -> None:
    """Raise UsageProblem for a time of no recording."""
    if options.at is not None and options.recording is None:
        raise UsageProblem(
            f"--at {options.at}: a moment of which recording?",
            "add --recording FILE; make one: dynctl record FILE --frontend URL",
        )


def expect_no_place(options: GlobalOptions) -> None:
    """Raise UsageProblem where the default address would be used and options of the command line
    or the context name another place."""
    typed = sorted(options.given & PLACES)
    if typed:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in typed)
        verb = "names a place" if len(typed) == 1 else "name places"
        raise UsageProblem(
            f"{flags} {verb} without a source, and has no effect on {DEFAULT_FRONTEND}, the "
            "default address",
            WAYS,
        )
    unread = places_without_source(options)
    if unread is None:
        return
    name, keys = unread
    raise UsageProblem(
        f"context {name} has {' and '.join(keys)} and names no source: without one they have no "
        f"effect on {DEFAULT_FRONTEND}, the default address",
        f"add a source to the context: dynctl context add {name} --discovery kubernetes ..\n"
        f"or name it here: --frontend {DEFAULT_FRONTEND}",
    )


def flags_of_sources(options: GlobalOptions) -> list[str]:
    """The sources that the options name, as flags; without the environment and the context."""
    named = {
        "--demo": options.demo,
        "--view": options.view is not None,
        "--recording": options.recording is not None,
        "--discovery": options.planes,
        "--frontend": bool(options.frontend) and not options.planes,
    }
    return [flag for flag, given in named.items() if given]
