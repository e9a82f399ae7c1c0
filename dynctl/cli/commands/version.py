"""`dynctl version`: this client and the frontends."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions


def version(
    options: GlobalOptions,
    client: Annotated[
        bool, typer.Option("--client", help="Print the version of this client only.")
    ] = False,
) -> int:
    """Print the versions of dynctl and of the frontends.

    Exit code 3: a specified frontend does not answer.
    """
    from dynctl import sources as connect
    from dynctl.base.errors import ExitCode
    from dynctl.documents.client import versions
    from dynctl.screens import render

    peers = () if client else connect.peer_versions(options)
    render.emit(versions(peers), options)
    failed = any(problem is not None for _, _, problem in peers)
    return ExitCode.UNREACHABLE if failed else ExitCode.YES
