"""The options that all serving processes have, and the FrontendConfig that they make."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynctl.base.errors import UsageProblem
from dynctl.cli.access_options import (
    AccessOptions,
    access_settings,
    health_of,
    index_peers,
    limits_of,
    replicas_of,
)
from dynctl.cli.option_groups import fields_of
from dynctl.cli.router_flags import split_preset
from dynctl.cli.shared_options import Needs, memory_of, one_choice, seconds, size_of
from dynctl.settings.router_settings import Resolved, needs_dynamo, resolve

if TYPE_CHECKING:
    from dynctl.serving.routing.config import FrontendConfig

LISTEN = "Listening"
WORKERS = "Workers and models"
LOGS = "Logs and decisions"

WORKER_HELP = (
    "An engine (repeatable): URL, then any of name=, role=, DOMAIN=VALUE, kv-events=, replay=, "
    "block-size=, dp=, total-blocks=, device=, can-prefill=, api-key-env=, "
    "forward-authorization=, separated by commas."
)

Host = Annotated[
    str,
    typer.Option(
        "--http-host",
        "--host",
        metavar="HOST",
        envvar="DYN_HTTP_HOST",
        help="Listen address; 0.0.0.0 accepts connections from other hosts.",
        rich_help_panel=LISTEN,
    ),
]
Port = Annotated[
    int,
    typer.Option(
        "--http-port",
        "--port",
        metavar="PORT",
        envvar="DYN_HTTP_PORT",
        min=0,
        max=65535,
        help="Listen port; 0: a free one.",
        rich_help_panel=LISTEN,
    ),
]
ApiToken = Annotated[
    str | None,
    typer.Option(
        "--admin-token",
        "--api-token",
        metavar="TOKEN",
        envvar=["DYNCTL_ADMIN_TOKEN", "DYNCTL_API_TOKEN"],
        help="Bearer token of operators: changes and routing details. Prefer the variable or "
        "--admin-token-file, which the process list does not show.",
        rich_help_panel=LISTEN,
    ),
]
Announce = Annotated[
    bool,
    typer.Option(
        "--announce",
        help="Print the address as one JSON line when ready.",
        rich_help_panel=LISTEN,
    ),
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        "--drain-timeout",
        metavar="DURATION",
        parser=seconds(0.0),
        help="Time for running requests to finish after SIGTERM.",
        rich_help_panel=LISTEN,
    ),
]
ShutdownDelay = Annotated[
    float,
    typer.Option(
        "--shutdown-delay",
        metavar="DURATION",
        parser=seconds(0.0),
        help="Time after SIGTERM in which the process is not ready and still answers new requests.",
        rich_help_panel=LISTEN,
    ),
]
LogFormat = Annotated[
    str,
    typer.Option(
        "--log-format",
        metavar="text|json",
        envvar="DYNCTL_LOG_FORMAT",
        help="Format of log lines.",
        rich_help_panel=LOGS,
    ),
]
LogLevel = Annotated[
    str,
    typer.Option(
        "--log-level",
        metavar="debug|info|warning|error",
        envvar="DYN_LOG",
        help="Lowest severity to log.",
        rich_help_panel=LOGS,
    ),
]
IndexMemory = Annotated[
    str,
    typer.Option(
        "--index-memory",
        metavar="SIZE",
        help="Memory for the index of cached blocks; above it the largest rank is read again.",
        rich_help_panel=LOGS,
    ),
    Needs(without=("router",)),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """What the options of a serving process are set to; sizes as typed."""

    worker: Annotated[
        list[str] | None, typer.Option(metavar="SPEC", help=WORKER_HELP, rich_help_panel=WORKERS)
    ] = None
    workers_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The workers as YAML; reloaded when it changes.",
            rich_help_panel=WORKERS,
        ),
    ] = None
    model_path: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of tokenizer and chat template. Without it: the files of a Dynamo "
            "worker's card, or POST /tokenize of the engines.",
            rich_help_panel=WORKERS,
        ),
    ] = None
    trust_template: Annotated[
        bool,
        typer.Option(
            "--trust-template",
            help="Do not bound the work of the chat template in --model-path: its time and memory.",
            rich_help_panel=WORKERS,
        ),
    ] = False
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="auto|fast|exact",
            help="auto: the fastest encoder that gives the same token ids; fast: fastokens; exact: "
            "tokenizers.",
            rich_help_panel=WORKERS,
        ),
    ] = "auto"
    model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Model of workers that do not report it.", rich_help_panel=WORKERS
        ),
        Needs(dynamo=False, without=("router",)),
    ] = None
    block_size: Annotated[
        int | None,
        typer.Option(
            "--kv-cache-block-size",
            metavar="TOKENS",
            envvar="DYN_KV_CACHE_BLOCK_SIZE",
            min=1,
            max=4096,
            help="Block size of workers that do not report it; where one reports another size, a "
            "condition names it. [default: 16]",
            rich_help_panel=WORKERS,
        ),
        Needs(dynamo=False, without=("router",)),
    ] = None
    api_token: ApiToken = None
    log_decisions: Annotated[
        str,
        typer.Option(
            metavar="off|winner|all",
            envvar="DYNCTL_LOG_DECISIONS",
            help="Log the winner of each hop, or all candidates with their costs.",
            rich_help_panel=LOGS,
        ),
    ] = "off"
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    decision_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Memory for past decisions (dynctl why ID).", rich_help_panel=LOGS
        ),
    ] = "64MiB"
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Record requests (hashes only), decisions, events and loads in a file (dynctl top "
            "--recording FILE --at TIME).",
            rich_help_panel=LOGS,
        ),
    ] = None
    record_max_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Size at which the recording becomes FILE.old and a new one begins.",
            rich_help_panel=LOGS,
        ),
        Needs(("record",)),
    ] = "1GiB"
    index_memory: IndexMemory = "4GiB"
    drain_timeout: DrainTimeout = 30.0
    shutdown_delay: ShutdownDelay = 0.0
    start_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION",
            parser=seconds(0.0),
            help="End with exit code 3 where discovery is not reachable for this time. "
            "[default: wait for it]",
            rich_help_panel=LISTEN,
        ),
        Needs(dynamo=True),
    ] = None
    model_return_time: Annotated[
        float,
        typer.Option(
            metavar="DURATION",
            parser=seconds(0.0),
            help="Answer 503 with retry-after, not 404, for a model whose last worker left within "
            "this time.",
            rich_help_panel=WORKERS,
        ),
    ] = 60.0
    system_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            envvar="DYN_SYSTEM_PORT",
            min=-1,
            max=65535,
            help="Separate port for health and metrics; -1: none.",
            rich_help_panel=LISTEN,
        ),
    ] = None
    announce: Announce = False

    def expect_valid(self) -> None:
        """Raise UsageProblem for values that are not valid."""
        one_choice("--log-decisions", self.log_decisions, ("off", "winner", "all"))
        one_choice("--log-format", self.log_format, ("text", "json"))
        if self.trust_template and self.model_path is None:
            raise UsageProblem(
                "--trust-template: expected --model-path DIR with it; chat templates that come "
                "from workers are never trusted"
            )
        one_choice("--tokenizer", self.tokenizer, ("auto", "fast", "exact"))


#: The options of a process that serves requests.
SERVING = fields_of(ServingOptions)

#: Those of a process that takes no requests.
OBSERVING = fields_of(
    ServingOptions,
    without=(
        *("worker", "workers_file", "trust_template", "tokenizer", "model_name", "block_size"),
        *("log_decisions", "drain_timeout", "shutdown_delay", "model_return_time"),
    ),
)

#: Options that steer routing beside the router's settings; `config show` lists them too.
STEERING = (
    fields_of(ServingOptions, only=("model_name", "block_size", "index_memory")),
    fields_of(
        AccessOptions,
        only=(
            *("first_byte_timeout", "idle_timeout", "eject_after", "eject_pause"),
            *("eject_max_pause", "panic_threshold", "router_replica_bind", "router_replica_peer"),
            *("router_replica_nats", "router_replica_group", "index_peer"),
        ),
    ),
)

#: Options that are fields of FrontendConfig as they are.
_FIELDS = (
    *("workers_file", "model_path", "trust_template", "tokenizer", "model_name", "block_size"),
    *("log_decisions", "log_format", "record", "announce"),
)


def _resolve_settings(router_flags: Mapping[str, str | bool]) -> Resolved:
    """The router's settings; warnings about them go to stderr."""
    from dynctl.screens.render import talk

    flags, preset = split_preset(router_flags)
    resolved = resolve(flags, os.environ, preset_name=preset)
    if resolved.changed_by_preset is not None:
        talk(resolved.changed_by_preset)
    for warning in resolved.warnings:
        talk(f"warning: {warning}")
    return resolved


def frontend_config(
    router_flags: Mapping[str, str | bool],
    access: AccessOptions,
    serving: ServingOptions,
    *,
    host: str,
    port: int,
    **more: Any,
) -> "FrontendConfig":
    """The FrontendConfig of the options; warnings about settings go to stderr.

    ``more``: its other fields. Raises UsageProblem.
    """
    from dynctl.screens.render import talk
    from dynctl.serving.routing.config import FrontendConfig, Limits

    serving.expect_valid()
    resolved = _resolve_settings(router_flags)
    shared, dynamo = more.get("router_url") is not None, more.get("dynamo")
    if shared:
        _refuse_own_workers(serving)
    elif not dynamo:
        for warning in needs_dynamo(resolved):
            talk(f"warning: {warning}")
    decisions = size_of("--decision-memory", serving.decision_memory)
    recording = memory_of("--record-max-bytes", serving.record_max_bytes)
    index = memory_of("--index-memory", serving.index_memory)
    peers = index_peers(access.index_peer)
    if shared:
        for spelled in _decided_elsewhere(resolved.sources):
            talk(f"warning: {spelled} has no effect with --router: set it on dynctl serve router")
    synced = resolved.config.router_replica_sync
    if dynamo and dynamo.event_plane and not synced:
        talk("warning: --event-plane has no effect without --router-replica-sync")
    operators = access_settings(access, serving.api_token)
    replicas = replicas_of(access, synced)
    if shared:
        replicas = None  # the router shares the load of all its frontends
    elif dynamo and replicas is not None:
        raise UsageProblem(
            "--router-replica-bind, --router-replica-peer and --router-replica-nats do not "
            "work with the workers of a Dynamo deployment",
            "--router-replica-sync alone shares load with its routers, over its event plane",
        )
    elif not dynamo and synced and replicas is None:
        nats = os.environ.get("NATS_SERVER")
        talk(
            "warning: no replica to share load with: set --router-replica-bind and "
            "--router-replica-peer, or --router-replica-nats"
            + (" (NATS_SERVER is for the workers of a Dynamo deployment)" if nats else "")
        )
    return FrontendConfig(
        **more,
        **operators,
        **{name: getattr(serving, name) for name in _FIELDS},
        host=host,
        port=port,
        workers=tuple(serving.worker or ()),
        log_level=serving.log_level.strip().lower(),
        router=resolved.config,
        preset=resolved.preset,
        origins=resolved.sources,
        admin_api=not _truth(os.environ.get("DYN_DISABLE_FRONTEND_ADMIN_API", "")),
        decision_memory_bytes=decisions,
        record_bytes=recording,
        index_memory_bytes=index,
        index_peers=peers,
        limits=Limits(
            drain_s=serving.drain_timeout,
            shutdown_delay_s=serving.shutdown_delay,
            model_return_s=serving.model_return_time,
            **limits_of(access),
        ),
        health=health_of(access),
        replicas=replicas,
        start_s=serving.start_timeout,
        system_port=None if serving.system_port == -1 else serving.system_port,
    )


def _refuse_own_workers(serving: ServingOptions) -> None:
    """Raise UsageProblem for options of workers where another process has them."""
    for flag, given in (("--worker", serving.worker), ("--workers-file", serving.workers_file)):
        if given:
            raise UsageProblem(
                f"{flag} and --router: set only one of them",
                "the workers are those of the router: give them to dynctl serve router",
            )


def _decided_elsewhere(sources: Mapping[str, str]) -> Iterator[str]:
    """The router settings that are set and have no effect because another process decides."""
    for name, source in sources.items():
        kind, _, spelled = source.partition(" ")
        if kind in ("flag", "env") and name != "overload_status_code":
            yield spelled


def _truth(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")
