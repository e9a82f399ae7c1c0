"""The answer of `events tail`: one line for each event.

Hashes are hexadecimal text, because they exceed the integers that JSON readers keep exactly.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec


class TailKind(StrEnum):
    """The kind of a line. Names are stable."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"
    UNKNOWN = "unknown"
    """An event of an unknown kind."""
    GAP = "gap"
    """Events of a publisher did not arrive; ``missing``: how many, where known."""
    RESTART = "restart"
    """A publisher restarted its count: its worker's earlier cache content is void."""
    MALFORMED = "malformed"
    FOREIGN = "foreign"
    DISCONNECT = "disconnect"
    RECONNECT = "reconnect"
    JOINED = "joined"
    LEFT = "left"
    SKIPPED = "skipped"
    """Lines were dropped because the reader is slower than the events."""
    LOAD = "load"
    BOOKED = "booked"
    PREFILLED = "prefilled"
    FREED = "freed"


LOAD_KINDS: Final = frozenset({TailKind.LOAD, TailKind.BOOKED, TailKind.PREFILLED, TailKind.FREED})
EVENT_KINDS: Final = LOAD_KINDS | {
    TailKind.STORED,
    TailKind.REMOVED,
    TailKind.CLEARED,
    TailKind.UNKNOWN,
}
"""All other kinds are remarks about the stream."""


class TailLine(msgspec.Struct, frozen=True):
    """One line. ``event`` is a TailKind; fields that do not apply are None.

    ``time``: UTC; the publisher's clock for events, this client's for remarks. ``worker``: its
    name. ``blocks`` of the event, ``first_hash`` and ``parent_hash`` are the engine's names (hex).
    ``missing``: events (or, where their numbers are unknown, messages) that did not arrive.
    """

    event: str
    time: str
    worker: str | None = None
    worker_id: int | None = None
    dp_rank: int | None = None
    model: str | None = None
    role: str | None = None
    domains: dict[str, str] = {}
    event_id: int | None = None
    blocks: int | None = None
    first_hash: str | None = None
    parent_hash: str | None = None
    tier: str | None = None
    missing: int | None = None
    request_id: str | None = None
    prefill_tokens: int | None = None
    message: str | None = None
    kind: str = "KvEventLine"
    schema: int = 1

    @property
    def is_remark(self) -> bool:
        return self.event not in EVENT_KINDS
