"""The options of ``serve`` about access: keys, TLS, limits of clients and engines, and replicas."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynctl.base.errors import UsageProblem, without_credentials
from dynctl.base.files import read_file
from dynctl.cli.option_groups import fields_of
from dynctl.cli.shared_options import Needs, seconds

if TYPE_CHECKING:
    from dynctl.serving.routing.config import HealthConfig, ReplicaConfig

_ACCESS = "Keys, TLS and sockets"
_CLIENTS = "Limits of clients"
_ENGINES = "Limits of engines"
_TRACES = "Traces"
_REPLICAS = "Other routers of the fleet"
_GROUP = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST_URL = 1024
_LONGEST_SECRET = 16 * 1024
_SECONDS: dict[str, Any] = {"metavar": "DURATION", "parser": seconds(0.1)}


def _file(flag: str, help: str, panel: str, metavar: str = "FILE") -> Any:
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=panel)


def _count(flag: str, help: str) -> Any:
    return typer.Option(
        flag,
        metavar="N",
        min=0,
        max=1_000_000,
        help=f"{help}; 0: no limit.",
        rich_help_panel=_ACCESS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessOptions:
    """What the options of access are set to; None and 0: not set."""

    admin_token_file: Annotated[
        Path | None, _file("--admin-token-file", "File with the operators' token.", _ACCESS)
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="DYNCTL_API_KEY",
            help="A key for clients of inference (repeatable). Prefer the variable or "
            "--api-key-file, which the process list does not show.",
            rich_help_panel=_ACCESS,
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        _file(
            "--api-key-file",
            "Keys, one a line, then name=, requests-per-minute= and concurrency= where needed; "
            "loaded again when it changes.",
            _ACCESS,
        ),
    ] = None
    key_requests_per_minute: Annotated[
        int,
        _count(
            "--key-requests-per-minute",
            "Requests that each key may start in a minute, in each of --processes",
        ),
        Needs(("api_key", "api_key_file")),
    ] = 0
    key_concurrency: Annotated[
        int,
        _count(
            "--key-concurrency",
            "Requests of each key that may run at the same time, in each of --processes",
        ),
        Needs(("api_key", "api_key_file")),
    ] = 0
    isolate_keys: Annotated[
        bool,
        typer.Option(
            "--isolate-keys",
            help="Each key has a cache of its own: a salt keeps its blocks apart from those of "
            "other keys. isolate= of a key in the file counts first.",
            rich_help_panel=_ACCESS,
        ),
        Needs(("api_key", "api_key_file"), not_on={"serve router": "set it on the frontends"}),
    ] = False
    hide_key_details: Annotated[
        bool,
        typer.Option(
            "--hide-key-details",
            help="Answers to clients with a key show no workers, no times of the router and no "
            "cached tokens. details= of a key in the file counts first.",
            rich_help_panel=_ACCESS,
        ),
        Needs(("api_key", "api_key_file"), not_on={"serve router": "set it on the frontends"}),
    ] = False
    client_fields: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD,..",
            help="Fields that direct engines, such as priority or kv_transfer_params, which "
            "clients may send (repeatable). client-fields= of a key in the file counts first.",
            rich_help_panel=_ACCESS,
        ),
        Needs(not_on={"serve router": "set it on the frontends"}),
    ] = None
    engine_api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="DYNCTL_ENGINE_API_KEY",
            help="Key for engines that need one. Prefer the variable or --engine-api-key-file; "
            "api-key-env= of a worker names the variable of its own key.",
            rich_help_panel=_ACCESS,
        ),
        Needs(dynamo=False),
    ] = None
    engine_api_key_file: Annotated[
        Path | None,
        _file("--engine-api-key-file", "File with the key for engines.", _ACCESS),
        Needs(dynamo=False),
    ] = None
    tls_cert: Annotated[
        Path | None,
        _file(
            "--tls-cert",
            "Certificate chain (PEM) for https; loaded again when it changes.",
            _ACCESS,
        ),
    ] = None
    tls_key: Annotated[
        Path | None, _file("--tls-key", "Private key (PEM) of the certificate.", _ACCESS)
    ] = None
    unix_socket: Annotated[
        Path | None,
        _file(
            "--unix-socket",
            "A second listener for operators: only this user can open it.",
            _ACCESS,
            metavar="PATH",
        ),
    ] = None
    system_host: Annotated[
        str,
        typer.Option(
            metavar="HOST",
            envvar="DYN_SYSTEM_HOST",
            help="Listen address of --system-port; a kubelet needs 0.0.0.0.",
            rich_help_panel=_ACCESS,
        ),
        Needs(("system_port",), unset=-1),
    ] = "127.0.0.1"
    compressed_requests: Annotated[
        bool,
        typer.Option(
            "--compressed-requests",
            help="Accept gzip and deflate bodies; their limit holds for the expanded body.",
            rich_help_panel=_CLIENTS,
        ),
    ] = False
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="DYNCTL_OTLP_ENDPOINT",
            help="Send a trace of each request to this OpenTelemetry collector (OTLP over "
            "HTTP), for example http://127.0.0.1:4318; needs dynctl[otlp].",
            rich_help_panel=_TRACES,
        ),
    ] = None
    otlp_sample_ratio: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            envvar="DYNCTL_OTLP_SAMPLE_RATIO",
            min=0,
            max=1,
            help="Share of requests that begin a trace; one with a traceparent is traced if "
            "its caller is.",
            rich_help_panel=_TRACES,
        ),
        Needs(("otlp_endpoint",)),
    ] = 1.0
    header_timeout: Annotated[
        float,
        typer.Option(
            help="Time from a connection, or from the first byte, to a complete header.",
            rich_help_panel=_CLIENTS,
            **_SECONDS,
        ),
    ] = 10.0
    keep_alive_timeout: Annotated[
        float,
        typer.Option(
            help="Time that a connection stays open between two requests.",
            rich_help_panel=_CLIENTS,
            **_SECONDS,
        ),
    ] = 75.0
    peer_connections: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=1 << 20,
            help="Connections of one client address; 0: three quarters of those for clients, "
            "which are half of the descriptors.",
            rich_help_panel=_CLIENTS,
        ),
    ] = 0
    first_byte_timeout: Annotated[
        float | None,
        typer.Option(
            help="Time to the first output of a stream or a prefill hop; then another engine "
            "gets the request. Default: from measured times, at least 10 s.",
            rich_help_panel=_ENGINES,
            **_SECONDS,
        ),
        Needs(not_on={"serve router": "set it on the frontends"}),
    ] = None
    idle_timeout: Annotated[
        float,
        typer.Option(
            help="Longest pause in an engine's stream.", rich_help_panel=_ENGINES, **_SECONDS
        ),
    ] = 300.0
    eject_after: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=1_000_000,
            help="Failed requests in a row after which an engine gets none for a pause; "
            "0: never. One request without any output ejects at once.",
            rich_help_panel=_ENGINES,
        ),
    ] = 5
    eject_pause: Annotated[
        float,
        typer.Option(
            help="First pause; one request on trial follows, and twice the pause if it fails.",
            rich_help_panel=_ENGINES,
            **_SECONDS,
        ),
        Needs(("eject_after",), unset=0),
    ] = 5.0
    eject_max_pause: Annotated[
        float,
        typer.Option(help="Longest pause.", rich_help_panel=_ENGINES, **_SECONDS),
        Needs(("eject_after",), unset=0),
    ] = 300.0
    panic_threshold: Annotated[
        str,
        typer.Option(
            metavar="PERCENT",
            help="Share of a model's workers that should be healthy; below it, workers whose "
            "probes or requests failed get requests too; 0%: never.",
            rich_help_panel=_ENGINES,
        ),
    ] = "50%"
    router_replica_bind: Annotated[
        str | None,
        typer.Option(
            metavar="PORT|ADDRESS",
            envvar="DYNCTL_ROUTER_REPLICA_BIND",
            help="With --router-replica-sync: where other routers read this one's load over "
            "ZMQ. PORT: only from this host; tcp://HOST:PORT: from others too.",
            rich_help_panel=_REPLICAS,
        ),
        Needs(without=("router",)),
    ] = None
    router_replica_peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            envvar="DYNCTL_ROUTER_REPLICA_PEERS",
            help="The --router-replica-bind of another router, tcp://HOST:PORT (repeatable).",
            rich_help_panel=_REPLICAS,
        ),
        Needs(without=("router",)),
    ] = None
    router_replica_nats: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="DYNCTL_ROUTER_REPLICA_NATS",
            help="Share load over NATS in place of ZMQ: nats://HOST:PORT, several with commas.",
            rich_help_panel=_REPLICAS,
        ),
        Needs(without=("router",)),
    ] = None
    router_replica_group: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            envvar="DYNCTL_ROUTER_REPLICA_GROUP",
            help="Over NATS only routers of one group share load.",
            rich_help_panel=_REPLICAS,
        ),
        Needs(without=("router",)),
    ] = "default"
    index_peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            envvar="DYNCTL_INDEX_PEERS",
            help="Begin with the index of this frontend or router, and read from the engines "
            "only what came after it (repeatable: the first that answers). It gets the admin "
            "token.",
            rich_help_panel=_REPLICAS,
        ),
        Needs(dynamo=False, without=("router",)),
    ] = None


_OF_REPLICAS = ("router_replica_bind", "router_replica_peer", "router_replica_nats")


_FIELDS = (
    "api_key_file",
    "key_requests_per_minute",
    "key_concurrency",
    "isolate_keys",
    "tls_cert",
    "tls_key",
    "unix_socket",
    "system_host",
    "compressed_requests",
    "otlp_sample_ratio",
)


#: The options of a serving process.
ACCESS = fields_of(AccessOptions)

#: Those of a process that only operators use.
OPERATOR_ACCESS = fields_of(
    AccessOptions,
    without={option.name for option in fields(AccessOptions)}
    - {
        *("admin_token_file", "tls_cert", "tls_key", "unix_socket", "system_host"),
        *("header_timeout", "keep_alive_timeout", "peer_connections"),
    },
)

#: An endpoint picker has listeners of its own, and its gateway knows the clients.
PICKER_ACCESS = fields_of(
    AccessOptions,
    without=(
        *("api_key", "api_key_file", "key_requests_per_minute", "key_concurrency"),
        *("isolate_keys", "hide_key_details"),
        *("tls_cert", "tls_key", "compressed_requests", "first_byte_timeout", "idle_timeout"),
    ),
)


def access_settings(access: AccessOptions, token: str | None) -> dict[str, Any]:
    """The options that are fields of FrontendConfig. ``token``: the operators', as typed."""
    expect_pair(access.tls_cert, access.tls_key)
    endpoint = access.otlp_endpoint
    if endpoint is not None:
        from dynctl.adapters.otlp import collector_url, require_opentelemetry

        endpoint = collector_url(endpoint)
        require_opentelemetry()
    return {
        "otlp_endpoint": endpoint,
        "api_token": secret("--admin-token", token, access.admin_token_file),
        "api_keys": tuple(access.api_key or ()),
        "key_details": not access.hide_key_details,
        "client_fields": client_fields(access.client_fields or ()),
        "engine_api_key": secret(
            "--engine-api-key", access.engine_api_key, access.engine_api_key_file
        ),
        **{name: getattr(access, name) for name in _FIELDS},
    }


def client_fields(given: Sequence[str]) -> frozenset[str]:
    """The fields that clients may send, of several lists with commas; raises UsageProblem."""
    from dynctl.wire.directions import DIRECTIONS

    named = frozenset(name for text in given for name in text.split(",") if name)
    unknown = sorted(named - DIRECTIONS.keys())
    if unknown:
        raise UsageProblem(
            f"--client-fields {unknown[0][:64]}: expected one of {', '.join(DIRECTIONS)}",
            "other fields need no permission",
        )
    return named


def expect_pair(cert: Path | None, key: Path | None) -> None:
    """Raise UsageProblem for a certificate without its key, and for a key alone."""
    if (cert is None) != (key is None):
        given, missing = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise UsageProblem(f"{given} needs {missing}", "set both, or none")


def secret(flag: str, given: str | None, file: Path | None) -> str | None:
    """A secret from its flag or its file, which may end with a line break."""
    if file is None:
        return given
    if given is not None:
        raise UsageProblem(f"{flag} and {flag}-file: set only one of them")
    text = read_file(file, _LONGEST_SECRET)
    if len(text) > _LONGEST_SECRET:
        raise UsageProblem(
            f"{flag}-file {file}: larger than {_LONGEST_SECRET:,} bytes; expected one line",
            "make one with: openssl rand -hex 32",
        )
    secret = text.decode("utf-8", "replace").strip()
    if not secret or not secret.isascii() or not secret.isprintable():
        raise UsageProblem(
            f"{flag}-file {file}: expected one line of printable ASCII characters",
            "make one with: openssl rand -hex 32",
        )
    return secret


def limits_of(access: AccessOptions) -> dict[str, Any]:
    """The options that are fields of Limits."""
    return {
        "header_s": access.header_timeout,
        "keep_alive_s": access.keep_alive_timeout,
        "peer_connections": access.peer_connections,
        "first_output_s": access.first_byte_timeout,
        "idle_s": access.idle_timeout,
    }


def health_of(access: AccessOptions) -> "HealthConfig":
    """The options about engines that fail; raises UsageProblem."""
    from dynctl.serving.routing.config import EjectionLimits, HealthConfig

    pause, longest = access.eject_pause, access.eject_max_pause
    if longest < pause:
        raise UsageProblem(
            f"--eject-max-pause {longest:g}: expected at least --eject-pause, which is {pause:g}"
        )
    return HealthConfig(
        ejection=EjectionLimits(access.eject_after, pause, longest),
        panic_threshold=_share("--panic-threshold", access.panic_threshold),
    )


def replicas_of(access: AccessOptions, sync: bool) -> "ReplicaConfig | None":
    """With which routers load is shared, None where ``sync`` is off; raises UsageProblem."""
    from dynctl.serving.routing.config import ReplicaConfig

    bind, peers, nats = (getattr(access, name) for name in _OF_REPLICAS)
    group = access.router_replica_group
    given = [name for name in _OF_REPLICAS if getattr(access, name)]
    if group != "default" and not nats:
        raise UsageProblem(
            f"--router-replica-group {group[:64]} has no effect without --router-replica-nats",
            "over ZMQ the listed peers are the group",
        )
    if not sync:
        if given:
            flag = f"--{given[0].replace('_', '-')}"
            raise UsageProblem(f"{flag} needs --router-replica-sync", "set both, or none")
        return None
    if nats and (bind or peers):
        raise UsageProblem(
            "--router-replica-nats and --router-replica-bind or --router-replica-peer: "
            "load is shared over NATS or over ZMQ",
            "set only one of them on all routers",
        )
    if peers and not bind:
        raise UsageProblem(
            "--router-replica-peer needs --router-replica-bind: the other routers read there",
            "for example --router-replica-bind 5560",
        )
    if not _GROUP.fullmatch(group):
        raise UsageProblem(
            f"--router-replica-group {group[:64]!r}: expected at most 64 letters, digits, _ and -"
        )
    if not given:
        return None
    return ReplicaConfig(
        None if bind is None else _zmq_address(bind), tuple(peers or ()), nats, group
    )


def index_peers(given: Sequence[str] | None, flag: str = "--index-peer") -> tuple[str, ...]:
    """The addresses of routers whose index this one begins with; raises UsageProblem."""
    for url in given or ():
        if not re.fullmatch(r"https?://[^\s/?#@]+/?", url) or len(url) > _LONGEST_URL:
            raise UsageProblem(
                f"{flag} {without_credentials(url)[:200]}: expected http://HOST:PORT or https://.."
            )
    return tuple(given or ())


def _zmq_address(text: str) -> str:
    """The ZMQ address of ``PORT``, ``tcp://HOST:PORT`` or ``ipc:///PATH``."""
    given = text.strip()
    address = f"tcp://127.0.0.1:{given}" if given.isascii() and given.isdigit() else given
    if address.startswith("ipc://") and len(address) > len("ipc://"):
        return address
    port = address.rpartition(":")[2]
    if not address.startswith("tcp://") or not port.isascii() or not port.isdigit():
        port = ""
    if not port or int(port[:6]) > 65535:
        raise UsageProblem(
            f"--router-replica-bind {text[:200]}: expected a port from 0 to 65535, tcp://HOST:PORT "
            "or ipc:///PATH"
        )
    return address


def _share(flag: str, text: str) -> float:
    """A percentage as a number from 0 to 1; the sign may be left out."""
    digits = text.strip().removesuffix("%").strip()
    if digits.isascii() and digits.isdigit() and int(digits[:4]) <= 100:
        return int(digits) / 100
    raise UsageProblem(f"{flag} {text[:40]}: expected a percentage from 0% to 100%")
