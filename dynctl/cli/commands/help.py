"""`dynctl help`: the pages of `--help`, as a command."""

import sys
from typing import Annotated

import typer

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions


def help_page(
    options: GlobalOptions,
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]", help="The command's name.")
    ] = None,
) -> int:
    """Show the help page of a command, as COMMAND --help does."""
    from dynctl.cli.app import first_screen
    from dynctl.cli.help import arrange

    if not command:
        sys.stdout.write(first_screen())
        return 0
    found = context.find_root()
    for word in command:
        group = found.command
        inner = group.get_command(found, word) if hasattr(group, "get_command") else None
        if inner is None:
            raise UsageProblem(f"unknown command '{' '.join(command)}'", "try: dynctl help")
        found = typer.Context(inner, parent=found, info_name=word)
    arrange(found.command_path, found.command)
    sys.stdout.write(found.get_help() + "\n")
    return 0
