"""The Typer app: the list of commands, and the conversion of errors to exit codes."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import typer

from dynctl.base.errors import (
    NO_ROOM,
    DynctlError,
    ExitCode,
    ReaderLeft,
    exit_code_of,
    file_problem,
)
from dynctl.cli.completion import VARIABLE, answer
from dynctl.cli.global_options import group_callback, with_globals
from dynctl.cli.help import CommandPage, GroupPage, arrange, chosen, help_wanted
from dynctl.cli.table import COMMANDS, GROUPS, Command, names_of_commands

#: The first screen around the table of commands, which :func:`first_screen` draws.
_HEADING = "dynctl: KV-cache-aware, topology-aware routing for LLM fleets"
_SHELVES = ("Look", "Ask", "Change", "Run", "Other")
_ENDING = """\
Try     dynctl demo --keep --load    then, in a second terminal: dynctl top
        dynctl route --demo --explain "a prompt"
        dynctl check --discovery etcd

Point it at a fleet: --frontend URL, --discovery etcd|file|kubernetes, or
dynctl context add NAME.  More: dynctl COMMAND --help, dynctl --help=global
"""

# Of the click that Typer bundles, which has no public name.
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]


class _Root(GroupPage):
    """The program itself: its page is the first screen."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        options: list[Any] = self.params
        if all(option.hidden or option.rich_help_panel is None for option in options):
            formatter.write(first_screen())
        else:
            super().format_help(ctx, formatter)


def first_screen() -> str:
    """The page of `dynctl` without arguments: at most 80x24, every command once."""
    shelves: dict[str, list[str]] = {shelf: [] for shelf in _SHELVES}
    for name in names_of_commands():
        shelf, text = (GROUPS[name] if name in GROUPS else COMMANDS[name]).menu
        shelves[shelf].append(f"{name:<12}{text}")
    lines = [_HEADING, ""]
    for shelf, entries in shelves.items():
        for place in range(0, len(entries), 2):
            row = f"{'' if place else shelf:<8}" + "".join(
                f"{entry:<38}" for entry in entries[place : place + 2]
            )
            lines.append(row.rstrip())
    return "\n".join((*lines, "", _ENDING))


def program(arguments: Sequence[str] | None = None) -> Any:
    """The program as a group of commands, in the order of the table.

    Only commands with all words of their path in ``arguments`` are imported and have options; the
    others have name and summary alone. None imports every command.
    """
    given = None if arguments is None else set(arguments)
    root = _group(_HEADING, _Root)
    for row in COMMANDS.values():
        imported = given is None or given.issuperset(row.path.split())
        first, _, second = row.path.partition(" ")
        owner, name = root, first
        if second:
            if first not in root.commands:
                read = given is None or first in given
                help = GROUPS[first].help
                root.commands[first] = _group(help) if read else GroupPage(name=first, help=help)
            owner, name = root.commands[first], second
        owner.commands[name] = (
            _command(row) if imported else CommandPage(name, short_help=row.summary)
        )
    return root


def _command(row: Command) -> Any:
    """The command of a row, with its options."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    name = row.path.split()[-1]
    app.command(name, cls=CommandPage, short_help=row.summary)(with_globals(function_of(row), row))
    return typer.main.get_command(app)


def function_of(row: Command) -> Callable[..., Any]:
    """The function of a row; its module is imported."""
    module, _, name = row.place.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"dynctl.cli.commands.{module}"), name)
    return function


def _group(help: str, cls: type[GroupPage] = GroupPage) -> Any:
    """A group without commands, with the global options."""
    app = typer.Typer(
        cls=cls,
        help=help,
        add_completion=cls is _Root,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
        no_args_is_help=True,
    )
    app.callback(cls=cls)(group_callback(help, version=cls is _Root))
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of this process and exit; dynctl.__main__ calls it."""
    if VARIABLE in os.environ:
        answer(_program_of_line)
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    debug = "--debug" in arguments
    command: Any = None
    try:
        arguments, group = help_wanted(_with_default(arguments))
        command = program(arguments)
        path, page = chosen(arguments, command)
        arrange(path, page, group)
        code = command.main(list(arguments), prog_name="dynctl", standalone_mode=False)
        sys.stdout.flush()
    except (ReaderLeft, BrokenPipeError):
        _forget_stdout()
        return ExitCode.YES
    except (_ClickException, typer.Abort) as error:
        return _usage_error(error, arguments, command)
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
            # Files of ours are named, so this is stdout, on which nothing more can be written.
            _forget_stdout()
            _say(f"error: the output cannot be written: {file_problem(error, writing=True)}")
            return ExitCode.USAGE
        return _report(error)
    return int(code or 0)


def _forget_stdout() -> None:
    """Python flushes stdout again at exit, which would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_default(arguments: Sequence[str]) -> list[str]:
    """``serve --worker ..`` means ``serve frontend --worker ..``; `serve` alone shows help.
    ``decisions [--refused ..]`` means ``decisions list``."""
    given = list(arguments)
    commands = names_of_commands()
    place = next((i for i, word in enumerate(given) if word in commands), None)
    if place is not None and given[place] == "decisions":
        known = {path.partition(" ")[2] for path in COMMANDS if path.startswith("decisions ")}
        if not {*known, "--help", "-h"} & set(given[place + 1 :]):
            given.insert(place + 1, "list")
        return given
    if place is None or given[place] != "serve" or not given[place + 1 :]:
        return given
    following = given[place + 1]
    if following.startswith("-") and following not in ("--help", "-h"):
        known = {path.partition(" ")[2] for path in COMMANDS if path.startswith("serve ")}
        if not known & set(given[place + 1 :]):
            given.insert(place + 1, "frontend")
    return given


def _program_of_line(words: list[str], incomplete: str) -> tuple[Any, list[str]]:
    """The program for a line that is typed, and its words with the command that they leave out."""
    option = incomplete.startswith("-")
    if option or (words and words[-1] not in GROUPS):
        words = _with_default([*words, incomplete])[:-1]
    return program(words), words


def _usage_error(error: Any, arguments: Sequence[str], root: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        _say(error.format_message(), file=sys.stdout)
        return ExitCode.YES
    from dynctl.cli.usage import usage_problem

    message, hint = usage_problem(error, arguments, root)
    _say(f"error: {message}", hint)
    return ExitCode.USAGE


def _report(error: BaseException) -> int:
    code = exit_code_of(error)
    if code is ExitCode.INTERRUPTED:
        return code
    if code is None:
        _say(
            f"error: dynctl failed unexpectedly: {type(error).__name__}: {error}",
            "this is a defect in dynctl; --debug shows the traceback",
        )
        return ExitCode.DEFECT
    if isinstance(error, DynctlError):
        _say(f"error: {error.message}", error.hint)
    elif isinstance(error, OSError):
        _say(f"error: {error.filename}: {file_problem(error)}")
    else:
        _say(f"error: {error}")
    return code


def _say(message: str, hint: str = "", file: Any = None) -> None:
    """Write a message and its hint to stderr, wrapped at words; `file`: a page, as it is."""
    from dynctl.base.terminal import printable, printable_lines, stream_width, wrapped

    if file is not None:
        file.write(printable_lines(message) + "\n")
        return
    message = printable(message)
    # COLUMNS, else the terminal of stderr; 80 in a pipe.
    width = stream_width(sys.stderr) or 80
    lines = wrapped(message, width, " " * 7)
    for line in map(printable, hint.splitlines()):
        lines += wrapped("  " + line, width, " " * 6)
    sys.stderr.write("\n".join(lines) + "\n")
