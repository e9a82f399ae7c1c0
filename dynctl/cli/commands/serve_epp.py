"""`dynctl serve epp`: the router as the endpoint picker of a gateway."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    DynamoOptions,
)
from dynctl.cli.option_groups import fields_of, with_options
from dynctl.cli.router_flags import ROUTER_FLAGS
from dynctl.cli.serving_options import SERVING, ServingOptions, frontend_config
from dynctl.cli.shared_options import Needs, seconds, size_of

#: HTTP status for a request that is shed, as gateways expect it.
_SHED = 429
#: Topology domain -> the label of pods that Kubernetes copies from their nodes.
_DOMAINS = ("zone=topology.kubernetes.io/zone", "region=topology.kubernetes.io/region")


DynamoFrontend = Annotated[
    str | None,
    typer.Option(
        "--dynamo-frontend",
        metavar="[HOST]:PORT",
        envvar="DYNCTL_DYNAMO_FRONTEND",
        help="With --discovery: where the gateway sends requests, a Dynamo frontend with "
        "--router-mode direct. :PORT is one beside each worker, at the worker's address.",
        rich_help_panel=DYNAMO,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """What the gateway connects to, and the bounds of its requests."""

    host: Annotated[
        str,
        typer.Option(
            metavar="HOST",
            envvar="DYNCTL_EPP_HOST",
            help="Listen address for gateways and health; 0.0.0.0 accepts connections from other "
            "hosts.",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            help="ext_proc port for gateways (gRPC); 0: a free one.",
        ),
    ] = 9002
    health_port: Annotated[
        int,
        typer.Option(
            metavar="PORT",
            min=-1,
            max=65535,
            help="gRPC health, without TLS; 0: a free one, -1: on --port alone.",
        ),
    ] = 9003
    tls: Annotated[
        bool,
        typer.Option(
            "--tls/--no-tls",
            help="TLS for gateways. Without --tls-cert the certificate is made at the start.",
        ),
    ] = True
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Certificate chain (PEM) for gateways; loaded again when it changes.",
        ),
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Private key (PEM) of the certificate.")
    ] = None
    body_limit: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest body of a request; larger ones get 413.")
    ] = "16MiB"
    stream_timeout: Annotated[
        float,
        typer.Option(
            metavar="DURATION",
            parser=seconds(1.0),
            help="Longest time without a message of the gateway about a request.",
        ),
    ] = 3600.0

    def expect_valid(self) -> None:
        """Raise UsageProblem for values that do not fit together."""
        expect_pair(self.tls_cert, self.tls_key)
        if self.tls_cert is not None and not self.tls:
            raise UsageProblem("--no-tls and --tls-cert: set only one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """The pods of an InferencePool as workers."""

    pool: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            envvar="DYNCTL_POOL",
            help="An InferencePool of the cluster, in the namespace of -n: its ready pods are the "
            "workers, each of its targetPorts a worker of its own.",
        ),
    ] = None
    pod_kv_events: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=1,
            max=65535,
            help="ZMQ port of the pods' KV events; that of the next targetPort is one higher. "
            "[default: from the engine, where it reports it]",
        ),
        Needs(("pool",)),
    ] = None
    pod_replay: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", min=1, max=65535, help="ZMQ port of the pods' replay sockets, likewise."
        ),
        Needs(("pool",)),
    ] = None
    pod_role_label: Annotated[
        str,
        typer.Option(
            metavar="LABEL",
            help="Pod label with the role: prefill or decode; any other value: both.",
        ),
        Needs(("pool",)),
    ] = "llm-d.ai/role"
    pod_domain: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DOMAIN=LABEL",
            help=f"A topology domain and the pod label with its value (repeatable). "
            f"[default: {', '.join(_DOMAINS)}]",
        ),
        Needs(("pool",)),
    ] = None

    def config(self, options: GlobalOptions) -> Any:
        """The PoolConfig; None without a pool."""
        from dynctl.serving.routing.config import PoolConfig

        if self.pool is None:
            return None
        labels: dict[str, str] = {}
        for text in self.pod_domain or _DOMAINS:
            domain, equals, label = text.partition("=")
            if not domain or not equals or not label:
                raise UsageProblem(
                    f"--pod-domain {text[:200]}: expected DOMAIN=LABEL, for example "
                    "rack=example.com/rack"
                )
            labels[domain] = label
        return PoolConfig(
            options,
            self.pool,
            self.pod_kv_events,
            self.pod_replay,
            self.pod_role_label,
            labels,
        )


@with_options(
    gateway=fields_of(GatewayOptions, panel="Gateway"),
    pods=fields_of(PoolOptions, panel="Workers of an InferencePool"),
    beside_dynamo=fields_of(DynamoOptions, only=("namespace_prefix", "event_plane"), panel=DYNAMO),
    serving=SERVING,
    access=PICKER_ACCESS,
    router_flags=ROUTER_FLAGS,
)
def epp(
    options: GlobalOptions,
    *,
    gateway: GatewayOptions,
    http_host: Annotated[
        str,
        typer.Option(
            metavar="HOST",
            envvar="DYN_HTTP_HOST",
            help="Listen address of metrics and of the operators' HTTP.",
            rich_help_panel="Listening",
        ),
    ] = "127.0.0.1",
    http_port: Annotated[
        int,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            envvar="DYN_HTTP_PORT",
            help="Port of metrics and of the operators' HTTP; 0: a free one.",
            rich_help_panel="Listening",
        ),
    ] = 9090,
    pods: PoolOptions,
    dynamo_frontend: DynamoFrontend = None,
    beside_dynamo: DynamoOptions,
    serving: ServingOptions,
    access: AccessOptions,
    router_flags: Mapping[str, str | bool],
) -> int:
    """Run the router as the endpoint picker of a gateway (Envoy ext_proc).

    For example: dynctl serve epp --pool my-pool -n inference --model-path DIR --host 0.0.0.0

    The gateway sends each request here, and gets the worker to send it to
    (docs/gateway.md). With --discovery the workers are those of a Dynamo deployment.
    """
    from dynctl.serving.epp.process import run_picker
    from dynctl.serving.routing.config import PickerConfig

    gateway.expect_valid()
    own = bool(serving.worker or serving.workers_file or pods.pool)
    dynamo = beside_dynamo.config(options, own=own)
    direct = _direct_frontend(dynamo_frontend, dynamo, options, own=own)
    config = frontend_config(
        router_flags,
        access,
        serving,
        dynamo=dynamo,
        host=http_host,
        port=http_port,
        picker=PickerConfig(
            gateway.host,
            gateway.port,
            None if gateway.health_port == -1 else gateway.health_port,
            gateway.tls,
            gateway.tls_cert,
            gateway.tls_key,
            pods.config(options),
            direct,
        ),
    )
    if config.origins.get("overload_status_code", "").partition(" ")[0] not in ("flag", "env"):
        config = replace(
            config,
            router=config.router.with_values({"overload_status_code": _SHED}),
            origins={**config.origins, "overload_status_code": "serve epp"},
        )
    size = size_of("--body-limit", gateway.body_limit)
    if not 1024 <= size <= 1 << 30:
        raise UsageProblem(f"--body-limit {gateway.body_limit}: expected 1KiB to 1GiB")
    limits = replace(config.limits, body_bytes=size, stream_silence_s=gateway.stream_timeout)
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
