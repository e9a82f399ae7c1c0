"""The Typer app: the list of commands, and the one place where errors become exit codes."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import typer

from dynctl.base.errors import DynctlError, ExitCode, ReaderLeft, exit_code_of
from dynctl.cli.global_options import group_callback, with_globals
from dynctl.cli.help import PlainCommand, PlainGroup

HELP = """Route, explain and verify topology-aware disaggregated LLM serving.

Start with `dynctl demo` (nothing needs to run), `dynctl serve frontend --worker URL`, or
`dynctl route --explain "a prompt"`.

Exit codes: 0 yes, 1 the answer is no, 2 usage or configuration, 3 unreachable, 4 timeout.
"""

#: Every command in the order of the help page: its path, where it is, what it does. Only the one
#: that the command line names is imported.
COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("demo", "demo:demo", "Start a two-zone fleet, route four requests, explain each."),
    ("serve frontend", "serve:frontend", "Run the OpenAI frontend with the router inside."),
    ("serve router", "serve:router", "Run the router alone, for other frontends."),
    ("serve engine", "serve_engine:engine", "Run a simulated OpenAI engine."),
    ("route", "route:route", "Show which workers would serve a prompt, and why."),
    ("workers list", "workers:list_workers", "List the workers: role, topology, load, freshness."),
    ("workers show", "workers:show_worker", "Show one worker: card, policy, taints, load."),
    ("topology show", "topology:show_topology", "Show domains: capacity, load, policy, stranded."),
    ("topology verify", "topology_verify:verify_topology", "Prove that topology reaches routing."),
    ("topology plan", "topology_plan:plan_topology", "Plan domains: ratio, losses, what to add."),
    ("topology lint", "topology_lint:lint_topology", "Check graph manifests, offline."),
    ("topology render", "topology_render:render_topology", "Print what worker pods need; YAML."),
    ("topology wait", "topology_wait:wait_for_topology", "Wait for a domain's topology file."),
    ("top", "top:top", "Watch domains, workers, decisions and alerts."),
    ("events tail", "events:tail_events", "Show KV events as they come; gaps are marked."),
    ("thresholds get", "thresholds:get_thresholds", "Show the busy thresholds in force."),
    ("thresholds set", "thresholds:set_thresholds", "Set busy thresholds; --dry-run tries them."),
    ("thresholds watch", "thresholds_watch:watch_thresholds", "Show what changes of them."),
    ("config show", "config:show_config", "Show every router setting and where it came from."),
    ("context list", "context:list_contexts", "List the contexts; * marks the current one."),
    ("context use", "context:use_context", "Make a context the current one."),
    ("context add", "context:add_context", "Keep this line's options as a context."),
    ("context show", "context:show_context", "Show what holds here and where it came from."),
    ("context remove", "context:remove_context", "Remove a context."),
    ("check", "check:check", "Check a live deployment; say what is wrong and how to fix it."),
    ("explain", "explain:explain", "Explain a code that a check printed."),
    ("why", "why:why", "Explain a decision that a frontend made."),
    ("bundle", "bundle:bundle", "Write what is seen into one file for a bug report."),
    ("completion", "completion:completion", "Print what completes command lines on TAB."),
    ("version", "version:version", "Print the versions of dynctl and of the frontends."),
)

GROUPS = {
    "serve": "Run a frontend, a router or a simulated engine.",
    "workers": "The workers that a router knows.",
    "topology": "Topology domains: capacity and KV-transfer policy.",
    "events": "What workers tell of their caches.",
    "thresholds": "Busy thresholds, live on the frontend.",
    "config": "The router's settings and their sources.",
    "context": "Named bundles of endpoints, so that nobody types them twice.",
}

#: The command that is about all the others.
WHOLE = "completion"

# Typer bundles click from 0.17 on and depends on it before; this is the same class either way.
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]


class _Root(PlainGroup):
    """Lists commands and groups in the order of COMMANDS; Typer would put all groups last."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys(path.partition(" ")[0] for path, _, _ in COMMANDS))


def build_app(arguments: Sequence[str] | None = None) -> typer.Typer:
    """The app, built from the lists above.

    Commands that ``arguments`` cannot mean are only named, not imported: the one that is run
    has all the words of its path on the command line. None imports every command, as does the
    one that describes them all.
    """
    given = None if arguments is None or WHOLE in arguments else set(arguments)
    app = _group(HELP, _Root)
    groups: dict[str, typer.Typer] = {}
    for path, place, summary in COMMANDS:
        first, _, second = path.partition(" ")
        if second and first not in groups:
            groups[first] = _group(GROUPS[first], meant=given is None or first in given)
            app.add_typer(groups[first], name=first)
        meant = given is None or set(path.split()) <= given
        function = with_globals(_load(place)) if meant else _named
        owner = groups[first] if second else app
        owner.command(second or first, cls=PlainCommand, short_help=summary)(function)
    return app


def _load(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"dynctl.cli.commands.{module}"), name)
    return function


def _named() -> None:
    """A command that is listed and cannot be meant."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of this process and end it; dynctl.__main__ calls it."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    debug = "--debug" in arguments
    arguments = _with_default(arguments)
    try:
        command = typer.main.get_command(build_app(arguments))
        code = command.main(list(arguments), prog_name="dynctl", standalone_mode=False)
        sys.stdout.flush()
    except (ReaderLeft, BrokenPipeError):
        # Python flushes stdout once more when it ends, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.YES
    except (_ClickException, typer.Abort) as error:
        return _usage_error(error, arguments)
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            raise
        return _report(error)
    return int(code or 0)


def _with_default(arguments: Sequence[str]) -> list[str]:
    """``serve --worker ..`` means ``serve frontend --worker ..``; `serve` alone is a question."""
    given = list(arguments)
    commands = {path.partition(" ")[0] for path, _, _ in COMMANDS}
    place = next((i for i, word in enumerate(given) if word in commands), None)
    if place is None or given[place] != "serve" or not given[place + 1 :]:
        return given
    following = given[place + 1]
    if following.startswith("-") and following not in ("--help", "-h"):
        known = {path.partition(" ")[2] for path, _, _ in COMMANDS if path.startswith("serve ")}
        if not known & set(given[place + 1 :]):
            given.insert(place + 1, "frontend")
    return given


def _group(help: str, cls: type[PlainGroup] = PlainGroup, *, meant: bool = True) -> typer.Typer:
    app = typer.Typer(
        cls=cls,
        help=help,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
        no_args_is_help=True,
    )
    if meant:
        app.callback(cls=cls)(group_callback(help))
    return app


def _usage_error(error: Any, arguments: Sequence[str]) -> int:
    context = getattr(error, "ctx", None)
    message = error.format_message() if hasattr(error, "format_message") else "aborted"
    if type(error).__name__ == "NoArgsIsHelpError":
        _say(message, file=sys.stdout)
        return ExitCode.YES
    message += _given_value(getattr(error, "param", None), message, arguments)
    path = context.command_path if context is not None else "dynctl"
    _say(f"error: {message}", f"try: {path} --help")
    return ExitCode.USAGE


def _given_value(parameter: Any, message: str, arguments: Sequence[str]) -> str:
    """`` (got 'soon')`` where Typer's message leaves out the value that it could not read."""
    for place, argument in enumerate(arguments):
        name, separator, value = argument.partition("=")
        if parameter is None or name not in parameter.opts or not name.startswith("-"):
            continue
        given = value if separator else "".join(arguments[place + 1 : place + 2])
        return "" if repr(given) in message else f" (got {given!r})"
    return ""


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
