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
    inner_context = context.find_root()
    for word in command:
        group = inner_context.command
        inner = group.get_command(inner_context, word) if hasattr(group, "get_command") else None
        if inner is None:
            raise UsageProblem(f"unknown command '{' '.join(command)}'", "try: dynctl help")
        inner_context = typer.Context(inner, parent=inner_context, info_name=word)
    arrange(inner_context.command_path, inner_context.command)
    sys.stdout.write(inner_context.get_help() + "\n")
    return 0
