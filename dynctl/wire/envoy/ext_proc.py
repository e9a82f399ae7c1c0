"""Envoy's ext_proc: what a gateway sends for each HTTP request, and what a picker answers.

``SERVICE``'s only method is a bidirectional stream for each HTTP request. The gateway sends
headers, body and trailers of the request and then of the response, as far as its processing mode
has them, and waits for an answer to each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal

from dynctl.wire.envoy.schema import DecodeError, message

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
PROCESS: Final = f"/{SERVICE}/Process"

DESTINATION: Final = "x-gateway-destination-endpoint"
"""The header, and the key in the metadata ``envoy.lb``, with the endpoint that is picked."""
METADATA: Final = "envoy.lb"
SUBSET_METADATA: Final = "envoy.lb.subset_hint"
SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
MODEL_NAME: Final = "x-gateway-model-name"
"""The model, where a filter before the picker has read it in the body."""

PREFILLER: Final = "x-prefiller-host-port"
"""Where the sidecar of a decode worker (llm-d) has the prompt computed."""
WORKER_ID: Final = "x-dynamo-worker-instance-id"
PREFILL_WORKER_ID: Final = "x-dynamo-prefill-instance-id"
DP_RANK: Final = "x-dynamo-dp-rank"
PREFILL_DP_RANK: Final = "x-dynamo-prefill-dp-rank"
ROUTING_MODE: Final = "x-dynamo-routing-mode"
ENGINE_RANK: Final = "x-data-parallel-rank"
#: Headers that only a picker sets: clients' copies are removed.
OWN_HEADERS: Final = (
    DESTINATION,
    SUBSET_KEY,
    PREFILLER,
    *(WORKER_ID, PREFILL_WORKER_ID, DP_RANK, PREFILL_DP_RANK, ROUTING_MODE),
    *("x-worker-instance-id", "x-prefill-instance-id", "x-dp-rank", "x-prefill-dp-rank"),
    *(ENGINE_RANK, "x-data-parallel-host-port", "x-prefiller-url", "x-encoder-hosts-ports"),
)

MOST_BODY: Final = 62_000
"""Bytes of a body in one answer: Envoy takes at most 64 KiB."""
MOST_BESIDE_BODY: Final = 256 * 1024
"""Bytes of a message beside its body: headers, metadata and unknown fields. Envoy's own limit of
headers is 60 KiB."""
MOST_HEADERS: Final = 1000
"""Headers in one message. Envoy's own limit is 100."""

Kind = Literal[
    "request_headers",
    "request_body",
    "request_trailers",
    "response_headers",
    "response_body",
    "response_trailers",
]


class BodyMode(IntEnum):
    """How a gateway sends bodies. Envoy's numbers."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


@dataclass(frozen=True, slots=True)
class Modes:
    """The body modes of a stream. ``eager``: the body comes without waiting for the answer to the
    headers."""

    request: BodyMode = BodyMode.FULL_DUPLEX_STREAMED
    response: BodyMode = BodyMode.FULL_DUPLEX_STREAMED
    eager: bool = False


@dataclass(frozen=True, slots=True)
class Processing:
    """One message of a gateway.

    ``headers`` are lower-case, the first of several with one name; ``end``: nothing follows on
    this side. ``modes`` come with the first message only; None: not given. ``subset``: the only
    endpoints to pick from, None: all. ``observes``: the gateway does not wait for an answer.
    """

    kind: Kind
    headers: Mapping[str, str]
    body: bytes = b""
    end: bool = False
    modes: Modes | None = None
    subset: tuple[str, ...] | None = None
    observes: bool = False


class ExtProcError(ValueError):
    """Not a message of ext_proc that can be processed."""


_REQUEST: Final = message("ProcessingRequest")
_RESPONSE: Final = message("ProcessingResponse")
_NO_HEADERS: Final[Mapping[str, str]] = {}
#: Envoy's HeaderAppendAction: the value replaces what is there.
_OVERWRITE: Final = 2
_MOST_ENDPOINTS: Final = 10_000
#: Entries of the metadata, and fields of one entry.
_MOST_ENTRIES: Final = 1000
#: Fields of a large message, and of the body in it: a gateway sends a few.
_MOST_FIELDS: Final = 64
#: Numbers of the fields of ProcessingRequest that are bodies, and of HttpBody's ``body``.
_BODIES: Final = (4, 5)
_BODY: Final = 1
_LONGEST_VARINT: Final = 10


def decode(data: bytes) -> Processing:
    """A message of the gateway. Raises ExtProcError.

    What it costs has a bound: bytes beside the body, headers, entries of the metadata.
    """
    if len(data) > MOST_BESIDE_BODY:
        _check_beside_body(data)
    try:
        message = _REQUEST.FromString(data)
    except DecodeError:
        raise ExtProcError("not a ProcessingRequest") from None
    kind = message.WhichOneof("kind")
    if kind is None:
        raise ExtProcError("a ProcessingRequest without headers, body or trailers")
    part = getattr(message, kind)
    if kind.endswith("_body"):
        end = part.end_of_stream or part.end_of_stream_without_message
        return Processing(kind, _NO_HEADERS, part.body, end, observes=message.observability_mode)
    if kind.endswith("_trailers"):
        return Processing(kind, _NO_HEADERS, end=True, observes=message.observability_mode)
    modes = subset = None
    if kind == "request_headers":
        subset = _subset(message.metadata_context)
        if message.HasField("protocol_config"):
            modes = _modes(message.protocol_config)
    return Processing(
        kind,
        _headers(part.headers.headers),
        end=part.end_of_stream,
        modes=modes,
        subset=subset,
        observes=message.observability_mode,
    )


def _modes(given: Any) -> Modes:
    try:
        return Modes(
            BodyMode(given.request_body_mode),
            BodyMode(given.response_body_mode),
            given.send_body_without_waiting_for_header_response,
        )
    except ValueError:
        raise ExtProcError(
            f"unknown body mode {given.request_body_mode} or {given.response_body_mode}"
        ) from None


def _check_beside_body(data: bytes) -> None:
    """Refuse a message that is large without its body, before it is decoded: millions of small
    parts take a hundred times as long as a body of their size. Raises ExtProcError."""
    beside = len(data)
    for number, begin, end in _fields(data, 0, len(data)):
        if number in _BODIES:
            for inner, inner_begin, inner_end in _fields(data, begin, end):
                if inner == _BODY:
                    beside -= inner_end - inner_begin
    if beside > MOST_BESIDE_BODY:
        raise ExtProcError(
            f"a message with {beside:,} bytes beside its body; at most {MOST_BESIDE_BODY:,}"
        )


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The fields with a length in ``data[at:end]``: number, begin and end of the content. Raises
    ExtProcError."""
    for _ in range(_MOST_FIELDS):
        if at == end:
            return
        tag, at = _varint(data, at, end)
        size, kind = 0, tag & 7
        if kind == 0:
            _, at = _varint(data, at, end)
        elif kind == 1:
            size = 8
        elif kind == 2:
            size, at = _varint(data, at, end)
        elif kind == 5:
            size = 4
        else:  # groups, which ext_proc does not have
            raise ExtProcError("not a ProcessingRequest")
        if at + size > end:
            raise ExtProcError("not a ProcessingRequest")
        if kind == 2:
            yield tag >> 3, at, at + size
        at += size
    if at < end:
        raise ExtProcError(f"a large message with more than {_MOST_FIELDS} fields")


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and where it ends. Raises ExtProcError."""
    value = 0
    for place in range(min(_LONGEST_VARINT, end - at)):
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ExtProcError("not a ProcessingRequest")


def _headers(given: Any) -> dict[str, str]:
    if len(given) > MOST_HEADERS:
        raise ExtProcError(f"{len(given):,} headers; at most {MOST_HEADERS:,}")
    headers: dict[str, str] = {}
    for header in given:
        raw = header.raw_value
        value = raw.decode("utf-8", "surrogateescape") if raw else header.value
        headers.setdefault(header.key.lower(), value)
    return headers


def _subset(metadata: Any) -> tuple[str, ...] | None:
    if len(metadata.filter_metadata) > _MOST_ENTRIES:
        raise _too_many_entries(metadata.filter_metadata)
    for entry in metadata.filter_metadata:
        if entry.key == SUBSET_METADATA:
            if len(entry.value.fields) > _MOST_ENTRIES:
                raise _too_many_entries(entry.value.fields)
            for field in entry.value.fields:
                if field.key == SUBSET_KEY:
                    return tuple(_endpoints(field.value))
    return None


def _too_many_entries(entries: Any) -> ExtProcError:
    return ExtProcError(f"metadata with {len(entries):,} entries; at most {_MOST_ENTRIES:,}")


def _endpoints(value: Any) -> Iterator[str]:
    """Addresses of a list, or of a text with commas."""
    listed = value.WhichOneof("kind") == "list_value"
    count = len(value.list_value.values) if listed else 1 + value.string_value.count(",")
    if count > _MOST_ENDPOINTS:
        raise ExtProcError(f"a subset of {count:,} endpoints; at most {_MOST_ENDPOINTS:,}")
    if listed:
        texts = [item.string_value for item in value.list_value.values]
    else:
        texts = value.string_value.split(",")
    return (text.strip() for text in texts if text.strip())


# -- answers -----------------------------------------------------------------------------------


def headers_answer(
    kind: Literal["request_headers", "response_headers", "request_body"],
    given: Mapping[str, str] | None = None,
    *,
    remove: Iterable[str] = (),
    reroute: bool = False,
    endpoint: str | None = None,
) -> bytes:
    """The answer to headers, or to a buffered body: ``given`` are set, ``remove`` removed.

    ``reroute``: the gateway chooses its route again; ``endpoint``: the dynamic metadata.
    """
    answer = _RESPONSE()
    part = getattr(answer, kind)
    part.SetInParent()
    _mutate(part.response.header_mutation, given or {}, remove)
    if reroute:
        part.response.clear_route_cache = True
    if endpoint is not None:
        _set_metadata(answer.dynamic_metadata, endpoint)
    return bytes(answer.SerializeToString())


def body_answer(kind: Literal["request_body", "response_body"]) -> bytes:
    """The answer to a piece of a body that passes unchanged (STREAMED, BUFFERED)."""
    answer = _RESPONSE()
    getattr(answer, kind).response.SetInParent()
    return bytes(answer.SerializeToString())


def streamed_answers(
    kind: Literal["request_body", "response_body"], body: bytes, *, end: bool
) -> Iterator[bytes]:
    """Answers that pass a body on in full duplex; ``end``: its last piece is the last of all."""
    view = memoryview(body)
    last = max(0, len(body) - 1) // MOST_BODY
    for number in range(last + 1):
        answer = _RESPONSE()
        piece = getattr(answer, kind).response.body_mutation.streamed_response
        piece.body = bytes(view[number * MOST_BODY : (number + 1) * MOST_BODY])
        piece.end_of_stream = end and number == last
        yield bytes(answer.SerializeToString())


def trailers_answer(kind: Literal["request_trailers", "response_trailers"]) -> bytes:
    """The answer to trailers that pass unchanged."""
    answer = _RESPONSE()
    getattr(answer, kind).SetInParent()
    return bytes(answer.SerializeToString())


def immediate_answer(status: int, headers: Mapping[str, str], body: bytes, details: str) -> bytes:
    """The gateway answers the client at once; ``details`` is for its access log."""
    answer = _RESPONSE()
    immediate = answer.immediate_response
    immediate.status.code = status
    _mutate(immediate.headers, headers, ())
    immediate.body = body
    immediate.details = details
    return bytes(answer.SerializeToString())


def _mutate(mutation: Any, given: Mapping[str, str], remove: Iterable[str]) -> None:
    for name, value in given.items():
        option = mutation.set_headers.add()
        option.header.key = name
        option.header.raw_value = value.encode("utf-8", "surrogateescape")
        option.append_action = _OVERWRITE
    mutation.remove_headers.extend(remove)


def _set_metadata(metadata: Any, endpoint: str) -> None:
    outer = metadata.fields.add(key=METADATA)
    inner = outer.value.struct_value.fields.add(key=DESTINATION)
    inner.value.string_value = endpoint
