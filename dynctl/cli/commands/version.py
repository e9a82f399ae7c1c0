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
    from dynctl.base.errors import ExitCode
    from dynctl.documents.client import versions
    from dynctl.screens import render
    from dynctl.sources.connect import peer_versions

    peers = () if client else peer_versions(options)
    render.emit(versions(peers), options)
    failed = any(problem is not None for _, _, problem in peers)
    return ExitCode.UNREACHABLE if failed else ExitCode.YES
