"""`dynctl help` and `dynctl options`: the pages of `--help`, as commands."""

import sys
from typing import Annotated

import typer

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions


def options(options: GlobalOptions, context: typer.Context) -> int:
    """List the global options; every command accepts them."""
    from dynctl.cli.help import options_page

    root = context.find_root()
    sys.stdout.write(options_page(root.command, root))
    return 0


def help_page(
    options: GlobalOptions,
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]", help="The command's name.")
    ] = None,
) -> int:
    """Show the help page of a command, as COMMAND --help does."""
    found = context.find_root()
    for word in command or ():
        group = found.command
        inner = group.get_command(found, word) if hasattr(group, "get_command") else None
        if inner is None:
            raise UsageProblem(f"unknown command '{' '.join(command or ())}'", "try: dynctl help")
        found = typer.Context(inner, parent=found, info_name=word)
    sys.stdout.write(found.get_help() + "\n")
    return 0
