"""Read and write entries of Dynamo's discovery plane: instances, cards, event channels, sources.

Keys are Dynamo's logical ones, the same in every backend, as in
``v1/instances/NAMESPACE/COMPONENT/ENDPOINT/ID`` with the id in lower-case hex. Values are JSON. An
entry that cannot be read becomes :class:`Malformed`, so that one bad worker does not hide others.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple

import msgspec

INSTANCES: Final = "v1/instances/"
CARDS: Final = "v1/mdc/"
EVENT_CHANNELS: Final = "v1/event_channels/"
EVENT_SOURCES: Final = "v1/event_sources/"
PREFIX: Final = "v1/"
"""The prefix of all keys that Dynamo registers."""

MAX_VALUE_BYTES: Final = 4 * 1024 * 1024

KV_EVENTS: Final = "kv-events"
KV_METRICS: Final = "kv_metrics"
ACTIVE_SEQUENCES: Final = "active_sequences_events"


class EndpointId(NamedTuple):
    """The address of an endpoint, ``namespace.component.name``."""

    namespace: str
    component: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}.{self.component}.{self.name}"


@dataclass(frozen=True, slots=True)
class Instance:
    """An endpoint of one process. ``transport`` is ``tcp``, ``nats_tcp`` or an unknown one.

    ``address``: for tcp ``HOST:PORT/ID/NS/COMPONENT/ENDPOINT`` (what follows the first ``/`` is the
    request plane's path), for nats the subject.
    """

    endpoint: EndpointId
    instance_id: int
    transport: str
    address: str
    device_type: str | None = None
    codec: str = "json"


@dataclass(frozen=True, slots=True)
class CardFile:
    """A model file in a card: a URL of the worker, or a path on its disk.

    ``kind`` is Dynamo's name of the format (``hf_tokenizer_json``, ``hf_chat_template``, ...).
    ``checksum`` has the form ``blake3:HEX``, ``size`` is in bytes.
    """

    path: str
    checksum: str | None = None
    size: int | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A worker's model deployment card.

    ``worker_type`` is ``aggregated``, ``prefill`` or ``decode``; older cards have none. ``needs``
    lists alternatives of worker types that must be registered too. ``files``: the card's own names
    (``tokenizer``, ``prompt_formatter``, ...) -> file. ``router_config`` is None if the worker does
    not advertise one. ``runtime_config`` is as published, not validated. ``context_length`` is the
    longest prompt with its output: the engine's limit, else the model's. ``aliases`` are other
    names of the model; ``lora`` is the adapter that the card registers on the same worker.
    ``version`` is equal for cards that a frontend accepts into one set of workers.
    ``migration_limit``: how often a response may go on with another worker.
    ``unknown_fields`` are set, and this version of dynctl does not know what they do.
    """

    endpoint: EndpointId
    instance_id: int
    name: str
    block_size: int | None
    worker_type: str | None = None
    needs: tuple[tuple[str, ...], ...] = ()
    model_type: str = ""
    model_input: str = ""
    source_path: str | None = None
    context_length: int | None = None
    runtime_config: Mapping[str, Any] = field(default_factory=dict)
    router_config: Mapping[str, Any] | None = None
    files: Mapping[str, CardFile] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    lora: str | None = None
    version: str = ""
    unknown_fields: tuple[str, ...] = ()
    migration_limit: int = 0


@dataclass(frozen=True, slots=True)
class ZmqTransport:
    """A PUB socket to subscribe to."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class NatsTransport:
    """Core NATS: the subject is ``subject_prefix.TOPIC``."""

    subject_prefix: str


@dataclass(frozen=True, slots=True)
class JetStreamTransport:
    """A stream of NATS JetStream, which keeps the events of a component's workers for an hour.

    Dynamo 1.0 to 1.3 write it with ``--durable-kv-events``; no entry of the discovery plane names
    it (:func:`durable_events`).
    """

    stream: str


@dataclass(frozen=True, slots=True)
class EventChannel:
    """The transport of one publisher of one topic. ``publisher_id`` is not a worker id.

    Before Dynamo 1.4 a channel belongs to a component (``scope.name`` is empty) or to a namespace
    (``scope.component`` too), and no entry names its worker: only its events do.
    """

    scope: EndpointId
    topic: str
    publisher_id: int
    transport: ZmqTransport | NatsTransport | JetStreamTransport


@dataclass(frozen=True, slots=True)
class EventSource:
    """The worker rank of a publisher, and the instance that answers requests for missed events."""

    scope: EndpointId
    topic: str
    publisher_id: int
    worker_id: int
    dp_rank: int
    recovery: Instance | None = None


def durable_events(card: ModelCard) -> EventChannel | None:
    """The stream of a worker that runs with ``--durable-kv-events``; None for other workers.

    Observed with Dynamo 1.0.2 to 1.3.1: such a worker has no local indexer. Cards of later versions
    have ``kv_event_publishing_enabled`` instead.
    """
    runtime = card.runtime_config
    later = "kv_event_publishing_enabled" in runtime
    if later or runtime.get("enable_local_indexer") is not False:
        return None
    scope = card.endpoint._replace(name="")
    name = f"namespace-{scope.namespace}-component-{scope.component}-{KV_EVENTS}"
    stream = re.sub("[^a-z0-9-]", "-", name.lower())
    return EventChannel(scope, KV_EVENTS, 0, JetStreamTransport(stream))


@dataclass(frozen=True, slots=True)
class Malformed:
    """An entry that could not be read. ``problem`` does not quote values of the card."""

    key: str
    problem: str


Entry = Instance | ModelCard | EventChannel | EventSource | Malformed


def parse_entry(key: str, value: bytes) -> Entry:
    """Read one entry. Never raises: an invalid or unknown entry is Malformed."""
    if len(value) > MAX_VALUE_BYTES:
        return Malformed(key, f"{len(value):,} bytes are over the limit of {MAX_VALUE_BYTES:,}")
    reader = next((read for prefix, read in _READERS.items() if key.startswith(prefix)), None)
    if reader is None:
        return Malformed(key, f"unknown kind of entry; known: {', '.join(_READERS)}")
    try:
        return reader(value)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return Malformed(key, str(error))


# -- the JSON, as msgspec structs ----------------------------------------------------------------


class _EndpointJson(msgspec.Struct):
    namespace: str
    component: str
    name: str


class _InstanceJson(msgspec.Struct):
    namespace: str
    component: str
    endpoint: str
    instance_id: int
    transport: dict[str, str]
    device_type: str | None = None
    request_plane_codec: str = "json"


class _ScopeJson(msgspec.Struct):
    endpoint: _EndpointJson
    kind: str = "endpoint"


class _TransportJson(msgspec.Struct):
    kind: str
    config: dict[str, Any]


class _ChannelJson(msgspec.Struct):
    topic: str
    instance_id: int
    transport: _TransportJson
    scope: _ScopeJson | None = None
    namespace: str | None = None
    component: str | None = None


class _WorkerJson(msgspec.Struct):
    worker_id: int
    dp_rank: int = 0


class _SourceMetadataJson(msgspec.Struct):
    worker: _WorkerJson
    recovery_target: _InstanceJson | None = None


class _SourceJson(msgspec.Struct):
    scope: _ScopeJson
    topic: str
    publisher_id: int
    metadata: _SourceMetadataJson


class _FileJson(msgspec.Struct):
    path: str
    checksum: str | None = None
    size: int | None = None


class _LoraJson(msgspec.Struct):
    name: str


class _CardJson(msgspec.Struct):
    display_name: str
    kv_cache_block_size: int | None = None
    worker_type: str | None = None
    needs: list[list[str]] | None = None
    model_type: str | None = None
    model_input: str | None = None
    source_path: str | None = None
    context_length: int | None = None
    architectural_max_context_length: int | None = None
    aliases: list[str] | None = None
    lora: _LoraJson | None = None
    extra_files: list[Any] | None = None
    runtime_config: dict[str, Any] | None = None
    router_config: dict[str, Any] | None = None
    model_info: dict[str, Any] | None = None
    tokenizer: dict[str, Any] | None = None
    prompt_formatter: dict[str, Any] | None = None
    chat_template_file: dict[str, Any] | None = None
    gen_config: dict[str, Any] | None = None
    migration_limit: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] | None = None


class _ModelJson(msgspec.Struct):
    namespace: str
    component: str
    endpoint: str
    instance_id: int
    card_json: dict[str, Any]


#: Fields of a card that the answer does not need: they name files, parsers and media, and change
#: neither hashes nor costs. All others must be fields of the struct above.
_WITHOUT_EFFECT: Final = frozenset(
    {"media_decoder", "media_fetcher", "prompt_context", "slug", "user_data"}
)
#: The same for the runtime config, with the fields that ModelRuntimeConfig reads.
_RUNTIME_FIELDS: Final = frozenset(
    {
        "bootstrap_host",
        "bootstrap_port",
        "context_length",
        "data_parallel_size",
        "data_parallel_start_rank",
        "disaggregated_endpoint",
        "enable_eagle",
        "enable_local_indexer",
        "exclude_tools_when_tool_choice_none",
        "kv_event_publishing_enabled",
        "kv_event_source_mode",
        "kv_state_endpoint",
        "kv_transfer_domain",
        "kv_transfer_enforcement",
        "kv_transfer_preferred_weight",
        "max_num_batched_tokens",
        "max_num_seqs",
        "reasoning_parser",
        "runtime_data",
        "structural_tag",
        "structural_tag_mode",
        "structural_tag_schema",
        "structural_tag_scope",
        "taints",
        "tokenizer_backend",
        "tool_call_arguments_format",
        "tool_call_parser",
        "topology_domains",
        "total_kv_blocks",
    }
)

_FILES: Final = ("model_info", "tokenizer", "prompt_formatter", "chat_template_file", "gen_config")


def _instance(value: bytes) -> Instance:
    return _to_instance(msgspec.json.decode(value, type=_InstanceJson))


def _to_instance(read: _InstanceJson) -> Instance:
    if len(read.transport) != 1:
        raise ValueError(f"transport: expected one, got {len(read.transport)}")
    [(kind, address)] = read.transport.items()
    return Instance(
        EndpointId(read.namespace, read.component, read.endpoint),
        read.instance_id,
        kind,
        address,
        read.device_type,
        read.request_plane_codec,
    )


def _card(value: bytes) -> ModelCard:
    read = msgspec.json.decode(value, type=_ModelJson)
    card = msgspec.convert(read.card_json, _CardJson)
    files = _files(card)
    runtime = card.runtime_config or {}
    length = runtime.get("context_length") or card.architectural_max_context_length
    return ModelCard(
        EndpointId(read.namespace, read.component, read.endpoint),
        read.instance_id,
        card.display_name,
        card.kv_cache_block_size or None,
        card.worker_type,
        tuple(map(tuple, card.needs or ())),
        card.model_type or "",
        card.model_input or "",
        card.source_path,
        length or card.context_length or None,
        runtime,
        card.router_config,
        files,
        tuple(card.aliases or ()),
        None if card.lora is None else card.lora.name,
        _version(card, files, length),
        _unknown_fields(read.card_json),
        card.migration_limit or 0,
    )


def _version(card: _CardJson, files: Mapping[str, CardFile], length: int | None) -> str:
    """A digest of what Dynamo's own checksum of a card covers.

    Names, source, checksums of the files, context length, block size, role, needs, router config
    and aliases; the runtime config is not part of it.
    """
    parts = [
        card.display_name,
        card.source_path,
        {name: (file.kind, file.checksum) for name, file in sorted(files.items())},
        sorted(_file_identity(file) for file in card.extra_files or ()),
        length or 0,
        card.kv_cache_block_size,
        card.worker_type,
        card.needs or [],
        card.router_config,
        card.aliases or [],
    ]
    return hashlib.blake2b(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:16]


def _file_identity(file: Any) -> tuple[str, str]:
    """The name and the checksum of a file, wherever a worker serves it."""
    described = file if isinstance(file, dict) else {}
    return str(described.get("path", "")).rpartition("/")[2], str(described.get("checksum"))


def _unknown_fields(card: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields with a value that neither the card nor its runtime config is known to have."""
    known = {*_CardJson.__struct_fields__, *_WITHOUT_EFFECT}
    runtime = card.get("runtime_config") or {}
    unknown = [name for name, value in card.items() if name not in known and value]
    unknown += [
        f"runtime_config.{name}"
        for name, value in runtime.items()
        if name not in _RUNTIME_FIELDS and value
    ]
    return tuple(sorted(unknown))


def _files(card: _CardJson) -> dict[str, CardFile]:
    """The files of ``{"tokenizer": {"hf_tokenizer_json": {"path": ..}}}``, for any inner name.

    A chat template's file is one level deeper: ``{"is_custom": false, "file": {"path": ..}}``.
    """
    files = {}
    for name in _FILES:
        kinds = getattr(card, name)
        for kind, value in kinds.items() if kinds else ():
            file = value
            if isinstance(file, dict) and isinstance(file.get("file"), dict):
                file = file["file"]
            if isinstance(file, dict) and isinstance(file.get("path"), str):
                read = msgspec.convert(file, _FileJson)
                files[name] = CardFile(read.path, read.checksum, read.size, kind)
                break
    return files


def _channel(value: bytes) -> EventChannel:
    read = msgspec.json.decode(value, type=_ChannelJson)
    kind, config = read.transport.kind, read.transport.config
    transport: ZmqTransport | NatsTransport
    if kind == "Zmq" and isinstance(config.get("endpoint"), str):
        transport = ZmqTransport(config["endpoint"])
    elif kind == "Nats" and isinstance(config.get("subject_prefix"), str):
        transport = NatsTransport(config["subject_prefix"])
    else:
        raise ValueError(f"transport: expected Zmq with an endpoint or Nats, got {kind[:40]!r}")
    if read.scope is not None:
        scope = _scope(read.scope)
    elif read.namespace is not None:
        scope = EndpointId(read.namespace, read.component or "", "")
    else:
        raise ValueError("expected a scope, or the namespace of Dynamo before 1.4")
    return EventChannel(scope, read.topic, read.instance_id, transport)


def _source(value: bytes) -> EventSource:
    read = msgspec.json.decode(value, type=_SourceJson)
    target = read.metadata.recovery_target
    return EventSource(
        _scope(read.scope),
        read.topic,
        read.publisher_id,
        read.metadata.worker.worker_id,
        read.metadata.worker.dp_rank,
        None if target is None else _to_instance(target),
    )


def _scope(scope: _ScopeJson) -> EndpointId:
    return EndpointId(scope.endpoint.namespace, scope.endpoint.component, scope.endpoint.name)


_READERS: Final[dict[str, Callable[[bytes], Entry]]] = {
    INSTANCES: _instance,
    CARDS: _card,
    EVENT_CHANNELS: _channel,
    EVENT_SOURCES: _source,
}


# -- writing ---------------------------------------------------------------------------------------


def instance_of(endpoint: EndpointId, instance_id: int, location: str) -> Instance:
    """A TCP instance at ``location`` (HOST:PORT). Dynamo's workers write "cuda" without a GPU too.

    Its requests and answers are msgpack.
    """
    path = f"{instance_id:x}/{endpoint.namespace}/{endpoint.component}/{endpoint.name}"
    return Instance(endpoint, instance_id, "tcp", f"{location}/{path}", "cuda", "msgpack")


def nats_instance_of(endpoint: EndpointId, instance_id: int) -> Instance:
    """As :func:`instance_of`, with the NATS request plane: the address is the endpoint's subject.

    Characters that a subject cannot have are ``_``, as in Dynamo's subjects.
    """
    service = slug_of(f"{endpoint.namespace}_{endpoint.component}")
    subject = f"{service}.{slug_of(endpoint.name)}-{instance_id:x}"
    return Instance(endpoint, instance_id, "nats_tcp", subject, "cuda", "msgpack")


def encode_entry(entry: Instance | ModelCard | EventChannel | EventSource) -> tuple[str, bytes]:
    """The key and the value of an entry, as Dynamo 1.6 writes them; :func:`parse_entry` reads them.

    A card has the fields of :class:`ModelCard` and those that Dynamo requires; what the card's
    reader merges (``context_length``) is the architecture's limit here.
    """
    kind, key, fields = _WRITERS[type(entry)](entry)
    return key, msgspec.json.encode({"type": kind, **fields})


_Written = tuple[str, str, dict[str, Any]]  # type, key, fields


def _write_instance(entry: Instance) -> _Written:
    at = entry.endpoint
    key = f"{INSTANCES}{at.namespace}/{at.component}/{at.name}/{entry.instance_id:x}"
    return "Endpoint", key, _instance_fields(entry)


def _instance_fields(entry: Instance) -> dict[str, Any]:
    fields = {
        "component": entry.endpoint.component,
        "endpoint": entry.endpoint.name,
        "namespace": entry.endpoint.namespace,
        "instance_id": entry.instance_id,
        "transport": {entry.transport: entry.address},
    }
    if entry.device_type is not None:
        fields["device_type"] = entry.device_type
    return fields | {"request_plane_codec": entry.codec}


def _write_channel(entry: EventChannel) -> _Written:
    if isinstance(entry.transport, ZmqTransport):
        transport = {"kind": "Zmq", "config": {"endpoint": entry.transport.endpoint}}
    elif isinstance(entry.transport, NatsTransport):
        config = {"subject_prefix": entry.transport.subject_prefix}
        transport = {"kind": "Nats", "config": config}
    else:
        raise ValueError("a stream of JetStream has no entry in discovery")
    fields = {
        "scope": _scope_fields(entry.scope),
        "topic": entry.topic,
        "instance_id": entry.publisher_id,
        "transport": transport,
    }
    return "EventChannel", EVENT_CHANNELS + _topic_key(entry), fields


def _write_source(entry: EventSource) -> _Written:
    at = entry.scope
    metadata: dict[str, Any] = {
        "kv_state_endpoint": at._asdict(),
        "worker": {"worker_id": entry.worker_id, "dp_rank": entry.dp_rank},
        "publisher_id": entry.publisher_id,
    }
    if entry.recovery is not None:
        metadata["recovery_target"] = _instance_fields(entry.recovery)
    fields = {
        "scope": _scope_fields(at),
        "topic": entry.topic,
        "publisher_id": entry.publisher_id,
        "metadata": metadata,
    }
    return "EventSource", EVENT_SOURCES + _topic_key(entry), fields


def _topic_key(entry: EventChannel | EventSource) -> str:
    at = entry.scope
    where = f"namespace/{at.namespace}/component/{at.component}/endpoint/{at.name}"
    return f"{where}/topic/{entry.topic}/{entry.publisher_id:x}"


def _scope_fields(scope: EndpointId) -> dict[str, Any]:
    return {"kind": "endpoint", "endpoint": scope._asdict()}


def _write_card(entry: ModelCard) -> _Written:
    at = entry.endpoint
    card: dict[str, Any] = {
        "display_name": entry.name,
        "slug": slug_of(entry.name),
        "source_path": entry.source_path,
        **{name: {file.kind: _file_fields(file)} for name, file in entry.files.items()},
        "architectural_max_context_length": entry.context_length or 0,
        "context_length": 0,
        "kv_cache_block_size": entry.block_size or 0,
        "migration_limit": 0,
        "model_type": entry.model_type,
        "model_input": entry.model_input,
        "worker_type": entry.worker_type,
        "needs": entry.needs,
        "runtime_config": entry.runtime_config,
        "media_decoder": None,
        "media_fetcher": None,
    }
    if entry.aliases:
        card["aliases"] = entry.aliases
    if entry.router_config is not None:
        card["router_config"] = entry.router_config
    fields = {
        "namespace": at.namespace,
        "component": at.component,
        "endpoint": at.name,
        "instance_id": entry.instance_id,
        "card_json": card,
    }
    return "Model", f"{CARDS}{at.namespace}/{at.component}/{at.name}/{entry.instance_id:x}", fields


def _file_fields(file: CardFile) -> dict[str, Any]:
    fields = {"path": file.path, "checksum": file.checksum, "size": file.size}
    # A template's file is one level deeper, as the reader expects it.
    return {"is_custom": False, "file": fields} if "template" in file.kind else fields


def slug_of(name: str) -> str:
    """A model's name as a part of keys and URLs: other characters than these are ``_``."""
    return re.sub("[^a-z0-9_-]", "_", name.lower())


_WRITERS: Final[dict[type, Callable[[Any], _Written]]] = {
    Instance: _write_instance,
    ModelCard: _write_card,
    EventChannel: _write_channel,
    EventSource: _write_source,
}
