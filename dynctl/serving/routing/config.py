"""FrontendConfig: the settings of ``serve frontend`` and ``serve router``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dynctl.base.options import GlobalOptions
from dynctl.wire.dynamo.discovery import EndpointId
from router_core import RouterConfig

#: Ranks up to which every decision lists its rejections and is kept whole: in a fleet of this size
#: the cost is negligible.
SMALL_FLEET = 16
#: Memory of a distinct block in the index where prompts have one block; where they are long it is
#: a quarter of that (`make bench BENCH=index`).
INDEX_BYTES_PER_BLOCK = 200
#: Tokens in a KV block of workers for which neither they nor the user specify it.
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one frontend. Sizes in bytes, times in seconds.

    ``body_bytes`` bounds one request's body, ``all_bodies_bytes`` the bodies of all requests in
    flight; a body must arrive within ``body_s``. A header must be complete within ``header_s``, and
    a connection between requests is closed after ``keep_alive_s``. A client that reads nothing of
    its answer for ``unread_s`` is disconnected. ``peer_connections``: the connections of one
    address; 0: three quarters of those for clients. An engine must send its
    first output, and a prefill hop its response, within ``first_byte_s``; streams and prefill hops
    within ``first_output_s``, None: as measured (see `dynctl.serving.engines.ejection`). A stream
    may pause for ``idle_s`` and has at most ``stream_answer_bytes``. ``attempts`` counts dispatches
    of one request, the first included. ``stream_silence_s`` bounds the pause between two messages
    of a gateway about a request that was routed. ``model_return_s``: how long after its last worker
    left a model is answered as unavailable, not as unknown.
    """

    body_bytes: int = 16 * 1024 * 1024
    all_bodies_bytes: int = 512 * 1024 * 1024
    body_s: float = 30.0
    header_bytes: int = 16 * 1024
    header_s: float = 10.0
    keep_alive_s: float = 75.0
    unread_s: float = 60.0
    peer_connections: int = 0
    in_flight: int = 8192
    connect_s: float = 3.0
    first_byte_s: float = 300.0
    first_output_s: float | None = None
    idle_s: float = 300.0
    prefill_answer_bytes: int = 32 * 1024 * 1024
    unary_answer_bytes: int = 64 * 1024 * 1024
    stream_answer_bytes: int = 1024 * 1024 * 1024
    attempts: int = 3
    stream_silence_s: float = 3600.0
    drain_s: float = 30.0
    shutdown_delay_s: float = 0.0
    workers: int = 4096
    model_return_s: float = 60.0


@dataclass(frozen=True, slots=True)
class EjectionLimits:
    """``failures`` in a row eject an engine, 0: never. The first pause is ``pause_s`` seconds, each
    further one twice the last, at most ``max_pause_s``."""

    failures: int = 5
    pause_s: float = 5.0
    max_pause_s: float = 300.0


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """How engines are probed: every ``interval_s``, ejected after ``failures`` failures.

    A refused connection ejects at once, with any value of ``failures``. ``ejection``: how requests
    that fail eject an engine that answers its probes. Where fewer than ``panic_threshold`` (0..1)
    of a model's workers of one role are well, those that are only in doubt get requests again.
    """

    path: str = "/health"
    interval_s: float = 2.0
    timeout_s: float = 2.0
    failures: int = 2
    ejection: EjectionLimits = field(default_factory=EjectionLimits)
    panic_threshold: float = 0.5


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """How routers of one fleet reach each other (:mod:`dynctl.serving.routing.replicas`).

    ``bind``: the ZMQ address of this router (None: no ZMQ); ``peers``: those of the others.
    ``nats``: servers that all of them use instead; only routers with the same ``group`` share load.
    """

    bind: str | None = None
    peers: tuple[str, ...] = ()
    nats: str | None = None
    group: str = "default"


@dataclass(frozen=True, slots=True)
class DynamoConfig:
    """The planes of a Dynamo deployment whose workers a frontend serves.

    ``planes`` name the discovery backend and the addresses. ``namespace`` is Dynamo's, ``PREFIX*``
    or None for all. ``cache`` is the directory for the files of models. ``response_port``: where
    workers' responses arrive; 0: a free port. ``migration_limit``: how often a response may go on
    with another worker, None: as the model's card says; it does not from ``migration_max_tokens``
    tokens of prompt and output on. ``event_plane``: where replica sync publishes (``zmq`` or
    ``nats``), None: as ``DYN_EVENT_PLANE`` says. ``endpoint``: only its workers, for a router that
    registers as a component of Dynamo and listens at ``rpc_host`` for requests; None: all, for a
    frontend. ``answers_by_text``: reasoning and calls of tools are found in the text of an answer
    however it is cut into tokens; False: piece by piece, as a Dynamo 1.6 frontend finds them.
    """

    planes: GlobalOptions
    namespace: str | None
    cache: Path
    response_port: int = 0
    migration_limit: int | None = None
    migration_max_tokens: int | None = None
    event_plane: str | None = None
    endpoint: EndpointId | None = None
    rpc_host: str = "127.0.0.1"
    answers_by_text: bool = True


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The InferencePool whose pods are the workers of an endpoint picker.

    ``cluster`` names the cluster and its namespace. ``events_port`` and ``replay_port``: where the
    first rank of each pod publishes KV events and answers replays, None: not at all; those of the
    next target port are one higher each. ``role_label`` is the pod label with the role;
    ``domains``: topology domain -> pod label.
    """

    cluster: GlobalOptions
    name: str
    events_port: int | None = None
    replay_port: int | None = None
    role_label: str = "llm-d.ai/role"
    domains: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PickerConfig:
    """The listeners of an endpoint picker and where its workers come from.

    ``tls`` without ``cert`` and ``key``: a certificate is made at the start. ``health_port`` None:
    health is on ``port`` alone. ``pool`` None: the workers are engines of the options, or those of
    a Dynamo deployment. These have no HTTP address: ``dynamo_frontend`` is the (host, port) of a
    Dynamo frontend that sends each request to the worker of its headers; host "": such a frontend
    runs beside each worker.
    """

    host: str = "127.0.0.1"
    port: int = 9002
    health_port: int | None = 9003
    tls: bool = True
    cert: Path | None = None
    key: Path | None = None
    pool: PoolConfig | None = None
    dynamo_frontend: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """Settings of a frontend process.

    ``workers`` are worker specs as on the command line (:mod:`dynctl.serving.engines.worker_spec`).
    ``model_name`` is the model of workers that do not report one, ``block_size`` their tokens in a
    KV block (None: ``DEFAULT_BLOCK_SIZE``). ``log_decisions`` is one of
    off, winner, all; ``log_format`` text or json. ``index_memory_bytes`` bounds the
    prefix index, ``decision_memory_bytes`` the decisions
    kept for ``why``. ``api_token``, if set, is required for writes and for routing details;
    ``api_keys`` and those of ``api_key_file``, if any, for inference, each with the limits
    ``key_requests_per_minute`` and ``key_concurrency`` (0: none). With ``isolate_keys`` keys share
    no cached blocks with each other; without ``key_details`` their answers do not show what was
    cached; the file may say otherwise for a key, as about ``client_fields``, the fields of
    `dynctl.wire.directions.DIRECTIONS` that clients may send. ``engine_api_key`` is sent to the
    engines of ``workers`` and ``workers_file``. ``tls_cert`` and ``tls_key`` are PEM files;
    ``unix_socket`` is a second listener, for operators.
    ``router_url``: the router process that decides and knows the workers, which ``router_token``
    proves an operator to; ``share_port``: other frontends of this host may listen on the same port.
    ``process``: the name of this process in its log lines, where one command started several;
    ``metrics_url``: where the metrics of all of them are, for ``/metrics``; ``processes_url``:
    where their states are, for conditions.
    ``otlp_endpoint``: the collector of traces (None: no traces), which get the share
    ``otlp_sample_ratio`` of requests.
    ``compressed_requests`` accepts bodies with a Content-Encoding.
    ``replicas``: with which other routers load is shared; None: with none. ``index_peers``: URLs
    of routers whose index this one begins with; ``api_token`` is sent to them.
    ``select_service_port`` and ``slot_tracker_port``: where ``serve router`` answers as Dynamo's
    services of these names; None: nowhere.
    ``trust_template``: the chat template of ``model_path`` runs without a meter.
    ``tokenizer``: which encoder of ``model_path`` serves (see `dynctl.tokenization.encoders`).
    ``dynamo``: the deployment whose workers are served; None: those of ``workers``.
    ``record``: the file in which the process records itself, of at most ``record_bytes``; then
    another one begins, and one older file is kept. None: no recording.
    ``picker``: what ``serve epp`` has beside the rest; None: another command.
    ``origins`` has the origin of each router setting (``flag``, ``env``, ``preset``, ...).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    router: RouterConfig = field(default_factory=RouterConfig)
    preset: str = "dynamo-1.6"
    origins: Mapping[str, str] = field(default_factory=dict)
    model_name: str | None = None
    model_path: Path | None = None
    trust_template: bool = False
    tokenizer: Literal["auto", "fast", "exact"] = "exact"
    workers: tuple[str, ...] = ()
    workers_file: Path | None = None
    workers_file_poll_s: float = 1.0
    block_size: int | None = None
    router_url: str | None = None
    router_token: str | None = field(default=None, repr=False)
    share_port: bool = False
    api_token: str | None = field(default=None, repr=False)
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None
    key_requests_per_minute: int = 0
    key_concurrency: int = 0
    isolate_keys: bool = False
    key_details: bool = True
    client_fields: frozenset[str] = frozenset()
    engine_api_key: str | None = field(default=None, repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    unix_socket: Path | None = None
    compressed_requests: bool = False
    otlp_endpoint: str | None = None
    otlp_sample_ratio: float = 1.0
    admin_api: bool = True
    log_decisions: str = "off"
    log_format: str = "text"
    log_level: str = "info"
    decision_memory_bytes: int = 64 * 1024 * 1024
    index_memory_bytes: int = 4 * 1024 * 1024 * 1024
    limits: Limits = field(default_factory=Limits)
    health: HealthConfig = field(default_factory=HealthConfig)
    system_host: str = "127.0.0.1"
    system_port: int | None = None
    announce: bool = False
    start_s: float | None = None
    replicas: ReplicaConfig | None = None
    index_peers: tuple[str, ...] = ()
    select_service_port: int | None = None
    slot_tracker_port: int | None = None
    process: str | None = None
    metrics_url: str | None = None
    processes_url: str | None = None
    dynamo: DynamoConfig | None = None
    record: Path | None = None
    record_bytes: int = 1024 * 1024 * 1024
    picker: PickerConfig | None = None
