"""Every command in one table: what it is, what it reads, its formats. A new command is a row here.

Help pages, the first screen, completion, warnings about options without effect and the formats of
``-o`` follow from it.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Final

from dynctl.base.backends import CLUSTER
from dynctl.base.options import (
    FORMATS,
    MANIFEST_FORMATS,
    STREAM_FORMATS,
    OutputFormat,
)


class Reads(StrEnum):
    """Where a command reads a fleet; options that name another source have no effect on it."""

    FLEET = "fleet"  # the source that the options name, else the default address
    IF_NAMED = "fleet if named"
    FRONTENDS = "frontends"  # and no discovery backend
    CLUSTER = "cluster"  # Kubernetes alone
    OWN_FLEET = "own fleet"  # one that it starts on this host
    NOTHING = "nothing"
    ITSELF = "itself"  # the command refuses by itself what it does not read


@dataclass(frozen=True, slots=True)
class Command:
    """A row: the words of the command, ``module:function`` in ``cli.commands``, what it does.

    ``formats``: of ``-o``. ``also``: options that it reads with any source, or without one.
    ``ignores``: options that it never reads. ``unserved``: options that a server does not read
    beside the workers in Dynamo's discovery; None: it serves no such workers. ``instead``: what to
    do in place of a source, on a server that has none. ``routes``: a router, on which variables of
    workers have no effect. ``first``: options of its first help page; empty: all of them. ``menu``:
    shelf and text on the first screen, of a command without a group.
    """

    path: str
    place: str
    summary: str
    _: KW_ONLY
    reads: Reads = Reads.FLEET
    formats: tuple[OutputFormat, ...] = FORMATS
    also: frozenset[str] = frozenset()
    ignores: frozenset[str] = frozenset()
    unserved: frozenset[str] | None = None
    instead: str = ""
    routes: bool = False
    first: tuple[str, ...] = ()
    menu: tuple[str, str] = ("", "")

    @property
    def serves(self) -> bool:
        """A server of requests or of Dynamo's planes."""
        return self.path.startswith("serve ")


@dataclass(frozen=True, slots=True)
class Group:
    """A word before several commands: its help, and shelf and text on the first screen."""

    help: str
    menu: tuple[str, str]


_CHECKS: Final = (*FORMATS, OutputFormat.JUNIT)
#: Of answers without names.
_UNNAMED: Final = tuple(form for form in FORMATS if form is not OutputFormat.NAME)
#: What servers of the workers in discovery do not read of the options for a live Dynamo.
_NOT_SERVED: Final = frozenset(
    {"output", "frontend", "token", "token_env", "token_file", "context", "wait", "reach"}
)

#: In the order of the help page. Only the command that runs is imported.
_ROWS: Final = (
    Command(
        "demo",
        "demo:demo",
        "Start a two-zone fleet and explain four requests.",
        reads=Reads.OWN_FLEET,
        formats=_UNNAMED,
        menu=("Run", "a fleet on this host"),
    ),
    Command(
        "serve frontend",
        "serve:frontend",
        "Run the OpenAI frontend with the router inside.",
        reads=Reads.NOTHING,
        unserved=_NOT_SERVED,
        routes=True,
        ignores=frozenset({"output"}),
        instead="specify engines with --worker; `dynctl demo` runs a whole fleet",
        first=(
            "--worker",
            "--model-path",
            "--http-host",
            "--http-port",
            "--router-mode",
            "--processes",
            "--admin-token-file",
            "--router-kv-transfer-topology-level",
        ),
    ),
    Command(
        "serve router",
        "serve:router",
        "Run the router alone, for other frontends.",
        reads=Reads.NOTHING,
        unserved=_NOT_SERVED | {"dyn_namespace"},
        routes=True,
        ignores=frozenset({"output"}),
        instead="specify engines with --worker, or the workers of a Dynamo with --endpoint "
        "NAMESPACE.COMPONENT.ENDPOINT",
        first=(
            "--worker",
            "--endpoint",
            "--model-path",
            "--http-host",
            "--http-port",
            "--router-mode",
            "--admin-token-file",
        ),
    ),
    Command(
        "serve indexer",
        "serve_indexer:indexer",
        "Run the index of cached blocks alone, over HTTP.",
        reads=Reads.NOTHING,
        first=(
            "--workers",
            "--replays",
            "--block-size",
            "--model-name",
            "--http-host",
            "--port",
            "--admin-token-file",
            "--snapshot",
            "--peers",
        ),
    ),
    Command(
        "serve observe",
        "serve:observe",
        "Run a shadow router beside a live Dynamo.",
        routes=True,
        ignores=frozenset({"output", "wait"}),
        first=(
            "--model-path",
            "--http-host",
            "--http-port",
            "--frontend-log",
            "--record",
            "--admin-token-file",
        ),
    ),
    Command(
        "serve attach",
        "serve_attach:attach",
        "Register an engine as a worker of a Dynamo fleet.",
        ignores=frozenset({"output", "wait"}),
        first=(
            "--engine",
            "--engine-type",
            "--endpoint",
            "--model-path",
            "--host",
            "--request-port",
            "--system-port",
        ),
    ),
    Command(
        "serve epp",
        "serve_epp:epp",
        "Run the router as a gateway's endpoint picker.",
        routes=True,
        first=(
            "--pool",
            "--worker",
            "--model-path",
            "--port",
            "--tls-cert",
            "--tls-key",
            "--router-mode",
            "--http-port",
            "--admin-token-file",
        ),
    ),
    Command(
        "serve engine",
        "serve_engine:engine",
        "Run a simulated OpenAI engine.",
        reads=Reads.NOTHING,
        ignores=frozenset({"output"}),
        first=(
            "--name",
            "--model",
            "--model-path",
            "--role",
            "--host",
            "--port",
            "--kv-events",
            "--replay",
            "--total-blocks",
            "--max-num-seqs",
            "--speedup-ratio",
            "--lora",
        ),
    ),
    Command(
        "route",
        "route:route",
        "Show which workers would serve a prompt, and why.",
        menu=("Ask", "where would a prompt go?"),
    ),
    Command(
        "workers list", "workers:list_workers", "List the workers: role, topology, load, caches."
    ),
    Command("workers show", "workers:show_worker", "Show one worker: card, policy, taints, load."),
    Command("workers cordon", "workers:cordon_worker", "Give a worker no new requests."),
    Command(
        "workers uncordon", "workers:uncordon_worker", "Give a cordoned worker requests again."
    ),
    Command(
        "workers drain", "workers:drain_worker", "Cordon a worker; wait until its requests ended."
    ),
    Command("workers add", "workers:add_worker", "Register a worker at a running router."),
    Command("workers remove", "workers:remove_worker", "Take a worker out of a running router."),
    Command(
        "topology show", "topology:show_topology", "Show domains: capacity, load, policy, stranded."
    ),
    Command(
        "topology verify",
        "topology_verify:verify_topology",
        "Verify topology from node to router.",
        reads=Reads.ITSELF,
        formats=_CHECKS,
    ),
    Command(
        "topology plan",
        "topology_plan:plan_topology",
        "Plan domains: ratio, losses, what to add.",
        reads=Reads.ITSELF,
    ),
    Command(
        "topology lint",
        "topology_lint:lint_topology",
        "Check graph manifests, offline.",
        reads=Reads.ITSELF,
        formats=_CHECKS,
    ),
    Command(
        "topology render",
        "topology_render:render_topology",
        "Print topology patches for pods.",
        reads=Reads.NOTHING,
        formats=MANIFEST_FORMATS,
    ),
    Command(
        "topology sync",
        "topology_sync:sync_topology",
        "Copy topology labels from nodes to pods.",
        reads=Reads.CLUSTER,
    ),
    Command(
        "topology wait",
        "topology_wait:wait_for_topology",
        "Wait for a domain's topology file.",
        reads=Reads.NOTHING,
    ),
    Command(
        "replay",
        "replay:replay",
        "Simulate routing policies on a trace or a recording.",
        reads=Reads.IF_NAMED,
        formats=(*FORMATS, OutputFormat.CSV),
        menu=("Run", "policies on a trace"),
        first=(
            "--generate",
            "--policy",
            "--workers",
            "--domain",
            "--enforcement",
            "--speed",
            "--max-regress",
            "--search",
        ),
    ),
    Command(
        "top",
        "top:top",
        "Watch domains, workers, decisions and alerts.",
        also=CLUSTER,
        ignores=frozenset({"wait"}),
        formats=_UNNAMED,
        menu=("Look", "live dashboard"),
    ),
    Command(
        "decisions list", "decisions:list_decisions", "List past decisions: where, cached, why."
    ),
    Command(
        "decisions tail",
        "decisions:tail_decisions",
        "Show decisions as they are made.",
        formats=STREAM_FORMATS,
    ),
    Command(
        "decisions compare",
        "decisions:compare_decisions",
        "Compare the choices of a live Dynamo with predictions.",
    ),
    Command(
        "events tail",
        "events:tail_events",
        "Show KV events live, with gaps marked.",
        formats=STREAM_FORMATS,
        ignores=frozenset({"wait"}),
    ),
    Command("thresholds get", "thresholds:get_thresholds", "Show the current busy thresholds."),
    Command(
        "thresholds set", "thresholds:set_thresholds", "Set busy thresholds; --dry-run tries them."
    ),
    Command(
        "thresholds watch",
        "thresholds:watch_thresholds",
        "Show changes of thresholds and ranks.",
        formats=STREAM_FORMATS,
    ),
    Command(
        "config show",
        "config:show_config",
        "Show every router setting and its source.",
        reads=Reads.IF_NAMED,
        first=("--advise", "--preset", "--router-mode"),
    ),
    Command(
        "context list",
        "context:list_contexts",
        "List the contexts; * marks the current one.",
        reads=Reads.NOTHING,
    ),
    Command(
        "context use",
        "context:use_context",
        "Make a context current.",
        reads=Reads.NOTHING,
        also=frozenset({"kubeconfig"}),
    ),
    Command(
        "context add",
        "context:add_context",
        "Save the options of this command as a context.",
        reads=Reads.ITSELF,
    ),
    Command(
        "context show",
        "context:show_context",
        "Show the options in effect and their sources.",
        reads=Reads.ITSELF,
    ),
    Command("context remove", "context:remove_context", "Remove a context.", reads=Reads.NOTHING),
    Command(
        "check",
        "check:check",
        "Check a live deployment: what is wrong, how to fix it.",
        formats=_CHECKS,
        menu=("Look", "is the fleet healthy?"),
    ),
    Command(
        "test",
        "test:prove",
        "Test a server by requests: names, tokens, reuse.",
        reads=Reads.FLEET,
        formats=(*_CHECKS, OutputFormat.PROMETHEUS),
        menu=("Look", "does it do it right?"),
    ),
    Command(
        "explain",
        "explain:explain",
        "Explain the code of a finding.",
        reads=Reads.NOTHING,
        menu=("Ask", "what a code means"),
    ),
    Command(
        "why",
        "why:why",
        "Explain a past decision of a frontend.",
        menu=("Ask", "explain past decisions"),
    ),
    Command(
        "hits",
        "hits:hits",
        "Show why the prefix hit rate is what it is, and what to change.",
        first=(
            "--for",
            "--by",
            "--from",
            "--to",
            "--record",
            "--generate",
            "--predicted",
            "--min-rate",
        ),
        menu=("Ask", "why this hit rate?"),
    ),
    Command(
        "hot",
        "hot:hot",
        "Show the prefixes that requests share most, and their copies.",
        menu=("Ask", "which prefixes are hot?"),
    ),
    Command(
        "record",
        "record:record",
        "Record what a router sees and does, in a file.",
        menu=("Run", "traffic, to a file"),
    ),
    Command(
        "bundle",
        "bundle:bundle",
        "Write a bundle file for a bug report.",
        reads=Reads.ITSELF,
        menu=("Other", "file for a bug report"),
    ),
    Command(
        "completion",
        "completion:completion",
        "Print the shell completion script.",
        reads=Reads.NOTHING,
        formats=_UNNAMED,
        menu=("Other", "shell completion script"),
    ),
    Command(
        "version",
        "version:version",
        "Print the versions of dynctl and of the frontends.",
        reads=Reads.FRONTENDS,
        menu=("Other", "client and frontends"),
    ),
    Command(
        "help",
        "help:help_page",
        "Show the help page of a command.",
        reads=Reads.NOTHING,
        menu=("Other", "help page of a command"),
    ),
)
COMMANDS: Final[Mapping[str, Command]] = {row.path: row for row in _ROWS}

GROUPS: Final[Mapping[str, Group]] = {
    "serve": Group(
        "Run a frontend, a router, an indexer, a shadow router, an engine or its sidecar. "
        "`dynctl serve --worker URL` is `dynctl serve frontend --worker URL`.",
        ("Run", "frontend, router, .."),
    ),
    "workers": Group(
        "Workers of a router: list, one worker, cordon, drain, add, remove.",
        ("Look", "list, cordon, drain"),
    ),
    "topology": Group(
        "Topology domains: capacity, policy, verify, plan, lint, sync.",
        ("Look", "domains, verify, plan"),
    ),
    "decisions": Group(
        "Past decisions of a router: list, tail, compare. `dynctl decisions --refused` is "
        "`dynctl decisions list --refused`.",
        ("Look", "what was routed where"),
    ),
    "events": Group("KV events of the workers, live.", ("Look", "KV events, live")),
    "thresholds": Group(
        "Busy thresholds, live on the frontends.", ("Change", "busy thresholds, live")
    ),
    "config": Group("Router settings and their sources.", ("Other", "settings, sources")),
    "context": Group("Saved endpoints.", ("Change", "saved endpoints")),
}

#: Older commands, and where they are now.
MOVED: Final[Mapping[str, str]] = {
    "audit": "of engines: dynctl hits --predicted\nof a live Dynamo: dynctl decisions compare",
    "options": "use: dynctl --help=global",
}


def names_of_commands() -> tuple[str, ...]:
    """The first words of all commands, in the order of the table."""
    return tuple(dict.fromkeys(row.path.partition(" ")[0] for row in _ROWS))


def formats_of(path: str) -> tuple[OutputFormat, ...]:
    """The output formats of a command; of other words, the usual ones."""
    return COMMANDS[path].formats if path in COMMANDS else FORMATS
