"""What `events tail` shows: one value a line, and how events of the planes become such lines. Pure.

Hashes are hexadecimal text, since they pass what JSON readers take as numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from dynctl.adapters.ports import ChannelCode
from dynctl.documents.events import TailKind, TailLine
from dynctl.wire.dynamo.active_sequences import (
    SequenceAdded,
    SequenceEvent,
    SequenceFreed,
    SequencePrefillDone,
)
from dynctl.wire.dynamo.events import KvMetrics, RouterEvent, UnknownEvent
from router_core import BlocksRemoved, BlocksStored, Cleared, Worker

_CONDITIONS: Final = {
    ChannelCode.CHANNEL_CONNECTED: TailKind.RECONNECT,
    ChannelCode.CHANNEL_DISCONNECTED: TailKind.DISCONNECT,
    ChannelCode.EVENTS_DROPPED: TailKind.GAP,
    ChannelCode.PUBLISHER_RESTARTED: TailKind.RESTART,
    ChannelCode.FOREIGN_PUBLISHER: TailKind.FOREIGN,
    ChannelCode.MALFORMED_MESSAGE: TailKind.MALFORMED,
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS: Final = 253_402_300_799_999  # the year 9999: beyond it there is no text for a time


def time_text(milliseconds: int) -> str:
    """UTC with milliseconds; a clock that is out of any calendar is shown as its last moment."""
    moment = _EPOCH + timedelta(milliseconds=min(max(0, milliseconds), _LAST_MS))
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def remark(
    kind: TailKind, at_ms: int, message: str, worker: Worker | None = None, **more: int | None
) -> TailLine:
    """A remark about a stream; ``more``: dp_rank, missing."""
    return _line(kind, at_ms, worker, None, message=message, **more)


def condition_kind(code: ChannelCode) -> TailKind:
    return _CONDITIONS[code]


def event_line(worker: Worker, event: RouterEvent, at_ms: int, message: str | None) -> TailLine:
    """A KV event; ``message``: what is unusual about it."""
    fields: dict[str, object] = {
        "dp_rank": event.dp_rank,
        "event_id": event.event_id,
        "tier": event.storage_tier,
        "message": message,
    }
    what, kind = event.event, TailKind.UNKNOWN
    match what:
        case BlocksStored():
            parent = what.parent_hash
            fields |= {
                **_blocks(what.block_hashes),
                "parent_hash": None if parent is None else _hex(parent),
            }
            kind = TailKind.STORED
        case BlocksRemoved():
            fields |= _blocks(what.block_hashes)
            kind = TailKind.REMOVED
        case Cleared():
            kind = TailKind.CLEARED
        case UnknownEvent():
            fields["message"] = f"unknown kind of event {what.kind!r}"
    return _line(kind, at_ms, worker, None, **fields)


def load_line(worker: Worker | None, report: KvMetrics, at_ms: int) -> TailLine:
    """A load report of a rank."""
    values = [
        f"{value:,} {what}"
        for value, what in (
            (report.active_decode_blocks, "active decode blocks"),
            (report.active_prefill_tokens, "active prefill tokens"),
            (report.kv_used_blocks, "KV blocks used"),
        )
        if value is not None
    ]
    return _line(
        TailKind.LOAD,
        at_ms,
        worker,
        report.worker_id,
        dp_rank=report.dp_rank,
        blocks=report.kv_used_blocks,
        prefill_tokens=report.active_prefill_tokens,
        message=", ".join(values) or "an empty report",
    )


def sequence_line(worker: Worker | None, event: SequenceEvent, at_ms: int) -> TailLine:
    """A router's replica-sync event about a request."""
    blocks = tokens = None
    match event:
        case SequenceAdded():
            kind = TailKind.BOOKED
            tokens = event.prefill_tokens
            blocks = None if event.token_sequence is None else len(event.token_sequence)
            known = "" if blocks is None else f", {blocks:,} prompt blocks"
            message = f"request {event.request_id}: {tokens:,} prefill tokens{known}"
        case SequencePrefillDone():
            kind, message = TailKind.PREFILLED, f"request {event.request_id}: prefill is done"
        case SequenceFreed():
            kind, message = TailKind.FREED, f"request {event.request_id}: ended"
        case _:
            kind = TailKind.UNKNOWN
            message = f"request {event.request_id}: unknown event {event.kind!r}"
    return _line(
        kind,
        at_ms,
        worker,
        event.worker_id,
        dp_rank=event.dp_rank,
        blocks=blocks,
        prefill_tokens=tokens,
        request_id=event.request_id,
        message=message,
    )


def _line(
    kind: TailKind, at_ms: int, worker: Worker | None, worker_id: int | None, **fields: object
) -> TailLine:
    """``worker_id``: of a worker that is not registered."""
    of: dict[str, object] = {}
    if worker is not None:
        of = {
            "worker": worker.name,
            "worker_id": worker.worker_id,
            "model": worker.model,
            "role": worker.role.value,
            "domains": dict(worker.domains),
        }
    elif worker_id is not None:
        of = {"worker": f"{worker_id:016x}", "worker_id": worker_id}
    return TailLine(kind.value, time_text(at_ms), **of, **fields)  # type: ignore[arg-type]


def _blocks(hashes: Sequence[int]) -> dict[str, object]:
    return {"blocks": len(hashes), "first_hash": _hex(hashes[0]) if hashes else None}


def _hex(value: int) -> str:
    return f"{value:016x}"
