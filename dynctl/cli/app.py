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
from dynctl.cli.global_options import group_callback, with_globals
from dynctl.cli.help import PlainCommand, PlainGroup

#: The page of `dynctl` without arguments: at most 80x24, every command once.
FIRST_SCREEN = """\
dynctl: KV-cache-aware, topology-aware routing for LLM fleets

Look    top         live dashboard            workers    list, cordon, drain
        check       is the fleet healthy?     topology   domains, verify, plan
        decisions   what was routed where     events     KV events, live
Ask     route       where would a prompt go?  why        explain past decisions
        hits        why this hit rate?        audit      were answers right?
        explain     explain a finding's code
Change  thresholds  busy thresholds, live     context    saved endpoints
Run     serve       frontend, router, attach  demo       a fleet on this host
        replay      policies on a trace       record     traffic, to a file
Other   bundle      file for a bug report     version    client and frontends
        completion  shell completion script   help       help page of a command
        options     the global options        config     settings, sources

Try     dynctl demo --keep --load    then, in a second terminal: dynctl top
        dynctl route --demo --explain "a prompt"
        dynctl check --discovery etcd

Point it at a fleet: --frontend URL, --discovery etcd|file|kubernetes, or
dynctl context add NAME.  More: dynctl options, dynctl COMMAND --help
"""

#: Every command in the order of the help page: path, module:function, summary. A new command is
#: added here. Only the command that is run is imported.
COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("demo", "demo:demo", "Start a two-zone fleet and explain four requests."),
    ("serve frontend", "serve:frontend", "Run the OpenAI frontend with the router inside."),
    ("serve router", "serve:router", "Run the router alone, for other frontends."),
    ("serve indexer", "serve_indexer:indexer", "Run the index of cached blocks alone, over HTTP."),
    ("serve observe", "serve:observe", "Run a shadow router beside a live Dynamo."),
    ("serve attach", "serve_attach:attach", "Register an engine as a worker of a Dynamo fleet."),
    ("serve epp", "serve_epp:epp", "Run the router as a gateway's endpoint picker."),
    ("serve engine", "serve_engine:engine", "Run a simulated OpenAI engine."),
    ("route", "route:route", "Show which workers would serve a prompt, and why."),
    ("workers list", "workers:list_workers", "List the workers: role, topology, load, caches."),
    ("workers show", "workers:show_worker", "Show one worker: card, policy, taints, load."),
    ("workers cordon", "workers:cordon_worker", "Give a worker no new requests."),
    ("workers uncordon", "workers:uncordon_worker", "Give a cordoned worker requests again."),
    ("workers drain", "workers:drain_worker", "Cordon a worker; wait until its requests ended."),
    ("workers add", "workers:add_worker", "Register a worker at a running router."),
    ("workers remove", "workers:remove_worker", "Take a worker out of a running router."),
    ("topology show", "topology:show_topology", "Show domains: capacity, load, policy, stranded."),
    ("topology verify", "topology_verify:verify_topology", "Verify topology from node to router."),
    ("topology plan", "topology_plan:plan_topology", "Plan domains: ratio, losses, what to add."),
    ("topology lint", "topology_lint:lint_topology", "Check graph manifests, offline."),
    ("topology render", "topology_render:render_topology", "Print topology patches for pods."),
    ("topology sync", "topology_sync:sync_topology", "Copy topology labels from nodes to pods."),
    ("topology wait", "topology_wait:wait_for_topology", "Wait for a domain's topology file."),
    ("replay", "replay:replay", "Simulate routing policies on a trace or a recording."),
    ("top", "top:top", "Watch domains, workers, decisions and alerts."),
    ("decisions list", "decisions:list_decisions", "List past decisions: where, cached, why."),
    ("decisions tail", "decisions:tail_decisions", "Show decisions as they are made."),
    ("events tail", "events:tail_events", "Show KV events live, with gaps marked."),
    ("thresholds get", "thresholds:get_thresholds", "Show the current busy thresholds."),
    ("thresholds set", "thresholds:set_thresholds", "Set busy thresholds; --dry-run tries them."),
    ("thresholds watch", "thresholds:watch_thresholds", "Show changes of thresholds and ranks."),
    ("config show", "config:show_config", "Show every router setting and its source."),
    ("context list", "context:list_contexts", "List the contexts; * marks the current one."),
    ("context use", "context:use_context", "Make a context current."),
    ("context add", "context:add_context", "Save the options of this command as a context."),
    ("context show", "context:show_context", "Show the options in effect and their sources."),
    ("context remove", "context:remove_context", "Remove a context."),
    ("check", "check:check", "Check a live deployment: what is wrong, how to fix it."),
    ("explain", "explain:explain", "Explain the code of a finding."),
    ("why", "why:why", "Explain a past decision of a frontend."),
    ("hits", "hits:hits", "Show why the prefix hit rate is what it is, and what to change."),
    ("audit", "audit:audit", "Compare predictions with live traffic."),
    ("record", "record:record", "Record what a router sees and does, in a file."),
    ("bundle", "bundle:bundle", "Write a bundle file for a bug report."),
    ("completion", "completion:completion", "Print the shell completion script."),
    ("version", "version:version", "Print the versions of dynctl and of the frontends."),
    ("options", "help:options", "List the global options."),
    ("help", "help:help_page", "Show the help page of a command."),
)

GROUPS = {
    "serve": "Run a frontend, a router, an indexer, a shadow router, an engine or its sidecar. "
    "`dynctl serve --worker URL` is `dynctl serve frontend --worker URL`.",
    "workers": "Workers of a router: list, one worker, cordon, drain, add, remove.",
    "topology": "Topology domains: capacity, policy, verify, plan, lint, sync.",
    "decisions": "Past decisions of a router: list, tail. `dynctl decisions --refused` is "
    "`dynctl decisions list --refused`.",
    "events": "KV events of the workers, live.",
    "thresholds": "Busy thresholds, live on the frontends.",
    "config": "Router settings and their sources.",
    "context": "Saved endpoints.",
}

#: Commands that read no fleet: the options for its source have no effect on them.
LOCAL = frozenset(
    (
        *("demo", "explain", "completion", "options", "help"),
        *("serve frontend", "serve router", "serve indexer", "serve engine"),
        *("topology render", "topology wait"),
        *("context list", "context use", "context remove"),
    )
)
_MORE = "Global options (--frontend, --discovery, --demo, -n, -o, ..): dynctl options"
_MORE_LOCAL = "Global options (-o, --no-color, --debug): dynctl options"
#: Commands whose options for a source are others than those of _MORE.
_MORE_OF = {
    **dict.fromkeys(
        ("serve", "serve frontend", "serve router", "serve attach", "serve observe"),
        "Global options (--discovery, --file-kv, ..): dynctl options",
    ),
    "topology sync": "Global options (-n, -A, --kubeconfig, -o, ..): dynctl options",
}

#: The command that needs all other commands imported.
WHOLE = "completion"

# Typer bundles click from 0.17 on and depends on it before; this is the same class either way.
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]


class _Root(PlainGroup):
    """The program itself: its page is the first screen.

    Commands and groups have the order of COMMANDS; Typer lists all groups last.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(FIRST_SCREEN)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys(path.partition(" ")[0] for path, _, _ in COMMANDS))


def build_app(arguments: Sequence[str] | None = None) -> typer.Typer:
    """The app, built from the lists above.

    Only commands with all words of their path in ``arguments`` are imported; the others are only
    listed. None, and the command ``completion``, import every command.
    """
    given = None if arguments is None or WHOLE in arguments else set(arguments)
    app = _group(FIRST_SCREEN, _Root)
    groups: dict[str, typer.Typer] = {}
    for path, place, summary in COMMANDS:
        first, _, second = path.partition(" ")
        if second and first not in groups:
            groups[first] = _group(GROUPS[first], imported=given is None or first in given)
            local = all(one in LOCAL for one, _, _ in COMMANDS if one.startswith(f"{first} "))
            groups[first].info.epilog = _MORE_OF.get(first, _MORE_LOCAL if local else _MORE)
            app.add_typer(groups[first], name=first)
        imported = given is None or set(path.split()) <= given
        function = with_globals(_load(place), path, local=path in LOCAL) if imported else _listed
        owner = groups[first] if second else app
        more = _MORE_OF.get(path, _MORE_LOCAL if path in LOCAL else _MORE)
        owner.command(second or first, cls=PlainCommand, short_help=summary, epilog=more)(function)
    return app


def _load(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"dynctl.cli.commands.{module}"), name)
    return function


def _listed() -> None:
    """A command that is only listed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of this process and exit; dynctl.__main__ calls it."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    debug = "--debug" in arguments
    arguments = _with_default(arguments)
    command: Any = None
    try:
        command = typer.main.get_command(build_app(arguments))
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
    commands = {path.partition(" ")[0] for path, _, _ in COMMANDS}
    place = next((i for i, word in enumerate(given) if word in commands), None)
    if place is not None and given[place] == "decisions":
        if not {"list", "tail", "--help", "-h"} & set(given[place + 1 :]):
            given.insert(place + 1, "list")
        return given
    if place is None or given[place] != "serve" or not given[place + 1 :]:
        return given
    following = given[place + 1]
    if following.startswith("-") and following not in ("--help", "-h"):
        known = {path.partition(" ")[2] for path, _, _ in COMMANDS if path.startswith("serve ")}
        if not known & set(given[place + 1 :]):
            given.insert(place + 1, "frontend")
    return given


def _group(help: str, cls: type[PlainGroup] = PlainGroup, *, imported: bool = True) -> typer.Typer:
    app = typer.Typer(
        cls=cls,
        help=help,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
        no_args_is_help=True,
    )
    if imported:
        app.callback(cls=cls)(group_callback(help, version=cls is _Root))
    return app


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
    from dynctl.base.terminal import message_width, printable, printable_lines, wrapped

    if file is not None:
        file.write(printable_lines(message) + "\n")
        return
    message = printable(message)
    # COLUMNS, else the terminal of stderr; 80 in a pipe.
    width = message_width() or 80
    lines = wrapped(message, width, " " * 7)
    for line in map(printable, hint.splitlines()):
        lines += wrapped("  " + line, width, " " * 6)
    sys.stderr.write("\n".join(lines) + "\n")
