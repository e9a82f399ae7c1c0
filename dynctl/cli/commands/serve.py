"""`dynctl serve frontend`, `serve router` and `serve observe`."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.cli.access_options import (
    ACCESS,
    OPERATOR_ACCESS,
    AccessOptions,
    access_settings,
    limits_of,
    secret,
)
from dynctl.cli.option_groups import with_options
from dynctl.cli.router_flags import ROUTER_FLAGS
from dynctl.cli.serving_options import (
    LOGS,
    OBSERVING,
    SERVING,
    Host,
    Port,
    ServingOptions,
    frontend_config,
)
from dynctl.cli.shared_options import Needs, memory_of, one_choice, seconds, size_of

_SHARED = "A router in another process"
DYNAMO_HINT = (
    "--discovery file --file-kv DIR, --discovery etcd --etcd-endpoints HOST:2379, or "
    "--discovery kubernetes"
)
DYNAMO = "Workers of a Dynamo deployment"
_SERVICES = "As Dynamo's services"


Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="NAMESPACE.COMPONENT.ENDPOINT",
        help="Be a component of Dynamo: route among the workers of this endpoint, and register "
        "the endpoints of a router (NAMESPACE.router.generate, ..) in discovery.",
        rich_help_panel=DYNAMO,
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
        rich_help_panel=DYNAMO,
    ),
    Needs(dynamo=True),
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
    Needs(("router",)),
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
        metavar="DURATION",
        parser=seconds(0.0, 3600.0),
        help="With --processes: a process without an answer for so long is killed and started "
        "again; 0: it is not.",
        rich_help_panel=_SHARED,
    ),
    Needs(("processes",), unset=1),
]
NamespacePrefix = Annotated[
    str | None,
    typer.Option(
        "--namespace-prefix",
        metavar="PREFIX",
        envvar="DYN_NAMESPACE_PREFIX",
        help="Serve all Dynamo namespaces that begin with this; wins over --dyn-namespace.",
        rich_help_panel=DYNAMO,
    ),
    Needs(dynamo=True),
]
EventPlane = Annotated[
    str | None,
    typer.Option(
        "--event-plane",
        metavar="zmq|nats",
        help="Event plane for what this frontend publishes to other routers "
        "(--router-replica-sync); workers' events come as each worker announces. "
        "[default: $DYN_EVENT_PLANE, then zmq]",
        rich_help_panel=DYNAMO,
    ),
    Needs(dynamo=True),
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
        rich_help_panel=DYNAMO,
    ),
    Needs(dynamo=True),
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
        rich_help_panel=DYNAMO,
    ),
    Needs(dynamo=True),
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
        rich_help_panel=DYNAMO,
    ),
    Needs(dynamo=True),
]
AnswerParsing = Annotated[
    str,
    typer.Option(
        "--answer-parsing",
        metavar="text|dynamo-1.6",
        help="How reasoning and tool calls are found in answers of Dynamo workers: in the text, "
        "however it is cut into tokens; or piece by piece, as Dynamo's frontend finds them.",
        rich_help_panel=DYNAMO,
    ),
    Needs(dynamo=True),
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


@with_options(serving=SERVING, access=ACCESS, router_flags=ROUTER_FLAGS)
def frontend(
    options: GlobalOptions,
    *,
    http_host: Host = "127.0.0.1",
    http_port: Port = 8000,
    serving: ServingOptions,
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
    answer_parsing: AnswerParsing = "text",
    access: AccessOptions,
    router_flags: Mapping[str, str | bool],
) -> int:
    """Run the OpenAI frontend with the router inside, in front of engines.

    For example: dynctl serve frontend --worker http://127.0.0.1:8001,zone=zone-a --model-path DIR

    With --discovery, and without --worker, its workers are those of a Dynamo deployment: dynctl
    serve frontend --discovery file --file-kv DIR
    """
    own = bool(serving.worker or serving.workers_file or router)
    dynamo = dynamo_config(
        options,
        namespace_prefix,
        event_plane,
        response_port,
        migration_limit,
        migration_max_seq_len,
        answer_parsing,
        own=own,
    )
    shared = _shared_router(router, router_token, router_token_file, share_port=share_port)
    config = frontend_config(
        router_flags,
        access,
        serving,
        **shared,
        dynamo=dynamo,
        host=http_host,
        port=http_port,
    )
    if processes > 1:
        _refuse_with_processes(config)
        from dynctl.serving.services.processes import run_processes
        from dynctl.web.child import MODULE

        return int(run_processes(config, processes, process_timeout, MODULE))
    from dynctl.serving.http.server import run_frontend
    from dynctl.web.routes import page_routes

    return int(run_frontend(config, extra_routes=(page_routes,)))


@with_options(serving=SERVING, access=ACCESS, router_flags=ROUTER_FLAGS)
def router(
    options: GlobalOptions,
    *,
    http_host: Host = "127.0.0.1",
    http_port: Port = 8080,
    serving: ServingOptions,
    endpoint: Endpoint = None,
    rpc_host: RpcHost = "127.0.0.1",
    response_port: ResponsePort = 0,
    select_service_port: SelectServicePort = None,
    slot_tracker_port: SlotTrackerPort = None,
    access: AccessOptions,
    router_flags: Mapping[str, str | bool],
) -> int:
    """Run the router alone, for other frontends: select, book and free over HTTP.

    For example: dynctl serve router --worker http://127.0.0.1:8101,name=a --model-path DIR

    With --endpoint and --discovery it is a router component of a Dynamo deployment.
    """
    dynamo = None
    if endpoint is not None:
        dynamo = _component(
            options, endpoint, rpc_host, response_port, given=(serving.worker, serving.workers_file)
        )
    config = frontend_config(
        router_flags,
        access,
        serving,
        dynamo=dynamo,
        host=http_host,
        port=http_port,
        select_service_port=select_service_port,
        slot_tracker_port=slot_tracker_port,
    )
    from dynctl.serving.services.router_server import run_router
    from dynctl.web.routes import page_routes

    return int(run_router(config, extra_routes=(page_routes,)))


@with_options(serving=OBSERVING, access=OPERATOR_ACCESS)
def observe(
    options: GlobalOptions,
    *,
    http_host: Host = "127.0.0.1",
    http_port: Port = 8100,
    frontend_log: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help="The log of a Dynamo frontend: its costs and refusals, and its choices where no "
            "frontend publishes them; - is standard input.",
            rich_help_panel=LOGS,
        ),
    ] = None,
    serving: ServingOptions,
    access: AccessOptions,
) -> int:
    """Run a shadow router: it follows a live Dynamo, predicts each choice of its frontends, and
    takes no request.

    top, why, audit, workers, topology show, check and route read it with --frontend URL. Nothing is
    written to the deployment.

    For example: dynctl serve observe --discovery etcd --frontend http://127.0.0.1:8000
    """
    from dynctl.adapters.dynamo.planes import backend, namespace, open_planes
    from dynctl.serving.routing.config import FrontendConfig, Limits
    from dynctl.serving.services.observe_server import Observed, run_observer
    from dynctl.sources.dynamo.beside import BesideDynamo
    from dynctl.sources.named import frontends
    from dynctl.web.routes import page_routes

    one_choice("--log-format", serving.log_format, ("text", "json"))
    if options.offline:
        raise UsageProblem(f"{options.offline}: serve observe follows a live Dynamo", DYNAMO_HINT)
    if backend(options) is None:
        raise UsageProblem("serve observe: no discovery backend is set", DYNAMO_HINT)
    config = FrontendConfig(
        host=http_host,
        port=http_port,
        model_path=serving.model_path,
        log_format=serving.log_format,
        log_level=serving.log_level.strip().lower(),
        decision_memory_bytes=size_of("--decision-memory", serving.decision_memory),
        record=serving.record,
        record_bytes=memory_of("--record-max-bytes", serving.record_max_bytes),
        index_memory_bytes=memory_of("--index-memory", serving.index_memory),
        limits=Limits(drain_s=0.0, **limits_of(access)),
        system_port=None if serving.system_port == -1 else serving.system_port,
        announce=serving.announce,
        **access_settings(access, serving.api_token),
    )
    beside = BesideDynamo(
        options,
        frontends(options),
        frontend_log,
        None if serving.model_path is None else str(serving.model_path),
    )
    return int(
        run_observer(
            config,
            Observed(lambda: open_planes(options), namespace(options), beside),
            extra_routes=(page_routes,),
        )
    )


def dynamo_config(
    options: GlobalOptions,
    prefix: str | None,
    event_plane: str | None,
    response_port: int = 0,
    migration_limit: int | None = None,
    migration_max_tokens: int | None = None,
    answer_parsing: str = "text",
    *,
    own: bool,
) -> Any:
    """The DynamoConfig of the options; None where they name no discovery backend, and for
    ``own`` workers."""
    from dynctl.adapters.dynamo.model_files import cache_directory
    from dynctl.adapters.dynamo.planes import NAMESPACE_VARIABLE, backend
    from dynctl.serving.routing.config import DynamoConfig

    # The contexts are those of clients.
    planes = replace(options, context_applied=True)
    if event_plane is not None:
        one_choice("--event-plane", event_plane, ("zmq", "nats"))
    one_choice("--answer-parsing", answer_parsing, ("text", "dynamo-1.6"))
    if own or backend(planes, serving=True) is None:
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
        answers_by_text=answer_parsing == "text",
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
    from dynctl.serving.routing.config import DynamoConfig
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
        raise UsageProblem(f"--endpoint {endpoint[:200]} needs Dynamo's discovery", DYNAMO_HINT)
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
    if not valid or "@" in parts.netloc or parts.path.strip("/") or parts.query or parts.fragment:
        return None
    return f"{parts.scheme}://{parts.netloc}"
