"""`dynctl serve frontend`, `serve router` and `serve observe`."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.cli.access_options import (
    access_settings,
    health_of,
    index_peers_of,
    limits_of,
    replicas_of,
    secret,
    with_access_options,
    with_operator_options,
)
from dynctl.cli.router_flags import split_preset, with_router_flags

_LISTEN = "Listening"
_WORKERS = "Workers and models"
_LOGS = "Logs and decisions"
_SHARED = "A router in another process"
_DYNAMO_HINT = (
    "--discovery file --file-kv DIR, --discovery etcd --etcd-endpoints HOST:2379, or "
    "--discovery kubernetes"
)
_DYNAMO = "Workers of a Dynamo deployment"
_SERVICES = "As Dynamo's services"
#: Bytes below which no useful index fits.
LEAST_INDEX = 1 << 20

_UNITS = {"": 1, "B": 1, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3}

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
        rich_help_panel=_LISTEN,
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
        rich_help_panel=_LISTEN,
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
        rich_help_panel=_LISTEN,
    ),
]
SystemPort = Annotated[
    int | None,
    typer.Option(
        "--system-port",
        metavar="PORT",
        envvar="DYN_SYSTEM_PORT",
        min=-1,
        max=65535,
        help="Separate port for health and metrics; -1: none.",
        rich_help_panel=_LISTEN,
    ),
]
Announce = Annotated[
    bool,
    typer.Option(
        "--announce",
        help="Print the address as one JSON line when ready.",
        rich_help_panel=_LISTEN,
    ),
]
Drain = Annotated[
    float,
    typer.Option(
        "--drain-timeout",
        metavar="SECONDS",
        min=0,
        max=86400,
        help="Time for running requests to finish after SIGTERM.",
        rich_help_panel=_LISTEN,
    ),
]
Workers = Annotated[
    list[str] | None,
    typer.Option("--worker", metavar="SPEC", help=WORKER_HELP, rich_help_panel=_WORKERS),
]
WorkersFile = Annotated[
    Path | None,
    typer.Option(
        "--workers-file",
        metavar="FILE",
        help="The workers as YAML; reloaded when it changes.",
        rich_help_panel=_WORKERS,
    ),
]
ModelPath = Annotated[
    Path | None,
    typer.Option(
        "--model-path",
        metavar="DIR",
        help="Directory of tokenizer and chat template. Without it: the files of a Dynamo worker's "
        "card, or POST /tokenize of the engines.",
        rich_help_panel=_WORKERS,
    ),
]
TrustTemplate = Annotated[
    bool,
    typer.Option(
        "--trust-template",
        help="Do not bound the work of the chat template in --model-path: its time and memory.",
        rich_help_panel=_WORKERS,
    ),
]
TokenizerChoice = Annotated[
    str,
    typer.Option(
        "--tokenizer",
        metavar="auto|fast|exact",
        help="auto: the fastest encoder that gives the same token ids; fast: fastokens; exact: "
        "tokenizers.",
        rich_help_panel=_WORKERS,
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model-name",
        metavar="NAME",
        help="Model of workers that do not report it.",
        rich_help_panel=_WORKERS,
    ),
]
BlockSize = Annotated[
    int,
    typer.Option(
        "--kv-cache-block-size",
        metavar="TOKENS",
        envvar="DYN_KV_CACHE_BLOCK_SIZE",
        min=1,
        max=4096,
        help="Block size of workers that do not report it.",
        rich_help_panel=_WORKERS,
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="NAMESPACE.COMPONENT.ENDPOINT",
        help="Be a component of Dynamo: route among the workers of this endpoint, and register "
        "the endpoints of a router (NAMESPACE.router.generate, ..) in discovery.",
        rich_help_panel=_DYNAMO,
    ),
]
RpcHost = Annotated[
    str,
    typer.Option(
        "--rpc-host",
        metavar="HOST",
        envvar="DYN_TCP_RPC_HOST",
        help="With --endpoint: address for requests of Dynamo's processes, which is registered. "
        "Their requests need no key or token.",
        rich_help_panel=_DYNAMO,
    ),
]
RouterUrl = Annotated[
    str | None,
    typer.Option(
        "--router",
        metavar="URL",
        envvar="DYNCTL_ROUTER",
        help="A dynctl serve router that knows the workers and decides, for any number of "
        "frontends; without an answer from it requests are routed by load alone.",
        rich_help_panel=_SHARED,
    ),
]
RouterToken = Annotated[
    str | None,
    typer.Option(
        "--router-token",
        metavar="TOKEN",
        envvar="DYNCTL_ROUTER_TOKEN",
        help="The --admin-token of that router. Prefer the variable or --router-token-file.",
        rich_help_panel=_SHARED,
    ),
]
RouterTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--router-token-file",
        metavar="FILE",
        help="File with the --admin-token of that router.",
        rich_help_panel=_SHARED,
    ),
]
SharePort = Annotated[
    bool,
    typer.Option(
        "--share-port",
        help="Let other frontends with --router on this host listen on the same port; the kernel "
        "spreads connections over them.",
        rich_help_panel=_SHARED,
    ),
]
Processes = Annotated[
    int,
    typer.Option(
        "--processes",
        metavar="N",
        min=1,
        max=64,
        help="Frontend processes behind the port. With two or more, one more process is their "
        "router; all of them are started, restarted and ended together. Limits of clients and "
        "keys hold in each frontend process: N of them admit up to N times as much.",
        rich_help_panel=_SHARED,
    ),
]
ProcessTimeout = Annotated[
    float,
    typer.Option(
        "--process-timeout",
        metavar="SECONDS",
        min=0,
        max=3600,
        help="With --processes: a process without an answer for so long is killed and started "
        "again; 0: it is not.",
        rich_help_panel=_SHARED,
    ),
]
NamespacePrefix = Annotated[
    str | None,
    typer.Option(
        "--namespace-prefix",
        metavar="PREFIX",
        envvar="DYN_NAMESPACE_PREFIX",
        help="Serve all Dynamo namespaces that begin with this; wins over --dyn-namespace.",
        rich_help_panel=_DYNAMO,
    ),
]
EventPlane = Annotated[
    str | None,
    typer.Option(
        "--event-plane",
        metavar="zmq|nats",
        help="Event plane for what this frontend publishes to other routers "
        "(--router-replica-sync); workers' events come as each worker announces. "
        "[default: $DYN_EVENT_PLANE, then zmq]",
        rich_help_panel=_DYNAMO,
    ),
]
ResponsePort = Annotated[
    int,
    typer.Option(
        "--response-port",
        metavar="PORT",
        envvar="DYN_TCP_RESPONSE_STREAM_PORT",
        min=0,
        max=65535,
        help="Port where Dynamo workers send their responses; 0: a free one.",
        rich_help_panel=_DYNAMO,
    ),
]
MigrationLimit = Annotated[
    int | None,
    typer.Option(
        "--migration-limit",
        metavar="N",
        envvar="DYN_MIGRATION_LIMIT",
        min=0,
        max=1000,
        help="How often a response may go on with another Dynamo worker after its worker is lost. "
        "[default: from the model's card]",
        rich_help_panel=_DYNAMO,
    ),
]
MigrationTokens = Annotated[
    int | None,
    typer.Option(
        "--migration-max-seq-len",
        metavar="TOKENS",
        envvar="DYN_MIGRATION_MAX_SEQ_LEN",
        min=1,
        max=1 << 31,
        help="Prompt and output above which a response does not go on elsewhere. "
        "[default: no limit]",
        rich_help_panel=_DYNAMO,
    ),
]
SelectServicePort = Annotated[
    int | None,
    typer.Option(
        "--select-service-port",
        metavar="PORT",
        min=0,
        max=65535,
        help="Answer there as Dynamo's selection service, for workers that its clients register.",
        rich_help_panel=_SERVICES,
    ),
]
SlotTrackerPort = Annotated[
    int | None,
    typer.Option(
        "--slot-tracker-port",
        metavar="PORT",
        min=0,
        max=65535,
        help="Answer there as Dynamo's slot tracker: load that its clients report.",
        rich_help_panel=_SERVICES,
    ),
]
LogDecisions = Annotated[
    str,
    typer.Option(
        "--log-decisions",
        metavar="off|winner|all",
        envvar="DYNCTL_LOG_DECISIONS",
        help="Log the winner of each hop, or all candidates with their costs.",
        rich_help_panel=_LOGS,
    ),
]
LogFormat = Annotated[
    str,
    typer.Option(
        "--log-format",
        metavar="text|json",
        envvar="DYNCTL_LOG_FORMAT",
        help="Format of log lines.",
        rich_help_panel=_LOGS,
    ),
]
LogLevel = Annotated[
    str,
    typer.Option(
        "--log-level",
        metavar="debug|info|warning|error",
        envvar="DYN_LOG",
        help="Lowest severity to log.",
        rich_help_panel=_LOGS,
    ),
]
IndexMemory = Annotated[
    str,
    typer.Option(
        "--index-memory",
        metavar="SIZE",
        help="Memory for the index of cached blocks; above it the largest rank is read again.",
        rich_help_panel=_LOGS,
    ),
]
DecisionMemory = Annotated[
    str,
    typer.Option(
        "--decision-memory",
        metavar="SIZE",
        help="Memory for past decisions (dynctl why ID).",
        rich_help_panel=_LOGS,
    ),
]


Record = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FILE",
        help="Record requests (hashes only), decisions, events and loads in a file (dynctl top "
        "--recording FILE --at TIME).",
        rich_help_panel=_LOGS,
    ),
]
RecordBytes = Annotated[
    str,
    typer.Option(
        "--record-max-bytes",
        metavar="SIZE",
        help="Size at which the recording becomes FILE.old and a new one begins.",
        rich_help_panel=_LOGS,
    ),
]


@with_router_flags
@with_access_options
def frontend(
    options: GlobalOptions,
    router_flags: Mapping[str, str | bool],
    access: Mapping[str, Any],
    http_host: Host = "127.0.0.1",
    http_port: Port = 8000,
    worker: Workers = None,
    workers_file: WorkersFile = None,
    model_path: ModelPath = None,
    trust_template: TrustTemplate = False,
    tokenizer: TokenizerChoice = "auto",
    model_name: ModelName = None,
    block_size: BlockSize = 16,
    router: RouterUrl = None,
    router_token: RouterToken = None,
    router_token_file: RouterTokenFile = None,
    share_port: SharePort = False,
    processes: Processes = 1,
    process_timeout: ProcessTimeout = 30.0,
    namespace_prefix: NamespacePrefix = None,
    event_plane: EventPlane = None,
    response_port: ResponsePort = 0,
    migration_limit: MigrationLimit = None,
    migration_max_seq_len: MigrationTokens = None,
    api_token: ApiToken = None,
    log_decisions: LogDecisions = "off",
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    decision_memory: DecisionMemory = "64MiB",
    record: Record = None,
    record_max_bytes: RecordBytes = "1GiB",
    index_memory: IndexMemory = "4GiB",
    drain_timeout: Drain = 30.0,
    system_port: SystemPort = None,
    announce: Announce = False,
) -> int:
    """Run the OpenAI frontend with the router inside, in front of engines.

    For example: dynctl serve frontend --worker http://127.0.0.1:8001,zone=zone-a --model-path DIR

    With --discovery, and without --worker, its workers are those of a Dynamo deployment: dynctl
    serve frontend --discovery file --file-kv DIR
    """
    own = bool(worker or workers_file or router)
    dynamo = _dynamo(
        options,
        namespace_prefix,
        event_plane,
        response_port,
        migration_limit,
        migration_max_seq_len,
        own=own,
    )
    shared = _shared_router(router, router_token, router_token_file, share_port=share_port)
    config = frontend_config(
        router_flags,
        access,
        **shared,
        dynamo=dynamo,
        host=http_host,
        port=http_port,
        workers=tuple(worker or ()),
        workers_file=workers_file,
        model_path=model_path,
        trust_template=trust_template,
        tokenizer=tokenizer,
        model_name=model_name,
        block_size=block_size,
        api_token=api_token,
        log_decisions=log_decisions,
        log_format=log_format,
        log_level=log_level,
        decision_memory=decision_memory,
        record=record,
        record_max_bytes=record_max_bytes,
        index_memory=index_memory,
        drain_timeout=drain_timeout,
        system_port=system_port,
        announce=announce,
    )
    if processes > 1:
        _refuse_with_processes(config)
        from dynctl.serving.http.processes import run_processes
        from dynctl.web.child import MODULE

        return int(run_processes(config, processes, process_timeout, MODULE))
    from dynctl.serving.http.server import run_frontend
    from dynctl.web.routes import page_routes

    return int(run_frontend(config, extra_routes=(page_routes,)))


@with_router_flags
@with_access_options
def router(
    options: GlobalOptions,
    router_flags: Mapping[str, str | bool],
    access: Mapping[str, Any],
    http_host: Host = "127.0.0.1",
    http_port: Port = 8080,
    worker: Workers = None,
    workers_file: WorkersFile = None,
    endpoint: Endpoint = None,
    rpc_host: RpcHost = "127.0.0.1",
    response_port: ResponsePort = 0,
    model_path: ModelPath = None,
    trust_template: TrustTemplate = False,
    tokenizer: TokenizerChoice = "auto",
    model_name: ModelName = None,
    block_size: BlockSize = 16,
    select_service_port: SelectServicePort = None,
    slot_tracker_port: SlotTrackerPort = None,
    api_token: ApiToken = None,
    log_decisions: LogDecisions = "off",
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    decision_memory: DecisionMemory = "64MiB",
    record: Record = None,
    record_max_bytes: RecordBytes = "1GiB",
    index_memory: IndexMemory = "4GiB",
    drain_timeout: Drain = 30.0,
    system_port: SystemPort = None,
    announce: Announce = False,
) -> int:
    """Run the router alone, for other frontends: select, book and free over HTTP.

    For example: dynctl serve router --worker http://127.0.0.1:8101,name=a --model-path DIR

    With --endpoint and --discovery it is a router component of a Dynamo deployment.
    """
    dynamo = None
    if endpoint is not None:
        dynamo = _component(
            options, endpoint, rpc_host, response_port, given=(worker, workers_file)
        )
    config = frontend_config(
        router_flags,
        access,
        dynamo=dynamo,
        host=http_host,
        port=http_port,
        workers=tuple(worker or ()),
        workers_file=workers_file,
        model_path=model_path,
        trust_template=trust_template,
        tokenizer=tokenizer,
        model_name=model_name,
        block_size=block_size,
        select_service_port=select_service_port,
        slot_tracker_port=slot_tracker_port,
        api_token=api_token,
        log_decisions=log_decisions,
        log_format=log_format,
        log_level=log_level,
        decision_memory=decision_memory,
        record=record,
        record_max_bytes=record_max_bytes,
        index_memory=index_memory,
        drain_timeout=drain_timeout,
        system_port=system_port,
        announce=announce,
    )
    from dynctl.serving.http.router_server import run_router
    from dynctl.web.routes import page_routes

    return int(run_router(config, extra_routes=(page_routes,)))


@with_operator_options
def observe(
    options: GlobalOptions,
    access: Mapping[str, Any],
    http_host: Host = "127.0.0.1",
    http_port: Port = 8100,
    model_path: ModelPath = None,
    frontend_log: Annotated[
        str | None,
        typer.Option(
            "--frontend-log",
            metavar="FILE|-",
            help="The log of a Dynamo frontend: its costs and refusals, and its choices where no "
            "frontend publishes them; - is standard input.",
            rich_help_panel=_LOGS,
        ),
    ] = None,
    api_token: ApiToken = None,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    decision_memory: DecisionMemory = "64MiB",
    record: Record = None,
    record_max_bytes: RecordBytes = "1GiB",
    index_memory: IndexMemory = "4GiB",
    system_port: SystemPort = None,
    announce: Announce = False,
) -> int:
    """Run a shadow router: it follows a live Dynamo, predicts each choice of its frontends, and
    takes no request.

    top, why, audit, workers, topology show, check and route read it with --frontend URL. Nothing is
    written to the deployment.

    For example: dynctl serve observe --discovery etcd --frontend http://127.0.0.1:8000
    """
    from dynctl.adapters.dynamo.planes import backend, namespace, open_planes
    from dynctl.serving.config import FrontendConfig, Limits
    from dynctl.serving.http.observe_server import run_observer
    from dynctl.sources import frontends
    from dynctl.sources.dynamo.beside import BesideDynamo
    from dynctl.web.routes import page_routes

    one_choice("--log-format", log_format, ("text", "json"))
    if options.offline:
        raise UsageProblem(f"{options.offline}: serve observe follows a live Dynamo", _DYNAMO_HINT)
    if backend(options) is None:
        raise UsageProblem("serve observe: no discovery backend is set", _DYNAMO_HINT)
    config = FrontendConfig(
        host=http_host,
        port=http_port,
        model_path=model_path,
        log_format=log_format,
        log_level=log_level.strip().lower(),
        decision_memory_bytes=size_of("--decision-memory", decision_memory),
        record=record,
        record_bytes=recording_size("--record-max-bytes", record_max_bytes),
        index_memory_bytes=_index_size(index_memory),
        limits=Limits(drain_s=0.0, **limits_of(access)),
        system_port=None if system_port == -1 else system_port,
        announce=announce,
        **access_settings(access, api_token),
    )
    beside = BesideDynamo(
        options, frontends(options), frontend_log, None if model_path is None else str(model_path)
    )
    return int(
        run_observer(
            config,
            open_planes=lambda: open_planes(options),
            namespace=namespace(options),
            beside=beside,
            extra_routes=(page_routes,),
        )
    )


def _dynamo(
    options: GlobalOptions,
    prefix: str | None,
    event_plane: str | None,
    response_port: int,
    migration_limit: int | None,
    migration_max_tokens: int | None,
    *,
    own: bool,
) -> Any:
    """The DynamoConfig of the options; None where they name no discovery backend, and for
    ``own`` workers."""
    from dynctl.adapters.dynamo.model_files import cache_directory
    from dynctl.adapters.dynamo.planes import NAMESPACE_VARIABLE, backend
    from dynctl.screens.render import talk
    from dynctl.serving.config import DynamoConfig

    # The contexts are those of clients.
    planes = replace(options, context_applied=True)
    if event_plane is not None:
        one_choice("--event-plane", event_plane, ("zmq", "nats"))
    if own or backend(planes, serving=True) is None:
        given = {
            "--namespace-prefix": prefix,
            "--event-plane": event_plane,
            "--response-port": response_port,
            "--migration-limit": migration_limit,
            "--migration-max-seq-len": migration_max_tokens,
        }
        for flag in (flag for flag, value in given.items() if value):
            talk(f"warning: {flag} has no effect without --discovery")
        return None
    # As Dynamo's frontend: all namespaces, unless one is set.
    name = options.dyn_namespace or os.environ.get(NAMESPACE_VARIABLE) or "*"
    name = f"{prefix}*" if prefix else name
    return DynamoConfig(
        planes,
        None if name == "*" else name,
        cache_directory(),
        response_port,
        migration_limit,
        migration_max_tokens,
        event_plane=event_plane,
        rpc_host=os.environ.get("DYN_TCP_RPC_HOST") or "127.0.0.1",
    )


def _component(
    options: GlobalOptions,
    endpoint: str,
    rpc_host: str,
    response_port: int,
    *,
    given: tuple[Any, Any],
) -> Any:
    """The DynamoConfig of a router that is a component of Dynamo; raises UsageProblem."""
    from dynctl.adapters.dynamo.model_files import cache_directory
    from dynctl.adapters.dynamo.planes import backend
    from dynctl.serving.config import DynamoConfig
    from dynctl.wire.dynamo.discovery import EndpointId

    parts = endpoint.removeprefix("dyn://").split(".")
    if len(parts) != 3 or not all(parts):
        raise UsageProblem(
            f"--endpoint {endpoint[:200]}: expected NAMESPACE.COMPONENT.ENDPOINT, for example "
            "dynamo.prefill.generate"
        )
    if any(given):
        raise UsageProblem(
            "--endpoint and --worker or --workers-file: set only one of them",
            "the workers of --endpoint are those in Dynamo's discovery",
        )
    planes = replace(options, context_applied=True)
    if backend(planes, serving=True) is None:
        raise UsageProblem(f"--endpoint {endpoint[:200]} needs Dynamo's discovery", _DYNAMO_HINT)
    return DynamoConfig(
        planes,
        parts[0],
        cache_directory(),
        response_port,
        endpoint=EndpointId(*parts),
        rpc_host=rpc_host,
    )


def _shared_router(
    url: str | None, token: str | None, token_file: Path | None, *, share_port: bool
) -> dict[str, Any]:
    """The options about a router in another process as fields of FrontendConfig."""
    if url is None:
        if share_port:
            raise UsageProblem(
                "--share-port needs --router",
                "start one dynctl serve router, and each frontend with --router URL: frontends on "
                "one port must share what they know",
            )
        if token_file is not None:
            raise UsageProblem("--router-token-file needs --router")
        return {}
    address = _address(url)
    if address is None:
        shown = "URL" if "@" in url else url[:200]
        raise UsageProblem(
            f"--router {shown}: expected the address of a dynctl serve router, for example "
            "http://127.0.0.1:8080"
        )
    return {
        "router_url": address,
        "router_token": secret("--router-token", token, token_file),
        "share_port": share_port,
    }


def _refuse_with_processes(config: Any) -> None:
    """Raise UsageProblem for what --processes cannot share; warn about what each counts alone."""
    from dynctl.screens.render import talk

    if config.router_url is not None:
        raise UsageProblem(
            "--processes and --router: set only one of them",
            "--processes starts a router of its own; for one elsewhere start each frontend with "
            "--router and --share-port",
        )
    if config.dynamo is not None:
        raise UsageProblem(
            "--processes does not work with the workers of a Dynamo deployment",
            "start several dynctl serve frontend, each on its own port",
        )
    if config.record is not None:
        raise UsageProblem(
            "--record and --processes: set only one of them",
            "record the router process of the command: dynctl record FILE --frontend URL names it",
        )
    if config.unix_socket is not None:
        raise UsageProblem(
            "--unix-socket and --processes: set only one of them",
            "several processes cannot share the socket; operators use the port with --admin-token",
        )
    if config.index_peers and config.api_token is None:
        raise UsageProblem(
            "--index-peer with --processes needs --admin-token",
            "the peer gets the token; without yours the router has a secret one",
        )
    if config.key_requests_per_minute or config.key_concurrency:
        talk(
            "warning: --key-requests-per-minute and --key-concurrency hold for each of the "
            "frontend processes: a key may use the limit once in each"
        )


def _address(url: str) -> str | None:
    """Scheme, host and port of a URL that has nothing else; None for another one."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    if not valid or parts.username or parts.path.strip("/") or parts.query or parts.fragment:
        return None
    return f"{parts.scheme}://{parts.netloc}"


def _refuse_own_workers(given: Mapping[str, Any]) -> None:
    """Raise UsageProblem for options of workers where another process has them."""
    for flag, name in (("--worker", "workers"), ("--workers-file", "workers_file")):
        if given[name]:
            raise UsageProblem(
                f"{flag} and --router: set only one of them",
                "the workers are those of the router: give them to dynctl serve router",
            )


def _without_effect(given: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    """What is set and has no effect because another process decides."""
    for name, source in sources.items():
        kind, _, spelled = source.partition(" ")
        if kind in ("flag", "env") and name != "overload_status_code":
            yield spelled
    yield from _about_workers(given)
    if given["index_memory_bytes"] != 4 << 30:
        yield "--index-memory"


def _about_workers(given: Mapping[str, Any]) -> Iterator[str]:
    """What is set about workers that report it."""
    for flag, name, default in (
        ("--model-name", "model_name", None),
        ("--kv-cache-block-size", "block_size", 16),
        ("--index-peer", "index_peers", ()),
    ):
        if given[name] != default:
            yield flag


def frontend_config(
    router_flags: Mapping[str, str | bool],
    access: Mapping[str, Any],
    **given: Any,
) -> Any:
    """The FrontendConfig of the options; warnings about settings go to stderr."""
    from dynctl.screens.render import talk
    from dynctl.serving.config import FrontendConfig, Limits
    from dynctl.settings.router_settings import resolve

    one_choice("--log-decisions", given["log_decisions"], ("off", "winner", "all"))
    one_choice("--log-format", given["log_format"], ("text", "json"))
    if given["trust_template"] and given["model_path"] is None:
        raise UsageProblem(
            "--trust-template: expected --model-path DIR with it; chat templates that come from "
            "workers are never trusted"
        )
    one_choice("--tokenizer", given["tokenizer"], ("auto", "fast", "exact"))
    given["log_level"] = given["log_level"].strip().lower()
    flags, preset = split_preset(router_flags)
    resolved = resolve(flags, os.environ, preset_name=preset)
    if resolved.changed_by_preset is not None:
        talk(resolved.changed_by_preset)
    for warning in resolved.warnings:
        talk(f"warning: {warning}")
    if given.get("router_url"):
        _refuse_own_workers(given)
    for flag, name in (
        ("--serve-indexer", "serve_indexer"),
        ("--use-remote-indexer", "use_remote_indexer"),
    ):
        if getattr(resolved.config, name) and not given.get("dynamo"):
            talk(f"warning: without the workers of a Dynamo deployment {flag} has no effect")
    drain = given.pop("drain_timeout")
    memory = size_of("--decision-memory", given.pop("decision_memory"))
    most = given.pop("record_max_bytes")
    given["record_bytes"] = recording_size("--record-max-bytes", most)
    given["index_memory_bytes"] = _index_size(given.pop("index_memory"))
    given["index_peers"] = index_peers_of(access)
    if given.get("router_url"):
        for spelled in _without_effect(given, resolved.sources):
            talk(f"warning: {spelled} has no effect with --router: set it on dynctl serve router")
    dynamo = given.get("dynamo")
    if dynamo and dynamo.event_plane and not resolved.config.router_replica_sync:
        talk("warning: --event-plane has no effect without --router-replica-sync")
    if dynamo:
        for spelled in _about_workers(given):
            talk(f"warning: {spelled} has no effect with the workers of a Dynamo deployment")
    port = given.pop("system_port")
    given |= access_settings(access, given.pop("api_token"))
    replicas = replicas_of(access, resolved.config.router_replica_sync)
    if given.get("router_url"):
        replicas = None  # the router shares the load of all its frontends
    elif not given.get("dynamo") and resolved.config.router_durable_kv_events:
        talk(
            "warning: no stream of KV events: --router-durable-kv-events is for the workers of a "
            "Dynamo deployment; name it with --discovery"
        )
    if given.get("dynamo"):
        if replicas is not None:
            raise UsageProblem(
                "--router-replica-bind, --router-replica-peer and --router-replica-nats do not "
                "work with the workers of a Dynamo deployment",
                "--router-replica-sync alone shares load with its routers, over its event plane",
            )
    elif not given.get("router_url") and resolved.config.router_replica_sync and replicas is None:
        talk(
            "warning: no replica to share load with: set --router-replica-bind and "
            "--router-replica-peer, or --router-replica-nats"
        )
    return FrontendConfig(
        **given,
        router=resolved.config,
        preset=resolved.preset,
        origins=resolved.sources,
        admin_api=not _truth(os.environ.get("DYN_DISABLE_FRONTEND_ADMIN_API", "")),
        decision_memory_bytes=memory,
        limits=Limits(drain_s=drain, **limits_of(access)),
        health=health_of(access),
        replicas=replicas,
        system_port=None if port == -1 else port,
    )


def one_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageProblem(f"{flag} {value}: expected one of {', '.join(choices)}")


def _index_size(text: str) -> int:
    size = size_of("--index-memory", text)
    if size < LEAST_INDEX:
        raise UsageProblem(f"--index-memory: expected at least 1MiB, got {size:,} bytes")
    return size


def recording_size(flag: str, text: str) -> int:
    """A bound of a recording, at least one that has room for a state."""
    size = size_of(flag, text)
    if size < LEAST_INDEX:
        raise UsageProblem(f"{flag}: expected at least 1MiB, got {size:,} bytes")
    return size


def size_of(flag: str, text: str) -> int:
    digits = text.strip().rstrip("BKMGTibkmgt")
    unit = text.strip()[len(digits) :].upper()
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if not 0 <= size <= 1 << 40:
        raise UsageProblem(f"{flag} {text}: expected a size, for example 64MiB or 1GiB")
    return size


def _truth(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")
