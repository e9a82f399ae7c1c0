"""Requests that routers book on workers: the topic ``active_sequences_events``.

Frontends with replica sync publish when they send a request to a worker, when its prefill is done
and when it ends. Mock workers publish the end of prefill themselves (their router id is the
worker's). There is no history: a late subscriber does not see the requests that run already. The
payload is one event map over NATS and ``{"events": [..]}`` over ZMQ; both are accepted from either.
As observed with Dynamo 1.6.1.
"""

import math
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

_U64 = Annotated[int, Meta(ge=0)]
_U32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
# Of one prompt. Sums of all bookings of a worker have to stay below 64 bits.
_Tokens = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
_Name = Annotated[str, Meta(max_length=256)]
_LONGEST_S: Final = 86_400.0


class SequenceAdded(Struct, frozen=True):
    """A router sent a request to a rank.

    ``token_sequence``: the chained hashes (u64) of its complete prompt blocks, parent first; None
    if the pool does not count blocks (prefill). In a decode pool they are random, so only their
    number is useful. ``prefill_tokens``: prompt tokens that the rank still has to compute (prompt
    minus cached), 0 if prefill is not tracked. ``expected_prefill_s``: seconds that they are
    predicted to take, None without a load model; as in Dynamo's source, not observed.
    """

    request_id: str
    worker_id: int
    dp_rank: int
    token_sequence: tuple[int, ...] | None
    prefill_tokens: int
    router_id: int
    lora: str | None = None
    track_prefill_tokens: bool = True
    expected_output_tokens: int | None = None
    expected_prefill_s: float | None = None


class SequencePrefillDone(Struct, frozen=True):
    """The first token arrived: the prefill of the request is done."""

    request_id: str
    worker_id: int
    dp_rank: int
    router_id: int
    lora: str | None = None


class SequenceFreed(Struct, frozen=True):
    """The request left the worker, finished or not, possibly before its first token."""

    request_id: str
    worker_id: int
    dp_rank: int
    router_id: int
    lora: str | None = None


class SequenceUnknown(Struct, frozen=True):
    """An event of an unknown kind; ``kind`` is its name on the wire."""

    request_id: str
    worker_id: int
    dp_rank: int
    router_id: int
    kind: str


SequenceEvent = SequenceAdded | SequencePrefillDone | SequenceFreed | SequenceUnknown


def kind_of(event: SequenceEvent) -> str:
    """The kind of an event in metrics: add, prefill_done, free or unknown."""
    match event:
        case SequenceAdded():
            return "add"
        case SequencePrefillDone():
            return "prefill_done"
        case SequenceFreed():
            return "free"
        case _:
            return "unknown"


class _Duration(Struct, gc=False):
    secs: _U64
    nanos: Annotated[int, Meta(ge=0, lt=1_000_000_000)] = 0


class _Hint(Struct, gc=False):
    initial_effective_prefill_tokens: _Tokens = 0
    expected_prefill_duration: _Duration | float | None = None


class _Add(Struct, gc=False):
    token_sequence: tuple[_U64, ...] | None = None
    track_prefill_tokens: bool = True
    expected_output_tokens: _Tokens | None = None
    prefill_load_hint: _Hint | None = None


class _SequenceData(Struct, gc=False):
    added: _Add | None = msgspec.field(name="AddRequest", default=None)


class _SequenceRank(Struct, gc=False):
    worker_id: _U64
    dp_rank: _U32 = 0


class _SequenceMessage(Struct, gc=False):
    request_id: _Name
    worker: _SequenceRank
    data: _SequenceData | str
    router_id: _U64
    lora_name: _Name | None = None


class _Shape(Struct, gc=False):
    events: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _RawSequence(Struct, gc=False):
    data: msgspec.Raw


_shape_decoder: Final = msgspec.msgpack.Decoder(_Shape)
_event_decoder: Final = msgspec.msgpack.Decoder(_SequenceMessage)
_events_decoder: Final = msgspec.msgpack.Decoder(list[_SequenceMessage])
_raw_event_decoder: Final = msgspec.msgpack.Decoder(_RawSequence)
_raw_events_decoder: Final = msgspec.msgpack.Decoder(list[_RawSequence])
_any_decoder: Final = msgspec.msgpack.Decoder()
_encoder: Final = msgspec.msgpack.Encoder()


def decode_sequences(
    payload: bytes, limits: PayloadLimits = DEFAULT_LIMITS
) -> tuple[SequenceEvent, ...]:
    """The events of a message, in order, from either form of payload.

    Raises ``WireError`` if the payload has neither form, a known event has a missing or wrong
    field, or a bound of ``limits`` is exceeded (``blocks`` bounds the hashes).
    """
    bound_payload(payload, limits)
    with reading("event"):
        several = _shape_decoder.decode(payload).events
        events = [] if isinstance(several, msgspec.Raw) else [_event_decoder.decode(payload)]
    if isinstance(several, msgspec.Raw):
        with reading("events"):
            events = _events_decoder.decode(several)
    if len(events) > limits.events:
        raise WireError("events", f"{len(events)} events, expected at most {limits.events}")
    hashes = sum(len(event.token_sequence or ()) for event in map(_added_request, events) if event)
    if hashes > limits.blocks:
        raise WireError("events", f"{hashes} hashes, expected at most {limits.blocks}")
    return tuple(_to_event(event, place, payload, several) for place, event in enumerate(events))


def encode_sequences(events: Sequence[SequenceEvent], *, batched: bool = True) -> bytes:
    """A payload as Dynamo writes it for ZMQ, or (``batched`` false, exactly one event) for NATS."""
    if batched:
        return _encoder.encode({"events": [_event_map(event) for event in events]})
    (event,) = events
    return _encoder.encode(_event_map(event))


def _seconds(hint: _Hint) -> float | None:
    duration = hint.expected_prefill_duration
    if isinstance(duration, _Duration):
        duration = duration.secs + duration.nanos / 1e9
    if duration is None or math.isnan(duration):
        return None
    return min(max(duration, 0.0), _LONGEST_S)


def _duration(seconds: float | None) -> dict[str, int] | None:
    """A span of time as Rust's serde writes it."""
    if seconds is None:
        return None
    nanos = round(min(max(seconds, 0.0), _LONGEST_S) * 1e9)
    return {"secs": nanos // 1_000_000_000, "nanos": nanos % 1_000_000_000}


def _added_request(event: _SequenceMessage) -> _Add | None:
    return None if isinstance(event.data, str) else event.data.added


def _to_event(
    event: _SequenceMessage, place: int, payload: bytes, several: msgspec.Raw | msgspec.UnsetType
) -> SequenceEvent:
    worker = event.worker
    added = _added_request(event)
    if added is not None:
        hint = added.prefill_load_hint
        tracked = added.track_prefill_tokens and hint is not None
        return SequenceAdded(
            event.request_id,
            worker.worker_id,
            worker.dp_rank,
            added.token_sequence,
            hint.initial_effective_prefill_tokens if hint is not None and tracked else 0,
            event.router_id,
            event.lora_name,
            added.track_prefill_tokens,
            added.expected_output_tokens,
            _seconds(hint) if hint is not None and tracked else None,
        )
    name = event.request_id, worker.worker_id, worker.dp_rank, event.router_id
    if event.data == "MarkPrefillCompleted":
        return SequencePrefillDone(*name, event.lora_name)
    if event.data == "Free":
        return SequenceFreed(*name, event.lora_name)
    # Only unknown events are decoded again: the fast path does not keep their names.
    if isinstance(several, msgspec.Raw):
        raw = _raw_events_decoder.decode(several)[place].data
    else:
        raw = _raw_event_decoder.decode(payload).data
    with reading(f"events[{place}].data"):
        return SequenceUnknown(*name, kind_name(_any_decoder.decode(raw)))


def _event_map(event: SequenceEvent) -> dict[str, Any]:
    return {
        "request_id": event.request_id,
        "worker": {"worker_id": event.worker_id, "dp_rank": event.dp_rank},
        "data": _data(event),
        "router_id": event.router_id,
        "lora_name": None if isinstance(event, SequenceUnknown) else event.lora,
    }


def _data(event: SequenceEvent) -> dict[str, Any] | str:
    match event:
        case SequenceAdded():
            # A request with nothing to prefill has no hint.
            tracked = event.track_prefill_tokens and event.prefill_tokens > 0
            hint = {
                "initial_effective_prefill_tokens": event.prefill_tokens,
                "expected_prefill_duration": _duration(event.expected_prefill_s),
            }
            return {
                "AddRequest": {
                    "token_sequence": event.token_sequence,
                    "track_prefill_tokens": event.track_prefill_tokens,
                    "expected_output_tokens": event.expected_output_tokens,
                    "prefill_load_hint": hint if tracked else None,
                }
            }
        case SequencePrefillDone():
            return "MarkPrefillCompleted"
        case SequenceFreed():
            return "Free"
        case SequenceUnknown():
            return event.kind
