"""Messages of Dynamo's event plane: envelopes, KV events and worker metrics, in both directions.

An envelope is a msgpack map with the publisher, its sequence number of this topic (from 0) and a
payload that is msgpack again. NATS carries it as the body. ZMQ carries four frames: topic,
publisher id and sequence number (u64, big endian), then a version byte, the envelope's length (u32,
big endian) and the envelope. As observed with Dynamo 1.6.1.

Everything here is pure. Unknown fields are ignored; errors have a path and never a value of the
payload.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from dynctl.base.decode_errors import WireError
from dynctl.wire.dynamo.payload import (
    DEFAULT_LIMITS,
    PayloadLimits,
    bound_payload,
    kind_name,
    reading,
)
from router_core import DEVICE, BlocksRemoved, BlocksStored, Cleared, LoadReported

FRAME_VERSION: Final = 1
"""The version byte in front of an envelope in a ZMQ message."""

_U64_MAX: Final = 0xFFFF_FFFF_FFFF_FFFF
_LONGEST_NAME: Final = 256  # topics, tiers, kinds: they reach logs and tables
_HEADER: Final = 5  # version byte and length

# No upper bound on a u64: msgpack itself has no larger integer.
_U64 = Annotated[int, Meta(ge=0)]
_U32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
# Of one rank. Sums over the ranks of a fleet have to stay below 64 bits.
_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Name = Annotated[str, Meta(max_length=_LONGEST_NAME)]


ENVELOPE_MARGIN_BYTES: Final = 4096
"""The most bytes of an envelope besides its payload, ZMQ frames included."""


class Envelope(Struct, frozen=True, gc=False):
    """One message of a publisher. ``published_at``: its wall clock in milliseconds."""

    publisher_id: _U64
    sequence: _U64
    published_at: _U64
    topic: _Name
    payload: bytes


#: Dynamo's events do not have cache groups.
WorkerEvent = BlocksStored | BlocksRemoved | Cleared


class RouterEvent(Struct, frozen=True):
    """A change of one rank's cache; ``event_id`` counts a publisher's events from 1.

    ``storage_tier`` is Dynamo's name (``device``, ``host_pinned``, ``disk``, ``external``, or an
    unknown one), the same as the ``tier`` of the event. ``residency_domain`` names the owner of the
    memory; only ``worker`` was observed. An event of an unknown kind is an :class:`UnknownEvent`,
    so that the numbers stay contiguous.
    """

    worker_id: int
    dp_rank: int
    event_id: int
    event: "WorkerEvent | UnknownEvent"
    storage_tier: str = DEVICE
    residency_domain: str = "worker"


class UnknownEvent(Struct, frozen=True):
    """An event of an unknown kind; ``kind`` is its name on the wire."""

    kind: str


class KvMetrics(Struct, frozen=True, gc=False):
    """The load report of a rank; None was not reported and leaves the last value."""

    worker_id: _U64
    dp_rank: _U32 = 0
    active_decode_blocks: _Count | None = None
    active_prefill_tokens: _Count | None = None
    kv_used_blocks: _Count | None = None

    def change(self) -> LoadReported:
        """The report as a change of the router's state."""
        return LoadReported(
            self.worker_id,
            self.dp_rank,
            active_decode_blocks=self.active_decode_blocks,
            kv_used_blocks=self.kv_used_blocks,
            active_prefill_tokens=self.active_prefill_tokens,
        )


# -- envelopes -------------------------------------------------------------------------------------

_encoder: Final = msgspec.msgpack.Encoder()
_envelope_decoder: Final = msgspec.msgpack.Decoder(Envelope)


def decode_envelope(body: bytes, limits: PayloadLimits = DEFAULT_LIMITS) -> Envelope:
    """The envelope in a NATS body. Raises ``WireError``."""
    longest = limits.payload_bytes + ENVELOPE_MARGIN_BYTES
    if len(body) > longest:
        raise WireError("envelope", f"{len(body)} bytes, expected at most {longest} bytes")
    with reading("envelope"):
        return _envelope_decoder.decode(body)


def encode_envelope(envelope: Envelope) -> bytes:
    """The body of a NATS message."""
    return _encoder.encode(envelope)


def decode_zmq_frames(frames: Sequence[bytes], limits: PayloadLimits = DEFAULT_LIMITS) -> Envelope:
    """The envelope in a ZMQ message, whose frames must have the same values.

    Raises ``WireError``.
    """
    if len(frames) != 4:
        raise WireError(
            "message",
            f"expected 4 frames (topic, publisher, sequence, envelope), got {len(frames)} frames",
        )
    topic, publisher, sequence, framed = frames
    if len(publisher) != 8:
        raise WireError("publisher_id", f"expected 8 bytes, got {len(publisher)}")
    if len(sequence) != 8:
        raise WireError("sequence", f"expected 8 bytes, got {len(sequence)}")
    if len(framed) < _HEADER:
        raise WireError("envelope", f"expected at least {_HEADER} bytes, got {len(framed)}")
    if framed[0] != FRAME_VERSION:
        raise WireError("envelope.version", f"expected {FRAME_VERSION}, got {framed[0]}")
    length = int.from_bytes(framed[1:_HEADER], "big")
    if length != len(framed) - _HEADER:
        raise WireError("envelope.length", f"expected {length} bytes, got {len(framed) - _HEADER}")
    envelope = decode_envelope(framed[_HEADER:], limits)
    for name, value, frame in (
        ("topic", envelope.topic.encode(), topic),
        ("publisher_id", envelope.publisher_id.to_bytes(8, "big"), publisher),
        ("sequence", envelope.sequence.to_bytes(8, "big"), sequence),
    ):
        if value != frame:
            raise WireError(name, "the frame and the envelope differ")
    return envelope


def encode_zmq_frames(envelope: Envelope) -> tuple[bytes, bytes, bytes, bytes]:
    """The four frames of a ZMQ message."""
    body = _encoder.encode(envelope)
    header = bytes((FRAME_VERSION,)) + len(body).to_bytes(4, "big")
    return (
        envelope.topic.encode(),
        envelope.publisher_id.to_bytes(8, "big"),
        envelope.sequence.to_bytes(8, "big"),
        header + body,
    )


# -- kv-events -------------------------------------------------------------------------------------


class _Block(Struct, gc=False):
    block_hash: _U64
    tokens_hash: _U64


class _Stored(Struct, gc=False):
    blocks: list[_Block]
    parent_hash: _U64 | None = None


class _Removed(Struct, gc=False):
    block_hashes: tuple[_U64, ...]


class _Data(Struct, gc=False):
    stored: _Stored | None = None
    removed: _Removed | None = None


class _Event(Struct, gc=False):
    event_id: _U64
    data: _Data | str
    dp_rank: _U32 = 0


class _RouterEvent(Struct, gc=False):
    worker_id: _U64
    event: _Event
    storage_tier: _Name = DEVICE
    residency_domain: _Name = "worker"


class _RawEvent(Struct, gc=False):
    data: msgspec.Raw


class _RawRouterEvent(Struct, gc=False):
    event: _RawEvent


#: The first bytes of a msgpack map, and an array with one element.
_MAP_STARTS: Final = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
_ARRAY_OF_ONE: Final = b"\x91"
_events_decoder: Final = msgspec.msgpack.Decoder(list[_RouterEvent])
_raw_events_decoder: Final = msgspec.msgpack.Decoder(list[_RawRouterEvent])
_any_decoder: Final = msgspec.msgpack.Decoder()


def decode_router_events(
    payload: bytes, limits: PayloadLimits = DEFAULT_LIMITS
) -> tuple[RouterEvent, ...]:
    """The events of a ``kv-events`` message, in order.

    Dynamo before 1.4 writes one event, later versions an array. Raises ``WireError`` if the payload
    is neither, a known event has a missing or wrong field, or a bound of ``limits`` is exceeded.
    """
    bound_payload(payload, limits)
    if payload[:1] and payload[0] in _MAP_STARTS:
        payload = _ARRAY_OF_ONE + payload
    with reading("events"):
        read = _events_decoder.decode(payload)
    if len(read) > limits.events:
        raise WireError("events", f"{len(read)} events, expected at most {limits.events}")
    blocks = 0
    events = []
    for place, router_event in enumerate(read):
        event = _to_event(router_event) or UnknownEvent(_unknown_kind(payload, place))
        if isinstance(event, BlocksStored | BlocksRemoved):
            blocks += len(event.block_hashes)
        events.append(_router_event(router_event, event))
    if blocks > limits.blocks:
        raise WireError("events", f"{blocks} blocks, expected at most {limits.blocks}")
    return tuple(events)


def router_event_from(value: Any, where: str = "event") -> RouterEvent:
    """An event from plain dicts and lists, as decoded from a recovery answer or from JSON.

    Raises ``WireError`` below the path ``where``.
    """
    with reading(where):
        read = msgspec.convert(value, _RouterEvent)
    event = _to_event(read) or UnknownEvent(kind_name(value["event"]["data"]))
    names: tuple[int, ...] = (read.worker_id, read.event.event_id)
    if isinstance(event, BlocksStored):
        names += (event.parent_hash or 0, *event.block_hashes, *event.local_hashes)
    elif isinstance(event, BlocksRemoved):
        names += tuple(event.block_hashes)
    if max(names) > _U64_MAX:
        raise WireError(where, "expected unsigned 64-bit ids and hashes, got a larger number")
    return _router_event(read, event)


def decode_durable_event(
    payload: bytes, limits: PayloadLimits = DEFAULT_LIMITS
) -> tuple[RouterEvent, int]:
    """The event in a message of a JetStream stream, which is JSON, and its rank's first number.

    As observed: Dynamo 1.0.2 numbers a rank's events from 0 and writes no storage tier, 1.2.1 and
    1.3.1 from 1 with a tier. Raises ``WireError``.
    """
    bound_payload(payload, limits)
    try:
        value = msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        raise WireError("event", "not JSON") from None
    event = router_event_from(value)
    if isinstance(event.event, BlocksStored | BlocksRemoved):
        blocks = len(event.event.block_hashes)
        if blocks > limits.blocks:
            raise WireError("event", f"{blocks} blocks, expected at most {limits.blocks}")
    return event, int("storage_tier" in value)


def encode_router_events(events: Sequence[RouterEvent]) -> bytes:
    """A ``kv-events`` payload as Dynamo's worker writes it."""
    return _encoder.encode([router_event_map(event) for event in events])


def _router_event(read: _RouterEvent, event: WorkerEvent | UnknownEvent) -> RouterEvent:
    return RouterEvent(
        read.worker_id,
        read.event.dp_rank,
        read.event.event_id,
        event,
        read.storage_tier,
        read.residency_domain,
    )


def _to_event(read: _RouterEvent) -> WorkerEvent | None:
    """The change of the cache, None for an unknown kind."""
    data = read.event.data
    if isinstance(data, str):
        return Cleared() if data == "cleared" else None
    stored, removed = data.stored, data.removed
    if stored is not None:
        blocks = stored.blocks
        return BlocksStored(
            stored.parent_hash,
            tuple([block.block_hash for block in blocks]),
            tuple([block.tokens_hash for block in blocks]),
            read.storage_tier,
        )
    if removed is not None:
        return BlocksRemoved(removed.block_hashes, read.storage_tier)
    return None


def _unknown_kind(payload: bytes, place: int) -> str:
    """The name of an unknown kind, decoded again: the fast path does not keep it."""
    raw = _raw_events_decoder.decode(payload)[place].event.data
    with reading(f"events[{place}].event.data"):
        return kind_name(_any_decoder.decode(raw))


def router_event_map(event: RouterEvent) -> dict[str, Any]:
    """The event as Dynamo's services write it in JSON."""
    return {
        "worker_id": event.worker_id,
        "storage_tier": event.storage_tier,
        "residency_domain": event.residency_domain,
        "event": {
            "event_id": event.event_id,
            "data": _data(event.event),
            "dp_rank": event.dp_rank,
        },
    }


def _data(event: WorkerEvent | UnknownEvent) -> dict[str, Any] | str:
    match event:
        case BlocksStored():
            blocks = [
                {"block_hash": name, "tokens_hash": local, "mm_extra_info": None}
                for name, local in zip(event.block_hashes, event.local_hashes, strict=True)
            ]
            return {
                "stored": {
                    "parent_hash": event.parent_hash,
                    "start_position": None,
                    "blocks": blocks,
                }
            }
        case BlocksRemoved():
            return {"removed": {"block_hashes": list(event.block_hashes)}}
        case Cleared():
            return "cleared"
        case UnknownEvent():
            return event.kind


# -- kv_metrics ------------------------------------------------------------------------------------

_metrics_decoder: Final = msgspec.msgpack.Decoder(KvMetrics)


def decode_kv_metrics(payload: bytes, limits: PayloadLimits = DEFAULT_LIMITS) -> KvMetrics:
    """The report in a ``kv_metrics`` message. Raises ``WireError``."""
    bound_payload(payload, limits)
    with reading("metrics"):
        return _metrics_decoder.decode(payload)


def encode_kv_metrics(metrics: KvMetrics) -> bytes:
    """A ``kv_metrics`` payload."""
    return _encoder.encode(metrics)


# -- forward-pass-metrics --------------------------------------------------------------------------

PASS_TOPIC: Final = "forward-pass-metrics"  # noqa: S105  a topic

_Digits = Annotated[str, Meta(max_length=20, pattern="^[0-9]+$")]


class ForwardPass(Struct, frozen=True):
    """Requests of one rank: ``running`` in the current batch, ``waiting`` for it.

    Engines publish it about once a second. Observed with Dynamo 1.6.1: ``worker_id`` is a decimal
    string, and ``queued_requests`` are accepted and not yet started.
    """

    worker_id: int
    dp_rank: int
    running: int
    waiting: int


class _Requests(Struct, frozen=True, gc=False):
    num_prefill_requests: _Count = 0
    num_decode_requests: _Count = 0


class _Pass(Struct, frozen=True, gc=False):
    worker_id: _Digits
    dp_rank: _U32 = 0
    scheduled_requests: _Requests = _Requests()
    queued_requests: _Requests = _Requests()


_pass_decoder: Final = msgspec.msgpack.Decoder(_Pass)


def decode_forward_pass(payload: bytes, limits: PayloadLimits = DEFAULT_LIMITS) -> ForwardPass:
    """The report in a message. Raises ``WireError``."""
    bound_payload(payload, limits)
    with reading("forward pass"):
        read = _pass_decoder.decode(payload)
    worker_id = int(read.worker_id)
    if worker_id > _U64_MAX:
        raise WireError("forward pass.worker_id", "expected at most 64 bits")
    running, waiting = read.scheduled_requests, read.queued_requests
    return ForwardPass(
        worker_id,
        read.dp_rank,
        running.num_prefill_requests + running.num_decode_requests,
        waiting.num_prefill_requests + waiting.num_decode_requests,
    )
