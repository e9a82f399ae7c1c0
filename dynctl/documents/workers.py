"""What a router says of its workers: the rows of ``GET /v1/workers`` and of ``workers list``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from dynctl.base.decode_errors import WireError
from router_core import Router, Worker

NOBODY_WAITS: Final[Mapping[int, int]] = {}


class Reported(msgspec.Struct, frozen=True):
    """A rank's own numbers; None was never reported.

    ``waiting_requests``: accepted by the engine and not begun.
    """

    active_decode_blocks: int | None = None
    kv_used_blocks: int | None = None
    active_prefill_tokens: int | None = None
    waiting_requests: int | None = None


class RankRow(msgspec.Struct, frozen=True):
    """One rank. Loads are this router's own count; ages are seconds, None is never."""

    dp_rank: int = 0
    active_requests: int = 0
    active_prefill_tokens: int = 0
    active_decode_blocks: float = 0
    reported: Reported = Reported()
    cached_blocks: int = 0
    busy: bool = False
    busy_reasons: list[str] = []
    index: str = "absent"
    index_age_s: float | None = None
    load_age_s: float | None = None
    gaps: int = 0


class WorkerRow(msgspec.Struct, frozen=True):
    """One worker with its ranks. ``status``: ready or unavailable, and ``reason`` why."""

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
    ranks: list[RankRow] = []

    @property
    def taints(self) -> list[str]:
        return list(self.runtime_config.get("taints", ()))


def worker_rows(router: Router, now: float) -> list[WorkerRow]:
    """The rows of a router's registry, at time ``now`` of the clock of its changes."""
    registry = router.registry
    return [
        worker_row(
            worker, rank_rows(router, worker, now), registry.unavailable_reason(worker.worker_id)
        )
        for worker in registry
    ]


def decode_worker_rows(data: bytes) -> list[WorkerRow]:
    """Read the answer of ``GET /v1/workers``; raises WireError."""
    try:
        document = msgspec.json.decode(data)
        if isinstance(document, dict):
            document = document.get("workers", document.get("items"))
        return msgspec.convert(document, list[WorkerRow])
    except msgspec.MsgspecError as error:
        raise WireError("workers", str(error)) from None


def rank_rows(
    router: Router, worker: Worker, now: float, waiting: Mapping[int, int] = NOBODY_WAITS
) -> list[RankRow]:
    """The ranks of one worker. ``waiting``: rank -> requests that wait in its engine, where that
    is told; a router itself does not know."""
    slots = router.registry.slots(worker.worker_id)
    ranks = []
    for rank, slot in zip(worker.ranks, slots, strict=True):
        fresh, reported = router.freshness[slot], router.busy.reported[slot]
        ranks.append(
            RankRow(
                dp_rank=rank,
                active_requests=router.load.requests[slot],
                active_prefill_tokens=router.load.prefill_tokens[slot],
                active_decode_blocks=router.load.decode_blocks[slot],
                reported=Reported(
                    reported.active_decode_blocks,
                    reported.kv_used_blocks,
                    reported.active_prefill_tokens,
                    waiting.get(rank),
                ),
                cached_blocks=router.index.block_count(slot),
                busy=bool(router.busy.busy_ranks >> slot & 1),
                busy_reasons=[reason.message for reason in router.busy.reasons(slot)],
                index=fresh.index_state,
                index_age_s=_age(now, fresh.index_at),
                load_age_s=_age(now, fresh.load_at),
                gaps=fresh.gaps,
            )
        )
    return ranks


def worker_row(worker: Worker, ranks: list[RankRow], reason: str | None = None) -> WorkerRow:
    """The row of a worker. ``reason``: why it is unavailable."""
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
        status="ready" if reason is None else "unavailable",
        reason=reason,
        busy=bool(ranks) and all(rank.busy for rank in ranks),
        domains=dict(worker.domains),
        routed_by=_routed_by(worker, ranks),
        ranks=ranks,
    )


def _routed_by(worker: Worker, ranks: list[RankRow]) -> str:
    if not worker.kv_events:
        return "load only"
    unknown = bool(ranks) and all(rank.index == "absent" for rank in ranks)
    return "load only, its cache is not known" if unknown else "cache and load"


def _age(now: float, at: float | None) -> float | None:
    return None if at is None else round(now - at, 3)
