"""Requests that routers book on workers: the topic ``active_sequences_events``.

Frontends with replica sync tell when they give a request to a worker, when its prefill is done and
when it ends; mock workers tell the end of prefill by themselves (their router id is the worker's).
There is no history: who comes late knows nothing of the requests that run. The payload is one event
map over NATS and ``{"events": [..]}`` over ZMQ; both are read from either. Seen so with Dynamo
1.6.1.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from dynctl.base.decode_errors import WireError
from dynctl.wire.dynamo.payload import (
    DEFAULT_LIMITS,
    Limits,
    bound_payload,
    kind_name,
    reading,
)

_U64 = Annotated[int, Meta(ge=0)]
_U32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
_Tokens = Annotated[int, Meta(ge=0, le=0x7FFF_FFFF_FFFF_FFFF)]
_Name = Annotated[str, Meta(max_length=256)]


class SequenceAdded(Struct, frozen=True):
    """A router gave a request to a rank.

    ``token_sequence``: the chained hashes (u64) of its complete prompt blocks, parent first; None
    where the pool does not count blocks (prefill). In a decode pool they are random, so only their
    number means something. ``prefill_tokens``: prompt tokens still to be computed there (prompt
    minus cached), 0 where prefill is not tracked.
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


class SequencePrefillDone(Struct, frozen=True):
    """The first token came: the request's prefill load is over."""

    request_id: str
    worker_id: int
    dp_rank: int
    router_id: int
    lora: str | None = None


class SequenceFreed(Struct, frozen=True):
    """The request left the worker, finished or not; it may never have had a first token."""

    request_id: str
    worker_id: int
    dp_rank: int
    router_id: int
    lora: str | None = None


class SequenceUnknown(Struct, frozen=True):
    """An event that this version does not understand, by its name on the wire."""

    request_id: str
    worker_id: int
    dp_rank: int
    router_id: int
    kind: str


SequenceEvent = SequenceAdded | SequencePrefillDone | SequenceFreed | SequenceUnknown


class _Hint(Struct, gc=False):
    initial_effective_prefill_tokens: _Tokens = 0


class _Add(Struct, gc=False):
    token_sequence: tuple[_U64, ...] | None = None
    track_prefill_tokens: bool = True
    expected_output_tokens: _Tokens | None = None
    prefill_load_hint: _Hint | None = None


class _Data(Struct, gc=False):
    added: _Add | None = msgspec.field(name="AddRequest", default=None)


class _Worker(Struct, gc=False):
    worker_id: _U64
    dp_rank: _U32 = 0


class _Event(Struct, gc=False):
    request_id: _Name
    worker: _Worker
    data: _Data | str
    router_id: _U64
    lora_name: _Name | None = None


class _Shape(Struct, gc=False):
    events: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _RawEvent(Struct, gc=False):
    data: msgspec.Raw


_shape_decoder: Final = msgspec.msgpack.Decoder(_Shape)
_event_decoder: Final = msgspec.msgpack.Decoder(_Event)
_events_decoder: Final = msgspec.msgpack.Decoder(list[_Event])
_raw_event_decoder: Final = msgspec.msgpack.Decoder(_RawEvent)
_raw_events_decoder: Final = msgspec.msgpack.Decoder(list[_RawEvent])
_any_decoder: Final = msgspec.msgpack.Decoder()
_encoder: Final = msgspec.msgpack.Encoder()


def decode_sequences(payload: bytes, limits: Limits = DEFAULT_LIMITS) -> tuple[SequenceEvent, ...]:
    """The events of a message, in order, from either shape.

    Raises ``WireError`` when the payload is neither, a known event lacks a field or has one of the
    wrong type, or a bound of ``limits`` is passed (``blocks`` bounds the hashes).
    """
    bound_payload(payload, limits)
    with reading("event"):
        several = _shape_decoder.decode(payload).events
        read = [] if isinstance(several, msgspec.Raw) else [_event_decoder.decode(payload)]
    if isinstance(several, msgspec.Raw):
        with reading("events"):
            read = _events_decoder.decode(several)
    if len(read) > limits.events:
        raise WireError("events", f"{len(read)} events, expected at most {limits.events}")
    hashes = sum(len(event.token_sequence or ()) for event in map(_added, read) if event)
    if hashes > limits.blocks:
        raise WireError("events", f"{hashes} hashes, expected at most {limits.blocks}")
    return tuple(_to_event(told, place, payload, several) for place, told in enumerate(read))


def encode_sequences(events: Sequence[SequenceEvent], *, batched: bool = True) -> bytes:
    """A payload as Dynamo writes it for ZMQ, or (``batched`` false, exactly one event) for NATS."""
    if batched:
        return _encoder.encode({"events": [_event_map(event) for event in events]})
    (event,) = events
    return _encoder.encode(_event_map(event))


def _added(told: _Event) -> _Add | None:
    return None if isinstance(told.data, str) else told.data.added


def _to_event(
    told: _Event, place: int, payload: bytes, several: msgspec.Raw | msgspec.UnsetType
) -> SequenceEvent:
    worker = told.worker
    added = _added(told)
    if added is not None:
        hint = added.prefill_load_hint
        tracked = added.track_prefill_tokens and hint is not None
        return SequenceAdded(
            told.request_id,
            worker.worker_id,
            worker.dp_rank,
            added.token_sequence,
            hint.initial_effective_prefill_tokens if hint is not None and tracked else 0,
            told.router_id,
            told.lora_name,
            added.track_prefill_tokens,
            added.expected_output_tokens,
        )
    name = told.request_id, worker.worker_id, worker.dp_rank, told.router_id
    if told.data == "MarkPrefillCompleted":
        return SequencePrefillDone(*name, told.lora_name)
    if told.data == "Free":
        return SequenceFreed(*name, told.lora_name)
    # Decoded again, and only then: the fast path keeps no names that it does not know.
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
            hint = {
                "initial_effective_prefill_tokens": event.prefill_tokens,
                "expected_prefill_duration": None,
            }
            return {
                "AddRequest": {
                    "token_sequence": event.token_sequence,
                    "track_prefill_tokens": event.track_prefill_tokens,
                    "expected_output_tokens": event.expected_output_tokens,
                    "prefill_load_hint": hint if event.track_prefill_tokens else None,
                }
            }
        case SequencePrefillDone():
            return "MarkPrefillCompleted"
        case SequenceFreed():
            return "Free"
        case SequenceUnknown():
            return event.kind
