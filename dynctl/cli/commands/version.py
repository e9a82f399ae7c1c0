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
    """Print the versions of dynctl and of the frontends that answer."""
    from dynctl import sources as connect
    from dynctl.documents.client import versions
    from dynctl.screens import render

    peers = () if client else connect.peer_versions(options)
    render.emit(versions(peers), options)
    return 0
