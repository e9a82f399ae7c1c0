"""The options of ``serve`` about its clients: what they may send, and how long they may take.

They are the same for every serving process, so a command takes all of them as one mapping.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

_CLIENTS = "Limits of clients"
_SECONDS: dict[str, Any] = {"metavar": "SECONDS", "min": 0.1, "max": 86400}

#: Name -> annotation and default.
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "compressed_requests": (
        Annotated[
            bool,
            typer.Option(
                "--compressed-requests",
                help="Accept gzip and deflate bodies; their limit holds for the expanded body.",
                rich_help_panel=_CLIENTS,
            ),
        ],
        False,
    ),
    "header_timeout": (
        Annotated[
            float,
            typer.Option(
                "--header-timeout",
                help="Time from a connection, or from the first byte, to a complete header.",
                rich_help_panel=_CLIENTS,
                **_SECONDS,
            ),
        ],
        10.0,
    ),
    "keep_alive_timeout": (
        Annotated[
            float,
            typer.Option(
                "--keep-alive-timeout",
                help="Time that a connection stays open between two requests.",
                rich_help_panel=_CLIENTS,
                **_SECONDS,
            ),
        ],
        75.0,
    ),
    "peer_connections": (
        Annotated[
            int,
            typer.Option(
                "--peer-connections",
                metavar="N",
                min=0,
                max=1 << 20,
                help="Connections of one client address; 0: three quarters of those for clients, "
                "which are half of the descriptors.",
                rich_help_panel=_CLIENTS,
            ),
        ],
        0,
    ),
}


def with_access_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command; it receives their values as ``access``."""
    signature = inspect.signature(function, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [item for item in signature.parameters.values() if item.name != "access"]

    @functools.wraps(function)
    def command(*positional: Any, **arguments: Any) -> Any:
        access = {name: arguments.pop(name) for name in _OPTIONS}
        return function(*positional, access=access, **arguments)

    parameters = [parameter.replace(kind=keyword) for parameter in own]
    parameters += [
        inspect.Parameter(name, keyword, default=default, annotation=annotation)
        for name, (annotation, default) in _OPTIONS.items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def client_limits(access: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are fields of Limits."""
    return {
        "header_s": access["header_timeout"],
        "keep_alive_s": access["keep_alive_timeout"],
        "peer_connections": access["peer_connections"],
    }
