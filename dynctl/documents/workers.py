"""The workers of a router: ``GET /v1/workers`` and ``workers list``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from dynctl.documents.codec import decode, field_values
from dynctl.documents.replicas import ReplicaRow
from router_core import Router, Worker

SCHEMA = 1
#: How the reason of a worker that the operator took out of routing begins.
CORDONED: Final = "cordoned by the operator"
NONE_WAITING: Final[Mapping[int, int]] = {}


class ReportedLoad(msgspec.Struct, frozen=True):
    """The numbers that a rank reports; None: never reported.

    ``waiting_requests``: accepted by the engine and not begun.
    """

    active_decode_blocks: int | None = None
    kv_used_blocks: int | None = None
    active_prefill_tokens: int | None = None
    waiting_requests: int | None = None


#: The status of an engine that was never reached: what it publishes is unknown.
DOUBTED: Final = "in doubt"
UNREACHED: Final = "unknown"


class RankRow(msgspec.Struct, frozen=True):
    """One rank. Loads are counted by the router; ages are in seconds, None: never.

    ``stream_for_s``: seconds since its event stream was connected or lost; absent without one.
    ``booked_prefill_tokens``: the active prefill tokens before the prefill load model let them
    fall; absent where they do not fall.
    """

    dp_rank: int = 0
    active_requests: int = 0
    active_prefill_tokens: int = 0
    active_decode_blocks: float = 0
    reported: ReportedLoad = ReportedLoad()
    cached_blocks: int = 0
    busy: bool = False
    busy_reasons: list[str] = []
    index: str = "absent"
    index_age_s: float | None = None
    load_age_s: float | None = None
    gaps: int = 0
    stream_for_s: float | UnsetType = UNSET
    booked_prefill_tokens: int | UnsetType = UNSET


class StreamState(msgspec.Struct, frozen=True):
    """The state of one rank's KV event stream, for freshness and metrics.

    ``for_s``: seconds since the connection was made or lost (or first tried). ``last_seq`` is None
    before the first batch. ``last_batch_at`` is a reading of the caller's monotonic clock in
    seconds. ``gaps`` counts holes seen, ``healed`` and ``lost`` the batches that the replay socket
    brought back or that stay missing; ``missing`` is what the index lacks now, which a restart or
    a cleared cache resets. ``dropped`` counts blocks by code.
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
    dropped: dict[str, int] = {}
    for_s: float | None = None


class WorkerRow(msgspec.Struct, frozen=True):
    """One worker with its ranks. ``status``: ready, or one of these, and ``reason`` why:
    unavailable; in doubt (it failed, and gets requests because too few others are well); unknown
    for an engine that was never reached.

    ``device``: ``cpu`` or the kind of its accelerator; absent where it is unknown.
    ``worker_sets``: the sets that it serves, of a Dynamo; prefill workers hand over to decode
    workers of these sets only. Absent where it has none. ``other_names``: aliases and adapters that
    requests may use in place of the model; absent without one.
    """

    name: str
    worker_id: int
    model: str
    role: str
    block_size: int = 16
    can_prefill: bool = True
    kv_events: bool = True
    endpoint: str | None = None
    runtime_config: dict[str, Any] = {}
    status: str = "ready"
    reason: str | None = None
    busy: bool = False
    domains: dict[str, str] = {}
    routed_by: str = "cache and load"
    ranks: Sequence[RankRow] = []
    device: str | UnsetType = UNSET
    worker_sets: list[str] | UnsetType = UNSET
    other_names: list[str] | UnsetType = UNSET

    @property
    def gets_requests(self) -> bool:
        """Whether the router may choose it."""
        return self.status in ("ready", DOUBTED)

    @property
    def served_names(self) -> list[str]:
        """The names by which requests reach it."""
        return [self.model, *(self.other_names or ())]

    @property
    def cordoned(self) -> bool:
        """Whether the operator took it out of routing."""
        return (self.reason or "").startswith(CORDONED)

    @property
    def taints(self) -> list[str]:
        return list(self.runtime_config.get("taints", ()))


class EngineRank(RankRow, frozen=True):
    """A rank whose engine the frontend probes. ``events`` is None without an event stream."""

    events: StreamState | None = None


class EngineRow(WorkerRow, frozen=True, kw_only=True):
    """A registered worker with its engine. ``source``: what added it; ``id``: the id as text."""

    ranks: Sequence[EngineRank] = []
    id: str
    source: str


class UnregisteredEngine(msgspec.Struct, frozen=True):
    """An engine that is not registered: its model is unknown, or it cannot serve requests.

    ``reason``: why. ``model`` and ``role`` are empty where unknown. ``domains`` and
    ``runtime_config`` have what was specified; what the engine itself publishes is unknown.
    """

    name: str
    worker_id: int
    model: str
    role: str
    reason: str | None
    id: str
    source: str
    endpoint: str
    status: str = UNREACHED
    ranks: list[EngineRank] = []
    domains: dict[str, str] = {}
    runtime_config: dict[str, Any] = {}


class WorkerList(msgspec.Struct, frozen=True):
    """The answer of `workers list`. ``source``: where the rows come from. ``replicas``: the routers
    whose requests count in the load too; absent without replica sync."""

    source: str
    workers: list[WorkerRow] = []
    replicas: list[ReplicaRow] | UnsetType = UNSET
    kind: str = "WorkerList"
    schema: int = SCHEMA


class WorkerDetail(msgspec.Struct, frozen=True):
    source: str
    worker: WorkerRow
    kind: str = "Worker"
    schema: int = SCHEMA


class CordonChange(msgspec.Struct, frozen=True):
    """What `workers cordon`, `uncordon` and `drain` did, or would do (``applied`` False).

    ``before``: whether the worker was cordoned. ``running``: requests on it that the frontends
    count now. ``same``: ready workers of its role, model and domains without it. ``drained``: of
    `drain`, whether its requests ended within ``waited_s`` seconds; absent otherwise.
    """

    source: str
    worker: str
    worker_id: int
    role: str
    cordoned: bool
    before: bool
    applied: bool
    running: int = 0
    same: int = 0
    domains: dict[str, str] = {}
    frontends: list[str] = []
    drained: bool | UnsetType = UNSET
    waited_s: float | UnsetType = UNSET
    kind: str = "CordonChange"
    schema: int = SCHEMA


class WorkerChange(msgspec.Struct, frozen=True):
    """What `workers add` and `remove` did, or would do (``applied`` False).

    ``change``: added, replaced or removed. ``role``, ``status`` and ``reason`` are those of the
    worker's row, None where no frontend has one. Of `remove`: ``running``: requests on it that the
    frontends counted; ``same``: ready workers of its role, model and domains without it.
    """

    source: str
    worker: str
    change: str
    applied: bool
    worker_id: int | None = None
    role: str | None = None
    status: str | None = None
    reason: str | None = None
    running: int = 0
    same: int = 0
    domains: dict[str, str] = {}
    frontends: list[str] = []
    kind: str = "WorkerChange"
    schema: int = SCHEMA


class WorkersAnswer(msgspec.Struct, frozen=True):
    """The answer of ``GET /v1/workers``."""

    workers: list[WorkerRow]
    replicas: list[ReplicaRow] | UnsetType = UNSET


def worker_rows(router: Router, now: float) -> list[WorkerRow]:
    """The rows of a router's registry, at time ``now`` of the clock of its changes."""
    registry = router.registry
    return [
        worker_row(
            worker, rank_rows(router, worker, now), registry.unavailable_reason(worker.worker_id)
        )
        for worker in registry
    ]


def engine_row(
    row: WorkerRow, *, source: str, endpoint: str, events: Mapping[int, StreamState]
) -> EngineRow:
    """The row of a registered worker with its engine's facts. ``events``: by rank."""
    ranks = [engine_rank(rank, events.get(rank.dp_rank)) for rank in row.ranks]
    values = {**field_values(row), "endpoint": endpoint, "ranks": ranks}
    return EngineRow(**values, id=str(row.worker_id), source=source)


def engine_rank(rank: RankRow, events: StreamState | None) -> EngineRank:
    """The row of a rank with the state of its event stream."""
    values = field_values(rank)
    if events is not None and events.for_s is not None:
        values["stream_for_s"] = events.for_s
    return EngineRank(**values, events=events)


def decode_workers(data: bytes) -> WorkersAnswer:
    """Read the answer of ``GET /v1/workers``; raises WireError."""
    return decode(data, WorkersAnswer, "workers")


def decode_worker_rows(data: bytes) -> list[WorkerRow]:
    """The workers alone of :func:`decode_workers`."""
    return decode_workers(data).workers


def rank_rows(
    router: Router,
    worker: Worker,
    now: float,
    waiting: Mapping[int, int] = NONE_WAITING,
    *,
    busy_ranks: int | None = None,
) -> list[RankRow]:
    """The ranks of one worker. ``waiting``: rank -> requests that wait in its engine, where the
    engine reports them; the router does not count them. ``busy_ranks``: the mask of busy slots at
    an earlier moment, None: now."""
    slots = router.registry.slots(worker.worker_id)
    ranks = []
    load, busy = router.load, router.busy
    decays, limited = bool(load.decaying), busy.thresholds(worker.model).any
    if busy_ranks is None:
        busy_ranks = busy.busy_ranks
    if decays:
        router.advance(now)
    for rank, slot in zip(worker.ranks, slots, strict=True):
        fresh, reported = router.freshness[slot], busy.reported[slot]
        ranks.append(
            RankRow(
                rank,
                load.requests[slot],
                load.prefill_tokens[slot],
                load.decode_blocks[slot],
                ReportedLoad(
                    reported.active_decode_blocks,
                    reported.kv_used_blocks,
                    reported.active_prefill_tokens,
                    waiting.get(rank),
                ),
                router.cached_blocks(slot),
                bool(busy_ranks >> slot & 1),
                [reason.message for reason in busy.reasons(slot)] if limited else [],
                fresh.state,
                _age(now, fresh.index_at),
                _age(now, fresh.load_at),
                fresh.gaps,
                UNSET,
                load.booked_prefill(slot) if decays else UNSET,
            )
        )
    return ranks


def worker_row(
    worker: Worker,
    ranks: Sequence[RankRow],
    reason: str | None = None,
    doubt: str | None = None,
) -> WorkerRow:
    """The row of a worker. ``reason``: why it is unavailable. ``doubt``: how it failed, where it
    gets requests all the same."""
    sick = "unavailable" if reason is not None else DOUBTED
    return WorkerRow(
        name=worker.name,
        worker_id=worker.worker_id,
        model=worker.model,
        role=worker.role.value,
        block_size=worker.block_size,
        can_prefill=worker.can_prefill,
        kv_events=worker.kv_events,
        endpoint=worker.endpoint,
        runtime_config=worker.runtime_config.to_dict(),
        status="ready" if reason is None and doubt is None else sick,
        reason=doubt if reason is None else reason,
        busy=bool(ranks) and all(rank.busy for rank in ranks),
        domains=dict(worker.domains),
        routed_by=_routed_by(worker, ranks),
        ranks=ranks,
        device=UNSET if worker.device is None else worker.device,
        worker_sets=list(worker.worker_sets) or UNSET,
        other_names=list(worker.served_names[1:]) or UNSET,
    )


def _routed_by(worker: Worker, ranks: Sequence[RankRow]) -> str:
    if not worker.kv_events:
        learned = any(rank.index == "estimated" for rank in ranks)
        return "estimated cache and load" if learned else "load only"
    unknown = bool(ranks) and all(rank.index == "absent" for rank in ranks)
    return "load only, its cache is not known" if unknown else "cache and load"


def _age(now: float, at: float | None) -> float | None:
    return None if at is None else round(now - at, 3)
