"""`dynctl serve attach`: an engine as a worker of a Dynamo fleet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.cli.option_groups import fields_of, with_options
from dynctl.cli.serving_options import LISTEN, DrainTimeout, LogFormat, LogLevel
from dynctl.cli.shared_options import one_choice, worker_environment
from dynctl.wire.engine_kinds.table import ATTACHED, kind_named

if TYPE_CHECKING:
    from dynctl.wire.dynamo.discovery import EndpointId


Announce = Annotated[
    bool,
    typer.Option(
        "--announce",
        help="Print the addresses as one JSON line when listening.",
        rich_help_panel=LISTEN,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine, and what the card has about it."""

    engine: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            help="The engine: URL, then any of kv-events=, replay=, model=, role=, name=, "
            "block-size=, dp=, total-blocks=, max-num-batched-tokens=, api-key-env=, taint=, "
            "DOMAIN=VALUE, separated by commas.",
        ),
    ]
    engine_type: Annotated[
        str,
        typer.Option(
            metavar="|".join(("auto", *ATTACHED)),
            help="API of the engine; auto: read from the engine.",
        ),
    ] = "auto"
    model_path: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of the engine's model: frontends get its tokenizer from the card.",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Requests that the engine runs at once, for the card."
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Parser of tool calls that the frontend uses for this model."
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Parser of reasoning that the frontend uses for this model."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The fleet, and how its requests and events travel."""

    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="NAMESPACE.COMPONENT.ENDPOINT",
            help="Endpoint to register; by default backend.generate of the namespace, for role "
            "prefill prefill.generate.",
        ),
    ] = None
    event_plane: Annotated[
        str,
        typer.Option(
            metavar="zmq|nats", envvar="DYN_EVENT_PLANE", help="Event plane of the fleet."
        ),
    ] = "zmq"
    request_plane: Annotated[
        str,
        typer.Option(
            metavar="tcp|nats",
            envvar="DYN_REQUEST_PLANE",
            help="How requests of frontends arrive; responses always go over TCP.",
        ),
    ] = "tcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressOptions:
    """Where the fleet reaches the process."""

    host: Annotated[
        str,
        typer.Option(
            metavar="HOST",
            envvar="DYN_TCP_RPC_HOST",
            help="Address to listen at and to register: requests, events and the system port. "
            "Frontends on other hosts need one that they reach.",
        ),
    ] = "127.0.0.1"
    request_port: Annotated[
        int,
        typer.Option(
            metavar="PORT",
            envvar="DYN_TCP_RPC_PORT",
            min=0,
            max=65535,
            help="Port of the request plane over TCP; 0: a free one.",
        ),
    ] = 0
    system_port: Annotated[
        int,
        typer.Option(
            metavar="PORT",
            envvar="DYN_SYSTEM_PORT",
            min=-1,
            max=65535,
            help="Port for health, metrics and the model's files; 0: a free one; -1: none, and the "
            "card has paths of this host.",
        ),
    ] = 0


@with_options(
    of_engine=fields_of(EngineOptions, panel="Engine"),
    fleet=fields_of(FleetOptions, panel="Dynamo fleet"),
    address=fields_of(AddressOptions, panel=LISTEN),
)
def attach(
    options: GlobalOptions,
    context: typer.Context,
    *,
    of_engine: EngineOptions,
    fleet: FleetOptions,
    address: AddressOptions,
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

    spec = parse_worker_spec(of_engine.engine, "--engine")
    one_choice("--engine-type", of_engine.engine_type, ("auto", *ATTACHED))
    one_choice("--event-plane", fleet.event_plane, ("zmq", "nats"))
    one_choice("--request-plane", fleet.request_plane, ("tcp", "nats"))
    for warning in _without_effect(options, context, fleet):
        talk(f"warning: {warning}")
    config = AttachConfig(
        engine=spec,
        endpoint=_endpoint(fleet.endpoint, options, prefill=spec.role == "prefill"),
        files=read_model_files(model_directory(of_engine.model_path)),
        host=address.host,
        port=address.request_port,
        system_port=None if address.system_port < 0 else address.system_port,
        event_plane="nats" if fleet.event_plane == "nats" else "zmq",
        request_plane="nats" if fleet.request_plane == "nats" else "tcp",
        nats_servers=",".join(nats_servers(options)),
        kind=None if of_engine.engine_type == "auto" else kind_named(of_engine.engine_type),
        api_key=_key(spec.api_key_env),
        options=CardOptions(
            max_num_seqs=of_engine.max_num_seqs,
            tool_call_parser=of_engine.tool_call_parser,
            reasoning_parser=of_engine.reasoning_parser,
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
    options: GlobalOptions, context: typer.Context, fleet: FleetOptions
) -> Iterator[str]:
    """What is given, by flag or variable, and not read on these planes."""
    import os

    if "nats" not in (fleet.event_plane, fleet.request_plane):
        named = (
            ("--nats-server", options.nats_server),
            ("NATS_SERVER", os.environ.get("NATS_SERVER")),
        )
        for name in [name for name, value in named if value][:1]:
            yield f"{name} has no effect without --event-plane nats or --request-plane nats"
    if fleet.request_plane == "nats":
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
