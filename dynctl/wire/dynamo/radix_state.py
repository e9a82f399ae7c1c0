"""The snapshot of a router's index that Dynamo 1.0 to 1.3 keep in a bucket of NATS' object store.

A list of KV events that build the index, in the binary form of Rust's bincode 1: integers are
little-endian with their full width, a list has its length (u64) first, an option one byte (0 or 1),
an enumeration the number of its variant (u32). Observed with Dynamo 1.3.1. Before it an event has
no storage tier and no start position, as read from its source; both forms are read. The events are
numbered by themselves, not by their workers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from dynctl.base.decode_errors import WireError
from dynctl.wire.dynamo.discovery import EndpointId
from dynctl.wire.dynamo.events import RouterEvent
from router_core import BlocksRemoved, BlocksStored, Cleared

#: The name of the object, and of the message that has it (`ChannelMessage.topic`).
RADIX_STATE: Final = "radix-state"
MAX_BYTES: Final = 256 * 1024 * 1024
_TIERS: Final = ("device", "host_pinned", "disk", "external")
_STORED, _REMOVED, _CLEARED = range(3)
_BLOCK: Final = struct.Struct("<QQB")
_U64: Final = struct.Struct("<Q")
_U32: Final = struct.Struct("<I")


def radix_bucket(scope: EndpointId) -> str:
    """The bucket of a component's snapshot."""
    name = f"namespace-{scope.namespace}-component-{scope.component}-radix-bucket"
    return re.sub("[^a-z0-9-]", "-", name.lower())


def decode_radix_state(payload: bytes) -> list[RouterEvent]:
    """The events of a snapshot; raises WireError."""
    if len(payload) > MAX_BYTES:
        raise WireError(RADIX_STATE, f"{len(payload):,} bytes, expected at most {MAX_BYTES:,}")
    problems = []
    for tiers in (True, False):
        try:
            return _RadixReader(payload, tiers=tiers).events()
        except WireError as error:
            problems.append(error)
    raise problems[0]


def encode_radix_state(events: Sequence[RouterEvent]) -> bytes:
    """The bytes that Dynamo 1.3.1 writes. Events of other kinds than stored blocks are left out."""
    parts = [b""]
    count = 0
    for event in events:
        stored = event.event
        if not isinstance(stored, BlocksStored) or event.storage_tier not in _TIERS:
            continue
        parts.append(
            struct.pack(
                "<QIQI",
                event.worker_id,
                _TIERS.index(event.storage_tier),
                count,
                _STORED,
            )
        )
        parent = stored.parent_hash
        parts.append(b"\0" if parent is None else b"\1" + _U64.pack(parent))
        parts.append(b"\0" + _U64.pack(len(stored.block_hashes)))
        parts += [
            _BLOCK.pack(name, local, 0)
            for name, local in zip(stored.block_hashes, stored.local_hashes, strict=True)
        ]
        parts.append(_U32.pack(event.dp_rank))
        count += 1
    parts[0] = _U64.pack(count)
    return b"".join(parts)


class _RadixReader:
    """Reads one form; ``tiers``: with storage tiers and start positions."""

    def __init__(self, payload: bytes, *, tiers: bool) -> None:
        self._data = payload
        self._at = 0
        self._tiers = tiers

    def events(self) -> list[RouterEvent]:
        events = [self._event() for _ in range(self._count(17))]
        if self._at != len(self._data):
            raise WireError(RADIX_STATE, f"{len(self._data) - self._at:,} bytes follow its end")
        return events

    def _event(self) -> RouterEvent:
        worker_id = self._u64()
        tier = self._variant(_TIERS) if self._tiers else _TIERS[0]
        event_id = self._u64()
        event: BlocksStored | BlocksRemoved | Cleared
        kind = self._u32()
        if kind == _STORED:
            parent = self._u64() if self._option() else None
            if self._tiers and self._option():
                self._u32()
            names, locals_ = self._blocks()
            event = BlocksStored(parent, names, locals_, tier)
        elif kind == _REMOVED:
            event = BlocksRemoved(tuple(self._u64() for _ in range(self._count(8))), tier)
        elif kind == _CLEARED:
            event = Cleared()
        else:
            raise WireError(RADIX_STATE, f"kind {kind} of an event, expected 0 to 2")
        return RouterEvent(worker_id, self._u32(), event_id, event, tier)

    def _blocks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        count = self._count(_BLOCK.size)
        end = self._at + count * _BLOCK.size
        rows = list(_BLOCK.iter_unpack(self._data[self._at : end]))
        if not any(extra for _, _, extra in rows):
            self._at = end
            return tuple(row[0] for row in rows), tuple(row[1] for row in rows)
        blocks = list(self._blocks_with_media(count))
        return tuple(name for name, _ in blocks), tuple(local for _, local in blocks)

    def _blocks_with_media(self, count: int) -> Iterator[tuple[int, int]]:
        for _ in range(count):
            block = self._u64(), self._u64()
            if self._option():
                for _ in range(self._count(16)):
                    self._u64()
                    for _ in range(self._count(16)):
                        self._take(16)
            yield block

    def _count(self, least: int) -> int:
        """A number of items of at least ``least`` bytes each."""
        count = self._u64()
        if count * least > len(self._data) - self._at:
            raise WireError(RADIX_STATE, f"{count:,} items in the rest of the object")
        return count

    def _variant(self, names: tuple[str, ...]) -> str:
        number = self._u32()
        if number >= len(names):
            raise WireError(RADIX_STATE, f"storage tier {number}, expected 0 to {len(names) - 1}")
        return names[number]

    def _option(self) -> bool:
        flag = self._take(1)[0]
        if flag > 1:
            raise WireError(RADIX_STATE, f"option {flag}, expected 0 or 1")
        return flag == 1

    def _u64(self) -> int:
        value: int = _U64.unpack(self._take(8))[0]
        return value

    def _u32(self) -> int:
        value: int = _U32.unpack(self._take(4))[0]
        return value

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise WireError(RADIX_STATE, "it ends early")
        part = self._data[self._at : end]
        self._at = end
        return part
