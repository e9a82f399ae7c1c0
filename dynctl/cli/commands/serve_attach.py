"""`dynctl serve attach`: an engine as a worker of a Dynamo fleet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.cli.serving_options import LISTEN, DrainTimeout, LogFormat, LogLevel
from dynctl.cli.shared_options import one_choice, worker_environment
from dynctl.wire.engine_kinds.table import ATTACHED, kind_named

if TYPE_CHECKING:
    from dynctl.wire.dynamo.discovery import EndpointId

_ENGINE = "Engine"
_FLEET = "Dynamo fleet"

EngineSpec = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="SPEC",
        help="The engine: URL, then any of kv-events=, replay=, model=, role=, name=, block-size=, "
        "dp=, total-blocks=, max-num-batched-tokens=, api-key-env=, taint=, DOMAIN=VALUE, "
        "separated by commas.",
        rich_help_panel=_ENGINE,
    ),
]
EngineType = Annotated[
    str,
    typer.Option(
        "--engine-type",
        metavar="|".join(("auto", *ATTACHED)),
        help="API of the engine; auto: read from the engine.",
        rich_help_panel=_ENGINE,
    ),
]
ModelPath = Annotated[
    Path | None,
    typer.Option(
        "--model-path",
        metavar="DIR",
        help="Directory of the engine's model: frontends get its tokenizer from the card.",
        rich_help_panel=_ENGINE,
    ),
]
MaxSeqs = Annotated[
    int | None,
    typer.Option(
        "--max-num-seqs",
        metavar="N",
        min=1,
        help="Requests that the engine runs at once, for the card.",
        rich_help_panel=_ENGINE,
    ),
]
ToolParser = Annotated[
    str | None,
    typer.Option(
        "--tool-call-parser",
        metavar="NAME",
        help="Parser of tool calls that the frontend uses for this model.",
        rich_help_panel=_ENGINE,
    ),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option(
        "--reasoning-parser",
        metavar="NAME",
        help="Parser of reasoning that the frontend uses for this model.",
        rich_help_panel=_ENGINE,
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="NAMESPACE.COMPONENT.ENDPOINT",
        help="Endpoint to register; by default backend.generate of the namespace, for role prefill "
        "prefill.generate.",
        rich_help_panel=_FLEET,
    ),
]
EventPlane = Annotated[
    str,
    typer.Option(
        "--event-plane",
        metavar="zmq|nats",
        envvar="DYN_EVENT_PLANE",
        help="Event plane of the fleet.",
        rich_help_panel=_FLEET,
    ),
]
RequestPlane = Annotated[
    str,
    typer.Option(
        "--request-plane",
        metavar="tcp|nats",
        envvar="DYN_REQUEST_PLANE",
        help="How requests of frontends arrive; responses always go over TCP.",
        rich_help_panel=_FLEET,
    ),
]
Host = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="HOST",
        envvar="DYN_TCP_RPC_HOST",
        help="Address to listen at and to register: requests, events and the system port. "
        "Frontends on other hosts need one that they reach.",
        rich_help_panel=LISTEN,
    ),
]
RequestPort = Annotated[
    int,
    typer.Option(
        "--request-port",
        metavar="PORT",
        envvar="DYN_TCP_RPC_PORT",
        min=0,
        max=65535,
        help="Port of the request plane over TCP; 0: a free one.",
        rich_help_panel=LISTEN,
    ),
]
SystemPort = Annotated[
    int,
    typer.Option(
        "--system-port",
        metavar="PORT",
        envvar="DYN_SYSTEM_PORT",
        min=-1,
        max=65535,
        help="Port for health, metrics and the model's files; 0: a free one; -1: none, and the "
        "card has paths of this host.",
        rich_help_panel=LISTEN,
    ),
]
Announce = Annotated[
    bool,
    typer.Option(
        "--announce",
        help="Print the addresses as one JSON line when listening.",
        rich_help_panel=LISTEN,
    ),
]


def attach(
    options: GlobalOptions,
    context: typer.Context,
    engine: EngineSpec,
    engine_type: EngineType = "auto",
    model_path: ModelPath = None,
    max_num_seqs: MaxSeqs = None,
    tool_call_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    endpoint: Endpoint = None,
    event_plane: EventPlane = "zmq",
    request_plane: RequestPlane = "tcp",
    host: Host = "127.0.0.1",
    request_port: RequestPort = 0,
    system_port: SystemPort = 0,
    drain_timeout: DrainTimeout = 30.0,
    announce: Announce = False,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
) -> int:
    """Register a vLLM or SGLang server as a worker of a Dynamo fleet, while this command runs.

    For example: dynctl serve attach --discovery file --file-kv DIR --engine http://127.0.0.1:8000
    --model-path MODEL

    The environment sets the topology (DYN_TOPOLOGY_*, DYN_KV_TRANSFER_*), as for Dynamo's workers.
    """
    from dataclasses import replace

    from dynctl.adapters.dynamo.planes import nats_servers
    from dynctl.base.worker_environment import TopologyEnvironmentError
    from dynctl.screens.render import talk
    from dynctl.serving.attach.card import CardOptions, read_model_files
    from dynctl.serving.attach.process import run_attach
    from dynctl.serving.attach.sidecar import AttachConfig, model_directory
    from dynctl.serving.engines.worker_spec import parse_worker_spec
    from dynctl.serving.routing.config import Limits

    spec = parse_worker_spec(engine, "--engine")
    one_choice("--engine-type", engine_type, ("auto", *ATTACHED))
    one_choice("--event-plane", event_plane, ("zmq", "nats"))
    one_choice("--request-plane", request_plane, ("tcp", "nats"))
    for warning in _without_effect(options, context, event_plane, request_plane):
        talk(f"warning: {warning}")
    config = AttachConfig(
        engine=spec,
        endpoint=_endpoint(endpoint, options, prefill=spec.role == "prefill"),
        files=read_model_files(model_directory(model_path)),
        host=host,
        port=request_port,
        system_port=None if system_port < 0 else system_port,
        event_plane="nats" if event_plane == "nats" else "zmq",
        request_plane="nats" if request_plane == "nats" else "tcp",
        nats_servers=",".join(nats_servers(options)),
        kind=None if engine_type == "auto" else kind_named(engine_type),
        api_key=_key(spec.api_key_env),
        options=CardOptions(
            max_num_seqs=max_num_seqs,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
        ),
        limits=Limits(),
        drain_s=drain_timeout,
    )
    try:
        topology = worker_environment()
    except TopologyEnvironmentError as error:
        # A worker does not start without its topology; its exit code is 1.
        talk(f"error: {error}")
        return 1
    config = replace(config, topology=topology)
    return run_attach(
        config, options, announced=announce, log_format=log_format, log_level=log_level
    )


def _without_effect(
    options: GlobalOptions, context: typer.Context, event_plane: str, request_plane: str
) -> Iterator[str]:
    """What is given, by flag or variable, and not read on these planes."""
    import os

    if "nats" not in (event_plane, request_plane):
        named = (
            ("--nats-server", options.nats_server),
            ("NATS_SERVER", os.environ.get("NATS_SERVER")),
        )
        for name in [name for name, value in named if value][:1]:
            yield f"{name} has no effect without --event-plane nats or --request-plane nats"
    if request_plane == "nats":
        source = context.get_parameter_source("request_port")
        names = {"COMMANDLINE": "--request-port", "ENVIRONMENT": "DYN_TCP_RPC_PORT"}
        if source is not None and source.name in names:
            yield f"{names[source.name]} has no effect with --request-plane nats: expected tcp"


def _key(variable: str | None) -> str | None:
    import os

    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise UsageProblem(f"--engine api-key-env={variable}: the variable is not set")
    return key


def _endpoint(text: str | None, options: GlobalOptions, *, prefill: bool) -> EndpointId:
    from dynctl.adapters.dynamo.planes import namespace
    from dynctl.wire.dynamo.discovery import EndpointId

    if text is None:
        return EndpointId(
            namespace(options) or "dynamo", "prefill" if prefill else "backend", "generate"
        )
    parts = text.removeprefix("dyn://").split(".")
    if len(parts) != 3 or not all(part and "/" not in part for part in parts):
        raise UsageProblem(
            f"--endpoint {text[:200]}: expected NAMESPACE.COMPONENT.ENDPOINT, for example "
            "dynamo.backend.generate"
        )
    return EndpointId(*parts)
