"""What routers of one fleet report about each other, and the messages between them beside Dynamo's.

Load events are Dynamo's (:mod:`dynctl.wire.dynamo.active_sequences`). Dynamo has no message to
show that a router is alive, nor one with the requests that already run; ours are on a topic of
their own, which Dynamo does not read.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from dynctl.base.decode_errors import WireError

#: The topic of :class:`ReplicaMessage`.
REPLICAS: Final = "dynctl_replicas"
_MOST_BYTES: Final = 16 * 1024 * 1024
_MOST_PARTS: Final = 65_536

_U64 = Annotated[int, Meta(ge=0)]
_Name = Annotated[str, Meta(max_length=256)]


class ReplicaMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a router to the others.

    ``alive``: every second, and when it needs something. ``leaving``: it ends, its requests too.
    ``bookings``: part ``part`` of ``parts`` of all requests that it has booked, as the payload of
    an event message in ``events``.

    ``sent``: the number of its last message of load events, None before the first one.
    ``requests``: its bookings at that moment. ``wants``: the routers whose bookings it needs.
    """

    kind: Literal["alive", "leaving", "bookings"]
    name: _Name
    sent: _U64 | None = None
    requests: _U64 = 0
    wants: Annotated[list[_U64], Meta(max_length=256)] = []
    part: Annotated[int, Meta(ge=0, le=_MOST_PARTS)] = 0
    parts: Annotated[int, Meta(ge=1, le=_MOST_PARTS)] = 1
    events: bytes = b""


_decoder: Final = msgspec.msgpack.Decoder(ReplicaMessage)
_encoder: Final = msgspec.msgpack.Encoder()


def encode_replica_message(message: ReplicaMessage) -> bytes:
    """The payload of an envelope."""
    return _encoder.encode(message)


def decode_replica_message(payload: bytes) -> ReplicaMessage:
    """The inverse; raises WireError."""
    if len(payload) > _MOST_BYTES:
        raise WireError("payload", f"{len(payload):,} bytes, expected at most {_MOST_BYTES:,}")
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise WireError("payload", "not a message of a replica of dynctl") from None


class ReplicaRow(msgspec.Struct, frozen=True):
    """Another router, as this one sees it.

    ``state``: ``in step``; ``behind``: some of its events are missing and its bookings are
    requested; ``silent``: nothing was received for ``heard_age_s``, its last load still counts;
    ``never heard``. ``requests``: of its requests, those that count as load here. ``lost``: its
    messages that never arrived. ``resyncs``: how often all its bookings were received.
    """

    name: str
    router_id: str | None = None
    address: str | None = None
    state: Literal["in step", "behind", "silent", "never heard"] = "never heard"
    heard_age_s: float | None = None
    requests: int = 0
    lost: int = 0
    resyncs: int = 0
