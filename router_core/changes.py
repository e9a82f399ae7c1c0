"""All changes of a router's state, as frozen values.

``Router.apply(change, now)`` is the only place where they take effect: event planes, replica sync,
recovery, recordings and tests all use it. A recording is a snapshot followed by changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from router_core.events import CacheEvent
from router_core.frozen import quick_init
from router_core.transfer import TransferTable
from router_core.workers import Worker

Stage = Literal["prefill", "decode", "aggregated"]
STAGES: tuple[Stage, ...] = ("prefill", "decode", "aggregated")


@dataclass(frozen=True, slots=True)
class WorkerUpserted:
    """A worker registered, or published a new card."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker left: its bookings, reports and cached blocks are removed."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class WorkerAvailability:
    """A worker is unavailable for ``reason``, or available again (``reason`` None)."""

    worker_id: int
    reason: str | None


@quick_init
@dataclass(frozen=True, slots=True)
class KvEvent:
    """One event of the prefix cache of one rank."""

    worker_id: int
    dp_rank: int
    event: CacheEvent


@dataclass(frozen=True, slots=True)
class IndexMarked:
    """How complete the index of one rank is.

    ``current``: every event was received; ``gapped``: ``missing`` batches were lost and not
    recovered; ``over_limit``: it had more blocks than the rank can have and was dropped, which
    ``current`` does not end: the event ``Cleared`` does, once the dropped blocks are swept;
    ``absent``: the rank does not report what it caches.
    """

    worker_id: int
    dp_rank: int
    state: Literal["current", "gapped", "over_limit", "absent"]
    missing: int = 0


@dataclass(frozen=True, slots=True)
class IndexConnected:
    """Whether the events of one rank can be received now.

    While they cannot, the index keeps its last contents and its state is ``disconnected``.
    ``recovering``: what the rank cached before, or while the connection was lost, is not read yet;
    None: as before.
    """

    worker_id: int
    dp_rank: int
    connected: bool
    recovering: bool | None = None


@quick_init
@dataclass(frozen=True, slots=True)
class Booked:
    """A request was given to a rank and counts as its load.

    ``prefill_tokens`` are prompt tokens that are not cached there; 0 where prefill is not
    tracked. ``sequence_hashes`` are its complete prompt blocks, shared with other requests;
    ``anonymous_blocks`` counts blocks that no other request shares (no KV reuse assumed).
    ``chains``: the lengths of the chains that ``sequence_hashes`` consist of, where these are known
    to be chains: then a prompt is booked in a few steps, not block by block.
    ``prompt_hashes`` are the complete prompt blocks that the rank will have cached, each after its
    parent; indexes that are learned from bookings take them. ``predicted_s``: seconds that the
    prefill is expected to take, by which its tokens fall with time; None: they do not fall.
    ``session``: the key of the request's session, which is bound to the rank from now on.
    ``replica``: another router chose the rank, so the turn of this one does not move on.
    """

    request_id: str
    stage: Stage
    worker_id: int
    dp_rank: int
    prefill_tokens: int = 0
    sequence_hashes: Sequence[int] = ()
    anonymous_blocks: int = 0
    prompt_hashes: Sequence[int] = ()
    predicted_s: float | None = None
    replica: bool = False
    session: str | None = None
    chains: tuple[int, ...] = ()


@quick_init
@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The first output token arrived: the request's prefill load ends."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Progressed:
    """The request is alive: the expiry time of its booking starts again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A request waits in the router queue, in a class of its model.

    ``isl_tokens`` of the prompt, of them ``cached_tokens`` on the worker that has most.
    ``arrived_at``: its arrival, in seconds of the clock of all changes. ``lane``: the worker and
    rank that it is pinned to, or a text for the other workers that it needs.
    """

    request_id: str
    model: str
    policy_class: str
    isl_tokens: int
    cached_tokens: int
    arrived_at: float
    priority: int = 0
    strict_priority: int = 0
    lane: tuple[int, int | None] | str | None = None


@dataclass(frozen=True, slots=True)
class Dequeued:
    """A request waits no more: it left, or it was admitted by its turn (`RouterQueue.next`).

    A turn leaves the ``credits`` of classes, and ``cursor``: the class whose turn is next.
    """

    request_id: str
    credits: tuple[tuple[str, int], ...] = ()
    cursor: str | None = None


@quick_init
@dataclass(frozen=True, slots=True)
class OutputBlock:
    """Generation filled one more block.

    ``decay_fraction`` (0..1), where the expected output length is known, is the new weight of the
    request's exclusive blocks.
    """

    request_id: str
    decay_fraction: float | None = None


@quick_init
@dataclass(frozen=True, slots=True)
class Freed:
    """The request ended on the given hop, or on all of its hops where ``stage`` is None.

    ``computed`` False: the engine did not accept it, and therefore does not have its prompt.
    """

    request_id: str
    stage: Stage | None = None
    computed: bool = True


@quick_init
@dataclass(frozen=True, slots=True)
class LoadReported:
    """Load reported by a rank; None keeps the last value."""

    worker_id: int
    dp_rank: int
    active_decode_blocks: int | None = None
    kv_used_blocks: int | None = None
    active_prefill_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ThresholdsSet:
    """Busy thresholds of one model; only the names in ``values`` change, None switches one off."""

    model: str
    values: Mapping[str, float | int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConfigSet:
    """Settings by field name, checked by RouterConfig."""

    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TransferTableSet:
    """The links between topology domains and the size of the KV cache; None: unknown."""

    table: TransferTable | None = None


@dataclass(frozen=True, slots=True)
class Expired:
    """End bookings without progress for ``active_request_expiry_secs``."""


Change = (
    WorkerUpserted
    | WorkerLost
    | WorkerAvailability
    | KvEvent
    | IndexMarked
    | IndexConnected
    | Booked
    | PrefillDone
    | Progressed
    | OutputBlock
    | Enqueued
    | Dequeued
    | Freed
    | LoadReported
    | ThresholdsSet
    | ConfigSet
    | TransferTableSet
    | Expired
)


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of a change: applied, or refused with a stable ``code`` and a message.

    Refusals of KV events carry the index's own codes; others are ``unknown_worker``,
    ``unknown_request``, ``duplicate_request`` and ``invalid``. An applied KV event has the code
    ``ignored_tier`` if its blocks are not indexed, and ``awaits_parent`` if they count only once
    their parent is stored.
    """

    ok: bool = True
    code: str = "ok"
    message: str = ""


OK = Applied()
