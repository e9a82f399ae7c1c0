"""The Typer app: the list of commands, and the one place where errors become exit codes."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from dynctl.commands import config, demo, route, serve, thresholds, version, why, workers
from dynctl.commands.global_options import group_callback, with_globals
from dynctl.commands.help import PlainCommand, PlainGroup
from dynctl.errors import DynctlError, ExitCode, exit_code_of

HELP = """Route, explain and verify topology-aware disaggregated LLM serving.

Start with `dynctl demo` (nothing needs to run), `dynctl serve frontend --worker URL`, or
`dynctl route --explain "a prompt"`.

Exit codes: 0 yes, 1 the answer is no, 2 usage or configuration, 3 unreachable, 4 timeout.
"""

#: Every command, in the order of the help page: name (a group's name, a space, its command).
COMMANDS: tuple[tuple[str, Any], ...] = (
    ("demo", demo.demo),
    ("serve frontend", serve.frontend),
    ("serve router", serve.router),
    ("serve engine", serve.engine),
    ("route", route.route),
    ("workers list", workers.list_workers),
    ("workers show", workers.show_worker),
    ("thresholds get", thresholds.get_thresholds),
    ("thresholds set", thresholds.set_thresholds),
    ("config show", config.show_config),
    ("why", why.why),
    ("version", version.version),
)

GROUPS = {
    "serve": "Run a frontend, a standalone router or a simulated engine.",
    "workers": "The workers that a router knows: role, topology, load, freshness.",
    "thresholds": "Busy thresholds, live on the frontend.",
    "config": "The router's effective settings and where each came from.",
}

# Typer bundles click from 0.17 on and depends on it before; this is the same class either way.
_ClickException = typer.BadParameter.__mro__[2]


def build_app() -> typer.Typer:
    """The app, built from the lists above."""
    app = _group(HELP)
    groups = {}
    for path, function in COMMANDS:
        first, _, second = path.partition(" ")
        owner = app
        if second:
            if first not in groups:
                owner = groups[first] = _group(GROUPS[first])
                app.add_typer(owner, name=first)
            owner = groups[first]
        owner.command(second or first, cls=PlainCommand)(with_globals(function))
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``dynctl`` script."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    debug = "--debug" in arguments
    try:
        command = typer.main.get_command(build_app())
        code = command.main(list(arguments), prog_name="dynctl", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader left (`dynctl ... | head`): not worth a word, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.YES
    except (_ClickException, typer.Abort) as error:
        return _usage_error(error)
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            raise
        return _report(error)
    return int(code or 0)


def _group(help: str) -> typer.Typer:
    app = typer.Typer(
        cls=PlainGroup,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
        no_args_is_help=True,
    )
    app.callback(cls=PlainGroup)(group_callback(help))
    return app


def _usage_error(error: Any) -> int:
    context = getattr(error, "ctx", None)
    message = error.format_message() if hasattr(error, "format_message") else "aborted"
    if type(error).__name__ == "NoArgsIsHelpError":
        _say(message, file=sys.stdout)
        return ExitCode.YES
    path = context.command_path if context is not None else "dynctl"
    _say(f"error: {message}", f"try: {path} --help")
    return ExitCode.USAGE


def _report(error: BaseException) -> int:
    code = exit_code_of(error)
    if code is ExitCode.INTERRUPTED:
        return code
    if code is None:
        _say(
            f"error: dynctl failed unexpectedly: {type(error).__name__}: {error}",
            "this is a defect; the same command with --debug shows where",
        )
        return ExitCode.DEFECT
    if isinstance(error, DynctlError):
        _say(f"error: {error.message}", error.hint)
    elif isinstance(error, OSError):
        _say(f"error: {error.filename}: {error.strerror}")
    else:
        _say(f"error: {error}")
    return code


def _say(message: str, hint: str = "", file: Any = None) -> None:
    lines = [message, *("  " + line for line in hint.splitlines())]
    (file or sys.stderr).write("\n".join(lines) + "\n")
