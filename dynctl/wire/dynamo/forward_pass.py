"""What an engine tells of its scheduler about once a second: the topic ``forward-pass-metrics``.

Seen with Dynamo 1.6.1: ``worker_id`` is a decimal string here, and ``queued_requests`` are those
that the engine has accepted and not begun.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from dynctl.base.decode_errors import WireError
from dynctl.base.json_fields import U64_MAX
from dynctl.wire.dynamo.payload import DEFAULT_LIMITS, Limits, bound_payload, reading

PASS_TOPIC: Final = "forward-pass-metrics"  # noqa: S105  a topic

_U32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
_Count = Annotated[int, Meta(ge=0, le=0x7FFF_FFFF_FFFF_FFFF)]
_Digits = Annotated[str, Meta(max_length=20, pattern="^[0-9]+$")]


class ForwardPass(Struct, frozen=True):
    """Requests of one rank: in the running batch, and waiting for it."""

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


_decoder: Final = msgspec.msgpack.Decoder(_Pass)


def decode_forward_pass(payload: bytes, limits: Limits = DEFAULT_LIMITS) -> ForwardPass:
    """The report in a message. Raises ``WireError``."""
    bound_payload(payload, limits)
    with reading("forward pass"):
        read = _decoder.decode(payload)
    worker_id = int(read.worker_id)
    if worker_id > U64_MAX:
        raise WireError("forward pass.worker_id", "expected at most 64 bits")
    running, waiting = read.scheduled_requests, read.queued_requests
    return ForwardPass(
        worker_id,
        read.dp_rank,
        running.num_prefill_requests + running.num_decode_requests,
        waiting.num_prefill_requests + waiting.num_decode_requests,
    )
