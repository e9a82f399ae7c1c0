"""`dynctl version`: this client, and the servers that it would talk to."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions


def version(
    options: GlobalOptions,
    client: Annotated[
        bool, typer.Option("--client", help="Only this program; ask nobody else.")
    ] = False,
) -> int:
    """Print the versions of dynctl and of the frontends that answer."""
    from dynctl import sources as connect
    from dynctl.documents.client import versions
    from dynctl.screens import render

    peers = () if client else connect.peer_versions(options)
    render.emit(versions(peers), options)
    return 0
