"""The seams: what a plane hands to the rest of dynctl, and what it must be able to do.

Adapters in ``dynctl.planes`` produce these values; nobody else needs to know which library they
came through. A Protocol stands here once it has a reader.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from router_core.changes import Change, IndexMarked, KvEvent
from router_core.events import BlocksRemoved, BlocksStored, Cleared


class StreamCode(StrEnum):
    """What can be wrong, or right again, with a worker's event stream. Codes are stable.

    The codes of ``dynctl.wire.index_events.DropCode`` appear as conditions too.
    """

    ENGINE_RESTARTED = "ENGINE_RESTARTED"
    EVENTS_LOST = "EVENTS_LOST"
    INDEX_CURRENT = "INDEX_CURRENT"
    REPLAY_UNAVAILABLE = "REPLAY_UNAVAILABLE"
    STREAM_CONNECTED = "STREAM_CONNECTED"
    STREAM_DISCONNECTED = "STREAM_DISCONNECTED"
    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
    MALFORMED_BATCH = "MALFORMED_BATCH"
    UNKNOWN_EVENT = "UNKNOWN_EVENT"


@dataclass(frozen=True, slots=True)
class IndexUpdate:
    """One batch of a worker's rank, ready to apply. Updates of a stream come in sequence order.

    ``published_at`` is the engine's wall clock in seconds: shown to people, never compared with
    ours. ``replayed`` says that the batch came from the replay socket.
    """

    worker_id: int
    dp_rank: int
    seq: int
    events: tuple[BlocksStored | BlocksRemoved | Cleared, ...]
    published_at: float
    replayed: bool = False

    def changes(self) -> Iterator[Change]:
        """The router's changes, in order."""
        for event in self.events:
            yield KvEvent(self.worker_id, self.dp_rank, event)


@dataclass(frozen=True, slots=True)
class StreamCondition:
    """Something about a stream that an operator or the index must know.

    ``ranks`` are the data-parallel ranks concerned. ``clears`` means that everything known about
    them is void and must be forgotten before the next update. ``missing`` (batches), where set,
    is how much of each rank's history is lost from now on; 0 means that its index is whole.
    """

    worker_id: int
    code: str
    message: str
    ranks: tuple[int, ...]
    details: Mapping[str, int | str] = field(default_factory=dict)
    clears: bool = False
    missing: int | None = None

    def changes(self) -> Iterator[Change]:
        """The router's changes, in order; none for a condition that only people care about."""
        for rank in self.ranks:
            if self.clears:
                yield KvEvent(self.worker_id, rank, Cleared())
            if self.missing is not None:
                state: Literal["current", "gapped"] = "gapped" if self.missing else "current"
                yield IndexMarked(self.worker_id, rank, state, self.missing)


StreamValue = IndexUpdate | StreamCondition


@dataclass(frozen=True, slots=True)
class StreamState:
    """How far a worker's event stream can be believed, for freshness and metrics.

    ``last_seq`` is None before the first batch. ``last_batch_at`` is a reading of the caller's
    monotonic clock in seconds. ``gaps`` counts holes seen, ``healed`` and ``lost`` the batches
    that the replay socket brought back or that stay missing; ``missing`` is what the index lacks
    now, which a restart or a cleared cache resets. ``dropped`` counts blocks by code.
    """

    connected: bool = False
    last_seq: int | None = None
    last_batch_at: float | None = None
    batches: int = 0
    gaps: int = 0
    healed: int = 0
    lost: int = 0
    missing: int = 0
    duplicates: int = 0
    late: int = 0
    restarts: int = 0
    malformed: int = 0
    unknown_events: int = 0
    unknown_fields: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)


class KvEventStream(Protocol):
    """One worker's KV events. Values go to the callback given at construction, in order."""

    async def run(self) -> None:
        """Follow the stream until cancelled; leaves no socket behind."""
        ...

    def state(self) -> StreamState:
        """A snapshot of the counters."""
        ...
