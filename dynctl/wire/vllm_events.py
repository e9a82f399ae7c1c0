"""Decode and encode the KV events that vLLM and SGLang publish over ZMQ.

A message has three frames: topic, sequence number (u64, big endian, from 0) and a msgpack batch
``[ts, [event, ...], data_parallel_rank]``. Events come as maps with a ``type`` key (newer vLLM
and SGLang, Dynamo's mocker) or as positional arrays whose first element is the type (older
releases); new fields are always appended. The replay socket answers with the same three frames
(older releases: without the topic) and ends with sequence -1 (signed) and an empty payload.

Everything here is pure; the sockets live in ``dynctl.adapters.zmq.kv_events``.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from dynctl.base.decode_errors import WireError

U64_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF
END_OF_REPLAY: Final = -1
"""The sequence number that ends a replay answer."""

_MAX_TYPE_NAME: Final = 64  # a hostile type name must not flood the log that reports it

# No upper bound on a hash: msgpack itself has no integer above u64.
_Hash = Annotated[int, Meta(ge=0)]
_Token = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
_U32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
# vLLM announces blocks that were offloaded with a block size of 0 and without tokens.
_BlockSize = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]


class BlockStored(
    Struct,
    frozen=True,
    gc=False,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="BlockStored",
):
    """A run of blocks was added to the cache.

    ``block_hashes`` are the engine's own block identities (u64), one a block, parent before child;
    ``parent_block_hash`` is the identity of the block before the first one, None at a prompt's
    start. ``token_ids`` has ``len(block_hashes) * block_size`` tokens (u32), more where a group
    with a sliding window lists only some blocks. ``medium`` is ``GPU`` (also None), ``CPU``,
    ``STORAGE``, ``DISK`` or ``EXTERNAL``, ``locality`` ``LOCAL`` or ``REMOTE``, ``ownership`` the
    store of an offloaded block. ``group_idx`` is the cache group of a hybrid model.
    ``extra_keys``: other inputs of the engine's hash, one entry a block; they may hold a cache
    salt, which is a secret of a tenant. (SGLang publishes ``cache_salt`` instead, which is read
    as the extra key of a prompt's first block; it calls host memory ``CPU_PINNED``. With
    speculative decoding by EAGLE it publishes pairs of tokens: :class:`PairsStored`.)
    """

    block_hashes: tuple[_Hash, ...]
    parent_block_hash: _Hash | None
    token_ids: tuple[_Token, ...]
    block_size: _BlockSize
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: _U32 | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class PairsStored(
    BlockStored,
    frozen=True,
    gc=False,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="BlockStored",
):
    """A BlockStored whose tokens were published as pairs (SGLang with EAGLE).

    The published ``token_ids`` are ``[[t0, t1], [t1, t2], ...]``, one pair a token: a cached token
    depends on the next one. Here ``token_ids`` are the plain tokens, one more than there are pairs,
    so that the window of each block is one token longer than its stride, as for
    ``is_eagle`` of `router_core.hashing.local_block_hashes`.
    """


class BlockRemoved(
    Struct,
    frozen=True,
    gc=False,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="BlockRemoved",
):
    """Blocks left the cache of one medium."""

    block_hashes: tuple[_Hash, ...]
    medium: str | None = None
    group_idx: _U32 | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(
    Struct,
    frozen=True,
    gc=False,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="AllBlocksCleared",
):
    """The engine emptied its cache."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, gc=False):
    """The events that an engine publishes in one message.

    ``ts`` is the engine's wall clock in seconds, ``data_parallel_rank`` the rank that published,
    None if the engine does not report it. ``unknown_types`` names skipped events of an unknown
    type, ``unknown_fields`` counts skipped fields of known ones; both are set by decoding only and
    never encoded.
    """

    ts: float
    events: tuple[Event, ...]
    data_parallel_rank: int | None = None
    unknown_types: tuple[str, ...] = ()
    unknown_fields: int = 0


class BatchLimits(Struct, frozen=True):
    """Bounds of one batch; a payload beyond them is refused as a whole.

    The defaults allow 1M tokens published at once, which is more than a hundred times one step of a
    large engine.
    """

    payload_bytes: int = 32 * 1024 * 1024
    events: int = 65_536
    tokens: int = 4 * 1024 * 1024
    block_hashes: int = 1024 * 1024


DEFAULT_LIMITS: Final = BatchLimits()


class _PositionalStored(BlockStored, frozen=True, array_like=True, gc=False):
    """A BlockStored as an array of its fields."""


class _PositionalRemoved(BlockRemoved, frozen=True, array_like=True, gc=False):
    """A BlockRemoved as an array of its fields."""


class _PositionalCleared(AllBlocksCleared, frozen=True, array_like=True, gc=False):
    """An AllBlocksCleared as an array."""


class _MapBatch(Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    ts: float
    events: tuple[Event, ...]
    data_parallel_rank: _U32 | None = None


class _PositionalBatch(Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    ts: float
    events: tuple[_PositionalStored | _PositionalRemoved | _PositionalCleared, ...]
    data_parallel_rank: _U32 | None = None


_EVENT_TYPES: Final[dict[str, type[BlockStored] | type[BlockRemoved] | type[AllBlocksCleared]]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
_map_decoder: Final = msgspec.msgpack.Decoder(_MapBatch)
_positional_decoder: Final = msgspec.msgpack.Decoder(_PositionalBatch)
_any_decoder: Final = msgspec.msgpack.Decoder()
_encoder: Final = msgspec.msgpack.Encoder()


def decode_batch(payload: bytes, limits: BatchLimits = DEFAULT_LIMITS) -> EventBatch:
    """Decode a batch from msgpack.

    Block hashes become u64: a signed one is reinterpreted, bytes (vLLM's sha256) give their last
    eight bytes, big endian, which is the number that vLLM publishes when integers are configured.
    Tokens that are published as pairs become a :class:`PairsStored`.
    Unknown event types and fields are skipped and counted.

    Raises ``WireError`` with the path if the payload is not a batch, a known event has a missing or
    wrong field, or a bound of ``limits`` is exceeded.
    """
    if len(payload) > limits.payload_bytes:
        raise WireError(
            "payload", f"{len(payload)} bytes, expected at most {limits.payload_bytes} bytes"
        )
    batch = _decode_known_shape(payload) or _decode_any_shape(payload)
    _check_limits(batch, limits)
    return batch


def encode_batch(batch: EventBatch) -> bytes:
    """A batch as msgpack with map-typed events, as current vLLM and Dynamo's mocker write it.

    A rank that is None is written as null: Dynamo's indexer drops batches of two elements.
    """
    return _encoder.encode((batch.ts, batch.events, batch.data_parallel_rank))


def encode_seq(seq: int) -> bytes:
    """A sequence number as its frame; ``END_OF_REPLAY`` gives the end marker."""
    if not END_OF_REPLAY <= seq < 1 << 63:
        raise WireError("sequence", f"{seq} is outside 0..2^63-1")
    return seq.to_bytes(8, "big", signed=True)


def decode_seq(frame: bytes) -> int:
    """The sequence number in a frame, or ``END_OF_REPLAY``."""
    if len(frame) != 8:
        raise WireError("sequence", f"expected 8 bytes, got {len(frame)}")
    seq = int.from_bytes(frame, "big", signed=True)
    if seq < END_OF_REPLAY:
        raise WireError("sequence", f"{seq & U64_MASK} is outside 0..2^63-1")
    return seq


def encode_message(topic: bytes, seq: int, batch: EventBatch) -> tuple[bytes, bytes, bytes]:
    """The three frames of a published batch."""
    return topic, encode_seq(seq), encode_batch(batch)


def decode_message(frames: Sequence[bytes]) -> tuple[bytes, int, bytes]:
    """(topic, sequence, payload) of a published message.

    The payload is not decoded, so that a malformed one still advances the sequence.
    """
    if len(frames) != 3:
        raise WireError(
            "message", f"expected 3 frames (topic, sequence, batch), got {len(frames)} frames"
        )
    seq = decode_seq(frames[1])
    if seq == END_OF_REPLAY:
        raise WireError("sequence", "the end-of-replay marker does not belong in a live stream")
    return frames[0], seq, frames[2]


END_OF_REPLAY_FRAMES: Final = (encode_seq(END_OF_REPLAY), b"")
"""The two frames that end a replay answer."""


def _decode_known_shape(payload: bytes) -> EventBatch | None:
    """The fast path, for known fields and u64 hashes only; None for any other payload."""
    try:
        by_name = _map_decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, MemoryError, UnicodeError):
        pass
    else:
        if math.isfinite(by_name.ts):
            return EventBatch(by_name.ts, by_name.events, by_name.data_parallel_rank)
    try:
        by_place = _positional_decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, MemoryError, UnicodeError):
        return None
    if not math.isfinite(by_place.ts):
        return None
    events = tuple(_EVENT_TYPES[_tag(event)](*_fields(event)) for event in by_place.events)
    return EventBatch(by_place.ts, events, by_place.data_parallel_rank)


def _tag(event: Struct) -> str:
    return str(event.__struct_config__.tag)


def _fields(event: Struct) -> tuple[Any, ...]:
    return msgspec.structs.astuple(event)


def _decode_any_shape(payload: bytes) -> EventBatch:
    try:
        raw = _any_decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise WireError("payload", f"not msgpack: {error}") from None
    except (RecursionError, MemoryError):
        raise WireError("payload", "nested too deeply") from None
    except (UnicodeError, TypeError, ValueError, OverflowError):
        # Valid lengths around invalid content: text that is not UTF-8, a map as a key.
        raise WireError("payload", "not msgpack that a KV event may contain") from None
    ts, raw_events, rank = _batch_parts(raw)
    events: list[Event] = []
    unknown_types: list[str] = []
    unknown_fields = max(0, len(raw) - 3)
    for i, raw_event in enumerate(raw_events):
        where = f"events[{i}]"
        name, values, surplus = _name_fields(raw_event, where)
        unknown_fields += surplus
        if values is None:
            unknown_types.append(name[:_MAX_TYPE_NAME])
        else:
            events.append(_build(name, values, where))
    return EventBatch(ts, tuple(events), rank, tuple(unknown_types), unknown_fields)


def _batch_parts(raw: Any) -> tuple[float, list[Any], int | None]:
    """(time, undecoded events, rank) of a batch; raises WireError."""
    if not isinstance(raw, list) or len(raw) < 2:
        raise WireError(
            "batch", f"expected an array [ts, events, data_parallel_rank], got {_describe(raw)}"
        )
    ts, raw_events = raw[0], raw[1]
    if isinstance(ts, bool) or not isinstance(ts, int | float) or not math.isfinite(ts):
        raise WireError("ts", f"expected a finite number of seconds, got {_describe(ts)}")
    if not isinstance(raw_events, list):
        raise WireError("events", f"expected an array, got {_describe(raw_events)}")
    rank = raw[2] if len(raw) > 2 else None
    if rank is not None and (type(rank) is not int or not 0 <= rank <= 0xFFFF_FFFF):
        raise WireError("data_parallel_rank", f"expected a rank from 0, got {_describe(rank)}")
    return float(ts), raw_events, rank


def _name_fields(raw: Any, where: str) -> tuple[str, dict[str, Any] | None, int]:
    """(type, known fields by name, how many others); the fields are None for an unknown type."""
    if isinstance(raw, dict):
        name = raw.get("type")
    elif isinstance(raw, list) and raw:
        name = raw[0]
    else:
        raise WireError(where, f"expected a map or a tagged array, got {_describe(raw)}")
    if not isinstance(name, str):
        raise WireError(f"{where}.type", f"expected a string, got {_describe(name)}")
    event_type = _EVENT_TYPES.get(name)
    if event_type is None:
        return name, None, 0
    known = event_type.__struct_fields__
    if isinstance(raw, list):
        # Not strict: old publishers send fewer fields, newer ones more.
        return name, dict(zip(known, raw[1:], strict=False)), max(0, len(raw) - 1 - len(known))
    values = {field: raw[field] for field in known if field in raw}
    surplus = len(raw) - 1 - len(values)
    if event_type is BlockStored and "cache_salt" in raw:
        surplus -= 1
        # In every event of a salted prompt; not a field, since its first block says it all.
        if raw["cache_salt"] and raw.get("parent_block_hash") is None:
            values.setdefault("extra_keys", [[raw["cache_salt"]]])
    return name, values, surplus


def _build(name: str, values: dict[str, Any], where: str) -> Event:
    hashes = values.get("block_hashes")
    if isinstance(hashes, list):
        values["block_hashes"] = [
            _as_u64(value, f"{where}.block_hashes", i) for i, value in enumerate(hashes)
        ]
    parent = values.get("parent_block_hash")
    if parent is not None:
        values["parent_block_hash"] = _as_u64(parent, f"{where}.parent_block_hash")
    values["type"] = name
    tokens = values.get("token_ids")
    kind: type[Event] = _EVENT_TYPES[name]
    if kind is BlockStored and isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
        kind = PairsStored
        values["token_ids"] = _tokens_of_pairs(tokens, f"{where}.token_ids")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        raise WireError(where + path.rstrip("`"), problem) from None


def _tokens_of_pairs(pairs: list[Any], where: str) -> list[Any]:
    """The tokens of consecutive pairs, which overlap by one token."""
    tokens = []
    for place, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != 2:
            raise WireError(f"{where}[{place}]", f"expected two tokens, got {_describe(pair)}")
        if place and pair[0] != pairs[place - 1][1]:
            raise WireError(
                f"{where}[{place}]",
                "expected a pair that begins with the last token of the one before",
            )
        tokens.append(pair[0])
    return [*tokens, pairs[-1][1]]


def _as_u64(value: Any, where: str, place: int | None = None) -> int:
    if type(value) is int and -(1 << 63) <= value <= U64_MASK:
        return value & U64_MASK
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    if place is not None:
        where = f"{where}[{place}]"
    raise WireError(
        where, f"expected a 64-bit integer or a non-empty byte string, got {_describe(value)}"
    )


def _check_limits(batch: EventBatch, limits: BatchLimits) -> None:
    events = len(batch.events) + len(batch.unknown_types)
    if events > limits.events:
        raise WireError("events", f"{events} events, expected at most {limits.events}")
    tokens = hashes = 0
    for event in batch.events:
        if isinstance(event, BlockStored):
            tokens += len(event.token_ids)
        if not isinstance(event, AllBlocksCleared):
            hashes += len(event.block_hashes)
    if tokens > limits.tokens:
        raise WireError("token_ids", f"{tokens} tokens, expected at most {limits.tokens}")
    if hashes > limits.block_hashes:
        raise WireError("block_hashes", f"{hashes} hashes, expected at most {limits.block_hashes}")


_NAMES: Final = {bool: "a boolean", int: "an integer", float: "a float", str: "a string"}


def _describe(value: Any) -> str:
    """The kind of a value and, for containers, its length; never its content."""
    if value is None:
        return "nothing"
    if isinstance(value, list | dict | bytes):
        kind = {list: "an array", dict: "a map", bytes: "bytes"}[type(value)]
        return f"{kind} of length {len(value)}"
    return _NAMES.get(type(value), f"a {type(value).__name__}")
