"""`dynctl serve frontend`, `serve router` and `serve observe`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from dynctl.cli.option_groups import fields_of, with_options
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

DYNAMO_HINT = (
    "--discovery file --file-kv DIR, --discovery etcd --etcd-endpoints HOST:2379, or "
    "--discovery kubernetes"
)
DYNAMO = "Workers of a Dynamo deployment"
_SERVICES = "As Dynamo's services"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRouterOptions:
    """A router in another process, and several processes behind one port."""

    router: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="DYNCTL_ROUTER",
            help="A dynctl serve router that knows the workers and decides, for any number of "
            "frontends; without an answer from it requests are routed by load alone.",
        ),
    ] = None
    router_token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            envvar="DYNCTL_ROUTER_TOKEN",
            help="The --admin-token of that router. Prefer the variable or --router-token-file.",
        ),
        Needs(("router",)),
    ] = None
    router_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the --admin-token of that router."),
    ] = None
    share_port: Annotated[
        bool,
        typer.Option(
            "--share-port",
            help="Let other frontends with --router on this host listen on the same port; the "
            "kernel spreads connections over them.",
        ),
    ] = False
    processes: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=64,
            help="Frontend processes behind the port. With two or more, one more process is their "
            "router; all of them are started, restarted and ended together. Limits of clients and "
            "keys hold in each frontend process: N of them admit up to N times as much.",
        ),
    ] = 1
    process_timeout: Annotated[
        float,
        typer.Option(
            metavar="DURATION",
            parser=seconds(0.0, 3600.0),
            help="With --processes: a process without an answer for so long is killed and started "
            "again; 0: it is not.",
        ),
        Needs(("processes",), unset=1),
    ] = 30.0

    def settings(self) -> dict[str, Any]:
        """The options about the router as fields of FrontendConfig; raises UsageProblem."""
        if self.router is None:
            if self.share_port:
                raise UsageProblem(
                    "--share-port needs --router",
                    "start one dynctl serve router, and each frontend with --router URL: frontends "
                    "on one port must share what they know",
                )
            if self.router_token_file is not None:
                raise UsageProblem("--router-token-file needs --router")
            return {}
        address = _address(self.router)
        if address is None:
            shown = "URL" if "@" in self.router else self.router[:200]
            raise UsageProblem(
                f"--router {shown}: expected the address of a dynctl serve router, for example "
                "http://127.0.0.1:8080"
            )
        return {
            "router_url": address,
            "router_token": secret("--router-token", self.router_token, self.router_token_file),
            "share_port": self.share_port,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoOptions:
    """The workers of a Dynamo deployment, and how their answers are read.

    ``endpoint`` and ``rpc_host`` are those of a router that is a component of the deployment.
    """

    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="NAMESPACE.COMPONENT.ENDPOINT",
            help="Be a component of Dynamo: route among the workers of this endpoint, and register "
            "the endpoints of a router (NAMESPACE.router.generate, ..) in discovery.",
        ),
    ] = None
    rpc_host: Annotated[
        str,
        typer.Option(
            metavar="HOST",
            envvar="DYN_TCP_RPC_HOST",
            help="With --endpoint: address for requests of Dynamo's processes, which is "
            "registered. Their requests need no key or token.",
        ),
        Needs(dynamo=True),
    ] = "127.0.0.1"
    namespace_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX",
            envvar="DYN_NAMESPACE_PREFIX",
            help="Serve all Dynamo namespaces that begin with this; wins over --dyn-namespace.",
        ),
        Needs(dynamo=True),
    ] = None
    event_plane: Annotated[
        str | None,
        typer.Option(
            metavar="zmq|nats",
            help="Event plane for what this frontend publishes to other routers "
            "(--router-replica-sync); workers' events come as each worker announces. "
            "[default: $DYN_EVENT_PLANE, then zmq]",
        ),
        Needs(dynamo=True),
    ] = None
    response_port: Annotated[
        int,
        typer.Option(
            metavar="PORT",
            envvar="DYN_TCP_RESPONSE_STREAM_PORT",
            min=0,
            max=65535,
            help="Port where Dynamo workers send their responses; 0: a free one.",
        ),
        Needs(dynamo=True),
    ] = 0
    migration_limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            envvar="DYN_MIGRATION_LIMIT",
            min=0,
            max=1000,
            help="How often a response may go on with another Dynamo worker after its worker is "
            "lost. [default: from the model's card]",
        ),
        Needs(dynamo=True),
    ] = None
    migration_max_seq_len: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            envvar="DYN_MIGRATION_MAX_SEQ_LEN",
            min=1,
            max=1 << 31,
            help="Prompt and output above which a response does not go on elsewhere. "
            "[default: no limit]",
        ),
        Needs(dynamo=True),
    ] = None
    answer_parsing: Annotated[
        str,
        typer.Option(
            metavar="text|dynamo-1.6",
            help="How reasoning and tool calls are found in answers of Dynamo workers: in the "
            "text, however it is cut into tokens; or piece by piece, as Dynamo's frontend finds "
            "them.",
        ),
        Needs(dynamo=True),
    ] = "text"

    def config(self, options: GlobalOptions, *, own: bool) -> Any:
        """The DynamoConfig; None where no discovery backend is named, and for ``own`` workers."""
        from dynctl.adapters.dynamo.model_files import cache_directory
        from dynctl.adapters.dynamo.planes import NAMESPACE_VARIABLE, backend
        from dynctl.serving.routing.config import DynamoConfig

        # The contexts are those of clients.
        planes = replace(options, context_applied=True)
        if self.event_plane is not None:
            one_choice("--event-plane", self.event_plane, ("zmq", "nats"))
        one_choice("--answer-parsing", self.answer_parsing, ("text", "dynamo-1.6"))
        if own or backend(planes, serving=True) is None:
            return None
        # As Dynamo's frontend: all namespaces, unless one is set.
        name = options.dyn_namespace or os.environ.get(NAMESPACE_VARIABLE) or "*"
        name = f"{self.namespace_prefix}*" if self.namespace_prefix else name
        return DynamoConfig(
            planes,
            None if name == "*" else name,
            cache_directory(),
            self.response_port,
            self.migration_limit,
            self.migration_max_seq_len,
            event_plane=self.event_plane,
            rpc_host=os.environ.get("DYN_TCP_RPC_HOST") or "127.0.0.1",
            answers_by_text=self.answer_parsing == "text",
        )

    def of_component(self, options: GlobalOptions, serving: ServingOptions) -> Any:
        """The DynamoConfig of a router at ``endpoint``, None without one; raises UsageProblem."""
        from dynctl.adapters.dynamo.model_files import cache_directory
        from dynctl.adapters.dynamo.planes import backend
        from dynctl.serving.routing.config import DynamoConfig
        from dynctl.wire.dynamo.discovery import EndpointId

        if self.endpoint is None:
            return None
        parts = self.endpoint.removeprefix("dyn://").split(".")
        if len(parts) != 3 or not all(parts):
            raise UsageProblem(
                f"--endpoint {self.endpoint[:200]}: expected NAMESPACE.COMPONENT.ENDPOINT, for "
                "example dynamo.prefill.generate"
            )
        if serving.worker or serving.workers_file:
            raise UsageProblem(
                "--endpoint and --worker or --workers-file: set only one of them",
                "the workers of --endpoint are those in Dynamo's discovery",
            )
        planes = replace(options, context_applied=True)
        if backend(planes, serving=True) is None:
            raise UsageProblem(
                f"--endpoint {self.endpoint[:200]} needs Dynamo's discovery", DYNAMO_HINT
            )
        return DynamoConfig(
            planes,
            parts[0],
            cache_directory(),
            self.response_port,
            endpoint=EndpointId(*parts),
            rpc_host=self.rpc_host,
        )


@with_options(
    serving=SERVING,
    shared=fields_of(SharedRouterOptions, panel="A router in another process"),
    beside_dynamo=fields_of(DynamoOptions, without=("endpoint", "rpc_host"), panel=DYNAMO),
    access=ACCESS,
    router_flags=ROUTER_FLAGS,
)
def frontend(
    options: GlobalOptions,
    *,
    http_host: Host = "127.0.0.1",
    http_port: Port = 8000,
    serving: ServingOptions,
    shared: SharedRouterOptions,
    beside_dynamo: DynamoOptions,
    access: AccessOptions,
    router_flags: Mapping[str, str | bool],
) -> int:
    """Run the OpenAI frontend with the router inside, in front of engines.

    For example: dynctl serve frontend --worker http://127.0.0.1:8001,zone=zone-a --model-path DIR

    With --discovery, and without --worker, its workers are those of a Dynamo deployment: dynctl
    serve frontend --discovery file --file-kv DIR
    """
    own = bool(serving.worker or serving.workers_file or shared.router)
    dynamo = beside_dynamo.config(options, own=own)
    config = frontend_config(
        router_flags,
        access,
        serving,
        **shared.settings(),
        dynamo=dynamo,
        host=http_host,
        port=http_port,
    )
    if shared.processes > 1:
        _refuse_with_processes(config)
        from dynctl.serving.services.processes import run_processes
        from dynctl.web.child import MODULE

        return int(run_processes(config, shared.processes, shared.process_timeout, MODULE))
    from dynctl.serving.http.server import run_frontend
    from dynctl.web.routes import page_routes

    return int(run_frontend(config, extra_routes=(page_routes,)))


@with_options(
    serving=SERVING,
    beside_dynamo=fields_of(
        DynamoOptions, only=("endpoint", "rpc_host", "response_port"), panel=DYNAMO
    ),
    access=ACCESS,
    router_flags=ROUTER_FLAGS,
)
def router(
    options: GlobalOptions,
    *,
    http_host: Host = "127.0.0.1",
    http_port: Port = 8080,
    serving: ServingOptions,
    beside_dynamo: DynamoOptions,
    select_service_port: SelectServicePort = None,
    slot_tracker_port: SlotTrackerPort = None,
    access: AccessOptions,
    router_flags: Mapping[str, str | bool],
) -> int:
    """Run the router alone, for other frontends: select, book and free over HTTP.

    For example: dynctl serve router --worker http://127.0.0.1:8101,name=a --model-path DIR

    With --endpoint and --discovery it is a router component of a Dynamo deployment.
    """
    config = frontend_config(
        router_flags,
        access,
        serving,
        dynamo=beside_dynamo.of_component(options, serving),
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
