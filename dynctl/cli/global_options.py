"""The global options: one table, accepted before and after the command's name, as in kubectl.

``--view a.json route hi`` and ``route hi --view a.json`` are equal. If an option is given twice,
the last one wins; repeatable options add up.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dynctl.base import backends
from dynctl.base.backends import CLUSTER
from dynctl.base.errors import UsageProblem
from dynctl.base.options import (
    OUTPUT,
    PLACES,
    PLANE_VARIABLES,
    READ_BY,
    SOURCES,
    WORKER_VARIABLES,
    GlobalOptions,
    OutputFormat,
)
from dynctl.cli.completion import formats, names_of, words_of
from dynctl.cli.given_options import PREFIX, merge
from dynctl.cli.shared_options import Needs, in_panel, seconds
from dynctl.cli.table import Command, Reads

PANEL = "Global options"
DYNAMO = "Global options for a live Dynamo"
KUBERNETES = "Global options for Kubernetes"


_GENERAL: Final[dict[str, Any]] = {
    "frontend": Annotated[
        list[str] | None,
        typer.Option(
            "--frontend",
            metavar="URL",
            help="Frontend or router to query (repeatable: replicas). [default: $DYNCTL_FRONTEND, "
            "the context's, then http://127.0.0.1:8000]",
        ),
    ],
    "view": Annotated[
        Path | None,
        typer.Option("--view", metavar="FILE", help="Use a view saved with --save-view, offline."),
    ],
    "recording": Annotated[
        Path | None,
        typer.Option(
            "--recording",
            metavar="FILE",
            help="Use a recording (dynctl record), at its end or at --at.",
        ),
    ],
    "at": Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="TIME",
            help="Moment of --recording: 2026-11-22T12:04:31Z, 12:04:31, +90s, -30s.",
        ),
    ],
    "demo": Annotated[bool | None, typer.Option("--demo", help="Use the embedded demo fleet.")],
    "output": Annotated[
        OutputFormat | None,
        typer.Option(
            "--output",
            "-o",
            autocompletion=formats,
            metavar="FORMAT",
            help="Output format: table, wide, json, jsonl, yaml, name; checks also junit, "
            "replay csv, test prometheus. [default: table]",
        ),
    ],
    "timeout": Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="DURATION",
            parser=seconds(),
            help="Timeout of a request. [default: 10s]",
        ),
    ],
    "token": Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TOKEN",
            help="Bearer token; prefer $DYNCTL_TOKEN, which the process list does not show.",
        ),
    ],
    "token_env": Annotated[
        str | None,
        typer.Option(
            "--token-env", metavar="NAME", help="Environment variable with the bearer token."
        ),
    ],
    "token_file": Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="File with the bearer token."),
    ],
    "ca_cert": Annotated[
        Path | None,
        typer.Option(
            "--ca-cert",
            metavar="FILE",
            help="Certificates (PEM) that sign https frontends. [default: $DYNCTL_CA_CERT, then "
            "the machine's]",
        ),
    ],
    "context": Annotated[
        str | None,
        typer.Option(
            "--context",
            autocompletion=names_of("context"),
            metavar="NAME",
            help="Saved endpoints to use (dynctl context list). [default: $DYNCTL_CONTEXT, then "
            "the current one]",
        ),
    ],
    "no_color": Annotated[
        bool | None, typer.Option("--no-color", help="Use no colors or bold text.")
    ],
    "debug": Annotated[
        bool | None, typer.Option("--debug", help="Show the traceback of an error.")
    ],
}
_LIVE: Final[dict[str, Any]] = {
    "discovery": Annotated[
        str | None,
        typer.Option(
            "--discovery",
            metavar="|".join(backends.BACKENDS),
            help="Discovery backend of a live Dynamo. [default: $DYN_DISCOVERY_BACKEND]",
        ),
    ],
    "dyn_namespace": Annotated[
        str | None,
        typer.Option(
            "--dyn-namespace",
            metavar="NAME",
            help="Dynamo namespace, PREFIX* or * for all. [default: $DYN_NAMESPACE, then dynamo]",
        ),
    ],
    "file_kv": Annotated[
        Path | None,
        typer.Option(
            "--file-kv",
            metavar="DIR",
            help="Directory of the file backend. [default: $DYN_FILE_KV]",
        ),
    ],
    "etcd_endpoints": Annotated[
        str | None,
        typer.Option(
            "--etcd-endpoints",
            metavar="HOST:PORT,..",
            help="Members of etcd. [default: $ETCD_ENDPOINTS, then localhost:2379]",
        ),
    ],
    "nats_server": Annotated[
        str | None,
        typer.Option(
            "--nats-server",
            metavar="URL,..",
            help="NATS servers for events. [default: $NATS_SERVER]",
        ),
    ],
    "wait": Annotated[
        float | None,
        typer.Option(
            "--wait",
            metavar="DURATION",
            parser=seconds(0.0),
            help="Time limit for reading the workers' caches. [default: 5s]",
        ),
    ],
}
_CLUSTER: Final[dict[str, Any]] = {
    "namespace": Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAME",
            help="Kubernetes namespace. [default: the context's]",
        ),
    ],
    "all_namespaces": Annotated[
        bool | None, typer.Option("--all-namespaces", "-A", help="All namespaces.")
    ],
    "kube_context": Annotated[
        str | None,
        typer.Option(
            "--kube-context",
            autocompletion=names_of("kube-context"),
            metavar="NAME",
            help="Context of the kubeconfig, or demo:NAME (`dynctl demo --cluster`). "
            "[default: the current one]",
        ),
    ],
    "kubeconfig": Annotated[
        Path | None,
        typer.Option(
            "--kubeconfig",
            metavar="FILE",
            help="Kubeconfig file. [default: $KUBECONFIG, ~/.kube/config, the pod's service "
            "account]",
        ),
    ],
    "reach": Annotated[
        str | None,
        typer.Option(
            "--reach",
            metavar="direct|port-forward|auto",
            help="Connection to frontends in pods. [default: auto]",
        ),
    ],
}
_ANNOTATIONS: Final = {
    **in_panel(PANEL, _GENERAL),
    **in_panel(DYNAMO, _LIVE),
    **in_panel(KUBERNETES, _CLUSTER),
}
#: What names a discovery backend, for `serve frontend`; and what specifies other workers.
_DISCOVERY = ("discovery", *backends.PLACES)
#: What is read where the discovery backend is the memory of the process.
_IN_MEMORY = OUTPUT | {"discovery", "dyn_namespace", "nats_server", "timeout"}
_OWN_WORKERS = (
    *(("--worker", "worker"), ("--workers-file", "workers_file"), ("--router", "router")),
)

#: Place -> the option with which it counts.
_COUNTS_WITH = {
    **dict.fromkeys(CLUSTER, "--discovery kubernetes"),
    **dict.fromkeys(("dyn_namespace", "nats_server"), "--discovery etcd, file or kubernetes"),
    **{b.place: f"--discovery {b.name}" for b in backends.BACKENDS.values() if b.place},
    "context": "a context that names a source: dynctl context add NAME --frontend URL",
}


def with_globals(function: Callable[..., Any], row: Command) -> Callable[..., Any]:
    """Give a command the global options as its first argument, ``options``.

    Options that have no effect on the command of ``row`` are reported.

    A command may declare one of them itself with another default or spelling; it also gets the
    value given before the command's name. A parameter of the type typer.Context receives the
    parser's context.
    """
    declared = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    own = [parameter for parameter in declared if parameter.annotation is not typer.Context]
    contexts = [parameter.name for parameter in declared if parameter not in own]
    redeclared = [parameter.name for parameter in own if parameter.name in _ANNOTATIONS]
    needs = {
        parameter.name: need
        for parameter in own
        for need in getattr(parameter.annotation, "__metadata__", ())
        if isinstance(need, Needs)
    }

    @functools.wraps(function)
    def command(**arguments: Any) -> Any:
        context: typer.Context = arguments.pop("context")
        merged = merge(context, arguments)
        values = {key: value for key, value in merged.items() if key in _ANNOTATIONS}
        if values.get("ca_cert") is not None:
            # Every request of the command trusts the same authorities.
            os.environ["DYNCTL_CA_CERT"] = str(values["ca_cert"])
        arguments |= dict.fromkeys(contexts, context)
        for name in redeclared:
            if arguments[name] is None:
                arguments[name] = values.get(name)
        options = GlobalOptions(**values, given=frozenset(values))
        if options.output not in row.formats:
            why = (
                f"the answer of {row.path} has no names"
                if options.output is OutputFormat.NAME
                else f"{row.path} has no such format"
            )
            raise UsageProblem(
                f"-o {options.output}: {why}; expected one of {', '.join(row.formats)}"
            )
        dynamo = _serves_dynamo(options, row.path, arguments)
        pool = row.path == _PICKER and arguments.get("pool") is not None
        warnings = [
            *_unread_variables(row, dynamo=dynamo),
            *_without_effect(options, row, frozenset(redeclared), dynamo=dynamo, pool=pool),
            *_unmet_needs(context, row.path, needs, arguments, dynamo),
        ]
        for warning in warnings:
            from dynctl.screens.render import talk

            talk(f"warning: {warning}")
        return function(options, **arguments)

    return _with_signature(command, own)


#: Beside the output.
_READ_WITH_CLUSTER = CLUSTER - {"reach"} | {"timeout", "context"}
#: Reads a Kubernetes cluster with --pool.
_PICKER = "serve epp"


def _unread_variables(row: Command, *, dynamo: bool) -> Iterator[str]:
    """Variables of the environment without effect on a server."""
    if row.serves and not dynamo and (row.reads is Reads.NOTHING or row.path == _PICKER):
        yield from (
            f"{name} has no effect on {row.path}: the command reads no source"
            for name in PLANE_VARIABLES
            if os.environ.get(name)
        )
    if row.routes:
        yield from (
            f"{name} has no effect on {row.path}: set it on the workers"
            for name in WORKER_VARIABLES
            if os.environ.get(name)
        )


def _without_effect(
    options: GlobalOptions,
    row: Command,
    own: frozenset[str] = frozenset(),
    *,
    dynamo: bool = False,
    pool: bool = False,
) -> Iterator[str]:
    """The options that were given and have no effect. Raises UsageProblem for those of a source,
    where `serve` would start without what they name, and for those that name a place which the
    command does not read. ``own``: options that the command declares itself; ``dynamo``: its
    workers are those of a Dynamo deployment; ``pool``: those of an InferencePool."""
    given = options.given - (OUTPUT - row.ignores) - own - row.also
    reads = row.reads
    if reads is Reads.ITSELF or not (given or options.given & PLACES):
        return
    if reads is Reads.IF_NAMED:
        from dynctl.sources.connect import names_source

        reads = Reads.FLEET if names_source(options) else Reads.NOTHING
    served = dynamo and row.serves
    if pool:
        # `serve epp` itself refuses the sources of workers beside a pool.
        yield from _report_unread(given - _READ_WITH_CLUSTER - SOURCES, f"on {row.path}")
    elif reads is Reads.CLUSTER:
        yield from _report_unread(given - _READ_WITH_CLUSTER, f"on {row.path}")
    elif reads is Reads.FRONTENDS:
        yield from _report_unread(
            given - READ_BY["--frontend"], f"on {row.path}: it reads frontends"
        )
    elif reads is Reads.OWN_FLEET:
        yield from _report_unread(given, f"on {row.path}: it runs a fleet of its own")
    elif reads is Reads.NOTHING and not served:
        if row.serves:
            _expect_no_source(given, row)
        strict = row.reads is Reads.IF_NAMED or row.unserved is not None
        yield from _report_unread(given, f"on {row.path}", strict=strict, counts=True)
    elif row.unserved is not None:
        yield from _unread_by_backend(options, row.unserved, given)
    else:
        yield from _unread_by_source(options, row, given, own)


def _unread_by_backend(
    options: GlobalOptions, unserved: frozenset[str], given: frozenset[str]
) -> Iterator[str]:
    """The options that a server does not read beside the workers in discovery."""
    backend = _served_backend(options)
    if backend is not None:
        read = READ_BY.get(backend, _IN_MEMORY) - unserved
        yield from _report_unread(given - read, f"with discovery backend {backend}", counts=True)


def _expect_no_source(given: frozenset[str], row: Command) -> None:
    refused = [_flag(name) for name in _ANNOTATIONS if name in given & SOURCES]
    if refused:
        verb = "specifies" if len(refused) == 1 else "specify"
        raise UsageProblem(
            f"{' and '.join(refused)} {verb} a source, but {row.path} has no source",
            row.instead or f"remove {' and '.join(refused)}",
        )


def _unread_by_source(
    options: GlobalOptions, row: Command, given: frozenset[str], own: frozenset[str]
) -> Iterator[str]:
    """The options that the source of a command does not read; raises as :func:`_without_effect`."""
    from dynctl.sources.connect import chosen_sources, is_dynctl_fleet
    from dynctl.sources.named import expect_recording

    expect_recording(options)
    sources = chosen_sources(options)
    if len(sources) == 2 and given & PLACES - READ_BY[sources[1].kind]:
        # Read by neither, or only by one of them: a request shows which one is the source.
        sources = [sources[0] if is_dynctl_fleet(options) else sources[1]]
    if len(sources) != 1:
        return
    (source,) = sources
    read = READ_BY[source.kind] - row.ignores
    unread = given - read
    if not source.named:
        # Beside the default address no place has an effect, whatever else the command reads.
        unread |= options.given & PLACES - own
    elif "context" in given and not _context_counts(options, read | row.also):
        unread |= {"context"}
    place = f"with {source.described}"
    if row.serves and source.kind == "--frontend":
        place = f"on {row.path} without a discovery backend"
    yield from _report_unread(unread, place, counts=True)


def _context_counts(options: GlobalOptions, read: frozenset[str]) -> bool:
    """Whether one of the places that are read comes from the context of ``--context``."""
    from dynctl.settings.contexts.keys import KEYS
    from dynctl.settings.contexts.precedence import apply_context

    origins = apply_context(options).origins
    places = [key for key in KEYS.values() if key.field in read & PLACES]
    return any(origins[key.name].startswith("context ") for key in places)


def _report_unread(
    unread: frozenset[str], place: str, *, strict: bool = True, counts: bool = False
) -> Iterator[str]:
    """A warning for each option without effect. ``strict``: raises UsageProblem for places;
    ``counts``: its hint has the option with which a place has an effect."""
    places = [name for name in _ANNOTATIONS if name in unread & PLACES]
    if strict and places:
        flags = " and ".join(map(_flag, places))
        verb, have = ("names a place", "has") if len(places) == 1 else ("name places", "have")
        ways = dict.fromkeys(
            f"{_flag(name)} counts with {_COUNTS_WITH[name]}"
            for name in places
            if counts and name in _COUNTS_WITH
        )
        remove = f"remove {'it' if len(places) == 1 else 'them'}"
        raise UsageProblem(
            f"{flags} {verb}, and {have} no effect {place}",
            "\n".join((*ways, f"or {remove}" if ways else remove)),
        )
    for name in _ANNOTATIONS:
        if name in unread:
            yield f"{_flag(name)} has no effect {place}"


def _unmet_needs(
    context: typer.Context,
    path: str,
    needs: Mapping[str, Needs],
    arguments: Mapping[str, Any],
    dynamo: bool,
) -> Iterator[str]:
    """The options of the command that were given, by flag or variable, and have no effect.

    ``dynamo``: its workers are those of a Dynamo deployment.
    """
    parameters: dict[str, Any] = {
        str(parameter.name): parameter for parameter in context.command.params
    }
    for name, need in needs.items():
        source = context.get_parameter_source(name)
        if source is None or source.name not in ("COMMANDLINE", "ENVIRONMENT"):
            continue
        why = _unmet(path, need, arguments, parameters, dynamo)
        if why:
            variables = parameters[name].envvar or ()
            variables = [variables] if isinstance(variables, str) else variables
            given = [variable for variable in variables if os.environ.get(variable)]
            from_variable = source.name == "ENVIRONMENT" and given
            typed = given[0] if from_variable else parameters[name].opts[0]
            yield f"{typed} has no effect {why}"


def _unmet(
    path: str,
    need: Needs,
    arguments: Mapping[str, Any],
    parameters: Mapping[str, Any],
    dynamo: bool,
) -> str:
    """Why an option has no effect; empty where it has one."""
    if path in need.not_on:
        return f"on {path}: {need.not_on[path]}"
    for other in need.without:
        if need.is_set(arguments.get(other)):
            return f"with {parameters[other].opts[0]}: set it on dynctl serve router"
    if need.dynamo is False and dynamo:
        return "with the workers of a Dynamo deployment"
    if need.dynamo and not dynamo:
        return f"without {'--endpoint' if path == 'serve router' else '--discovery'}"
    if not need.parameters or any(need.is_set(arguments.get(name)) for name in need.parameters):
        return ""
    flags = [parameters[name].opts[0] for name in need.parameters if name in parameters]
    values = [f" above {need.unset}" if need.unset in (0, 1) else ""] * len(flags)
    return "without " + " or ".join(map("".join, zip(flags, values, strict=True)))


def _served_backend(options: GlobalOptions) -> str | None:
    from dynctl.adapters.dynamo.planes import backend

    named = backend(replace(options, context_applied=True), serving=True)
    return None if named is None else named[0]


def _serves_dynamo(options: GlobalOptions, path: str, arguments: dict[str, Any]) -> bool:
    """Whether the workers of `serve frontend`, `router` or `epp` are those of a Dynamo deployment.

    Raises UsageProblem where a frontend has both these and other workers.
    """
    if path == "serve router":
        return arguments.get("endpoint") is not None
    if path == "serve epp":
        engines = any(arguments.get(name) for name in ("worker", "workers_file", "pool"))
        return not engines and _served_backend(options) is not None
    if path == "config show":  # of a frontend in this environment
        return any(os.environ.get(name) for name in backends.VARIABLES)
    if path != "serve frontend":
        return False
    own = [flag for flag, name in _OWN_WORKERS if arguments.get(name)]
    named = [_flag(name) for name in _DISCOVERY if name in options.given]
    if named and own:
        raise UsageProblem(
            f"{named[0]} and {own[0]}: set only one of them",
            "the workers of a frontend are those in Dynamo's discovery, or those specified",
        )
    return bool(named or any(os.environ.get(name) for name in backends.VARIABLES)) and not own


def _flag(name: str) -> str:
    """The option as on the command line: ``--namespace (-n)``."""
    option = _ANNOTATIONS[name].__metadata__[0]
    # Without a default, the first of the spellings stands in its place.
    short = ", ".join(option.param_decls)
    return f"{option.default} ({short})" if short else str(option.default)


def group_callback(help: str, *, version: bool = False) -> Callable[..., Any]:
    """The callback of a group of commands; it takes the global options, and --version."""

    def callback(**arguments: Any) -> None:
        arguments.pop("version", None)
        merge(arguments.pop("context"), arguments)

    callback.__doc__ = help
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter("version", keyword, default=False, annotation=_VERSION)]
    return _with_signature(callback, own if version else [])


def _print_version(wanted: bool) -> None:
    if wanted:
        from dynctl import version

        typer.echo(f"dynctl {version()}")
        raise typer.Exit


_VERSION = Annotated[
    bool,
    typer.Option(
        "--version",
        "-V",
        help="Print the version and exit.",
        is_eager=True,
        callback=_print_version,
    ),
]


def _with_words(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter; its value is completed with the words that its metavar lists."""
    for part in getattr(parameter.annotation, "__metadata__", ()):
        words = words_of(getattr(part, "metavar", None))
        if words is not None and part.autocompletion is None:
            part.autocompletion = words
    return parameter


def _with_signature(
    function: Callable[..., Any], own: list[inspect.Parameter]
) -> Callable[..., Any]:
    """Give the function a signature with the global options, for Typer."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("context", keyword, annotation=typer.Context)]
    parameters += [_with_words(parameter.replace(kind=keyword)) for parameter in own]
    parameters += [
        _with_words(inspect.Parameter(PREFIX + name, keyword, default=None, annotation=annotation))
        for name, annotation in _ANNOTATIONS.items()
        if name not in {parameter.name for parameter in own}
    ]
    signature = inspect.Signature(parameters)
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function
