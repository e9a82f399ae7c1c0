"""`dynctl serve epp`: the router as the endpoint picker of a gateway."""

from collections.abc import Mapping
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import typer

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.cli.access_options import PICKER_ACCESS, AccessOptions, expect_pair
from dynctl.cli.commands.serve import (
    DYNAMO,
    DYNAMO_HINT,
    EventPlane,
    NamespacePrefix,
    dynamo_config,
)
from dynctl.cli.option_groups import with_options
from dynctl.cli.router_flags import ROUTER_FLAGS
from dynctl.cli.serving_options import SERVING, ServingOptions, frontend_config
from dynctl.cli.shared_options import Needs, seconds, size_of

_GATEWAY = "Gateway"
_POOL = "Workers of an InferencePool"
#: HTTP status for a request that is shed, as gateways expect it.
_SHED = 429
#: Topology domain -> the label of pods that Kubernetes copies from their nodes.
_DOMAINS = ("zone=topology.kubernetes.io/zone", "region=topology.kubernetes.io/region")

Listen = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="HOST",
        envvar="DYNCTL_EPP_HOST",
        help="Listen address for gateways and health; 0.0.0.0 accepts connections from other "
        "hosts.",
        rich_help_panel=_GATEWAY,
    ),
]
PickerPort = Annotated[
    int,
    typer.Option(
        "--port", metavar="PORT", min=0, max=65535,
        help="ext_proc port for gateways (gRPC); 0: a free one.",
        rich_help_panel=_GATEWAY,
    ),
]  # fmt: skip
HealthPort = Annotated[
    int,
    typer.Option(
        "--health-port", metavar="PORT", min=-1, max=65535,
        help="gRPC health, without TLS; 0: a free one, -1: on --port alone.",
        rich_help_panel=_GATEWAY,
    ),
]  # fmt: skip
Tls = Annotated[
    bool,
    typer.Option(
        "--tls/--no-tls",
        help="TLS for gateways. Without --tls-cert the certificate is made at the start.",
        rich_help_panel=_GATEWAY,
    ),
]
Cert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert", metavar="FILE",
        help="Certificate chain (PEM) for gateways; loaded again when it changes.",
        rich_help_panel=_GATEWAY,
    ),
]  # fmt: skip
Key = Annotated[
    Path | None,
    typer.Option(
        "--tls-key", metavar="FILE", help="Private key (PEM) of the certificate.",
        rich_help_panel=_GATEWAY,
    ),
]  # fmt: skip
BodyLimit = Annotated[
    str,
    typer.Option(
        "--body-limit", metavar="SIZE",
        help="Largest body of a request; larger ones get 413.",
        rich_help_panel=_GATEWAY,
    ),
]  # fmt: skip
Silence = Annotated[
    float,
    typer.Option(
        "--stream-timeout", metavar="DURATION", parser=seconds(1.0),
        help="Longest time without a message of the gateway about a request.",
        rich_help_panel=_GATEWAY,
    ),
]  # fmt: skip
Pool = Annotated[
    str | None,
    typer.Option(
        "--pool", metavar="NAME", envvar="DYNCTL_POOL",
        help="An InferencePool of the cluster, in the namespace of -n: its ready pods are the "
        "workers, each of its targetPorts a worker of its own.",
        rich_help_panel=_POOL,
    ),
]  # fmt: skip
EventsPort = Annotated[
    int | None,
    typer.Option(
        "--pod-kv-events", metavar="PORT", min=1, max=65535,
        help="ZMQ port of the pods' KV events; that of the next targetPort is one higher. "
        "[default: from the engine, where it reports it]",
        rich_help_panel=_POOL,
    ),
    Needs(("pool",)),
]  # fmt: skip
ReplayPort = Annotated[
    int | None,
    typer.Option(
        "--pod-replay", metavar="PORT", min=1, max=65535,
        help="ZMQ port of the pods' replay sockets, likewise.",
        rich_help_panel=_POOL,
    ),
    Needs(("pool",)),
]  # fmt: skip
RoleLabel = Annotated[
    str,
    typer.Option(
        "--pod-role-label", metavar="LABEL",
        help="Pod label with the role: prefill or decode; any other value: both.",
        rich_help_panel=_POOL,
    ),
    Needs(("pool",)),
]  # fmt: skip
Domains = Annotated[
    list[str] | None,
    typer.Option(
        "--pod-domain", metavar="DOMAIN=LABEL",
        help=f"A topology domain and the pod label with its value (repeatable). "
        f"[default: {', '.join(_DOMAINS)}]",
        rich_help_panel=_POOL,
    ),
    Needs(("pool",)),
]  # fmt: skip

DynamoFrontend = Annotated[
    str | None,
    typer.Option(
        "--dynamo-frontend", metavar="[HOST]:PORT", envvar="DYNCTL_DYNAMO_FRONTEND",
        help="With --discovery: where the gateway sends requests, a Dynamo frontend with "
        "--router-mode direct. :PORT is one beside each worker, at the worker's address.",
        rich_help_panel=DYNAMO,
    ),
]  # fmt: skip


@with_options(serving=SERVING, access=PICKER_ACCESS, router_flags=ROUTER_FLAGS)
def epp(
    options: GlobalOptions,
    *,
    host: Listen = "127.0.0.1",
    port: PickerPort = 9002,
    health_port: HealthPort = 9003,
    tls: Tls = True,
    tls_cert: Cert = None,
    tls_key: Key = None,
    body_limit: BodyLimit = "16MiB",
    stream_timeout: Silence = 3600.0,
    http_host: Annotated[
        str,
        typer.Option(
            metavar="HOST", envvar="DYN_HTTP_HOST",
            help="Listen address of metrics and of the operators' HTTP.",
            rich_help_panel="Listening"
        )
    ] = "127.0.0.1",
    http_port: Annotated[
        int,
        typer.Option(
            metavar="PORT", min=0, max=65535, envvar="DYN_HTTP_PORT",
            help="Port of metrics and of the operators' HTTP; 0: a free one.",
            rich_help_panel="Listening"
        )
    ] = 9090,
    pool: Pool = None,
    pod_kv_events: EventsPort = None,
    pod_replay: ReplayPort = None,
    pod_role_label: RoleLabel = "llm-d.ai/role",
    pod_domain: Domains = None,
    dynamo_frontend: DynamoFrontend = None,
    namespace_prefix: NamespacePrefix = None,
    event_plane: EventPlane = None,
    serving: ServingOptions,
    access: AccessOptions,
    router_flags: Mapping[str, str | bool],
) -> int:  # fmt: skip
    """Run the router as the endpoint picker of a gateway (Envoy ext_proc).

    For example: dynctl serve epp --pool my-pool -n inference --model-path DIR --host 0.0.0.0

    The gateway sends each request here, and gets the worker to send it to
    (docs/gateway.md). With --discovery the workers are those of a Dynamo deployment.
    """
    from dynctl.serving.epp.process import run_picker
    from dynctl.serving.routing.config import PickerConfig

    expect_pair(tls_cert, tls_key)
    if tls_cert is not None and not tls:
        raise UsageProblem("--no-tls and --tls-cert: set only one of them")
    own = bool(serving.worker or serving.workers_file or pool)
    dynamo = dynamo_config(options, namespace_prefix, event_plane, own=own)
    direct = _direct_frontend(dynamo_frontend, dynamo, options, own=own)
    config = frontend_config(
        router_flags,
        access,
        serving,
        dynamo=dynamo,
        host=http_host,
        port=http_port,
        picker=PickerConfig(
            host,
            port,
            None if health_port == -1 else health_port,
            tls,
            tls_cert,
            tls_key,
            _pool(options, pool, pod_kv_events, pod_replay, pod_role_label, pod_domain),
            direct,
        ),
    )
    if config.origins.get("overload_status_code", "").partition(" ")[0] not in ("flag", "env"):
        config = replace(
            config,
            router=config.router.with_values({"overload_status_code": _SHED}),
            origins={**config.origins, "overload_status_code": "serve epp"},
        )
    size = size_of("--body-limit", body_limit)
    if not 1024 <= size <= 1 << 30:
        raise UsageProblem(f"--body-limit {body_limit}: expected 1KiB to 1GiB")
    limits = replace(config.limits, body_bytes=size, stream_silence_s=stream_timeout)
    return int(run_picker(replace(config, limits=limits)))


def _direct_frontend(
    text: str | None, dynamo: Any, options: GlobalOptions, *, own: bool
) -> tuple[str, int] | None:
    """(host or "", port) of --dynamo-frontend; raises UsageProblem. ``own``: the options name
    engines or a pool."""
    if own and (text is not None or options.discovery is not None):
        flag = "--discovery" if text is None else "--dynamo-frontend"
        raise UsageProblem(
            f"{flag} and --worker, --workers-file or --pool: set only one of them",
            "the workers are those of Dynamo's discovery, or those of the other option",
        )
    if text is None:
        if dynamo is None:
            return None
        raise UsageProblem(
            "serve epp: Dynamo workers have no HTTP address: they take requests on the request "
            "plane, where a gateway cannot send them",
            "run a Dynamo frontend with --router-mode direct, and set --dynamo-frontend HOST:PORT, "
            "or :PORT where one runs beside each worker; for pods of an InferencePool set --pool",
        )
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    number = int(port) if port.isascii() and port.isdecimal() and len(port) < 6 else 0
    if not colon or not 0 < number < 65536 or (host and not _is_address(host)):
        raise UsageProblem(
            f"--dynamo-frontend {text[:200]}: expected IP:PORT, or :PORT for a frontend beside "
            "each worker; a gateway needs an IP address to send requests to"
        )
    if dynamo is None:
        raise UsageProblem("--dynamo-frontend needs Dynamo's discovery", DYNAMO_HINT)
    return host, number


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _pool(
    options: GlobalOptions,
    name: str | None,
    events: int | None,
    replay: int | None,
    role_label: str,
    domains: list[str] | None,
) -> Any:
    """The PoolConfig of the options; None without a pool."""
    from dynctl.serving.routing.config import PoolConfig

    if name is None:
        return None
    labels: dict[str, str] = {}
    for text in domains or _DOMAINS:
        domain, equals, label = text.partition("=")
        if not domain or not equals or not label:
            raise UsageProblem(
                f"--pod-domain {text[:200]}: expected DOMAIN=LABEL, for example "
                "rack=example.com/rack"
            )
        labels[domain] = label
    return PoolConfig(options, name, events, replay, role_label, labels)
